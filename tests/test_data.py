import io
import itertools
import json
import math
import os
import random
import signal
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from published import write

from nevis_lite import cache, data
from nevis_lite.cache import prepare
from nevis_lite.config import DataConfig, UserError
from nevis_lite.data import TRIES, EndlessStream, Split, crop_and_resize, draw, generator, random_boxes, to_input
from nevis_lite.datasets import SPLITS, DataSet
from nevis_lite.raw import Raw

FULL_RANGE = (0.08, 1.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def png(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def entry(folder: Path, **facts) -> DataSet:
    return DataSet(key="pets", name="Pets", folder=folder, **facts)


def class_folders(folder: Path, train: list, others: int = 1, classes: int = 2) -> Path:
    """Four splits of PNG files: the images `train` dealt to the classes in turn; `others` dark ones a class elsewhere."""
    for split in SPLITS:
        images = train if split == "train" else [np.full((2, 2), SPLITS.index(split))] * others * classes
        for number, image in enumerate(images):
            (folder / split / f"c{number % classes}").mkdir(parents=True, exist_ok=True)
            (folder / split / f"c{number % classes}" / f"{number:05}.png").write_bytes(png(image))
    return folder


def split_of(root: Path, images: list, config: DataConfig | None = None) -> Split:
    """The cached train split of `images`, in the order of the list: each is a class of its own."""
    folder = class_folders(root / "pets", images, classes=len(images))
    return Split(prepare(entry(folder), config or DataConfig(dir=str(root))), "train", torch.device("cpu"))


def stored(split: Split) -> list[np.ndarray]:
    return [split.pixels[begin : begin + h * w * c].reshape(h, w, c).numpy() for begin, h, w, c in split.index.tolist()]


def write_idx(folder: Path, split: str, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    for what, array in (("images", np.asarray(images)), ("labels", np.asarray(labels))):
        content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
        (folder / f"{split}-{what}-idx{array.ndim}-ubyte").write_bytes(content)


def files(folder: Path) -> dict:
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
            for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def config(tmp_path):
    return DataConfig(dir=str(tmp_path))


# ---- the cache


def test_pixels_and_labels_come_back_as_they_were(tmp_path, config):
    images = [noise(5, 7, 3, seed=1), noise(3, 4, 3, seed=2), noise(9, 2, 3, seed=3), noise(6, 6, 3, seed=4)]
    folder = prepare(entry(class_folders(tmp_path / "pets", images)), config)
    split = Split(folder, "train", torch.device("cpu"))
    assert len(split) == 4 and split.labels.tolist() == [0, 0, 1, 1] and split.labels.dtype == torch.int64
    for found, expected in zip(stored(split), [images[0], images[2], images[1], images[3]], strict=True):
        np.testing.assert_array_equal(found, expected)
    meta = split.meta
    assert (meta["name"], meta["kind"], meta["num_classes"]) == ("Pets", "single_label", 2)
    assert meta["sizes"] == {"train": 4, "dev": 2, "dev_test": 2, "test": 2} and meta["skipped"] == 0
    assert meta["resolution"] == round((5 + 3 + 2 + 6 + 6 * 2) / 10, 1)  # of all splits, shorter sides
    assert (folder / "report.jsonl").read_text() == ""


def test_many_labels_come_back_as_they_were(tmp_path, config):
    labels = np.random.default_rng(0).integers(0, 2, (40, 3))
    write_idx(tmp_path / "x", "train", noise(40, 4, 4), labels)
    write_idx(tmp_path / "x", "test", noise(5, 4, 4), labels[:5])
    split = Split(prepare(entry(tmp_path / "x"), config), "test", torch.device("cpu"))
    np.testing.assert_array_equal(split.labels, labels[:5])
    assert split.meta["kind"] == "multi_label" and split.meta["num_classes"] == 3


def test_an_unchanged_source_is_not_read_again(tmp_path, config):
    source = class_folders(tmp_path / "pets", [noise(4, 4, 3)] * 4)
    folder = prepare(entry(source), config)
    before = files(tmp_path / "cache")
    assert prepare(entry(source), config) == folder
    assert files(tmp_path / "cache") == before


@pytest.mark.parametrize("change", ["content", "time", "new", "gone", "renamed", "class"])
def test_a_changed_source_is_read_again_and_the_old_cache_goes(tmp_path, config, change):
    source = class_folders(tmp_path / "pets", [noise(4, 4, 3)] * 4)
    path = source / "train" / "c0" / "00000.png"
    old = prepare(entry(source), config)
    if change == "content":
        path.write_bytes(png(noise(6, 5, 3, seed=9)))
    elif change == "time":
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1000))
    elif change == "new":
        (source / "train" / "c1" / "9.png").write_bytes(png(noise(4, 4, 3)))
    elif change == "gone":
        path.unlink()
    elif change == "renamed":
        path.rename(path.with_name("0.png"))
    elif change == "class":
        path.rename(source / "train" / "c1" / "x.png")
    new = prepare(entry(source), config)
    assert new != old and [path.name for path in (tmp_path / "cache").iterdir()] == [new.name]
    split = Split(new, "train", torch.device("cpu"))
    assert len(split) == {"new": 5, "gone": 3}.get(change, 4)
    assert (split.index[0, 1:].tolist() == [6, 5, 3]) == (change == "content")
    assert split.labels.sum() == (3 if change in ("new", "class") else 2)


@pytest.mark.parametrize("facts", [{"classes": 5}, {"split": {"slices": {"train": 0.5, "dev": 0.5}}}])
def test_a_changed_entry_is_read_again(tmp_path, config, facts):
    source = class_folders(tmp_path / "pets", [noise(4, 4, 3)] * 4)
    assert prepare(entry(source), config) != prepare(entry(source, **facts), config)


def test_each_cache_side_has_a_cache_of_its_own(tmp_path, config):
    source = class_folders(tmp_path / "pets", [noise(8, 9, 3)] * 2)
    folders = [prepare(entry(source), DataConfig(dir=str(tmp_path), cache_side=side)) for side in (0, 4)]
    assert folders[0] != folders[1] and all((folder / "meta.json").is_file() for folder in folders)


def test_two_folders_of_one_name_do_not_share_a_cache(tmp_path, config):
    first = prepare(entry(class_folders(tmp_path / "a" / "pets", [np.full((2, 2), 1)] * 2)), config)
    second = prepare(entry(class_folders(tmp_path / "b" / "pets", [np.full((2, 2), 2)] * 2)), config)
    assert first.is_dir() and second.is_dir() and first != second
    assert [int(Split(folder, "train", torch.device("cpu")).pixels[0]) for folder in (first, second)] == [1, 2]


def test_the_digest_tells_content_apart_and_nothing_else(tmp_path, config):
    def digest(name, images, classes=2):
        return json.loads((prepare(entry(class_folders(tmp_path / name, images, classes=classes)), config) / "meta.json")
                          .read_text())["sha256"]

    images = [noise(3, 3, 3, seed=number) for number in range(4)]
    assert digest("a", images) == digest("b", images)
    assert digest("c", [*images[:3], noise(3, 3, 3, seed=9)]) != digest("a2", images)
    assert digest("d", images, classes=4) != digest("a3", images)


def test_a_failed_build_leaves_nothing_behind_and_the_old_cache_whole(tmp_path, config):
    source = class_folders(tmp_path / "pets", [noise(4, 4, 3)] * 4)
    prepare(entry(source), config)
    before = files(tmp_path / "cache")
    (source / "train" / "c0" / "00000.png").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(UserError, match="1 of 10 images cannot be read, for example .*00000.png"):
        prepare(entry(source), config)
    assert files(tmp_path / "cache") == before
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_first_build_that_fails_leaves_nothing_behind(tmp_path, config):
    source = class_folders(tmp_path / "pets", [noise(4, 4, 3)] * 4)
    for path in (source / "dev").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="No image of the dev split"):
        prepare(entry(source), config)
    assert list((tmp_path / "cache").iterdir()) == []


def test_builds_at_the_same_time_end_in_one_cache(tmp_path, config):
    source = class_folders(tmp_path / "pets", [noise(8, 8, 3)] * 40)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: prepare(entry(source), config), range(4)))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [path.name for path in folders]
    assert len(stored(Split(folders.pop(), "train", torch.device("cpu")))) == 40


def test_grey_takes_one_channel_and_colour_three(tmp_path):
    grey = noise(4, 5)
    almost = np.repeat(grey[..., None], 3, axis=2)
    almost[3, 4, 2] ^= 1
    split = split_of(tmp_path, [grey, np.repeat(grey[..., None], 3, axis=2), almost])
    assert [image.shape for image in stored(split)] == [(4, 5, 1), (4, 5, 1), (4, 5, 3)]
    np.testing.assert_array_equal(stored(split)[1][..., 0], grey)
    assert split.pixels.numel() == 4 * 5 * 5


@pytest.mark.parametrize("side, sizes", [(0, [(100, 60), (41, 200), (12, 10), (300, 1)]),
                                         (20, [(33, 20), (20, 98), (12, 10), (300, 1)])])
def test_the_shorter_side_is_capped_and_never_grows(tmp_path, side, sizes):
    images = [noise(100, 60, 3), noise(41, 200), noise(12, 10, 3), noise(300, 1, 3)]
    split = split_of(tmp_path, images, DataConfig(dir=str(tmp_path), cache_side=side))
    assert [image.shape[:2] for image in stored(split)] == sizes
    assert split.meta["cache_side"] == side
    assert split.meta["resolution"] == round((60 + 41 + 10 + 1 + 3 * 4 * 2) / 16, 1)  # of the files, not of the cache


def test_shrinking_averages_rather_than_picks(tmp_path):
    checks = np.indices((80, 80)).sum(axis=0) % 2 * 255
    (small,) = stored(split_of(tmp_path, [checks, checks], DataConfig(dir=str(tmp_path), cache_side=10)))[:1]
    assert small.shape == (10, 10, 1) and abs(small.astype(int) - 127).max() <= 2


def jpeg(pixels, folder: Path) -> Path:
    """One file, which `folder` has as an image of each of two classes."""
    for name in ("a", "b"):
        for number in range(12):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg", quality=90)
    return folder / "a" / "0.jpg"


def landscape(height: int, width: int) -> np.ndarray:
    """Colours that change over tens of pixels, and grain."""
    rough = Image.fromarray(noise(height // 40, width // 40, 3)).resize((width, height), Image.Resampling.BICUBIC)
    return (np.asarray(rough) * 0.9 + noise(height, width, 3) * 0.1).astype(np.uint8)


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("height, width, apart", [(41, 64, 0), (49, 119, 0), (51, 187, 8), (241, 963, 8), (805, 603, 8)])
def test_a_photo_is_shrunk_as_pillow_does_it_at_once(tmp_path, grey, height, width, apart):
    """Bit for bit, unless its shorter side is at least 2.5 times the cap: then a JPEG may be decoded without its details."""
    pixels = landscape(height, width)
    path = jpeg(pixels[..., 0] if grey else pixels, tmp_path / "x")
    split = Split(prepare(entry(tmp_path / "x"), DataConfig(dir=str(tmp_path), cache_side=20)), "train", torch.device("cpu"))
    with Image.open(path) as image:
        scale = 20 / min(image.size)
        wanted = np.asarray(image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR))
    difference = stored(split)[0].astype(int) - (wanted[..., None] if grey else wanted)
    assert abs(difference).max() <= apart and abs(difference).mean() <= apart / 8
    assert split.meta["resolution"] == min(height, width)


def test_the_number_of_threads_does_not_matter(tmp_path, monkeypatch):
    source, found = class_folders(tmp_path / "pets", [noise(9, 5 + number % 40, 3, seed=number) for number in range(90)]), []
    for threads in (1, 7):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        folder = prepare(entry(source), DataConfig(dir=str(tmp_path / str(threads)), cache_side=8))
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1] and len(found[0]) == 3 * 4 + 2


def test_a_photo_with_several_boxes_is_decoded_once(tmp_path, config, monkeypatch):
    photos = {f"{name}.png": noise(30, 40, 3, seed=number) for number, name in enumerate("abc")}
    boxes = [(name, 3 * place, place, 8 + place, 6) for place in range(5) for name in photos]  # photo after photo, five times
    images = [{"id": name, "file_name": name} for name in photos]
    annotations = [{"image_id": name, "bbox": box, "category_id": number % 2} for number, (name, *box) in enumerate(boxes)]
    index = json.dumps({"images": images, "annotations": annotations})
    write(tmp_path / "pets", {f"{split}.json": index for split in SPLITS})
    write(tmp_path / "pets", {f"{split}/{name}": png(pixels) for split in SPLITS for name, pixels in photos.items()})
    parts = [{"index": f"/{split}.json$", "folder": split, "split": split} for split in SPLITS]
    dataset = entry(tmp_path / "pets", reader="coco_objects", kind="single_label", classes=2, labels="number",
                    options={"smallest": 1, "parts": parts})
    reads, read = [], Raw.read
    monkeypatch.setattr(Raw, "read", lambda raw, name: reads.append(name) or read(raw, name))
    split = Split(prepare(dataset, config), "train", torch.device("cpu"))
    assert sorted(name for name in reads if name.endswith("png")) == sorted(f"{split}/{n}" for split in SPLITS for n in photos)
    assert split.labels.tolist() == [number % 2 for number in range(15)]
    for found, (name, left, top, width, height) in zip(stored(split), boxes, strict=True):
        np.testing.assert_array_equal(found, photos[name][top:top + height, left:left + width])


def test_ctrl_c_ends_a_build_at_once_and_leaves_nothing(tmp_path, config, monkeypatch):
    source, decoded, read = class_folders(tmp_path / "pets", [[[1]]] * 400), [], cache.read_shrunk

    def interrupted(path, side):
        decoded.append(path)
        if len(decoded) == 50:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)
        return read(path, side)

    monkeypatch.setattr(cache, "read_shrunk", interrupted)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs lack
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare(entry(source), config)
    finally:
        signal.signal(signal.SIGINT, before)
    assert list((tmp_path / "cache").iterdir()) == [] and len(decoded) < 300


def test_images_without_a_pixel_are_broken(tmp_path, config):
    for split in SPLITS:
        write_idx(tmp_path / "x", split, np.zeros((4, 0, 2)), [0, 1, 0, 1])
    with pytest.raises(UserError, match="No image of the train split can be read.*no pixels"):
        prepare(entry(tmp_path / "x"), config)


def many_images(folder: Path, count: int, broken: int) -> Path:
    """`count` images, 50 in class a and 200 in class b; the first files of class a are `broken`."""
    class_folders(folder, [], others=1)
    for number in range(count - 6):  # the other splits hold six
        name, value = ("c0", 50) if number % 2 == 0 else ("c1", 200)
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
        content = b"broken" if number < 2 * broken and number % 2 == 0 else png([[value]])
        (folder / "train" / name / f"{number:05}.png").write_bytes(content)
    return folder


def test_a_thousandth_of_broken_images_is_skipped_and_listed(tmp_path, config):
    folder = prepare(entry(many_images(tmp_path / "pets", 1001, broken=1)), config)
    (row,) = [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]
    assert row["split"] == "train" and row["image"].endswith("00000.png") and row["error"]
    split = Split(folder, "train", torch.device("cpu"))
    assert split.meta["skipped"] == 1 and split.meta["sizes"]["train"] == len(split) == len(split.labels) == 994
    np.testing.assert_array_equal(split.pixels.numpy(), np.where(split.labels == 0, 50, 200))  # labels stay with images


@pytest.mark.parametrize("count, broken", [(999, 1), (1001, 2)])
def test_more_broken_images_are_an_error(tmp_path, config, count, broken):
    with pytest.raises(UserError, match=f"{broken} of {count} images cannot be read"):
        prepare(entry(many_images(tmp_path / "pets", count, broken)), config)


@pytest.mark.parametrize(
    "facts, labels, words",
    [
        ({"classes": 3}, [0, 1, 2, 3], "labels must lie in 0..2; found 0 to 3"),
        ({"classes": 3}, [[0, 1], [1, 0], [0, 0], [1, 1]], "in 3 columns"),
        ({}, [[0, 1], [1, 0], [0, 2], [1, 1]], "zeros and ones"),
        ({}, [[0, 0]] * 4, "no image has a label"),
    ],
)
def test_impossible_labels_are_an_error_before_any_training(tmp_path, config, facts, labels, words):
    for split in SPLITS:
        write_idx(tmp_path / "x", split, noise(4, 2, 2), np.zeros(4) if np.ndim(labels) == 1 else np.ones((4, 2)))
    write_idx(tmp_path / "x", "dev_test", noise(4, 2, 2), labels)
    if "columns" in words:
        facts = {"classes": 3}
    with pytest.raises(UserError, match=words):
        prepare(entry(tmp_path / "x", **facts), config)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_class_that_only_test_has_is_an_error(tmp_path, config):
    for split in SPLITS:
        write_idx(tmp_path / "x", split, noise(4, 2, 2), [0, 1, 0, 2 if split == "test" else 1])
    with pytest.raises(UserError, match="test: labels must lie in 0..1"):
        prepare(entry(tmp_path / "x"), config)


def test_an_empty_split_is_an_error(tmp_path, config):
    for split in SPLITS:
        count = 0 if split == "dev" else 4
        write_idx(tmp_path / "x", split, np.zeros((count, 2, 2)), np.arange(count) % 2)
    with pytest.raises(UserError, match="dev: the split is empty"):
        prepare(entry(tmp_path / "x"), config)


def test_copies_in_a_later_split_are_told_and_stay(tmp_path, config, capsys):
    source = class_folders(tmp_path / "pets", [noise(2, 3), noise(4, 4, 3), noise(5, 5)], others=2)
    same, wide = noise(4, 4, 3), noise(2, 3).reshape(3, 2)  # of the same bytes, but another picture
    for split, name, pixels in (("dev", "1.png", np.repeat(noise(2, 3)[..., None], 3, axis=2)), ("test", "1.png", same),
                                ("test", "2.png", same), ("test", "3.png", wide), ("test", "4.png", np.full((2, 2), 1))):
        (source / split / "c1" / name).write_bytes(png(pixels))
    folder = prepare(entry(source), config)
    meta = Split(folder, "train", torch.device("cpu")).meta
    assert meta["copies"] == {"dev": 1, "test": 3} and meta["skipped"] == 0  # the fourth is dev's own picture
    assert meta["sizes"] == {"train": 3, "dev": 5, "dev_test": 4, "test": 8}
    rows = [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]
    assert [(row["split"], *row["image"].split("/")[-2:]) for row in rows] == [
        ("dev", "c1", "1.png"), ("test", "c1", "1.png"), ("test", "c1", "2.png"), ("test", "c1", "4.png")]
    told = capsys.readouterr().err
    assert "1 of 5 images of dev are in an earlier split, too; 3 of 8 images of test" in told and "report.jsonl" in told
    prepare(entry(source), config)
    assert not capsys.readouterr().err


def test_copies_among_arrays_are_told_by_their_number(tmp_path, config):
    for number, split in enumerate(SPLITS):
        shades = [1 if split == "test" and place == 3 else 10 * number + place for place in range(4)]
        write_idx(tmp_path / "x", split, np.multiply.outer(shades, np.ones((2, 2))), [0, 1, 0, 1])
    (row,) = (prepare(entry(tmp_path / "x"), config) / "report.jsonl").read_text().splitlines()
    assert json.loads(row)["split"] == "test" and json.loads(row)["image"] == "number 3"


def test_the_cache_and_a_part_of_it_know_the_names_of_their_classes(tmp_path, config):
    names = ["1", "2", "10", "b"]
    for split in SPLITS:
        for number, name in enumerate(names):
            (tmp_path / "x" / split / name).mkdir(parents=True)
            (tmp_path / "x" / split / name / "x.png").write_bytes(png([[number]]))
    folder = prepare(entry(tmp_path / "x"), config)
    split = Split(folder, "test", torch.device("cpu"))
    assert [split.meta["classes"][label] for label in split.labels] == [names[pixel] for pixel in split.pixels] == names
    part = Split(folder, "test", torch.device("cpu"), (1, 2))
    assert [part.meta["classes"][label] for label in part.labels] == [names[pixel] for pixel in part.pixels] == ["10", "b"]


# ---- crop boxes


def boxes_of(height: int, width: int, count: int = 20_000, area=FULL_RANGE, seed: int = 0) -> np.ndarray:
    sizes = torch.full((count,), height), torch.full((count,), width)
    return random_boxes(*sizes, area, torch.rand(len(sizes[0]), TRIES, 4, generator=seeded(seed))).numpy()


def law(height: int, width: int, rng: random.Random, area=FULL_RANGE) -> tuple[int, int, int, int]:
    """One box by TensorFlow's sample_distorted_bounding_box for the whole image, written as a loop."""
    for _ in range(10):
        aspect = rng.uniform(3 / 4, 4 / 3)
        lowest = round(math.sqrt(area[0] * height * width / aspect))
        highest = round(math.sqrt(area[1] * height * width / aspect))
        while highest > height or round(highest * aspect) > width:
            highest -= 1
        h = rng.randint(min(lowest, highest), highest)
        w = round(h * aspect)
        if h * w < area[0] * height * width:
            h += 1
            w = round(h * aspect)
        if h * w > area[1] * height * width:
            h -= 1
            w = round(h * aspect)
        if not area[0] * height * width <= h * w <= area[1] * height * width or h > height or w > width or h < 1 or w < 1:
            continue
        y = rng.randrange(height - h) if h < height else 0
        x = rng.randrange(width - w) if w < width else 0
        if h * w < 0.1 * height * width:
            continue
        if (h, w) != (height, width):
            return y, x, h, w
        break
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov and Smirnov's: the largest difference of two distribution functions."""
    points = np.union1d(a, b)
    a, b = (np.searchsorted(np.sort(sample), points, "right") / len(sample) for sample in (a, b))
    return np.abs(a - b).max()


@pytest.mark.parametrize("height, width", [(28, 28), (64, 64), (375, 500), (500, 375), (9, 31), (5, 5), (3, 3), (8, 2)])
def test_boxes_follow_the_law_of_the_reference(height, width):
    rng = random.Random(1)
    expected = np.array([law(height, width, rng) for _ in range(20_000)])
    found = boxes_of(height, width)
    # 0.0195 is passed by chance once in a thousand samples of this size.
    for derive in (*(lambda boxes, i=i: boxes[:, i] for i in range(4)),
                   lambda boxes: boxes[:, 2] * boxes[:, 3], lambda boxes: boxes[:, 3] / boxes[:, 2],
                   lambda boxes: boxes[:, 0] / np.maximum(height - boxes[:, 2], 1), lambda boxes: boxes @ [1000, 1, 100, 10]):
        assert distance(derive(found), derive(expected)) < 0.0195


def test_boxes_follow_the_law_within_another_range():
    rng = random.Random(1)
    expected = np.array([law(32, 40, rng, (0.5, 0.8)) for _ in range(20_000)])
    found = boxes_of(32, 40, area=(0.5, 0.8))
    assert all(distance(found[:, i], expected[:, i]) < 0.0195 for i in range(4))
    shares = found[:, 2] * found[:, 3] / (32 * 40)
    assert shares.min() >= 0.5 and shares.max() <= 0.8


@pytest.mark.parametrize("height, width, mean", [(28, 28, 0.43), (32, 32, 0.43), (64, 64, 0.43), (375, 500, 0.39),
                                                 (3000, 2000, 0.34)])
def test_area_of_the_boxes(height, width, mean):
    boxes = boxes_of(height, width)
    shares = boxes[:, 2] * boxes[:, 3] / (height * width)
    assert shares.mean() == pytest.approx(mean, abs=0.012)
    assert 0.1 <= shares.min() < 0.11


@pytest.mark.parametrize("height, width", [(28, 28), (375, 500), (31, 7), (2, 3), (2000, 3000)])
def test_boxes_lie_inside_the_image_and_keep_their_shape(height, width):
    y, x, h, w = boxes_of(height, width).T
    assert (y >= 0).all() and (x >= 0).all() and (y + h <= height).all() and (x + w <= width).all()
    assert (h >= 1).all() and (w >= 1).all()
    assert ((w - 0.5) / h <= 4 / 3 + 1e-6).all() and ((w + 0.5) / h >= 3 / 4 - 1e-6).all()


def test_the_last_row_and_column_are_only_reached_by_boxes_that_span_the_image():
    boxes = boxes_of(28, 28)
    for begin, length in ((0, 2), (1, 3)):
        shorter = boxes[boxes[:, length] < 28]
        assert (shorter[:, begin] + shorter[:, length]).max() == 27 and shorter[:, begin].min() == 0


def test_the_height_is_uniform_given_the_shape():
    y, x, h, w = boxes_of(2000, 3000).T
    aspect = w / h
    lowest, highest = np.sqrt(0.1 * 6e6 / aspect), np.minimum(np.minimum(2000, 3000 / aspect), np.sqrt(6e6 / aspect))
    shares = (h - lowest) / (highest - lowest)
    uniform = (np.arange(100_000) + 0.5) / 100_000
    assert distance(shares, uniform) < 0.0145
    assert distance((aspect - 3 / 4) / (4 / 3 - 3 / 4), uniform) < 0.05  # nearly uniform: small shapes are rejected more often


def test_boxes_of_a_batch_differ():
    boxes = boxes_of(64, 64, 64)
    assert len(np.unique(boxes, axis=0)) > 60 and len(np.unique(boxes[:, 2:], axis=0)) > 55
    assert not (boxes == boxes_of(64, 64, 64, seed=1)).all(axis=1).any()
    assert (boxes == boxes_of(64, 64, 64)).all()


def test_each_image_of_a_mixed_batch_gets_a_box_of_its_own_size():
    height, width = torch.tensor([10, 300, 1, 50] * 500), torch.tensor([12, 200, 1, 5] * 500)
    boxes = random_boxes(height, width, FULL_RANGE, torch.rand(len(height), TRIES, 4, generator=seeded()))
    assert (boxes[:, 0] + boxes[:, 2] <= height).all() and (boxes[:, 1] + boxes[:, 3] <= width).all()
    assert boxes[1::4, 2].float().mean() > 100 and (boxes[2::4] == torch.tensor([0, 0, 1, 1])).all()


@pytest.mark.parametrize("height, width, square", [(30, 40, [0, 5, 30, 30]), (40, 30, [5, 0, 30, 30]), (8, 8, [0, 0, 8, 8]),
                                                   (5, 8, [0, 1, 5, 5]), (1, 300, [0, 149, 1, 1]), (301, 1, [150, 0, 1, 1])])
def test_the_whole_image_and_failure_give_the_central_square(height, width, square):
    assert (boxes_of(height, width, 200, (1.0, 1.0)) == square).all()
    assert data.central_boxes(torch.tensor([height]), torch.tensor([width]))[0].tolist() == square


# ---- pixels of the crops


def packed(images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (H, W, C) end to end, with their index."""
    offsets = np.cumsum([0] + [image.size for image in images[:-1]])
    index = [(offset, *image.shape) for offset, image in zip(offsets, images, strict=True)]
    return torch.from_numpy(np.concatenate([image.ravel() for image in images])), torch.tensor(index)


def assert_resized(found: torch.Tensor, image: np.ndarray, box, size: int) -> float:
    """`found` is the crop resized by torch and cut to whole numbers; returns the share of values that rounding moved by one."""
    y, x, h, w = (int(value) for value in box)
    crop = torch.from_numpy(image[y : y + h, x : x + w]).permute(2, 0, 1)[None].double()
    exact = F.interpolate(crop, (size, size), mode="bilinear", align_corners=False, antialias=False)[0].expand(3, -1, -1)
    whole = (exact + 1e-9).floor()
    assert torch.equal(found[(exact - exact.round()).abs() > 0.01].double(), whole[(exact - exact.round()).abs() > 0.01])
    assert (found - whole).abs().max() <= 1
    return (found != whole).float().mean()


def mixed_batch() -> tuple[list[np.ndarray], torch.Tensor]:
    rng = np.random.default_rng(0)
    images, boxes = [], []
    for number in range(60):
        height, width = (1, 40) if number == 0 else (40, 1) if number == 1 else rng.integers(1, 90, 2)
        images.append(noise(height, width, 1 if number % 3 == 0 else 3, seed=number))
        h, w = rng.integers(1, height + 1), rng.integers(1, width + 1)
        boxes.append((rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w))
    return images, torch.tensor(np.array(boxes))


@pytest.mark.parametrize("size, most", [(1, 0.002), (7, 0.02), (32, 0.002), (64, 0.002)])
def test_crops_are_those_of_interpolate_cut_to_whole_numbers(size, most):
    images, boxes = mixed_batch()
    found = crop_and_resize(*packed(images), boxes, size, 3)
    assert found.shape == (60, 3, size, size) and found.dtype == torch.uint8
    off = [assert_resized(*case, size) for case in zip(found, images, boxes, strict=True)]
    assert np.mean(off) < most  # the middle of 7 pixels often lies on a whole number, where single precision may miss it


def test_an_image_at_its_own_size_is_untouched():
    image = noise(16, 16, 3)
    found = crop_and_resize(*packed([image]), torch.tensor([[0, 0, 16, 16]]), 16, 3)
    np.testing.assert_array_equal(found[0].permute(1, 2, 0), image)


def test_values_are_cut_off_not_rounded():
    image = np.array([[0, 3]], np.uint8)[..., None]  # 0, 0.75, 2.25, 3
    assert crop_and_resize(*packed([image]), torch.tensor([[0, 0, 1, 2]]), 4, 1)[0, 0, 0].tolist() == [0, 0, 2, 3]


def test_shrinking_a_crop_does_not_smooth():
    image = np.zeros((1, 9, 1), np.uint8)
    image[0, 4] = 255
    assert crop_and_resize(*packed([image]), torch.tensor([[0, 0, 1, 9]]), 3, 1)[0, 0, 0].tolist() == [0, 255, 0]


def test_a_mirrored_crop_is_the_flipped_one():
    images, boxes = mixed_batch()
    mirror = torch.arange(60) % 2 == 0
    plain, mirrored = (crop_and_resize(*packed(images), boxes, 20, 3, flags) for flags in (None, mirror))
    torch.testing.assert_close(mirrored[mirror], plain[mirror].flip(3), rtol=0, atol=0)
    torch.testing.assert_close(mirrored[~mirror], plain[~mirror], rtol=0, atol=0)


def test_a_grey_image_gives_its_one_channel_to_each_of_three():
    grey, colour = noise(5, 6, 1), noise(5, 6, 3)
    box = torch.tensor([[1, 1, 4, 4]])
    alone = crop_and_resize(*packed([grey]), box, 8, 1)
    both = crop_and_resize(*packed([grey, colour]), box.repeat(2, 1), 8, 3)
    assert alone.shape == (1, 1, 8, 8) and both.shape == (2, 3, 8, 8)
    assert (both[0] == alone[0]).all() and not (both[1, 0] == both[1, 1]).all()


@pytest.mark.parametrize("channels, depth", [((1, 1), 1), ((1, 3), 3), ((3, 3), 3)])
def test_squares_of_a_split_have_one_channel_only_if_all_its_images_are_grey(tmp_path, channels, depth):
    split = split_of(tmp_path, [noise(5, 6, number, seed=number).squeeze() for number in channels])
    assert split.squares(4).shape == (2, depth, 4, 4)
    for images in (next(split.batches(4, 2)), split.crops(torch.tensor([0, 1]), DataConfig(), 4, draw(2, seeded()))):
        assert images.shape == (2, 3, 4, 4)
        assert [bool((image[0] == image[2]).all()) for image in images] == [number == 1 for number in channels]


def test_input_runs_from_minus_one_to_one():
    values = torch.arange(256, dtype=torch.uint8)
    found = to_input(values.reshape(256, 1, 1, 1))
    assert found.shape == (256, 3, 1, 1) and found.dtype == torch.float32
    np.testing.assert_allclose(found[:, 1, 0, 0], [2 * value / 255 - 1 for value in range(256)], atol=1e-7)
    assert found.min() == -1 and found.max() == 1
    colour = torch.from_numpy(noise(2, 3, 4, 4))
    torch.testing.assert_close(to_input(colour), 2 * (colour / 255) - 1)


# ---- a split


def test_training_crops_of_odd_images_are_finite(tmp_path):
    sizes = [(1, 1), (1, 300), (300, 1), (3, 3), (2, 2), (1, 2), (40, 3)]
    images = [noise(*size, 3, seed=number) for number, size in enumerate(sizes)]
    split = split_of(tmp_path, images)
    picks = torch.arange(len(sizes)).repeat(50)
    for size in (8, 64):
        crops = split.crops(picks, DataConfig(), size, draw(len(picks), seeded(1)))
        assert crops.shape == (len(picks), 3, size, size)
        assert torch.isfinite(crops).all() and crops.min() >= -1 and crops.max() <= 1
    # Of a line no box has the right shape: its central pixel fills the crop.
    for number, pixel in ((0, images[0][0, 0]), (1, images[1][0, 149]), (2, images[2][149, 0])):
        expected = torch.from_numpy(pixel).float()[:, None, None] * 2 / 255 - 1
        torch.testing.assert_close(crops[picks == number], expected.expand(50, 3, 64, 64))


@pytest.mark.parametrize("flip", [True, False])
def test_half_of_the_crops_are_mirrored_or_none(tmp_path, flip):
    image = np.zeros((8, 8))
    image[:, 4:] = 255
    split = split_of(tmp_path, [image, image])
    config = DataConfig(flip=flip, crop_area=(1.0, 1.0))
    crops = split.crops(torch.zeros(2000, dtype=torch.long), config, 8, draw(2000, seeded()))
    mirrored = crops[:, 0, 0, 0] > crops[:, 0, 0, 7]
    assert (crops[mirrored].flip(3) == crops[~mirrored][0]).all()
    assert mirrored.float().mean() == pytest.approx(0.5 if flip else 0.0, abs=0.04)


def test_mirroring_and_position_are_drawn_separately(tmp_path):
    ramp = np.tile(np.arange(0, 240, 8), (30, 1))
    split = split_of(tmp_path, [ramp, ramp])
    crops = split.crops(torch.zeros(4000, dtype=torch.long), DataConfig(), 8, draw(4000, seeded()))
    mirrored = crops[:, 0, 0, 0] > crops[:, 0, 0, 7]
    centre, width = crops.mean(dim=(1, 2, 3)), (crops[:, 0, 0, 0] - crops[:, 0, 0, 7]).abs()
    for value in (centre, width):
        assert abs(np.corrcoef(mirrored.float(), value)[0, 1]) < 0.06


def test_evaluation_sees_central_squares(tmp_path):
    images = [noise(5, 8, 3), noise(9, 4, 3, seed=1), noise(6, 6, seed=2), noise(1, 7, 3, seed=3)]
    split = split_of(tmp_path, images)
    expected = [images[0][:, 1:6], images[1][2:6], np.repeat(images[2][..., None], 3, 2), images[3][:, 3:4]]
    squares = split.squares(10)
    for found, image in zip(squares, expected, strict=True):
        assert_resized(found, image, (0, 0, *image.shape[:2]), 10)
    torch.testing.assert_close(split.squares(10, torch.tensor([2, 0])), squares[[2, 0]], rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_evaluation_batches_hold_every_image_once_in_order(tmp_path, batch):
    split = split_of(tmp_path, [np.full((2, 2), number) for number in range(7)])
    batches = list(split.batches(4, batch))
    assert [len(part) for part in batches] == [min(batch, 7 - begin) for begin in range(0, 7, batch)]
    assert ((torch.cat(batches)[:, 0, 0, 0] + 1) * 255 / 2).round().tolist() == list(range(7))
    assert torch.cat(list(split.batches(4, batch, torch.tensor([5, 1])))).shape == (2, 3, 4, 4)


META = torch.device("meta")  # stands for a GPU: tensors can be put there


@pytest.mark.parametrize("free, where", [(2.0, "meta"), (1.99, "cpu"), (100, "meta"), (0, "cpu")])
def test_pixels_go_to_the_device_if_they_take_at_most_half_of_what_is_free(tmp_path, monkeypatch, capsys, free, where):
    split = split_of(tmp_path, [noise(5, 6, 3), noise(7, 8)])
    monkeypatch.setattr(data, "free_bytes", lambda device: free * (90 + 56))
    found = Split(split.folder, "train", META)
    assert found.pixels.device.type == found.index.device.type == where
    assert not capsys.readouterr().err


def test_pixels_that_do_not_fit_on_a_gpu_are_told_once_and_stay_in_the_file(tmp_path, monkeypatch, capsys):
    folder = split_of(tmp_path, [noise(5, 6, 3), noise(7, 8)]).folder
    monkeypatch.setattr(data, "free_bytes", lambda device: 200)
    data.say_once.cache_clear()
    for name in ("train", "train"):
        assert Split(folder, name, torch.device("cuda")).pixels.device.type == "cpu"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and f"{folder.name}, train: 0.0 GB" in told[0] and "on the CPU from the mapped file" in told[0]


def test_memory_that_pytorch_holds_in_reserve_is_free(monkeypatch):
    for name, value in {"mem_get_info": (1000, 9000), "memory_reserved": 700, "memory_allocated": 200}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert data.free_bytes(torch.device("cuda")) == 1500 and data.free_bytes(torch.device("cpu")) == 0


# ---- endless batches


def numbered(root: Path, count: int) -> Split:
    """Images of one colour: image i has label i and value 9 i."""
    return split_of(root, [np.full((4, 4), 9 * number) for number in range(count)])


def endless(split: Split, batch: int, key=(0, 0, 0)) -> EndlessStream:
    return EndlessStream(split, batch, DataConfig(), 8, key)


@pytest.mark.parametrize("batch", [1, 5, 22, 23, 24, 60])
def test_every_epoch_is_a_permutation_and_every_batch_is_full(tmp_path, batch):
    stream = endless(numbered(tmp_path, 23), batch)
    steps = [stream.picks(step) for step in range(23 * 4 // batch + 1)]
    assert {len(picks) for picks in steps} == {batch}
    epochs = torch.cat(steps)[: len(steps) * batch // 23 * 23].reshape(-1, 23)
    assert len(epochs) >= 4 and (epochs.sort(dim=1).values == torch.arange(23)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


def test_a_split_smaller_than_a_batch_repeats(tmp_path):
    stream = endless(numbered(tmp_path, 3), 16)
    for step in range(5):
        images, labels = stream(step)
        assert images.shape == (16, 3, 8, 8) and sorted(labels.bincount(minlength=3).tolist()) == [5, 5, 6]


def test_labels_belong_to_their_images(tmp_path):
    images, labels = endless(numbered(tmp_path, 20), 50)(3)
    values = ((images + 1) * 255 / 2).round()
    assert (values == 9 * labels[:, None, None, None]).all()


def test_several_labels_an_image_keep_their_columns(tmp_path, config):
    labels = np.eye(4, dtype=np.uint8)[np.arange(12) % 4]
    for split in SPLITS:
        write_idx(tmp_path / "x", split, np.arange(12)[:, None, None] * np.ones((12, 3, 3)), labels)
    split = Split(prepare(entry(tmp_path / "x"), config), "train", torch.device("cpu"))
    images, found = endless(split, 7)(2)
    numbers = ((images[:, 0, 0, 0] + 1) * 255 / 2).round().long()
    assert found.shape == (7, 4) and (found == torch.from_numpy(labels)[numbers]).all()


def test_a_batch_depends_on_key_and_step_alone(tmp_path):
    split = split_of(tmp_path, [noise(9, 9, 3, seed=number) for number in range(11)])
    fresh = {step: endless(split, 4)(step) for step in (0, 3, 7)}
    used = endless(split, 4)
    for step in (7, 0, 5, 3, 7, 100, 0, 3):
        torch.manual_seed(step)
        images, labels = used(step)
        if step in fresh:
            torch.testing.assert_close(images, fresh[step][0], rtol=0, atol=0)
            assert (labels == fresh[step][1]).all()


@pytest.mark.parametrize("batch", [1, 7, 32, 200])
def test_batches_made_together_are_those_made_alone(tmp_path, monkeypatch, batch):
    images = [noise(9, 6 + number, 3, seed=number) for number in range(11)]
    split = split_of(tmp_path, [image if number % 2 else image[..., 0] for number, image in enumerate(images)])
    steps = [0, 1, 2, 129, 3, 4, 18, 17]
    together = list(map(endless(split, batch), steps))
    monkeypatch.setattr("nevis_lite.data.TOGETHER", 1)
    for (images, labels), (expected, expected_labels) in zip(together, map(endless(split, batch), steps), strict=True):
        torch.testing.assert_close(images, expected, rtol=0, atol=0)
        assert torch.equal(labels, expected_labels) and images.is_contiguous(memory_format=torch.channels_last)


def test_steps_trials_tasks_and_seeds_give_different_batches(tmp_path):
    split = split_of(tmp_path, [noise(20, 20, 3)] * 2)
    keys = list(itertools.product(range(2), repeat=3))
    batches = [endless(split, 4, key)(step)[0] for key in keys for step in range(3)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(batches, 2))
    orders = {tuple(endless(numbered(tmp_path / "n", 12), 12, key).picks(0).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_a_generator_is_a_function_of_its_purpose_and_key():
    def draw(purpose, *key):
        return torch.rand(2, generator=generator("cpu", purpose, *key)).tolist()

    torch.manual_seed(0)
    first = draw("a", 1, 2, 3)
    torch.manual_seed(1)
    assert draw("a", 1, 2, 3) == first
    others = [("b", 1, 2, 3), ("a", 1, 2, 4), ("a", 2, 1, 3), ("a", 3, 2, 1), ("a", 1, 2), ("a", 0, 1, 2, 3)]
    assert len({tuple(draw(*key)) for key in others} | {tuple(first)}) == 7
