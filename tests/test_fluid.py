"""FLUID runs: what a learner may know when it predicts, what is counted, and what is left when a run is killed."""

import json
import sys

import numpy as np
import pytest
import torch
import yaml

from nevis_lite import config, fluid, fluid_metrics, fluid_pool, fluid_pretrain, stream
from nevis_lite.config import UserError
from nevis_lite.fluid import FluidConfig
from nevis_lite.fluid_methods import METHODS
from nevis_lite.fluid_metrics import Log
from nevis_lite.fluid_sequence import Sequence

TASKS = [{"task": "demo_optical_digits", "year": 1998}, {"task": "demo_icons_b", "year": 2021}]  # 30 classes
FROZEN = [name for name, method in METHODS.items() if not method.full]
FULL = [name for name, method in METHODS.items() if method.full]


@pytest.fixture(scope="module")
def settings(data_dir):
    """settings(**changes): short sequences of tiny images; a dict among the changes is merged into its section."""
    def make(**changes):
        content = {"tasks": TASKS, "sequence": {"classes": 8, "c": 3, "validation_classes": 4},
                   "pretrain": {"steps": 6, "batch": 16, "episodes": 3}, "update": {"samples": 20, "epochs": 1},
                   "learn": {"batch": 16, "fisher": 4}, "model": {"name": "resnet8", "image_size": 12},
                   "data": {"dir": str(data_dir), "crop_area": [0.8, 1.0]}, "device": "cpu", "threads": 1}
        for key, value in changes.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) else value
        found = FluidConfig()
        config.fill(found, content, "test")
        return found

    return make


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    """The folder of a run of all methods, and its results."""
    out = tmp_path_factory.mktemp("fluid") / "run"
    return out, fluid.run(settings(), out)


@pytest.fixture(scope="module")
def stage_of(settings, tmp_path_factory):
    """stage_of(options, kind): the test sequence of a run, with what its learners start from."""
    pretrained = tmp_path_factory.mktemp("pretrained")

    def make(options, kind="supervised"):
        tasks = stream.load(options.tasks, options.data.dir).tasks
        base, stages = fluid_pool.draw(fluid_pool.pool_of(tasks, options.data, torch.device("cpu")), options)
        folder = pretrained / stages["test"].sequence.hash
        folder.mkdir(exist_ok=True)
        network, stage = fluid_pretrain.network(kind, folder, base, options), stages["test"]
        stage.starts[kind] = fluid_pretrain.start(network, stage, base, options, 1000)
        stage.features[kind] = fluid_pretrain.features(network.backbone, stage.images, options)
        return stage

    return make


def learner_on(stage, name, options):
    return METHODS[name](stage.starts["supervised"], len(stage.sequence.classes), len(stage.sequence.label), options)


def play(stage, name, options, **more) -> Log:
    return fluid.live(learner_on(stage, name, options), stage, options, **more)[0]


def same(a: Log, b: Log):
    assert a.updates == b.updates
    for name in ("pred", "macs_cached", "macs_uncached", "macs_backward"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for score in fluid.SCORES:
        np.testing.assert_array_equal(a.novelty[score], b.novelty[score])


# ---- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_logs_sequences_and_results(whole):
    out, results = whole
    assert results == json.loads((out / "results.json").read_text())
    assert list(results["methods"]) == list(METHODS)
    test, validation = Sequence.load(out / "sequence.npz"), Sequence.load(out / "validation.npz")
    assert results["sequence"] == {"hash": test.hash, "samples": len(test.label), "classes": 8, "known": 2,
                                   "head": int(test.head.sum())}
    assert not set(test.index) & set(validation.index)
    assert not set(test.classes[2:]) & set(validation.classes[1:])
    for name, row in results["methods"].items():
        log = Log.load(out / "methods" / name / "log.npz")
        tuned = {score: fluid_metrics.fit_threshold(Log.load(out / "methods" / name / "validation.npz"), validation, score)
                 for score in fluid.SCORES}
        assert row["thresholds"] == tuned
        tried = Log.load(out / "methods" / name / "validation.npz").pred == validation.label
        assert row["validation"]["overall"] == tried.mean()
        assert row["overall"] == fluid_metrics.evaluate(log, test)["overall"] == np.mean(log.pred == test.label)
        assert sorted(path.name for path in (out / "methods" / name).iterdir()) == ["log.npz", "validation.npz"]


def test_pretraining_images_are_in_no_sequence(settings):
    options = settings()
    tasks = stream.load(options.tasks, options.data.dir).tasks
    images = fluid_pool.pool_of(tasks, options.data, torch.device("cpu"))
    base, stages = fluid_pool.draw(images, options)
    at = [set(part.index[:, 0].tolist()) for part in (base, *(stage.images for stage in stages.values()))]
    assert len(set.union(*at)) == sum(map(len, at))
    for stage in stages.values():
        names = [images.meta["classes"][label] for label in stage.sequence.classes[:stage.sequence.known]]
        assert names == [base.meta["classes"][label] for label in stage.known]
    assert len(images) == 1797 + 1360  # all splits of the digits and of the icons
    assert images.meta["classes"][0].startswith("optical digits: ") and images.meta["num_classes"] == 30


def test_nothing_outside_the_known_classes_is_predicted_and_a_first_sample_never_hits(whole):
    out, _ = whole
    test = Sequence.load(out / "sequence.npz")
    for name in METHODS:
        pred, known = Log.load(out / "methods" / name / "log.npz").pred, set(range(test.known))
        for t, label in enumerate(test.label):
            assert pred[t] in known, name
            known.add(label)
        assert not (pred == test.label)[test.new].any()


def test_compute_is_what_the_updates_visit(whole, settings):
    """Updates after 20, 40, ... samples, one epoch each; F of the backbone, d K of the head, backward = forward."""
    out, results = whole
    samples, forward = results["sequence"]["samples"], backbone_macs(settings())
    visits = sum(range(20, samples, 20))
    head = 64 * 8
    spent = {name: row["macs"] for name, row in results["methods"].items()}
    predictions = samples * (forward + head)
    assert spent["ncm"]["cached"] == spent["ncm"]["uncached"] == predictions
    assert spent["ft"]["cached"] == predictions + 2 * visits * head
    assert spent["ft"]["uncached"] == predictions + visits * (forward + 2 * head)
    assert spent["standard"]["cached"] == spent["standard"]["uncached"] == predictions + 2 * visits * (forward + head)
    assert spent["lwf"]["cached"] == spent["standard"]["cached"] + visits * (forward + head)
    assert spent["ewc"]["cached"] == spent["standard"]["cached"] + 2 * 4 * (forward + head)
    assert spent["standard"]["cached"] < spent["der"]["cached"] < spent["derpp"]["cached"]
    due = (samples - 1) // 20
    before = sum(t < samples / 9 for t in range(20, samples, 20))  # imprint switches at a ninth of the sequence
    for name in METHODS:
        done = {"ncm": 0, "ptn": 0, "meta_baseline": 0, "imprint": due - before}.get(name, due)
        assert results["methods"][name]["updates"] == len(Log.load(out / "methods" / name / "log.npz").updates) == done, name


def backbone_macs(options):
    """Multiply-adds of the backbone, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    from nevis_lite import models

    with FlopCounterMode(display=False) as counter:
        models.build(options.model.name).eval()(torch.zeros(1, 3, options.model.image_size, options.model.image_size))
    return counter.get_total_flops() // 2


# ---- one image at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ncm", "et", "imprint", "standard", "derpp"])
def test_chunks_of_features_give_the_predictions_of_one_image_at_a_time(name, settings, stage_of):
    options = settings()
    stage = stage_of(options)
    chunked = play(stage, name, options, chunk=7)
    if not METHODS[name].full:
        backbone = stage.starts["supervised"].backbone
        rows = [fluid_pretrain.features(backbone, stage.images, options, torch.tensor([t])) for t in range(len(stage.images))]
        torch.testing.assert_close(torch.cat(rows), stage.features["supervised"], rtol=1e-4, atol=1e-5)
        stage.features["supervised"] = torch.cat(rows)
    single = play(stage, name, options, chunk=1)
    np.testing.assert_array_equal(single.pred, chunked.pred)
    np.testing.assert_array_equal(single.macs_cached, chunked.macs_cached)
    for score in fluid.SCORES:
        np.testing.assert_allclose(single.novelty[score], chunked.novelty[score], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_label_changes_no_prediction_up_to_its_own(name, settings, stage_of):
    options = settings()
    stage = stage_of(options)
    stage.starts[METHODS[name].pretraining], stage.features[METHODS[name].pretraining] = (
        stage.starts["supervised"], stage.features["supervised"])
    right = play(stage, name, options)
    poisoned, at = stage.sequence, 33
    poisoned.label[at:] = (poisoned.label[at:] + 3) % 8
    wrong = play(stage, name, options)
    np.testing.assert_array_equal(wrong.pred[:at + 1], right.pred[:at + 1])
    for score in fluid.SCORES:
        np.testing.assert_array_equal(wrong.novelty[score][:at + 1], right.novelty[score][:at + 1])
    assert (wrong.novelty["maxlogit"] != right.novelty["maxlogit"]).any()  # later it counts


@pytest.mark.parametrize("name", METHODS)
def test_only_methods_that_train_all_layers_touch_the_backbone(name, settings, stage_of):
    """Parameters and buffers of batch norm, of the learner's backbone and of the pretrained one that all share."""
    options = settings(learn={"switch": 0.0})
    stage = stage_of(options)
    stage.features[METHODS[name].pretraining] = stage.features["supervised"]
    learner = learner_on(stage, name, options)
    shared = stage.starts["supervised"].backbone
    before = {key: value.clone() for key, value in shared.state_dict().items()}
    fluid.live(learner, stage, options)
    assert all(torch.equal(value, before[key]) for key, value in shared.state_dict().items())
    changed = [key for key, value in learner.backbone.state_dict().items() if not torch.equal(value, before[key])]
    assert any("running_mean" in key for key in changed) == any("conv" in key for key in changed) == METHODS[name].full


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, seconds", [("et", 0.0), ("imprint", 0.0), ("standard", 1e9), ("ewc", 0.0), ("derpp", 0.0),
                                           ("derpp", 1e9), ("er_ace", 1e9)])
def test_a_killed_run_goes_on_to_the_same_log(name, seconds, settings, stage_of, tmp_path, monkeypatch):
    """Killed at sample 27, with the last checkpoint there, or at the update after 20; the update after 40 is still to come."""
    options = settings(checkpoint_seconds=seconds)
    stage, path = stage_of(options), tmp_path / "checkpoint.pt"
    expected = play(stage, name, options)
    assert [update["t"] for update in expected.updates] == [20, 40]
    learner = learner_on(stage, name, options)
    observe, seen = learner.observe, []

    def killed(h, slot):
        seen.append(slot)
        if len(seen) == 28:
            raise KeyboardInterrupt
        observe(h, slot)

    monkeypatch.setattr(learner, "observe", killed)
    with pytest.raises(KeyboardInterrupt):
        fluid.live(learner, stage, options, path)
    assert torch.load(path, weights_only=True)["done"] == (20 if seconds else 27)
    same(play(stage, name, options, checkpoint=path), expected)


def test_a_resumed_run_keeps_what_is_finished_and_takes_more_methods(settings, tmp_path, monkeypatch):
    first = fluid.run(settings(methods=["ncm"]), tmp_path / "run")
    monkeypatch.setattr(METHODS["ncm"], "observe", None)  # a second look at the images would fail
    both = fluid.run(settings(methods=["ncm", "et"], checkpoint_seconds=5), tmp_path / "run", resume=True)
    assert both["methods"]["ncm"] == first["methods"]["ncm"] and list(both["methods"]) == ["ncm", "et"]


def test_methods_that_a_resumed_run_is_not_asked_for_keep_their_results(settings, tmp_path):
    first = fluid.run(settings(methods=["ncm"]), tmp_path / "run")
    fluid.run(settings(methods=["et"]), tmp_path / "run", resume=True)
    methods = fluid_metrics.load(tmp_path / "run")["methods"]
    assert list(methods) == ["ncm", "et"] and methods["ncm"] == first["methods"]["ncm"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
def test_two_runs_in_one_folder_at_once_are_refused(settings, tmp_path, monkeypatch):
    observe, refused = METHODS["ncm"].observe, []

    def meanwhile(learner, h, slot):
        if not refused:
            with pytest.raises(UserError, match="another process") as caught:
                fluid.run(settings(methods=["ncm"]), tmp_path / "run", resume=True)
            refused.append(caught)
        observe(learner, h, slot)

    monkeypatch.setattr(METHODS["ncm"], "observe", meanwhile)
    fluid.run(settings(methods=["ncm"]), tmp_path / "run")
    assert refused and fluid_metrics.load(tmp_path / "run")["methods"]


@pytest.mark.parametrize("name", ["results.json", "pretrained.pt", "methods/et/test.pt"])
def test_a_damaged_file_of_a_run_is_named(name, settings, tmp_path):
    fluid.run(settings(methods=["ncm"]), tmp_path / "run")
    damaged = tmp_path / "run" / name
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"{")
    with pytest.raises(UserError, match=f"{name}: .*; delete it") as error:
        fluid.run(settings(methods=["ncm", "et"]), tmp_path / "run", resume=True)
    damaged.unlink()
    assert list(fluid.run(settings(methods=["ncm", "et"]), tmp_path / "run", resume=True)["methods"]) == ["ncm", "et"]
    assert "\n" not in str(error.value)


def test_a_run_killed_before_its_config_was_written_starts_again(settings, tmp_path):
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.yaml.part").write_text("tas")
    assert fluid.run(settings(methods=["ncm"]), tmp_path)["methods"]


def test_wrong_weights_leave_no_folder_behind(settings, tmp_path):
    with pytest.raises(UserError, match="model.weights=nowhere.pt: no such file"):
        fluid.run(settings(methods=["ncm"], model={"weights": "nowhere.pt"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_can_be_read_while_it_goes_on(settings, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(METHODS["et"], "observe", killed)
    with pytest.raises(KeyboardInterrupt):
        fluid.run(settings(methods=["ncm", "et"]), tmp_path / "run")
    assert list(fluid_metrics.load(tmp_path / "run")["methods"]) == ["ncm"]


def test_a_resumed_run_on_other_images_is_refused(settings, tmp_path):
    fluid.run(settings(methods=["ncm"]), tmp_path / "run")
    sequence = Sequence.load(tmp_path / "run" / "sequence.npz")
    sequence.index[:2] = sequence.index[1], sequence.index[0]
    sequence.save(tmp_path / "run" / "sequence.npz")
    with pytest.raises(UserError, match="the images changed since the run began"):
        fluid.run(settings(methods=["ncm"]), tmp_path / "run", resume=True)


def test_the_same_seed_gives_the_same_run_and_another_one_another(whole, settings, tmp_path):
    again = fluid.run(settings(methods=["der"]), tmp_path / "a")["methods"]["der"]
    expected = whole[1]["methods"]["der"]
    assert {**again, "seconds": 0} == {**expected, "seconds": 0}
    assert fluid.run(settings(methods=["ncm"], seed=1), tmp_path / "b")["sequence"]["hash"] != whole[1]["sequence"]["hash"]


def test_a_learner_whose_training_diverged_hits_nothing_from_there_on(settings, stage_of):
    options = settings(learn={"lr_head": 1e38})
    stage = stage_of(options)
    log = play(stage, "ft", options)
    first = log.updates[0]["t"]
    assert (log.pred[:first] >= 0).all() and (log.pred[log.updates[1]["t"]:] == -1).all()
    found = fluid_metrics.evaluate(log, stage.sequence)
    assert found["last_fifth"] == 0 and "diverged" in found["missing"]["unseen.msp"]


# ---- odd sequences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [
    {"classes": 2, "c": 3, "known": 0.5},
    {"classes": 4, "c": 3, "known": 1.0},  # no novel class
    {"classes": 4, "c": 3, "known": 0.0},  # nothing is known at first
    {"classes": 6, "c": 0.9},  # classes with one image
    {"classes": 4, "natural": True, "head": 60},
], ids=str)
def test_odd_sequences_give_sensible_rows(sequence, settings, tmp_path):
    options = settings(sequence={**sequence, "validation_classes": 0}, update={"samples": 9},
                       methods=["ncm", "ft", "et", "imprint", "ptn", "lwf", "ewc", "er_ace"])
    if sequence.get("natural"):
        options.methods = ["ncm", "ft"]
    results = fluid.run(options, tmp_path / "run")
    test = Sequence.load(tmp_path / "run" / "sequence.npz")
    for name, row in results["methods"].items():
        assert 0 <= row["overall"] <= 1 and row["thresholds"] == {}, name
        log = Log.load(tmp_path / "run" / "methods" / name / "log.npz")
        assert (log.pred[:1] == -1).all() == (test.known == 0)
        assert all(np.isfinite(values[log.pred >= 0]).all() for values in log.novelty.values()), name
        assert (row["unseen"]["msp"]["auroc"] is None) == (test.known == len(test.classes))


def test_a_start_from_scratch_is_a_random_network_with_a_head_of_zeros(settings, tmp_path):
    fluid.run(settings(pretrain={"steps": 0}, methods=["ft"], sequence={"classes": 4}), tmp_path / "run")
    state = torch.load(tmp_path / "run" / "pretrained.pt", weights_only=True)
    assert not state["head.weight"].any() and state["backbone.conv1.weight"].any()


def test_weights_of_a_file_are_the_start(settings, tmp_path, whole):
    options = settings(pretrain={"steps": 0}, model={"weights": str(whole[0] / "pretrained.pt")}, methods=["ncm"])
    fluid.run(options, tmp_path / "run")
    expected = torch.load(whole[0] / "pretrained.pt", weights_only=True)
    found = torch.load(tmp_path / "run" / "pretrained.pt", weights_only=True)
    assert all(torch.equal(value, expected[key]) for key, value in found.items() if key.startswith("backbone."))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, message", [
    ({"methods": ["ncmm"]}, "methods: unknown method ncmm; did you mean ncm."),
    ({"tasks": []}, "tasks: a pool of images needs at least one data set."),
    ({"sequence": {"classes": 60}}, "lower sequence.classes, or give more tasks."),
    ({"pretrain": {"classes": 31}}, "pretrain.classes"),
    ({"sequence": {"c": 200}}, "images left"),
    ({"pretrain": {"way": 25}, "methods": ["ptn"]}, "pretrain.way=25"),
    ({"tasks": [*TASKS, {"task": "demo_icons_b", "year": 2021}]}, "listed twice"),
    ({"tasks": [{"task": "demo_mnist", "year": 2004, "split": 5}]}, "leave out split"),
    ({"tasks": [{"task": "demo_icon_parts", "year": 2020}]}, "several labels"),
    ({"pretrain": {"lr": 1e9}}, "pretrain.lr: the pretraining diverged; lower it."),
], ids=str)
def test_what_makes_no_sense_is_told_in_one_sentence(changes, message, settings, tmp_path):
    with pytest.raises(UserError) as error:
        fluid.run(settings(**changes), tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("methods", [["ncm", "ptn"], ["ncm", "meta_baseline"], []])
def test_a_way_that_is_too_large_is_told_before_anything_is_trained(methods, settings, tmp_path):
    with pytest.raises(UserError, match="pretrain.way=25: only"):
        fluid.run(settings(pretrain={"way": 25}, methods=methods), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fluid.run(settings(pretrain={"way": 25}, methods=["ncm"]), tmp_path / "run")["methods"]["ncm"]["updates"] == 0


def test_the_command(settings, tmp_path, capsys, data_dir):
    file, out = tmp_path / "mine.yaml", str(tmp_path / "run")
    file.write_text(yaml.safe_dump({**config.to_dict(settings()), "methods": ["ncm", "ft"]}))

    def command(*words):
        code = fluid.main(["--config", str(file), "--out", out, *words])
        return code, capsys.readouterr()

    code, printed = command()
    assert code == 0 and "ncm: overall accuracy" in printed.out and "clock" in printed.out and out in printed.out
    for words, expected, message in [
        ([], 2, "already holds a run: go on with --resume"),
        (["--resume", "learn.scale=3"], 2, "learn.scale was 16.0 and is 3.0"),
        (["update.whn=never"], 2, "unknown key update.whn; did you mean update.when"),
        (["update.when=sometimes"], 2, "update.when cannot be 'sometimes'"),
        (["methods=[ft, nm]"], 2, "unknown method nm"),
        (["tasks=[{task: caltech256, year: 2007}]"], 3, "missing"),
    ]:
        code, printed = command(*words)
        assert code == expected and message in printed.err and "Traceback" not in printed.err, words
        assert "allow_missing" not in printed.err  # which is a key of other runs
    code, printed = command("--resume")
    assert code == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    assert fluid.main(["--config", str(file), "--out", str(other)]) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err


def test_a_config_that_is_no_text_or_holds_nothing_is_one_sentence(tmp_path, capsys):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert fluid.main(["--config", str(tmp_path / "binary.yaml")]) == 2
    assert "binary.yaml: cannot be read" in capsys.readouterr().err
    (tmp_path / "empty.yaml").write_text("")
    assert fluid.main(["--config", str(tmp_path / "empty.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("tasks: a")
