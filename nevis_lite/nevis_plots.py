"""Pictures of NEVIS runs, after the figures of the paper (arXiv 2211.11747).

A function draws one picture, or returns a str that says why there is none. What is drawn comes from `compare` and `analysis`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from nevis_lite import compare
from nevis_lite.plots import DASHES, INK, NARROW, PALE, WIDE, Picture, canvas, looks


def pareto(runs: list[dict]) -> Picture | str:
    """Mean error against compute (Fig. 4): a faint point a run, mean and sd of each baseline and budget, the front in steps."""
    labels, found = compare.labels_of(runs), compare.comparison(runs)["baselines"]
    groups = defaultdict(list)
    for run, label in zip(runs, labels, strict=True):
        if "unfinished" not in run and None not in (run["error"], run["cflop"]) and found[label]["error"]["mean"] is not None:
            groups[label].append(run)
    if not groups:
        return "no run is finished and has a mean error"
    look = looks(run["baseline"] for run in runs)
    figure = canvas(NARROW, 2.8)
    axes = figure.subplots()
    rows, places = [], defaultdict(list)
    for label, members in groups.items():
        mean, compute = found[label]["error"], compare.spread_of([run["cflop"] for run in members])
        baseline, partial = members[0]["baseline"], any(run["partial"] for run in members)
        colour, marker = look[baseline]
        axes.scatter([run["cflop"] for run in members], [run["error"] for run in members], s=6, color=colour, alpha=0.5,
                     linewidth=0)
        axes.errorbar(compute["mean"], mean["mean"], yerr=mean["sd"], xerr=compute["sd"], color=colour, marker=marker,
                      markerfacecolor="none" if partial else colour, elinewidth=0.8)
        places[baseline].append((compute["mean"], mean["mean"], partial))
        rows.append({"baseline": label, "runs": mean["n"], "cflop": compute["mean"], "cflop_sd": compute["sd"],
                     "error": mean["mean"], "error_sd": mean["sd"], "pareto": found[label]["pareto"], "partial": partial})
    return Picture("pareto", "Error against compute", "", figure, rows)
