"""What the paper reads from its runs beside the mean error: regret, forward transfer, slices, who learns from whom, ablations.

A run is the content of its `results.json`, as `metrics.load` returns it, also while the run goes on. Results are plain values:
a list of dicts is a table, to plot or to write as CSV; a matrix is a list of rows. What is undefined is None, with the reason
in "reason" or, by name, in "missing"; tasks that don't count are in "left_out". Only numpy is needed.
"""

import math
import re
import textwrap
from bisect import bisect
from collections import Counter, defaultdict

import numpy as np

from nevis_lite import compare
from nevis_lite.compare import mean_and_sd, spread_of
from nevis_lite.metrics import by_identity, columns, judged_tasks, mean_of, name_of, shown

# A bin holds its lower end. The sizes are the paper's. Images with a shorter side below 64 pixels are enlarged for the paper's
# network; below 32 are mostly digits, from 256 on mostly photographs.
BINS = {
    "num_train": ((1_000, 10_000, 100_000), ("<1k", "1k-10k", "10k-100k", ">=100k")),
    "resolution": ((32, 64, 256), ("<32 px", "32-64 px", "64-256 px", ">=256 px")),
}


# ---- regret and forward transfer ------------------------------------------------------------------------------------


def regret(run: dict, reference: dict) -> dict:
    """R_t, the sum over the tasks i <= t of e_i minus the reference's e_i (paper, regret curves); below 0 is better than it.

    "curve": a row for each task that both runs have, in the order of `run`: "difference" of the errors, "all": the sum so far,
    "meta_test": the sum over S_Ts alone, None before its first task. "all", "meta_test": the sums at the end, over "tasks" and
    "meta_test_tasks" tasks. "left_out": the tasks of either run that have no difference. ValueError when the runs are of
    different phases, whose errors are those of different splits.
    """
    if run["phase"] != reference["phase"]:
        raise ValueError(f"{run['name']} and {reference['name']} are of different phases: their errors cannot be compared.")
    ours, theirs = by_identity(run["tasks"]), by_identity(reference["tasks"])
    curve, left_out, sums = [], [], {"all": None, "meta_test": None}
    for key, task in (ours | theirs).items():
        lacking = [each["name"] for each, tasks in ((run, ours), (reference, theirs)) if key not in tasks]
        if lacking:
            left_out.append({**_facts(task), "reason": f"not in {lacking[0]}"})
        elif not (_defined(ours[key]["error"]) and _defined(theirs[key]["error"])):
            left_out.append({**_facts(task), "reason": "its error is undefined in one of the runs"})
        else:
            difference = ours[key]["error"] - theirs[key]["error"]
            sums["all"] = (sums["all"] or 0.0) + difference
            if ours[key]["meta"] == "test":
                sums["meta_test"] = (sums["meta_test"] or 0.0) + difference
            curve.append({**_facts(ours[key]), "difference": difference, **sums})
    return {"reference": reference["name"], **sums, "tasks": len(curve),
            "meta_test_tasks": sum(row["meta"] == "test" for row in curve), "left_out": left_out, "curve": curve,
            "missing": {name: "no task to sum over" for name, value in sums.items() if value is None}}


def forward_transfer(run: dict) -> dict:
    """FWT of the tasks whose data set came before in the stream: (AUC_2 - AUC_1) / (1 - AUC_1) (paper, Eq. 5).

    AUC_1 and AUC_2 are `area_under_curve` of the first presentation and of a later one. "pairs": a row each, with "index" and
    "year" of the first, "index_again" and "year_again" of the later; "mean": over the "n" pairs whose "fwt" is defined.
    """
    presentations = defaultdict(list)
    for task in run["tasks"]:
        presentations[task["task"], name_of(task)].append(task)
    pairs = []
    for tasks in presentations.values():
        first, *later = sorted(tasks, key=lambda task: task["occurrence"])
        known = len({task["occurrence"] for task in tasks}) == len(tasks)
        unknown = {"fwt": None, "reason": "several data sets of the stream bear this name"}
        pairs += [_pair(first, again) | ({} if known else unknown) for again in later]
    values = [pair["fwt"] for pair in pairs if pair["fwt"] is not None]
    missing = {} if values else {"mean": "it is undefined for every pair" if pairs else "no data set came twice"}
    return {"mean": mean_of(values), "n": len(values), "missing": missing, "pairs": pairs}


def _pair(first: dict, again: dict) -> dict:
    (area, reason), (area_again, reason_again) = area_under_curve(first["curve"]), area_under_curve(again["curve"])
    reason = reason or reason_again
    if reason is None and first["curve"][-1][0] != again["curve"][-1][0]:
        reason = "the two trainings have different numbers of steps"
    elif area == 1:
        reason = "1 - AUC_1 is zero: nothing was left to gain"
    return {**_facts(first), "index_again": again["index"], "year_again": again["year"], "auc": area, "auc_again": area_again,
            "fwt": (area_again - area) / (1 - area) if reason is None else None, "reason": reason}


def area_under_curve(curve: list) -> tuple[float | None, str | None]:
    """Area under accuracy (or mAP) on dev against steps, over the number of steps: in [0, 1]; None with a reason if undefined.

    `curve`: [[step, error], ...]; accuracy is linear between the points.
    """
    points = np.array(curve, dtype=np.float64).reshape(-1, 2)  # None becomes NaN
    if len(points) < 2 or not np.isfinite(points).all() or (np.diff(points[:, 0]) <= 0).any():
        return None, "a curve has fewer than two points, undefined ones, or steps that don't increase"
    steps, accuracy = points[:, 0], 1 - points[:, 1]
    return float(np.sum(np.diff(steps) * (accuracy[1:] + accuracy[:-1]) / 2) / (steps[-1] - steps[0])), None


# ---- slices ---------------------------------------------------------------------------------------------------------


def slices(run: dict) -> list[dict]:
    """Mean error of the tasks of each domain, training set size and native resolution (paper, errors by domain and by size).

    The resolution of a task is the mean shorter side of its images in pixels; see BINS. A row for each slice that has a task:
    "by", "slice", "tasks" and the mean of their "error", "meta_test_tasks", those of S_Ts, and the mean of their
    "meta_test_error". A mean is None where there is no task, or where the error of one is undefined.
    """
    rows = []
    for by in ("domain", *BINS):
        members = defaultdict(list)
        for task in run["tasks"]:
            members[_slice(by, task[by])].append(task)
        labels = [*BINS[by][1], "unknown"] if by in BINS else sorted(members)
        for label in (label for label in labels if label in members):
            row, reasons, judged = {"by": by, "slice": label}, [], [task for task in members[label] if task["meta"] == "test"]
            for prefix, tasks in (("", members[label]), ("meta_test_", judged)):
                mean = mean_of([task["error"] for task in tasks])
                row |= {f"{prefix}tasks": len(tasks), f"{prefix}error": mean}
                if mean is None:
                    reasons.append(f"{prefix}error: {'the error of a task is undefined' if tasks else 'no such task'}")
            rows.append({**row, "reason": "; ".join(reasons) or None})
    return rows


def _slice(by: str, value: float | str | None) -> str:
    if value is None:
        return "unknown"
    ends, labels = BINS.get(by, ((), (value,)))
    return labels[bisect(ends, value)]


# ---- who learns from whom -------------------------------------------------------------------------------------------


def relatedness(run: dict) -> dict:
    """The transfer matrix that k-NN estimates: accuracy (or mAP) on dev of each target with the features of each source.

    "scores": a row for each of "sources", a column for each of "targets", None where it was not measured: FT-d looks at earlier
    tasks alone, and Indep at none. 1 - score is the k-NN error that the paper chooses sources by.
    """
    names = {str(task["index"]): f"{task['index']} {name_of(task)}" for task in run["tasks"]}
    measured = {source for task in run["tasks"] for source in task["scores"]}
    sources = [source for source in ("scratch", "pretrained", *names) if source in measured]
    return {"sources": [names.get(source, source) for source in sources], "targets": list(names.values()),
            "scores": [[task["scores"].get(source) for task in run["tasks"]] for source in sources],
            "missing": {} if sources else {"scores": f"baseline {run['baseline']} measured none"}}


def measured_transfer(runs: list[dict]) -> dict:
    """The transfer matrix that finetuning measures: mean error of each target by the source that its weights came from.

    "error", "n": a row for each of "sources", a column for each of "targets": the mean over "n" trainings in all `runs`, None
    over none. The row "scratch" has the errors without a source. A source is what its run made of it: for pure pairs, give runs
    of FT-prev on streams of two tasks, where each source has learned from scratch. Tasks are known by data set, name and
    occurrence. "left_out": trainings that don't tell. ValueError when runs differ in phase or budget.
    """
    if len({(run["phase"], run["trials"], run["steps"]) for run in runs}) > 1:
        raise ValueError("These runs differ in phase, trials or steps: their errors don't belong in one matrix.")
    cells, left_out = defaultdict(list), []
    for run in runs:
        known = {None: (0, "", "scratch", 1), "pretrained": (1, "", "pretrained", 1)}
        known |= {task["index"]: (2, task["task"], name_of(task), task["occurrence"]) for task in run["tasks"]}
        counts = Counter(known.values())
        for task in run["tasks"]:
            source, target = known.get(task["source"]), known[task["index"]]
            reason = (f"its source {task['source']} is not in the run" if source is None
                      else "it or its source shares its name with another task" if max(counts[source], counts[target]) > 1
                      else "it trained together with other tasks" if task["auxiliaries"]
                      else None if _defined(task["error"]) else "its error is undefined")
            if reason is None:
                cells[source, target].append(task["error"])
            else:
                left_out.append({"run": run["name"], **_facts(task), "reason": reason})
    sources = sorted(dict.fromkeys(source for source, _ in cells), key=lambda source: source[0])
    targets = list(dict.fromkeys(target for _, target in cells))
    sides = [[name + (f" ({occurrence})" if occurrence > 1 else "") for _, _, name, occurrence in side]
             for side in (sources, targets)]
    return {"sources": sides[0], "targets": sides[1], "left_out": left_out,
            "error": [[mean_of(cells.get((source, target), [])) for target in targets] for source in sources],
            "n": [[len(cells.get((source, target), [])) for target in targets] for source in sources]}


def source_graph(run: dict) -> dict:
    """Where the weights of each task came from, and through how many tasks they went (paper: chains of FT-d exceed ten links).

    "tasks": a row each with "source" (an index, "pretrained", or None for random weights), its k-NN "score", "auxiliaries",
    "chain": the indices that the weights went through, the task's own at the end, and "links": how often they were handed on, 0
    from scratch. "longest": the most links; "mean": over all tasks.
    """
    chains, rows = {None: [], "pretrained": ["pretrained"]}, []
    for task in run["tasks"]:
        source, before = task["source"], chains.get(task["source"])
        chain = chains[task["index"]] = None if before is None else [*before, task["index"]]
        rows.append({**_facts(task), "source": source, "auxiliaries": task["auxiliaries"],
                     "score": task["scores"].get("scratch" if source is None else str(source)),
                     "links": None if chain is None else len(chain) - 1, "chain": chain,
                     "reason": f"the way to its source {source} begins at no earlier task" if chain is None else None})
    links = [row["links"] for row in rows]
    missing = "no task" if not links else "the links of a task are unknown" if None in links else None
    return {"longest": None if missing else max(links), "mean": mean_of(links),
            "missing": {"longest": missing, "mean": missing} if missing else {}, "tasks": rows}


# ---- ablations and orders -------------------------------------------------------------------------------------------


def variants(runs: list[dict]) -> list[dict]:
    """Runs of a stream and of its ablations and orders, side by side (paper, Table 5 and the orders of FT-prev).

    A row for each variant and baseline, with the averages over its finished runs (`compare.averages`): those of all seeds and,
    where the variant is random, of all its "draws"; "tasks": how many its stream has; "difference": its mean error minus that
    of the same baseline on the unchanged stream, None when there's no such run, or when the means are over different tasks.
    ValueError when runs are of different phases, or two are of the same stream, baseline and seed.
    """
    if len({run["phase"] for run in runs}) > 1:
        raise ValueError("These runs are of different phases: their errors cannot be compared.")
    groups, seen = defaultdict(list), set()
    for run, label in zip(runs, compare.labels_of(runs), strict=True):
        if (run["stream"], label, run["seed"]) in seen:
            raise ValueError(f"Two runs of {label} on {run['stream']} have seed {run['seed']}: name only one of them.")
        seen.add((run["stream"], label, run["seed"]))
        groups[re.sub(r", seed \d+", "", run["stream"]), label].append(run)
    return [_variant(stream, label, members, groups.get((stream.split(" (")[0], label), []))
            for (stream, label), members in groups.items()]


def _variant(stream: str, label: str, runs: list[dict], unchanged: list[dict]) -> dict:
    finished, base = ([run for run in group if "unfinished" not in run] for group in (runs, unchanged))
    means, base_mean = compare.averages(runs), compare.averages(unchanged)["error"]["mean"]
    difference = reason = verdict = None
    if runs == unchanged:
        reason = "the unchanged stream"
    elif means["error"]["mean"] is None or base_mean is None:
        reason = "no mean error of this variant, or of this baseline on the unchanged stream"
    elif len({frozenset(by_identity(judged_tasks(run["tasks"], run["phase"]))) for run in finished + base}) > 1:
        reason = "the means are over different tasks"
    else:
        difference = means["error"]["mean"] - base_mean
        verdict = compare.verdict_of_one(difference, finished[0]) if len(finished) == len(base) == 1 else None
    return {"stream": stream, "baseline": label, "draws": len({run["stream"] for run in runs}),
            "tasks": len(finished[0]["tasks"]) if finished else None, **means, "difference": difference, "verdict": verdict,
            "reason": reason}


def variant_table(runs: list[dict]) -> str:
    """`variants` as GitHub markdown. Raises as it does."""
    rows = [[row["stream"], row["baseline"], str(row["draws"]), shown(row["tasks"], "d"), *compare.average_cells(row),
             shown(row["difference"], "+.4f"), row["verdict"] or row["reason"] or ""] for row in variants(runs)]
    header = ["stream", "baseline", "draws", "tasks", *compare.AVERAGES, "difference of error", ""]
    return "\n\n".join([*compare.marks_of(runs), compare.markdown(header, rows)])


# ---- what --more shows ----------------------------------------------------------------------------------------------


def more(runs: list[dict]) -> list[dict]:
    """For each run its forward transfer, slices, sources and relatedness, and its regret against Indep.

    Where not just one run of Indep has the same stream, phase, seed and budget, "regret" is None.
    """
    def conditions(run):
        return tuple(run[key] for key in ("stream", "phase", "seed", "trials", "steps"))

    indep = defaultdict(list)
    for run in runs:
        if run["baseline"] == "indep":
            indep[conditions(run)].append(run)
    found = []
    for run in runs:
        references = indep[conditions(run)]
        reference = references[0] if len(references) == 1 else None
        found.append({
            "name": run["name"], "forward_transfer": forward_transfer(run), "slices": slices(run), "sources": source_graph(run),
            "relatedness": relatedness(run), "regret": reference and regret(run, reference),
            "missing": {} if reference else {
                "regret": f"needs one run of Indep with its stream, phase, seed and budget, and has {len(references)}"}})
    return found


def more_text(runs: list[dict], found: list[dict]) -> str:
    """`found`, which is `more(runs)`, as text: of one run all but its matrix; of several a line each, and slices."""
    if len(runs) == 1:
        return "\n\n".join("\n".join(lines(found[0])) for lines in (_transfer_lines, _chain_lines, _slice_lines))
    rows = []
    for each in found:
        sums, transfer = each["regret"] or {"meta_test": None, "all": None, "tasks": 0}, each["forward_transfer"]
        rows.append([each["name"], shown(sums["meta_test"], "+.4f"), shown(sums["all"], "+.4f"), str(sums["tasks"]),
                     shown(transfer["mean"], "+.4f"), str(transfer["n"]), shown(each["sources"]["longest"], "d")])
    header = ["run", "regret against Indep, S_Ts", "all", "tasks", "forward transfer", "pairs", "longest chain"]
    return f"{compare.markdown(header, rows)}\n\n{_slice_table(runs, found)}"


def _transfer_lines(found: dict) -> list[str]:
    transfer = found["forward_transfer"]
    if not transfer["pairs"]:
        return [f"forward transfer: {transfer['missing']['mean']}"]
    rows = [[pair["name"], f"{pair['year']}, {pair['year_again']}", shown(pair["auc"]), shown(pair["auc_again"]),
             shown(pair["fwt"], "+.4f"), pair["reason"] or ""] for pair in transfer["pairs"]]
    mean = [f"mean of {transfer['n']}", "", "", "", shown(transfer["mean"], "+.4f"), ""]
    return [line.rstrip() for line in columns([["forward transfer", "years", "AUC", "again", "FWT", ""], *rows, mean], (0, 5))]


def _chain_lines(found: dict) -> list[str]:
    graph = found["sources"]
    if graph["longest"] is None:
        return [f"chains of weights: {graph['missing']['longest']}"]
    names = {row["index"]: f"{row['index']} {row['name']}" for row in graph["tasks"]}
    chain = [names.get(index, index) for index in next(
        row["chain"] for row in graph["tasks"] if row["links"] == graph["longest"])]
    if len(chain) > 12:  # FT-prev's goes through the whole stream
        chain[6:-6] = ["..."]
    text = f"chains of weights: links {graph['mean']:.1f} on average, {graph['longest']} at most: {' > '.join(chain)}"
    return textwrap.wrap(text, 110, subsequent_indent="  ")


def _slice_lines(found: dict) -> list[str]:
    rows = [[row["by"], row["slice"], str(row["tasks"]), shown(row["error"]), str(row["meta_test_tasks"]),
             shown(row["meta_test_error"])] for row in found["slices"]]
    return columns([["tasks by", "", "all", "error", "meta-test", "error"], *rows], (0, 1))


def _slice_table(runs: list[dict], found: list[dict]) -> str:
    """Errors of all tasks in a slice, mean and sd over the finished runs of a baseline on a stream."""
    several = len({run["stream"] for run in runs}) > 1
    labels = [label + f", {run['stream']}" * several for run, label in zip(runs, compare.labels_of(runs), strict=True)]
    errors: dict[tuple, dict] = defaultdict(lambda: {label: [] for label in labels})
    for run, label, each in zip(runs, labels, found, strict=True):
        for row in each["slices"] if "unfinished" not in run else []:
            errors[row["by"], row["slice"]][label].append(row["error"])
    rows = [[*key, *(mean_and_sd(spread_of(values)) for values in by_label.values())] for key, by_label in errors.items()]
    return compare.markdown(["error of all tasks by", "", *dict.fromkeys(labels)], rows)


# ---- tasks ----------------------------------------------------------------------------------------------------------


def _facts(task: dict) -> dict:
    return {"index": task["index"], "task": task["task"], "name": name_of(task), "year": task["year"], "meta": task["meta"]}


def _defined(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
