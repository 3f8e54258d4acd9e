"""Results of `lifelong.evaluate` of several lifetimes side by side, and results as text."""

from __future__ import annotations

from textwrap import wrap

from nevis_lite.compare import interval_of, spread_of_defined
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
    spread = spread_of_defined(values)
    return {"values": values, **spread, "interval": interval_of(spread)}


def metric_rows(result: dict) -> list[list]:
    """A header, and a row for each metric of the lifetime, from a result of `evaluate` or of `across`."""
    several = "each" in result
    rows = [["metric", "in full", *(("mean", "sd", "95 % from", "to", "lifetimes") if several else ("value", "mean of"))]]
    for metric in sorted(result["lifetime"], key=list(SHORT).index):
        value = result["lifetime"][metric]
        cells = [value["mean"], value["sd"], *(value["interval"] or (None, None)), value["n"]] if several else [
            value, result["counts"][metric]]
        rows.append([SHORT[metric], metric, *cells])
    return rows


def task_rows(result: dict) -> list[list]:
    """The same of the tasks."""
    kinds = [metric for metric in SHORT
             if metric not in result["pairs"] and any(metric in found for found in result["tasks"].values())]
    return [["task", *(SHORT[metric] for metric in kinds)],
            *([task, *(_first(found.get(metric)) for metric in kinds)] for task, found in result["tasks"].items())]


def pair_rows(result: dict) -> list[list]:
    """The same of the pairs of tasks that have a transfer; only the header without any."""
    pairs = result["pairs"]
    named = dict.fromkeys((source, target) for sources in pairs.values() for source in sources for target in sources[source])
    return [["source -> target, first value", *(SHORT[metric] for metric in pairs)],
            *([f"{source} -> {target}", *(_first(found.get(source, {}).get(target)) for found in pairs.values())]
              for source, target in named)]


def reasons(result: dict) -> list[str]:
    """Why numbers are missing, each reason once with the first of its numbers."""
    keys_of = {}
    for key, reason in result["missing"].items():
        keys_of.setdefault(reason, []).append(key)
    missing = [f"{reason}: {', '.join(keys[:4])}{f' and {len(keys) - 4} more' if len(keys) > 4 else ''}"
               for reason, keys in keys_of.items()]
    if len(missing) > MOST_REASONS:
        missing[MOST_REASONS:] = [f"{len(missing) - MOST_REASONS} reasons more, which --json lists"]
    return missing


def table(result: dict, title: str) -> str:
    """A result of `evaluate`, or of `across`, as text: lifetime, tasks, pairs, then what is missing."""
    lines = [title, "", *_text(metric_rows(result), left=(0, 1)), "", *_text(task_rows(result), left=(0,))]
    pairs = pair_rows(result)
    lines += ["", *_text(pairs, left=(0,))] if len(pairs) > 1 else []
    for heading, texts in (("missing", reasons(result)), ("notes", result["notes"])):
        lines += ["", f"{heading}:"] if texts else []
        lines += [line for text in texts for line in wrap(text, 110, initial_indent="  ", subsequent_indent="    ")]
    return "\n".join(lines)


def _text(rows: list[list], left: tuple[int, ...]) -> list[str]:
    return columns([[cell if isinstance(cell, str) else shown(cell, "d" if isinstance(cell, int) else ".4f") for cell in row]
                    for row in rows], left)


def _first(value: float | list | dict | None) -> float | None:
    return value["mean"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value
