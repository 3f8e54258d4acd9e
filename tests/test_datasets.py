import gzip
import hashlib
import io
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from nevis_lite import datasets
from nevis_lite.config import MissingData, UserError
from nevis_lite.datasets import DataSet, read
from nevis_lite.pixels import read_image
from nevis_lite.splits import ALL, TRAIN, TRAIN_DEV, Examples, assign, complete

RED, WHITE = (255, 0, 0), (255, 255, 255)


def examples(count: int) -> Examples:
    """`count` one-pixel images whose label is their number."""
    return Examples(np.zeros((count, 1, 1), np.uint8), np.arange(count))


def entry(folder: Path, **facts) -> DataSet:
    return DataSet(key="x", name="X", folder=folder, **facts)


def idx_bytes(array) -> bytes:
    array = np.asarray(array, np.uint8)
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, split: str, images, labels, zipped: bool = True):
    folder.mkdir(parents=True, exist_ok=True)
    for what, array in (("images", np.asarray(images)), ("labels", np.asarray(labels))):
        name = f"{split}-{what}-idx{array.ndim}-ubyte"
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))


def write_four_idx(folder: Path, count: int = 6, **options):
    for split in datasets.SPLITS:
        write_idx(folder, split, np.zeros((count, 2, 2)), np.arange(count) % 2, **options)


def write_images(folder: Path, *names: str):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (2, 2)).save(folder / name, "PNG")


def png(image: Image.Image, **options) -> bytes:
    return encoded(image, "PNG", **options)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# ---- splits


LONG = {"r": "train", "t": "test", "v": "dev_test", "d": "dev"}


@pytest.mark.parametrize(
    "shares, first, counts",
    [
        (ALL, "rrvdrvrtdtrd", {"dev": 140, "dev_test": 142, "test": 182, "train": 536}),
        (TRAIN, "rrrvdrrdrvvd", {"dev": 162, "dev_test": 169, "train": 669}),
        (TRAIN_DEV, "rrrrrrrddrrr", {"dev": 203, "train": 797}),
    ],
)
def test_drawn_splits_are_those_of_the_reference(shares, first, counts):
    names = assign(1000, shares)
    assert list(names[:12]) == [LONG[letter] for letter in first]
    assert dict(zip(*np.unique(names, return_counts=True), strict=True)) == counts
    assert (assign(12, shares) == names[:12]).all()  # of the first examples, whatever follows


def test_shares_add_up_to_one():
    assert [sum(shares.values()) for shares in (ALL, TRAIN, TRAIN_DEV)] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    "given, drawn",
    [
        (("train",), ALL),
        (("train", "test"), TRAIN),
        (("train", "dev_test", "test"), TRAIN_DEV),
        (("train", "dev", "test"), {"train": 0.8, "dev_test": 0.2}),
    ],
)
def test_splits_that_are_missing_come_from_train_in_its_order(given, drawn):
    published = {name: examples(50 if name == "train" else 7) for name in given}
    splits = complete(published, {})
    names = assign(50, drawn)
    assert set(splits) == set(datasets.SPLITS)
    for name in datasets.SPLITS:
        expected = np.flatnonzero(names == name) if name in drawn else np.arange(7)
        np.testing.assert_array_equal(splits[name].labels, expected)
        assert len(splits[name].images) == len(expected)


def test_published_splits_stay_as_they_are():
    published = {name: examples(count) for count, name in enumerate(datasets.SPLITS, start=1)}
    splits = complete(published, {"slices": {"train": 0.7, "dev": 0.15, "dev_test": 0.15}})
    assert {name: len(split) for name, split in splits.items()} == {"train": 1, "dev": 2, "dev_test": 3, "test": 4}


@pytest.mark.parametrize("given", [("train", "dev"), ("train", "dev_test"), ("train", "dev", "dev_test")])
def test_a_missing_test_split_beside_others_is_refused(given):
    with pytest.raises(UserError, match="test"):
        complete({name: examples(40) for name in given}, {})


@pytest.mark.parametrize("splits", [{}, {"test": examples(4)}, {"train": examples(0), "test": examples(4)}])
def test_nothing_to_train_on_is_refused(splits):
    with pytest.raises(UserError, match="no training images"):
        complete(splits, {})


def test_too_few_images_to_draw_every_split_are_refused():
    with pytest.raises(UserError, match="3 images are too few to draw dev, test from"):
        complete({"train": examples(3)}, {})
    assert set(complete({"train": examples(12)}, {})) == set(datasets.SPLITS)


@pytest.mark.parametrize(
    "count, sizes",  # of MNIST, CIFAR, SVHN, STL-10, Caltech 101, CUB, Dogs, Pets, EMNIST
    [
        (60_000, (42_000, 9_000, 9_000)),
        (50_000, (35_000, 7_500, 7_500)),
        (73_257, (51_279, 10_988, 10_990)),
        (5_000, (3_500, 750, 750)),
        (3_060, (2_142, 459, 459)),
        (5_994, (4_195, 899, 900)),
        (12_000, (8_400, 1_800, 1_800)),
        (3_680, (2_576, 552, 552)),
        (112_800, (78_960, 16_920, 16_920)),
    ],
)
def test_slices_by_share_are_contiguous_and_the_last_takes_the_rest(count, sizes):
    published = {"train": examples(count), "test": examples(5)}
    splits = complete(published, {"slices": {"train": 0.7, "dev": 0.15, "dev_test": 0.15}})
    assert tuple(len(splits[name]) for name in ("train", "dev", "dev_test")) == sizes
    joined = np.concatenate([splits[name].labels for name in ("train", "dev", "dev_test")])
    np.testing.assert_array_equal(joined, np.arange(count))
    assert len(splits["test"]) == 5


def test_slices_by_count_leave_the_rest_out():
    published = {"train": examples(100), "test": examples(5)}
    splits = complete(published, {"slices": {"train": 60, "dev": 20, "dev_test": 10}})
    np.testing.assert_array_equal(splits["train"].labels, np.arange(60))
    np.testing.assert_array_equal(splits["dev"].labels, np.arange(60, 80))
    np.testing.assert_array_equal(splits["dev_test"].labels, np.arange(80, 90))


def test_slices_of_more_images_than_there_are_are_refused():
    slices = {"train": 60, "dev": 20, "dev_test": 10}
    with pytest.raises(UserError, match="train has 80 images, fewer than the 90"):
        complete({"train": examples(80), "test": examples(5)}, {"slices": slices})


@pytest.mark.parametrize("rule, digest", [
    ({}, "fff5d4ed020e041810727ee9fff540bd"),
    ({"slices": {"train": 0.7, "dev": 0.15, "dev_test": 0.15}}, "52eb1a52e55fa86f935307dd42e23a83"),
    ({"domain": True}, "6be69fdf9ecdd1e377e9755a66bcf182"),
    ({"per_class": {"train": 0.5, "dev": 0.1, "dev_test": 0.1}, "seed": 0}, "bbcf2d709f4ea8ec2d6fa819eed758be"),
    ({"last_of_class": {"test": 3, "dev": 2, "dev_test": 2}}, "3de81880e8ccda19cc681b8121289662"),
    ({"permuted": {"train": 0.8, "dev": 0.1, "dev_test": 0.1}, "seed": 7}, "69ebc322cf4969d0c3cf8f5a3d17136a"),
    ({"drawn_of_class": 20, "seed": 1234, "slices": {"train": 0.7, "dev": 0.15, "dev_test": 0.15}},
     "e0bee56187c5deac7b6049d60aef9d99"),
])
def test_splits_are_the_same_with_every_version_of_numpy(rule, digest):
    """Digests of the numbers of the images in each split, equal with numpy 1.24 and 2.4."""
    published = {"train": Examples(np.arange(300)[:, None, None], np.arange(300) * 7 % 11)}
    if rule.keys() & {"slices", "permuted", "domain"} and "drawn_of_class" not in rule:
        published["test"] = Examples(np.arange(300, 340)[:, None, None], np.zeros(40, np.int64))
    splits = complete(published, rule)
    told = "\n".join(f"{name} {' '.join(map(str, splits[name].images.ravel()))}" for name in datasets.SPLITS)
    assert hashlib.md5(told.encode()).hexdigest() == digest


@pytest.mark.parametrize("reader", ["class_folders", "by_name"])
def test_splits_do_not_depend_on_the_order_of_the_file_system(tmp_path, monkeypatch, reader):
    for name in ("a", "10", "2"):
        write_images(tmp_path / name, *(f"{i}.png" for i in range(20)))
    dataset = entry(tmp_path, reader=reader, kind="single_label", classes=3)
    if reader == "by_name":
        dataset = replace(dataset, options={"parts": [{"pattern": r"(?P<label>\w+)/\d+\.png$"}]})

    def told():
        return {name: ([str(image) for image in split.images], split.labels.tolist()) for name, split in read(dataset).items()}

    before, walk = told(), os.walk

    def backwards(*arguments, **options):
        for root, folders, files in walk(*arguments, **options):
            folders.reverse()
            files.reverse()
            yield root, folders, files

    monkeypatch.setattr(os, "walk", backwards)
    assert told() == before and sum(len(labels) for _, labels in before.values()) == 60


# ---- class folders


def test_class_folders_with_all_splits(tmp_path):
    for number, split in enumerate(datasets.SPLITS, start=1):
        write_images(tmp_path / split / "cat", *(f"{i}.png" for i in range(number)))
        write_images(tmp_path / split / "dog", "b.png", "a.png")
    splits = read(entry(tmp_path))
    assert list(splits) == list(datasets.SPLITS)
    for number, (name, split) in enumerate(splits.items(), start=1):
        assert [Path(path).relative_to(tmp_path).parts for path in split.images] == (
            [(name, "cat", f"{i}.png") for i in range(number)] + [(name, "dog", "a.png"), (name, "dog", "b.png")])
        assert split.labels.tolist() == [0] * number + [1, 1]
    assert datasets.num_classes(entry(tmp_path), splits) == 2


def test_classes_without_splits_are_all_train(tmp_path):
    write_images(tmp_path / "b", "1.png")
    write_images(tmp_path / "a", "1.png", "2.png")
    splits = datasets.read_class_folders(tmp_path)
    assert list(splits) == ["train"] and splits["train"].labels.tolist() == [0, 0, 1]


def test_numbered_classes_are_in_natural_order(tmp_path):
    names = ["10", "2", "1", "class10", "class9", "b"]
    for name in names:
        write_images(tmp_path / name, "x.png")
    images = datasets.read_class_folders(tmp_path)["train"].images
    assert [Path(path).parent.name for path in images] == ["1", "2", "10", "b", "class9", "class10"]


def test_litter_of_operating_systems_is_no_image_and_no_class(tmp_path):
    for root in (tmp_path, tmp_path / "train", tmp_path / "train" / "a"):
        write_images(root / "__MACOSX", "._x.png")
        root.mkdir(parents=True, exist_ok=True)
        for name in (".DS_Store", "Thumbs.db", "desktop.ini", "._x.png"):
            (root / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / ".git").mkdir()
    write_images(tmp_path / "train" / "a", "x.png")
    write_images(tmp_path / "train" / "b", "x.png")
    splits = datasets.read_class_folders(tmp_path)
    assert list(splits) == ["train"]
    assert splits["train"].images == [str(tmp_path / "train" / name / "x.png") for name in "ab"]


def test_suffixes_and_sub_folders_do_not_matter(tmp_path):
    names = ["A.JPG", "b.Jpeg", "c", "d.old.png", "e.PNG", "sub/f.tif", "sub.png"]  # a folder goes by its own name
    (tmp_path / "one" / "sub").mkdir(parents=True)
    write_images(tmp_path / "one", *names)
    write_images(tmp_path / "two", "x.png")
    images = datasets.read_class_folders(tmp_path)["train"].images
    assert images[:-1] == [str(tmp_path / "one" / name) for name in names]
    assert all(read_image(path).shape == (2, 2, 3) for path in images)


def test_a_class_that_train_lacks_is_refused_and_one_that_test_lacks_is_not(tmp_path):
    for split in datasets.SPLITS:
        for name in ("a", "b", "c"):
            if (split, name) != ("test", "b"):
                write_images(tmp_path / split / name, "x.png")
    assert datasets.read_class_folders(tmp_path)["test"].labels.tolist() == [0, 2]
    write_images(tmp_path / "test" / "d", "x.png")
    with pytest.raises(UserError, match="class d does not occur in .*train"):
        datasets.read_class_folders(tmp_path)


def test_an_empty_class_keeps_its_number_and_is_told(tmp_path, capsys):
    for empty in ("a", "c"):
        (tmp_path / "train" / empty).mkdir(parents=True)
    write_images(tmp_path / "train" / "b", *(f"{i}.png" for i in range(20)))
    write_images(tmp_path / "test" / "c", "x.png")
    splits = read(entry(tmp_path))
    assert set(splits["train"].labels.tolist()) == {1} and splits["test"].labels.tolist() == [2]
    assert datasets.num_classes(entry(tmp_path), splits) == 3
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == [f"{tmp_path}/train/{name}" for name in "ac"]


def test_a_stray_folder_beside_the_splits_is_refused(tmp_path):
    for name in ("train", "test", "val"):
        write_images(tmp_path / name / "a", "x.png")
        write_images(tmp_path / name / "b", "x.png")
    with pytest.raises(UserError, match="val lies beside test, train"):
        datasets.read_class_folders(tmp_path)


def test_splits_without_train_are_refused(tmp_path):
    write_images(tmp_path / "test" / "a", "x.png")
    with pytest.raises(UserError, match="no train/ beside test"):
        datasets.read_class_folders(tmp_path)


def test_a_single_class_and_images_without_a_class_are_refused(tmp_path):
    write_images(tmp_path / "train", "x.png")
    with pytest.raises(UserError, match="at least two classes, found 0"):
        datasets.read_class_folders(tmp_path)
    write_images(tmp_path / "train" / "a", "x.png")
    with pytest.raises(UserError, match="at least two classes, found 1"):
        datasets.read_class_folders(tmp_path)


def test_folders_without_images_are_refused(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "b").mkdir(parents=True)
    with pytest.raises(UserError, match="no training images"):
        read(entry(tmp_path))


@pytest.mark.parametrize("make", [True, False])
def test_missing_and_empty_folders_are_missing_data(tmp_path, make):
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    assert datasets.is_missing(entry(folder))
    with pytest.raises(MissingData, match=f"no files in {folder}") as error:
        read(entry(folder))
    assert error.value.code == 3 and datasets.LAYOUT in str(error.value)


def test_classes_are_counted_by_the_entry_then_the_names_then_the_ids(tmp_path):
    write_four_idx(tmp_path)
    splits = read(entry(tmp_path))
    assert datasets.num_classes(entry(tmp_path), splits) == 2 and datasets.class_names(entry(tmp_path), splits) == []
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    assert datasets.num_classes(entry(tmp_path), splits) == 3
    assert datasets.class_names(entry(tmp_path), splits) == ["a", "b", "c"]
    assert datasets.num_classes(entry(tmp_path, classes=5), splits) == 5


@pytest.mark.parametrize("order, names", [(None, ["2", "10"]), (["10", "2"], ["10", "2"]), ("minus 1", [*"123456789", "10"]),
                                          ("number", [*"0123456789", "10"])])
@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_the_names_of_the_classes_lead_back_to_the_labels_of_the_files(tmp_path, kind, order, names):
    for label in ("2", "10"):
        write_images(tmp_path / label, *(f"{i}.png" for i in range(20)))
    if kind == "single_label":
        reader = {"reader": "by_name", "options": {"parts": [{"pattern": r"/(?P<label>\d+)/.*png"}]}}
    else:
        (tmp_path / "list.csv").write_text("".join(f"{label}/{i}.png,{label}\n" for label in ("2", "10") for i in range(20)))
        part = {"index": "list.csv", "delimiter": ",", "image": "{0}", "labels": "{1}", "between": "+"}
        reader = {"reader": "by_table", "options": {"parts": [part]}}
    dataset = entry(tmp_path, kind=kind, classes=len(names), labels=order, **reader)
    splits = read(dataset)
    assert datasets.class_names(dataset, splits) == names
    for split in splits.values():
        for image, label in zip(split.images, split.labels, strict=True):
            assert image.name.split("/")[0] == names[label if kind == "single_label" else label.argmax()]


# ---- IDX


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_give_back_what_was_written(tmp_path, zipped):
    random = np.random.default_rng(0)
    expected = {}
    for number, split in enumerate(datasets.SPLITS, start=2):
        expected[split] = random.integers(0, 256, (number, 3, 5)), random.integers(0, 10, number)
        write_idx(tmp_path, split, *expected[split], zipped=zipped)
    for name, split in read(entry(tmp_path)).items():
        np.testing.assert_array_equal(split.images, expected[name][0])
        np.testing.assert_array_equal(split.labels, expected[name][1])
        assert split.images.dtype == np.uint8 and split.labels.dtype == np.int64


def test_t10k_is_the_test_split(tmp_path):
    write_idx(tmp_path, "train", np.zeros((30, 2, 2)), np.arange(30) % 3)
    write_idx(tmp_path, "t10k", np.zeros((4, 2, 2)), [2, 2, 1, 0])
    splits = read(entry(tmp_path))
    assert splits["test"].labels.tolist() == [2, 2, 1, 0]
    assert sum(len(splits[name]) for name in ("train", "dev", "dev_test")) == 30


def test_idx_labels_of_more_classes_than_a_byte_has(tmp_path):
    labels = np.arange(300, dtype=np.int32)
    write_idx(tmp_path, "train", np.zeros((300, 2, 2)), [0])
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    content = struct.pack(">HBBI", 0, 12, 1, 300) + labels.astype(">i4").tobytes()
    (tmp_path / "train-labels-idx1-int").write_bytes(content)
    splits = read(entry(tmp_path, split=TRAIN))
    assert sorted(label for part in splits.values() for label in part.labels.tolist()) == labels.tolist()
    assert all(part.labels.dtype == np.int64 for part in splits.values())


def test_idx_labels_below_zero_are_named(tmp_path):
    write_idx(tmp_path, "train", np.zeros((2, 2, 2)), [0, 1])
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    (tmp_path / "train-labels-idx1-int").write_bytes(struct.pack(">HBBIii", 0, 12, 1, 2, 0, -1))
    with pytest.raises(UserError, match="train-labels-idx1-int: has the label -1"):
        read(entry(tmp_path))


def test_idx_images_must_be_bytes(tmp_path):
    write_idx(tmp_path, "train", [[[0]]], [0])
    content = struct.pack(">HBBIII", 0, 12, 3, 1, 1, 1) + bytes(4)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz: images must be bytes"):
        read(entry(tmp_path))


def test_idx_colours_and_many_labels(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 4, 3))
    labels = np.arange(80).reshape(40, 2) % 2
    write_idx(tmp_path, "train", images, labels)
    splits = read(entry(tmp_path))
    names = assign(40, ALL)
    np.testing.assert_array_equal(splits["dev"].images, images[names == "dev"])
    np.testing.assert_array_equal(splits["test"].labels, labels[names == "test"])
    assert datasets.num_classes(entry(tmp_path), splits) == 2


def test_both_the_zipped_and_the_plain_file_may_lie_there(tmp_path):
    write_four_idx(tmp_path, zipped=True)
    write_four_idx(tmp_path, zipped=False)
    assert [len(split) for split in read(entry(tmp_path)).values()] == [6] * 4


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("keep", [0, 3, 9, -1])
def test_a_truncated_idx_file_is_named(tmp_path, zipped, keep):
    write_four_idx(tmp_path, zipped=zipped)
    path = next(tmp_path.glob("dev-images*"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=path.name):
        read(entry(tmp_path))


@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html><html>quota exceeded</html>", struct.pack(">HBBI", 0, 13, 1, 6) + bytes(24), bytes(40)])
def test_what_is_not_idx_is_named(tmp_path, content):
    write_four_idx(tmp_path)
    (tmp_path / "test-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="test-labels-idx1-ubyte.gz"):
        read(entry(tmp_path))
    (tmp_path / "test-labels-idx1-ubyte.gz").write_bytes(content)  # a page saved under the archive's name
    with pytest.raises(UserError, match="test-labels-idx1-ubyte.gz"):
        read(entry(tmp_path))


def test_surplus_bytes_are_refused(tmp_path):
    write_four_idx(tmp_path, zipped=False)
    with open(tmp_path / "dev-labels-idx1-ubyte", "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="dev-labels-idx1-ubyte"):
        read(entry(tmp_path))


def test_images_without_labels_are_refused(tmp_path):
    write_four_idx(tmp_path)
    (tmp_path / "dev-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="dev-images-idx3-ubyte.gz: its label file dev-labels"):
        read(entry(tmp_path))


def test_counts_of_images_and_labels_must_agree(tmp_path):
    write_four_idx(tmp_path)
    write_idx(tmp_path, "dev", np.zeros((5, 2, 2)), np.zeros(4))
    with pytest.raises(UserError, match="5 images but 4 labels"):
        read(entry(tmp_path))


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 2, 4), (4, 2, 2, 1, 1)])
def test_images_of_another_shape_are_refused(tmp_path, shape):
    write_idx(tmp_path, "train", np.zeros(shape), np.zeros(4))
    with pytest.raises(UserError, match="train-images"):
        read(entry(tmp_path))


def test_an_unknown_split_is_refused(tmp_path):
    write_four_idx(tmp_path)
    write_idx(tmp_path, "vall", np.zeros((4, 2, 2)), np.zeros(4))
    with pytest.raises(UserError, match="unknown split"):
        read(entry(tmp_path))


def test_splits_must_agree_on_the_number_of_labels(tmp_path):
    write_four_idx(tmp_path)
    (tmp_path / "dev-labels-idx1-ubyte.gz").unlink()
    write_idx(tmp_path, "dev", np.zeros((6, 2, 2)), np.ones((6, 3)))
    with pytest.raises(UserError, match="differ in their number of labels"):
        read(entry(tmp_path))


def test_the_reader_is_told_by_the_files(tmp_path):
    write_four_idx(tmp_path / "idx")
    for name in ("a", "b"):
        write_images(tmp_path / "folders" / name, *(f"{i}.png" for i in range(12)))
    assert isinstance(read(entry(tmp_path / "idx"))["train"].images, np.ndarray)
    assert isinstance(read(entry(tmp_path / "folders"))["train"].images[0], str)
    with pytest.raises(UserError, match="unknown reader idxx; did you mean idx"):
        read(entry(tmp_path / "idx", reader="idxx"))
    with pytest.raises(UserError, match="no file is named like"):
        read(entry(tmp_path / "folders", reader="idx"))


# ---- Landsat, and the catalogue


def test_landsat_pixels_and_labels():
    dataset = datasets.catalogue(Path("data"))["demo_landsat"]
    splits = read(dataset)
    assert {name: len(split) for name, split in splits.items()} == {"train": 1000, "dev": 300, "dev_test": 300, "test": 600}
    lines = (dataset.folder / "sat.trn").read_text().splitlines()
    for name, number, line in (("train", 0, 0), ("train", 999, 999), ("dev", 0, 1000), ("dev_test", 299, 1599)):
        values = [int(word) for word in lines[line].split()]
        image = splits[name].images[number]
        assert image.shape == (3, 3, 3) and image.dtype == np.uint8
        for row in range(3):
            for column in range(3):
                begin = 4 * (3 * row + column)
                assert image[row, column].tolist() == values[begin : begin + 3]
        assert splits[name].labels[number] == values[36] - 1
    assert {int(label) for split in splits.values() for label in split.labels} <= set(range(7)) - {5}  # it has no class 6


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("content", ["1 2 3\n", "a b c\n", "", None])
def test_broken_landsat_files_are_named(tmp_path, content):
    (tmp_path / "sat.tst").write_text(" ".join(["1"] * 37))
    if content is not None:
        (tmp_path / "sat.trn").write_text(content)
    with pytest.raises(UserError, match="sat.trn"):
        datasets.read_landsat(tmp_path)


def test_every_embedded_data_set_can_be_read():
    embedded = {key: dataset for key, dataset in datasets.catalogue(Path("nowhere")).items() if key.startswith("demo_")}
    assert len(embedded) == 11
    for dataset in embedded.values():
        splits = read(dataset)
        assert all(len(split) for split in splits.values())
        kind = "multi_label" if splits["train"].labels.ndim == 2 else "single_label"
        assert kind == dataset.kind
        most = splits["train"].labels.shape[1] if kind == "multi_label" else splits["train"].labels.max() + 1
        assert most == dataset.classes


def test_the_catalogue_is_well_formed(tmp_path):
    for key, dataset in datasets.catalogue(tmp_path).items():
        assert dataset.key == key and dataset.kind in ("single_label", "multi_label") and dataset.classes > 1
        assert dataset.reader in ("auto", *datasets.FOLDER_READERS, *datasets.TABLE_READERS)
        assert dataset.folder == tmp_path / key or dataset.folder.is_dir()
        assert len(dataset.split) <= 3


# ---- pixels


def test_plain_colours_are_kept():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for kind in ("PNG", "BMP", "PPM", "TIFF"):
        np.testing.assert_array_equal(read_image(encoded(Image.fromarray(pixels), kind)), pixels)


def test_a_path_and_its_bytes_are_the_same(tmp_path):
    content = png(Image.new("RGB", (3, 2), (1, 2, 3)))
    (tmp_path / "x.dat").write_bytes(content)
    for source in (tmp_path / "x.dat", str(tmp_path / "x.dat"), content):
        assert read_image(source).tolist() == [[[1, 2, 3]] * 3] * 2


def test_grey_is_repeated():
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    np.testing.assert_array_equal(read_image(png(Image.fromarray(pixels))), np.repeat(pixels[..., None], 3, axis=2))


def test_a_transparent_pixel_is_white_and_its_hidden_colour_never_seen():
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 255, 51)):
        image.putpixel((x, 0), (*RED, alpha))
    pixels = read_image(png(image))[0]
    assert pixels[0].tolist() == list(WHITE) and pixels[1].tolist() == list(RED)
    np.testing.assert_allclose(pixels[2], [255, 204, 204], atol=1)  # a fifth of red on white


def test_transparent_grey_is_laid_on_white():
    image = Image.new("LA", (2, 1))
    image.putpixel((0, 0), (10, 0))
    image.putpixel((1, 0), (10, 255))
    assert read_image(png(image))[0].tolist() == [[255] * 3, [10] * 3]


@pytest.mark.parametrize("transparency", [1, bytes([255, 0])])
def test_a_transparent_palette_entry_is_white(transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 255, *RED])
    image.putpixel((1, 0), 1)
    assert read_image(png(image, transparency=transparency))[0].tolist() == [[0, 0, 255], list(WHITE)]


@pytest.mark.parametrize("mode, colour, key", [("RGB", RED, RED), ("L", 9, 9)])
def test_a_transparent_colour_key_is_white(mode, colour, key):
    image = Image.new(mode, (2, 1), colour)
    image.putpixel((1, 0), (0, 0, 1) if mode == "RGB" else 1)
    assert read_image(png(image, transparency=key))[0, 0].tolist() == list(WHITE)


def test_a_palette_without_transparency_gives_its_colours():
    image = Image.new("P", (2, 1))
    image.putpalette([1, 2, 3, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert read_image(png(image)).tolist() == [[[1, 2, 3], [200, 100, 50]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    values = np.array([[0, 257, 1000], [32768, 65278, 65535]], np.uint16)
    pixels = read_image(encoded(Image.fromarray(values), kind))
    assert pixels.dtype == np.uint8 and (pixels[..., 0] == pixels[..., 2]).all()
    np.testing.assert_allclose(pixels[..., 0], values / 257, atol=0.51)
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert len(np.unique(read_image(encoded(Image.fromarray(ramp), kind)))) == 256


def test_sixteen_bits_in_the_other_byte_order_are_the_same():
    values = np.array([[0, 257, 1000], [32768, 65278, 65535]])
    image = Image.frombytes("I;16B", (3, 2), values.astype(">u2").tobytes())
    np.testing.assert_allclose(read_image(encoded(image, "TIFF"))[..., 0], values / 257, atol=0.51)


@pytest.mark.parametrize("values", [[[0, 50_000, 100_000]], [[-5, 0, 5]]])
def test_numbers_beyond_sixteen_bits_are_stretched_not_clipped(values):
    pixels = read_image(encoded(Image.fromarray(np.array(values, np.int32)), "TIFF"))
    assert pixels[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_image_with_values_that_are_not_finite_is_broken_rather_than_black(value):
    with pytest.raises(OSError, match="not finite"):
        read_image(encoded(Image.fromarray(np.array([[0, value, 1]], np.float32)), "TIFF"))


def test_floats_are_stretched_to_the_whole_range():
    values = np.array([[-1.0, 0.0, 1.0]], np.float32)
    assert read_image(encoded(Image.fromarray(values), "TIFF"))[..., 0].tolist() == [[0, 128, 255]]
    assert read_image(encoded(Image.fromarray(np.zeros((1, 2), np.float32)), "TIFF")).tolist() == [[[0] * 3] * 2]


def test_print_colours_become_screen_colours():
    for ink, colour in (((0, 255, 255, 0), RED), ((0, 0, 0, 0), WHITE), ((0, 0, 0, 255), (0, 0, 0))):
        for kind, options in (("JPEG", {"quality": 100}), ("TIFF", {})):
            pixels = read_image(encoded(Image.new("CMYK", (8, 8), ink), kind, **options))
            assert pixels.shape == (8, 8, 3)
            np.testing.assert_allclose(pixels, np.broadcast_to(colour, (8, 8, 3)), atol=8)


def test_ycck_becomes_screen_colours():
    """A CMYK file of neutral colour differences, marked as YCCK, which Pillow reads but does not write."""
    for luminance, grey in ((0, 255), (255, 0), (100, 155)):  # of inverted inks, so 0 is no ink at all
        content = bytearray(encoded(Image.new("CMYK", (16, 16), (255 - luminance, 127, 127, 0)), "JPEG", quality=100))
        content[content.index(b"Adobe") + 11] = 2
        np.testing.assert_allclose(read_image(bytes(content)), np.full((16, 16, 3), grey), atol=3)


def test_lab_becomes_screen_colours():
    for lab, colour in (((255, 128, 128), WHITE), ((0, 128, 128), (0, 0, 0)), ((136, 209, 198), RED)):
        image = Image.new("LAB", (2, 2), lab)
        try:
            image.convert("RGB")
        except ValueError:
            pytest.skip("this Pillow does not convert LAB")
        np.testing.assert_allclose(read_image(encoded(image, "TIFF")), np.broadcast_to(colour, (2, 2, 3)), atol=12)


def test_black_and_white_are_0_and_255():
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert read_image(png(image)).tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_of_an_animation_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = read_image(encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    assert (pixels == RED).all() and pixels.shape == (4, 4, 3)


def test_rotation_in_exif_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    image = Image.new("RGB", (20, 10))
    assert read_image(encoded(image, "JPEG", exif=exif)).shape == (10, 20, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_a_truncated_file_is_an_os_error(kind, share):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(pixels), kind)
    with pytest.raises(OSError):
        read_image(content[: int(share * len(content))])


@pytest.mark.parametrize("kind", ["one comment", "many comments", "profile"])
def test_long_comments_do_no_harm(kind):
    info = PngImagePlugin.PngInfo()
    for number in range({"one comment": 1, "many comments": 70}.get(kind, 0)):
        info.add_text(f"x{number}", "a" * (2 << 20 if kind == "one comment" else 1_000_000), zip=True)
    content = png(Image.new("RGB", (2, 2), RED), pnginfo=info, icc_profile=bytes(2 << 20) if kind == "profile" else None)
    assert (read_image(content) == RED).all()


def test_no_file_stays_open(tmp_path):
    (tmp_path / "good.png").write_bytes(png(Image.new("RGB", (2, 2))))
    (tmp_path / "bad.png").write_bytes(png(Image.new("RGB", (200, 200)))[:100])
    before = os.listdir("/proc/self/fd")
    kept = [read_image(tmp_path / "good.png") for _ in range(3)]
    for _ in range(3):
        try:
            read_image(tmp_path / "bad.png")
        except OSError as error:
            kept.append(error)
    assert len(kept) == 6 and os.listdir("/proc/self/fd") == before


def test_a_damaged_png_and_a_web_page_are_os_errors(tmp_path):
    content = bytearray(png(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))))
    content[len(content) // 2] ^= 255
    (tmp_path / "page.jpg").write_text("<!DOCTYPE html>")
    for source in (bytes(content), tmp_path / "page.jpg", tmp_path / "absent.png", tmp_path):
        with pytest.raises(OSError):
            read_image(source)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1)])
def test_images_of_a_single_pixel_across(size):
    assert read_image(png(Image.new("RGB", size, RED))).shape == (size[1], size[0], 3)


def test_a_picture_above_pillows_safety_limit_is_read(monkeypatch):
    content = png(Image.new("1", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1024)  # Pillow refuses twice as many
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(content))
    assert read_image(content).shape == (100, 100, 3)
