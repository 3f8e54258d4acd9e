"""Pictures of runs and lifetimes: how they look, how they are saved, and the command.

`python -m nevis_lite.plots RUN... --out DIR`. What is drawn is in `nevis_plots.py` and `lifelong_plots.py`, and each number
comes from `compare.py`, `analysis.py` or a log. Needs matplotlib, and no torch; nothing is kept in pyplot's global state.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nevis_lite import lifelong_log, metrics
from nevis_lite.config import UserError
from nevis_lite.run_folder import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW, WIDE = 3.3, 6.8  # inches: one and two columns of a paper

# Text, axes and neutral lines have one colour, grids and faint fills the other, and nothing else has them: a page with a dark
# mode can replace both in an SVG. All series colours have a contrast of 3 or more on white and on near-black.
INK, PALE = "#2b2e33", "#d9dce1"
BASELINES = {  # colour and marker; the colours are Okabe and Ito's, some of them darker or lighter
    "indep": ("#8a8d91", "o"), "ft-prev": ("#2e95d3", "s"), "ft-d": ("#d55e00", "D"), "ft-s": ("#009e73", "^"),
    "mt": ("#0072b2", "P"), "pt": ("#c46a9d", "v"), "pt-ft": ("#c98500", "X"), "bhpo": ("#7a7400", "*")}
DASHES = ("-", "--", ":", "-.")  # of one baseline with several budgets

STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7,
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "axes.grid": True, "grid.color": PALE,
    "grid.linewidth": 0.5, "axes.axisbelow": True, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4, "ytick.minor.width": 0.4, "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.2, "lines.markersize": 4, "legend.frameon": False,
    "pdf.fonttype": 42, "svg.fonttype": "none"}  # text stays text


@dataclass
class Picture:
    """`name` is that of its files, `caption` says what is seen and left out; `rows` are the data that are drawn."""

    name: str
    title: str
    caption: str
    figure: Figure
    rows: list[dict]


# ---- how pictures look ----------------------------------------------------------------------------------------------


def style():
    """The context in which all pictures are drawn and saved; UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("Pictures need matplotlib: pip install -e '.[plots]'") from None
    return matplotlib.rc_context(STYLE)


def canvas(width: float, height: float) -> Figure:
    """An empty figure in inches, whose parts make room for each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def looks(baselines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """{baseline: (colour, marker)}: those of BASELINES keep theirs, others take what is left, in alphabetical order."""
    names = set(baselines)
    free = [look for name, look in BASELINES.items() if name not in names] or list(BASELINES.values())
    others = sorted(names - BASELINES.keys())
    return BASELINES | {name: free[i % len(free)] for i, name in enumerate(others)}
