import copy

import pytest
from made_runs import row, run, write_unfinished
from scipy import stats

from nevis_lite import compare, metrics


def runs():
    ft_d = [run("ft-d", seed, (0.5, 0.3, error)) for seed, error in enumerate((0.10, 0.12, 0.11))]
    indep = [run("indep", seed, (0.5, 0.4, error)) for seed, error in enumerate((0.20, 0.21, 0.22, 0.9))]
    return ft_d + indep


def test_comparison():
    found = compare.comparison(runs())
    ft_d = found["baselines"]["ft-d"]
    assert ft_d["error"] == {"n": 3, "mean": pytest.approx(0.11), "sd": pytest.approx(0.01)}
    assert ft_d["error_all"]["mean"] == pytest.approx(0.91 / 3)
    assert ft_d["cflop"] == 3 * 3.24e12
    (pair,) = found["pairs"]
    differences = [-0.10, -0.09, -0.11]
    assert pair["seeds"] == [0, 1, 2] and pair["differences"] == pytest.approx(differences)
    assert pair["mean"] == pytest.approx(-0.1) and pair["sd"] == pytest.approx(0.01)
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert pair["interval"] == pytest.approx([expected.low, expected.high], abs=1e-5)
    assert pair["verdict"] == "ft-d is better"
    assert [task["task"] for task in found["tasks"]] == ["DIGITS", "A VERY LONG NAME OF A DATA SET", "FLOWERS"]
    assert found["tasks"][1]["errors"]["indep"] == {"n": 4, "mean": pytest.approx(0.4), "sd": pytest.approx(0)}


def test_quantiles():
    assert compare._T95 == pytest.approx([stats.t.ppf(0.975, n) for n in range(1, 10)], abs=5e-4)


def test_differences_within_noise_and_too_few_seeds():
    some = [run("a", 0, (0, 0, 0.1)), run("b", 0, (0, 0, 0.2)), run("a", 1, (0, 0, 0.2)), run("b", 1, (0, 0, 0.1))]
    (pair,) = compare.comparison(some)["pairs"]
    assert pair["verdict"] == "within noise" and pair["mean"] == pytest.approx(0)
    (pair,) = compare.comparison(some[:2])["pairs"]
    assert pair["interval"] is None and pair["verdict"] == "no interval: one seed"
    (pair,) = compare.comparison([some[0], some[3]])["pairs"]
    assert pair["n"] == 0 and pair["mean"] is None and pair["seeds"] == []
    assert pair["verdict"] == "no interval: fewer than two common seeds"


def test_one_seed_is_judged_by_the_noise_of_the_papers_seeds():
    def verdict(difference, **changes):
        some = [run("a", 0, (0, 0, 0.2), **changes), run("b", 0, (0, 0, 0.2 + difference), **changes)]
        return compare.comparison(some)["pairs"][0]["verdict"]

    within = "no interval: one seed; within 0.0085, the noise of the paper's seeds"
    beyond = within.replace("within", "beyond")
    assert verdict(0.0084, stream="short") == within and verdict(-0.0084, stream="full (without_imagenet)") == within
    assert verdict(0.0086, stream="full") == beyond  # 2 sqrt(2) 0.003 = 0.00849
    for changes in ({"stream": "tiny"}, {"stream": "full", "phase": "meta_train"}, {"stream": "full", "partial": ["birds"]}):
        assert verdict(0.001, **changes) == "no interval: one seed"


def test_runs_that_lack_different_tasks_are_not_paired():
    some = [run(name, seed, partial=["birds"] * (name == "a" or seed > 1)) for name in "ab" for seed in range(4)]
    (pair,) = compare.comparison(some)["pairs"]
    assert pair["seeds"] == [2, 3]


def test_tasks_are_matched_across_orders():
    shuffled = copy.deepcopy(run("ft-d", 1))
    for task in shuffled["tasks"]:
        task["index"] = 200 - task["index"]
    assert len(compare.comparison([run("ft-d", 0), shuffled])["tasks"]) == 3


def test_a_run_that_goes_on_is_in_no_mean(tmp_path):
    going_on = metrics.load(write_unfinished(tmp_path / "ft-d-9", run("ft-d", 9, (0.9, 0.9, 0.9)), 5))
    found = compare.comparison([*runs(), going_on])
    assert found["unfinished"] == {"ft-d-9": {"done": 3, "planned": 5}}
    assert found["baselines"] == compare.comparison(runs())["baselines"]
    assert found["tasks"][0]["errors"]["ft-d"] == {"n": 4, "mean": pytest.approx(0.6), "sd": pytest.approx(0.2)}
    text = compare.text([going_on])
    assert text.startswith("**UNFINISHED**: ft-d-9 has done 3 of 5 tasks and is not in the means\n\n")
    assert "| ft-d | 0 | 3 x 100 | - | - | - | - | - |  |" in text


def test_folders_that_share_a_name_stay_apart():
    tasks = [row(index, "birds", 2000, error) for index, error in enumerate((0.1, 0.3))]
    found = compare.comparison([run(tasks=tasks)])["tasks"]
    assert [task["errors"]["ft-d"]["mean"] for task in found] == [0.1, 0.3]


def test_runs_that_cannot_be_compared():
    with pytest.raises(ValueError, match="different streams or phases"):  # two lists of the user's, both without a name
        compare.comparison([run(), run("indep", tasks=run()["tasks"][1:])])
    with pytest.raises(ValueError, match="different streams or phases"):
        compare.comparison([run(), run("indep", phase="meta_train")])
    with pytest.raises(ValueError, match="Two runs of ft-d have seed 0"):
        compare.comparison([run(), run()])


def test_compare():
    text = compare.text([*runs(), run("mt", 7, partial=["birds"])])
    assert text.startswith("**PARTIAL**: mt-7 misses birds\n\n| baseline | runs |")
    assert "| ft-d | 3 | 3 x 100 | 0.1100 | 0.0100 | 0.3033 | 0.0033 | 9.72 TFLOP | * |" in text
    assert "| mt | 1 | 3 x 100 | 0.1000 | - | 0.3000 | - | 9.72 TFLOP |  |" in text
    assert "| ft-d - indep | 0: -0.1000 1: -0.0900 2: -0.1100 | -0.1000 | 0.0100 | -0.1248 to -0.0752 | ft-d is" in text
    assert "| year | task | ft-d | indep | mt |\n| --- | --- | --- | --- | --- |" in text
    assert "| 2021 | FLOWERS | 0.1100 ± 0.0100 | 0.3825 ± 0.3451 | 0.1000 |" in text
    assert "difference" not in compare.text([run(seed=0), run(seed=1)])


def test_runs_that_differ_in_other_settings_go_by_their_folders():
    some = [run("ft-d", seed, name=f"demo-{distance}-seed{seed}") for distance in ("cosine", "euclidean") for seed in (0, 1)]
    assert list(compare.comparison(some)["baselines"]) == ["demo-cosine", "demo-euclidean"]
    assert compare.comparison(some)["baselines"]["demo-cosine"]["error"]["n"] == 2


def test_a_partial_run_is_on_no_front():
    easy = run("mt", 0, (0, 0, 0.01), partial=["birds"], cflop=1)
    found = compare.comparison([run("ft-d"), easy])["baselines"]
    assert {name: group["pareto"] for name, group in found.items()} == {"ft-d": True, "mt": False}


def test_the_pareto_front_by_hand():
    points = {"a": (1.0, 0.5), "b": (2.0, 0.4), "c": (3.0, 0.4), "d": (2.0, 0.6), "e": (9.0, 0.1), "f": (8.0, 0.45)}
    assert compare.pareto(points) == ["a", "b", "e"]
    assert compare.pareto({}) == [] and compare.pareto({"a": (1.0, 0.5)}) == ["a"]


def test_a_baseline_at_another_budget_is_another_point():
    some = [run("ft-d", 0, (0, 0, 0.3)), run("ft-d", 0, (0, 0, 0.2), trials=6, cflop=10**14), run("indep", 0, (0, 0, 0.4)),
            run("indep", 0, (0, 0, 0.3), trials=6, cflop=10**14)]
    found = compare.comparison(some)
    cheap, dear = ("3 x 100 updates", "6 x 100 updates")
    assert {name: group["pareto"] for name, group in found["baselines"].items()} == {
        f"ft-d, {cheap}": True, f"ft-d, {dear}": True, f"indep, {cheap}": False, f"indep, {dear}": False}
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [
        (f"ft-d, {budget}", f"indep, {budget}") for budget in (cheap, dear)]
    many = [run(name, 0) for name in "abcdefghi"]
    assert "| year |" in compare.text(many[:8]) and "| year |" not in compare.text(many)


def test_interval_is_scipys():
    assert compare.interval_of(compare.spread_of([1.0])) is None and compare.interval_of(compare.spread_of([])) is None
    for n in range(2, 11):
        expected = stats.t.interval(0.95, n - 1, 1, 2 / n**0.5)
        assert compare.interval_of({"n": n, "mean": 1.0, "sd": 2.0}) == pytest.approx(expected, abs=2e-3)
