"""The log of a lifetime, for the metrics of `lifelong`: reading it from a file or from memory, and checking it.

A log has a row for each experience: of learning (block_type train) or of evaluation (test). Consecutive rows of the same block,
type and task are a *regime*: an evaluation block over three tasks is three regimes. The log of a single-task expert, which
learns one task alone, looks the same.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from nevis_lite.config import UserError

COLUMNS = ("block_num", "block_type", "task", "exp_num", "value")
KINDS = "a .csv, .tsv or .jsonl file, or the folder of an l2logger scenario"
CHUNK = 1000  # rows that are read at once; more leave the cache of the processor, which takes twice as long
LARGEST = 1e100  # sums and quotients of values stay finite
MISSING = ("", "null", "None", "NA")  # and nan, in any case


@dataclass
class Log:
    """Rows in the order of their experiences. `task` (N,) holds indices of `tasks`, which stand in the order of first training,
    with those that are only evaluated at the end; `value` (N,) has no NaN; `notes` says what was left out or looks odd.
    """

    name: str
    tasks: list[str]
    task: np.ndarray
    block: np.ndarray
    exp: np.ndarray
    train: np.ndarray
    sleep: np.ndarray
    value: np.ndarray
    notes: list[str] = field(default_factory=list)

    def bounds(self) -> np.ndarray:
        """(R + 1,): regime r is rows bounds[r] to bounds[r + 1]."""
        change = np.zeros(len(self.value) - 1, bool)
        for column in (self.block, self.train, self.sleep, self.task):
            change |= column[1:] != column[:-1]
        return np.concatenate([[0], np.flatnonzero(change) + 1, [len(self.value)]])

    def learned(self, task: str) -> np.ndarray:
        """Indices of the rows in which `task` is trained, awake."""
        if task not in self.tasks:
            return np.zeros(0, int)
        return np.flatnonzero((self.task == self.tasks.index(task)) & self.train & ~self.sleep)


# ---- reading --------------------------------------------------------------------------------------------------------


def read(path: str | Path, value: str | None = None) -> Log:
    """The log in a .csv, .tsv or .jsonl file, or in the folder of an l2logger scenario; UserError, one sentence, on any fault.

    `value` names the column of the performance. Without it: "value", and in a folder the only one of metrics_columns in its
    logger_info.json.
    """
    path = Path(path)
    try:
        files = [path]
        if path.is_dir():
            files = sorted(path.rglob("data-log.tsv"))
            value = value or _performance_column(path)
        if not files:
            raise UserError(f"{path}: no data-log.tsv in this folder; a log is {KINDS}.")
        names = {}
        return _ordered(str(path), [part for file in files for part in _read_file(file, value or "value", names)], names)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None


def from_rows(rows: list, name: str = "rows") -> Log:
    """The log in a list of dicts, or of tuples (block_num, block_type, task, exp_num, value[, block_subtype]); UserError."""
    if all(isinstance(row, dict) for row in rows):
        table = _by_column(rows)
    else:
        for i, row in enumerate(rows):
            if not isinstance(row, list | tuple) or len(row) not in (5, 6):
                raise UserError(f"{name}[{i}]: expected {', '.join(COLUMNS)} and perhaps block_subtype, found {row!r}.")
        columns = zip(*(row if len(row) == 6 else (*row, None) for row in rows), strict=True)
        table = dict(zip((*COLUMNS, "block_subtype"), columns, strict=True))
    names = {}
    return _ordered(name, [_checked(table, names, lambda i: f"{name}[{i}]")] if rows else [], names)


def from_experts(experts: dict[str, list]) -> list[Log]:
    """One log for each run of an expert: {task: [values]}, or {task: [[values of a run], ...]}; UserError."""
    logs = []
    for task, runs in experts.items():
        if not isinstance(runs, list | tuple | np.ndarray):
            raise UserError(f"experts[{task!r}]: expected a list of values, or one for each run, found {runs!r}.")
        runs = runs if len(runs) and isinstance(runs[0], list | tuple | np.ndarray) else [runs]
        logs += [from_rows([(0, "train", task, i, value) for i, value in enumerate(run)], f"experts[{task!r}]") for run in runs]
    return logs


def _performance_column(folder: Path) -> str | None:
    infos = sorted(folder.rglob("logger_info.json"))
    if len(infos) > 1:
        raise UserError(f"{folder}: holds {len(infos)} scenarios; name each: {', '.join(str(info.parent) for info in infos)}.")
    if not infos:
        return None
    try:
        columns = json.loads(infos[0].read_text(encoding="utf-8"))["metrics_columns"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{infos[0]}: holds no metrics_columns; name the performance: --value NAME.") from None
    if len(columns) != 1:
        raise UserError(f"{infos[0]}: metrics_columns are {columns}; choose the performance: --value NAME.")
    return columns[0]


def _read_file(path: Path, value: str, names: dict[str, int]) -> list[dict[str, np.ndarray]]:
    """The columns of a file, in parts of CHUNK rows; `names` as in `_checked`."""
    tables = {".csv": _text_tables, ".tsv": _text_tables, ".jsonl": _json_tables}.get(path.suffix.lower())
    if not tables:
        raise UserError(f"{path}: a log is {KINDS}.")
    parts = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for lines, table in tables(file, path):
            for old, new in (("task_name", "task"), (value, "value")):
                if old in table:
                    table[new] = table[old]
            if value not in table:
                raise UserError(f"{path}, line {lines[0]}: no column {value}, the performance; found: {', '.join(table)}. "
                                "Another one is chosen with --value NAME.")
            parts.append(_checked(table, names, lambda i, lines=lines: f"{path}, line {lines[i]}"))
    return parts


def _text_tables(file, path: Path) -> Iterator[tuple[list[int], dict[str, list]]]:
    """Yields (line of each row, {column: cells}) of comma- or tab-separated text."""
    reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise UserError(f"{path}, line 1: names a column twice: {', '.join(header)}.")
        done = 1
        while rows := list(islice(reader, CHUNK)):
            lines = [line for line, row in enumerate(rows, done + 1) if row]
            done += len(rows)
            rows = [row for row in rows if row]
            for line, row in zip(lines, rows, strict=True):
                if len(row) != len(header):
                    raise UserError(f"{path}, line {line}: has {len(row)} cells, but line 1 names {len(header)} columns.")
            if rows:
                yield lines, dict(zip(header, zip(*rows, strict=True), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}.") from None


def _json_tables(file, path: Path) -> Iterator[tuple[list[int], dict[str, list]]]:
    """The same, of lines of JSON objects."""
    numbered = ((line, text) for line, text in enumerate(file, start=1) if text.strip())
    while part := list(islice(numbered, CHUNK)):
        rows = []
        for line, text in part:
            try:
                rows.append(json.loads(text))
            except ValueError as error:
                raise UserError(f"{path}, line {line}: no JSON ({error}).") from None
            if not isinstance(rows[-1], dict):
                raise UserError(f"{path}, line {line}: expected a JSON object, found {text.strip()[:40]}.")
        yield [line for line, _ in part], _by_column(rows)


def _by_column(rows: list[dict]) -> dict[str, list]:
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}


# ---- checking -------------------------------------------------------------------------------------------------------


def _checked(table: dict[str, list], names: dict[str, int], where: Callable[[int], str]) -> dict[str, np.ndarray]:
    """The columns as arrays; UserError names the place `where(row)` and the column. Tasks become indices, added to `names`."""
    lacking = [name for name in COLUMNS if name not in table]
    if lacking:
        raise UserError(f"{where(0)}: no column {', '.join(lacking)}; a log has {', '.join(COLUMNS)}; "
                        f"found: {', '.join(map(str, table))}.")
    value = _numbers(table["value"], "value", where)
    if (abs(value) > LARGEST).any():
        i = int(np.argmax(abs(value) > LARGEST))
        raise UserError(f"{where(i)}, column value: {value[i]} is no performance; leave the cell empty if there was none.")
    whole = {}
    for name in ("block_num", "exp_num"):
        numbers = _numbers(table[name], name, where)
        wrong = ~((numbers >= 0) & (numbers < 2**53) & (numbers == np.floor(numbers)))
        if wrong.any():
            i = int(np.argmax(wrong))
            raise UserError(f"{where(i)}, column {name}: expected a whole number from 0 on, found {table[name][i]!r}.")
        whole[name] = numbers.astype(np.int64)
    tasks = list(map(str, table["task"]))
    empty = [task for task in set(tasks) if task.strip() in MISSING]
    if empty:
        raise UserError(f"{where(tasks.index(empty[0]))}, column task: is empty.")
    codes = {task: names.setdefault(task.strip(), len(names)) for task in dict.fromkeys(tasks)}
    nothing = [None] * len(value)
    return {
        "block": whole["block_num"],
        "exp": whole["exp_num"],
        "task": np.array([codes[task] for task in tasks]),
        "value": value,
        "train": _words(table["block_type"], {"train": True, "test": False}, "block_type", where),
        "sleep": _words(table.get("block_subtype", nothing), {"sleep": True, "wake": False, "": False, None: False},
                        "block_subtype", where),
        "done": _words(table.get("exp_status", nothing), {"complete": True, "incomplete": False, "": True, None: True},
                       "exp_status", where),
    }


def _numbers(cells: list, name: str, where: Callable[[int], str]) -> np.ndarray:
    try:
        return np.array(list(map(float, cells)))
    except (TypeError, ValueError):  # a cell is empty, or no number
        found = []
    for i, cell in enumerate(cells):
        try:
            found.append(math.nan if cell is None or cell in MISSING else float(cell))
        except (TypeError, ValueError):
            raise UserError(f"{where(i)}, column {name}: expected a number, found {cell!r}.") from None
    return np.array(found)


def _words(cells: list, meaning: dict, name: str, where: Callable[[int], str]) -> np.ndarray:
    try:
        return np.array([meaning[cell] for cell in cells], bool)
    except (KeyError, TypeError):
        i = next(i for i, cell in enumerate(cells) if not isinstance(cell, str | None) or cell not in meaning)
        known = " or ".join(filter(None, meaning))
        raise UserError(f"{where(i)}, column {name}: expected {known}, found {cells[i]!r}.") from None


def _ordered(name: str, parts: list[dict[str, np.ndarray]], names: dict[str, int]) -> Log:
    """The rows of all parts of a log in the order of their experiences, without those that have no value; `names` of tasks."""
    if not parts:
        raise UserError(f"{name}: there is no row; a log has the columns {', '.join(COLUMNS)}.")
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    done, present = rows.pop("done"), ~np.isnan(rows["value"])
    kept = done & present
    notes = [f"rows {words}, left out: {count}" for words, count in (
        ("whose exp_status is not complete", (~done).sum()), ("without a value", (done & ~present).sum())) if count]
    if not kept.any():
        raise UserError(f"{name}: no row has a value.")
    rows = {key: column[kept] for key, column in rows.items()}
    order = np.lexsort((rows["block"], rows["exp"]))
    rows = {key: column[order] for key, column in rows.items()}
    back = np.flatnonzero(np.diff(rows["block"]) < 0)
    if len(back):
        i = int(back[0])
        raise UserError(f"{name}: block_num goes back from {rows['block'][i]} to {rows['block'][i + 1]} at exp_num "
                        f"{rows['exp'][i + 1]}; exp_num must grow over the whole log, and not start again in each block.")
    lower = [name.lower() for name in names]
    if len(set(lower)) < len(lower):
        notes.append("tasks whose names differ only in upper and lower case are one task")
    codes, first = np.unique(rows["task"][np.argsort(~rows["train"], kind="stable")], return_index=True)  # training rows first
    tasks = list(dict.fromkeys(lower[code] for code in codes[np.argsort(first)]))
    rows["task"] = np.array([tasks.index(word) if word in tasks else -1 for word in lower])[rows["task"]]
    notes += _repeated(rows)
    return Log(name=name, tasks=tasks, notes=notes, **rows)


def _repeated(rows: dict[str, np.ndarray]) -> list[str]:
    """A note if rows repeat another one in everything, as in a log that was written twice."""
    if (np.diff(rows["exp"]) > 0).all():
        return []
    order = np.lexsort(list(rows.values()))
    count = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in rows.values()]).sum()
    return [f"rows that repeat another one in all columns: {count}; they count as experiences of several workers, so remove "
            "them if the log was written twice"] if count else []
