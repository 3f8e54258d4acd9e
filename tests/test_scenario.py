"""A lifetime of learning and evaluation blocks: its log, its experts, and the metrics that are told."""

import csv
import json

import pytest
import yaml

from nevis_lite import config, lifelong, scenario
from nevis_lite.config import UserError
from nevis_lite.run_folder import only_one
from nevis_lite.scenario import ScenarioConfig

TASKS = [{"task": "demo_mnist", "year": 2004, "split": 5}]


@pytest.fixture
def settings(data_dir):
    """settings(**changes): three blocks of a few updates on Split-MNIST."""
    def make(**changes):
        content = {"tasks": TASKS, "blocks": [0, 1, 0], "steps": 6, "log_every": 2, "model": {"image_size": 16},
                   "data": {"dir": str(data_dir)}, "device": "cpu", "threads": 1}
        found = ScenarioConfig()
        config.fill(found, content | changes, "test")
        return found

    return make


def rows(path):
    return list(csv.DictReader(path.open()))


def test_the_log_alternates_blocks_and_counts_images(settings, tmp_path):
    scenario.run(settings(), tmp_path / "run")
    log = rows(tmp_path / "run" / "log.csv")
    blocks = {}
    for row in log:
        blocks.setdefault(int(row["block_num"]), []).append((row["block_type"], row["task"], int(row["exp_num"])))
    everything = [f"mnist {part}/5" for part in range(1, 6)]
    for number in (0, 2, 4, 6):
        assert blocks[number] == [("test", task, 96 * number // 2) for task in everything]  # 6 updates of 16 images a block
    for number, task, begin in ((1, 0, 0), (3, 1, 96), (5, 0, 192)):
        assert blocks[number] == [("train", everything[task], begin + done) for done in (0, 32, 64)]
    assert all(0 <= float(row["value"]) <= 1 for row in log)
    assert sorted(path.name for path in (tmp_path / "run" / "experts").iterdir()) == ["0.csv", "1.csv"]


def test_the_results_are_the_metrics_of_the_log_and_its_experts(settings, tmp_path):
    results = scenario.run(settings(), tmp_path / "run")
    assert results == json.loads((tmp_path / "run" / "results.json").read_text())
    log = [(int(row["block_num"]), row["block_type"], row["task"], int(row["exp_num"]), float(row["value"]))
           for row in rows(tmp_path / "run" / "log.csv")]
    experts = {f"mnist {number + 1}/5": [float(row["value"]) for row in rows(tmp_path / "run" / "experts" / f"{number}.csv")
                                         if row["block_type"] == "train"] for number in (0, 1)}
    assert results == json.loads(json.dumps(lifelong.evaluate(log, experts)))
    assert results["lifetime"].keys() == lifelong.evaluate(log)["lifetime"].keys()


def test_a_task_learned_well_is_forgotten_under_a_shared_head(settings, tmp_path):
    """0 against 1, then 2 against 3 with the same two outputs: the first task's accuracy falls."""
    scenario.run(settings(blocks=[0, 1], steps=60, experts=False), tmp_path / "run")
    first = [float(row["value"]) for row in rows(tmp_path / "run" / "log.csv")
             if row["task"] == "mnist 1/5" and row["block_type"] == "test"]
    assert first[1] > 0.9 and first[2] < first[1] - 0.1


def test_heads_of_their_own_leave_the_others_alone(settings, tmp_path):
    life = scenario.set_up(settings(head="own"))
    assert len(life.names) == 5
    shared, own = (scenario.run(settings(head=head, experts=False), tmp_path / head) for head in ("shared", "own"))
    assert shared != own


def test_a_lifetime_is_a_function_of_its_seed_and_goes_on_from_its_logs(settings, tmp_path):
    first = scenario.run(settings(), tmp_path / "a")
    assert scenario.run(settings(), tmp_path / "b") == first and scenario.run(settings(seed=1), tmp_path / "c") != first
    (tmp_path / "b" / "experts" / "1.csv").unlink()
    (tmp_path / "b" / "results.json").unlink()
    before = (tmp_path / "b" / "log.csv").stat().st_mtime_ns
    with pytest.raises(UserError, match="go on with --resume"):
        scenario.run(settings(), tmp_path / "b")
    with pytest.raises(UserError, match="settings changed"):
        scenario.run(settings(steps=7), tmp_path / "b", resume=True)
    assert scenario.run(settings(), tmp_path / "b", resume=True) == first
    assert (tmp_path / "b" / "log.csv").stat().st_mtime_ns == before


@pytest.mark.parametrize("changes, words", [
    ({"blocks": [0, 5]}, "there is no task 5; tasks are counted from 0 to 4"),
    ({"tasks": []}, "at least one task"),
    ({"tasks": TASKS[:1] * 2}, "listed twice"),
    ({"tasks": [{"task": "demo_icon_parts", "year": 2020}], "blocks": []}, "one label an image"),
    ({"model": {"name": "resnet9"}}, "unknown model resnet9"),
    ({"model": {"weights": "x.pt"}}, "starts from random weights"),
])
def test_wrong_settings_are_told_before_training(settings, tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        scenario.run(settings(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_lifetimes_in_one_folder_at_once_are_refused(settings, tmp_path):
    (tmp_path / "life").mkdir()
    with only_one(tmp_path / "life"), pytest.raises(UserError, match="another process is running in this folder"):
        scenario.run(settings(), tmp_path / "life")
    assert not (tmp_path / "life" / "log.csv").exists()


def test_a_diverging_lifetime_is_one_sentence(settings, data_dir, tmp_path, capsys):
    path = tmp_path / "wild.yaml"
    path.write_text(yaml.safe_dump({"tasks": TASKS, "lr": 1e9, "steps": 6, "log_every": 2, "model": {"image_size": 16},
                                    "data": {"dir": str(data_dir)}}))
    assert scenario.main(["--config", str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "the training diverged; lower lr" in error and error.count("\n") == 1


def test_the_command_shows_the_metrics(data_dir, tmp_path, capsys):
    command = ["--config", "split_mnist.yaml", "--out", str(tmp_path / "run"), "steps=4", "log_every=2", "model.image_size=8",
               "blocks=[0,1]", f"data.dir={data_dir}"]
    assert scenario.main(command) == 0
    said = capsys.readouterr().out
    assert "mnist 1/5" in said and str(tmp_path / "run") in said
    assert scenario.main(command) == 2 and "--resume" in capsys.readouterr().err


def test_a_config_that_is_no_text_or_holds_nothing_is_one_sentence(tmp_path, capsys):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert scenario.main(["--config", str(tmp_path / "binary.yaml")]) == 2
    assert "binary.yaml: cannot be read" in capsys.readouterr().err
    (tmp_path / "empty.yaml").write_text("")
    assert scenario.main(["--config", str(tmp_path / "empty.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("tasks: a")
