"""Pictures of the tasks of a NEVIS stream, and of who learned from whom, after the figures of the paper (arXiv 2211.11747).

A function draws one picture, or returns a str that says why there is none, inside of `with plots.style()`. All numbers come
from `analysis`.
"""

from __future__ import annotations

from nevis_lite import analysis, plots
from nevis_lite.metrics import name_of
from nevis_lite.plots import INK, NARROW, PALE, WIDE, Picture, canvas

MOST_NAMES = 30  # of tasks along an axis; where there are more, years stand in their place
FRAME = "#d55e00"  # is seen on all colours of a heat map
BY = {"domain": "domain", "num_train": "training images", "resolution": "shorter side of the images"}


def statistics(run: dict) -> Picture | str:
    """The tasks of a stream: years, domains, resolutions, classes and training images (Fig. 2)."""
    tasks = run["tasks"]
    years = [task["year"] for task in tasks]
    counts = {"year": [(year, years.count(year),
                        sum(task["year"] == year and task["meta"] == "test" for task in tasks))
                       for year in range(min(years), max(years) + 1)]}
    for row in analysis.slices(run):
        counts.setdefault(row["by"], []).append((row["slice"], row["tasks"], row["meta_test_tasks"]))
    figure = canvas(WIDE, 3.8)
    parts = figure.subplot_mosaic([["year", "domain"], ["size", "resolution"]])
    for by in ("year", "domain", "resolution"):
        names, heights, judged = zip(*counts[by], strict=True)
        bars, along = (parts[by].bar, parts[by].yaxis) if by == "year" else (parts[by].barh, parts[by].xaxis)
        bars(names, heights, facecolor="none", edgecolor=INK, linewidth=0.6)
        bars(names, judged, facecolor=INK, linewidth=0)
        along.get_major_locator().set_params(integer=True)
        along.set_label_text("tasks")
        parts[by].grid(False, axis="x" if by == "year" else "y")
    for meta, fill in (("train", "none"), ("test", INK)):
        points = [(task["num_train"], task["num_classes"]) for task in tasks if task["meta"] == meta]
        parts["size"].plot(*zip(*points, strict=True) if points else ((), ()), "o", color=INK, markerfacecolor=fill,
                           markersize=3, markeredgewidth=0.6)
    parts["year"].set_xlabel("year")
    parts["domain"].invert_yaxis()
    parts["resolution"].set_ylabel(BY["resolution"])
    parts["size"].set(xscale="log", yscale="log", xlabel=BY["num_train"], ylabel="classes")
    for axis in (parts["size"].xaxis, parts["size"].yaxis):
        plots.few_ticks(axis, lambda count: f"{count:,.0f}")
    shown = ("index", "task", "name", "year", "occurrence", "domain", "kind", "num_classes", "num_train", "resolution", "meta")
    rows = [{key: task[key] for key in shown} for task in tasks]
    return Picture("statistics", "The tasks of the stream", (
        f"{len(tasks)} tasks by year, domain and resolution, and the sizes of each. Dark and filled: meta-test tasks."
        + (f" The run goes on: it has {run['unfinished']['planned']} tasks." if "unfinished" in run else "")), figure, rows)


def relatedness(run: dict) -> Picture | str:
    """The k-NN accuracies that sources are chosen by, earlier tasks against later ones (Fig. 3), and what was chosen."""
    found = analysis.relatedness(run)
    if found["missing"]:
        return "the baseline measures none"
    names = {None: "scratch", **{task["index"]: f"{task['index']} {name_of(task)}" for task in run["tasks"]}}
    chosen = [names.get(task["source"], task["source"]) for task in run["tasks"]]
    rows = [{"source": source, "target": target, "score": score, "chosen": source == best}
            for source, scores in zip(found["sources"], found["scores"], strict=True)
            for target, score, best in zip(found["targets"], scores, chosen, strict=True) if score is not None]
    figure, axes = _matrix(found["scores"], found["sources"], found["targets"], "k-NN accuracy or mAP on dev")
    for target, best in enumerate(chosen):
        if best in found["sources"]:
            axes.plot(target, found["sources"].index(best), "s", color=FRAME, fillstyle="none", markeredgewidth=1,
                      markersize=min(13.0, 250 / len(chosen)))
    if len(chosen) > MOST_NAMES:
        years = {names[task["index"]]: task["year"] for task in run["tasks"]}
        for axis, side in ((axes.xaxis, found["targets"]), (axes.yaxis, found["sources"])):
            _year_ticks(axis, [years.get(name, name) for name in side])
    return Picture("relatedness", f"Relatedness of tasks, {run['name']}", (
        "Each cell: how well nearest neighbours classify the target, with the features of the source. Framed: the source that "
        "the target started from. Empty: not measured."), figure, rows)


def measured_transfer(runs: list[dict]) -> Picture | str:
    """Error of each target after learning each source (Fig. 3, by finetuning)."""
    found = analysis.measured_transfer(runs)
    rows = [{"source": source, "target": target, "error": error, "trainings": count}
            for source, errors, counts in zip(found["sources"], found["error"], found["n"], strict=True)
            for target, error, count in zip(found["targets"], errors, counts, strict=True) if count]
    if not rows:
        return "no training tells its source"
    figure, _ = _matrix(found["error"], found["sources"], found["targets"], "mean error")
    return Picture("transfer", "Measured transfer", (
        "Each cell: mean error of the target when its weights came from the source; lower is better within a column."
        + (f" Left out: {len(found['left_out'])} trainings that don't tell." if found["left_out"] else "")), figure, rows)


def sources(run: dict, colour: str) -> Picture | str:
    """Arcs from each task to those that started from it (Fig. 18); the longest chain in `colour`."""
    from matplotlib.patches import Arc

    graph, tasks = analysis.source_graph(run), run["tasks"]
    places = {row["index"]: place for place, row in enumerate(graph["tasks"])}
    longest = next((row["chain"] for row in graph["tasks"] if row["links"] == graph["longest"]), None) or []
    arcs = [(row["source"], row["index"], "-") for row in graph["tasks"]]
    arcs += [(other, row["index"], ":") for row in graph["tasks"] for other in row["auxiliaries"] if other != row["source"]]
    arcs = [(places[source], places[target], line, line == "-" and source in longest and target in longest)
            for source, target, line in arcs if source in places]
    if not arcs:
        return "no task started from an earlier one"
    height = max(*(end - start for start, end, _, _ in arcs), len(tasks) / 8)  # FT-prev's are all as low as the first
    figure = canvas(WIDE, 1.4 + 1.6 * min(1.0, 2 * height / len(tasks)))
    axes = figure.subplots()
    for start, end, line, marked in arcs:
        axes.add_patch(Arc(((start + end) / 2, 0), end - start, 2 * (end - start), theta2=180, linestyle=line,
                           color=colour if marked else INK, linewidth=1.4 if marked else 0.6, alpha=1 if marked else 0.6))
    for row in graph["tasks"]:
        fill = {None: "none", "pretrained": PALE}.get(row["source"], INK)
        axes.plot(places[row["index"]], 0, "o", color=INK, markerfacecolor=fill, markersize=3, markeredgewidth=0.6,
                  clip_on=False)
    year_axis(axes, tasks, names=True)
    axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(0, 1.05 * height))
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    rows = [{key: row[key] for key in ("index", "name", "year", "meta", "source", "auxiliaries", "score", "links", "chain")}
            for row in graph["tasks"]]
    return Picture("sources", f"Who learned from whom, {run['name']}", (
        "An arc leads from the task whose weights were taken to the one that started from them; dotted: its data were trained "
        "on, too. Hollow: from scratch; pale: from the pretrained network. "
        + (f"Coloured: the longest chain, of {graph['longest']} links; {graph['mean']:.1f} on average. " if longest else "")
        + "Shaded: meta-test tasks."), figure, rows)


def year_axis(axes, tasks: list[dict], names: bool = False):
    """The tasks as the x axis: years below (with `names`, names if they find room), the meta-test tasks shaded."""
    if names and len(tasks) <= MOST_NAMES:
        axes.set_xticks(range(len(tasks)), [f"{task['year']} {plots.short(name_of(task), 18)}" for task in tasks], rotation=90)
    else:
        _year_ticks(axes.xaxis, [task["year"] for task in tasks])
    axes.grid(False, axis="x")
    for place, task in enumerate(tasks):
        if task["meta"] == "test":
            axes.axvspan(place - 0.5, place + 0.5, color=PALE, alpha=0.5, linewidth=0, zorder=0)


def _year_ticks(axis, years: list):
    """A tick where a year begins, if there's room for it."""
    places = []
    for place, year in enumerate(years):
        if (place == 0 or year != years[place - 1]) and (not places or place - places[-1] >= len(years) / 15):
            places.append(place)
    axis.set_ticks(places, [years[place] for place in places])


def _matrix(cells: list[list], sources: list[str], targets: list[str], label: str):
    """A heat map with tasks on both sides; (figure, axes)."""
    figure = canvas(WIDE if len(targets) > 6 else NARROW, min(6.2, 1.8 + 0.2 * len(sources)))
    axes = figure.subplots()
    plots.heat(axes, cells, *([plots.short(name) for name in names] for names in (sources, targets)), label)
    axes.set(xlabel="target", ylabel="source")
    return figure, axes
