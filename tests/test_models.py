import pytest
import torch
from torch import nn

from nevis_lite import models
from nevis_lite.config import UserError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("resnet34", 21_276_992),
        ("resnet18", 11_168_832),
        ("resnet34_imagenet", 21_284_672),
        ("resnet18_imagenet", 11_176_512),
    ],
)
def test_parameters_of_the_reference(name, parameters):
    with torch.device("meta"):
        backbone = models.MODELS[name]()
    assert sum(p.numel() for p in backbone.parameters()) == parameters


@pytest.mark.parametrize("name", models.MODELS)
def test_shapes(name):
    classifier = models.build(name, 7, seeded()).eval()
    images = torch.rand(2, 3, 32, 32)
    features = classifier.backbone(images)
    assert features.shape == (2, classifier.backbone.num_features)
    assert classifier(images).shape == (2, 7)
    torch.testing.assert_close(classifier(images), classifier.head(features))


@pytest.mark.parametrize("name, side", [("resnet18", 8), ("resnet18_imagenet", 2), ("resnet8", 8)])
def test_side_of_the_last_map_at_64_pixels(name, side):
    with torch.device("meta"):
        backbone = models.MODELS[name]()
        backbone.avgpool = nn.Identity()
        assert backbone(torch.empty(1, 3, 64, 64)).shape == (1, backbone.num_features * side**2)


def test_unknown_name():
    with pytest.raises(UserError, match="model.name: unknown model resnet50; did you mean resnet"):
        models.build("resnet50")


def test_weights_are_a_function_of_the_generator():
    state = torch.get_rng_state()
    first, again, other = (models.build("resnet8", 10, seeded(seed)) for seed in (3, 3, 4))
    backbone = models.build("resnet8", None, seeded(3))
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, first.backbone.state_dict()[key]), key
    assert not torch.equal(first.head.weight, other.head.weight)
    assert all(p.requires_grad and p.device.type == "cpu" for p in first.parameters())


def test_initial_values():
    model = models.build("resnet18", 1000, seeded())
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            sigma = layer.weight[0].numel() ** -0.5
            assert layer.weight.abs().max() <= 2 * sigma * 1.0001
            if layer.weight.numel() > 30_000:
                assert layer.weight.std().item() == pytest.approx(0.8796 * sigma, rel=0.015)
            assert layer.bias is None or not layer.bias.any()
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all() and not layer.bias.any()
            assert (layer.running_var == 1).all() and not layer.running_mean.any()
            assert layer.num_batches_tracked == 0


def test_initialise_makes_a_fresh_head():
    model = models.build("resnet8", 5, seeded(1))
    model.head = models.initialise(nn.Linear(64, 3), seeded(2))
    assert torch.equal(model.head.weight, models.initialise(nn.Linear(64, 3), seeded(2)).weight)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 3)


def test_decay_only_on_conv_and_linear_weights():
    model = models.build("resnet18", 10, seeded())
    decayed, others = models.parameter_groups(model, 1e-4)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [id(p) for p in decayed["params"]] == [id(layer.weight) for layer in layers]
    assert (decayed["weight_decay"], others["weight_decay"]) == (1e-4, 0)
    assert len(layers) == 21  # 17 convolutions of 3x3, 3 projections, the head
    assert len(others["params"]) == 2 * 20 + 1  # scale and offset of 20 batch norms, the bias of the head
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    torch.optim.SGD(models.parameter_groups(model, 1e-4), lr=0.1, momentum=0.9, nesterov=True)
