"""What comes before a stream: the networks that its learners start from, trained supervised or on episodes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from nevis_lite import fit, models
from nevis_lite.config import FitConfig, UserError
from nevis_lite.data import EndlessStream, draw, generator, seeds
from nevis_lite.fluid_learners import Start
from nevis_lite.fluid_pool import Pool, Stage
from nevis_lite.run_folder import load_state, write_atomic


def initial(settings, classes: int) -> models.Classifier:
    """The network before all training: random weights, or those of `model.weights`, and a head of zeros."""
    model = models.build(settings.model.name, classes, generator("cpu", "weights", settings.seed))
    if settings.model.weights:
        model.backbone.load_state_dict(models.pretrained(settings.model.name, settings.model.weights)[0])
    nn.init.zeros_(model.head.weight)
    return model


def supervised(model: models.Classifier, images: Pool, settings):
    """Train `model` on the pretraining images, in place."""
    rule = FitConfig(steps=settings.pretrain.steps, max_warmup=0.1)
    trial = fit.start(model, rule)
    batches = EndlessStream(images, settings.pretrain.batch, settings.data, settings.model.image_size, (settings.seed,))
    for _ in tqdm(range(settings.pretrain.steps), desc="pretraining", unit=" updates", disable=None, leave=False):
        fit.update(trial, batches, {"lr": settings.pretrain.lr, "label_smoothing": 0.0}, rule)
    if not math.isfinite(float(trial.loss_sum)):
        raise UserError("pretrain.lr: the pretraining diverged; lower it.")


def episodic(backbone: nn.Module, images: Pool, settings, cosine: bool):
    """Train `backbone` in place to classify images by the nearest of a few classes' means, in small tasks drawn at random.

    Logits are minus the squared distances to the means, or the cosines times a scale that is learned, 10 at first.
    """
    options, size, rows = settings.pretrain, settings.model.image_size, episode_classes(images, settings.pretrain)
    scale = nn.Parameter(torch.tensor(10.0, device=images.device))
    groups = [*models.parameter_groups(backbone, settings.learn.weight_decay), {"params": [scale]}]
    optimizer = torch.optim.SGD(groups, lr=options.episode_lr, momentum=0.9)
    backbone.train()
    for episode in tqdm(range(options.episodes), desc="episodes", unit=" updates", disable=None, leave=False):
        key = (settings.seed, episode)
        draws = np.random.default_rng(seeds("fluid episode", *key))
        picks = [torch.from_numpy(draws.permutation(rows[label])[:options.shot + options.query])
                 for label in draws.choice(len(rows), options.way, replace=False)]
        random = generator(images.pixels.device, "fluid crops", *key)
        crops = images.crops(torch.cat(picks), settings.data, size, draw(sum(map(len, picks)), random))
        with fit.autocast(FitConfig(), images.device):
            features = backbone(crops).float().split([len(found) for found in picks])
        means = torch.stack([part[:options.shot].mean(dim=0) for part in features])
        queries = torch.cat([part[options.shot:] for part in features])
        targets = torch.cat([torch.full((len(part) - options.shot,), label) for label, part in enumerate(features)])
        logits = (scale * F.normalize(queries, dim=1) @ F.normalize(means, dim=1).T if cosine else
                  -(queries[:, None] - means).square().sum(dim=2))
        loss = F.cross_entropy(logits, targets.to(images.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    if options.episodes and not math.isfinite(float(loss.detach())):
        raise UserError("pretrain.episode_lr: the pretraining on episodes diverged; lower it.")


def episode_classes(images: Pool, options) -> list[np.ndarray]:
    """The rows of each class that an episode may have, with more images than the shot; UserError for fewer than the way."""
    labels = images.labels.cpu().numpy()
    rows = [np.flatnonzero(labels == label) for label in range(images.meta["num_classes"])]
    rows = [found for found in rows if len(found) > options.shot]
    if len(rows) < options.way:
        raise UserError(f"pretrain.way={options.way}: only {len(rows)} of the pretraining classes have more than pretrain.shot "
                        f"images; lower one of the two.")
    return rows


def network(kind: str, folder: Path, images: Pool, settings) -> models.Classifier:
    """The pretrained network of a kind, from a file in `folder` if it's there, else trained now and written.

    supervised; ptn, which knows episodes alone; or meta_baseline, which knows them after supervised training.
    """
    classes = images.meta["num_classes"]
    file = folder / ("pretrained.pt" if kind == "supervised" else f"pretrained-{kind}.pt")
    if file.is_file():
        model = models.build(settings.model.name, classes)
        model.load_state_dict(load_state(file))
        return model.to(images.device, memory_format=torch.channels_last)
    if kind == "meta_baseline":
        model = network("supervised", folder, images, settings)
    else:
        model = initial(settings, classes)
    model = model.to(images.device, memory_format=torch.channels_last)
    if kind == "supervised":
        supervised(model, images, settings)
    else:
        episodic(model.backbone, images, settings, cosine=kind == "meta_baseline")
    write_atomic(file, lambda out: torch.save(model.state_dict(), out))
    return model


def start(model: models.Classifier, stage: Stage, base: Pool, settings, forward_macs: int) -> Start:
    """What the learners of a stage start from: the network, and the pretraining images of the classes that are known."""
    labels = base.labels.cpu().numpy()
    rows = np.flatnonzero(np.isin(labels, stage.known))
    slots = np.full(base.meta["num_classes"], -1)
    slots[stage.known] = np.arange(len(stage.known))
    images = base.subset(rows, slots[labels[rows]])
    weight, bias = (value.detach()[torch.from_numpy(stage.known)] for value in (model.head.weight, model.head.bias))
    return Start(model.backbone, weight, bias, features(model.backbone, images, settings), images, forward_macs)


def features(backbone: nn.Module, images: Pool, settings, picks: torch.Tensor | None = None) -> torch.Tensor:
    """(n, d) of the central squares of all images, or of `picks`, in evaluation mode."""
    picks = torch.arange(len(images)) if picks is None else picks
    if not len(picks):
        return torch.zeros(0, backbone.num_features, device=images.device)
    return fit.predict(backbone, images, settings.model.image_size, FitConfig(), picks)
