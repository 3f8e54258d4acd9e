"""A lifetime: one network learns tasks in blocks, and is evaluated on all of them before the first block and after each.

Writes the log that the lifelong-learning metrics judge (`lifelong.py`), and those of single-task experts, which learn one task
from scratch in as many updates: `python -m nevis_lite.scenario --config split_mnist.yaml`.
"""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nevis_lite import config, lifelong, lifelong_log, lifelong_report, stream
from nevis_lite.config import DataConfig, ModelConfig, UserError, option

# torch is imported by the functions that need it, so that --help and a wrong key are answered at once.


@dataclass
class ScenarioConfig:
    """An experience is a training image. Each block starts with a new optimiser and learning-rate schedule."""

    tasks: list = option([], "as stream.tasks: {task: mnist, year: 2004, split: 5}, {folder, name, year}, ...")
    blocks: list = option([], "the task that each learning block trains, counted from 0; empty: each once, in order")
    head: str = option("shared", "shared: all tasks use one head, as if their classes were the same; own: a head for each",
                       choices=("shared", "own"))
    steps: int = option(200, "updates of a learning block", low=1)
    log_every: int = option(10, "updates between two values of the learning curve, which are accuracies on dev", low=1)
    batch: int = option(16, "images of an update", low=2)
    lr: float = option(0.02, "peak learning rate of a block", above=0.0)
    experts: bool = option(True, "train the single-task experts, without which RP and SE are missing")
    model: ModelConfig = field(default_factory=lambda: ModelConfig("resnet8", 32))
    data: DataConfig = field(default_factory=lambda: DataConfig(crop_area=(0.8, 1.0), flip=False))
    seed: int = option(0, "every random draw is a function of (seed, block, step)", low=0)
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps")
    threads: int = option(0, "CPU threads, 0: torch's choice", low=0)


def run(settings: ScenarioConfig, out: str | Path, resume: bool = False) -> dict:
    """The lifetime and its experts, a log each in the folder `out`; returns their metrics (`lifelong.evaluate`).

    With `resume`, logs that are whole stay, and one that was interrupted is begun anew. UserError for what makes no sense, or
    when another process runs in the folder.
    """
    from nevis_lite.run_folder import only_one, write_atomic, write_json

    out, life = Path(out), set_up(settings)
    plain, known = config.write_yaml(config.to_dict(settings)), out / "config.yaml"
    if known.is_file() and not resume:
        raise UserError(f"{out} already holds a lifetime: go on with --resume, or choose another folder with --out.")
    if known.is_file() and known.read_text(encoding="utf-8") != plain:
        raise UserError(f"{out}: the settings changed since the lifetime began; change them back, or choose another --out.")
    (out / "experts").mkdir(parents=True, exist_ok=True)
    with only_one(out):
        write_atomic(known, lambda file: file.write(plain.encode()))
        blocks = settings.blocks or list(range(len(life.names)))
        log = _log(out / "log.csv", life, blocks, 0)
        experts = {}
        for task in sorted(set(blocks)) if settings.experts else []:
            expert = _log(out / "experts" / f"{task}.csv", life, [task], 1 + task)
            experts[life.names[task]] = [row["value"] for row in expert if row["block_type"] == "train"]
        results = lifelong.evaluate(log, experts)
        write_json(out / "results.json", results)
    return results


@dataclass
class Life:
    """The tasks of a lifetime, and what every network of it starts from."""

    settings: ScenarioConfig
    names: list[str]
    splits: list[dict]  # of each task: Split by name


def set_up(settings: ScenarioConfig) -> Life:
    """Everything that can be checked before training; the pixel caches that are missing are built."""
    import torch

    from nevis_lite import cache, fit, models
    from nevis_lite.data import Split

    models.check_name(settings.model.name)
    if settings.model.weights:
        raise UserError("model.weights: a lifetime starts from random weights.")
    if not settings.tasks:
        raise UserError("tasks: a lifetime needs at least one task.")
    tasks = stream.load(settings.tasks, settings.data.dir).tasks
    if wrong := [number for number in settings.blocks if number not in range(len(tasks))]:
        raise UserError(f"blocks: there is no task {wrong[0]}; tasks are counted from 0 to {len(tasks) - 1}.")
    device = fit.pick_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    life = Life(settings, [], [])
    for task in tasks:
        folder = cache.prepare(task.dataset, settings.data)
        life.splits.append({name: Split(folder, name, device, task.part) for name in ("train", "dev", "test")})
        meta = life.splits[-1]["train"].meta
        if meta["kind"] == "multi_label":
            raise UserError(f"{task.name}: the values of a lifetime are accuracies, which need one label an image.")
        if task.part and (meta["num_classes"] < 2 or 0 in meta["sizes"].values()):
            raise UserError(f"{task.name}: has too few classes or images; split into fewer tasks.")
        name = task.name.lower()
        if name in life.names:
            raise UserError(f"tasks: {task.name} is listed twice; a task is listed once and named in several blocks.")
        life.names.append(name)
    return life


def _log(path: Path, life: Life, blocks: list[int], number: int) -> list[dict]:
    """The rows of lifetime `number` (0, experts from 1 on), lived through now if the file isn't there yet."""
    from nevis_lite.run_folder import write_atomic

    if not path.is_file():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([lifelong_log.COLUMNS, *_live(life, blocks, number, path.stem)])
        write_atomic(path, lambda file: file.write(text.getvalue().encode()))
    with open(path, encoding="utf-8", newline="") as file:
        return [row | {"value": float(row["value"]), "block_num": int(row["block_num"]), "exp_num": int(row["exp_num"])}
                for row in csv.DictReader(file)]


def _live(life: Life, blocks: list[int], number: int, name: str) -> list[tuple]:
    """Train an untrained network through `blocks`; rows of lifelong_log.COLUMNS."""
    import torch
    from torch import nn
    from tqdm import tqdm

    from nevis_lite import fit, models
    from nevis_lite.config import FitConfig
    from nevis_lite.data import EndlessStream, generator

    settings, device = life.settings, life.splits[0]["train"].device
    size, rule = settings.model.image_size, FitConfig(steps=settings.steps, max_warmup=0.1)
    random = generator("cpu", "weights", settings.seed, number)
    backbone = models.build(settings.model.name, generator=random)
    classes = [splits["train"].meta["num_classes"] for splits in life.splits]
    heads = [models.linear_head(backbone.num_features, count, random) for count in
             ([max(classes)] if settings.head == "shared" else classes)]
    nets = [models.Classifier(backbone, heads[task % len(heads)]).to(device, memory_format=torch.channels_last)
            for task in range(len(classes))]
    rows, seen = [], 0

    def record(block: int, kind: str, task: int, net: nn.Module):
        error = fit.evaluate(net, life.splits[task]["dev" if kind == "train" else "test"], size, rule)
        if error is None:
            raise UserError(f"{life.names[task]}: the training diverged; lower lr.")
        rows.append((block, kind, life.names[task], seen, 1 - error))

    with tqdm(total=len(blocks) * settings.steps, desc=f"lifetime {name}", unit=" updates", disable=None, leave=False) as bar:
        for position, task in enumerate(blocks):
            for other, net in enumerate(nets):
                record(2 * position, "test", other, net)
            trial = fit.start(nets[task], rule)
            batches = EndlessStream(life.splits[task]["train"], settings.batch, settings.data, size,
                                    (settings.seed, number, position))
            for step in range(settings.steps):
                if step % settings.log_every == 0:
                    record(2 * position + 1, "train", task, nets[task])
                fit.update(trial, batches, {"lr": settings.lr, "label_smoothing": 0.0}, rule)
                seen += settings.batch
                bar.update()
        for other, net in enumerate(nets):
            record(2 * len(blocks), "test", other, net)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use, 3 data missing, 130 interrupted."""
    arguments = config.parser_of(
        "scenario", "Train one network through a lifetime of learning and evaluation blocks, and report its metrics.",
        ScenarioConfig(), "folder of the logs", "keep the logs that are whole",
        "split_mnist.yaml head=own seed=1").parse_intermixed_args(argv)

    def work():
        settings = config.load(arguments.config, arguments.overrides, ScenarioConfig)
        out = config.out_of(arguments, settings.seed)
        results = run(settings, out, arguments.resume)
        print(lifelong_report.table(results, f"lifetime in {out}"))
        print(f"\nIn {out}: log.csv, experts/, results.json")

    return config.exit_code(work, "Stopped; --resume keeps the logs that are whole.")


if __name__ == "__main__":
    sys.exit(main())
