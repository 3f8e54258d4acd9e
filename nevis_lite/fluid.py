"""FLUID (arXiv 2007.02519): a learner on a stream of single images in an open world, with its compute counted.

It predicts each image among the classes known so far or calls it new, is told the label, and trains when its strategy says so:
`python -m nevis_lite.fluid --config fluid_demo.yaml`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nevis_lite import config, fluid_metrics, fluid_updates, stream
from nevis_lite.config import DataConfig, ModelConfig, UserError, option
from nevis_lite.fluid_metrics import Log
from nevis_lite.fluid_sequence import Sequence, build_sequence, class_counts

# torch is imported by the functions that need it, so that --help and a wrong key are answered at once.

__all__ = ["build_sequence", "class_counts", "run"]
SCORES = ("msp", "mdt", "maxlogit")
MACS = ("cached", "uncached", "backward")  # what a Meter counts
CHUNK = 256  # images whose features are computed at once, none of whose labels is known then


@dataclass
class SequenceConfig:
    classes: int = option(200, "classes of the test sequence", low=2)
    known: float = option(0.25, "share of them that is known from the start, of the pretrained classes", low=0.0, high=1.0)
    c: float = option(25.0, "class number r of K has floor(c K / (r + K / 40)) images: from about 40 c down to c", above=0)
    natural: bool = option(False, "take all images of a class instead")
    head: float | None = option(None, "classes with more samples are the head, others the tail; none: 2 c")
    validation_classes: int = option(40, "classes, all others, of the sequence that thresholds are fitted on; 0: no such one",
                                     low=0)


@dataclass
class PretrainConfig:
    classes: int = option(0, "pretrained classes; 0: all that the novel classes of the sequences leave", low=0)
    share: float = option(0.5, "share of their images that pretrains, and never comes in a sequence", above=0.0, high=1.0)
    steps: int = option(2000, "updates of supervised pretraining; 0 with model.weights=none is a start from scratch", low=0)
    batch: int = option(64, "images of such an update", low=2)
    lr: float = option(0.05, "its peak learning rate", above=0.0)
    episodes: int = option(1000, "updates of pretraining on episodes (ptn, meta_baseline)", low=0)
    episode_lr: float = option(0.003, "its learning rate", above=0.0)
    way: int = option(5, "classes of an episode", low=2)
    shot: int = option(1, "images of a class that its mean is made of", low=1)
    query: int = option(15, "images of a class that are classified", low=1)


@dataclass
class UpdateConfig:
    when: str = option("every", "every, doubling, new_classes, error_rise, never",
                       choices=("every", "doubling", "new_classes", "error_rise", "never"))
    epochs: int = option(4, "epochs of an update, over all samples so far", low=1)
    samples: int = option(0, "every: samples between two updates; doubling: before the first; error_rise: of a window; 0: an "
                             "18th of the sequence", low=0)
    classes: int = option(10, "new_classes: how many", low=1)
    rise: float = option(0.05, "error_rise: by how much", above=0.0, high=1.0)


@dataclass
class LearnConfig:
    batch: int = option(256, "images of a step", low=2)
    lr_head: float = option(0.1, "learning rate of methods that train the head alone", above=0.0)
    lr_full: float = option(0.01, "of methods that train all layers", above=0.0)
    weight_decay: float = option(1e-4, "on conv and linear weights", low=0.0)
    scale: float = option(16.0, "length of features in the inner products of ncm, et and imprint; 0: as they are", low=0.0)
    switch: float = option(1 / 9, "imprint: share of the sequence after which the rows are trained", low=0.0, high=1.0)
    buffer: float = option(0.057, "der, derpp, er_ace: samples that the buffer holds, as a share of the sequence", above=0.0,
                           high=1.0)
    der: float = option(0.5, "der, derpp: weight of the replayed logits", low=0.0)
    derpp: float = option(0.5, "derpp: weight of the replayed labels", low=0.0)
    ewc: float = option(10.0, "ewc: weight of the penalty", low=0.0)
    fisher: int = option(256, "ewc: images that tell which weights matter", low=1)


@dataclass
class FluidConfig:
    """The paper's constants are the defaults, scaled to the length of the sequence."""

    tasks: list = option([], "data sets whose images are pooled, as stream.tasks: {task: caltech256, year: 2007}, {idx, ...}")
    methods: list[str] = option([], "which; empty: all")
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    model: ModelConfig = field(default_factory=lambda: ModelConfig("resnet34", 64))
    data: DataConfig = field(default_factory=lambda: DataConfig(crop_area=(0.3, 1.0)))
    seed: int = option(0, "every random draw is a function of (seed, sample, epoch)", low=0)
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps")
    threads: int = option(0, "CPU threads, 0: torch's choice", low=0)
    checkpoint_seconds: float = option(60.0, "seconds between two checkpoints; updates are followed by one, too", low=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# A run


def run(settings: FluidConfig, out: str | Path, resume: bool = False) -> dict:
    """Pretrain once, then send each method down the validation and the test sequence; the content of results.json.

    With `resume`, what is finished stays, and a method goes on at its last checkpoint; methods may be added. UserError for what
    makes no sense, or when another process runs in the folder; MissingData.
    """
    if not settings.tasks:
        raise UserError("tasks: a pool of images needs at least one data set.")
    tasks = stream.load(settings.tasks, settings.data.dir).tasks  # says what is missing before torch is loaded
    import torch

    from nevis_lite import fit, fluid_pool, fluid_pretrain, models, setup
    from nevis_lite.fluid_methods import METHODS
    from nevis_lite.run_folder import write_atomic, write_json

    if wrong := [name for name in settings.methods if name not in METHODS]:
        raise UserError(f"methods: unknown method {wrong[0]}{config.nearest(wrong[0], METHODS)}.")
    forward_macs = setup.network(settings.model.name, "model.name", settings.model.image_size).forward_flops // 2
    if settings.model.weights and not resume:
        models.pretrained(settings.model.name, settings.model.weights)  # refuses wrong ones before there is a folder
    device = fit.pick_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    base, stages = fluid_pool.draw(fluid_pool.pool_of(tasks, settings.data, device), settings)
    if any(METHODS[name].pretraining != "supervised" for name in settings.methods or METHODS):
        fluid_pretrain.episode_classes(base, settings.pretrain)  # refuses a wrong way before anything is trained
    out, test = Path(out), stages["test"].sequence
    lock, done = _open(out, settings, setup.machine(device), resume)
    with lock:
        if (out / "sequence.npz").is_file() and Sequence.load(out / "sequence.npz").hash != test.hash:
            raise UserError(f"{out}: the images changed since the run began; start anew with another --out.")
        for which, file in (("test", "sequence.npz"), ("validation", "validation.npz")):
            if which in stages:
                write_atomic(out / file, stages[which].sequence.save)
        results = {"kind": "fluid", "name": out.name, "seed": settings.seed,
                   "sequence": {"hash": test.hash, "samples": len(test.index), "classes": len(test.classes),
                                "known": test.known, "head": int(test.head.sum())},
                   "pretraining": {"classes": base.meta["num_classes"], "images": len(base)}, "methods": done}
        for name in settings.methods or METHODS:
            if name not in done:
                done[name] = _evaluate(name, stages, base, settings, out, forward_macs)
                write_json(out / "results.json", results)
            for checkpoint in (out / "methods" / name).glob("*.pt"):
                checkpoint.unlink()
    return results


def _evaluate(name: str, stages: dict, base, settings: FluidConfig, out: Path, forward_macs: int) -> dict:
    """Send a method down all sequences, and write their logs; the method's part of results.json."""
    from tqdm import tqdm

    from nevis_lite import fluid_pretrain
    from nevis_lite.fluid_methods import METHODS
    from nevis_lite.run_folder import write_atomic

    method, folder, logs, seconds, thresholds = METHODS[name], out / "methods" / name, {}, {}, {}
    kind = method.pretraining
    folder.mkdir(parents=True, exist_ok=True)
    for which, stage in stages.items():
        if kind not in stage.starts:
            network = fluid_pretrain.network(kind, out, base, settings)
            stage.starts[kind] = fluid_pretrain.start(network, stage, base, settings, forward_macs)
        if not method.full and kind not in stage.features:
            stage.features[kind] = fluid_pretrain.features(stage.starts[kind].backbone, stage.images, settings)
        learner = method(stage.starts[kind], len(stage.sequence.classes), len(stage.sequence.index), settings)
        logs[which], seconds[which] = live(learner, stage, settings, folder / f"{which}.pt", f"{name}, {which}")
        write_atomic(folder / ("log.npz" if which == "test" else f"{which}.npz"), logs[which].save)
    if "validation" in stages:
        thresholds = {score: fluid_metrics.fit_threshold(logs["validation"], stages["validation"].sequence, score)
                      for score in logs["validation"].novelty}
    found = {which: fluid_metrics.evaluate(logs[which], stage.sequence, thresholds) for which, stage in stages.items()}
    tqdm.write(f"{name}: overall accuracy {found['test']['overall']:.4f} in {seconds['test']:.0f} s", file=sys.stdout)
    sys.stdout.flush()
    tuned = {"validation": {name: found["validation"][name] for name in ("overall", "mean_class")}} if thresholds else {}
    return found["test"] | tuned | {"thresholds": thresholds, "seconds": round(seconds["test"], 1)}


def strategy(options: UpdateConfig, length: int):
    """The update strategy of a sequence of `length` samples."""
    samples, epochs = options.samples or max(1, length // 18), options.epochs
    return {"every": fluid_updates.Every(samples, epochs), "doubling": fluid_updates.Doubling(samples, epochs),
            "new_classes": fluid_updates.NewClasses(options.classes, epochs),
            "error_rise": fluid_updates.ErrorRise(samples, options.rise, epochs), "never": fluid_updates.Never()}[options.when]


def live(learner, stage, settings: FluidConfig, checkpoint: Path | None = None, title: str = "",
         chunk: int = CHUNK) -> tuple[Log, float]:
    """Predict, score, reveal, observe, maybe update, sample by sample; the log, and seconds.

    Between two updates of a backbone the features of `chunk` images are computed at once, which sees no label, so that the
    predictions are those of one image at a time. Goes on at `checkpoint` if that's there.
    """
    import torch
    from tqdm import tqdm

    from nevis_lite import fluid_pretrain
    from nevis_lite.fluid_learners import Memory
    from nevis_lite.run_folder import load_state, write_atomic

    sequence, began = stage.sequence, time.monotonic()
    label, length, when = sequence.label, len(sequence.label), strategy(settings.update, len(sequence.label))
    labels, known = torch.from_numpy(label).to(learner.device), set(range(sequence.known))
    features = None if learner.full else stage.features[learner.pretraining]
    log = {"pred": np.full(length, -1), "hit": np.zeros(length, bool), "new": np.zeros(length, bool),
           **{name: np.zeros(length, np.float32) for name in SCORES},
           **{f"macs_{name}": np.zeros(length) for name in MACS}}
    done, last, updates, spent, saved = 0, 0, [], 0.0, began
    if checkpoint and checkpoint.is_file():
        state = load_state(checkpoint)
        log = {name: values.numpy() for name, values in state["log"].items()}
        done, last, updates, spent = (state[name] for name in ("done", "last", "updates", "seconds"))
        learner.load_state_dict(state["learner"])
        known.update(label[:done].tolist())

    def save():
        state = {"log": {name: torch.from_numpy(values) for name, values in log.items()}, "done": done, "last": last,
                 "updates": updates, "seconds": spent + time.monotonic() - began, "learner": learner.state_dict()}
        write_atomic(checkpoint, lambda file: torch.save(state, file))

    first, ready = done, length if features is not None else done  # features of samples from `first` up to `ready` are there
    for t in tqdm(range(done, length), initial=done, total=length, desc=title, unit=" samples", disable=None, leave=False):
        if features is None and t == ready:
            first, ready = t, min(t + chunk, length)
            block = fluid_pretrain.features(learner.backbone, stage.images, settings, torch.arange(first, ready))
        h = features[t] if features is not None else block[t - first]
        with torch.no_grad():
            logits = learner.logits(h[None])
            scores = learner.novelty(h[None], logits)
            log["pred"][t] = logits.argmax() if known and not logits.isnan().any() else -1  # NaN: its training diverged
            for name in SCORES:
                log[name][t] = scores[name]
            learner.meter.predict(1)
            learner.observe(h, int(label[t]))
        log["new"][t], log["hit"][t] = label[t] not in known, log["pred"][t] == label[t]
        known.add(int(label[t]))
        done = t + 1
        if done < length and when.due(done, last, log["hit"][:done], log["new"][:done]):
            if learner.update(Memory(stage.images, labels[:done], features), when.epochs):
                updates.append({"t": done, "epochs": when.epochs, "images": done * when.epochs})
            last, ready = done, ready if features is not None else done
        for name in MACS:
            log[f"macs_{name}"][t] = getattr(learner.meter, name)
        if checkpoint and (last == done or done == length or time.monotonic() - saved >= settings.checkpoint_seconds):
            save()
            saved = time.monotonic()
    found = Log(log["pred"], {name: log[name] for name in SCORES}, *(log[f"macs_{name}"] for name in MACS), updates)
    return found, spent + time.monotonic() - began


def _open(out: Path, settings: FluidConfig, machine: dict, resume: bool) -> tuple:
    """Make the folder, or check that it holds a run of these settings; its lock, and the finished methods' results by name."""
    from nevis_lite.run_folder import holds_run, only_one, refuse_another_config, write_atomic, write_json

    started, plain = out / "config.yaml", config.to_dict(settings)
    if holds_run(out, resume):
        refuse_another_config(out, plain, FluidConfig, ("methods",))
    done = fluid_metrics.load(out)["methods"] if (out / "results.json").is_file() else {}
    out.mkdir(parents=True, exist_ok=True)
    lock = only_one(out)
    write_json(out / "environment.json", machine)
    write_atomic(started, lambda file: file.write(config.write_yaml(plain).encode()))
    return lock, done


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use, 3 data missing, 130 interrupted."""
    arguments = config.parser_of(
        "fluid", "Send learners down a stream of single images in an open world, and report accuracy and compute.",
        FluidConfig(), "run folder", "go on with the run in the folder; methods may be added",
        "fluid_demo.yaml methods=[ncm,et] seed=1").parse_intermixed_args(argv)

    def work():
        settings = config.load(arguments.config, arguments.overrides, FluidConfig)
        out = config.out_of(arguments, settings.seed)
        results = run(settings, out, arguments.resume)
        print(f"{fluid_metrics.table(results)}\n\nIn {out}: results.json, sequence.npz, methods/")

    return config.exit_code(work, "Stopped; --resume goes on at the last checkpoint.")


if __name__ == "__main__":
    sys.exit(main())
