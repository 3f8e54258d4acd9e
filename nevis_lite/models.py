"""The residual networks of the benchmark, their heads and their initial weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet34": partial(_resnet, [3, 4, 6, 3], imagenet_stem=False),
    "resnet18": partial(_resnet, [2, 2, 2, 2], imagenet_stem=False),
    "resnet34_imagenet": partial(_resnet, [3, 4, 6, 3], imagenet_stem=True),
    "resnet18_imagenet": partial(_resnet, [2, 2, 2, 2], imagenet_stem=True),
    "resnet8": _resnet8,
}


class Classifier(nn.Module):
    """A backbone and one linear layer: images (B, 3, S, S) -> logits (B, num_classes)."""

    def __init__(self, backbone: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


def build(name: str, num_classes: int | None = None, generator: torch.Generator | None = None) -> nn.Module:
    """A freshly initialised network on the CPU.

    Without `num_classes` it is the backbone, images (B, 3, S, S) -> features (B, D) with D in `num_features`; with it a
    `Classifier` that gives logits (B, num_classes). The weights depend on `generator` alone (see `initialise`), and a
    backbone gets the same ones with and without a head. Raises ValueError for a name that is not in `MODELS`.
    """
    if name not in MODELS:
        raise ValueError(f"Unknown model {name!r}; the known ones are {', '.join(MODELS)}.")
    # On the meta device the initial draws of the torch layers, all replaced below, neither cost time nor touch an RNG.
    with torch.device("meta"):
        model = MODELS[name]()
        if num_classes is not None:
            model = Classifier(model, num_classes)
    return initialise(model.to_empty(device="cpu"), generator)


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
    parameters = list(model.parameters())
    return [
        # Only the weights of convolutions and linear layers have more than one dimension.
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
