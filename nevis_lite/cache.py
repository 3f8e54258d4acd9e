"""The pixel cache of a data set on disk: every image decoded once. Needs no torch, so that a look at it is quick.

A split is one file of bytes (images of all sizes end to end, height x width x channels, grey ones with a single channel), an
index and the labels. `data.py` reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nevis_lite import datasets
from nevis_lite.config import DataConfig, UserError
from nevis_lite.datasets import DataSet
from nevis_lite.pixels import read_image, read_shrunk, shrink
from nevis_lite.raw import legible
from nevis_lite.readers import Image, in_threads
from nevis_lite.splits import Examples

CACHE_FORMAT = 5  # raise it when the files' meaning changes: old caches are then built anew
BAD_SHARE = 0.001  # more broken images than this are an error


def folder_of(dataset: DataSet, config: DataConfig) -> Path:
    """<dir>/cache/<key>-<place>-<cache_side>-<fingerprint>: another one when source files, entry or format change."""
    place = hashlib.sha256(os.fsencode(dataset.folder.absolute())).hexdigest()[:4]  # two folders may share a name
    return Path(config.dir) / "cache" / f"{dataset.key}-{place}-{config.cache_side}-{_fingerprint(dataset)}"


def meta_of(folder: Path) -> dict | None:
    """The facts about a cache that is whole: sizes, classes, digests; else None."""
    path = folder / "meta.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _fingerprint(dataset: DataSet) -> str:
    """Looks at names, sizes and times, not at content."""
    facts = [CACHE_FORMAT, dataset.kind, dataset.classes, dataset.reader, dataset.options, dataset.labels, dataset.split,
             dataset.dedupe]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in datasets.files_below(dataset.folder):
        status = os.stat(path)
        digest.update(_below(dataset.folder, path) + f" {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _below(folder: Path, path: str) -> bytes:
    """The name of a file as bytes, from `folder` on, with the same slashes on every system."""
    return os.fsencode(path.removeprefix(f"{folder}{os.sep}").replace(os.sep, "/"))


def prepare(dataset: DataSet, config: DataConfig) -> Path:
    """The cache folder of a data set, built if its source files or `cache_side` changed since; safe to interrupt.

    UserError when labels are out of range or more than 0.1 % of the images are broken; fewer are skipped. `report.jsonl` has a
    row for each of them, and for each image whose pixels are those of an image of an earlier split.
    """
    folder = folder_of(dataset, config)
    root, prefix = folder.parent, folder.name[:folder.name.rindex("-") + 1]
    if (folder / "meta.json").is_file():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    splits = datasets.read(dataset, root)
    classes = datasets.num_classes(dataset, splits)
    for name, examples in splits.items():
        _check_labels(examples.labels, classes, f"{dataset.folder}, {name}")
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    try:
        content, sides, sizes, bad, copies = hashlib.sha256(), 0, {}, [], []
        seen = np.empty(0, np.uint64)  # what tells the pixels of the splits so far
        total = sum(len(examples) for examples in splits.values())
        with tqdm(total=total, desc=f"caching {dataset.name}", unit=" images", disable=None, leave=False) as bar:
            for name, examples in splits.items():
                kept, prints, broken, shorter = _write_split(building, name, examples, config.cache_side, content, bar)
                sizes[name] = len(kept)
                sides += shorter
                bad += broken
                copies += [_row(name, examples, kept[place], "an image of an earlier split has the same pixels")
                           for place in np.flatnonzero(np.isin(prints, seen))]
                seen = np.concatenate([seen, prints])
        with open(building / "report.jsonl", "w", encoding="utf-8") as report:
            report.writelines(json.dumps(row) + "\n" for row in bad + copies)
        if len(bad) > BAD_SHARE * total:
            listed = "; ".join(f"{row['image']} ({row['error']})" for row in bad[:3])
            raise UserError(f"{dataset.name}: {len(bad)} of {total} images cannot be read, for example {listed}; "
                            "mend or remove them.")
        meta = {"name": dataset.name, "kind": "multi_label" if splits["train"].labels.ndim == 2 else "single_label",
                "num_classes": classes, "classes": datasets.class_names(dataset, splits), "sizes": sizes, "skipped": len(bad),
                "copies": Counter(row["split"] for row in copies),
                "resolution": round(sides / sum(sizes.values()), 1), "cache_side": config.cache_side,
                "class_counts": {name: _class_counts(np.load(building / f"{name}.labels.npy"), classes) for name in splits},
                "splits": {name: _order_digest(examples, dataset.folder) for name, examples in splits.items()},
                "sha256": content.hexdigest()}
        (building / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        os.chmod(building, 0o755)  # mkdtemp's folders are private
        for old in root.iterdir():
            if old.name.startswith(prefix) and old != folder:
                shutil.rmtree(old, ignore_errors=True)
        try:
            building.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # else another process was quicker
                raise
            shutil.rmtree(building, ignore_errors=True)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    if bad or copies:
        told = [f"{len(bad)} of {total} images cannot be read and are left out"] * bool(bad)
        told += [f"{count} of {sizes[name]} images of {name} are in an earlier split, too"
                 for name, count in meta["copies"].items()]
        print(f"{dataset.name}: {'; '.join(told)} (listed in {folder / 'report.jsonl'})", file=sys.stderr)
    return folder


def _remove_leftovers(root: Path):
    """What builds that were killed left behind; a day old, so that no other process is still at it."""
    for path in root.iterdir():
        if path.name.startswith((".building-", "nevis_lite-")) and time.time() - path.stat().st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)


def _class_counts(labels: np.ndarray, classes: int) -> list[int]:
    """How many images have each class or label."""
    return (np.bincount(labels, minlength=classes) if labels.ndim == 1 else labels.sum(axis=0, dtype=np.int64)).tolist()


def _order_digest(examples: Examples, folder: Path) -> str:
    """12 digits that tell which images, in which order, with which labels: by name, or by pixels where they have none."""
    digest = hashlib.sha256()
    for image, label in zip(examples.images, examples.labels, strict=True):
        if isinstance(image, np.ndarray):
            digest.update(np.ascontiguousarray(image))
        else:
            digest.update(_below(folder, str(image)) + b"\n")
        digest.update(label.tobytes())
    return digest.hexdigest()[:12]


def _check_labels(labels: np.ndarray, classes: int, where: str):
    """On the CPU, before training: a label out of range kills a CUDA process without a hint."""
    if not len(labels):
        raise UserError(f"{where}: the split is empty.")
    if labels.ndim == 2 and (labels.shape[1] != classes or not np.isin(labels, (0, 1)).all()):
        raise UserError(f"{where}: labels must be zeros and ones in {classes} columns; found shape {labels.shape} "
                        f"and values {labels.min()} to {labels.max()}.")
    if labels.ndim == 2 and not labels.any():
        raise UserError(f"{where}: no image has a label, so mAP is undefined.")
    if labels.ndim == 1 and (labels.min() < 0 or labels.max() >= classes):
        raise UserError(f"{where}: labels must lie in 0..{classes - 1}; found {labels.min()} to {labels.max()}.")


def _row(split: str, examples: Examples, number: int, error: str) -> dict:
    """A row of the report."""
    image = examples.images[number]
    name = f"number {number}" if isinstance(image, np.ndarray) else legible(str(image))
    return {"split": split, "image": name, "error": error}


def _write_split(folder: Path, name: str, examples: Examples, cache_side: int, content,
                 bar) -> tuple[np.ndarray, np.ndarray, list[dict], int]:
    """Write one split's three files and feed the digest `content`.

    Returns the numbers of the images that can be read, eight bytes that tell the pixels of each, a row for each other one, and
    the sum of the native shorter sides.
    """
    images, index = examples.images, np.zeros((len(examples), 4), np.int64)
    prints, bad, offset, sides = np.zeros(len(examples), np.uint64), [], 0, 0
    with open(folder / f"{name}.pixels", "wb") as file:
        decoded = in_threads(lambda numbers: _decode([images[number] for number in numbers], cache_side), _order(images))
        for number, found in decoded:
            bar.update()
            if isinstance(found, OSError):
                bad.append(_row(name, examples, number, legible(str(found))))
                continue
            pixels, side, digest = found
            file.write(pixels)
            content.update(digest)
            index[number] = offset, *pixels.shape
            prints[number] = int.from_bytes(digest[:8], "big")
            offset += pixels.size
            sides += side
    if not offset:
        raise UserError(f"No image of the {name} split can be read, for example {bad[0]['image']} ({bad[0]['error']}).")
    kept = np.flatnonzero(index[:, 1])
    for what, values in (("index", index[kept]), ("labels", np.ascontiguousarray(examples.labels[kept]))):
        content.update(values)
        np.save(folder / f"{name}.{what}.npy", values)
    return kept, prints[kept], bad, sides


def _order(images) -> np.ndarray:
    """Numbers of the images as they are best read: references by name, as files lie in archives, parts of a photo in a row."""
    if isinstance(images[0], (np.ndarray, str)):
        return np.arange(len(images))
    return np.argsort(np.array([image.name for image in images], object), kind="stable")


def _decode(images: list, cache_side: int) -> list[tuple[np.ndarray, int, bytes] | OSError]:
    """Of each image the pixels (H, W, 1 or 3), the shorter side capped; the native shorter side; and a digest of the pixels."""
    photo = lru_cache(maxsize=1)(lambda raw, name: read_image(raw.read(name)))  # of which several parts may follow each other

    def shrunk(image) -> tuple[np.ndarray, int]:
        match image:
            case str():
                return read_shrunk(image, cache_side)
            case Image(change=None):
                return read_shrunk(image.raw.read(image.name), cache_side)
            case Image():
                pixels = image.change(photo(image.raw, image.name))
            case np.ndarray():
                pixels = image
            case _:
                pixels = image.load()
        if not pixels.size:
            raise OSError("it has no pixels")
        return shrink(pixels, cache_side), min(pixels.shape[:2])

    found = []
    for image in images:
        try:
            pixels, side = shrunk(image)
            digest = hashlib.sha256(repr(pixels.shape).encode())
            digest.update(pixels)
            found.append((pixels, side, digest.digest()))
        except OSError as error:
            found.append(error)
    return found
