"""Readers that take labels from an index: MATLAB files, PASCAL VOC's XML, JSON as COCO has it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from xml.etree import ElementTree

import numpy as np

from nevis_lite.arrays import read_mat
from nevis_lite.config import UserError
from nevis_lite.raw import Raw
from nevis_lite.readers import Image, Table, by_end, find, rows


@dataclass(frozen=True, slots=True)
class Crop:
    """What of an image lies in a box of whole pixels, the right and lower edges not included. COCO needs 860,000 of these."""

    left: int
    top: int
    right: int
    bottom: int

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        pixels = pixels[max(0, self.top):max(0, self.bottom), max(0, self.left):max(0, self.right)]
        if not pixels.size:
            raise OSError(f"{self} lies outside of the image")
        return pixels


def count_bins(counts, bins: int, limit: int) -> np.ndarray:
    """(N,) int64 class ids 0..bins-1 of object counts: contiguous ranges of counts that hold about equally many images.

    Counts above `limit` stand for `limit`. The upper edge of range k = 1, 2, ... is the largest count c such that fewer than
    k/bins of all images have at most c; going up count by count, the id rises by one for each count above its range's edge.
    """
    counts = np.minimum(np.asarray(counts, np.int64), limit)
    at_most = np.cumsum(np.bincount(counts, minlength=limit + 1))
    edges = np.searchsorted(at_most, np.arange(1, bins) * (len(counts) / bins)) - 1
    ids, current = np.zeros(limit + 1, np.int64), 0
    for count in range(limit + 1):
        current += current < bins - 1 and count > edges[current]
        ids[count] = current
    return ids[counts]


def _listed(raw: Raw, listed: Iterable[tuple]) -> Table:
    """A table of (end of the image's name, label, split), sorted by name; images that the archives lack are left out."""
    table, ends = Table(), functools.cache(functools.partial(by_end, raw))
    for path, label, split in sorted(listed, key=itemgetter(0)):
        name = ends(path.count("/")).get(path)
        if name is not None:
            table.add(Image(raw, name), label, split)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# MATLAB


def _variable(raw: Raw, pattern: str, variable: str) -> np.ndarray:
    """A variable of the first file that matches `pattern`."""
    name = find(raw, pattern)[0]
    variables = read_mat(raw, name)
    if variable not in variables:
        raise UserError(f"{name} has no variable {variable} but {', '.join(variables)}")
    return variables[variable]


def _only(value):
    """What MATLAB wraps in arrays of one element: a word or a number."""
    while isinstance(value, np.ndarray):
        value = value.ravel()[0]
    return value


def mat_ids(raw: Raw, index: str, image: str, splits: dict[str, str], labels: list[str] | None = None,
            run: int | None = None) -> Table:
    """Images are numbered from 1 and named by the format `image`; a variable of `index` lists the numbers of each split.

    `labels` is [pattern of the file, variable] of all images' labels; or else `run` images in a row have one class.
    """
    classes = _variable(raw, *labels).ravel() if labels else None

    def listed() -> Iterator[tuple]:
        for split, variable in splits.items():
            for number in _variable(raw, index, variable).ravel().astype(int).tolist():
                yield image.format(number), (number - 1) // run if classes is None else classes[number - 1], split
    return _listed(raw, listed())


def mat_list(raw: Raw, parts: list[dict]) -> Table:
    """A cell array of image names and a matrix with a row for each of them, for every part in turn.

    A part has `files` and `labels`, [pattern of the file, variable] both; `folder`, what to put before the names; and
    `split`. One column of labels is a number, of several those above zero count as present.
    """
    def listed() -> Iterator[tuple]:
        for part in parts:
            paths = [part["folder"] + _only(cell) for cell in _variable(raw, *part["files"]).ravel()]
            for path, row in zip(paths, _variable(raw, *part["labels"]).reshape(len(paths), -1), strict=True):
                yield path, row[0] if len(row) == 1 else np.flatnonzero(row > 0).tolist(), part.get("split", "train")
    return _listed(raw, listed())


def stanford_cars(raw: Raw) -> Table:
    """Either car_ims/ with cars_annos.mat, or cars_train/ and cars_test/ with the annotations of the development kit.

    The pictures of the two are numbered differently, so cars_annos.mat is of no use to the latter.
    """
    annotations = functools.partial(_variable, raw, variable="annotations")
    if any(name.endswith(".jpg") and "/car_ims/" in "/" + name for name in raw.names):
        return _listed(raw, ((_only(row["relative_im_path"]), _only(row["class"]), "test" if _only(row["test"]) else "train")
                             for row in annotations(r"/cars_annos\.mat$").ravel()))
    parts = (("train", r"/cars_train_annos\.mat$"), ("test", r"/cars_test_annos_withlabels\.mat$"))
    return _listed(raw, ((f"cars_{split}/{_only(row['fname'])}", _only(row["class"]), split)
                         for split, pattern in parts for row in annotations(pattern).ravel()))


def mall(raw: Raw) -> Table:
    """Frames of a video with the number of people in each; the first 800 are for training."""
    counts = count_bins(_variable(raw, r"/mall_gt\.mat$", "count").ravel(), 10, 99)
    table = Table()
    for name in find(raw, r"/frames/seq_\d+\.jpg$"):
        number = int(name[-10:-4])
        table.add(Image(raw, name), counts[number - 1], "train" if number <= 800 else "test")
    return table


def shanghai_tech(raw: Raw) -> Table:
    """Crowds of two parts in one; a file an image has the place of each head."""
    images, counts, splits = [], [], []
    for name in find(raw, r"^(?!.*_h5_).*/part_[AB][^/]*/(train|test)_data/ground[-_]truth/GT_IMG_\d+\.mat$"):
        image = re.sub(r"ground[-_]truth/GT_(IMG_\d+)\.mat$", r"images/\1.jpg", name)
        if image in raw:
            images.append(Image(raw, image))
            counts.append(len(_only(read_mat(raw, name)["image_info"])[0]))
            splits.append("train" if "/train_data/" in name else "test")
    return Table(images, count_bins(counts, 10, 4999).tolist(), splits)


# ---------------------------------------------------------------------------------------------------------------------
# PASCAL VOC


def voc2006(raw: Raw) -> Table:
    """A list of images for each class; of several classes of an image the last one in the alphabet counts."""
    listed = {}
    for part, split in (("trainval", "train"), ("test", "test")):
        for index in find(raw, rf"/ImageSets/[a-z]+_{part}\.txt$"):
            base, word = re.search(r"(.*)ImageSets/([a-z]+)_", index).groups()
            for fields in rows(raw.text(index)):
                if fields[-1] == "1":
                    listed[f"{base}PNGImages/{fields[0]}.png"] = word, split
    table = Table()
    for name in sorted(name for name in listed if name in raw):
        table.add(Image(raw, name), *listed[name])
    return table


def voc(raw: Raw, parts: list[dict]) -> Table:
    """The classes of all annotated objects, difficult ones too, of the images that a text file names.

    A part has `index`, a regular expression of that file's name, and `splits`, among which a permutation with seed 0 of its
    images is cut into equal runs.
    """
    table = Table()
    for part in parts:
        for index in find(raw, part["index"]):
            found = [(name, [entry.text for entry in root.findall("object/name")]) for name, root in _annotated(raw, [index])]
            count = len(part["splits"])
            order = np.random.default_rng(0).permutation(len(found))
            for place, split in enumerate(part["splits"]):
                for pick in sorted(order[place * len(found) // count:(place + 1) * len(found) // count]):
                    name, words = found[pick]
                    table.add(Image(raw, name), words, split)
    return table


def voc_actions(raw: Raw) -> Table:
    """A crop of each person whose actions are annotated."""
    table = Table()
    for name, root in _annotated(raw, find(raw, r"/ImageSets/Action/[a-z]+_trainval\.txt$")):
        for person in root.findall("object[actions]"):
            box = Crop(*(int(float(person.findtext(f"bndbox/{side}"))) for side in ("xmin", "ymin", "xmax", "ymax")))
            table.add(Image(raw, name, box), [action.tag for action in person.find("actions") if int(action.text)])
    return table


def _annotated(raw: Raw, indexes: list[str]) -> Iterator[tuple[str, ElementTree.Element]]:
    """Images that the first column of any of the text files names, sorted, with their annotations; if both are there."""
    found = {(index.split("ImageSets/")[0], fields[0]) for index in indexes for fields in rows(raw.text(index))}
    for base, word in sorted(found):
        image, annotation = f"{base}JPEGImages/{word}.jpg", f"{base}Annotations/{word}.xml"
        if image in raw and annotation in raw:
            yield image, _xml(raw, annotation)


def _xml(raw: Raw, name: str) -> ElementTree.Element:
    """An XML file without a document type, whose entities could grow without bound. What is parsed is text, so that no other
    encoding hides one."""
    text = raw.text(name)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise UserError(f"{name} defines entities; refused")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{name}: not readable as XML ({error})") from None


# ---------------------------------------------------------------------------------------------------------------------
# JSON


KEPT = ("images", "annotations", "categories", "id", "name", "file_name", "image_id", "category_id", "bbox")


def _json(raw: Raw, pattern: str) -> dict:
    """The first file that matches; outlines and whatever else no reader wants are dropped while it is parsed."""
    name = find(raw, pattern)[0]
    try:
        return json.loads(raw.read(name), object_hook=lambda entry: {key: entry[key] for key in KEPT if key in entry})
    except ValueError as error:
        raise UserError(f"{name}: not readable as JSON ({error})") from None


def coco_objects(raw: Raw, parts: list[dict], smallest: int) -> Table:
    """A crop of each annotated object whose box has at least `smallest` pixels a side, in the order of the annotations.

    A part has `index`, a regular expression of its JSON file's name, `folder` of its images, and `split`. The label is the
    number of the category.
    """
    table, ends = Table(), by_end(raw, 1)
    for part in parts:
        content = _json(raw, part["index"])
        names = {image["id"]: ends.get(f"{part['folder']}/{image['file_name']}") for image in content["images"]}
        for entry in content["annotations"]:
            left, top, width, height = entry["bbox"]
            name = names.get(entry["image_id"])
            if name is not None and min(width, height) >= smallest:
                box = Crop(round(left), round(top), round(left + width), round(top + height))
                table.add(Image(raw, name, box), entry["category_id"], part["split"])
    return table


def coco_images(raw: Raw, parts: list[dict]) -> Table:
    """Whole images with the name of their category; of several annotations of an image the last one counts.

    A part has `index`, a regular expression of its JSON file's name, and `split`.
    """
    def listed() -> Iterator[tuple]:
        for part in parts:
            content = _json(raw, part["index"])
            words = {category["id"]: category["name"] for category in content["categories"]}
            found = {entry["image_id"]: words[entry["category_id"]] for entry in content["annotations"]}
            for image in content["images"]:
                if image["id"] in found:
                    yield image["file_name"], found[image["id"]], part["split"]
    return _listed(raw, listed())


READERS = {"mat_ids": mat_ids, "mat_list": mat_list, "stanford_cars": stanford_cars, "mall": mall,
           "shanghai_tech": shanghai_tech, "voc2006": voc2006, "voc": voc, "voc_actions": voc_actions,
           "coco_objects": coco_objects, "coco_images": coco_images}
