"""What is fixed before the first step of a run: tasks, caches, networks and their cost, the device; and what can be checked."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
import torchvision

import nevis_lite
from nevis_lite import baselines, cache, config, fit, flops, metrics, models, parallel
from nevis_lite.baselines import Baseline, Past, View
from nevis_lite.config import Config, UserError
from nevis_lite.data import Announced, Split
from nevis_lite.datasets import DataSet
from nevis_lite.run_folder import predictor_path
from nevis_lite.search import gp_ucb
from nevis_lite.stream import Access, Stream, Task


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
    backbones: dict = field(default_factory=dict)  # by network: the one that all trials train, and its compiled form

    def open(self, task: int, name: str) -> Split | Announced:
        if (task, name) not in self.opened:
            folder, part = self.folders[task], self.tasks[task].part
            self.opened[task, name] = (Split(folder, name, self.device, part) if folder else
                                       Announced(self.tasks[task].dataset.images[name] // (part or (0, 1))[1]))
        return self.opened[task, name]

    def forget(self):
        """Free the memory of the task before."""
        self.opened.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def compiled(self, model: models.Classifier, hyperparameters: dict) -> Callable | None:
        """With fit.compile, the compiled form of the model's backbone, which is replaced by one that outlives the trial.

        That one takes over the weights in place, so that each network is compiled once a run.
        """
        if not self.config.fit.compile:
            return None
        name = hyperparameters.get("model", self.config.model.name)
        if name not in self.backbones:
            self.backbones[name] = model.backbone, fit.compile_backbone(model.backbone)
        backbone, compiled = self.backbones[name]
        backbone.load_state_dict(model.backbone.state_dict())
        model.backbone = backbone
        return compiled

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
        return device_name(self.device)

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
    networks = {name: network(name, key, settings.model.image_size) for name, key in
                [(settings.model.name, "model.name"), *((name, "search.model") for name in settings.search.model)]}
    _check_combination(settings, baseline, loaded)
    if settings.fit.precision == "fp32":
        torch.backends.cudnn.allow_tf32 = False  # which has fewer digits
    if settings.fit.compile:
        if settings.parallel == "data" and parallel.world() > 1 and device.type == "cuda":
            raise UserError("fit.compile: synchronised batch norm is not compiled; leave it out, or take parallel=trials.")
        fit.check_compiler(device)
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


def network(name: str, key: str, image_size: int) -> Network:
    """UserError for a network that cannot be trained on such images."""
    models.check_name(name, key)
    backbone = models.on_meta(name)
    try:
        with torch.no_grad():  # a step on the meta device, where only shapes matter
            out = backbone.train()(torch.empty(2, 3, image_size, image_size, device="meta"))
    except Exception as error:  # whatever a network says to images that it wasn't made for
        raise UserError(f"{key}={name}: cannot train on images of {image_size} pixels ({str(error).splitlines()[0]}); "
                        "try another model.image_size or network.") from None
    if not isinstance(out, torch.Tensor) or out.shape != (2, backbone.num_features):
        raise UserError(f"{key}={name}: does not turn an image into one vector of {backbone.num_features} features; take "
                        "another network.")
    return Network(flops.forward_flops(backbone, image_size), flops.training_flops(backbone, image_size), backbone.num_features)


def _check_combination(settings: Config, baseline: Baseline, loaded: Stream):
    """UserError for choices that do not go together."""
    wants_weights = baseline.start in (baselines.start_pretrained, baselines.start_related_or_pretrained)
    multitask = baseline.data is baselines.data_multitask
    if baseline.search is gp_ucb and settings.parallel == "trials" and parallel.world() > 1:
        raise UserError(f"baseline {baseline.label} chooses each trial from those before, so that several processes cannot "
                        "train them side by side: take one process, or parallel=data.")
    if wants_weights and settings.model.weights is None:
        raise UserError(f"baseline {baseline.label} starts from pretrained weights: say which with model.weights.")
    without = (baselines.start_random, baselines.start_previous, baselines.start_related, baselines.start_related_static)
    if settings.model.weights and baseline.start in without:
        raise UserError(f"model.weights: baseline {baseline.label} does not start from pretrained weights; take pt or pt-ft.")
    if baseline.start is baselines.start_related_static and settings.select.indep_run is None:
        raise UserError(f"baseline {baseline.label} needs a finished Indep run of the stream: name its folder in "
                        "select.indep_run.")
    if settings.select.indep_run and baseline.start in without[:-1]:
        raise UserError(f"select.indep_run: baseline {baseline.label} does not look at an Indep run; take ft-s.")
    if settings.search.model and (multitask or baseline.start is not baselines.start_random):
        raise UserError(f"search.model: baseline {baseline.label} hands weights on, which fit one network alone; give "
                        "its name in model.name, or take baseline.start=random.")
    if multitask and settings.search.auxiliary_weight is None:
        raise UserError(f"baseline {baseline.label} weighs auxiliary tasks: give the range in search.auxiliary_weight, for "
                        "example [0, 1].")
    if settings.search.auxiliary_weight and not multitask:
        raise UserError(f"search.auxiliary_weight: baseline {baseline.label} has no auxiliary tasks; take mt.")
    if settings.baseline.auxiliary != 1 and baseline.data is baselines.data_current:
        raise UserError(f"baseline.auxiliary: baseline {baseline.label} has no auxiliary tasks; take mt.")
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
        if "unfinished" in results:
            raise UserError(f"the run in {folder} is {results['reason']}; finish it with --resume.")
        theirs = config.from_dict(config.keys_of(Path(folder) / "config.yaml"), folder).model
    except (OSError, UserError, ValueError) as error:
        raise UserError(f"select.indep_run: {error}") from None
    ours = settings.model
    scratch = results["baseline"].split(", search=")[0] == "indep"  # whatever the search
    if not scratch or (theirs.name, theirs.image_size) != (ours.name, ours.image_size):
        raise UserError(f"select.indep_run={folder}: is a run of {results['baseline']} with {theirs.name} at "
                        f"{theirs.image_size} pixels; it must be one of indep with {ours.name} at {ours.image_size}.")
    found = {key: predictor_path(Path(folder), row["index"]) for key, row in metrics.by_identity(results["tasks"]).items()}
    wanted = [{"task": task.task, "name": task.name, "year": task.year, "index": task.index} for task in tasks]
    paths = {row["index"]: found.get(key) for key, row in metrics.by_identity(wanted).items()}
    for task in tasks[:-1]:  # nothing comes after the last one
        if paths[task.index] is None or not paths[task.index].is_file():
            raise UserError(f"select.indep_run={folder}: has no predictor of {task.name} ({task.year}).")
    return paths


def _only_announced(dataset: DataSet, settings: Config) -> bool:
    """Whether the sizes of a data set are known from the catalogue, but its images are not cached yet."""
    return bool(dataset.images) and cache.meta_of(cache.folder_of(dataset, settings.data)) is None


def head(setup: Setup) -> dict:
    """What `results.json` says of the run beside what comes out of it."""
    return {"stream": setup.stream.name, "phase": setup.config.phase, "baseline": setup.baseline.label,
            "seed": setup.config.seed, "trials": setup.config.search.trials, "steps": setup.config.fit.steps,
            "partial": [task.name for task in setup.stream.missing], "cflop_pretraining": setup.pretraining_flops}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def machine(device: torch.device) -> dict:
    """Which software on which machine, from when on."""
    root = Path(nevis_lite.__file__).resolve().parent.parent
    try:
        revision = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12"], check=True,
                                  capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = None
    return {"nevis_lite": nevis_lite.__version__, "revision": revision, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "device": device_name(device), "cpus": os.cpu_count(), "platform": platform.platform(),
            "python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__,
            "numpy": numpy.__version__}


def environment(setup: Setup, command: str) -> dict:
    """What a reader of the numbers needs to know, also before `results.json` is there, and the digests that a resume checks."""
    return machine(setup.device) | {
        "command": command, "head": head(setup), "planned": len(setup.tasks),
        "data": {f"{task.index} {task.task}": Split(folder, "train", setup.device).meta["sha256"]
                 for task, folder in zip(setup.tasks, setup.folders, strict=True)} | _digests(setup.config)}


def _digests(settings: Config) -> dict:
    """Of the files outside of the run that its numbers rest on."""
    paths = {"model.weights": settings.model.weights,
             "select.indep_run": settings.select.indep_run and Path(settings.select.indep_run) / "results.json"}
    return {key: hashlib.sha256(Path(path).read_bytes()).hexdigest() for key, path in paths.items()
            if path not in (None, "published")}
