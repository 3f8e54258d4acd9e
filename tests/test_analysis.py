"""Regret, forward transfer, slices, who learns from whom, ablations: each against values worked out by hand or by SciPy."""

import json

import numpy as np
import pytest
from made_runs import row, run, write, write_unfinished
from scipy.integrate import trapezoid

from nevis_lite import analysis, metrics


def strictly(value):
    """Plain values alone, and no NaN among them."""
    json.dumps(value, allow_nan=False)
    return value


# ---- regret


def two_runs():
    years = {"a": (2000, "train"), "b": (2019, "test"), "c": (2005, "train"), "d": (2020, "test")}
    errors = {"ft-d": (0.5, 0.2, 0.4, 0.1), "indep": (0.4, 0.4, 0.5, 0.4)}
    return [run(baseline, tasks=[row(index, name, year, errors[baseline][index], meta=meta)
                                 for index, (name, (year, meta)) in enumerate(years.items())]) for baseline in errors]


def test_regret_by_hand():
    found = strictly(analysis.regret(*two_runs()))
    assert [point["difference"] for point in found["curve"]] == pytest.approx([0.1, -0.2, -0.1, -0.3])
    assert [point["all"] for point in found["curve"]] == pytest.approx([0.1, -0.1, -0.2, -0.5])
    assert [point["meta_test"] for point in found["curve"]] == [
        None, pytest.approx(-0.2), pytest.approx(-0.2), pytest.approx(-0.5)]
    assert (found["all"], found["meta_test"]) == (pytest.approx(-0.5), pytest.approx(-0.5))
    assert (found["tasks"], found["meta_test_tasks"], found["missing"], found["left_out"]) == (4, 2, {}, [])
    assert found["curve"][1].items() >= {"index": 1, "task": "b", "name": "B", "year": 2019, "meta": "test"}.items()


def test_regret_knows_a_task_in_another_order_by_its_year():
    # The same stream shuffled: the later MNIST comes first, and is then the first occurrence.
    ours = run(tasks=[row(0, "mnist", 2015, 0.1), row(1, "mnist", 2004, 0.5, occurrence=2)])
    theirs = run("indep", tasks=[row(0, "mnist", 2004, 0.3), row(1, "mnist", 2015, 0.2, occurrence=2)])
    assert [point["difference"] for point in analysis.regret(ours, theirs)["curve"]] == pytest.approx([-0.1, 0.2])


def test_regret_leaves_out_what_has_no_difference():
    ours, theirs = two_runs()
    ours["tasks"][0]["error"], theirs["tasks"][1]["error"] = None, float("nan")
    del theirs["tasks"][2], ours["tasks"][3]
    found = strictly(analysis.regret(ours, theirs))
    assert {each["name"]: each["reason"] for each in found["left_out"]} == {
        "A": "its error is undefined in one of the runs", "B": "its error is undefined in one of the runs",
        "C": "not in indep-0", "D": "not in ft-d-0"}
    assert (found["curve"], found["all"], found["meta_test"], found["tasks"]) == ([], None, None, 0)
    assert found["missing"] == {"all": "no task to sum over", "meta_test": "no task to sum over"}
    with pytest.raises(ValueError, match="ft-d-0 and indep-0 are of different phases"):
        analysis.regret(run(), run("indep", phase="meta_train"))


# ---- forward transfer


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_scipys(seed):
    rng = np.random.default_rng(seed)
    steps = np.concatenate([[0], np.cumsum(rng.integers(1, 50, 9))])
    errors = rng.random(10)
    area, reason = analysis.area_under_curve([[int(step), float(error)] for step, error in zip(steps, errors, strict=True)])
    assert reason is None and area == pytest.approx(trapezoid(1 - errors, steps) / steps[-1], abs=1e-12)


def twice(first, again, **changes):
    tasks = [row(0, "mnist", 2004, 0.1, curve=first), row(1, "usps", 2010, 0.1),
             row(2, "mnist", 2015, 0.1, **{"occurrence": 2, "curve": again, **changes})]
    return run(tasks=tasks)


FIRST = [[0, 1.0], [50, 0.5], [100, 0.5]]  # accuracy 0, 1/2, 1/2: area 3/8
AGAIN = [[0, 0.5], [100, 0.0]]  # accuracy 1/2, 1: area 3/4


def test_forward_transfer_by_hand():
    found = strictly(analysis.forward_transfer(twice(FIRST, AGAIN)))
    (pair,) = found["pairs"]
    assert pair == {"index": 0, "task": "mnist", "name": "MNIST", "year": 2004, "meta": "train", "index_again": 2,
                    "year_again": 2015, "auc": 0.375, "auc_again": 0.75, "fwt": pytest.approx(0.6), "reason": None}
    assert (found["mean"], found["n"], found["missing"]) == (pytest.approx(0.6), 1, {})
    assert analysis.forward_transfer(twice(AGAIN, FIRST))["mean"] == pytest.approx(-0.375 / 0.25)


def test_a_third_presentation_is_compared_with_the_first_and_only_defined_pairs_are_averaged():
    results = twice(FIRST, [[0, None], [100, 0.1]])
    results["tasks"].append(row(3, "mnist", 2020, 0.1, occurrence=3, curve=AGAIN))
    found = strictly(analysis.forward_transfer(results))
    assert [(pair["index"], pair["index_again"], pair["fwt"]) for pair in found["pairs"]] == [
        (0, 2, None), (0, 3, pytest.approx(0.6))]
    assert found["mean"] == pytest.approx(0.6) and found["n"] == 1


@pytest.mark.parametrize("first, again, words", [
    ([[0, 0.0], [100, 0.0]], AGAIN, "1 - AUC_1 is zero"),
    (FIRST, [[0, 0.5], [50, 0.1]], "different numbers of steps"),
    (FIRST, [[0, 0.5]], "fewer than two points"),
    ([], AGAIN, "fewer than two points"),
    (FIRST, [[0, float("nan")], [100, 0.5]], "undefined"),
    (FIRST, [[0, 0.5], [None, 0.4], [100, 0.5]], "undefined"),
    (FIRST, [[0, 0.5], [0, 0.4], [100, 0.5]], "don't increase"),
])
def test_forward_transfer_that_is_undefined_has_a_reason(first, again, words):
    found = strictly(analysis.forward_transfer(twice(first, again)))
    assert found["pairs"][0]["fwt"] is None and words in found["pairs"][0]["reason"]
    assert (found["mean"], found["n"], found["missing"]) == (None, 0, {"mean": "it is undefined for every pair"})


def test_forward_transfer_does_not_mix_folders_that_share_a_name():
    found = analysis.forward_transfer(twice(FIRST, AGAIN, occurrence=1))
    assert found["pairs"][0]["reason"] == "several data sets of the stream bear this name"
    named = twice(FIRST, AGAIN, name="other digits")
    assert analysis.forward_transfer(named)["missing"] == {"mean": "no data set came twice"}


# ---- slices


def test_slices_by_hand():
    facts = [("ocr", 999, 31.9, "train", 0.1), ("ocr", 1_000, 32, "test", 0.3), ("object", 10_000, 64, "test", 0.5),
             ("object", 100_000, 256.0, "test", None), ("ocr", None, None, "train", 0.5)]
    tasks = [row(index, f"task {index}", 2000, error, domain=domain, num_train=size, resolution=side, meta=meta)
             for index, (domain, size, side, meta, error) in enumerate(facts)]
    rows = strictly(analysis.slices(run(tasks=tasks)))
    undefined, absent = "the error of a task is undefined", "no such task"
    assert [tuple(each.values()) for each in rows] == [
        ("domain", "object", 2, None, 2, None, f"error: {undefined}; meta_test_error: {undefined}"),
        ("domain", "ocr", 3, pytest.approx(0.3), 1, 0.3, None),
        ("num_train", "<1k", 1, 0.1, 0, None, f"meta_test_error: {absent}"),
        ("num_train", "1k-10k", 1, 0.3, 1, 0.3, None),
        ("num_train", "10k-100k", 1, 0.5, 1, 0.5, None),
        ("num_train", ">=100k", 1, None, 1, None, f"error: {undefined}; meta_test_error: {undefined}"),
        ("num_train", "unknown", 1, 0.5, 0, None, f"meta_test_error: {absent}"),
        ("resolution", "<32 px", 1, 0.1, 0, None, f"meta_test_error: {absent}"),
        ("resolution", "32-64 px", 1, 0.3, 1, 0.3, None),
        ("resolution", "64-256 px", 1, 0.5, 1, 0.5, None),
        ("resolution", ">=256 px", 1, None, 1, None, f"error: {undefined}; meta_test_error: {undefined}"),
        ("resolution", "unknown", 1, 0.5, 0, None, f"meta_test_error: {absent}"),
    ]
    assert list(rows[0]) == ["by", "slice", "tasks", "error", "meta_test_tasks", "meta_test_error", "reason"]
    assert analysis.slices(run(tasks=[])) == []


def test_a_task_without_a_domain_is_in_a_slice_of_its_own():
    rows = analysis.slices(run(tasks=[row(0, "a", 2000, 0.1, domain=None), row(1, "b", 2000, 0.2)]))
    assert [(each["slice"], each["error"]) for each in rows[:2]] == [("object", 0.2), ("unknown", 0.1)]


# ---- who learns from whom


def chained():
    """0 from scratch, 1 from 0, 2 from 0, 3 from 2, 4 from the pretrained network, 5 from 4."""
    sources = [None, 0, 0, 2, "pretrained", 4]
    return run(tasks=[row(index, f"task{index}", 2000 + index, 0.1, source=source,
                          scores={str(earlier): index / 10 + earlier / 100 for earlier in range(index)})
                      for index, source in enumerate(sources)])


def test_the_source_graph_by_hand():
    found = strictly(analysis.source_graph(chained()))
    assert [each["links"] for each in found["tasks"]] == [0, 1, 1, 2, 1, 2]
    assert found["tasks"][3].items() >= {"source": 2, "score": 0.32, "chain": [0, 2, 3], "reason": None}.items()
    assert found["tasks"][5]["chain"] == ["pretrained", 4, 5] and found["tasks"][4]["score"] is None
    assert (found["longest"], found["mean"], found["missing"]) == (2, pytest.approx(7 / 6), {})


def test_a_source_that_is_no_earlier_task_ends_no_chain():
    results = chained()
    results["tasks"][2]["source"] = 3  # a circle
    found = strictly(analysis.source_graph(results))
    assert [each["links"] for each in found["tasks"]] == [0, 1, None, None, 1, 2]
    assert found["tasks"][3]["reason"] == "the way to its source 2 begins at no earlier task"
    assert found["longest"] is None and found["missing"]["longest"] == "the links of a task are unknown"
    assert analysis.source_graph(run(tasks=[]))["missing"]["mean"] == "no task"


def test_relatedness_is_a_matrix_of_sources_and_targets():
    results = chained()
    results["tasks"] = results["tasks"][:3]
    results["tasks"][2]["scores"] = {"1": 0.3, "scratch": 0.2, "0": 0.1}
    assert strictly(analysis.relatedness(results)) == {
        "sources": ["scratch", "0 TASK0", "1 TASK1"], "targets": ["0 TASK0", "1 TASK1", "2 TASK2"],
        "scores": [[None, None, 0.2], [None, 0.1, 0.1], [None, None, 0.3]], "missing": {}}
    found = analysis.relatedness(run("indep"))
    assert found["scores"] == [] and found["missing"] == {"scores": "baseline indep measured none"}


def pair_of(source, target, errors, seed=0, **changes):
    tasks = [row(0, source, 2000, errors[0]), row(1, target, 2001, errors[1], source=0, occurrence=1 + (source == target))]
    return run("ft-prev", seed, tasks=tasks, **changes)


def test_measured_transfer_by_hand():
    runs = [pair_of("a", "b", (0.5, 0.2)), pair_of("a", "b", (0.7, 0.4), 1), pair_of("b", "a", (0.6, 0.3)),
            pair_of("a", "a", (0.6, 0.1))]
    found = strictly(analysis.measured_transfer(runs))
    assert found["sources"] == ["scratch", "A", "B"] and found["targets"] == ["A", "B", "A (2)"]
    assert found["error"] == [[pytest.approx(0.6), 0.6, None], [None, pytest.approx(0.3), 0.1], [0.3, None, None]]
    assert found["n"] == [[3, 1, 0], [0, 2, 1], [1, 0, 0]] and found["left_out"] == []
    assert analysis.measured_transfer([]) == {"sources": [], "targets": [], "error": [], "n": [], "left_out": []}


def test_measured_transfer_leaves_out_what_does_not_tell():
    tasks = [row(0, "a", 2000, 0.5), row(1, "b", 2001, 0.2, source=0, auxiliaries=[0]), row(2, "c", 2002, None, source=0),
             row(3, "d", 2003, 0.1, source=9), row(4, "e", 2004, 0.1), row(5, "e", 2005, 0.2), row(6, "f", 2005, 0.2, source=4),
             row(7, "scratch", 2006, 0.3), row(8, "g", 2006, 0.4, source=7)]
    found = strictly(analysis.measured_transfer([run("mt", tasks=tasks)]))
    assert {each["index"]: each["reason"] for each in found["left_out"]} == {
        1: "it trained together with other tasks", 2: "its error is undefined", 3: "its source 9 is not in the run",
        **dict.fromkeys((4, 5, 6), "it or its source shares its name with another task")}
    assert found["sources"] == ["scratch", "SCRATCH"] and found["targets"] == ["A", "SCRATCH", "G"]
    assert found["error"] == [[0.5, 0.3, None], [None, None, 0.4]]
    with pytest.raises(ValueError, match="differ in phase, trials or steps"):
        analysis.measured_transfer([pair_of("a", "b", (0, 0)), pair_of("a", "b", (0, 0), trials=9)])


# ---- ablations and orders


def ablated(stream, seed, error, first=0):
    tasks = [row(0, "digits", 1998, 0.5), row(1, "letters", 2004, 0.5), row(2, "birds", 2021, error, meta="test")][first:]
    return run("ft-d", seed, tasks=tasks, stream=stream, name=f"{stream} {seed}")


def test_variants_by_hand():
    runs = [ablated("short", 0, 0.2), ablated("short", 1, 0.4), ablated("short (without_first_1)", 0, 0.5, first=1),
            *(ablated(f"short (shuffled, seed {draw})", 0, 0.1 * draw) for draw in (1, 2, 3))]
    whole, without, shuffled = strictly(analysis.variants(runs))
    assert whole["error"] == {"n": 2, "mean": pytest.approx(0.3), "sd": pytest.approx(0.02**0.5)}
    assert (whole["difference"], whole["reason"]) == (None, "the unchanged stream")
    assert (without["tasks"], without["draws"], without["error"]["mean"]) == (2, 1, 0.5)
    assert without["difference"] == pytest.approx(0.2) and without["verdict"] is None
    assert (shuffled["stream"], shuffled["draws"], shuffled["tasks"]) == ("short (shuffled)", 3, 3)
    assert shuffled["error"] == {"n": 3, "mean": pytest.approx(0.2), "sd": pytest.approx(0.1)}
    assert shuffled["difference"] == pytest.approx(-0.1)
    assert "| short (shuffled) | ft-d | 3 | 3 | 3 | 3 x 100 | 0.2000 | 0.1000 |" in analysis.variant_table(runs)


def test_two_single_runs_are_judged_by_the_noise_of_the_papers_seeds():
    for error, place in ((0.205, "within"), (0.21, "beyond")):
        _, row_ = analysis.variants([ablated("short", 0, 0.2), ablated("short (without_first_1)", 0, error, first=1)])
        assert row_["verdict"] == f"no interval: one seed; {place} 0.0085, the noise of the paper's seeds"


def test_variants_without_a_difference_say_why(tmp_path):
    meta_train = [ablated("short", 0, 0.2), ablated("short (without_first_1)", 0, 0.2, first=1)]
    for each in meta_train:
        each["phase"] = "meta_train"
    assert analysis.variants(meta_train)[1]["reason"] == "the means are over different tasks"
    (alone,) = analysis.variants([ablated("short (without_first_1)", 0, 0.2)])
    assert alone["reason"] == "no mean error of this variant, or of this baseline on the unchanged stream"
    going_on = metrics.load(write_unfinished(tmp_path / "a", ablated("short (without_first_1)", 0, 0.2), 9))
    _, part = strictly(analysis.variants([ablated("short", 0, 0.2), going_on]))
    assert part["error"] == {"n": 0, "mean": None, "sd": None} and part["difference"] is part["tasks"] is None
    with pytest.raises(ValueError, match="different phases"):
        analysis.variants([ablated("short", 0, 0.2), meta_train[0]])
    with pytest.raises(ValueError, match="Two runs of ft-d on short have seed 0"):
        analysis.variants([ablated("short", 0, 0.2)] * 2)


# ---- the command


def test_more_of_one_run(tmp_path, capsys):
    metrics.main([write(tmp_path / "run", twice(FIRST, AGAIN, source=1)), "--more"])
    said = capsys.readouterr().out.split("\n\n")
    assert said[2:] == [
        "forward transfer       years     AUC   again      FWT\n"
        "MNIST             2004, 2015  0.3750  0.7500  +0.6000\n"
        "mean of 1                                     +0.6000",
        "chains of weights: links 0.3 on average, 1 at most: 1 USPS > 2 MNIST",
        "tasks by            all   error  meta-test  error\n"
        "domain      object    3  0.1000          0      -\n"
        "num_train   >=100k    3  0.1000          0      -\n"
        "resolution  <32 px    3  0.1000          0      -\n"]


def test_a_long_chain_is_shortened():
    tasks = [row(index, f"t{index}", 2000, 0.1, source=index - 1 if index else None) for index in range(14)]
    results = run("ft-prev", tasks=tasks)
    said = " ".join(analysis.more_text([results], analysis.more([results])).split())
    assert "links 6.5 on average, 13 at most: 0 T0 > 1 T1 > 2 T2 > 3 T3 > 4 T4 > 5 T5 > ... > 8 T8 > 9 T9 > 10 T10 >" in said


def test_more_of_several_runs(tmp_path, capsys):
    folders = [write(tmp_path / each["name"], each) for each in two_runs()]
    metrics.main([*folders, "--more"])
    said = capsys.readouterr().out
    assert "| ft-d-0 | -0.5000 | -0.5000 | 4 | - | 0 | 0 |" in said and "| indep-0 | +0.0000 |" in said
    assert "| domain | object | 0.3000 | 0.4250 |" in said
    metrics.main([*folders, "--more", "--json"])
    more = json.loads(capsys.readouterr().out)["more"]
    assert more[0]["regret"]["all"] == pytest.approx(-0.5) and more[0]["missing"] == {}
    assert strictly(analysis.more(two_runs()[:1]))[0]["missing"].keys() == {"regret"}


def test_of_two_runs_of_indep_neither_is_the_reference():
    ours, indep = two_runs()
    found = analysis.more([ours, indep, {**indep, "name": "other-0"}])
    assert [each["regret"] for each in found] == [None] * 3
    assert found[0]["missing"]["regret"].endswith("and has 2")


def test_runs_of_variants_are_shown_side_by_side(tmp_path, capsys):
    runs = [ablated("short", 0, 0.2), ablated("short (without_first_1)", 0, 0.5, first=1)]
    folders = [write(tmp_path / f"run{index}", each) for index, each in enumerate(runs)]
    metrics.main([*folders, "--more"])
    said = capsys.readouterr().out
    assert said.startswith(analysis.variant_table(runs)) and "| ft-d, short | ft-d, short (without_first_1) |" in said
    metrics.main([*folders, "--json"])
    assert json.loads(capsys.readouterr().out) == {"variants": analysis.variants(runs)}


@pytest.mark.parametrize("baseline", ["ft-d", "mt", "pt-ft"])
def test_real_runs_have_what_the_analyses_need(finished, baseline, capsys):
    for arguments in ([], ["--json"]):
        metrics.main([str(finished(baseline)), str(finished("indep")), "--more", *arguments])
        metrics.main([str(finished(baseline)), "--more", *arguments])
    results = metrics.load(finished(baseline))
    assert analysis.source_graph(results)["longest"] >= 1 and analysis.relatedness(results)["scores"]
    assert len(analysis.regret(results, metrics.load(finished("indep")))["curve"]) == 4
