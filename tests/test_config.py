import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nevis_lite import config
from nevis_lite.config import Config, UserError

ROOT = Path(__file__).resolve().parents[1]


def write(tmp_path, text: str) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(tmp_path, text: str, *overrides: str) -> Config:
    return config.load(write(tmp_path, text), overrides)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("-2.5e+1", -25.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("1_000", 1000),
        ("0", 0),
        ("-7", -7),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("0x10", "0x10"),
        ("2004-01-02", "2004-01-02"),
        ("cuda:1", "cuda:1"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("'1'", "1"),
    ],
)
def test_plain_words_mean_what_they_look_like(text, value):
    found = config.read_yaml(text, "text")
    assert found == value and type(found) is type(value)


def test_an_int_with_a_leading_zero_is_never_octal():
    assert config.read_yaml("010", "text") != 8


@pytest.mark.parametrize("text", ["[1, 2", "a: b: c", "a: 'x", "\tfit: 1", "fit: {steps: 1", "- a\nb: c", "a: \x00", "*nobody"])
def test_broken_yaml_is_a_user_error_that_names_the_file(tmp_path, text):
    with pytest.raises(UserError, match="own.yaml.*not valid YAML"):
        load(tmp_path, text)


def test_broken_yaml_names_the_line(tmp_path):
    with pytest.raises(UserError, match="line 3"):
        load(tmp_path, "seed: 1\nphase: meta_test\nfit: steps: 3\n")


@pytest.mark.parametrize("content", ["seed: 1 # caf\xe9".encode("latin-1"), "seed: 1".encode("utf-16"), b"\xff\xfe\x00"])
def test_files_that_are_not_utf8_are_a_user_error(tmp_path, content):
    path = tmp_path / "own.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match="own.yaml"):
        config.load(str(path))


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load(tmp_path, "") == load(tmp_path, "# nothing\n") == Config()


def test_a_byte_order_mark_is_ignored(tmp_path):
    assert load(tmp_path, "\ufeffseed: 3\n").seed == 3


def test_the_defaults_are_the_papers():
    defaults = Config()
    assert (defaults.search.trials, defaults.search.lr, defaults.search.label_smoothing) == (16, (1e-4, 1e-1), (0.0, 0.3))
    assert (defaults.fit.steps, defaults.fit.validate_every, defaults.fit.max_batch) == (50_000, 1000, 512)
    assert (defaults.fit.warmup_epochs, defaults.fit.weight_decay) == (7.0, 1e-4)
    assert (defaults.model.name, defaults.model.image_size) == ("resnet34", 64)
    assert defaults.data.crop_area == (0.08, 1.0) and defaults.data.flip
    assert (defaults.select.neighbours, defaults.select.max_train, defaults.select.max_dev) == (5, 10_000, 5_000)


def test_two_configs_share_no_list():
    first, second = Config(), Config()
    first.stream.tasks.append("x")
    assert second.stream.tasks == [] and Config().stream.tasks == []


def test_numbers_in_words_reach_their_fields(tmp_path):
    read = load(tmp_path, "search: {lr: [1e-4, 5e-2], trials: 1_0}\nfit: {steps: 1e3, warmup_epochs: 3, weight_decay: 1e-5}\n")
    assert read.search.lr == (1e-4, 5e-2) and read.search.trials == 10
    assert read.fit.steps == 1000 and type(read.fit.steps) is int
    assert read.fit.warmup_epochs == 3.0 and type(read.fit.warmup_epochs) is float
    assert read.fit.weight_decay == 1e-5


@pytest.mark.parametrize("word, value", [("yes", True), ("no", False), ("on", True), ("off", False), ("True", True),
                                         ("false", False), ("NO", False), ('"yes"', True)])
def test_every_way_to_say_yes_or_no(tmp_path, word, value):
    assert load(tmp_path, f"data: {{flip: {word}}}").data.flip is value
    assert load(tmp_path, "", f"data.flip={word}").data.flip is value


@pytest.mark.parametrize(
    "text, named",
    [
        ("sede: 1", "unknown key sede; did you mean seed."),
        ("sarch: {trials: 2}", "unknown key sarch; did you mean search."),
        ("fit: {stesp: 5}", "unknown key fit.stesp; did you mean fit.steps."),
        ("search: {label_smooth: [0, 1]}", "unknown key search.label_smooth; did you mean search.label_smoothing."),
        ("1: 2", "unknown key 1; known: stream, phase, baseline, search,"),
    ],
)
def test_unknown_keys_are_answered_with_the_nearest_name(tmp_path, text, named):
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    assert named in str(error.value) and "own.yaml" in str(error.value)
    assert error.value.code == 2


@pytest.mark.parametrize(
    "text",
    [
        "fit: {steps: 1.5}",
        "fit: {steps: many}",
        "fit: {steps: true}",
        "fit: {steps: [1]}",
        "fit: {steps: null}",
        "fit: {steps: '5'}",
        "fit: {steps: 1e999}",
        "fit: {weight_decay: .nan}",
        "fit: {warmup_epochs: yes}",
        "data: {flip: 1}",
        "data: {flip: maybe}",
        "data: {flip: null}",
        "data: {dir: [a]}",
        "data: {dir: null}",
        "phase: {a: 1}",
        "search: {lr: 1e-3}",
        "search: {lr: [1e-3]}",
        "search: {lr: [1e-4, 1e-3, 1e-2]}",
        "search: {lr: [low, high]}",
        "search: {batch: 16}",
        "search: {batch: [16, many]}",
        "search: {batch: [16.5]}",
        "search: {schedule: [1, [2]]}",
        "search: {crop: [true, 0.5]}",
        "search: {flip: [null]}",
        "search: {model: {vgg: 1}}",
        "search: {auxiliary_weight: 0.5}",
        "stream: {tasks: demo}",
        "stream: {tasks: {a: 1}}",
        "fit: 5",
        "fit: [steps, 5]",
        "[seed, 1]",
        "just words",
    ],
)
def test_wrong_types_are_refused(tmp_path, text):
    with pytest.raises(UserError, match="own.yaml"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "text, words",
    [
        ("fit: {steps: 0}", "fit.steps must be at least 1, not 0"),
        ("search: {trials: 0}", "search.trials must be at least 1"),
        ("seed: -1", "seed must be at least 0, not -1"),
        ("fit: {max_warmup: 1.5}", "fit.max_warmup must be at most 1, not 1.5"),
        ("search: {lr: [0, 1]}", "search.lr must be above 0, not 0"),
        ("search: {lr: [0.1, 0.01]}", "lower end 0.1 is above the upper end 0.01"),
        ("search: {label_smoothing: [0, 1.1]}", "search.label_smoothing must be at most 1"),
        ("data: {crop_area: [0.0, 1.0]}", "data.crop_area must be above 0"),
        ("data: {crop_area: [0.5, 1.2]}", "data.crop_area must be at most 1"),
        ("data: {cache_side: -1}", "data.cache_side must be at least 0"),
        ("model: {image_size: 7}", "model.image_size must be at least 8"),
        ("search: {auxiliary_weight: [-1, 1]}", "search.auxiliary_weight must be at least 0"),
        ("search: {batch: [16, 1]}", "search.batch: an entry must be at least 2, not 1"),
        ("search: {batch: [16, 32, 16]}", "search.batch has an entry twice"),
        ("search: {batch: 16}", "search.batch must be a list in brackets, not 16"),
        ("search: {schedule: [cosin]}", "search.schedule: an entry cannot be 'cosin'; did you mean cosine"),
        ("search: {flip: [true, maybe]}", "search.flip: an entry must be true or false, not 'maybe'"),
        ("fit: {schedule: piecewize}", "did you mean piecewise"),
        ("phase: meta-test", "did you mean meta_test"),
        ("fit: {precision: bf-16}", "did you mean bf16"),
        ("fit: {precision: quick}", "known: auto, fp32, bf16"),
    ],
)
def test_values_out_of_range_name_the_bound_or_the_choices(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    assert words in str(error.value)


def test_a_range_may_be_a_point(tmp_path):
    assert load(tmp_path, "search: {lr: [0.01, 0.01]}").search.lr == (0.01, 0.01)


def test_what_is_searched_beside_rate_and_smoothing(tmp_path):
    text = "search: {schedule: [cosine, piecewise], batch: [16, 3.2e1], model: [vgg], crop: [yes, no], flip: []}"
    read = load(tmp_path, text, "search.flip=[false, true]", "search.auxiliary_weight=[0, 1]").search
    assert (read.schedule, read.batch, read.model) == (["cosine", "piecewise"], [16, 32], ["vgg"])
    assert (read.crop, read.flip, read.auxiliary_weight) == ([True, False], [False, True], (0.0, 1.0))
    assert type(read.batch[1]) is int
    assert load(tmp_path, "search: {auxiliary_weight: [0, 1]}", "search.auxiliary_weight=none").search.auxiliary_weight is None


def test_a_word_is_short_for_a_name(tmp_path):
    read = load(tmp_path, "stream: demo\nbaseline: ft-prev\nmodel: resnet8\n")
    assert (read.stream.name, read.baseline.name, read.model.name) == ("demo", "ft-prev", "resnet8")
    assert load(tmp_path, "", "baseline=indep", "stream=demo").baseline.name == "indep"


def test_a_word_for_a_section_without_a_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="search.name"):
        load(tmp_path, "search: random")


def test_a_list_is_short_for_own_tasks(tmp_path):
    read = load(tmp_path, "stream: [{folder: a, year: 2004}, {idx: b, year: 2005}]")
    assert read.stream.tasks == [{"folder": "a", "year": 2004}, {"idx": "b", "year": 2005}]
    assert read.stream.name not in ("demo", "short")  # it must not pass for a known stream
    with pytest.raises(UserError):
        load(tmp_path, "fit: [1]")


def test_a_choice_may_be_none(tmp_path):
    read = load(tmp_path, "baseline: {name: ft-d, start: none, data: null, search: random}")
    assert read.baseline.start is None and read.baseline.data is None and read.baseline.search == "random"
    assert load(tmp_path, "baseline: {start: previous}", "baseline.start=none").baseline.start is None


def test_overrides_win_in_their_order_and_leave_the_rest(tmp_path):
    read = load(tmp_path, "fit: {steps: 5, validate_every: 2}\nseed: 4\n",
                "fit.steps=7", "fit.steps=9", "search.lr=[1e-3, 1e-2]", "data.dir=/a=b", "device=cuda:1")
    assert (read.fit.steps, read.fit.validate_every, read.seed) == (9, 2, 4)
    assert read.search.lr == (0.001, 0.01) and read.data.dir == "/a=b" and read.device == "cuda:1"


def test_a_named_stream_replaces_own_tasks_and_own_tasks_a_named_stream(tmp_path):
    text = "stream: [{folder: a, year: 2004}]"
    assert load(tmp_path, text, "stream=demo").stream == load(tmp_path, "stream: demo").stream
    assert load(tmp_path, "stream: demo", "stream=[{folder: a, year: 2004}]").stream == load(tmp_path, text).stream


@pytest.mark.parametrize("override", ["fit.steps", "fit.stesp=3", "=5", "fit.=5", "fit.steps=", "fit.steps.x=3", "nothing=1",
                                      "fit.steps=[", "fit=5", "", "fit.steps=3 4"])
def test_bad_overrides_are_a_user_error(tmp_path, override):
    with pytest.raises(UserError) as error:
        load(tmp_path, "", override)
    assert override in str(error.value)


OTHERS = ("split", "fluid")  # of scenario.py and fluid.py


@pytest.mark.parametrize("name", [path.name for path in sorted(config.CONFIGS.glob("*.yaml"))
                                  if not path.name.startswith(OTHERS)])
def test_shipped_configs_load_and_differ_in_what_their_baseline_needs_alone(name):
    stream, baseline = name.removesuffix(".yaml").split("_")
    read = config.load(name)
    if "pretrain" in name:
        assert read.baseline.name == "indep" and read.stream != config.StreamConfig()
        return
    assert read.stream.name == {"cheap": "short"}.get(stream, stream)
    assert read.baseline.name == {"ftd": "ft-d", "ftprev": "ft-prev", "fts": "ft-s", "ptft": "pt-ft"}.get(baseline, baseline)
    indep = config.load(f"{stream}_indep")
    changed = {"indep": (), "ft-prev": (), "ft-d": (), "ft-s": ("select.indep_run",), "mt": ("search.auxiliary_weight",),
               "pt": ("model.weights",), "pt-ft": ("model.weights",)}.get(read.baseline.name, ("search",))
    for key in ("baseline", *changed):
        section, _, field = key.partition(".")
        mine, theirs = (getattr(one, section) for one in (read, indep))
        assert mine != theirs or baseline == "indep"
        setattr(indep, section, dataclasses.replace(theirs, **{field: getattr(mine, field)}) if field else mine)
    assert indep == read


def test_a_config_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    expected = config.load(str(ROOT / "configs" / "demo_ftd.yaml"))
    monkeypatch.chdir(tmp_path)
    assert config.load("demo_ftd") == config.load("demo_ftd.yaml") == expected


def test_a_file_in_the_working_directory_comes_first(tmp_path, monkeypatch):
    (tmp_path / "demo_ftd.yaml").write_text("seed: 77\n")
    monkeypatch.chdir(tmp_path)
    assert config.load("demo_ftd.yaml").seed == 77


def test_an_unknown_config_is_answered_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="did you mean demo_ftd.yaml"):
        config.load("demo_ftdd")
    with pytest.raises(UserError, match="known: .*demo_ftd.yaml.*, \\.\\.\\."):
        config.load(str(tmp_path))


def test_a_config_survives_yaml(tmp_path):
    read = load(tmp_path, "stream: [{folder: 'yes', year: 2004}]\nbaseline: {name: ft-d, start: previous}\nseed: 3\n"
                          "search: {lr: [1e-5, 1e-1]}\nfit: {weight_decay: 1e-7}\ndata: {flip: no, dir: '12:30'}\n")
    plain = config.to_dict(read)
    for again in (config.read_yaml(config.write_yaml(plain), "text"), yaml.safe_load(yaml.safe_dump(plain))):
        assert config.from_dict(again) == read
    assert config.from_dict(config.to_dict(Config())) == Config()
    searched = load(tmp_path, "search: {auxiliary_weight: [0, 1], batch: [16, 32], crop: [true, false], schedule: [cosine]}")
    assert config.from_dict(config.read_yaml(config.write_yaml(config.to_dict(searched)), "text")) == searched


@pytest.mark.parametrize("value", ["no", "yes", "1e-3", "12:30", "010", "1_000", "null", "none", "~", "true", "", "a: b", "- a",
                                   "# a", "2004-01-02", "0x10", ".inf", " a ", "é", "a\nb", 1e-7, 1e22, 0.1, 3, True, None])
def test_what_is_written_is_read_back_as_the_same_value(value):
    found = config.read_yaml(config.write_yaml({"a": [value]}), "text")["a"][0]
    assert found == value and type(found) is type(value)


def test_plain_dicts_hold_lists_and_no_tuples():
    plain = config.to_dict(Config())
    assert plain["search"]["lr"] == [1e-4, 1e-1] and isinstance(plain["data"]["crop_area"], list)
    assert set(plain) == {field.name for field in dataclasses.fields(Config)}


def test_help_lists_every_key_with_its_default():
    text = config.describe()
    for key, value in config.to_dict(Config()).items():
        for inner, default in (value.items() if isinstance(value, dict) else [(None, value)]):
            assert f"{key}.{inner}={default}" in text if inner else f"{key}={default}" in text


@pytest.mark.parametrize("module", ["nevis_lite.config", "nevis_lite.datasets", "nevis_lite.stream"])
def test_reading_a_config_does_not_wait_for_torch(tmp_path, module):
    code = f"import sys, {module}; from nevis_lite import config; config.load('demo_ftd'); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
