import json
import sys

import pytest
from made_runs import row, run, write_unfinished

pytest.importorskip("tensorboard")

from nevis_lite import track


def points(folder):
    """{writer: {tag: [(step, value)]}} as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in sorted((folder / "tensorboard").iterdir()):
        events = EventAccumulator(str(place)).Reload()
        found[place.name] = {tag: [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
                             for tag in events.Tags()["scalars"]}
    return found


def add(folder, name, rows):
    with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def trial(number, last):
    return {"task": 0, "trial": number, "hyperparameters": {"lr": 0.1}, "error": last,
            "curve": [[0, 0.9], [50, None], [100, last]]}


@pytest.fixture
def folder(tmp_path):
    """A run that has begun and has no row yet."""
    folder = tmp_path / "going"
    write_unfinished(folder, run(tasks=[]), planned=2)
    (folder / "tasks.jsonl").write_text("")
    return folder


TASKS = [row(0, "a", 2000, 0.5, dev_error=0.4), row(1, "b", 2021, 0.2, meta="test", dev_error=0.1)]


def test_points_come_once_while_a_run_goes_on_and_is_resumed(folder):
    board = track.begin(folder)
    assert not track.update(board)
    add(folder, "trials", [trial(0, 0.4), trial(1, 0.6)])
    assert not track.update(board)
    (folder / "trials.jsonl").write_text("")  # killed, and resumed from a checkpoint before both
    add(folder, "trials", [trial(0, 0.4)])
    assert not track.update(board)
    add(folder, "trials", [trial(1, 0.6)])
    add(folder, "tasks", TASKS)
    (folder / "results.json").write_text(json.dumps(run(tasks=TASKS)))
    assert track.update(board)
    assert points(folder) == {
        "trial 0": {"dev error/task 000": [(0, 0.9), (100, 0.4)]},
        "trial 1": {"dev error/task 000": [(0, 0.9), (100, 0.6)]},
        "tasks": {"task/error": [(0, 0.5), (1, 0.2)], "task/dev error": [(0, 0.4), (1, 0.1)],
                  "stream/mean error so far": [(0, 0.5), (1, 0.35)],
                  "stream/compute so far, FLOP": [(0, 3.24e12), (1, 6.48e12)]}}


def test_the_command_replaces_its_own_points(folder):
    add(folder, "tasks", [*TASKS[:1], row(1, "b", 2021, None, meta="test", dev_error=0.1, reason="not finite")])
    (folder / "results.json").write_text(json.dumps(run(tasks=TASKS)))
    for _ in range(2):
        assert track.main([str(folder)]) == 0
    assert points(folder)["tasks"]["task/error"] == [(0, 0.5)]


def test_a_row_without_a_curve_is_one_sentence(folder, capsys):
    add(folder, "trials", [trial(0, 0.4), {**trial(1, 0.6), "curve": None}])
    assert track.main([str(folder)]) == 2
    assert capsys.readouterr().err == f"{folder / 'trials.jsonl'}, line 2 has None for curve.\n"


def test_no_run_and_no_package(folder, tmp_path, capsys, monkeypatch):
    assert track.main([str(tmp_path)]) == 2 and "No run in" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert track.main([str(folder)]) == 2 and capsys.readouterr().err == "track: needs TensorBoard: pip install tensorboard\n"
