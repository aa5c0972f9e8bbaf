"""What the benchmarks measure with; `.ci/run` runs each of them with `--quick`."""

import json
import math
import pathlib

import numpy as np
import pytest

from benchmarks import memory, monitor, report, shapes, targets, timing


@pytest.mark.parametrize(
    "name, variables, millions",
    [
        ("ResNet-20", 59, 0.27),
        ("ResNet-110", 329, 1.73),
        ("6 dense 2048", 12, 25.18),
        ("LSTM", 9, 4.65),
    ],
)
def test_workloads_have_the_models_variables(name, variables, millions):
    workload = shapes.WORKLOADS[name]
    assert len(workload) == variables
    assert round(sum(map(math.prod, workload.values())) / 1e6, 2) == millions


def test_cases_take_turns_and_nobody_always_goes_first():
    calls = []
    times = timing.interleaved(
        {name: lambda name=name: calls.append(name) for name in "ab"}, rounds=4
    )
    assert calls == ["b", "a", "a", "b"] * 2
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4}


def test_the_ratio_is_taken_round_by_round():
    base = [1.0, 10.0, 100.0]  # a machine that gets slower and slower
    ratio = timing.ratio([2.0, 20.0, 200.0], base)
    assert (ratio["low"], ratio["median"], ratio["high"]) == (2.0, 2.0, 2.0)


def test_peak_memory_sees_what_a_step_gives_back():
    peak = memory.peak_extra_bytes(lambda: np.ones(50_000_000, "uint8").sum())
    if peak is None:
        pytest.skip("Linux only")
    assert 45e6 < peak < 80e6


def test_a_result_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    for value in (1, 2):
        path = report.save(tmp_path, "x", {"results": value})
    assert json.loads(path.read_text())["results"] == 2
    assert report.load(tmp_path, "x") == 2 and report.load(tmp_path, "y") == {}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_too_few_rounds_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", "--rounds", "1"])
    with pytest.raises(SystemExit) as error:
        report.parsed(report.arguments("A benchmark."))
    assert error.value.code == 2
    assert "--rounds must be 2 or more. Received: 1" in capsys.readouterr().err


def test_a_missed_target_is_in_bold_and_a_met_one_is_not():
    ratio = {"median": 1.3, "low": 1.2, "high": 1.4}
    found = {"graph": {**ratio, "median": 1.1}, "xla": ratio, "": 0.5}
    expected = "graph 1.10 [1.20, 1.40]; xla **1.30 [1.20, 1.40]**; 0.5"
    assert targets.cell(1.15, found) == expected


def test_the_cost_of_a_record_is_what_its_step_and_the_next_take_longer():
    cycle = [4.0, 2.0, *[1.0] * 7, 100.0]  # the last one was hit by chance
    found = monitor.cost([cycle] * 3)
    assert found["median"] == pytest.approx(0.4)
    assert (found["seconds_a_step"], found["records"]) == (1.0, 3)


def test_the_documented_cost_of_watching_is_the_measured_one():
    results = json.loads((report.RESULTS / "monitor.json").read_text())
    docs = pathlib.Path(__file__).parent.parent / "docs" / "how.md"
    assert monitor.table(results) in docs.read_text()
    assert results["date"] in docs.read_text()
