"""One page of runs and lifetimes for a browser, in a file that needs nothing else: `python -m nevis_lite.report RUN...`.

Each number comes from `metrics`, `compare`, `analysis`, `lifelong_report` or `fluid_metrics`; this module only lays them out. A
row is a list of cells, which are text, a number, None for what is missing, or (number, how it is shown).
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import sys
from collections import defaultdict
from html import escape
from pathlib import Path, PurePosixPath, PureWindowsPath
from urllib.parse import quote

from nevis_lite import (
    analysis,
    compare,
    config,
    fluid_metrics,
    fluid_plots,
    lifelong,
    lifelong_plots,
    lifelong_report,
    metrics,
    plots,
)
from nevis_lite.config import UserError
from nevis_lite.lifelong_report import metric_rows, pair_rows, reasons, task_rows
from nevis_lite.metrics import human, name_of, shown
from nevis_lite.run_folder import write_atomic

HERE = Path(__file__).parent
ENLARGED = 1.6  # CSS pixels for a point of a figure: its text of 7 and 8 points is then as large as that of a table
SMALLEST = 0.7  # of that size on a narrow screen; a figure that needs more room is scrolled
TITLE = "<title>nevis_lite: "  # by which a page is known that may be written over
MADE_WITH = ("started", "nevis_lite", "revision", "device", "torch", "platform")  # of environment.json, all of them text


# ---- the page -------------------------------------------------------------------------------------------------------


def write(out: str | Path, names: list[str]):
    """The page of runs and lifetimes, given by their folders or logs, into the file `out`.

    ValueError, OSError or UserError, one sentence, when one cannot be read or they do not go together, without matplotlib, or
    where the file is there and no such page.
    """
    plots.style()  # says early that matplotlib is missing
    if Path(out).is_dir():
        raise UserError(f"{Path(out)}: is a folder; --out names a file, such as {Path(out) / 'report.html'}.")
    if Path(out).exists() and not (Path(out).is_file() and TITLE.encode() in Path(out).read_bytes()[:500]):
        raise UserError(f"{Path(out)}: is there and no page of this command; move it away, or choose another --out.")
    runs, lives, fluid = plots.by_kind([Path(name) for name in names])
    text = page([load(path) for path in runs], [load_lifetime(path) for path in lives],
                [fluid_metrics.load(path) | {"config": _settings(path)} for path in fluid])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(out), lambda file: file.write(text.encode()))


def load(folder: Path) -> dict:
    """A run as `plots.load` returns it, with its "config" (YAML) and its "environment", both without paths of this machine."""
    path = folder / "environment.json"
    facts = config.keys_of(path) if path.is_file() else {}
    if wrong := [key for key in (*MADE_WITH, "command") if not isinstance(facts.get(key), str | None)]:
        raise UserError(f"{path}: damaged: it has {facts[wrong[0]]!r} for {wrong[0]}, which is text.")
    if facts.get("command"):
        try:
            words = shlex.split(facts["command"])
        except ValueError as error:
            raise UserError(f"{path}: damaged: its command {facts['command']!r} is no command line ({error}).") from None
        facts["command"] = shlex.join(map(_without_path, words))
    return plots.load(folder) | {"config": _settings(folder), "environment": _without_path(facts)}


def load_lifetime(path: Path) -> dict:
    """What `lifelong_plots.load` returns, as "lifetime", with its "name" and, of one of `scenario.py`, its "config" (YAML)."""
    lifetime, place = lifelong_plots.load(path), path.resolve()
    lifetime.log.name = place.name if path.is_dir() else f"{place.parent.name}/{place.name}"
    if (path / "config.yaml").is_file() and not (path / "results.json").is_file():
        lifetime.log.notes.append("UNFINISHED: its experts are not all there yet")
    return {"name": lifetime.log.name, "lifetime": lifetime, "config": _settings(path)}


def _settings(folder: Path) -> str:
    settings = config.keys_of(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    return config.write_yaml(_without_path(settings)) if settings else ""


def _without_path(value):
    """Absolute paths tell a reader nothing but who lives where: only their last name is kept."""
    if isinstance(value, dict):
        return {key: _without_path(content) for key, content in value.items()}
    if isinstance(value, list):
        return [_without_path(content) for content in value]
    if not isinstance(value, str):
        return value
    key, equals, path = value.rpartition("=")
    absolute = PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute()
    return f"{key}{equals}…/{PureWindowsPath(path).name}" if absolute else value


def page(runs: list[dict], lifetimes: list[dict], fluid: list[dict]) -> str:
    """The page as HTML. The same runs give the same page. ValueError as in `compare.comparison` and its likes."""
    streams, families = defaultdict(list), defaultdict(list)
    for run in runs:
        streams[run["stream"], run["phase"]].append(run)
        families[run["stream"].split(" (")[0], run["phase"]].append(run)
    found = {key: compare.comparison(members) for key, members in streams.items()}
    sections = {", ".join(key): _baselines(members, found[key]) for key, members in streams.items()}
    sections |= {f"{name} and its variants, {phase}": _variants(members) for (name, phase), members in families.items()
                 if len({run["stream"] for run in members}) > 1}
    sections["Pictures"] = "".join(picture_html(picture, "run") for picture in plots.pictures(runs)) if runs else ""
    sections["Differences and tasks"] = "\n".join(
        f"<h3>{escape(', '.join(key))}</h3>" * (len(streams) > 1) + _details(members, found[key])
        for key, members in streams.items())
    sections["Lifetimes"] = _lifetimes(lifetimes) if lifetimes else ""
    configs = defaultdict(list)
    for run in fluid:
        configs[fluid_metrics.name_of(run)].append(run)
    sections |= {f"FLUID: {name}": _fluid(members, len(configs) > 1) for name, members in configs.items()}
    sections["Each run"] = "\n".join(map(_run, runs))
    sections = {name: body for name, body in sections.items() if body}
    title = ", ".join([*dict.fromkeys(name for name, _ in families), *["lifetimes"] * bool(lifetimes),
                       *configs])
    counts = [f"{len(them)} {what}{'s' * (len(them) > 1)}" for them, what in
              ((runs, "run"), (lifetimes, "lifetime"), (fluid, "FLUID run")) if them]
    links = [f'<a href="#part-{number}">{escape(name)}</a>' for number, name in enumerate(sections)]
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"{TITLE}{escape(title)}</title>\n<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n<header>",
        f"<h1>nevis_lite: {escape(title)}</h1>\n<p>{', '.join(counts)}</p>\n{_made_with(runs)}",
        f'<nav aria-label="Contents">{" ".join(links)}</nav>\n</header>\n<main>',
        *(f'<section id="part-{number}">\n<h2>{escape(name)}</h2>\n{body}\n</section>'
          for number, (name, body) in enumerate(sections.items())),
        f"</main>\n<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n"])


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _made_with(runs: list[dict]) -> str:
    """When and with what, so far as the runs say so; where they differ, all of it."""
    facts = []
    for key in MADE_WITH:
        values = sorted({run["environment"][key] for run in runs if run["environment"].get(key) is not None})
        if key == "started" and values:
            values = list(dict.fromkeys(value[:10] for value in (values[0], values[-1])))
        if values:
            facts.append(f"<dt>{key}</dt><dd>{escape((' to ' if key == 'started' else ', ').join(values))}</dd>")
    return f"<dl>{''.join(facts)}</dl>" if facts else ""


# ---- runs -----------------------------------------------------------------------------------------------------------


def _baselines(runs: list[dict], found: dict) -> str:
    """What the runs of one stream and phase come to; `found` is their comparison."""
    partial = {label for run, label in zip(runs, compare.labels_of(runs), strict=True) if run["partial"]}
    wins = defaultdict(list)
    for pair in found["pairs"]:
        better = pair["verdict"].removesuffix(" is better")
        if better != pair["verdict"]:
            wins[better].append(pair["second"] if better == pair["first"] else pair["first"])
    rows = [[label + ", PARTIAL" * (label in partial), *_averages(group), "*" if group["pareto"] else "",
             ", ".join(wins[label])] for label, group in found["baselines"].items()]
    return _marks(runs) + table(
        "Baselines", ["baseline", *compare.AVERAGES, "Pareto front", "better than"], rows,
        "Mean and standard deviation over the seeds of finished runs. Better: by the interval of the paired difference.")


def _details(runs: list[dict], found: dict) -> str:
    """The runs of one stream and phase beside each other; `found` is their comparison."""
    pairs = [[pair["first"], pair["second"], pair["n"], _signed(pair["mean"]), pair["sd"],
              *map(_signed, pair["interval"] or (None, None)), pair["verdict"]] for pair in found["pairs"]]
    tasks = [[task["year"], task["task"], *((error["mean"], compare.mean_and_sd(error)) for error in task["errors"].values())]
             for task in found["tasks"]]
    return "\n".join([
        table("Paired differences of the mean error",
              ["first", "second", "seeds", "mean", "sd", "95 % from", "to", "verdict"], pairs,
              "First minus second, over the seeds that both have; below 0 the first is better.") if pairs else "",
        table("Errors by task", ["year", "task", *found["baselines"]], tasks, "Over all runs that have learned the task."),
        _runs(runs, compare.labels_of(runs)),
        f"<p>{_download('Baselines, differences and errors as JSON', 'comparison.json', json.dumps(found))}</p>"])


def _runs(runs: list[dict], labels: list[str]) -> str:
    rows = []
    for run, label, more in zip(runs, labels, analysis.more(runs), strict=True):
        regret = more["regret"] or {"meta_test": None, "all": None}
        rows.append([run["name"], label, run["seed"], _state(run), run["error"], run["error_all"], _compute(run["cflop"]),
                     _compute(run["cflop_paper"]), _signed(regret["meta_test"]), _signed(regret["all"]),
                     _signed(more["forward_transfer"]["mean"]), more["sources"]["longest"]])
    header = ["run", "baseline", "seed", "state", "error", "error, all tasks", "compute, all phases", "training only",
              "regret, meta-test", "regret, all tasks", "forward transfer", "longest chain"]
    return table("Runs", header, rows, "Regret is against the run of Indep with the same seed and budget. The longest chain "
                 "says how often weights were handed on.")


def _variants(runs: list[dict]) -> str:
    rows = [[row["stream"], row["baseline"], row["draws"], row["tasks"], *_averages(row), _signed(row["difference"]),
             row["verdict"] or row["reason"] or ""] for row in analysis.variants(runs)]
    header = ["stream", "baseline", "draws", "tasks", *compare.AVERAGES, "difference", "verdict"]
    return _marks(runs) + table("Variants", header, rows,
                                "Difference: mean error minus that of the same baseline on the unchanged stream.")


def _averages(group: dict) -> list:
    """`compare.averages` as cells under the header compare.AVERAGES."""
    errors = [group[key][part] for key in ("error", "error_all") for part in ("mean", "sd")]
    return [group["error"]["n"], group["budget"], *errors, _compute(group["cflop"])]


def _run(run: dict) -> str:
    """One run, folded: its tasks, settings and environment."""
    names = {task["index"]: name_of(task) for task in run["tasks"]}
    searched = list(dict.fromkeys(key for task in run["tasks"] for key in task["hyperparameters"]))
    rows = [[task["index"], task["year"], name_of(task), "*" if task["meta"] == "test" else "", task["domain"],
             task["num_classes"], task["num_train"], metrics.origin(task["source"], names),
             ", ".join(metrics.origin(source, names) for source in task["auxiliaries"]),
             *(_searched(task["hyperparameters"].get(key)) for key in searched), task.get("dev_error"),
             (task["error"], shown(task["error"]) if "reason" not in task else task["reason"]),
             _compute(sum(task["flops"].values()))] for task in run["tasks"]]
    header = ["#", "year", "task", "meta-test", "domain", "classes", "train", "start", "trained with", *searched, "dev error",
              "error", "compute"]
    environment = run["environment"] and json.dumps(run["environment"], indent=1, ensure_ascii=False)
    texts = {"Settings": run["config"], "Environment": environment}
    totals = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in metrics.totals(run))
    return "\n".join([
        f"<details>\n<summary>{escape(run['name'])} {escape(_state(run))}</summary>", _marks([run]), f"<dl>{totals}</dl>",
        table(f"Tasks of {run['name']}", header, rows),
        *(f"<h4>{title}</h4>\n<pre>{escape(text)}</pre>" for title, text in texts.items() if text), "</details>"])


def _searched(value: float | int | str | bool | None):
    """A hyper-parameter as a cell."""
    return (value, f"{value:.3g}") if isinstance(value, float) else str(value) if isinstance(value, bool) else value


def _state(run: dict) -> str:
    unfinished = ["UNFINISHED: {done} of {planned} tasks".format(**run["unfinished"])] if "unfinished" in run else []
    return "; ".join(unfinished + [f"PARTIAL: {len(run['partial'])} missing"] * bool(run["partial"]))


def _marks(runs: list[dict]) -> str:
    lines = [re.sub(r"\*\*(\w+)\*\*", r"<strong>\1</strong>", escape(mark), count=1) for mark in compare.marks_of(runs)]
    return "".join(f'<p class="mark">{line}</p>\n' for line in lines)


# ---- lifetimes ------------------------------------------------------------------------------------------------------


def _lifetimes(lifetimes: list[dict]) -> str:
    """Metrics of one lifetime, or of several together; why numbers are missing; pictures, and settings."""
    found = {each["name"]: lifelong.evaluate(each["lifetime"].log, each["lifetime"].experts) for each in lifetimes}
    if len(found) < len(lifetimes):
        raise UserError("Two lifetimes have the same name: rename one, or name only one of them.")
    result = next(iter(found.values())) if len(found) == 1 else lifelong_report.across(found)
    with plots.style():
        pictures = lifelong_plots.draw([each["lifetime"] for each in lifetimes])[0]
    tables = (("Metrics of the lifetime", metric_rows(result)), ("Tasks of the lifetime", task_rows(result)),
              ("Transfer between tasks", pair_rows(result)))
    missing, settings = reasons(result), [each for each in lifetimes if each["config"]]
    return "\n".join([
        f"<p>{escape(', '.join(found))}; mode {result['mode']}</p>",
        *(f'<p class="mark">{escape(note)}</p>' for note in result["notes"]),
        *(table(title, header, rows) for title, (header, *rows) in tables if rows),
        "<h3>Missing</h3>\n<ul>" + "".join(f"<li>{escape(text)}</li>" for text in missing) + "</ul>" if missing else "",
        f"<p>{_download('All of this as JSON', 'lifetimes.json', json.dumps(result))}</p>",
        *(picture_html(picture, "life") for picture in pictures),
        *(f"<details>\n<summary>Settings of {escape(each['name'])}</summary>\n<pre>{escape(each['config'])}</pre>\n</details>"
          for each in settings)])


# ---- FLUID ----------------------------------------------------------------------------------------------------------


def _fluid(runs: list[dict], several: bool) -> str:
    """Runs of one config: accuracies, detection of unseen classes, pictures. `several`: there are other configs beside it."""
    found, end = fluid_metrics.comparison(runs), f", {fluid_metrics.name_of(runs[0])}" * several
    accuracies = [[method, *(_spread(values[name]) for name in fluid_metrics.ACCURACY),
                   *(round(values["macs"][name]["mean"] / 1e9, 3) for name in ("cached", "uncached"))]
                  for method, values in found["methods"].items()]
    unseen = {(method, score): [*(_spread(values[measure]) for measure in fluid_metrics.UNSEEN),
                                _spread(each["open_accuracy"][score]) if score in each["open_accuracy"] else None]
              for method, each in found["methods"].items() for score, values in each["unseen"].items()}
    clock = [["-", "clock", *cells] for (_, score), cells in unseen.items() if score == "clock"][:1]  # the same for all
    unseen = [[*key, *cells] for key, cells in unseen.items() if key[1] != "clock"] + clock
    with plots.style():
        pictures = fluid_plots.draw(runs)[0]
    return "\n".join([
        f"<p>Seeds {', '.join(map(str, found['seeds']))}; mean and standard deviation over them.</p>",
        table(f"Accuracy{end}", ["method", *fluid_metrics.ACCURACY.values(), "GMAC cached", "not cached"], accuracies,
              fluid_metrics.LEGEND),
        table(f"Unseen classes{end}", ["method", "by", *fluid_metrics.UNSEEN.values(), "open"], unseen,
              fluid_metrics.UNSEEN_LEGEND),
        f"<p>{_download('All of this as JSON', 'fluid.json', json.dumps(found))}</p>",
        *(picture_html(picture, plots.slug(f"fluid{end}")) for picture in pictures),
        *(f"<details>\n<summary>Settings of {escape(run['name'])}</summary>\n<pre>{escape(run['config'])}</pre>\n</details>"
          for run in runs)])


# ---- parts of a page ------------------------------------------------------------------------------------------------


def _signed(value: float | None) -> tuple:
    return value, shown(value, "+.4f")


def _spread(spread: dict) -> tuple:
    return spread["mean"], compare.mean_and_sd(spread)


def _compute(flops: float | None) -> tuple:
    return flops, "-" if flops is None else human(flops)


def table(title: str, header: list[str], rows: list[list], note: str = "") -> str:
    """A table in a box of its own, with its values as CSV."""
    values = [[cell[0] if isinstance(cell, tuple) else cell for cell in row] for row in rows]
    kinds = ["text" if any(isinstance(row[i], str) for row in values) else "number" for i in range(len(header))]
    head = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(header, kinds, strict=True))
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    link = _download("CSV", f"{plots.slug(title)}.csv", plots.csv_text([dict(zip(header, row, strict=True)) for row in values]))
    return (f'<figure class="table">\n<figcaption><h3>{escape(title)}</h3> {link}</figcaption>\n'
            f'<div class="box" role="region" aria-label="{escape(title)}" tabindex="0">'
            f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n"
            + (f"<p>{escape(note)}</p>\n" if note else "") + "</figure>")


def _cell(cell) -> str:
    value, text = cell if isinstance(cell, tuple) else (cell, f"{cell:.4f}" if isinstance(cell, float) else str(cell))
    if value is None:
        return f'<td class="number">{"-" if cell is None else escape(text)}</td>'
    if isinstance(value, str):
        return f"<td>{escape(text)}</td>"
    return f'<td class="number" data-value="{value!r}">{escape(text)}</td>'


def _download(text: str, file: str, content: str) -> str:
    kind = "json" if file.endswith("json") else "csv"
    return f'<a download="{escape(file)}" href="data:text/{kind};charset=utf-8,{quote(content)}">{escape(text)}</a>'


def picture_html(picture: plots.Picture, prefix: str) -> str:
    """A picture in the page's own colours, with its data; `prefix` keeps its ids apart from those of other pictures."""
    link = _download("CSV", f"{picture.name}.csv", plots.csv_text(picture.rows))
    return (f'<figure class="picture">\n<figcaption><h3>{escape(picture.title)}</h3> {link}</figcaption>\n'
            f'<div class="box" role="region" aria-label="{escape(picture.title)}" tabindex="0">{svg(picture, prefix)}</div>\n'
            f"<p>{escape(picture.caption)}</p>\n</figure>\n")


def svg(picture: plots.Picture, prefix: str) -> str:
    """The figure as SVG inside of HTML: text as text, the ink and the pale colour as CSS variables, ids of its own."""
    import matplotlib

    file, own = io.StringIO(), f"{prefix}-{plots.slug(picture.name)}-"
    with plots.style(), matplotlib.rc_context({"svg.hashsalt": picture.name}):
        picture.figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| version="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{own}", text)
    text = text.replace(plots.INK, "var(--ink)").replace(plots.PALE, "var(--pale)")
    width, height = (ENLARGED * float(size) for size in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    view = f'viewBox="0 0 {width / ENLARGED:g} {height / ENLARGED:g}" width="{width:.0f}" height="{height:.0f}"'
    label = f'style="min-width: {SMALLEST * width:.0f}px" role="img" aria-label="{escape(picture.title)}"'
    return f"<svg {view} {label}>{text[text.index('>') + 1:]}"


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use or a run that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.report", allow_abbrev=False,
        description="Write a page with the tables and pictures of runs and lifetimes, for a browser.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, also of one that goes on, or of a lifetime of "
                        "scenario.py; or the log of a lifetime")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    try:
        write(arguments.out, arguments.runs)
    except (UserError, OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 2
    print(f"In {arguments.out}: tables and pictures for a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
