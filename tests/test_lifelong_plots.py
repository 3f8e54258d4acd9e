from pathlib import Path

import pytest

from nevis_lite import lifelong_plots, plots
from nevis_lite.lifelong_log import from_experts, from_rows
from nevis_lite.lifelong_plots import Lifetime

pytestmark = pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")

LIFE = [(0, "test", "a", 0, 0.1), (0, "test", "b", 0, 0.2), (1, "train", "a", 1, 0.3), (1, "train", "a", 2, 0.9),
        (2, "test", "a", 3, 0.8), (2, "test", "a", 4, 1.0), (2, "test", "b", 5, 0.2), (3, "train", "b", 6, 0.5)]


def life(rows=LIFE, experts=None, name="life"):
    return Lifetime(from_rows(rows, name), from_experts(experts or {}))


def draw(lifetimes):
    with plots.style():
        drawn, absent = lifelong_plots.draw(lifetimes)
    for picture in drawn:
        picture.figure.draw_without_rendering()
    return {picture.name: picture for picture in drawn}, absent


def test_evaluations_are_the_means_of_their_experiences():
    drawn, absent = draw([life()])
    assert [(row["task"], row["block"], row["experience"], row["performance"]) for row in drawn["evaluations"].rows] == [
        ("a", 0, 0, 0.1), ("b", 0, 0, 0.2), ("a", 2, 3, pytest.approx(0.9)), ("b", 2, 5, 0.2)]
    spans = [axes.transData.inverted().transform(patch.get_extents())[:, 0].tolist()
             for axes in drawn["evaluations"].figure.axes for patch in axes.patches]
    assert spans == [pytest.approx([1, 3]), pytest.approx([6, 6])] * 2  # until the next evaluation, or the end
    assert absent == {"against_experts": "there is no log of a single-task expert"}


def test_learning_against_experts():
    drawn, absent = draw([life(experts={"a": [[0.4, 0.6], [0.2, 0.4, 1.0]]})])
    assert not absent
    rows = [(row["task"], row["of"], row["experience"], row["performance"]) for row in drawn["against_experts"].rows]
    assert rows == [("a", "lifetime", 0, 0.3), ("a", "lifetime", 1, 0.9), ("a", "expert", 0, 0.4), ("a", "expert", 1, 0.6),
                    ("a", "expert", 0, 0.2), ("a", "expert", 1, 0.4), ("a", "expert", 2, 1.0), ("b", "lifetime", 0, 0.5)]
    bold = [line for line in drawn["against_experts"].figure.axes[0].lines if line.get_label() == "expert"]
    assert bold[0].get_ydata() == pytest.approx([0.3, 0.5])  # mean of the two, cut to the shorter one


def test_lifetimes_of_the_same_blocks_are_drawn_together():
    other = [(*row[:4], row[4] / 2) for row in LIFE]
    drawn, _ = draw([life(name="x"), life(other, name="y")])
    (mean,) = [line for line in drawn["evaluations"].figure.axes[0].lines if line.get_marker() == "o"]
    assert mean.get_ydata() == pytest.approx([0.075, 0.675])
    assert {row["lifetime"] for row in drawn["evaluations"].rows} == {"x", "y"}
    drawn, _ = draw([life(name="x"), life(LIFE[:-1], name="y")])
    assert list(drawn) == ["evaluations-x", "evaluations-y"]
    fewer_evaluations = [row for row in LIFE if row[:3] != (2, "test", "b")]
    assert list(draw([life(name="x"), life(fewer_evaluations, name="y")])[0]) == ["evaluations-x", "evaluations-y"]


def test_a_task_that_is_evaluated_twice_at_one_experience():
    """As before and after sleep, which stand in one block."""
    rows = [(0, "test", "a", 0, 0.1, "wake"), (0, "test", "a", 0, 0.3, "sleep"), (1, "train", "a", 1, 0.5, "wake")]
    drawn, _ = draw([life(rows, name="x"), life(rows, name="y")])
    assert [row["performance"] for row in drawn["evaluations"].rows] == [0.1, 0.3] * 2


def test_an_expert_of_a_later_task_alone_is_in_the_legend():
    drawn, _ = draw([life(experts={"b": [0.4, 0.6]})])
    assert [text.get_text() for text in drawn["against_experts"].figure.legends[0].get_texts()] == ["lifetime", "expert"]


def test_logs_without_evaluation_or_without_learning():
    assert draw([life(LIFE[2:4])])[1]["evaluations"] == "the log has no evaluation block"
    assert draw([life(LIFE[:2])])[1]["against_experts"] == "the log has no learning block"


def write(path: Path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("block_num,block_type,task,exp_num,value\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))


def test_command_draws_the_folder_of_a_scenario_and_a_log(tmp_path, capsys):
    write(tmp_path / "life" / "log.csv", LIFE)
    write(tmp_path / "life" / "experts" / "0.csv", [(0, "train", "a", 0, 0.5)])
    assert plots.main([str(tmp_path / "life"), "--out", str(tmp_path / "figures")]) == 0
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == [
        f"{name}.{ending}" for name in ("against_experts", "evaluations") for ending in ("csv", "pdf", "png")]
    write(tmp_path / "bad.csv", [(0, "tset", "a", 0, 0.5)])
    capsys.readouterr()
    assert plots.main([str(tmp_path / "bad.csv")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'bad.csv'}, line 2, column block_type: expected train or test")
