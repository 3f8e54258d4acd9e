"""What the readers of indexes do beyond the small copies of `test_published.py`."""

import pytest
from published import picture, write
from published_indexes import jpeg, jpegs, mat, structure

from nevis_lite.config import UserError
from nevis_lite.indexes import Crop, count_bins, stanford_cars, voc
from nevis_lite.raw import Raw


@pytest.mark.parametrize(("counts", "bins", "ids"), [
    # fewer than 2, 4, 6 and 8 of ten images have at most 1, 3, 5 and 7: the upper edges of four ranges
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 5, [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]),
    # fewer than 2 have at most 4, fewer than 4 at most 8: the first range is 0..4, where there are none
    ([12, 9, 5, 5, 5, 9], 3, [2, 2, 1, 1, 1, 2]),
    # two edges at 6: from 7 to 8 the id rises by one alone
    ([7, 7, 7, 7, 7, 8], 3, [1, 1, 1, 1, 1, 2]),
    # above the limit all are alike: as 1, 2, 20, 20
    ([1, 2, 20, 99], 2, [0, 1, 1, 1]),
])
def test_count_bins_hold_about_equally_many_images(counts, bins, ids):
    assert count_bins(counts, bins, 20).tolist() == ids


def test_a_crop_keeps_within_the_image():
    pixels = picture(3, (12, 9))
    assert Crop(2, 3, 5, 9)(pixels).shape == (6, 3, 3)
    assert Crop(-4, -1, 50, 4)(pixels).shape == (4, 12, 3)
    for outside in (Crop(12, 0, 20, 9), Crop(-9, 0, -1, 9), Crop(4, 4, 4, 9)):
        with pytest.raises(OSError, match="outside"):
            outside(pixels)


def test_stanford_cars_in_its_other_packaging(tmp_path):
    """As Kaggle has it: the pictures are numbered anew in each part, and cars_annos.mat doesn't fit them."""
    def annotations(path: str, **fields) -> bytes:
        names = [f"{number:05d}.jpg" for number in (1, 2, 3)]
        return mat(annotations=structure({"bbox_x1": [1, 1, 1], **fields, path: names}))

    train = {f"cars_train/cars_train/{number:05d}.jpg": number for number in (1, 2, 3)}
    test = {f"cars_test/cars_test/{number:05d}.jpg": 10 + number for number in (1, 2)}
    write(tmp_path, jpegs(train | test) | {
        "cars_annos.mat": annotations("relative_im_path", **{"class": [9, 9, 9], "test": [1, 1, 1]}),
        "cars_test_annos_withlabels.mat": annotations("fname", **{"class": [5, 6, 7]}),
        "devkit/cars_test_annos.mat": annotations("fname"),
        "devkit/cars_train_annos.mat": annotations("fname", **{"class": [196, 1, 2]}),
    })
    table = stanford_cars(Raw(tmp_path))
    rows = zip(map(str, table.images), map(int, table.labels), table.splits, strict=True)
    assert set(rows) == {*zip(train, (196, 1, 2), ("train",) * 3, strict=True), *zip(test, (5, 6), ("test",) * 2, strict=True)}


@pytest.mark.parametrize(("text", "told"), [
    ('<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>', "defines entities"),
    ("<annotation><object>", "not readable as XML"),
    ('<!DOCTYPE a [<!ENTITY b "bbbb">]><annotation>&b;</annotation>'.encode("utf-16"), "not readable as XML"),
])
def test_an_unsafe_or_broken_annotation_is_refused(text, told, tmp_path):
    base = "VOCdevkit/VOC2007"
    write(tmp_path, {f"{base}/ImageSets/Main/train.txt": "000001\n", f"{base}/JPEGImages/000001.jpg": jpeg(1),
                     f"{base}/Annotations/000001.xml": text})
    with pytest.raises(UserError, match=told):
        voc(Raw(tmp_path), [{"index": "/Main/train.txt$", "splits": ["train"]}])
