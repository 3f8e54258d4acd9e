"""The generic readers: from the published files of a data set (`raw.py`) to a table of images and labels.

A reader is a function `reader(raw, **options) -> Table`, named by an entry of `datasets.yaml` with its options. It lists
images as references and decodes none. Labels may still be words; `Table.finish` turns them into class ids. `arrays.py` holds
the readers of files that are arrays of pixels, `bespoke.py` those that only one data set needs.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from nevis_lite.config import UserError
from nevis_lite.pixels import read_image
from nevis_lite.raw import Raw

CHUNK = 16  # images that a thread decodes at a time


@dataclass(frozen=True, slots=True)
class Image:
    """A reference to an image in `raw`. `change`, if any, is applied to its decoded pixels (H, W, 3)."""

    raw: Raw
    name: str
    change: Callable[[np.ndarray], np.ndarray] | None = None

    def load(self) -> np.ndarray:
        pixels = read_image(self.raw.read(self.name))
        return self.change(pixels) if self.change else pixels

    def __str__(self):
        return self.name


@dataclass
class Table:
    """Images in a fixed order, each with its label and the split that the publishers gave it.

    `labels`: a word or a number an image, or a list of them (or a row of zeros and ones) in multi-label data sets.
    `splits`: train, dev, dev_test or test; what is missing among them is drawn later (`datasets.complete`).
    """

    images: list = field(default_factory=list)  # Image, or uint8 arrays (H, W) or (H, W, 3)
    labels: list = field(default_factory=list)
    splits: list[str] = field(default_factory=list)

    def add(self, image, label, split: str = "train"):
        self.images.append(image)
        self.labels.append(label)
        self.splits.append(split)

    def __add__(self, other: Table) -> Table:
        return Table(self.images + other.images, self.labels + other.labels, self.splits + other.splits)


def natural(word: str) -> list:
    """Sort key that puts class2 before class10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", word)
    return [*((0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts), (2, 0, word)]


def class_ids(labels: list, order: list | str | None, classes: int) -> np.ndarray:
    """(N,) int64 ids of labels that are words or numbers.

    `order`: the list of all class words in their order; or "minus 1" for numbers that begin at 1, "number" for numbers as
    they are; None for the words that occur, in natural order. UserError when a label is none of them or there are more than
    `classes`.
    """
    if order in ("number", "minus 1"):
        wrong = next((label for label in labels if not str(label).strip().isdigit()), None)
        if wrong is not None:
            raise UserError(f"has the label {wrong!r} where a number was expected")
        ids = np.array([int(label) for label in labels], np.int64) - (order == "minus 1")
        if len(ids) and not 0 <= ids.min() <= ids.max() < classes:
            raise UserError(f"has labels from {ids.min()} to {ids.max()} where 0 to {classes - 1} are known")
        return ids
    words = class_words(labels, order, classes)
    if len(words) > classes:
        raise UserError(f"has {len(words)} classes where {classes} are known, for example {', '.join(words[:5])}")
    number = {word: index for index, word in enumerate(words)}
    unknown = next((str(label) for label in labels if str(label) not in number), None)
    if unknown is not None:
        raise UserError(f"has the label {unknown!r}, which is none of its classes")
    return np.array([number[str(label)] for label in labels], np.int64)


def class_words(labels: list, order: list | str | None, classes: int) -> list[str]:
    """The word or number of each class as its publishers have it, in the order of the ids; arguments as of `class_ids`."""
    if order in ("number", "minus 1"):
        return [str(number + (order == "minus 1")) for number in range(classes)]
    return [str(word) for word in order] if order else sorted({str(label) for label in labels}, key=natural)


def label_matrix(labels: list, order: list | str | None, classes: int) -> np.ndarray:
    """(N, classes) uint8 of zeros and ones from lists of words or numbers; `order` as in `class_ids`."""
    flat = [label for row in labels for label in row]
    ids = iter(class_ids(flat, order, classes))
    matrix = np.zeros((len(labels), classes), np.uint8)
    for index, row in enumerate(labels):
        for _ in row:
            matrix[index, next(ids)] = 1
    return matrix


def in_threads(work: Callable[[Sequence], list], items: Sequence) -> Iterator[tuple]:
    """Each of `items` with its place in `work(some items in a row)`, in their order.

    The threads are never far ahead of who takes the results, so that these need little memory.
    """
    pool, waiting = ThreadPoolExecutor(os.cpu_count()), deque()
    try:
        for begin in range(0, len(items), CHUNK):
            chunk = items[begin:begin + CHUNK]
            waiting.append((chunk, pool.submit(work, chunk)))
            if len(waiting) > 2 * os.cpu_count():
                chunk, future = waiting.popleft()
                yield from zip(chunk, future.result(), strict=True)
        for chunk, future in waiting:
            yield from zip(chunk, future.result(), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C doesn't wait for what is queued


def first_copies(images: list, labels: np.ndarray) -> np.ndarray:
    """Indices of the images that are no exact copy (pixels and label) of an earlier one; broken files are kept for later."""
    def digest(index: int) -> bytes:
        image = images[index]
        try:
            pixels = image if isinstance(image, np.ndarray) else image.load()
        except OSError:
            return f"broken {index}".encode()
        return hashlib.md5(pixels.tobytes() + labels[index].tobytes()).digest()

    seen = {}
    for index, key in in_threads(lambda some: list(map(digest, some)), range(len(images))):
        seen.setdefault(key, index)
    return np.array(sorted(seen.values()))


# ---------------------------------------------------------------------------------------------------------------------
# Class folders, and whatever else is told by file names


def by_name(raw: Raw, parts: list[dict]) -> Table:
    """Label and split from each file's name, for every part in turn.

    A part has `pattern`, a regular expression searched in '/' + name, whose groups `label` and `split` are used, if there;
    else `label` and `split` (train if absent) hold for the whole part. `alias` renames labels, and one renamed to null is
    dropped; `where` maps values of the group `split` to splits, and values that it lacks are dropped; labels with fewer than
    `at_least` images in the part are dropped. Files are taken in sorted order, and a file that an earlier part took isn't
    taken again.
    """
    table, taken = Table(), set()
    for part in parts:
        pattern, alias, where = re.compile(part["pattern"]), part.get("alias", {}), part.get("where")
        matches = []
        for name in sorted(raw.names):
            match = None if name in taken else pattern.search("/" + name)
            if not match:
                continue
            groups = match.groupdict()
            label, split = groups.get("label", part.get("label")), groups.get("split", part.get("split", "train"))
            label = alias.get(label, label)
            split = where.get(split) if where else split
            if label is not None and split is not None:
                matches.append((name, label, split))
        sizes = Counter(label for _, label, _ in matches)
        for name, label, split in matches:
            if sizes[label] >= part.get("at_least", 1):
                taken.add(name)
                table.add(Image(raw, name), label, split)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Index files: one row an image


def rows(text: str, delimiter: str | None = None, skip: int = 0, columns: int = 0) -> Iterable[list[str]]:
    """The non-empty rows of a text table as lists of fields; `delimiter` None is any white space.

    With `columns` the last of so many fields takes the rest of the line, white space and all.
    """
    lines = [line for line in text.split("\n") if line.strip()][skip:]
    if delimiter is None or columns:
        return (line.strip().split(delimiter, columns - 1) for line in lines)
    return csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter)


def by_table(raw: Raw, parts: list[dict]) -> Table:
    """Images and labels from index files, for every part in turn.

    A part has `index`, a regular expression of the index file's name; `delimiter`, `skip` (header lines) and `columns`, as in
    `rows`; `join`, a list of more such files, whose rows continue those that begin with the same field; `image`, the end of
    the image's name as a format of the row's fields ('images/{0}.jpg'); `label`, such a format, too, of which `pattern`, if
    given, keeps its first group; `labels` instead, for several labels an image: the format is split at `between`; `split`, a
    format, of which `where`, if given, maps values to splits and drops what it lacks; and `drop`, a list of image names' ends
    to leave out. Images that the index names and the archives lack are left out, but not all of them. UserError on rows that
    don't fit.
    """
    table, ends = Table(), functools.cache(functools.partial(by_end, raw))
    for part in parts:
        before = len(table.images)
        for fields in _joined(raw, part):
            try:
                image, label, split = _row(part, fields)
            except (IndexError, AttributeError):
                raise UserError(f"has an unexpected row in {part['index']}: {' '.join(fields)[:200]}") from None
            if split is None or any(image.endswith(end) for end in part.get("drop", [])):
                continue
            slashes = image.count("/")
            name = ends(slashes).get(image) or ends(slashes, loose).get(loose(image))
            if name is not None:
                table.add(Image(raw, name), label, split)
        if len(table.images) == before:
            raise UserError(f"has none of the images that {part['index']} names, so an archive is missing")
    return table


def _joined(raw: Raw, part: dict) -> Iterable[list[str]]:
    """The rows of a part's index files, each with its fields in the files of `join`; rows that lack those are left out."""
    others = [{fields[0]: fields[1:] for fields in _joined(raw, other)} for other in part.get("join", [])]
    for index in find(raw, part["index"]):
        for fields in rows(raw.text(index), part.get("delimiter"), part.get("skip", 0), part.get("columns", 0)):
            if all(fields[0] in other for other in others):
                yield sum((other[fields[0]] for other in others), fields)


def _row(part: dict, fields: list[str]) -> tuple[str, str | list[str], str | None]:
    """The image's name, the label or labels, and the split of one row."""
    if "labels" in part:
        label = part["labels"].format(*fields).split(part["between"])
    else:
        label = part["label"].format(*fields)
        if "pattern" in part:
            label = re.search(part["pattern"], label).group(1)
    split = part.get("split", "train").format(*fields)
    return part["image"].format(*fields), label, part["where"].get(split) if "where" in part else split


def find(raw: Raw, pattern: str) -> list[str]:
    """The names that match `pattern` (searched in '/' + name), sorted. UserError when there is none."""
    names = sorted(name for name in raw.names if re.search(pattern, "/" + name))
    if not names:
        raise UserError(f"has no file like {pattern}")
    return names


def by_end(raw: Raw, slashes: int, spelling: Callable[[str], str] = str) -> dict[str, str]:
    """{the last `slashes` + 1 parts of a name, as spelled: the name}."""
    return {spelling("/".join(name.split("/")[-slashes - 1:])): name for name in raw.names}


def loose(name: str) -> str:
    """A name without what archives and index files often spell differently: case, and letters beyond ASCII."""
    return re.sub(r"[^\x00-\x7f]+", "?", name).lower()


def mixed(raw: Raw, names: list[dict], tables: list[dict]) -> Table:
    """The parts `names` as `by_name` reads them, then the parts `tables` as `by_table` does."""
    return by_name(raw, names) + by_table(raw, tables)


READERS: dict[str, Callable[..., Table]] = {"by_name": by_name, "by_table": by_table, "mixed": mixed}
