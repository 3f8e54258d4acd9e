"""The tasks in order, and who may see which split of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nevis_lite import datasets
from nevis_lite.config import MissingData, StreamConfig, UserError, nearest, read_yaml
from nevis_lite.datasets import DataSet

FIRST_META_TEST_YEAR = 2019  # S_Tr is everything before, S_Ts the last three years (paper, section 3)


class ProtocolError(Exception):
    """A learner reached for what it may not see."""


@dataclass(frozen=True)
class Task:
    """One occurrence of a data set in a stream: MNIST 2004 and MNIST 2015 are two tasks with two heads."""

    index: int
    task: str  # key of the data set
    name: str
    year: int
    occurrence: int  # 1 the first time that the data set occurs
    domain: str
    kind: str | None  # single_label or multi_label; None until the files were read
    num_classes: int | None
    meta: str  # "train" (S_Tr) or "test" (S_Ts)
    dataset: DataSet


@dataclass(frozen=True)
class Stream:
    name: str
    tasks: list[Task]
    missing: list[Task]  # left out for want of data, by request

    def __iter__(self):
        return iter(self.tasks)

    def __len__(self):
        return len(self.tasks)


def load(stream: StreamConfig | str | list, data_dir: str | Path = "data", phase: str = "meta_test") -> Stream:
    """A named stream of `streams.yaml` or a list of tasks; reads no pixels.

    `phase="meta_train"` keeps S_Tr alone. UserError for an unknown name or a task that makes no sense; MissingData, with the
    list of what to put where, unless `allow_missing`.
    """
    if isinstance(stream, str):
        stream = StreamConfig(name=stream)
    elif isinstance(stream, list):
        stream = StreamConfig(tasks=stream)
    known = read_yaml((datasets.PACKAGE / "streams.yaml").read_text(encoding="utf-8"), "streams.yaml")
    name = stream.name or ("own tasks" if stream.tasks else "short")
    if stream.tasks and name in known:
        raise UserError(f"stream: give either the name of a known stream ({name}) or your own tasks, not both.")
    if not stream.tasks and name not in known:
        raise UserError(f"stream.name: unknown stream {name}{nearest(name, known)}.")
    entries = stream.tasks or [{"task": key, "year": year} for year, keys in known[name].items() for key in keys]
    catalogue = datasets.catalogue(Path(data_dir))
    tasks, seen = [], Counter()
    for position, entry in enumerate(entries, start=1):
        dataset, year, meta = _parse(entry, catalogue, f"stream.tasks, task {position}")
        seen[dataset.folder] += 1
        tasks.append(dict(task=dataset.key, name=dataset.name, year=year, occurrence=seen[dataset.folder],
                          domain=dataset.domain, kind=dataset.kind, num_classes=dataset.classes, meta=meta, dataset=dataset))
    if any(early["year"] > late["year"] for early, late in zip(tasks, tasks[1:], strict=False)):
        raise UserError(f"stream {name}: the tasks are not in the order of their years.")
    if phase == "meta_train":
        tasks = [task for task in tasks if task["meta"] == "train"]
        if not tasks:
            raise UserError(f"stream {name}: phase meta_train needs a task with meta: train (or a year before "
                            f"{FIRST_META_TEST_YEAR}).")
    missing = [Task(index=0, **task) for task in tasks if datasets.is_missing(task["dataset"])]
    if missing and not stream.allow_missing:
        lines = dict.fromkeys(f"  {task.dataset.name:<28.28} {task.dataset.folder.absolute()}" for task in missing)
        raise MissingData("\n".join([
            f"stream {name}: {len(lines)} data sets are missing. Each belongs in its folder:", *lines, datasets.LAYOUT,
            "To go on without them: stream.allow_missing=true, which marks the results as partial."]))
    present = [task for task in tasks if not datasets.is_missing(task["dataset"])]
    if not present:
        raise MissingData(f"stream {name}: the data of every task are missing.")
    return Stream(name, [Task(index=index, **task) for index, task in enumerate(present)], missing)


def _parse(entry, catalogue: dict[str, DataSet], where: str) -> tuple[DataSet, int, str]:
    """One task of a list: `task` names a data set of the catalogue, `folder` or `idx` points at the user's own files."""
    known = ("task", "name", "folder", "idx", "year", "meta", "domain")
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected {{name, year, folder or idx}}, found {entry!r}.")
    for key in entry:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{nearest(key, known)}.")
    if sum(key in entry for key in ("task", "folder", "idx")) != 1:
        raise UserError(f"{where}: needs exactly one of task (a known data set), folder or idx (your own files).")
    year = entry.get("year", 0 if entry.get("meta") else None)
    if not isinstance(year, int) or isinstance(year, bool):
        raise UserError(f"{where}: year must be a whole number, not {year!r}.")
    meta = entry.get("meta", "test" if year >= FIRST_META_TEST_YEAR else "train")
    if meta not in ("train", "test"):
        raise UserError(f"{where}: meta must be train or test, not {meta!r}.")
    if "task" in entry:
        if str(entry["task"]) not in catalogue:
            raise UserError(f"{where}: unknown data set {entry['task']}{nearest(entry['task'], catalogue)}.")
        return catalogue[str(entry["task"])], year, meta
    reader, path = ("class_folders", entry["folder"]) if "folder" in entry else ("idx", entry["idx"])
    if not isinstance(path, str) or not path:
        raise UserError(f"{where}: folder and idx take the path of a folder, not {path!r}.")
    path = Path(path).expanduser().absolute()
    name = str(entry.get("name", path.name))
    return DataSet(key=path.name, name=name, folder=path, domain=str(entry.get("domain", "other")), reader=reader), year, meta


@dataclass
class Access:
    """What a learner may read at task `now`: train and dev of this task and of earlier ones, and nothing else."""

    now: int
    _open: Callable  # (task index, split name) -> split

    def split(self, name: str, task: int | None = None):
        """The split `name` of task number `task` (default: the current one); ProtocolError for test splits and later tasks."""
        task = self.now if task is None else task
        if name not in ("train", "dev"):
            raise ProtocolError(f"A learner sees train and dev, never {name}: only the evaluator reads it.")
        if not 0 <= task <= self.now:
            raise ProtocolError(f"A learner at task {self.now} cannot see task {task}.")
        return self._open(task, name)
