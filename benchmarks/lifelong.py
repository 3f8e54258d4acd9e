"""How long the Lifelong Learning Metrics of a log take: `python benchmarks/lifelong.py`.

Writes logs of 50,000 to 400,000 rows: five tasks in turn, evaluation of all of them (10 rows each) around every training, of
1000 rows or, for many short blocks, of 50. Prints CPU seconds, the median of three: of reading, of evaluating in both modes,
and of the whole command in a process of its own (mode paper, no experts).
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from nevis_lite import lifelong, lifelong_log
from nevis_lite.lifelong_log import COLUMNS

TASKS = [f"task_{i}" for i in range(5)]


def write_log(path: Path, count: int, length: int):
    random, block, skill, rows = np.random.default_rng(0), 0, dict.fromkeys(TASKS, 0.1), []
    while len(rows) < count:
        blocks = [("test", task, 10) for task in TASKS] if block % 2 == 0 else [("train", TASKS[block // 2 % 5], length)]
        for kind, task, rows_of in blocks:
            for _ in range(rows_of):
                skill[task] += (0.02 if kind == "train" else -0.005) * (0.9 - skill[task])
                rows.append((block, kind, task, len(rows), round(max(0.0, skill[task] + random.normal(0, 0.05)), 4)))
        block += 1
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows[:count]])


def seconds(call) -> float:
    times = []
    for _ in range(3):
        began = os.times()
        call()
        times.append(sum(os.times()[:4]) - sum(began[:4]))  # of this process and of those it has waited for
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[50_000, 100_000, 200_000, 400_000])
    arguments = parser.parse_args()
    print(f"{'rows':>8}{'block':>8}{'read':>8}{'paper':>8}{'compat':>8}{'command':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for length in (1000, 50):
            for count in arguments.rows:
                path = Path(folder) / f"{length}-{count}.csv"
                write_log(path, count, length)
                log = lifelong_log.read(path)
                experts = {task: np.linspace(0.1, 0.9, 2000).tolist() for task in TASKS}
                times = [seconds(lambda path=path: lifelong_log.read(path)),
                         *(seconds(lambda log=log, experts=experts, mode=mode: lifelong.evaluate(log, experts, mode=mode))
                           for mode in lifelong.MODES)]
                command = [sys.executable, "-m", "nevis_lite.lifelong", path]
                environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
                whole = seconds(lambda command=command, environment=environment: subprocess.run(
                    command, env=environment, stdout=subprocess.DEVNULL, check=True))
                print(f"{count:>8}{length:>8}" + "".join(f"{value:>8.2f}" for value in times) + f"{whole:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
