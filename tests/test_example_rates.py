"""`find_rate.py`, `rules.py` and `end_of_training.py`, which share their tasks."""

import json

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import end_of_training
import find_rate
import mnist_mlp
import rules

pytestmark = pytest.mark.usefixtures("without_xla")
ABOVE = {0.1: [1.0, 1.1, 0.9], 0.01: [2.0, 2.1, 1.9], 0.03: [1.05, 1.2, 0.95]}


@pytest.mark.parametrize(
    "picked, best, expected",
    [
        (None, 0.1, "no pick"),
        (0.1, 0.1, "the same"),
        (0.1, 0.01, "better"),
        (0.03, 0.1, "as good"),
        (0.01, 0.1, "**worse**"),
    ],
)
def test_a_pick_is_worse_only_beyond_the_noise_of_seeds(picked, best, expected):
    found = find_rate.verdict(picked, best, lambda rate: np.array(ABOVE[rate]))
    assert found == expected


def test_one_seed_each_decides_nothing():
    assert find_rate.verdict(0.1, 0.2, lambda rate: np.array([rate])) == "one seed"


def test_picks_beside_grids(tmp_path, capsys):
    (row,) = find_rate.main(["--smoke", "--out", str(tmp_path)])
    assert row["best"] in mnist_mlp.GRID
    assert row["picked"] in (None, *mnist_mlp.GRID)
    assert len(row["moved"]) == 6  # blocks
    text = (tmp_path / "find_rate.md").read_text()
    assert "SAMPLES" in text and f"| {row['best']:g} |" in text
    assert (tmp_path / "find_rate.png").stat().st_size > 5_000
    capsys.readouterr()
    again = find_rate.main(["--smoke", "--out", str(tmp_path)])
    assert again[0]["verdict"] == row["verdict"]
    assert "[1/" not in capsys.readouterr().out  # nothing is trained again

    # A grid that the task's own experiment has searched is not trained again either.
    grid = tmp_path / "find_rate_grid.jsonl"
    searched = [json.loads(line) for line in grid.read_text().splitlines()]
    grid.unlink()
    for result in searched:
        result["experiment"] = mnist_mlp.SEARCH
        del result["settings"]["task"]
    lines = "".join(f"{json.dumps(result)}\n" for result in searched)
    (tmp_path / f"{mnist_mlp.SEARCH}.jsonl").write_text(lines)
    (third,) = find_rate.main(["--smoke", "--stages", "grid", "--out", str(tmp_path)])
    assert third["verdict"] == row["verdict"] and not grid.exists()


@pytest.mark.long
def test_three_rules(tmp_path):
    results = rules.main(["--smoke", "--out", str(tmp_path)])
    assert [r["algorithm"] for r in results] == ["SGDMNG", "SGDMNG_adap", "SGDMNG_rms"]
    text = (tmp_path / "rules.md").read_text()
    assert "SAMPLES" in text and "| rms |" in text
    assert (tmp_path / "rules.png").stat().st_size > 5_000


@pytest.mark.long
def test_ends_of_training(tmp_path):
    flags = ["--smoke", "--algorithms", "AdamNG", "--out", str(tmp_path)]
    results = end_of_training.main(flags)
    assert [r["settings"]["end"] for r in results] == list(end_of_training.ENDS)
    assert len({r["settings"]["rate"] for r in results}) == 1
    assert "SAMPLE of MNIST" in (tmp_path / "end_of_training_sample.md").read_text()


def test_the_linear_end_is_constant_then_a_line_to_zero():
    end = end_of_training.LinearEnd(0.3, 90)
    rates = [float(end(step)) for step in (0, 60, 75, 90, 91)]
    np.testing.assert_allclose(rates, [0.3, 0.3, 0.15, 0, 0], atol=1e-7)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(end)
    )
    assert again.get_config() == end.get_config()
