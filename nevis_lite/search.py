"""Which hyper-parameters to try next (paper, section 4)."""

from __future__ import annotations

import numpy as np

from nevis_lite.config import SearchConfig
from nevis_lite.data import seeds


def random_search(config: SearchConfig, seed: int, task: int, trial: int, history: list[dict]) -> dict:
    """Hyper-parameters number `trial` of a task: lr log-uniform, label_smoothing uniform.

    A pure function of (seed, task, trial), so that every baseline tries the same points. With `stratified`, the log range of
    lr is cut into as many equal parts as there are trials, and each part is drawn from once, in random order. `history`, the
    rows of the task's finished trials, is for searches that learn from them.
    """
    lr, smoothing = np.random.default_rng(seeds("candidates", seed, task, trial)).random(2)
    if config.stratified:
        part = np.random.default_rng(seeds("strata", seed, task)).permutation(config.trials)[trial]
        lr = (part + lr) / config.trials
    low, high = np.log(config.lr)
    return {"lr": float(np.exp(low + lr * (high - low))),
            "label_smoothing": float(config.label_smoothing[0] + smoothing * np.ptp(config.label_smoothing))}
