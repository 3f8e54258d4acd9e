import copy
import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nevis_lite import cache, data, fit, models
from nevis_lite.config import DataConfig, FitConfig, UserError
from nevis_lite.data import EndlessStream, Split
from nevis_lite.datasets import SPLITS, DataSet

SIZE = 8
CONFIG = FitConfig(steps=12, validate_every=4, max_warmup=0.25, warmup_epochs=1.0)
HYPERPARAMETERS = {"lr": 0.02, "label_smoothing": 0.1}
NEVER = float("nan")


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Train and dev of a task whose two classes are bright and dark noise, 30 and 21 images."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split in SPLITS:
        for number in range({"train": 30, "dev": 21}.get(split, 4)):
            folder = root / "x" / split / f"c{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 140, (9, 9, 3)) + 90 * (number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    folder = cache.prepare(DataSet(key="x", name="X", folder=root / "x"), DataConfig(dir=str(root)))
    return [Split(folder, name, torch.device("cpu")) for name in ("train", "dev")]


@pytest.fixture(scope="module")
def many_labels(tmp_path_factory):
    """Dev of a task of 40 images a split with three labels each."""
    root = tmp_path_factory.mktemp("data")
    (root / "x").mkdir()
    rng = np.random.default_rng(1)
    for split in SPLITS:
        images, labels = rng.integers(0, 256, (40, 3, 3, 3)), rng.integers(0, 2, (40, 3))
        for what, array in (("images", images), ("labels", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
            (root / "x" / f"{split}-{what}-idx{array.ndim}-ubyte").write_bytes(content)
    folder = cache.prepare(DataSet(key="x", name="X", folder=root / "x"), DataConfig(dir=str(root)))
    return Split(folder, "dev", torch.device("cpu"))


def network(num_classes: int = 2) -> models.Classifier:
    return models.build("resnet8", num_classes, torch.Generator().manual_seed(0))


def batches(split: Split, batch: int = 16) -> EndlessStream:
    return EndlessStream(split, batch, DataConfig(), SIZE, (0, 0, 0))


def train(splits, model=None, hyperparameters=HYPERPARAMETERS, config=CONFIG, **options) -> fit.Trial:
    return fit.train(model or network(), batches(splits[0]), splits[1], hyperparameters, config, **options)


def assert_same_weights(a: dict, b: dict):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---- rules


@pytest.mark.parametrize(
    "num_train, size",  # the edges of Eq. 4, and MNIST, CIFAR-10, SVHN, CelebA, ImageNet
    [(1, 16), (6_400, 16), (12_799, 16), (12_800, 32), (25_599, 32), (25_600, 64), (51_199, 64), (51_200, 128), (102_399, 128),
     (102_400, 256), (204_799, 256), (204_800, 512), (10_000_000, 512), (42_000, 64), (35_000, 64), (51_279, 128),
     (130_216, 256), (1_153_050, 512)],
)
def test_batch_size_of_equation_4(num_train, size):
    assert fit.batch_size(num_train, 512) == size


def test_batch_size_has_an_upper_end():
    assert [fit.batch_size(1_153_050, most) for most in (256, 32, 8)] == [256, 32, 8]


def test_learning_rates_of_the_reference():
    rates = {1: 2.61165e-5, 1000: 0.0261165, 3829: 0.1, 25_000: 0.056495, 49_999: 1.01e-8}
    for step, rate in rates.items():
        assert fit.learning_rate(step, 50_000, 3829, 0.1) == pytest.approx(rate, rel=1e-2 if step == 49_999 else 1e-5)


def test_warmup_begins_at_zero_and_the_cosine_ends_above_it():
    rates = [fit.learning_rate(step, 100, 20, 0.5) for step in range(101)]
    assert rates[0] == 0 and rates[20] == 0.5 and rates[100] == pytest.approx(1e-8)
    assert rates[:21] == sorted(rates[:21]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[60] == pytest.approx(0.25)
    assert fit.learning_rate(0, 100, 0, 0.5) == 0.5  # without warm-up


@pytest.mark.parametrize("steps, warmup, tenth, hundredth", [(64_000, 400, 32_000, 48_000), (10, 2, 5, 7), (101, 0, 50, 75)])
def test_piecewise_constant_rates(steps, warmup, tenth, hundredth):
    rates = [fit.learning_rate(step, steps, warmup, 0.5, "piecewise") for step in range(steps)]
    assert rates[:warmup] == [fit.learning_rate(step, steps, warmup, 0.5) for step in range(warmup)]
    assert set(rates[warmup:tenth]) == {0.5}
    assert rates[tenth:hundredth] == pytest.approx([0.05] * (hundredth - tenth))
    assert rates[hundredth:] == pytest.approx([0.005] * (steps - hundredth))


def test_a_warmup_beyond_half_of_the_steps_is_followed_by_the_piece_that_is_due():
    rates = [fit.learning_rate(step, 100, 60, 0.5, "piecewise") for step in range(100)]
    assert rates[59] == pytest.approx(0.5 * 59 / 60) and rates[60] == pytest.approx(0.05) and rates[75] == pytest.approx(0.005)


@pytest.mark.parametrize("searched, given, used", [({}, "cosine", "cosine"), ({}, "piecewise", "piecewise"),
                                                   ({"schedule": "cosine"}, "piecewise", "cosine"),
                                                   ({"schedule": "piecewise"}, "cosine", "piecewise")])
def test_the_schedule_of_the_trial_comes_before_that_of_the_config(splits, searched, given, used):
    trial = train(splits, hyperparameters=HYPERPARAMETERS | searched, config=dataclasses.replace(CONFIG, schedule=given))
    last = {"cosine": 0.02 * (1 + math.cos(0.9 * math.pi)) / 2, "piecewise": 0.0002}[used]  # 2 steps warm up, 9 of 10 follow
    assert trial.optimizer.param_groups[0]["lr"] == pytest.approx(last, rel=1e-4)


@pytest.mark.parametrize(
    "num_train, batch, config, steps",
    [
        (35_000, 64, FitConfig(), 3829),
        (1_153_050, 512, FitConfig(), 15_771),
        (1_153_050, 512, FitConfig(steps=10_000), 9_999),
        (1_153_050, 512, FitConfig(max_warmup=0.1), 5_000),
        (100, 16, FitConfig(steps=300, max_warmup=0.1), 30),
        (32, 16, FitConfig(steps=300), 21),
        (100, 16, FitConfig(warmup_epochs=0.5), 3),
        (100, 16, FitConfig(warmup_epochs=0), 0),
        (100, 16, FitConfig(max_warmup=0), 0),
        (100, 16, FitConfig(steps=1), 0),
    ],
)
def test_length_of_the_warmup(num_train, batch, config, steps):
    assert fit.warmup_steps(config, num_train, batch) == steps


def test_every_learning_rate_is_finite_when_warmup_meets_the_end():
    for steps in range(1, 12):
        config = FitConfig(steps=steps)
        warmup = fit.warmup_steps(config, 1000, 16)
        rates = [fit.learning_rate(step, steps, warmup, 0.1) for step in range(steps)]
        assert all(math.isfinite(rate) and 0 <= rate <= 0.1 for rate in rates)


@pytest.mark.parametrize("steps, every, expected", [(10, 5, [0, 5, 10]), (9, 4, [0, 4, 8, 9]), (3, 9, [0, 3]), (1, 1, [0, 1])])
def test_dev_is_evaluated_at_the_start_regularly_and_at_the_end(steps, every, expected):
    assert fit.validation_steps(FitConfig(steps=steps, validate_every=every)) == expected


def test_the_reference_evaluates_51_times():
    assert len(fit.validation_steps(FitConfig())) == 51


@pytest.mark.parametrize("name", ["banana", "cuda:99", ""])
def test_a_device_that_is_not_there_is_a_user_error(name):
    with pytest.raises(UserError, match=f"device={name}"):
        fit.pick_device(name)


def test_devices():
    assert fit.pick_device("cpu").type == "cpu"
    assert fit.pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# ---- loss


@pytest.mark.parametrize("smoothing", [0.0, 0.15, 0.3, 1.0])
def test_smoothed_cross_entropy_by_hand(smoothing):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 4)) * 3, rng.integers(0, 4, 6)
    log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = np.full((6, 4), smoothing / 4)
    targets[np.arange(6), labels] += 1 - smoothing
    expected = -(targets * log_shares).sum(axis=1).mean()
    found = fit.loss_function("single_label", torch.tensor(logits), torch.tensor(labels), smoothing)
    assert found.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.15, 0.3, 1.0])
def test_smoothed_binary_cross_entropy_by_hand(smoothing):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 4)) * 3, rng.integers(0, 2, (6, 4), dtype=np.uint8)
    shares = 1 / (1 + np.exp(-logits))
    targets = labels * (1 - smoothing) + smoothing / 2
    expected = -(targets * np.log(shares) + (1 - targets) * np.log(1 - shares)).mean()  # over images and labels
    found = fit.loss_function("multi_label", torch.tensor(logits, dtype=torch.float32), torch.tensor(labels), smoothing)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_only_weights_of_layers_decay():
    groups = fit.start(network(), FitConfig(weight_decay=0.03)).optimizer.param_groups
    model = network()
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [group["weight_decay"] for group in groups] == [0.03, 0.0]
    assert [len(group["params"]) for group in groups] == [len(layers), 2 * len(norms) + 1]  # the head has the one bias
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert all(group["momentum"] == 0.9 and group["nesterov"] and group["dampening"] == 0 for group in groups)


def test_updates_are_nesterov_with_coupled_decay_on_the_schedule(splits):
    """Against the recurrence written out: g += wd w, v = 0.9 v + g, w -= lr (g + 0.9 v)."""
    model, shadow = network(), network()
    trial = fit.start(model, CONFIG)
    stream = batches(splits[0])
    velocity = {}
    for step in range(6):
        fit.update(trial, stream, HYPERPARAMETERS, CONFIG)
        shadow.train()
        images, labels = stream(step)
        F.cross_entropy(shadow(images), labels, label_smoothing=0.1).backward()
        rate = fit.learning_rate(step, 12, 2, 0.02)  # 30 // 16 + 1 = 2 steps are an epoch
        with torch.no_grad():
            for name, weight in shadow.named_parameters():
                gradient = weight.grad + (1e-4 * weight if weight.ndim > 1 else 0)
                velocity[name] = gradient if step == 0 else 0.9 * velocity[name] + gradient
                weight -= rate * (gradient + 0.9 * velocity[name])
                weight.grad = None
        for (name, weight), expected in zip(model.named_parameters(), shadow.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6, msg=name)
    assert trial.step == 6


def test_the_first_update_of_a_warmup_moves_no_weight_but_the_statistics(splits):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit.update(fit.start(model, CONFIG), batches(splits[0]), HYPERPARAMETERS, CONFIG)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != ("running" in name or "tracked" in name)


def gradients_of(trial: fit.Trial, stream: EndlessStream, hyperparameters: dict) -> dict:
    """Make an update; what the optimiser got of each parameter, which it then uses as scratch paper."""
    found = {}
    hook = trial.optimizer.register_step_pre_hook(lambda optimizer, *_: found.update(
        {weight: weight.grad.clone() for group in optimizer.param_groups for weight in group["params"]}))
    fit.update(trial, stream, hyperparameters, CONFIG)
    hook.remove()
    return found


# ---- auxiliary tasks


def auxiliary(split: Split) -> fit.Auxiliary:
    """The task's own dev images as another task."""
    return fit.Auxiliary(EndlessStream(split, 8, DataConfig(), SIZE, (0, 0, 0, 1)), models.linear_head(64, 2))


def test_the_gradient_is_that_of_the_weighted_sum_of_losses(splits):
    model, stream, others = network(), batches(splits[0]), [auxiliary(splits[1]), auxiliary(splits[0])]
    trained = [*model.parameters(), *(weight for other in others for weight in other.head.parameters())]
    (images, labels), total = stream(0), 0.0
    shadow = copy.deepcopy(model).train()
    shadow_heads = [copy.deepcopy(other.head) for other in others]
    total = F.cross_entropy(shadow(images), labels, label_smoothing=0.1)
    for other, head in zip(others, shadow_heads, strict=True):
        images, labels = other.batches(0)
        total = total + 0.3 * F.cross_entropy(head(shadow.backbone(images)), labels, label_smoothing=0.1)
    expected = torch.autograd.grad(total, [*shadow.parameters(), *(w for head in shadow_heads for w in head.parameters())])
    found = gradients_of(fit.start(model, CONFIG, others), stream, HYPERPARAMETERS | {"auxiliary_weight": 0.3})
    for weight, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(found[weight], gradient, rtol=1e-4, atol=1e-6)
    assert found[others[0].head.weight].any()


def test_with_weight_zero_auxiliary_tasks_change_nothing(splits):
    """Neither weights nor the statistics of batch norm, which are those of the current task alone."""
    alone = train(splits)
    together = train(splits, hyperparameters=HYPERPARAMETERS | {"auxiliary_weight": 0.0}, auxiliaries=[auxiliary(splits[1])])
    assert_same_weights(together.model.state_dict(), alone.model.state_dict())
    assert together.curve == alone.curve
    weighted = train(splits, hyperparameters=HYPERPARAMETERS | {"auxiliary_weight": 1.0}, auxiliaries=[auxiliary(splits[1])])
    assert not torch.equal(weighted.model.head.weight, alone.model.head.weight)


def test_a_trial_with_auxiliary_tasks_goes_on_from_a_snapshot(splits):
    options = {"hyperparameters": HYPERPARAMETERS | {"auxiliary_weight": 0.7}}
    heads = [models.linear_head(64, 2, torch.Generator().manual_seed(5)) for _ in range(2)]
    parts = [fit.Auxiliary(EndlessStream(splits[1], 8, DataConfig(), SIZE, (0, 0, 0, 1)), head) for head in heads]
    whole = train(splits, auxiliaries=parts[:1], **options)
    kept = []

    def stop(trial):
        if trial.step == 5:
            kept.append(copy.deepcopy(trial.snapshot()))
            raise Stop

    with pytest.raises(Stop):
        train(splits, auxiliaries=parts[1:], on_step=stop, **options)
    again = train(splits, auxiliaries=[auxiliary(splits[1])], snapshot=kept[0], **options)  # another head, to be replaced
    assert_same_weights(again.model.state_dict(), whole.model.state_dict())
    assert_same_weights(again.heads.state_dict(), whole.heads.state_dict())


# ---- nothing waits for the device


class Asks(TorchDispatchMode):
    """Notes each operation that tells the host something, for which it has to wait until a device is done."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = str(function), kwargs or {}
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if by_mask or any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            self.found.append(name)
        return function(*args, **kwargs)


@pytest.mark.parametrize("ask", [lambda x: float(x[0]), lambda x: bool((x > 0).all()), lambda x: x[x > 0], torch.nonzero])
def test_questions_of_the_host_are_noticed(ask):
    with Asks() as asks:
        ask(torch.arange(3))
    assert asks.found


@pytest.mark.parametrize("parts", [1, 2])
def test_between_validations_no_update_asks_the_device(splits, many_labels, parts):
    hyperparameters = HYPERPARAMETERS | {"auxiliary_weight": 0.5}
    for one, other, classes in ((splits[0], many_labels, 2), (many_labels, splits[0], 3)):
        head = models.linear_head(64, 5 - classes)
        others = [fit.Auxiliary(EndlessStream(other, 8, DataConfig(), SIZE, (0, 0, 0, 1)), head)]
        trial, stream = fit.start(network(classes), CONFIG, others), batches(one)
        trial.parts = parts
        fit.update(trial, stream, hyperparameters, CONFIG)  # looks once what there is
        with Asks() as asks:
            for _ in range(11):
                fit.update(trial, stream, hyperparameters, CONFIG)
        assert not asks.found


# ---- other ways to compute the same


def test_fused_updates_are_those_of_one_operation_after_the_other(splits, monkeypatch):
    """What CUDA uses, here on the CPU: with weights whose memory is channels-last, as in a run."""
    trials = {}
    for fused in (True, False):
        monkeypatch.setitem(fit.SGD_KERNELS, "cpu", {"fused": fused, "foreach": False})
        trials[fused] = train(splits, network().to(memory_format=torch.channels_last))
        assert trials[fused].optimizer.defaults["fused"] is fused
    assert_close_weights(trials[True].model.state_dict(), trials[False].model.state_dict())


def test_the_order_of_channels_in_memory_changes_last_digits_alone(splits):
    usual, last = (train(splits, network().to(memory_format=order)) for order in (torch.contiguous_format, torch.channels_last))
    assert_close_weights(last.model.state_dict(), usual.model.state_dict())


def test_a_step_in_bf16_goes_the_way_of_one_in_single_precision(splits):
    """Batch norm over few values of 8 bits each turns the gradient of this small network by some degrees."""
    losses, gradients = {}, {}
    for precision in ("fp32", "bf16"):
        config = dataclasses.replace(CONFIG, precision=precision)
        trial = fit.start(network(), config)
        trial.model.train()
        losses[precision] = float(fit._gradients(trial, batches(splits[0]), HYPERPARAMETERS, config))
        gradients[precision] = torch.cat([parameter.grad.flatten() for parameter in trial.model.parameters()])
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert 0.97 < F.cosine_similarity(*gradients.values(), dim=0) < 0.9999


# ---- compiled


def tiny(num_classes: int = 2) -> models.Classifier:
    """A network that is compiled in seconds, with batch norm and dropout."""
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                           nn.Dropout(0.3))
    backbone = models.Foreign(models.initialise(layers, torch.Generator().manual_seed(0)), 8, (0.5,) * 3, (0.25,) * 3)
    return models.Classifier(backbone, models.linear_head(8, num_classes, torch.Generator().manual_seed(1)))


def tiny_trial(splits, **options) -> fit.Trial:
    """With an auxiliary task, that is with and without running statistics."""
    head = models.linear_head(8, 2, torch.Generator().manual_seed(2))
    other = fit.Auxiliary(EndlessStream(splits[1], 8, DataConfig(), SIZE, (0, 0, 0, 1)), head)
    return train(splits, hyperparameters=HYPERPARAMETERS | {"lr": 0.2, "auxiliary_weight": 0.4}, auxiliaries=[other], **options)


def assert_close_weights(one: dict, other: dict):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5, msg=name)


def test_compiled_updates_are_those_of_the_network_itself(splits):
    try:
        fit.check_compiler(torch.device("cpu"))
    except UserError as error:
        pytest.skip(str(error))
    options = {"hyperparameters": {"lr": 0.2, "label_smoothing": 0.1}}
    eager, model = train(splits, tiny(), **options), tiny()
    compiled = train(splits, model, compiled=fit.compile_backbone(model.backbone), **options)
    assert compiled.backbone is not model.backbone
    assert_close_weights(compiled.model.state_dict(), eager.model.state_dict())
    assert compiled.curve == eager.curve and compiled.loss == pytest.approx(eager.loss, rel=1e-4)
    assert not torch.allclose(compiled.model.head.weight, tiny().head.weight, rtol=0.01)


def test_snapshots_go_over_between_compiled_and_not(splits, counted_compile):
    def model(compiled):
        model = tiny()
        return {"model": model, "compiled": fit.compile_backbone(model.backbone) if compiled else None}

    expected = tiny_trial(splits, **model(False))
    for compiled in (False, True):
        kept = []

        def stop(trial, kept=kept):
            if trial.step == 5:
                kept.append(copy.deepcopy(trial.snapshot()))
                raise Stop

        with pytest.raises(Stop):
            tiny_trial(splits, on_step=stop, **model(compiled))
        assert kept[0]["model"].keys() == tiny().state_dict().keys()
        assert_close_weights(tiny_trial(splits, snapshot=kept[0], **model(not compiled)).model.state_dict(),
                             expected.model.state_dict())
    assert len(counted_compile) == 2


def test_new_weights_in_place_are_not_compiled_again(splits, counted_compile):
    """But each batch size is, once with and once without running statistics; of these there may be more than PyTorch's 8."""
    model, sizes = tiny(), (4, 6, 8, 10, 12)
    compiled = fit.compile_backbone(model.backbone)
    for batch in sizes + sizes[::-1]:
        model.load_state_dict(tiny().state_dict())
        other = fit.Auxiliary(batches(splits[1], batch), models.linear_head(8, 2))
        trial = fit.start(model, CONFIG, [other], compiled)
        for _ in range(2):
            fit.update(trial, batches(splits[0], batch), HYPERPARAMETERS | {"auxiliary_weight": 1.0}, CONFIG)
    assert len(counted_compile) == 2 * len(sizes)


# ---- memory and shares

OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
                 RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                              "tried to allocate 99999999999 bytes. Error code 12 (Cannot allocate memory)")]


def with_memory_for(model: models.Classifier, most: int, error: RuntimeError) -> models.Classifier:
    """A network that fails behind its backbone, when batch norm has looked at the images already."""
    def check(head, inputs):
        if len(inputs[0]) > most:
            raise error

    model.head.register_forward_pre_hook(check)
    return model


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["CUDA", "CPU"])
def test_out_of_memory_a_batch_is_computed_in_parts_with_the_same_loss(splits, capsys, error):
    data.say_once.cache_clear()
    model, shadow, stream = with_memory_for(network(), 4, error), network().train(), batches(splits[0])
    other = auxiliary(splits[1])
    head = copy.deepcopy(other.head)
    trial = fit.start(model, CONFIG, [other])
    images, labels = stream(0)
    loss = sum(F.cross_entropy(shadow(images[i:i + 4]), labels[i:i + 4], label_smoothing=0.1) for i in range(0, 16, 4)) / 4
    statistics = {name: value.clone() for name, value in shadow.named_buffers()}
    images, labels = other.batches(0)
    parts = [(shadow.backbone(images[i:i + 2]), labels[i:i + 2]) for i in range(0, 8, 2)]
    more = sum(F.cross_entropy(head(features), targets, label_smoothing=0.1) for features, targets in parts) / 4
    (loss + 0.3 * more).backward()
    found = gradients_of(trial, stream, HYPERPARAMETERS | {"auxiliary_weight": 0.3})
    assert trial.parts == trial.snapshot()["parts"] == 4 and float(trial.loss_sum) == pytest.approx(loss.item())
    for weight, expected in zip(model.parameters(), shadow.parameters(), strict=True):
        torch.testing.assert_close(found[weight], expected.grad, rtol=1e-4, atol=1e-6)
    assert_same_weights(dict(model.named_buffers()), statistics)
    assert capsys.readouterr().err.count("\n") == 2  # for 2 and for 4 parts
    fit.update(trial, stream, HYPERPARAMETERS | {"auxiliary_weight": 0.3}, CONFIG)
    fit.update(fit.start(model, CONFIG), stream, HYPERPARAMETERS, CONFIG)  # another trial of the same size
    assert not capsys.readouterr().err


def test_a_trial_in_parts_goes_on_in_parts(splits):
    kept = []

    def stop(trial):
        kept.append(copy.deepcopy(trial.snapshot()))
        raise Stop

    whole = train(splits, with_memory_for(network(), 21, OUT_OF_MEMORY[0]))
    parts = train(splits, with_memory_for(network(), 8, OUT_OF_MEMORY[0]))
    with pytest.raises(Stop):
        train(splits, with_memory_for(network(), 8, OUT_OF_MEMORY[0]), on_step=stop)
    assert_same_weights(train(splits, snapshot=kept[0]).model.state_dict(), parts.model.state_dict())
    assert not torch.equal(whole.model.head.weight, parts.model.head.weight)  # batch norm saw 8 at a time


def test_what_is_no_lack_of_memory_or_too_much_of_it_is_an_error(splits):
    with pytest.raises(RuntimeError, match="shapes"):
        train(splits, with_memory_for(network(), 8, RuntimeError("shapes do not match")))
    trial = fit.start(with_memory_for(network(), 1, OUT_OF_MEMORY[0]), CONFIG)
    with pytest.raises(torch.OutOfMemoryError):
        fit.update(trial, batches(splits[0]), HYPERPARAMETERS, CONFIG)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["CUDA", "CPU"])
def test_out_of_memory_fewer_images_are_predicted_at_a_time(splits, error):
    scores = fit.predict(network(), splits[1], SIZE, CONFIG)
    torch.testing.assert_close(fit.predict(with_memory_for(network(), 5, error), splits[1], SIZE, CONFIG), scores)


def test_the_shares_of_a_batch_add_up_to_its_update(splits, monkeypatch):
    """Three processes, one after the other, without batch norm; the last one hears what the others would have said."""
    def plain():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return models.Classifier(backbone, nn.Linear(64, 2))

    heads, said = [models.linear_head(64, 2, torch.Generator().manual_seed(5)) for _ in range(4)], []

    def updated(head, share):
        other = fit.Auxiliary(EndlessStream(splits[1], 10, DataConfig(), SIZE, (0, 0, 0, 1), share), head)
        config = FitConfig(steps=9, warmup_epochs=0)  # whose first update moves the weights
        trial = fit.start(plain(), config, [other])
        stream = EndlessStream(splits[0], 10, DataConfig(), SIZE, (0, 0, 0), share)
        fit.update(trial, stream, HYPERPARAMETERS | {"auxiliary_weight": 0.3}, config)
        return trial, len(stream(0)[0])

    def add_up(tensors):
        said.append([tensor.clone() for tensor in tensors])
        for number, tensor in enumerate(tensors):
            tensor.copy_(sum(message[number] for message in said))

    one, _ = updated(heads[3], (0, 1))
    assert not said
    monkeypatch.setattr(fit.parallel, "add_up", add_up)
    sizes = [updated(heads[number], (number, 3)) for number in range(3)]
    assert [size for _, size in sizes] == [3, 3, 4]
    last = sizes[-1][0]
    torch.testing.assert_close(last.loss_sum, one.loss_sum)
    for weight, expected in zip([*last.model.parameters(), *last.heads.parameters()],
                                [*one.model.parameters(), *one.heads.parameters()], strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


# ---- evaluation


def test_error_is_that_of_each_image_alone(splits):
    dev, model = splits[1], network().eval()
    model.head.bias.data = torch.tensor([0.0, 0.3])
    with torch.no_grad():
        scores = torch.stack([model(images)[0] for images in dev.batches(SIZE, 1)])
    wrong = (scores.argmax(dim=1) != dev.labels).float().mean().item()
    assert fit.evaluate(model, dev, SIZE, CONFIG) == pytest.approx(wrong) and 0 < wrong < 1


@pytest.mark.parametrize("batch", [1, 2, 5, 20, 21, 1000])
def test_the_size_of_evaluation_batches_does_not_matter(splits, many_labels, monkeypatch, batch):
    trained = network()
    train(splits, trained)
    models_and_splits = [(trained, splits[1]), (network(3), many_labels)]
    expected = [(fit.evaluate(*pair, SIZE, CONFIG), fit.predict(*pair, SIZE, CONFIG)) for pair in models_and_splits]
    monkeypatch.setattr(fit, "EVALUATION_BATCH", batch)
    for pair, (error, outputs) in zip(models_and_splits, expected, strict=True):
        assert fit.evaluate(*pair, SIZE, CONFIG) == pytest.approx(error, abs=1e-9)
        torch.testing.assert_close(fit.predict(*pair, SIZE, CONFIG), outputs, rtol=1e-4, atol=1e-5)


def test_error_of_several_labels_is_one_minus_sklearns_map(many_labels):
    model = network(3)
    scores = fit.predict(model, many_labels, SIZE, CONFIG)
    expected = 1 - average_precision_score(many_labels.labels.numpy(), scores.numpy(), average="macro")
    assert fit.evaluate(model, many_labels, SIZE, CONFIG) == pytest.approx(expected, abs=1e-12)


def test_evaluating_changes_nothing(splits):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit.evaluate(model, splits[1], SIZE, CONFIG)
    assert_same_weights(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_outputs_that_are_not_finite_have_no_error(splits):
    model = network()
    model.head.bias.data[1] = NEVER
    assert fit.evaluate(model, splits[1], SIZE, CONFIG) is None


def test_predictions_of_picks_come_in_their_order(splits):
    model = network()
    everything = fit.predict(model, splits[1], SIZE, CONFIG)
    some = fit.predict(model, splits[1], SIZE, CONFIG, torch.tensor([4, 0, 9]))
    torch.testing.assert_close(some, everything[[4, 0, 9]], rtol=1e-4, atol=1e-5)


# ---- a trial


def test_a_trial_learns_and_records_its_curve(splits):
    trial = train(splits, config=FitConfig(steps=60, validate_every=20, warmup_epochs=1.0))
    assert [step for step, _ in trial.curve] == [0, 20, 40, 60]
    assert trial.step == 60 and not trial.failed and trial.best_error < 0.2
    assert math.isfinite(trial.loss) and 0 < trial.loss < math.log(2)


def test_the_weights_kept_are_the_best_on_dev_and_the_earliest_of_equals(splits):
    kept, model = [], network()
    config = FitConfig(steps=12, validate_every=1, warmup_epochs=0.0)

    def copy(trial):
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
        if trial.step >= 8:
            model.head.bias.data[0] = 1e4  # from here on it always answers with the first class

    trial = train(splits, model, {"lr": 0.02, "label_smoothing": 0.0}, config, on_step=copy)
    errors = [error for _, error in trial.curve]
    best = errors.index(min(errors))
    assert 0 < best <= 8 and errors[-1] == pytest.approx(10 / 21)
    assert (trial.best_error, trial.best_step) == (min(errors), best)
    assert_same_weights(trial.best_state, kept[best - 1])
    again = network()
    again.load_state_dict(trial.best_state)
    assert fit.evaluate(again, splits[1], SIZE, config) == trial.best_error


def test_on_step_is_called_after_each_update(splits):
    steps = []
    train(splits, on_step=lambda trial: steps.append(trial.step))
    assert steps == list(range(1, 13))


def test_two_trainings_are_the_same_to_the_last_bit(splits):
    torch.manual_seed(1)
    first = train(splits)
    torch.manual_seed(2)
    second = train(splits)
    assert first.curve == second.curve and first.loss == second.loss
    assert_same_weights(first.model.state_dict(), second.model.state_dict())


@pytest.mark.parametrize("lr", [1e30, 3e38])
def test_a_trial_that_diverges_fails_without_an_error(splits, lr):
    trial = train(splits, hyperparameters={"lr": lr, "label_smoothing": 0.0})
    assert trial.failed and trial.step < 12 and trial.curve[-1] == [trial.step, None]
    assert all(torch.isfinite(value).all() for value in trial.best_state.values() if value.is_floating_point())


def test_weights_that_are_not_numbers_fail_at_once(splits):
    model = network()
    next(model.parameters()).data.fill_(NEVER)
    trial = train(splits, model)
    assert trial.failed and trial.step == 0 and trial.curve == [[0, None]] and trial.best_state is None


def test_a_loss_that_is_not_finite_fails_though_outputs_are(splits):
    def poison(running: fit.Trial):
        if running.step == 2:
            running.loss_sum = running.loss_sum + NEVER

    trial = train(splits, on_step=poison)
    assert trial.failed and trial.step == 4 and trial.best_step == 0


# ---- stopping and going on


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 11, 12])
def test_a_stopped_trial_goes_on_to_the_same_weights_and_curve(splits, tmp_path, stop):
    expected = train(splits)

    def save_and_stop(trial):
        if trial.step == stop:
            torch.save(trial.snapshot(), tmp_path / "snapshot.pt")
            raise Stop

    with pytest.raises(Stop):
        train(splits, on_step=save_and_stop)
    snapshot = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    other = models.build("resnet8", 2, torch.Generator().manual_seed(9))  # its weights are to be replaced
    trial = train(splits, other, snapshot=snapshot)
    assert trial.curve == expected.curve and trial.step == 12
    for name in ("best_error", "best_step", "loss", "failed"):
        assert getattr(trial, name) == getattr(expected, name)
    assert_same_weights(trial.model.state_dict(), expected.model.state_dict())
    assert_same_weights(trial.best_state, expected.best_state)


def test_a_failed_trial_stays_failed(splits, tmp_path):
    trial = train(splits, hyperparameters={"lr": 1e30, "label_smoothing": 0.0})
    torch.save(trial.snapshot(), tmp_path / "snapshot.pt")
    again = train(splits, snapshot=torch.load(tmp_path / "snapshot.pt", weights_only=True))
    assert again.failed and again.step == trial.step and again.curve == trial.curve


def test_a_snapshot_is_no_larger_than_weights_momentum_and_the_best(splits, tmp_path):
    trial = train(splits)
    torch.save(trial.snapshot(), tmp_path / "snapshot.pt")
    parameters = sum(value.nbytes for value in trial.model.state_dict().values())
    assert Path(tmp_path / "snapshot.pt").stat().st_size < 3 * parameters + 100_000
