"""Train one predictor on one task with one set of hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nevis_lite import metrics, models
from nevis_lite.config import FitConfig, UserError
from nevis_lite.data import EndlessStream, Split, seeds

EVALUATION_BATCH = 512
FINAL_LR = 1e-8  # where the cosine ends


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one; UserError for a device that this machine lacks."""
    if name.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device={name} is not known; it is auto, cpu, cuda, cuda:N or mps.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={name} cannot be used here ({str(error).splitlines()[0]}); try device=auto.") from None


def batch_size(num_train: int, max_batch: int) -> int:
    """Eq. 4: the power of two just below 0.0025 x training images, at least 16 and at most `max_batch`."""
    return min(max_batch, max(16, 2 ** int(math.log2(max(1.0, 0.0025 * num_train)))))


def warmup_steps(config: FitConfig, num_train: int, batch: int) -> int:
    """Steps of linear warm-up: `warmup_epochs` epochs, at most `max_warmup` of the steps, and fewer than all of them."""
    return min(config.steps - 1, int(config.max_warmup * config.steps), int(config.warmup_epochs * (num_train // batch + 1)))


def learning_rate(step: int, steps: int, warmup: int, peak: float, schedule: str = "cosine") -> float:
    """The rate of update number `step` (from 0): linear from 0 to `peak`, then half a cosine down to 1e-8.

    The schedule `piecewise` ends its warm-up at `peak` too and is constant from there, but a tenth from half of the steps on
    and a hundredth from three quarters on, as the ResNets of CIFAR-10 were trained (arXiv 1512.03385).
    """
    if step < warmup:
        return peak * step / warmup
    if schedule == "piecewise":
        return peak * 0.1 ** ((step >= steps // 2) + (step >= 3 * steps // 4))
    floor = FINAL_LR / peak
    cosine = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    return peak * ((1 - floor) * cosine + floor)


def validation_steps(config: FitConfig) -> list[int]:
    """After how many updates dev is evaluated: at the start, every `validate_every`, and at the end."""
    return [*range(0, config.steps, config.validate_every), config.steps]


def loss_function(kind: str, logits: Tensor, labels: Tensor, smoothing: float, over_labels: str = "mean") -> Tensor:
    """Mean loss over the images of logits (B, C): cross-entropy for labels (B,), binary cross-entropy for labels (B, C).

    Smoothed targets are y (1 - s) + s / C, and y (1 - s) + s / 2 for several labels an image. The labels of an image are
    averaged, which makes the gradient C times smaller than with `over_labels="sum"`.
    """
    if kind == "single_label":
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    targets = labels.float() * (1 - smoothing) + smoothing / 2
    loss = F.binary_cross_entropy_with_logits(logits, targets)
    return loss * logits.shape[1] if over_labels == "sum" else loss


def autocast(config: FitConfig, device: torch.device):
    """bf16 on CUDA unless asked otherwise; CPUs are many times slower in bf16."""
    if config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def predict(model: nn.Module, split: Split, size: int, config: FitConfig, picks: Tensor | None = None) -> Tensor:
    """Outputs of `model` in evaluation mode for a split's central squares, (N, C) floats on the device."""
    model.eval()
    with autocast(config, split.device):
        return torch.cat([model(images).float() for images in split.batches(size, EVALUATION_BATCH, picks)])


def evaluate(model: nn.Module, split: Split, size: int, config: FitConfig) -> float | None:
    """The task's error on a split: 1 - accuracy or 1 - mAP over all its images; None if an output isn't finite."""
    scores = predict(model, split, size, config)
    if not torch.isfinite(scores).all():
        return None
    return metrics.error(split.meta["kind"], scores.cpu().numpy(), split.labels.cpu().numpy())


@dataclass
class Auxiliary:
    """An earlier task that trains together with the current one: its batches, and a head of its own on the same backbone."""

    batches: EndlessStream
    head: nn.Linear


@dataclass
class Trial:
    """A training in progress. `curve` holds [step, dev error]; `best_state` the weights at its lowest point."""

    model: models.Classifier
    optimizer: torch.optim.Optimizer
    auxiliaries: list[Auxiliary] = field(default_factory=list)
    step: int = 0
    curve: list = field(default_factory=list)
    best_error: float = math.inf
    best_step: int = 0
    best_state: dict | None = None
    loss: float | None = None  # mean training loss between the last two validations
    loss_sum: Tensor | float = 0.0  # on the device, so that no step waits for it
    failed: bool = False

    def snapshot(self) -> dict:
        """Everything needed to go on from here, as tensors and plain values."""
        values = {name: getattr(self, name) for name in
                  ("step", "curve", "best_error", "best_step", "best_state", "loss", "loss_sum", "failed")}
        return values | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                         "heads": self.heads.state_dict()}

    def restore(self, snapshot: dict):
        for name, value in snapshot.items():
            if name in ("model", "optimizer", "heads"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)

    @property
    def heads(self) -> nn.ModuleList:
        """Those of the auxiliary tasks."""
        return nn.ModuleList(auxiliary.head for auxiliary in self.auxiliaries)


def start(model: models.Classifier, config: FitConfig, auxiliaries: list[Auxiliary] = ()) -> Trial:
    """A trial before its first step: every task starts with a fresh optimiser (SGD, Nesterov momentum 0.9)."""
    trained = nn.ModuleList([model, *(auxiliary.head for auxiliary in auxiliaries)])
    groups = models.parameter_groups(trained, config.weight_decay)
    return Trial(model, torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True), list(auxiliaries))


def train(model: models.Classifier, batches: EndlessStream, dev: Split, hyperparameters: dict, config: FitConfig,
          auxiliaries: list[Auxiliary] = (), snapshot: dict | None = None,
          on_step: Callable[[Trial], None] = lambda trial: None) -> Trial:
    """Train `model` for `config.steps` updates and return the trial, with the best weights on dev kept.

    `hyperparameters`: lr, label_smoothing, the weight of the `auxiliaries` and, in place of the config's, schedule. `snapshot`
    goes on where an earlier call was stopped. `on_step` is called after each update and may raise to stop. A loss or output
    that isn't finite ends the trial with `failed` set.
    """
    trial = start(model, config, auxiliaries)
    if snapshot:
        trial.restore(snapshot)
    size = batches.size
    validations = set(validation_steps(config))
    if not trial.curve:
        _validate(trial, dev, size, config)
    while trial.step < config.steps and not trial.failed:
        update(trial, batches, hyperparameters, config)
        if trial.step in validations:
            _validate(trial, dev, size, config)
        on_step(trial)
    return trial


def update(trial: Trial, batches: EndlessStream, hyperparameters: dict, config: FitConfig):
    """One step of SGD at the learning rate of the trial's step."""
    warmup = warmup_steps(config, len(batches.split), batches.batch)
    schedule = hyperparameters.get("schedule", config.schedule)
    for group in trial.optimizer.param_groups:
        group["lr"] = learning_rate(trial.step, config.steps, warmup, hyperparameters["lr"], schedule)
    trial.model.train()
    trial.optimizer.zero_grad(set_to_none=True)
    loss = _loss(trial.model.backbone, trial.model.head, batches, trial.step, hyperparameters, config)
    loss.backward()
    for auxiliary in trial.auxiliaries:
        with _statistics_kept(trial.model):
            other = _loss(trial.model.backbone, auxiliary.head, auxiliary.batches, trial.step, hyperparameters, config)
        (hyperparameters["auxiliary_weight"] * other).backward()  # one after the other: memory for one batch, not for all
    trial.optimizer.step()
    trial.loss_sum = trial.loss_sum + loss.detach()
    trial.step += 1


def _loss(backbone: nn.Module, head: nn.Module, batches: EndlessStream, step: int, hyperparameters: dict,
          config: FitConfig) -> Tensor:
    """The mean loss over batch number `step`."""
    images, labels = batches(step)
    if isinstance(backbone, models.Foreign):  # may have dropout, which draws from torch's global generators
        torch.manual_seed(int(seeds("dropout", *batches.key, step).generate_state(1)[0]))
    with autocast(config, batches.split.device):
        logits = head(backbone(images))
    return loss_function(batches.split.meta["kind"], logits.float(), labels, hyperparameters["label_smoothing"],
                         config.multi_label_loss)


@contextmanager
def _statistics_kept(model: nn.Module):
    """Batch norm uses the batch's own statistics, and its running ones, which predictions will use, stay the current task's."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d) and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def _validate(trial: Trial, dev: Split, size: int, config: FitConfig):
    """Add a point to the curve; keep the weights if it's the lowest; end the trial when something isn't finite."""
    if trial.step:
        trial.loss = float(trial.loss_sum) / (trial.step - trial.curve[-1][0])
        trial.loss_sum = 0.0
    error = evaluate(trial.model, dev, size, config)
    trial.curve.append([trial.step, error])
    if error is None or not math.isfinite(trial.loss or 0.0):
        trial.failed = True
    elif error < trial.best_error:
        trial.best_error, trial.best_step = error, trial.step
        trial.best_state = {name: value.detach().clone() for name, value in trial.model.state_dict().items()}
