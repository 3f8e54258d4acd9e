import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import made_fluid
import numpy as np
import pytest
from made_runs import row, run, write, write_unfinished
from sklearn.metrics import average_precision_score

from nevis_lite import analysis, compare, metrics

# ---- one task


def test_single_label_error():
    scores = [[0.1, 0.9], [0.8, 0.2], [0.5, 0.5], [0.5, 0.5]]
    assert metrics.single_label_error(scores, [1, 1, 0, 1]) == 0.5  # a tie goes to class 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("distinct", [2, 5, 10**6])
def test_average_precision_is_scikit_learns(dtype, distinct):
    rng = np.random.default_rng(distinct)
    for n, _ in product((1, 2, 17, 500), range(5)):
        scores = (rng.integers(distinct, size=n) / distinct).astype(dtype)
        positives = rng.random(n) < 0.3
        positives[rng.integers(n)] = True
        expected = average_precision_score(positives, scores)
        assert metrics.average_precision(scores, positives) == pytest.approx(expected, abs=1e-12)


def test_average_precision_by_hand():
    # From the top: positive (P 1, R 1/2), then a tie of a positive and a negative (P 2/3, R 1).
    assert metrics.average_precision([3, 2, 2, 1], [1, 1, 0, 0]) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert metrics.average_precision([1, 1, 1, 1], [1, 0, 0, 0]) == 0.25
    assert metrics.average_precision([1, 2], [0, 0]) is None


def test_classes_without_a_positive_are_left_out():
    rng = np.random.default_rng(0)
    scores, labels = rng.random((50, 4)), rng.integers(2, size=(50, 4))
    labels[:, 2] = 0
    labels[7] = 0  # an example without any label counts as a negative
    kept = [0, 1, 3]
    expected = average_precision_score(labels[:, kept], scores[:, kept], average="macro")
    value, undefined = metrics.mean_average_precision(scores, labels)
    assert value == pytest.approx(expected, abs=1e-12) and undefined == 1
    assert metrics.multi_label_error(scores, labels) == 1 - value
    assert metrics.error("multi_label", scores, labels) == 1 - value
    assert metrics.mean_average_precision(scores, 0 * labels) == (None, 4)
    assert metrics.mean_average_precision(scores, 0 * labels, map_zero=True) == (0.0, 4)
    value, undefined = metrics.mean_average_precision(scores, labels, map_zero=True)
    with pytest.warns(UserWarning, match="No positive class"):
        assert value == pytest.approx(average_precision_score(labels, scores, average="macro"), abs=1e-12) and undefined == 1
    with pytest.raises(ValueError, match="no class has a positive"):
        metrics.multi_label_error(scores, 0 * labels)


@pytest.mark.parametrize("kind, labels", [("single_label", (0,)), ("multi_label", (0, 3))])
def test_no_examples(kind, labels):
    with pytest.raises(ValueError, match="no examples"):
        metrics.error(kind, np.zeros((0, 3)), np.zeros(labels, int))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind, labels", [("single_label", [0, 1]), ("multi_label", [[0, 1], [1, 0]])])
def test_scores_that_are_not_finite(kind, labels, bad):
    with pytest.raises(ValueError, match="not finite"):
        metrics.error(kind, [[0.0, bad], [1.0, 0.0]], labels)


@pytest.mark.parametrize("kind, labels", [("single_label", [[0], [1]]), ("single_label", [0]), ("multi_label", [0, 1])])
def test_shapes_that_do_not_match(kind, labels):
    with pytest.raises(ValueError, match="do not go together"):
        metrics.error(kind, [[0.0, 1.0], [1.0, 0.0]], labels)


def test_unknown_kind():
    with pytest.raises(ValueError, match="'regression'.*single_label, multi_label"):
        metrics.error("regression", [[0.0]], [0])


# ---- one run


def test_summarise():
    tasks = run()["tasks"] + [row(106, "birds", 2021, 0.3, meta="test")]
    summary = metrics.summarise(tasks, "meta_test")
    assert summary["error"] == pytest.approx(0.2) and summary["error_all"] == pytest.approx(0.3)
    assert summary["cflop_paper"] == 4 * 3 * 10**12
    assert summary["cflop"] == 4 * 3_240_000_000_000
    assert metrics.summarise(tasks, "meta_train")["error"] == summary["error_all"]
    assert metrics.summarise(tasks[:2], "meta_test")["error"] == pytest.approx(0.4)
    assert metrics.summarise([], "meta_test") == {"error": None, "error_all": None, "cflop": 0, "cflop_paper": 0}


@pytest.mark.parametrize("undefined", [None, float("nan")])
def test_the_mean_of_an_undefined_error_is_none(undefined):
    summary = metrics.summarise(run(errors=(undefined, 0.3, 0.1))["tasks"], "meta_test")
    assert summary["error"] == 0.1 and summary["error_all"] is None


def test_names_break_no_table():
    tasks = [row(0, "a", 2000, 0.5, name="old\nbirds | new"), row(1, "b", 2001, 0.5)]
    assert "  old birds | new  " in metrics.table(run(tasks=tasks)).splitlines()[1]
    assert "| 2000 | old birds \\| new | 0.5000 |" in compare.text([run(tasks=tasks)])


def test_human():
    cases = {0: "0 GFLOP", 5e6: "0.005 GFLOP", 3.24e12: "3.24 TFLOP", 999.4e12: "999 TFLOP", 999.6e12: "1 PFLOP"}
    cases |= {1.5e18: "1.5 EFLOP", 1e21: "1000 EFLOP", 1.234e22: "12340 EFLOP"}
    assert {flops: metrics.human(flops) for flops in cases} == cases


def test_table():
    assert metrics.table(run()).splitlines() == [
        "  #  year  task                       classes    train  start                  lr  smooth   error     compute",
        "  0  1998  DIGITS                          10  1281167  scratch             0.012    0.15  0.5000  3.24 TFLOP",
        "  1  2004  A VERY LONG NAME OF A           10  1281167  0 DIGITS            0.012    0.15  0.3000  3.24 TFLOP",
        "105  2021  FLOWERS                 *       10  1281167  1 A VERY LONG NAME  0.012    0.15  0.1000  3.24 TFLOP",
        "",
        "mean error, meta-test tasks * (1)         0.1000",
        "mean error, all tasks (3)                 0.3000",
        "compute, training only (as in the paper)  9 TFLOP",
        "compute, all phases                       9.72 TFLOP",
    ]


def test_table_of_a_partial_run_and_of_meta_train():
    missing = [f"data set {i}" for i in range(30)]
    lines = metrics.table(run(partial=missing, phase="meta_train", errors=(None, 0.3, 0.1))).splitlines()
    assert lines[0].startswith("PARTIAL: missing data set 0, data set 1,")
    assert max(map(len, lines)) <= 110
    assert not any("meta-test" in line for line in lines)
    assert "partial mean, all tasks (3)               -" in lines
    assert not any("mean error" in line for line in lines)


def test_load(tmp_path):
    folder = write(tmp_path / "a", run())
    assert metrics.load(folder) == run()
    with pytest.raises(FileNotFoundError, match=f"No run in {tmp_path}/b: .* results.json"):
        metrics.load(tmp_path / "b")


def test_a_run_that_goes_on_can_be_read(tmp_path):
    results = metrics.load(write_unfinished(tmp_path / "a", run(), 5))
    reason = "unfinished: 3 of 5 tasks are done"
    assert results == {**run(), "name": "a", "error": None, "error_all": None, "unfinished": {"done": 3, "planned": 5},
                       "reason": reason}
    lines = metrics.table(results).splitlines()
    assert lines[0] == "UNFINISHED: 3 of 5 tasks are done"
    assert "mean so far, all tasks (3)                0.3000" in lines and not any("mean error" in line for line in lines)
    assert metrics.with_reference_map(results) == results
    assert metrics.load(write_unfinished(tmp_path / "b", run(tasks=[]), 5))["unfinished"] == {"done": 0, "planned": 5}
    (tmp_path / "b" / "tasks.jsonl").unlink()
    assert metrics.load(tmp_path / "b")["tasks"] == []


def test_a_run_without_tasks_is_no_traceback(tmp_path, capsys):
    metrics.main([write(tmp_path / "a", run(tasks=[])), "--more"])
    said = capsys.readouterr().out
    assert "mean error, all tasks (0)                 -" in said and "no data set came twice" in said
    metrics.main([str(tmp_path / "a"), "--more", "--json"])
    assert json.loads(capsys.readouterr().out)["error"] is None


@pytest.mark.parametrize("name, text, words", [
    ("results.json", "{", "results.json: damaged, or no JSON"),
    ("results.json", "\N{DEGREE SIGN}", "results.json: damaged, or no text"),
    ("results.json", "[]", "results.json: holds no JSON object"),
    ("results.json", '{"name": "x", "tasks": []}', r"results.json: is not of a run \(.*\): it lacks stream"),
    ("results.json", json.dumps({**run(), "tasks": [1]}), "its tasks are no list of rows"),
    ("results.json", json.dumps(run()).replace('"year": 1998, ', ""), "row 1 of the tasks lacks year"),
    ("results.json", json.dumps(run(tasks=[row(3, "a", 2000, 0.1), row(3, "a", 2000, 0.2)])), r"two rows of task 3 \(A\)"),
    ("results.json", json.dumps(run(seed="0")), "it has '0' for seed"),
    ("results.json", json.dumps(run(cflop_pretraining="1e12")), "has '1e12' for cflop_pretraining"),
    ("results.json", json.dumps(run(tasks=[row(3, "a", 2000, "0.1")])), "row 1 of the tasks has '0.1' for error"),
    ("results.json", json.dumps(run()).replace('"year": 1998', '"year": [1998]'), r"has \[1998\] for year"),
    ("results.json", json.dumps(run()).replace("3000000000000", "NaN"), "tasks, flops: has None for train"),
    ("results.json", json.dumps(run()).replace('"train": 3000000000000, ', ""), "row 1 of the tasks, flops: lacks train"),
    ("results.json", json.dumps(run()).replace("0.012345", "[0.1]"), r"hyperparameters: has \[0.1\] for lr"),
    ("results.json", json.dumps(run()).replace("[50, 0.6]", "50"), "row 1 of the tasks: its curve is no list of"),
    ("environment.json", '{"head": {"stream": "demo"}}', "environment.json: does not say what run this is"),
    ("environment.json", '{"data": {}}', "environment.json: does not say what run this is"),
])
def test_files_that_make_no_sense_are_one_sentence(tmp_path, capsys, name, text, words):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=words):
        metrics.load(tmp_path)
    with pytest.raises(SystemExit) as stop:
        metrics.main([str(tmp_path)])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and not said.out


def test_a_damaged_row_is_named_by_its_line(tmp_path):
    folder = write_unfinished(tmp_path / "a", run(), 5)
    path = tmp_path / "a" / "tasks.jsonl"
    path.write_text(path.read_text().replace('"index": 1,', '"index": ,'))
    with pytest.raises(ValueError, match="tasks.jsonl, line 2: damaged"):
        metrics.load(folder)
    write_unfinished(tmp_path / "b", run(tasks=run()["tasks"] * 2), 6)
    with pytest.raises(ValueError, match="tasks.jsonl: has two rows of task 0"):
        metrics.load(tmp_path / "b")


def test_nan_in_a_file_is_undefined(tmp_path, capsys):
    folder = write(tmp_path / "a", run(errors=(0.5, 0.3, float("nan"))))
    results = metrics.load(folder)
    assert results["tasks"][2]["error"] is None and results["error"] is None and results["error_all"] is None
    metrics.main([folder, "--json", "--more"])
    assert "NaN" not in capsys.readouterr().out


def test_the_reference_counts_classes_without_positives_as_zero():
    # mAP 0.8 over the 3 classes that have positives is 0.6 over all 4.
    labels = row(1, "labels", 2020, 0.2, meta="test", kind="multi_label", num_classes=4, labels_left_out=1)
    found = metrics.with_reference_map(run(tasks=[row(0, "digits", 1998, 0.1), labels]))
    assert [task["error"] for task in found["tasks"]] == pytest.approx([0.1, 0.4])
    assert found["error"] == pytest.approx(0.4) and found["error_all"] == pytest.approx(0.25)
    del labels["labels_left_out"]
    assert metrics.with_reference_map(run(tasks=[labels]))["tasks"][0]["error"] is None
    labels["error"] = None
    assert metrics.with_reference_map(run(tasks=[labels]))["error"] is None


def test_the_table_names_starts_that_are_no_task():
    results = run()
    results["tasks"][0]["source"] = "pretrained"
    lines = metrics.table({**results, "cflop_pretraining": 5 * 10**12}).splitlines()
    results["tasks"][1]["source"] = 99  # no task of the run
    assert "  99  " in metrics.table(results).splitlines()[2]
    assert "  pretrained  " in lines[1] and lines[-1] == "compute of the pretrained weights, beside 5 TFLOP"


# ---- the command


def test_command(tmp_path, capsys):
    one, other = write(tmp_path / "one", run()), write(tmp_path / "other", run("indep"))
    metrics.main([one])
    assert capsys.readouterr().out == metrics.table(run()) + "\n"
    metrics.main([one, other])
    assert capsys.readouterr().out == compare.text([run(), run("indep")]) + "\n"
    metrics.main([one, "--json"])
    assert json.loads(capsys.readouterr().out) == run()
    metrics.main([one, other, "--json"])
    assert json.loads(capsys.readouterr().out) == compare.comparison([run(), run("indep")])
    metrics.main([one, other, "--more"])
    assert capsys.readouterr().out.startswith(compare.text([run(), run("indep")]) + "\n\n| run | regret")


def test_command_with_the_references_map(tmp_path, capsys):
    labels = row(1, "labels", 2020, 0.2, meta="test", kind="multi_label", num_classes=4, labels_left_out=1)
    folder = write(tmp_path / "run", run(tasks=[labels]))
    for arguments, mean in (([], "0.2000"), (["--map-zero"], "0.4000")):
        metrics.main([folder, *arguments])
        assert f"mean error, meta-test tasks * (1)         {mean}" in capsys.readouterr().out


def test_command_on_a_missing_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        metrics.main([str(tmp_path / "none")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        metrics.main([str(tmp_path), "--js"])
    assert stop.value.code == 2


@pytest.mark.parametrize("module", ["metrics", "lifelong", "fluid_metrics"])
def test_a_reader_that_stops_reading_is_no_fault(tmp_path, module):
    write(tmp_path / "run", run(tasks=[row(index, "a", 2000 + index, 0.5) for index in range(300)]))  # more than a pipe holds
    rows = "".join(f"{i},{('test', 'train')[i % 2]},task {i // 10},{i},0.5\n" for i in range(6000))
    (tmp_path / "log.csv").write_text("block_num,block_type,task,exp_num,value\n" + rows)
    methods = {f"method {index}": (0.5, 0.0) for index in range(30)}
    made_fluid.run(tmp_path / "fluid", methods=methods)
    inputs = {"metrics": "run", "lifelong": "log.csv", "fluid_metrics": "fluid"}
    command = [sys.executable, "-m", f"nevis_lite.{module}", inputs[module], "--json"]
    with subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": str(Path(metrics.__file__).parent.parent)},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_metrics_do_not_import_torch():
    code = "import sys, nevis_lite.metrics, nevis_lite.analysis; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_numbers_of_several_runs_are_found_here_too():
    assert metrics.pareto is compare.pareto and metrics.regret is analysis.regret
    assert metrics.forward_transfer is analysis.forward_transfer
    with pytest.raises(AttributeError, match="no attribute 'regrets'"):
        metrics.regrets  # noqa: B018
