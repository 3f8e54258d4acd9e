import functools
import gzip
import os
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from published import encode, zipped

from nevis_lite import cache, datasets, fetch, stream, train
from nevis_lite.baselines import View
from nevis_lite.cache import folder_of, meta_of
from nevis_lite.config import Config, DataConfig, MissingData, StreamConfig, UserError
from nevis_lite.data import Split
from nevis_lite.datasets import DataSet
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
        stream.load(StreamConfig("short"), tmp_path)
    assert error.value.code == 3
    lines = str(error.value).splitlines()
    folders = [line.split()[-1] for line in lines if line.startswith("  ")]
    assert folders == [str(tmp_path / key) for key in dict.fromkeys(SHORT)]
    assert f"python -m nevis_lite.stream prepare short --data {tmp_path}" in lines[-2] and "allow_missing" in lines[-1]


def test_short_is_24_meta_train_tasks_and_5_meta_test_tasks(tmp_path):
    for key in SHORT:
        (tmp_path / key / "train").mkdir(parents=True, exist_ok=True)  # own class folders
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
    with pytest.raises(MissingData, match="1 data set is missing"):
        stream.load(tasks)


def test_an_unknown_stream_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="unknown stream shrt; did you mean short"):
        stream.load("shrt", tmp_path)


# ---- the paper's streams, orders and ablations


@functools.cache
def all_entries() -> dict:
    return datasets.catalogue(Path("data"))


def planned(name="full", phase="meta_test", **options) -> list:
    entries = all_entries()
    with patch.object(datasets, "catalogue", lambda folder: entries):
        return stream.plan(StreamConfig(name=name, **options), phase=phase)[1]


def keys(tasks, meta=None) -> list:
    return [(task.year, task.task) for task in tasks if meta in (None, task.meta)]


@pytest.mark.parametrize("name, train_tasks, test_tasks, distinct", [
    ("full", 79, 27, 97), ("short", 24, 5, 28), ("tiny", 6, 1, 6), ("debug", 2, 0, 2), ("imagenet_only", 1, 0, 1),
    ("major_domain_only", 43, 27, 64), ("large_dataset_only", 40, 27, 64), ("demo", 8, 4, 11)])
def test_sizes_of_the_streams(name, train_tasks, test_tasks, distinct):
    tasks = planned(name)
    assert (len(keys(tasks, "train")), len(keys(tasks, "test"))) == (train_tasks, test_tasks)
    assert len({task.task for task in tasks}) == distinct and [task.index for task in tasks] == list(range(len(tasks)))
    assert all(task.kind and task.num_classes for task in tasks)


def test_nine_data_sets_occur_twice_in_the_full_stream():
    twice = {key: [task.year for task in planned() if task.task == key] for key, count in
             Counter(task.task for task in planned()).items() if count > 1}
    assert twice == {"brodatz": [1998, 2011], "olivetti_face": [1998, 2010], "coil20": [2000, 2019], "coil100": [2001, 2019],
                     "mnist": [2004, 2015], "caltech101": [2005, 2016], "scenes15": [2008, 2019],
                     "imagenet2012": [2011, 2021], "oxford_flowers102": [2011, 2021]}
    multi_label = {task.task for task in planned() if task.kind == "multi_label"}
    assert multi_label == {"voc2007", "voc2012", "celeb_a", "sun_attributes", "voc_actions", "iaprtc12", "nih_chest_xray",
                           "awa2", "biwi"}


@pytest.mark.parametrize("name", ["major_domain_only", "large_dataset_only"])
def test_parts_of_the_full_stream_keep_its_order_and_all_of_its_meta_test_tasks(name):
    part, everything = keys(planned(name)), iter(keys(planned()))
    assert all(task in everything for task in part)  # a subsequence
    assert keys(planned(name), "test") == keys(planned(), "test")


def test_the_major_stream_leaves_out_seven_domains():
    left_out = Counter(keys(planned())) - Counter(keys(planned("major_domain_only")))
    domains = {task.task: task.domain for task in planned()}
    assert {domains[key] for _, key in left_out} == {"satellite", "face", "texture", "shape", "ocr", "quality", "medical"}
    kept = {domains[key] for year, key in keys(planned("major_domain_only"), "train")} - {"object", "scene", "counting"}
    assert kept <= {"ocr"}  # SVHN, which the reference counts as objects


@pytest.mark.parametrize("keep, count", [
    ("all", 79), ("without_imagenet", 78), ("without_first_30", 49), ("without_last_30", 49), ("without_first_79", 0),
    ("without_last_0", 79), ("random:40", 40), ("random:43", 43), ("random:79", 79), ("without_random:30", 49)])
def test_ablations_take_from_meta_train_alone(keep, count):
    for seed in (0, 1):
        tasks, everything = planned(keep=keep, keep_seed=seed), iter(keys(planned()))
        assert len(keys(tasks, "train")) == count and keys(tasks, "test") == keys(planned(), "test")
        assert all(task in everything for task in keys(tasks))  # in the order that they had


def test_which_tasks_the_ablations_take():
    everything = keys(planned(), "train")
    assert keys(planned(keep="without_first_30"), "train") == everything[30:]
    assert everything[30:36] == [(2011, key) for key in ("oxford_flowers102", "belgium_tsc", "german_tsr", "brodatz",
                                                         "vistex")] + [(2012, "umd")]
    assert keys(planned(keep="without_last_30"), "train") == everything[:-30]
    assert everything[-31] == (2015, "sun397") and everything[-30] == (2015, "cifar10")
    gone = Counter(everything) - Counter(keys(planned(keep="without_imagenet"), "train"))
    assert list(gone) == [(2011, "imagenet2012")]


def test_random_ablations_are_drawn_by_seed():
    drawn = [keys(planned(keep="random:40", keep_seed=seed), "train") for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] != drawn[3] != drawn[0]
    times = Counter(task for seed in range(200) for task in keys(planned("demo", keep="random:4", keep_seed=seed), "train"))
    assert len(times) == 8 and all(70 < count < 130 for count in times.values())  # 100 expected, deviation 7


@pytest.mark.parametrize("keep, words", [
    ("without_first_80", "only 79 meta-train tasks"), ("random:80", "only 79"), ("without", "cannot be 'without'"),
    ("random", "did you mean random:43"), ("random:-1", "cannot be"), ("imagenet", "did you mean without_imagenet")])
def test_impossible_ablations_are_refused(keep, words):
    with pytest.raises(UserError, match="stream.keep") as error:
        planned(keep=keep)
    assert words in str(error.value)


def test_an_ablation_without_effect_is_refused_and_one_that_leaves_nothing_too():
    with pytest.raises(UserError, match="ImageNet is no meta-train task"):
        planned("demo", keep="without_imagenet")
    with pytest.raises(UserError, match="no task is left"):
        planned("debug", keep="without_first_2")
    with pytest.raises(UserError, match="meta_train needs"):
        planned(keep="random:0", phase="meta_train")


@pytest.mark.parametrize("name", ["full", "short", "large_dataset_only"])
@pytest.mark.parametrize("order", ["within_years", "shuffled"])
def test_no_order_loses_a_task_or_changes_its_side(name, order):
    before = planned(name)
    for seed in range(5):
        after = planned(name, order=order, order_seed=seed)
        assert Counter(keys(after, "train")) == Counter(keys(before, "train"))
        assert Counter(keys(after, "test")) == Counter(keys(before, "test"))
        assert keys(after) == keys(planned(name, order=order, order_seed=seed)) != keys(before)
        assert [task.index for task in after] == list(range(len(before)))
        for key, group in Counter(task.task for task in after).items():
            assert [task.occurrence for task in after if task.task == key] == list(range(1, group + 1))
    assert keys(planned(name, order=order, order_seed=0)) != keys(planned(name, order=order, order_seed=1))


def test_an_order_within_years_keeps_the_years():
    for seed in range(5):
        assert [task.year for task in planned(order="within_years", order_seed=seed)] == [task.year for task in planned()]


def test_meta_test_tasks_go_anywhere_in_a_shuffled_stream():
    places = [task.index for seed in range(40) for task in planned(order="shuffled", order_seed=seed) if task.meta == "test"]
    assert len(places) == 40 * 27 and min(places) < 5 and max(places) > 100 and 48 < np.mean(places) < 57


def test_meta_train_of_a_shuffled_stream_is_its_order_without_the_others():
    whole, first = (planned(order="shuffled", phase=phase) for phase in ("meta_test", "meta_train"))
    assert keys(first) == keys(whole, "train") and len(first) == 79


def test_permutations_are_the_same_everywhere():
    order = [task.task for task in planned("demo", order="shuffled", order_seed=3)]
    assert order == ["demo_mnist", "demo_mnist", "demo_fashion_mnist", "demo_mnist_rot", "demo_textures", "demo_icons_b",
                     "demo_icon_parts", "demo_clipart_keywords", "demo_faces", "demo_optical_digits", "demo_landsat",
                     "demo_icons_a"]


def test_a_variant_bears_another_name():
    def name(**options):
        return stream.load(StreamConfig(name="demo", **options)).name

    assert name() == "demo" and name(order="shuffled", order_seed=2) == "demo (shuffled, seed 2)"
    assert name(keep="without_last_3", order="within_years") == "demo (without_last_3; within_years, seed 0)"
    assert name(keep="random:3", keep_seed=7) == "demo (random:3, seed 7)"


def test_own_lists_can_be_shuffled_and_need_no_order_then(tmp_path):
    folder = str(class_folders(tmp_path / "pets"))
    tasks = [{"folder": folder, "year": year} for year in (2020, 2000, 2010)]
    own = stream.load(StreamConfig(tasks=tasks, order="shuffled"))
    assert {(task.year, task.meta) for task in own} == {(2020, "test"), (2000, "train"), (2010, "train")}


def test_a_shuffled_run_reports_on_the_same_tasks(settings, tmp_path):
    results = train.run(settings(stream={"name": "four", "order": "shuffled", "order_seed": 1}), tmp_path / "run")
    rows = results["tasks"]
    assert [row["year"] for row in rows] != sorted(row["year"] for row in rows)
    judged = [row for row in rows if row["meta"] == "test"]
    assert {row["year"] for row in judged} == {2019, 2021} and {row["split"] for row in rows} == {"test"}
    assert results["error"] == pytest.approx(np.mean([row["error"] for row in judged]))
    assert results["stream"] == "four (shuffled, seed 1)"


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
    caches = [cache.prepare(task.dataset, DataConfig(dir=str(root))) for task in tasks]
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


# ---- the command


def picture_zip(count=24) -> bytes:
    return zipped({f"photos/{'ab'[number % 2]}/{number:02}.png": encode(number) for number in range(count)})


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    """Four published data sets: one to download, one by hand, one of two parts, and one whose archive is damaged."""
    def entry(key, *files, **facts):
        options = {"parts": [{"pattern": r"/(?P<label>[ab])/[^/]+\.png$"}]}
        return DataSet(key, key.title(), tmp_path / "data" / key, "single_label", 2, reader="by_name", options=options,
                       files=list(files), **facts)

    entries = {"net": entry("net", {"name": "net.zip", "url": "http://x/net.zip"}),
               "hand": entry("hand", {"name": "hand.zip", "url": "http://x/page", "manual": "Log in and accept the rules."}),
               "parts": entry("parts", {"name": "1.zip", "url": "http://x/1"}, {"name": "2.zip", "url": "http://x/2"}),
               "broken": entry("broken", {"name": "broken.zip", "url": "http://x/broken"})}
    monkeypatch.setattr(datasets, "catalogue", lambda data_dir: entries)
    return entries


@pytest.fixture
def web(monkeypatch):
    """{file name: content} of what the net has; `asked` lists what was fetched."""
    content = {"net.zip": picture_zip(), "1.zip": picture_zip(), "broken.zip": b"PK no zip"}
    asked = []

    def fetch_file(file, folder, report=print, accept_new_checksum=False, hosts=None):
        asked.append(file["name"])
        if file["name"] not in content:
            raise fetch.FetchError(f"{file['name']} cannot be fetched (x: HTTP 404).\nby hand", "x: HTTP 404")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file["name"]).write_bytes(content[file["name"]])

    monkeypatch.setattr(fetch, "fetch", fetch_file)
    return asked


def call(tmp_path, command, *words) -> int:
    return stream.main([command, *words, "--data", str(tmp_path / "data")])


def test_prepare_goes_on_past_what_fails_and_says_what_to_do(tmp_path, catalogue, web, capsys):
    assert call(tmp_path, "prepare", "broken", "hand", "parts", "net") == 3
    told = capsys.readouterr().out
    assert "[4/4] net: ready, 24 images, 2 classes" in told and "1 of 4 data sets are ready" in told
    assert "not a whole archive" in told and "parts: lacks 2.zip (x: HTTP 404)\n" in told
    assert f"by hand, into {tmp_path}/data/hand:" in told and "hand.zip: Log in and accept the rules. (http://x/page)" in told
    assert [line.split(":")[0] for line in told.splitlines()[-3:]] == ["  broken", "  hand", "  parts"]
    assert web == ["broken.zip", "1.zip", "2.zip", "net.zip"]


def test_prepare_again_does_what_is_left(tmp_path, catalogue, web, capsys):
    call(tmp_path, "prepare", "net", "parts")
    (tmp_path / "data" / "parts" / "2.zip").write_bytes(picture_zip())
    web.clear()
    assert call(tmp_path, "prepare", "net", "parts") == 0 and not web
    assert "[2/2] parts: ready, 48 images" in capsys.readouterr().out


def test_the_cache_is_the_one_that_training_uses(tmp_path, catalogue, web):
    assert call(tmp_path, "prepare", "net") == 0
    (built,) = (tmp_path / "data" / "cache").iterdir()
    assert folder_of(catalogue["net"], DataConfig(dir=str(tmp_path / "data"))) == built
    before = built.stat().st_mtime_ns
    assert cache.prepare(catalogue["net"], DataConfig(dir=str(tmp_path / "data"))) == built
    assert built.stat().st_mtime_ns == before
    assert call(tmp_path, "prepare", "net", "--cache-side", "5") == 0
    assert len(list((tmp_path / "data" / "cache").iterdir())) == 2


def test_stop_at_first_or_keep_going(tmp_path, catalogue, web, capsys):
    assert call(tmp_path, "prepare", "hand", "net", "--stop-at-first") == 3
    assert not web and "net" not in capsys.readouterr().out
    assert call(tmp_path, "prepare", "hand", "net", "--keep-going") == 3
    assert web == ["net.zip"] and "net: ready" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call(tmp_path, "prepare", "net", "--keep-going", "--stop-at-first")


def test_every_file_that_lacks_is_told_with_its_reason_and_no_host_waited_for_twice(tmp_path, catalogue, monkeypatch, capsys):
    """Nothing listens at port 1; the rest of the addresses are none at all."""
    asked, urlopen = [], fetch.urlopen
    monkeypatch.setattr(fetch, "urlopen", lambda request, timeout: asked.append(request.host) or urlopen(request, timeout=1))
    monkeypatch.setattr(fetch, "WAITS", (0, 0, 0))
    monkeypatch.setenv("no_proxy", "*")
    catalogue["parts"].files[:] = [
        {"name": "1.zip", "url": "http://127.0.0.1:1/1"}, {"name": "2.zip", "url": "http://127.0.0.1:1/2"},
        {"name": "3.zip", "url": "nosuch://y/3"}, {"name": "4.zip", "url": "http://y/page", "manual": "Log in."}]
    catalogue["net"].files[0]["url"] = "http://127.0.0.2:1/net.zip"
    catalogue["broken"].files[0]["url"] = "http://127.0.0.1:1/broken.zip"
    assert call(tmp_path, "prepare", "parts", "net", "broken") == 3
    assert asked == ["127.0.0.1:1"] * 2 + ["y", "127.0.0.2:1"]
    told = capsys.readouterr().out
    assert "parts: lacks 1.zip, 2.zip, 3.zip and 1 more (127.0.0.1:1: [Errno 111] Connection refused)" in told
    assert "    1.zip, 2.zip: 127.0.0.1:1: [Errno 111] Connection refused\n    3.zip: y: unknown url type: nosuch\n" in told
    assert "      4.zip: Log in. (http://y/page)" in told and "      2.zip: http://127.0.0.1:1/2" in told
    assert told.splitlines()[-1] == "  broken: lacks broken.zip (127.0.0.1:1: [Errno 111] Connection refused)"


def test_classes_without_an_image_are_counted(tmp_path, catalogue, web, capsys):
    catalogue["net"] = replace(catalogue["net"], labels=["a", "b", "c"], classes=3)
    assert call(tmp_path, "prepare", "net") == 0
    words = "net: ready, 24 images, 3 classes (without an image: 1 in train, 2 in dev, 1 in dev_test, 2 in test)\n"
    assert words in capsys.readouterr().out  # dev and test have images of one class alone


def test_files_at_hand_are_used(tmp_path, catalogue, web, capsys):
    (tmp_path / "raw" / "parts").mkdir(parents=True)
    (tmp_path / "raw" / "hand.zip").write_bytes(picture_zip())
    (tmp_path / "raw" / "parts" / "2.zip").write_bytes(picture_zip())
    assert call(tmp_path, "prepare", "hand", "parts", "--raw", str(tmp_path / "raw")) == 0
    assert web == ["1.zip"] and (tmp_path / "data" / "hand" / "hand.zip").is_symlink()
    assert call(tmp_path, "prepare", "net", "--raw", str(tmp_path / "nowhere")) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_file_by_hand_that_is_another_edition_is_used_and_told(tmp_path, catalogue, web, capsys):
    catalogue["hand"].files[0]["md5"] = "0" * 32
    (tmp_path / "data" / "hand").mkdir(parents=True)
    (tmp_path / "data" / "hand" / "hand.zip").write_bytes(picture_zip())
    assert call(tmp_path, "prepare", "hand") == 0
    assert "hand: hand.zip is another edition than the known one, or damaged (md5" in capsys.readouterr().out


def test_any_fault_of_one_data_set_leaves_the_others_alone(tmp_path, catalogue, web, capsys, monkeypatch):
    monkeypatch.setattr(cache, "prepare", lambda dataset, settings: 1 / 0)
    assert call(tmp_path, "prepare", "net", "parts") == 3
    assert "net: ZeroDivisionError: division by zero" in capsys.readouterr().out and web == ["net.zip", "1.zip", "2.zip"]


def test_interrupted(tmp_path, catalogue, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch", interrupt)
    assert call(tmp_path, "prepare", "net") == 130 and "goes on with what is left" in capsys.readouterr().err


def test_check_tells_the_state_of_each_data_set(tmp_path, catalogue, web, capsys):
    call(tmp_path, "prepare", "net", "parts")
    (tmp_path / "data" / "broken").mkdir()
    (tmp_path / "data" / "broken" / "broken.zip").write_bytes(b"x" * 2500)
    capsys.readouterr()
    assert call(tmp_path, "check", *catalogue) == 3
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["net"][1:3] == ["cached", "2"] and sum(map(int, rows["net"][3:7])) == 24
    assert rows["hand"][1] == "manual" and rows["parts"][1] == "partial" and rows["parts"][-2:] == ["lacks", "2.zip"]
    assert rows["broken"][1] == "ready" and rows["broken"][7:9] == ["2.5", "kB"]
    assert call(tmp_path, "check", "net") == 0
    web.clear()
    (tmp_path / "data" / "net" / "net.zip").unlink()
    assert call(tmp_path, "check", "net") == 3 and "downloadable" in capsys.readouterr().out and not web


def test_check_tells_which_splits_have_other_numbers_of_images_than_expected(tmp_path, catalogue, web, capsys, monkeypatch):
    def last_words(**facts):
        catalogue["net"] = replace(catalogue["net"], **facts)
        assert call(tmp_path, "check", "net") == 0
        return capsys.readouterr().out.splitlines()[1].split()[11:]

    monkeypatch.setattr(cache, "BAD_SHARE", 0.5)
    (tmp_path / "data" / "net").mkdir(parents=True)
    (tmp_path / "data" / "net" / "net.zip").write_bytes(picture_zip())
    call(tmp_path, "prepare", "net")
    capsys.readouterr()
    sizes = meta_of(folder_of(catalogue["net"], DataConfig(dir=str(tmp_path / "data"))))["sizes"]
    (digest,) = last_words()
    assert last_words(images=sizes) == [digest]
    assert last_words(images=sizes | {"train": 90, "test": 7}) == [digest, "expected", "train", "90,", "test", "7"]
    assert last_words(images_about=True) == [digest]
    pictures = {f"photos/{'ab'[number % 2]}/{number:02}.png": encode(number) for number in range(24)}
    (tmp_path / "data" / "net" / "net.zip").write_bytes(zipped(pictures | {"photos/a/00.png": b"broken"}))
    call(tmp_path, "prepare", "net")
    capsys.readouterr()
    assert last_words(images=sizes, images_about=False)[1:] == ["expected", "train", str(sizes["train"]), "(1", "broken)"]


def test_the_digest_of_the_splits_tells_which_images_and_labels(tmp_path, catalogue, web):
    def splits(dataset, data_dir=tmp_path / "data"):
        return meta_of(cache.prepare(dataset, DataConfig(dir=str(data_dir))))["splits"]

    call(tmp_path, "prepare", "net")
    first = splits(catalogue["net"])
    assert set(first) == set(datasets.SPLITS) and all(len(digest) == 12 for digest in first.values())
    moved = DataSet("net", "Net", tmp_path / "moved", "single_label", 2, reader="by_name", options=catalogue["net"].options)
    moved.folder.mkdir()
    (moved.folder / "net.zip").write_bytes(picture_zip())
    assert splits(moved) == first  # wherever it lies
    swapped = DataSet("net", "Net", moved.folder, "single_label", 2, reader="by_name", options=moved.options, labels=["b", "a"])
    assert all(splits(swapped)[name] != first[name] for name in first)
    folders = [DataSet("pets", "Pets", class_folders(tmp_path / place / "pets")) for place in ("here", "there")]
    assert splits(folders[0]) == splits(folders[1])
    digits = DataSet("digits", "Digits", idx_files(tmp_path / "digits"))
    assert len(set(splits(digits).values())) == 4


def test_a_partial_data_set_is_missing(tmp_path, catalogue):
    (tmp_path / "data" / "parts").mkdir(parents=True)
    (tmp_path / "data" / "parts" / "1.zip").touch()
    with pytest.raises(MissingData, match="lacks 2.zip") as error:
        stream.load([{"task": "parts", "year": 2000}], tmp_path / "data")
    assert "python -m nevis_lite.stream prepare parts" in str(error.value)


def test_list_shows_streams_and_tasks(capsys):
    assert stream.main(["list"]) == 0
    assert "full                   106         79        27        97  1992 to 2021" in capsys.readouterr().out
    assert stream.main(["list", "demo", "keep=without_first_7"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 7 and told[1].split() == ["0", "2017", "demo_faces", "face", "single_label", "2", "-", "1", "train",
                                                      "faces"]
    assert told[-1] == "stream demo (without_first_7): 5 tasks, 1 meta-train and 4 meta-test, of 5 data sets"
    assert stream.main(["list", "full"]) == 0
    rows = {line.split()[2]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["mnist"][6] == "42000" and rows["aberdeen"][6].startswith("~")


@pytest.mark.parametrize("words, told", [
    (["list", "ful"], "unknown stream ful; did you mean full"), (["list", "demo", "keep=x"], "stream.keep cannot be 'x'"),
    (["list", "demo", "kep=all"], "unknown key stream.kep; did you mean stream.keep"),
    (["check", "mnst"], "mnst is neither a stream nor a data set; did you mean mnist"),
    (["prepare", "demo", "--cache-side", "-1"], "cache_side must be at least 0")])
def test_wrong_words_are_answered_in_a_sentence(words, told, capsys):
    assert stream.main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list"], ["list", "full"], ["check", "full", "--data", "nowhere"]])
def test_a_look_needs_no_torch(words):
    code = f"import sys; from nevis_lite import stream; stream.main({words}); assert 'torch' not in sys.modules"
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and done.stdout, done.stderr
    assert os.times().children_user - before.children_user < 2


def test_every_named_data_set_is_in_the_catalogue(tmp_path):
    known = datasets.catalogue(tmp_path)
    assert {entry["task"] for entries in stream.named_streams().values() for entry in entries} <= set(known)
