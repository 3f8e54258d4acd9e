"""What a person sees while a run goes on: one line a trial, alive on a terminal, plain in a file."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

REFRESH = 0.5  # seconds between two looks at the loss, each of which waits for the device
PLAIN = 30.0  # seconds between two lines of the same trial in a file


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Progress:
    """Time left is told from FLOPs: what is still to do, at the speed since this start."""

    def __init__(self, planned: list[int], flops_done: int, quiet: bool = False):
        """`planned`: FLOPs of each task; `flops_done`: of them, what an earlier session did; `quiet`: shows nothing."""
        self.planned, self.done, self.spent, self.quiet = planned, flops_done, 0, quiet
        self.began = time.monotonic()

    def begin(self, task, trial: int, trials: int, steps: int, step: int, batch: int, trial_flops: int):
        """A trial starts, or goes on at `step`."""
        self.head = self._head(task, trial, trials)
        self.task_end = sum(self.planned[:task.index + 1])
        self.steps, self.batch, self.trial_flops = steps, batch, trial_flops
        self.first_step, self.trial_began = step, time.monotonic()
        self.shown = self.printed = self.trial_began
        self.bar = tqdm(total=steps, initial=step, bar_format="{bar:8} {desc}", disable=self.quiet or None)

    def update(self, trial, finished: bool = False):
        now = time.monotonic()
        if self.quiet or not finished and now - self.shown < REFRESH:
            return
        self.shown = now
        share = (trial.step - self.first_step) / self.steps
        spent = self.spent + self.trial_flops * share
        rate = spent / max(now - self.began, 1e-9)
        reached = self.done + spent
        left_task, left_stream = (clock(max(0.0, end - reached) / rate) if rate else "?"  # not a step done since the start
                                  for end in (self.task_end, sum(self.planned)))
        since = trial.step - trial.curve[-1][0]
        loss = float(trial.loss_sum) / since if since else trial.loss
        dev = trial.best_error if trial.best_state else None
        speed = (trial.step - self.first_step) * self.batch / max(now - self.trial_began, 1e-9)
        # What matters most comes first: a narrow terminal cuts the line's end.
        line = (f"{self.head} left {left_task}, stream {left_stream}  step {trial.step}/{self.steps} "
                f"loss {_number(loss)} dev {_number(dev)} {speed:.0f} images/s" + (" FAILED" if trial.failed else ""))
        if not self.bar.disable:
            self.bar.n = trial.step
            self.bar.set_description_str(line)
        elif finished or now - self.printed >= PLAIN:
            self.printed = now
            print(line, flush=True)

    def end(self, trial):
        self.update(trial, finished=True)
        self.bar.close()
        self.spent += self.trial_flops * (trial.step - self.first_step) / self.steps

    def finish(self, task):
        """A task is done, whoever trained how many of its trials."""
        self.spent = sum(self.planned[:task.index + 1]) - self.done

    def tell(self, task, row: dict, trials: int):
        """A trial is done that another process trained."""
        if not self.quiet:
            failed = " FAILED" if row["status"] == "failed" else ""
            self.say(f"{self._head(task, row['trial'], trials)} by another process  step {row['steps']} loss "
                     f"{_number(row['loss'])} dev {_number(row['error'])}{failed}")

    def _head(self, task, trial: int, trials: int) -> str:
        return (f"[{task.index + 1:>{len(str(len(self.planned)))}}/{len(self.planned)}] {task.year} {task.name[:20]:<20} "
                f"trial {trial + 1}/{trials}")

    def spend(self, flops: int):
        """Work before the trials of a task: the choice of its start."""
        self.spent += flops

    def say(self, text: str):
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
