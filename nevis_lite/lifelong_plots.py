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
        return Lifetime(lifelong_log.read(path / "log.csv"), experts)
    return Lifetime(lifelong_log.read(path), [])


def draw(lifetimes: list[Lifetime]) -> tuple[list[Picture], dict[str, str]]:
    """All pictures of lifetimes, and {name: why it is absent} of the others. Those with the same blocks are drawn together."""
    groups, found = defaultdict(list), {}
    for lifetime in lifetimes:
        groups[tuple(_blocks(lifetime.log))].append(lifetime)
    for members in groups.values():
        end = f"-{plots.slug(members[0].log.name)}" * (len(groups) > 1)
        for function in (evaluations, against_experts):
            found[function.__name__ + end] = function(members)
    return ([replace(picture, name=name) for name, picture in found.items() if isinstance(picture, Picture)],
            {name: reason for name, reason in found.items() if isinstance(reason, str)})


def evaluations(lifetimes: list[Lifetime]) -> Picture | str:
    """What each task is worth in each evaluation, between the blocks in which the tasks were learned."""
    log, rows = lifetimes[0].log, []
    for lifetime in lifetimes:
        bounds = lifetime.log.bounds()
        rows += [{"lifetime": lifetime.log.name, "task": regime.task, "block": regime.block,
                  "experience": int(lifetime.log.exp[bounds[regime.number]]), "performance": regime.terminal}
                 for regime in regimes_of(lifetime.log) if not regime.train]
    if not rows:
        return "the log has no evaluation block"
    figure, parts = plots.panels(len(log.tasks), 1 + len(log.tasks) // 9, 0.75, sharex=True, sharey=True)
    for task, axes in zip(log.tasks, parts, strict=True):
        for start, end, trained in _blocks(log):
            colour, alpha = (OWN, 0.25) if trained == task else (PALE, 0.5)
            axes.axvspan(start, end, color=colour, alpha=alpha, linewidth=0)
        by_place = defaultdict(list)
        for row in rows:
            if row["task"] == task:
                by_place[row["block"], row["experience"]].append(row["performance"])
        places = [place for _, place in by_place]
        for values in zip(*by_place.values(), strict=True) if len(lifetimes) > 1 else ():
            axes.plot(places, values, color=INK, alpha=0.3, linewidth=0.6)
        axes.plot(places, [mean_of(values) for values in by_place.values()], "o-", color=INK, markersize=3)
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
    plots.legend(figure, parts[0])
    return Picture("against_experts", f"Learning against experts, {_who(lifetimes)}", (
        "Each task in the lifetime and learned alone, from its first experience on. Faint: values as logged; bold: smoothed "
        "as for the metrics, mean over the logs, cut to the shortest."), figure, rows)


def _blocks(log: Log) -> list[tuple[int, int, str]]:
    """(First experience, that of the next regime, task) of each regime in which a task is learned."""
    bounds = log.bounds().tolist()
    ends = [*log.exp[bounds[1:-1]].tolist(), int(log.exp[-1])]
    return [(int(log.exp[start]), end, log.tasks[log.task[start]]) for start, end in zip(bounds[:-1], ends, strict=True)
            if log.train[start]]


def _who(lifetimes: list[Lifetime]) -> str:
    return lifetimes[0].log.name if len(lifetimes) == 1 else f"{len(lifetimes)} lifetimes"


def _faint(lifetimes: list[Lifetime]) -> str:
    return f" Faint: {len(lifetimes)} lifetimes; bold: their mean." if len(lifetimes) > 1 else ""
