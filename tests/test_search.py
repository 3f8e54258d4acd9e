import json
import math
import random
import sys

import botorch.fit
import numpy as np
import pytest
import torch
from botorch.exceptions import ModelFittingError

from nevis_lite.config import SearchConfig, UserError
from nevis_lite.search import Dimension, gp_ucb, random_search, space

SPACE = {"auxiliary_weight": (0.0, 1.0), "schedule": ["cosine", "piecewise"], "batch": [16, 64, 256], "crop": [True, False],
         "model": ["vgg", "resnet34", "resnet18"], "flip": [True, False]}


def draw(config=None, seed=0, task=0, trial=0, history=()):
    return random_search(config or SearchConfig(), seed, task, trial, list(history))


def test_a_candidate_is_a_function_of_seed_task_and_trial():
    forwards = [draw(seed=1, task=2, trial=trial) for trial in range(5)]
    backwards = [draw(seed=1, task=2, trial=trial) for trial in reversed(range(5))]
    assert forwards == backwards[::-1]
    assert draw(trial=3, history=[{"error": 0.1}]) == draw(trial=3)


def test_global_random_state_has_no_say():
    np.random.seed(1)
    first = draw()
    np.random.seed(2)
    assert draw() == first


@pytest.mark.parametrize("name", ["lr", "label_smoothing"])
def test_tasks_trials_and_seeds_draw_different_points(name):
    keys = [(seed, task, trial) for seed in range(3) for task in range(4) for trial in range(5)]
    assert len({draw(SearchConfig(), *key)[name] for key in keys}) == len(keys)


def test_values_are_plain_floats():
    assert {type(value) for value in draw().values()} == {float}
    assert set(draw()) == {"lr", "label_smoothing"}


def test_ranges_are_respected_and_filled_log_uniformly_and_uniformly():
    config = SearchConfig(lr=(1e-3, 1e-1), label_smoothing=(0.1, 0.2))
    points = [draw(config, task=task, trial=trial) for task in range(100) for trial in range(20)]
    for shares in ([(math.log10(point["lr"]) + 3) / 2 for point in points],
                   [(point["label_smoothing"] - 0.1) / 0.1 for point in points]):
        assert min(shares) >= -1e-12 and max(shares) <= 1 + 1e-12
        counts = np.histogram(shares, bins=10, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared, 9 degrees of freedom, 0.1 %


def test_learning_rate_and_smoothing_are_not_correlated():
    points = np.array([list(draw(task=task, trial=trial).values()) for task in range(60) for trial in range(16)])
    assert abs(np.corrcoef(np.log(points.T))[0, 1]) < 0.1
    # The reference's smoothing of a task repeats the learning rates of the next one.
    smoothing, rate = points[:-16, 1] / 0.3, (np.log10(points[16:, 0]) + 4) / 3
    assert not np.isclose(smoothing, rate).any()


@pytest.mark.parametrize("name", ["lr", "label_smoothing"])
def test_a_range_of_one_point_gives_it(name):
    config = SearchConfig(lr=(0.02, 0.02), label_smoothing=(0.1, 0.1))
    assert draw(config)[name] == pytest.approx({"lr": 0.02, "label_smoothing": 0.1}[name])


@pytest.mark.parametrize("trials", [1, 3, 16])
def test_stratified_draws_hit_each_part_of_the_log_range_once(trials):
    config = SearchConfig(trials=trials, lr=(1e-4, 1e-1), stratified=True)
    for task in range(5):
        rates = [draw(config, seed=3, task=task, trial=trial)["lr"] for trial in range(trials)]
        parts = [int((math.log10(rate) + 4) / 3 * trials) for rate in rates]
        assert sorted(parts) == list(range(trials))


def test_stratified_parts_come_in_another_order_for_each_task():
    config = SearchConfig(trials=6, stratified=True)
    orders = {tuple(np.argsort([draw(config, task=task, trial=trial)["lr"] for trial in range(6)])) for task in range(10)}
    assert len(orders) > 5


def test_stratifying_leaves_the_smoothing_alone():
    plain, stratified = SearchConfig(), SearchConfig(stratified=True)
    assert all(draw(plain, trial=trial)["label_smoothing"] == draw(stratified, trial=trial)["label_smoothing"]
               for trial in range(16))


# ---- the space


def test_nothing_but_rate_and_smoothing_is_searched_unless_given():
    assert [dimension.name for dimension in space(SearchConfig())] == ["lr", "label_smoothing"]
    assert {dimension.name for dimension in space(SearchConfig(**SPACE))} == {"lr", "label_smoothing", *SPACE}
    assert set(draw(SearchConfig(flip=[True, False]))) == {"lr", "label_smoothing", "flip"}


@pytest.mark.parametrize(
    "key, lr, smoothing",
    [((0, 0, 0), 0.062126266894506586, 0.21108625414632307), ((0, 3, 7), 0.003093382292102256, 0.2765798090625353),
     ((4, 28, 15), 0.0011150251276032296, 0.11723532919365717)],
)
def test_published_points_stay(key, lr, smoothing):
    """Drawn by the version that the published results come from."""
    assert draw(SearchConfig(), *key) == pytest.approx({"lr": lr, "label_smoothing": smoothing}, rel=1e-12)


def test_published_stratified_points_stay():
    point = draw(SearchConfig(trials=4, stratified=True), 2, 11, 3)
    assert point == pytest.approx({"lr": 0.03706613439901588, "label_smoothing": 0.04720604969712578}, rel=1e-12)


def test_searching_more_leaves_the_other_values_as_they_are():
    everything = SearchConfig(**SPACE)
    for name, given in SPACE.items():
        for trial in range(5):
            point, more = draw(SearchConfig(**{name: given}), trial=trial), draw(everything, trial=trial)
            assert point == {key: more[key] for key in ("lr", "label_smoothing", name)}
            assert point | draw(trial=trial) == point


def test_all_choices_are_drawn_equally_often_and_by_themselves():
    points = [draw(SearchConfig(**SPACE), task=task, trial=trial) for task in range(40) for trial in range(30)]
    for name in ("schedule", "batch", "model", "crop", "flip"):
        counts = [sum(point[name] == choice for point in points) for choice in SPACE[name]]
        expected = len(points) / len(counts)
        assert sum((count - expected) ** 2 / expected for count in counts) < 13.9  # chi-squared, 2 degrees, 0.1 %
    both = sum(point["crop"] == point["flip"] for point in points)
    assert abs(both - 600) < 60  # 3.5 standard deviations


@pytest.mark.parametrize(
    "dimension, value, columns",
    [
        (Dimension("lr", 1e-4, 1e-1, log=True), 1e-3, [1 / 3]),
        (Dimension("label_smoothing", 0.1, 0.3), 0.15, [0.25]),
        (Dimension("label_smoothing", 0.1, 0.1), 0.1, [0]),
        (Dimension("batch", 16, 256, log=True, choices=(16, 64, 256)), 64, [0.5]),
        (Dimension("flip", choices=(True, False)), True, [1]),
        (Dimension("flip", choices=(True, False)), False, [0]),
        (Dimension("model", choices=("vgg", "resnet34", "resnet18")), "resnet34", [0, 1, 0]),
        (Dimension("model", choices=("vgg",)), "vgg", [1]),
    ],
)
def test_numbers_keep_their_order_and_words_get_a_column_each(dimension, value, columns):
    assert dimension.columns(value) == pytest.approx(columns)


# ---- GP-UCB


def finished(config=None, trials=8, error=lambda point: point["label_smoothing"], seed=0) -> list[dict]:
    """Rows of `trials` finished trials at random points."""
    points = [draw(config, seed=seed, trial=trial) for trial in range(trials)]
    errors = [error(point) for point in points]
    return [{"trial": trial, "hyperparameters": point, "status": "failed" if error is None else "done", "error": error}
            for trial, (point, error) in enumerate(zip(points, errors, strict=True))]


def suggest(history, config=None, seed=0, task=0) -> dict:
    return gp_ucb(config or SearchConfig(), seed, task, len(history), history)


def valley(point: dict) -> float:
    """An error whose lowest value, 0.1, lies at lr = 10^-2.2 and label_smoothing = 0.1."""
    return 0.1 + (math.log10(point["lr"]) + 2.2) ** 2 / 6 + 2 * (point["label_smoothing"] - 0.1) ** 2


def test_gp_ucb_finds_better_points_than_random_search_though_errors_are_noisy():
    config, gaps = SearchConfig(trials=12), {}
    for search in (random_search, gp_ucb):
        chosen = []
        for seed in range(8):
            history, noise = [], np.random.default_rng(seed).normal(scale=0.01, size=config.trials)
            for trial in range(config.trials):
                point = search(config, seed, 0, trial, history)
                history.append({"trial": trial, "hyperparameters": point, "error": valley(point) + noise[trial]})
            chosen.append(valley(min(history, key=lambda row: row["error"])["hyperparameters"]))
        gaps[search] = np.mean(chosen) - 0.1
    assert 0 < gaps[gp_ucb] < 0.5 * gaps[random_search]


@pytest.mark.parametrize("trials, first", [(2, 2), (4, 2), (8, 2), (16, 4), (32, 8)])
def test_the_first_quarter_is_random(trials, first):
    config = SearchConfig(trials=trials)
    same = [suggest(finished(config, trial), config) == draw(config, trial=trial) for trial in range(min(trials, 10))]
    assert same == [trial < first for trial in range(len(same))]


def test_a_suggestion_depends_on_its_arguments_alone():
    history = finished()
    first = suggest(history)
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)
        random.seed(state)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert suggest(history) == first
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert suggest(history[::-1]) == first and history == finished()
    others = [suggest(history, seed=1), suggest(history, task=1), suggest(finished(seed=1)), suggest(finished(trials=9))]
    assert first not in others


@pytest.mark.parametrize("search", [random_search, gp_ucb])
def test_points_of_a_mixed_space_are_valid_and_plain(search):
    config = SearchConfig(trials=8, **SPACE)
    for trial in range(3, 8):
        point = search(config, 0, 0, trial, finished(config, trial))
        assert list(point) == [dimension.name for dimension in space(config)]
        assert json.loads(json.dumps(point)) == point
        assert {type(point[name]) for name in ("lr", "label_smoothing", "auxiliary_weight")} == {float}
        assert type(point["batch"]) is int and {type(point["crop"]), type(point["flip"])} == {bool}
        assert all(point[name] in SPACE[name] for name in ("schedule", "batch", "model", "crop", "flip"))
        assert 1e-4 <= point["lr"] <= 1e-1 and 0 <= point["label_smoothing"] <= 0.3 and 0 <= point["auxiliary_weight"] <= 1


def test_choices_are_learned_from():
    config = SearchConfig(**SPACE)
    history = finished(config, 16, lambda point: 0.2 + 0.1 * (point["model"] != "resnet34") + 0.1 * point["flip"])
    points = [suggest(history, config, seed) for seed in range(4)]
    assert all(point["model"] == "resnet34" and not point["flip"] for point in points)  # 1 in 6 at random


def test_a_range_of_one_point_stays_it_by_gp_ucb():
    config = SearchConfig(label_smoothing=(0.1, 0.1))
    assert suggest(finished(config, error=lambda point: point["lr"]), config)["label_smoothing"] == pytest.approx(0.1)


def test_failed_trials_count_as_the_worst_and_are_avoided():
    history = finished(trials=12, error=lambda point: None if point["lr"] > 10**-2.5 else 0.3 + 0.1 * point["label_smoothing"])
    worst = max(row["error"] for row in history if row["error"] is not None)
    assert 3 <= sum(row["error"] is None for row in history) <= 9
    assert suggest(history) == suggest([row | {"error": worst if row["error"] is None else row["error"]} for row in history])
    assert sum(suggest(history, seed=seed)["lr"] < 10**-2.5 for seed in range(10)) >= 9  # half of them at random


@pytest.mark.parametrize("error", [None, 0.5])
def test_errors_that_are_all_the_same_give_the_random_point(error):
    assert suggest(finished(error=lambda point: error)) == draw(trial=8)


def test_one_trial_that_did_not_fail_gives_the_random_point():
    history = finished(error=lambda point: None)
    history[3]["error"] = 0.2
    assert suggest(history) == draw(trial=8)


@pytest.mark.parametrize("errors", [[0.0, 1.0] * 4, [0.3, 0.3 + 1e-6] * 4, [0.5] * 7 + [0.4]])
def test_odd_errors_and_repeated_points_are_fitted(errors):
    history = finished()
    for row, error in zip(history, errors, strict=True):
        row |= {"error": error, "hyperparameters": history[row["trial"] // 2]["hyperparameters"]}
    point = suggest(history)
    assert 1e-4 <= point["lr"] <= 1e-1 and 0 <= point["label_smoothing"] <= 0.3


@pytest.mark.parametrize("error", [ModelFittingError("all attempts failed"), RuntimeError("not positive definite")])
def test_a_fit_that_fails_gives_the_random_point_with_a_warning(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(botorch.fit, "fit_gpytorch_mll", fail)
    with pytest.warns(UserWarning, match="task 0, trial 8: .*" + str(error)):
        assert suggest(finished()) == draw(trial=8)


def test_without_botorch_the_first_call_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(UserError, match="needs BoTorch: pip install botorch"):
        suggest([])
