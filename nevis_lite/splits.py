"""Which images of a data set are train, dev, dev_test and test, where its publishers left that open.

Everything here is a pure function of the order of the images, which is that of their sorted names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nevis_lite.config import UserError

SPLITS = ("train", "dev", "dev_test", "test")
# The reference's random assignment draws splits that are missing in these shares.
ALL = {"train": 0.56, "dev": 0.12, "dev_test": 0.12, "test": 0.20}  # no official split
TRAIN = {"train": 0.70, "dev": 0.15, "dev_test": 0.15}  # an official test split
TRAIN_DEV = {"train": 0.80, "dev": 0.20}  # official validation (used as dev_test) and test splits


@dataclass
class Examples:
    """One split: `images` are paths (str), references or uint8 arrays; `labels` (N,) class ids or (N, C) zeros and ones."""

    images: Sequence
    labels: np.ndarray
    classes: Sequence[str] = ()  # the names of the classes or labels, in the order of their ids

    def __len__(self):
        return len(self.labels)

    def take(self, picks: np.ndarray) -> Examples:
        images = self.images[picks] if isinstance(self.images, np.ndarray) else [self.images[i] for i in picks]
        return Examples(images, self.labels[picks], self.classes)


def classes_of(part: tuple[int, int] | None, num_classes: int) -> range:
    """Ids of the classes of a part such as (2, 5), the third of five equal ones: neighbours in the order of ids; None: all."""
    number, parts = part or (0, 1)
    return range(number * num_classes // parts, (number + 1) * num_classes // parts)


def assign(count: int, shares: dict[str, float]) -> np.ndarray:
    """(count,) split names, one draw an example in the order of the examples: dm_nevis's rule, seed 0, not stratified."""
    names = sorted(shares)
    draws = np.random.RandomState(0).multinomial(1, [shares[name] for name in names], size=count)
    return np.array(names)[draws.argmax(axis=1)]


def complete(splits: dict[str, Examples], rule: dict) -> dict[str, Examples]:
    """All four splits. Those that are missing are drawn by `rule`, or without one by the reference's shares.

    Rules: {slices: {train: n, dev: n, ...}} contiguous parts of train; {domain: true} dev from train, dev_test from test
    (.8/.2 and .5/.5); {per_class: {train: share, ...}, seed: s} a permutation of each class, the rest is test;
    {last_of_class: {test: n, ...}} the last images of each class; {permuted: {train: n, ...}, seed: s} parts of a permutation
    of train; {drawn_of_class: n, seed: s, slices: {train: n, ...}} parts of n images drawn from each class, the rest is test.
    UserError if it can't be done.
    """
    if not len(splits.get("train", ())):
        raise UserError("there are no training images")
    train = splits["train"]
    if all(name in splits for name in SPLITS):
        return splits
    if "drawn_of_class" in rule:
        parts = _drawn_of_class(train, rule["drawn_of_class"], rule["seed"], rule["slices"])
    elif "slices" in rule:
        parts = _cut(train, np.arange(len(train)), rule["slices"])
    elif "permuted" in rule:
        parts = _cut(train, np.random.default_rng(rule["seed"]).permutation(len(train)), rule["permuted"])
    elif "per_class" in rule:
        parts = _per_class(train, rule["per_class"], rule["seed"])
    elif "last_of_class" in rule:
        parts = _last_of_class(train, rule["last_of_class"])
    elif "domain" in rule:
        parts = _drawn(train, TRAIN_DEV) | _drawn(splits["test"], {"dev_test": 0.5, "test": 0.5})
    else:
        parts = _by_presence(splits)
    return splits | parts


def _by_presence(splits: dict[str, Examples]) -> dict[str, Examples]:
    missing = tuple(name for name in SPLITS if name not in splits)
    shares = {(): None, ("dev", "dev_test", "test"): ALL, ("dev", "dev_test"): TRAIN, ("dev",): TRAIN_DEV,
              ("dev_test",): {"train": 0.80, "dev_test": 0.20}}.get(missing, "unknown")
    if shares == "unknown":
        raise UserError(f"has {', '.join(splits)} but no {' or '.join(missing)}; give train alone, or add test")
    return _drawn(splits["train"], shares) if shares else {}


def _drawn(examples: Examples, shares: dict[str, float]) -> dict[str, Examples]:
    names = assign(len(examples), shares)
    parts = {name: examples.take(np.flatnonzero(names == name)) for name in shares}
    empty = [name for name, part in parts.items() if not len(part)]
    if empty:
        raise UserError(f"{len(examples)} images are too few to draw {', '.join(empty)} from; add images, or make the folders "
                        f"{', '.join(SPLITS)} yourself")
    return parts


def _cut(train: Examples, order: np.ndarray, sizes: dict) -> dict[str, Examples]:
    """Consecutive parts of `order`: counts as they are, shares of the whole truncated, and the last share takes the rest."""
    counts = {name: size if size >= 1 else int(size * len(train)) for name, size in sizes.items()}
    if all(size < 1 for size in sizes.values()):
        last = list(counts)[-1]
        counts[last] = len(train) - sum(count for name, count in counts.items() if name != last)
    if sum(counts.values()) > len(train):
        raise UserError(f"train has {len(train)} images, fewer than the {sum(counts.values())} of its parts")
    ends = np.cumsum(list(counts.values()))
    return {name: train.take(order[end - count:end]) for (name, count), end in zip(counts.items(), ends, strict=True)}


def _per_class(train: Examples, shares: dict[str, float], seed: int) -> dict[str, Examples]:
    """Each class, in the order of its id, permuted by one generator and cut at the truncated shares; the rest is test."""
    random, picks = np.random.default_rng(seed), {name: [] for name in (*shares, "test")}
    for label in np.unique(train.labels):
        members = np.flatnonzero(train.labels == label)
        members, begin = members[random.permutation(len(members))], 0
        for name, share in shares.items():
            count = int(share) if share >= 1 else int(share * len(members))
            picks[name].append(members[begin:begin + count])
            begin += count
        picks["test"].append(members[begin:])
    return {name: train.take(np.concatenate(parts)) for name, parts in picks.items()}


def _last_of_class(train: Examples, counts: dict[str, int]) -> dict[str, Examples]:
    """From the end of each class `counts` images for each split in turn; the others are train."""
    picks = {name: [] for name in (*counts, "train")}
    for label in np.unique(train.labels):
        members = np.flatnonzero(train.labels == label)
        for name, count in counts.items():
            picks[name].append(members[len(members) - count:])
            members = members[:len(members) - count]
        picks["train"].append(members)
    return {name: train.take(np.sort(np.concatenate(parts))) for name, parts in picks.items()}


def _drawn_of_class(train: Examples, count: int, seed: int, sizes: dict) -> dict[str, Examples]:
    """`count` images of each class, drawn as in TFDS, are shuffled and cut by `sizes`; the rest is test."""
    random = np.random.RandomState(seed)
    picks = [random.permutation(np.flatnonzero(train.labels == label))[:count] for label in np.unique(train.labels)]
    picks = random.permutation(np.concatenate(picks))
    drawn, rest = train.take(picks), np.setdiff1d(np.arange(len(train)), picks)
    return _cut(drawn, np.arange(len(drawn)), sizes) | {"test": train.take(rest)}
