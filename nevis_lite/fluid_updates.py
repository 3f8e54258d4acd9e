"""When a learner on a stream trains: strategies as plain objects, for `fluid.py`.

due(t, last, hit, new), asked after t samples of which `last` had come before the latest update, says whether to train now, for
`epochs` epochs. hit and new (t,) tell of each sample whether it was predicted right and whether its class was new. A strategy
keeps nothing, so that a run that goes on decides as one that was never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Never:
    """Predict, observe, and leave it at that."""

    def due(self, t: int, last: int, hit: np.ndarray, new: np.ndarray) -> bool:
        return False


@dataclass(frozen=True)
class Every:
    """After every `samples` samples."""

    samples: int
    epochs: int

    def due(self, t: int, last: int, hit: np.ndarray, new: np.ndarray) -> bool:
        return t % self.samples == 0


@dataclass(frozen=True)
class Doubling:
    """After `first` samples, twice as many, four times as many, ..."""

    first: int
    epochs: int

    def due(self, t: int, last: int, hit: np.ndarray, new: np.ndarray) -> bool:
        return t == (2 * last or self.first)


@dataclass(frozen=True)
class NewClasses:
    """When `classes` classes have appeared since the last update."""

    classes: int
    epochs: int

    def due(self, t: int, last: int, hit: np.ndarray, new: np.ndarray) -> bool:
        return bool(new[t - 1]) and new[last:t].sum() >= self.classes


@dataclass(frozen=True)
class ErrorRise:
    """When the error over the last `window` samples is `rise` above that over the first `window` after the last update."""

    window: int
    rise: float
    epochs: int

    def due(self, t: int, last: int, hit: np.ndarray, new: np.ndarray) -> bool:
        before, now = hit[last:last + self.window], hit[t - self.window:t]
        return t - last >= 2 * self.window and before.mean() - now.mean() > self.rise
