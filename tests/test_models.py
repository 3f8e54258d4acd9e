import sys

import pytest
import safetensors.torch
import torch
import torchvision
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
        ("vgg", 7_785_664),
    ],
)
def test_parameters_of_the_reference(name, parameters):
    with torch.device("meta"):
        backbone = models.MODELS[name]()
    assert sum(p.numel() for p in backbone.parameters() if p.requires_grad) == parameters


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


def test_the_norms_of_vgg_have_an_offset_and_no_scale():
    model = models.build("vgg", 3, seeded())
    optimizer = torch.optim.SGD(models.parameter_groups(model, 1e-4), lr=0.1, momentum=0.9, nesterov=True)
    images = torch.rand(4, 3, 16, 16, generator=seeded())
    model(images).square().sum().backward()
    optimizer.step()
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 11
    assert all((norm.weight == 1).all() and norm.bias.any() and norm.running_mean.any() for norm in norms)
    model.eval()  # the other images of a batch have no say
    torch.testing.assert_close(model(images[:1]), model(images)[:1])


def test_unknown_name():
    with pytest.raises(UserError, match="model.name: unknown model resnet50; did you mean resnet"):
        models.build("resnet50")


def test_names_of_other_libraries():
    with pytest.raises(UserError, match="did you mean torchvision/resnet50"):
        models.check_name("torchvision/resnet50x")
    with pytest.raises(UserError, match=r"search.model: unknown model timm/.*, \.\.\.\.$"):
        models.check_name("timm/none such at all", "search.model")


@pytest.mark.parametrize("name, num_features", [("torchvision/resnet18", 512), ("torchvision/mobilenet_v3_small", 1024),
                                                ("torchvision/vgg11", 4096), ("timm/resnet10t", 512),
                                                pytest.param("timm/dm_nfnet_f0", 3072, marks=pytest.mark.slow)])
def test_networks_of_other_libraries(name, num_features):
    state = torch.get_rng_state()
    first, again = (models.build(name, 5, seeded(1)).eval() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        assert first.backbone(images).shape == (2, num_features) and first(images).shape == (2, 5)
        assert torch.equal(first(images), again(images))
        assert not torch.equal(first(images), models.build(name, 5, seeded(2)).eval()(images))


def test_a_network_of_torchvision_sees_what_it_was_trained_on():
    net = torchvision.models.resnet18(weights=None).eval()
    pixels = torch.rand(2, 3, 64, 64)
    usual = torchvision.transforms.functional.normalize(pixels, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    backbone = models.build("torchvision/resnet18").eval()
    backbone.net.load_state_dict({name: value for name, value in net.state_dict().items() if not name.startswith("fc.")})
    net.fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(backbone(pixels * 2 - 1), net(usual), rtol=1e-4, atol=1e-4)


# ---- pretrained weights


@pytest.fixture
def source():
    """A backbone whose statistics are not the initial ones."""
    net = models.build("resnet8", None, seeded(7)).train()
    with torch.no_grad():
        net(torch.rand(8, 3, 16, 16))
    return net.eval()


def stored(source, path, how):
    state = source.state_dict()
    if how == "predictor":
        content = {"model": "resnet8", "flops": 123, "state": {f"backbone.{key}": value for key, value in state.items()}
                   | {"head.weight": torch.zeros(3, 64), "head.bias": torch.zeros(3)}}
    elif how == "parallel":
        content = {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in state.items()}}
    else:
        content = state
    if how == "safetensors":
        safetensors.torch.save_file(state, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    torch.save(content, path)
    return path


def test_what_a_file_says_of_its_compute_is_believed_if_it_is_a_count(source, tmp_path):
    for flops, expected in ((5, 5), (-5, None), (float("nan"), None), ("5", None), (torch.tensor(5), None), (True, None)):
        torch.save({"state": source.state_dict(), "flops": flops}, tmp_path / "w.pt")
        assert models.pretrained("resnet8", str(tmp_path / "w.pt"))[1] == expected
    torch.save({**source.state_dict(), 1: torch.zeros(1)}, tmp_path / "w.pt")
    assert models.pretrained("resnet8", str(tmp_path / "w.pt"))[1] is None


@pytest.mark.parametrize("how", ["plain", "predictor", "parallel", "safetensors"])
def test_pretrained_weights_give_the_features_of_their_source(source, tmp_path, capsys, how):
    path = stored(source, tmp_path / "weights.pt", how)
    state, spent = models.pretrained("resnet8", str(path))
    assert spent == (123 if how == "predictor" else None)
    copy = models.build("resnet8", None, seeded(1))
    copy.load_state_dict(state)
    images = torch.rand(4, 3, 16, 16)
    assert torch.equal(copy.eval()(images), source(images))
    count, said = len(source.state_dict()), capsys.readouterr().out
    assert f"{count} of {count} tensors matched" in said
    assert ("left out: head.weight, head.bias" in said) == (how == "predictor")


def test_weights_of_torchvision_are_read_from_its_own_file(tmp_path):
    net = torchvision.models.resnet18(weights=None).eval()
    torch.save(net.state_dict(), tmp_path / "resnet18.pth")
    backbone = models.build("torchvision/resnet18").eval()
    backbone.load_state_dict(models.pretrained("torchvision/resnet18", str(tmp_path / "resnet18.pth"))[0])
    loaded = backbone.net.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in net.state_dict().items() if "fc" not in name)


def test_weights_that_do_not_fit_are_refused(source, tmp_path):
    state = source.state_dict()
    cases = {
        "other.pt": (models.build("resnet18", None, seeded()).state_dict(), r"conv1.weight has the shape \(64, 3, 3, 3\)"),
        "bare.pt": ({key: value for key, value in state.items() if "running" not in key}, "lacks .* such as bn1.running_mean"),
        "empty.pt": ({"epoch": 1}, "holds no state dict"),
        "list.pt": ([1, 2], "holds no state dict"),
        "larger.pt": (state | {f"layer3.1.{key}": value for key, value in state.items() if "layer1" in key}, "larger network"),
        "nan.pt": (state | {"bn1.weight": torch.full((16,), torch.nan)}, "bn1.weight has values that are not finite"),
        "code.pt": (models.build("torchvision/resnet18"), "cannot be read"),
    }
    for name, (content, words) in cases.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match=words) as error:
            models.pretrained("resnet8", str(tmp_path / name))
        assert name in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "text.pt").write_text("no tensors")
    for weights, words in ((tmp_path / "text.pt", "cannot be read"), (tmp_path / "none.pt", "no such file")):
        with pytest.raises(UserError, match=words):
            models.pretrained("resnet8", str(weights))
    with pytest.raises(UserError, match="resnet8 has none"):
        models.pretrained("resnet8", "published")


def test_a_missing_library_is_named_with_its_command(tmp_path, monkeypatch):
    for module in ("timm", "safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="pip install timm"):
        models.build("timm/dm_nfnet_f0")
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="pip install safetensors"):
        models.pretrained("resnet8", str(tmp_path / "a.safetensors"))


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


@pytest.mark.parametrize("num_classes", [None, 3])
@pytest.mark.parametrize("name", ["resnet8", "vgg", "torchvision/resnet18"])
def test_a_network_of_given_weights_is_the_one_they_come_from(name, num_classes):
    original = models.build(name, num_classes, torch.Generator().manual_seed(1))
    original.train()(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)))  # so that batch norm has statistics
    before = torch.random.get_rng_state()
    again = models.with_state(name, original.state_dict(), num_classes)
    if name in models.MODELS:
        assert torch.equal(torch.random.get_rng_state(), before)
    assert type(again) is type(original) and not any(parameter.is_meta for parameter in again.parameters())
    assert torch.equal(again.eval()(torch.ones(2, 3, 32, 32)), original.eval()(torch.ones(2, 3, 32, 32)))
    with torch.no_grad():  # nor do they share memory
        next(again.parameters()).zero_()
    assert next(original.parameters()).any()


def test_a_backbone_on_the_meta_device_is_nobody_elses():
    models.on_meta("resnet8").conv1 = torch.nn.Identity()
    assert isinstance(models.on_meta("resnet8").conv1, torch.nn.Conv2d)
    assert isinstance(models.build("resnet8").conv1, torch.nn.Conv2d)
