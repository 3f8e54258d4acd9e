"""The page on the published data sets, and the facts of the catalogue that it shows."""

import re
import runpy
from pathlib import Path

import pytest

from nevis_lite import datasets, stream

PAGE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "tools" / "make_data_table.py"))
CATALOGUE = datasets.catalogue(Path("nowhere"))
PUBLISHED = [key for key in CATALOGUE if not key.startswith("demo_")]

TOTALS = {  # of all splits, as papers and publishers' pages have them
    "landsat": 6435, "coil20": 1440, "coil100": 7200, "mnist": 70_000, "caltech101": 9144, "scenes8": 2688, "scenes15": 4485,
    "voc2007": 9963, "caltech256": 30_607, "imagenet2012": 1_281_167 + 50_000, "oxford_flowers_17": 1360,
    "oxford_flowers102": 8189, "german_tsr": 51_839, "kth_tips": 810, "kth_tips_2b": 4752, "voc2012": 11_540,
    "smallnorb": 48_600, "cifar10": 60_000, "caltech_birds2011": 11_788, "stanford_cars": 16_185,
    "fgvc_aircraft_family": 10_000, "dtd": 5640, "oxford_iiit_pet": 7349, "stanford_dogs": 20_580, "svhn": 99_289,
    "celeb_a": 202_599, "sun_attributes": 14_340, "cifar100": 60_000, "tid2008": 1700, "tid2013": 3000, "usps": 9298,
    "semeion": 1593, "office_caltech_10": 2533, "emnist_balanced": 131_600, "melanoma": 2750, "trancos": 1244, "mall": 2000,
    "fashion_mnist": 70_000, "tiny_imagenet": 110_000, "stl10": 13_000, "food101": 101_000, "mnist_rotation": 70_000,
    "awa2": 37_322, "shanghai_tech": 1198, "domainnet": 586_575, "pneumonia_chest_xray": 5856, "path_mnist": 5000,
    "nih_chest_xray": 112_120, "tubercolosis": 4200, "patch_camelyon": 327_680}
TEST = {  # the official test sets, or validation sets where those of the test set have no labels
    "landsat": 2000, "mnist": 10_000, "voc2007": 4952, "imagenet2012": 50_000, "oxford_flowers102": 6149, "german_tsr": 12_630,
    "smallnorb": 24_300, "cifar10": 10_000, "cifar100": 10_000, "caltech_birds2011": 5794, "stanford_cars": 8041,
    "fgvc_aircraft_family": 3333, "dtd": 1880, "oxford_iiit_pet": 3669, "stanford_dogs": 8580, "svhn": 26_032,
    "celeb_a": 19_962, "usps": 2007, "emnist_balanced": 18_800, "melanoma": 600, "fashion_mnist": 10_000,
    "tiny_imagenet": 10_000, "stl10": 8000, "food101": 25_250, "nih_chest_xray": 25_596, "patch_camelyon": 32_768}


def test_the_page_is_the_one_that_the_catalogue_gives():
    assert PAGE["PAGE"].read_text(encoding="utf-8") == PAGE["page"](), "run PYTHONPATH=. python tools/make_data_table.py"


def test_the_page_has_a_row_for_each_data_set_of_full():
    rows = re.findall(r"^\| \d{4}.* \|$", PAGE["page"](), re.MULTILINE)
    keys = [re.search(r"\(`(\w+)`\)", row).group(1) for row in rows]
    assert len(keys) == 97 and set(keys) == set(PUBLISHED)
    assert set(keys) == {entry["task"] for entry in stream.named_streams()["full"]}
    assert {row.replace("\\|", "").count("|") for row in rows} == {len(PAGE["COLUMNS"]) + 1}


@pytest.mark.parametrize("key", PUBLISHED)
def test_numbers_of_images(key):
    dataset = CATALOGUE[key]
    images = dataset.images
    assert not images or list(images) == list(datasets.SPLITS) and all(count > 0 for count in images.values())
    assert images or not dataset.images_about
    assert dataset.images_about or not dataset.dedupe  # how many copies there are is only known once they were looked for
    if key in TOTALS:
        assert sum(images.values()) == TOTALS[key] and not dataset.images_about
    if key in TEST:
        assert images["test"] == TEST[key]


def test_the_parts_of_train():
    """By hand from the rules: shares of train are cut down to whole images, and the last one takes the rest."""
    for key, parts in {"mnist": (42_000, 9000, 9000), "svhn": (51_279, 10_988, 10_990), "dtd": (1504, 376, 1880),
                       "voc2007": (2000, 501, 2510), "celeb_a": (130_216, 32_554, 19_867),
                       "imagenet2012": (1_153_050, 64_058, 64_059), "brodatz": (555, 111, 111), "lfw": (4293, 423, 423),
                       "mall": (560, 120, 120), "melanoma": (1600, 400, 150), "cmu_amp_expression": (533, 117, 117)}.items():
        assert tuple(CATALOGUE[key].images[name] for name in ("train", "dev", "dev_test")) == parts
