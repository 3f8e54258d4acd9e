"""Results of `lifelong.evaluate` of several lifetimes side by side, and results as text."""

from __future__ import annotations

from textwrap import wrap

from nevis_lite.compare import interval_of, spread_of
from nevis_lite.metrics import columns, shown

# What a table calls the metrics, in its order.
SHORT = {"perf_maintenance_pooled": "PM", "perf_maintenance": "PM", "perf_maintenance_mrlep": "PM mrlep",
         "perf_maintenance_mrtlp": "PM mrtlp", "forward_transfer_contrast": "FT", "backward_transfer_contrast": "BT",
         "forward_transfer_ratio": "FT ratio", "backward_transfer_ratio": "BT ratio", "backward_transfer_task_average": "BT",
         "relative_performance": "RP", "ste_rel_perf": "RP", "sample_efficiency_count_based": "SE", "sample_efficiency": "SE",
         "perf_recovery": "PR", "avg_train_perf": "train", "avg_eval_perf": "test"}
MOST_REASONS = 20  # in a table


def across(lifetimes: dict[str, dict]) -> dict:
    """Several results of `evaluate`, {name: result}, side by side.

    "lifetime", "tasks" and "pairs" are as in each of them, but in place of a number, of a pair its first one, stands {"values",
    "n", "mean", "sd", "interval"}: over the n lifetimes that have it, None in "values" for the others, and Student's 95 %
    interval. "missing" and "notes" begin with the name of the lifetime; "each" holds the results.
    """
    numbers = [_flat(result) for result in lifetimes.values()]
    found = {"mode": next(iter(lifetimes.values()))["mode"], "names": list(lifetimes), "lifetime": {}, "tasks": {}, "pairs": {}}
    for path in dict.fromkeys(path for flat in numbers for path in flat):
        *branch, leaf = path
        place = found
        for key in branch:
            place = place.setdefault(key, {})
        place[leaf] = _spread([flat.get(path) for flat in numbers])
    missing = {f"{name}: {key}": why for name, result in lifetimes.items() for key, why in result["missing"].items()}
    notes = [f"{name}: {note}" for name, result in lifetimes.items() for note in result["notes"]]
    return {**found, "missing": missing, "notes": notes, "each": lifetimes}


def _flat(result: dict) -> dict[tuple[str, ...], float | None]:
    scalars = {("lifetime", metric): value for metric, value in result["lifetime"].items()}
    scalars |= {("tasks", task, metric): value for task, found in result["tasks"].items() for metric, value in found.items()
                if not isinstance(value, list | dict)}
    return scalars | {("pairs", metric, source, target): values[0] for metric, sources in result["pairs"].items()
                      for source, targets in sources.items() for target, values in targets.items()}


def _spread(values: list[float | None]) -> dict:
    spread = spread_of([value for value in values if value is not None])
    return {"values": values, **spread, "interval": interval_of(spread)}


def table(result: dict, title: str) -> str:
    """A result of `evaluate`, or of `across`, as text: lifetime, tasks, pairs, then what is missing."""
    several, pairs = "each" in result, result["pairs"]
    rows = [["metric", "", *(("mean", "sd", "95 % from", "to", "lifetimes") if several else ("value", "mean of"))]]
    for metric in sorted(result["lifetime"], key=list(SHORT).index):
        value = result["lifetime"][metric]
        cells = [value, result["counts"][metric]] if not several else [
            value["mean"], value["sd"], *(value["interval"] or (None, None)), value["n"]]
        rows.append([SHORT[metric], metric, *map(shown, cells[:-1]), str(cells[-1])])
    lines = [title, "", *columns(rows, left=(0, 1)), ""]

    kinds = [metric for metric in SHORT if metric not in pairs and any(metric in found for found in result["tasks"].values())]
    rows = [["task", *(SHORT[metric] for metric in kinds)]]
    rows += [[task, *(_cell(found.get(metric)) for metric in kinds)] for task, found in result["tasks"].items()]
    lines += columns(rows, left=(0,))
    named = dict.fromkeys((source, target) for sources in pairs.values() for source in sources for target in sources[source])
    rows = [["source -> target, first value", *(SHORT[metric] for metric in pairs)]]
    rows += [[f"{source} -> {target}", *(_cell(found.get(source, {}).get(target)) for found in pairs.values())]
             for source, target in named]
    lines += ["", *columns(rows, left=(0,))] if named else []

    reasons = {}
    for key, reason in result["missing"].items():
        reasons.setdefault(reason, []).append(key)
    missing = [f"{reason}: {', '.join(keys[:4])}{f' and {len(keys) - 4} more' if len(keys) > 4 else ''}"
               for reason, keys in reasons.items()]
    if len(missing) > MOST_REASONS:
        missing[MOST_REASONS:] = [f"{len(missing) - MOST_REASONS} reasons more, which --json lists"]
    for heading, texts in (("missing", missing), ("notes", result["notes"])):
        lines += ["", f"{heading}:"] if texts else []
        lines += [line for text in texts for line in wrap(text, 110, initial_indent="  ", subsequent_indent="    ")]
    return "\n".join(lines)


def _cell(value: float | list | dict | None) -> str:
    return shown(value["mean"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value)
