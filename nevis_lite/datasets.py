"""From published files to images and labels: one entry a data set in `datasets.yaml`, read by a handful of readers.

`read` gives the four splits of a data set as `Examples`, whose images are paths, references or arrays and are decoded later,
once, by the pixel cache (`data.py`). An entry names its published files, the reader that understands them with the reader's
options, how labels become class ids, and how splits that the files lack are made (`splits.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nevis_lite import arrays, bespoke, indexes, readers
from nevis_lite.config import MissingData, UserError, nearest, read_yaml
from nevis_lite.pixels import read_image  # noqa: F401, a part of this module's interface
from nevis_lite.raw import ARCHIVE, Raw, is_litter, legible
from nevis_lite.readers import class_ids, class_words, label_matrix, natural
from nevis_lite.splits import SPLITS, Examples, complete

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class DataSet:
    """An entry of the catalogue, or a user's own folder."""

    key: str
    name: str
    folder: Path
    kind: str | None = None  # single_label or multi_label; None: told by the files
    classes: int | None = None
    domain: str = "other"
    files: list[dict] = field(default_factory=list)  # as published: {name, url, md5 or sha256, mirrors, manual}
    reader: str = "auto"
    options: dict = field(default_factory=dict)  # of the reader
    labels: list | str | None = None  # the order of the classes: see readers.class_ids
    split: dict = field(default_factory=dict)  # a rule of splits.complete; empty: the reference's shares
    images: dict = field(default_factory=dict)  # how many each split holds if the files are as published: {train: n, ...}
    images_about: bool = False  # `images` are no more than rough
    dedupe: bool = False  # exact copies (pixels and label) are dropped, the first one stays
    note: str = ""  # where we deviate from the reference, or what could not be verified
    licence: str = ""  # or terms, as the publishers state them
    size: str = ""  # of all files to fetch, roughly


def catalogue(data_dir: Path) -> dict[str, DataSet]:
    """All entries of `datasets.yaml` by key; embedded ones live in the package, others in `data_dir`/key."""
    entries = {}
    for key, facts in read_yaml((PACKAGE / "datasets.yaml").read_text(encoding="utf-8"), "datasets.yaml").items():
        folder = PACKAGE / facts.pop("embedded") if "embedded" in facts else Path(data_dir) / key
        entries[key] = DataSet(key=key, folder=folder, **facts)
    return entries


def is_missing(dataset: DataSet) -> bool:
    return not dataset.folder.is_dir() or all(is_litter(path.name) for path in dataset.folder.iterdir())


def files_below(folder: str | Path) -> Iterator[str]:
    """All files at any depth, sorted, behind links too; without what operating systems and editors leave in folders.

    None if there is no such folder. Paths are strings, since a Path takes four times the room, and ImageNet has 1.28 million.
    """
    for entry in sorted(os.scandir(folder) if os.path.isdir(folder) else (), key=lambda entry: entry.name):
        if not is_litter(entry.name):
            if entry.is_dir():
                yield from files_below(entry.path)
            else:
                yield entry.path


LAYOUT = ("A folder holds train/, dev/, dev_test/ and test/ with a sub-folder of images for each class, or IDX files "
          "(train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, ...); splits that are missing are drawn from train.")


def read(dataset: DataSet, scratch: Path | None = None) -> dict[str, Examples]:
    """All four splits; decodes no image file, unless copies have to be found.

    `scratch` takes what has to be decompressed (default: the system's temporary folder). MissingData without files, UserError
    on files that make no sense.
    """
    if is_missing(dataset):
        raise MissingData(f"{dataset.name}: no files in {dataset.folder.absolute()}.\n{LAYOUT}")
    reader = own_layout(dataset) or dataset.reader
    if reader == "auto":
        reader = "idx" if any(dataset.folder.glob("*-ubyte*")) else "class_folders"
    try:
        if reader in FOLDER_READERS:
            splits = FOLDER_READERS[reader](dataset.folder)
        elif reader in TABLE_READERS:
            splits = _from_table(dataset, TABLE_READERS[reader], scratch)
        else:
            raise UserError(f"unknown reader {reader}{nearest(reader, [*FOLDER_READERS, *TABLE_READERS])}")
        splits = complete(splits, dataset.split)
    except (UserError, OSError) as error:
        told = str(error).rstrip(".")
        kind = type(error) if isinstance(error, UserError) else UserError
        raise kind(f"{told}." if told.startswith(str(dataset.folder)) else f"{dataset.folder}: {told}.") from None
    shape = {examples.labels.shape[1:] for examples in splits.values()}
    if len(shape) > 1:
        raise UserError(f"{dataset.folder}: the label files of its splits differ in their number of labels.")
    return {name: splits[name] for name in SPLITS}


def own_layout(dataset: DataSet) -> str | None:
    """The reader of a published data set that somebody put there in the layout of one's own images; None if nobody did."""
    if not dataset.files or any(is_there(dataset.folder, file["name"]) for file in dataset.files):
        return None
    idx_in = dataset.reader == "idx_in"  # whose published files are IDX, too, and have names of their own
    if any(dataset.folder.glob("[!.]*-ubyte*" if idx_in else "train-images*-ubyte*")):
        return "idx_in" if idx_in else "idx"
    return "class_folders" if (dataset.folder / "train").is_dir() else None


def is_there(folder: Path, name: str) -> bool:
    """Whether a published file is, as a file, or, of an archive, unpacked in a folder of its name."""
    return (folder / name).is_file() or bool(ARCHIVE.search(name)) and (folder / ARCHIVE.sub("", name)).is_dir()


def _from_table(dataset: DataSet, reader, scratch: Path | None) -> dict[str, Examples]:
    """The splits that the publishers made, from what a reader lists."""
    table = reader(Raw(dataset.folder, scratch), **dataset.options)
    if not table.images:
        raise UserError("holds none of the images that were expected")
    if dataset.kind == "multi_label":
        labels = label_matrix(table.labels, dataset.labels, dataset.classes)
        words = class_words([label for row in table.labels for label in row], dataset.labels, dataset.classes)
    else:
        labels = class_ids(table.labels, dataset.labels, dataset.classes)
        words = class_words(table.labels, dataset.labels, dataset.classes)
    keep = readers.first_copies(table.images, labels) if dataset.dedupe else np.arange(len(labels))
    names = np.array(table.splits)[keep]
    examples = Examples(table.images, labels, words)
    return {name: examples.take(keep[names == name]) for name in SPLITS if (names == name).any()}


def num_classes(dataset: DataSet, splits: dict[str, Examples]) -> int:
    """Classes (or labels) of a data set: the entry's, else those that have names, else the largest id of train + 1."""
    if dataset.classes:
        return dataset.classes
    if splits["train"].labels.ndim == 2:
        return splits["train"].labels.shape[1]
    return len(class_names(dataset, splits)) or int(splits["train"].labels.max()) + 1


def class_names(dataset: DataSet, splits: dict[str, Examples]) -> list[str]:
    """What the classes or labels are called, in the order of their ids: by the files, else by `classes.txt`; or else empty."""
    names = dataset.folder / "classes.txt"
    return list(splits["train"].classes) or (names.read_text(encoding="utf-8").splitlines() if names.is_file() else [])


# ---------------------------------------------------------------------------------------------------------------------
# Readers: folder -> splits as they are published


def read_idx(folder: Path) -> dict[str, Examples]:
    """IDX files `<split>-images-idx3-ubyte[.gz]` (idx4: colour) and `<split>-labels-idx1-ubyte[.gz]` (idx2: many labels).

    Of more than 256 classes the labels are in `<split>-labels-idx1-int[.gz]`. `t10k`, MNIST's own name, is the test split.
    """
    splits = {}
    for path in sorted(path for path in folder.glob("*-images*-ubyte*") if not is_litter(path.name)):
        prefix = path.name.split("-images")[0]
        name = "test" if prefix == "t10k" else prefix
        if name not in SPLITS:
            raise UserError(f"{path}: unknown split{nearest(name, SPLITS)}.")
        labels = sorted(file for kind in ("ubyte", "int") for file in folder.glob(f"{prefix}-labels*-{kind}*"))
        if not labels:
            raise UserError(f"{path}: its label file {prefix}-labels-idx1-ubyte[.gz] is missing.")
        examples = Examples(*(arrays.parse_idx(file.read_bytes(), file) for file in (path, labels[0])))
        if len(examples.images) != len(examples.labels):
            raise UserError(f"{path}: {len(examples.images)} images but {len(examples.labels)} labels in {labels[0].name}.")
        if examples.labels.ndim not in (1, 2):
            raise UserError(f"{labels[0]}: labels must be (N,) ids or (N, C) zeros and ones, not {examples.labels.shape}.")
        if (examples.images.ndim not in (3, 4) or (examples.images.ndim == 4 and examples.images.shape[3] != 3)
                or examples.images.dtype != np.uint8):
            raise UserError(f"{path}: images must be bytes, (N, H, W) or (N, H, W, 3), not {examples.images.dtype} "
                            f"{examples.images.shape}.")
        if examples.labels.min(initial=0) < 0:
            raise UserError(f"{labels[0]}: has the label {examples.labels.min()}; classes are numbered from 0.")
        splits[name] = Examples(examples.images, examples.labels if examples.labels.ndim == 2
                                else examples.labels.astype(np.int64))
    if not splits:
        raise UserError(f"{folder}: no file is named like train-images-idx3-ubyte.gz.")
    return splits


def read_class_folders(folder: Path) -> dict[str, Examples]:
    """`<split>/<class>/images`, or `<class>/images` without a split. Classes in natural order (2 before 10)."""
    inside = _folders(folder)
    roots = {path.name: path for path in inside if path.name in SPLITS}
    if roots and len(roots) < len(inside):
        other = ", ".join(path.name for path in inside if path.name not in SPLITS)
        raise UserError(f"{folder}: {other} lies beside {', '.join(roots)}; splits are named {', '.join(SPLITS)}.")
    roots = roots or {"train": folder}
    if "train" not in roots:
        raise UserError(f"{folder}: there is no train/ beside {', '.join(roots)}.")
    classes = [path.name for path in _folders(roots["train"])]
    if len(classes) < 2:
        raise UserError(f"{roots['train']}: needs a sub-folder for each of at least two classes, found {len(classes)}.")
    splits = {}
    for name, root in roots.items():
        images, labels = [], []
        for path in _folders(root):
            if path.name not in classes:
                raise UserError(f"{path}: class {path.name} does not occur in {roots['train']}.")
            files = list(files_below(path))
            if not files and name == "train":
                print(f"{path}: a class without images; remove the folder if it is none.", file=sys.stderr)
            images += files
            labels += [classes.index(path.name)] * len(files)
        splits[name] = Examples(images, np.array(labels, np.int64), [legible(name) for name in classes])
    return splits


def _folders(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.is_dir() and not is_litter(path.name)),
                  key=lambda path: natural(path.name))


def read_landsat(folder: Path) -> dict[str, Examples]:
    """Statlog Landsat: 36 numbers (3x3 pixels x 4 bands) and a class 1..7 a row; the first three bands are the colours."""
    splits = {}
    for name, file in (("train", "sat.trn"), ("test", "sat.tst")):
        try:
            rows = np.loadtxt(folder / file, dtype=np.int64, ndmin=2)
            pixels, labels = rows[:, :36].reshape(-1, 3, 3, 4), rows[:, 36] - 1
        except (OSError, ValueError, IndexError) as error:
            raise UserError(f"{folder / file}: cannot be read as rows of 37 numbers ({error}).") from None
        splits[name] = Examples(pixels[..., :3].astype(np.uint8), labels)
    return splits


FOLDER_READERS = {"idx": read_idx, "class_folders": read_class_folders, "landsat": read_landsat}
TABLE_READERS = readers.READERS | arrays.READERS | indexes.READERS | bespoke.READERS
