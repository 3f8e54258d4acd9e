"""Runs as `results.json` has them, made by hand."""

import json

from nevis_lite import metrics


def row(index, task, year, error, source=None, meta="train", train=3e12, **changes):
    return {
        "index": index,
        "task": task,
        "name": task.upper(),
        "year": year,
        "occurrence": 1,
        "domain": "object",
        "kind": "single_label",
        "meta": meta,
        "num_classes": 10,
        "num_train": 1281167,
        "resolution": 28.0,
        "error": error,
        "source": source,
        "auxiliaries": [],
        "scores": {},
        "hyperparameters": {"lr": 0.012345, "label_smoothing": 0.15},
        "flops": {"train": int(train), "validate": 10**11, "select": 10**11, "predict": 4 * 10**10},
        "curve": [[0, 0.9], [50, 0.6], [100, 0.5]],
        **changes,
    }


def run(baseline="ft-d", seed=0, errors=(0.5, 0.3, 0.1), tasks=None, **changes):
    tasks = [
        row(0, "digits", 1998, errors[0]),
        row(1, "a very long name of a data set", 2004, errors[1], source=0),
        row(105, "flowers", 2021, errors[2], source=1, meta="test"),
    ] if tasks is None else tasks
    results = {
        "name": f"{baseline}-{seed}",
        "stream": "demo",
        "phase": "meta_test",
        "baseline": baseline,
        "seed": seed,
        "trials": 3,
        "steps": 100,
    }
    return {**results, "partial": [], "tasks": tasks, **metrics.summarise(tasks, "meta_test"), **changes}


def write(folder, results):
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return str(folder)


def write_unfinished(folder, results, planned):
    """What a run leaves that was stopped while it appended a row."""
    folder.mkdir()
    head = {key: results[key] for key in ("stream", "phase", "baseline", "seed", "trials", "steps", "partial")}
    (folder / "environment.json").write_text(json.dumps({"head": head, "planned": planned}), encoding="utf-8")
    rows = "".join(json.dumps(task) + "\n" for task in results["tasks"])
    (folder / "tasks.jsonl").write_text(rows + '{"index": 7, "ta', encoding="utf-8")
    return str(folder)
