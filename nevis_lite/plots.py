"""Pictures of runs and lifetimes: how they look, how they are saved, and the command.

`python -m nevis_lite.plots RUN... --out DIR`. What is drawn is in `nevis_plots.py`, `lifelong_plots.py` and `fluid_plots.py`,
and each number comes from `compare.py`, `analysis.py`, `fluid_metrics.py` or a log. Needs matplotlib, and no torch; nothing is
kept in pyplot's global state.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nevis_lite import lifelong_log, metrics
from nevis_lite.config import UserError
from nevis_lite.run_folder import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NARROW, WIDE = 3.3, 6.8  # inches: one and two columns of a paper

# Text, axes and neutral lines have one colour, grids and faint fills the other, and nothing else has them: a page with a dark
# mode can replace both in an SVG. All series colours have a contrast of 3 or more on white and on near-black.
INK, PALE = "#2b2e33", "#d9dce1"
BASELINES = {  # colour and marker; the colours are Okabe and Ito's, some of them darker or lighter
    "indep": ("#8a8d91", "o"), "ft-prev": ("#2e95d3", "s"), "ft-d": ("#d55e00", "D"), "ft-s": ("#009e73", "^"),
    "mt": ("#0072b2", "P"), "pt": ("#c46a9d", "v"), "pt-ft": ("#c98500", "X"), "bhpo": ("#7a7400", "*")}
MEANS = "mean and standard deviation over the seeds"  # for captions
LINES = (("-", "full"), ("--", "left"), (":", "bottom"), ("-.", "right"))  # and fills of markers: budgets of one baseline

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

    @contextmanager
    def styled():
        with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
            warnings.filterwarnings("ignore", r"Glyph \d+ ")  # a name's emoji that the font lacks: a box is drawn
            yield

    return styled()


def canvas(width: float, height: float) -> Figure:
    """An empty figure in inches, whose parts make room for each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def looks(baselines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """{baseline: (colour, marker)}: those of BASELINES keep theirs, others take what is left, in alphabetical order."""
    names = set(baselines)
    free = [look for name, look in BASELINES.items() if name not in names] or list(BASELINES.values())
    return BASELINES | {name: free[i % len(free)] for i, name in enumerate(sorted(names - BASELINES.keys()))}


def dodged(axes: Axes, columns: list[str], series: list[tuple[str, dict, list[dict | None]]], across: bool = False):
    """Mean and standard deviation beside each other: of each (label, properties of a line, a spread for each of `columns`).

    A spread is a `compare.spread_of`; what is None isn't drawn. `across` lays the axis of the values along x.
    """
    room = 72 / axes.figure.dpi * (axes.bbox.height if across else axes.bbox.width) / len(columns) / len(series)  # points
    for number, (label, look, spreads) in enumerate(series):
        offset = (number + 0.5) / len(series) - 0.5
        points = [(place + 0.75 * offset, spread["mean"], spread["sd"] or 0.0)
                  for place, spread in enumerate(spreads) if spread and spread["mean"] is not None]
        places, means, sds = zip(*points, strict=True) if points else ((), (), ())
        look = look | {"linestyle": "none", "elinewidth": 0.7, "label": label, "markersize": min(4.0, room)}
        if across:
            axes.errorbar(means, places, xerr=sds, **look)
        else:
            axes.errorbar(places, means, yerr=sds, **look)
    axis, limits = (axes.yaxis, axes.set_ylim) if across else (axes.xaxis, axes.set_xlim)
    axis.set_ticks(range(len(columns)), columns)
    axis.set_tick_params(length=0)
    axis.grid(False)
    limits(*((len(columns) - 0.5, -0.5) if across else (-0.5, len(columns) - 0.5)))
    for edge in range(len(columns) - 1):
        (axes.axhline if across else axes.axvline)(edge + 0.5, color=PALE, linewidth=0.5)


def panels(count: int, columns: int, height: float, **shared) -> tuple[Figure, list[Axes]]:
    """A figure with a part of `height` inches for each of `count` things, in rows of `columns`; `shared` as in `subplots`."""
    lines = -(-count // columns)
    figure = canvas(WIDE, 0.6 + height * lines)
    parts = figure.subplots(lines, columns, squeeze=False, **shared).ravel()
    for axes in parts[count:]:
        axes.remove()
    for axes in parts[max(0, count - columns) : count]:  # below some of them is an empty place
        axes.xaxis.set_tick_params(labelbottom=True)
    return figure, list(parts[:count])


def legend(figure: Figure):
    """One legend for all parts of the figure above them, if it has more than one entry."""
    entries = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(entries) > 1:
        columns = int(17 * figure.get_figwidth() / (max(map(len, entries)) + 5))  # 17 characters an inch
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", columnspacing=1.2, handletextpad=0.4,
                      ncols=max(1, min(columns, len(entries))))


def few_ticks(axis: Axis, text: Callable[[float], str]):
    """Ticks on a logarithmic axis, however narrow, with the labels text(value)."""
    low, high = axis.get_view_interval()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 2:
            break
    axis.set_ticks(ticks, [text(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def label_points(axes: Axes, points: list[tuple[float, float, str]], lines: list[tuple[float, float, float, float]]):
    """Write a text beside each (x, y, text), where it covers the least of texts, points and `lines` (x, y, x, y)."""
    figure = axes.figure
    figure.draw_without_rendering()  # so that the scales are known
    dots = axes.transData.transform([point[:2] for point in points])
    starts, ends = (axes.transData.transform(np.reshape(lines, (-1, 2, 2))[:, end]) for end in (0, 1))
    along = np.concatenate([starts + (ends - starts) * share for share in np.linspace(0, 1, 50)])
    weights = [10.0] * len(dots) + [1.0] * len(along)
    margin = np.where(np.array(weights) > 1, 3.0, 0.5)[:, None] * figure.dpi / 72
    places = np.concatenate([dots, along])
    taken = np.concatenate([places - margin, places + margin], axis=1)  # boxes: left, bottom, right, top
    ways = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)]
    for x, y, text in points:
        note = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=7, va="center")
        note.set_in_layout(False)
        found = []
        for distance, (right, up) in ((distance, way) for distance in range(6, 30, 3) for way in ways):
            note.set(position=(distance * right, distance * up), ha=("center", "left", "right")[right])
            box = note.get_window_extent().extents
            covered = np.dot(weights, ((box[:2] < taken[:, 2:]) & (taken[:, :2] < box[2:])).all(axis=1))
            outside = (box[:2] < axes.bbox.min).any() or (box[2:] > axes.bbox.max).any()
            found.append((covered + 1000 * outside, distance, len(found), note.get_position(), note.get_ha(), box))
        _, distance, _, place, side, box = min(found, key=lambda each: each[:3])
        note.set(position=place, ha=side)
        taken, weights = np.vstack([taken, box]), [*weights, 100.0]
        if distance > 6:  # so far away that a line must lead there
            axes.annotate("", (x, y), place, textcoords="offset points",
                          arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3})


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]):
    """Write the text of each (x, y, text, colour), ends of lines, to the right of the axes, one below the other."""
    axes.figure.draw_without_rendering()
    ends = sorted(ends, key=lambda end: end[1])
    heights, gap = [axes.transData.transform(end[:2])[1] for end in ends], 9 / 72 * axes.figure.dpi
    for _ in range(50):  # neighbours that are too close push each other away
        for i in range(len(heights) - 1):
            push = max(0.0, gap - heights[i + 1] + heights[i]) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    for (x, y, text, colour), height in zip(ends, heights, strict=True):
        share = (height - axes.bbox.y0) / axes.bbox.height
        axes.annotate(text, (x, y), (1.03, share), textcoords="axes fraction", fontsize=7, va="center", annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0})


def heat(axes: Axes, cells: list[list[float | None]], rows: list[str], columns: list[str], label: str):
    """A matrix as colours; up to 16 columns also as numbers. What is None stays empty."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("", ["#31446b", "#8f8c83", "#ffe945"])  # the middle and the end of cividis
    values = [value for row in cells for value in row if value is not None]
    scale = Normalize(min(values), max(values))
    drawn = axes.imshow([[math.nan if value is None else value for value in row] for row in cells], colours, scale,
                        aspect="auto", interpolation="nearest")
    axes.grid(False)
    axes.figure.colorbar(drawn, ax=axes, label=label, shrink=0.8, aspect=30).outline.set_visible(False)
    if len(columns) <= 16:
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                if value is not None:
                    axes.text(j, i, f"{value:.2f}"[value < 1:], ha="center", va="center", fontsize=6,
                              color="#fefefe" if scale(value) < 0.45 else "#0a0a0a")
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        axis.set_ticks(range(len(names)), names)
        axis.set_tick_params(length=0, labelrotation=0)
    axes.xaxis.set_tick_params(labelrotation=90)


def short(text: str, width: int = 22) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def slug(text: str) -> str:
    """`text` as part of a file name."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


# ---- pictures of runs, files, and the command -----------------------------------------------------------------------


def load(folder: str | Path) -> dict:
    """A run as `metrics.load` returns it, with the rows of its `trials.jsonl` as "trainings"; raises as it does."""
    return metrics.load(folder) | {"trainings": metrics.trials_of(folder)}


def by_kind(paths: list[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """The folders of NEVIS runs, the lifetimes, and the folders of FLUID runs among `paths`."""
    from nevis_lite import fluid_metrics, lifelong_plots

    lives = [path for path in paths if lifelong_plots.is_lifetime(path)]
    fluid = [path for path in paths if fluid_metrics.is_run(path)]
    return [path for path in paths if path not in lives + fluid], lives, fluid


def pictures(runs: list[dict]) -> list[Picture]:
    """Every picture that these runs have data for; runs that `load` read also give that of the hyper-parameters.

    ValueError when runs don't go together, as in `compare`; UserError without matplotlib.
    """
    from nevis_lite import nevis_plots  # which builds on this module

    with style():
        return nevis_plots.draw(runs)[0]


def csv_text(rows: list[dict]) -> str:
    """Rows as CSV with all their keys; None is an empty cell, lists are JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in row.items()})
    return text.getvalue()


def save(pictures: list[Picture], out: str | Path) -> list[Path]:
    """Each picture as .png (200 dpi), .pdf and .csv in the folder `out`; returns the files."""
    out, files = Path(out), []
    out.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        contents = {"csv": csv_text(picture.rows).encode()}
        with style():
            for ending in ("png", "pdf"):
                content = io.BytesIO()
                picture.figure.savefig(content, format=ending, dpi=200, facecolor="white")
                contents[ending] = content.getvalue()
        for ending, content in contents.items():
            files.append(out / f"{picture.name}.{ending}")
            write_atomic(files[-1], lambda file, content=content: file.write(content))
    return files


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use or nothing to draw."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.plots", allow_abbrev=False,
        description="Draw runs and lifetimes: a .png, a .pdf and the drawn data as .csv of each picture.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, also of one of fluid.py or one that goes on, "
                        f"or of a lifetime of scenario.py; or the log of a lifetime: {lifelong_log.KINDS}")
    parser.add_argument("--out", metavar="DIR", default="figures", help="folder of the pictures (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        if Path(arguments.out).is_file():
            raise UserError(f"{arguments.out}: is a file; --out names a folder.")
        with style():
            from nevis_lite import fluid_metrics, fluid_plots, lifelong_plots, nevis_plots

            paths = [Path(path) for path in arguments.runs]
            runs, lives, fluid = by_kind(paths)
            kinds = [nevis_plots.draw([load(path) for path in runs]),
                     lifelong_plots.draw([lifelong_plots.load(path) for path in lives]),
                     fluid_plots.draw([fluid_metrics.load(path) for path in fluid])]
            drawn = [picture for pictures, _ in kinds for picture in pictures]
            for file in save(drawn, arguments.out):
                print(file)
        absent = {name: reason for _, reasons in kinds for name, reason in reasons.items()}
        for reason in dict.fromkeys(absent.values()):
            print(f"not drawn: {', '.join(name for name in absent if absent[name] == reason)}: {reason}")
        return 0 if drawn else 2
    except (UserError, OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
