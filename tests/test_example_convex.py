"""`examples/convex_bound.py`: the theorem's numbers, and that the bound holds."""

import keras
import numpy as np
import pytest
import reference

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import convex_bound
import data
import harness
import tensorflow as tf


@pytest.fixture(scope="module")
def problem():
    digits = data.mnist("sample", None)
    blocks = convex_bound.features(digits.train[0])
    return blocks, tf.constant(digits.train[1] % 2, "float64")


def test_the_minimum_is_one(problem, rng):
    best = convex_bound.minimum(*problem)
    least = float(convex_bound.objective(*problem, best))
    assert least < 0.6 * np.log(2)
    for size in (1e-4, 1e-2):
        other = [w + size * rng.normal(size=w.shape) for w in best]
        assert float(convex_bound.objective(*problem, other)) > least
    weights = [tf.constant(w) for w in best]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = convex_bound.objective(*problem, weights)
    for gradient in tape.gradient(value, weights):
        assert np.abs(gradient.numpy()).max() < 1e-9


def test_the_objective_is_the_cross_entropy_and_half_the_ridge():
    x = [tf.ones((2, 4), tf.float64), tf.zeros((2, 784), tf.float64)]
    weights = [np.array([1.0, 0, 0, 0]), np.ones(784)]
    found = float(
        convex_bound.objective(x, tf.constant([0.0, 1.0], tf.float64), weights)
    )
    entropy = (np.log(1 + np.e) + np.log(1 + 1 / np.e)) / 2  # both logits are 1
    assert found == pytest.approx(entropy + convex_bound.RIDGE / 2 * (1 + 784))


def test_the_quadrants_have_by_far_the_larger_gradient_and_fewer_weights(problem):
    quadrants, pixels = (part.numpy() for part in problem[0])
    assert quadrants.shape[1:] == (4,) and pixels.shape[1:] == (784,)
    assert np.allclose(quadrants.sum(1), pixels.sum(1), rtol=1e-4)
    norms = [
        np.mean([reference.block_norm([row]) for row in part])
        for part in (quadrants, pixels)
    ]
    assert norms[0] > 5 * norms[1]


@pytest.mark.parametrize("blocks", ["layer", "model"])
def test_the_numbers_are_those_of_the_paper_written_down_once_more(blocks, rng):
    """Algorithm 2 by `tests/reference.py`, and the theorem sum by sum."""
    rate, steps, sizes = 0.3, 12, (4, 784)
    parts = [[0], [1]] if blocks == "layer" else [[0, 1]]
    best = [rng.normal(size=n) for n in sizes]
    start = [np.zeros_like(w) for w in best]
    method = reference.AdaGradBNG(
        start, parts, learning_rate=rate, delta=convex_bound.DELTA
    )
    rows, gradients, iterates, regrets = [], [], [], []
    for _ in range(steps):
        gradient = [
            rng.normal(size=w.shape) * (5 if i else 1) for i, w in enumerate(best)
        ]
        away = [w - b for w, b in zip(method.weights, best)]
        iterates.append(np.concatenate([a.ravel() for a in away]))
        gradients.append(gradient)
        regrets.append(rng.normal())
        method.step(gradient)
        normalized = [
            reference.normalize(g, best, parts, reference.unit) for g in gradients
        ]
        s = [np.sqrt(sum(g[i] ** 2 for g in normalized)) for i in (0, 1)]
        first = sum(np.sum(a**2 * (convex_bound.DELTA + r)) for a, r in zip(away, s))
        rows.append(
            [
                regrets[-1],
                np.abs(iterates[-1]).max(),
                first,
                *(reference.block_norm([g]) for g in gradient),
                *(r.sum() for r in s),
            ]
        )
    found = convex_bound.theorem(np.array(rows), rate, blocks)

    for last in (1, 5, steps):
        d = max(np.abs(x).max() for x in iterates[:last])
        m = [
            max(reference.block_norm([g[i] for i in p]) for g in gradients[:last])
            for p in parts
        ]
        d_i = [sum(sizes[i] for i in p) for p in parts]
        sums = []
        for p in parts:
            total = 0.0
            for i in p:
                unit = [
                    g[i] / reference.block_norm([g[j] for j in p])
                    for g in gradients[:last]
                ]
                total += np.sum(np.sqrt(np.sum(np.square(unit), axis=0)))
            sums.append(total)
        start_term = rows[0][2] / (2 * rate * last)
        distance_term = d**2 * np.sqrt(len(parts) * 788) / (2 * rate * np.sqrt(last))
        first_bound = start_term + distance_term
        first_bound += sum(rate * a**2 * b / last for a, b in zip(m, sums))
        second_bound = start_term + distance_term
        second_bound += sum(rate * a**2 * np.sqrt(b / last) for a, b in zip(m, d_i))
        assert found["regret"][last - 1] == pytest.approx(np.mean(regrets[:last]))
        assert found["bound"][last - 1] == pytest.approx(first_bound)
        assert found["bound_by_size"][last - 1] == pytest.approx(second_bound)
        assert first_bound <= second_bound


def test_the_bound_holds_at_every_t_with_two_blocks_and_with_one(tmp_path, capsys):
    results = convex_bound.main(["--smoke", "--out", str(tmp_path)])
    assert {r["settings"]["blocks"] for r in results} == {"layer", "model"}
    for result in results:
        history = result["history"]
        assert history["T"][0] == 1 and history["T"][-1] == 266
        assert 0 < history["largest_share_of_bound_at_any_T"][0] < 1
        for name in ("regret", "gap", "bound"):
            assert len(history[name]) == len(history["T"])
        assert np.all(np.array(history["regret"]) < history["bound"])
        assert np.all(np.array(history["bound"]) <= history["bound_by_size"])
        assert np.all(np.array(history["gap"]) > -1e-9)  # nothing is below the minimum
    assert (
        "the average regret is below the bound at every T | held"
        in capsys.readouterr().out
    )
    assert (tmp_path / "convex_bound.png").stat().st_size > 5_000


def test_the_steps_are_those_of_algorithm_2(problem):
    """The example's loop beside the NumPy twin, on the same batches."""
    weights = convex_bound.build_weights()
    optimizer = harness.optimizer("AdaGradBNG", 0.3, delta=convex_bound.DELTA)
    twin = reference.AdaGradBNG(
        [w.numpy() for w in weights], [[0], [1]], learning_rate=0.3, delta=1e-3
    )
    x, y = problem
    for start in range(0, 300, 30):
        batch = [part[start : start + 30] for part in x]
        current = [tf.convert_to_tensor(w.value) for w in weights]
        with tf.GradientTape() as tape:
            tape.watch(current)
            value = convex_bound.objective(batch, y[start : start + 30], current)
        gradients = tape.gradient(value, current)
        optimizer.apply(gradients, weights)
        twin.step([g.numpy() for g in gradients])
    for mine, other in zip(weights, twin.weights):
        np.testing.assert_allclose(mine.numpy(), other, rtol=1e-6, atol=1e-9)


def test_the_published_runs_reach_10_000_steps_and_hold_at_every_one():
    import pathlib

    published = pathlib.Path(convex_bound.__file__).parent / "results"
    results = harness.read_all(published, convex_bound.EXPERIMENT)
    assert len(results) == 2 * len(convex_bound.RATES)
    for result in results:
        assert result["history"]["T"][-1] == 10_000
        assert result["history"]["largest_share_of_bound_at_any_T"][0] < 1
        assert "60,000 + 10,000" in result["data"]
