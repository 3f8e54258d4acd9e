import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import made_fluid
import pytest
from made_runs import row, run, write, write_unfinished

pytest.importorskip("matplotlib")

from nevis_lite import plots, report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The tables of a page as {title: rows of texts}, its ids, links and downloads; fails where tags don't nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.sources, self.tables, self.files, self.marks = [], [], [], {}, {}, []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, pairs):
        found = dict(pairs)
        assert len(found) == len(pairs), f"<{tag}> has an attribute twice"
        self.ids += [found["id"]] if "id" in found else []
        self.sources += [found[key] for key in ("src", "href", "xlink:href", "action", "data") if key in found]
        if "download" in found:
            self.files[found["download"]] = unquote(found["href"].split(",", 1)[1])
        if found.get("role") == "region":
            self.title = found["aria-label"]
        elif tag == "table":
            self.tables[self.title] = []
        elif tag == "tr":
            self.tables[self.title].append([])
        elif tag in ("td", "th"):
            self.tables[self.title][-1].append("")
        elif found.get("class") == "mark":
            self.marks.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, pairs):
        self.handle_starttag(tag, pairs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, text):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.title][-1][-1] += text
        elif "p" in self.open and self.marks:
            self.marks[-1] += text


def made(tmp_path, runs, *folders):
    """The page of finished runs and of folders, as text and taken apart."""
    tmp_path.mkdir(exist_ok=True)
    report.write(tmp_path / "report.html", [*(write(tmp_path / each["name"], each) for each in runs), *folders])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three seeds of FT-d and of Indep."""
    runs = [run("ft-d", seed, (0.5, 0.3, error)) for seed, error in enumerate((0.10, 0.12, 0.11))]
    runs += [run("indep", seed, (0.5, 0.4, error)) for seed, error in enumerate((0.20, 0.21, 0.22))]
    return made(tmp_path_factory.mktemp("pages"), runs)


def test_numbers_are_those_of_the_runs(page):
    tables = page[1].tables
    # Means of 0.10, 0.12, 0.11 and of 0.20, 0.21, 0.22; all tasks: (0.5 + 0.3 + 0.11) / 3 and (0.5 + 0.4 + 0.21) / 3.
    # A task costs 3e12 + 1e11 + 1e11 + 4e10.
    assert tables["Baselines"][1:] == [
        ["ft-d", "3", "3 x 100", "0.1100", "0.0100", "0.3033", "0.0033", "9.72 TFLOP", "*", "indep"],
        ["indep", "3", "3 x 100", "0.2100", "0.0100", "0.3700", "0.0033", "9.72 TFLOP", "", ""]]
    # Differences -0.10, -0.09, -0.11: mean -0.1, sd 0.01, and 4.303 * 0.01 / sqrt(3) = 0.0248.
    assert tables["Paired differences of the mean error"][1:] == [
        ["ft-d", "indep", "3", "-0.1000", "0.0100", "-0.1248", "-0.0752", "ft-d is better"]]
    assert tables["Errors by task"] == [
        ["year", "task", "ft-d", "indep"],
        ["1998", "DIGITS", "0.5000 ± 0.0000", "0.5000 ± 0.0000"],
        ["2004", "A VERY LONG NAME OF A DATA SET", "0.3000 ± 0.0000", "0.4000 ± 0.0000"],
        ["2021", "FLOWERS", "0.1100 ± 0.0100", "0.2100 ± 0.0100"]]
    # Regret of seed 0: 0.10 - 0.20 on the meta-test task, and 0.3 - 0.4 before.
    assert tables["Runs"][1] == ["ft-d-0", "ft-d", "0", "", "0.1000", "0.3000", "9.72 TFLOP", "9 TFLOP", "-0.1000", "-0.2000",
                                 "-", "2"]
    assert tables["Tasks of ft-d-1"][3] == [
        "105", "2021", "FLOWERS", "*", "object", "10", "1281167", "1 A VERY LONG NAME OF A DATA SET", "", "0.0123", "0.15", "-",
        "0.1200", "3.24 TFLOP"]


def test_the_page_needs_nothing_else(page):
    text, parsed = page
    assert len(parsed.ids) == len(set(parsed.ids)) > 0
    assert not re.search(r"https?://", text)
    assert all(source.startswith(("#", "data:")) for source in parsed.sources)
    used = {source[1:] for source in parsed.sources if source.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(parsed.ids)
    assert "<svg" in text and "var(--ink)" in text and plots.INK not in text and plots.PALE not in text


def test_every_table_and_picture_can_be_taken_away(page):
    _, parsed = page
    for title, (header, *rows) in parsed.tables.items():
        first, *others = csv.reader(io.StringIO(parsed.files[f"{plots.slug(title)}.csv"]))
        assert first == header and len(others) == len(rows)
    assert parsed.files["pareto.csv"].startswith("baseline,")
    (pair,) = json.loads(parsed.files["comparison.json"])["pairs"]
    assert pair["differences"] == pytest.approx([-0.10, -0.09, -0.11])


def test_the_same_runs_give_the_same_bytes(tmp_path):
    assert made(tmp_path / "a", [run(seed=0), run(seed=1)])[0] == made(tmp_path / "b", [run(seed=0), run(seed=1)])[0]


def test_names_are_escaped(tmp_path):
    name = """<script>alert('x')</script> & "co" </svg>"""
    tasks = [row(0, "a", 2000, 0.5, name=name, domain=name), row(1, "b", 2021, 0.5, meta="test", name=name, source=0,
                                                                 scores={"0": 0.5}, hyperparameters={name: name})]
    text, parsed = made(tmp_path, [run(name, 0, tasks=tasks, stream=name, partial=[name], name="odd")])
    assert text.count("<script>") == 1 and name not in text
    assert parsed.tables["Errors by task"][1] == ["2000", name, "0.5000"] and name in parsed.marks[0]


def test_marks_of_partial_and_unfinished_runs(tmp_path):
    going = write_unfinished(tmp_path / "going", run("mt", 0), planned=12)
    _, parsed = made(tmp_path, [run("ft-d", 0, partial=["birds", "cars"]), run("indep", 0)], going)
    partial, unfinished = parsed.marks[:2]
    assert partial == "PARTIAL: ft-d-0 misses birds, cars"
    assert unfinished.startswith("UNFINISHED: going has done 3 of 12 tasks")
    names = [cells[0] for cells in parsed.tables["Baselines"][1:]]
    assert names == ["ft-d, PARTIAL", "indep", "mt"]
    states = [cells[3:6] for cells in parsed.tables["Runs"][1:]]
    assert states[0][0] == "PARTIAL: 2 missing" and states[2] == ["UNFINISHED: 3 of 12 tasks", "-", "-"]


def test_what_is_undefined_is_a_dash(tmp_path):
    rows = [row(0, "a", 2000, float("nan"), reason="outputs are not finite"), row(1, "b", 2021, 0.25, meta="test")]
    tables = made(tmp_path, [run("ft-d", 0, tasks=rows)])[1].tables
    assert tables["Baselines"][1] == ["ft-d", "1", "3 x 100", "0.2500", "-", "-", "-", "6.48 TFLOP", "*", ""]
    assert tables["Errors by task"][1] == ["2000", "A", "-"]
    assert tables["Tasks of ft-d-0"][1][-2] == "outputs are not finite"


@pytest.mark.parametrize("tasks", [[], [row(0, "a", 2021, 0.5, meta="test")]], ids=["none", "one"])
def test_one_task_or_none(tmp_path, tasks):
    folder = write_unfinished(tmp_path / "going", run(tasks=tasks), planned=3)
    parsed = made(tmp_path, [], folder)[1]
    assert len(parsed.tables["Tasks of going"]) == 1 + len(tasks)


def test_streams_have_a_section_each_and_variants_a_table(tmp_path):
    runs = [run("ft-d", 0, stream=stream, name=name) for stream, name in
            (("full", "a"), ("full (shuffled, seed 1)", "b"), ("tiny", "c"))]
    text, parsed = made(tmp_path, runs)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == ["full, meta_test", "full (shuffled, seed 1), meta_test", "tiny, meta_test",
                        "full and its variants, meta_test", "Pictures", "Differences and tasks", "Each run"]
    assert [cells[0] for cells in parsed.tables["Variants"][1:]] == ["full", "full (shuffled)"]


def test_a_lifetime(tmp_path):
    life = tmp_path / "life"
    (life / "experts").mkdir(parents=True)
    head = "block_num,block_type,task,exp_num,value\n"
    blocks = [(0, "test", "a", 0.2), (0, "test", "b", 0.2), (1, "train", "a", 0.8), (2, "test", "a", 0.8),
              (2, "test", "b", 0.6), (3, "train", "b", 0.9), (4, "test", "a", 0.4), (4, "test", "b", 0.9)]
    (life / "log.csv").write_text(head + "".join(f"{block},{kind},{task},{i},{value}\n"
                                                 for i, (block, kind, task, value) in enumerate(blocks)))
    (life / "experts" / "0.csv").write_text(head + "0,train,a,0,0.8\n")
    (life / "config.yaml").write_text("seed: 0\n")
    parsed = made(tmp_path, [], str(life))[1]
    values = {cells[0]: cells[2] for cells in parsed.tables["Metrics of the lifetime"][1:]}
    # Normalised, a is 1 at 0.2 and 101 at 0.8, so 0.4 is 34.33; b is 1 at 0.2 and 101 at 0.9, so 0.6 is 58.14.
    assert values["PM"] == "-66.6667" and values["FT"] == f"{(58.142857 - 1) / (58.142857 + 1):.4f}"
    assert values["BT"] == f"{(34.333333 - 101) / (34.333333 + 101):.4f}" and values["RP"] == "1.0000"
    assert any(mark.startswith("UNFINISHED") for mark in parsed.marks)


def test_fluid_runs_have_a_section_for_each_config(tmp_path):
    folders = [made_fluid.run(tmp_path / f"{name}-seed{seed}", seed) for name in ("small", "large") for seed in (0, 1)]
    parsed = made(tmp_path, [run()], *map(str, folders))[1]
    results = [json.loads((folder / "results.json").read_text())["methods"]["ft"] for folder in folders[:2]]
    shown = {cells[0]: cells for cells in parsed.tables["Accuracy, small"][1:]}["ft"]
    assert shown[1].split(" ± ")[0] == f"{(results[0]['overall'] + results[1]['overall']) / 2:.4f}"
    clocks = [cells for cells in parsed.tables["Unseen classes, large"][1:] if cells[1] == "clock"]
    assert len(clocks) == 1 and len(parsed.ids) == len(set(parsed.ids))


def test_paths_of_the_machine_stay_there(tmp_path):
    folder = tmp_path / "one"
    write(folder, run())
    (folder / "config.yaml").write_text("data: {dir: /home/ann lee/data}\nstream: {tasks: [{folder: 'C:\\ann lee\\birds'}]}\n")
    command = "python -m nevis_lite.train --config '/home/ann lee/my.yaml' data.dir=/srv/data seed=1"
    (folder / "environment.json").write_text(json.dumps({"command": command, "started": "2026-11-30T12:00:00+0000"}))
    text, _ = made(tmp_path, [], str(folder))
    assert not [path for path in ("ann lee", "/srv", "C:", str(tmp_path)) if path in text]
    assert all(kept in text for kept in ("…/my.yaml", "…/data", "…/birds", "seed=1", "2026-11-30"))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", run())
    assert report.main(["one"]) == 0 and (tmp_path / "report.html").is_file()
    assert capsys.readouterr().out == "In report.html: tables and pictures for a browser\n"
    assert report.main(["one", "--out", "new/page.html"]) == 0 and (tmp_path / "new" / "page.html").is_file()
    capsys.readouterr()
    assert report.main(["one", "two"]) == 2 and "No run in two" in capsys.readouterr().err
    assert report.main(["one", "--out", "new"]) == 2
    assert capsys.readouterr().err == "new: is a folder; --out names a file, such as new/report.html.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "one", "report.html"]
    (tmp_path / "one" / "environment.json").write_text("[]")
    assert report.main(["one"]) == 2 and "one/environment.json: expected keys and values" in capsys.readouterr().err
    (tmp_path / "one" / "environment.json").write_bytes(b"\xff\xfe")
    assert report.main(["one"]) == 2 and "one/environment.json: cannot be read" in capsys.readouterr().err
    (tmp_path / "one" / "environment.json").unlink()
    write(tmp_path / "three", run())
    assert report.main(["one", "three"]) == 2 and "have seed 0" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["command", "started", "nevis_lite", "revision", "device", "torch", "platform"])
@pytest.mark.parametrize("value", [3, ["a"], {"a": 1}])
def test_an_environment_that_is_no_text_is_one_sentence(tmp_path, capsys, key, value):
    folder = write(tmp_path / "one", run())
    (tmp_path / "one" / "environment.json").write_text(json.dumps({key: value}))
    assert report.main([folder, "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{folder}/environment.json: damaged: it has {value!r} for {key}") and error.count("\n") == 1


def test_a_command_of_unequal_quotes_is_one_sentence(tmp_path, capsys):
    folder = write(tmp_path / "one", run())
    (tmp_path / "one" / "environment.json").write_text(json.dumps({"command": "train 'a"}))
    assert report.main([folder, "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err == (f"{folder}/environment.json: damaged: its command \"train 'a\" is no command line "
                                       "(No closing quotation).\n")


@pytest.mark.parametrize("content", ["", "my thesis", "<!DOCTYPE html>\n<html lang=\"en\">\n<title>mine</title>"])
def test_only_a_page_of_its_own_is_written_over(tmp_path, capsys, content):
    folder, page = write(tmp_path / "one", run()), tmp_path / "page.html"
    page.write_text(content)
    assert report.main([folder, "--out", str(page)]) == 2 and page.read_text() == content
    assert capsys.readouterr().err == f"{page}: is there and no page of this command; move it away, or choose another --out.\n"
    page.unlink()
    assert report.main([folder, "--out", str(page)]) == 0
    first = page.read_bytes()
    write(tmp_path / "two", run(seed=1))
    assert report.main([folder, str(tmp_path / "two"), "--out", str(page)]) == 0 and page.read_bytes() != first


@pytest.mark.parametrize("blocked, code", [("torch", 0), ("matplotlib", 2)])
def test_what_is_needed(tmp_path, blocked, code):
    write(tmp_path / "one", run())
    program = f"import sys; sys.modules[{blocked!r}] = None; from nevis_lite import report; sys.exit(report.main(['one']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(report.HERE.parent)})
    assert done.returncode == code, done.stderr
    assert code == 0 or done.stderr == "Pictures need matplotlib: pip install -e '.[plots]'\n"
