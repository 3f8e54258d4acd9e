"""Every setting of a run, with its default: one dataclass tree, filled from a YAML file and `section.key=value`.

The defaults are the paper's (arXiv 2211.11747) where it states them and the reference implementation's elsewhere. A file states
only what differs. Needs no torch, so that a wrong key is reported at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import math
import os
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SCHEDULES = ("cosine", "piecewise")


class UserError(Exception):
    """A mistake that the user can mend: shown as one sentence, without traceback. `code` is the exit code."""

    code = 2


class MissingData(UserError):
    code = 3


def need(module: str, title: str, name: str):
    """An optional module, or UserError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{name}: needs {title}: pip install {module.split('.')[0]}") from None


def option(default, text: str, **checks):
    """A field with its help text; checks: `choices`, `low`, `high` (bounds included) or `above` (bound excluded)."""
    metadata = {"help": text, **checks}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class StreamConfig:
    name: str | None = option(None, "short (the default), demo, full, ...: see `stream list`; or a name for your own")
    tasks: list = option([], "your own list of tasks: {name, year, folder or idx, meta: train or test}")
    order: str = option("chronological", "chronological; within_years permutes the tasks of each year, shuffled all tasks",
                        choices=("chronological", "within_years", "shuffled"))
    order_seed: int = option(0, "which permutation", low=0)
    keep: str = option("all", "meta-train tasks that stay: all, without_imagenet, without_first_30, without_last_30, "
                              "random:43, without_random:30 (or other numbers)")
    keep_seed: int = option(0, "which random ones", low=0)
    allow_missing: bool = option(False, "go on without tasks whose data are missing; marks the results as partial")


@dataclass
class BaselineConfig:
    name: str = option("ft-d", "a row of the paper's Table 4: indep, ft-prev, ft-s, ft-d, mt, pt, pt-ft, bhpo")
    start: str | None = option(None, "where weights start, instead of the row's: random, previous, related_static, related, "
                                     "pretrained, related_or_pretrained")
    data: str | None = option(None, "what trains them, instead of the row's: current, multitask")
    search: str | None = option(None, "how hyper-parameters are searched, instead of the row's: random, gp_ucb")
    auxiliary: int = option(1, "most related earlier tasks that a multitask learner trains on, too", low=1)


@dataclass
class SearchConfig:
    trials: int = option(16, "trainings a task", low=1)
    lr: tuple[float, float] = option((1e-4, 1e-1), "peak learning rate, log-uniform", above=0.0)
    label_smoothing: tuple[float, float] = option((0.0, 0.3), "label smoothing, uniform", low=0.0, high=1.0)
    stratified: bool = option(False, "one learning rate from each of `trials` equal parts of the log range")
    auxiliary_weight: tuple[float, float] | None = option(None, "weight of the losses of auxiliary tasks, uniform; none: "
                                                          "not searched", low=0.0)
    schedule: list[str] = option([], "schedules to search; empty: fit.schedule", choices=SCHEDULES)
    batch: list[int] = option([], "batch sizes to search; empty: the rule of Eq. 4", low=2)
    model: list[str] = option([], "networks to search; empty: model.name")
    crop: list[bool] = option([], "[true, false] also tries central squares; empty: random crops")
    flip: list[bool] = option([], "[true, false] tries both; empty: data.flip")


@dataclass
class FitConfig:
    steps: int = option(50_000, "updates a trial", low=1)
    validate_every: int = option(1000, "updates between two validations on all of dev", low=1)
    max_batch: int = option(512, "upper end of the batch-size rule (paper, Eq. 4)", low=2)
    warmup_epochs: float = option(7.0, "epochs of linear warm-up", low=0.0)
    max_warmup: float = option(1.0, "largest share of the steps that may be warm-up", low=0.0, high=1.0)
    schedule: str = option("cosine", "after warm-up: cosine, or piecewise (a tenth at 1/2 and again at 3/4 of the steps)",
                           choices=SCHEDULES)
    weight_decay: float = option(1e-4, "on conv and linear weights only", low=0.0)
    multi_label_loss: str = option("mean", "over an image's labels: mean, as in the reference, or sum", choices=("mean", "sum"))
    precision: str = option("auto", "auto is bf16 on CUDA and fp32 elsewhere", choices=("auto", "fp32", "bf16"))
    compile: bool = option(False, "compile the backbone, on CUDA with CUDA graphs: takes minutes at first and a C++ compiler; "
                                  "no gain on a CPU")


@dataclass
class ModelConfig:
    name: str = option("resnet34", "resnet34, resnet18, resnet34_imagenet, resnet18_imagenet, resnet8, vgg, torchvision/..., "
                                   "timm/...")
    image_size: int = option(64, "side of the square input in pixels", low=8, high=1024)
    weights: str | None = option(None, "pretrained (pt, pt-ft): a .pt or .safetensors file, a run's predictor, or published")


@dataclass
class DataConfig:
    dir: str = option("data", "folder of the data sets and of the pixel cache")
    cache_side: int = option(128, "cached images keep at most this shorter side in pixels; 0 never shrinks", low=0)
    crop_area: tuple[float, float] = option((0.08, 1.0), "range of a training crop's share of the image", above=0.0, high=1.0)
    flip: bool = option(True, "mirror half of the training crops")


@dataclass
class SelectConfig:
    neighbours: int = option(5, "k of the nearest-neighbour relatedness (ft-s, ft-d, mt, pt-ft)", low=1)
    distance: str = option("euclidean", "between features", choices=("euclidean", "cosine"))
    scratch: bool = option(False, "random weights are a candidate, too, so that no earlier task has to be taken")
    indep_run: str | None = option(None, "folder of the Indep run whose predictors give the features of ft-s")
    max_train: int = option(10_000, "images of train that vote", low=1)
    max_dev: int = option(5_000, "images of dev that are classified", low=1)


@dataclass
class Config:
    stream: StreamConfig = field(default_factory=StreamConfig)
    phase: str = option("meta_test", "meta_train: S_Tr, reported on dev_test; meta_test: S_Tr + S_Ts, reported on test",
                        choices=("meta_train", "meta_test"))
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    seed: int = option(0, "every random draw is a function of (seed, task, trial, step)", low=0)
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps")
    parallel: str = option("trials", "what several processes share: trials, the trainings of a task; data, each batch",
                           choices=("trials", "data"))
    processes: int = option(0, "that the command starts on this machine; 0: for trials of a run with `threads` as many as the "
                               "cores allow, else one", low=0)
    threads: int = option(0, "CPU threads, 0: torch's choice; another number changes the last digits of results", low=0)
    checkpoint_seconds: float = option(60.0, "seconds between two snapshots of a trial in progress", low=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML whose plain words mean what they look like: `no` is a word, `1e-3` a number, `12:30` and `010` no numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:0|[1-9][0-9_]*)?\.[0-9]+|(?:0|[1-9][0-9_]*)\.?)(?:[eE][-+]?[0-9]+)?$"), list("-+.0123456789"))


def read_yaml(text: str, where: str):
    """Parse YAML text; UserError naming `where` and the line when it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, KeyError, AttributeError) as error:  # the last two: from explicit tags
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}{line}: not valid YAML ({problem}).") from None


def keys_of(path: Path) -> dict:
    """What a YAML or JSON file holds; UserError if it cannot be read or holds no keys."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    if content is not None and not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values, found {str(content)[:100]!r}.")
    return content or {}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever `_Loader` would not read back as the same value."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def write_yaml(content: dict) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def find_config(name: str) -> Path:
    """`name` as a path, else in `configs/`, with or without `.yaml`; UserError with the nearest name otherwise."""
    for path in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if os.path.isfile(path):  # unlike Path's own, no error for a name that no file can have
            return path
    known = sorted(path.name for path in CONFIGS.glob("*.yaml"))
    raise UserError(f"--config {name}: no such file here or in {CONFIGS}{nearest(name, known)}.")


def load(name: str, overrides: typing.Sequence[str] = (), kind: type = Config):
    """The config of the file `name` (see `find_config`) with `section.key=value` overrides; UserError on any mistake.

    `kind` is the dataclass that it fills.
    """
    path, config = find_config(name), kind()
    fill(config, keys_of(path), str(path))
    override(config, overrides)
    return config


def override(target, overrides: typing.Sequence[str]):
    """Set fields of the dataclass `target` from words key=value, or section.key=value; UserError on any mistake."""
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word!r}: an override is written section.key=value, for example fit.steps=1000.")
        nested = read_yaml(value, word) if value.strip() else ""
        for part in reversed(key.split(".")):
            nested = {part: nested}
        fill(target, nested, word)


def from_dict(content: dict, where: str = "config") -> Config:
    """A Config from nested dicts; UserError names `where`, the key, and the nearest valid name."""
    config = Config()
    fill(config, content, where)
    return config


def to_dict(config: Config) -> dict:
    """Plain nested dicts and lists, as written to `config.yaml`."""
    plain = dataclasses.asdict(config)
    for section in plain.values():
        if isinstance(section, dict):
            section.update({key: list(value) for key, value in section.items() if isinstance(value, tuple)})
    return plain


def parser_of(module: str, description: str, settings, out: str, resume: str, example: str) -> argparse.ArgumentParser:
    """The command line of a module that runs a config file; `settings` hold the defaults that its help tells."""
    parser = argparse.ArgumentParser(
        prog=f"python -m nevis_lite.{module}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description, epilog=f"keys, with their defaults:\n{describe(settings)}\n\nexample: python -m "
                                        f"nevis_lite.{module} --config {example}")
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file, looked up here and in configs/")
    parser.add_argument("--out", metavar="DIR", help=f"{out} (default: runs/<config>-seed<seed>)")
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the file")
    return parser


def out_of(arguments: argparse.Namespace, seed: int) -> Path:
    """The run folder that a command line of `parser_of` means."""
    return Path(arguments.out or f"runs/{find_config(arguments.config).stem}-seed{seed}")


def exit_code(work: typing.Callable[[], int | None], stopped: str) -> int:
    """That of a command: what `work` returns, or 0; a mistake is told in one sentence, and Ctrl-C with `stopped`."""
    try:
        return work() or 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except OSError as error:  # a full disk, a folder that cannot be written
        print(f"{error.filename or 'Writing'}: {error.strerror or error}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{stopped}", file=sys.stderr)
        return 130


def nearest(name: str, known: typing.Iterable[str], prefix: str = "") -> str:
    """'; did you mean x' when something is close, else '; known: ...', to end an error message with."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    listed = ", ".join(prefix + word for word in known[:20]) + (", ..." if len(known) > 20 else "")
    return f"; did you mean {prefix}{close[0]}" if close else f"; known: {listed}"


def fill(target, content, where: str, prefix: str = ""):
    """Set the fields of the dataclass `target` from the dict `content`, recursively; UserError names `where` and the key."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected keys and values{f' under {prefix[:-1]}' if prefix else ''}, found {content!r}.")
    hints = typing.get_type_hints(type(target))
    fields = {item.name: item for item in dataclasses.fields(target)}
    for key, value in content.items():
        if key not in fields:
            raise UserError(f"{where}: unknown key {prefix}{key}{nearest(key, fields, prefix)}.")
        current = getattr(target, key)
        if dataclasses.is_dataclass(current):
            if value is None:  # a section's name with nothing under it
                continue
            if isinstance(value, str):  # `baseline: ft-d` is short for `baseline: {name: ft-d}`
                value = {"name": value, "tasks": []} if key == "stream" else {"name": value}
            elif isinstance(value, list) and key == "stream":  # `stream: [...]` is short for `stream: {tasks: [...]}`
                value = {"name": None, "tasks": value}
            fill(current, value, where, f"{prefix}{key}.")
        else:
            setattr(target, key, _convert(value, hints[key], fields[key].metadata, f"{where}: {prefix}{key}"))


def _convert(value, kind, checks, where: str):
    """`value` as the field's type, within its bounds; UserError otherwise."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # only `X | None` occurs
        if value is None or value == "none":
            return None
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise UserError(f"{where} must be two numbers [low, high], not {value!r}.")
        low, high = (_convert(item, float, checks, where) for item in value)
        if low > high:
            raise UserError(f"{where}: the lower end {low:g} is above the upper end {high:g}.")
        return low, high
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise UserError(f"{where} must be a list in brackets, not {value!r}.")
        entries = [_convert(entry, typing.get_args(kind)[0], checks, f"{where}: an entry") for entry in value]
        if len(set(entries)) < len(entries):
            raise UserError(f"{where} has an entry twice: {value!r}.")
        return entries
    wrong = UserError(f"{where} must be {_KINDS[kind]}, not {value!r}.")
    if kind is bool:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if str(value).lower() not in words:
            raise wrong
        return words[str(value).lower()]
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong
        if not math.isfinite(value) or (kind is int and value != int(value)):
            raise wrong
        value = kind(value)
        if "low" in checks and value < checks["low"]:
            raise UserError(f"{where} must be at least {checks['low']:g}, not {value:g}.")
        if "above" in checks and value <= checks["above"]:
            raise UserError(f"{where} must be above {checks['above']:g}, not {value:g}.")
        if "high" in checks and value > checks["high"]:
            raise UserError(f"{where} must be at most {checks['high']:g}, not {value:g}.")
        return value
    if kind is str:
        if isinstance(value, (dict, list, bool)) or value is None:
            raise wrong
        value = str(value)
        if "choices" in checks and value not in checks["choices"]:
            raise UserError(f"{where} cannot be {value!r}{nearest(value, checks['choices'])}.")
        return value
    if not isinstance(value, kind):
        raise wrong
    return value


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list",
          dict: "keys and values in braces"}


def describe(settings=None) -> str:
    """All keys of a dataclass, by default of Config, with default and meaning, for --help."""
    lines = []

    def walk(target, prefix):
        for item in dataclasses.fields(target):
            value = getattr(target, item.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{item.name}.")
            else:
                shown = list(value) if isinstance(value, tuple) else value
                lines.append(f"  {f'{prefix}{item.name}={shown}':<34} {item.metadata['help']}")

    walk(settings or Config(), "")
    return "\n".join(lines)
