import math

import numpy as np
import pytest

from nevis_lite.config import SearchConfig
from nevis_lite.search import random_search


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
