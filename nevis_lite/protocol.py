"""The protocol loop (paper, Algorithm 1): the tasks of a stream in order, each learned once, then judged by the evaluator.

`Setup` holds what is fixed before the first step. `run` does it all, writes the run folder, and can be stopped and resumed at
any step.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
import torchvision

import nevis_lite
from nevis_lite import baselines, config, cost, data, fit, flops, metrics, models, stream
from nevis_lite.baselines import Baseline, Past, View
from nevis_lite.config import Config, UserError
from nevis_lite.data import EndlessStream, Split
from nevis_lite.progress import Progress
from nevis_lite.run_folder import RunFolder, write_atomic, write_json
from nevis_lite.stream import Access, Stream, Task


class Interrupted(Exception):
    """A signal asked the run to stop; a checkpoint has been written."""


@dataclass
class Setup:
    config: Config
    baseline: Baseline
    stream: Stream
    tasks: list[Task]
    folders: list[Path]  # pixel cache of each task
    device: torch.device
    reported: str  # the split that the evaluator reads
    backbone_flops: int  # forward, of one image
    training_flops: int  # forward and backward, of one image, without a head
    num_features: int
    opened: dict = field(default_factory=dict)  # splits of the current task, so that its trials share what is in memory

    def open(self, task: int, name: str) -> Split:
        if (task, name) not in self.opened:
            self.opened[task, name] = Split(self.folders[task], name, self.device)
        return self.opened[task, name]

    def size(self, task: int, name: str) -> int:
        return self.open(task, name).meta["sizes"][name]

    def view(self, task: Task, memory: list[Past], dry: bool = False) -> View:
        return View(task, Access(task.index, self.open), memory, self.config, self.device, self.backbone_flops,
                    self.num_features, dry)

    def image_flops(self, task: Task) -> tuple[int, int]:
        """FLOPs of one image through backbone and head: prediction, training step."""
        head = 2 * self.num_features * task.num_classes
        return self.backbone_flops + head, self.training_flops + 3 * head

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"

    def predict_flops(self, task: Task) -> int:
        return self.size(task.index, self.reported) * self.image_flops(task)[0]

    def trial_flops(self, task: Task, num_train: int, steps: int, validations: int) -> dict:
        predict, train = self.image_flops(task)
        batch = fit.batch_size(num_train, self.config.fit.max_batch)
        return {"train": steps * batch * train, "validate": validations * self.size(task.index, "dev") * predict}


def set_up(settings: Config) -> Setup:
    """Check everything that can be checked before training: names, data (cached here), device. UserError or MissingData."""
    loaded = stream.load(settings.stream, settings.data.dir, settings.phase)
    baseline = baselines.choose(settings.baseline)
    device = fit.pick_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        backbone = models.build(settings.model.name)
    except ValueError as error:
        raise UserError(f"model.name: {error}") from None
    folders = [data.prepare(task.dataset, settings.data) for task in loaded]
    tasks = []
    for task, folder in zip(loaded, folders, strict=True):
        meta = Split(folder, "train", device).meta
        if task.kind not in (None, meta["kind"]):
            raise UserError(f"{task.dataset.folder}: {task.name} is a {task.kind} task, but its labels are {meta['kind']}.")
        tasks.append(dataclasses.replace(task, kind=meta["kind"], num_classes=meta["num_classes"]))
    size = settings.model.image_size
    return Setup(settings, baseline, loaded, tasks, folders, device,
                 reported="test" if settings.phase == "meta_test" else "dev_test",
                 backbone_flops=flops.forward_flops(backbone, size), training_flops=flops.training_flops(backbone, size),
                 num_features=backbone.num_features)


# ---------------------------------------------------------------------------------------------------------------------
# Running


def run(setup: Setup, out: str | Path, resume: bool = False, command: str = "") -> dict:
    """All tasks in order; returns the content of `results.json`.

    Raises Interrupted after a checkpoint when SIGINT or SIGTERM arrives.
    """
    began = time.monotonic()
    _check_room(setup, Path(out))
    with closing(RunFolder(out, config.to_dict(setup.config), environment(setup, command), resume)) as folder:
        if (folder.path / "results.json").is_file():
            return metrics.load(folder.path)
        earlier = folder.state["seconds"]
        with _stop_signals() as stop:
            def save(**state):
                folder.save(**state, seconds=earlier + time.monotonic() - began)
                if stop.is_set():
                    raise Interrupted

            _all_tasks(setup, folder, save, stop)
        results = {"name": folder.path.resolve().name, "stream": setup.stream.name, "phase": setup.config.phase,
                   "baseline": setup.baseline.label, "seed": setup.config.seed,
                   "partial": [task.name for task in setup.stream.missing],
                   **metrics.summarise(folder.rows["tasks"], setup.config.phase),
                   "seconds": round(earlier + time.monotonic() - began, 1), "device": setup.device_name,
                   "tasks": folder.rows["tasks"]}
        write_json(folder.path / "results.json", results)
        return results


def _check_room(setup: Setup, out: Path):
    """Better to say it now than in the middle of the stream."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    needed, free = cost.disk_bytes(setup)["runs"], shutil.disk_usage(there).free
    if not (out / "config.yaml").is_file() and needed > free:
        raise UserError(f"{out}: the run needs up to {needed / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free.")


def _all_tasks(setup: Setup, folder: RunFolder, save, stop):
    """What is still to do of the stream; a row and a checkpoint after each task."""
    planned = [flops.total(row["flops"]) for row in cost.plan(setup)]
    spent = flops.add(*(row["flops"] for row in folder.rows["tasks"]),
                      *(row["flops"] for row in folder.rows["trials"] if row["task"] == folder.state["task"]))
    progress = Progress(planned, flops.total(spent))
    for task in setup.tasks[folder.state["task"]:]:
        setup.opened.clear()  # frees the memory of the task before
        folder.append("tasks", _learn_and_judge(setup, task, folder, progress, save, stop))
        save(task=task.index + 1)


def _learn_and_judge(setup: Setup, task: Task, folder: RunFolder, progress: Progress, save, stop) -> dict:
    """One task: choose the start, try hyper-parameters, keep the best predictor, have it evaluated. Returns the task's row."""
    memory = [Past(row["index"], setup.tasks[row["index"]], row["num_train"], row["dev_error"],
                   folder.predictor(row["index"])) for row in folder.rows["tasks"]]
    view = setup.view(task, memory)
    state = folder.state
    if "start" not in state:
        began = time.monotonic()
        source = setup.baseline.start(view)
        progress.spend(view.flops)
        save(task=task.index, start={"source": source, "flops": view.flops, "scores": view.scores,
                                     "seconds": time.monotonic() - began}, best=None, trial=None)
    start = folder.state["start"]
    trials = setup.config.search.trials
    for number in range(len(_trials(folder, task)), trials):
        _run_trial(setup, view, number, folder, progress, save, stop)
    best = folder.state["best"]
    if best is None:
        raise UserError(f"{task.name}: all {trials} trials of task {task.index} diverged; lower the upper end of search.lr.")

    model = models.build(setup.config.model.name, task.num_classes).to(setup.device, memory_format=torch.channels_last)
    model.load_state_dict(best["state"])
    predictor = {"model": setup.config.model.name, "num_classes": task.num_classes, "task": task.task,
                 "image_size": setup.config.model.image_size, "state": best["state"]}
    write_atomic(folder.predictor(task.index), lambda file: torch.save(predictor, file))
    judged = setup.open(task.index, setup.reported)
    error = fit.evaluate(model, judged, setup.config.model.image_size, setup.config.fit)
    progress.spend(setup.predict_flops(task))
    chosen = _trials(folder, task)[best["trial"]]
    origin = "scratch" if start["source"] is None else setup.tasks[start["source"]].name
    progress.say(f"{task.year} {task.name}: error {'undefined' if error is None else f'{error:.4f}'} on {setup.reported}, "
                 f"from {origin}")
    spent = flops.add(*(row["flops"] for row in _trials(folder, task)),
                      {"select": start["flops"], "predict": setup.predict_flops(task)})
    undefined = {} if error is not None else {"reason": "the predictor's outputs on the test images are not all finite"}
    return {"index": task.index, "task": task.task, "name": task.name, "year": task.year, "occurrence": task.occurrence,
            "domain": task.domain, "kind": task.kind, "num_classes": task.num_classes,
            "num_train": len(setup.baseline.data(view)), "resolution": judged.meta["resolution"], "meta": task.meta,
            "split": setup.reported, "error": error, **undefined, "dev_error": chosen["error"], "source": start["source"],
            "scores": {str(index): score for index, score in start["scores"].items()},
            "hyperparameters": chosen["hyperparameters"], "trials": trials, "flops": spent, "curve": chosen["curve"]}


def _trials(folder: RunFolder, task: Task) -> list[dict]:
    return [row for row in folder.rows["trials"] if row["task"] == task.index]


def _run_trial(setup: Setup, view: View, number: int, folder: RunFolder, progress: Progress, save, stop):
    """Train once, from the checkpoint's snapshot if there is one; append the trial's row and keep the better predictor."""
    settings, task, state = setup.config, view.task, folder.state
    history = _trials(folder, task)
    hyperparameters = setup.baseline.search(settings.search, settings.seed, task.index, number, history)
    split = setup.baseline.data(view)
    batch = fit.batch_size(len(split), settings.fit.max_batch)
    batches = EndlessStream(split, batch, settings.data, settings.model.image_size,
                            (settings.seed, task.index, number))
    model = baselines.initial_model(view, state["start"]["source"])
    snapshot, best, start = state["trial"], state["best"], state["start"]
    seconds_before = snapshot["seconds"] if snapshot else 0.0
    began = saved = time.monotonic()
    planned = setup.trial_flops(task, len(split), settings.fit.steps, len(fit.validation_steps(settings.fit)))
    progress.begin(task, number, settings.search.trials, settings.fit.steps, snapshot["step"] if snapshot else 0, batch,
                   flops.total(planned))

    def on_step(trial: fit.Trial):
        nonlocal saved
        progress.update(trial)
        if stop.is_set() or time.monotonic() - saved >= settings.checkpoint_seconds:
            snapshot = trial.snapshot() | {"seconds": seconds_before + time.monotonic() - began}
            save(task=task.index, start=start, best=best, trial=snapshot)
            saved = time.monotonic()

    trial = fit.train(model, batches, view.split("dev"), hyperparameters, settings.fit, snapshot, on_step)
    progress.end(trial)
    folder.append("trials", {
        "task": task.index, "trial": number, "hyperparameters": hyperparameters,
        "status": "failed" if trial.failed else "done", "error": None if trial.failed else trial.best_error,
        "best_step": trial.best_step, "steps": trial.step,
        "loss": trial.loss if trial.loss is not None and math.isfinite(trial.loss) else None, "curve": trial.curve,
        "flops": setup.trial_flops(task, len(split), trial.step, len(trial.curve)),
        "seconds": round(seconds_before + time.monotonic() - began, 2)})
    if not trial.failed and (best is None or trial.best_error < best["error"]):
        best = {"trial": number, "error": trial.best_error, "state": trial.best_state}
    save(task=task.index, start=start, best=best, trial=None)


@contextmanager
def _stop_signals():
    """An event that the first SIGINT or SIGTERM sets; a second one acts as usual."""
    stop, before = threading.Event(), {}

    def request(number, frame):
        stop.set()
        for known, handler in before.items():
            signal.signal(known, handler)

    if threading.current_thread() is threading.main_thread():
        before.update({number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield stop
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


# ---------------------------------------------------------------------------------------------------------------------
# Circumstances


def environment(setup: Setup, command: str) -> dict:
    """What a reader of the numbers needs to know, and the digests of the data that a resume checks."""
    root = Path(nevis_lite.__file__).resolve().parent.parent
    try:
        revision = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"], check=True,
                                  capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = None
    return {"nevis_lite": nevis_lite.__version__, "revision": revision, "command": command,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "device": setup.device_name, "cpus": os.cpu_count(),
            "platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
            "torchvision": torchvision.__version__, "numpy": numpy.__version__,
            "data": {f"{task.index} {task.task}": Split(folder, "train", setup.device).meta["sha256"]
                     for task, folder in zip(setup.tasks, setup.folders, strict=True)}}
