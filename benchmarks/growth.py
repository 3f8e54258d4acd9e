"""How cost grows with the stream and with the data set, and what is spent around the steps: `python benchmarks/growth.py`.

Needs PYTHONPATH=. as `speed.py` does, which calls it at its end. Each figure stands against another of the same go.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from speed import HYPERPARAMETERS, in_turns, split_of, timed

from nevis_lite import baselines, cache, config, cost, fit, models, protocol, run_folder, setup, stream, train
from nevis_lite.baselines import View
from nevis_lite.config import DataConfig, FitConfig, StreamConfig
from nevis_lite.data import EndlessStream, Split, generator
from nevis_lite.progress import Progress
from nevis_lite.run_folder import RunFolder, SnapshotWriter, save_trial

TEN = ("landsat", "optical_digits", "mnist", "textures", "clipart_keywords", "faces", "fashion_mnist", "mnist_rot",
       "icon_parts", "icons_b")  # so that any ten tasks in a row hold each once
STEPS, EVALUATION, SELECTION = "steps", "evaluation", "selection"
PARTS = {  # of a run, and the functions that spend its time
    STEPS: [(fit, "update")], EVALUATION: [(fit, "evaluate")], SELECTION: [(View, "relatedness")],
    "files": [(protocol, "save_trial"), (protocol, "load_trial"), (protocol, "write_atomic"), (RunFolder, "append"),
              (RunFolder, "save")],
    "plan and progress": [(cost, "plan"), (Progress, "begin"), (Progress, "update"), (Progress, "end")],
    "networks": [(baselines, "initial_model"), (models, "build")], "set-up": [(setup, "set_up")]}


@contextmanager
def clocked(parts: dict[str, list[tuple]]):
    """Seconds of the main thread in each part, without those in parts that it calls."""
    seconds = Counter()

    def watch(part: str, work: Callable) -> Callable:
        def watched(*arguments, **keywords):
            if threading.current_thread() is not threading.main_thread():
                return work(*arguments, **keywords)
            before, began = sum(seconds.values()), time.perf_counter()
            try:
                return work(*arguments, **keywords)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # or its time would be that of whoever waits next
                seconds[part] += time.perf_counter() - began - (sum(seconds.values()) - before)
        return watched

    with ExitStack() as patches:
        for part, functions in parts.items():
            for place, name in functions:
                patches.enter_context(mock.patch.object(place, name, watch(part, getattr(place, name))))
        yield seconds


def quietly(settings: dict, out: Path) -> dict:
    with redirect_stdout(io.StringIO()):
        return train.run(settings, out)


def say(title: str, text: str):
    print(f"{title:<42} {text}", flush=True)


# ---- the stream grows -----------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def long_stream(baseline: str, count: int, data: str, device: torch.device, out: Path):
    """The last ten of 20, 50 and 106 small tasks against the first ten. FT-d looks at all earlier tasks by definition."""
    tasks, marks, append = [{"task": f"demo_{TEN[i % 10]}", "year": 1900 + i} for i in range(count)], [], RunFolder.append
    settings = {"stream": {"tasks": tasks}, "baseline": baseline, "model": {"name": "resnet8", "image_size": 16},
                "fit": {"steps": 4, "validate_every": 4}, "search": {"trials": 1}, "select": {"max_train": 50, "max_dev": 25},
                "data": {"dir": data}, "device": str(device), "threads": 1}

    def marking(folder: RunFolder, name: str, row: dict):
        append(folder, name, row)
        if name == "tasks":
            files = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            marks.append((time.perf_counter(), seconds[SELECTION], resident(), (out / "checkpoint.pt").stat().st_size, files))

    with clocked({SELECTION: [(View, "relatedness")]}) as seconds, mock.patch.object(RunFolder, "append", marking):
        quietly(settings, out)
    clock, selecting, memory, checkpoint, files = np.array(marks).T
    rest, selecting = np.diff(clock) - np.diff(selecting), np.diff(selecting)  # number 0 is of the second task

    def ratio(values: np.ndarray, end: int) -> str:
        return f"{np.median(values[end - 10:end]):,.1f} (x {np.median(values[end - 10:end]) / np.median(values[:10]):.2f})"

    for end in (end for end in (20, 50, 106) if end <= count):
        grown = (np.median(memory[end - 10:end]) - np.median(memory[:10])) / (end - 10)
        line = (f"{ratio(rest * 1e3, end - 1)} ms a task; memory {ratio(memory / 1e6, end)} MB, {grown / 1e3:+.0f} kB a task; "
                f"checkpoint {ratio(checkpoint / 1e3, end)} kB; folder {ratio(np.diff(files) / 1e3, end - 1)} kB a task")
        if selecting.any():
            line += f"; besides, selection {ratio(selecting * 1e3, end - 1)} ms"
        say(f"{baseline}, tasks {end - 9} to {end} / first 10", line)


# ---- the data set grows ---------------------------------------------------------------------------------------------


def write_idx(path: Path, values: np.ndarray):
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes((0, 0, 8, values.ndim)) + sizes + values.astype(np.uint8).tobytes())


def data_set(settings: DataConfig, device: torch.device, folder: Path, repeats: int):
    """A step of ResNet-8 at 32 pixels, and the opening of its split, on more and more copies of the digits."""
    digits, rule = split_of(settings, "train", torch.device("cpu"), "demo_mnist"), FitConfig()
    _, high, wide, _ = digits.index[0].tolist()
    images, labels, steps, opened = digits.pixels.numpy().reshape(-1, high, wide), digits.labels.numpy(), {}, {}
    for count in (1_000, 10_000, 100_000):
        source = folder / f"{count} digits"
        source.mkdir()
        copies = np.arange(count) % len(labels)
        for name, rows in (("train", copies), *((name, copies[:100]) for name in ("dev", "dev_test", "t10k"))):
            write_idx(source / f"{name}-images-idx3-ubyte", images[rows])
            write_idx(source / f"{name}-labels-idx1-ubyte", labels[rows])
        task, = stream.load([{"idx": str(source), "year": 2000}])
        with redirect_stderr(io.StringIO()):  # which says that the copies are copies
            built = cache.prepare(task.dataset, settings)
        split = Split(built, "train", device)
        net = models.build("resnet8", 10, generator("cpu", "weights", 0))
        trial = fit.start(net.to(device, memory_format=torch.channels_last), rule)
        batches = EndlessStream(split, 16, settings, 32, (0, 0, 0))

        def step(trial=trial, batches=batches):
            for _ in range(16):
                fit.update(trial, batches, HYPERPARAMETERS, rule)

        def opening(built=built):
            split = Split(built, "train", device)
            return split.labels, split.index, split.pixels

        steps[count], opened[count] = step, opening
    for title, works, each in (("a step of 16 images", steps, 16), ("opening the split", opened, 1)):
        seconds = {count: statistics.median(values) for count, values in in_turns(works, device, repeats).items()}
        smallest = seconds[1_000]
        say(title, "; ".join(f"{count:,} images {value / each * 1e3:.2f} ms (x {value / smallest:.2f})"
                             for count, value in seconds.items()))


# ---- around the steps -----------------------------------------------------------------------------------------------


def overhead(data: str, device: torch.device, out: Path):
    """Half of the demo run, as its config has it."""
    loaded = config.load("demo_ftd.yaml", [f"data.dir={data}", f"device={device}"])
    tasks, settings = stream.load(StreamConfig("demo")).tasks[:6], config.to_dict(loaded)
    for task in tasks:
        cache.prepare(task.dataset, loaded.data)
    settings["stream"] = {"tasks": [{"task": task.task, "year": task.year} for task in tasks]}
    with clocked(PARTS) as seconds:
        began = time.perf_counter()
        quietly(settings, out)
        whole = time.perf_counter() - began
    learning = sum(seconds[part] for part in (STEPS, EVALUATION, SELECTION))
    rest = {**{part: seconds[part] for part in PARTS if part not in (STEPS, EVALUATION, SELECTION)},
            "all else": whole - sum(seconds.values())}
    shares = ", ".join(f"{part} {value / whole:.1%}" for part, value in rest.items())
    say(f"around the steps of a run of {whole:.0f} s", f"{(whole - learning) / whole:.1%}: {shares}; "
        + ", ".join(f"{part} {seconds[part] / whole:.1%}" for part in (STEPS, EVALUATION, SELECTION)))


def pause(settings: DataConfig, device: torch.device, folder: Path, repeats: int):
    """How long a snapshot of ResNet-34 holds the thread that trains."""
    rule = FitConfig()
    net = models.build("resnet34", 40, generator("cpu", "weights", 0))
    trial = fit.start(net.to(device, memory_format=torch.channels_last), rule)
    fit.update(trial, EndlessStream(split_of(settings, "train", device), 16, settings, 32, (0, 0, 0)), HYPERPARAMETERS, rule)
    trial.best_state = {name: value.clone() for name, value in trial.model.state_dict().items()}
    seconds = {"in the background": [], "at once": []}
    for _ in range(repeats + 1):
        with SnapshotWriter(folder, 0, 0) as writer:
            seconds["in the background"].append(timed(lambda writer=writer: writer.write(trial.snapshot()), device))
        seconds["at once"].append(timed(lambda: save_trial(folder, 0, 1, snapshot=trial.snapshot()), device))
    held, whole = (statistics.median(values[1:]) for values in seconds.values())
    size = run_folder.trial_path(folder, 0).stat().st_size
    say("held by a snapshot of ResNet-34", f"{held * 1e3:.0f} ms in the background, {whole * 1e3:.0f} ms at once "
        f"(x {whole / held:.1f}), {size / 1e6:.0f} MB")


def start_up(run: Path, repeats: int):
    commands = {"import numpy": ["-c", "import numpy"], "train --help": ["-m", "nevis_lite.train", "--help"],
                "stream list": ["-m", "nevis_lite.stream", "list"], "metrics RUN": ["-m", "nevis_lite.metrics", str(run)]}
    works = {name: lambda words=words: subprocess.run([sys.executable, *words], check=True, capture_output=True)
             for name, words in commands.items()}
    seconds = {name: statistics.median(values) for name, values in in_turns(works, torch.device("cpu"), repeats).items()}
    say("start-up", "; ".join(f"{name} {value:.2f} s (x {value / seconds['import numpy']:.1f})"
                              for name, value in seconds.items()))


def measure(device: torch.device, repeats: int):
    with tempfile.TemporaryDirectory() as place:
        folder, data = Path(place), DataConfig(dir=f"{place}/data", crop_area=(0.8, 1.0), flip=False)
        with redirect_stdout(io.StringIO()):
            long_stream("indep", 20, data.dir, device, folder / "first")  # builds the caches, and warms up
        for baseline in ("indep", "ft-d"):
            long_stream(baseline, 106, data.dir, device, folder / baseline)
        data_set(data, device, folder, repeats)
        overhead(data.dir, device, folder / "demo")
        pause(data, device, folder, repeats)
        start_up(folder / "demo", repeats)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default: %(default)s)")
    arguments = parser.parse_args()
    device = fit.pick_device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(f"{setup.device_name(device)} of {os.cpu_count()} cores; PyTorch {torch.__version__}; medians of {arguments.repeats}")
    measure(device, arguments.repeats)


if __name__ == "__main__":
    main()
