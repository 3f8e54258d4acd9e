"""What the learners that FLUID compares have in common: scores, novelty, the memory, and training on it.

A learner scores features h (B, d), is told one label after the other, and now and then trains on everything that it was told.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nevis_lite import fit, models
from nevis_lite.config import FitConfig
from nevis_lite.data import Split, draw, generator, seeds
from nevis_lite.fluid_metrics import Meter

# ---------------------------------------------------------------------------------------------------------------------
# What a learner is given


@dataclass
class Start:
    """What every learner of a run starts from: a pretrained network, and the pretraining images of the known classes."""

    backbone: nn.Module
    weight: Tensor  # (known, d) and (known,): rows of the pretrained head
    bias: Tensor
    features: Tensor  # (n, d) of the pretraining images of known classes
    images: Split  # these images, labelled with their slots
    forward_macs: int


@dataclass
class Memory:
    """The samples revealed so far, in order of time."""

    images: Split  # of the whole sequence; only those with a label are looked at
    labels: Tensor  # (t,) slots
    features: Tensor | None  # (T, d) of a frozen backbone

    def __len__(self):
        return len(self.labels)


@dataclass
class Batch:
    """Samples of a memory that one step trains on; `features` carry gradients where the backbone is trained."""

    picks: Tensor
    images: Tensor | None
    features: Tensor
    labels: Tensor
    memory: Memory
    random: torch.Generator


@dataclass
class Reservoir:
    """A uniform sample, of at most `size`, of all that was added: numbers of samples, and the logits that they had then."""

    size: int
    picks: Tensor | None = None  # (size,) on the CPU
    logits: Tensor | None = None  # (size, K) on the device
    seen: int = 0

    def add(self, picks: Tensor, logits: Tensor, random: torch.Generator):
        if self.picks is None:
            self.picks, self.logits = picks.new_zeros(self.size), logits.new_zeros(self.size, logits.shape[1])
        chosen = {}
        for i, share in enumerate(torch.rand(len(picks), generator=random, device=random.device).tolist()):
            place = self.seen if self.seen < self.size else int(share * (self.seen + 1))
            self.seen += 1
            if place < self.size:
                chosen[place] = i  # a later sample takes the place of an earlier one
        if chosen:
            places, rows = list(chosen), list(chosen.values())
            self.picks[places], self.logits[places] = picks[rows], logits[rows]

    def draw(self, count: int, random: torch.Generator) -> Tensor:
        """Places of `count` different entries, or of all if there are fewer."""
        return torch.randperm(min(self.seen, self.size), generator=random, device=random.device)[:count].cpu()


# ---------------------------------------------------------------------------------------------------------------------
# Learners


class Learner:
    """Trains the head alone, unless `full`: then all layers. Slots are numbered as the sequence does; unknown ones get -inf.

    `settings` is the run's FluidConfig, `length` that of the sequence. All randomness is a function of the seed and the time.
    """

    full = False  # whether updates change the backbone
    pretraining = "supervised"  # or the kind of episodic pretraining, see fluid_pretrain.py
    bias = True
    trains = True
    replays = False  # whether updates keep samples in a buffer and train on them once more

    def __init__(self, start: Start, slots: int, length: int, settings):
        self.start, self.settings, self.length = start, settings, length
        known, d = start.weight.shape
        self.meter = Meter(start.forward_macs, head_macs=d * slots)
        self.device = start.weight.device
        self.backbone = copy.deepcopy(start.backbone) if self.full else start.backbone
        self.head = nn.Linear(d, slots, bias=self.bias, device=self.device)
        nn.init.zeros_(self.head.weight)
        if self.bias:
            nn.init.zeros_(self.head.bias)
        self.known = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.count = torch.zeros(slots, device=self.device)
        self.total = torch.zeros(slots, d, device=self.device)  # of the embedded features of each class
        self.known[:known] = True
        self.count.index_add_(0, start.images.labels, torch.ones_like(start.images.labels, dtype=self.count.dtype))
        self.total.index_add_(0, start.images.labels, self.embed(start.features))
        self.buffer = Reservoir(max(1, int(settings.learn.buffer * length)))
        self.begin()
        trained = nn.ModuleList([self.head, self.backbone] if self.full else [self.head])
        self.optimizer = torch.optim.SGD(models.parameter_groups(trained, settings.learn.weight_decay), momentum=0.9,
                                         lr=settings.learn.lr_full if self.full else settings.learn.lr_head)

    def begin(self):
        """What a method sets up before its optimiser; here the pretrained rows of the head."""
        with torch.no_grad():
            self.head.weight[:len(self.start.weight)] = self.start.weight
            self.head.bias[:len(self.start.bias)] = self.start.bias

    # Scores

    @property
    def centroids(self) -> Tensor:
        """(K, d) class means; zero for unknown classes."""
        return self.total / self.count.clamp(min=1)[:, None]

    def embed(self, h: Tensor) -> Tensor:
        """What the class means are means of: features of length 1."""
        return F.normalize(h, dim=1)

    def scaled(self, h: Tensor) -> Tensor:
        """Features of length learn.scale, or as they are if that is 0: the temperature of scores that are inner products."""
        return self.settings.learn.scale * F.normalize(h, dim=1) if self.settings.learn.scale else h

    def scores(self, h: Tensor) -> Tensor:
        """(B, K), also of unknown slots."""
        return self.head(h)

    def logits(self, h: Tensor) -> Tensor:
        """(B, d) -> (B, K), -inf for unknown slots."""
        return self.scores(h).masked_fill(~self.known, -torch.inf)

    def novelty(self, h: Tensor, logits: Tensor) -> dict[str, Tensor]:
        """How likely a sample is of an unknown class, (B,) each: higher is likelier; inf when no class is known.

        msp: minus the largest softmax probability; maxlogit: minus the largest logit; mdt: the least cosine distance to a
        class, which is its mean, or its row of the head where the backbone moves on and leaves old means behind.
        """
        if not self.known.any():
            return dict.fromkeys(("msp", "mdt", "maxlogit"), torch.full((len(h),), torch.inf))
        classes = F.normalize(self.head.weight if self.full else self.total, dim=1)[self.known]
        return {"msp": -logits.softmax(dim=1).amax(dim=1), "mdt": 1 - (F.normalize(h, dim=1) @ classes.T).amax(dim=1),
                "maxlogit": -logits.amax(dim=1)}

    # Learning

    def observe(self, h: Tensor, slot: int):
        """The label of the sample with the features h (d,) is revealed."""
        self.known[slot] = True
        self.count[slot] += 1
        self.total[slot] += self.embed(h[None])[0]

    def update(self, memory: Memory, epochs: int) -> bool:
        """Epochs of SGD over the whole memory; its order and crops depend on the seed and on the memory's length.

        False when there is nothing to train.
        """
        if not self.trains or len(memory) < 2:  # batch norm has no variance over one image
            return False
        torch.manual_seed(int(seeds("fluid dropout", self.settings.seed, len(memory)).generate_state(1)[0]))
        for epoch in range(epochs):
            for batch in self.batches(memory, epoch):
                loss = self.loss(batch)
                if self.replays:
                    with torch.no_grad():
                        self.buffer.add(batch.picks, self.logits(batch.features), batch.random)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                self.meter.train(len(batch.labels), full=self.full)
        return True

    def batches(self, memory: Memory, epoch: int) -> Iterator[Batch]:
        """Parts of equal size, up to one, of the memory in a random order."""
        key = (self.settings.seed, len(memory), epoch)
        order = torch.randperm(len(memory), generator=generator("cpu", "fluid order", *key))
        random = generator(memory.images.pixels.device, "fluid crops", *key)
        for picks in order.tensor_split(-(-len(order) // self.settings.learn.batch)):
            images = self.crops(memory, picks, random) if self.full else None
            features = self.forward(images) if self.full else memory.features[picks.to(self.device)]
            yield Batch(picks, images, features, memory.labels[picks.to(self.device)], memory, random)

    def crops(self, memory: Memory, picks: Tensor, random: torch.Generator) -> Tensor:
        return memory.images.crops(picks, self.settings.data, self.settings.model.image_size, draw(len(picks), random))

    def forward(self, images: Tensor) -> Tensor:
        """Features with gradients; batch norm uses and keeps the batch's statistics."""
        self.backbone.train()
        with fit.autocast(FitConfig(), self.device):
            return self.backbone(images).float()

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(batch.features), batch.labels)

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """As many samples of the buffer as the batch has: logits now, labels, and logits when they went in."""
        places = self.buffer.draw(len(batch.labels), batch.random)
        picks = self.buffer.picks[places]
        logits = self.logits(self.forward(self.crops(batch.memory, picks, batch.random)))
        self.meter.train(len(picks), full=True)
        return logits, batch.memory.labels[picks.to(self.device)], self.buffer.logits[places.to(self.device)]

    # Going on later

    def state_dict(self) -> dict:
        return {"backbone": self.backbone.state_dict() if self.full else None, "head": self.head.state_dict(),
                "optimizer": self.optimizer.state_dict(), "known": self.known, "count": self.count, "total": self.total,
                "buffer": vars(self.buffer), "meter": vars(self.meter)}

    def load_state_dict(self, state: dict):
        if self.full:
            self.backbone.load_state_dict(state["backbone"])
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.known, self.count, self.total = (state[name].to(self.device) for name in ("known", "count", "total"))
        self.buffer = Reservoir(**state["buffer"])
        if self.buffer.logits is not None:
            self.buffer.logits = self.buffer.logits.to(self.device)
        vars(self.meter).update(state["meter"])
