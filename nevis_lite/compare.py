"""Several runs of one stream side by side: mean and spread of the seeds, Pareto front, paired differences.

A run is the content of its `results.json`, as `metrics.load` returns it, also while the run goes on. Only numpy is needed.
"""

import itertools
import math
import re
from collections import defaultdict

import numpy as np

from nevis_lite.metrics import by_identity, human, mean_of, name_of, one_line, shown

# Two-sided 95 % quantile of Student's t for 1 to 9 degrees of freedom. For more, the last one is kept: the interval is
# then a little too wide, never too narrow.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

# The mean S_Ts error of three seeds of Indep on FULL had a standard deviation of 0.003 (paper). Chance alone seldom makes the
# errors of two single runs differ by more than twice that of a difference.
SEED_NOISE = 2 * math.sqrt(2) * 0.003


def comparison(runs: list[dict]) -> dict:
    """Several runs of one stream and phase, each the content of a `results.json`, grouped by baseline.

    "baselines": per baseline its `averages`, and whether it is on the Pareto front, where nothing partial stands; a baseline at
    another budget, trials x updates, is another baseline;
    "pairs": for every two baselines of one budget the differences of "error", first minus second, over the seeds that both
    have with the same tasks missing, if any, and their mean, sd and paired 95 % interval, mean +- t sd / sqrt(n) with
    Student's t of n - 1 degrees of freedom; the verdict on a single seed of FULL or SHORT goes by SEED_NOISE;
    "tasks": {"n", "mean", "sd"} of the error of each task by baseline; "partial": run name -> its missing tasks; "unfinished":
    run name -> numbers of tasks, as `load` has them. Standard deviations are those of a sample (n - 1). What is undefined is
    None. Raises ValueError when the runs are of different streams or phases, or two are of the same baseline and seed.
    """
    whole = [run for run in runs if not run["partial"] and "unfinished" not in run]
    if (len({(run["stream"], run["phase"]) for run in runs}) > 1
            or len({frozenset(by_identity(run["tasks"])) for run in whole}) > 1):
        raise ValueError("These runs are of different streams or phases: their errors cannot be compared.")
    labels = labels_of(runs)
    groups: dict[str, dict[int, dict]] = {}
    for run, label in zip(runs, labels, strict=True):
        seeds = groups.setdefault(label, {})
        if run["seed"] in seeds:
            raise ValueError(f"Two runs of {label} have seed {run['seed']}: name only one of them.")
        seeds[run["seed"]] = run
    baselines = {label: averages(list(seeds.values())) for label, seeds in groups.items()}
    points = {label: (group["cflop"], group["error"]["mean"]) for label, group in baselines.items()}
    whole_ones = {label for label, seeds in groups.items() if not any(run["partial"] for run in seeds.values())}
    front = pareto({label: point for label, point in points.items() if None not in point and label in whole_ones})

    tasks: dict[tuple, dict] = {}
    for run, label in zip(runs, labels, strict=True):
        for identity, row in by_identity(run["tasks"]).items():
            task = tasks.setdefault(
                identity, {"year": row["year"], "task": name_of(row), "errors": {label: [] for label in groups}}
            )
            task["errors"][label].append(row["error"])
    for task in tasks.values():
        task["errors"] = {label: spread_of(values) for label, values in task["errors"].items()}

    return {
        "partial": {run["name"]: run["partial"] for run in runs if run["partial"]},
        "unfinished": {run["name"]: run["unfinished"] for run in runs if "unfinished" in run},
        "baselines": {label: {**group, "pareto": label in front} for label, group in baselines.items()},
        "pairs": [
            _pair(first, second, groups)
            for first, second in itertools.combinations(groups, 2)
            if baselines[first]["budget"] == baselines[second]["budget"]
        ],
        "tasks": list(tasks.values()),
    }


def labels_of(runs: list[dict]) -> list[str]:
    """What each run is called beside the others: its baseline, with the budget if it has several.

    Where that does not tell two runs of a seed apart, since they differ in other settings, the names of their folders do.
    """
    budgets = defaultdict(set)
    for run in runs:
        budgets[run["baseline"]].add(_budget(run))
    labels = [run["baseline"] + (f", {_budget(run)} updates" if len(budgets[run["baseline"]]) > 1 else "") for run in runs]
    folders, places = [re.sub(r"-seed\d+$", "", run["name"]) for run in runs], [(run["stream"], run["seed"]) for run in runs]
    apart, by_folder = (len(set(zip(names, places, strict=True))) for names in (labels, folders))
    return folders if apart < by_folder == len(runs) else labels


def averages(runs: list[dict]) -> dict:
    """Of some runs of one "budget": {"n", "mean", "sd"} of "error" and "error_all", and mean "cflop", of the finished ones."""
    finished = [run for run in runs if "unfinished" not in run]
    return {
        "budget": _budget(runs[0]) if runs else None,
        **{key: spread_of([run[key] for run in finished]) for key in ("error", "error_all")},
        "cflop": mean_of([run["cflop"] for run in finished]),
    }


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the points (compute, error) that no other one beats in both, from cheap to expensive (paper, Fig. 4)."""
    front, lowest = [], math.inf
    for name, (_, error) in sorted(points.items(), key=lambda item: item[1]):
        if error < lowest:
            front, lowest = [*front, name], error
    return front


def _budget(run: dict) -> str:
    """Trials a task x updates a trial."""
    return f"{run['trials']} x {run['steps']:,}"


AVERAGES = ("runs", "trials x updates", "error", "sd", "error, all tasks", "sd, all tasks", "compute, all phases")


def average_cells(group: dict) -> list[str]:
    """`averages` as cells under the header AVERAGES."""
    errors = [shown(group[key][part]) for key in ("error", "error_all") for part in ("mean", "sd")]
    return [str(group["error"]["n"]), group["budget"], *errors, "-" if group["cflop"] is None else human(group["cflop"])]


def marks_of(runs: list[dict]) -> list[str]:
    """What a reader must know before the numbers of some runs."""
    partial = [f"**PARTIAL**: {run['name']} misses {', '.join(run['partial'])}" for run in runs if run["partial"]]
    unfinished = [(run["name"], run["unfinished"]) for run in runs if "unfinished" in run]
    return partial + ["**UNFINISHED**: {} has done {done} of {planned} tasks and is not in the means".format(name, **tasks)
                      for name, tasks in unfinished]


def text(runs: list[dict]) -> str:
    """`comparison` as GitHub markdown: baselines, paired differences, errors by task if there are at most 8 baselines.

    Raises as it does.
    """
    found = comparison(runs)
    baselines = found["baselines"]
    rows = [[baseline, *average_cells(group), "*" if group["pareto"] else ""] for baseline, group in baselines.items()]
    parts = [*marks_of(runs), markdown(["baseline", *AVERAGES, "Pareto front"], rows)]
    rows = [
        [
            f"{pair['first']} - {pair['second']}",
            " ".join(f"{seed}: {value:+.4f}" for seed, value in zip(pair["seeds"], pair["differences"], strict=True)),
            shown(pair["mean"], "+.4f"),
            shown(pair["sd"]),
            "-" if pair["interval"] is None else "{:+.4f} to {:+.4f}".format(*pair["interval"]),
            pair["verdict"],
        ]
        for pair in found["pairs"]
    ]
    if rows:
        parts.append(markdown(["difference of error", "by seed", "mean", "sd", "95 % interval", ""], rows))
    rows = [
        [str(task["year"]), task["task"], *(mean_and_sd(task["errors"][baseline]) for baseline in baselines)]
        for task in found["tasks"]
    ]
    if len(baselines) <= 8:
        parts.append(markdown(["year", "task", *baselines], rows))
    return "\n\n".join(parts)


def _pair(first: str, second: str, groups: dict[str, dict[int, dict]]) -> dict:
    a, b = groups[first], groups[second]
    seeds = sorted(seed for seed in a.keys() & b.keys() if None not in (a[seed]["error"], b[seed]["error"])
                   and a[seed]["partial"] == b[seed]["partial"])
    differences = [a[seed]["error"] - b[seed]["error"] for seed in seeds]
    spread = spread_of(differences)
    interval, verdict = interval_of(spread), "no interval: fewer than two common seeds"
    if spread["n"] == 1:
        verdict = verdict_of_one(differences[0], a[seeds[0]])
    elif interval:
        better = first if spread["mean"] < 0 else second
        verdict = "within noise" if interval[0] <= 0 <= interval[1] else f"{better} is better"
    pair = {"first": first, "second": second, "seeds": seeds, "differences": differences}
    return {**pair, **spread, "interval": interval, "verdict": verdict}


def verdict_of_one(difference: float, run: dict) -> str:
    """What to make of the difference between `run` and one other run, where the seeds of the paper can stand for ours."""
    stream = run["stream"].split(" (")[0]
    if stream not in ("full", "short") or run["phase"] != "meta_test" or run["partial"]:
        return "no interval: one seed"
    place = "within" if abs(difference) < SEED_NOISE else "beyond"
    return f"no interval: one seed; {place} {SEED_NOISE:.4f}, the noise of the paper's seeds"


def spread_of(values: list[float | None]) -> dict:
    mean = mean_of(values)
    sd = float(np.std(values, ddof=1)) if mean is not None and len(values) > 1 else None
    return {"n": len(values), "mean": mean, "sd": sd}


def spread_of_defined(values: list[float | None]) -> dict:
    """`spread_of` of those that are not None."""
    return spread_of([value for value in values if value is not None])


def interval_of(spread: dict) -> list[float] | None:
    """95 % interval of the mean of a `spread_of`: mean +- t sd / sqrt(n), Student's t of n - 1 degrees of freedom; or None."""
    if spread["sd"] is None:
        return None
    half = _T95[min(spread["n"] - 1, len(_T95)) - 1] * spread["sd"] / spread["n"] ** 0.5
    return [spread["mean"] - half, spread["mean"] + half]


def mean_and_sd(spread: dict) -> str:
    return shown(spread["mean"]) if spread["sd"] is None else f"{spread['mean']:.4f} ± {spread['sd']:.4f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; what would end a cell or a row is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(one_line(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in lines)
