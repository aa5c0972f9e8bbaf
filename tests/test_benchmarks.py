"""What the benchmarks measure with; `.ci/run` runs each of them with `--quick`."""

import json
import math
import pathlib
import time

import numpy as np
import pytest

from benchmarks import (
    backends,
    memory,
    models,
    monitor,
    optimizers,
    report,
    shapes,
    steps,
    targets,
    timing,
    train_step,
    update_step,
)


@pytest.mark.parametrize(
    "name, variables, millions",
    [
        ("MLP", 36, 0.24),
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


def test_each_optimizer_is_compared_with_its_stock_one_and_with_one_by_hand():
    def new_step(name, shapes):
        seconds = {"Adam": 0.004, "AdamNG": 0.002, "AdamNG by hand": 0.001}
        return lambda gradients: time.sleep(seconds.get(name, 0.0))

    names = (*optimizers.MAIN, "AdamNG by hand")
    result = steps.measure(new_step, names, shapes.dense(1, 2), 20, first_rounds=2)
    assert (result["parameters"], result["variables"]) == (6, 2)
    row = result["rows"]["AdamNG"]
    assert row["base"] == "Adam" and len(row["first_seconds"]) == 2
    assert row["ratio"]["median"] < 1 < row["by_hand_ratio"]["median"]
    assert "ratio" not in result["rows"]["Adam"]
    assert "by_hand_ratio" not in result["rows"]["SGDNG"]


def test_all_that_is_compared_has_a_base_of_stock_keras():
    stock = {name for name in optimizers.OPTIMIZERS if "NG" not in name} - {"Lamb"}
    assert set(optimizers.BASE.values()) == stock
    assert set(optimizers.OPTIMIZERS) - set(optimizers.BASE) == stock


def test_the_models_that_are_trained_are_those_that_exist():
    assert [*models.MODELS] == [*train_step.MODELS]
    variables = models.mlp().trainable_variables
    assert [v.shape for v in variables] == [*shapes.WORKLOADS["MLP"].values()]


def test_a_backend_that_is_not_installed_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setitem(backends.NEEDED, "jax", ("keras", "no_such_package"))
    assert [*backends.answers("jax", "steps")] == []
    expected = "Without jax; it needs: pip install no_such_package"
    assert capsys.readouterr().out.strip() == expected


def test_a_part_that_fails_ends_the_benchmark():
    with pytest.raises(SystemExit, match="failed on tensorflow"):
        [*backends.answers("tensorflow", "no_such_module")]


RATIO = {"median": 1.3, "low": 1.2, "high": 1.4}


def test_a_missed_target_is_in_bold_and_a_met_one_is_not():
    assert targets.cell(1.3, RATIO) == "1.30 [1.20, 1.40] ≤ 1.3"
    assert targets.cell(1.25, RATIO) == "**1.30 [1.20, 1.40] > 1.25**"
    assert targets.cell(1, 0.52) == "0.5 ≤ 1"
    assert targets.cell(1, None) == "not measured"


def save_results(folder):
    """As if everything took 1.3 times as long as with stock Keras."""
    row = {"ratio": RATIO, "first_ratio": RATIO, "by_hand_ratio": RATIO}
    rows = {
        "rows": {name: {**row, "peak_extra_bytes": 0} for name in optimizers.OPTIMIZERS}
    }
    found = {
        "update_step": {
            f"{workload}, {mode}": rows
            for workload in shapes.WORKLOADS
            for mode in update_step.MODES
        },
        "train_step": {
            f"{model}, {backend}": rows
            for model in train_step.MODELS
            for backend in backends.NEEDED
        },
        "growth": {"rows": {"plain SGDNG, 1000000 rows": row}},
    }
    for name, results in found.items():
        report.save(folder, name, {"results": results})


def test_the_table_of_targets_has_all_that_was_measured(tmp_path):
    assert "not measured" in targets.table(tmp_path)
    save_results(tmp_path)
    header, _, *lines = targets.table(tmp_path).splitlines()
    assert "not measured" not in "".join(lines)
    assert [c.strip() for c in header.split("|")[3:-1]] == [*targets.COLUMNS.values()]
    assert "| **1.30 [1.20, 1.40] > 0.25** |" in lines[0]
    large = [line.split("|")[6].strip() for line in lines]
    assert large.count("1.30 [1.20, 1.40] ≤ 1.6") == 1  # SGDNG on torch
    assert large.count("0.0 ≤ 16.8") == 4  # peak memory


def test_the_table_of_the_readme_has_two_updates_and_fit_of_four_models(tmp_path):
    save_results(tmp_path)
    header, _, *lines = targets.readme_table(tmp_path).splitlines()
    assert header.count("|") == 8
    assert [line.split("|")[1].strip() for line in lines] == ["AdamNG", "SGDNG"]
    assert all(line.count("1.30") == 6 for line in lines)


def test_the_small_table_has_the_medians_of_every_backend(tmp_path):
    save_results(tmp_path)
    _, _, *lines = targets.small_table(tmp_path).splitlines()
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["TensorFlow, eager", *["1.30"] * 4]
    assert cells[-1] == ["`fit`, torch", "1.30", "", "1.30", ""]
    assert len(cells) == len(update_step.MODES) + len(backends.NEEDED)


def test_the_cost_of_a_record_is_what_its_step_and_the_next_take_longer():
    cycle = [4.0, 2.0, *[1.0] * 7, 100.0]  # the last one was hit by chance
    found = monitor.cost([cycle] * 3)
    assert found["median"] == pytest.approx(0.4)
    assert (found["seconds_a_step"], found["records"]) == (1.0, 3)


def test_the_documented_cost_of_watching_is_the_measured_one():
    results = json.loads((report.RESULTS / "monitor.json").read_text())
    docs = pathlib.Path(__file__).parent.parent / "docs" / "speed.md"
    assert monitor.table(results) in docs.read_text()
    assert results["date"] in docs.read_text()
