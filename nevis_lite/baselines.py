"""The meta-learners of the paper's Table 4, each as three choices: where weights start, which data train them, which search.

A choice is a function; the dicts START, DATA and SEARCH name them. To add a baseline, add a function:

    start(view) -> source of the weights: index of an earlier task, "pretrained", or None for random ones
    data(view) -> indices of the earlier tasks that train together with the current one
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
from nevis_lite.search import gp_ucb, random_search
from nevis_lite.stream import Access, Task

PRETRAINED = "pretrained"
Source = int | str | None  # of weights: an earlier task's index, "pretrained", or None for random ones


@dataclass(frozen=True)
class Past:
    """What a learner kept from an earlier task: the predictor, and the dev error that it was chosen by."""

    index: int
    task: Task
    num_train: int
    dev_error: float
    path: Path | None  # None in a dry run


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
    pretrained: dict | None = None  # state of a backbone, from model.weights
    indep: dict[int, Path] = field(default_factory=dict)  # predictors of select.indep_run by task index
    dry: bool = False  # only charge: features and scores are zeros
    flops: int = 0
    scores: dict[Source, float] = field(default_factory=dict)  # of the candidates, for the record

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

    def backbone(self, source: Source, path: Path | None = None) -> nn.Module:
        """The network of a source with its weights, or with those of the predictor at `path` in their place."""
        name, state = self.config.model.name, self.pretrained
        if source is None:
            net = models.build(name, generator=generator("cpu", "weights", self.config.seed, self.task.index))
            return net.to(self.device, memory_format=torch.channels_last)
        if source == PRETRAINED and state is None:
            raise UserError("a start from pretrained weights needs model.weights.")
        if source != PRETRAINED:
            path = path or next(past.path for past in self.memory if past.index == source)
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)["state"]
            except Exception as error:  # torch has many ways to say "broken file"
                raise UserError(f"{path}: is no predictor that can be read ({type(error).__name__}); put it back, or run its "
                                "stream anew.") from None
            prefix = "backbone."
            state = {key[len(prefix):]: value for key, value in state.items() if key.startswith(prefix)}
        net = models.with_state(name, state)
        return net.to(self.device, memory_format=torch.channels_last)

    def relatedness(self, source: Source, path: Path | None = None) -> float:
        """k-NN accuracy (or mAP) on dev of this task's images, as features of a source's backbone (paper, FT-d)."""
        if source in self.scores:
            return self.scores[source]
        backbone = None if self.dry else self.backbone(source, path=path)
        train, dev = self.features(backbone, "train"), self.features(backbone, "dev")
        self.flops += flops.knn_flops(len(dev), len(train), self.num_features)
        if self.dry:
            self.scores[source] = 0.0
            return 0.0
        if self.config.select.distance == "cosine":
            train, dev = F.normalize(train), F.normalize(dev)
        train_split, dev_split = self.split("train"), self.split("dev")
        votes = knn_votes(train, train_split.labels[self.subset("train").to(self.device)], dev,
                          self.config.select.neighbours, self.task.num_classes)
        labels = dev_split.labels[self.subset("dev").to(self.device)]
        votes, labels = votes.cpu().numpy(), labels.cpu().numpy()
        if self.task.kind == "single_label":
            score = 1 - metrics.single_label_error(votes, labels)
        else:  # a subset without any label says nothing about the candidate
            score = metrics.mean_average_precision(votes, labels)[0] or 0.0
        self.scores[source] = score
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
    half = (references * references).sum(1) / 2
    room, votes = half.new_empty(min(512, len(queries)), len(references)), []  # one for all parts: new memory is slow to touch
    for part in queries.split(512):  # half the squared distance, less the query's own half square, which changes no order
        distances = torch.mm(part, references.T, out=room[:len(part)])
        torch.sub(half, distances, out=distances)
        votes.append(targets[distances.topk(min(k, len(references)), largest=False).indices].mean(1))
    return torch.cat(votes)


# ---------------------------------------------------------------------------------------------------------------------
# Choices


def start_random(view: View) -> None:
    return None


def start_previous(view: View) -> int | None:
    return view.memory[-1].index if view.memory else None


def start_related(view: View) -> Source:
    """The earlier task with the best k-NN score; the latest of equals, since it was trained on top of more."""
    return _best(view, [past.index for past in view.memory])


def start_related_or_pretrained(view: View) -> Source:
    """The pretrained network is one more candidate, and the oldest."""
    return _best(view, [PRETRAINED, *(past.index for past in view.memory)])


def start_pretrained(view: View) -> Source:
    return PRETRAINED


def start_related_static(view: View) -> Source:
    """As `start_related`, but with the features of predictors that learned their task from scratch (select.indep_run)."""
    for past in view.memory:
        view.relatedness(past.index, view.indep.get(past.index))
    return _best(view, [past.index for past in view.memory])


def _best(view: View, sources: list[Source]) -> Source:
    """The source with the highest score, the last of equals; where there is none, or if that scores best, random weights."""
    sources = [None] * view.config.select.scratch + sources
    return max(sources, key=lambda source: (view.relatedness(source), sources.index(source)), default=None)


def data_current(view: View) -> list[int]:
    return []


def data_multitask(view: View) -> list[int]:
    """The `baseline.auxiliary` earlier tasks with the best k-NN scores, all of them while there are fewer."""
    latest_first = sorted((past.index for past in view.memory), reverse=True)
    return sorted(latest_first, key=view.relatedness, reverse=True)[:view.config.baseline.auxiliary]


START: dict[str, Callable] = {"random": start_random, "previous": start_previous, "related": start_related,
                              "related_static": start_related_static, "pretrained": start_pretrained,
                              "related_or_pretrained": start_related_or_pretrained}
DATA: dict[str, Callable] = {"current": data_current, "multitask": data_multitask}
SEARCH: dict[str, Callable] = {"random": random_search, "gp_ucb": gp_ucb}

BASELINES = {  # name: start, data, search (paper, Table 4)
    "indep": ("random", "current", "random"),
    "ft-prev": ("previous", "current", "random"),
    "ft-s": ("related_static", "current", "random"),
    "ft-d": ("related", "current", "random"),
    "mt": ("related", "multitask", "random"),
    "pt": ("pretrained", "current", "random"),
    "pt-ft": ("related_or_pretrained", "current", "random"),
    "bhpo": ("random", "current", "gp_ucb"),
}


@dataclass(frozen=True)
class Baseline:
    label: str
    start: Callable[[View], Source]
    data: Callable[[View], list[int]]
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


def initial_model(view: View, source: Source, name: str | None = None) -> models.Classifier:
    """The weights that every trial of a task starts from: a source's backbone or a random one, and always a fresh head.

    `name`: a network other than the config's, for random weights.
    """
    random = generator("cpu", "weights", view.config.seed, view.task.index)
    model = models.build(name or view.config.model.name, view.task.num_classes, random)
    if source is not None:
        model.backbone = view.backbone(source)
    return model.to(view.device, memory_format=torch.channels_last)


def auxiliary_head(view: View, index: int) -> nn.Linear:
    """A fresh head for the earlier task `index`, on the backbone that the current task trains; it is dropped afterwards."""
    classes = next(past.task.num_classes for past in view.memory if past.index == index)
    random = generator("cpu", "auxiliary head", view.config.seed, view.task.index, index)
    return models.linear_head(view.num_features, classes, random).to(view.device)
