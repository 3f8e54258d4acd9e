"""Files that are arrays of pixels: what small copies of one colour cannot show."""

import os
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import h5py
import numpy as np
import published_arrays
import pytest
import scipy.io
from published import idx, tarred, write
from published_arrays import LAYOUTS, PUBLISHED, TEST, TRAIN, ids, planes
from test_published import found

from nevis_lite import arrays, datasets
from nevis_lite.config import UserError
from nevis_lite.raw import Raw

CATALOGUE = datasets.catalogue("")


def read(folder, key):
    return datasets.read(replace(CATALOGUE[key], folder=folder / key))


def laid_out(folder, key):
    (folder / key).mkdir()
    LAYOUTS[key](folder / key)
    return read(folder, key)


def pixels_of(examples) -> list:
    return [image if isinstance(image, np.ndarray) else image.load() for image in examples.images]


@pytest.mark.parametrize("key", sorted({*LAYOUTS} - {"mnist_rotation"}))
def test_every_pixel_lies_where_it_was(key, tmp_path, monkeypatch):
    written = {}

    def noise(number, size, mode="RGB"):
        shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
        pixels = np.random.default_rng(number).integers(256, size=shape).astype(np.uint8)
        pixels = pixels // 128 * 255 if mode == "1" else pixels
        written[pixels.shape, pixels.tobytes()] = number
        return pixels

    monkeypatch.setattr(published_arrays, "picture", noise)
    splits = laid_out(tmp_path, key)
    assert {(pixels.shape, pixels.tobytes()) for examples in splits.values() for pixels in pixels_of(examples)} == {*written}


@pytest.mark.parametrize("key", LAYOUTS)
def test_half_a_file_is_a_user_error(key, tmp_path):
    laid_out(tmp_path, key)
    for path in sorted((tmp_path / key).iterdir()):
        if path.name in ("semeion.names", "caltech101_silhouettes_28.mat"):
            continue  # nobody reads them
        content = path.read_bytes()
        path.write_bytes(content[:int(0.45 * len(content))])
        with pytest.raises(UserError, match=f"{key}.*{path.name}"):
            read(tmp_path, key)
        path.write_bytes(content)


@pytest.mark.parametrize("key, labels", [("mnist_rotation", "train-labels-idx1-ubyte.gz"),
                                         ("mnist", "t10k-labels-idx1-ubyte.gz")])
def test_labels_that_are_too_few_are_a_user_error(key, labels, tmp_path):
    laid_out(tmp_path, key)
    write(tmp_path / key, {labels: idx([1, 2, 3])})
    with pytest.raises(UserError, match="images but 3 labels"):
        read(tmp_path, key)


def test_rotations_are_a_function_of_seed_and_index():
    images = np.random.default_rng(0).integers(256, size=(6, 9, 9)).astype(np.uint8)
    turned = [arrays._rotated(part, np.random.default_rng([1, 0])) for part in (images, images[:4])]
    assert all((a == b).all() for a, b in zip(turned[0], turned[1], strict=False))
    other = arrays._rotated(images, np.random.default_rng([1, 1]))
    assert any((a != b).any() for a, b in zip(turned[0], other, strict=True))
    assert all(image.shape == (9, 9) and image.dtype == np.uint8 and abs(int(image[4, 4]) - int(before[4, 4])) <= 1
               for image, before in zip(turned[0], images, strict=True))  # all about the centre


@pytest.mark.parametrize("key, archive, folder, names, label_bytes", [
    ("cifar10", "cifar-10-binary.tar.gz", "cifar-10-batches-bin", ("data_batch_1", "test_batch"), 1),
    ("cifar100", "cifar-100-binary.tar.gz", "cifar-100-binary", ("train", "test"), 2)])
def test_the_binary_cifar_serves_too(key, archive, folder, names, label_bytes, tmp_path):
    members = {f"{folder}/batches.meta.txt": "airplane\n"}
    for name, rows in zip(names, (TRAIN, TEST), strict=True):
        labels = np.full((len(rows), label_bytes), 9, np.uint8)
        labels[:, -1] = ids(rows)
        members[f"{folder}/{name}.bin"] = np.hstack([labels, planes(rows, 32).reshape(len(rows), -1)]).tobytes()
    write(tmp_path / key, {archive: tarred(members, "gz")})
    splits = read(tmp_path, key)
    assert sum((found(splits[name], "RGB") for name in ("train", "dev", "dev_test")), []) == PUBLISHED["train"]
    assert found(splits["test"], "RGB") == PUBLISHED["test"]


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("call", [lambda folder: Call(os.mkdir, str(folder / "made")),
                                  lambda folder: Call(eval, f"__import__('os').mkdir({str(folder / 'made')!r})"),
                                  lambda folder: {b"data": [Call(np.memmap, str(folder / "made"), np.uint8, "w+", 0, 9)]},
                                  lambda folder: Call(np.ndarray.tofile, np.zeros(3), str(folder / "made"))])
def test_a_pickle_that_wants_to_run_something_is_a_user_error(call, protocol, tmp_path):
    content = pickle.dumps(call(tmp_path), protocol=protocol)
    members = {f"cifar-10-batches-py/{name}": content for name in ("data_batch_1", "test_batch")}
    write(tmp_path / "cifar10", {"cifar-10-python.tar.gz": tarred(members, "gz")})
    with pytest.raises(UserError, match="not a pickle of arrays"):
        read(tmp_path, "cifar10")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_arrays_are_read_in_every_protocol(protocol):
    batch = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [1, 2], b"name": (b"\xff\0", "text", None, 0.5)}
    result = arrays.safe_pickle(pickle.dumps(batch, protocol=protocol), "x")
    assert (result.pop(b"data") == batch.pop(b"data")).all() and result == batch


def write_mat73(path, variables: dict):
    """As MATLAB writes version 7.3: axes the other way round, words as codes, cells as references, behind a header."""
    def put(group, name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                put(group.require_group(name), key, inner)
        elif isinstance(value, str):
            group[name] = np.array([[ord(letter)] for letter in value], np.uint16)
            group[name].attrs["MATLAB_class"] = np.bytes_("char")
        elif value.dtype == object:
            references = group.create_dataset(name, value.T.shape, h5py.ref_dtype)
            for place, inner in np.ndenumerate(value.T):
                put(group.file.require_group("#refs#"), f"{name}{place}", inner)
                references[place] = group.file["#refs#"][f"{name}{place}"].ref
        elif not value.size:
            group[name] = np.array(value.shape)
            group[name].attrs["MATLAB_empty"] = 1
        else:
            group[name] = value.T

    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in variables.items():
            put(file, name, value)
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file")


def same(a, b) -> bool:
    if isinstance(a, np.ndarray) and a.dtype.names:
        return a.shape == b.shape and a.dtype.names == b.dtype.names and all(same(a[name], b[name]) for name in a.dtype.names)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and all(same(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
    return np.array_equal(a, b) and np.shape(a) == np.shape(b)


def test_both_versions_of_matlab_files_read_alike(tmp_path):
    cells = np.empty((1, 3), object)
    cells[0, :] = ["daisy", "b", np.arange(6).reshape(2, 3)]
    variables = {"X": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.array([[1.5], [2]]), "word": "tulip",
                 "names": cells, "list": {"a": np.array([[3]]), "b": "x"}}
    scipy.io.savemat(tmp_path / "5.mat", variables)
    write_mat73(tmp_path / "7.mat", variables | {"none": np.empty((0, 0))})
    raw = Raw(tmp_path)
    old, new = arrays.read_mat(raw, "5.mat"), arrays.read_mat(raw, "7.mat")
    assert new.pop("none").size == 0 and [*new] == sorted(old) == sorted(variables)
    assert all(same(old[name], new[name]) for name in old)
    assert new["X"].shape == (2, 3, 4) and new["names"][0, 0] == ["daisy"] and new["list"]["b"][0, 0] == ["x"]


def test_svhn_in_version_73_reads_alike(tmp_path):
    splits = laid_out(tmp_path, "svhn")
    for path in (tmp_path / "svhn").iterdir():
        variables = {name: value for name, value in scipy.io.loadmat(path).items() if name in "Xy"}
        write_mat73(path, variables)
    for name, examples in read(tmp_path, "svhn").items():
        assert found(examples, "RGB") == found(splits[name], "RGB")


@pytest.mark.parametrize("key, module, title", [("svhn", "scipy.io", "SciPy"), ("pacs", "h5py", "h5py")])
def test_a_missing_library_is_named(key, module, title, tmp_path, monkeypatch):
    (tmp_path / key).mkdir()
    LAYOUTS[key](tmp_path / key)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"needs {title}: pip install {module.split('.')[0]}"):
        read(tmp_path, key)


@pytest.mark.parametrize("key, told", [("patch_camelyon", r"_train_x\.h5\.gz, image 3"), ("casia_hwdb", r"1001-c\.gnt at \d+")])
def test_large_sets_are_lists_of_references_that_threads_may_load(key, told, tmp_path, monkeypatch):
    monkeypatch.setattr(published_arrays, "TRAIN", [(number, 0) for number in range(40)])
    images = [image for examples in laid_out(tmp_path, key).values() for image in examples.images]
    assert not any(hasattr(image, "__dict__") for image in images)
    assert any(re.search(told, str(image)) for image in images)
    reads, raw_read = [], Raw.read
    monkeypatch.setattr(Raw, "read", lambda raw, name: reads.append(name) or raw_read(raw, name))
    with ThreadPoolExecutor(8) as pool:
        loaded = [list(pool.map(lambda image: image.load(), images)) for _ in range(3)]
    assert all((a == b).all() and (a == c).all() for a, b, c in zip(*loaded, strict=True))
    assert len(reads) == len({*reads})
