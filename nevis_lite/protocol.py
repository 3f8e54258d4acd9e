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
from nevis_lite import baselines, cache, config, cost, fit, flops, metrics, models
from nevis_lite.baselines import PRETRAINED, Baseline, Past, View
from nevis_lite.config import Config, UserError
from nevis_lite.data import Announced, EndlessStream, Split
from nevis_lite.datasets import DataSet
from nevis_lite.progress import Progress
from nevis_lite.run_folder import RunFolder, predictor_path, write_atomic, write_json
from nevis_lite.search import gp_ucb
from nevis_lite.stream import Access, Stream, Task


class Interrupted(Exception):
    """A signal asked the run to stop; a checkpoint has been written."""


@dataclass(frozen=True)
class Network:
    """What one image costs in a backbone."""

    forward_flops: int
    training_flops: int  # forward and backward
    num_features: int


@dataclass
class Setup:
    config: Config
    baseline: Baseline
    stream: Stream
    tasks: list[Task]
    folders: list[Path | None]  # pixel cache of each task; None in a dry run where it is still to be built
    device: torch.device
    reported: str  # the split that the evaluator reads
    networks: dict[str, Network]  # the config's, and those that are searched
    pretrained: dict | None  # state of a backbone
    pretraining_flops: int | None
    indep: dict[int, Path]  # predictors of select.indep_run by task index
    opened: dict = field(default_factory=dict)  # splits of the current task, so that its trials share what is in memory

    def open(self, task: int, name: str) -> Split | Announced:
        if (task, name) not in self.opened:
            folder, part = self.folders[task], self.tasks[task].part
            self.opened[task, name] = (Split(folder, name, self.device, part) if folder else
                                       Announced(self.tasks[task].dataset.images[name] // (part or (0, 1))[1]))
        return self.opened[task, name]

    def size(self, task: int, name: str) -> int:
        return len(self.open(task, name))

    def view(self, task: Task, memory: list[Past], dry: bool = False) -> View:
        network = self.networks[self.config.model.name]
        return View(task, Access(task.index, self.open), memory, self.config, self.device, network.forward_flops,
                    network.num_features, self.pretrained, self.indep, dry)

    def image_flops(self, task: Task, hyperparameters: dict) -> tuple[int, int]:
        """FLOPs of one image through backbone and head: prediction, training step."""
        network = self.networks[hyperparameters.get("model", self.config.model.name)]
        head = 2 * network.num_features * task.num_classes
        return network.forward_flops + head, network.training_flops + 3 * head

    def batch(self, task: Task, hyperparameters: dict) -> int:
        """Eq. 4, unless batch sizes are searched."""
        return hyperparameters.get("batch") or fit.batch_size(self.size(task.index, "train"), self.config.fit.max_batch)

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"

    def predict_flops(self, task: Task, hyperparameters: dict) -> int:
        return self.size(task.index, self.reported) * self.image_flops(task, hyperparameters)[0]

    def trial_flops(self, task: Task, auxiliaries: list[int], hyperparameters: dict, steps: int, validations: int) -> dict:
        """The ledger of a training; each auxiliary task adds a batch to each step."""
        images = steps * self.batch(task, hyperparameters)
        train = sum(self.image_flops(self.tasks[index], hyperparameters)[1] for index in (task.index, *auxiliaries))
        return {"train": images * train,
                "validate": validations * self.size(task.index, "dev") * self.image_flops(task, hyperparameters)[0]}


def set_up(settings: Config, loaded: Stream, dry: bool = False) -> Setup:
    """Check everything that can be checked before training: names, data, device. UserError or MissingData.

    The pixel caches that are missing are built here, of all splits, and their labels checked for range; after this, test
    splits are opened by the evaluator alone. A `dry` set-up builds none of published data sets whose sizes are known, and does
    without the files of pretrained weights and of an Indep run.
    """
    baseline = baselines.choose(settings.baseline)
    device = fit.pick_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    networks = {name: _network(name, key, settings.model.image_size) for name, key in
                [(settings.model.name, "model.name"), *((name, "search.model") for name in settings.search.model)]}
    _check_combination(settings, baseline, loaded)
    weights = settings.model.weights
    not_needed = weights is None or dry and (weights == "published" or not Path(weights).is_file())
    pretrained, pretraining_flops = (None, None) if not_needed else models.pretrained(settings.model.name, weights)
    folders = [None if dry and _only_announced(task.dataset, settings) else cache.prepare(task.dataset, settings.data)
               for task in loaded]
    tasks = []
    for task, folder in zip(loaded, folders, strict=True):
        announced = {"kind": task.kind, "num_classes": task.num_classes}
        meta = Split(folder, "train", device, task.part).meta if folder else announced
        if task.kind not in (None, meta["kind"]):
            raise UserError(f"{task.dataset.folder}: {task.name} is a {task.kind} task, but its labels are {meta['kind']}.")
        if task.part and meta["kind"] == "multi_label":
            raise UserError(f"{task.name}: a data set with several labels an image cannot be split by class.")
        if task.part and folder and (meta["num_classes"] < 2 or 0 in meta["sizes"].values()):
            sizes = ", ".join(f"{size} in {name}" for name, size in meta["sizes"].items())
            raise UserError(f"{task.dataset.folder}: {task.name} has {meta['num_classes']} of the classes and of the images "
                            f"{sizes}; split the data set into fewer tasks.")
        tasks.append(dataclasses.replace(task, kind=meta["kind"], num_classes=meta["num_classes"]))
    reported = "test" if settings.phase == "meta_test" else "dev_test"
    return Setup(settings, baseline, loaded, tasks, folders, device, reported, networks, pretrained, pretraining_flops,
                 {} if dry else _indep(settings, tasks))


def _network(name: str, key: str, image_size: int) -> Network:
    models.check_name(name, key)
    backbone = models.build(name)
    return Network(flops.forward_flops(backbone, image_size), flops.training_flops(backbone, image_size), backbone.num_features)


def _check_combination(settings: Config, baseline: Baseline, loaded: Stream):
    """UserError for choices that do not go together."""
    wants_weights = baseline.start in (baselines.start_pretrained, baselines.start_related_or_pretrained)
    multitask = baseline.data is baselines.data_multitask
    if wants_weights and settings.model.weights is None:
        raise UserError(f"baseline {baseline.label} starts from pretrained weights: say which with model.weights.")
    if settings.model.weights and not wants_weights:
        raise UserError(f"model.weights: baseline {baseline.label} does not start from pretrained weights; take pt or pt-ft.")
    if baseline.start is baselines.start_related_static and settings.select.indep_run is None:
        raise UserError(f"baseline {baseline.label} needs a finished Indep run of the stream: name its folder in "
                        "select.indep_run.")
    if settings.search.model and (multitask or baseline.start is not baselines.start_random):
        raise UserError(f"search.model: baseline {baseline.label} hands weights on, which fit one network alone; give "
                        "its name in model.name, or take baseline.start=random.")
    if multitask and settings.search.auxiliary_weight is None:
        raise UserError(f"baseline {baseline.label} weighs auxiliary tasks: give the range in search.auxiliary_weight, for "
                        "example [0, 1].")
    if settings.search.auxiliary_weight and not multitask:
        raise UserError(f"search.auxiliary_weight: baseline {baseline.label} has no auxiliary tasks; take mt.")
    if multitask and settings.baseline.auxiliary >= len(loaded):
        raise UserError(f"baseline.auxiliary={settings.baseline.auxiliary}: a stream of {len(loaded)} tasks has at most "
                        f"{len(loaded) - 1} earlier ones.")
    if baseline.search is gp_ucb:
        gp_ucb(settings.search, settings.seed, 0, 0, [])  # needs a library


def _indep(settings: Config, tasks: list[Task]) -> dict[int, Path]:
    """The predictors of select.indep_run for the same tasks; UserError if one is missing."""
    folder = settings.select.indep_run
    if folder is None:
        return {}
    try:
        results = metrics.load(folder)
        theirs = config.from_dict(config.read_yaml((Path(folder) / "config.yaml").read_text(encoding="utf-8"), folder)).model
    except (OSError, UserError) as error:
        raise UserError(f"select.indep_run: {error}") from None
    ours = settings.model
    if not results["baseline"].startswith("indep") or (theirs.name, theirs.image_size) != (ours.name, ours.image_size):
        raise UserError(f"select.indep_run={folder}: is a run of {results['baseline']} with {theirs.name} at "
                        f"{theirs.image_size} pixels; it must be one of indep with {ours.name} at {ours.image_size}.")
    found = {(row["task"], row["occurrence"]): predictor_path(Path(folder), row["index"]) for row in results["tasks"]}
    paths = {task.index: found.get((task.task, task.occurrence)) for task in tasks}
    for task in tasks[:-1]:  # nothing comes after the last one
        if paths[task.index] is None or not paths[task.index].is_file():
            raise UserError(f"select.indep_run={folder}: has no predictor of {task.name} ({task.year}).")
    return paths


def _only_announced(dataset: DataSet, settings: Config) -> bool:
    """Whether the sizes of a data set are known from the catalogue, but its images are not cached yet."""
    return bool(dataset.images) and cache.meta_of(cache.folder_of(dataset, settings.data)) is None


# ---------------------------------------------------------------------------------------------------------------------
# Running


@dataclass
class Session:
    """A run in progress: what its parts share."""

    setup: Setup
    folder: RunFolder
    progress: Progress
    stop: threading.Event  # set by a signal
    seconds: float  # of earlier sessions
    began: float = field(default_factory=time.monotonic)

    def total_seconds(self) -> float:
        return self.seconds + time.monotonic() - self.began

    def save(self, task: int, **state):
        """Write a checkpoint; raise Interrupted after it if a signal asks for that."""
        self.folder.save(task=task, **state, seconds=self.total_seconds())
        if self.stop.is_set():
            raise Interrupted

    def trials(self, task: Task) -> list[dict]:
        return [row for row in self.folder.rows["trials"] if row["task"] == task.index]


def run(setup: Setup, out: str | Path, resume: bool = False, command: str = "") -> dict:
    """All tasks in order; returns the content of `results.json`.

    Raises Interrupted after a checkpoint when SIGINT or SIGTERM arrives.
    """
    _check_room(setup, Path(out))
    with closing(RunFolder(out, config.to_dict(setup.config), environment(setup, command), resume)) as folder:
        if (folder.path / "results.json").is_file():
            return metrics.load(folder.path)
        planned = [flops.total(row["flops"]) for row in cost.plan(setup)]
        spent = [row["flops"] for row in folder.rows["tasks"]]
        spent += [row["flops"] for row in folder.rows["trials"] if row["task"] == folder.state["task"]]
        with _stop_signals() as stop:
            session = Session(setup, folder, Progress(planned, flops.total(flops.add(*spent))), stop, folder.state["seconds"])
            for task in setup.tasks[folder.state["task"]:]:
                setup.opened.clear()  # frees the memory of the task before
                folder.append("tasks", _learn_and_judge(session, task))
                session.save(task.index + 1)
        results = {"name": folder.path.resolve().name, "stream": setup.stream.name, "phase": setup.config.phase,
                   "baseline": setup.baseline.label, "seed": setup.config.seed,
                   "trials": setup.config.search.trials, "steps": setup.config.fit.steps,
                   "partial": [task.name for task in setup.stream.missing],
                   **metrics.summarise(folder.rows["tasks"], setup.config.phase), "cflop_pretraining": setup.pretraining_flops,
                   "seconds": round(session.total_seconds(), 1), "device": setup.device_name, "tasks": folder.rows["tasks"]}
        write_json(folder.path / "results.json", results)
        return results


def _check_room(setup: Setup, out: Path):
    """Better to say it now than in the middle of the stream."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    needed, free = cost.disk_bytes(setup)["runs"], shutil.disk_usage(there).free
    if not (out / "config.yaml").is_file() and needed > free:
        raise UserError(f"{out}: the run needs up to {needed / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free.")


def _learn_and_judge(session: Session, task: Task) -> dict:
    """One task: choose the start, try hyper-parameters, keep the best predictor, have it evaluated. Returns the task's row."""
    setup, folder = session.setup, session.folder
    memory = [Past(row["index"], setup.tasks[row["index"]], row["num_train"], row["dev_error"],
                   folder.predictor(row["index"])) for row in folder.rows["tasks"]]
    view = setup.view(task, memory)
    if "start" not in folder.state:
        source, auxiliaries = setup.baseline.start(view), setup.baseline.data(view)
        session.progress.spend(view.flops)
        start = {"source": source, "auxiliaries": auxiliaries, "flops": view.flops, "scores": view.scores}
        session.save(task.index, start=start, best=None, trial=None)
    start = folder.state["start"]
    trials = setup.config.search.trials
    for number in range(len(session.trials(task)), trials):
        _run_trial(session, view, number)
    best = folder.state["best"]
    if best is None:
        raise UserError(f"{task.name}: all {trials} trials of task {task.index} diverged; lower the upper end of search.lr.")

    chosen = session.trials(task)[best["trial"]]
    name = chosen["hyperparameters"].get("model", setup.config.model.name)
    spent = sum(flops.total(row["flops"]) for row in (*folder.rows["tasks"], *session.trials(task))) + start["flops"]
    facts = setup.open(task.index, "train").meta
    predictor = {"model": name, "num_classes": task.num_classes, "classes": facts["classes"], "task": task.task, "flops": spent,
                 "image_size": setup.config.model.image_size, "state": best["state"]}
    write_atomic(folder.predictor(task.index), lambda file: torch.save(predictor, file))
    error = _judge(session, task, name, best["state"])
    predicted = setup.predict_flops(task, chosen["hyperparameters"])
    session.progress.spend(predicted)
    origin = {None: "scratch", PRETRAINED: PRETRAINED} | {past.index: past.task.name for past in memory}
    shown = "undefined" if error is None else f"{error:.4f}"
    session.progress.say(f"{task.year} {task.name}: error {shown} on {setup.reported}, from {origin[start['source']]}"
                         + "".join(f", with {origin[index]}" for index in start["auxiliaries"]))
    without = facts["class_counts"][setup.reported].count(0)  # labels without a positive example: the mAP leaves them out
    left_out = {"labels_left_out": without} if task.kind == "multi_label" else {}
    undefined = {} if error is not None else {"reason": "the predictor's outputs on the test images are not all finite"}
    return {"index": task.index, "task": task.task, "name": task.name, "year": task.year, "occurrence": task.occurrence,
            "domain": task.domain, "kind": task.kind, "num_classes": task.num_classes,
            "num_train": len(view.split("train")), "resolution": view.split("train").meta["resolution"],
            "meta": task.meta, "split": setup.reported, "error": error, **undefined, **left_out, "dev_error": chosen["error"],
            "source": start["source"], "auxiliaries": start["auxiliaries"],
            "scores": {"scratch" if source is None else str(source): score for source, score in start["scores"].items()},
            "hyperparameters": chosen["hyperparameters"], "trials": trials,
            "flops": flops.add(*(row["flops"] for row in session.trials(task)),
                               {"select": start["flops"], "predict": predicted}),
            "curve": chosen["curve"]}


def _judge(session: Session, task: Task, name: str, state: dict) -> float | None:
    """The evaluator: the error of a predictor on the split that the phase reports. Nothing else reads that split."""
    setup = session.setup
    model = models.build(name, task.num_classes).to(setup.device, memory_format=torch.channels_last)
    model.load_state_dict(state)
    return fit.evaluate(model, setup.open(task.index, setup.reported), setup.config.model.image_size, setup.config.fit)


def _run_trial(session: Session, view: View, number: int):
    """Train once, from the checkpoint's snapshot if there is one; append the trial's row and keep the better predictor."""
    setup, settings, task, state = session.setup, session.setup.config, view.task, session.folder.state
    hyperparameters = setup.baseline.search(settings.search, settings.seed, task.index, number, session.trials(task))
    snapshot, best, start = state["trial"], state["best"], state["start"]
    model = baselines.initial_model(view, start["source"], hyperparameters.get("model"))
    batch, key = setup.batch(task, hyperparameters), (settings.seed, task.index, number)
    whole = (1.0, 1.0)  # of which nothing but the central square fits
    augmentation = dataclasses.replace(settings.data, flip=hyperparameters.get("flip", settings.data.flip),
                                       crop_area=settings.data.crop_area if hyperparameters.get("crop", True) else whole)
    batches = EndlessStream(view.split("train"), batch, augmentation, settings.model.image_size, key)
    auxiliaries = [fit.Auxiliary(EndlessStream(view.split("train", index), batch, augmentation, settings.model.image_size,
                                               (*key, 1 + index)),
                                 baselines.auxiliary_head(view, index)) for index in start["auxiliaries"]]
    earlier = snapshot["seconds"] if snapshot else 0.0
    began = saved = time.monotonic()
    planned = setup.trial_flops(task, start["auxiliaries"], hyperparameters, settings.fit.steps,
                                len(fit.validation_steps(settings.fit)))
    session.progress.begin(task, number, settings.search.trials, settings.fit.steps, snapshot["step"] if snapshot else 0,
                           batch, flops.total(planned))

    def on_step(trial: fit.Trial):
        nonlocal saved
        session.progress.update(trial)
        if session.stop.is_set() or time.monotonic() - saved >= settings.checkpoint_seconds:
            now = trial.snapshot() | {"seconds": earlier + time.monotonic() - began}
            session.save(task.index, start=start, best=best, trial=now)
            saved = time.monotonic()

    trial = fit.train(model, batches, view.split("dev"), hyperparameters, settings.fit, auxiliaries, snapshot, on_step)
    session.progress.end(trial)
    session.folder.append("trials", {
        "task": task.index, "trial": number, "hyperparameters": hyperparameters,
        "status": "failed" if trial.failed else "done", "error": None if trial.failed else trial.best_error,
        "best_step": trial.best_step, "steps": trial.step,
        "loss": trial.loss if trial.loss is not None and math.isfinite(trial.loss) else None, "curve": trial.curve,
        "flops": setup.trial_flops(task, start["auxiliaries"], hyperparameters, trial.step, len(trial.curve)),
        "seconds": round(earlier + time.monotonic() - began, 2)})
    if not trial.failed and (best is None or trial.best_error < best["error"]):
        best = {"trial": number, "error": trial.best_error, "state": trial.best_state}
    session.save(task.index, start=start, best=best, trial=None)


@contextmanager
def _stop_signals():
    """An event that the first SIGINT or SIGTERM sets; a second one acts as usual."""
    stop, before = threading.Event(), {}

    def request(number, frame):
        os.write(2, b"\nStopping after this step; once more stops at once.\n")
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
