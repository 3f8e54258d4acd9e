"""Images while training: the splits of the pixel cache (`cache.py`) in memory, and batches of crops made on the device.

Crops of a whole batch are gathered from the bytes of a split by index arithmetic: no worker processes, no padding, on whichever
device the pixels lie.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nevis_lite import cache, parallel
from nevis_lite.config import DataConfig
from nevis_lite.splits import classes_of

TRIES = 10  # to draw the box of a crop
TOGETHER = 128  # training crops that are made at once, if a batch is not larger


def seeds(purpose: str, *key: int) -> np.random.SeedSequence:
    """Randomness as a pure function of `key`, such as (seed, task, trial, step); `purpose` keeps different uses apart."""
    return np.random.SeedSequence([zlib.crc32(purpose.encode()), *key])


def generator(device: torch.device | str, purpose: str, *key: int) -> torch.Generator:
    state = seeds(purpose, *key).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> 1))


@functools.cache
def say_once(what: str):
    print(what, file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Splits in memory


def free_bytes(device: torch.device) -> int:
    """For this process on a CUDA device, with what PyTorch holds in reserve; on others 0: nothing is put there."""
    if device.type != "cuda":
        return 0
    in_reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] // parallel.on_each_gpu() + in_reserve


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To CUDA through pinned memory, so that the host doesn't wait for the device; PyTorch keeps it until the copy is done."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Announced:
    """Stands for a split whose images are not there yet: a dry run needs to know how many there will be."""

    count: int

    def __len__(self):
        return self.count


class Split:
    """Images and labels of one split, or of a `part` of its classes, numbered from 0. Nothing is read before it's asked for."""

    def __init__(self, folder: Path, name: str, device: torch.device, part: tuple[int, int] | None = None):
        self.folder, self.name, self.device, self.part = folder, name, device, part
        self._squares = {}

    @cached_property
    def meta(self) -> dict:
        """The facts about the cache (`cache.prepare`), with the sizes and the classes of the part."""
        meta = cache.meta_of(self.folder)
        if self.part:
            classes = classes_of(self.part, meta["num_classes"])
            sizes = {name: sum(counts[classes.start:classes.stop]) for name, counts in meta["class_counts"].items()}
            meta |= {"num_classes": len(classes), "sizes": sizes, "classes": meta["classes"][classes.start:classes.stop]}
        return meta

    def __len__(self):
        return self.meta["sizes"][self.name]

    @cached_property
    def labels(self) -> Tensor:
        """(N,) int64, or (N, C) uint8 for several labels an image; on the device."""
        labels = np.load(self.folder / f"{self.name}.labels.npy")
        if self.part:
            rows, first = self._rows
            labels = labels[rows] - first
        return torch.from_numpy(labels).to(self.device)

    @cached_property
    def _rows(self) -> tuple[np.ndarray, int]:
        """Numbers of the part's images, and the id of its first class."""
        labels = np.load(self.folder / f"{self.name}.labels.npy")
        classes = classes_of(self.part, cache.meta_of(self.folder)["num_classes"])
        return np.flatnonzero((labels >= classes.start) & (labels < classes.stop)), classes.start

    @cached_property
    def index(self) -> Tensor:
        """(N, 4) int64: offset into `pixels`, height, width, channels; beside the pixels."""
        index = np.load(self.folder / f"{self.name}.index.npy")
        if self.part:
            index = index[self._rows[0]]
            sizes = index[:, 1:].prod(axis=1)
            index[:, 0] = sizes.cumsum() - sizes
        return torch.from_numpy(index).to(self.pixels.device)

    @cached_property
    def depth(self) -> int:
        """Channels of the crops: 1 if all images are grey, else 3."""
        return int(self.index[:, 3].max())

    @cached_property
    def pixels(self) -> Tensor:
        """(M,) uint8, on the device if it takes at most half of what is free there, else mapped from the file.

        Those of a part are copied, so that a hundredth of ImageNet takes a hundredth of its room on the device.
        """
        pixels = np.memmap(self.folder / f"{self.name}.pixels", np.uint8, mode="c")
        if self.part:
            index = np.load(self.folder / f"{self.name}.index.npy")[self._rows[0]]
            pixels = np.concatenate([pixels[row[0]:row[0] + row[1:].prod()] for row in index])
        pixels = torch.from_numpy(pixels)
        free = free_bytes(self.device)
        if pixels.numel() <= free / 2:
            with suppress(torch.OutOfMemoryError):  # another process was quicker
                return pixels.to(self.device)
        if self.device.type == "cuda":
            say_once(f"{self.folder.name}, {self.name}: {pixels.numel() / 1e9:.1f} GB of pixels are too much for the "
                     f"{free / 1e9:.1f} GB free on the device, so crops are made on the CPU from the mapped file, which the "
                     "system keeps in memory while there is room")
        return pixels

    def crops(self, picks: Tensor, config: DataConfig, size: int, draws: Tensor) -> Tensor:
        """Random training crops of the images `picks` (B,) as (B, 3, size, size) floats in [-1, 1]; `draws` as of `draw`."""
        index = self.index[to_device(picks, self.index.device)]
        boxes = random_boxes(index[:, 1], index[:, 2], config.crop_area, draws[:, :-1].unflatten(1, (TRIES, 4)))
        mirror = draws[:, -1] < (0.5 if config.flip else 0.0)
        return to_input(self._cut(index, boxes, size, mirror))

    def squares(self, size: int, picks: Tensor | None = None) -> Tensor:
        """Central squares of all images, or of `picks`, resized: (N, 1 or 3, size, size) uint8. Those of all are kept."""
        if picks is None and size in self._squares:
            return self._squares[size]
        index = self.index if picks is None else self.index[to_device(picks, self.index.device)]
        squares = self._cut(index, central_boxes(index[:, 1], index[:, 2]), size)
        if picks is None:
            self._squares[size] = squares
        return squares

    def _cut(self, index: Tensor, boxes: Tensor, size: int, mirror: Tensor | None = None) -> Tensor:
        """What `crop_and_resize` gives, on the device.

        As many at once as take half a gigabyte: gathering needs some 40 bytes for each value of a crop.
        """
        rows = max(1, 1024 * 64**2 // size**2)
        parts = [to_device(crop_and_resize(self.pixels, index[at:at + rows], boxes[at:at + rows], size, self.depth,
                                           None if mirror is None else mirror[at:at + rows]), self.device)
                 for at in range(0, len(index), rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def batches(self, size: int, batch: int, picks: Tensor | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Tensor]:
        """Evaluation input in order, (<= batch, 3, size, size) floats; every image of the `share` (number, of) exactly once."""
        squares = self.squares(size, picks)
        for part in squares[share_of(len(squares), share)].split(batch):
            yield to_input(part)


def share_of(count: int, share: tuple[int, int]) -> slice:
    """Part number `share[0]` of `share[1]` nearly equal parts."""
    number, parts = share
    return slice(number * count // parts, (number + 1) * count // parts)


class EndlessStream:
    """Constant batches of training crops; batch number `step` is a pure function of (key, step).

    Epochs of shuffled indices run on without a gap, so there's no ragged last batch, and splits smaller than a batch repeat.
    Small batches are made several at a time, since it's the number of operations that costs, not their size. With a `share`
    (number, of) it gives that part of each batch.
    """

    def __init__(self, split: Split, batch: int, config: DataConfig, size: int, key: tuple[int, ...],
                 share: tuple[int, int] = (0, 1)):
        self.split, self.batch, self.config, self.size, self.key, self.share = split, batch, config, size, key, share
        self._orders, self._ready = {}, (range(0), [])

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Images (B, 3, S, S) and labels (B,) or (B, C) of update number `step`."""
        steps, batches = self._ready
        if step not in steps:
            together, part = max(1, TOGETHER // self.batch), share_of(self.batch, self.share)
            steps = range(step - step % together, step - step % together + together)
            picks = torch.cat([self.picks(step)[part] for step in steps])
            draws = torch.cat([draw(self.batch, generator(self.split.pixels.device, "crops", *self.key, step))[part]
                               for step in steps])
            images = self.split.crops(picks, self.config, self.size, draws)
            labels = self.split.labels[to_device(picks, self.split.device)]
            size = part.stop - part.start
            batches = list(zip(images.split(size), labels.split(size), strict=True))
            self._ready = steps, batches
        return batches[step - steps.start]

    def picks(self, step: int) -> Tensor:
        count, begin, end = len(self.split), step * self.batch, (step + 1) * self.batch
        epochs = range(begin // count, (end - 1) // count + 1)
        self._orders = {epoch: self._orders[epoch] if epoch in self._orders else
                        torch.randperm(count, generator=generator("cpu", "order", *self.key, epoch)) for epoch in epochs}
        return torch.cat([self._orders[epoch][max(0, begin - epoch * count):end - epoch * count] for epoch in epochs])


# ---------------------------------------------------------------------------------------------------------------------
# Crops, a whole batch at once


def draw(batch: int, random: torch.Generator) -> Tensor:
    """What the crops of a batch are made from, (B, TRIES x 4 + 1) uniform numbers: of each box, and whether to mirror it."""
    boxes = torch.rand(batch, TRIES * 4, generator=random, device=random.device)
    return torch.cat([boxes, torch.rand(batch, 1, generator=random, device=random.device)], dim=1)


def random_boxes(height: Tensor, width: Tensor, area: tuple[float, float], draws: Tensor) -> Tensor:
    """Crop boxes (B, 4) as y, x, height, width for images of `height` and `width` (B,), by the reference's law.

    The aspect ratio is uniform in [3/4, 4/3], the box's height uniform over the whole numbers that keep its share of the
    image within `area` (so it's the side that is uniform, not the area). Of the tries, `draws` (B, TRIES, 4), the first that
    fits and covers a tenth of the image counts; a box that is the whole image, or none found, gives the central square.
    """
    high, wide = height[:, None].float(), width[:, None].float()
    aspect = 3 / 4 + draws[..., 0] * (4 / 3 - 3 / 4)
    least, most = area[0] * high * wide, area[1] * high * wide

    low = torch.sqrt(least / aspect).round()
    top = torch.sqrt(most / aspect).round()
    widest = ((wide + 0.5 - 1e-4) / aspect).floor()  # the tallest box whose rounded width still fits
    top = torch.where((top * aspect).round() > wide, widest, top).minimum(high)
    low = low.minimum(top)
    h = low + (draws[..., 1] * (top - low + 1)).floor().minimum(top - low)
    w = (h * aspect).round()
    h = torch.where(h * w < least, h + 1, h)  # a pixel's repair where rounding left the range
    w = (h * aspect).round()
    h = torch.where(h * w > most, h - 1, h)
    w = (h * aspect).round()

    covered = (h * w).clamp(min=1) / (high * wide)
    fits = (h * w >= least) & (h * w <= most) & (h <= high) & (w <= wide) & (h > 0) & (w > 0) & (covered >= 0.1)
    # The last row or column is never reached: the offset is drawn below, not up to, the free room.
    y = (draws[..., 2] * (high - h)).floor().clamp(min=0).minimum((high - h - 1).clamp(min=0))
    x = (draws[..., 3] * (wide - w)).floor().clamp(min=0).minimum((wide - w - 1).clamp(min=0))
    first = fits.float().argmax(dim=1, keepdim=True)
    boxes = torch.stack([part.gather(1, first)[:, 0] for part in (y, x, h, w)], dim=1).long()
    whole = ~fits.any(dim=1) | ((boxes[:, 2] == height) & (boxes[:, 3] == width))
    return torch.where(whole[:, None], central_boxes(height, width), boxes)


def central_boxes(height: Tensor, width: Tensor) -> Tensor:
    """The largest central squares (B, 4) as y, x, height, width."""
    side = torch.minimum(height, width)
    return torch.stack([(height - side) // 2, (width - side) // 2, side, side], dim=1)


def crop_and_resize(pixels: Tensor, index: Tensor, boxes: Tensor, size: int, depth: int, mirror: Tensor | None = None
                    ) -> Tensor:
    """Cut `boxes` (B, 4) from the images at `index` (B, 4) and resize: (B, depth, size, size) uint8; depth is 3, or 1 if all
    images are grey.

    Bilinear with half-pixel centres and without antialiasing, the value cut off to whole numbers, as the reference does.
    """
    offset, _, width, channels = (column[:, None, None] for column in index.T)  # (B, 1, 1) each
    y0, y1, fy = _taps(boxes[:, 0], boxes[:, 2], size)
    x0, x1, fx = _taps(boxes[:, 1], boxes[:, 3], size)
    if mirror is not None:
        x0, x1, fx = (torch.where(mirror[:, None], part.flip(1), part) for part in (x0, x1, fx))
    plane = torch.arange(depth, device=pixels.device)
    colour = torch.minimum(plane[None, None], channels - 1)  # (B, 1, C): a grey image gives its one channel three times

    def row(y: Tensor) -> Tensor:
        """The image rows y (B, S), interpolated along x: (B, S, S, C)."""
        start = offset + y[..., None] * width * channels  # (B, S, 1)
        left, right = (start[..., None] + (x[..., None] * channels + colour)[:, None] for x in (x0, x1))
        left, right = pixels[left].float(), pixels[right].float()
        return left + (right - left) * fx[:, None, :, None]

    above, below = row(y0), row(y1)
    mixed = above + (below - above) * fy[:, :, None, None]
    return mixed.to(torch.uint8).permute(0, 3, 1, 2)  # memory stays channels-last


def _taps(begin: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `size` output pixels the two source pixels and the weight of the second, (B, size) each."""
    centre = torch.arange(size, device=begin.device) + 0.5
    source = (centre * (length.float() / size)[:, None] - 0.5).clamp(min=0)
    first = source.floor()
    second = torch.minimum(first + 1, length[:, None].float() - 1)
    return begin[:, None] + first.long(), begin[:, None] + second.long(), source - first


def to_input(pixels: Tensor) -> Tensor:
    """uint8 (B, 1 or 3, S, S) -> floats 2v/255 - 1 with three channels."""
    return (pixels.float() * 2 / 255 - 1).expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
