import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nevis_lite import flops, models


def on_meta(name: str, num_classes: int | None = None) -> nn.Module:
    """A model without weights: costs depend on shapes only."""
    with torch.device("meta"):
        backbone = models.MODELS[name]()
        return backbone if num_classes is None else models.Classifier(backbone, nn.Linear(backbone.num_features, num_classes))


def counted_by_torch(module: nn.Module, image_size: int, backward: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        out = module(torch.empty(1, 3, image_size, image_size, device="meta"))
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "module, expected",
    [
        (nn.Conv2d(3, 16, 3, padding=1), 2 * 8 * 8 * 16 * 3 * 9),
        (nn.Conv2d(3, 6, 3, stride=2, groups=3, bias=False), 2 * 3 * 3 * 6 * 9),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), 2 * 192 * 10),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10, bias=False)), 2 * 192 * 10),
    ],
)
def test_hand_counts(module, expected):
    assert flops.forward_flops(module, 8) == expected


@pytest.mark.parametrize(
    "name, size, multiply_adds",
    [
        ("resnet34", 64, 4_637_589_504),
        ("resnet18", 64, 2_221_670_400),
        ("resnet34_imagenet", 64, 299_040_768),
        ("resnet18_imagenet", 64, 148_045_824),
        ("vgg", 64, 1_290_534_912),
        ("resnet8", 32, 3_125_248),
    ],
)
def test_backbones(name, size, multiply_adds):
    assert flops.forward_flops(on_meta(name), size) == 2 * multiply_adds


@pytest.mark.parametrize("name", models.MODELS)
def test_agrees_with_torch(name):
    size = 32 if name == "resnet8" else 64
    model = on_meta(name, 10)
    assert flops.forward_flops(model, size) == counted_by_torch(model, size, backward=False)
    training = counted_by_torch(model, size, backward=True)
    assert flops.training_flops(model, size) == pytest.approx(training, rel=0.005)
    assert training / flops.forward_flops(model, size) < 3


def test_grayscale():
    assert flops.forward_flops(nn.Conv2d(1, 4, 1), 5, channels=1) == 2 * 25 * 4


def test_the_module_is_left_as_it_was(capsys, recwarn):
    model = models.build("resnet8", 10).train()
    model.head.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flops.training_flops(model, 32)
    assert model.training and model.backbone.bn1.training and not model.head.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert capsys.readouterr() == ("", "") and not recwarn


def test_wrong_image():
    with pytest.raises(ValueError, match="Sequential cannot read an image of 3 x 9 x 9"):
        flops.forward_flops(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), 9)


def test_knn():
    assert flops.knn_flops(5, 7, 11) == 2 * 5 * 7 * 11


def test_ledgers():
    ledger = flops.add({"train": 10**19, "select": 2}, {"train": 1, "validate": 3}, {})
    assert ledger == {"train": 10**19 + 1, "validate": 3, "select": 2, "predict": 0}
    assert tuple(ledger) == flops.PHASES and all(type(value) is int for value in ledger.values())
    assert flops.total(ledger) == 10**19 + 6
    assert flops.total(flops.add()) == 0
