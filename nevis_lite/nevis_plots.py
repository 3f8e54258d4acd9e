"""Pictures of NEVIS runs, after the figures of the paper (arXiv 2211.11747).

A function draws one picture, or returns a str that says why there is none. It takes what `series_of` makes of the runs of a
stream, or one run, inside of `with plots.style()`. All numbers come from `compare` and `analysis`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from nevis_lite import analysis, compare, plots
from nevis_lite.compare import spread_of, spread_of_defined
from nevis_lite.metrics import human, name_of
from nevis_lite.plots import INK, MEANS, NARROW, WIDE, Picture, canvas
from nevis_lite.stream_plots import BY, measured_transfer, relatedness, sources, statistics, year_axis

MOST_CURVES = 12


@dataclass
class Series:
    """The runs of one baseline, where budgets differ at one budget. `label` is as in `compare`; `name`, shorter, is drawn."""

    label: str
    name: str
    look: dict  # properties of its lines
    runs: list[dict]

    @property
    def baseline(self) -> str:
        return self.runs[0]["baseline"]

    @property
    def family(self) -> str:
        """What its other budgets have in common with it: the baseline, or the folder where runs differ in other settings."""
        return self.baseline if self.label.split(", ")[0] == self.baseline else self.label

    @property
    def finished(self) -> list[dict]:
        return [run for run in self.runs if "unfinished" not in run]


def series_of(runs: list[dict], among: list[dict] = ()) -> list[Series]:
    """The series of the runs of a stream; `among` are all runs of a set of pictures, in which colours agree."""
    looks, groups, seen = plots.looks(run["baseline"] for run in [*runs, *among]), defaultdict(list), Counter()
    for run, label in zip(runs, compare.labels_of(runs), strict=True):
        groups[label].append(run)
    order = sorted(groups.items(), key=lambda item: (list(looks).index(item[1][0]["baseline"]), _budget(item[1][0]), item[0]))
    count, series = Counter(members[0]["baseline"] for members in groups.values()), []
    for label, members in order:
        baseline = members[0]["baseline"]
        (colour, marker), (line, fill) = looks[baseline], plots.LINES[seen[baseline] % len(plots.LINES)]
        look = {"color": colour, "marker": marker, "linestyle": line, "fillstyle": fill}
        series.append(Series(label, label if count[baseline] > 1 else baseline, look, members))
        seen[baseline] += 1
    return series


def largest(runs: list[dict]) -> list[dict]:
    """Of each baseline the runs of its largest budget, or of the largest that has a finished run."""
    best = {}
    for run in runs:
        each = "unfinished" not in run, _budget(run)
        best[run["baseline"]] = max(best.get(run["baseline"], each), each)
    return [run for run in runs if best[run["baseline"]][1] == _budget(run)]


def draw(runs: list[dict]) -> tuple[list[Picture], dict[str, str]]:
    """All pictures that these runs have data for, and {name: why it is absent} of the others. ValueError as in `compare`.

    Runs of several streams or phases give pictures of each. Runs that are pairs of tasks give their transfer matrix alone.
    """
    pairs = [run for run in runs if len(run["tasks"]) == 2]
    pairs = pairs if len({run["stream"] for run in pairs}) > 1 else []
    others = [run for run in runs if run["tasks"] and run not in pairs]
    groups, found = defaultdict(list), {f"all of {run['name']}": ("no task is done", "") for run in runs if not run["tasks"]}
    for run in others:
        groups[run["stream"], run["phase"]].append(run)
    phases = list(dict.fromkeys(phase for _, phase in groups))
    for (stream, phase), members in groups.items():
        where = stream + f", {phase}" * (len(phases) > 1)
        end = f"-{plots.slug(where)}" * (len(groups) > 1)
        series, top = series_of(members, among=runs), series_of(largest(members), among=runs)
        found["pareto" + end], found["regret" + end] = (pareto(series), where), (regret(series), where)
        for function in (slices, forward_transfer, learning_curves, hyperparameters):
            found[function.__name__ + end] = function(top), where
        found["statistics" + end] = statistics(_longest(series)), where
        for each in top:
            run = max(each.runs, key=lambda run: (len(run["tasks"]), -run["seed"]))
            found[f"relatedness-{plots.slug(each.name)}{end}"] = relatedness(run), where
            found[f"sources-{plots.slug(each.name)}{end}"] = sources(run, each.look["color"]), where
    for phase in phases:
        members = [run for run in others if run["phase"] == phase]
        found["variants" + f"-{phase}" * (len(phases) > 1)] = variants(members), phase
    if pairs:
        found["transfer"] = measured_transfer(pairs), f"{len(pairs)} pairs of tasks"
    pictures = [replace(picture, name=name, title=f"{picture.title}, {where}")
                for name, (picture, where) in found.items() if isinstance(picture, Picture)]
    return pictures, {name: reason for name, (reason, _) in found.items() if isinstance(reason, str)}


# ---- errors ---------------------------------------------------------------------------------------------------------


def pareto(series: list[Series]) -> Picture | str:
    """Mean error against compute (Fig. 4)."""
    found = compare.comparison(_runs(series))["baselines"]
    shown = [each for each in series if found[each.label]["error"]["mean"] is not None]
    if not shown:
        return "no run is finished and has a mean error"
    figure = canvas(NARROW, 2.8)
    axes, rows, names, bars = figure.subplots(), [], {}, []
    for each in shown:
        group, partial = found[each.label], any(run["partial"] for run in each.finished)
        compute, errors = ([run[key] for run in each.finished] for key in ("cflop", "error"))
        row = {"baseline": each.label, "runs": len(errors), "cflop": group["cflop"], "cflop_sd": spread_of(compute)["sd"],
               "error": group["error"]["mean"], "error_sd": group["error"]["sd"], "pareto": group["pareto"], "partial": partial}
        rows.append(row)
        look = each.look | {"linestyle": "none", "fillstyle": "none" if partial else "full"}
        axes.plot(compute, errors, ".", color=look["color"], alpha=0.4, markersize=3, markeredgewidth=0)
        axes.errorbar(row["cflop"], row["error"], row["error_sd"], row["cflop_sd"], **look, elinewidth=0.7)
        x, y, dx, dy = (row[key] or 0.0 for key in ("cflop", "error", "cflop_sd", "error_sd"))
        bars += [(x - dx, y, x + dx, y), (x, y - dy, x, y + dy)]
        names[each.family] = x, y, each.family + " (partial)" * partial  # the largest budget is the last one
    for _, members in groupby(zip(shown, rows, strict=True), key=lambda pair: pair[0].family):
        budgets = list(members)
        points = sorted((row["cflop"], row["error"]) for _, row in budgets)
        axes.plot(*zip(*points, strict=True), color=budgets[0][0].look["color"], linewidth=0.6, alpha=0.6)
        bars += [(*point, *after) for point, after in pairwise(points)]
    front = sorted((row["cflop"], row["error"]) for row in rows if row["pareto"])
    if front:
        axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, linestyle=":", drawstyle="steps-post", zorder=1)
    axes.set(xscale="log", xlabel="compute of the whole stream", ylabel=_error_of(series))
    axes.margins(0.15, 0.08)
    plots.few_ticks(axes.xaxis, human)
    bars += [edge for (x, y), (x2, y2) in pairwise(front) for edge in ((x, y, x2, y), (x2, y, x2, y2))]
    plots.label_points(axes, list(names.values()), bars)
    return Picture("pareto", "Error against compute", (
        f"Lower and further to the left is better. Large points with bars: {MEANS}; small ones: the runs. A thin line joins "
        "the budgets of a baseline. No mean beats those on the dotted steps, the Pareto front, in both. Hollow: runs that miss "
        "tasks, and stand on no front."
        + f" Without a mean error: {', '.join(each.name for each in series if each not in shown)}." * (len(shown) < len(series))
        + _notes(series)), figure, rows)


def regret(series: list[Series]) -> Picture | str:
    """Sum of the differences from Indep's errors, task by task (Fig. 5)."""
    runs, tasks = _runs(series), _longest(series)["tasks"]
    curves = {id(run): each["regret"] and each["regret"]["curve"] for run, each in zip(runs, analysis.more(runs), strict=True)}
    figure = canvas(WIDE, 2.8)
    axes, rows, ends, left_out = figure.subplots(), [], [], 0
    places = {task["index"]: place for place, task in enumerate(tasks)}
    for each in (each for each in series if each.baseline != "indep"):
        known = [curves[id(run)] for run in each.runs if curves[id(run)]]
        indices = max(([row["index"] for row in curve] for curve in known), key=len, default=[])
        known, all_known = [curve for curve in known if [row["index"] for row in curve] == indices], len(known)
        left_out += all_known - len(known)
        if not known:
            continue
        spreads = [spread_of([row["all"] for row in at]) for at in zip(*known, strict=True)]
        x, means = [places[index] for index in indices], [spread["mean"] for spread in spreads]
        axes.plot(x, means, **each.look, markevery=max(1, len(x) // 12))
        if spreads[0]["sd"] is not None:
            low, high = ([spread["mean"] + sign * spread["sd"] for spread in spreads] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=each.look["color"], alpha=0.1, linewidth=0)
        ends.append((x[-1], means[-1], each.name, each.look["color"]))
        rows += [{"baseline": each.label, **{key: row[key] for key in ("index", "name", "year", "meta")}, **spread}
                 for row, spread in zip(known[0], spreads, strict=True)]
    if not rows:
        return "needs a run of Indep, and another one with its seed and budget"
    axes.axhline(0, color=INK, linewidth=0.8)
    year_axis(axes, tasks)
    axes.set(xlabel="task, by year", ylabel="regret against Indep", xlim=(-0.5, len(tasks) - 0.5))
    plots.label_ends(axes, [(len(tasks) - 1, 0.0, "indep", INK), *ends])
    return Picture("regret", "Regret against Indep", (
        "The sum over the tasks so far of the error minus that of Indep with the same seed; below 0 is better than learning "
        f"from scratch. Lines and bands: {MEANS}. Shaded: meta-test tasks."
        + f" Left out: {left_out} runs whose tasks differ from those of other seeds." * (left_out > 0)), figure, rows)


def slices(series: list[Series]) -> Picture | str:
    """Mean error by domain, training set size and resolution (Figs. 6-8)."""
    series = [each for each in series if each.finished]
    if not series:
        return "no run is finished"
    tables = {each.label: [{(row["by"], row["slice"]): row for row in analysis.slices(run)} for run in each.finished]
              for each in series}
    longest = tables[max(tables, key=lambda label: max(map(len, tables[label])))]
    keys = {key: row["tasks"] for table in longest for key, row in table.items()}
    figure = canvas(WIDE, 4.2)
    parts, rows = figure.subplot_mosaic([["domain"] * 2, ["num_train", "resolution"]], sharey=True), []
    for by, axes in parts.items():
        names = [name for group, name in keys if group == by]
        found = {each.label: [spread_of([table.get((by, name), {"error": None})["error"] for table in tables[each.label]])
                              for name in names] for each in series}
        plots.dodged(axes, [f"{name}\n{keys[by, name]}" for name in names],
                     [(each.name, each.look, found[each.label]) for each in series])
        axes.set(xlabel=f"{BY[by]}, and number of tasks", ylabel="mean error" * (by != "resolution"), ylim=(0, None))
        rows += [{"by": by, "slice": name, "tasks": keys[by, name], "baseline": label, **spreads[place]}
                 for place, name in enumerate(names) for label, spreads in found.items()]
    plots.legend(figure)
    return Picture("slices", "Errors by domain and size", (
        f"Error of all tasks of a kind, {MEANS}. A mean is missing where the error of a task is undefined."
        f"{_notes(series)}"), figure, rows)


def variants(runs: list[dict]) -> Picture | str:
    """Mean errors on a stream, in other orders and after ablations (Fig. 10), of the baselines that were run on one."""
    labels = {label for run, label in zip(runs, compare.labels_of(runs), strict=True) if " (" in run["stream"]}
    rows = [{**{key: row[key] for key in ("stream", "baseline", "draws", "tasks")}, **row["error"],
             "difference": row["difference"]} for row in analysis.variants(runs) if row["baseline"] in labels]
    if not any(row["mean"] is not None for row in rows):
        return "no finished run of an order or ablation of a stream"
    found = {(row["stream"], row["baseline"]): row for row in rows}
    names, series = sorted({row["stream"] for row in rows}), [each for each in series_of(runs) if each.label in labels]
    figure = canvas(WIDE, 0.8 + len(names) * max(0.28, 0.1 * len(series)))
    axes = figure.subplots()
    plots.dodged(axes, names, [(each.name, each.look, [found.get((name, each.label)) for name in names]) for each in series],
                 across=True)
    axes.set_xlabel("mean error" if len(series) > 1 else f"mean error of {series[0].name}")
    plots.legend(figure)
    return Picture("variants", "Orders and ablations", (
        "Mean error on each stream, mean and standard deviation over seeds and draws. Where the tasks of S_Ts differ, errors "
        f"are those of different tasks.{_notes(series)}"), figure, rows)


def learning_curves(series: list[Series]) -> Picture | str:
    """Error on dev during the training that won, of up to MOST_CURVES tasks."""
    tasks = [task for task in _longest(series)["tasks"] if task["curve"]]
    if not tasks:
        return "no task has a learning curve"
    count = min(MOST_CURVES, len(tasks))
    chosen = [tasks[round(i * (len(tasks) - 1) / max(1, count - 1))] for i in range(count)]
    (figure, parts), rows = plots.panels(count, min(4, count), 1.15, sharex=True), []
    for axes, task in zip(parts, chosen, strict=True):
        for each in series:
            curves = [own["curve"] for run in each.runs for own in run["tasks"]
                      if own["index"] == task["index"] and own["curve"]]
            curves = [curve for curve in curves if [point[0] for point in curve] == [point[0] for point in curves[0]]]
            spreads = [(points[0][0], spread_of([error for _, error in points])) for points in zip(*curves, strict=True)]
            if spreads:
                axes.plot([step for step, _ in spreads], [spread["mean"] for _, spread in spreads], **each.look,
                          label=each.name, markersize=2.5, linewidth=0.9)
            rows += [{"index": task["index"], "name": name_of(task), "year": task["year"], "baseline": each.label, "step": step,
                      **spread} for step, spread in spreads]
        axes.set_title(f"{task['year']} {plots.short(name_of(task), 18)}" + "*" * (task["meta"] == "test"), fontsize=7)
        axes.set_ylim(0, None)
    figure.supxlabel("updates", fontsize=8)
    figure.supylabel("error on dev", fontsize=8)
    plots.legend(figure)
    return Picture("learning_curves", "Learning curves", (
        "Error on dev in the training that won the search, mean over the seeds whose steps agree; * marks meta-test tasks."
        + f" {count} of {len(tasks)} tasks, evenly spread over the stream." * (count < len(tasks))), figure, rows)


def hyperparameters(series: list[Series]) -> Picture | str:
    """What each training lost against the best of its search, by learning rate and label smoothing."""
    keys, rows = ("lr", "label_smoothing"), []
    for each in series:
        for run in each.runs:
            for _, trials in groupby(run.get("trainings", ()), key=lambda row: row["task"]):
                trials = sorted((row for row in trials if row["error"] is not None), key=lambda row: row["error"])
                rows += [{"baseline": each.label, "seed": run["seed"], "task": row["task"], "trial": row["trial"],
                          **{key: row["hyperparameters"].get(key) for key in keys}, "dev_error": row["error"],
                          "above_best": row["error"] - trials[0]["error"], "rank": rank}
                         for rank, row in enumerate(trials, start=1)]
    shown = [each for each in series if any(row["baseline"] == each.label for row in rows)]
    if not shown:
        return "no trials.jsonl was read, or no training in it is done"
    figure = canvas(WIDE, 0.8 + 0.85 * len(shown))
    parts = figure.subplots(len(shown), 2, squeeze=False, sharex="col", sharey=True)
    for each, line in zip(shown, parts, strict=True):
        for key, axes in zip(keys, line, strict=True):
            for best, look in ((False, {"s": 5 if len(rows) < 2000 else 2, "color": INK, "alpha": 0.35}),
                               (True, {"s": 12, "color": each.look["color"], "marker": each.look["marker"]})):
                points = [(row[key], row["above_best"]) for row in rows
                          if row["baseline"] == each.label and (row["rank"] == 1) == best and row[key] is not None]
                axes.scatter(*zip(*points, strict=True) if points else ((), ()), **look, linewidth=0,
                             rasterized=len(points) > 1000)
        line[0].set_title(each.name, loc="left", fontsize=7)
    parts[0, 0].set_xscale("log")
    parts[-1, 0].set_xlabel("learning rate")
    parts[-1, 1].set_xlabel("label smoothing")
    figure.supylabel("dev error above the best", fontsize=8)
    return Picture("hyperparameters", "Hyper-parameters", (
        "Each point is a training: its error on dev minus the lowest of the same task and run. Coloured: the best of its task, "
        "which lie at 0; where they gather, a narrower search would do. Trainings that diverged are left out."), figure, rows)


def forward_transfer(series: list[Series]) -> Picture | str:
    """Forward transfer of the data sets that come twice (Fig. 11)."""
    pairs = {}
    for each in series:
        for pair in (pair for run in each.runs for pair in analysis.forward_transfer(run)["pairs"]):
            key = pair["index"], pair["index_again"]
            name = f"{plots.short(pair['name'])}, {pair['year']} to {pair['year_again']}"
            pairs.setdefault(key, (name, {each.label: [] for each in series}))[1][each.label].append(pair["fwt"])
    spreads = {key: {label: spread_of_defined(values) for label, values in by_label.items()}
               for key, (_, by_label) in sorted(pairs.items())}
    rows = [{"index": key[0], "index_again": key[1], "task": pairs[key][0], "baseline": label, **spread}
            for key, by_label in spreads.items() for label, spread in by_label.items() if spread["n"]]
    if not rows:
        return "no data set came twice with comparable learning curves"
    figure = canvas(WIDE, 0.8 + len(spreads) * max(0.3, 0.07 * len(series)))
    axes = figure.subplots()
    plots.dodged(axes, [pairs[key][0] for key in spreads], [
        (each.name, each.look, [by_label[each.label] for by_label in spreads.values()]) for each in series], across=True)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="forward transfer (AUC$_2$ - AUC$_1$) / (1 - AUC$_1$)")
    plots.legend(figure)
    return Picture("forward_transfer", "Forward transfer to repeated tasks", (
        "How much better the later training learned than the first one on the same data set: 1 is perfect at once, 0 no "
        f"better. {MEANS.capitalize()} for which it is defined."), figure, rows)


# ---- what they share ------------------------------------------------------------------------------------------------


def _runs(series: list[Series]) -> list[dict]:
    return [run for each in series for run in each.runs]


def _longest(series: list[Series]) -> dict:
    return max(_runs(series), key=lambda run: len(run["tasks"]))


def _error_of(series: list[Series]) -> str:
    run = _longest(series)
    judged = run["phase"] == "meta_test" and any(task["meta"] == "test" for task in run["tasks"])
    return "mean error, meta-test tasks" if judged else "mean error, all tasks"


def _budget(run: dict) -> int:
    return run["trials"] * run["steps"]


def _notes(series: list[Series]) -> str:
    """What a reader must know of the runs, for the end of a caption."""
    names = [run["name"] for run in _runs(series) if "unfinished" in run]
    notes = f" Budgets: {'; '.join(each.label for each in series)}." if any(each.label != each.name for each in series) else ""
    return notes + (f" Left out, since unfinished: {', '.join(names)}." if names else "")
