"""The numbers of NEVIS'22 (arXiv 2211.11747): error of a task, mean error and compute of a stream, runs side by side.

Only numpy is needed, so that a run can be read anywhere, also while it goes on: `python -m nevis_lite.metrics RUN...`.
"""

import argparse
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np

# Keys of a run, of a row of its tasks and of one of its trials, and the types of their values.
RUN_KEYS = {"name": str, "stream": str, "phase": str, "baseline": str, "seed": int, "trials": int, "steps": int,
            "partial": list, "tasks": list}
TASK_KEYS = {"index": int, "task": str, "name": str | None, "year": int, "occurrence": int, "domain": str | None, "kind": str,
             "num_classes": int, "num_train": int | None, "resolution": int | float | None, "meta": str,
             "error": int | float | None, "source": int | str | None, "auxiliaries": list, "scores": dict,
             "hyperparameters": dict, "flops": dict, "curve": list}
TRIAL_KEYS = {"task": int, "trial": int, "error": int | float | None, "hyperparameters": dict, "curve": list}
OPTIONAL = {"cflop_pretraining": int | float | None, "dev_error": int | float | None, "labels_left_out": int | None,
            "reason": str | None}
CONTENTS = {"flops": int | float, "scores": int | float | None, "hyperparameters": str | int | float | None}  # of dicts
NUMBERS = dict.fromkeys(("lr", "label_smoothing"), int | float | None)  # hyper-parameters that tables and pictures count on


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


def mean_average_precision(
    scores: np.ndarray, labels: np.ndarray, map_zero: bool = False
) -> tuple[float | None, int]:
    """(mAP, number of classes without a positive example): the mean of `average_precision` over the other classes.

    `scores` (N, C), `labels` (N, C), 0 or 1. mAP is None when no class has a positive example. A class without one is
    left out; `map_zero` counts it as 0, as scikit-learn and the reference do. Raises ValueError as `average_precision` does.
    """
    scores, labels = _checked(scores, labels, 2, 2)
    values = [average_precision(scores[:, c], labels[:, c]) for c in range(scores.shape[1])]
    defined = [value for value in values if value is not None]
    undefined = len(values) - len(defined)
    return mean_of(defined + [0.0] * undefined if map_zero else defined), undefined


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
    """The content of `results.json` in the folder of a run, with its summary made anew from the rows.

    Of a run that goes on or was stopped: what its finished tasks give so far, with "unfinished": {"done", "planned"}, numbers
    of tasks; its mean errors are None, with a "reason", since they'd be over other tasks than those of the whole run. What is
    NaN in a file is None here. FileNotFoundError when there is no run; ValueError, one sentence, when its files make no sense.
    """
    path = Path(run_dir) / "results.json"
    if not path.is_file():
        return _load_unfinished(Path(run_dir))
    results = _parsed(text_of(path), path)
    _check(results, path)
    return results | summarise(results["tasks"], results["phase"])


def _load_unfinished(folder: Path) -> dict:
    path, rows = folder / "environment.json", folder / "tasks.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"No run in {folder}: it holds neither a results.json nor an environment.json.")
    begun = _parsed(text_of(path), path)
    if not isinstance(begun.get("head"), dict) or not isinstance(begun.get("planned"), int):
        raise ValueError(f"{path}: does not say what run this is; when it has been finished (--resume), results.json will.")
    tasks = rows_of(rows)
    results = {"name": folder.resolve().name, **begun["head"], "tasks": tasks}
    _check(results, rows)
    return results | summarise(tasks, results["phase"]) | {
        "error": None, "error_all": None, "unfinished": {"done": len(tasks), "planned": begun["planned"]},
        "reason": f"unfinished: {len(tasks)} of {begun['planned']} tasks are done"}


def trials_of(folder: str | Path) -> list[dict]:
    """The rows of `trials.jsonl`, a training each; raises as `rows_of`, also where a row is not of a training."""
    path = Path(folder) / "trials.jsonl"
    rows = rows_of(path)
    for count, row in enumerate(rows, start=1):
        _check_row(row, TRIAL_KEYS, f"{path}, line {count}")
    return rows


def rows_of(path: Path) -> list[dict]:
    """The rows of a `tasks.jsonl` or `trials.jsonl`, none if there's no such file; ValueError where one is damaged."""
    lines = text_of(path).split("\n")[:-1] if path.is_file() else []  # the last one may be half written
    return [_parsed(line, f"{path}, line {count}") for count, line in enumerate(lines, start=1)]


def text_of(path: Path) -> str:
    """What a file of a run holds; ValueError if it's no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: damaged, or no text ({error}).") from None


def _parsed(text: str, where: Path | str) -> dict:
    try:
        content = json.loads(text, parse_constant=lambda name: None)  # NaN and infinities
    except ValueError as error:
        raise ValueError(f"{where}: damaged, or no JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where}: holds no JSON object.")
    return content


def _check(results: dict, path: Path) -> None:
    _check_types(results, RUN_KEYS, f"{path}: is not of a run (lifelong reads logs, fluid_metrics runs of FLUID): it")
    if not all(isinstance(row, dict) for row in results["tasks"]):
        raise ValueError(f"{path}: its tasks are no list of rows.")
    seen = set()
    for count, row in enumerate(results["tasks"], start=1):
        _check_row(row, TASK_KEYS, f"{path}: row {count} of the tasks")
        if row["index"] in seen:
            raise ValueError(f"{path}: has two rows of task {row['index']} ({row['name']}); remove the one that is wrong.")
        seen.add(row["index"])


def _check_row(row: dict, types: dict, where: str) -> None:
    _check_types(row, types, where)
    for key, kind in CONTENTS.items():
        if key in types:
            needed = {"train": kind} if key == "flops" else {}
            numbers = {name: kind for name, kind in NUMBERS.items() if key == "hyperparameters" and name in row[key]}
            _check_types(row[key], needed | dict.fromkeys(row[key], kind) | numbers, f"{where}, {key}:")
    if not all(isinstance(point, list) and len(point) == 2 and isinstance(point[0], int)
               and isinstance(point[1], int | float | None) for point in row["curve"]):
        raise ValueError(f"{where}: its curve is no list of [step, error].")


def _check_types(found: dict, types: dict, where: str) -> None:
    lacking = [key for key in types if key not in found]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(lacking)}.")
    for key, kind in (types | OPTIONAL).items():
        if not isinstance(found.get(key), kind):
            raise ValueError(f"{where} has {found[key]!r} for {key}.")


def with_reference_map(results: dict) -> dict:
    """A run as the reference counts mAP, where a class without a positive example has a precision of 0.

    With U ("labels_left_out") of C classes without one, a multi-label error e becomes 1 - (1 - e) (C - U) / C.
    """
    tasks = [{**task, **_reference_map(task)} if task["kind"] == "multi_label" else task for task in results["tasks"]]
    summary = {} if "unfinished" in results else summarise(tasks, results["phase"])
    return {**results, **summary, "tasks": tasks}


def _reference_map(task: dict) -> dict:
    if task["error"] is None:
        return {}
    if "labels_left_out" not in task:
        return {"error": None, "reason": "its row does not say how many labels were left out of the mAP"}
    return {"error": 1 - (1 - task["error"]) * (1 - task["labels_left_out"] / task["num_classes"])}


def summarise(tasks: list[dict], phase: str) -> dict:
    """The summary of a run from its rows in `results.json` (paper, Eq. 1-2 and Algorithm 1).

    "error": mean error over the meta-test tasks, or over all in phase "meta_train" or when there is no meta-test task;
    "error_all": mean over all tasks; "cflop": FLOPs of all tasks and phases; "cflop_paper": only of training, as the
    paper counts. Every task weighs the same. A mean is None when there is no task or the error of one is undefined.
    """
    return {
        "error": mean_of([task["error"] for task in judged_tasks(tasks, phase)]),
        "error_all": mean_of([task["error"] for task in tasks]),
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
    tasks = results["tasks"]
    names = {task["index"]: name_of(task) for task in tasks}
    header = ["#", "year", "task", "", "classes", "train", "start", "lr", "smooth", "error", "compute"]
    rows = columns([header, *(_row(task, names) for task in tasks)], left=(2, 6))

    unfinished = results.get("unfinished")
    marks = [f"PARTIAL: missing {', '.join(results['partial'])}"] if results["partial"] else []
    marks += ["UNFINISHED: {done} of {planned} tasks are done".format(**unfinished)] if unfinished else []
    marks = [line for mark in marks for line in textwrap.wrap(mark, 110)]
    return "\n".join([*marks, *rows, "", *(f"{label:<42}{value}" for label, value in totals(results))])


def totals(results: dict) -> list[tuple[str, str]]:
    """What stands below the tasks of a run: (label, value) of its mean errors and of its compute."""
    tasks, phase, unfinished = results["tasks"], results["phase"], results.get("unfinished")
    summary, judged = summarise(tasks, phase), judged_tasks(tasks, phase)
    mean = "partial mean" if results["partial"] else "mean so far" if unfinished else "mean error"
    ends = [(f"{mean}, all tasks ({len(tasks)})", shown(summary["error_all"]))]
    if judged is not tasks:
        ends.insert(0, (f"{mean}, meta-test tasks * ({len(judged)})", shown(summary["error"])))
    ends.append(("compute, training only (as in the paper)", human(summary["cflop_paper"])))
    ends.append(("compute, all phases", human(summary["cflop"])))
    if results.get("cflop_pretraining"):
        ends.append(("compute of the pretrained weights, beside", human(results["cflop_pretraining"])))
    return ends


def columns(rows: list[list[str]], left: tuple[int, ...]) -> list[str]:
    """Rows of cells as lines with aligned columns: those in `left`, names, to the left, and numbers to the right."""
    rows = [list(map(one_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join(f"{{:{'<' if i in left else '>'}{width}}}" for i, width in enumerate(widths))
    return [template.format(*row) for row in rows]


def one_line(text: str) -> str:
    """A cell of a table; names may hold line breaks."""
    return " ".join(text.splitlines())


def _row(task: dict, names: dict[int, str]) -> list[str]:
    found = task["hyperparameters"]
    return [
        str(task["index"]),
        str(task["year"]),
        names[task["index"]][:22],
        "*" if task["meta"] == "test" else "",
        str(task["num_classes"]),
        str(task["num_train"]),
        origin(task["source"], names)[:18],
        shown(found.get("lr"), ".2g"),
        shown(found.get("label_smoothing"), ".2f"),
        shown(task["error"]),
        human(sum(task["flops"].values())),
    ]


def origin(source: int | str | None, names: dict[int, str]) -> str:
    """An earlier task by its number and name, since two may share a name; or "scratch" or "pretrained"."""
    return "scratch" if source is None else f"{source} {names[source]}" if source in names else str(source)


def judged_tasks(tasks: list[dict], phase: str) -> list[dict]:
    """The tasks whose mean error is the result of the run."""
    return [task for task in tasks if phase == "meta_test" and task["meta"] == "test"] or tasks


def by_identity(tasks: list[dict]) -> dict[tuple, dict]:
    """{what tells a task in any order of its stream: its row}. An index doesn't, nor does an occurrence.

    Two folders of the user's that share a name and a year are told apart by their order.
    """
    seen, found = Counter(), {}
    for task in tasks:
        identity = task["task"], name_of(task), task["year"]
        found[(*identity, seen[identity])] = task
        seen[identity] += 1
    return found


def name_of(task: dict) -> str:
    return task.get("name") or task["task"]


def shown(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)


def mean_of(values: list[float | None]) -> float | None:
    values = np.array(values, dtype=np.float64)  # None becomes NaN
    return float(values.mean()) if values.size and np.isfinite(values).all() else None


# ---- several runs, and the command ------------------------------------------------------------------------------------


def __getattr__(name: str):
    """The numbers of the modules that build on this one: metrics.pareto, metrics.regret, metrics.forward_transfer, ..."""
    if not name.startswith("_"):  # while modules are being imported, Python asks for __path__
        from nevis_lite import analysis, compare

        for module in (compare, analysis):
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def describe(runs: list[dict], more: bool = False) -> tuple[dict, str]:
    """What the command shows of runs, as plain values and as text; ValueError when they cannot be compared."""
    from nevis_lite import analysis, compare  # which build on this module

    if len(runs) == 1:
        found, text = runs[0], table(runs[0])
    elif len({run["stream"] for run in runs}) > 1:
        found, text = {"variants": analysis.variants(runs)}, analysis.variant_table(runs)
    else:
        found, text = compare.comparison(runs), compare.text(runs)
    if more:
        extra = analysis.more(runs)
        found, text = {**found, "more": extra}, f"{text}\n\n{analysis.more_text(runs, extra)}"
    return found, text


def main(argv: list[str] | None = None) -> None:
    """`python -m nevis_lite.metrics RUN... [--more] [--json]`; exits with 2 when a run cannot be read or compared."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.metrics", description="Show a run, or compare several.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, also of one that goes on")
    parser.add_argument("--more", action="store_true", help="regret, forward transfer, slices and who learned from whom, too")
    parser.add_argument("--map-zero", action="store_true", help="mAP as in the reference: 0 for a class without positives")
    parser.add_argument("--json", action="store_true", help="print JSON: results.json of one run, or the comparison")
    args = parser.parse_args(argv)
    try:
        runs = [load(run) for run in args.runs]
        found, text = describe([with_reference_map(run) for run in runs] if args.map_zero else runs, args.more)
        print(json.dumps(found, indent=1, allow_nan=False) if args.json else text, flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stdout = None
    except (OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
