"""Building the pixel cache against torchvision's ImageFolder and DataLoader, in one go: `python benchmarks/prepare.py`.

Makes JPEG photographs of a few sizes in class folders, then decodes and shrinks all of them (shorter side 128) in both ways
with the same number of workers, in turns, five times each; and a third time with a loader that lets the JPEG decoder leave out
details, as the cache does. Then builds the caches of growing data sets of small images, each
in a process of its own, and prints its peak memory, which must not grow with the number of images. At last it opens the
prepared stream FULL, made of the tests' small copies of its data sets. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from nevis_lite import cache, config, stream
from nevis_lite.config import DataConfig
from nevis_lite.datasets import DataSet
from nevis_lite.pixels import DRAFT
from nevis_lite.splits import SPLITS


def photographs(folder: Path, count: int, sides: tuple[int, ...], kind: str):
    """`count` smooth random pictures in two classes of four splits."""
    random = np.random.default_rng(0)
    for number in range(count):
        width, height = (sides[(number + shift) % len(sides)] for shift in (0, 1))
        rough = Image.fromarray(random.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), np.uint8))
        path = folder / SPLITS[number % 4] / f"class{number // 4 % 2}" / f"{number:07d}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        rough.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of all processors, those of ended child processes too."""
    began, used = time.perf_counter(), sum(os.times()[:4])
    work()
    return time.perf_counter() - began, sum(os.times()[:4]) - used


def build(source: Path):
    """The cache of class folders, thrown away afterwards."""
    with tempfile.TemporaryDirectory() as data:
        cache.prepare(DataSet(key="bench", name="bench", folder=source, reader="class_folders"), DataConfig(dir=data))


def drafted(path: str) -> Image.Image:
    with Image.open(path) as image:
        image.draft("RGB", (int(DRAFT * 128),) * 2)
        return image.convert("RGB")


def with_torchvision(source: Path, workers: int, **loader) -> Callable[[], None]:
    """What reads the same images with torchvision; to list them takes no part in its time."""
    import torch
    from torch.utils.data import ConcatDataset, DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    def joined(examples: list) -> tuple:  # images of all sizes in one tensor, which the parent gets sooner than many
        return torch.cat([image.flatten() for image, _ in examples]), [(image.shape, label) for image, label in examples]

    shrink = v2.Compose([v2.PILToTensor(), v2.Resize(128, antialias=True)])
    images = ConcatDataset([ImageFolder(source / split, shrink, **loader) for split in SPLITS])

    def load():
        for _ in DataLoader(images, batch_size=64, num_workers=workers, collate_fn=joined):
            pass

    return load


def compare(count: int, sides: tuple[int, ...]):
    workers = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        photographs(Path(folder), count, sides, "jpg")
        ways = {"pixel cache": lambda: build(Path(folder)),
                "ImageFolder + DataLoader": with_torchvision(Path(folder), workers),
                "the same, drafting": with_torchvision(Path(folder), workers, loader=drafted)}
        times = {name: [] for name in ways}
        for _ in range(5):
            for name, work in ways.items():
                times[name].append(timed(work))
    print(f"{count} JPEGs of {min(sides)} to {max(sides)} pixels, {workers} workers, five times each")
    for name, rounds in times.items():
        seconds, used = zip(*rounds, strict=True)
        print(f"{name:<26} {count / statistics.median(seconds):>7.0f} images/s ({count / max(seconds):.0f} to "
              f"{count / min(seconds):.0f}), {1000 * statistics.median(used) / count:.2f} ms of a processor an image")
    for what, kind in (("time", 0), ("processors' time", 1)):
        ours, *theirs = (statistics.median(values[kind] for values in rounds) for rounds in times.values())
        print(f"ratio of {what}: {', '.join(f'{other / ours:.2f}' for other in theirs)}", flush=True)


def peak_of(count: int) -> float:
    """Peak memory in MB of a process that builds the cache of `count` small images."""
    with tempfile.TemporaryDirectory() as folder:
        photographs(Path(folder), count, (32,), "png")
        done = subprocess.run([sys.executable, __file__, "--only-build", folder], capture_output=True, text=True, check=True)
        return float(done.stdout)


def open_full():
    """Seconds until all sizes are known of a prepared stream, and until a run could begin; and whether pixels were read."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from test_published import publish

    from nevis_lite.setup import set_up

    with tempfile.TemporaryDirectory() as folder:
        publish(Path(folder))
        settings = config.from_dict({"stream": "full", "data": {"dir": folder}, "device": "cpu"})
        set_up(settings, stream.load("full", folder))  # builds the caches
        opened = []
        sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)

        def sizes() -> int:
            return len([cache.meta_of(cache.prepare(task.dataset, settings.data)) for task in stream.load("full", folder)])

        seconds = [statistics.median(timed(work)[0] for _ in range(5))
                   for work in (sizes, lambda: set_up(settings, stream.load("full", folder)))]
        print(f"opening the prepared stream of {sizes()} tasks: {seconds[0]:.2f} s, and with the network that the run counts "
              f"FLOPs on {seconds[1]:.2f} s; files of pixels read: {sum(path.endswith('.pixels') for path in opened)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="photographs of the comparison")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2000, 20000, 100000], help="sizes of the memory test")
    parser.add_argument("--only-build", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_build:
        build(Path(arguments.only_build))
        status = Path("/proc/self/status").read_text()  # getrusage would tell the parent's peak if that was higher
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    compare(arguments.images, (300, 400, 500, 640))
    compare(arguments.images, (375, 500))
    compare(arguments.images // 20, (1200, 1600, 2400))
    for count in arguments.sizes:
        print(f"peak memory for {count:>7} images of 32 pixels: {peak_of(count):.0f} MB", flush=True)
    open_full()


if __name__ == "__main__":
    main()
