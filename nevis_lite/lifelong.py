"""The Lifelong Learning Metrics (arXiv 2201.08278): does a learner keep what it has learned, and does one task help another?

`python -m nevis_lite.lifelong LOG... [--ste STE...]` for logs in files, `evaluate(rows, experts)` for rows in memory. Mode
"paper" is what the paper defines, mode "compat" what the package l2metrics 3.1.0 computes. Inside of this module a metric is a
float, or a str that says why there is none; results have None in its place, and the reason in "missing". Numpy only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise

import numpy as np

from nevis_lite import config
from nevis_lite.config import UserError
from nevis_lite.lifelong_curves import Regime, Settings, experience_means, prepare, recovery_times, regimes_of, saturation
from nevis_lite.lifelong_log import COLUMNS, KINDS, Log, from_experts, from_rows, read
from nevis_lite.lifelong_report import across, table

MODES = ("paper", "compat")
NEGATIVE = "negative performances have no meaningful quotient: normalise, or give a data_range that covers all values"
NEVER = "never trained"
NO_FORWARD = "no other task is trained between two evaluations in a row before the task's own first training"
NO_BACKWARD = NO_FORWARD.replace("before", "after")
MOST_RECOVERIES = 2000  # of a task, since the slope between them is a median over all pairs


# ---- the formulas ---------------------------------------------------------------------------------------------------


def contrast(new: float, old: float) -> float | str:
    """(new - old) / (new + old), the paper's transfer: in [-1, 1] for values that are not negative, 0 without transfer."""
    return _quotient(new - old, new + old, "the evaluations before and after add up to 0")


def ratio(new: float, old: float) -> float | str:
    """new / old, the package's transfer: 1 without transfer."""
    return _quotient(new, old, "the evaluation before is 0")


def relative_performance(own: np.ndarray, expert: np.ndarray) -> float | str:
    """Sum of the learner's values over that of the expert's, both cut to the shorter one (n,): above 1 for a better learner."""
    n = min(len(own), len(expert))
    return _quotient(float(own[:n].sum()), float(expert[:n].sum()), "the expert's values add up to 0")


def sample_efficiency(own: tuple[float, int], expert: tuple[float, int], first: int) -> float | str:
    """(sat_own / sat_expert) (n_expert / n_own) of two `saturation`s, n = index + `first`: above 1 for a faster learner."""
    height = _quotient(own[0], expert[0], "the expert saturates at 0")
    speed = _quotient(expert[1] + first, own[1] + first, "the learner is at its best from the first experience on")
    return height if isinstance(height, str) else speed if isinstance(speed, str) else height * speed


def performance_recovery(times: list[int]) -> float | str:
    """- (median slope between any two of the recovery times 0, 1, 2, ...): above 0 if a task recovers faster and faster."""
    if len(times) < 2:
        return "needs two recovery times, so three training blocks"
    if len(times) > MOST_RECOVERIES:
        return f"more than {MOST_RECOVERIES} recovery times"
    i, j = np.triu_indices(len(times), k=1)
    times = np.asarray(times, float)
    return -float(np.median((times[j] - times[i]) / (j - i)))


def _quotient(a: float, b: float, reason: str) -> float | str:
    value = a / b if b else math.inf
    return value if math.isfinite(value) else reason


# ---- what is compared -----------------------------------------------------------------------------------------------


def maintenance(regimes: list[Regime]) -> dict[str, list[list[float]]]:
    """{"mrlep": runs of maintenance values, "mrtlp": ...} of the `regimes` of one task, in order.

    A value is the terminal performance of an evaluation minus that of the first evaluation after the latest training (mrlep, as
    in the paper), or minus that of the end of this training (mrtlp). Below 0 the task is being forgotten.
    """
    values, trained, reference, fresh = {"mrlep": [[]], "mrtlp": [[]]}, None, None, False
    for regime in regimes:
        if regime.train:
            trained, fresh = regime.terminal, True
        elif regime.counts and fresh:
            reference, fresh = regime.terminal, False
        elif regime.counts and trained is not None:
            values["mrlep"][-1].append(regime.terminal - reference)
            values["mrtlp"][-1].append(regime.terminal - trained)
            continue
        for runs in values.values():
            runs.append([])
    return {method: [run for run in runs if run] for method, runs in values.items()}


def transfers(regimes: list[Regime], mode: str) -> Iterator[tuple[str, str, str, float, float, str | None]]:
    """Yields (kind, source, target, new, old, problem) where `source` is trained between two evaluations in a row of `target`.

    kind is "forward" before the first training of the target, else "backward"; old and new are the terminal performances. In
    mode paper, `problem` says why a value does not count: exactly one training must lie in between, and of another task. Mode
    compat takes whatever lies in between; of several sources of a kind, only the one that the log names last.
    """
    trainings = [regime for regime in regimes if regime.train]
    numbers = [regime.number for regime in trainings]
    named, first_training, evaluations = {}, {}, defaultdict(list)
    for regime in regimes:
        named.setdefault(regime.task, regime.number)
        if regime.train:
            first_training.setdefault(regime.task, regime.number)
        elif regime.counts:
            evaluations[regime.task].append(regime)
    for target, tests in evaluations.items():
        first = first_training.get(target, math.inf)
        for before, after in pairwise(tests):
            between = trainings[bisect(numbers, before.number) : bisect(numbers, after.number)]
            sources = dict.fromkeys(("forward" if regime.number < first else "backward", regime.task) for regime in between
                                    if regime.task != target)
            problem = None
            if mode == "compat":  # a later source takes the place of an earlier one of its kind
                sources = dict(sorted(sources, key=lambda pair: named[pair[1]])).items()
            elif len(between) > 1:
                what = f"{target}, too, was" if any(regime.task == target for regime in between) else "several blocks were"
                problem = f"{what} trained between its evaluations in blocks {before.block} and {after.block}"
            elif min(before.terminal, after.terminal) < 0:
                problem = NEGATIVE
            for kind, source in sources:
                yield kind, source, target, after.terminal, before.terminal, problem


def against_experts(log: Log, experts: list[Log], task: str, time: bool, mode: str) -> dict:
    """Relative performance ("rp") and sample efficiency ("se") of a task, each a mean over its experts' runs, with their parts.

    `time` first averages the runs, cut to the shortest, at each experience. Mode paper counts experiences from 1. Mode compat
    counts from 0, and leaves out an expert that is at its best at once; efficiency is 0 for a learner that stays below a fifth
    of the expert, or whose values fall over the experiences.
    """
    own = log.learned(task)
    runs = [(expert.value[rows], expert.exp[rows]) for expert in experts if len(rows := expert.learned(task))]
    if not len(own) or not runs:
        reason = "no log of its single-task expert" if len(own) else "never trained, but in sleep" if log.sleep.any() else NEVER
        return {"rp": reason, "se": reason, "rp_values": [], "se_values": [], "top": (None, None), "expert_tops": []}
    if time:
        n = min(len(values) for values, _ in runs)
        runs = [(np.mean([values[:n] for values, _ in runs], axis=0), np.arange(n))]
    y, exp = log.value[own], log.exp[own]
    top, *tops = (saturation(experience_means(*run, [0])[0]) for run in [(y, exp), *runs])
    falls = np.dot(exp - exp.mean(), y - y.mean()) < 0  # the slope of the line through the values
    rp, se = [], []
    for (x, _), other in zip(runs, tops, strict=True):
        performance, efficiency = relative_performance(y, x), sample_efficiency(top, other, first=1 if mode == "paper" else 0)
        if mode == "paper":
            performance = NEGATIVE if min(y[: len(x)].sum(), x[: len(y)].sum()) < 0 else performance
            efficiency = NEGATIVE if min(top[0], other[0]) < 0 else efficiency
        elif top[1] and not other[1]:
            efficiency = "its expert is at its best from the first experience on"
        elif top[1] and (falls or top[0] < 0.2 * other[0]):
            efficiency = 0.0
        rp.append(performance)
        se.append(efficiency)
    return {"rp": _average(rp), "se": _average(se), "rp_values": _numbers(rp), "se_values": _numbers(se), "top": top,
            "expert_tops": tops}


# ---- one lifetime ---------------------------------------------------------------------------------------------------


def evaluate(rows: list | Log, experts: dict | list[Log] | None = None, mode: str = "paper", **settings) -> dict:
    """The metrics of one lifetime; UserError on bad input.

    `rows`: tuples (block_num, block_type, task, exp_num, value[, block_subtype]), dicts with these keys, or a log from
    `lifelong_log.read`. `experts`: {task: [values]}, {task: [[values of run 1], ...]}, or logs. `settings`: fields of
    `lifelong_curves.Settings`. Returns {"mode", "lifetime": {metric: value}, "counts": {metric: number of values in its mean},
    "tasks": {task: {metric: value or list}}, "pairs": {metric: {source: {target: [values in order of time]}}}, "missing":
    {"metric", "task: metric" or "source -> target: metric": why it is None, or why a value was left out},
    "normalization_data_range", "notes"}.
    """
    if mode not in MODES:
        raise UserError(f"mode cannot be {mode!r}{config.nearest(str(mode), MODES)}.")
    chosen = Settings()
    config.fill(chosen, settings, "settings")
    log = rows if isinstance(rows, Log) else from_rows(rows)
    logs = from_experts(experts or {}) if isinstance(experts, dict | None) else experts
    log, logs, ranges = prepare(log, logs, chosen)
    regimes = regimes_of(log)
    pairs, missing = _pairs(regimes, mode, chosen.transfer_method)
    values, tasks = (_paper if mode == "paper" else _compat)(log, logs, regimes, pairs, missing, chosen)
    for metric, sources in pairs.items():
        first = [numbers[0] for targets in sources.values() for numbers in targets.values()]
        values[metric] = first or _reasons(missing, metric)

    average = np.median if mode == "compat" and chosen.aggregation_method == "median" else np.mean
    lifetime = {metric: _average(found, average) for metric, found in values.items()}
    counts = {metric: len(_numbers(found)) for metric, found in values.items()}
    for place, found in (("", lifetime), *((f"{task}: ", found) for task, found in tasks.items())):
        for metric, value in found.items():
            if isinstance(value, str):
                missing[f"{place}{metric}"], found[metric] = value, None
    return {"mode": mode, "lifetime": lifetime, "counts": counts, "tasks": tasks, "pairs": pairs, "missing": missing,
            "normalization_data_range": ranges, "notes": log.notes}


def _pairs(regimes: list[Regime], mode: str, method: str) -> tuple[dict, dict]:
    """({metric: {source: {target: values}}}, {"source -> target: metric": why a value was left out})."""
    functions = {"contrast": contrast} if mode == "paper" else {
        name: function for name, function in (("ratio", ratio), ("contrast", contrast)) if method in (name, "both")}
    pairs = {f"{kind}_transfer_{name}": {} for name in functions for kind in ("forward", "backward")}
    reasons = {}
    for kind, source, target, new, old, problem in transfers(regimes, mode):
        for name, function in functions.items():
            metric, value = f"{kind}_transfer_{name}", problem or function(new, old)
            if isinstance(value, str):
                reasons.setdefault(f"{source} -> {target}: {metric}", value)
            else:
                pairs[metric].setdefault(source, {}).setdefault(target, []).append(value)
    return pairs, reasons


def _paper(log: Log, experts: list[Log], regimes: list[Regime], pairs: dict, missing: dict, settings: Settings):
    """({metric: values that the lifetime averages over}, tasks) without the transfer of `pairs`, as the paper defines them."""
    tasks, pooled = {}, []
    for task, own in _by_task(log, regimes).items():
        kept = [*chain(*maintenance(own)["mrlep"])] or [_why_no_maintenance(own)]
        backward = [value for targets in pairs["backward_transfer_contrast"].values() for value in targets.get(task, [])]
        learned = against_experts(log, experts, task, settings.ste_averaging_method == "time", "paper")
        pooled += kept
        tasks[task] = {
            "perf_maintenance": _average(kept),
            "backward_transfer_task_average": _average(backward or _reasons(missing, f"{task}: backward_transfer_contrast")),
            "relative_performance": learned["rp"],
            "sample_efficiency_count_based": learned["se"],
            **_sizes(own),
        }
    values = {"perf_maintenance_pooled": pooled}
    for metric in ("relative_performance", "sample_efficiency_count_based"):
        values[metric] = [found[metric] for found in tasks.values()]
    return values, tasks


def _compat(log: Log, experts: list[Log], regimes: list[Regime], pairs: dict, missing: dict, settings: Settings):
    """The same, with the metrics and the names of l2metrics 3.1.0."""
    methods = [method for method in ("mrlep", "mrtlp") if settings.maintenance_method in (method, "both")]
    by_task = _by_task(log, regimes)
    recoveries = {task: recovery_times(own) for task, own in by_task.items()}
    if sum(map(len, recoveries.values())) < 2:
        recoveries = dict.fromkeys(by_task, [])
    tasks = {}
    for i, (task, own) in enumerate(by_task.items()):
        rows = log.value[log.task == i]
        trained = [regime.mean for regime in own if regime.train]
        tested = [regime.mean for regime in own if not regime.train and regime.counts]
        kept = maintenance(own)
        learned = against_experts(log, experts, task, settings.ste_averaging_method == "time", "compat")
        (height, index), tops = learned["top"], [(top, at) for top, at in learned["expert_tops"] if at and learned["top"][1]]
        tasks[task] = {
            "perf_recovery": performance_recovery(recoveries[task]),
            "avg_train_perf": _average(trained or [NEVER]),
            "avg_eval_perf": _average(tested or ["never evaluated"]),
            **{f"perf_maintenance_{method}": _average([*chain(*kept[method])] or [_why_no_maintenance(own)])
               for method in methods},
            "ste_rel_perf": learned["rp"],
            "sample_efficiency": learned["se"],
        }
        averaged = tuple(tasks[task])
        tasks[task] |= {
            **{metric: sources.get(task, {}) for metric, sources in pairs.items()},
            "recovery_times": recoveries[task],
            "avg_train_perf_vals": trained,
            "avg_eval_perf_vals": tested,
            **{f"maintenance_val_{method}": kept[method] for method in methods},
            "ste_rel_perf_vals": learned["rp_values"],
            "sample_efficiency_vals": learned["se_values"],
            "ste_saturation_vals": [top for top, _ in tops],
            "ste_exp_to_sat_vals": [at for _, at in tops],
            "se_saturation_vals": [_quotient(height, top, None) for top, _ in tops],
            "se_exp_to_sat_vals": [at / index for _, at in tops],
            "se_task_saturation": height if index else None,
            "se_task_exp_to_sat": index or None,
            "min": float(rows.min()),
            "max": float(rows.max()),
            **_sizes(own),
        }
    return {metric: [found[metric] for found in tasks.values()] for metric in averaged}, tasks


def _by_task(log: Log, regimes: list[Regime]) -> dict[str, list[Regime]]:
    found = {task: [] for task in log.tasks}
    for regime in regimes:
        found[regime.task].append(regime)
    return found


def _sizes(own: list[Regime]) -> dict[str, int]:
    return {"num_lx": sum(regime.length for regime in own if regime.train),
            "num_ex": sum(regime.length for regime in own if not regime.train)}


def _why_no_maintenance(own: list[Regime]) -> str:
    if not any(regime.train for regime in own):
        return NEVER
    return "not evaluated again after the first evaluation that follows its training"


def _reasons(missing: dict[str, str], end: str) -> list[str]:
    """Why there is no transfer: of the pairs in `missing` whose keys end in `end`, which is or ends in a metric."""
    return [why for key, why in missing.items() if key.endswith(end)] or [NO_FORWARD if "forward" in end else NO_BACKWARD]


def _average(values: list[float | str], average: Callable = np.mean) -> float | str:
    """Over those that are numbers; without any, the reasons."""
    return float(average(_numbers(values))) if _numbers(values) else "; ".join(list(dict.fromkeys(values))[:3])


def _numbers(values: list[float | str]) -> list[float]:
    return [value for value in values if not isinstance(value, str)]


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use or bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.lifelong", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""The Lifelong Learning Metrics (arXiv 2201.08278) of a log: performance maintenance (PM), forward and
backward transfer (FT, BT), relative performance (RP) and sample efficiency (SE). Several logs: mean and interval.""",
        epilog=f"""A log is {KINDS}, with the columns
  {", ".join(COLUMNS)} and, if there is any, block_subtype (wake or sleep):
  a row for each experience; block_type is train or test; exp_num grows over the whole log; value is better when higher.

keys, with their defaults:
{config.describe(Settings())}

example: python -m nevis_lite.lifelong seed0.csv seed1.csv --ste experts/*.csv
         python -m nevis_lite.lifelong log.csv --json "data_range={{a: {{min: 0, max: 1}}, b: {{min: 0, max: 1}}}}\"""")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="the log of a lifetime; key=value among them is a setting")
    parser.add_argument("--ste", nargs="+", action="extend", default=[], metavar="STE",
                        help="logs of single-task experts; several of a task are several runs")
    parser.add_argument("--mode", choices=MODES, default="paper", help="as the paper, or as l2metrics 3.1.0 (default: paper)")
    parser.add_argument("--value", metavar="NAME", help="column of the performance (default: value; an l2logger's only one)")
    parser.add_argument("--json", action="store_true", help="print JSON: all values, counts and reasons")
    arguments = parser.parse_intermixed_args(argv)
    settings = [word for word in (*arguments.logs, *arguments.ste) if "=" in word and not os.path.exists(word)]
    logs, experts = ([word for word in words if word not in settings] for words in (arguments.logs, arguments.ste))
    try:
        chosen = Settings()
        config.override(chosen, settings)
        for words, kind in ((logs, "LOG"), (experts, "STE")):
            twice = [word for word in words if words.count(word) > 1]
            if twice:
                raise UserError(f"{twice[0]}: is named twice as {kind}.")
        if not logs:
            raise UserError("No LOG is named; --help shows an example.")
        runs = [read(path, arguments.value) for path in experts]
        results = {path: evaluate(read(path, arguments.value), runs, arguments.mode, **vars(chosen)) for path in logs}
        result = results[logs[0]] if len(logs) == 1 else across(results)
        title = f"{logs[0] if len(logs) == 1 else f'{len(logs)} lifetimes'}, mode {arguments.mode}"
        print(json.dumps(result, indent=1, allow_nan=False) if arguments.json else table(result, title), flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stdout = None
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
