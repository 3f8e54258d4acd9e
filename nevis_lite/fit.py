"""Train one predictor on one task with one set of hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nevis_lite import metrics, models, parallel
from nevis_lite.config import FitConfig, UserError
from nevis_lite.data import EndlessStream, Split, say_once, seeds

EVALUATION_BATCH = 512
LEAST_SHARE = 2  # images: batch norm cannot work on one
FINAL_LR = 1e-8  # where the cosine ends
RECOMPILE_LIMIT = 256  # variants of a compiled backbone: each batch size, with and without running statistics
# The same update in few kernels. On the CPU `foreach` gives the numbers of the plain loop, which `fused` doesn't.
SGD_KERNELS = {"cuda": {"fused": True}, "cpu": {"foreach": True}}


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one, each process's own if there are enough; UserError for what this machine lacks."""
    if name.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device={name} is not known; it is auto, cpu, cuda, cuda:N or mps.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and parallel.world() > 1:
        name = f"cuda:{parallel.local_rank() % max(1, torch.cuda.device_count())}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # for those parts of PyTorch that use the current one
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
def predict(model: nn.Module, split: Split, size: int, config: FitConfig, picks: Tensor | None = None,
            share: tuple[int, int] = (0, 1)) -> Tensor:
    """Outputs of `model` in evaluation mode for a split's central squares, (N, C) floats on the device."""
    model.eval()
    batch = EVALUATION_BATCH
    while True:
        try:
            with autocast(config, split.device):
                return torch.cat([model(images).float() for images in split.batches(size, batch, picks, share)])
        except RuntimeError as error:
            if batch == 1 or not _out_of_memory(error):
                raise
        batch //= 2
        _retry(f"predicting {2 * batch} images at a time takes more memory than there is; going on with {batch}")


def evaluate(model: nn.Module, split: Split, size: int, config: FitConfig, share: tuple[int, int] = (0, 1)) -> float | None:
    """The task's error on a split: 1 - accuracy or 1 - mAP over all its images; None if an output isn't finite.

    Each process predicts its `share` (number, of) of the images, and all return the same.
    """
    scores = predict(model, split, size, config, share=share)
    if share[1] > 1:
        scores = parallel.join_rows(scores)
    if not torch.isfinite(scores).all():
        return None
    return metrics.error(split.meta["kind"], scores.cpu().numpy(), split.labels.cpu().numpy())


def _out_of_memory(error: RuntimeError) -> bool:
    """Only CUDA has an exception of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory", "ALLOC_FAILED"))


def _retry(what: str):
    """Call it outside of the handler: the exception holds what the failed try had allocated."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    say_once(what)


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
    backbone: Callable[[Tensor], Tensor]  # the model's, or its compiled form
    norms: list[nn.Module]
    statistics: list[list[Tensor]]  # what batch norm has gathered, which a forward pass changes; a list a type of number
    before: list[list[Tensor]]  # where they are put aside
    auxiliaries: list[Auxiliary] = field(default_factory=list)
    step: int = 0
    curve: list = field(default_factory=list)
    best_error: float = math.inf
    best_step: int = 0
    best_state: dict | None = None
    loss: float | None = None  # mean training loss between the last two validations
    loss_sum: Tensor | float = 0.0  # on the device, so that no step waits for it
    failed: bool = False
    parts: int = 1  # in which a batch is computed, one after the other; more where memory was short

    def snapshot(self) -> dict:
        """Everything needed to go on from here, as tensors and plain values."""
        values = {name: getattr(self, name) for name in
                  ("step", "curve", "best_error", "best_step", "best_state", "loss", "loss_sum", "failed", "parts")}
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


def start(model: models.Classifier, config: FitConfig, auxiliaries: list[Auxiliary] = (), compiled: Callable | None = None
          ) -> Trial:
    """A trial before its first step: every task starts with a fresh optimiser (SGD, Nesterov momentum 0.9).

    `compiled`: a form of the model's backbone (`compile_backbone`) that computes the features in training.
    """
    trained = nn.ModuleList([model, *(auxiliary.head for auxiliary in auxiliaries)])
    groups = models.parameter_groups(trained, config.weight_decay)
    kernels = SGD_KERNELS.get(model.head.weight.device.type, {})
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True, **kernels)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm)]
    buffers = [value for layer in norms for value in layer.buffers()]
    statistics = [[value for value in buffers if value.dtype == kind] for kind in {value.dtype for value in buffers}]
    before = [[torch.empty_like(value) for value in values] for values in statistics]
    backbone = model.backbone if compiled is None else compiled
    return Trial(model, optimizer, backbone, norms, statistics, before, list(auxiliaries))


def compile_backbone(backbone: nn.Module) -> Callable[[Tensor], Tensor]:
    """A compiled form that works on the module's own parameters and buffers, with CUDA graphs on CUDA.

    It lasts as long as they stay where they are: give the module other weights by `load_state_dict`. Each batch size is
    compiled when it is first met. Random draws (dropout) are those of the module itself.
    """
    device = next(backbone.parameters()).device
    torch._dynamo.config.cache_size_limit = RECOMPILE_LIMIT  # beyond, it silently does not compile
    options = {"triton.cudagraphs": device.type == "cuda", "fallback_random": True}  # the former is mode="reduce-overhead"
    return torch.compile(backbone, dynamic=False, options=options)


def check_compiler(device: torch.device):
    """UserError where torch.compile does not work, told before any training."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:  # torch has many ways to say what is missing
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"fit.compile: cannot compile for {device.type} ({why}); it needs a C++ "
                        "compiler such as g++ with Python's headers, and Triton for CUDA; or leave fit.compile out.") from None


def train(model: models.Classifier, batches: EndlessStream, dev: Split, hyperparameters: dict, config: FitConfig,
          auxiliaries: list[Auxiliary] = (), snapshot: dict | None = None, compiled: Callable | None = None,
          on_step: Callable[[Trial], None] = lambda trial: None) -> Trial:
    """Train `model` for `config.steps` updates and return the trial, with the best weights on dev kept.

    `hyperparameters`: lr, label_smoothing, the weight of the `auxiliaries` and, in place of the config's, schedule. `snapshot`
    goes on where an earlier call was stopped. `on_step` is called after each update and may raise to stop. A loss or output
    that isn't finite ends the trial with `failed` set. `compiled` is as of `start`. Where `batches` has a share, so have the
    auxiliaries', and the other processes train on the rest of each batch at the same time.
    """
    if batches.share[1] > 1 and batches.split.device.type == "cuda":  # where alone it exists
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    trial = start(model, config, auxiliaries, compiled)
    if snapshot:
        trial.restore(snapshot)
    size = batches.size
    validations = set(validation_steps(config))
    if not trial.curve:
        _validate(trial, dev, size, config, batches.share)
    while trial.step < config.steps and not trial.failed:
        update(trial, batches, hyperparameters, config)
        if trial.step in validations:
            _validate(trial, dev, size, config, batches.share)
        on_step(trial)
    return trial


def update(trial: Trial, batches: EndlessStream, hyperparameters: dict, config: FitConfig):
    """One step of SGD at the learning rate of the trial's step."""
    warmup = warmup_steps(config, len(batches.split), batches.batch)
    schedule = hyperparameters.get("schedule", config.schedule)
    for group in trial.optimizer.param_groups:
        group["lr"] = learning_rate(trial.step, config.steps, warmup, hyperparameters["lr"], schedule)
    if not (trial.model.training and trial.model.backbone.training):  # setting it takes longer than looking
        trial.model.train()
    _copy(trial.before, trial.statistics)
    while True:
        try:
            loss = _gradients(trial, batches, hyperparameters, config)
            break
        except RuntimeError as error:
            smallest = batches.batch // batches.share[1] // (2 * trial.parts)
            if not _out_of_memory(error) or smallest < LEAST_SHARE:
                raise
            if batches.share[1] > 1 and batches.split.device.type == "cuda":  # the others wait for its batch norms
                raise UserError(f"batches of {batches.batch} images do not fit into the memory of {batches.share[1]} devices: "
                                "take more processes, a smaller fit.max_batch, or parallel=trials.") from None
        _copy(trial.statistics, trial.before)
        trial.parts *= 2
        _retry(f"batches of {batches.batch} images take more memory than there is; going on in {trial.parts} parts, "
               "of which batch norm sees one at a time")
    if batches.share[1] > 1:
        statistics = [value for values in trial.statistics for value in values if value.is_floating_point()]
        for value in statistics:
            value /= batches.share[1]  # where batch norm sees only its share, the mean over all is kept
        parallel.add_up([loss, *(parameter.grad for group in trial.optimizer.param_groups for parameter in group["params"]
                                 if parameter.grad is not None), *statistics])
    trial.optimizer.step()
    trial.loss_sum = trial.loss_sum + loss
    trial.step += 1


def _gradients(trial: Trial, batches: EndlessStream, hyperparameters: dict, config: FitConfig) -> Tensor:
    """Leave the gradient of the step's loss in the parameters; returns that of the current task alone."""
    trial.optimizer.zero_grad(set_to_none=True)
    # A compiled backbone's CUDA graphs write features and gradients into memory of their own, and reuse it from here on. That
    # is safe: nothing of the step before is alive, its gradients having just been dropped. Within the step they aren't reused:
    # PyTorch sees that gradients are alive when the next part or auxiliary task comes, and records graphs beside them.
    if trial.backbone is not trial.model.backbone and batches.split.device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()
    loss = _backward(trial, trial.model.head, batches, 1.0, hyperparameters, config)
    for auxiliary in trial.auxiliaries:  # one after the other: memory for one batch, not for all
        with _statistics_kept(trial.norms):
            _backward(trial, auxiliary.head, auxiliary.batches, hyperparameters["auxiliary_weight"], hyperparameters, config)
    return loss


def _backward(trial: Trial, head: nn.Module, batches: EndlessStream, weight: float, hyperparameters: dict,
              config: FitConfig) -> Tensor:
    """Add the gradient of `weight` x the mean loss over the step's batch; returns that mean, or what a share adds to it."""
    images, labels = batches(trial.step)
    total = torch.zeros((), device=batches.split.device)
    if isinstance(trial.model.backbone, models.Foreign):  # may have dropout, which draws from torch's global generators
        torch.manual_seed(int(seeds("dropout", *batches.key, trial.step).generate_state(1)[0]))
    for part, targets in zip(images.tensor_split(trial.parts), labels.tensor_split(trial.parts), strict=True):
        with autocast(config, batches.split.device):
            logits = head(trial.backbone(part))
        loss = loss_function(batches.split.meta["kind"], logits.float(), targets, hyperparameters["label_smoothing"],
                             config.multi_label_loss) * (len(part) / batches.batch)
        (weight * loss).backward()
        total += loss.detach()
    return total


def _copy(targets: list[list[Tensor]], sources: list[list[Tensor]]):
    """In an operation for each type of number, however many tensors there are."""
    for target, source in zip(targets, sources, strict=True):
        torch._foreach_copy_(target, source)


@contextmanager
def _statistics_kept(norms: list[nn.Module]):
    """Batch norm uses the batch's own statistics, and its running ones, which predictions will use, stay the current task's."""
    layers = [layer for layer in norms if layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def _validate(trial: Trial, dev: Split, size: int, config: FitConfig, share: tuple[int, int]):
    """Add a point to the curve; keep the weights if it's the lowest; end the trial when something isn't finite."""
    if trial.step:
        trial.loss = float(trial.loss_sum) / (trial.step - trial.curve[-1][0])
        trial.loss_sum = 0.0
    error = evaluate(trial.model, dev, size, config, share)
    trial.curve.append([trial.step, error])
    if error is None or not math.isfinite(trial.loss or 0.0):
        trial.failed = True
    elif error < trial.best_error:
        trial.best_error, trial.best_step = error, trial.step
        trial.best_state = {name: value.detach().clone() for name, value in trial.model.state_dict().items()}
