"""Several processes, as torchrun starts them: the same results as one, however they end and with however many they go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun's processes end by signals")


def torchrun(*arguments, processes=2):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "nevis_lite.train"]
    return subprocess.Popen([sys.executable, *command, *map(str, arguments)], env=ENVIRONMENT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    """Its exit code, output and errors."""
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def ranks(process):
    """The process ids by rank: torchrun's children, in the order in which they were started."""
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for(path, process):
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


def test_two_processes_end_as_one(config_file, finished, assert_same, tmp_path):
    code, output, errors = finish(torchrun("--config", config_file(), "--out", tmp_path / "run"))
    assert code == 0, errors
    assert output.count("mean error, all tasks") == 1
    assert not (tmp_path / "run" / "working").exists()
    assert_same(tmp_path / "run", finished("ft-d"))
