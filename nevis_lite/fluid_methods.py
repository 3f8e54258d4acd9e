"""The methods that FLUID compares: what they score with, what they train, and on which loss.

A new method is a class and a line in METHODS; all that they share is in `fluid_learners.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nevis_lite import fit
from nevis_lite.config import FitConfig
from nevis_lite.data import generator
from nevis_lite.fluid_learners import Batch, Learner, Memory

# ---------------------------------------------------------------------------------------------------------------------
# Terms of losses


def distillation(logits: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """T^2 times the cross-entropy of softmax(logits / T) under softmax(teacher / T), (B, C) each; 0 without classes."""
    if not logits.shape[1]:
        return logits.new_zeros(())
    return temperature**2 * F.cross_entropy(logits / temperature, (teacher / temperature).softmax(dim=1))


def quadratic_penalty(values: list[Tensor], anchors: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Half the sum of weight (value - anchor)^2 over all elements of all tensors."""
    return sum((weight * (value - anchor) ** 2).sum()
               for value, anchor, weight in zip(values, anchors, weights, strict=True)) / 2


def logit_distance(logits: Tensor, stored: Tensor) -> Tensor:
    """Mean squared difference from the `stored` logits (B, K), where these are finite: of the classes known at the time."""
    there = stored.isfinite()
    return F.mse_loss(logits[there], stored[there])


def within_batch(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy among the classes that `labels` (B,) hold: the other ones are not pushed down."""
    present = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    present[labels] = True
    return F.cross_entropy(logits.masked_fill(~present, -torch.inf), labels)


# ---------------------------------------------------------------------------------------------------------------------
# Methods


class NearestClassMean(Learner):
    """NCM: the largest cosine between a feature and a class mean."""

    trains = False

    def scores(self, h: Tensor) -> Tensor:
        return self.scaled(h) @ F.normalize(self.total, dim=1).T


class MetaBaseline(Learner):
    """Cosine NCM on a backbone that was trained supervised, then on episodes with cosine prototypes."""

    pretraining = "meta_baseline"
    trains = False
    scores = NearestClassMean.scores


class PrototypicalNetwork(Learner):
    """NCM by squared distance, on a backbone trained on episodes alone."""

    pretraining = "ptn"
    trains = False

    def embed(self, h: Tensor) -> Tensor:
        return h

    def scores(self, h: Tensor) -> Tensor:
        return -torch.cdist(h, self.centroids, compute_mode="donot_use_mm_for_euclid_dist") ** 2


class FineTune(Learner):
    """The linear head is trained, on features that are computed once."""


class ExemplarTuning(Learner):
    """Eq. 1: a class is the mean of its features of length 1, which follows every sample, plus a residual that is trained."""

    bias = False

    def begin(self):
        pass  # the head's rows are the residuals, zero at first

    def scores(self, h: Tensor) -> Tensor:
        return self.scaled(h) @ (self.centroids + self.head.weight).T


class Imprinting(Learner):
    """NCM until learn.switch of the sequence; from there on the means are the rows of a cosine classifier that is trained.

    A class that appears later gets its first feature as its row.
    """

    bias = False

    def begin(self):
        self.head.gain = nn.Parameter(torch.ones((), device=self.device))  # of the scale
        with torch.no_grad():
            self.head.weight.copy_(F.normalize(self.total, dim=1))

    @property
    def switched(self) -> bool:
        return int(self.seen) >= self.settings.learn.switch * self.length

    @property
    def seen(self) -> Tensor:
        return self.count.sum() - len(self.start.images.labels)

    def scores(self, h: Tensor) -> Tensor:
        return self.head.gain * self.scaled(h) @ F.normalize(self.head.weight, dim=1).T

    @torch.no_grad()
    def observe(self, h: Tensor, slot: int):
        moves = not self.switched or not self.known[slot]
        super().observe(h, slot)
        if moves:
            self.head.weight[slot] = F.normalize(self.total[slot], dim=0)

    def update(self, memory: Memory, epochs: int) -> bool:
        return self.switched and super().update(memory, epochs)


class StandardTraining(Learner):
    """All layers are trained on everything seen so far."""

    full = True


class LearningWithoutForgetting(Learner):
    """LwF: standard training, and the outputs for the classes known from the start stay near the pretrained network's."""

    full = True

    def loss(self, batch: Batch) -> Tensor:
        start = self.start
        with torch.no_grad():
            start.backbone.eval()
            with fit.autocast(FitConfig(), self.device):
                features = start.backbone(batch.images).float()
            teacher = features @ start.weight.T + start.bias  # in single precision, as the learner's own
        self.meter.forward(len(batch.images))
        logits = self.logits(batch.features)
        return F.cross_entropy(logits, batch.labels) + distillation(logits[:, :len(start.weight)], teacher)


class ElasticWeightConsolidation(Learner):
    """EWC: standard training, and weights that mattered to the classes known from the start stay near what they were."""

    full = True

    def begin(self):
        super().begin()
        self.values = [*self.backbone.parameters(), *self.head.parameters()]
        self.values = [value for value in self.values if value.requires_grad]
        self.anchors = [value.detach().clone() for value in self.values]
        self.fisher = self.diagonal_fisher()

    def diagonal_fisher(self) -> list[Tensor]:
        """The mean squared gradient of the log-probability of an image's label, over images of the known classes."""
        random = generator("cpu", "fluid fisher", self.settings.seed)
        picks = torch.randperm(len(self.start.images.labels), generator=random)[:self.settings.learn.fisher]
        fisher = [torch.zeros_like(value) for value in self.values]
        self.backbone.eval()
        for pick in picks[:, None]:
            images = next(self.start.images.batches(self.settings.model.image_size, 1, pick))
            loss = F.cross_entropy(self.logits(self.backbone(images)), self.start.images.labels[pick.to(self.device)])
            for mean, gradient in zip(fisher, torch.autograd.grad(loss, self.values), strict=True):
                mean += gradient**2 / len(picks)
        self.meter.train(len(picks), full=True)
        return fisher

    def loss(self, batch: Batch) -> Tensor:
        penalty = quadratic_penalty(self.values, self.anchors, self.fisher)
        return super().loss(batch) + self.settings.learn.ewc * penalty


class DarkExperienceReplay(Learner):
    """DER: standard training, and replayed samples keep the logits that they had when they went into the buffer."""

    full = True
    replays = True

    def loss(self, batch: Batch) -> Tensor:
        loss = Learner.loss(self, batch)
        if self.buffer.seen:
            logits, _, stored = self.replay(batch)
            loss = loss + self.settings.learn.der * logit_distance(logits, stored)
        return loss


class DarkExperienceReplayLabels(Learner):
    """DER++: DER, and other replayed samples keep their labels."""

    full = True
    replays = True

    def loss(self, batch: Batch) -> Tensor:
        loss = DarkExperienceReplay.loss(self, batch)
        if self.buffer.seen:
            logits, labels, _ = self.replay(batch)
            loss = loss + self.settings.learn.derpp * F.cross_entropy(logits, labels)
        return loss


class AsymmetricReplay(Learner):
    """ER-ACE: new samples compete among the classes of their batch, replayed ones among all known classes."""

    full = True
    replays = True

    def loss(self, batch: Batch) -> Tensor:
        loss = within_batch(self.logits(batch.features), batch.labels)
        if self.buffer.seen:
            logits, labels, _ = self.replay(batch)
            loss = loss + F.cross_entropy(logits, labels)
        return loss


METHODS: dict[str, type[Learner]] = {
    "ncm": NearestClassMean,
    "ft": FineTune,
    "standard": StandardTraining,
    "et": ExemplarTuning,
    "imprint": Imprinting,
    "ptn": PrototypicalNetwork,
    "meta_baseline": MetaBaseline,
    "lwf": LearningWithoutForgetting,
    "ewc": ElasticWeightConsolidation,
    "der": DarkExperienceReplay,
    "derpp": DarkExperienceReplayLabels,
    "er_ace": AsymmetricReplay,
}
