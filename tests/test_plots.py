import csv
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from made_runs import row, run, write, write_unfinished

from nevis_lite import plots, report
from nevis_lite.config import UserError

pytestmark = pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")


def stream(baseline, seed, errors, **changes):
    """Four tasks, of which digits come twice; FT-d's start from the task before, which was the best of those measured."""
    related = baseline == "ft-d"
    facts = [("digits", 1998, "ocr", 900, 28.0, "train", 1), ("birds", 2004, "object", 20_000, 300.0, "train", 1),
             ("digits", 2010, "ocr", 900, 28.0, "train", 2), ("x-rays", 2021, "medical", 1_000, 64.0, "test", 1)]
    tasks = [row(i, name, year, error, domain=domain, num_train=size, resolution=pixels, meta=meta, occurrence=occurrence,
                 source=i - 1 if related and i else None, scores={str(k): 0.2 + 0.1 * k for k in range(i)} if related else {},
                 curve=[[0, 0.9], [100, error]])
             for i, ((name, year, domain, size, pixels, meta, occurrence), error) in enumerate(zip(facts, errors, strict=True))]
    return run(baseline, seed, tasks=tasks, **changes)


def trainings(*rows):
    return [{"task": task, "trial": trial, "hyperparameters": {"lr": lr, "label_smoothing": 0.1}, "error": error,
             "curve": [[0, 0.9]]}
            for task, trial, lr, error in rows]


def some_runs():
    searched = trainings((0, 0, 1e-3, 0.5), (0, 1, 1e-2, 0.2), (1, 0, 0.1, None))
    return [stream("indep", 0, (0.1, 0.4, 0.2, 0.30)), stream("indep", 1, (0.1, 0.4, 0.2, 0.40)),
            stream("ft-d", 0, (0.1, 0.3, 0.1, 0.20), trainings=searched),
            stream("ft-d", 1, (0.1, 0.4, 0.3, 0.20), cflop=1.4e13)]


@pytest.fixture(scope="module")
def drawn():
    return {picture.name: picture for picture in plots.pictures(some_runs())}


def chosen(picture, **conditions):
    return [row for row in picture.rows if all(row[key] == value for key, value in conditions.items())]


def test_each_picture_is_drawn(drawn):
    assert list(drawn) == ["pareto", "regret", "slices", "forward_transfer", "learning_curves", "hyperparameters", "statistics",
                           "relatedness-ft-d", "sources-ft-d"]
    for picture in drawn.values():
        assert picture.title and "\n" not in picture.title and picture.caption.endswith(".") and picture.rows
        assert picture.figure.get_axes()


def test_pareto_front(drawn):
    indep, ft_d = drawn["pareto"].rows
    assert indep["baseline"] == "indep" and indep["runs"] == 2 and indep["error"] == pytest.approx(0.35)
    assert indep["error_sd"] == pytest.approx(0.1 / 2**0.5) and indep["cflop"] == pytest.approx(4 * 3.24e12)
    assert indep["cflop_sd"] == 0 and ft_d["cflop"] == pytest.approx((4 * 3.24e12 + 1.4e13) / 2)
    assert ft_d["cflop_sd"] == pytest.approx((1.4e13 - 4 * 3.24e12) / 2**0.5)
    assert ft_d["error"] == pytest.approx(0.2) and indep["pareto"] and ft_d["pareto"] and not ft_d["partial"]
    labels = {text.get_text(): text.xy for text in drawn["pareto"].figure.axes[0].texts if text.get_text()}
    assert labels == {row["baseline"]: (row["cflop"], row["error"]) for row in (indep, ft_d)}


def test_regret(drawn):
    rows = drawn["regret"].rows  # differences of seed 0: 0, -0.1, -0.1, -0.1; of seed 1: 0, 0, 0.1, -0.2
    assert [row["mean"] for row in rows] == pytest.approx([0, -0.05, -0.05, -0.2])
    assert [row["sd"] for row in rows] == pytest.approx([0, 0.1 / 2**0.5, 0.3 / 2**0.5, 0.2 / 2**0.5])
    assert {row["baseline"] for row in rows} == {"ft-d"} and [row["name"] for row in rows][-1] == "X-RAYS"


def test_slices(drawn):
    (ocr,) = chosen(drawn["slices"], slice="ocr", baseline="ft-d")
    assert ocr["tasks"] == 2 and ocr["n"] == 2 and ocr["mean"] == pytest.approx((0.1 + 0.2) / 2)
    assert ocr["sd"] == pytest.approx(0.1 / 2**0.5)
    assert [row["slice"] for row in chosen(drawn["slices"], by="num_train", baseline="indep")] == ["<1k", "1k-10k", "10k-100k"]
    assert [row["tasks"] for row in chosen(drawn["slices"], by="resolution", baseline="indep")] == [2, 1, 1]


def test_forward_transfer(drawn):
    # AUC of a curve from error 0.9 to e is 1 - (0.9 + e) / 2. Indep: 0.5, then 0.45. FT-d: 0.5, then 0.5 and 0.4.
    indep, ft_d = drawn["forward_transfer"].rows
    assert indep["task"] == "DIGITS, 1998 to 2010" and indep["mean"] == pytest.approx(-0.05 / 0.5) and indep["n"] == 2
    assert ft_d["mean"] == pytest.approx((0 - 0.1 / 0.5) / 2)


def test_learning_curves(drawn):
    birds = chosen(drawn["learning_curves"], baseline="ft-d", name="BIRDS")
    assert [row["step"] for row in birds] == [0, 100] and [row["mean"] for row in birds] == pytest.approx([0.9, 0.35])


def test_learning_curves_of_a_long_stream_are_those_of_twelve_tasks():
    tasks = [row(i, f"task {i}", 1990 + i, 0.5) for i in range(23)]
    (picture,) = [one for one in plots.pictures([run(tasks=tasks)]) if one.name == "learning_curves"]
    assert list(dict.fromkeys(row["index"] for row in picture.rows)) == list(range(0, 23, 2))
    assert "12 of 23 tasks" in picture.caption


def test_hyperparameters(drawn):
    best, other = drawn["hyperparameters"].rows
    assert (best["lr"], best["rank"], best["above_best"]) == (1e-2, 1, 0)
    assert (other["lr"], other["rank"], other["above_best"]) == (1e-3, 2, pytest.approx(0.3))


def test_relatedness_and_sources(drawn):
    assert len(drawn["relatedness-ft-d"].rows) == 6  # pairs of four tasks
    (best,) = chosen(drawn["relatedness-ft-d"], target="3 X-RAYS", chosen=True)
    assert best["source"] == "2 DIGITS" and best["score"] == pytest.approx(0.4)
    assert drawn["sources-ft-d"].rows[-1]["chain"] == [0, 1, 2, 3] and drawn["sources-ft-d"].rows[-1]["links"] == 3


def test_statistics(drawn):
    assert [(row["name"], row["num_train"], row["meta"]) for row in drawn["statistics"].rows][-1] == ("X-RAYS", 1000, "test")
    bars = {patch.get_x() + patch.get_width() / 2: patch.get_height() for patch in drawn["statistics"].figure.axes[0].patches}
    assert bars[2021] == 1 and bars[2020] == 0


def test_variants_of_a_stream():
    runs = [*some_runs(), stream("ft-d", 0, (0.1, 0.4, 0.3, 0.26), stream="demo (shuffled, seed 0)")]
    drawn, names = {picture.name: picture for picture in plots.pictures(runs)}, ("stream", "baseline", "mean", "difference")
    rows = [[row[name] for name in names] for row in drawn["variants"].rows]
    assert rows == [["demo", "ft-d", pytest.approx(0.2), None], ["demo (shuffled)", "ft-d", 0.26, pytest.approx(0.06)]]
    assert "pareto-demo" in drawn and "pareto-demo-shuffled-seed-0" in drawn


def pairs():
    return [run("ft-prev", tasks=[row(0, first, 2000, 0.5), row(1, "c", 2001, error, source=0)], name=first,
                stream=f"{first} then c") for first, error in (("a", 0.2), ("b", 0.4))]


def test_pairs_of_tasks_give_a_transfer_matrix_alone():
    (picture,) = plots.pictures(pairs())
    assert picture.name == "transfer" and "2 pairs" in picture.title
    assert {(row["source"], row["target"]): row["error"] for row in picture.rows} == {
        ("scratch", "A"): 0.5, ("scratch", "B"): 0.5, ("A", "C"): 0.2, ("B", "C"): 0.4}


def test_other_pictures_show_the_largest_budget_and_the_front_shows_all():
    runs = [stream("ft-d", 0, (0.1, 0.3, 0.1, error), trials=trials) for trials, error in ((16, 0.2), (4, 0.3))]
    drawn = {picture.name: picture for picture in plots.pictures(runs)}
    assert [row["baseline"] for row in drawn["pareto"].rows] == ["ft-d, 4 x 100 updates", "ft-d, 16 x 100 updates"]
    assert {(row["baseline"], row["n"]) for row in drawn["slices"].rows} == {("ft-d", 1)}


def test_runs_that_differ_in_other_settings_go_by_their_folders():
    runs = [stream("ft-d", 0, (0.1, 0.3, 0.1, error), name=f"{name}-seed0") for name, error in (("deep", 0.2), ("wide", 0.3))]
    (picture,) = [one for one in plots.pictures(runs) if one.name == "pareto"]
    assert [row["baseline"] for row in picture.rows] == ["deep", "wide"]
    assert {text.get_text() for text in picture.figure.axes[0].texts} >= {"deep", "wide"}


def test_a_source_outside_of_the_run_gives_no_arc():
    names = [picture.name for picture in plots.pictures([run(tasks=[row(4, "digits", 1998, 0.5, source=2)])])]
    assert "sources-ft-d" not in names


def test_a_baseline_looks_the_same_in_every_picture():
    looks = plots.looks(["mine", "ft-d", "another"])
    assert looks["ft-d"] == plots.looks([])["ft-d"] and len({looks[name] for name in ("mine", "ft-d", "another")}) == 3
    assert {plots.INK, plots.PALE}.isdisjoint(colour for colour, _ in plots.BASELINES.values())


def luminance(colour):
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [colour for colour, _ in plots.BASELINES.values()])
def test_colours_are_legible_on_white_and_on_near_black(colour):
    assert 1.05 / (luminance(colour) + 0.05) >= 3 and (luminance(colour) + 0.05) / (luminance("#15171a") + 0.05) >= 3


# ---- odd runs -------------------------------------------------------------------------------------------------------


def test_one_run_of_one_task():
    names = [picture.name for picture in plots.pictures([run(tasks=[row(0, "digits", 1998, 0.5)])])]
    assert names == ["pareto", "slices", "learning_curves", "statistics"]


def test_a_run_without_tasks_gives_no_picture():
    assert plots.pictures([run(tasks=[])]) == [] and plots.pictures([]) == []


def test_an_undefined_error_leaves_gaps_and_no_picture_fails():
    runs = [stream("indep", 0, (0.1, 0.4, 0.2, 0.3)), stream("ft-d", 0, (0.1, None, 0.1, None), error=None)]
    drawn = {picture.name: picture for picture in plots.pictures(runs)}
    assert [row["baseline"] for row in drawn["pareto"].rows] == ["indep"]
    assert "Without a mean error: ft-d." in drawn["pareto"].caption
    assert [row["index"] for row in drawn["regret"].rows] == [0, 2]
    assert [row["mean"] for row in chosen(drawn["slices"], slice="medical")] == [0.3, None]


def test_a_partial_run_is_marked_and_on_no_front():
    partial = stream("ft-d", 0, (0.1, 0.3, 0.1, 0.2), partial=["cats"])
    (picture,) = [one for one in plots.pictures([partial]) if one.name == "pareto"]
    assert picture.rows[0]["partial"] and not picture.rows[0]["pareto"]
    assert [text.get_text() for text in picture.figure.axes[0].texts] == ["ft-d (partial)"]


def test_a_run_that_goes_on_is_in_no_mean(tmp_path):
    going = stream("ft-d", 0, (0.1, 0.3, 0.1, 0.2))
    loaded = plots.load(write_unfinished(tmp_path / "going", going | {"tasks": going["tasks"][:2]}, planned=4))
    drawn = {picture.name: picture for picture in plots.pictures([stream("indep", 0, (0.1, 0.4, 0.2, 0.3)), loaded])}
    assert [row["baseline"] for row in drawn["pareto"].rows] == ["indep"]
    assert "Left out, since unfinished: going" in drawn["pareto"].caption
    assert [row["mean"] for row in drawn["regret"].rows] == pytest.approx([0, -0.1])  # its first tasks do have a regret
    assert "hyperparameters" not in drawn


# ---- files and the command ------------------------------------------------------------------------------------------


def test_files(drawn, tmp_path):
    rows = [{"name": "a", "value": None, "chain": [0, 1]}, {"name": "b", "more": 0.5}]
    files = plots.save([replace(drawn["statistics"], name="one", rows=rows)], tmp_path / "figures")
    assert sorted(file.name for file in files) == ["one.csv", "one.pdf", "one.png"]
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["one.csv", "one.pdf", "one.png"]
    assert (tmp_path / "figures" / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figures" / "one.pdf").read_bytes().startswith(b"%PDF")
    with open(tmp_path / "figures" / "one.csv", encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["name", "value", "chain", "more"], ["a", "", "[0, 1]", ""], ["b", "", "", "0.5"]]


def test_trainings_are_read_while_a_run_goes_on(tmp_path):
    folder = write(tmp_path / "ft-d-0", stream("ft-d", 0, (0.1, 0.3, 0.1, 0.2)))
    rows = trainings((0, 0, 1e-3, 0.5), (0, 1, 1e-2, 0.2))
    (tmp_path / "ft-d-0" / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"task": 1, "tri')
    assert plots.load(folder)["trainings"] == rows
    (tmp_path / "ft-d-0" / "trials.jsonl").write_text(json.dumps({"task": 0, "trial": 0, "curve": []}) + "\n")
    with pytest.raises(ValueError, match="trials.jsonl, line 1 lacks error, hyperparameters"):
        plots.load(folder)


@pytest.mark.parametrize("key", ["lr", "label_smoothing"])
@pytest.mark.parametrize("file", ["trials.jsonl", "results.json"])
def test_a_word_in_place_of_a_number_is_one_sentence(tmp_path, capsys, key, file):
    results, found = run(), {"lr": 0.01, "label_smoothing": 0.1, key: "fast"}
    if file == "results.json":
        results["tasks"][1]["hyperparameters"] = found
    folder = write(tmp_path / "one", results)
    trial = {"task": 0, "trial": 0, "error": 0.5, "hyperparameters": found if file == "trials.jsonl" else {}, "curve": []}
    (tmp_path / "one" / "trials.jsonl").write_text(json.dumps(trial) + "\n")
    assert plots.main([folder, "--out", str(tmp_path / "figures")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{folder}/{file}") and error.endswith(f"hyperparameters: has 'fast' for {key}.\n")
    assert error.count("\n") == 1


def test_names_that_the_font_lacks_give_no_warning(tmp_path, recwarn):
    tasks = [row(0, "a", 2000, 0.5, name="\N{BIRD} 鳥"), row(1, "b", 2021, 0.25, meta="test", name="\N{RAT}", source=0)]
    folder = write(tmp_path / "one", run("\N{CAT}", tasks=tasks, stream="\N{FISH}", name="\N{DOG}"))
    assert plots.main([folder, "--out", str(tmp_path / "figures")]) == 0
    assert report.main([folder, "--out", str(tmp_path / "page.html")]) == 0
    assert not [str(each.message) for each in recwarn]


def test_command(tmp_path, capsys):
    folders = [write(tmp_path / run["name"], run) for run in pairs()]
    folders.append(write_unfinished(tmp_path / "begun", run(tasks=[]), planned=4))
    assert plots.main([*folders, "--out", str(tmp_path / "figures")]) == 0
    files = [str(tmp_path / "figures" / f"transfer.{ending}") for ending in ("csv", "png", "pdf")]
    assert capsys.readouterr().out.splitlines() == [*files, "not drawn: all of begun: no task is done"]
    assert plots.main(folders[2:]) == 2


def test_command_says_in_a_sentence_what_is_wrong(tmp_path, capsys, monkeypatch):
    assert plots.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"No run in {tmp_path}: it holds neither a results.json nor an environment.json.\n"
    twice = [write(tmp_path / name, run(name="same")) for name in ("a", "b")]
    assert plots.main(twice) == 2
    assert "Two runs of ft-d have seed 0" in capsys.readouterr().err
    (tmp_path / "taken").write_text("")
    assert plots.main([twice[0], "--out", str(tmp_path / "taken")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'taken'}: is a file; --out names a folder.\n"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.main(twice) == 2
    assert capsys.readouterr().err == "Pictures need matplotlib: pip install -e '.[plots]'\n"
    with pytest.raises(UserError, match="need matplotlib"):
        plots.pictures([])


def test_plots_import_neither_torch_nor_pyplot():
    code = ("import sys; from nevis_lite import lifelong_plots, nevis_plots, plots; plots.pictures([]); "
            "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
