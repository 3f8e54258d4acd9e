"""How long a run takes on more devices: `python benchmarks/scale.py short_ftd.yaml full_ftd.yaml`. No data are needed.

A schedule of the whole stream: tasks one after the other; of a task first the choice of the start on one device, then its
trials, whoever is free taking the next (`parallel: trials`) or each on all devices (`parallel: data`), then the prediction on
one device. Images and FLOPs are those of the dry run. What a step takes is assumed (--tflops, --least, --message), or with
--measure timed on this device, which the embedded images feed.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass

from nevis_lite import config, cost, fit, stream
from nevis_lite.setup import Setup, set_up


@dataclass
class Device:
    speed: float  # FLOPs a second, of large batches
    least: float  # seconds of a step, however small its batch
    message: float  # seconds of adding up the gradients of all devices, a step


def makespan(trials: list[float], devices: int) -> float:
    """Seconds until the last of the trials ends, each taken in order by the device that is free first."""
    free = [0.0] * devices
    for seconds in trials:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def hours(setup: Setup, plan: list[dict], device: Device, devices: int, shared: bool) -> float:
    """Of the whole stream; `shared`: each batch by all devices."""
    settings, seconds = setup.config, 0.0
    sharing = devices if shared else 1
    for row in plan:
        count, ledger = settings.search.trials, row["flops"]
        steps = settings.fit.steps * (1 + len(row["auxiliaries"]))
        computing = max(device.least, ledger["train"] / (count * steps * sharing) / device.speed)
        trial = steps * computing + settings.fit.steps * device.message * (sharing > 1)
        trial += ledger["validate"] / count / sharing / device.speed
        seconds += (ledger["select"] + ledger["predict"]) / device.speed
        seconds += count * trial if shared else makespan([trial] * count, devices)
    return seconds / 3600


def measure(setup: Setup, message: float) -> Device:
    """Of this device: its speed at the stream's largest batch, and a step of two images."""
    task = max(setup.tasks, key=lambda task: setup.batch(task, {}))
    seconds = cost.seconds_of(setup, task, {})[0]
    speed = setup.batch(task, {}) * setup.image_flops(task, {})[1] / seconds
    return Device(speed, cost.seconds_of(setup, task, {"batch": 2})[0], message)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="+", help="files of configs")
    parser.add_argument("--tflops", type=float, default=100.0, help="speed of a device on large batches (default: %(default)s)")
    parser.add_argument("--least", type=float, default=12.0, help="ms of a step, however small (default: %(default)s)")
    parser.add_argument("--message", type=float, default=3.0, help="ms of adding up gradients, a step (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="time steps here, in place of --tflops and --least")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    arguments = parser.parse_args()
    for name in arguments.config:
        settings = config.load(name)
        setup = set_up(settings, stream.load(settings.stream, settings.data.dir, settings.phase, dry=True), dry=True)
        plan, message = cost.plan(setup), arguments.message / 1e3
        device = (measure(setup, message) if arguments.measure else
                  Device(1e12 * arguments.tflops, arguments.least / 1e3, message))
        print(f"{name}: {len(plan)} tasks of {settings.search.trials} trials; {device.speed / 1e12:.3g} TFLOP/s, a step takes "
              f"{1e3 * device.least:.3g} ms at least ({'measured' if arguments.measure else 'assumed'})")
        print(f"{'devices':>8} {'trials, h':>10} {'speed-up':>9} {'data, h':>10} {'speed-up':>9}")
        one, smallest = hours(setup, plan, device, 1, shared=False), min(setup.batch(task, {}) for task in setup.tasks)
        for devices in arguments.devices:
            line = f"{devices:>8}"
            for shared in (False, True):
                possible = not shared or devices == 1 or smallest >= fit.LEAST_SHARE * devices
                taken = hours(setup, plan, device, devices, shared)
                line += f" {taken:>10.2f} {one / taken:>9.1f}" if possible else f" {'-':>10} {'-':>9}"
            print(line)


if __name__ == "__main__":
    main()
