"""The learners of FLUID on a few features in the plane, against values worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from nevis_lite import fluid_methods
from nevis_lite.fluid import FluidConfig, strategy
from nevis_lite.fluid_learners import Batch, Memory, Reservoir, Start
from nevis_lite.fluid_methods import METHODS
from nevis_lite.fluid_updates import Doubling, ErrorRise, Every, Never, NewClasses


class Line(nn.Module):
    """A backbone of two inputs and two features."""

    num_features = 2

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(2))

    def forward(self, x):
        return self.layer(x)


class Points:
    """Stands for a split: an image is a point of the plane, and a crop of it the point itself."""

    def __init__(self, points, labels=()):
        self.pixels, self.labels = torch.tensor(points), torch.tensor(labels, dtype=torch.int64)

    def crops(self, picks, config, size, draws):
        return self.pixels[picks]

    def batches(self, size, batch, picks):
        yield from self.pixels[picks].split(batch)


KNOWN = Points([[3.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [0, 0, 1])  # two images of slot 0, one of slot 1


def learner(name, slots=4, length=18, weight=((1.0, 0.0), (0.0, 2.0)), bias=(0.5, 0.0), start=KNOWN, **learn):
    settings = FluidConfig()
    for key, value in learn.items():
        setattr(settings.learn, key, value)
    begin = Start(Line(), torch.tensor(weight).view(-1, 2), torch.tensor(bias), start.pixels, start, forward_macs=4)
    return METHODS[name](begin, slots, length, settings)


def batch(found, points, labels, **memory):
    """What a step of the learner `found` trains on."""
    points, labels = torch.tensor(points), torch.tensor(labels)
    features = found.forward(points) if found.full else points
    everything = Memory(Points(points.tolist()), labels, points)
    return Batch(torch.arange(len(labels)), points, features, labels, everything, torch.Generator().manual_seed(0))


# ---- scores and novelty ---------------------------------------------------------------------------------------------


def test_unknown_slots_have_no_score_until_they_are_revealed():
    for name in METHODS:
        found = learner(name)
        logits = found.logits(torch.tensor([[1.0, 1.0]]))
        assert logits[0].isfinite().tolist() == [True, True, False, False], name
        found.observe(torch.tensor([-1.0, 0.0]), 3)
        assert found.logits(torch.tensor([[1.0, 1.0]]))[0].isfinite().tolist() == [True, True, False, True], name


def test_the_head_starts_from_the_pretrained_rows_and_new_classes_from_zero():
    found = learner("ft")
    found.observe(torch.tensor([5.0, 5.0]), 2)
    assert found.logits(torch.tensor([[3.0, 4.0]]))[0, :3].tolist() == [3.5, 8.0, 0.0]


def test_ncm_is_the_cosine_to_the_running_mean_of_unit_features():
    found = learner("ncm", scale=10.0)
    found.observe(torch.tensor([0.0, 7.0]), 0)  # the mean of slot 0 is (2/3, 1/3): at atan(1/2)
    logits = found.logits(torch.tensor([[5.0, 0.0]]))[0, :2]
    assert logits.tolist() == pytest.approx([10 * 2 / math.sqrt(5), 0.0], abs=1e-5)


def test_the_prototypical_network_is_minus_the_squared_distance_to_the_mean():
    logits = learner("ptn").logits(torch.tensor([[5.0, 1.0]]))[0, :2]  # means (2, 0) and (0, 2)
    assert logits.tolist() == [-10.0, -26.0]


def test_exemplar_tuning_without_residual_is_ncm_up_to_the_length_of_the_mean():
    et, ncm = learner("et"), learner("ncm")
    draws = torch.Generator().manual_seed(1)
    for slot in (2, 3, 0, 1, 2, 3):
        h = torch.randn(2, generator=draws)
        et.observe(h, slot)
        ncm.observe(h, slot)
    h = torch.randn(5, 2, generator=draws)
    lengths = torch.stack([found / count for found, count in zip(et.total, et.count, strict=True)]).norm(dim=1)
    torch.testing.assert_close(et.logits(h), ncm.logits(h) * lengths)


def test_exemplar_tuning_is_equation_1():
    """C = mean of unit features + residual, times the feature as it is when learn.scale is 0."""
    found = learner("et", scale=0.0)
    with torch.no_grad():
        found.head.weight[1] = torch.tensor([0.5, -1.0])
    assert found.logits(torch.tensor([[3.0, 4.0]]))[0, :2].tolist() == [3.0, 1.5]  # (1, 0).(3, 4); (0.5, 0).(3, 4)


def test_exemplar_tuning_trains_the_residual_alone_and_its_means_follow_every_sample():
    found = learner("et", batch=4, lr_head=1.0)
    before = found.centroids.clone()
    memory = Memory(KNOWN, torch.tensor([2, 2, 3, 3]), torch.tensor([[-1.0, 0], [-2, 0], [0, -1], [0, -3]]))
    for h, slot in zip(memory.features, memory.labels, strict=True):
        found.observe(h, int(slot))
    assert found.centroids[2:].tolist() == [[-1.0, 0.0], [0.0, -1.0]] and torch.equal(found.centroids[:2], before[:2])
    found.update(memory, 1)
    assert found.centroids[2:].tolist() == [[-1.0, 0.0], [0.0, -1.0]]
    assert found.head.weight[2, 0] < 0 and found.head.weight[3, 1] < 0


def test_imprinting_is_ncm_before_the_switch_and_keeps_trained_rows_after_it():
    imprint, ncm = learner("imprint", switch=0.5, length=6), learner("ncm")
    for h, slot in (([-1.0, 1.0], 2), ([-1.0, 0.0], 2)):
        for found in (imprint, ncm):
            found.observe(torch.tensor(h), slot)
        torch.testing.assert_close(imprint.logits(torch.tensor([[1.0, 2.0]])), ncm.logits(torch.tensor([[1.0, 2.0]])))
    memory = Memory(KNOWN, torch.tensor([2, 2]), torch.tensor([[-1.0, 1.0], [-1.0, 0.0]]))
    rows = imprint.head.weight.clone()
    imprint.update(memory, 1)
    assert torch.equal(imprint.head.weight, rows)  # two of six samples: not yet
    imprint.observe(torch.tensor([0.0, -4.0]), 3)
    imprint.update(memory, 1)
    trained = imprint.head.weight.clone()
    assert not torch.equal(trained, rows)
    imprint.observe(torch.tensor([-1.0, 5.0]), 2)
    assert torch.equal(imprint.head.weight, trained)


def test_a_class_after_the_switch_gets_its_first_feature_as_its_row():
    found = learner("imprint", switch=0.0)
    for h in ([3.0, -4.0], [0.0, 1.0]):
        found.observe(torch.tensor(h), 3)
    torch.testing.assert_close(found.head.weight[3], torch.tensor([0.6, -0.8]))


def test_novelty_by_hand():
    found = learner("ft")
    h = torch.tensor([[3.0, 4.0]])
    scores = found.novelty(h, found.logits(h))  # logits 3.5 and 8, cosines .6 and .8
    assert scores["msp"].item() == pytest.approx(-1 / (1 + math.exp(-4.5)))
    assert scores["mdt"].item() == pytest.approx(0.2, abs=1e-6)
    assert scores["maxlogit"].item() == -8.0


def test_everything_is_new_while_no_class_is_known():
    start = SimpleNamespace(pixels=torch.zeros(0, 2), labels=torch.zeros(0, dtype=torch.int64))
    found = learner("et", weight=(), bias=(), start=start)
    h = torch.tensor([[1.0, 0.0]])
    assert {score.item() for score in found.novelty(h, found.logits(h)).values()} == {math.inf}


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_distillation_by_hand():
    """Logits (0, 0) under the teacher (2 ln 3, 0): softmax at T = 2 is (3/4, 1/4), so 4 ln 2; 0 without classes."""
    loss = fluid_methods.distillation(torch.zeros(1, 2), torch.tensor([[2 * math.log(3), 0.0]]))
    assert loss.item() == pytest.approx(4 * math.log(2))
    shifted = fluid_methods.distillation(torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2))
    assert shifted.item() == pytest.approx(-4 * (math.log(3 / 4) + math.log(1 / 4)) / 2)
    assert fluid_methods.distillation(torch.zeros(3, 0), torch.zeros(3, 0)).item() == 0


def test_lwf_adds_the_distillation_of_the_pretrained_network():
    found = learner("lwf")
    plain = torch.nn.functional.cross_entropy(torch.tensor([[1.5, 4.0]]), torch.tensor([1]))
    p = torch.tensor([0.75, 2.0]).softmax(0)  # the teacher's logits are its own: 1.5 and 4, halved
    expected = plain.item() - 4 * (p * p.log()).sum().item()
    assert found.loss(batch(found, [[1.0, 2.0]], [1])).item() == pytest.approx(expected, rel=1e-5)


def test_the_quadratic_penalty_by_hand():
    values, anchors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.tensor([0.0, 2.0]), torch.tensor(1.0)]
    assert fluid_methods.quadratic_penalty(values, anchors, [torch.tensor([4.0, 9.0]), torch.tensor(0.5)]).item() == 3.0


def test_fisher_is_the_mean_squared_gradient_of_the_log_probability():
    """Of the head's weights it is ((p - y) h)^2, and only rows of known classes matter."""
    found = learner("ewc")
    expected = np.zeros((4, 2))
    for h, label in zip(KNOWN.pixels.numpy(), KNOWN.labels.tolist(), strict=True):
        z = np.exp([h[0] + 0.5, 2 * h[1]])
        p = z / z.sum() - np.eye(2)[label]
        expected[:2] += np.outer(p, h) ** 2 / 3
    by_shape = {tuple(value.shape): fisher for value, fisher in zip(found.values, found.fisher, strict=True)}
    np.testing.assert_allclose(by_shape[4, 2], expected, rtol=1e-4)


def test_ewc_weighs_the_penalty():
    found = learner("ewc", ewc=10.0)
    step = batch(found, [[1.0, 2.0]], [1])
    before = found.loss(step).item()
    with torch.no_grad():
        found.head.weight[0, 0] += 0.1
    moved = torch.nn.functional.cross_entropy(torch.tensor([[1.6, 4.0]]), torch.tensor([1])).item()
    assert before == pytest.approx(torch.nn.functional.cross_entropy(torch.tensor([[1.5, 4.0]]), torch.tensor([1])).item())
    fisher = next(fisher for fisher in found.fisher if fisher.shape == (4, 2))[0, 0].item()
    assert found.loss(step).item() == pytest.approx(moved + 10 * fisher * 0.01 / 2, rel=1e-5)


def test_logit_distance_looks_at_the_classes_that_were_known():
    stored = torch.tensor([[1.0, -torch.inf], [2.0, 4.0]])
    assert fluid_methods.logit_distance(torch.tensor([[2.0, 9.0], [2.0, 1.0]]), stored).item() == pytest.approx((1 + 0 + 9) / 3)


def test_within_batch_leaves_out_absent_classes():
    logits = torch.tensor([[0.0, 50.0, 0.0], [math.log(3), 50.0, 0.0]])
    loss = fluid_methods.within_batch(logits, torch.tensor([0, 2]))
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)


@pytest.mark.parametrize("name, expected", [
    ("der", lambda ce, mse, new: ce + 0.5 * mse),
    ("derpp", lambda ce, mse, new: ce + 0.5 * mse + 0.5 * ce),
    ("er_ace", lambda ce, mse, new: new + ce),
])
def test_replay_losses_by_hand(name, expected):
    """The buffer holds the batch's one sample (1, 2) of slot 1, with logits 1 higher than now."""
    found = learner(name)
    found.buffer.add(torch.tensor([0]), torch.tensor([[2.5, 5.0, -torch.inf, -torch.inf]]), torch.Generator().manual_seed(0))
    ce = torch.nn.functional.cross_entropy(torch.tensor([[1.5, 4.0]]), torch.tensor([1])).item()
    loss = found.loss(batch(found, [[1.0, 2.0]], [1]))
    assert loss.item() == pytest.approx(expected(ce, 1.0, 0.0), rel=1e-5)


def test_the_buffer_keeps_every_sample_with_the_same_probability():
    kept, random = np.zeros(40), torch.Generator().manual_seed(0)
    for _ in range(500):
        buffer = Reservoir(10)
        for picks in torch.arange(40).split(7):
            buffer.add(picks, picks[:, None].float(), random)
        assert len(set(buffer.picks.tolist())) == 10 and torch.equal(buffer.logits[:, 0], buffer.picks.float())
        kept[buffer.picks] += 1
    assert np.abs(kept / 500 - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 500)


def test_the_buffer_holds_samples_of_the_stream_and_replays_different_ones():
    buffer, random = Reservoir(10), torch.Generator().manual_seed(0)
    buffer.add(torch.arange(3), torch.zeros(3, 2), random)
    assert sorted(buffer.draw(8, random).tolist()) == [0, 1, 2]
    assert len(set(buffer.draw(2, random).tolist())) == 2


# ---- updates --------------------------------------------------------------------------------------------------------


def times(when, hit, new):
    """After which samples the strategy trains."""
    found, last = [], 0
    for t in range(1, len(hit) + 1):
        if when.due(t, last, hit[:t], new[:t]):
            found, last = [*found, t], t
    return found


def test_when_the_strategies_train():
    right, none = np.ones(40, bool), np.zeros(40, bool)
    assert times(Every(9, 1), right, none) == [9, 18, 27, 36]
    assert times(Doubling(5, 1), right, none) == [5, 10, 20, 40]
    assert times(Never(), right, none) == []
    new = none.copy()
    new[[0, 3, 4, 20, 30]] = True
    assert times(NewClasses(2, 1), right, new) == [4, 21]
    hit = right.copy()
    hit[20:] = False
    assert times(ErrorRise(5, 0.5, 1), hit, none) == [23]  # three of the last five are wrong


def test_the_strategy_scales_with_the_sequence():
    options = FluidConfig().update
    assert strategy(options, 90_000) == Every(5000, 4) and strategy(options, 7) == Every(1, 4)
    options.when, options.samples = "doubling", 12
    assert strategy(options, 90_000) == Doubling(12, 4)


@pytest.mark.parametrize("name", METHODS)
def test_an_update_changes_what_the_method_trains_and_nothing_else(name):
    found = learner(name, batch=4, switch=0.0)
    memory = Memory(Points([[-1.0, 0.0], [-2.0, 0.0], [0.0, -1.0], [1.0, -3.0]]), torch.tensor([2, 2, 3, 0]),
                    torch.tensor([[-1.0, 0.0], [-2.0, 0.0], [0.0, -1.0], [1.0, -3.0]]))
    for h, slot in zip(memory.features, memory.labels, strict=True):
        found.observe(h, int(slot))
    head, pretrained = found.head.weight.clone(), found.start.backbone.layer.weight.clone()
    found.update(memory, 2)
    assert torch.equal(found.start.backbone.layer.weight, pretrained)
    assert torch.equal(found.backbone.layer.weight, pretrained) != found.full
    assert torch.equal(found.head.weight, head) != found.trains
