"""A short stream of the embedded data sets with tiny settings, and what runs of it leave behind."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only wait for each other on such tiny nets

import pytest
import torch
import yaml

from nevis_lite import train

STREAM = [
    {"task": "demo_landsat", "year": 1998},
    {"task": "demo_mnist", "year": 2004},
    {"task": "demo_clipart_keywords", "year": 2019},
    {"task": "demo_icons_b", "year": 2021},
]


SLOWEST = ("test_train.py", "test_parallel.py", "test_protocol.py", "test_search.py")


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no core has nothing to do while another one is busy with the last."""
    items.sort(key=lambda item: item.path.name not in SLOWEST)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """One pixel cache for all tests."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def settings(data_dir):
    """settings(**changes): a config as a dict; a dict among the changes is merged into its section."""
    def make(**changes):
        config = {
            "stream": {"name": "four", "tasks": STREAM}, "baseline": "ft-d", "seed": 0,
            "model": {"name": "resnet8", "image_size": 16}, "fit": {"steps": 8, "validate_every": 3},
            "search": {"trials": 2, "lr": [0.01, 0.1]}, "select": {"max_train": 100, "max_dev": 60},
            "data": {"dir": str(data_dir)}, "device": "cpu", "threads": 1, "checkpoint_seconds": 0.05,
        }
        for key, value in changes.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) and isinstance(config[key], dict) else value
        return config

    return make


@pytest.fixture(scope="session")
def of_baseline(settings, tmp_path_factory):
    """of_baseline(name): what settings and config_file must be given for a baseline. ft-s and pt rest on the Indep run."""
    indep = tmp_path_factory.mktemp("indep") / "run"

    def get(baseline):
        if baseline in ("ft-s", "pt", "pt-ft") and not indep.exists():
            train.run(settings(baseline="indep"), indep)
        return {"baseline": baseline} | {
            "ft-s": {"select": {"indep_run": str(indep)}},
            "mt": {"search": {"auxiliary_weight": [0.2, 1]}},
            "pt": {"model": {"weights": str(indep / "predictors" / "003.pt")}},
            "pt-ft": {"model": {"weights": str(indep / "predictors" / "003.pt")}},
            "bhpo": {"search": {"trials": 3, "schedule": ["cosine", "piecewise"], "batch": [8, 16], "crop": [True, False],
                                "flip": [True, False], "model": ["resnet8", "resnet18_imagenet"]}},
        }.get(baseline, {})

    return get


@pytest.fixture(scope="session")
def finished(settings, of_baseline, tmp_path_factory):
    """finished(baseline): the folder of a whole run on the short stream, made once."""
    runs = {}

    def get(baseline):
        if baseline not in runs:
            runs[baseline] = tmp_path_factory.mktemp(baseline) / "run"
            train.run(settings(**of_baseline(baseline)), runs[baseline])
        return runs[baseline]

    return get


@pytest.fixture
def config_file(settings, tmp_path_factory):
    """config_file(**changes): the settings as a YAML file, outside of tmp_path."""
    def write(**changes):
        path = tmp_path_factory.mktemp("config") / "tiny.yaml"
        path.write_text(yaml.safe_dump(settings(**changes)))
        return str(path)

    return write


@pytest.fixture
def counted_compile(monkeypatch):
    """The graphs that torch.compile is given from now on. They run as they are, so that no C++ compiler is needed."""
    compiled, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda what, dynamic=None, options=None: compiled(what, dynamic=dynamic,
                                                                                            backend=backend))
    return graphs


@pytest.fixture(scope="session")
def read_run():
    """read_run(folder): what must be equal in equal runs, so all but seconds; predictors as tensors."""
    def strict(text):
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))

    def rows(path):
        return [{key: value for key, value in strict(line).items() if key != "seconds"}
                for line in path.read_text().splitlines()]

    def read(folder):
        folder = Path(folder)
        results = strict((folder / "results.json").read_text())
        assert results.pop("seconds") >= 0
        predictors = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("predictors/*"))}
        return SimpleNamespace(results=results, trials=rows(folder / "trials.jsonl"), tasks=rows(folder / "tasks.jsonl"),
                               predictors=predictors)

    return read


@pytest.fixture(scope="session")
def assert_same(read_run):
    """assert_same(folder, other): two runs ended with the same numbers and, bit for bit, the same predictors."""
    def check(folder, other):
        one, two = read_run(folder), read_run(other)
        assert one.results == two.results
        assert one.trials == two.trials
        assert one.tasks == two.tasks
        assert one.predictors.keys() == two.predictors.keys()
        for name, predictor in one.predictors.items():
            state, state_2 = predictor.pop("state"), two.predictors[name].pop("state")
            assert predictor == two.predictors[name]
            assert state.keys() == state_2.keys()
            assert all(torch.equal(value, state_2[key]) for key, value in state.items()), name

    return check
