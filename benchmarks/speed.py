"""How fast the steps are, each figure against something else in the same go: `PYTHONPATH=. python benchmarks/speed.py`.

The rival of a training step is the plain PyTorch loop that most people would write: decoded images in memory, torchvision's
RandomResizedCrop and flip image by image in a DataLoader, NCHW, eager, in single precision, and on a GPU with autocast, too.
The two take turns, `--repeats` times; a ratio is that of the medians, and brackets hold the lowest and the highest.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
import yaml
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from nevis_lite import baselines, cache, config, datasets, fit, flops, metrics, models, stream, train
from nevis_lite.config import DataConfig, FitConfig, StreamConfig
from nevis_lite.data import EndlessStream, Split, generator

HYPERPARAMETERS = {"lr": 0.01, "label_smoothing": 0.1}


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds by the clock until the device is done."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def in_turns(works: dict[str, Callable], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Seconds of each work, `repeats` times, after a call that does not count."""
    for work in works.values():
        timed(work, device)
    seconds = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seconds[name].append(timed(work, device))
    return seconds


def show(title: str, seconds: dict[str, list[float]], amount: int, unit: str):
    """A line for each work: amount a second, and how many times the first is faster."""
    first, *_ = names = list(seconds)
    for name in names:
        rates = sorted(amount / value for value in seconds[name])
        ratio = statistics.median(seconds[name]) / statistics.median(seconds[first])
        against = "" if name == first else f"   x {ratio:.2f}"
        spread = f"({rates[0]:,.1f} to {rates[-1]:,.1f})"
        print(f"{title:<42} {name:<26} {statistics.median(rates):>10,.1f} {spread} {unit}{against}", flush=True)
        title = ""


# ---- the plain loop -------------------------------------------------------------------------------------------------


class InMemory(Dataset):
    """A split of the cache as decoded images and a torchvision transform: what the plain loop reads."""

    def __init__(self, split: Split, transform: v2.Transform):
        pixels = split.pixels.cpu().numpy()
        self.images = [Image.fromarray(pixels[at:at + high * wide * deep].reshape((high, wide, deep)).squeeze()).convert("RGB")
                       for at, high, wide, deep in split.index.tolist()]
        self.labels, self.transform = split.labels.cpu(), transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number: int):
        return self.transform(self.images[number]), self.labels[number]


def transforms(size: int, settings: DataConfig | None = None) -> v2.Compose:
    """Of training with `settings`; without, of evaluation."""
    crop = [v2.Resize(size), v2.CenterCrop(size)] if settings is None else [
        v2.RandomResizedCrop(size, settings.crop_area), v2.RandomHorizontalFlip(0.5 if settings.flip else 0.0)]
    return v2.Compose([*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])


def endless(images: InMemory, batch: int, workers: int):
    """Shuffled batches without end."""
    loader = DataLoader(images, batch, shuffle=True, drop_last=len(images) >= batch, num_workers=workers,
                        persistent_workers=workers > 0, pin_memory=torch.cuda.is_available())
    while True:
        yield from loader


def plain_steps(model: models.Classifier, batches, device: torch.device, steps: int, rule: FitConfig, amp: bool = False):
    """The textbook loop: SGD with Nesterov momentum and a cosine, the loss read in every step as its progress line does."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=rule.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        images, labels = (part.to(device) for part in next(batches))
        with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
            logits = model(images)
            loss = (F.cross_entropy(logits, labels, label_smoothing=0.1) if labels.ndim == 1
                    else F.binary_cross_entropy_with_logits(logits, labels.float()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        loss.item()


@torch.no_grad()
def plain_evaluation(model: models.Classifier, images: InMemory, device: torch.device):
    model.eval()
    return torch.cat([model(batch.to(device)).cpu() for batch, _ in DataLoader(images, 64)])


# ---- what is measured -----------------------------------------------------------------------------------------------


def split_of(settings: DataConfig, name: str, device: torch.device, key: str = "demo_icons_a") -> Split:
    return Split(cache.prepare(datasets.catalogue(Path(settings.dir))[key], settings), name, device)


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of a large matrix product: the most that a step could reach."""
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side ** 3 / min(in_turns({"product": lambda: left @ right}, device, 10)["product"])


def steps(name: str, size: int, batch: int, settings: DataConfig, device: torch.device, repeats: int, workers: int):
    """Training images a second, share of the peak, and share of the step that goes into making its batch."""
    split, rule = split_of(settings, "train", device), FitConfig()
    count = max(2, (2048 if device.type == "cuda" else 256) // batch, 16 * workers)  # more than the loader has ready at first
    count = count if size < 64 or device.type == "cuda" else 2
    nets = [models.build(name, split.meta["num_classes"], generator("cpu", "weights", 0)).to(device) for _ in range(3)]
    trial = fit.start(nets[0].to(memory_format=torch.channels_last), rule)
    batches = EndlessStream(split, batch, settings, size, (0, 0, 0))
    plain = endless(InMemory(split, transforms(size, settings)), batch, workers)

    def ours():
        for _ in range(count):
            fit.update(trial, batches, HYPERPARAMETERS, rule)
            trial.step %= 1000

    def only_batches():
        for step in range(count):
            batches(trial.step + step)

    works = {"nevis_lite": ours, "plain loop": lambda: plain_steps(nets[1], plain, device, count, rule)}
    if device.type == "cuda":
        works["plain loop, autocast"] = lambda: plain_steps(nets[2], plain, device, count, rule, amp=True)
    seconds = in_turns(works, device, repeats)
    show(f"training, {name} at {size}, batch {batch}", seconds, count * batch, "images/s")
    making = statistics.median(in_turns({"batches": only_batches}, device, repeats)["batches"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    best, spent = statistics.median(seconds["nevis_lite"]), flops.training_flops(nets[0], size) * count * batch
    print(f"{'':<42} {spent / best / peak(device, dtype):.1%} of the measured {str(dtype)[6:]} peak; making the batches alone "
          f"takes {making / best:.1%} of the step")


def crops(size: int, settings: DataConfig, device: torch.device, repeats: int):
    split = split_of(settings, "train", device)
    images = InMemory(split, transforms(size, settings))
    batches = EndlessStream(split, 128, settings, size, (0, 0, 0))
    count = iter(range(10 ** 9))
    pil = torchvision.transforms.Compose([torchvision.transforms.RandomResizedCrop(size, settings.crop_area),
                                          torchvision.transforms.RandomHorizontalFlip(0.5 if settings.flip else 0.0),
                                          torchvision.transforms.PILToTensor()])
    arrays = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images.images[:512]]
    tensor = v2.Compose([v2.RandomResizedCrop(size, settings.crop_area, antialias=False),
                         v2.RandomHorizontalFlip(0.5 if settings.flip else 0.0)])
    works = {"nevis_lite": lambda: [batches(next(count)) for _ in range(4)],
             "torchvision v2, tensors": lambda: torch.stack([tensor(image) for image in arrays]),
             "torchvision, PIL": lambda: torch.stack([pil(image) for image in images.images[:512]])}
    show(f"crops of {size} pixels", in_turns(works, device, repeats), 512, "images/s")


def evaluation(name: str, size: int, settings: DataConfig, device: torch.device, repeats: int):
    split, rule = split_of(settings, "test", device), FitConfig()
    net = models.build(name, split.meta["num_classes"], generator("cpu", "weights", 0)).to(device)
    images = InMemory(split, transforms(size))
    show(f"evaluation, {name} at {size}", in_turns({
        "nevis_lite": lambda: fit.evaluate(net.to(memory_format=torch.channels_last), split, size, rule),
        "plain loop": lambda: plain_evaluation(net.to(memory_format=torch.contiguous_format), images, device)},
        device, repeats), len(split), "images/s")


def neighbours(device: torch.device, repeats: int):
    """FT-d's relatedness at its largest: 5,000 dev images among 10,000 of train, 512 features."""
    from sklearn.neighbors import KNeighborsClassifier

    random = np.random.default_rng(0)
    train, dev = (random.standard_normal((count, 512), np.float32) for count in (10_000, 5_000))
    labels = random.integers(100, size=10_000)
    tensors = [torch.from_numpy(part).to(device) for part in (train, labels, dev)]
    show("5 nearest of 10,000 for 5,000", in_turns({
        "nevis_lite": lambda: baselines.knn_votes(*tensors, 5, 100),
        "scikit-learn": lambda: KNeighborsClassifier(5, algorithm="brute").fit(train, labels).predict_proba(dev)},
        device, repeats), 5_000, "queries/s")


def stacked(name: str, size: int, batch: int, device: torch.device, repeats: int, trials: int = 4):
    """Gradients of several trials' steps: a step after the other, or one of stacked parameters (torch.func)."""
    nets = [models.build(name, 10, generator("cpu", "weights", number)).to(device, memory_format=torch.channels_last).train()
            for number in range(trials)]
    random = torch.Generator().manual_seed(0)
    images = torch.randn(trials, batch, 3, size, size, generator=random).to(device)
    labels = torch.randint(10, (trials, batch), generator=random).to(device)
    parts = [part.contiguous(memory_format=torch.channels_last) for part in images]
    weights, statistics = torch.func.stack_module_state(nets)

    def loss(weights, statistics, images, labels):
        return F.cross_entropy(torch.func.functional_call(nets[0], (weights, statistics), (images,)), labels)

    def one_after_the_other():
        for net, images, target in zip(nets, parts, labels, strict=True):
            net.zero_grad()
            F.cross_entropy(net(images), target).backward()

    def together():
        losses = torch.vmap(loss)(weights, statistics, images, labels)
        torch.autograd.grad(losses.sum(), list(weights.values()))

    show(f"{trials} trials, {name} at {size}, batch {batch}", in_turns(
        {"one after the other": one_after_the_other, "stacked parameters": together}, device, repeats), trials, "gradients/s")


def processes(folder: str, repeats: int):
    """Whole runs of the command with one process and with two, with and without start-up: 3 tasks of 4 trials of 300 steps."""
    tasks = [{"task": key, "year": 2000 + number} for number, key in enumerate(("demo_mnist", "demo_icons_a", "demo_faces"))]
    content = {"stream": {"tasks": tasks}, "baseline": "indep", "model": {"name": "resnet8", "image_size": 32}, "threads": 1,
               "data": {"crop_area": [0.8, 1.0], "flip": False, "dir": folder}, "search": {"trials": 4},
               "fit": {"steps": 300, "validate_every": 75, "max_warmup": 0.1}}
    path = Path(folder) / "beside.yaml"
    path.write_text(yaml.safe_dump(content))
    count, within = iter(range(100)), {"2 processes": [], "1 process": []}

    def run(name: str):
        out = f"{folder}/{next(count)}"
        subprocess.run([sys.executable, "-m", "nevis_lite.train", "--config", path, "--out", out, f"processes={name[0]}"],
                       check=True, capture_output=True)
        within[name].append(metrics.load(out)["seconds"])

    works = {name: lambda name=name: run(name) for name in within}
    show("trials of a run, whole command", in_turns(works, torch.device("cpu"), repeats), 3600, "steps/s")
    show("trials of a run, without start-up", {name: values[1:] for name, values in within.items()}, 3600, "steps/s")


def demo(settings: DataConfig, device: torch.device, repeats: int, workers: int):
    """The demo's twelve tasks, one trial of 100 steps each, with three validations and the final evaluation."""
    content = {"stream": "demo", "baseline": "indep", "model": {"name": "resnet8", "image_size": 32}, "threads": 1,
               "data": {"crop_area": [0.8, 1.0], "flip": False, "dir": settings.dir}, "device": str(device),
               "fit": {"steps": 100, "validate_every": 50, "max_warmup": 0.1}, "search": {"trials": 1}}
    rule = config.from_dict(content).data
    tasks = stream.load(StreamConfig("demo"), settings.dir)

    def ours():
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            train.run(content, Path(folder) / "run")

    def plain():
        for task in tasks:
            parts = {name: split_of(rule, name, torch.device("cpu"), task.task) for name in ("train", "dev", "test")}
            images = {name: InMemory(part, transforms(32, rule if name == "train" else None)) for name, part in parts.items()}
            net = models.build("resnet8", parts["train"].meta["num_classes"], generator("cpu", "weights", 0)).to(device)
            batches = endless(images["train"], 16, workers)
            plain_evaluation(net, images["dev"], device)
            for _ in range(2):
                plain_steps(net, batches, device, 50, FitConfig())
                plain_evaluation(net, images["dev"], device)
            plain_evaluation(net, images["test"], device)

    show("demo stream, 100 steps a task", in_turns({"nevis_lite": ours, "plain loop": plain}, device, repeats), 1200, "steps/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="of the plain loop's DataLoader (default: 8 with a GPU, 0 without)")
    arguments = parser.parse_args()
    device = fit.pick_device(arguments.device)
    on_gpu, repeats = device.type == "cuda", arguments.repeats
    workers = arguments.workers if arguments.workers is not None else 8 * on_gpu
    if not on_gpu:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if on_gpu else f"{device.type}, 1 thread of {os.cpu_count()} cores"
    print(f"{name}; PyTorch {torch.__version__}, torchvision {torchvision.__version__}; medians of {repeats}")
    with tempfile.TemporaryDirectory() as folder:
        paper, gentle = DataConfig(dir=folder), DataConfig(dir=folder, crop_area=(0.8, 1.0), flip=False)
        for batch in (16, 512):
            steps("resnet8", 32, batch, gentle, device, repeats, workers)
        for net in ("resnet18", "resnet34"):
            for batch in (16, 32, 64, 128, 256, 512) if on_gpu else (16,):
                steps(net, 64, batch, paper, device, repeats, workers)
        for size, settings in ((32, gentle), (64, paper)):
            crops(size, settings, device, repeats)
        evaluation("resnet8", 32, gentle, device, repeats)
        neighbours(device, repeats)
        stacked("resnet8", 32, 16, device, repeats)
        if on_gpu:
            stacked("resnet18", 64, 16, device, repeats)
        processes(folder, min(repeats, 3))
        demo(gentle, device, min(repeats, 3), workers)
    import growth  # which takes the clock from here

    growth.measure(device, repeats)


if __name__ == "__main__":
    main()
