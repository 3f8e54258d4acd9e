"""What the steps of a run cost, in FLOPs = 2 x multiply-adds, and the ledger of what was spent.

Convolutions and matrix products are counted, taps on the padding included; biases, batch norm, activations, pooling and
the optimiser are not: they are small beside them. A ledger is a plain dict, phase -> FLOPs, fit for JSON.
"""

import copy

import torch
from ptflops import get_model_complexity_info
from ptflops.aten_ops import conv_flop, matmul_flop
from torch import nn

PHASES = ("train", "validate", "select", "predict")

# ptflops counts the addition of a bias as a multiply-add. PyTorch's own FlopCounterMode does not, and neither do we.
_WITHOUT_BIAS = {
    torch.ops.aten.addmm: lambda args, out: matmul_flop(args[1:3], out),
    torch.ops.aten.convolution: lambda args, out: conv_flop((*args[:2], None, *args[3:]), out),
}


def forward_flops(module: nn.Module, image_size: int, channels: int = 3) -> int:
    """FLOPs of one forward pass of one image (channels, image_size, image_size).

    The module is left as it is. Raises ValueError when it cannot read such an image.
    """
    # A copy, because ptflops puts the module in eval mode and leaves its hooks; on meta, because only shapes matter.
    multiply_adds, _ = get_model_complexity_info(
        copy.deepcopy(module).to("meta"),
        (channels, image_size, image_size),
        as_strings=False,
        print_per_layer_stat=False,
        custom_modules_hooks=_WITHOUT_BIAS,
        backend="aten",
    )
    if multiply_adds is None:
        name = type(module).__name__
        raise ValueError(f"{name} cannot read an image of {channels} x {image_size} x {image_size} (channels first).")
    return 2 * int(multiply_adds)


def training_flops(module: nn.Module, image_size: int) -> int:
    """FLOPs of a forward and a backward pass of one RGB image, all weights trained.

    Every convolution and linear layer is computed three times: its output, the gradient of its weight and that of its
    input. Only the first convolution, which must be the one that reads the image, needs no gradient of its input.
    """
    stem = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    return 3 * forward_flops(module, image_size) - forward_flops(stem, image_size)


def knn_flops(num_queries: int, num_references: int, num_features: int) -> int:
    """FLOPs of the inner products of every query with every reference, each of `num_features` values."""
    return 2 * num_queries * num_references * num_features


def add(*ledgers: dict) -> dict:
    """The sum of any number of ledgers, as a ledger with all four phases; a phase that one lacks counts as 0."""
    return {phase: sum(int(ledger.get(phase, 0)) for ledger in ledgers) for phase in PHASES}


def total(ledger: dict) -> int:
    """FLOPs of all phases together."""
    return sum(ledger.values())
