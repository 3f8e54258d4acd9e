"""Every data set of the catalogue, read from a small copy of what its publishers put online."""

import importlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from published import number_of

from nevis_lite import datasets, fetch, train
from nevis_lite.splits import SPLITS

MODULES = [importlib.import_module(path.stem) for path in sorted(Path(__file__).parent.glob("published_*.py"))]
LAYOUTS = {key: layout for module in MODULES for key, layout in module.LAYOUTS.items()}
MODES = {key: mode for module in MODULES for key, mode in getattr(module, "MODES", {}).items()}  # of `number_of`
SHARES = {("train",): {"train": 0.56, "dev": 0.12, "dev_test": 0.12, "test": 0.2},
          ("test", "train"): {"train": 0.7, "dev": 0.15, "dev_test": 0.15},
          ("dev_test", "test", "train"): {"train": 0.8, "dev": 0.2}}


def drawn(rows: list, shares: dict) -> dict:
    """The reference's random assignment, written again: example i goes where draw i of RandomState(0) has its one."""
    random, names = np.random.RandomState(0), sorted(shares)
    parts = {name: [] for name in names}
    for row in rows:
        parts[names[int(np.argmax(random.multinomial(1, [shares[name] for name in names])))]].append(row)
    return parts


def expected(published: dict, rule: dict) -> dict:
    if set(published) == set(SPLITS):
        return published
    if "slices" in rule:
        rows, shares = published["train"], rule["slices"]
        first, second = int(shares["train"] * len(rows)), int(shares["dev"] * len(rows))
        if "dev_test" not in shares:
            second = len(rows) - first
        parts = {"train": rows[:first], "dev": rows[first:first + second], "dev_test": rows[first + second:]}
        return {**published, **{name: parts[name] for name in shares}}
    return {**published, **drawn(published["train"], SHARES[tuple(sorted(published))])}


def found(examples, mode: str) -> list:
    rows = []
    for image, label in zip(examples.images, examples.labels, strict=True):
        if isinstance(image, Path):
            pixels = datasets.read_image(image)
        else:
            pixels = image if isinstance(image, np.ndarray) else image.load()
        label = tuple(np.flatnonzero(label).tolist()) if np.ndim(label) else int(label)
        rows.append((number_of(pixels, mode), label))
    return rows


@pytest.mark.parametrize("key", LAYOUTS)
def test_a_small_copy_is_read_right(key, tmp_path):
    folder = tmp_path / key
    folder.mkdir()
    published = LAYOUTS[key](folder)
    dataset = datasets.catalogue(tmp_path)[key]
    splits = datasets.read(dataset)
    wanted = expected(published, dataset.split)
    assert set(splits) == set(wanted) == set(SPLITS)
    for name in SPLITS:
        assert found(splits[name], MODES.get(key, "RGB")) == wanted[name], name
    assert datasets.num_classes(dataset, splits) == dataset.classes


def test_a_run_over_all_106_tasks_ends_with_a_row_for_each(tmp_path):
    catalogue = datasets.catalogue(tmp_path)
    for key, layout in LAYOUTS.items():
        (tmp_path / key).mkdir()
        layout(tmp_path / key)
        for file in fetch.absent(catalogue[key]):  # Brodatz's other textures, UIUC's other archives: any will do
            shutil.copy(tmp_path / key / catalogue[key].files[0]["name"], tmp_path / key / file["name"])
    results = train.run({
        "stream": "full", "baseline": "indep", "model": {"name": "resnet8", "image_size": 8}, "search": {"trials": 1},
        "fit": {"steps": 1, "max_batch": 2}, "data": {"dir": str(tmp_path)}, "device": "cpu"}, tmp_path / "run")
    rows = results["tasks"]
    assert len(rows) == 106 and results["partial"] == [] and sum(row["meta"] == "test" for row in rows) == 27
    assert all(row["error"] is not None and 0 <= row["error"] <= 1 for row in rows)
    assert sum(row["occurrence"] == 2 for row in rows) == 9
