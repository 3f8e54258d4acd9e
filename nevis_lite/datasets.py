"""From published files to images and labels: one entry a data set in `datasets.yaml`, read by a handful of readers.

A reader lists the splits of a data set as `Examples`: images are paths or uint8 arrays and are decoded later, once, by the
pixel cache (`data.py`). What a data set's files do not split is split here, by the reference's rules.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nevis_lite.config import MissingData, UserError, nearest, read_yaml

PACKAGE = Path(__file__).resolve().parent
SPLITS = ("train", "dev", "dev_test", "test")
KINDS = ("single_label", "multi_label")
# Splits that the files lack are drawn from what they have (dm_nevis's random assignment), in these shares.
ALL = {"train": 0.56, "dev": 0.12, "dev_test": 0.12, "test": 0.20}  # no official split
TRAIN = {"train": 0.70, "dev": 0.15, "dev_test": 0.15}  # an official test split
TRAIN_DEV = {"train": 0.80, "dev": 0.20}  # official validation (used as dev_test) and test splits


@dataclass
class Examples:
    """One split: `images` are paths or uint8 arrays (H, W) or (H, W, 3); `labels` (N,) class ids or (N, C) zeros and ones."""

    images: Sequence
    labels: np.ndarray

    def __len__(self):
        return len(self.labels)

    def take(self, picks: np.ndarray) -> Examples:
        images = self.images[picks] if isinstance(self.images, np.ndarray) else [self.images[i] for i in picks]
        return Examples(images, self.labels[picks])


@dataclass(frozen=True)
class DataSet:
    """An entry of the catalogue. `slices`: sizes (or shares) of contiguous parts of the official train split, in order."""

    key: str
    name: str
    folder: Path
    kind: str | None = None  # None: told by the files
    classes: int | None = None
    domain: str = "other"
    reader: str = "auto"
    slices: dict = field(default_factory=dict)


def catalogue(data_dir: Path) -> dict[str, DataSet]:
    """All entries of `datasets.yaml` by key; embedded ones live in the package, others in `data_dir`/key."""
    text = (PACKAGE / "datasets.yaml").read_text(encoding="utf-8")
    entries = {}
    for key, facts in read_yaml(text, "datasets.yaml").items():
        folder = PACKAGE / facts.pop("embedded") if "embedded" in facts else Path(data_dir) / key
        entries[key] = DataSet(key=key, folder=folder, **facts)
    return entries


def is_missing(dataset: DataSet) -> bool:
    return not dataset.folder.is_dir() or all(map(_ignored, dataset.folder.iterdir()))


def files_below(folder: Path) -> list[Path]:
    """All files at any depth, sorted, behind links too; without what operating systems and editors leave in folders."""
    found = []
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _ignored(Path(name))]
        found += [Path(root, name) for name in files if not _ignored(Path(name))]
    return sorted(found)


LAYOUT = ("A folder holds train/, dev/, dev_test/ and test/ with a sub-folder of images for each class, or IDX files "
          "(train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, ...); splits that are missing are drawn from train.")


def read(dataset: DataSet) -> dict[str, Examples]:
    """All four splits; decodes no image file. MissingData without files, UserError on files that make no sense."""
    if is_missing(dataset):
        raise MissingData(f"{dataset.name}: no files in {dataset.folder.absolute()}.\n{LAYOUT}")
    reader = dataset.reader
    if reader == "auto":
        reader = "idx" if any(dataset.folder.glob("*-ubyte*")) else "class_folders"
    if reader not in READERS:
        raise UserError(f"{dataset.key}: unknown reader {reader}{nearest(reader, READERS)}.")
    splits = complete(READERS[reader](dataset.folder), dataset)
    shape = {examples.labels.shape[1:] for examples in splits.values()}
    if len(shape) > 1:
        raise UserError(f"{dataset.folder}: the label files of its splits differ in their number of labels.")
    return {name: splits[name] for name in SPLITS}


def num_classes(dataset: DataSet, splits: dict[str, Examples]) -> int:
    """Classes (or labels) of a data set: the entry's, else what its files name, else the largest id of train + 1."""
    if dataset.classes:
        return dataset.classes
    if splits["train"].labels.ndim == 2:
        return splits["train"].labels.shape[1]
    names = dataset.folder / "classes.txt"
    if names.is_file():
        return len(names.read_text(encoding="utf-8").splitlines())
    return int(splits["train"].labels.max()) + 1


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def assign(count: int, shares: dict[str, float]) -> np.ndarray:
    """(count,) split names, one draw an example in the order of the examples: dm_nevis's rule, seed 0, not stratified."""
    names = sorted(shares)
    draws = np.random.RandomState(0).multinomial(1, [shares[name] for name in names], size=count)
    return np.array(names)[draws.argmax(axis=1)]


def complete(splits: dict[str, Examples], dataset: DataSet) -> dict[str, Examples]:
    """Draw the splits that are missing from train, by `dataset.slices` or else by the reference's shares."""
    where = dataset.folder
    if "train" not in splits or not len(splits["train"]):
        raise UserError(f"{where}: there are no training images.")
    missing = [name for name in SPLITS if name not in splits]
    if dataset.slices and missing:
        return splits | _slice(splits["train"], dataset.slices, where)
    shares = {(): None, ("dev", "dev_test", "test"): ALL, ("dev", "dev_test"): TRAIN, ("dev",): TRAIN_DEV,
              ("dev_test",): {"train": 0.80, "dev_test": 0.20}}.get(tuple(missing), "unknown")
    if shares == "unknown":
        raise UserError(f"{where}: has {', '.join(splits)} but no {' or '.join(missing)}; give train alone, or add test.")
    if shares is None:
        return splits
    train = splits["train"]
    names = assign(len(train), shares)
    parts = {name: train.take(np.flatnonzero(names == name)) for name in shares}
    empty = [name for name, part in parts.items() if not len(part)]
    if empty:
        raise UserError(f"{where}: {len(train)} images are too few to draw {', '.join(empty)} from; "
                        f"add images, or make the folders {', '.join(SPLITS)} yourself.")
    return splits | parts


def _slice(train: Examples, slices: dict, where: Path) -> dict[str, Examples]:
    """Contiguous parts: counts as they are, shares of the whole truncated, and the last share takes the rest."""
    sizes = {name: size if size >= 1 else int(size * len(train)) for name, size in slices.items()}
    if all(size < 1 for size in slices.values()):
        last = list(sizes)[-1]
        sizes[last] = len(train) - sum(size for name, size in sizes.items() if name != last)
    if sum(sizes.values()) > len(train):
        raise UserError(f"{where}: train has {len(train)} images, fewer than the {sum(sizes.values())} of its slices.")
    parts, begin = {}, 0
    for name, size in sizes.items():
        parts[name] = train.take(np.arange(begin, begin + size))
        begin += size
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# Readers: folder -> splits as they are published


def read_idx(folder: Path) -> dict[str, Examples]:
    """IDX files `<split>-images-idx3-ubyte[.gz]` (idx4: colour) and `<split>-labels-idx1-ubyte[.gz]` (idx2: many labels).

    `t10k`, MNIST's own name, is the test split.
    """
    splits = {}
    for path in sorted(path for path in folder.glob("*-images*-ubyte*") if not _ignored(path)):
        prefix = path.name.split("-images")[0]
        name = "test" if prefix == "t10k" else prefix
        if name not in SPLITS:
            raise UserError(f"{path}: unknown split{nearest(name, SPLITS)}.")
        labels = sorted(folder.glob(f"{prefix}-labels*-ubyte*"))
        if not labels:
            raise UserError(f"{path}: its label file {prefix}-labels-idx1-ubyte[.gz] is missing.")
        examples = Examples(_idx(path), _idx(labels[0]))
        if len(examples.images) != len(examples.labels):
            raise UserError(f"{path}: {len(examples.images)} images but {len(examples.labels)} labels in {labels[0].name}.")
        if examples.labels.ndim not in (1, 2):
            raise UserError(f"{labels[0]}: labels must be (N,) ids or (N, C) zeros and ones, not {examples.labels.shape}.")
        if examples.images.ndim not in (3, 4) or (examples.images.ndim == 4 and examples.images.shape[3] != 3):
            raise UserError(f"{path}: images must be (N, H, W) or (N, H, W, 3), not {examples.images.shape}.")
        splits[name] = Examples(examples.images, examples.labels if examples.labels.ndim == 2
                                else examples.labels.astype(np.int64))
    if not splits:
        raise UserError(f"{folder}: no file is named like train-images-idx3-ubyte.gz.")
    return splits


def _idx(path: Path) -> np.ndarray:
    """An IDX file of unsigned bytes as an array."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, ndim = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{ndim}I", content[4:4 + 4 * ndim])
        if zero or kind != 8:
            raise ValueError("it does not hold unsigned bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, gzip.zlib.error) as error:
        raise UserError(f"{path}: not a whole IDX file ({error}); fetch it again.") from None


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
            files = files_below(path)
            images += files
            labels += [classes.index(path.name)] * len(files)
        splits[name] = Examples(images, np.array(labels, np.int64))
    return splits


def _folders(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.is_dir() and not _ignored(path)),
                  key=lambda path: ([(0, int(part), "") if part[0] in "0123456789" else (1, 0, part)
                                     for part in re.findall(r"[0-9]+|[^0-9]+", path.name)], path.name))


def _ignored(path: Path) -> bool:
    """What operating systems and editors leave behind."""
    return path.name.startswith((".", "__MACOSX")) or path.name in ("Thumbs.db", "desktop.ini")


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


READERS = {"idx": read_idx, "class_folders": read_class_folders, "landsat": read_landsat}


# ---------------------------------------------------------------------------------------------------------------------
# Pixels


def read_image(source: bytes | str | Path) -> np.ndarray:
    """Decode one image file to uint8 (H, W, 3).

    Transparency is laid on white; 16-bit and float images are scaled rather than clipped; of an animation the first frame
    counts; EXIF rotation is ignored, as in the reference. OSError when the file is no image or broken.
    """
    from PIL import Image, ImageFile  # only those who decode files wait for it

    Image.MAX_IMAGE_PIXELS = None  # local files, shrunk at once
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            mode = image.mode
            if mode.startswith("I;16") or mode in ("I", "F"):
                values = np.asarray(image).astype(np.float64)
                if mode == "F":
                    low, high = float(values.min()), float(values.max())
                    values = (values - low) * (255 / max(high - low, 1e-12))
                else:  # 16 bits, also where Pillow keeps them in a wider mode
                    values = values / 257
                return np.repeat(np.clip(np.round(values), 0, 255).astype(np.uint8)[..., None], 3, axis=2)
            if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # its decoders say "broken" in many ways
        raise OSError(f"{type(error).__name__}: {error}") from None
