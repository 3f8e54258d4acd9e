"""Pictures of FLUID runs, whose numbers `fluid_metrics.py` has: runs that differ in their seeds as mean and deviation.

A function draws one picture of the runs of one config, inside of `with plots.style()`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from nevis_lite import plots
from nevis_lite.compare import spread_of, spread_of_defined
from nevis_lite.fluid_metrics import BUCKETS, EARLIER, check_seeds, name_of
from nevis_lite.plots import INK, MEANS, NARROW, PALE, WIDE, Picture

LOOKS = list(plots.BASELINES.values())
FROZEN = ("ncm", "ft", "et", "imprint", "ptn", "meta_baseline")  # drawn solid; what trains all layers is dashed or hatched
PARTS = 18  # of the sequence, whose accuracies are drawn over time


def pictures(runs: list[dict]) -> list[Picture]:
    """Every picture of these runs, as `fluid_metrics.load` reads them; ValueError as `draw`, UserError without matplotlib."""
    with plots.style():
        return draw(runs)[0]


def draw(runs: list[dict]) -> tuple[list[Picture], dict[str, str]]:
    """All pictures, of each config its own, and {what is absent: why}. ValueError as `check_seeds`."""
    groups, drawn, absent = defaultdict(list), [], {}
    for run in runs:
        if run["methods"]:
            groups[name_of(run)].append(run)
        else:
            absent[f"all of {run['name']}"] = "no method is done"
    for name, members in groups.items():
        check_seeds(members)
        end = f"-{plots.slug(name)}" * (len(groups) > 1)
        for function in (over_time, against_compute, earlier_examples, buckets, unseen_classes, counts):
            picture = function(members)
            drawn.append(replace(picture, name=picture.name + end, title=f"{picture.title}, {name}"))
    return drawn, absent


def over_time(runs: list[dict]) -> Picture:
    """Accuracy within parts of the sequence."""
    methods = methods_of(runs)
    figure = plots.canvas(WIDE, 3.0)
    axes, rows, ends = figure.subplots(), [], []
    for (method, found), look in zip(methods.items(), looks(methods), strict=True):
        places, parts = zip(*map(_in_parts, found), strict=True)
        spreads = [spread_of(list(values)) for values in zip(*parts, strict=True)]
        rows += [{"method": method, "samples": end, **spread} for end, spread in zip(places[0], spreads, strict=True)]
        _line(axes, places[0], spreads, look, method)
        ends.append((places[0][-1], spreads[-1]["mean"], method, look["color"]))
    axes.set(xlabel="samples", ylabel="accuracy")
    axes.margins(x=0)
    plots.label_ends(axes, ends)
    return Picture("over_time", "Accuracy over time", (
        f"Within {len(places[0])} parts of the sequence, each at its end. Lines and bands: {MEANS}. Dashed: methods that train "
        "all layers."), figure, rows)


def against_compute(runs: list[dict]) -> Picture:
    """Overall accuracy against all multiply-adds."""
    methods = methods_of(runs)
    figure = plots.canvas(NARROW, 3.0)
    axes, rows, names, lines = figure.subplots(), [], [], []
    for (method, found), look in zip(methods.items(), looks(methods), strict=True):
        accuracy = spread_of([one["overall"] for one in found])
        cached, uncached = (spread_of([one["macs"][name] / 1e9 for one in found])["mean"] for name in ("cached", "uncached"))
        rows.append({"method": method, "gmac_cached": cached, "gmac_uncached": uncached, **accuracy})
        look = look | {"linestyle": "none"}
        axes.plot([cached, uncached], [accuracy["mean"]] * 2, color=look["color"], linewidth=0.6)
        axes.errorbar(uncached, accuracy["mean"], accuracy["sd"], **look | {"fillstyle": "none"}, elinewidth=0.7)
        axes.errorbar(cached, accuracy["mean"], accuracy["sd"], **look, elinewidth=0.7)
        names.append((cached, accuracy["mean"], method))
        lines += [(cached, accuracy["mean"], uncached, accuracy["mean"]),
                  (cached, accuracy["mean"] - (accuracy["sd"] or 0), cached, accuracy["mean"] + (accuracy["sd"] or 0))]
    axes.set(xscale="log", xlabel="multiply-adds of the whole sequence, in 10⁹", ylabel="overall accuracy")
    axes.margins(0.2, 0.1)
    plots.few_ticks(axes.xaxis, lambda value: f"{value:,g}")
    plots.label_points(axes, names, lines)
    return Picture("against_compute", "Accuracy against compute", (
        "Higher and further to the left is better. Filled: the features of a frozen backbone are kept; hollow: they are "
        "computed for every visit. A backward pass costs as much as a forward pass, as in the paper. Bars: "
        f"{MEANS}."), figure, rows)


def earlier_examples(runs: list[dict]) -> Picture:
    """Accuracy by number of earlier samples of the class."""
    methods = methods_of(runs)
    figure, parts = plots.panels(2, 2, 2.4, sharey=True)
    rows, names = [], [name for name, _, _ in EARLIER]
    for axes, kind, title in zip(parts, ("novel", "pretrain"), ("novel classes", "pretrained classes"), strict=True):
        for (method, found), look in zip(methods.items(), looks(methods), strict=True):
            spreads = [spread_of_defined([one["earlier"][kind][name]["accuracy"] for one in found]) for name in names]
            samples = [int(np.mean([one["earlier"][kind][name]["samples"] for one in found])) for name in names]
            rows += [{"method": method, "classes": kind, "earlier": name, "samples": size, **spread}
                     for name, size, spread in zip(names, samples, spreads, strict=True)]
            _line(axes, range(len(names)), spreads, look, method)
        axes.set_title(title, loc="left")
        axes.set_xticks(range(len(names)), names)
    parts[0].set_ylabel("accuracy")
    figure.supxlabel("earlier samples of the class in the sequence", fontsize=8)
    plots.legend(figure)
    return Picture("earlier_examples", "Accuracy by number of earlier examples", (
        f"Lines and bands: {MEANS}. The first sample of a novel class cannot be right; pretrained classes have been seen in "
        "pretraining, too. Dashed: methods that train all layers."), figure, rows)


def buckets(runs: list[dict]) -> Picture:
    """Mean accuracy of pretrained and novel classes in the head and in the tail."""
    methods = methods_of(runs)
    figure = plots.canvas(WIDE, 2.8)
    axes, rows = figure.subplots(), []
    for number, ((method, found), look) in enumerate(zip(methods.items(), looks(methods), strict=True)):
        spreads = [spread_of_defined([one[bucket] for one in found]) for bucket in BUCKETS]
        rows += [{"method": method, "classes": bucket, **spread} for bucket, spread in zip(BUCKETS, spreads, strict=True)]
        places = np.arange(len(BUCKETS)) + 0.8 * ((number + 0.5) / len(methods) - 0.5)
        means = np.array([spread["mean"] for spread in spreads], float)  # None becomes NaN, which isn't drawn
        axes.bar(places, means, 0.8 / len(methods), yerr=[spread["sd"] or 0.0 for spread in spreads], label=method,
                 color=look["color"], hatch="////" if look["linestyle"] == "--" else None, edgecolor=PALE, linewidth=0.3,
                 error_kw={"ecolor": INK, "elinewidth": 0.7})
    axes.set_xticks(range(len(BUCKETS)), [bucket.replace("pretrain", "pretrained").replace("_", ", ") for bucket in BUCKETS])
    axes.set_ylabel("mean accuracy of the classes")
    axes.xaxis.set_tick_params(length=0)
    axes.xaxis.grid(False)
    plots.legend(figure)
    return Picture("buckets", "Accuracy of four kinds of classes", (
        f"Head: classes with more than {runs[0]['threshold']:g} samples in the sequence. Bars: {MEANS}. Hatched: methods that "
        "train all layers."), figure, rows)


def unseen_classes(runs: list[dict]) -> Picture:
    """How well the first samples of novel classes are told apart, beside a clock that looks at no image."""
    methods = methods_of(runs)
    scores = [score for score in next(iter(methods.values()))[0]["unseen"] if score != "clock"]
    figure = plots.canvas(WIDE, 0.8 + 0.22 * len(methods))
    parts, rows = figure.subplots(1, 2, sharey=True), []
    for axes, measure, title in zip(parts, ("auroc", "windowed_auroc"), ("whole sequence", "within windows"), strict=True):
        series = []
        for score, (colour, marker) in zip(scores, LOOKS[1:], strict=False):
            spreads = [spread_of_defined([one["unseen"][score][measure] for one in found]) for found in methods.values()]
            series.append((score, {"color": colour, "marker": marker}, spreads))
            rows += [{"method": method, "score": score, "measure": measure, **spread}
                     for method, spread in zip(methods, spreads, strict=True)]
        plots.dodged(axes, list(methods), series, across=True)
        clock = spread_of_defined([next(iter(run["methods"].values()))["unseen"]["clock"][measure] for run in runs])
        rows.append({"method": None, "score": "clock", "measure": measure, **clock})
        if clock["mean"] is not None:
            axes.axvline(clock["mean"], color=INK, linestyle=":", label="clock")
        axes.axvline(0.5, color=INK, linewidth=0.5)
        axes.set_title(title, loc="left")
        axes.set_xlabel("AUROC")
    plots.legend(figure)
    return Picture("unseen_classes", "Detection of unseen classes", (
        f"By novelty score: {MEANS}. Dotted: the clock, which says that early samples are new and looks at no image; over the "
        "whole sequence the AUROC mostly measures time. Solid: chance."), figure, rows)


def counts(runs: list[dict]) -> Picture:
    """How many samples each class has."""
    run = min(runs, key=lambda run: run["seed"])
    found, known = np.array(run["counts"]), run["sequence"]["known"]
    order = np.argsort(-found, kind="stable")
    rows = [{"rank": rank, "samples": int(found[slot]), "pretrained": bool(slot < known)} for rank, slot in enumerate(order, 1)]
    figure = plots.canvas(NARROW, 2.4)
    axes = figure.subplots()
    for kind, label, (colour, _) in ((True, "pretrained", LOOKS[2]), (False, "novel", LOOKS[3])):
        points = [(row["rank"], row["samples"]) for row in rows if row["pretrained"] == kind]
        axes.plot(*zip(*points, strict=True) if points else ((), ()), ".", color=colour, markersize=3, label=label)
    axes.axhline(run["threshold"], color=INK, linewidth=0.6, linestyle=":")
    axes.set(xlabel="classes, from most to fewest samples", ylabel="samples", yscale="log")
    plots.few_ticks(axes.yaxis, lambda value: f"{value:g}")
    plots.legend(figure)
    head = int(np.sum(found > run["threshold"]))
    return Picture("counts", "Samples of each class", (
        f"{found.sum():,} samples of {len(found):,} classes, of which {known:,} were pretrained; seed {run['seed']}. Dotted: "
        f"above it are the {head:,} classes of the head."), figure, rows)


# ---- what the pictures share ----------------------------------------------------------------------------------------


def methods_of(runs: list[dict]) -> dict[str, list[dict]]:
    """{method: its results in all runs that have it}."""
    found = defaultdict(list)
    for run in runs:
        for method, result in run["methods"].items():
            found[method].append(result)
    return dict(found)


def looks(methods: dict) -> list[dict]:
    """Properties of each method's line; the colours begin anew where methods train all layers."""
    seen, found = {"-": 0, "--": 0}, []
    for method in methods:
        line = "-" if method in FROZEN else "--"
        colour, marker = LOOKS[(seen[line] + 1) % len(LOOKS)]
        seen[line] += 1
        found.append({"color": colour, "marker": marker, "linestyle": line})
    return found


def _line(axes, places, spreads: list[dict], look: dict, label: str):
    """A line of means with a band of the deviation; places without a mean are left out."""
    points = [(place, one["mean"], one["sd"] or 0.0) for place, one in zip(places, spreads, strict=True)
              if one["mean"] is not None]
    x, mean, sd = map(np.array, zip(*points, strict=True)) if points else (np.zeros(0),) * 3
    axes.plot(x, mean, **look, markersize=2.5, label=label)
    axes.fill_between(x, mean - sd, mean + sd, color=look["color"], alpha=0.15, linewidth=0)


def _in_parts(result: dict) -> tuple[list[int], list[float]]:
    """(Ends, accuracies) of PARTS parts of the sequence, or of as many as there are windows."""
    ends, running = (np.array(result["over_time"][name], float) for name in ("samples", "accuracy"))
    chosen = np.unique(np.linspace(0, len(ends), min(PARTS, len(ends)) + 1).astype(int)[1:] - 1)
    samples, hits = np.append(0, ends[chosen]), np.append(0, (ends * running)[chosen])
    return samples[1:].astype(int).tolist(), (np.diff(hits) / np.diff(samples)).tolist()
