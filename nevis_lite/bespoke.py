"""Readers that only one data set needs (TID2008 and TID2013 share one)."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np

from nevis_lite.arrays import read_mat
from nevis_lite.config import UserError
from nevis_lite.indexes import count_bins
from nevis_lite.raw import Raw
from nevis_lite.readers import Image, Table, by_end, by_table, class_ids, find, rows
from nevis_lite.splits import Examples, complete


def matches(raw: Raw, pattern: str) -> list[tuple[str, re.Match]]:
    """The names that match, sorted, each with its match. UserError when there is none."""
    return [(name, re.search(pattern, "/" + name)) for name in find(raw, pattern)]


def text_like(raw: Raw, pattern: str) -> str:
    """The text of the first file whose name matches."""
    return raw.text(find(raw, pattern)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Textures and landscapes


def brodatz(raw: Raw) -> Table:
    """One picture a class, D1 to D112 without D14, cut into nine patches, column by column."""
    table = Table()
    for name, match in matches(raw, r"(?i)/D(\d+)\.gif$"):
        number = int(match[1])
        for place in range(9):
            table.add(Image(raw, name, partial(patch, column=place // 3, row=place % 3)), number - 1 - (number > 14))
    return table


def patch(pixels: np.ndarray, column: int, row: int) -> np.ndarray:
    """One patch of three by three; up to two lines of pixels on the right and below belong to none."""
    height, width = pixels.shape[0] // 3, pixels.shape[1] // 3
    return pixels[row * height:(row + 1) * height, column * width:(column + 1) * width]


@dataclass(frozen=True, slots=True)
class RadarImage:
    """A file of 1024 x 1024 grey values and nothing else."""

    raw: Raw
    name: str

    def load(self) -> np.ndarray:
        content = self.raw.read(self.name)
        if len(content) != 1 << 20:
            raise OSError(f"{len(content)} bytes in place of 1024 x 1024")
        return np.frombuffer(content, np.uint8).reshape(1024, 1024)

    def __str__(self):
        return self.name


def magellan(raw: Raw) -> Table:
    """1 if at least one row of an image's list is a volcano of confidence 1, which is certain, else 0."""
    table = Table()
    for name in find(raw, r"/Images/img\d+\.sdt$"):
        truth = re.sub(r"Images/(img\d+)\.sdt$", r"GroundTruths/\1.lxyr", name)
        if truth in raw:
            table.add(RadarImage(raw, name), int(any(fields[0] == "1" for fields in rows(raw.text(truth)))))
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that become classes


def tid(raw: Raw, types: int, levels: int) -> Table:
    """Five classes of MSSIM, which a file lists by reference image, type and level of the distortion."""
    values = np.array(text_like(raw, r"(?i)/mssim\.txt$").split(), float)
    if len(values) != 25 * types * levels:
        raise UserError(f"has {len(values)} MSSIM values where {25 * types * levels} are known")
    table, labels = Table(), value_bins(values, 5)
    for name, match in matches(raw, r"(?i)/i(\d+)_(\d+)_(\d+)\.bmp$"):
        reference, kind, level = (int(number) - 1 for number in match.groups())
        table.add(Image(raw, name), labels[(reference * types + kind) * levels + level])
    return table


def value_bins(values: np.ndarray, bins: int) -> np.ndarray:
    """The first of `bins` equal runs of the sorted values in which each value occurs."""
    return np.searchsorted(np.sort(values), values) // (len(values) // bins)


def trancos(raw: Raw) -> Table:
    """Ten classes of vehicle counts: an image's text file has a row for each vehicle."""
    splits = {}
    for file, split in (("training", "train"), ("validation", "dev_test"), ("test", "test")):
        splits |= dict.fromkeys(text_like(raw, rf"/image_sets/{file}\.txt$").split(), split)
    points = find(raw, r"/images/[^/]+\.txt$")
    labels = count_bins(np.array([len(list(rows(raw.text(name)))) for name in points]), 10, 200)
    table = Table()
    for name, label in zip(points, labels, strict=True):
        image = name.removesuffix("txt") + "jpg"
        split = splits.get(image.split("/")[-1])
        if split and image in raw:
            table.add(Image(raw, image), label, split)
    return table


def biwi(raw: Raw, splits: dict[str, list[int]]) -> Table:
    """Five classes each of yaw, pitch and roll of the head; sequences that `splits` doesn't name are train."""
    where = {sequence: split for split, sequences in splits.items() for sequence in sequences}
    table, poses = Table(), []
    for name, match in matches(raw, r"/(\d\d)/frame_\d+_rgb\.png$"):
        pose = name.removesuffix("rgb.png") + "pose.txt"
        if pose in raw:
            poses.append(angles(np.array(raw.text(pose).split()[:9], float).reshape(3, 3)))
            table.add(Image(raw, name), None, where.get(int(match[1]), "train"))
    bins = [quantile_bins(column, 5) + 5 * place for place, column in enumerate(np.transpose(poses))]
    table.labels = np.transpose(bins).tolist()
    return table


def angles(rotation: np.ndarray) -> np.ndarray:
    """Yaw, pitch and roll of a rotation matrix, in degrees."""
    yaw = np.arctan2(-rotation[0, 1], rotation[0, 0])
    pitch = np.arcsin(np.clip(rotation[0, 2], -1, 1))
    roll = np.arctan2(-rotation[1, 2], rotation[2, 2])
    return np.degrees([yaw, pitch, roll])


def quantile_bins(values: np.ndarray, bins: int) -> np.ndarray:
    """Bins of equally many values, 0 to `bins` - 1; a value on an edge is in the bin above, and the largest in the last."""
    edges = np.interp(np.linspace(0, len(values), bins + 1), np.arange(len(values)), np.sort(values))
    return np.minimum(np.digitize(values, edges), bins) - 1


# ---------------------------------------------------------------------------------------------------------------------
# Tables that have to be joined


def awa2(raw: Raw) -> Table:
    """The attributes of each image's class; some classes are train and the others test."""
    number = {fields[1]: int(fields[0]) - 1 for fields in rows(text_like(raw, r"/classes\.txt$"))}
    attributes = np.array(list(rows(text_like(raw, r"/predicate-matrix-binary\.txt$"))), int)
    splits = {name: split for split in ("train", "test") for name in text_like(raw, rf"/{split}classes\.txt$").split()}
    table = Table()
    for name, match in matches(raw, r"(?i)/JPEGImages/([^/]+)/[^/]+\.jpe?g$"):
        if match[1] in splits:
            table.add(Image(raw, name), np.flatnonzero(attributes[number[match[1]]]), splits[match[1]])
    return table


def iaprtc12(raw: Raw) -> Table:
    """The labels of all regions of an image. The official test images are in no split, as in the reference."""
    pool = {int(number) for part in ("training", "validation")
            for number in read_mat(raw, find(raw, rf"/matlab/{part}\.mat$")[0])[part].ravel()}
    labels = defaultdict(list)
    for name in find(raw, r"/saiapr_tc-12/\d\d/labels\.txt$"):
        for fields in rows(raw.text(name)):
            labels[int(float(fields[0]))].append(int(float(fields[2])))
    table = Table()
    for name, match in matches(raw, r"^(?!.*saiaprtc12ok).*/images/(\d+)\.jpg$"):  # each image is there twice
        number = int(match[1])
        if number in pool and number in labels:
            table.add(Image(raw, name), labels[number])
    return table


def ddsm(raw: Raw) -> Table:
    """Whole mammograms: those of the picture list whose patient is the first folder of a case's image path.

    An image of several abnormalities has one row for each, of which the first counts.
    """
    def read(file: str) -> csv.DictReader:
        return csv.DictReader(io.StringIO(text_like(raw, rf"/csv/{file}\.csv$")))

    images = defaultdict(list)
    for row in read("dicom_info"):
        images[row["PatientID"]].append("/".join(row["image_path"].split("/")[-2:]))
    table, left = Table(), by_end(raw, 1)
    for split, kind in (("train", "calc"), ("train", "mass"), ("test", "calc"), ("test", "mass")):
        for row in read(f"{kind}_case_description_{split}_set"):
            for image in images[row["image file path"].split("/")[0]]:
                if image in left:
                    table.add(Image(raw, left.pop(image)), row["pathology"], split)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Indexes and lists of a kind of their own


def by_flags(raw: Raw, parts: list[dict]) -> Table:
    """As `by_table`, but `labels` are a number for each class, above zero where the class applies."""
    table = by_table(raw, parts)
    table.labels = [[number for number, flag in enumerate(flags) if float(flag) > 0] for flags in table.labels]
    return table


def interact(raw: Raw, parts: list[dict], rule: dict, extra: list[dict]) -> Table:
    """Images (`parts`) that are split by a `rule` of `splits.complete`, and images (`extra`) that all go to train."""
    real, table = by_table(raw, parts), Table()
    order = list(dict.fromkeys(real.labels))  # the reference draws class by class as they appear
    ids = class_ids(real.labels, order, len(order))
    for name, examples in complete({"train": Examples(np.arange(len(ids)), ids)}, rule).items():
        for index in examples.images:
            table.add(real.images[index], real.labels[index], name)
    return table + by_table(raw, extra)


def imagenet(raw: Raw) -> Table:
    """Train images are named by their synset, validation images (test here) numbered like the lines of the kit's ground truth.

    A class is the synset's place among the 1000 sorted ones; the ground truth has the development kit's own numbers.
    """
    synsets = _synsets(raw)
    classes = {synset: index for index, synset in enumerate(sorted(synsets.values()))}
    truth = raw.text(find(raw, r"/ILSVRC2012_validation_ground_truth\.txt$")[0]).split()
    table = Table()
    for name in sorted(raw.names):
        train = re.search(r"/(n\d{8})_\d+\.JPEG$", "/" + name)
        val = re.search(r"/ILSVRC2012_val_(\d+)\.JPEG$", "/" + name)
        if train and train[1] in classes:
            table.add(Image(raw, name), classes[train[1]])
        elif val and int(val[1]) <= len(truth):
            table.add(Image(raw, name), classes[synsets[int(truth[int(val[1]) - 1])]], "test")
    return table


def _synsets(raw: Raw) -> dict[int, str]:
    """{the kit's number: synset} of the classes, which are the synsets without children."""
    rows = read_mat(raw, find(raw, r"/meta\.mat$")[0])["synsets"].ravel()
    return {int(row["ILSVRC2012_ID"].item()): row["WNID"].item() for row in rows if not row["num_children"].item()}


READERS = {"by_flags": by_flags, "interact": interact, "imagenet": imagenet,
           "brodatz": brodatz, "magellan": magellan, "tid": tid, "trancos": trancos, "biwi": biwi, "awa2": awa2,
           "iaprtc12": iaprtc12, "ddsm": ddsm}
