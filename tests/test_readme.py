"""The README's own code, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from nevis_lite import config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL).group(1)


def test_the_baseline_of_the_readme_runs(tmp_path):
    code = block("python")
    assert len(code.splitlines()) <= 30
    (tmp_path / "my_baseline.py").write_text(code)
    command = [sys.executable, "my_baseline.py", "--config", "demo_ftd.yaml", "baseline.start=largest", "--out", "run",
               "fit.steps=2", "search.trials=1", "model.image_size=8", f"data.dir={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sources = [int(row["source"]) if row["source"] is not None else None
               for row in config.read_yaml((tmp_path / "run" / "results.json").read_text(), "results.json")["tasks"]]
    # Training sizes are 1000, 900, 1000, 400, 797, 2400, ...: the first of the largest so far.
    assert sources == [None, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5]


def test_the_stream_of_the_readme_is_a_valid_config():
    settings = config.from_dict(config.read_yaml(block("yaml"), "README.md"))
    assert len(settings.stream.tasks) == 3 and settings.model.name == "resnet8"


def test_the_commands_of_the_readme_name_configs_that_exist():
    for name in re.findall(r"--config (\w+\.yaml)", README):
        assert name == "birds.yaml" or (ROOT / "configs" / name).is_file()
