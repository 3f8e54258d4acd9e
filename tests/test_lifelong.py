"""Lifelong Learning Metrics against values worked out by hand, SciPy, and what l2metrics 3.1.0 printed (tests/golden/l2).

In a golden file `expected` is from running the package, `expected_paper` from hand formulas of the paper on the same curves.
"""

import csv
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage, stats

from nevis_lite import lifelong, lifelong_curves, lifelong_log
from nevis_lite.config import UserError
from nevis_lite.lifelong_curves import Settings
from nevis_lite.lifelong_log import COLUMNS

GOLDEN = Path(__file__).parent / "golden" / "l2"
FILES = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}
UNITS, RANDOM = FILES.pop("unit_vectors"), FILES.pop("random_logs")["cases"]
CASES = FILES
RAW = {"smoothing_method": "none", "normalization_method": "none"}
RUNS = ("ste_rel_perf_vals", "ste_saturation_vals", "ste_exp_to_sat_vals", "se_saturation_vals", "se_exp_to_sat_vals",
        "sample_efficiency_vals")  # one value for each run of the expert, which the package lists in another order


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def assert_equal(found, expected, where=""):
    """Nested dicts and lists of numbers and None."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_equal(found[i], value, f"{where}/{i}")
    else:
        assert found == (None if expected is None else close(expected)), where


def log(*blocks):
    """Rows of blocks (type, task, values); block_num and exp_num count up."""
    rows = []
    for block, (kind, task, values) in enumerate(blocks):
        rows += [(block, kind, task, len(rows) + i, value) for i, value in enumerate(values)]
    return rows


def strict(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


# ---- golden files


@pytest.mark.parametrize("case", [*CASES.values(), *RANDOM], ids=[*CASES, *(f"random{i}" for i in range(len(RANDOM)))])
def test_compat_is_what_the_package_prints(case):
    found, expected = lifelong.evaluate(case["log"], case["ste"], mode="compat", **case["settings"]), case["expected"]
    for task in expected["tasks"]:
        for key in RUNS:
            found["tasks"][task][key].sort()
            expected["tasks"][task][key].sort()
    assert_equal(found["lifetime"], expected["lifetime"])
    assert_equal(found["tasks"], expected["tasks"])
    if "normalization_data_range" in expected:
        assert_equal(found["normalization_data_range"] or None, expected["normalization_data_range"])


@pytest.mark.parametrize("name", CASES)
def test_paper_is_what_the_paper_defines(name):
    case = CASES[name]
    found, expected = lifelong.evaluate(case["log"], case["ste"], **case["settings"]), case["expected_paper"]
    assert_equal(found["lifetime"], {metric: expected[metric] for metric in found["lifetime"]})
    assert len(found["lifetime"]) == 5
    for metric, sources in found["pairs"].items():
        assert_equal(sources, expected[f"{metric}_pairs"])
    for metric, key in (("backward_transfer_task_average", "backward_transfer_task_average"),
                        ("sample_efficiency_count_based", "sample_efficiency_count_based_tasks")):
        values = {task: values[metric] for task, values in found["tasks"].items() if values[metric] is not None}
        assert_equal(values, expected[key])


@pytest.mark.parametrize("name", CASES)
def test_prepared_values_and_regimes_are_those_of_the_package(name):
    case, expected = CASES[name], CASES[name]["expected"]
    experts = lifelong_log.from_experts(case["ste"])
    prepared, runs, _ = lifelong_curves.prepare(lifelong_log.from_rows(case["log"]), experts, Settings(**case["settings"]))
    assert prepared.value.tolist() == close(expected["preprocessed"]["ll"])
    assert_equal(sorted(run.value.tolist() for run in runs), sorted(sum(expected["preprocessed"]["ste"].values(), [])))
    regimes = lifelong_curves.regimes_of(prepared)
    assert [regime.number for regime in regimes for _ in range(regime.length)] == expected["preprocessed"]["ll_regime"]
    for regime, facts in zip(regimes, expected["regimes"], strict=True):
        assert regime.terminal == close(facts["term_perf"]) and regime.mean == close(facts["avg_perf"])
        assert lifelong_curves.saturation(regime.means) == (close(facts["saturation"]), facts["exp_to_sat"])
        assert (regime.block, regime.task) == (facts["block_num"], facts["task_name"])
        assert regime.train == (facts["block_type"] == "train")


def test_functions_of_one_curve_are_those_of_the_package():
    for unit in UNITS["smooth"]:
        smoothed = lifelong_curves.smooth(np.array(unit["x"]), unit["window_length"], unit["window"])
        assert smoothed.tolist() == close(unit["y"])
    for unit in UNITS["terminal"]:
        x = np.array(unit["x"])
        assert lifelong_curves.terminal_performance(x, unit["block_type"] == "train") == close(unit["term_perf"])
        time = lifelong_curves.recovery_time(x, unit["recovery_threshold"])
        assert (len(x) + 1 if time is None else time) == unit["recovery_time"]
    for unit in UNITS["saturation"]:
        assert lifelong_curves.saturation(np.array(unit["x"])) == (close(unit["saturation"]), unit["exp_to_sat"])
    for unit in UNITS["theil_sen_performance_recovery"]:
        assert lifelong.performance_recovery(unit["recovery_times"]) == close(unit["perf_recovery"])


# ---- formulas, by hand or with SciPy


def test_the_tiny_log_by_hand():
    case = CASES["tiny_hand_checkable"]
    found = lifelong.evaluate(case["log"], case["ste"], **case["settings"])
    assert_equal(found["lifetime"], {
        "perf_maintenance_pooled": -0.2,  # a: .5 - .7; b: .6 - .8
        "relative_performance": (6.35 / 5.55 + 2.6 / 1.6) / 2,
        "sample_efficiency_count_based": (0.9 / 0.8 * 7 / 8 + 0.9 / 0.6 * 4 / 4) / 2,
        "forward_transfer_contrast": 0.2 / 0.7,  # b before it is trained: .25, then .45
        "backward_transfer_contrast": (-0.2 / 1.2 + -0.2 / 1.4) / 2,  # a: .7, then .5; b: .8, then .6
    })
    assert found["counts"] == {"perf_maintenance_pooled": 2, "relative_performance": 2, "sample_efficiency_count_based": 2,
                               "forward_transfer_contrast": 1, "backward_transfer_contrast": 2}
    assert found["missing"] == {}


def test_maintenance_is_pooled_over_the_lifetime_and_averaged_by_task():
    rows = log(("train", "a", [1]), ("test", "a", [8]), ("train", "b", [1]), ("test", "b", [5]), ("test", "a", [6]),
               ("train", "c", [1]), ("test", "a", [4]), ("test", "b", [6]), ("train", "a", [3]), ("test", "a", [9]),
               ("test", "b", [5]))
    found = lifelong.evaluate(rows, **RAW)  # a: 6 - 8, 4 - 8, and 9 is a new reference; b: 6 - 5, 5 - 5
    assert found["lifetime"]["perf_maintenance_pooled"] == close((-2 - 4 + 1 + 0) / 4)
    assert found["counts"]["perf_maintenance_pooled"] == 4
    assert [found["tasks"][task]["perf_maintenance"] for task in "abc"] == [close(-3), close(0.5), None]
    assert "not evaluated again" in found["missing"]["c: perf_maintenance"]
    compat = lifelong.evaluate(rows, mode="compat", maintenance_method="both", **RAW)
    assert compat["lifetime"]["perf_maintenance_mrlep"] == close((-3 + 0.5) / 2)
    assert compat["tasks"]["a"]["maintenance_val_mrtlp"] == [[close(6 - 1), close(4 - 1)]]
    assert compat["lifetime"]["perf_maintenance_mrtlp"] == close((4 + 4.5) / 2)


def test_contrast_and_ratio_by_hand():
    assert lifelong.contrast(0.6, 0.2) == close(0.5) and lifelong.contrast(0.2, 0.6) == close(-0.5)
    assert lifelong.contrast(0.3, 0.3) == 0 and lifelong.ratio(0.6, 0.2) == close(3)
    assert "add up to 0" in lifelong.contrast(0.0, 0.0) and "is 0" in lifelong.ratio(0.5, 0.0)


def test_own_learning_is_no_transfer():
    rows = log(("test", "b", [2]), ("train", "a", [1]), ("train", "b", [5]), ("test", "b", [6]), ("train", "c", [1]),
               ("train", "a", [1]), ("test", "b", [3]), ("train", "a", [1]), ("test", "b", [2]))
    found = lifelong.evaluate(rows, **RAW)
    assert found["pairs"] == {"forward_transfer_contrast": {}, "backward_transfer_contrast": {"a": {"b": [close(-1 / 5)]}}}
    assert found["missing"]["a -> b: forward_transfer_contrast"] == (
        "b, too, was trained between its evaluations in blocks 0 and 3")
    assert found["missing"]["forward_transfer_contrast"] == found["missing"]["a -> b: forward_transfer_contrast"]
    assert found["missing"]["c -> b: backward_transfer_contrast"] == (
        "several blocks were trained between its evaluations in blocks 3 and 6")
    # The package counts b's own learning as a's forward transfer, and of a and c it keeps the one that the log names last.
    compat = lifelong.evaluate(rows, mode="compat", transfer_method="both", **RAW)
    assert compat["pairs"]["forward_transfer_ratio"] == {"a": {"b": [close(3)]}}
    assert compat["pairs"]["backward_transfer_ratio"] == {"c": {"b": [close(0.5)]}, "a": {"b": [close(2 / 3)]}}
    assert compat["lifetime"]["backward_transfer_contrast"] == close((-3 / 9 + -1 / 5) / 2)


def test_the_lifetime_takes_the_first_value_of_a_pair():
    rows = log(("train", "b", [1]), ("test", "b", [4]), ("train", "a", [1]), ("test", "b", [2]), ("train", "a", [1]),
               ("test", "b", [6]))
    found = lifelong.evaluate(rows, **RAW)
    assert found["pairs"]["backward_transfer_contrast"] == {"a": {"b": [close(-1 / 3), close(1 / 2)]}}
    assert found["lifetime"]["backward_transfer_contrast"] == close(-1 / 3)
    assert found["tasks"]["b"]["backward_transfer_task_average"] == close((-1 / 3 + 1 / 2) / 2)


def test_relative_performance_and_efficiency_over_several_runs_of_the_expert():
    rows = log(("train", "a", [1, 2]), ("test", "a", [1]), ("train", "a", [4, 3, 2]))
    experts = {"a": [[1, 1, 2], [2, 4]]}
    found = lifelong.evaluate(rows, experts, **RAW)["tasks"]["a"]
    assert found["relative_performance"] == close((7 / 4 + 3 / 6) / 2)
    assert found["sample_efficiency_count_based"] == close((4 / 2 * 3 / 3 + 4 / 4 * 2 / 3) / 2)
    found = lifelong.evaluate(rows, experts, ste_averaging_method="time", **RAW)["tasks"]["a"]  # one run: 1.5, 2.5
    assert found["relative_performance"] == close(3 / 4)
    assert found["sample_efficiency_count_based"] == close(4 / 2.5 * 2 / 3)
    compat = lifelong.evaluate(rows, experts, mode="compat", **RAW)["tasks"]["a"]
    assert compat["sample_efficiency"] == close((4 / 2 * 2 / 2 + 4 / 4 * 1 / 2) / 2)


@pytest.mark.parametrize("own, expert, efficiency, reason", [
    ([5, 6, 1], [1, 2, 3], 0.0, None),  # values fall
    ([1, 2, 3], [1, 15, 16], 0.0, None),  # below a fifth of the expert
    ([1, 2, 3], [1, 13, 14], 3 / 14, None),
    ([3, 1, 2], [1, 2, 3], None, "the learner is at its best from the first experience on"),
    ([1, 2, 3], [3, 2, 1], None, "its expert is at its best from the first experience on"),
])
def test_the_packages_own_rules_of_sample_efficiency(own, expert, efficiency, reason):
    found = lifelong.evaluate(log(("train", "a", own)), {"a": expert}, mode="compat", **RAW)
    assert found["lifetime"]["sample_efficiency"] == (None if efficiency is None else close(efficiency))
    assert found["missing"].get("sample_efficiency") == reason
    paper = lifelong.evaluate(log(("train", "a", own)), {"a": expert}, **RAW)["lifetime"]["sample_efficiency_count_based"]
    assert paper == close(max(own) / max(expert) * (expert.index(max(expert)) + 1) / (own.index(max(own)) + 1))


def test_recovery_is_scipys_theil_sen_slope():
    chance = random.Random(0)
    for n in (2, 3, 10, 41):
        times = [chance.randint(0, 30) for _ in range(n)]
        assert lifelong.performance_recovery(times) == close(-stats.theilslopes(times)[0])
    # ends at 4, 5 (last tenth: one experience): block 2 reaches 4 at once, block 3 reaches 5 at its third experience; 9 never
    rows = log(("train", "a", [1, 4]), ("train", "b", [1]), ("train", "a", [4, 9, 5]), ("train", "b", [1]),
               ("train", "a", [1, 4, 5, 9]), ("train", "b", [1]), ("train", "a", [1, 2]))
    found = lifelong.evaluate(rows, mode="compat", **RAW)
    assert found["tasks"]["a"]["recovery_times"] == [0, 2, 3] and found["tasks"]["a"]["perf_recovery"] == close(-1.5)
    assert found["tasks"]["b"]["recovery_times"] == [0, 0] and found["lifetime"]["perf_recovery"] == close(-0.75)


@pytest.mark.parametrize("method, weights", [("flat", np.ones), ("hanning", np.hanning), ("blackman", np.blackman)])
@pytest.mark.parametrize("w", [3, 4, 7, 10])
def test_smoothing_is_scipys_convolution_with_mirrored_ends(method, weights, w):
    x = np.random.default_rng(0).normal(size=40)
    # The origin shifts its window, which is centred on i for odd w and on i + 1/2 for even w, by one to the left.
    expected = ndimage.convolve1d(x, weights(w) / weights(w).sum(), mode="mirror", origin=-1)
    assert lifelong_curves.smooth(x, w, method) == close(expected)


def test_clamping_and_normalising_by_hand():
    rows = log(("train", "a", [0, 1, 2, 3]), ("test", "a", [10]), ("train", "b", [5]), ("test", "b", [7]))
    experts = {"a": [4, 5, 6, 7, 8, 9]}  # with the log 0 ... 10, so that the quantiles are 1 and 9

    def prepared(**settings):
        prepared, _, ranges = lifelong_curves.prepare(
            lifelong_log.from_rows(rows), lifelong_log.from_experts(experts), Settings(smoothing_method="none", **settings))
        return prepared.value.tolist(), ranges

    assert prepared() == ([1, 11, 21, 31, 101, 1, 101], {"a": {"min": 0, "max": 10}, "b": {"min": 5, "max": 7}})
    assert prepared(normalization_method="run")[0] == close([1, 11, 21, 31, 101, 51, 71])
    values, ranges = prepared(clamp_outliers=True)
    assert values == close([1, 1, 13.5, 26, 101, 1, 101]) and ranges["a"] == {"min": 1, "max": 9}
    given = {"A": {"min": 0, "max": 2}, "b": {"min": 0, "max": 10}}
    assert prepared(data_range=given)[0] == close([1, 51, 101, 151, 501, 51, 71])
    assert prepared(data_range=given, clamp_outliers=True)[0] == close([1, 51, 101, 101, 101, 51, 71])
    assert prepared(normalization_method="none") == ([0, 1, 2, 3, 10, 5, 7], None)


def test_variants_become_one_task():
    rows = log(("train", "a_1", [1, 2]), ("train", "a_2", [3, 4]), ("test", "a10_1", [5]))
    experts = {"a_1": [1, 2], "a_2": [2, 2], "a10_1": [9]}
    assert list(lifelong.evaluate(rows, experts, **RAW)["tasks"]) == ["a_1", "a_2", "a10_1"]
    found = lifelong.evaluate(rows, experts, variant_mode="agnostic", **RAW)
    assert list(found["tasks"]) == ["a", "a10"]
    assert found["tasks"]["a"]["relative_performance"] == close((3 / 3 + 3 / 4) / 2)
    given = {"a_1": {"min": 0, "max": 4}, "a_2": {"min": 1, "max": 9}, "a10_1": {"min": 0, "max": 500}}
    found = lifelong.evaluate(rows, variant_mode="agnostic", data_range=given)
    assert found["normalization_data_range"] == {"a": {"min": 0, "max": 9}, "a10": {"min": 0, "max": 500}}


def test_workers_that_share_an_experience_are_averaged_in_a_curve_but_not_in_a_sum():
    rows = [(0, "train", "a", 0, 1), (0, "train", "a", 1, 2), (0, "train", "a", 1, 6), (1, "test", "a", 2, 3),
            (1, "test", "a", 2, 5), (1, "test", "a", 3, 10)]
    prepared = lifelong_log.from_rows(rows)
    train, test = lifelong_curves.regimes_of(prepared)
    assert train.means.tolist() == [1, 4] and test.means.tolist() == [4, 10] and test.terminal == 7 and test.mean == 6
    assert lifelong.evaluate(rows, {"a": [1, 1, 1]}, **RAW)["tasks"]["a"]["relative_performance"] == close(9 / 3)


def test_with_sleep_only_the_evaluations_in_sleep_count():
    awake = log(("train", "a", [1]), ("test", "a", [9]), ("test", "a", [4]), ("train", "b", [1]), ("test", "a", [8]),
                ("test", "a", [3]))
    subtypes = ("wake", "wake", "sleep", "wake", "wake", "sleep")
    rows = [(*row, subtype) for row, subtype in zip(awake, subtypes, strict=True)]
    found = lifelong.evaluate(rows, **RAW)
    assert found["lifetime"]["perf_maintenance_pooled"] == -1
    assert found["pairs"]["backward_transfer_contrast"] == {"b": {"a": [close(-1 / 7)]}}
    assert found["notes"] == ["the log has sleep: PM, FT and BT leave out the evaluations that are awake"]


def test_training_in_sleep_is_no_learning_that_experts_or_recovery_see():
    rows = log(("train", "a", [1]), ("train", "a", [9]), ("train", "a", [2]), ("train", "b", [1]), ("train", "a", [3]))
    rows[1] += ("sleep",)
    found = lifelong.evaluate(rows, {"a": [1, 1, 1, 1]}, mode="compat", **RAW)["tasks"]["a"]
    assert found["ste_rel_perf"] == 2 and found["recovery_times"] == [0, 0]
    asleep = lifelong.evaluate([(*row[:5], "sleep") for row in rows], {"a": [1]}, **RAW)
    assert asleep["missing"]["a: relative_performance"] == "never trained, but in sleep"


def test_a_plateau_saturates_at_its_first_experience_in_spite_of_rounding():
    flat = np.array([0.1, 0.3, 0.3 - 1e-16, 0.3 + 1e-16, 0.2])
    assert lifelong_curves.saturation(flat)[1] == 1
    assert lifelong_curves.saturation(np.array([1e-13, 3e-13, 5e-13]))[1] == 2  # small is not rounding
    assert lifelong_curves.recovery_time(flat, 0.1 + 0.2) == 1  # which is above 0.3


# ---- what is missing


def test_what_is_missing_says_why():
    rows = log(("test", "a", [0]), ("test", "b", [0]), ("train", "a", [0, 0]), ("test", "a", [0]), ("test", "b", [0]),
               ("train", "c", [1]))
    found = lifelong.evaluate(rows, {"a": [0, 0]}, **RAW)
    assert set(found["lifetime"].values()) == {None}
    assert found["missing"] | {} == {
        "a -> b: forward_transfer_contrast": "the evaluations before and after add up to 0",
        "perf_maintenance_pooled": "not evaluated again after the first evaluation that follows its training; never trained",
        "relative_performance": "the expert's values add up to 0; no log of its single-task expert; never trained",
        "sample_efficiency_count_based": "the expert saturates at 0; no log of its single-task expert; never trained",
        "forward_transfer_contrast": "the evaluations before and after add up to 0",
        "backward_transfer_contrast": lifelong.NO_BACKWARD,
    } | {key: why for key, why in found["missing"].items() if key[:3] in ("a: ", "b: ", "c: ")}
    assert found["missing"]["b: relative_performance"] == "never trained"
    assert found["missing"]["c: relative_performance"] == "no log of its single-task expert"
    assert found["missing"]["a: relative_performance"] == "the expert's values add up to 0"


def test_negative_values_have_no_contrast_in_the_paper_mode():
    rows = log(("test", "b", [-0.4]), ("train", "a", [-1, -0.5]), ("test", "b", [-0.2]))
    found = lifelong.evaluate(rows, {"a": [-2, -1]}, **RAW)
    assert [found["lifetime"][metric] for metric in ("forward_transfer_contrast", "relative_performance",
                                                     "sample_efficiency_count_based")] == [None] * 3
    assert all("negative" in found["missing"][key] for key in ("a -> b: forward_transfer_contrast", "a: relative_performance"))
    compat = lifelong.evaluate(rows, {"a": [-2, -1]}, mode="compat", transfer_method="both", **RAW)
    assert compat["lifetime"]["forward_transfer_contrast"] == close(-1 / 3)  # worse, although it got better
    assert lifelong.evaluate(rows, {"a": [-2, -1]})["lifetime"]["forward_transfer_contrast"] > 0


def test_random_logs_give_strict_json_and_a_reason_for_each_number_that_is_missing():
    chance = random.Random(0)
    for _ in range(60):
        rows, exp = [], 0
        for block in range(chance.randint(1, 8)):
            for task in chance.sample("abc", chance.randint(1, 3)):
                for _ in range(chance.choice((1, 2, 20))):
                    value = chance.choice((0.0, 0.5, 1.0, chance.random(), None if chance.random() < 0.2 else 0.1))
                    kind = chance.choice(("train", "test")) if chance.random() < 0.1 else ("test", "train")[block % 2]
                    rows.append((block, kind, task, exp, value))
                    exp += chance.random() < 0.9
        rows.append((99, "test", "a", exp, 0.3))
        experts = {task: [chance.choice((0.0, chance.random())) for _ in range(chance.randint(1, 30))]
                   for task in "abcd" if chance.random() < 0.6}
        for mode in lifelong.MODES:
            found = strict(json.dumps(lifelong.evaluate(
                rows, experts, mode, normalization_method=chance.choice(("task", "run", "none")), transfer_method="both",
                clamp_outliers=chance.random() < 0.3)))
            for place, values in (("", found["lifetime"]), *((f"{task}: ", values) for task, values in found["tasks"].items())):
                for metric, value in values.items():
                    if not metric.startswith("se_task"):
                        assert (value is None) == (f"{place}{metric}" in found["missing"]), metric
            assert all(why for why in found["missing"].values())
            lifelong.table(found, "title")


# ---- reading


ROWS = [(0, "test", "a", 0, 0.25), (0, "test", "b", 1, 0.5), (1, "train", "a", 2, 0.25), (1, "train", "a", 3, 0.75),
        (2, "test", "a", 4, 0.75), (2, "test", "b", 5, 1.0)]


def write(path, rows, columns=COLUMNS, delimiter=","):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows([columns, *rows])
    return str(path)


def write_folder(folder, rows, columns=("reward",)):
    """As l2logger writes it: a file for each block, more columns, and the performance under a name of its own."""
    for row in rows:
        path = folder / "worker-0" / f"{row[0]}-{row[1]}" / "data-log.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text("block_num\texp_num\tworker_id\tblock_type\tblock_subtype\ttask_name\ttask_params\texp_status\t"
                            "timestamp\treward\tloss\n")
        with path.open("a") as file:
            file.write(f'{row[0]}\t{row[3]}\tworker-0\t{row[1]}\twake\t{row[2].upper()}\t"{{""x"": 1}}"\tcomplete\t'
                       f"20200101T000000.0\t{row[4]}\t9\n")
    (folder / "logger_info.json").write_text(json.dumps({"metrics_columns": list(columns)}))
    return str(folder)


def test_all_forms_of_a_log_give_the_same(tmp_path):
    expected = lifelong.evaluate(ROWS)
    assert expected["lifetime"]["forward_transfer_contrast"] == close(100 / 102)
    dicts = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in dicts[::-1]))
    for path in (write(tmp_path / "log.csv", ROWS), write(tmp_path / "log.tsv", ROWS, delimiter="\t"), tmp_path / "log.jsonl",
                 write(tmp_path / "reordered.csv", [row[::-1] for row in ROWS], COLUMNS[::-1]),
                 write_folder(tmp_path / "scenario", ROWS)):
        assert lifelong.evaluate(lifelong_log.read(path)) == expected, path
    assert lifelong.evaluate(dicts) == expected
    assert lifelong.evaluate([(*row, "wake") for row in ROWS]) == expected
    two = write_folder(tmp_path / "two", ROWS, ("loss", "reward"))
    assert lifelong.evaluate(lifelong_log.read(two, "reward")) == expected
    assert lifelong_log.read(write(tmp_path / "named.csv", ROWS, (*COLUMNS[:4], "accuracy")), "accuracy").value.sum() == 3.5


def test_experts_in_files_are_those_in_memory(tmp_path):
    experts = {"a": [[0.1, 0.2, 0.4], [0.3, 0.5]], "b": [[0.2]]}
    files = [write(tmp_path / f"{task}{i}.csv", log(("test", task.upper(), [9]), ("train", task.upper(), run)))
             for task, runs in experts.items() for i, run in enumerate(runs)]
    given = lifelong.evaluate(ROWS, [lifelong_log.read(file) for file in files], **RAW)
    assert given == lifelong.evaluate(ROWS, experts, **RAW) and given["lifetime"]["relative_performance"] > 1


def test_rows_without_a_value_are_left_out_before_anything_is_numbered(tmp_path):
    holes = [ROWS[0], (0, "test", "a", 0, None), *ROWS[1:3], (1, "train", "b", 2, math.nan), *ROWS[3:]]
    found = lifelong.evaluate(holes)
    assert found.pop("notes") == ["rows without a value, left out: 2"]
    assert found.items() <= lifelong.evaluate(ROWS).items()
    path = write(tmp_path / "log.csv", [(*ROWS[0], "complete"), (*ROWS[1], ""), (0, "test", "b", 1, 7, "incomplete"),
                                        (0, "test", "b", 1, "NA", "complete")], (*COLUMNS, "exp_status"))
    read = lifelong_log.read(path)
    assert read.value.tolist() == [0.25, 0.5]
    assert read.notes == ["rows whose exp_status is not complete, left out: 1", "rows without a value, left out: 1"]


def test_odd_logs_are_noted():
    assert lifelong.evaluate(ROWS + ROWS[:2])["notes"] == [
        "rows that repeat another one in all columns: 2; they count as experiences of several workers, so remove them if the "
        "log was written twice"]
    assert lifelong.evaluate([*ROWS, (3, "test", "A", 6, 1)])["notes"] == [
        "tasks whose names differ only in upper and lower case are one task"]
    found = lifelong.evaluate([(0, "test", "a", 0, 3), (0, "train", "a", 1, 3)], {"z": [1]})
    assert found["notes"] == ["experts of tasks that the log does not name are not used: z",
                              "a is constant: its normalised values are all 1"]
    assert lifelong.evaluate(ROWS, {"a": [0.5, None]})["notes"] == ["experts['a']: rows without a value, left out: 1"]


HEAD = ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize("name, text, words", [
    ("x.csv", "", "x.csv: there is no row; a log has the columns block_num"),
    ("x.csv", HEAD, "x.csv: there is no row"),
    ("x.csv", "block_num,block_type,task,value\n0,train,a,1\n", "x.csv, line 2: no column exp_num; a log has block_num"),
    ("x.csv", "block_num,block_type,task,exp_num,score\n0,train,a,0,1\n", "x.csv, line 2: no column value, the performance"),
    ("x.csv", "block_num,value,block_type,task,exp_num,value\n0,1,train,a,0,1\n", "x.csv, line 1: names a column twice"),
    ("x.csv", HEAD + "\n0,train,a,0,1\n0,train,a,1\n", "line 4: has 4 cells, but line 1 names 5"),
    ("x.csv", HEAD + "0,train,a,0,good\n", "line 2, column value: expected a number, found 'good'"),
    ("x.csv", HEAD + "0,train,a,0,-inf\n", "line 2, column value: -inf is no performance"),
    ("x.csv", HEAD + "0,train,a,0,2e100\n", "line 2, column value: 2e+100 is no performance"),
    ("x.csv", HEAD + "0,train,a,1e16,1\n", "column exp_num: expected a whole number from 0 on, found '1e16'"),
    ("x.csv", HEAD + "0,train,a,0.5,1\n", "column exp_num: expected a whole number from 0 on"),
    ("x.csv", HEAD + ",train,a,0,1\n", "column block_num: expected a whole number"),
    ("x.csv", HEAD + "0,eval,a,0,1\n", "column block_type: expected train or test, found 'eval'"),
    ("x.csv", HEAD + "0,test,,0,1\n", "line 2, column task: is empty"),
    ("x.csv", HEAD[:-1] + ",block_subtype\n0,test,a,0,1,nap\n", "block_subtype: expected sleep or wake, found 'nap'"),
    ("x.csv", HEAD + "0,train,a,0,\n", "x.csv: no row has a value"),
    ("x.csv", HEAD + "0,train,a,0,1\n0,train,a,1,1\n1,test,a,0,1\n",
     "block_num goes back from 1 to 0 at exp_num 1; exp_num must grow over the whole log"),
    ("x.jsonl", '{"block_num": 0}\n{"block', "x.jsonl, line 2: no JSON"),
    ("x.jsonl", "[1, 2]\n", "line 1: expected a JSON object, found [1, 2]"),
    ("x.jsonl", '{"block_num": 0, "block_type": ["train"], "task": "a", "exp_num": 0, "value": 1}\n', "found ['train']"),
    ("x.jsonl", '{"block_num": 0, "block_type": "train", "task": "a", "exp_num": 0, "value": {}}\n', "a number, found {}"),
    ("x.log", "", "x.log: a log is a .csv, .tsv or .jsonl file, or the folder of an l2logger scenario"),
    ("nothere.csv", None, "nothere.csv: cannot be read (No such file"),
])
def test_a_bad_file_gets_one_sentence(tmp_path, capsys, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert lifelong.main([str(tmp_path / name)]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_a_bad_line_far_down_is_named(tmp_path):
    rows = [(0, "train", "a", i, 0.5) for i in range(2 * lifelong_log.CHUNK)]
    path = write(tmp_path / "log.csv", [*rows, (0, "train", "a", "x", 0.5)])
    with pytest.raises(UserError, match=f"line {2 * lifelong_log.CHUNK + 2}, column exp_num: expected a number, found 'x'"):
        lifelong_log.read(path)
    (tmp_path / "bytes.csv").write_bytes(b"block_num\xff\n")
    with pytest.raises(UserError, match="bytes.csv: cannot be read"):
        lifelong_log.read(tmp_path / "bytes.csv")


def test_a_folder_that_is_no_scenario(tmp_path):
    with pytest.raises(UserError, match="no data-log.tsv in this folder"):
        lifelong_log.read(tmp_path)
    one = write_folder(tmp_path / "one", ROWS, ("reward", "loss"))
    with pytest.raises(UserError, match=r"metrics_columns are \['reward', 'loss'\]; choose the performance: --value"):
        lifelong_log.read(one)
    with pytest.raises(UserError, match="no column speed"):
        lifelong_log.read(one, "speed")
    write_folder(tmp_path / "other", ROWS)
    with pytest.raises(UserError, match="holds 2 scenarios; name each: .*one, .*other"):
        lifelong_log.read(tmp_path)
    (tmp_path / "one" / "logger_info.json").write_text("{")
    with pytest.raises(UserError, match="holds no metrics_columns"):
        lifelong_log.read(one)


@pytest.mark.parametrize("arguments, words", [
    ({"rows": []}, "rows: there is no row"),
    ({"rows": [(1, 2)]}, r"rows\[0\]: expected block_num, block_type"),
    ({"rows": [ROWS[0], {"task": "a"}]}, r"rows\[1\]: expected"),
    ({"rows": [{"block_num": 0, "task": "a"}]}, r"rows\[0\]: no column block_type, exp_num, value"),
    ({"rows": [(0, "train", "a", 0, "x")]}, r"rows\[0\], column value: expected a number, found 'x'"),
    ({"experts": {"a": []}}, r"experts\['a'\]: there is no row"),
    ({"experts": {"a": 3}}, r"experts\['a'\]: expected a list of values"),
    ({"experts": {"a": [None]}}, r"experts\['a'\]: no row has a value"),
    ({"mode": "papr"}, "mode cannot be 'papr'; did you mean paper"),
    ({"smoothing": "flat"}, "unknown key smoothing; did you mean smoothing_method"),
    ({"window_length": 2.5}, "window_length must be a whole number"),
    ({"data_range": [0, 1]}, "data_range must be keys and values in braces"),
    ({"data_range": {"a": {"min": 0, "max": 1}}}, "data_range: names no range for b"),
    ({"data_range": {"a": {"min": 1, "max": 1}}}, "data_range of a: min must be below max"),
    ({"data_range": {"a": [0, 1]}}, "data_range of a: expected {min: NUMBER, max: NUMBER}"),
])
def test_bad_arguments_get_one_sentence(arguments, words):
    with pytest.raises(UserError, match=words):
        lifelong.evaluate(**{"rows": ROWS, **arguments})


# ---- several lifetimes, and the command


def test_several_lifetimes_have_a_mean_and_students_interval(tmp_path, capsys):
    ends = (2, 5, 3)  # forward transfer a -> b: (end - 2) / (end + 2)
    files = [write(tmp_path / f"{end}.csv", log(("test", "b", [2]), ("train", "a", [1]), ("test", "b", [end]))) for end in ends]
    files.append(write(tmp_path / "short.csv", log(("test", "b", [2]), ("train", "c", [1]))))
    settings = [f"{key}={value}" for key, value in RAW.items()]
    assert lifelong.main([*files, *settings, "--json"]) == 0
    found = strict(capsys.readouterr().out)
    values = [(end - 2) / (end + 2) for end in ends]
    expected = {"values": [*values, None], "n": 3, "mean": np.mean(values), "sd": np.std(values, ddof=1),
                "interval": list(stats.t.interval(0.95, 2, np.mean(values), stats.sem(values)))}
    for part in (found["lifetime"]["forward_transfer_contrast"], found["pairs"]["forward_transfer_contrast"]["a"]["b"]):
        interval = part.pop("interval")
        assert_equal(part, {key: value for key, value in expected.items() if key != "interval"})
        assert interval == pytest.approx(expected["interval"], abs=1e-3)  # the quantile has three decimals
    assert found["tasks"]["b"]["perf_maintenance"] == {"values": [None] * 4, "n": 0, "mean": None, "sd": None, "interval": None}
    assert found["tasks"]["c"]["num_lx"]["values"] == [None, None, None, 1]
    assert found["missing"][f"{files[3]}: forward_transfer_contrast"] == lifelong.NO_FORWARD
    assert found["each"][files[0]] == strict(json.dumps(lifelong.evaluate(lifelong_log.read(files[0]), **RAW)))

    assert lifelong.main([*files, *settings]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "4 lifetimes, mode paper"
    row = ["FT", "forward_transfer_contrast", "0.2095", "0.2144", "-0.3232", "0.7423", "3"]
    assert row in map(str.split, text.splitlines())


def test_command(tmp_path, capsys):
    case = CASES["tiny_hand_checkable"]
    path = write(tmp_path / "log=1.csv", case["log"])  # not a setting: there is such a file
    experts = [write(tmp_path / f"{task}.csv", [(0, "train", task, i, value) for i, value in enumerate(values)])
               for task, values in case["ste"].items()]
    settings = [f"{key}={value}" for key, value in RAW.items()]
    assert lifelong.main([path, "--ste", *experts, *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}, mode paper"
    assert [line.split() for line in lines[3:8]] == [
        ["PM", "perf_maintenance_pooled", "-0.2000", "2"], ["FT", "forward_transfer_contrast", "0.2857", "1"],
        ["BT", "backward_transfer_contrast", "-0.1548", "2"], ["RP", "relative_performance", "1.3846", "2"],
        ["SE", "sample_efficiency_count_based", "1.2422", "2"]]
    assert [line.split() for line in lines[9:12]] == [
        ["task", "PM", "BT", "RP", "SE"], ["a_1", "-0.2000", "-0.1667", "1.1441", "0.9844"],
        ["b_1", "-0.2000", "-0.1429", "1.6250", "1.5000"]]
    assert lines[14].split() == ["a_1", "->", "b_1", "0.2857", "-0.1429"]
    assert max(map(len, lines)) <= 110

    assert lifelong.main([path, *settings, "--ste", *experts, "--mode", "compat", "--json"]) == 0
    found = strict(capsys.readouterr().out)
    assert found["lifetime"]["ste_rel_perf"] == close(case["expected"]["lifetime"]["ste_rel_perf"])
    assert lifelong.main([path, "data_range={a_1: {min: 0, max: 1}, b_1: {min: 0, max: 2}}", "--json"]) == 0
    assert strict(capsys.readouterr().out)["normalization_data_range"]["b_1"] == {"min": 0, "max": 2}


@pytest.mark.parametrize("words, error", [
    (["smoothing_method=none"], "No LOG is named"),
    (["LOG", "LOG"], "is named twice as LOG"),
    (["LOG", "--ste", "LOG", "LOG"], "is named twice as STE"),
    (["LOG", "smothing_method=none"], "unknown key smothing_method; did you mean smoothing_method"),
    (["LOG", "--value", "loss"], "no column loss"),
])
def test_wrong_use_of_the_command(tmp_path, capsys, words, error):
    path = write(tmp_path / "log.csv", ROWS)
    assert lifelong.main([path if word == "LOG" else word for word in words]) == 2
    shown = capsys.readouterr().err
    assert error in shown and shown.count("\n") == 1


def test_help_shows_columns_settings_and_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        lifelong.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "block_num, block_type, task, exp_num, value" in text and "smoothing_method=flat" in text and "example: " in text
    with pytest.raises(SystemExit) as stop:
        lifelong.main(["--js", "x.csv"])
    assert stop.value.code == 2


def test_lifelong_does_not_import_torch():
    code = "import sys, nevis_lite.lifelong; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
