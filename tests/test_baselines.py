import dataclasses
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from sklearn.neighbors import KNeighborsClassifier

from nevis_lite import baselines, cache, config, fit, models, stream
from nevis_lite.baselines import BASELINES, Past, View, choose, initial_model, knn_votes
from nevis_lite.config import BaselineConfig, UserError
from nevis_lite.data import Split
from nevis_lite.datasets import SPLITS, DataSet
from nevis_lite.search import random_search
from nevis_lite.stream import Access

CPU = torch.device("cpu")


def settings(root="data", **select) -> config.Config:
    return config.from_dict({"model": {"name": "resnet8", "image_size": 16}, "data": {"dir": str(root)}, "select": select})


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Four tasks on the same 60 images a split: three classes that differ in brightness. With them their caches and root."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split in SPLITS:
        for number in range(60):
            folder = root / "x" / split / f"c{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 120, (8, 8, 3)) + 60 * (number % 3)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    found = stream.load([{"folder": str(root / "x"), "year": year} for year in (2000, 2001, 2002, 2003)]).tasks
    folder = cache.prepare(found[0].dataset, config.DataConfig(dir=str(root)))
    return [dataclasses.replace(task, kind="single_label", num_classes=3) for task in found], folder, root


def view_of(tasks, now=3, memory=(), **select) -> View:
    found, folder, root = tasks
    access = Access(now, lambda task, name: Split(folder, name, CPU))
    return View(found[now], access, list(memory), settings(root, **select), CPU, backbone_flops=1000, num_features=64)


def remember(tasks, index: int, folder, spoil: bool = False) -> Past:
    """A stored predictor of random weights; a spoilt one tells no image from another."""
    model = models.build("resnet8", 3, torch.Generator().manual_seed(100 + index))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean += 0.01 * (index + 1)
    if spoil:
        model.backbone.conv1.weight.data.zero_()
    torch.save({"state": model.state_dict()}, folder / f"{index}.pt")
    return Past(index, tasks[0][index], 60, 0.5, folder / f"{index}.pt")


def assert_same(a: dict, b: dict):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- nearest neighbours


@pytest.mark.parametrize("dimensions, offset", [(2, 0.0), (64, 0.0), (64, 1000.0)])
def test_votes_are_those_of_sklearn(dimensions, offset):
    rng = np.random.default_rng(0)
    references, queries = (rng.normal(size=(count, dimensions)) + offset for count in (200, 1100))  # several parts of queries
    labels = rng.integers(0, 7, 200)
    references, queries = references.astype(np.float32), queries.astype(np.float32)
    expected = KNeighborsClassifier(5).fit(references, labels).predict_proba(queries)
    found = knn_votes(torch.from_numpy(references), torch.from_numpy(labels), torch.from_numpy(queries), 5, 7)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("count", [1, 511, 1030])
def test_votes_are_to_the_bit_those_of_one_product_also_where_references_are_equal(count):
    rng = np.random.default_rng(0)
    references = torch.from_numpy(rng.normal(size=(150, 64)).astype(np.float32))[torch.from_numpy(rng.integers(0, 150, 600))]
    queries = torch.cat([references[:count // 2], torch.from_numpy(rng.normal(size=(count - count // 2, 64)))]).double()
    labels = torch.from_numpy(rng.integers(0, 7, 600))
    references64 = references.double()
    squares = (references64 * references64).sum(1) - 2 * queries @ references64.T
    votes = torch.eye(7, dtype=torch.float64)[labels[squares.topk(5, largest=False).indices]].mean(1)
    assert torch.equal(knn_votes(references, labels, queries, 5, 7), votes)


def test_votes_for_several_labels_are_those_of_sklearn():
    rng = np.random.default_rng(0)
    references, queries = rng.normal(size=(80, 4)), rng.normal(size=(50, 4))
    labels = rng.integers(0, 2, (80, 6), dtype=np.uint8)
    parts = KNeighborsClassifier(5).fit(references, labels).predict_proba(queries)
    found = knn_votes(torch.from_numpy(references), torch.from_numpy(labels), torch.from_numpy(queries), 5, 6)
    np.testing.assert_allclose(found, np.stack([part[:, 1] for part in parts], axis=1), atol=1e-12)


def test_classes_that_no_reference_has_get_no_votes():
    references = torch.tensor([[0.0], [1.0], [2.0]])
    found = knn_votes(references, torch.tensor([3, 3, 1]), torch.tensor([[0.1]]), 2, 6)
    assert found.tolist() == [[0, 0, 0, 1, 0, 0]]


def test_fewer_references_than_neighbours_all_vote():
    references, queries = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([[0.0], [9.0]])
    found = knn_votes(references, torch.tensor([0, 1, 1]), queries, 5, 2)
    np.testing.assert_allclose(found, [[1 / 3, 2 / 3]] * 2)
    assert knn_votes(references[:1], torch.tensor([1]), queries, 5, 2).tolist() == [[0, 1], [0, 1]]


def test_one_neighbour_is_the_nearest():
    references = torch.tensor([[0.0, 0.0], [3.0, 4.0], [10.0, 0.0]])
    found = knn_votes(references, torch.tensor([0, 1, 2]), torch.tensor([[2.0, 3.0], [9.0, 1.0], [0.0, 1.0]]), 1, 3)
    assert found.argmax(dim=1).tolist() == [1, 2, 0]


# ---- choices


@pytest.mark.parametrize("name, start", [("indep", baselines.start_random), ("ft-prev", baselines.start_previous),
                                         ("ft-d", baselines.start_related)])
def test_the_rows_of_table_4(name, start):
    chosen = choose(BaselineConfig(name=name))
    assert (chosen.label, chosen.start, chosen.data, chosen.search) == (name, start, baselines.data_current, random_search)


def test_a_replaced_choice_shows_in_the_label():
    chosen = choose(BaselineConfig(name="ft-d", start="previous", data="current"))
    assert chosen.label == "ft-d, start=previous" and chosen.start is baselines.start_previous
    assert choose(BaselineConfig(name="ft-d", start="related", search="random")).label == "ft-d"


@pytest.mark.parametrize(
    "chosen, words",
    [
        (BaselineConfig(name="ft_d"), "baseline.name: unknown baseline ft_d; did you mean ft-d"),
        (BaselineConfig(name="zzz"), "known: " + ", ".join(BASELINES)),
        (BaselineConfig(start="prev"), "baseline.start: unknown choice prev"),
        (BaselineConfig(data="all"), "baseline.data: unknown choice all"),
        (BaselineConfig(search="grid"), "baseline.search: unknown choice grid"),
        (BaselineConfig(start=""), "baseline.start: unknown choice"),
    ],
)
def test_unknown_names_are_user_errors(chosen, words):
    with pytest.raises(UserError) as error:
        choose(chosen)
    assert words in str(error.value)


# ---- where weights start


def test_the_first_task_starts_from_random_weights(tasks):
    view = view_of(tasks, now=0)
    assert {name: start(view) for name, start in baselines.START.items() if "pretrained" not in name} == dict.fromkeys(
        ("random", "previous", "related", "related_static"))
    assert view.flops == 0 and view.scores == {}


def test_independent_and_previous(tasks, tmp_path):
    view = view_of(tasks, memory=[remember(tasks, index, tmp_path) for index in range(3)])
    assert baselines.start_random(view) is None and baselines.start_previous(view) == 2
    assert view.flops == 0


def test_related_is_the_best_nearest_neighbour_accuracy(tasks, tmp_path):
    memory = [remember(tasks, index, tmp_path, spoil=index != 1) for index in range(3)]
    view = view_of(tasks, memory=memory)
    assert baselines.start_related(view) == 1
    assert set(view.scores) == {0, 1, 2} and view.scores[1] > max(view.scores[0], view.scores[2])
    train, dev = view.split("train"), view.split("dev")
    backbone = view.backbone(1)
    features = [fit.predict(backbone, split, 16, view.config.fit).numpy() for split in (train, dev)]
    expected = KNeighborsClassifier(5).fit(features[0], train.labels.numpy()).score(features[1], dev.labels.numpy())
    assert view.scores[1] == pytest.approx(expected) and expected > 0.5


def test_relatedness_of_several_labels_is_sklearns_map(tasks, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "y").mkdir()
    for split in SPLITS:
        labels = rng.integers(0, 2, (50, 3))
        images = rng.integers(0, 100, (50, 4, 4)) + 50 * labels[:, :1, None] + 100 * labels[:, 1:2, None]
        for what, array in (("images", images), ("labels", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
            (tmp_path / "y" / f"{split}-{what}-idx{array.ndim}-ubyte").write_bytes(content)
    folder = cache.prepare(DataSet(key="y", name="Y", folder=tmp_path / "y"), config.DataConfig(dir=str(tmp_path)))
    task = dataclasses.replace(tasks[0][3], kind="multi_label")
    past = remember(tasks, 0, tmp_path)
    view = dataclasses.replace(view_of((tasks[0][:3] + [task], folder, tmp_path)), memory=[past])
    found = view.relatedness(past.index)
    backbone = view.backbone(past.index)
    features = [fit.predict(backbone, view.split(name), 16, view.config.fit) for name in ("train", "dev")]
    parts = KNeighborsClassifier(5).fit(features[0], view.split("train").labels).predict_proba(features[1])
    votes = np.stack([part[:, 1] for part in parts], axis=1)
    assert found == pytest.approx(average_precision_score(view.split("dev").labels, votes, average="macro"))


def test_of_equally_related_tasks_the_latest_is_chosen(tasks, tmp_path):
    memory = [remember(tasks, index, tmp_path, spoil=True) for index in range(3)]
    view = view_of(tasks, memory=memory)
    assert baselines.start_related(view) == 2 and len(set(view.scores.values())) == 1


def test_selection_is_charged_for_features_and_distances(tasks, tmp_path):
    memory = [remember(tasks, index, tmp_path) for index in range(2)]
    paid = view_of(tasks, memory=memory, max_train=50, max_dev=20)
    baselines.start_related(paid)
    assert paid.flops == 2 * ((50 + 20) * 1000 + 2 * 50 * 20 * 64)
    dry = dataclasses.replace(view_of(tasks, memory=[dataclasses.replace(past, path=None) for past in memory],
                                      max_train=50, max_dev=20), dry=True)
    assert baselines.start_related(dry) is not None and dry.flops == paid.flops


def test_subsets_are_fixed_random_and_no_larger_than_asked(tasks):
    view = view_of(tasks, max_train=25, max_dev=100)
    picks = view.subset("train")
    assert len(picks) == 25 and (picks.diff() > 0).all() and picks.max() < 60
    assert torch.equal(view_of(tasks, max_train=25).subset("train"), picks)  # the same for every candidate and run
    assert not torch.equal(picks, torch.arange(25))
    assert not torch.equal(view_of(tasks, now=2, max_train=25).subset("train"), picks)
    assert not torch.equal(view_of(tasks, max_dev=25).subset("dev"), picks)
    assert torch.equal(view.subset("dev"), torch.arange(60))


# ---- other candidates


def spoilt_state() -> dict:
    state = models.build("resnet8", None, torch.Generator().manual_seed(0)).state_dict()
    return {name: torch.zeros_like(value) for name, value in state.items()}


def test_the_pretrained_network_is_taken_when_it_is_the_best(tasks, tmp_path):
    spoilt = [remember(tasks, index, tmp_path, spoil=True) for index in range(3)]
    good = models.build("resnet8", None, torch.Generator().manual_seed(100)).state_dict()
    view = dataclasses.replace(view_of(tasks, memory=spoilt), pretrained=good)
    assert baselines.start_related_or_pretrained(view) == "pretrained"
    assert set(view.scores) == {"pretrained", 0, 1, 2}
    assert_same(initial_model(view, "pretrained").backbone.state_dict(), good)


def test_an_earlier_task_is_taken_when_it_beats_the_pretrained_network(tasks, tmp_path):
    memory = [remember(tasks, index, tmp_path, spoil=index != 1) for index in range(3)]
    view = dataclasses.replace(view_of(tasks, memory=memory), pretrained=spoilt_state())
    assert baselines.start_related_or_pretrained(view) == 1
    first = dataclasses.replace(view_of(tasks, now=0), pretrained=spoilt_state())
    assert baselines.start_related_or_pretrained(first) == baselines.start_pretrained(first) == "pretrained"


def test_scratch_is_a_candidate_on_request(tasks, tmp_path):
    spoilt = [remember(tasks, index, tmp_path, spoil=True) for index in range(3)]
    assert baselines.start_related(view_of(tasks, memory=spoilt)) == 2
    view = view_of(tasks, memory=spoilt, scratch=True)
    assert baselines.start_related(view) is None and set(view.scores) == {None, 0, 1, 2}
    assert_same(view.backbone(None).state_dict(), initial_model(view, None).backbone.state_dict())  # what the trials start from


def test_cosine_distance_is_that_of_sklearn(tasks, tmp_path):
    past = remember(tasks, 0, tmp_path)
    view = view_of(tasks, memory=[past], distance="cosine", neighbours=7)
    train, dev = view.split("train"), view.split("dev")
    features = [fit.predict(view.backbone(0), split, 16, view.config.fit).numpy() for split in (train, dev)]
    nearest = KNeighborsClassifier(7, metric="cosine").fit(features[0], train.labels.numpy())
    assert view.relatedness(0) == pytest.approx(nearest.score(features[1], dev.labels.numpy()))


def test_a_predictor_that_was_cut_off_is_named(tasks, tmp_path):
    past = remember(tasks, 0, tmp_path)
    past.path.write_bytes(past.path.read_bytes()[:1000])
    with pytest.raises(UserError, match=f"{past.path}: is no predictor that can be read"):
        view_of(tasks, memory=[past]).relatedness(0)


MATRIX = [  # of task 3 and of task 2, by hand: rows are targets, columns sources
    ([], None), ([0.9], 0), ([0.3, 0.7], 1), ([0.5, 0.8, 0.6], 1)]


@pytest.mark.parametrize("target, expected", [(target, row[1]) for target, row in enumerate(MATRIX)])
def test_a_static_start_follows_the_relatedness_of_the_indep_run(tasks, tmp_path, monkeypatch, target, expected):
    asked = []
    indep = {index: tmp_path / f"indep{index}.pt" for index in range(4)}

    def relatedness(view, source, path=None):
        asked.append(path) if path else None
        return MATRIX[target][0][source]

    monkeypatch.setattr(View, "relatedness", relatedness)
    view = view_of(tasks, now=target, memory=[remember(tasks, index, tmp_path) for index in range(target)])
    assert baselines.start_related_static(dataclasses.replace(view, indep=indep)) == expected
    assert asked == [indep[index] for index in range(target)]


def test_a_static_start_looks_at_the_indep_features_and_takes_its_own_weights(tasks, tmp_path):
    (tmp_path / "indep").mkdir()
    own = [remember(tasks, index, tmp_path, spoil=index == 1) for index in range(3)]
    indep = {index: remember(tasks, index, tmp_path / "indep", spoil=index != 1).path for index in range(3)}
    view = dataclasses.replace(view_of(tasks, memory=own), indep=indep)
    assert baselines.start_related_static(view) == 1 and baselines.start_related(view_of(tasks, memory=own)) != 1
    assert not initial_model(view, 1).backbone.conv1.weight.any()  # the spoilt one of this run


@pytest.mark.parametrize("auxiliary, expected", [(1, [1]), (2, [1, 2]), (3, [1, 2, 0])])
def test_multitask_trains_with_the_most_related_tasks(tasks, tmp_path, auxiliary, expected):
    memory = [remember(tasks, index, tmp_path, spoil=index != 1) for index in range(3)]  # 0 and 2 tell as little
    view = view_of(tasks, memory=memory)
    view.config.baseline.auxiliary = auxiliary
    assert baselines.start_related(view) == 1
    charged = view.flops
    assert baselines.data_multitask(view) == expected
    assert view.flops == charged  # the scores are those of the start
    view = view_of(tasks, memory=memory[:1])
    view.config.baseline.auxiliary = auxiliary
    assert baselines.data_multitask(view) == [0] and baselines.data_multitask(view_of(tasks, now=0)) == []


# ---- initial weights


def test_the_backbone_is_the_sources_and_the_head_is_fresh(tasks, tmp_path):
    memory = [remember(tasks, index, tmp_path) for index in range(3)]
    view = view_of(tasks, memory=memory)
    stored = torch.load(tmp_path / "1.pt", weights_only=True)["state"]
    model = initial_model(view, 1)
    assert_same({f"backbone.{name}": value for name, value in model.backbone.state_dict().items()},
                {name: value for name, value in stored.items() if name.startswith("backbone.")})  # statistics too
    assert not torch.equal(model.head.weight, stored["head.weight"])
    assert model.head.bias.abs().max() == 0 and 0 < model.head.weight.std() < 2 / 64**0.5
    images = torch.rand(4, 3, 16, 16)
    source = models.build("resnet8", 3)
    source.load_state_dict(stored)
    torch.testing.assert_close(model.eval().backbone(images), source.eval().backbone(images))


@pytest.mark.parametrize("source", [None, 0, 2])
def test_every_trial_starts_from_the_same_weights(tasks, tmp_path, source):
    view = view_of(tasks, memory=[remember(tasks, index, tmp_path) for index in range(3)])
    torch.manual_seed(0)
    first = initial_model(view, source)
    torch.manual_seed(1)
    second = initial_model(view, source)
    assert_same(first.state_dict(), second.state_dict())
    first.head.weight.data.zero_()
    first.backbone.conv1.weight.data.zero_()  # the trainings of two trials must not meet
    assert second.head.weight.any() and second.backbone.conv1.weight.any()
    assert initial_model(view, source).backbone.conv1.weight.any()


def test_the_head_does_not_depend_on_the_source(tasks, tmp_path):
    view = view_of(tasks, memory=[remember(tasks, index, tmp_path) for index in range(3)])
    heads = [initial_model(view, source).head.state_dict() for source in (None, 0, 1)]
    assert_same(heads[0], heads[1])
    assert_same(heads[0], heads[2])


def test_tasks_and_seeds_start_from_different_random_weights(tasks):
    views = [view_of(tasks, now=0), view_of(tasks, now=1), view_of(tasks, now=0)]
    views[2].config.seed = 1
    weights = [initial_model(view, None).backbone.conv1.weight for view in views]
    assert not any(torch.equal(weights[a], weights[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_an_independent_start_leaves_the_past_alone(tasks, tmp_path):
    alone, together = view_of(tasks), view_of(tasks, memory=[remember(tasks, 0, tmp_path)])
    assert_same(initial_model(alone, None).state_dict(), initial_model(together, None).state_dict())
