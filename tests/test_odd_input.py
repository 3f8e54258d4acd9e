"""What users feed it: odd files, odd names, odd YAML. Each of these once failed."""

import gzip
import io
import os
import struct

import numpy as np
import pytest
import torch
from PIL import Image, features

from nevis_lite import cache, config, data, datasets, doctor, stream
from nevis_lite.config import DataConfig, UserError
from nevis_lite.datasets import SPLITS, DataSet


def entry(folder, **facts):
    return DataSet(key="x", name="X", folder=folder, **facts)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def idx(array):
    array = np.asarray(array, np.uint8)
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def test_squares_of_more_than_1024_grey_images_before_a_coloured_one(tmp_path):
    for split in SPLITS:
        for name, count in (("a", 1024 if split == "dev" else 1), ("b", 1)):
            for i in range(count):
                pixels = np.zeros((2, 2)) if name == "a" else np.eye(2)[..., None] * [1, 2, 3]
                put(tmp_path / "x" / split / name / f"{i:05}.png", png(pixels))
    folder = cache.prepare(entry(tmp_path / "x"), DataConfig(dir=str(tmp_path)))
    assert len(data.Split(folder, "dev", torch.device("cpu")).squares(4)) == 1025


@pytest.mark.parametrize("link", ["split", "class"])
def test_a_change_behind_a_linked_folder_rebuilds_the_cache(tmp_path, link):
    for split in SPLITS:
        for name in ("a", "b"):
            put(tmp_path / "far" / split / name / "1.png", png([[1]]))
    (tmp_path / "x").mkdir()
    for split in SPLITS:
        if link == "split":
            (tmp_path / "x" / split).symlink_to(tmp_path / "far" / split)
        else:
            (tmp_path / "x" / split).mkdir()
            for name in ("a", "b"):
                (tmp_path / "x" / split / name).symlink_to(tmp_path / "far" / split / name)
    config = DataConfig(dir=str(tmp_path))
    cache.prepare(entry(tmp_path / "x"), config)
    put(tmp_path / "far" / "train" / "a" / "2.png", png([[1]]))
    new = cache.prepare(entry(tmp_path / "x"), config)
    assert len(data.Split(new, "train", torch.device("cpu"))) == 3


def encoded(kind):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)).save(file, kind)
    return bytearray(file.getvalue())


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_a_damaged_avif_is_an_os_error():
    content = encoded("AVIF")
    content[content.index(b"iloc") + 13] ^= 0x40
    with pytest.raises(OSError):
        datasets.read_image(bytes(content))


@pytest.mark.parametrize("width", [2**31 - 1, 2**31 + 5])
def test_a_bmp_of_absurd_width_is_an_os_error(width):
    content = encoded("BMP")
    content[18:22] = struct.pack("<I", width)
    with pytest.raises(OSError):
        datasets.read_image(bytes(content))


@pytest.mark.parametrize("word", ["010", "007", "00", "-012"])
def test_a_number_with_a_leading_zero_is_a_word(word):
    assert config.read_yaml(word, "x") == word


@pytest.mark.parametrize("text", ["a: !!bool maybe", "a: !!timestamp x"])
def test_odd_tags_are_user_errors(text):
    with pytest.raises(UserError):
        config.read_yaml(text, "x")


@pytest.mark.parametrize("task", [["demo_mnist"], {"demo_mnist": 1}])
def test_a_task_that_is_no_word_is_a_user_error(tmp_path, task):
    with pytest.raises(UserError):
        stream.load([{"task": task, "year": 2000}], tmp_path)


@pytest.mark.parametrize("folder", [None, ""])
def test_an_empty_folder_entry_is_a_user_error_that_says_so(folder):
    """Today: MissingData for a folder called "None"; with folder: "" likewise."""
    with pytest.raises(UserError) as error:
        stream.load([{"folder": folder, "year": 2000}])
    assert error.value.code == 2


def test_an_empty_section_is_as_good_as_none():
    assert config.from_dict({"fit": None}) == config.Config()


def test_a_far_off_key_is_answered_with_the_known_ones():
    with pytest.raises(UserError) as error:
        config.from_dict({"data": {"zzz": 1}})
    assert "did you mean" not in str(error.value)


def test_apple_double_beside_idx_files_is_ignored(tmp_path):
    for split in SPLITS:
        put(tmp_path / f"{split}-images-idx3-ubyte.gz", idx(np.zeros((2, 2, 2))))
        put(tmp_path / f"{split}-labels-idx1-ubyte.gz", idx([0, 1]))
        put(tmp_path / f"._{split}-images-idx3-ubyte.gz", b"\0\5\x16\7")
        put(tmp_path / f"._{split}-labels-idx1-ubyte.gz", b"\0\5\x16\7")
    datasets.read(entry(tmp_path))


@pytest.mark.parametrize("hidden", [".ipynb_checkpoints", "__MACOSX", ".thumbnails"])
def test_hidden_folders_inside_a_class_are_ignored(tmp_path, hidden):
    for name in ("a", "b"):
        put(tmp_path / name / "1.png", png([[1]]))
    put(tmp_path / "a" / hidden / "1-checkpoint.png", png([[1]]))
    assert len(datasets.read_class_folders(tmp_path)["train"]) == 2


def test_a_litter_only_folder_is_missing(tmp_path):
    put(tmp_path / ".DS_Store", b"x")
    assert datasets.is_missing(entry(tmp_path))


def test_names_that_are_not_utf8_are_cached_and_told(tmp_path, capsys):
    for split in SPLITS:
        for number in range(2 if split == "train" else 1):
            for name in ("bär".encode("latin-1"), b"c"):
                folder = os.path.join(os.fsencode(tmp_path), "lätta".encode("latin-1"), split.encode(), name)
                os.makedirs(folder, exist_ok=True)
                with open(os.path.join(folder, "ü%d.png".encode("latin-1") % number), "wb") as file:
                    file.write(png([[7]]))
    dataset = entry(tmp_path / os.fsdecode("lätta".encode("latin-1")))
    meta = cache.meta_of(cache.prepare(dataset, DataConfig(dir=str(tmp_path / "data"))))
    assert meta["classes"] == ["bär", "c"] and meta["sizes"]["train"] == 4 and meta["copies"]["test"] == 2
    for path in dataset.folder.rglob("*.png"):
        path.write_bytes(b"broken")
    failed = doctor.prepare([dataset], DataConfig(dir=str(tmp_path / "data")))
    assert "lätta" in failed["x"] and "ü0.png" in failed["x"] and failed["x"].encode()


def test_class_names_of_superscripts(tmp_path):
    for name in ("5\u00b2", "b"):
        put(tmp_path / name / "1.png", png([[1]]))
    datasets.read_class_folders(tmp_path)


def test_the_order_of_01_and_1_does_not_come_from_the_file_system(tmp_path):
    for number, names in enumerate((("1", "01"), ("01", "1"))):
        for name in names:
            put(tmp_path / str(number) / name / "1.png", png([[1]]))

    class Reversed(type(tmp_path)):
        def iterdir(self):
            return reversed(list(super().iterdir()))

    a, b = (datasets.read_class_folders(kind(tmp_path / "0"))["train"].images for kind in (type(tmp_path), Reversed))
    assert a == b


def test_a_dark_sixteen_bit_image_is_scaled_as_its_neighbours_are():
    file = io.BytesIO()
    Image.fromarray(np.array([[0, 200]], np.uint16)).save(file, "PNG")
    assert datasets.read_image(file.getvalue()).max() <= 1


def test_labels_of_three_dimensions_are_refused(tmp_path):
    for split in SPLITS:
        put(tmp_path / f"{split}-images-idx3-ubyte.gz", idx(np.zeros((2, 2, 2))))
        put(tmp_path / f"{split}-labels-idx3-ubyte.gz", idx(np.zeros((2, 2, 2))))
    with pytest.raises(UserError):
        cache.prepare(entry(tmp_path), DataConfig(dir=str(tmp_path / "d")))


def test_old_caches_of_folders_with_brackets_go(tmp_path):
    """root.glob(prefix + "*") reads [ ] * ? in the folder's name as a pattern."""
    for split in SPLITS:
        for name in ("a", "b"):
            put(tmp_path / "x[1]" / split / name / "1.png", png([[1]]))
    dataset = DataSet(key="x[1]", name="X", folder=tmp_path / "x[1]")
    cache.prepare(dataset, DataConfig(dir=str(tmp_path)))
    put(tmp_path / "x[1]" / "train" / "a" / "2.png", png([[1]]))
    cache.prepare(dataset, DataConfig(dir=str(tmp_path)))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_name_that_is_too_long_for_a_file():
    with pytest.raises(UserError):
        config.load("x" * 300)
