"""Several processes, started by the command itself or by torchrun: the same results as one, however they end and go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nevis_lite import config, parallel, protocol, stream, sweep, train
from nevis_lite.config import UserError
from nevis_lite.setup import set_up

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes end by signals here")

# Imported by each Python that starts: process RANK meets its end at the COUNT-th opening of a file with an ENDING, by a SIGNAL,
# or, where that is 0, by a full disk.
SITECUSTOMIZE = """
import os, sys

if "RANK" in os.environ:
    ending, count, number, rank = os.environ["END_EARLY"].split()
    count = int(count)

    def hook(event, arguments):
        global count
        if event == "open" and str(arguments[0]).endswith(ending) and os.environ["RANK"] == rank:
            count -= 1
            if count == 0 and int(number):
                os.kill(os.getpid(), int(number))
            elif count == 0:
                raise OSError(28, "No space left on device", arguments[0])

    sys.addaudithook(hook)
"""


@pytest.fixture
def start(config_file, tmp_path):
    """start(*arguments, launcher, end_early, **changes): the command as two processes, of which one may end early."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def begin(*arguments, launcher=(), end_early=("never", 1, 0, 1), **changes):
        environment = {**os.environ, "END_EARLY": " ".join(map(str, end_early)), "PYTHONPATH": f"{place}:{ROOT}",
                       "OMP_NUM_THREADS": "1"}
        settings = config_file(checkpoint_seconds=0, processes=0 if launcher else 2, **changes)
        command = [sys.executable, *launcher, "-m", "nevis_lite.train", "--config", settings, *map(str, arguments)]
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return begin


def ended(process):
    """Its exit code, output and errors."""
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def in_a_trial(process, run, seconds=60):
    """Wait until a snapshot of a trial is there."""
    until = time.monotonic() + seconds
    while not list((run / "working").glob("*.pt")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Processes of the command's own


def test_one_dies_then_the_launcher_is_interrupted_then_killed_and_the_run_ends_as_one_process_ends_it(
        start, finished, assert_same, tmp_path):
    run = tmp_path / "run"
    code, output, errors = ended(start("--out", run, end_early=(".pt.part", 4, signal.SIGKILL.value, 1)))
    assert code == 128 + signal.SIGKILL and "Process 1 of 2 was ended by SIGKILL" in errors, errors
    assert output.startswith("2 processes share the trials of each task")
    assert errors.count("Stopped; the run goes on where it was") == 1 and "Traceback" not in errors
    assert "python -m nevis_lite.train --resume --config" in errors and "torchrun" not in errors
    for number, expected in (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL):
        for file in (run / "working").glob("*.pt"):
            file.unlink()
        process = start("--out", run, "--resume")
        in_a_trial(process, run)
        process.send_signal(number)
        code, _, errors = ended(process)  # all have closed their ends of the pipes, also those that lost their launcher
        assert code == expected and errors.count("Stopped; the run goes on where it was") == 1, errors
        assert "Traceback" not in errors
    assert not (run / "results.json").exists()
    code, output, errors = ended(start("--out", run, "--resume"))
    assert code == 0 and output.count("mean error, all tasks") == 1, errors
    assert not (run / "working").exists()
    assert_same(run, finished("ft-d"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_first_process_is_killed_or_another_one_gets_a_signal_and_all_stop(start, number, tmp_path):
    rank = 0 if number == signal.SIGKILL else 1
    code, _, errors = ended(start("--out", tmp_path / "run", end_early=(".pt.part", 3, number.value, rank)))
    assert "Traceback" not in errors and not (tmp_path / "run" / "results.json").exists()
    if rank == 0:
        assert code == 128 + signal.SIGKILL and "Process 0 of 2 was ended by SIGKILL; the run goes on with --resume." in errors
    else:
        assert code == 130 and errors.count("Stopped; the run goes on where it was") == 1


def test_one_that_is_interrupted_while_it_starts_ends_all(start, tmp_path):
    importing = f"nevis_lite/__pycache__/protocol.cpython-{sys.version_info.major}{sys.version_info.minor}.pyc"
    code, output, errors = ended(start("--out", tmp_path / "run", end_early=(importing, 1, signal.SIGINT.value, 1)))
    assert code == 130 and "Traceback" not in errors and "Stopped" in errors, errors
    assert not (tmp_path / "run" / "results.json").exists()


def test_an_error_of_one_of_them_is_told_once_and_is_the_exit_code(start, tmp_path):
    code, _, errors = ended(start("--out", tmp_path / "run", end_early=(".pt.part", 4, 0, 1)))
    assert code == 2 and errors.count("No space left on device") == 1 and "Traceback" not in errors, errors


def test_one_that_shares_batches_and_dies_ends_the_others_in_a_sentence(start, settings, tmp_path):
    code, _, errors = ended(start("--out", tmp_path / "run", end_early=("labels.npy", 2, signal.SIGKILL.value, 1),
                                  parallel="data", stream={"tasks": settings()["stream"]["tasks"][:1]}))
    assert code == 128 + signal.SIGKILL and "Another process of the run cannot be reached" in errors
    assert "Traceback" not in errors


def test_what_the_processes_tell_each_other_is_private(start, tmp_path):
    """Who can write it can run code here: it's a file of this user in a folder of this user, not a port."""
    process = start("--out", tmp_path / "run")
    in_a_trial(process, tmp_path / "run")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    facts = dict(fact.split("=", 1) for fact in Path(f"/proc/{children[0]}/environ").read_text().split("\0") if "=" in fact)
    folder = Path(facts[parallel.STORE]).parent
    assert folder.stat().st_mode & 0o077 == 0 and "MASTER_PORT" not in facts
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 130
    assert not folder.exists()


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


def test_a_script_of_ones_own_starts_no_processes(config_file, tmp_path, capsys):
    assert train.main(["--config", config_file(), "processes=2", "--out", str(tmp_path / "run")]) == 2
    assert "torchrun --nproc-per-node=2" in capsys.readouterr().err and not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# torchrun


def test_of_torchruns_one_is_killed_and_both_go_on_to_the_results_of_one_process(start, finished, assert_same, tmp_path):
    end_early = ".pt.part", 4, signal.SIGKILL.value, 1
    code, _, errors = ended(start("--out", tmp_path / "run", launcher=TORCHRUN, end_early=end_early))
    assert code and "SIGKILL" in errors and "Stopped; the run goes on where it was" in errors
    code, output, errors = ended(start("--out", tmp_path / "run", "--resume", launcher=TORCHRUN))
    assert code == 0 and output.count("mean error, all tasks") == 1, errors
    assert not (tmp_path / "run" / "working").exists()
    assert_same(tmp_path / "run", finished("ft-d"))


def test_an_error_in_one_of_torchruns_ends_both_with_one_sentence_and_one_process_goes_on(
        start, config_file, finished, assert_same, tmp_path):
    code, _, errors = ended(start("--out", tmp_path / "run", launcher=TORCHRUN, end_early=(".pt.part", 4, 0, 1)))
    assert code and errors.count("No space left on device") == 1 and "exitcode  : 2" in errors
    assert errors.count("Traceback") == 1  # of torchrun itself
    assert train.main(["--config", config_file(), "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert_same(tmp_path / "run", finished("ft-d"))


def test_shared_batches_keep_the_ledger_and_stop_and_resume_exactly(
        start, settings, finished, of_baseline, assert_same, read_run, tmp_path):
    """A signal to one stops both. Batch norm sees each process's half here, so that errors are not those of one process."""
    changes = {**of_baseline("mt"), "parallel": "data", "stream": {"tasks": settings()["stream"]["tasks"][:2]}}
    run, other = tmp_path / "run", tmp_path / "other" / "run"
    code, _, errors = ended(start("--out", run, launcher=TORCHRUN, end_early=("000.pt", 1, signal.SIGTERM.value, 1), **changes))
    assert code and "exitcode  : 130" in errors and errors.count("Stopped; the run goes on where it was") == 1, errors
    assert "torchrun --nproc-per-node=2" in errors and errors.count("Traceback") == 1
    for command, launcher in ((("--out", run, "--resume"), TORCHRUN), (("--out", other), ())):
        code, _, errors = ended(start(*command, launcher=launcher, **changes))
        assert code == 0, errors
    assert_same(run, other)
    shared, one = read_run(run), read_run(finished("mt"))
    for row, alone in zip(shared.trials, one.trials[:4], strict=True):
        assert row["status"] == "done" and 0 <= row["error"] <= 1
        assert (row["hyperparameters"], row["flops"]) == (alone["hyperparameters"], alone["flops"])
        if row["task"] == 0:  # before the first step, from random weights
            assert row["curve"][0] == alone["curve"][0]


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture
def of_torchrun(monkeypatch):
    """of_torchrun(**environment): this process, as if torchrun had started it."""
    def pretend(**facts):
        facts = {parallel.TORCHRUN: "x", "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "RANK": 0, "LOCAL_RANK": 0, **facts}
        for key, value in facts.items():
            monkeypatch.setenv(key, str(value))

    return pretend


def test_a_search_that_looks_back_is_refused(settings, of_baseline, of_torchrun):
    """Before any file is looked at."""
    of_torchrun()
    made = config.from_dict(settings(**of_baseline("bhpo")))
    with pytest.raises(UserError, match="chooses each trial from those before.*parallel=data"):
        set_up(made, stream.load(made.stream, made.data.dir, made.phase))


@pytest.mark.parametrize(("gpus", "refused"), [(3, True), (4, False)])
def test_processes_that_share_batches_need_a_gpu_each(settings, of_torchrun, monkeypatch, gpus, refused):
    made = config.from_dict(settings(parallel="data"))
    setup = set_up(made, stream.load(made.stream, made.data.dir, made.phase))
    setup.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    of_torchrun()
    if refused:
        with pytest.raises(UserError, match="4 processes need a GPU each"):
            protocol._check_shares(setup, 4)
    else:
        protocol._check_shares(setup, 4)


def test_the_command_to_go_on_names_the_launcher(of_torchrun, monkeypatch):
    monkeypatch.setattr(sys, "argv", [train.__file__])
    rest = "-m nevis_lite.train --resume --config 'a b'"
    assert train._command(["--config", "a b", "--resume"]) == f"python {rest}"
    of_torchrun()
    assert train._command(["--config", "a b"]) == f"torchrun --nproc-per-node=4 {rest}"
    of_torchrun(GROUP_WORLD_SIZE=2, GROUP_RANK=1, MASTER_ADDR="host", MASTER_PORT=29500)
    assert train._command(["--config", "a b"]) == (
        f"torchrun --nnodes=2 --node-rank=1 --master-addr=host --master-port=29500 --nproc-per-node=4 {rest}")


def test_a_sweep_is_no_work_for_torchrun(config_file, of_torchrun, capsys):
    of_torchrun()
    assert sweep.main(["--config", config_file()]) == 2
    assert "processes=N" in capsys.readouterr().err
