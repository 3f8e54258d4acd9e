"""A run as a folder: rows that are appended, a checkpoint that is replaced as a whole, and going on from it.

Row files and checkpoint agree by counting: a checkpoint says how many rows were there when it was written, and on resume the
rows after it are cut off, since the work that they tell of is done again and comes out the same. A trial without a row has a
file of its own, written by the process that trains it: a snapshot, or once it's done the row to be.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are then the user's care
    fcntl = None

from nevis_lite.config import Config, UserError, fill, keys_of, to_dict, write_yaml
from nevis_lite.parallel import Interrupted

# torch is imported by the functions that need it: pictures are written atomically, too, and need none.

ROWS = ("trials", "tasks")
EARLY_FILES = ("lock", "environment.json", "environment.json.part", "config.yaml.part")  # what a kill at the start may leave
MAY_CHANGE = ("data.dir", "processes", "checkpoint_seconds")  # settings, between a stop and a resume
NOTHING_DONE = {"task": 0, "seconds": 0.0, "rows": dict.fromkeys(ROWS, 0)}


def write_atomic(path: Path, write):
    """Call write(file) on a temporary neighbour of `path`, then move it into place: there's always a whole file."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # after an error of the disk torch.save ends with a RuntimeError of its own
        full = error if isinstance(error, OSError) else error.__context__
        if not isinstance(full, OSError):
            raise
        full.filename = full.filename or str(temporary)
        raise full from None
    os.replace(temporary, path)


def write_json(path: Path, content):
    text = json.dumps(content, indent=1, allow_nan=False)
    write_atomic(path, lambda file: file.write(text.encode()))


def holds_run(folder: Path, resume: bool) -> bool:
    """Whether there is a run to go on with; UserError if there is one and `resume` is off, or if other files are there."""
    if (folder / "config.yaml").is_file():
        if not resume:
            raise UserError(f"{folder} already holds a run: go on with --resume, or choose another folder with --out.")
        return True
    if folder.is_dir() and any(file.name not in EARLY_FILES for file in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run: choose another folder with --out.")
    return False


def only_one(folder: Path):
    """An open file whose lock the system releases when this process ends, however it ends. UserError if it's taken."""
    file = open(folder / "lock", "w")  # noqa: SIM115
    if fcntl:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise UserError(f"{folder}: another process is running in this folder; wait for it, or stop it.") from None
    return file


def load_state(path: Path, advice: str = "delete it, and its work is done again"):
    """What torch.save wrote into a file; UserError with the advice if it's damaged."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many ways to say "broken file"
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); {advice}.") from None


def refuse_changes(folder: Path, what: str, before, now, free: tuple[str, ...] = ()):
    """UserError if nested settings differ from those that the run in `folder` began with, other than under the `free` keys."""
    changed = [f"{key} was {old!r} and is {new!r}" for key, old, new in differences(before, now) if key not in free]
    if changed:
        raise UserError(f"{folder}: {what} changed since the run began ({'; '.join(changed[:3])}); "
                        "change it back, or start anew with another --out.")


def refuse_another_config(folder: Path, config: dict, kind: type = Config, free: tuple[str, ...] = ()):
    """UserError if the run that is in `folder` began with other settings, of the dataclass `kind`, than `config`.

    MAY_CHANGE and the `free` keys may differ. Keys that are younger than the run had their defaults.
    """
    started, before = folder / "config.yaml", kind()
    fill(before, keys_of(started), str(started))
    refuse_changes(folder, started.name, to_dict(before), config, (*MAY_CHANGE, *free))


class RunFolder:
    """`state` is the checkpoint's content: where the run is, and what the current task has so far."""

    def __init__(self, path: str | Path, config: dict, environment: dict, resume: bool):
        """Open or make the folder. UserError if it holds a run and `resume` is off, or another config's run, or other files."""
        self.path = Path(path)
        started, goes_on = self.path / "config.yaml", holds_run(self.path, resume)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = only_one(self.path)
        try:
            self.state = self._go_on(config, environment) if goes_on else dict(NOTHING_DONE)
            if not goes_on:
                write_json(self.path / "environment.json", environment)
                write_atomic(started, lambda file: file.write(write_yaml(config).encode()))
            (self.path / "predictors").mkdir(exist_ok=True)
            self.rows = {name: self._cut_rows(name, self.state["rows"][name]) for name in ROWS}
        except BaseException:
            self.close()
            raise

    def _go_on(self, config: dict, environment: dict) -> dict:
        """The checkpoint of the run that is in the folder, if it's a run of this config on these data."""
        refuse_another_config(self.path, config)
        before = keys_of(self.path / "environment.json")
        if not {"data", "device"} <= before.keys():
            raise UserError(f"{self.path / 'environment.json'}: damaged: lacks data or device; start anew with another --out.")
        refuse_changes(self.path, "the data", before["data"], environment["data"])
        if before["device"] != environment["device"]:
            print(f"The run began on {before['device']} and goes on on {environment['device']}: "
                  "its numbers will agree with an uninterrupted run to rounding only.")
        return self._load_checkpoint()

    def _load_checkpoint(self) -> dict:
        """The newest whole checkpoint; the previous one if the newest cannot be read. UserError if none of them can."""
        damaged = []
        for name in ("checkpoint.pt", "checkpoint.previous.pt"):
            path = self.path / name
            if path.is_file():
                try:
                    state = load_state(path, advice="an older one is looked for")
                except UserError as error:
                    damaged.append(path)
                    print(error)
                    continue
                for broken in damaged:  # out of the way, so that it never replaces the good one
                    broken.rename(broken.with_suffix(".damaged"))
                return state
        if damaged:
            raise UserError(f"{self.path}: no checkpoint can be read; start anew with another --out.")
        return dict(NOTHING_DONE)

    def _cut_rows(self, name: str, count: int) -> list[dict]:
        """The first `count` rows of a row file, which is cut to them."""
        path = self.path / f"{name}.jsonl"
        content = path.read_bytes() if path.is_file() else b""
        lines = content.split(b"\n")[:count]
        if len(lines) < count:
            raise UserError(f"{path}: has fewer rows than the {count} of the checkpoint; start anew with another --out.")
        try:
            rows = [json.loads(line) for line in lines]
        except ValueError:
            raise UserError(f"{path}: a row is damaged; start anew with another --out.") from None
        kept = b"".join(line + b"\n" for line in lines)
        if kept != content or not path.is_file():
            write_atomic(path, lambda file: file.write(kept))
        return rows

    def append(self, name: str, row: dict):
        with open(self.path / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[name].append(row)

    def save(self, **state):
        """Write a checkpoint of `state` and the present rows; the one before it is kept."""
        import torch

        self.state = {**state, "rows": {name: len(rows) for name, rows in self.rows.items()}}
        path = self.path / "checkpoint.pt"
        if path.is_file():
            os.replace(path, self.path / "checkpoint.previous.pt")
        write_atomic(path, lambda file: torch.save(self.state, file))

    def close(self):
        self._lock.close()

    def predictor(self, task: int) -> Path:
        return predictor_path(self.path, task)


def predictor_path(run: Path, task: int) -> Path:
    return run / "predictors" / f"{task:03d}.pt"


def trial_path(run: Path, number: int) -> Path:
    return run / "working" / f"{number}.pt"


def save_trial(run: Path, task: int, number: int, **content):
    """`snapshot` of a trial in progress, or `row` and `state`, the best weights, of one that is done."""
    import torch

    path = trial_path(run, number)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, lambda file: torch.save({"task": task, **content}, file))


class SnapshotWriter:
    """Writes the snapshots of a trial in a thread, while its training goes on.

    One at a time: a snapshot that is due while the one before is still being written waits for it. So a kill costs no more
    than it would without the thread, and there is one copy in memory. What a write raises is raised by the next call.
    """

    def __init__(self, run: Path, task: int, number: int):
        self.trial = run, task, number
        self._thread, self._writing = ThreadPoolExecutor(1), Future()
        self._writing.set_result(None)

    def write(self, snapshot: dict):
        """Copy the snapshot, which the next step changes, and leave the rest to the thread."""
        self._writing.result()
        self._writing = self._thread.submit(save_trial, *self.trial, snapshot=on_host(snapshot))

    def check(self):
        if self._writing.done():
            self._writing.result()

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(self, kind, error, traceback):
        self._thread.shutdown()  # waits
        if error is None or isinstance(error, Interrupted):  # which promises that it's written; others tell more
            self._writing.result()


def on_host(content):
    """A copy of nested dicts and lists whose tensors are copied to host memory."""
    import torch

    if isinstance(content, torch.Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        return {key: on_host(value) for key, value in content.items()}
    return [on_host(value) for value in content] if isinstance(content, list | tuple) else content


def load_trial(run: Path, task: int, number: int) -> dict:
    """What `save_trial` wrote; nothing if there's no such file, or one of another task, or a damaged one."""
    path = trial_path(run, number)
    if not path.is_file():
        return {}
    try:
        content = load_state(path, advice="its trial starts anew")
    except UserError as error:
        print(error)
        return {}
    return content if content["task"] == task else {}


def differences(before, now, prefix: str = "") -> list[tuple]:
    """(key, old, new) for every leaf where two nested dicts differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [(prefix, before, now)]
    return [item for key in [*before, *(key for key in now if key not in before)]
            for item in differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))]
