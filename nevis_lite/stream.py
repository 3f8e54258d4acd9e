"""The tasks in order, and who may see which split of them. `python -m nevis_lite.stream` lists them and gets their data."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from nevis_lite import config, datasets, doctor, fetch
from nevis_lite.config import DataConfig, MissingData, StreamConfig, UserError, nearest, read_yaml
from nevis_lite.datasets import DataSet
from nevis_lite.splits import classes_of

FIRST_META_TEST_YEAR = 2019  # S_Tr is everything before, S_Ts the last three years (paper, section 3)
KEEP = ("all", "without_imagenet", "without_first_30", "without_last_30", "random:43", "without_random:30")


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
    part: tuple[int, int] | None = None  # (2, 5): only the third of five parts of the data set's classes (splits.classes_of)


class Entry(NamedTuple):
    """A task as a stream lists it."""

    dataset: DataSet
    year: int
    meta: str
    part: tuple[int, int] | None


@dataclass(frozen=True)
class Stream:
    name: str
    tasks: list[Task]
    missing: list[Task]  # left out for want of data, by request

    def __iter__(self):
        return iter(self.tasks)

    def __len__(self):
        return len(self.tasks)


def load(stream: StreamConfig | str | list, data_dir: str | Path = "data", phase: str = "meta_test",
         dry: bool = False) -> Stream:
    """A named stream of `streams.yaml` or a list of tasks; reads no pixels.

    `phase="meta_train"` keeps S_Tr alone. UserError for an unknown name or a task that makes no sense; MissingData, with the
    list of what to put where, unless `allow_missing`. `dry` is content with data sets of which the catalogue knows the sizes.
    """
    of_a_config = isinstance(stream, StreamConfig)  # whose user can go on without some tasks
    if isinstance(stream, str):
        stream = StreamConfig(name=stream)
    elif isinstance(stream, list):
        stream = StreamConfig(tasks=stream)
    name, tasks = plan(stream, data_dir, phase)
    incomplete = {dataset.folder for dataset in _datasets(tasks)
                  if (datasets.is_missing(dataset) or fetch.absent(dataset)) and not (dry and dataset.images)}
    missing = [task for task in tasks if task.dataset.folder in incomplete]
    present = [task for task in tasks if task.dataset.folder not in incomplete]
    if missing and not stream.allow_missing:
        way_out = "\nTo go on without them: stream.allow_missing=true, which marks the results as partial."
        raise MissingData(_what_is_missing(name, stream, missing, data_dir) + way_out * of_a_config)
    if not present:
        raise MissingData(f"stream {name}: the data of every task are missing.")
    return Stream(name, [replace(task, index=index) for index, task in enumerate(present)], missing)


def plan(stream: StreamConfig, data_dir: str | Path = "data", phase: str = "meta_test") -> tuple[str, list[Task]]:
    """The name of a stream and all its tasks, also those without data: what `keep` leaves, as `order` has them."""
    known = named_streams()
    name = stream.name or ("own tasks" if stream.tasks else "short")
    if stream.tasks and name in known:
        raise UserError(f"stream: give either the name of a known stream ({name}) or your own tasks, not both.")
    if not stream.tasks and name not in known:
        raise UserError(f"stream.name: unknown stream {name}{nearest(name, known)}.")
    catalogue = datasets.catalogue(Path(data_dir))
    listed = [task for position, entry in enumerate(stream.tasks or known[name], start=1)
              for task in _parse(entry, catalogue, f"stream.tasks, task {position}")]
    if stream.order != "shuffled" and any(early.year > late.year for early, late in zip(listed, listed[1:], strict=False)):
        raise UserError(f"stream {name}: the tasks are not in the order of their years.")
    listed = _ordered(_kept(listed, stream.keep, stream.keep_seed), stream.order, stream.order_seed)
    variants = [f"{stream.keep}{f', seed {stream.keep_seed}' if 'random' in stream.keep else ''}"] * (stream.keep != "all")
    variants += [f"{stream.order}, seed {stream.order_seed}"] * (stream.order != "chronological")
    name += f" ({'; '.join(variants)})" if variants else ""  # numbers of a variant must not pass for those of the stream
    if not listed:
        raise UserError(f"stream {name}: no task is left.")
    tasks, seen = [], Counter()
    for dataset, year, meta, part in listed:
        seen[dataset.folder, part] += 1
        if phase == "meta_test" or meta == "train":
            of = f" {part[0] + 1}/{part[1]}" if part else ""
            classes = dataset.classes and len(classes_of(part, dataset.classes))
            tasks.append(Task(len(tasks), dataset.key + of, dataset.name + of, year, seen[dataset.folder, part], dataset.domain,
                              dataset.kind, classes, meta, dataset, part))
    if not tasks:
        raise UserError(f"stream {name}: phase meta_train needs a task with meta: train (or a year before "
                        f"{FIRST_META_TEST_YEAR}).")
    return name, tasks


def named_streams() -> dict[str, list[dict]]:
    """{name: its tasks, written as those of `stream.tasks` are}."""
    known = read_yaml((datasets.PACKAGE / "streams.yaml").read_text(encoding="utf-8"), "streams.yaml")
    return {name: [{"year": year, **({"task": task} if isinstance(task, str) else task)}
                   for year, tasks in years.items() for task in tasks] for name, years in known.items()}


def _kept(listed: list[Entry], rule: str, seed: int) -> list[Entry]:
    """The tasks that an ablation (paper, Table 5) leaves: it takes away from S_Tr alone."""
    train = [number for number, task in enumerate(listed) if task.meta == "train"]
    counted = re.fullmatch(r"(without_first_|without_last_|random:|without_random:)(\d+)", rule)
    if rule == "all":
        return listed
    if rule == "without_imagenet":
        dropped = [number for number in train if listed[number].dataset.key == "imagenet2012"]
        if not dropped:
            raise UserError(f"stream.keep={rule}: ImageNet is no meta-train task of this stream.")
    elif counted:
        word, count = counted[1], int(counted[2])
        if count > len(train):
            raise UserError(f"stream.keep={rule}: the stream has only {len(train)} meta-train tasks.")
        drawn = _permuted(train, f"keep {seed}")
        dropped = {"without_first_": train[:count], "without_last_": train[len(train) - count:],
                   "random:": drawn[count:], "without_random:": drawn[:count]}[word]
    else:
        raise UserError(f"stream.keep cannot be {rule!r}{nearest(rule, KEEP)}.")
    return [task for number, task in enumerate(listed) if number not in dropped]


def _ordered(listed: list[Entry], order: str, seed: int) -> list[Entry]:
    """Every task stays, and stays in S_Tr or S_Ts, wherever it goes."""
    if order == "shuffled":
        return _permuted(listed, f"order {seed}")
    if order == "within_years":
        years = dict.fromkeys(task.year for task in listed)
        return [task for year in years for task in _permuted([task for task in listed if task.year == year], f"{year} {seed}")]
    return listed


def _permuted(items: list, purpose: str) -> list:
    draws = random.Random(purpose)  # its random() alone is promised to be the same in every version of Python
    return sorted(items, key=lambda _: draws.random())


def _what_is_missing(name: str, stream: StreamConfig, missing: list[Task], data_dir: str | Path) -> str:
    lines, published = [], []
    for dataset in _datasets(missing):
        lacks = "" if datasets.is_missing(dataset) else f"  lacks {fetch.few(fetch.absent(dataset))}"
        lines.append(f"  {dataset.name:<28.28} {dataset.folder.absolute()}{lacks}")
        published += [dataset.key] * bool(dataset.files)
    command = f"python -m nevis_lite.stream prepare {' '.join(published if stream.tasks else [stream.name or 'short'])}"
    command += f" --data {data_dir}" if str(data_dir) != DataConfig().dir else ""
    count = "1 data set is" if len(lines) == 1 else f"{len(lines)} data sets are"
    return "\n".join([f"stream {name}: {count} missing. Each belongs in its folder:", *lines,
                      datasets.LAYOUT, *[f"What can be fetched, and what to do about the rest: {command}"] * bool(published)])


def _datasets(tasks: list[Task]) -> list[DataSet]:
    """Each data set once, in the order of its first task."""
    return list({task.dataset.folder: task.dataset for task in tasks}.values())


def _parse(entry, catalogue: dict[str, DataSet], where: str) -> list[Entry]:
    """One entry of a list: `task` names a data set of the catalogue, `folder` or `idx` points at the user's own files.

    `split: n` makes n tasks of it, each with the next share of the classes, as in Split-ImageNet or Split-MNIST.
    """
    known = ("task", "name", "folder", "idx", "year", "meta", "domain", "split")
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
        dataset = catalogue[str(entry["task"])]
    else:
        dataset = _own(entry, where)
    if "split" not in entry:
        return [Entry(dataset, year, meta, None)]
    parts, most = entry["split"], (dataset.classes or 2000) // 2
    if not isinstance(parts, int) or isinstance(parts, bool) or not 2 <= parts <= most or dataset.kind == "multi_label":
        raise UserError(f"{where}: split takes a number of tasks, 2 or more, with two classes or more each and every image in "
                        f"one of them; it cannot be {parts!r} here.")
    return [Entry(dataset, year, meta, (number, parts)) for number in range(parts)]


def _own(entry: dict, where: str) -> DataSet:
    reader, path = ("class_folders", entry["folder"]) if "folder" in entry else ("idx", entry["idx"])
    if not isinstance(path, str) or not path:
        raise UserError(f"{where}: folder and idx take the path of a folder, not {path!r}.")
    path = Path(path).expanduser().absolute()
    name = str(entry.get("name", path.name))
    return DataSet(key=path.name, name=name, folder=path, domain=str(entry.get("domain", "other")), reader=reader)


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


# ---------------------------------------------------------------------------------------------------------------------
# The command


def table_of_streams() -> str:
    lines = [f"{'stream':<20} {'tasks':>5} {'meta-train':>10} {'meta-test':>9} {'data sets':>9}  years"]
    catalogue = datasets.catalogue(Path())
    for name, entries in named_streams().items():
        tasks = [task for entry in entries for task in _parse(entry, catalogue, name)]
        train, distinct = sum(task.meta == "train" for task in tasks), len({task.dataset.key for task in tasks})
        years = f"{tasks[0].year} to {tasks[-1].year}"
        lines.append(f"{name:<20} {len(tasks):>5} {train:>10} {len(tasks) - train:>9} {distinct:>9}  {years}")
    return "\n".join(lines)


def table_of_tasks(name: str, tasks: list[Task]) -> str:
    lines = [f"{'#':>3}  {'year':<4}  {'task':<24} {'domain':<9} {'kind':<12} {'classes':>7} {'train':>8} {'occurrence':>10} "
             f"{'meta':<5}  name"]
    for task in tasks:
        number, parts = task.dataset.images.get("train"), (task.part or (0, 1))[1]
        images = f"{'~' * (task.dataset.images_about or parts > 1)}{number // parts}" if number else "-"
        lines.append(f"{task.index:>3}  {task.year:<4}  {task.task:<24} {task.domain:<9} {task.kind or '-':<12} "
                     f"{task.num_classes or '-':>7} {images:>8} {task.occurrence:>10} {task.meta:<5}  {task.name}")
    train = sum(task.meta == "train" for task in tasks)
    return "\n".join([*lines, f"stream {name}: {len(tasks)} tasks, {train} meta-train and {len(tasks) - train} meta-test, "
                              f"of {len(_datasets(tasks))} data sets"])


def find_datasets(names: list[str], data_dir: Path) -> list[DataSet]:
    """The data sets of named streams, or those that are named themselves; each once."""
    known, catalogue, found = named_streams(), datasets.catalogue(data_dir), {}
    for name in names:
        if name in known:
            found |= {entry["task"]: catalogue[entry["task"]] for entry in known[name]}
        elif name in catalogue:
            found[name] = catalogue[name]
        else:
            raise UserError(f"{name} is neither a stream nor a data set{nearest(name, [*known, *catalogue])}.")
    return list(found.values())


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 all there, 2 wrong use, 3 data missing, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m nevis_lite.stream", allow_abbrev=False,
                                     description="List the streams, and get and check the data of their tasks.",
                                     epilog="example: python -m nevis_lite.stream prepare short --data data")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    defaults = DataConfig()
    add = commands.add_parser("list", allow_abbrev=False, help="all streams, or the tasks of one")
    add.add_argument("name", nargs="?", metavar="NAME", help="a stream")
    add.add_argument("overrides", nargs="*", metavar="key=value", help="of a stream: order, order_seed, keep, keep_seed")
    for name, help in (("check", "what is there of each data set: a row each"),
                       ("prepare", "fetch what can be fetched, say what to do about the rest, build the pixel caches")):
        add = commands.add_parser(name, allow_abbrev=False, help=help, description=help)
        add.add_argument("names", nargs="+", metavar="NAME", help="a stream, or a data set by its key")
        add.add_argument("--data", default=defaults.dir, metavar="DIR", help="data folder (default: %(default)s)")
        add.add_argument("--cache-side", type=int, default=defaults.cache_side, metavar="N",
                         help="data.cache_side of the runs that will use the cache (default: %(default)s)")
    add.add_argument("--raw", type=Path, metavar="DIR", help="link files that already lie in DIR/<key>/ or in DIR")
    group = add.add_mutually_exclusive_group()
    group.add_argument("--stop-at-first", action="store_true", help="stop at the first data set that fails")
    group.add_argument("--keep-going", dest="stop_at_first", action="store_false", default=False,
                       help="go on with the others (the default)")
    add.add_argument("--accept-new-checksum", action="store_true", help="take files that were packed anew since we knew them")
    arguments = parser.parse_args(argv)

    def work():
        if arguments.command == "list":
            print(table_of_tasks(*plan(_stream_of(arguments))) if arguments.name else table_of_streams())
            return 0
        settings = config.from_dict({"data": {"dir": arguments.data, "cache_side": arguments.cache_side}}, "--cache-side").data
        found = find_datasets(arguments.names, Path(arguments.data))
        if arguments.command == "check":
            text, complete = doctor.check(found, settings)
            print(text)
            return 0 if complete else MissingData.code
        failed = doctor.prepare(found, settings, arguments.raw, arguments.accept_new_checksum, arguments.stop_at_first)
        print("\n".join([f"{len(found) - len(failed)} of {len(found)} data sets are ready.",
                         *(f"  {key}: {words}" for key, words in failed.items())]))
        return MissingData.code if failed else 0

    return config.exit_code(work, "Stopped; the same command goes on with what is left.")


def _stream_of(arguments) -> StreamConfig:
    content = {"name": arguments.name}
    for override in arguments.overrides:
        key, _, value = override.partition("=")
        content[key] = read_yaml(value, override)
    return config.from_dict({"stream": content}, " ".join(arguments.overrides)).stream


if __name__ == "__main__":
    sys.exit(main())
