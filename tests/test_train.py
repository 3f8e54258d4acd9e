"""The command: resume after any kind of stop, refusals, exit codes, and the run folder."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from nevis_lite import baselines, config, metrics, protocol, stream, train
from nevis_lite.config import UserError
from nevis_lite.progress import Progress
from nevis_lite.search import random_search
from nevis_lite.stream import Task

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# Run the command again and again, each time in a fork that dies without any clean-up at the last of a series of moments, each
# (event, ending of a file, how many times); then run it to its end.
DIE_AND_FINISH = """
import json, os, signal, sys
from nevis_lite import protocol, train

def die_at(moments):
    def hook(name, args):
        if name == moments[0][0] and str(args[0]).endswith(moments[0][1]):
            moments[0][2] -= 1
            if moments[0][2] == 0:
                len(moments) > 1 or os.kill(os.getpid(), signal.SIGKILL)
                del moments[0]
    sys.addaudithook(hook)
    train.main(sys.argv[2:])
    os._exit(99)

for moments in json.loads(sys.argv[1]):
    child = os.fork() or die_at(moments)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, moments
sys.exit(train.main(sys.argv[2:]))
"""
MOMENTS = [  # in the order of a run; each counts from the latest start
    [("os.rename", "config.yaml.part", 1)],  # hardly begun
    [("os.rename", "checkpoint.pt.part", 1)],  # the very first checkpoint, written but not yet in place
    [("open", "working/0.pt.part", 4)],  # in the first trial, as the thread begins to write a snapshot
    [("os.rename", "working/0.pt.part", 2)],  # the snapshot is written but not in place
    [("os.rename", "checkpoint.pt.part", 1)],  # the old checkpoint was moved away and the new one isn't in place yet
    [("open", "trials.jsonl", 2)],  # a trial is done and has no row (the first opening is that of the start)
    [("open", "trials.jsonl", 2), ("os.rename", "checkpoint.pt", 1)],  # it has its row, and the checkpoint is older
    [("os.rename", "000.pt.part", 1)],  # a predictor is written but not in place
    [("open", "test.labels.npy", 1)],  # at evaluation
    [("open", "000.pt", 1)],  # in the selection of the second task
    [("open", "tasks.jsonl", 2)],  # a task is judged and has no row
    [("open", "001.pt", 1)],  # in the selection of the third task, when one of two candidates has its score
    [("open", "results.json.part", 1)],  # at the end
]


def python(*arguments):
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=ENVIRONMENT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, code=0):
    """Wait for a process; its output, and its errors after a check of the exit code."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    return output, errors


def wait_for_rows(out, rows, process):
    while count_rows(out) < rows and process.poll() is None:
        time.sleep(0.005)


def count_rows(out):
    path = out / "trials.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# Stop and go on


def test_killed_in_every_phase_and_resumed_the_run_ends_the_same(config_file, finished, assert_same, tmp_path):
    command = ["--config", config_file(checkpoint_seconds=0), "--out", tmp_path / "run", "--resume"]
    finish(python("-c", DIE_AND_FINISH, json.dumps(MOMENTS), *command))
    assert_same(tmp_path / "run", finished("ft-d"))


@pytest.mark.parametrize(("name", "content", "words"), [
    ("config.yaml", "[1, 2]\n", "config.yaml: expected keys and values, found '[1, 2]'."),
    ("environment.json", "{", "environment.json, line 2: not valid YAML"),
    ("environment.json", "{}", "environment.json: damaged: lacks data or device"),
])
def test_damaged_settings_of_a_run_are_one_sentence(stopped, settings, tmp_path, name, content, words):
    out = shutil.copytree(stopped, tmp_path / "run")
    (out / name).write_text(content)
    with pytest.raises(UserError) as error:
        train.run(settings(), out, resume=True)
    assert words in str(error.value) and len(str(error.value)) < 300


def test_a_run_goes_on_whose_config_is_older_than_a_key(stopped, settings, finished, assert_same, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    before = config.read_yaml((out / "config.yaml").read_text(), "config.yaml")
    del before["fit"]["compile"], before["processes"]
    (out / "config.yaml").write_text(config.write_yaml(before))
    train.run(settings(), out, resume=True)
    assert_same(out, finished("ft-d"))


def test_other_pretrained_weights_are_noticed_at_resume(settings, of_baseline, tmp_path):
    weights = tmp_path / "weights.pt"
    shutil.copy(of_baseline("pt")["model"]["weights"], weights)
    changes = {"baseline": "pt", "model": {"weights": str(weights)}}
    train.run(settings(**changes), tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    shutil.copy(Path(of_baseline("pt")["model"]["weights"]).with_name("002.pt"), weights)
    with pytest.raises(UserError, match="the data changed since the run began .model.weights"):
        train.run(settings(**changes), tmp_path / "run", resume=True)


@pytest.mark.parametrize("baseline", ["ft-s", "mt", "pt-ft"])
def test_killed_where_other_candidates_or_tasks_take_part_the_run_ends_the_same(config_file, of_baseline, finished, assert_same,
                                                                               tmp_path, baseline):
    moments = [[("open", "001.pt", 1)],  # in the selection of the third task
               [("open", "001.pt", 1), ("open", "working/0.pt.part", 4)],  # in its first trial
               [("open", "trials.jsonl", 2), ("os.rename", "checkpoint.pt", 1)],  # between two of its trials
               [("open", "tasks.jsonl", 2)]]
    command = ["--config", config_file(**of_baseline(baseline), checkpoint_seconds=0), "--out", tmp_path / "run", "--resume"]
    finish(python("-c", DIE_AND_FINISH, json.dumps(moments), *command))
    assert_same(tmp_path / "run", finished(baseline))


@pytest.mark.slow
def test_killed_in_the_fit_of_a_process_the_run_ends_the_same(config_file, of_baseline, finished, assert_same, tmp_path):
    script = """
import os, signal, sys
import botorch.fit
from nevis_lite import train
fit = botorch.fit.fit_gpytorch_mll
for fits in (1, 2, 2):
    child = os.fork()
    if not child:
        def dying(mll):
            global fits
            fits -= 1
            return fit(mll) if fits else os.kill(os.getpid(), signal.SIGKILL)
        botorch.fit.fit_gpytorch_mll = dying
        train.main(sys.argv[1:])
        os._exit(99)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
sys.exit(train.main(sys.argv[1:]))
"""
    command = ["--config", config_file(**of_baseline("bhpo"), checkpoint_seconds=0), "--out", tmp_path / "run", "--resume"]
    finish(python("-c", script, *command))
    assert_same(tmp_path / "run", finished("bhpo"))


def test_killed_at_random_times_and_resumed_the_run_ends_the_same(config_file, finished, assert_same, tmp_path):
    out, draw = tmp_path / "run", random.Random(0)
    command = ["-m", "nevis_lite.train", "--config", config_file(), "--out", out, "--resume"]
    for rows in (2, 5):
        process = python(*command)
        wait_for_rows(out, rows, process)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        process.communicate()
    finish(python(*command))
    assert_same(out, finished("ft-d"))


def test_signals_exit_with_130_and_the_printed_command_goes_on(config_file, finished, assert_same, tmp_path):
    out = tmp_path / "two words" / "run"
    command = ["-m", "nevis_lite.train", "--config", config_file(checkpoint_seconds=60), "--out", str(out)]
    for number, rows in ((signal.SIGINT, 1), (signal.SIGTERM, 3)):
        process = python(*command)
        wait_for_rows(out, rows, process)
        process.send_signal(number)
        _, errors = finish(process, 130)
        printed = shlex.split(errors.splitlines()[-1])
        assert printed[0] == "python" and printed.count("--resume") == 1 and "Traceback" not in errors
        command = printed[1:]
    finish(python(*command))
    assert_same(out, finished("ft-d"))


def test_a_signal_in_a_trial_saves_its_latest_step(settings, finished, assert_same, tmp_path, monkeypatch):
    def signalling_search(config, seed, task, trial, history):
        if (task, trial) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return random_search(config, seed, task, trial, history)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(protocol.Interrupted):
        patch.setitem(baselines.SEARCH, "random", signalling_search)
        train.run(settings(checkpoint_seconds=1000), tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) == before
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert (checkpoint["task"], checkpoint["rows"]["trials"]) == (1, 3)
    trial = torch.load(tmp_path / "run" / "working" / "1.pt", weights_only=True)
    assert (trial["task"], trial["snapshot"]["step"]) == (1, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    train.run(settings(), tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", finished("ft-d"))
    truncate(tmp_path / "other" / "run" / "working" / "1.pt")  # which costs the work of that trial alone
    train.run(settings(), tmp_path / "other" / "run", resume=True)
    assert_same(tmp_path / "other" / "run", finished("ft-d"))


@pytest.fixture(scope="module")
def stopped(settings, tmp_path_factory):
    """A run that a power cut ended in task 1, after its first trial; the previous checkpoint doesn't know of that row."""
    def failing_search(config, seed, task, trial, history):
        if (task, trial) == (1, 1):
            raise KeyError("power cut")
        return random_search(config, seed, task, trial, history)

    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setitem(baselines.SEARCH, "random", failing_search)
        train.run(settings(checkpoint_seconds=0), out)
    rows = [torch.load(out / name, weights_only=True)["rows"]["trials"] for name in ("checkpoint.previous.pt", "checkpoint.pt")]
    assert rows == [2, 3] and count_rows(out) == 3
    return out


def test_a_stopped_run_can_be_read(stopped, finished):
    whole, part = metrics.load(finished("ft-d")), metrics.load(stopped)
    assert part["unfinished"] == {"done": 1, "planned": 4} and part["tasks"] == whole["tasks"][:1]
    of_the_end = {"error", "error_all", "cflop", "cflop_paper", "tasks", "unfinished", "reason", "seconds", "device"}
    assert {key: whole[key] for key in whole.keys() - of_the_end} == {key: part[key] for key in part.keys() - of_the_end}


def truncate(path):
    path.write_bytes(path.read_bytes()[:1000])


def empty(path):
    path.write_bytes(b"")


def fill_with_text(path):
    path.write_text("a full disk, perhaps\n")


@pytest.mark.parametrize("damage", [truncate, empty, fill_with_text])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
        stopped, settings, finished, assert_same, tmp_path, capsys, damage):
    out = shutil.copytree(stopped, tmp_path / "run")
    damage(out / "checkpoint.pt")
    train.run(settings(), out, resume=True)
    assert "checkpoint.pt: cannot be read" in "".join(capsys.readouterr())
    assert_same(out, finished("ft-d"))


def test_a_good_checkpoint_stays_until_there_is_a_newer_one(stopped, settings, monkeypatch, tmp_path):
    out, replace = shutil.copytree(stopped, tmp_path / "run"), os.replace
    truncate(out / "checkpoint.pt")

    def power_cut(source, target):
        if str(source).endswith("checkpoint.pt.part"):
            raise KeyError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(KeyError, match="power cut"):
        train.run(settings(checkpoint_seconds=0), out, resume=True)
    assert torch.load(out / "checkpoint.previous.pt", weights_only=True)["rows"]["trials"] == 2


def test_without_a_whole_checkpoint_nothing_is_thrown_away(stopped, settings, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    for path in out.glob("checkpoint*.pt"):
        truncate(path)
    with pytest.raises(UserError, match="no checkpoint can be read"):
        train.run(settings(), out, resume=True)
    assert count_rows(out) == 3


def test_rows_past_the_checkpoint_are_cut_even_half_a_row(stopped, settings, finished, assert_same, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    with open(out / "trials.jsonl", "a") as file:
        file.write('{"task": 1, "trial": 1, "error": 0.0}\n{"task": 1, "tri')
    (out / "tasks.jsonl").write_text((out / "tasks.jsonl").read_text() + '{"index": 1')
    train.run(settings(), out, resume=True)
    assert_same(out, finished("ft-d"))


def test_a_missing_row_is_an_error(stopped, settings, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    (out / "trials.jsonl").write_bytes((out / "trials.jsonl").read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match="trials.jsonl"):
        train.run(settings(), out, resume=True)


def test_every_file_of_tensors_loads_without_code(stopped, finished):
    paths = [*stopped.rglob("*.pt"), *finished("ft-d").rglob("*.pt")]
    assert len(paths) == 2 + 1 + 2 + 4
    for path in paths:
        torch.load(path, weights_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# What isn't done


def test_a_run_is_never_overwritten(stopped, settings, config_file, tmp_path, capsys):
    out = shutil.copytree(stopped, tmp_path / "run")
    before = files(out)
    assert train.main(["--config", config_file(), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--resume" in error
    assert files(out) == before


def test_a_folder_with_other_files_is_left_alone(settings, tmp_path):
    (tmp_path / "thesis.tex").write_text("hello")
    for resume in (False, True):
        with pytest.raises(UserError, match="not empty"):
            train.run(settings(), tmp_path, resume)
    assert files(tmp_path)["thesis.tex"] == b"hello"


@pytest.mark.parametrize("place", ["--out", "--out below", "data.dir="])
def test_a_file_where_a_folder_should_be_is_one_line(config_file, tmp_path, capsys, place):
    (tmp_path / "file").write_text("hello")
    file = str(tmp_path / "file")
    words = {"--out": ["--out", file], "--out below": ["--out", f"{file}/run"],
             "data.dir=": [f"data.dir={file}", "--out", str(tmp_path / "run")]}[place]
    assert train.main(["--config", config_file(), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "hello"


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
def test_two_runs_in_one_folder_at_once_are_refused(settings, finished, assert_same, tmp_path, monkeypatch):
    refused = []

    def search(config, seed, task, trial, history):
        if not refused:
            with pytest.raises(UserError, match="another process") as caught:
                train.run(settings(), tmp_path / "run", resume=True)
            refused.append(caught)
        return random_search(config, seed, task, trial, history)

    monkeypatch.setitem(baselines.SEARCH, "random", search)
    train.run(settings(), tmp_path / "run")
    assert_same(tmp_path / "run", finished("ft-d"))


def test_a_finished_run_only_prints_its_table(finished, config_file, tmp_path, capsys):
    out = shutil.copytree(finished("ft-d"), tmp_path / "run")
    before = files(out)
    assert train.main(["--config", config_file(), "--out", str(out), "--resume"]) == 0
    output = capsys.readouterr().out
    assert "icons B" in output and "compute, all phases" in output and "trial 1/2" not in output
    assert files(out) == before


@pytest.mark.parametrize("changes, words", [
    ({"fit": {"steps": 9}}, ("fit.steps", "8", "9")),
    ({"baseline": "indep"}, ("baseline.name", "ft-d", "indep")),
    ({"seed": 1}, ("seed", "0", "1")),
])
def test_another_config_cannot_resume(stopped, settings, tmp_path, changes, words):
    out = shutil.copytree(stopped, tmp_path / "run")
    before = files(out)
    with pytest.raises(UserError) as caught:
        train.run(settings(**changes), out, resume=True)
    assert "{} was {!r} and is {!r}".format(words[0], *map(config.read_yaml, words[1:], words[1:])) in str(caught.value)
    assert files(out) == before


def write_pictures(folder, classes=("blue", "red"), count=30):
    """PNG files of different sizes in a sub-folder for each class, without splits."""
    draw = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 100, (8 + i % 5, 11, 3), np.uint8)
            pixels[..., number] += 150
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_other_pixels_cannot_resume(settings, tmp_path):
    folder = write_pictures(tmp_path / "pictures")
    changes = {"stream": [{"folder": str(folder), "year": 2000}], "data": {"dir": str(tmp_path / "data")}, "fit": {"steps": 1}}
    train.run(settings(**changes), tmp_path / "run")
    Image.new("RGB", (9, 9)).save(folder / "red" / "0.png")
    with pytest.raises(UserError, match=r"data changed.*pictures was '[0-9a-f]+' and is '[0-9a-f]+'"):
        train.run(settings(**changes), tmp_path / "run", resume=True)


def test_two_folders_of_one_name_are_told_apart(settings, read_run, tmp_path):
    folders = [write_pictures(tmp_path / place / "pictures") for place in ("here", "there")]
    changes = {"stream": [{"folder": str(folder), "year": 2000} for folder in folders],
               "data": {"dir": str(tmp_path / "data")}, "fit": {"steps": 1}}
    train.run(settings(**changes), tmp_path / "run")
    assert [row["occurrence"] for row in read_run(tmp_path / "run").tasks] == [1, 1]
    Image.new("RGB", (9, 9)).save(folders[0] / "red" / "0.png")
    with pytest.raises(UserError, match="data changed"):
        train.run(settings(**changes), tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", ["1e3", "no", "010", "12:30", "~", "a: b", "日本"])
def test_names_that_look_like_something_else_survive_a_resume(finished, settings, tmp_path, name):
    before = config.to_dict(config.from_dict(settings(stream={"name": name})))
    out = shutil.copytree(finished("ft-d"), tmp_path / "run")
    (out / "config.yaml").write_text(config.write_yaml(before), encoding="utf-8")
    assert train.run(settings(stream={"name": name}), out, resume=True)["name"] == "run"


def test_dry_run_prints_the_cost_and_makes_no_run(finished, config_file, read_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--config", config_file(), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert train.main(["--config", config_file(), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert f"({read_run(finished('ft-d')).results['cflop']} FLOPs)" in output and "at a time" not in output
    assert train.main(["--config", config_file(), "--dry-run", "processes=2"]) == 0  # starts none
    assert "cpu, 1 thread, 2 trials at a time: " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes on the command line


@pytest.mark.parametrize("override, words", [
    ("search.trial=3", "did you mean search.trials"),
    ("serch.trials=3", "search"),
    ("fit.steps=many", "fit.steps whole number 'many'"),
    ("fit.steps=0", "fit.steps at least 1"),
    ("search.lr=[0.1,0.01]", "search.lr"),
    ("fit.precision=fp64", "fit.precision"),
    ("fit", "section.key=value"),
    ("phase=meta_tset", "meta_test"),
    ("baseline=ft-dd", "baseline.name ft-d"),
    ("baseline.start=relatd", "baseline.start related"),
    ("model=resnet9", "model.name resnet8"),
    ("device=tpu", "device=tpu"),
    ("device=cuda:99", "device=cuda:99"),
    ("device=meta", "device=meta"),
    ("stream=demi", "did you mean demo"),
    ("stream=[{task: demo_mnits, year: 2004}]", "demo_mnist"),
    ("stream=[{task: demo_mnist, year: 2004}, {task: demo_faces, year: 2003}]", "order of their years"),
])
def test_a_mistake_is_one_line_and_leaves_nothing(config_file, tmp_path, monkeypatch, capsys, override, words):
    monkeypatch.chdir(tmp_path)
    out = ["--out", str(tmp_path / "run"), f"data.dir={tmp_path / 'data'}"]
    assert train.main(["--config", config_file(), *out, override]) == 2
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and not output
    assert all(word in error for word in words.split())
    assert not list(tmp_path.iterdir())


def test_an_unknown_config_is_one_line_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--config", "demo_ftdd.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "did you mean demo_ftd.yaml" in error
    assert not list(tmp_path.iterdir())


def test_a_broken_config_is_one_line_with_file_and_line(tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("seed: 1\nfit: {steps: 3\n")
    assert train.main(["--config", str(tmp_path / "broken.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "broken.yaml, line " in error


@pytest.mark.parametrize("arguments", [["--config", "demo_ftd.yaml", "--resum"], ["--conf", "demo_ftd.yaml"], []])
def test_options_are_neither_shortened_nor_swallowed(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(arguments)
    assert caught.value.code == 2


def test_batches_of_one_image_need_no_traceback(config_file, tmp_path):
    """Batch norm cannot work on one value."""
    one_task = "stream=[{task: demo_landsat, year: 1998}]"
    words = ["--out", str(tmp_path / "run"), "fit.max_batch=1", "model.image_size=8", one_task]
    assert train.main(["--config", config_file(), *words]) in (0, 2)


CHECK_TORCH = "import sys; from nevis_lite import train; code = {}; assert 'torch' not in sys.modules; sys.exit(code)"


def test_missing_data_are_all_listed_before_torch_is_loaded(tmp_path):
    call = f"train.main(['--config', 'short_ftd.yaml', 'data.dir={tmp_path}', '--out', '{tmp_path}/run'])"
    output, errors = finish(python("-c", CHECK_TORCH.format(call)), 3)
    listed = [line.split()[-1] for line in errors.splitlines() if line.startswith("  ")]
    assert len(set(listed)) == len(listed) == 28 and all(Path(path).parent == tmp_path for path in listed)
    assert "28 data sets are missing" in errors and "Traceback" not in errors
    assert not output and not list(tmp_path.iterdir())


def test_help_comes_without_torch():
    output, errors = finish(python("-X", "importtime", "-m", "nevis_lite.train", "--help"))
    assert "--resume" in output and "search.trials=16" in output
    assert "nevis_lite.config" in errors and "torch" not in errors


def test_missing_data_that_are_allowed_mark_the_results(config_file, read_run, tmp_path, capsys):
    tasks = "stream=[{task: demo_landsat, year: 1998}, {task: cifar10, year: 2011}, {task: demo_faces, year: 2020}]"
    command = ["--config", config_file(fit={"steps": 1}), "--out", str(tmp_path / "run"), tasks]
    assert train.main(command) == 3
    assert not (tmp_path / "run").exists()
    assert train.main([*command, "stream.allow_missing=true"]) == 0
    results = read_run(tmp_path / "run").results
    assert results["partial"] == ["CIFAR 10"]
    assert [(row["index"], row["name"]) for row in results["tasks"]] == [(0, "Landsat"), (1, "faces")]
    assert "PARTIAL: missing CIFAR 10" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# As a library


def test_a_name_replaces_the_list_of_the_file_and_a_list_is_no_known_stream(config_file, settings):
    assert config.load(config_file(), ["stream=demo"]).stream == config.StreamConfig("demo")
    own = config.from_dict({"stream": {"tasks": settings()["stream"]["tasks"]}})
    assert stream.load(own.stream).name not in ("short", "demo")


def test_equal_seeds_are_bit_equal_and_other_seeds_differ(settings, finished, assert_same, read_run, tmp_path):
    results = train.run(config.from_dict(settings()), tmp_path / "a" / "run")
    assert results == json.loads((tmp_path / "a" / "run" / "results.json").read_text())
    assert_same(tmp_path / "a" / "run", finished("ft-d"))
    train.run(settings(seed=1), tmp_path / "b" / "run")
    one, two = read_run(tmp_path / "a" / "run"), read_run(tmp_path / "b" / "run")
    for trial, other in zip(one.trials, two.trials, strict=True):
        assert trial["hyperparameters"] != other["hyperparameters"]
    for name, predictor in one.predictors.items():
        key = "backbone.conv1.weight"
        assert not torch.equal(predictor["state"][key], two.predictors[name]["state"][key])


def write_idx(folder, split, images, labels):
    folder.mkdir(exist_ok=True)
    for kind, values in (("images", images), ("labels", labels)):
        shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
        path = folder / f"{split}-{kind}-idx{values.ndim}-ubyte"
        path.write_bytes(bytes((0, 0, 8, values.ndim)) + shape + values.astype(np.uint8).tobytes())


def test_own_pictures_and_own_idx_files_run_end_to_end(settings, read_run, tmp_path):
    pictures, draw = write_pictures(tmp_path / "pictures", ("blue", "red", "10")), np.random.default_rng(1)
    for split, count in (("train", 40), ("test", 20)):
        write_idx(tmp_path / "digits", split, draw.integers(0, 256, (count, 6, 7)), np.arange(count) % 4)
    tasks = [{"name": "My pictures", "folder": str(pictures), "year": 2001, "domain": "art"},
             {"idx": str(tmp_path / "digits"), "year": 2005, "meta": "test"}]
    train.run(settings(stream=tasks, data={"dir": str(tmp_path / "data")}), tmp_path / "run")
    first, second = read_run(tmp_path / "run").results["tasks"]
    assert (first["name"], first["num_classes"], first["domain"], first["meta"]) == ("My pictures", 3, "art", "train")
    assert (second["name"], second["num_classes"], second["year"], second["meta"]) == ("digits", 4, 2005, "test")
    assert 0 <= first["error"] <= 1 and 0 <= second["error"] <= 1
    assert 30 < first["num_train"] < 75 and 20 < second["num_train"] < 40  # the rest of it became dev and so on


def test_several_labels_an_image_of_which_the_selection_sees_none(settings, read_run, tmp_path):
    draw, labels = np.random.default_rng(0), np.zeros((40, 3))
    labels[:3] = np.eye(3)
    for split in ("train", "dev", "dev_test", "test"):
        write_idx(tmp_path / "rare", split, draw.integers(0, 256, (40, 8, 8)), labels * ([1, 0, 1] if split == "test" else 1))
    tasks = [{"task": "demo_landsat", "year": 1998}, {"idx": str(tmp_path / "rare"), "year": 2000}]
    train.run(settings(stream=tasks, select={"max_dev": 5}, data={"dir": str(tmp_path / "data")}), tmp_path / "run")
    row = read_run(tmp_path / "run").tasks[1]
    assert row["kind"] == "multi_label" and row["source"] in (None, 0)
    assert row["labels_left_out"] == 1 and 0 <= row["error"] <= 1  # of test, where one label has no positive example


def test_a_run_in_the_present_folder_has_its_name(settings, tmp_path, monkeypatch):
    (tmp_path / "my run").mkdir()
    monkeypatch.chdir(tmp_path / "my run")
    one_task = {"tasks": settings()["stream"]["tasks"][:1]}
    assert train.run(settings(stream=one_task, fit={"steps": 1}), ".")["name"] == "my run"


def test_time_left_is_unknown_before_the_first_step_after_a_resume(capsys):

    progress = Progress([10**12], flops_done=9 * 10**11)
    task = Task(0, "x", "X", 2000, 1, "other", "single_label", 2, "train", None)
    progress.begin(task, trial=1, trials=2, steps=100, step=100, batch=16, trial_flops=10**11)  # stopped at its last step
    progress.end(SimpleNamespace(step=100, curve=[[0, 0.5], [100, 0.2]], loss=0.1, loss_sum=0.0, best_state={}, best_error=0.2,
                                 failed=False))
    assert "left ?, stream ?" in capsys.readouterr().out


def test_time_left_counts_trials_of_other_processes(capsys):
    """Two of a task's three trials are another process's; what is left after it are the other task's three."""
    tasks = [SimpleNamespace(index=number, year=2000, name="x") for number in range(2)]
    progress = Progress([300, 300], 0)
    trial = SimpleNamespace(step=0, curve=[[0, 0.5]], loss_sum=0.0, loss=None, best_state=None, best_error=0.5, failed=False)
    progress.begin(tasks[0], 0, 3, 10, 0, 16, 150)
    trial.step = 10
    progress.end(trial)
    progress.tell(tasks[0], {"trial": 1, "steps": 10, "loss": 0.25, "error": None, "status": "failed"}, 3)
    progress.finish(tasks[0])
    assert progress.spent == 300
    assert "2000 x                    trial 2/3 by another process  step 10 loss 0.2500 dev - FAILED" in capsys.readouterr().out
