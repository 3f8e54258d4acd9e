"""Every data set of the catalogue, read from a small copy of what its publishers put online."""

import importlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from published import number_of

from nevis_lite import config, datasets, fetch, setup, stream, train
from nevis_lite.splits import SPLITS

MODULES = [importlib.import_module(path.stem) for path in sorted(Path(__file__).parent.glob("published_*.py"))]
LAYOUTS = {key: layout for module in MODULES for key, layout in module.LAYOUTS.items()}
MODES = {key: mode for module in MODULES for key, mode in getattr(module, "MODES", {}).items()}  # of `number_of`
SHARES = {("train",): {"train": 0.56, "dev": 0.12, "dev_test": 0.12, "test": 0.2},
          ("test", "train"): {"train": 0.7, "dev": 0.15, "dev_test": 0.15},
          ("dev_test", "test", "train"): {"train": 0.8, "dev": 0.2}}


# Number of classes as the publishers and the benchmark state it, and the parts of an official train split in stored order.
CLASSES = {key: classes for classes, keys in {
    2: "caltech_categories magellan_venus_volcanoes patch_camelyon pneumonia_chest_xray synthetic_covid19_xray "
        "tubercolosis uiuc_cars ",
    3: "ddsm ig02 melanoma",
    4: "covid_19_xray pascal_voc2005",
    5: "smallnorb tid2008 tid2013",
    7: "butterflies landsat pacs",
    8: "path_mnist scenes8",
    10: "cifar10 fashion_mnist flickr_material_database kth_tips mall mnist mnist_m mnist_rotation not_mnist "
        "office_caltech_10 pascal_voc2006 semeion shanghai_tech stl10 svhn trancos usps ",
    11: "kth_tips_2a kth_tips_2b voc_actions",
    13: "cmu_amp_expression",
    15: "biwi nih_chest_xray scenes15",
    16: "caltech_camera_traps",
    17: "oxford_flowers_17",
    19: "vistex",
    20: "animal coil20 umist voc2007 voc2012",
    24: "ppmi",
    25: "uiuc_texture umd",
    27: "wiki_paintings_style",
    28: "extended_yaleb",
    37: "oxford_iiit_pet",
    40: "celeb_a",
    41: "olivetti_face",
    43: "german_tsr",
    47: "dtd emnist_balanced",
    50: "cvc_muscima",
    60: "interact",
    62: "belgium_tsc chars74k",
    67: "mit_scenes",
    70: "fgvc_aircraft_family mpeg7",
    85: "awa2",
    90: "coco_single_label",
    91: "aberdeen",
    100: "cifar100 coil100",
    101: "food101 food101n silhouettes_28",
    102: "caltech101 oxford_flowers102 sun_attributes",
    111: "brodatz",
    120: "stanford_dogs",
    196: "stanford_cars",
    200: "caltech_birds2011 tiny_imagenet",
    250: "sketch",
    257: "caltech256",
    276: "iaprtc12",
    345: "domainnet",
    352: "animal_web",
    397: "sun397",
    423: "lfw lfwa",
    1000: "aloi imagenet2012",
    3926: "casia_hwdb",
}.items() for key in keys.split()}
THREE_PARTS = "mnist cifar10 cifar100 svhn emnist_balanced fashion_mnist stl10".split()  # .70 / .15 / .15
TWO_PARTS = "celeb_a patch_camelyon".split()  # .80 / .20


def drawn(rows: list, shares: dict) -> dict:
    """The reference's random assignment, written again: example i goes where draw i of RandomState(0) has its one."""
    random, names = np.random.RandomState(0), sorted(shares)
    parts = {name: [] for name in names}
    for row in rows:
        parts[names[int(np.argmax(random.multinomial(1, [shares[name] for name in names])))]].append(row)
    return parts


def expected(key: str, published: dict) -> dict:
    """The four splits, from what the layout says of the published ones."""
    rows = published["train"]
    if set(published) == set(SPLITS):
        return published
    if key in THREE_PARTS:
        first, second = int(0.7 * len(rows)), int(0.15 * len(rows))
        return {**published, "train": rows[:first], "dev": rows[first:first + second], "dev_test": rows[first + second:]}
    if key in TWO_PARTS:
        return {**published, "train": rows[:int(0.8 * len(rows))], "dev": rows[int(0.8 * len(rows)):]}
    return {**published, **drawn(rows, SHARES[tuple(sorted(published))])}


def found(examples, mode: str) -> list:
    rows = []
    for image, label in zip(examples.images, examples.labels, strict=True):
        if isinstance(image, str):
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
    wanted = expected(key, published)
    assert set(splits) == set(wanted) == set(SPLITS)
    for name in SPLITS:
        assert found(splits[name], MODES.get(key, "RGB")) == wanted[name], name
    assert datasets.num_classes(dataset, splits) == CLASSES[key]


def publish(root: Path):
    """Make `root` a data folder with a small copy of every data set."""
    catalogue = datasets.catalogue(root)
    for key, layout in LAYOUTS.items():
        (root / key).mkdir()
        layout(root / key)
        for file in fetch.absent(catalogue[key]):  # Brodatz's other textures, UIUC's other archives: any will do
            shutil.copy(root / key / catalogue[key].files[0]["name"], root / key / file["name"])


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    root = tmp_path_factory.mktemp("copies")
    publish(root)
    return root


def run(copies, out, **changes):
    settings = {"model": {"name": "resnet8", "image_size": 8}, "search": {"trials": 1}, "fit": {"steps": 1, "max_batch": 2},
                "data": {"dir": str(copies)}, "device": "cpu", "threads": 1}
    return train.run(settings | changes, out)


def test_a_run_over_all_106_tasks_ends_with_a_row_for_each(copies, tmp_path):
    results = run(copies, tmp_path / "run", stream="full", baseline="indep")
    rows = results["tasks"]
    assert len(rows) == 106 and results["partial"] == [] and sum(row["meta"] == "test" for row in rows) == 27
    assert all(row["error"] is not None and 0 <= row["error"] <= 1 for row in rows)
    assert sum(row["occurrence"] == 2 for row in rows) == 9


def test_opening_a_prepared_stream_reads_no_pixels(copies):
    settings = config.from_dict({"stream": "full", "model": {"name": "resnet8"}, "data": {"dir": str(copies)}, "device": "cpu"})
    prepared = setup.set_up(settings, stream.load("full", copies))
    hidden = [path.rename(path.with_suffix(".hidden")) for path in (copies / "cache").rglob("*.pixels")]
    opened = setup.set_up(settings, stream.load("full", copies))
    for path in hidden:
        path.rename(path.with_suffix(".pixels"))
    assert len(hidden) == 4 * len(LAYOUTS)
    assert opened.folders == prepared.folders and opened.tasks == prepared.tasks
    assert all(opened.size(task.index, name) > 0 for task in opened.tasks for name in SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["indep", "ft-prev", "ft-s", "ft-d", "mt", "pt", "pt-ft", "bhpo"])
def test_every_baseline_finishes_short(copies, tmp_path, baseline):
    more = {}
    if baseline == "ft-s":
        run(copies, tmp_path / "indep", stream="short", baseline="indep")
        more = {"select": {"indep_run": str(tmp_path / "indep")}}
    elif baseline == "mt":
        more = {"baseline": {"name": "mt", "auxiliary": 2}, "search": {"trials": 2, "auxiliary_weight": [0, 1]}}
    elif baseline.startswith("pt"):
        run(copies, tmp_path / "pretrained", stream="imagenet_only", baseline="indep")
        more = {"model": {"name": "resnet8", "image_size": 8, "weights": str(tmp_path / "pretrained/predictors/000.pt")}}
    elif baseline == "bhpo":
        more = {"search": {"trials": 4, "schedule": ["cosine", "piecewise"], "batch": [2, 4], "model": ["resnet8", "vgg"],
                           "crop": [True, False], "flip": [True, False]}}
    rows = run(copies, tmp_path / "run", **{"stream": "short", "baseline": baseline} | more)["tasks"]
    assert len(rows) == 29 and all(0 <= row["error"] <= 1 for row in rows)
    assert [len(row["auxiliaries"]) for row in rows] == [min(2, row["index"]) if baseline == "mt" else 0 for row in rows]
    if baseline == "bhpo":
        assert {row["hyperparameters"]["model"] for row in rows} == {"resnet8", "vgg"}
