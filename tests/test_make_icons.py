"""The rules by which tools/make_icons.py makes a data set of icons, and that its files are those that are read."""

import hashlib
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nevis_lite.datasets import DataSet, class_names, read

ICONS = SimpleNamespace(**runpy.run_path(str(Path(__file__).resolve().parent.parent / "tools" / "make_icons.py")))


@pytest.mark.parametrize("name, concept", [
    ("home", "home"), ("home-outline", "home"), ("home-2-line", "home"), ("home-24-filled", "home"), ("home-20px", "home"),
    ("home-16x16-duotone-rounded", "home"), ("arrow-left-bold", "arrow-left"), ("4g-plus", "4g-plus"), ("bold", ""), ("24", ""),
])
def test_what_an_icon_shows(name, concept):
    assert ICONS.concept_of(name) == concept


@pytest.mark.parametrize("info, expected", [
    ({"license": {"spdx": "MIT"}}, True), ({"license": {"spdx": "Apache-2.0"}}, True), ({"license": {"spdx": "CC0-1.0"}}, True),
    ({"license": {"spdx": "CC-BY-4.0"}}, True), ({"license": {"spdx": "CC-BY-NC-4.0"}}, False),
    ({"license": {"spdx": "CC-BY-NC-SA-4.0"}}, False), ({"license": {"spdx": "GPL-3.0"}}, False),
    ({"license": {"title": "Free"}}, False), ({}, False), ({"license": {"spdx": "MIT"}, "palette": True}, False),
])
def test_which_sets_are_taken(info, expected):
    assert ICONS.allowed(info) == expected


def package(folder, sets):
    """A package of icon sets, {prefix: (licence, {name: body})}, laid out as @iconify/json is."""
    root = folder / "package"
    (root / "json").mkdir(parents=True)
    collection = {prefix: {"name": prefix.upper(), "author": {"name": "An author"}, "license": {"spdx": licence}}
                  for prefix, (licence, _) in sets.items()}
    (root / "collections.json").write_text(json.dumps(collection))
    for prefix, (_, icons) in sets.items():
        content = {"width": 24, "height": 24, "icons": {name: {"body": body} for name, body in icons.items()}}
        (root / "json" / f"{prefix}.json").write_text(json.dumps(content))
    return {ICONS.ICONIFY: folder}


def square(size):
    return f'<path d="M2 2h{size}v{size}h-{size}z"/>'


SETS = {"a": ("MIT", {"home": square(8), "home-fill": square(9), "star": square(10), "24": square(11)}),
        "b": ("CC0-1.0", {"home": square(8), "home-line": square(12), "star": '<path d="M0 0"/><animate/>'}),
        "c": ("GPL-3.0", {"star": square(13), "star-fill": square(14), "star-line": square(15)})}


def test_the_most_drawn_concepts(tmp_path):
    """Three different homes, of which b's first is a copy; one star, since c's licence and b's animation leave theirs out."""
    concepts, _ = ICONS.read_icons(package(tmp_path, SETS))
    found = ICONS.most_drawn(concepts, 10)
    assert {concept: [f"{prefix}:{name}" for prefix, name, _ in drawings] for concept, drawings in found.items()} == {
        "home": ["a:home", "a:home-fill", "b:home-line"], "star": ["a:star"]}
    assert list(ICONS.most_drawn(concepts, 1)) == ["home"]


def test_the_files_are_those_that_streams_read(tmp_path):
    """Labels beyond 255, names and pixels come back; equal arrays give equal bytes."""
    labels = np.repeat(np.arange(300), 8)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 4, 4), np.uint8)
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        ICONS.write_idx(folder, "train-images", images)
        ICONS.write_idx(folder, "train-labels", labels)
        (folder / "classes.txt").write_text("\n".join(f"concept {label}" for label in range(300)) + "\n")
    assert ICONS.checksums(tmp_path / "one") == ICONS.checksums(tmp_path / "two")
    dataset = DataSet(key="icons", name="icons", folder=tmp_path / "one")
    splits = read(dataset)
    found = sorted((label, image.tobytes()) for part in splits.values()
                   for image, label in zip(part.images, part.labels.tolist(), strict=True))
    assert found == sorted((label, image.tobytes()) for image, label in zip(images, labels.tolist(), strict=True))
    assert class_names(dataset, splits)[299] == "concept 299"


def test_the_whole_way(tmp_path):
    pytest.importorskip("resvg_py")
    out = tmp_path / "icons"
    out.mkdir()
    counts = ICONS.build(out, package(tmp_path / "work", SETS), 10)
    assert counts.tolist() == [3, 1]
    assert (out / "sources.txt").read_text().split() == ["a:home", "a:home-fill", "b:home-line", "a:star"]
    text = (out / "ATTRIBUTION.md").read_text()
    assert "| a | A | An author | MIT | 3 |" in text and "| b |" in text and "| c |" not in text
    digest = hashlib.sha256((out / "classes.txt").read_bytes()).hexdigest()
    assert f"{digest}  classes.txt" in (out / "SHA256SUMS").read_text()
