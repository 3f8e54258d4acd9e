"""What a run will cost, told before it is run: FLOPs (exactly those of its ledger), bytes on disk, and hours on this device."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from nevis_lite import baselines, cache, datasets, fit, flops, metrics, models
from nevis_lite.baselines import Past
from nevis_lite.data import EndlessStream, Split
from nevis_lite.progress import clock
from nevis_lite.setup import Setup
from nevis_lite.stream import Access, Task


def plan(setup: Setup) -> list[dict]:
    """For each task of a run: num_train, and the ledger `flops` that a run without failed trials will have.

    The choices of start and auxiliary tasks are made for real, on a view whose features are zeros, so that all they look at is
    counted. Two things are known only once the run is over: where batch sizes or networks are searched, `flops` is the
    ledger of the costliest (`hyperparameters`) and `least` the total of the cheapest; and an auxiliary task's head costs what
    its number of classes tells, here that of the latest task.
    """
    config, rows, memory = setup.config, [], []
    validations = len(fit.validation_steps(config.fit))
    names = [name for name in ("batch", "model") if getattr(config.search, name)]
    searched = [dict(zip(names, values, strict=True)) for values in product(*(getattr(config.search, name) for name in names))]
    for task in setup.tasks:
        view = setup.view(task, memory, dry=True)
        setup.baseline.start(view)
        auxiliaries, num_train, ledgers = setup.baseline.data(view), len(view.split("train")), []
        for hyperparameters in searched:
            trial = setup.trial_flops(task, auxiliaries, hyperparameters, config.fit.steps, validations)
            ledgers.append({phase: config.search.trials * count for phase, count in trial.items()}
                           | {"select": view.flops, "predict": setup.predict_flops(task, hyperparameters)})
        most = max(range(len(ledgers)), key=lambda number: flops.total(ledgers[number]))
        rows.append({"task": task, "num_train": num_train, "auxiliaries": auxiliaries, "flops": ledgers[most],
                     "hyperparameters": searched[most], "least": min(map(flops.total, ledgers))})
        memory = [*memory, Past(task.index, task, num_train, 0.0, None)]
    return rows


def disk_bytes(setup: Setup, processes: int) -> dict[str, int]:
    """Bytes of the pixel caches, which exist already, and of the run folder (`runs`), which `processes` are still to write."""
    backbone = models.on_meta(setup.config.model.name)
    weights = sum(value.numel() * value.element_size() for value in backbone.state_dict().values())
    caches = sum(cache_bytes(folder) for folder in set(setup.folders))
    processes, trials = (processes if setup.config.parallel == "trials" else 1), setup.config.search.trials
    # A predictor a task; two checkpoints and one being written, each with the best of the task; a snapshot and one being
    # written of each trial in progress, with weights, momentum and best; the best of trials that wait for the end of the task.
    waiting = trials if processes > 1 else 0
    return {"caches": caches, "runs": weights * (len(setup.tasks) + 3 + 2 * 3 * min(processes, trials) + waiting)}


def cache_bytes(folder: Path | None) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder else 0


def seconds_of(setup: Setup, task: Task, hyperparameters: dict) -> tuple[float, float]:
    """Measured seconds of one training step and of predicting one image, on a task's data, or on others if they aren't here."""
    config, view = setup.config, setup.view(task, [])
    if setup.folders[task.index] is None:
        other = datasets.catalogue(Path(config.data.dir))["demo_icons_a"]
        folder = cache.prepare(other, config.data)
        view.task = replace(task, kind=other.kind, num_classes=other.classes)
        view.access = Access(task.index, lambda task, name: Split(folder, name, setup.device))
    dev = view.split("dev")
    batch = setup.batch(task, hyperparameters)
    batches = EndlessStream(view.split("train"), batch, config.data, config.model.image_size, (0, 0, 0))
    model = baselines.initial_model(view, None, hyperparameters.get("model"))
    trial = fit.start(model, config.fit, compiled=setup.compiled(model, hyperparameters))
    picks = torch.arange(min(256 if setup.device.type == "cuda" else 32, len(dev)))

    def measure(work) -> float:
        """Seconds of a call: ten of them, fewer where one takes long."""
        began = time.perf_counter()
        work()  # the first call is slower
        repeats = 10 if time.perf_counter() - began < 1 else 2
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
        return (time.perf_counter() - began) / repeats

    for _ in range(2 * config.fit.compile):  # compiles, and records graphs
        fit.update(trial, batches, {"lr": 0.01, "label_smoothing": 0.0}, config.fit)
    step = measure(lambda: fit.update(trial, batches, {"lr": 0.01, "label_smoothing": 0.0}, config.fit))
    image = measure(lambda: fit.predict(trial.model, dev, config.model.image_size, config.fit, picks))
    return step, image / len(picks)


def table(setup: Setup, processes: int) -> str:
    """What `--dry-run` prints."""
    config, rows, timed, total_seconds = setup.config, plan(setup), {}, 0.0
    steps, trials = config.fit.steps, config.search.trials
    rounds = math.ceil(trials / processes) if config.parallel == "trials" else trials
    lines = [f"{'#':>3}  {'year':<4}  {'task':<22} {'train':>8} {'batch':>5} {'steps':>7} {'trials':>6} {'compute':>12} "
             f"{'cache':>10} {'time':>9}"]
    for row in rows:
        task, hyperparameters = row["task"], row["hyperparameters"]
        batch = setup.batch(task, hyperparameters)
        if batch not in timed:
            timed[batch] = seconds_of(setup, task, hyperparameters)
        step_seconds, image_seconds = timed[batch]
        ledger = row["flops"]
        images = ledger["validate"] * rounds / trials + ledger["select"] + ledger["predict"]
        images /= setup.image_flops(task, hyperparameters)[0]
        seconds = rounds * steps * step_seconds * (1 + len(row["auxiliaries"])) + images * image_seconds
        total_seconds += seconds
        cached = f"{cache_bytes(setup.folders[task.index]) / 1e6:.1f} MB" if setup.folders[task.index] else "-"
        lines.append(f"{task.index:>3}  {task.year:<4}  {task.name[:22]:<22} {row['num_train']:>8} {batch:>5} {steps:>7} "
                     f"{trials:>6} {metrics.human(flops.total(row['flops'])):>12} {cached:>10} {clock(seconds):>9}")
    least = sum(row["least"] for row in rows)
    ledger, disk = flops.add(*(row["flops"] for row in rows)), disk_bytes(setup, processes)
    beside = f", {min(processes, trials)} trials at a time" if rounds < trials else ""
    phases = ", ".join(f"{phase} {metrics.human(count)}" for phase, count in ledger.items())
    lines += ["", f"compute: {phases}; all {metrics.human(flops.total(ledger))} ({flops.total(ledger)} FLOPs)",
              f"on disk: pixel cache {disk['caches'] / 1e6:.0f} MB (written), run folder at most {disk['runs'] / 1e6:.0f} MB; "
              f"free here: {shutil.disk_usage('.').free / 1e9:.0f} GB",
              f"predicted time on {setup.device_name}{beside}: {total_seconds / 3600:.2f} hours ({clock(total_seconds)}), "
              "from a few timed steps for each batch size"]
    if least < flops.total(ledger):
        lines.append(f"batch sizes or networks are searched: these are the numbers of the costliest choices; of the cheapest, "
                     f"compute would be {metrics.human(least)}")
    if setup.pretraining_flops:
        lines.append(f"compute of the pretrained weights, not included: {metrics.human(setup.pretraining_flops)}")
    announced = sum(folder is None for folder in setup.folders)
    if announced:
        lines.append(f"{announced} of {len(setup.folders)} tasks are not cached yet: their sizes are those published, and "
                     "their steps were timed on other images")
    return "\n".join(lines)
