"""Grids of runs: their names, what is skipped, and what stands at the end."""

import pytest

from nevis_lite import compare, metrics, sweep
from nevis_lite.config import UserError


def test_a_grid_has_a_run_for_each_combination(config_file):
    name = config_file()
    runs = sweep.grid([name], ["search.trials=1,2", "fit.steps=8", "data.crop_area=[0.5,1.0],[0.8,1.0]", "seed=0,1"])
    assert len(runs) == 8
    assert runs["tiny-trials1-crop_area_0.5_1.0_-seed0"] == (
        name, ["search.trials=1", "fit.steps=8", "data.crop_area=[0.5,1.0]", "seed=0"])
    assert list(runs)[-1] == "tiny-trials2-crop_area_0.8_1.0_-seed1"


@pytest.mark.parametrize("override, words", [("search.trails=1,2", "did you mean search.trials"), ("seed=0,x", "whole number"),
                                             ("seed=1,1", "name each value once"),
                                             ("search.trials=1,1.0", "name each value once"),
                                             ("search.trials", "section.key=value")])
def test_a_wrong_grid_is_refused_before_the_first_run(config_file, override, words):
    with pytest.raises(UserError, match=words):
        sweep.grid([config_file()], [override])


def test_a_sweep_needs_a_file_and_splits_at_outer_commas(config_file, capsys):
    assert sweep.main(["--config", "seed=1"]) == 2 and "--config needs a file" in capsys.readouterr().err
    tasks = "stream.tasks=[{task: demo_mnist, year: 2004}, {task: demo_faces, year: 2017}]"
    (run,) = sweep.grid([config_file()], [tasks])
    assert sweep.grid([config_file()], [tasks])[run][1] == [tasks]


def test_a_sweep_ends_with_the_comparison_and_goes_on_where_it_stopped(config_file, data_dir, tmp_path, capsys):
    tasks = [{"task": "demo_landsat", "year": 1998}, {"task": "demo_icons_b", "year": 2021}]
    command = ["--config", config_file(stream=tasks), "--out", str(tmp_path / "runs"), "baseline=indep,ft-prev",
               "search.trials=1", "fit.steps=2,4"]
    assert sweep.main([*command, "--dry-run"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == 4 and not (tmp_path / "runs").exists()
    assert sweep.main(command) == 0
    said = capsys.readouterr().out
    runs = [metrics.load(tmp_path / "runs" / name) for name in names]
    assert compare.text(runs) in said and "| indep, 1 x 2 updates | 1 | 1 x 2 |" in said
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("results.json")}
    (tmp_path / "runs" / names[0] / "results.json").unlink()
    assert sweep.main(command) == 0
    assert [path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp] == [
        tmp_path / "runs" / names[0] / "results.json"]


def test_a_run_that_fails_does_not_stop_the_others(config_file, tmp_path, capsys):
    tasks = [{"task": "demo_icons_b", "year": 2021}]
    command = ["--config", config_file(stream=tasks, search={"trials": 1}), "--out", str(tmp_path),
               "search.lr=[1e8,1e9],[0.01,0.1]"]
    assert sweep.main(command) == 2
    assert (tmp_path / "tiny-lr_0.01_0.1_-seed0" / "results.json").is_file()
    assert "1 of 2 runs failed: tiny-lr_1e8_1e9_-seed0" in capsys.readouterr().err


def test_a_folder_of_another_config_is_told_before_the_first_run(config_file, tmp_path, capsys):
    out = tmp_path / "runs"
    command = ["--config", config_file(), "--out", str(out), "fit.steps=1", "search.trials=1"]
    assert sweep.main([*command, "seed=1"]) == 0
    kept = (out / "tiny-seed1" / "results.json").read_bytes()
    capsys.readouterr()
    assert sweep.main([*command[:-2], "fit.steps=2", "search.trials=1", "seed=0,1"]) == 2
    output, error = capsys.readouterr()
    assert not output and "tiny-seed1: config.yaml changed since the run began (fit.steps was 1 and is 2)" in error
    assert sorted(path.name for path in out.iterdir()) == ["tiny-seed1"]
    assert (out / "tiny-seed1" / "results.json").read_bytes() == kept
