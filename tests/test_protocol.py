"""Who sees what and when, where a task's weights come from, and whether the ledger is that of the work done."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nevis_lite import baselines, config, cost, data, fit, flops, metrics, models, protocol, run_folder, stream, train
from nevis_lite.config import UserError
from nevis_lite.setup import Setup
from nevis_lite.setup import set_up as set_up_config

TRIALS = 2


def set_up(settings):
    settings = config.from_dict(settings)
    return set_up_config(settings, stream.load(settings.stream, settings.data.dir, settings.phase))


@pytest.fixture(scope="module")
def opened():
    """(path, mode) of every file that this process opens from now on; a hook stays for good, so it's made once."""
    log = []

    def hook(event, arguments):
        if event == "open" and isinstance(arguments[0], str):
            log.append((arguments[0], arguments[1]))

    sys.addaudithook(hook)
    return log


# ---------------------------------------------------------------------------------------------------------------------
# What a learner may see


@pytest.mark.parametrize("reach", [
    lambda view: view.split("test"),
    lambda view: view.split("dev_test"),
    lambda view: view.split("test", 0),
    lambda view: view.split("../test"),
    lambda view: view.split("train", view.task.index + 1),
    lambda view: view.split("dev", -1),
    lambda view: view.access.split("test"),
], ids=["test", "dev_test", "test of an earlier task", "a path", "a later task", "a task from behind", "by access"])
def test_a_learner_that_reaches_too_far_is_stopped(settings, tmp_path, monkeypatch, reach):
    monkeypatch.setitem(baselines.START, "reaching", lambda view: None if view.dry else reach(view))
    with pytest.raises(stream.ProtocolError):
        train.run(settings(baseline={"name": "ft-d", "start": "reaching"}), tmp_path / "run")
    assert not (tmp_path / "run" / "trials.jsonl").read_text()


def test_the_data_choice_cannot_reach_test_either(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(baselines.DATA, "reaching", lambda view: view.split("test"))
    with pytest.raises(stream.ProtocolError):
        train.run(settings(baseline={"name": "indep", "data": "reaching"}), tmp_path / "run")


def test_a_learner_sees_train_and_dev_of_all_tasks_so_far(settings, tmp_path, monkeypatch):
    seen = []

    def start(view):
        if not view.dry:
            seen.append([len(view.split(name, task)) for task in range(view.task.index + 1) for name in ("train", "dev")])
            assert [past.index for past in view.memory] == list(range(view.task.index))

    monkeypatch.setitem(baselines.START, "looking", start)
    short = {"fit": {"steps": 1}, "search": {"trials": 1}}
    train.run(settings(baseline={"name": "indep", "start": "looking"}, **short), tmp_path / "run")
    sizes = [1000, 300, 1000, 300, 797, 239, 200, 200]
    assert seen == [sizes[:2], sizes[:4], sizes[:6], sizes]


@pytest.mark.parametrize("parts, told", [(2, "x 2/2 has 2 of the classes and of the images 4 in train, 0 in dev"),
                                         (4, "x 1/4 has 1 of the classes")])
def test_parts_without_images_or_with_one_class_are_refused_before_any_training(settings, tmp_path, parts, told):
    for split in ("train", "dev", "dev_test", "test"):
        for name in "abcd":
            (tmp_path / "x" / split / name).mkdir(parents=True)
            for number in range(0 if split == "dev" and name in "cd" else 2):
                Image.new("L", (4, 4), number).save(tmp_path / "x" / split / name / f"{number}.png")
    tasks = [{"folder": str(tmp_path / "x"), "year": 2020, "split": parts}]
    with pytest.raises(UserError, match=f"{told}.*fewer tasks"):
        train.run(settings(stream=tasks, data={"dir": str(tmp_path / "data")}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# When files are opened


def position(opened, ending, mode="r", count=1):
    """Where in the log a file with this ending was opened for the count-th time."""
    return [i for i, (path, used) in enumerate(opened) if path.endswith(ending) and used and used[0] == mode][count - 1]


def test_test_files_are_opened_after_the_predictor_is_chosen_and_only_then(finished, settings, opened, tmp_path):
    finished("ft-d")  # the pixel cache is warm
    opened.clear()
    setup = set_up(settings())
    protocol.run(setup, tmp_path / "run")
    for task in setup.tasks:
        folder = setup.folders[task.index].name
        chosen = position(opened, f"{task.index:03d}.pt.part", "w")
        judged = position(opened, "tasks.jsonl", "a", task.index + 1)
        assert position(opened, "trials.jsonl", "a", TRIALS * (task.index + 1)) < chosen
        for name in ("test.labels.npy", "test.pixels", "test.index.npy"):
            times = [i for i, (path, _) in enumerate(opened) if path.endswith(f"{folder}/{name}")]
            assert times and chosen < min(times) and max(times) < judged
    sources = ("dev_test.", "sat.tst", "/test-", "/t10k-")
    assert not [path for path, _ in opened if any(part in path for part in sources)]


def test_phase_meta_train_opens_no_test_file(finished, settings, opened, read_run, tmp_path):
    finished("ft-d")
    opened.clear()
    train.run(settings(phase="meta_train"), tmp_path / "run")
    paths = [path for path, _ in opened]
    assert any(path.endswith("dev_test.pixels") for path in paths)
    assert not [path for path in paths if any(part in path for part in ("/test.", "sat.tst", "/test-", "/t10k-"))]
    results = read_run(tmp_path / "run").results
    assert [(row["task"], row["split"], row["meta"]) for row in results["tasks"]] == [
        ("demo_landsat", "dev_test", "train"), ("demo_mnist", "dev_test", "train")]
    assert results["error"] == results["error_all"] == np.mean([row["error"] for row in results["tasks"]])


def test_the_phase_changes_what_is_reported_and_nothing_that_is_learned(settings, finished, read_run, tmp_path):
    train.run(settings(phase="meta_train"), tmp_path / "run")
    meta_train, meta_test = read_run(tmp_path / "run"), read_run(finished("ft-d"))
    assert meta_train.trials == meta_test.trials[:2 * TRIALS]
    assert [row["error"] for row in meta_train.tasks] != [row["error"] for row in meta_test.tasks[:2]]


def test_dry_run_opens_no_test_file(finished, settings, opened):
    finished("ft-d")
    opened.clear()
    cost.table(set_up(settings()), 1)
    assert not [path for path, _ in opened if "/test." in path or "dev_test." in path]


def test_poisoned_test_labels_change_errors_and_nothing_else(finished, settings, data_dir, read_run, tmp_path):
    clean = read_run(finished("ft-d"))
    poisoned = shutil.copytree(data_dir, tmp_path / "data")
    for path in poisoned.rglob("test.labels.npy"):
        np.save(path, np.roll(np.load(path), 1, axis=0))
    train.run(settings(data={"dir": str(poisoned)}), tmp_path / "run")
    other = read_run(tmp_path / "run")
    assert other.trials == clean.trials
    for name, predictor in clean.predictors.items():
        assert all(torch.equal(value, other.predictors[name]["state"][key]) for key, value in predictor["state"].items())
    for row, row_2 in zip(clean.tasks, other.tasks, strict=True):
        assert row.pop("error") != row_2.pop("error")
        assert row == row_2


# ---------------------------------------------------------------------------------------------------------------------
# Where weights come from


def test_indep_starts_from_scratch_everywhere(finished, read_run):
    assert [row["source"] for row in read_run(finished("indep")).tasks] == [None] * 4


def test_ft_prev_starts_from_the_task_before(finished, read_run):
    assert [row["source"] for row in read_run(finished("ft-prev")).tasks] == [None, 0, 1, 2]


def test_ft_d_scores_all_earlier_tasks_and_starts_from_the_best(finished, read_run):
    rows = read_run(finished("ft-d")).tasks
    assert rows[0]["source"] is None and rows[0]["flops"]["select"] == 0
    for row in rows[1:]:
        assert list(row["scores"]) == [str(index) for index in range(row["index"])]
        best = max(row["scores"].values())
        assert row["source"] == max(int(index) for index, score in row["scores"].items() if score == best)
        assert row["flops"]["select"] > 0


def test_all_baselines_try_the_same_hyperparameters(finished, read_run):
    one, two, three = ([row["hyperparameters"] for row in read_run(finished(name)).trials]
                       for name in ("indep", "ft-prev", "ft-d"))
    assert one == two == three and len({row["lr"] for row in one}) == 4 * TRIALS


def test_a_start_has_the_weights_and_statistics_of_its_source_and_a_new_head(finished, settings, read_run):
    out = finished("ft-prev")
    setup, predictors = set_up(settings(baseline="ft-prev")), read_run(out).predictors
    memory = [baselines.Past(i, setup.tasks[i], 1, 0.5, out / "predictors" / f"{i:03d}.pt") for i in range(2)]
    view = setup.view(setup.tasks[2], memory)
    source = setup.baseline.start(view)
    model = baselines.initial_model(view, source).state_dict()
    for key, value in predictors["001.pt"]["state"].items():
        if key.startswith("backbone."):
            assert torch.equal(model[key], value), key
    assert "backbone.bn1.running_mean" in model and model["backbone.bn1.running_mean"].any()
    assert model["head.weight"].shape == (8, 64) and not model["head.bias"].any()


def test_a_repeated_data_set_is_two_tasks_with_two_heads(settings, read_run, tmp_path):
    twice = [{"task": "demo_mnist", "year": 2004}, {"task": "demo_landsat", "year": 2005}, {"task": "demo_mnist", "year": 2020}]
    train.run(settings(stream=twice, baseline="ft-prev"), tmp_path / "run")
    run = read_run(tmp_path / "run")
    facts = [(row["index"], row["task"], row["occurrence"], row["year"], row["meta"], row["source"]) for row in run.tasks]
    assert facts == [(0, "demo_mnist", 1, 2004, "train", None), (1, "demo_landsat", 1, 2005, "train", 0),
                     (2, "demo_mnist", 2, 2020, "test", 1)]
    first, second = run.predictors["000.pt"]["state"], run.predictors["002.pt"]["state"]
    assert first["head.weight"].shape == second["head.weight"].shape
    assert not torch.equal(first["head.weight"], second["head.weight"])
    assert run.tasks[0]["hyperparameters"] != run.tasks[2]["hyperparameters"]
    assert run.results["error"] == run.tasks[2]["error"]


# ---------------------------------------------------------------------------------------------------------------------
# Results and the ledger


@pytest.mark.parametrize("baseline", ["indep", "ft-prev", "ft-s", "ft-d", "pt", "pt-ft"])
def test_the_plan_is_the_ledger_of_the_run(finished, settings, of_baseline, read_run, baseline):
    planned, rows = cost.plan(set_up(settings(**of_baseline(baseline)))), read_run(finished(baseline)).tasks
    assert [row["flops"] for row in planned] == [row["flops"] for row in rows]
    assert [row["num_train"] for row in planned] == [row["num_train"] for row in rows] == [1000, 1000, 797, 200]


def test_the_plan_of_multitask_is_its_ledger_but_for_the_heads(finished, settings, of_baseline, read_run):
    """How many classes the auxiliary tasks will have is known only when they are chosen."""
    setup, rows = set_up(settings(**of_baseline("mt"))), read_run(finished("mt")).tasks
    for planned, row in zip(cost.plan(setup), rows, strict=True):
        assert len(row["auxiliaries"]) == len(planned["auxiliaries"]) == min(1, row["index"])
        chosen, expected = row["auxiliaries"], planned["auxiliaries"]
        heads = [sum(setup.tasks[index].num_classes for index in indices) for indices in (chosen, expected)]
        more = TRIALS * 8 * 16 * 3 * 2 * 64 * (heads[0] - heads[1])  # trials, steps, batch, forward and backward
        assert row["flops"] == planned["flops"] | {"train": planned["flops"]["train"] + more}


def test_the_plan_of_a_search_over_networks_bounds_its_ledger(finished, settings, of_baseline, read_run):
    planned = cost.plan(set_up(settings(**of_baseline("bhpo"))))
    run = read_run(finished("bhpo"))
    assert len({(row["hyperparameters"]["model"], row["hyperparameters"]["batch"]) for row in run.trials}) > 1
    for row, plan in zip(run.tasks, planned, strict=True):
        assert plan["least"] <= sum(row["flops"].values()) <= sum(plan["flops"].values())
        for trial in (trial for trial in run.trials if trial["task"] == row["index"]):
            chosen = trial["hyperparameters"]
            network = models.build(chosen["model"])
            image = (flops.training_flops(network, 16)
                     + 3 * 2 * network.num_features * row["num_classes"])
            assert trial["flops"]["train"] == 8 * chosen["batch"] * image
        model = run.predictors[f"{row['index']:03d}.pt"]["model"]
        assert model == row["hyperparameters"]["model"]


def test_a_multitask_run_trains_with_earlier_tasks_and_keeps_one_head(finished, read_run):
    multitask, alone = read_run(finished("mt")), read_run(finished("ft-d"))
    assert [len(row["auxiliaries"]) for row in multitask.tasks] == [0, 1, 1, 1]
    assert multitask.tasks[0]["error"] == alone.tasks[0]["error"] and multitask.tasks[1]["error"] != alone.tasks[1]["error"]
    assert all(0.2 <= row["hyperparameters"]["auxiliary_weight"] <= 1 for row in multitask.trials)
    for name, predictor in multitask.predictors.items():
        assert predictor["state"].keys() == alone.predictors[name]["state"].keys()
    for row in multitask.tasks:
        assert row["auxiliaries"] == [] or row["source"] == row["auxiliaries"][0]


def test_every_task_starts_from_the_pretrained_network_and_its_compute_is_told_apart(finished, of_baseline, read_run):
    run, source = read_run(finished("pt")), of_baseline("pt")["model"]["weights"]
    assert [row["source"] for row in run.tasks] == ["pretrained"] * 4
    pretraining = read_run(Path(source).parents[1])
    spent = sum(sum(row["flops"].values()) for row in pretraining.tasks) - pretraining.tasks[-1]["flops"]["predict"]
    assert run.results["cflop_pretraining"] == spent and run.results["cflop"] == sum(
        sum(row["flops"].values()) for row in run.tasks)
    assert {row["source"] for row in read_run(finished("pt-ft")).tasks} <= {"pretrained", 0, 1, 2}
    assert read_run(finished("pt-ft")).tasks[0]["scores"].keys() == {"pretrained"}
    assert read_run(finished("indep")).results["cflop_pretraining"] is None


def test_a_static_run_scores_the_predictors_of_the_indep_run(finished, of_baseline, settings, read_run):
    run = read_run(finished("ft-s"))
    assert [sorted(row["scores"]) for row in run.tasks] == [[], ["0"], ["0", "1"], ["0", "1", "2"]]
    setup = set_up(settings(**of_baseline("ft-s")))
    folder = Path(of_baseline("ft-s")["select"]["indep_run"])
    for row in run.tasks:
        view = setup.view(setup.tasks[row["index"]], [])
        for source, score in row["scores"].items():
            assert view.relatedness(int(source), folder / "predictors" / f"00{source}.pt") == score
    assert run.tasks[1]["scores"] == {"0": read_run(finished("ft-d")).tasks[1]["scores"]["0"]}  # the first tasks are the same


@pytest.mark.parametrize("changes, words", [
    ({"baseline": "pt"}, "say which with model.weights"),
    ({"baseline": "ft-d", "model": {"weights": "x.pt"}}, "take pt or pt-ft"),
    ({"baseline": "pt", "model": {"weights": "none.pt"}}, "none.pt: no such file"),
    ({"baseline": "ft-s"}, "needs a finished Indep run"),
    ({"baseline": "ft-s", "select": {"indep_run": "nowhere"}}, "select.indep_run: No run in nowhere"),
    ({"baseline": "mt"}, "search.auxiliary_weight"),
    ({"baseline": "ft-d", "search": {"auxiliary_weight": [0, 1]}}, "take mt"),
    ({"baseline": {"name": "ft-d", "auxiliary": 2}}, "baseline.auxiliary: baseline ft-d has no"),
    ({"baseline": "ft-d", "select": {"indep_run": "runs/indep"}}, "select.indep_run: baseline ft-d does not look"),
    ({"baseline": {"name": "mt", "auxiliary": 4}, "search": {"auxiliary_weight": [0, 1]}}, "4 tasks has at most 3 earlier"),
    ({"baseline": "ft-d", "search": {"model": ["resnet8", "resnet18"]}}, "baseline.start=random"),
    ({"baseline": "bhpo", "search": {"model": ["resnet8", "resnet19"]}}, "search.model: unknown model resnet19"),
    ({"baseline": "indep", "model": {"name": "resnet19"}}, "model.name: unknown model resnet19"),
])
def test_wrong_combinations_are_refused_before_any_training(settings, tmp_path, changes, words):
    with pytest.raises(UserError, match=words) as error:
        train.run(settings(**changes), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_pretrained_compute_adds_up_along_a_chain(settings, finished, of_baseline, read_run, tmp_path):
    before = read_run(finished("pt")).results
    weights = str(finished("pt") / "predictors" / "003.pt")
    train.run(settings(baseline="pt", model={"weights": weights}), tmp_path / "run")
    spent = before["cflop"] - before["tasks"][-1]["flops"]["predict"] + before["cflop_pretraining"]
    assert read_run(tmp_path / "run").results["cflop_pretraining"] == spent


def test_two_folders_of_one_name_have_two_indep_predictors(settings, tmp_path):
    for place, shade in (("a", 30), ("b", 90)):
        for number in range(30):
            folder = tmp_path / place / "birds" / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), shade + 60 * (number % 2) + number).save(folder / f"{number:02}.png")
    tasks = [{"folder": str(tmp_path / place / "birds"), "year": 2000} for place in "ab"]
    tasks.append({"task": "demo_faces", "year": 2017})
    train.run(settings(stream=tasks, baseline="indep"), tmp_path / "indep")
    setup = set_up(settings(stream=tasks, baseline="ft-s", select={"indep_run": str(tmp_path / "indep")}))
    assert [path.name for path in setup.indep.values()] == ["000.pt", "001.pt", "002.pt"]


@pytest.mark.parametrize("name, size, words", [
    ("torchvision/alexnet", 8, "cannot train on images of 8 pixels"), ("torchvision/squeezenet1_1", 64, "no linear layer"),
    ("torchvision/googlenet", 64, "one vector of 1024 features")])
def test_networks_that_cannot_be_trained_so_are_refused(settings, tmp_path, name, size, words):
    with pytest.raises(UserError, match=words) as error:
        train.run(settings(baseline="indep", model={"name": name, "image_size": size}), tmp_path / "run")
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_network_with_dropout_gives_the_same_numbers_again(settings, assert_same, tmp_path):
    changes = {"baseline": "indep", "model": {"name": "torchvision/alexnet", "image_size": 64}, "fit": {"steps": 2},
               "stream": [{"task": "demo_faces", "year": 2017}], "search": {"trials": 1}}
    for name in "ab":
        torch.manual_seed(ord(name))
        train.run(settings(**changes), tmp_path / name / "run")
    assert_same(tmp_path / "a" / "run", tmp_path / "b" / "run")


# ---------------------------------------------------------------------------------------------------------------------
# Compiled


def test_a_compiled_run_is_the_same_run_and_compiles_once(settings, finished, assert_same, counted_compile, tmp_path):
    train.run(settings(fit={"compile": True}), tmp_path / "run")
    assert_same(tmp_path / "run", finished("ft-d"))
    assert len(counted_compile) == 1 + 1  # the check at set-up, and one for four tasks of two trials, all with batches of 16


def test_a_compiled_run_that_is_stopped_in_each_trial_goes_on_to_the_same_end(settings, of_baseline, finished, assert_same,
                                                                              counted_compile, tmp_path, monkeypatch):
    calls = []

    def signalling(*arguments):
        calls.append(arguments)
        if len(calls) % 2:
            os.kill(os.getpid(), signal.SIGINT)
        return search(*arguments)

    search = baselines.SEARCH["random"]
    monkeypatch.setitem(baselines.SEARCH, "random", signalling)
    changes = of_baseline("mt") | {"fit": {"compile": True}}
    for _ in range(4 * TRIALS):
        with pytest.raises(protocol.Interrupted):
            train.run(settings(**changes), tmp_path / "run", resume=True)
    train.run(settings(**changes), tmp_path / "run", resume=True)
    monkeypatch.undo()
    assert_same(tmp_path / "run", finished("mt"))


def test_each_network_that_is_searched_is_compiled_once(settings, read_run, counted_compile, tmp_path, monkeypatch):
    """And stays where it is: CUDA graphs are tied to the memory of the weights."""
    compile_backbone, backbones = fit.compile_backbone, []
    monkeypatch.setattr(fit, "compile_backbone", lambda backbone: backbones.append(backbone) or compile_backbone(backbone))
    train.run(settings(baseline="indep", stream={"tasks": settings()["stream"]["tasks"][2:]}, fit={"compile": True, "steps": 2},
                       search={"trials": 3, "model": ["resnet8", "vgg"]}), tmp_path / "run")
    names = [row["hyperparameters"]["model"] for row in read_run(tmp_path / "run").trials]
    assert names.count("resnet8") > 1 and names.count("vgg") > 1
    assert len(backbones) == 2 and len(counted_compile) == 1 + 2


def test_without_a_compiler_a_compiled_run_is_refused_at_once(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        with pytest.raises(UserError, match="fit.compile: cannot compile for cpu .*no-such-compiler.*C.. compiler") as error:
            train.run(settings(fit={"compile": True}), tmp_path / "run")
    torch._dynamo.reset()
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_nothing_of_a_task_is_in_memory_when_the_next_one_begins(settings, tmp_path, monkeypatch):
    """Also without the garbage collector, which comes when it likes."""
    forget, made, alive = Setup.forget, [], []

    def keep(kind, start):
        def wrapped(self, *arguments, **options):
            start(self, *arguments, **options)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", wrapped)

    def forgetting(setup):
        forget(setup)
        alive.append([reference() for reference in made if reference() is not None])

    for kind in (data.Split, data.EndlessStream, models.Classifier):
        keep(kind, kind.__init__)
    monkeypatch.setattr(Setup, "forget", forgetting)
    gc.collect()
    gc.disable()
    try:
        train.run(settings(fit={"steps": 1}), tmp_path / "run")
    finally:
        gc.enable()
    assert len(alive) == 4 and not any(alive) and len(made) > 20


def test_a_start_of_ones_own_may_use_pretrained_weights(settings, of_baseline, read_run, tmp_path, monkeypatch):
    monkeypatch.setitem(baselines.START, "mine", lambda view: baselines.PRETRAINED if view.memory else None)
    mine = {"baseline": {"name": "indep", "start": "mine"}}
    train.run(settings(**mine, model=of_baseline("pt")["model"]), tmp_path / "run")
    assert [row["source"] for row in read_run(tmp_path / "run").tasks] == [None, *["pretrained"] * 3]
    with pytest.raises(UserError, match="needs model.weights"):
        train.run(settings(**mine), tmp_path / "without")


def test_an_indep_run_must_fit(settings, finished, of_baseline, tmp_path):
    folder = of_baseline("ft-s")["select"]["indep_run"]
    stopped = shutil.copytree(folder, tmp_path / "stopped")
    (stopped / "results.json").unlink()
    more = settings()["stream"]["tasks"] + [{"task": "demo_faces", "year": 2022}] * 2
    for changes, words in (({"stream": {"tasks": more}}, r"has no predictor of faces \(2022\)"),
                           ({"model": {"image_size": 32}}, "must be one of indep with resnet8 at 32"),
                           ({"select": {"indep_run": str(finished("ft-d"))}}, "is a run of ft-d"),
                           ({"select": {"indep_run": str(stopped)}}, "unfinished: 4 of 4 tasks are done; finish it")):
        with pytest.raises(UserError, match=words):
            train.run(settings(**{"baseline": "ft-s", "select": {"indep_run": folder}, **changes}), tmp_path / "run")


def test_results_add_up(finished, read_run):
    run = read_run(finished("ft-d"))
    results, rows = run.results, run.results["tasks"]
    assert rows == run.tasks and len(run.trials) == 4 * TRIALS
    assert [row["meta"] for row in rows] == ["train", "train", "test", "test"]
    assert results["error"] == pytest.approx((rows[2]["error"] + rows[3]["error"]) / 2, abs=1e-12)
    assert results["error_all"] == pytest.approx(sum(row["error"] for row in rows) / 4, abs=1e-12)
    for row in rows:
        for phase in ("train", "validate"):
            assert row["flops"][phase] == sum(t["flops"][phase] for t in run.trials if t["task"] == row["index"])
    assert results["cflop_paper"] == sum(trial["flops"]["train"] for trial in run.trials)
    assert results["cflop"] == (sum(sum(trial["flops"].values()) for trial in run.trials)
                                + sum(row["flops"]["select"] + row["flops"]["predict"] for row in rows))


def test_the_ledger_by_hand(finished, read_run):
    """Landsat: batches of 16, 8 steps, 300 dev images at steps 0, 3, 6, 8, 600 test images, one linear layer of 64 x 7."""
    backbone, head = models.build("resnet8"), 2 * 64 * 7
    multiply_adds = 0

    def count(layer, inputs, output):
        nonlocal multiply_adds
        multiply_adds += output[0].numel() * layer.weight[0].numel()

    convolutions = [layer for layer in backbone.modules() if isinstance(layer, torch.nn.Conv2d)]
    for layer in convolutions:
        layer.register_forward_hook(count)
    with torch.no_grad():
        backbone.eval()(torch.zeros(1, 3, 16, 16))
    forward, stem = 2 * multiply_adds, 2 * 8 * 8 * 16 * 27  # the stem's output is 16 x 8 x 8
    ledger = read_run(finished("ft-d")).tasks[0]["flops"]
    assert ledger == {"train": TRIALS * 8 * 16 * (3 * (forward + head) - stem), "select": 0,
                      "validate": TRIALS * 4 * 300 * (forward + head), "predict": 600 * (forward + head)}
    selection = read_run(finished("ft-d")).tasks[2]["flops"]["select"]
    assert selection == 2 * (160 * forward + 2 * 100 * 60 * 64)  # two candidates, 100 train and 60 dev images


def test_results_have_the_documented_fields(finished, read_run):
    results = read_run(finished("ft-d")).results  # which fails at a NaN
    assert {"name", "stream", "phase", "baseline", "seed", "partial", "error", "error_all", "cflop", "cflop_paper", "device",
            "cflop_pretraining", "trials", "steps", "tasks"} == results.keys()
    facts = ("name", "stream", "phase", "baseline", "seed", "partial")
    assert [results[key] for key in facts] == ["run", "four", "meta_test", "ft-d", 0, []]
    for row in results["tasks"]:
        assert {"index", "task", "year", "occurrence", "domain", "kind", "num_classes", "num_train", "resolution", "meta",
                "split", "error", "source", "hyperparameters", "trials", "flops", "curve"} <= row.keys()
        assert row["flops"].keys() == {"train", "validate", "select", "predict"}
        assert row["hyperparameters"].keys() == {"lr", "label_smoothing"} and row["trials"] == TRIALS
        assert [step for step, _ in row["curve"]] == [0, 3, 6, 8] and row["split"] == "test"
    assert [row.get("labels_left_out") for row in results["tasks"]] == [None, None, 0, None]
    assert [row["kind"] for row in results["tasks"]] == ["single_label", "single_label", "multi_label", "single_label"]
    assert [row["num_classes"] for row in results["tasks"]] == [7, 10, 8, 20]


def test_the_best_trial_on_dev_is_the_task_s_result(finished, read_run):
    run = read_run(finished("ft-d"))
    for row in run.tasks:
        trials = [trial for trial in run.trials if trial["task"] == row["index"]]
        best = min(trials, key=lambda trial: (trial["error"], trial["trial"]))
        assert (row["dev_error"], row["hyperparameters"], row["curve"]) == (
            best["error"], best["hyperparameters"], best["curve"])
        assert best["error"] == min(error for _, error in best["curve"])


def test_a_predictor_file_reproduces_the_error_of_its_task(finished, settings, read_run):
    run, setup = read_run(finished("ft-d")), set_up(settings())
    for row, predictor in zip(run.tasks, run.predictors.values(), strict=True):
        model = models.build(predictor["model"], predictor["num_classes"])
        model.load_state_dict(predictor["state"])
        split = data.Split(setup.folders[row["index"]], "test", torch.device("cpu"))
        with torch.no_grad():
            scores = torch.cat([model.eval()(images) for images in split.batches(predictor["image_size"], 100)])
        if row["kind"] == "single_label":
            error = (scores.argmax(1) != split.labels).double().mean().item()
        else:
            error = 1 - metrics.mean_average_precision(scores.numpy(), split.labels.numpy())[0]
        assert error == pytest.approx(row["error"], abs=1e-4)


def test_a_predictor_knows_what_its_classes_are_called(finished, read_run):
    landsat, mnist, keywords, icons = (predictor["classes"] for predictor in read_run(finished("ft-d")).predictors.values())
    assert landsat == mnist == [] and keywords[:2] == ["flag", "food"] and icons[:2] == ["trash", "rocket"]
    assert len(keywords) == 8 and len(icons) == 20


# ---------------------------------------------------------------------------------------------------------------------
# Trials that diverge


def absurd_then_sane(settings, seed, task, trial, history):
    return {"lr": (1e30, 0.01)[trial], "label_smoothing": 0.0}


def test_a_failed_trial_is_charged_and_never_wins(settings, read_run, tmp_path, monkeypatch):
    monkeypatch.setitem(baselines.SEARCH, "absurd", absurd_then_sane)
    train.run(settings(baseline={"name": "indep", "search": "absurd"}), tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [trial["status"] for trial in run.trials] == ["failed", "done"] * 4
    for row, failed, sane in zip(run.tasks, run.trials[::2], run.trials[1::2], strict=True):
        assert failed["error"] is None and failed["flops"]["train"] > 0 and failed["steps"] < 8
        assert row["hyperparameters"]["lr"] == 0.01 and row["dev_error"] == sane["error"]
        for phase in ("train", "validate"):
            assert row["flops"][phase] == failed["flops"][phase] + sane["flops"][phase]
            assert failed["flops"][phase] * (8 if phase == "train" else 4) == sane["flops"][phase] * (
                failed["steps"] if phase == "train" else len(failed["curve"]))


def test_stopped_in_every_trial_a_run_with_failures_ends_the_same(settings, assert_same, tmp_path, monkeypatch):
    calls = []

    def signalling(*arguments):
        calls.append(arguments)
        if len(calls) % 2:  # in the first step of a trial, and not where that trial goes on
            os.kill(os.getpid(), signal.SIGINT)
        return absurd_then_sane(*arguments)

    tasks = settings(stream={"tasks": settings()["stream"]["tasks"][:2]})
    monkeypatch.setitem(baselines.SEARCH, "random", absurd_then_sane)
    train.run(tasks, tmp_path / "a" / "run")
    monkeypatch.setitem(baselines.SEARCH, "random", signalling)
    for _ in range(2 * TRIALS):
        with pytest.raises(protocol.Interrupted):
            train.run(tasks, tmp_path / "b" / "run", resume=True)
    train.run(tasks, tmp_path / "b" / "run", resume=True)
    assert_same(tmp_path / "b" / "run", tmp_path / "a" / "run")


@pytest.mark.parametrize("baseline", ["pt", "ft-prev"])
def test_outputs_that_no_update_made_infinite_are_not_put_down_to_the_learning_rate(baseline, settings, of_baseline, tmp_path,
                                                                                   monkeypatch):
    huge = torch.load(of_baseline("pt")["model"]["weights"], weights_only=True)
    huge["state"] = {key: value * 1e30 if key.endswith("weight") else value for key, value in huge["state"].items()}
    torch.save(huge, tmp_path / "huge.pt")
    changes, named = {"model": {"weights": str(tmp_path / "huge.pt")}}, f"model.weights={tmp_path / 'huge.pt'}"
    if baseline == "ft-prev":
        changes, named = {}, str(tmp_path / "run" / "predictors" / "000.pt")
        load = baselines.View.backbone
        monkeypatch.setattr(baselines.View, "backbone", lambda view, source, path=None: spoilt(load(view, source, path)))

        def spoilt(backbone):
            for weight in backbone.parameters():
                weight.data *= 1e30
            return backbone
    with pytest.raises(UserError) as caught:
        train.run(settings(baseline=baseline, **changes), tmp_path / "run")
    assert str(caught.value).endswith(f"look at the weights that it starts from: {named}.") and "lower" not in str(caught.value)


def test_when_all_trials_fail_the_run_ends_with_one_sentence(config_file, settings, tmp_path, capsys):
    absurd = {"lr": [1e8, 1e9]}
    command = ["--config", config_file(search=absurd), "--out", str(tmp_path / "run")]
    for _ in range(2):
        assert train.main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "diverged" in error and "search.lr" in error
        command.append("--resume")
    assert len((tmp_path / "run" / "trials.jsonl").read_text().splitlines()) == TRIALS
    with pytest.raises(UserError, match="search.lr was"):
        train.run(settings(), tmp_path / "run", resume=True)


def test_a_refusal_leaves_no_lock_behind(settings, tmp_path):
    train.run(settings(fit={"steps": 1}), tmp_path / "run")
    try:
        train.run(settings(), tmp_path / "run", resume=True)
    except UserError as error:
        kept = error
    train.run(settings(fit={"steps": 1}), tmp_path / "run", resume=True)
    assert kept


def test_a_refused_folder_gets_no_file(settings, tmp_path):
    (tmp_path / "thesis.tex").write_text("hello")
    with pytest.raises(UserError):
        train.run(settings(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_read_only_finished_run_prints_its_table(settings, tmp_path):
    train.run(settings(fit={"steps": 1}), tmp_path / "run")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.name != "lock"}
    train.run(settings(fit={"steps": 1}), tmp_path / "run", resume=True)
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.name != "lock"}


def test_no_run_is_left_when_the_disk_is_too_small(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol.cost, "disk_bytes", lambda setup, processes: {"runs": 1 << 60, "caches": 0})
    with pytest.raises(UserError, match="are free"):
        train.run(settings(fit={"steps": 1}), tmp_path / "run")
    monkeypatch.undo()
    train.run(settings(fit={"steps": 1}), tmp_path / "run")


# ---------------------------------------------------------------------------------------------------------------------
# Snapshots, which a thread writes

# The command, but killed when its second snapshot is about to be in place and the training has made a step meanwhile.
KILL_IN_FLIGHT = """
import os, signal, sys, threading, time
from nevis_lite import fit, train

steps, renamed, update = 0, 0, fit.update

def counting(*arguments):
    global steps
    update(*arguments)
    steps += 1

def hook(event, arguments):
    global renamed
    if event == "os.rename" and str(arguments[0]).endswith("working/0.pt.part"):
        renamed += 1
        before, deadline = steps, time.monotonic() + 60
        while renamed == 2 and steps == before and time.monotonic() < deadline:
            time.sleep(0.001)
        if renamed == 2:
            os.kill(os.getpid(), signal.SIGKILL if steps > before else signal.SIGABRT)

fit.update = counting
sys.addaudithook(hook)
train.main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_killed_while_a_snapshot_is_written_and_the_training_goes_on_it_ends_the_same(config_file, settings, finished,
                                                                                    assert_same, tmp_path):
    """Afterwards `seconds` has the time that the snapshot tells, which is later than the checkpoint's."""
    out = tmp_path / "run"
    command = [sys.executable, "-c", KILL_IN_FLIGHT, "--config", config_file(checkpoint_seconds=0), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(protocol.__file__).parents[1])}
    assert subprocess.run(command, env=environment, timeout=300, capture_output=True).returncode == -signal.SIGKILL
    path = out / "working" / "0.pt"
    trial, checkpoint = torch.load(path, weights_only=True), torch.load(out / "checkpoint.pt", weights_only=True)
    assert trial["snapshot"]["step"] == 1 and trial["snapshot"]["run_seconds"] > checkpoint["seconds"]
    trial["snapshot"]["run_seconds"] += 1000
    torch.save(trial, path)
    assert 1000 < train.run(settings(), out, resume=True)["seconds"] < 2000
    assert_same(out, finished("ft-d"))


def test_a_disk_that_is_full_for_a_snapshot_ends_the_run_with_one_sentence(config_file, settings, finished, assert_same,
                                                                         tmp_path, monkeypatch, capsys):
    fsync = os.fsync

    def full(number):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert train.main(["--config", config_file(checkpoint_seconds=0), "--out", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "No space left on device" in errors
    assert not (tmp_path / "run" / "trials.jsonl").read_text() and not (tmp_path / "run" / "working" / "0.pt").exists()
    train.run(settings(), tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", finished("ft-d"))


@pytest.mark.parametrize("room", [0, 20_000])
def test_tensors_that_do_not_fit_on_the_disk_are_an_error_of_the_disk(tmp_path, room):
    """Of which torch.save makes a RuntimeError when the disk is full later than at once."""
    class Small:
        def write(self, content):
            nonlocal room
            room -= len(content)
            if room < 0:
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device.*x.pt.part"):
        run_folder.write_atomic(tmp_path / "x.pt", lambda file: torch.save({"x": torch.zeros(10_000)}, Small()))
    assert not (tmp_path / "x.pt").exists()


def test_a_snapshot_is_a_copy():
    content = {"model": {"x": torch.ones(2)}, "curve": [[0, 0.5]], "best": None, "heads": [torch.zeros(1)], "name": "a"}
    copied = run_folder.on_host(content)
    content["model"]["x"] += 1
    content["curve"].append([1, 0.4])
    content["heads"][0] += 1
    assert copied["model"]["x"].tolist() == [1, 1] and copied["curve"] == [[0, 0.5]] and copied["heads"][0].tolist() == [0]
    assert copied["best"] is None and copied["name"] == "a"
