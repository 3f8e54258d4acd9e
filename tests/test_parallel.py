"""Several processes, as torchrun or the command itself starts them: the same results as one, however they end and go on."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nevis_lite import config, parallel, stream, sweep, train
from nevis_lite.config import UserError
from nevis_lite.setup import set_up

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun's processes end by signals")


# The command, but process 1 meets its end at the n-th opening of a file with an ending: a signal, or a full disk.
END_EARLY = """
import os, sys
from nevis_lite import train

ending, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def hook(event, arguments):
    global count
    if event == "open" and str(arguments[0]).endswith(ending) and os.environ["RANK"] == "1":
        count -= 1
        if count == 0 and number:
            os.kill(os.getpid(), number)
        elif count == 0:
            raise OSError(28, "No space left on device", arguments[0])

sys.addaudithook(hook)
sys.exit(train.main(sys.argv[4:]))
"""


def torchrun(*arguments, script=("-m", "nevis_lite.train")):
    """Its exit code, output and errors, with two processes."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script, *arguments)


def python(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], env=ENVIRONMENT, text=True, timeout=120, capture_output=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def end_early(config_file, tmp_path):
    """end_early(number, ending, count, **changes): a run in which process 1 gets a signal, or without one a full disk."""
    def start(number, ending=".pt.part", count=4, **changes):  # in its first trial
        (tmp_path / "early.py").write_text(END_EARLY)
        command = ["--config", config_file(checkpoint_seconds=0, **changes), "--out", tmp_path / "run"]
        return command, torchrun(ending, count, number, *command, script=[tmp_path / "early.py"])

    return start


def test_one_is_killed_and_both_go_on_to_the_results_of_one_process(end_early, finished, assert_same, tmp_path):
    command, (code, _, errors) = end_early(signal.SIGKILL)
    assert code and "SIGKILL" in errors and "Stopped; the run goes on where it was" in errors
    code, output, errors = torchrun(*command, "--resume")
    assert code == 0, errors
    assert output.count("mean error, all tasks") == 1
    assert not (tmp_path / "run" / "working").exists()
    assert_same(tmp_path / "run", finished("ft-d"))


def test_an_error_in_one_ends_both_with_one_sentence_and_one_process_goes_on(end_early, finished, assert_same, tmp_path):
    command, (code, _, errors) = end_early(0)
    assert code and errors.count("No space left on device") == 1 and "exitcode  : 2" in errors
    assert errors.count("Traceback") == 1  # of torchrun itself
    assert train.main([*map(str, command), "--resume"]) == 0
    assert_same(tmp_path / "run", finished("ft-d"))


def test_a_search_that_looks_back_is_refused(settings, of_baseline, monkeypatch):
    """Before any file is looked at."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    made = config.from_dict(settings(**of_baseline("bhpo")))
    with pytest.raises(UserError, match="chooses each trial from those before.*parallel=data"):
        set_up(made, stream.load(made.stream, made.data.dir, made.phase))


def test_shared_batches_keep_the_ledger_and_stop_and_resume_exactly(end_early, settings, finished, of_baseline, assert_same,
                                                                    read_run, tmp_path):
    """A signal to one stops both. Batch norm sees each process's half here, so that errors are not those of one process."""
    command, (code, _, errors) = end_early(signal.SIGTERM, "000.pt", 1, **of_baseline("mt"), parallel="data",
                                          stream={"tasks": settings()["stream"]["tasks"][:2]})
    assert code and "exitcode  : 130" in errors and errors.count("Stopped; the run goes on where it was") == 1, errors
    assert "torchrun --nproc-per-node=2" in errors and errors.count("Traceback") == 1
    for out, more in ((tmp_path / "run", ["--resume"]), (tmp_path / "other" / "run", [])):
        code, _, errors = torchrun(*command[:2], "--out", out, *more)
        assert code == 0, errors
    assert_same(tmp_path / "run", tmp_path / "other" / "run")
    shared, one = read_run(tmp_path / "run"), read_run(finished("mt"))
    for row, other in zip(shared.trials, one.trials[:4], strict=True):
        assert row["status"] == "done" and 0 <= row["error"] <= 1
        assert (row["hyperparameters"], row["flops"]) == (other["hyperparameters"], other["flops"])
        if row["task"] == 0:  # before the first step, from random weights
            assert row["curve"][0] == other["curve"][0]


def test_the_command_starts_processes_that_give_the_results_of_one(config_file, finished, assert_same, tmp_path):
    code, output, errors = python("-m", "nevis_lite.train", "--config", config_file(), "processes=2", "--out", tmp_path / "run")
    assert code == 0, errors
    assert output.startswith("2 processes share the trials of each task") and output.count("mean error, all tasks") == 1
    assert_same(tmp_path / "run", finished("ft-d"))


def test_a_process_that_dies_ends_those_beside_it_and_one_goes_on(config_file, finished, assert_same, tmp_path):
    (tmp_path / "early.py").write_text(END_EARLY)
    command = ["--config", config_file(checkpoint_seconds=0), "--out", tmp_path / "run", "processes=2"]
    code, _, errors = python(tmp_path / "early.py", ".pt.part", 4, signal.SIGKILL.value, *command)
    assert code == 128 + signal.SIGKILL and "Process 1 of 2 was ended by SIGKILL" in errors, errors
    assert errors.count("Stopped; the run goes on where it was") == 1 and "Traceback" not in errors
    assert f"python {tmp_path / 'early.py'} .pt.part 4" in errors and "torchrun" not in errors
    assert train.main([*map(str, command[:-1]), "processes=1", "--resume"]) == 0
    assert_same(tmp_path / "run", finished("ft-d"))


def test_an_error_of_one_of_them_is_told_once_and_is_the_exit_code(config_file, tmp_path):
    (tmp_path / "early.py").write_text(END_EARLY)
    code, _, errors = python(tmp_path / "early.py", ".pt.part", 4, 0, "--config", config_file(checkpoint_seconds=0),
                             "--out", tmp_path / "run", "processes=2")
    assert code == 2 and errors.count("No space left on device") == 1 and "Traceback" not in errors, errors


def test_one_that_shares_batches_and_dies_ends_the_others_in_a_sentence(config_file, settings, tmp_path):
    (tmp_path / "early.py").write_text(END_EARLY)
    changes = {"checkpoint_seconds": 0, "parallel": "data", "stream": {"tasks": settings()["stream"]["tasks"][:1]}}
    code, _, errors = python(tmp_path / "early.py", "labels.npy", 2, signal.SIGKILL.value, "--config", config_file(**changes),
                             "--out", tmp_path / "run", "processes=2")
    assert code == 128 + signal.SIGKILL and "Another process of the run has ended" in errors and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_stops_all_and_they_go_on(number, config_file, finished, assert_same, tmp_path):
    """After SIGKILL, which cannot be passed on, they notice that they have lost their parent."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "nevis_lite.train", "--config", config_file(checkpoint_seconds=0, fit={"steps": 8}),
               "--out", str(run), "processes=2"]
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (run / "working").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130), errors
    assert errors.count("Stopped; the run goes on where it was") == 1 and "Traceback" not in errors, errors
    with open(run / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (run / "results.json").exists()
    code, _, errors = python(*command[1:], "--resume")
    assert code == 0, errors
    assert_same(run, finished("ft-d"))


@pytest.mark.parametrize(("changes", "processes"), [
    ({}, 3),  # of four cores
    ({"search": {"trials": 2}}, 2), ({"search": {"trials": 1}}, 1),
    ({"threads": 2}, 2), ({"threads": 3}, 1), ({"threads": 0}, 1),
    ({"processes": 7, "search": {"trials": 1}}, 7), ({"processes": 1}, 1), ({"parallel": "data"}, 1),
    ({"baseline": "bhpo"}, 1), ({"baseline": {"search": "gp_ucb"}}, 1), ({"baseline": {"name": "bhpo", "search": "random"}}, 3),
    ({"fit": {"steps": 10}}, 1),  # over before the others would have started
])
def test_how_many_processes_a_run_takes_by_itself(changes, processes, monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 4)
    content = {"threads": 1, "search": {"trials": 3}, "fit": {"steps": 100}} | changes
    monkeypatch.setattr(sys, "argv", [train.__file__])
    assert train._processes(config.from_dict(content)) == processes
    monkeypatch.setattr(sys, "argv", ["my_baseline.py"])
    assert train._processes(config.from_dict(content)) == changes.get("processes", 1)


def test_the_command_to_go_on_names_the_launcher(monkeypatch):
    monkeypatch.setattr(sys, "argv", [train.__file__])
    for run, nodes, start in ((parallel.LAUNCH, 1, "python -m"), ("x", 1, "torchrun --nproc-per-node=4 -m"),
                              ("x", 2, "torchrun --nnodes=2 --node-rank=1 --master-addr=host --master-port=29500 "
                                       "--nproc-per-node=4 -m")):
        for key, value in {"TORCHELASTIC_RUN_ID": run, "GROUP_WORLD_SIZE": nodes, "GROUP_RANK": 1, "MASTER_ADDR": "host",
                           "MASTER_PORT": 29500, "LOCAL_WORLD_SIZE": 4}.items():
            monkeypatch.setenv(key, str(value))
        assert train._command(["--config", "a b", "--resume"]) == f"{start} nevis_lite.train --config 'a b' --resume"


def test_a_sweep_is_no_work_for_torchrun(config_file, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert sweep.main(["--config", config_file()]) == 2
    assert "processes=N" in capsys.readouterr().err
