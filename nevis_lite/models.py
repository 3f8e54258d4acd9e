"""The networks of the benchmark, their heads, and their weights: initial ones, or pretrained ones from a file or a library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from nevis_lite.config import UserError, nearest, need
from nevis_lite.run_folder import load_state


def _resnet(blocks: list[int], imagenet_stem: bool) -> ResNet:
    """A ResNet of basic blocks, widths 64 to 512, that ends in the global mean over space.

    The network of the paper keeps the resolution of its 64-pixel images in the stem (3x3, stride 1, no pooling). With
    torchvision's ImageNet stem (7x7, stride 2, then max-pooling) it is about 15 times cheaper and a different network.
    """
    net = ResNet(BasicBlock, blocks)
    if not imagenet_stem:
        net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    net.num_features = 512
    return net


def _resnet8() -> ResNet:
    """Three narrow stages behind a stride-2 stem: 3.1 M multiply-adds at 32 pixels, so that a CPU can train it."""
    net = _resnet([1, 1, 1, 1], imagenet_stem=False)
    net.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
    net.bn1 = nn.BatchNorm2d(16)
    net.inplanes = 16
    net.layer1 = net._make_layer(BasicBlock, 16, 1)
    net.layer2 = net._make_layer(BasicBlock, 32, 1, stride=2)
    net.layer3 = net._make_layer(BasicBlock, 64, 1, stride=2)
    net.layer4 = nn.Identity()
    net.num_features = 64
    return net


def _vgg() -> nn.Sequential:
    """The VGG of the reference: 11 convolutions of 3x3, with stride 2 where the width doubles, and the global mean."""
    layers = []
    for before, width in pairwise([3, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512]):
        norm = nn.BatchNorm2d(width)
        norm.weight.requires_grad_(False)  # stays 1: this batch norm has an offset but no scale
        layers += [nn.Conv2d(before, width, 3, stride=2 if width == 2 * before else 1, padding=1), norm, nn.ReLU(inplace=True)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.num_features = 512
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet34": partial(_resnet, [3, 4, 6, 3], imagenet_stem=False),
    "resnet18": partial(_resnet, [2, 2, 2, 2], imagenet_stem=False),
    "resnet34_imagenet": partial(_resnet, [3, 4, 6, 3], imagenet_stem=True),
    "resnet18_imagenet": partial(_resnet, [2, 2, 2, 2], imagenet_stem=True),
    "vgg": _vgg,
    "resnet8": _resnet8,
}


class Classifier(nn.Module):
    """A backbone and one linear layer: images (B, 3, S, S) -> logits (B, num_classes)."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


def build(name: str, num_classes: int | None = None, generator: torch.Generator | None = None) -> nn.Module:
    """A freshly initialised network on the CPU.

    Without `num_classes` it is the backbone, images (B, 3, S, S) -> features (B, D) with D in `num_features`; with it a
    `Classifier` that gives logits (B, num_classes). The weights depend on `generator` alone (see `initialise`), and a
    backbone gets the same ones with and without a head. UserError for a name that `check_name` refuses.
    """
    check_name(name)
    if name in MODELS:
        backbone = initialise(on_meta(name).to_empty(device="cpu"), generator)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            backbone = _of_library(name)
    if num_classes is None:
        return backbone
    return Classifier(backbone, linear_head(backbone.num_features, num_classes, generator))


def with_state(name: str, state: dict[str, Tensor], num_classes: int | None = None) -> nn.Module:
    """A network as of `build` that has the weights and statistics of `state`, and none are drawn for it, which takes long."""
    if name not in MODELS:
        net = build(name, num_classes)
    else:
        net = on_meta(name)
        if num_classes is not None:
            net = Classifier(net, nn.Linear(net.num_features, num_classes, device="meta"))
        net.to_empty(device="cpu")
    net.load_state_dict(state)
    return net


def on_meta(name: str) -> nn.Module:
    """The backbone without weights, on the meta device, for those who want to know shapes."""
    return copy.deepcopy(_skeleton(MODELS[name])) if name in MODELS else build(name).to("meta")


@cache
def _skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    """A network on the meta device, where the first draws of torch's layers neither take time nor touch an RNG."""
    with torch.device("meta"):
        return make()


def linear_head(num_features: int, num_classes: int, generator: torch.Generator | None = None) -> nn.Linear:
    """A freshly initialised head on the CPU."""
    with torch.device("meta"):
        head = nn.Linear(num_features, num_classes)
    return initialise(head.to_empty(device="cpu"), generator)


def check_name(name: str, key: str = "model.name"):
    """UserError, naming the config's `key`, unless `name` is one of MODELS, torchvision/<model> or timm/<model>."""
    library, slash, model = name.rpartition("/")
    if library == "torchvision":
        known = torchvision.models.list_models(torchvision.models)
    elif library == "timm":
        known = need("timm", "timm", f"{key}={name}").list_models()
    else:
        slash, model, known = "", name, list(MODELS)
    if model not in known:
        raise UserError(f"{key}: unknown model {name}{nearest(model, known, slash and library + slash)}.")


class Foreign(nn.Module):
    """A network of another library: images (B, 3, S, S) in [-1, 1] -> features (B, D), with D in `num_features`.

    It sees what it was trained on: colours minus their `mean`, over their `sd`.
    """

    def __init__(self, net: nn.Module, num_features: int, mean: tuple[float, ...], sd: tuple[float, ...]) -> None:
        super().__init__()
        self.net, self.num_features = net, num_features
        mean, sd = (torch.tensor(values).view(1, 3, 1, 1) for values in (mean, sd))
        self.register_buffer("scale", 0.5 / sd, persistent=False)
        self.register_buffer("shift", (0.5 - mean) / sd, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images * self.scale + self.shift)


def _of_library(name: str, published: bool = False) -> nn.Module:
    """The backbone of a torchvision or timm model, with its own initial weights, or the `published` ones, which it downloads.

    What is cut off as its head is its last linear layer.
    """
    library, model = name.split("/")
    try:
        if library == "timm":
            net = need("timm", "timm", name).create_model(model, pretrained=published, num_classes=0)
            num_features = getattr(net, "head_hidden_size", None) or net.num_features  # the former where both differ
            mean, sd = net.pretrained_cfg["mean"], net.pretrained_cfg["std"]
        else:
            net = torchvision.models.get_model(model, weights="DEFAULT" if published else None)
            heads = [key for key, layer in net.named_modules() if isinstance(layer, nn.Linear)]
            if not heads:
                raise UserError(f"{name}: has no linear layer at its end that could be cut off; take another network.")
            head = heads[-1]
            num_features, mean, sd = net.get_submodule(head).in_features, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
            net.set_submodule(head, nn.Identity())
    except (OSError, RuntimeError) as error:  # huggingface_hub and urllib both raise kinds of OSError
        raise UserError(f"model.weights=published: the weights of {name} cannot be had ({error}).") from None
    return Foreign(net, num_features, mean, sd)


def pretrained(name: str, weights: str) -> tuple[dict, int | None]:
    """The state dict of backbone `name` from a file, or from its library if `weights` is "published"; says what matched.

    With it the FLOPs that went into it, if the file tells: a run's predictor does.

    The file is a .safetensors, or what `torch.save` wrote: a state dict, a checkpoint with one inside, or a run's predictor.
    Its head is left out. All parameters and the statistics of batch norm must be there, finite, in their shapes: UserError
    otherwise.
    """
    if weights == "published":
        if "/" not in name:
            raise UserError(f"model.weights=published: {name} has none; torchvision/... and timm/... models do.")
        state = _of_library(name, published=True).state_dict()
        print(f"pretrained weights: those published for {name}, {len(state)} tensors")
        return state, None
    (found, spent), wanted = _read_weights(Path(weights)), build(name).state_dict()
    # A name may be under `backbone.` (ours), `module.` (DataParallel), or as the other library has it.
    aliases = {key: (key, f"backbone.{key}", f"module.{key}", key.removeprefix("net.")) for key in wanted}
    matched = {key: next((alias for alias in names if alias in found), None) for key, names in aliases.items()}
    lacking = [key for key, alias in matched.items() if alias is None and not key.endswith("num_batches_tracked")]
    if lacking:
        raise UserError(f"{weights}: is not of {name}; it lacks {len(lacking)} of {len(wanted)} tensors, such as {lacking[0]}.")
    for key, alias in matched.items():
        if alias and found[alias].shape != wanted[key].shape:
            raise UserError(f"{weights}: is not of {name}; {alias} has the shape {tuple(found[alias].shape)} instead of "
                            f"{tuple(wanted[key].shape)}.")
        if alias and not found[alias].isfinite().all():
            raise UserError(f"{weights}: {alias} has values that are not finite; its training diverged, take other weights.")
    rest = [key for key in found if key not in matched.values()]
    more_than_a_head = len({key.rpartition(".")[0] for key in rest}) > 1
    if more_than_a_head and {_part(key) for key in rest} & {_part(key) for key in wanted}:
        raise UserError(f"{weights}: is not of {name}, but of a larger network; it also has {rest[0]}.")
    left_out = f"; left out: {', '.join(rest[:4])}{' ...' if len(rest) > 4 else ''}" if rest else ""
    state = {key: found[alias] if alias else wanted[key] for key, alias in matched.items()}
    count = sum(alias is not None for alias in matched.values())
    print(f"pretrained weights: {weights}, {count} of {len(wanted)} tensors matched{left_out}")
    return state, spent


def _part(key: str) -> str:
    """The part of a network that a tensor belongs to, such as layer1."""
    for prefix in ("backbone.", "module.", "net."):
        key = key.removeprefix(prefix)
    return key.partition(".")[0]


def _read_weights(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """The tensors of a file by name, and the FLOPs that a run's predictor tells."""
    if not path.is_file():
        raise UserError(f"model.weights={path}: no such file.")
    if path.suffix == ".safetensors":
        safetensors = need("safetensors.torch", "safetensors", str(path))
        try:
            return safetensors.load_file(path), None
        except Exception as error:  # its own error is no kind of OSError or ValueError
            raise UserError(f"{path}: cannot be read ({error}).") from None
    content = load_state(path, advice="take a file that holds a state dict")
    spent = content.get("flops") if isinstance(content, dict) else None
    spent = spent if type(spent) is int and spent >= 0 else None
    for key in ("state", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {key: value for key, value in items if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{path}: holds no state dict.")
    return tensors, spent


def initialise(module: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Give every layer of a module on the CPU its initial values, in place, and return the module.

    Weights of convolutions and linear layers: normal with sigma = 1/sqrt(fan_in), cut at 2 sigma and not rescaled, so
    that the standard deviation is 0.8796/sqrt(fan_in); biases 0; batch norm: scale 1 (also the last one of a residual
    branch), offset 0, empty statistics. This is the reference implementation's scheme (the defaults of dm-haiku). All
    draws come from `generator`, in the order of `module.modules()`; None is torch's global generator.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            sigma = layer.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(layer.weight, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
    return module


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for `torch.optim.SGD`: conv and linear weights with `weight_decay`, biases and batch norm without.

    Source: the reference implementation's optimiser, which adds the decay to the gradient as `torch.optim.SGD` does.
    """
    decayed = {layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    return [
        {"params": [p for p in model.parameters() if p in decayed], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p not in decayed], "weight_decay": 0.0},
    ]
