import numpy as np
import pytest
from published import write

from nevis_lite import bespoke
from nevis_lite.config import UserError
from nevis_lite.raw import Raw


def test_a_value_belongs_to_the_first_run_that_has_it():
    assert bespoke.value_bins(np.array([5.0, 1, 2, 2, 2, 2, 9, 9, 3, 4]), 5).tolist() == [3, 0, 0, 0, 0, 0, 4, 4, 2, 3]


def test_a_value_on_an_edge_is_in_the_bin_above_and_the_largest_in_the_last():
    assert bespoke.quantile_bins(np.arange(10.0)[::-1], 5).tolist() == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    assert bespoke.quantile_bins(np.array([0.0, 0, 0, 1, 2, 3]), 2).tolist() == [0, 0, 0, 1, 1, 1]
    assert bespoke.quantile_bins(np.full(5, 7.0), 5).tolist() == [4] * 5


def test_angles_of_a_published_pose():
    pose = np.array([[0.784991, -0.0678137, 0.615784], [-0.117134, 0.959814, 0.255021], [-0.608332, -0.272319, 0.745503]])
    assert bespoke.angles(pose) == pytest.approx([4.9375, 38.0062, -18.8845], abs=0.01)
    assert np.isfinite(bespoke.angles(np.array([[0, 0, 1.0000001], [0, 1, 0], [-1, 0, 0]]))).all()


def test_a_cut_off_radar_image_is_a_broken_file(tmp_path):
    write(tmp_path, {"package/Images/img1.sdt": b"\0" * 100, "package/GroundTruths/img1.lxyr": "1 1 1 1\n",
                     "package/Images/img2.sdt": b"\0" * 100})
    table = bespoke.magellan(Raw(tmp_path))
    assert [str(image) for image in table.images] == ["package/Images/img1.sdt"]  # the other has no list
    with pytest.raises(OSError, match="1024"):
        table.images[0].load()


def test_a_list_of_values_must_fit_the_images(tmp_path):
    write(tmp_path, {"metrics_values/MSSIM.TXT": "0.5\n" * 1699, "i01_01_1.bmp": b""})
    with pytest.raises(UserError, match="1699 MSSIM values where 1700"):
        bespoke.tid(Raw(tmp_path), 17, 4)
