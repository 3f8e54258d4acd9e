"""Pictures of lifetimes of alternating learning and evaluation, whose metrics `lifelong.py` has. Values are drawn as logged."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nevis_lite import lifelong_log, plots
from nevis_lite.lifelong_curves import Settings, experience_means, prepare, regimes_of
from nevis_lite.lifelong_log import Log
from nevis_lite.metrics import mean_of
from nevis_lite.plots import INK, PALE, Picture

OWN, EXPERT = plots.BASELINES["ft-d"][0], plots.BASELINES["mt"][0]


@dataclass
class Lifetime:
    log: Log
    experts: list[Log]


def is_lifetime(path: Path) -> bool:
    """Whether `path` holds a lifetime and not a run: a log, or a folder of `scenario.py` or of l2logger."""
    return path.is_file() or (path / "log.csv").is_file() or any(path.glob("**/data-log.tsv"))


def load(path: Path) -> Lifetime:
    """The log in `path`, with those of its experts where `scenario.py` has trained some; UserError, one sentence."""
    if (path / "log.csv").is_file():
        experts = [lifelong_log.read(file) for file in sorted((path / "experts").glob("*.csv"))]
        return Lifetime(replace(lifelong_log.read(path / "log.csv"), name=str(path)), experts)
    return Lifetime(lifelong_log.read(path), [])


def draw(lifetimes: list[Lifetime]) -> tuple[list[Picture], dict[str, str]]:
    """All pictures of lifetimes, and {name: why it is absent} of the others. Those with the same regimes are drawn together."""
    groups, found = defaultdict(list), {}
    for lifetime in lifetimes:
        groups[tuple(_regimes(lifetime.log))].append(lifetime)
    for members in groups.values():
        end = f"-{plots.slug(members[0].log.name)}" * (len(groups) > 1)
        for function in (evaluations, against_experts):
            found[function.__name__ + end] = function(members)
    return ([replace(picture, name=name) for name, picture in found.items() if isinstance(picture, Picture)],
            {name: reason for name, reason in found.items() if isinstance(reason, str)})


def evaluations(lifetimes: list[Lifetime]) -> Picture | str:
    """What each task is worth in each evaluation, between the blocks in which the tasks were learned."""
    log, regimes, rows = lifetimes[0].log, _regimes(lifetimes[0].log), []
    for lifetime in lifetimes:
        rows += [{"lifetime": lifetime.log.name, "task": regime.task, "block": regime.block,
                  "experience": regimes[regime.number][0], "performance": regime.terminal}
                 for regime in regimes_of(lifetime.log) if not regime.train]
    if not rows:
        return "the log has no evaluation block"
    figure, parts = plots.panels(len(log.tasks), 1 + len(log.tasks) // 9, 0.75, sharex=True, sharey=True)
    for task, axes in zip(log.tasks, parts, strict=True):
        for start, end, _, trained, train in regimes:
            colour, alpha = (OWN, 0.25) if trained == task else (PALE, 0.5)
            if train:
                axes.axvspan(start, end, color=colour, alpha=alpha, linewidth=0)
        places = [start for start, _, _, tested, train in regimes if tested == task and not train]
        own = [row["performance"] for row in rows if row["task"] == task]
        curves = [own[i * len(places) : (i + 1) * len(places)] for i in range(len(lifetimes))]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(places, curve, color=INK, alpha=0.3, linewidth=0.6)
        axes.plot(places, [mean_of(values) for values in zip(*curves, strict=True)], "o-", color=INK, markersize=3)
        axes.set_title(plots.short(task, 40), loc="left", fontsize=7)
    figure.supxlabel("experience of the lifetime", fontsize=8)
    figure.supylabel("performance", fontsize=8)
    return Picture("evaluations", f"Evaluations, {_who(lifetimes)}", (
        "Points: mean of each evaluation of the task, as logged. Coloured: blocks in which this task is learned; pale: other "
        "tasks are. A fall behind the colour is forgetting." + _faint(lifetimes)), figure, rows)


def against_experts(lifetimes: list[Lifetime]) -> Picture | str:
    """The learning curve of each task in the lifetime, and that of its single-task expert."""
    curves = defaultdict(list)
    for lifetime in lifetimes:
        log, experts, _ = prepare(lifetime.log, lifetime.experts, Settings(normalization_method="none"))
        for raw, smoothed in zip([lifetime.log, *lifetime.experts], [log, *experts], strict=True):
            for task in raw.tasks:
                if len(learned := raw.learned(task)):
                    curves[task, "lifetime" if smoothed is log else "expert"].append((raw.name, *(
                        experience_means(each.value[learned], each.exp[learned], [0])[0] for each in (raw, smoothed))))
    tasks = [task for task in lifetimes[0].log.tasks if (task, "lifetime") in curves]
    if not tasks:
        return "the log has no learning block"
    if not any(who == "expert" for _, who in curves):
        return "there is no log of a single-task expert"
    figure, parts = plots.panels(len(tasks), min(3, len(tasks)), 1.2, sharex=True, sharey=True)
    rows = []
    for task, axes in zip(tasks, parts, strict=True):
        for who, colour, line in (("lifetime", OWN, "-"), ("expert", EXPERT, "--")):
            found = curves[task, who]
            rows += [{"task": task, "of": who, "log": name, "experience": i, "performance": float(value)}
                     for name, values, _ in found for i, value in enumerate(values)]
            for _, values, _ in found:
                axes.plot(values, color=colour, alpha=0.2, linewidth=0.5, rasterized=len(values) > 2000)
            if found:
                length = min(len(values) for _, values, _ in found)
                axes.plot(np.mean([smoothed[:length] for _, _, smoothed in found], axis=0), line, color=colour, label=who)
        axes.set_title(plots.short(task, 36), loc="left", fontsize=7)
    figure.supxlabel("experiences of learning that were logged", fontsize=8)
    figure.supylabel("performance", fontsize=8)
    plots.legend(figure)
    return Picture("against_experts", f"Learning against experts, {_who(lifetimes)}", (
        "Each task in the lifetime and learned alone, from its first experience on. Faint: values as logged; bold: smoothed "
        "as for the metrics, mean over the logs, cut to the shortest."), figure, rows)


def _regimes(log: Log) -> list[tuple[int, int, int, str, bool]]:
    """(First experience, that of the next one, block, task, whether it is learned) of each regime."""
    bounds = log.bounds().tolist()
    starts = [*log.exp[bounds[:-1]].tolist(), int(log.exp[-1])]
    return [(starts[i], starts[i + 1], int(log.block[row]), log.tasks[log.task[row]], bool(log.train[row]))
            for i, row in enumerate(bounds[:-1])]


def _who(lifetimes: list[Lifetime]) -> str:
    return lifetimes[0].log.name if len(lifetimes) == 1 else f"{len(lifetimes)} lifetimes"


def _faint(lifetimes: list[Lifetime]) -> str:
    return f" Faint: {len(lifetimes)} lifetimes; bold: their mean." if len(lifetimes) > 1 else ""
