"""The numbers of FLUID: by hand, against scikit-learn, and the paper's compute."""

import json
import math

import numpy as np
import pytest
from made_fluid import log_of, run
from sklearn.metrics import precision_recall_curve, roc_auc_score

from nevis_lite import fluid_metrics
from nevis_lite.config import UserError
from nevis_lite.fluid_metrics import Log, Meter, auroc, best_f1, evaluate, fit_threshold, windowed_auroc
from nevis_lite.fluid_sequence import Sequence, build_sequence


def sequence_of(labels, known, classes=None, threshold=2):
    labels = np.array(labels)
    classes = np.arange(classes or labels.max() + 1)
    return Sequence(np.arange(len(labels)), labels, classes, list(map(str, classes)), known, threshold, 0)


def made(pred, **novelty):
    macs = np.arange(1.0, len(pred) + 1)
    return Log(np.array(pred), {name: np.array(values, np.float32) for name, values in novelty.items()}, macs, 10 * macs,
               macs / 2, [{"t": 3, "epochs": 4, "images": 12}])


# Eight samples of two pretrained and two novel classes; novel ones come first at times 1 and 5.
LABELS, PRED = [0, 2, 2, 1, 0, 3, 2, 0], [0, 0, 2, 1, 1, 2, 2, 0]
MDT = [0.1, 0.9, 0.2, 0.3, 0.5, 0.5, 0.4, 0.1]
SEQUENCE, LOG = sequence_of(LABELS, known=2), made(PRED, mdt=MDT)


# ---- accuracy -------------------------------------------------------------------------------------------------------


def test_accuracies_by_hand():
    found = evaluate(LOG, SEQUENCE, windows=2)
    assert found["overall"] == 5 / 8
    assert found["mean_class"] == pytest.approx((2 / 3 + 1 + 2 / 3 + 0) / 4)
    assert [found[bucket] for bucket in fluid_metrics.BUCKETS] == pytest.approx([2 / 3, 1, 2 / 3, 0])
    assert found["last_fifth"] == 1.0  # one sample of eight
    assert found["missing"] == {} and found["updates"] == 1


def test_accuracy_by_earlier_examples_by_hand():
    found = evaluate(LOG, SEQUENCE)["earlier"]
    for kind, expected in (("novel", {"0": (2, 0.0), "1": (1, 1.0), "2-4": (1, 1.0)}),
                           ("pretrain", {"0": (2, 1.0), "1": (1, 0.0), "2-4": (1, 1.0)})):
        for name, cell in found[kind].items():
            assert (cell["samples"], cell["accuracy"]) == expected.get(name, (0, None))


def test_the_groups_of_earlier_examples_have_the_limits_that_they_name():
    """A class of 60 samples: of the k-th, k - 1 came before it."""
    found = evaluate(made([0] * 60), sequence_of([0] * 60, known=0))["earlier"]["novel"]
    assert {name: cell["samples"] for name, cell in found.items()} == {
        "0": 1, "1": 1, "2-4": 3, "5-9": 5, "10-24": 15, "25-49": 25, "50+": 10}


def test_accuracy_over_time_and_compute_by_hand():
    found = evaluate(LOG, SEQUENCE, windows=3)["over_time"]  # windows end after 2, 5 and 8 samples
    assert found["samples"] == [2, 5, 8]
    assert found["windowed"] == pytest.approx([1 / 2, 2 / 3, 2 / 3])
    assert found["accuracy"] == pytest.approx([1 / 2, 3 / 5, 5 / 8])
    assert (found["macs_cached"], found["macs_uncached"]) == ([2, 5, 8], [20, 50, 80])
    assert len(evaluate(LOG, SEQUENCE)["over_time"]["samples"]) == 8  # no more windows than samples


def test_mean_per_class_is_the_weighted_mean_of_the_buckets():
    sequence = build_sequence(np.repeat(np.arange(50), 200), range(20), n_classes=30, c=6)
    found = evaluate(log_of(sequence, 0.7), sequence)
    novel, head = np.arange(30) >= sequence.known, sequence.head
    sizes = [np.sum((novel == new) & (head == big)) for new in (False, True) for big in (True, False)]
    assert min(sizes) > 0 and sum(sizes) == 30
    assert found["mean_class"] == pytest.approx(np.dot(sizes, [found[bucket] for bucket in fluid_metrics.BUCKETS]) / 30)


# ---- unseen classes -------------------------------------------------------------------------------------------------


def test_detection_by_hand():
    found = evaluate(LOG, SEQUENCE, windows=2)["unseen"]
    assert found["mdt"]["auroc"] == pytest.approx(11.5 / 12)  # .9 beats all six, .5 beats five and one is equal
    assert found["mdt"]["windowed_auroc"] == pytest.approx((3 * 1 + 3 * 2.5 / 3) / 6)
    assert found["mdt"]["f1"] == pytest.approx(0.8)  # at .5: both positives of three
    assert found["clock"]["auroc"] == pytest.approx(7 / 12)  # time 1 comes before five known ones, time 5 before two
    assert found["clock"]["windowed_auroc"] == pytest.approx((3 * 2 / 3 + 3 * 2 / 3) / 6)


def test_detection_against_scikit_learn():
    random = np.random.default_rng(0)
    for trial in range(20):
        positives = random.random(300) < 0.1
        positives[:2] = True, False
        scores = random.integers(0, 2 + 3 * trial, 300) / 7  # from nearly all equal to few equal
        assert auroc(scores, positives) == pytest.approx(roc_auc_score(positives, scores))
        precision, recall, _ = precision_recall_curve(positives, scores)
        with np.errstate(invalid="ignore"):
            f1 = 2 * precision * recall / (precision + recall)
        assert best_f1(scores, positives) == pytest.approx(np.nanmax(f1))
        edges = np.array([0, 100, 101, 250, 300])
        parts = [slice(*edges[i:i + 2]) for i in range(4)]
        parts = [part for part in parts if 0 < positives[part].sum() < len(positives[part])]
        pairs = [positives[part].sum() * (~positives[part]).sum() for part in parts]
        expected = np.average([roc_auc_score(positives[part], scores[part]) for part in parts], weights=pairs)
        assert windowed_auroc(scores, positives, edges) == pytest.approx(expected)


def test_equal_scores_tell_nothing():
    """Thousands of equal scores, as of a head that was not trained: their order must not matter."""
    positives = np.arange(1000) < 50
    assert auroc(np.zeros(1000), positives) == 0.5
    assert windowed_auroc(np.zeros(1000), positives, np.array([0, 100, 1000])) == 0.5
    assert best_f1(np.zeros(1000), positives) == best_f1(np.full(1000, np.inf), positives) == pytest.approx(2 * 50 / 1050)


def test_the_clock_detects_new_classes_without_looking():
    """Measured on the paper's own test sequences: AUROC .983 to .984, F1 .422 to .434, though it knows nothing."""
    sequence = build_sequence(np.repeat(np.arange(1250), 1000), range(500), n_classes=1000)
    pred = np.zeros(len(sequence.label), np.int64)
    found = evaluate(Log(pred, {}, *(np.zeros(len(pred)),) * 3, []), sequence)["unseen"]["clock"]
    assert found["auroc"] == pytest.approx(0.9835, abs=0.005) and found["f1"] == pytest.approx(0.43, abs=0.05)
    assert found["windowed_auroc"] < 0.6


# ---- the open world -------------------------------------------------------------------------------------------------


def test_open_accuracy_by_hand():
    """Above .45 are times 1 and 5, rightly, and 4, wrongly: seven hits of eight."""
    found = evaluate(LOG, SEQUENCE, {"mdt": 0.45})["open_accuracy"]
    assert found == {"mdt": 7 / 8}
    assert evaluate(LOG, SEQUENCE, {"mdt": 2.0})["open_accuracy"] == {"mdt": 5 / 8}  # never crossed: as if there were no new
    assert evaluate(LOG, SEQUENCE, {"mdt": -1.0})["open_accuracy"] == {"mdt": 2 / 8}  # always new


def test_the_threshold_is_the_best_and_the_highest_of_those():
    assert fit_threshold(LOG, SEQUENCE, "mdt") == float(np.float32(0.4))
    random = np.random.default_rng(1)
    for _ in range(20):
        labels = random.integers(0, 6, 40)
        log, sequence = made(random.integers(0, 6, 40), mdt=random.integers(0, 9, 40)), sequence_of(labels, 2, 6)
        tries = {tau: evaluate(log, sequence, {"mdt": tau})["open_accuracy"]["mdt"] for tau in np.arange(-0.5, 9)}
        best = fit_threshold(log, sequence, "mdt")
        assert evaluate(log, sequence, {"mdt": best})["open_accuracy"]["mdt"] == max(tries.values())
        highest = max(tau for tau, value in tries.items() if value == max(tries.values()))
        assert best in log.novelty["mdt"] or best < 0
        assert not np.any((log.novelty["mdt"] > best) & (log.novelty["mdt"] < highest))  # so that both call the same ones new


@pytest.mark.parametrize("log, sequence, opened", [
    (made([0, 1, 0, 1], mdt=[0.4, 0.3, 0.2, 0.1]), sequence_of([0, 1, 0, 1], known=2), 1.0),  # never new
    (made([1, 1, 1, 1], mdt=[0.4, 0.3, 0.2, 0.1]), sequence_of([0, 1, 2, 3], known=0), 1.0),  # always new
])
def test_thresholds_that_nothing_or_all_crosses_are_numbers(log, sequence, opened):
    tau = fit_threshold(log, sequence, "mdt")
    assert math.isfinite(tau) and json.loads(json.dumps(tau, allow_nan=False)) == tau
    assert evaluate(log, sequence, {"mdt": tau})["open_accuracy"]["mdt"] == opened


# ---- odd sequences and logs -----------------------------------------------------------------------------------------


def test_a_sequence_without_a_novel_class():
    found = evaluate(made([0, 1, 1], mdt=[1, 2, 3]), sequence_of([0, 1, 0], known=2), {"mdt": 5.0})
    assert found["overall"] == pytest.approx(2 / 3) == found["open_accuracy"]["mdt"]
    assert found["novel_head"] is None is found["unseen"]["mdt"]["auroc"] is found["unseen"]["clock"]["f1"]
    assert found["missing"]["unseen.mdt"] == "no sample is of a new class"
    assert found["missing"]["novel_tail"] == "no novel tail class"
    json.dumps(found, allow_nan=False)


def test_two_classes_one_of_them_once_and_a_class_without_images():
    found = evaluate(made([0, 0, 0, 1], mdt=[0, 0, 1, 0]), sequence_of([0, 0, 1, 0], known=1, classes=3))
    assert found["mean_class"] == pytest.approx((2 / 3 + 0) / 2)  # the third class has no image
    assert found["novel_tail"] == 0.0 and found["pretrain_tail"] is None
    assert found["unseen"]["mdt"]["auroc"] == 1.0
    assert found["missing"]["classes"] == "1 of 3 classes have no sample and are in no mean"
    json.dumps(found, allow_nan=False)


def test_before_the_first_class_is_known_a_sample_is_new():
    """Without a known class no score means anything; the very first sample is new for certain."""
    log, sequence = made([-1, 0, 0], mdt=[np.nan, 0.5, 0.1]), sequence_of([0, 1, 0], known=0)
    found = evaluate(log, sequence, {"mdt": 0.3})
    assert found["unseen"]["mdt"]["auroc"] == 1.0 and found["open_accuracy"]["mdt"] == 1.0
    assert fit_threshold(log, sequence, "mdt") == float(np.float32(0.1))


def test_scores_that_are_no_numbers():
    log = made(PRED, mdt=[*MDT[:-1], np.nan], msp=MDT)
    assert fit_threshold(log, SEQUENCE, "mdt") is None
    found = evaluate(log, SEQUENCE, {"mdt": None, "msp": 0.45})
    assert found["unseen"]["mdt"] == {"auroc": None, "windowed_auroc": None, "f1": None}
    assert "diverged" in found["missing"]["unseen.mdt"]
    assert found["open_accuracy"] == {"mdt": None, "msp": 7 / 8} and "open_accuracy.mdt" in found["missing"]


def test_a_log_of_another_sequence():
    with pytest.raises(ValueError, match="A log of 3 samples and a sequence of 8 do not go together"):
        evaluate(made([0, 1, 2]), SEQUENCE)


def test_a_stored_log_comes_back(tmp_path):
    LOG.save(tmp_path / "log.npz")
    back = Log.load(tmp_path / "log.npz")
    assert evaluate(back, SEQUENCE, {"mdt": 0.45}) == evaluate(LOG, SEQUENCE, {"mdt": 0.45})
    assert back.updates == LOG.updates and back.novelty["mdt"].dtype == np.float32
    SEQUENCE.save(tmp_path / "sequence.npz")
    with pytest.raises(UserError, match="sequence.npz: lacks pred"):
        Log.load(tmp_path / "sequence.npz")


# ---- compute --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward, full, cached, uncached", [
    (1.819066368e9, False, 0.1636, 5.730),  # ResNet-18: the paper prints .16 / 5.73, in 10^15
    (1.819066368e9, True, 11.296, 11.296),  # 11.29
    (4.134e9, False, 0.3717, 13.02),  # ResNet-50: .36 / 13.03
])
def test_compute_of_the_paper(forward, full, cached, uncached):
    """89,921 samples, and after every 5,000 of them 4 epochs over all so far."""
    meter = Meter(forward)
    for _ in range(89_921):
        meter.predict(1)
    for update in range(1, 18):
        meter.train(4 * 5000 * update, full)
    assert (meter.cached / 1e15, meter.uncached / 1e15) == pytest.approx((cached, uncached), rel=5e-4)
    if full:
        assert (meter.uncached + meter.backward) / 1e15 == pytest.approx(16.86, rel=5e-4)  # the usual 3 F a step


def test_meter_by_hand():
    meter = Meter(forward_macs=100, head_macs=7)
    meter.predict(3)
    assert (meter.cached, meter.uncached, meter.backward) == (321, 321, 0)
    meter.train(2, full=False)  # the head forward and backward; the backbone forward, unless its features are kept
    assert (meter.cached, meter.uncached, meter.backward) == (321 + 28, 321 + 28 + 200, 14)
    meter.train(1, full=True)
    assert (meter.cached, meter.uncached, meter.backward) == (349 + 214, 549 + 214, 14 + 107)
    meter.forward(1)
    assert (meter.cached, meter.uncached) == (670, 870)


def test_both_ways_to_count_a_backward_pass():
    assert evaluate(LOG, SEQUENCE)["macs"] == {"cached": 8, "uncached": 80, "cached_usual": 12, "uncached_usual": 84}


# ---- runs and the command -------------------------------------------------------------------------------------------


def test_the_table_of_a_run(tmp_path, capsys):
    folder = run(tmp_path / "a-seed0")
    fluid_metrics.main([str(folder)])
    text, found = capsys.readouterr().out, fluid_metrics.load(folder)
    lines = [line.split() for line in text.splitlines()]
    row = next(line for line in lines if line[:1] == ["ft"])
    assert row[1] == f"{found['methods']['ft']['overall']:.4f}"
    assert ["ft", "mdt"] in [line[:2] for line in lines] and ["-", "clock"] in [line[:2] for line in lines]
    assert max(map(len, text.splitlines())) <= 128
    fluid_metrics.main([str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["counts"] == found["counts"]


def test_several_seeds(tmp_path, capsys):
    folders = [run(tmp_path / f"a-seed{seed}", seed, settings={"data": {"dir": str(seed)}}) for seed in range(3)]
    runs = [fluid_metrics.load(folder) for folder in folders]
    found = fluid_metrics.comparison(runs)
    values = [one["methods"]["ncm"]["overall"] for one in runs]
    assert found["methods"]["ncm"]["overall"] == {
        "n": 3, "mean": pytest.approx(np.mean(values)), "sd": pytest.approx(np.std(values, ddof=1))}
    assert found["methods"]["ft"]["unseen"]["mdt"]["auroc"]["n"] == 3
    fluid_metrics.main([*map(str, folders)])
    text = capsys.readouterr().out
    assert f"| ncm | {np.mean(values):.4f} ± {np.std(values, ddof=1):.4f} |" in text and "seeds 0, 1, 2" in text
    fluid_metrics.main([*map(str, folders), "--json"])
    assert json.loads(capsys.readouterr().out)["seeds"] == [0, 1, 2]


def test_runs_that_cannot_be_read_or_averaged(tmp_path, capsys):
    same, other = run(tmp_path / "same"), run(tmp_path / "other", 1, settings={"learn": {"lr": 0.2}})
    wrong = run(tmp_path / "wrong")
    (wrong / "results.json").write_text('{"stream": "demo"}')
    for folders, message in (([same, same], "Two runs have seed 0"), ([same, other], "differ in learn.lr (0.1 and 0.2)"),
                             ([tmp_path], "no finished part"), ([wrong], "another kind of run")):
        with pytest.raises(SystemExit) as ended:
            fluid_metrics.main([*map(str, folders)])
        assert ended.value.code == 2 and message in capsys.readouterr().err
