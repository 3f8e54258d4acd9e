"""Several processes, as torchrun starts them: the same results as one, however they end and with however many they go on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nevis_lite import config, stream, train
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
    done = subprocess.run([*command, *map(str, arguments)], env=ENVIRONMENT, text=True, timeout=120, capture_output=True)
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
