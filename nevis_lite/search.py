"""Which hyper-parameters to try next (paper, section 4): random points, or those that a Gaussian process finds promising."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nevis_lite.config import SearchConfig, need
from nevis_lite.data import seeds

CANDIDATES = 2048  # points among which the Gaussian process chooses
EXPLORATION = 1.8  # standard deviations below the mean: the open-source Vizier's; the paper used Vizier and states no value


class Dimension(NamedTuple):
    """A hyper-parameter that is searched: one of `choices`, or without them a number from `low` to `high`."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple = ()

    def value(self, share: float):
        """What lies at `share` (0 <= share < 1) of the range or of the choices."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        low, high = np.log((self.low, self.high)) if self.log else (self.low, self.high)
        value = low + share * (high - low)
        return float(np.exp(value) if self.log else value)

    def columns(self, value) -> list[float]:
        """A value as the Gaussian process sees it: a number's share of the range; for words, one column of 0 or 1 for each."""
        if isinstance(value, str):
            return [float(value == choice) for choice in self.choices]
        low, high, value = (math.log(number) if self.log else number for number in (self.low, self.high, value))
        return [(value - low) / (high - low) if high > low else 0.0]


def space(config: SearchConfig) -> list[Dimension]:
    """What is searched: lr and label_smoothing, and whatever else the config gives choices or a range."""
    dimensions = [Dimension("lr", *config.lr, log=True), Dimension("label_smoothing", *config.label_smoothing)]
    if config.auxiliary_weight is not None:
        dimensions.append(Dimension("auxiliary_weight", *config.auxiliary_weight))
    if config.batch:
        dimensions.append(Dimension("batch", min(config.batch), max(config.batch), log=True, choices=tuple(config.batch)))
    return dimensions + [Dimension(name, choices=tuple(getattr(config, name)))
                         for name in ("schedule", "model", "crop", "flip") if getattr(config, name)]


def _point(dimensions: list[Dimension], shares) -> dict:
    """Hyper-parameters that lie at `shares`, one of each dimension."""
    return {dimension.name: dimension.value(share) for dimension, share in zip(dimensions, shares, strict=True)}


def random_search(config: SearchConfig, seed: int, task: int, trial: int, history: list[dict]) -> dict:
    """Hyper-parameters number `trial` of a task: lr log-uniform, everything else uniform.

    A pure function of (seed, task, trial), so that every baseline tries the same points; searching one thing more leaves the
    other values as they are. With `stratified`, the log range of lr is cut into as many equal parts as there are trials, and
    each part is drawn from once, in random order. `history`, the rows of the task's finished trials, is for searches that
    learn from them.
    """
    lr, smoothing = np.random.default_rng(seeds("candidates", seed, task, trial)).random(2)
    if config.stratified:
        part = np.random.default_rng(seeds("strata", seed, task)).permutation(config.trials)[trial]
        lr = (part + lr) / config.trials
    dimensions = space(config)
    others = [np.random.default_rng(seeds(f"candidates: {dimension.name}", seed, task, trial)).random()
              for dimension in dimensions[2:]]
    return _point(dimensions, [lr, smoothing, *others])


def gp_ucb(config: SearchConfig, seed: int, task: int, trial: int, history: list[dict]) -> dict:
    """Hyper-parameters number `trial` of a task by GP-UCB (paper, BHPO); a pure function of its arguments.

    The first quarter of the trials, at least two, are random_search's: with fewer, the process would judge up to seven
    dimensions from next to nothing. Then it is fitted to the dev errors in `history`, rows of `trial`, `hyperparameters` and
    `error`, and of CANDIDATES random points the one with the lowest mean - EXPLORATION x standard deviation is next. A failed
    trial (`error` None) counts as the worst error seen. random_search's point is taken again while all errors are equal, and,
    with a warning, where the fit fails. Raises UserError without BoTorch, for every trial: ask for trial 0 before training.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says of torch when it's imported is not our user's business
        need("botorch", "BoTorch", "Bayesian search")
    from botorch.exceptions import ModelFittingError

    fallback = random_search(config, seed, task, trial, history)
    rows = sorted(history, key=lambda row: row["trial"])  # the order of a sum changes its last digits
    errors = [row["error"] for row in rows if row["error"] is not None]
    if trial < max(2, config.trials // 4) or len(set(errors)) < 2:
        return fallback
    errors = [max(errors) if row["error"] is None else row["error"] for row in rows]
    dimensions = space(config)
    shares = np.random.default_rng(seeds("gp_ucb", seed, task, trial)).random((CANDIDATES, len(dimensions)))
    candidates = [_point(dimensions, row) for row in shares]
    try:
        bounds = _lower_bounds(dimensions, [row["hyperparameters"] for row in rows], errors, candidates)
    except (ModelFittingError, RuntimeError) as error:  # the latter: matrices that cannot be factorised
        warnings.warn(f"task {task}, trial {trial}: the Gaussian process cannot be fitted ({error}); a random point instead.",
                      stacklevel=2)
        return fallback
    return candidates[int(bounds.argmin())]


def _lower_bounds(dimensions: list[Dimension], tried: list[dict], errors: list[float], candidates: list[dict]) -> Tensor:
    """Lower confidence bounds of the error at `candidates`, (len(candidates),), by a process fitted to `errors` at `tried`."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    def columns(points: list[dict]) -> Tensor:
        return torch.tensor([[column for dimension in dimensions for column in dimension.columns(point[dimension.name])]
                             for point in points], dtype=torch.float64)

    with torch.random.fork_rng(devices=[]):  # a fit that fails at first tries again from random values
        torch.default_generator.manual_seed(0)
        observed = torch.tensor(errors, dtype=torch.float64)[:, None]
        process = SingleTaskGP(columns(tried), observed, outcome_transform=Standardize(m=1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
    with torch.no_grad():
        posterior = process.posterior(columns(candidates)[:, None])  # each by itself, not jointly
        return (posterior.mean - EXPLORATION * posterior.variance.sqrt()).flatten()
