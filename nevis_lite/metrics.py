"""The numbers of NEVIS'22 (arXiv 2211.11747): error of a task, mean error and compute of a stream, runs side by side.

Only numpy is needed, so that a finished run can be read anywhere: `python -m nevis_lite.metrics RUN... [--json]`.
"""

import argparse
import itertools
import json
import math
import sys
import textwrap
from pathlib import Path

import numpy as np

# Two-sided 95 % quantile of Student's t for 1 to 9 degrees of freedom. For more, the last one is kept: the interval is
# then a little too wide, never too narrow.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


# ---- one task -------------------------------------------------------------------------------------------------------


def single_label_error(scores: np.ndarray, labels: np.ndarray) -> float:
    """1 - accuracy, the error of a single-label task (paper, Eq. 1).

    `scores` (N, C), any monotone score; `labels` (N,), integers. The prediction is the highest score, the lowest class
    where several are equal. Raises ValueError when there is no example, a score is not finite or shapes do not match.
    """
    scores, labels = _checked(scores, labels, 2, 1)
    return float(np.mean(scores.argmax(axis=1) != labels))


def average_precision(scores: np.ndarray, positives: np.ndarray) -> float | None:
    """Area under the precision-recall curve of one class: sum_n (R_n - R_{n-1}) P_n over the distinct scores.

    `scores` (N,), `positives` (N,), 0 or 1. Nothing is interpolated: this is scikit-learn's `average_precision_score`,
    and the prevalence where all scores are equal. None when there is no positive example, where recall is undefined.
    Raises ValueError when there is no example, a score is not finite or shapes do not match.
    """
    scores, positives = _checked(scores, positives, 1, 1)
    positives = positives.astype(bool)
    if not positives.any():
        return None
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # the last example of each distinct score
    true_positives = np.cumsum(positives[order])[last]
    recall = true_positives / positives.sum()
    return float(np.sum(np.diff(recall, prepend=0.0) * true_positives / (last + 1)))


def mean_average_precision(scores: np.ndarray, labels: np.ndarray) -> tuple[float | None, int]:
    """(mAP, number of classes without a positive example): the mean of `average_precision` over the other classes.

    `scores` (N, C), `labels` (N, C), 0 or 1. mAP is None when no class has a positive example. A class without one is
    left out, where scikit-learn and the reference count it as 0. Raises ValueError as `average_precision` does.
    """
    scores, labels = _checked(scores, labels, 2, 2)
    values = [average_precision(scores[:, c], labels[:, c]) for c in range(scores.shape[1])]
    defined = [value for value in values if value is not None]
    return _mean(defined), len(values) - len(defined)


def multi_label_error(scores: np.ndarray, labels: np.ndarray) -> float:
    """1 - mAP, the error of a multi-label task (paper, Eq. 1); `scores` and `labels` (N, C).

    Raises ValueError when no class has a positive example, and as `average_precision` does.
    """
    value, _ = mean_average_precision(scores, labels)
    if value is None:
        raise ValueError("mAP is undefined: no class has a positive example.")
    return 1.0 - value


def error(kind: str, scores: np.ndarray, labels: np.ndarray) -> float:
    """The error of a task, in [0, 1]; `kind` is "single_label" or "multi_label", else ValueError."""
    errors = {"single_label": single_label_error, "multi_label": multi_label_error}
    if kind not in errors:
        raise ValueError(f"Unknown kind of task {kind!r}; the known ones are {', '.join(errors)}.")
    return errors[kind](scores, labels)


def _checked(scores: np.ndarray, labels: np.ndarray, ndim: int, label_ndim: int) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if scores.ndim != ndim or labels.shape != scores.shape[:label_ndim]:
        raise ValueError(f"Scores of shape {scores.shape} and labels of shape {labels.shape} do not go together.")
    if scores.size == 0:
        raise ValueError("The error of no examples is undefined.")
    if not np.isfinite(scores).all():
        raise ValueError("Scores are not finite: the training has diverged.")
    return scores, labels


# ---- one run --------------------------------------------------------------------------------------------------------


def load(run_dir: str | Path) -> dict:
    """The content of `results.json` in the folder of a run; FileNotFoundError when it is not there."""
    path = Path(run_dir) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"No finished run in {run_dir}: it holds no results.json.")
    return json.loads(path.read_text(encoding="utf-8"))


def summarise(tasks: list[dict], phase: str) -> dict:
    """The summary of a run from its rows in `results.json` (paper, Eq. 1-2 and Algorithm 1).

    "error": mean error over the meta-test tasks, or over all in phase "meta_train" or when there is no meta-test task;
    "error_all": mean over all tasks; "cflop": FLOPs of all tasks and phases; "cflop_paper": only of training, as the
    paper counts. Every task weighs the same. A mean is None when there is no task or the error of one is undefined.
    """
    return {
        "error": _mean([task["error"] for task in _judged(tasks, phase)]),
        "error_all": _mean([task["error"] for task in tasks]),
        "cflop": sum(sum(task["flops"].values()) for task in tasks),
        "cflop_paper": sum(task["flops"]["train"] for task in tasks),
    }


def human(flops: float) -> str:
    """FLOPs for people, three digits: 3.24e12 -> "3.24 TFLOP"; G, T, P and E are 1e9, 1e12, 1e15 and 1e18."""
    for prefix, size in (("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18)):
        if flops < 999.5 * size:
            return f"{flops / size:.3g} {prefix}FLOP"
    return f"{flops / 1e18:.0f} EFLOP"


def table(results: dict) -> str:
    """The content of `results.json` as text of at most 110 columns: a row per task, then the summary."""
    tasks, phase = results["tasks"], results["phase"]
    names = {task["index"]: _name(task) for task in tasks}
    header = ["#", "year", "task", "", "classes", "train", "start", "lr", "smooth", "error", "compute"]
    lines = [header, *(_row(task, names) for task in tasks)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Names, in columns 2 and 6, are aligned to the left, numbers to the right.
    template = "  ".join(f"{{:{'<' if i in (2, 6) else '>'}{width}}}" for i, width in enumerate(widths))
    rows = [template.format(*line) for line in lines]

    summary, judged = summarise(tasks, phase), _judged(tasks, phase)
    mean = "partial mean" if results["partial"] else "mean error"
    ends = [(f"{mean}, all tasks ({len(tasks)})", _number(summary["error_all"]))]
    if judged is not tasks:
        ends.insert(0, (f"{mean}, meta-test tasks * ({len(judged)})", _number(summary["error"])))
    ends.append(("compute, training only (as in the paper)", human(summary["cflop_paper"])))
    ends.append(("compute, all phases", human(summary["cflop"])))
    if results.get("cflop_pretraining"):
        ends.append(("compute of the pretrained weights, beside", human(results["cflop_pretraining"])))
    missing = f"PARTIAL: missing {', '.join(results['partial'])}" if results["partial"] else ""
    return "\n".join([*textwrap.wrap(missing, 110), *rows, "", *(f"{label:<42}{value}" for label, value in ends)])


def _row(task: dict, names: dict[int, str]) -> list[str]:
    found = task["hyperparameters"]
    return [
        str(task["index"]),
        str(task["year"]),
        names[task["index"]][:22],
        "*" if task["meta"] == "test" else "",
        str(task["num_classes"]),
        str(task["num_train"]),
        _origin(task["source"], names)[:18],
        _number(found.get("lr"), ".2g"),
        _number(found.get("label_smoothing"), ".2f"),
        _number(task["error"]),
        human(sum(task["flops"].values())),
    ]


def _origin(source: int | str | None, names: dict[int, str]) -> str:
    """An earlier task by its number and name, since two may share a name; or "scratch" or "pretrained"."""
    return "scratch" if source is None else f"{source} {names[source]}" if source in names else source


def _judged(tasks: list[dict], phase: str) -> list[dict]:
    """The tasks whose mean error is the result of the run."""
    return [task for task in tasks if phase == "meta_test" and task["meta"] == "test"] or tasks


def _name(task: dict) -> str:
    return task.get("name") or task["task"]


def _number(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)


def _mean(values: list[float | None]) -> float | None:
    values = np.array(values, dtype=np.float64)  # None becomes NaN
    return float(values.mean()) if values.size and np.isfinite(values).all() else None


# ---- several runs ---------------------------------------------------------------------------------------------------


def comparison(runs: list[dict]) -> dict:
    """Several runs of one stream and phase, each the content of a `results.json`, grouped by baseline.

    "baselines": per baseline, {"n", "mean", "sd"} of "error" and "error_all" over its runs, the mean "cflop", and whether it is
    on the Pareto front; where runs differ in their budgets, a baseline at another budget is another baseline;
    "pairs": for every two baselines of one budget the differences of "error", first minus second, over the seeds that both
    have with the same tasks missing, if any, and their mean, sd and paired 95 % interval, mean +- t sd / sqrt(n) with
    Student's t of n - 1 degrees of freedom;
    "tasks": {"n", "mean", "sd"} of the error of each task by baseline; "partial": run name -> its missing tasks.
    Standard deviations are those of a sample (n - 1). What is undefined is None. Raises ValueError when the runs are of
    different streams or phases, or two are of the same baseline and seed.
    """
    if any((run["stream"], run["phase"]) != (runs[0]["stream"], runs[0]["phase"]) for run in runs):
        raise ValueError("These runs are of different streams or phases: their errors cannot be compared.")
    several = len({_budget(run) for run in runs}) > 1
    labels = [run["baseline"] + (f", {_budget(run)}" if several else "") for run in runs]
    groups: dict[str, dict[int, dict]] = {}
    for run, label in zip(runs, labels, strict=True):
        seeds = groups.setdefault(label, {})
        if run["seed"] in seeds:
            raise ValueError(f"Two runs of {label} have seed {run['seed']}: name only one of them.")
        seeds[run["seed"]] = run
    means = {name: (_mean([run["cflop"] for run in seeds.values()]), _mean([run["error"] for run in seeds.values()]))
             for name, seeds in groups.items()}
    front = pareto({name: point for name, point in means.items() if None not in point})
    budgets = {name: _budget(next(iter(seeds.values()))) for name, seeds in groups.items()}

    tasks: dict[tuple, dict] = {}  # not by index: another order of the stream gives the same task another index
    for run, label in zip(runs, labels, strict=True):
        for row in run["tasks"]:
            task = tasks.setdefault(
                (row["task"], row["occurrence"]),
                {"year": row["year"], "task": _name(row), "errors": {baseline: [] for baseline in groups}},
            )
            task["errors"][label].append(row["error"])
    for task in tasks.values():
        task["errors"] = {baseline: _spread(values) for baseline, values in task["errors"].items()}

    return {
        "partial": {run["name"]: run["partial"] for run in runs if run["partial"]},
        "baselines": {
            baseline: {
                "error": _spread([run["error"] for run in seeds.values()]),
                "error_all": _spread([run["error_all"] for run in seeds.values()]),
                "cflop": means[baseline][0],
                "pareto": baseline in front,
            }
            for baseline, seeds in groups.items()
        },
        "pairs": [
            _pair(first, second, groups)
            for first, second in itertools.combinations(groups, 2)
            if budgets[first] == budgets[second]
        ],
        "tasks": list(tasks.values()),
    }


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the points (compute, error) that no other one beats in both, from cheap to expensive (paper, Fig. 4)."""
    front, lowest = [], math.inf
    for name, (_, error) in sorted(points.items(), key=lambda item: item[1]):
        if error < lowest:
            front, lowest = [*front, name], error
    return front


def _budget(run: dict) -> str:
    return f"{run['trials']} x {run['steps']:,} updates"


def compare(runs: list[dict]) -> str:
    """`comparison` as GitHub markdown: baselines, paired differences, errors by task if there are at most 8 baselines.

    Raises as it does.
    """
    found = comparison(runs)
    baselines = found["baselines"]
    parts = [f"**PARTIAL**: {name} misses {', '.join(missing)}" for name, missing in found["partial"].items()]
    rows = [
        [
            baseline,
            str(group["error"]["n"]),
            *(_number(group[key][part]) for key in ("error", "error_all") for part in ("mean", "sd")),
            human(group["cflop"]),
            "*" if group["pareto"] else "",
        ]
        for baseline, group in baselines.items()
    ]
    header = ["baseline", "runs", "error", "sd", "error, all tasks", "sd", "compute, all phases", "Pareto front"]
    parts.append(_markdown(header, rows))
    rows = [
        [
            f"{pair['first']} - {pair['second']}",
            " ".join(f"{seed}: {value:+.4f}" for seed, value in zip(pair["seeds"], pair["differences"], strict=True)),
            _number(pair["mean"], "+.4f"),
            _number(pair["sd"]),
            "-" if pair["interval"] is None else "{:+.4f} to {:+.4f}".format(*pair["interval"]),
            pair["verdict"],
        ]
        for pair in found["pairs"]
    ]
    if rows:
        parts.append(_markdown(["difference of error", "by seed", "mean", "sd", "95 % interval", ""], rows))
    rows = [
        [str(task["year"]), task["task"], *(_mean_and_sd(task["errors"][baseline]) for baseline in baselines)]
        for task in found["tasks"]
    ]
    if len(baselines) <= 8:
        parts.append(_markdown(["year", "task", *baselines], rows))
    return "\n\n".join(parts)


def _pair(first: str, second: str, groups: dict[str, dict[int, dict]]) -> dict:
    a, b = groups[first], groups[second]
    seeds = sorted(seed for seed in a.keys() & b.keys() if None not in (a[seed]["error"], b[seed]["error"])
                   and a[seed]["partial"] == b[seed]["partial"])
    differences = [a[seed]["error"] - b[seed]["error"] for seed in seeds]
    spread = _spread(differences)
    interval, verdict = None, "no interval: fewer than two common seeds"
    if spread["n"] > 1:
        half = _T95[min(spread["n"] - 1, len(_T95)) - 1] * spread["sd"] / spread["n"] ** 0.5
        interval = [spread["mean"] - half, spread["mean"] + half]
        better = first if spread["mean"] < 0 else second
        verdict = "within noise" if interval[0] <= 0 <= interval[1] else f"{better} is better"
    pair = {"first": first, "second": second, "seeds": seeds, "differences": differences}
    return {**pair, **spread, "interval": interval, "verdict": verdict}


def _spread(values: list[float | None]) -> dict:
    mean = _mean(values)
    sd = float(np.std(values, ddof=1)) if mean is not None and len(values) > 1 else None
    return {"n": len(values), "mean": mean, "sd": sd}


def _mean_and_sd(spread: dict) -> str:
    return _number(spread["mean"]) if spread["sd"] is None else f"{spread['mean']:.4f} ± {spread['sd']:.4f}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main(argv: list[str] | None = None) -> None:
    """`python -m nevis_lite.metrics RUN... [--json]`; exits with 2 when a run cannot be read or compared."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.metrics", description="Show a run, or compare several.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON: results.json of one run, or the comparison")
    args = parser.parse_args(argv)
    try:
        runs = [load(run) for run in args.runs]
        if args.json:
            print(json.dumps(runs[0] if len(runs) == 1 else comparison(runs), indent=1, allow_nan=False))
        else:
            print(table(runs[0]) if len(runs) == 1 else compare(runs))
    except (FileNotFoundError, ValueError) as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
