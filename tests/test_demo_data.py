"""The embedded demo data, read with a parser of its own: nothing here uses the package or the tool that made it."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

DEMO = Path(__file__).resolve().parents[1] / "nevis_lite" / "demo"
SPLITS = ("train", "dev", "dev_test", "test")
# key: (images per split, shape of an image, number of classes, several labels an image)
EXPECTED = {
    "landsat": ((1000, 300, 300, 600), (3, 3, 4), 7, False),
    "optical_digits": ((900, 250, 200, 447), (8, 8), 10, False),
    "mnist": ((1000, 300, 200, 1000), (28, 28), 10, False),
    "textures": ((400, 120, 100, 148), (32, 32), 3, False),
    "clipart_keywords": ((797, 239, 111, 447), (40, 40, 3), 8, True),
    "icons_a": ((2400, 400, 240, 583), (32, 32), 40, False),
    "faces": ((112, 24, 24, 40), (25, 25), 2, False),
    "fashion_mnist": ((300, 250, 150, 1000), (28, 28), 10, False),
    "mnist_rot": ((300, 200, 100, 800), (28, 28), 10, False),
    "icon_parts": ((300, 200, 100, 600), (32, 32), 12, True),
    "icons_b": ((200, 200, 160, 800), (32, 32), 20, False),
}


def read_idx(path):
    packed = path.read_bytes()
    assert packed[3] & 8 == 0 and packed[4:8] == bytes(4), f"{path}: a file name or a time makes gzip irreproducible"
    data = gzip.decompress(packed)
    assert data[:3] == b"\0\0\x08"
    end = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, end, 4)]
    assert path.name.endswith(f"-idx{len(shape)}-ubyte.gz")
    return np.frombuffer(data, np.uint8, offset=end).reshape(shape)


def read_split_files(folder, split):
    (images,), (labels,) = folder.glob(f"{split}-images-*"), folder.glob(f"{split}-labels-*")
    return read_idx(images), read_idx(labels)


def read_set(key):
    """{split: (images, labels)}; the label codes of landsat run from 1, made to run from 0."""
    folder = DEMO / key
    if key == "landsat":
        tables = [np.loadtxt(folder / name, dtype=np.int64) for name in ("sat.trn", "sat.tst")]
        assert all(table.min() >= 0 and table.max() <= 255 for table in tables)
        pairs = [(table[:, :36].reshape(-1, 3, 3, 4).astype(np.uint8), table[:, 36] - 1) for table in tables]
    elif key == "fashion_mnist":
        pairs = [read_split_files(folder, name) for name in ("train", "t10k")]
    else:
        return {split: read_split_files(folder, split) for split in SPLITS}
    assert len(pairs[0][1]) == sum(EXPECTED[key][0][:3])
    bounds = np.cumsum(EXPECTED[key][0][:2])
    parts = list(zip(np.split(pairs[0][0], bounds), np.split(pairs[0][1], bounds), strict=True)) + pairs[1:]
    return dict(zip(SPLITS, parts, strict=True))


@pytest.fixture(scope="module")
def sets():
    return {key: read_set(key) for key in EXPECTED}


def pixels(images):
    return {image.tobytes() for image in images}


def test_checksums_cover_every_file():
    listed = dict(line.split("  ")[::-1] for line in (DEMO / "SHA256SUMS").read_text().splitlines())
    found = {p.relative_to(DEMO).as_posix(): p for p in DEMO.rglob("*") if p.is_file() and p.name != "SHA256SUMS"}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def test_folders_and_total_size():
    assert {p.name for p in DEMO.iterdir() if p.is_dir()} == set(EXPECTED)
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) <= 6_000_000


@pytest.mark.parametrize("key", EXPECTED)
def test_sizes_labels_and_classes(sets, key):
    sizes, shape, classes, multi = EXPECTED[key]
    expected_labels = {0, 1, 2, 3, 4, 6} if key == "landsat" else set(range(classes))  # landsat: no class "mixture"
    for split, size in zip(SPLITS, sizes, strict=True):
        images, labels = sets[key][split]
        assert images.shape == (size, *shape) and images.dtype == np.uint8
        if multi:
            assert labels.shape == (size, classes)
            assert labels.max() == 1 and labels.any(axis=1).all() and labels.any(axis=0).all()
        else:
            assert labels.shape == (size,)
            assert set(labels.tolist()) == expected_labels
    names = DEMO / key / "classes.txt"
    if names.exists():
        lines = names.read_text().splitlines()
        assert len(set(lines)) == len(lines) == classes


@pytest.mark.parametrize("key", EXPECTED)
def test_no_image_is_in_two_splits(sets, key):
    # Landsat images are made of the first three of the four bands.
    seen = [pixels(images[..., :3] if key == "landsat" else images) for images, _ in sets[key].values()]
    assert len(set().union(*seen)) == sum(map(len, seen))


def test_no_image_is_in_two_icon_sets(sets):
    seen = [pixels(np.concatenate([images for images, _ in sets[key].values()]))
            for key in ("icons_a", "icons_b", "icon_parts")]
    assert len(set().union(*seen)) == sum(map(len, seen)) == sum(sum(EXPECTED[k][0]) for k in EXPECTED if "icon" in k)


def test_icons_are_dark_on_white_and_not_blank(sets):
    for key in ("icons_a", "icons_b", "icon_parts"):
        images = np.concatenate([images for images, _ in sets[key].values()])
        assert (images.min(axis=(1, 2)) < 128).all() and (images.max(axis=(1, 2)) > 128).all()
        assert np.median(images[:, 0, 0]) == 255


def test_concepts_of_the_two_icon_sets_differ():
    concepts = [set((DEMO / key / "classes.txt").read_text().split()) for key in ("icons_a", "icons_b")]
    assert not concepts[0] & concepts[1]
