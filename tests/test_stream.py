import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nevis_lite import data, stream
from nevis_lite.baselines import View
from nevis_lite.config import Config, DataConfig, MissingData, StreamConfig, UserError
from nevis_lite.data import Split
from nevis_lite.stream import Access, ProtocolError

SHORT = """coil100 mnist pascal_voc2005 caltech_categories uiuc_cars pascal_voc2006 caltech101 ig02 scenes15 voc2007 lfw sketch
    brodatz imagenet2012 voc2012 caltech256 cifar100 cifar10 usps mnist mnist_m office_caltech_10 pacs melanoma
    fashion_mnist stanford_dogs caltech_birds2011 stanford_cars fgvc_aircraft_family""".split()


def class_folders(folder: Path, count: int = 12) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (4, 4), number).save(folder / name / f"{number}.png")
    return folder


def idx_files(folder: Path, count: int = 30) -> Path:
    folder.mkdir(parents=True)
    for what, array in (("images", np.zeros((count, 4, 4))), ("labels", np.arange(count) % 2)):
        content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
        (folder / f"train-{what}-idx{array.ndim}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


# ---- named streams


def test_demo_is_eight_meta_train_tasks_and_four_meta_test_tasks(tmp_path):
    demo = stream.load("demo", tmp_path)
    assert len(demo) == 12 and not demo.missing and demo.name == "demo"
    assert [task.meta for task in demo] == ["train"] * 8 + ["test"] * 4
    assert [task.index for task in demo] == list(range(12))
    years = [task.year for task in demo]
    assert years == sorted(years) and all((task.year >= 2019) == (task.meta == "test") for task in demo)
    assert {task.kind for task in demo} == {"single_label", "multi_label"}


def test_demo_has_mnist_twice_as_two_tasks(tmp_path):
    mnist = [task for task in stream.load("demo", tmp_path) if task.task == "demo_mnist"]
    assert [(task.year, task.occurrence) for task in mnist] == [(2004, 1), (2015, 2)]
    assert mnist[0].index != mnist[1].index and mnist[0].dataset == mnist[1].dataset
    assert all(task.occurrence == 1 for task in stream.load("demo", tmp_path) if task.task != "demo_mnist")


def test_meta_train_keeps_the_tasks_before_2019(tmp_path):
    everything, first = stream.load("demo", tmp_path), stream.load("demo", tmp_path, phase="meta_train")
    assert list(first) == list(everything)[:8]


def test_short_without_data_lists_its_28_data_sets(tmp_path):
    with pytest.raises(MissingData, match="28 data sets are missing") as error:
        stream.load("short", tmp_path)
    assert error.value.code == 3
    lines = str(error.value).splitlines()
    folders = [line.split()[-1] for line in lines if line.startswith("  ")]
    assert folders == [str(tmp_path / key) for key in dict.fromkeys(SHORT)]
    assert "allow_missing" in lines[-1]


def test_short_is_24_meta_train_tasks_and_5_meta_test_tasks(tmp_path):
    for key in SHORT:
        (tmp_path / key).mkdir(exist_ok=True)
        (tmp_path / key / "file").touch()
    short = stream.load("short", tmp_path)
    assert [task.task for task in short] == SHORT
    assert [task.meta for task in short] == ["train"] * 24 + ["test"] * 5
    assert [task.occurrence for task in short if task.task == "mnist"] == [1, 2]
    assert [task.year for task in short] == sorted(task.year for task in short)
    assert len(stream.load("short", tmp_path, "meta_train")) == 24
    # Of the numbers of classes, those that the data sets' own papers state.
    classes = {task.task: task.num_classes for task in short}
    assert {"coil100": 100, "mnist": 10, "voc2007": 20, "imagenet2012": 1000, "caltech256": 257, "cifar100": 100, "pacs": 7,
            "stanford_dogs": 120, "caltech_birds2011": 200, "stanford_cars": 196}.items() <= classes.items()
    assert {task.task for task in short if task.kind == "multi_label"} == {"voc2007", "voc2012"}


def test_allow_missing_goes_on_with_what_is_there(tmp_path):
    class_folders(tmp_path / "pacs")
    class_folders(tmp_path / "mnist")
    short = stream.load(StreamConfig(name="short", allow_missing=True), tmp_path)
    assert [(task.index, task.task, task.occurrence) for task in short] == [(0, "mnist", 1), (1, "mnist", 2), (2, "pacs", 1)]
    assert len(short.missing) == 26 and not any(task.task in ("mnist", "pacs") for task in short.missing)


def test_allow_missing_does_not_go_on_with_nothing(tmp_path):
    with pytest.raises(MissingData, match="every task"):
        stream.load(StreamConfig(name="short", allow_missing=True), tmp_path)


def test_only_missing_tasks_of_the_phase_count(tmp_path):
    tasks = [{"folder": str(class_folders(tmp_path / "a")), "year": 2000}, {"folder": str(tmp_path / "no"), "year": 2020}]
    assert len(stream.load(tasks, phase="meta_train")) == 1
    with pytest.raises(MissingData, match="1 data sets"):
        stream.load(tasks)


def test_an_unknown_stream_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="unknown stream shrt; did you mean short"):
        stream.load("shrt", tmp_path)


# ---- own lists


def test_own_folders_and_idx_files(tmp_path):
    tasks = [{"name": "mine", "folder": str(class_folders(tmp_path / "pets")), "year": 2001, "domain": "object"},
             {"idx": str(idx_files(tmp_path / "digits")), "year": 2005}, {"task": "demo_mnist", "year": 2006},
             {"folder": str(tmp_path / "pets"), "year": 2019}]
    own = stream.load(tasks, tmp_path)
    assert [task.name for task in own] == ["mine", "digits", "MNIST", "pets"]
    assert [task.task for task in own] == ["pets", "digits", "demo_mnist", "pets"]
    assert [task.meta for task in own] == ["train", "train", "train", "test"]
    assert [task.occurrence for task in own] == [1, 1, 1, 2]  # by its files, not by its name
    assert [task.domain for task in own] == ["object", "other", "ocr", "other"]
    assert own.tasks[0].kind is None and own.tasks[0].num_classes is None and own.tasks[2].num_classes == 10


def test_own_data_are_found_from_the_working_directory(tmp_path, monkeypatch):
    class_folders(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)
    (task,) = stream.load([{"folder": "pets", "year": 2000}])
    assert task.dataset.folder == tmp_path / "pets"


def test_meta_may_replace_the_year(tmp_path):
    folder = str(class_folders(tmp_path / "pets"))
    own = stream.load([{"folder": folder, "meta": "train"}, {"folder": folder, "meta": "test"}])
    assert [task.meta for task in own] == ["train", "test"]
    assert [task.meta for task in stream.load([{"folder": folder, "year": 1999, "meta": "test"}])] == ["test"]


def test_meta_train_without_such_a_task_is_refused(tmp_path):
    with pytest.raises(UserError, match="meta_train needs a task"):
        stream.load([{"folder": str(class_folders(tmp_path / "a")), "year": 2020}], phase="meta_train")


@pytest.mark.parametrize(
    "entry, words",
    [
        ("demo_mnist", "expected {name, year, folder or idx}, found 'demo_mnist'"),
        ({"year": 2000}, "needs exactly one of task"),
        ({"folder": ".", "idx": ".", "year": 2000}, "needs exactly one of task"),
        ({"folder": "."}, "year must be a whole number, not None"),
        ({"folder": ".", "year": "2000"}, "year must be a whole number, not '2000'"),
        ({"folder": ".", "year": True}, "year must be a whole number, not True"),
        ({"folder": ".", "year": 2000.5}, "year must be a whole number, not 2000.5"),
        ({"folder": ".", "year": 2000, "meta": "dev"}, "meta must be train or test, not 'dev'"),
        ({"folder": ".", "year": 2000, "flder": 1}, "unknown key flder; did you mean folder"),
        ({"task": "demo_mnst", "year": 2000}, "unknown data set demo_mnst; did you mean demo_mnist"),
    ],
)
def test_bad_entries_are_named_by_their_position(tmp_path, entry, words):
    good = {"task": "demo_mnist", "year": 1998}
    with pytest.raises(UserError) as error:
        stream.load([good, entry], tmp_path)
    assert words in str(error.value) and "stream.tasks, task 2" in str(error.value)


def test_own_tasks_do_not_bear_the_name_of_a_known_stream(tmp_path):
    tasks = [{"task": "demo_mnist", "year": 2005}]
    with pytest.raises(UserError, match="demo"):
        stream.load(StreamConfig(name="demo", tasks=tasks), tmp_path)
    assert stream.load(StreamConfig(name="mine", tasks=tasks), tmp_path).name == "mine"
    assert stream.load(tasks, tmp_path).name not in ("demo", "short")


def test_years_must_not_descend(tmp_path):
    with pytest.raises(UserError, match="order of their years"):
        stream.load([{"task": "demo_mnist", "year": 2005}, {"task": "demo_faces", "year": 2004}], tmp_path)


def test_a_missing_own_folder_is_missing_data(tmp_path):
    with pytest.raises(MissingData) as error:
        stream.load([{"folder": str(tmp_path / "nowhere"), "year": 2004}])
    assert str(tmp_path / "nowhere") in str(error.value)


# ---- who sees what


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    """What a learner sees at the third of four tasks."""
    root = tmp_path_factory.mktemp("data")
    folder = class_folders(root / "pets", 40)
    tasks = stream.load([{"folder": str(folder), "year": year} for year in (2000, 2001, 2002, 2003)]).tasks
    caches = [data.prepare(task.dataset, DataConfig(dir=str(root))) for task in tasks]
    access = Access(2, lambda task, name: Split(caches[task], name, "cpu"))
    return View(tasks[2], access, [], Config(), "cpu", 1, 1)


@pytest.mark.parametrize("name", ["test", "dev_test", "train_and_dev", "", "TEST", None])
def test_a_learner_never_sees_a_test_split(view, name):
    for task in (None, 0, 2):
        with pytest.raises(ProtocolError):
            view.access.split(name, task)
        with pytest.raises(ProtocolError):
            view.split(name, task)


@pytest.mark.parametrize("task", [3, 4, 100, -1])
def test_a_learner_never_sees_a_later_task(view, task):
    for name in ("train", "dev"):
        with pytest.raises(ProtocolError):
            view.access.split(name, task)
        with pytest.raises(ProtocolError):
            view.split(name, task)


def test_a_learner_sees_train_and_dev_of_this_and_earlier_tasks(view):
    for task in (None, 0, 1, 2):
        assert len(view.split("train", task)) > len(view.split("dev", task)) > 0
    assert view.split("dev").name == "dev"


@pytest.mark.parametrize("name", ["test", "dev_test"])
def test_a_subset_of_a_test_split_is_refused_too(view, name):
    with pytest.raises(ProtocolError):
        view.subset(name)
    with pytest.raises(ProtocolError):
        view.features(None, name)
