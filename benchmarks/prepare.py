"""Building the pixel cache against torchvision's ImageFolder and DataLoader, in one go: `python benchmarks/prepare.py`.

Makes JPEG photographs of a few sizes in class folders, then decodes and shrinks all of them (shorter side 128) in both ways
with the same number of workers, in turns, three times each. Then builds the caches of growing data sets of small images, each
in a process of its own, and prints its peak memory, which must not grow with the number of images. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from nevis_lite import cache
from nevis_lite.config import DataConfig
from nevis_lite.datasets import DataSet
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


def build(source: Path, data: Path):
    cache.prepare(DataSet(key="bench", name="bench", folder=source, reader="class_folders"), DataConfig(dir=str(data)))


def seconds_of_ours(source: Path) -> float:
    with tempfile.TemporaryDirectory() as data:
        began = time.perf_counter()
        build(source, Path(data))
        return time.perf_counter() - began


def seconds_of_torchvision(source: Path, workers: int) -> float:
    from torch.utils.data import ConcatDataset, DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    shrink = v2.Compose([v2.PILToTensor(), v2.Resize(128, antialias=True)])
    images = ConcatDataset([ImageFolder(source / split, shrink) for split in SPLITS])
    began = time.perf_counter()
    for _ in DataLoader(images, batch_size=64, num_workers=workers, collate_fn=list):
        pass
    return time.perf_counter() - began


def peak_of(count: int) -> float:
    """Peak memory in MB of a process that builds the cache of `count` small images."""
    with tempfile.TemporaryDirectory() as folder:
        photographs(Path(folder) / "images", count, (32,), "png")
        done = subprocess.run([sys.executable, __file__, "--only-build", folder], capture_output=True, text=True, check=True)
        return float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="photographs of the comparison")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2000, 20000, 100000], help="sizes of the memory test")
    parser.add_argument("--only-build", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_build:
        build(Path(arguments.only_build) / "images", Path(arguments.only_build) / "data")
        status = Path("/proc/self/status").read_text()  # getrusage would tell the parent's peak if that was higher
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    workers = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        photographs(Path(folder), arguments.images, (300, 400, 500, 640), "jpg")
        times = {"pixel cache": [], "ImageFolder + DataLoader": []}
        for _ in range(3):
            times["pixel cache"].append(seconds_of_ours(Path(folder)))
            times["ImageFolder + DataLoader"].append(seconds_of_torchvision(Path(folder), workers))
    print(f"{arguments.images} JPEGs of 300 to 640 pixels, {workers} workers, three times each")
    for name, seconds in times.items():
        print(f"{name:<26} {arguments.images / statistics.median(seconds):>7.0f} images/s "
              f"({arguments.images / max(seconds):.0f} to {arguments.images / min(seconds):.0f})")
    ours, theirs = (statistics.median(seconds) for seconds in times.values())
    print(f"ratio: {theirs / ours:.2f}")
    for count in arguments.sizes:
        print(f"peak memory for {count:>7} images of 32 pixels: {peak_of(count):.0f} MB", flush=True)


if __name__ == "__main__":
    main()
