"""Pictures of FLUID runs: what is drawn is what the results say."""

import numpy as np
import pytest
from made_fluid import METHODS, run

from nevis_lite import fluid_metrics, fluid_plots

pytestmark = pytest.mark.filterwarnings("error")
NAMES = ["over_time", "against_compute", "earlier_examples", "buckets", "unseen_classes", "counts"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds, of which the last one has not come to the last method yet."""
    root = tmp_path_factory.mktemp("runs")
    some = {name: METHODS[name] for name in list(METHODS)[:2]}
    return [fluid_metrics.load(run(root / f"icons-seed{seed}", seed, some if seed == 2 else METHODS)) for seed in range(3)]


@pytest.fixture(scope="module")
def drawn(runs):
    return {picture.name: picture for picture in fluid_plots.pictures(runs)}


def chosen(picture, **conditions):
    return [row for row in picture.rows if all(row[key] == value for key, value in conditions.items())]


def results(runs, method):
    return [each["methods"][method] for each in runs if method in each["methods"]]


def test_each_picture_is_drawn(drawn):
    assert list(drawn) == NAMES
    for picture in drawn.values():
        assert picture.title.endswith(", icons") and picture.caption.endswith(".") and picture.rows
        assert picture.figure.get_axes()


def test_accuracy_over_time_adds_up_to_the_overall_one(runs, drawn):
    """Parts of the sequence, weighted by their lengths."""
    rows = chosen(drawn["over_time"], method="ncm")
    ends = [0, *(row["samples"] for row in rows)]
    assert ends[-1] == runs[0]["sequence"]["samples"] and len(rows) == 18 and {row["n"] for row in rows} == {3}
    overall = np.mean([found["overall"] for found in results(runs, "ncm")])
    assert np.average([row["mean"] for row in rows], weights=np.diff(ends)) == pytest.approx(overall)


def test_accuracy_against_compute(runs, drawn):
    (row,) = chosen(drawn["against_compute"], method="standard")
    values = [found["overall"] for found in results(runs, "standard")]
    assert row["n"] == 2 and (row["mean"], row["sd"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    samples = runs[0]["sequence"]["samples"]  # see made_fluid: 1,000 multiply-adds a sample, and 6 million of training
    assert (row["gmac_cached"], row["gmac_uncached"]) == pytest.approx((1e-6 * samples, 1e-6 * samples + 6e-3))


def test_buckets_and_earlier_examples(runs, drawn):
    for bucket in fluid_metrics.BUCKETS:
        (row,) = chosen(drawn["buckets"], method="ft", classes=bucket)
        values = [found[bucket] for found in results(runs, "ft") if found[bucket] is not None]
        assert row["n"] == len(values) and row["mean"] == pytest.approx(np.mean(values))
    for kind in ("novel", "pretrain"):
        rows = chosen(drawn["earlier_examples"], method="ft", classes=kind)
        assert [row["earlier"] for row in rows] == ["0", "1", "2-4", "5-9", "10-24", "25-49", "50+"]
    assert chosen(drawn["earlier_examples"], classes="novel", earlier="0")[0]["mean"] == 0.0


def test_unseen_classes_stand_beside_the_clock(runs, drawn):
    (clock,) = chosen(drawn["unseen_classes"], score="clock", measure="auroc")
    expected = [each["methods"]["ncm"]["unseen"]["clock"]["auroc"] for each in runs]
    assert clock["mean"] == pytest.approx(np.mean(expected)) and clock["mean"] > 0.9
    assert len(chosen(drawn["unseen_classes"], measure="windowed_auroc")) == 3 * 2 + 1  # methods, scores, and the clock


def test_counts(runs, drawn):
    rows = drawn["counts"].rows
    assert [row["samples"] for row in rows] == sorted(runs[0]["counts"], reverse=True)
    assert sum(row["pretrained"] for row in rows) == runs[0]["sequence"]["known"]


def test_a_single_seed_and_several_configs(tmp_path, runs):
    other = fluid_metrics.load(run(tmp_path / "faces", settings={"learn": {"lr": 0.2}}))
    pictures, absent = fluid_plots.draw([runs[0], other])
    assert [picture.name for picture in pictures] == [f"{name}-{config}" for config in ("icons", "faces") for name in NAMES]
    assert all(row["sd"] is None for row in pictures[0].rows) and not absent
    assert fluid_plots.draw([{**other, "methods": {}}]) == ([], {"all of faces": "no method is done"})
    with pytest.raises(ValueError, match="differ in learn.lr"):
        fluid_plots.draw([runs[0], {**other, "name": "icons-seed1", "seed": 1}])


def test_a_sequence_without_novel_classes(tmp_path):
    """Metrics that are undefined are not drawn, and nothing else is missing."""
    only = fluid_metrics.load(run(tmp_path / "known", frac_pretrain=1.0))
    drawn = {picture.name: picture for picture in fluid_plots.pictures([only])}
    assert list(drawn) == NAMES
    assert {row["mean"] for row in chosen(drawn["unseen_classes"], score="mdt")} == {None}


def test_methods_differ_in_looks():
    """Twelve methods: no two share colour and line."""
    names = [*fluid_plots.FROZEN, "standard", "lwf", "ewc", "der", "derpp", "er_ace"]
    looks = [(look["color"], look["linestyle"]) for look in fluid_plots.looks(dict.fromkeys(names))]
    assert len(set(looks)) == 12
