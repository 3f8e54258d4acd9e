"""The protocol loop (paper, Algorithm 1): the tasks of a stream in order, each learned once, then judged by the evaluator.

`run` does it all, writes the run folder, and can be stopped and resumed at any step. Of several processes (`parallel.py`) the
first one leads: it owns the run folder, chooses and judges, while the others only train.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import signal
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nevis_lite import baselines, config, cost, fit, flops, metrics, models, parallel
from nevis_lite.baselines import PRETRAINED, Past, View
from nevis_lite.config import UserError
from nevis_lite.data import EndlessStream
from nevis_lite.parallel import Interrupted, Team
from nevis_lite.progress import Progress
from nevis_lite.run_folder import RunFolder, SnapshotWriter, load_trial, save_trial, trial_path, write_atomic, write_json
from nevis_lite.setup import Setup, environment, head
from nevis_lite.stream import Task

# ---------------------------------------------------------------------------------------------------------------------
# Running


@dataclass
class Session:
    """A run in progress: what its parts share."""

    setup: Setup
    out: Path
    team: Team
    progress: Progress
    folder: RunFolder | None = None  # only the first process has it
    seconds: float = 0.0  # of earlier sessions
    began: float = field(default_factory=time.monotonic)

    def total_seconds(self) -> float:
        return self.seconds + time.monotonic() - self.began

    def save(self, task: int, **state):
        """Write a checkpoint; raise Interrupted after it if a signal asks for that."""
        self.folder.save(task=task, **state, seconds=self.total_seconds())
        if self.team.stop.is_set():
            raise Interrupted

    def trials(self, task: Task) -> list[dict]:
        return [row for row in self.folder.rows["trials"] if row["task"] == task.index]


def run(setup: Setup, out: str | Path, resume: bool = False, command: str = "", team: Team | None = None) -> dict:
    """All tasks in order; returns the content of `results.json`.

    Raises Interrupted after a checkpoint when SIGINT or SIGTERM arrives.
    """
    team, out = team or Team(), Path(out)
    if setup.config.parallel == "data" and team.world > 1:
        _check_shares(setup, team.world)
        team.share_batches(setup.device)
    with _stop_signals(team):
        return _follow(setup, out, team) if team.rank else _lead(setup, out, resume, command, team)


def _lead(setup: Setup, out: Path, resume: bool, command: str, team: Team) -> dict:
    """The run, as the first process sees it, or the only one."""
    _check_room(setup, out, team.world)
    with closing(RunFolder(out, config.to_dict(setup.config), environment(setup, command), resume)) as folder:
        team.tell((out / "environment.json").read_text(encoding="utf-8"))
        results = metrics.load(out) if (out / "results.json").is_file() else _learn_all(setup, out, team, folder)
        team.tell({"results": results})
        return results


def _learn_all(setup: Setup, out: Path, team: Team, folder: RunFolder) -> dict:
    planned = [flops.total(row["flops"]) for row in cost.plan(setup)]
    spent = [row["flops"] for row in folder.rows["tasks"]]
    spent += [row["flops"] for row in folder.rows["trials"] if row["task"] == folder.state["task"]]
    progress = Progress(planned, flops.total(flops.add(*spent)))
    session = Session(setup, out, team, progress, folder, folder.state["seconds"])
    for task in setup.tasks[folder.state["task"]:]:
        setup.forget()
        folder.append("tasks", _learn_and_judge(session, task))
        session.save(task.index + 1)
    shutil.rmtree(out / "working", ignore_errors=True)
    results = {"name": out.resolve().name, **head(setup), **metrics.summarise(folder.rows["tasks"], setup.config.phase),
               "seconds": round(session.total_seconds(), 1), "device": setup.device_name, "tasks": folder.rows["tasks"]}
    write_json(out / "results.json", results)
    return results


def _follow(setup: Setup, out: Path, team: Team) -> dict:
    """The run, as the other processes see it: of each task the first one tells what to start from, and they train."""
    path, environment_text = out / "environment.json", team.tell()
    if not path.is_file() or path.read_text(encoding="utf-8") != environment_text:
        raise UserError(f"{out}: {platform.node()} does not see the run folder that the first process made; choose one with "
                        "--out that all machines share.")
    session = Session(setup, out, team, Progress([0] * len(setup.tasks), 0, quiet=True))
    while "results" not in (told := team.tell()):
        setup.forget()
        view = setup.view(setup.tasks[told["task"]], told["memory"])
        _take_trials(session, view, told["start"], told["done"])
    return told["results"]


def _check_shares(setup: Setup, processes: int):
    """UserError if a process would get too little of the smallest batches."""
    if setup.device.type == "cuda" and parallel.on_each_gpu() > 1:
        raise UserError(f"parallel=data: {processes} processes need a GPU each, and here are {torch.cuda.device_count()}; take "
                        "fewer, or parallel=trials.")
    smallest = min(setup.config.search.batch or [setup.batch(task, {}) for task in setup.tasks])
    if smallest < fit.LEAST_SHARE * processes:
        raise UserError(f"parallel=data: {processes} processes cannot share batches of {smallest} images; take at most "
                        f"{smallest // fit.LEAST_SHARE}, or parallel=trials.")


def _check_room(setup: Setup, out: Path, processes: int):
    """Better to say it now than in the middle of the stream."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    needed, free = cost.disk_bytes(setup, processes)["runs"], shutil.disk_usage(there).free
    if not (out / "config.yaml").is_file() and needed > free:
        raise UserError(f"{out}: the run needs up to {needed / 1e6:,.1f} MB of disk and {free / 1e6:,.1f} MB are free.")


def _learn_and_judge(session: Session, task: Task) -> dict:
    """One task: choose the start, try hyper-parameters, keep the best predictor, have it evaluated. Returns the task's row."""
    setup, folder = session.setup, session.folder
    memory = [Past(row["index"], setup.tasks[row["index"]], row["num_train"], row["dev_error"],
                   folder.predictor(row["index"])) for row in folder.rows["tasks"]]
    view = setup.view(task, memory)
    if "start" not in folder.state:
        source, auxiliaries = setup.baseline.start(view), setup.baseline.data(view)
        session.progress.spend(view.flops)
        start = {"source": source, "auxiliaries": auxiliaries, "flops": view.flops, "scores": view.scores}
        session.save(task.index, start=start, best=None)
    start = folder.state["start"]
    trials, done = setup.config.search.trials, len(session.trials(task))
    session.team.tell({"task": task.index, "memory": memory, "start": start, "done": done})
    own = _take_trials(session, view, start, done)
    for number in range(len(session.trials(task)), trials):  # of the other processes, or done before theirs
        _keep_trial(session, task, number)
        if number not in own:
            session.progress.tell(task, session.trials(task)[number], trials)
    best = folder.state["best"]
    if best is None:
        raise UserError(_why_none_is_done(session, task, start["source"]))

    chosen = session.trials(task)[best["trial"]]
    name = chosen["hyperparameters"].get("model", setup.config.model.name)
    spent = sum(flops.total(row["flops"]) for row in (*folder.rows["tasks"], *session.trials(task)))
    spent += start["flops"] + (setup.pretraining_flops or 0)
    facts = setup.open(task.index, "train").meta
    predictor = {"model": name, "num_classes": task.num_classes, "classes": facts["classes"], "task": task.task, "flops": spent,
                 "image_size": setup.config.model.image_size, "state": best["state"]}
    write_atomic(folder.predictor(task.index), lambda file: torch.save(predictor, file))
    error = _judge(session, task, name, best["state"])
    predicted = setup.predict_flops(task, chosen["hyperparameters"])
    session.progress.finish(task)
    origin = {None: "scratch", PRETRAINED: PRETRAINED} | {past.index: past.task.name for past in memory}
    shown = "undefined" if error is None else f"{error:.4f}"
    session.progress.say(f"{task.year} {task.name}: error {shown} on {setup.reported}, from {origin[start['source']]}"
                         + "".join(f", with {origin[index]}" for index in start["auxiliaries"]))
    without = facts["class_counts"][setup.reported].count(0)  # labels without a positive example: the mAP leaves them out
    left_out = {"labels_left_out": without} if task.kind == "multi_label" else {}
    undefined = {} if error is not None else {"reason": "the predictor's outputs on the test images are not all finite"}
    return {"index": task.index, "task": task.task, "name": task.name, "year": task.year, "occurrence": task.occurrence,
            "domain": task.domain, "kind": task.kind, "num_classes": task.num_classes,
            "num_train": len(view.split("train")), "resolution": view.split("train").meta["resolution"],
            "meta": task.meta, "split": setup.reported, "error": error, **undefined, **left_out, "dev_error": chosen["error"],
            "source": start["source"], "auxiliaries": start["auxiliaries"],
            "scores": {"scratch" if source is None else str(source): score for source, score in start["scores"].items()},
            "hyperparameters": chosen["hyperparameters"], "trials": trials,
            "flops": flops.add(*(row["flops"] for row in session.trials(task)),
                               {"select": start["flops"], "predict": predicted}),
            "curve": chosen["curve"]}


def _why_none_is_done(session: Session, task: Task, source: baselines.Source) -> str:
    """What to tell when all trials of a task failed."""
    settings, rows = session.setup.config, session.trials(task)
    if any(row["steps"] for row in rows):
        return f"{task.name}: all {len(rows)} trials of task {task.index} diverged; lower the upper end of search.lr."
    weights = {None: "random ones of model.name", PRETRAINED: f"model.weights={settings.model.weights}"}
    return (f"{task.name}: the outputs of task {task.index}'s network are not finite before any update, so that no search.lr "
            f"helps; look at the weights that it starts from: {weights.get(source) or session.folder.predictor(source)}.")


def _judge(session: Session, task: Task, name: str, state: dict) -> float | None:
    """The evaluator: the error of a predictor on the split that the phase reports. Nothing else reads that split."""
    setup = session.setup
    model = models.with_state(name, state, task.num_classes).to(setup.device, memory_format=torch.channels_last)
    return fit.evaluate(model, setup.open(task.index, setup.reported), setup.config.model.image_size, setup.config.fit)


def _take_trials(session: Session, view: View, start: dict, done: int) -> list[int]:
    """Train this process's part of the trials from number `done` on, and wait for the others. Returns which they were."""
    own = []
    for number in session.team.take(range(done, session.setup.config.search.trials)):
        _run_trial(session, view, start, number)
        own.append(number)
        if session.folder and number == len(session.trials(view.task)):  # those before it have their rows
            _keep_trial(session, view.task, number)
    session.team.exchange()
    return own


def _keep_trial(session: Session, task: Task, number: int):
    """Append the row of a trial that is done, and keep the better weights."""
    folder, done = session.folder, load_trial(session.out, task.index, number)
    row, best = done["row"], folder.state["best"]
    folder.append("trials", row)
    if row["status"] == "done" and (best is None or row["error"] < best["error"]):
        best = {"trial": number, "error": row["error"], "state": done["state"]}
    session.save(task.index, start=folder.state["start"], best=best)
    trial_path(session.out, number).unlink()


def _run_trial(session: Session, view: View, start: dict, number: int):
    """Train once, from the trial's snapshot if there is one, and leave row and weights in the trial's file."""
    setup, team, task, settings = session.setup, session.team, view.task, session.setup.config
    found, hyperparameters = load_trial(session.out, task.index, number), None
    if team.rank == 0 or not team.shares_batches:
        history = session.trials(task) if team.share[1] == team.world else None  # else rows are known at the task's end
        hyperparameters = setup.baseline.search(settings.search, settings.seed, task.index, number, history)
    if team.shares_batches:  # also waits until all have looked into the trial's file
        hyperparameters = team.tell(hyperparameters)
    if "row" in found:
        return
    snapshot = found.get("snapshot")
    model = baselines.initial_model(view, start["source"], hyperparameters.get("model"))
    compiled = setup.compiled(model, hyperparameters)
    batch, key = setup.batch(task, hyperparameters), (settings.seed, task.index, number)
    whole = (1.0, 1.0)  # of which nothing but the central square fits
    augmentation = dataclasses.replace(settings.data, flip=hyperparameters.get("flip", settings.data.flip),
                                       crop_area=settings.data.crop_area if hyperparameters.get("crop", True) else whole)
    batches = EndlessStream(view.split("train"), batch, augmentation, settings.model.image_size, key, team.share)
    auxiliaries = [fit.Auxiliary(EndlessStream(view.split("train", index), batch, augmentation, settings.model.image_size,
                                               (*key, 1 + index), team.share),
                                 baselines.auxiliary_head(view, index)) for index in start["auxiliaries"]]
    earlier = 0.0
    if snapshot:  # is newer than the checkpoint, which isn't written during a trial
        earlier, session.seconds = snapshot["seconds"], max(session.seconds, snapshot["run_seconds"])
    began = saved = time.monotonic()
    planned = setup.trial_flops(task, start["auxiliaries"], hyperparameters, settings.fit.steps,
                                len(fit.validation_steps(settings.fit)))
    session.progress.begin(task, number, settings.search.trials, settings.fit.steps, snapshot["step"] if snapshot else 0,
                           batch, flops.total(planned) * team.ahead(settings.search.trials))

    def on_step(trial: fit.Trial):
        nonlocal saved
        writer.check()
        stopping = team.stopping()  # before the progress line, which would wait for a device that waits for a dead process
        session.progress.update(trial)
        if stopping or time.monotonic() - saved >= settings.checkpoint_seconds:
            if team.share[0] == 0:
                writer.write(trial.snapshot() | {"seconds": earlier + time.monotonic() - began,
                                                 "run_seconds": session.total_seconds()})
            if stopping:
                raise Interrupted
            saved = time.monotonic()

    with SnapshotWriter(session.out, task.index, number) as writer:  # which has written all before the trial's row is
        trial = fit.train(model, batches, view.split("dev"), hyperparameters, settings.fit, auxiliaries, snapshot, compiled,
                          on_step)
    session.progress.end(trial)
    row = {"task": task.index, "trial": number, "hyperparameters": hyperparameters,
           "status": "failed" if trial.failed else "done", "error": None if trial.failed else trial.best_error,
           "best_step": trial.best_step, "steps": trial.step,
           "loss": trial.loss if trial.loss is not None and math.isfinite(trial.loss) else None, "curve": trial.curve,
           "flops": setup.trial_flops(task, start["auxiliaries"], hyperparameters, trial.step, len(trial.curve)),
           "seconds": round(earlier + time.monotonic() - began, 2)}
    if team.share[0] == 0:
        save_trial(session.out, task.index, number, row=row, state=trial.best_state)


@contextmanager
def _stop_signals(team: Team):
    """The first SIGINT or SIGTERM asks to stop; a second one acts as usual."""
    before = {}

    def request(number, frame):
        if team.rank == 0:
            os.write(2, b"\nStopping after this step; once more stops at once.\n")
        team.stop.set()
        for known, handler in before.items():
            signal.signal(known, handler)

    if threading.current_thread() is threading.main_thread():
        before.update({number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
