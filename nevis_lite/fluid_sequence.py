"""Sequences for FLUID (arXiv 2007.02519): which images come when, from any labelled images, with a heavy tail of classes.

A quarter of the classes was pretrained, the rest is new; the counts follow a Zipf-Mandelbrot law, and the order is random.
Needs no torch, so that a sequence can be drawn, stored and looked at anywhere.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nevis_lite.config import UserError


def class_counts(n_classes: int, c: float = 25.0) -> np.ndarray:
    """(K,) int64, images of the r-th most frequent of K classes: floor(c K / (r + K/40)), r = 1..K.

    The largest is about 40 c, the smallest c / 1.025, and 46 % of the classes have more than 2 c, whatever K is. At c = 25 and
    K = 1000 these are the counts of the paper's sequences.
    """
    rank = np.arange(1, n_classes + 1)
    return np.floor(c * n_classes / (rank + n_classes / 40)).astype(np.int64)


@dataclass
class Sequence:
    """T images in the order of their arrival, of K classes in slots: the pretrained ones first, then the novel ones."""

    index: np.ndarray  # (T,) int64, places in the pool of images
    label: np.ndarray  # (T,) int64, slots
    classes: np.ndarray  # (K,) int64, the slots' ids in the pool
    names: list[str]  # (K,)
    known: int  # slots 0 to known - 1 are the pretrained classes
    threshold: float  # a class with more images than this is a head class, else a tail class
    seed: int

    @property
    def count(self) -> np.ndarray:
        """(K,) int64, images of each class."""
        return np.bincount(self.label, minlength=len(self.classes))

    @property
    def head(self) -> np.ndarray:
        """(K,) bool."""
        return self.count > self.threshold

    @property
    def new(self) -> np.ndarray:
        """(T,) bool: the first sample of a class that was not pretrained."""
        first = np.zeros(len(self.label), bool)
        first[np.unique(self.label, return_index=True)[1]] = True
        return first & (self.label >= self.known)

    @property
    def hash(self) -> str:
        """12 digits that differ where any of the content does."""
        digest = hashlib.sha256(repr((self.known, float(self.threshold), self.seed, list(self.names))).encode())
        for values in (self.index, self.label, self.classes):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()[:12]

    def save(self, path):
        """Write an .npz, to a path or an open file, that numpy reads without pickle."""
        np.savez(path, index=self.index, label=self.label, classes=self.classes, names=np.array(self.names, str),
                 known=self.known, threshold=float(self.threshold), seed=self.seed)

    @classmethod
    def load(cls, path: str | Path) -> Sequence:
        """What `save` wrote; UserError where it didn't write it."""
        found = read_npz(path, ("index", "label", "classes", "names", "known", "threshold", "seed"))
        return cls(found["index"], found["label"], found["classes"], found["names"].tolist(), int(found["known"]),
                   float(found["threshold"]), int(found["seed"]))


def read_npz(path: str | Path, needed: tuple[str, ...]) -> dict[str, np.ndarray]:
    """All arrays of an .npz file; UserError if it can't be read or lacks one that is needed."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    lacking = [name for name in needed if name not in found]
    if lacking:
        raise UserError(f"{path}: lacks {', '.join(lacking)}, so it is another kind of file.")
    return found


def reserve(labels: np.ndarray, classes: Iterable[int], share: float = 0.5, seed: int = 0) -> np.ndarray:
    """Places of a share of the images of each of `classes`, sorted: those to pretrain on, which no sequence may contain.

    `labels` (N,), of the whole pool. Of a class with two images or more at least one is taken and one is left.
    """
    random, taken = np.random.default_rng([seed, 1]), [np.zeros(0, np.int64)]
    for one in sorted(set(classes)):
        images = np.flatnonzero(labels == one)
        most = max(len(images) - 1, 0)
        taken.append(random.permutation(images)[:min(max(round(share * len(images)), 1), most)])
    return np.sort(np.concatenate(taken))


def build_sequence(labels: np.ndarray, pretrain_classes: Iterable[int], *, n_classes: int, frac_pretrain: float = 0.25,
                   c: float = 25.0, head: float | None = None, natural: bool = False, exclude_images: Iterable[int] = (),
                   exclude_classes: Iterable[int] = (), names: list[str] | None = None, seed: int = 0) -> Sequence:
    """A sequence from a pool of images with `labels` (N,), and `names` of their classes, if they have any.

    Of its classes a share `frac_pretrain` is drawn from `pretrain_classes`, the rest from the others without
    `exclude_classes`. Their counts are `class_counts`, at least 1, given to classes at random among those that have so many
    images, and cut to what there is where none has; `natural` takes all images of each class instead. Without
    `exclude_images`, those that were pretrained on or are in another sequence. `head`: the threshold, 2 c by default.
    UserError if the pool has too few classes with enough images.
    """
    labels, random = np.asarray(labels), np.random.default_rng([seed, 2])
    pretrained, excluded = set(pretrain_classes), set(exclude_classes)
    free = np.ones(len(labels), bool)
    free[np.fromiter(exclude_images, np.int64)] = False
    left = np.bincount(labels[free], minlength=max(pretrained, default=0) + 1)
    targets = np.maximum(class_counts(n_classes, c), 1)
    least = 1 if natural else targets[-1]

    known = int(frac_pretrain * n_classes + 0.5)
    rich = np.flatnonzero(left >= least)
    parts = []
    for kind, size, pool in (("pretrained", known, [one for one in rich if one in pretrained]),
                             ("novel", n_classes - known, [one for one in rich if one not in pretrained | excluded])):
        if len(pool) < size:
            raise UserError(f"The pool has {len(pool)} {kind} classes with {least} or more images left, and a sequence of "
                            f"{n_classes} classes needs {size}: take fewer classes, a smaller c, or more images.")
        parts.append(np.sort(random.choice(pool, size, replace=False)) if size else np.zeros(0, np.int64))
    classes = np.concatenate(parts).astype(np.int64)

    counts = left[classes].copy()
    if not natural:
        open_slots = np.ones(n_classes, bool)
        for target in targets:  # from the largest to the smallest, so that no count is cut that another class could fill
            able = np.flatnonzero(open_slots & (left[classes] >= target))
            slot = random.choice(able) if len(able) else np.argmax(np.where(open_slots, left[classes], -1))
            counts[slot], open_slots[slot] = min(target, left[classes[slot]]), False
    index = np.concatenate([random.permutation(np.flatnonzero(free & (labels == one)))[:count]
                            for one, count in zip(classes, counts, strict=True)])
    label, order = np.repeat(np.arange(n_classes), counts), random.permutation(len(index))
    return Sequence(index[order], label[order], classes, [names[one] if names else str(one) for one in classes], known,
                    2 * c if head is None else head, seed)
