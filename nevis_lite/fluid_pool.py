"""The images of a FLUID run: pooled from data sets, a share for pretraining, and the sequences drawn from the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nevis_lite import cache
from nevis_lite.config import DataConfig, UserError
from nevis_lite.data import Split, free_bytes, seeds
from nevis_lite.fluid_sequence import Sequence, build_sequence, reserve
from nevis_lite.stream import Task


class Pool(Split):
    """Images of several tasks as one split, with classes numbered through."""

    def __init__(self, index: Tensor, pixels: Tensor, labels: Tensor, classes: list[str], device: torch.device):
        self.index, self.pixels, self.labels, self.device = index, pixels, labels.to(device), device
        self.name, self.part, self._squares = "pool", None, {}
        self.meta = {"kind": "single_label", "num_classes": len(classes), "classes": classes, "sizes": {"pool": len(index)}}

    def subset(self, rows: np.ndarray, labels: np.ndarray, classes: list[str] | None = None) -> Pool:
        """The images `rows` (n,) in this order, with other labels (n,) and names of classes."""
        index = self.index[torch.from_numpy(rows).to(self.index.device)]
        return Pool(index, self.pixels, torch.from_numpy(labels), classes or self.meta["classes"], self.device)


def pool_of(tasks: list[Task], data: DataConfig, device: torch.device) -> Pool:
    """All splits of all tasks. UserError for several labels an image, or a data set that is listed twice."""
    index, pixels, labels, classes, offset, folders = [], [], [], [], 0, set()
    for task in tasks:
        folder = cache.prepare(task.dataset, data)
        meta = cache.meta_of(folder)
        if meta["kind"] == "multi_label":
            raise UserError(f"{task.name}: has several labels an image; a stream of this kind needs one.")
        if folder in folders:
            raise UserError(f"tasks: {task.name} is listed twice, and its images would be, too.")
        if task.part:
            raise UserError(f"{task.name}: all classes of a data set go into the pool; leave out split.")
        folders.add(folder)
        for name in meta["sizes"]:
            split = Split(folder, name, torch.device("cpu"))
            index.append(split.index + torch.tensor([offset, 0, 0, 0]))
            pixels.append(split.pixels)
            labels.append(split.labels + len(classes))
            offset += len(split.pixels)
        classes += [f"{task.name}: {name}" for name in meta["classes"] or range(meta["num_classes"])]
    pixels, index = torch.cat(pixels), torch.cat(index)
    if pixels.numel() <= free_bytes(device) / 2:
        pixels, index = pixels.to(device), index.to(device)
    return Pool(index, pixels, torch.cat(labels), classes, device)


@dataclass
class Stage:
    """A sequence with its images, in order, and what the learners on it share."""

    sequence: Sequence
    images: Pool
    known: np.ndarray  # numbers that the classes known from the start have in pretraining, (known,)
    starts: dict = field(default_factory=dict)  # by kind of pretraining: a Start (fluid_learners.py)
    features: dict = field(default_factory=dict)  # by kind of pretraining: (T, d) of all images


def draw(images: Pool, settings) -> tuple[Pool, dict[str, Stage]]:
    """The pretraining images, with their classes numbered from 0, and the stages "test" and, if it has classes, "validation".

    No two of them share an image, and the stages share no class that was not pretrained.
    """
    labels, names, options = images.labels.cpu().numpy(), images.meta["classes"], settings.sequence
    sizes = {"test": options.classes} | ({"validation": options.validation_classes} if options.validation_classes else {})
    filled = np.flatnonzero(np.bincount(labels, minlength=len(names)))
    novel = sum(classes - int(options.known * classes + 0.5) for classes in sizes.values())
    count = settings.pretrain.classes or len(filled) - novel
    if count < 1 or count > len(filled):
        raise UserError(f"pretrain.classes: the pool has {len(filled)} classes with images, and the sequences need "
                        f"{novel} that were not pretrained; lower sequence.classes, or give more tasks.")
    pretrained = np.sort(np.random.default_rng(seeds("fluid pretraining", settings.seed)).permutation(filled)[:count])
    number = np.full(len(names), -1)
    number[pretrained] = np.arange(count)
    reserved = reserve(labels, pretrained, settings.pretrain.share, settings.seed)
    base = images.subset(reserved, number[labels[reserved]], [names[label] for label in pretrained])
    stages, classes_used, images_used = {}, [], reserved
    for which, classes in sizes.items():
        sequence = build_sequence(labels, pretrained, n_classes=classes, frac_pretrain=options.known, c=options.c,
                                  head=options.head, natural=options.natural, exclude_images=images_used,
                                  exclude_classes=classes_used, names=names, seed=settings.seed)
        classes_used = [*classes_used, *sequence.classes]
        images_used = np.concatenate([images_used, sequence.index])
        stages[which] = Stage(sequence, images.subset(sequence.index, sequence.label),
                              number[sequence.classes[:sequence.known]])
    return base, stages
