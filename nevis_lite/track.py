"""Runs as TensorBoard shows them, while they go on or afterwards: `python -m nevis_lite.track RUN...`.

A process beside the run reads the rows that it appends: nothing has to be said before a run starts, and no training waits.
A row makes its points once: after a resume the rows behind the checkpoint are cut off and come again with the same numbers.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from nevis_lite import metrics
from nevis_lite.config import UserError, need
from nevis_lite.run_folder import ROWS

SECONDS = 3.0  # between two looks at the rows


@dataclass
class Board:
    """A run and its points, in `tensorboard/` in its folder: those of the tasks, and for each trial number its curves."""

    folder: Path
    phase: str
    seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROWS, 0))  # rows whose points are there
    writers: dict = field(default_factory=dict)

    def writer(self, name: str):
        from torch.utils.tensorboard import SummaryWriter

        if name not in self.writers:
            self.writers[name] = SummaryWriter(self.folder / "tensorboard" / name)
        return self.writers[name]


def begin(folder: str | Path) -> Board:
    """The board of a run, without points: those of an earlier call are removed. Raises as `metrics.load`; UserError without
    TensorBoard.
    """
    need("tensorboard", "TensorBoard", "track")
    phase = metrics.load(folder)["phase"]
    for file in Path(folder, "tensorboard").rglob("events.out.tfevents.*"):
        file.unlink()
    return Board(Path(folder), phase)


def update(board: Board) -> bool:
    """Write the points of the rows that are new; whether the run is finished."""
    finished = (board.folder / "results.json").is_file()  # first, since rows come before it
    rows = {"trials": metrics.trials_of(board.folder), "tasks": metrics.rows_of(board.folder / "tasks.jsonl")}
    for row in rows["trials"][board.seen["trials"]:]:
        writer = board.writer(f"trial {row['trial']}")
        for step, error in row["curve"]:
            if error is not None:
                writer.add_scalar(f"dev error/task {row['task']:03d}", error, step)
    for count, row in list(enumerate(rows["tasks"], start=1))[board.seen["tasks"]:]:
        so_far = metrics.summarise(rows["tasks"][:count], board.phase)
        points = {"task/error": row["error"], "task/dev error": row.get("dev_error"),
                  "stream/mean error so far": so_far["error_all"], "stream/compute so far, FLOP": so_far["cflop"]}
        for tag, value in points.items():
            if value is not None:
                board.writer("tasks").add_scalar(tag, value, row["index"])
    board.seen = {name: max(board.seen[name], len(rows[name])) for name in ROWS}
    for writer in board.writers.values():
        writer.flush()
    return finished


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 all runs are finished or Ctrl-C, 2 a run cannot be read, or no TensorBoard."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.track", allow_abbrev=False,
        description="Write the points of runs for TensorBoard, and go on until all runs are finished, or Ctrl-C.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; `tensorboard --logdir` of it shows the points")
    arguments = parser.parse_args(argv)
    try:
        boards = [begin(run) for run in arguments.runs]
        while boards := [board for board in boards if not update(board)]:
            time.sleep(SECONDS)
    except (UserError, OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
