"""From the rows of a log to the curves that `lifelong` compares: smoothed, clamped, normalised, and cut into regimes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nevis_lite.config import UserError, option
from nevis_lite.lifelong_log import Log

WINDOWS = {"flat": np.ones, "hanning": np.hanning, "hamming": np.hamming, "bartlett": np.bartlett, "blackman": np.blackman}
ROUNDING = 1e-9  # of the largest value: where less than this decides, on a plateau, the last bits of a sum would
SCALE, OFFSET = 100.0, 1.0  # values are normalised to 1 ... 101, above 0 where quotients are undefined


@dataclass
class Settings:
    variant_mode: str = option("aware", "agnostic: variants a_1 and a_2 are one task, a", choices=("aware", "agnostic"))
    smoothing_method: str = option("flat", "window that smooths each training block, or none", choices=(*WINDOWS, "none"))
    window_length: int | None = option(None, "its experiences; none: a fifth of the block, 100 at most", low=1)
    do_smooth_eval_data: bool = option(False, "smooth evaluation blocks, too")
    clamp_outliers: bool = option(False, "cut values to data_range, else to the 10 % and 90 % quantiles of their task")
    normalization_method: str = option("task", "to 1...101 by the range of the task, of the whole run, or none",
                                       choices=("task", "run", "none"))
    data_range: dict | None = option(None, "{task: {min: 0, max: 1}, ...}; none: the lowest and highest value that occur")
    ste_averaging_method: str = option("metrics", "several experts of a task: mean of the metrics, or of the curves over time",
                                       choices=("metrics", "time"))
    aggregation_method: str = option("mean", "compat: mean or median over tasks or pairs", choices=("mean", "median"))
    maintenance_method: str = option("mrlep", "compat: against the evaluation after training (mrlep), its end (mrtlp), both",
                                     choices=("mrlep", "mrtlp", "both"))
    transfer_method: str = option("ratio", "compat: ratio, contrast or both", choices=("ratio", "contrast", "both"))


# ---- values ---------------------------------------------------------------------------------------------------------


def prepare(log: Log, experts: list[Log], settings: Settings) -> tuple[Log, list[Log], dict | None]:
    """Log and experts with values smoothed, clamped and normalised, in this order, and the range of each task, or None.

    Normalised is 1 + 100 (x - min) / (max - min), with min and max of the task over all its rows and its experts' training
    rows, or as in `data_range`; a constant task becomes 1. UserError if `data_range` is wrong.
    """
    given = _given_ranges(settings)
    if settings.variant_mode == "agnostic":
        log, *experts = (_without_variants(one) for one in [log, *experts])
    lacking = [task for task in log.tasks if task not in given] if given else []
    if lacking:
        raise UserError(f"data_range: names no range for {', '.join(lacking)}; the log needs {', '.join(log.tasks)}.")
    log, *experts = (replace(one, value=_smoothed(one, settings), notes=list(one.notes)) for one in [log, *experts])
    log.notes.extend(f"{expert.name}: {note}" for expert in experts for note in expert.notes)
    unused = sorted({task for expert in experts for task in expert.tasks} - set(log.tasks))
    if unused:
        log.notes.append(f"experts of tasks that the log does not name are not used: {', '.join(unused)}")
    if log.sleep.any() and not (log.sleep | log.train).all():
        log.notes.append("the log has sleep: PM, FT and BT leave out the evaluations that are awake")
    parts = {task: [(log.value, np.flatnonzero(log.task == i)), *((expert.value, expert.learned(task)) for expert in experts)]
             for i, task in enumerate(log.tasks)}
    ranges = {}
    for task in log.tasks:
        pool = np.concatenate([values[rows] for values, rows in parts[task]])
        if settings.clamp_outliers:
            low, high = given[task] if given else np.quantile(pool, (0.1, 0.9))
            for values, rows in parts[task]:
                values[rows] = values[rows].clip(low, high)
            pool = pool.clip(low, high)
        ranges[task] = given[task] if given else (float(pool.min()), float(pool.max()))
    if settings.normalization_method == "none":
        return log, experts, None
    lows, highs = zip(*(given or ranges).values(), strict=True)
    for task in log.tasks:
        low, high = ranges[task] if settings.normalization_method == "task" else (min(lows), max(highs))
        for values, rows in parts[task]:
            values[rows] = OFFSET + (values[rows] - low) / (high - low) * SCALE if high > low else OFFSET
        if high == low:
            log.notes.append(f"{task} is constant: its normalised values are all {OFFSET:g}")
    return log, experts, {task: {"min": low, "max": high} for task, (low, high) in (given or ranges).items()}


def _smoothed(log: Log, settings: Settings) -> np.ndarray:
    values, bounds = log.value.copy(), log.bounds()
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if log.train[start] or settings.do_smooth_eval_data:
            values[start:end] = smooth(values[start:end], settings.window_length, settings.smoothing_method)
    return values


def _without_variants(log: Log) -> Log:
    labels = [task.split("_")[0] for task in log.tasks]
    tasks = list(dict.fromkeys(labels))
    return replace(log, tasks=tasks, task=np.array([tasks.index(label) for label in labels])[log.task])


def _given_ranges(settings: Settings) -> dict[str, tuple[float, float]]:
    """{task: (min, max)} of `data_range`, of all variants together in agnostic mode; UserError."""
    given = {}
    for task, ends in (settings.data_range or {}).items():
        try:
            low, high = float(ends["min"]), float(ends["max"])
        except (TypeError, ValueError, KeyError):
            raise UserError(f"data_range of {task}: expected {{min: NUMBER, max: NUMBER}}, found {ends!r}.") from None
        if not -math.inf < low < high < math.inf:
            raise UserError(f"data_range of {task}: min must be below max, found {ends!r}.")
        task = str(task).lower()
        label = task.split("_")[0] if settings.variant_mode == "agnostic" else task
        lowest, highest = given.get(label, (low, high))
        given[label] = min(low, lowest), max(high, highest)
    return given


# ---- curves ---------------------------------------------------------------------------------------------------------


def smooth(values: np.ndarray, window_length: int | None = None, method: str = "flat") -> np.ndarray:
    """Weighted means over a window of w = `window_length` experiences, as many as there are `values` (n,).

    Without a length, or when it is above n, w is a fifth of n, 100 at most; for w < 3 the values themselves. The ends are
    reflected. Value i is centred on i - 1 for odd w and on i - 1/2 for even w: a flat w = 3 is the mean of i - 2, i - 1 and i.
    """
    n, w = len(values), window_length
    if w is None or n < w:
        w = min(n // 5, 100)
    if w < 3 or method == "none":
        return values
    window = WINDOWS[method](w)
    means = np.convolve(np.pad(values, w - 1, mode="reflect"), window / window.sum(), mode="valid")
    return means[w // 2 - 1 :][:n]


def experience_means(values: np.ndarray, exp: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Means of the neighbours that share an experience number (E,), index among them of each row in `starts`).

    Several workers may log one experience. Nothing is averaged across the rows `starts`. `values` and `exp` (N,).
    """
    first = np.union1d(np.flatnonzero(np.diff(exp)) + 1, starts).astype(int)
    means = np.add.reduceat(values, first) / np.diff(np.append(first, len(values)))
    return means, np.searchsorted(first, starts)


def terminal_performance(means: np.ndarray, train: bool) -> float:
    """Mean over an evaluation regime, or over the last tenth of a training regime; `means` (E,) by experience."""
    last = means[len(means) * 9 // 10 if train else 0 :]
    return float(last.sum()) / len(last)


def saturation(means: np.ndarray) -> tuple[float, int]:
    """(Maximum of the flat moving average, its first index from 0); `means` (E,)."""
    curve = smooth(means)
    top = float(curve.max())
    return top, int(np.argmax(curve >= top - ROUNDING * abs(curve).max()))


def recovery_time(means: np.ndarray, threshold: float) -> int | None:
    """Index of the first experience at `threshold` or above, None if there is none. `means` (E,)."""
    reached = means >= threshold - ROUNDING * abs(means).max()
    return int(np.argmax(reached)) if reached.any() else None


@dataclass
class Regime:
    """Consecutive rows of one block, type and task, `length` of them with the mean `mean`; `means` (E,) by experience.

    `counts` is False for an evaluation that is awake in a log with sleep: maintenance and transfer leave it out.
    """

    number: int
    block: int
    task: str
    train: bool
    sleep: bool
    length: int
    mean: float
    means: np.ndarray
    terminal: float
    counts: bool


def regimes_of(log: Log) -> list[Regime]:
    bounds = log.bounds()
    starts, lengths = bounds[:-1], np.diff(bounds)
    means, edges = experience_means(log.value, log.exp, starts)
    edges = [*edges.tolist(), len(means)]
    row_means = (np.add.reduceat(log.value, starts) / lengths).tolist()
    tasks, blocks, trains, sleeps = (column[starts].tolist() for column in (log.task, log.block, log.train, log.sleep))
    awake = not log.sleep.any()
    found = []
    for number, length in enumerate(lengths.tolist()):
        train, sleep, series = trains[number], sleeps[number], means[edges[number] : edges[number + 1]]
        found.append(Regime(number, blocks[number], log.tasks[tasks[number]], train, sleep, length, row_means[number], series,
                            terminal_performance(series, train), train or sleep or awake))
    return found


def recovery_times(regimes: list[Regime]) -> list[int]:
    """Of each training of one task after its first: the experiences, from 0, until it is as good as at the end of the training
    before; if it never is, one more than it has rows.
    """
    trainings = [regime for regime in regimes if regime.train and not regime.sleep]
    times = [(recovery_time(after.means, before.terminal), after.length + 1) for before, after in pairwise(trainings)]
    return [never if time is None else time for time, never in times]
