"""The meta-learners of the paper's Table 4, each as three choices: where weights start, which data train them, which search.

A choice is a function; the dicts START, DATA and SEARCH name them. To add a baseline, add a function:

    start(view) -> index of the earlier task whose weights to start from, or None for random weights
    data(view) -> the split to train on
    search(config, seed, task, trial, history) -> hyper-parameters of a trial (see search.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nevis_lite import fit, flops, metrics, models
from nevis_lite.config import BaselineConfig, Config, UserError, nearest
from nevis_lite.data import Split, generator
from nevis_lite.search import random_search
from nevis_lite.stream import Access, Task


@dataclass(frozen=True)
class Past:
    """What a learner kept from an earlier task: the predictor, and the dev error that it was chosen by."""

    index: int
    task: Task
    num_train: int
    dev_error: float
    path: Path | None  # None in a dry run

    def backbone(self, config: Config, device: torch.device) -> nn.Module:
        """Its trained backbone; an untrained one in a dry run."""
        model = models.build(config.model.name)
        if self.path is not None:
            state = torch.load(self.path, map_location="cpu", weights_only=True)["state"]
            prefix = "backbone."
            model.load_state_dict({key[len(prefix):]: value for key, value in state.items() if key.startswith(prefix)})
        return model.to(device, memory_format=torch.channels_last)


@dataclass
class View:
    """All that a meta-learner sees of a task: its train and dev splits, and `memory`, the earlier tasks.

    There is no test split and no later task in it. What it computes is charged to `flops`.
    """

    task: Task
    access: Access
    memory: list[Past]
    config: Config
    device: torch.device
    backbone_flops: int  # of one image
    num_features: int
    dry: bool = False  # only charge: features and scores are zeros
    flops: int = 0
    scores: dict[int, float] = field(default_factory=dict)  # of the candidates, for the record

    def split(self, name: str, task: int | None = None) -> Split:
        """`train` or `dev` of this task, or of an earlier one; ProtocolError for anything else."""
        return self.access.split(name, task)

    def subset(self, name: str) -> Tensor:
        """Indices of a fixed random part of a split: at most select.max_train or select.max_dev images."""
        count, most = len(self.split(name)), getattr(self.config.select, f"max_{name}")
        if count <= most:
            return torch.arange(count)
        random = generator("cpu", f"subset of {name}", self.config.seed, self.task.index)
        return torch.randperm(count, generator=random)[:most].sort().values

    def features(self, backbone: nn.Module | None, name: str) -> Tensor:
        """Features (n, D) of `subset(name)` in evaluation mode; zeros in a dry run, where `backbone` is None."""
        picks = self.subset(name)
        self.flops += len(picks) * self.backbone_flops
        if self.dry:
            return torch.zeros(len(picks), self.num_features)
        split = self.split(name)
        picks = None if len(picks) == len(split) else picks  # all squares are kept, those of a part are not
        return fit.predict(backbone, split, self.config.model.image_size, self.config.fit, picks)

    def relatedness(self, past: Past) -> float:
        """k-NN accuracy (or mAP) on dev of this task's images, as features of an earlier task's predictor (paper, FT-d)."""
        backbone = None if self.dry else past.backbone(self.config, self.device)
        train, dev = self.features(backbone, "train"), self.features(backbone, "dev")
        self.flops += flops.knn_flops(len(dev), len(train), self.num_features)
        if self.dry:
            return 0.0
        train_split, dev_split = self.split("train"), self.split("dev")
        votes = knn_votes(train, train_split.labels[self.subset("train").to(self.device)], dev,
                          self.config.select.neighbours, self.task.num_classes)
        labels = dev_split.labels[self.subset("dev").to(self.device)]
        votes, labels = votes.cpu().numpy(), labels.cpu().numpy()
        if self.task.kind == "single_label":
            score = 1 - metrics.single_label_error(votes, labels)
        else:  # a subset without any label says nothing about the candidate
            score = metrics.mean_average_precision(votes, labels)[0] or 0.0
        self.scores[past.index] = score
        return score


def knn_votes(references: Tensor, labels: Tensor, queries: Tensor, k: int, num_classes: int) -> Tensor:
    """Share of each class among the k nearest references (Euclidean): (Q, C) floats.

    `references` (R, D), `labels` (R,) ids or (R, C) zeros and ones, `queries` (Q, D). Exact: distances are matrix products in
    double precision. With fewer than k references all of them vote.
    """
    if references.device.type == "mps":  # has no double precision
        return knn_votes(references.cpu(), labels.cpu(), queries.cpu(), k, num_classes)
    targets = (labels if labels.ndim == 2 else F.one_hot(labels, num_classes)).double()
    references, queries = references.double(), queries.double()
    squares = (references * references).sum(1)
    votes = [targets[(squares - 2 * part @ references.T).topk(min(k, len(references)), largest=False).indices].mean(1)
             for part in queries.split(1024)]  # a query's own square doesn't change its order
    return torch.cat(votes)


# ---------------------------------------------------------------------------------------------------------------------
# Choices


def start_random(view: View) -> None:
    return None


def start_previous(view: View) -> int | None:
    return view.memory[-1].index if view.memory else None


def start_related(view: View) -> int | None:
    """The earlier task with the best k-NN score; the latest of equals, since it was trained on top of more."""
    if not view.memory:
        return None
    return max(view.memory, key=lambda past: (view.relatedness(past), past.index)).index


def data_current(view: View) -> Split:
    return view.split("train")


START: dict[str, Callable] = {"random": start_random, "previous": start_previous, "related": start_related}
DATA: dict[str, Callable] = {"current": data_current}
SEARCH: dict[str, Callable] = {"random": random_search}

BASELINES = {  # name: start, data, search (paper, Table 4)
    "indep": ("random", "current", "random"),
    "ft-prev": ("previous", "current", "random"),
    "ft-d": ("related", "current", "random"),
}


@dataclass(frozen=True)
class Baseline:
    label: str
    start: Callable[[View], int | None]
    data: Callable[[View], Split]
    search: Callable[..., dict]


def choose(config: BaselineConfig) -> Baseline:
    """The row of Table 4 with the choices that the config replaces; UserError for an unknown name."""
    if config.name not in BASELINES:
        raise UserError(f"baseline.name: unknown baseline {config.name}{nearest(config.name, BASELINES)}.")
    label, chosen = config.name, []
    for axis, known, default in zip(("start", "data", "search"), (START, DATA, SEARCH), BASELINES[config.name], strict=True):
        name = getattr(config, axis)
        if name is None or name == default:
            name = default
        else:
            label += f", {axis}={name}"
        if name not in known:
            raise UserError(f"baseline.{axis}: unknown choice {name}{nearest(name, known)}.")
        chosen.append(known[name])
    return Baseline(label, *chosen)


def initial_model(view: View, source: int | None) -> models.Classifier:
    """The weights that every trial of a task starts from: a source's backbone or a random one, and always a fresh head."""
    random = generator("cpu", "weights", view.config.seed, view.task.index)
    model = models.build(view.config.model.name, view.task.num_classes, random)
    if source is not None:
        model.backbone = next(past for past in view.memory if past.index == source).backbone(view.config, view.device)
    return model.to(view.device, memory_format=torch.channels_last)
