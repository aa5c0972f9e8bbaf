"""TensorFlow only: `tf.IndexedSlices`, the gradients of embeddings."""

import time

import keras
import numpy as np
import pytest
import reference
from helpers import (
    MODES,
    OPTIMIZERS,
    arrays,
    call,
    compiled,
    tensors,
    traced,
    variable,
)

from keras_bng import SGDNG, AdagradNG, normalize, partition

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow only"
)

EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
INDICES = [5, 2, 5, 0, 2, 5]


def sparse_gradient(rng, rows=8, width=3, indices=INDICES, dtype="float32"):
    values = rng.normal(size=(len(indices), width))
    slices = tf.IndexedSlices(
        tf.constant(values, dtype), tf.constant(indices), tf.constant([rows, width])
    )
    dense = np.zeros((rows, width))
    np.add.at(dense, indices, values)
    return slices, dense


@MODES
@pytest.mark.parametrize("rule", ["unit", "adaptive", "clip"])
def test_repeated_rows_count_once_summed_and_stay_sparse(rng, mode, rule):
    w = [variable(rng.normal(size=(8, 3)).astype("float32"), "e/embeddings")]
    slices, dense = sparse_gradient(rng)
    blocks = partition(w)

    def run(g):
        (result,) = normalize([g], w, blocks, rule)
        assert isinstance(result, tf.IndexedSlices)
        return result

    twin = {
        "unit": reference.unit,
        "adaptive": reference.adaptive(0.02),
        "clip": reference.clip(0.1),
    }[rule]
    (expected,) = reference.normalize([dense], arrays(w), [[0]], twin)
    result = call(mode, run, slices)
    np.testing.assert_allclose(
        tf.convert_to_tensor(result).numpy(), expected, rtol=1e-5, atol=1e-7
    )
    values, indices = result.values.numpy(), result.indices.numpy()
    touched = [i for i, row in zip(indices, values) if row.any()]
    assert sorted(touched) == [0, 2, 5], "every row once"


def test_a_sparse_and_a_dense_variable_share_a_norm(rng):
    w = [variable(np.ones((8, 3), "float32"), p) for p in ("t/embeddings", "t/kernel")]
    slices, dense = sparse_gradient(rng)
    other = rng.normal(size=(8, 3))
    result = normalize([slices, *tensors([other])], w, partition(w))
    expected = reference.normalize([dense, other], arrays(w), [[0, 1]], reference.unit)
    for ours, theirs in zip(result, expected):
        ours = tf.convert_to_tensor(ours).numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@MODES
def test_extreme_and_broken_sparse_gradients(rng, mode):
    w = [variable(np.ones((8, 3), "float32"), "e/embeddings")]
    slices, _ = sparse_gradient(rng)

    def scaled(g, scale):
        g = tf.IndexedSlices(g.values * scale, g.indices, g.dense_shape)
        return normalize([g], w, partition(w))[0].values

    run = traced(mode, scaled)

    def norm_at(scale):
        return reference.block_norm([run(slices, tf.constant(scale)).numpy()])

    for scale in (1e-30, 1e30):
        assert abs(norm_at(scale) - 1) < 1e-5
    for scale in (0.0, float("nan"), float("inf")):
        assert norm_at(scale) == 0


def test_no_rows_at_all_is_a_zero_gradient():
    w = [variable(np.ones((8, 3), "float32"), "e/embeddings")]
    empty = tf.IndexedSlices(
        tf.zeros((0, 3)), tf.zeros((0,), tf.int32), tf.constant([8, 3])
    )
    (result,) = normalize([empty], w, partition(w))
    assert not tf.convert_to_tensor(result).numpy().any()


@MODES
def test_sparse_gradients_in_integers_and_in_float64(mode):
    w = [variable(np.ones((4, 1)), "e/embeddings", dtype="float64")]
    for values in (
        tf.constant([[1], [4], [2]]),
        tf.constant([[1.0], [4.0], [2.0]], tf.float64) * 1e-170,
    ):
        g = tf.IndexedSlices(values, tf.constant([2, 0, 2]), tf.constant([4, 1]))
        (result,) = call(mode, lambda g: normalize([g], w, partition(w)), g)
        expected = [[0.8], [0.0], [0.6], [0.0]]
        np.testing.assert_allclose(tf.convert_to_tensor(result), expected, rtol=1e-12)


@EVERY_OPTIMIZER
@MODES
def test_a_sparse_step_equals_the_dense_one(rng, make, mode):
    start = rng.normal(size=(8, 3)).astype("float32")
    gradients = [sparse_gradient(rng) for _ in range(4)]

    def weights_after(which):
        w = [variable(start, "e/embeddings"), variable(start, "d/kernel")]
        optimizer = make()
        optimizer.build(w)
        step = traced(mode, lambda a, b: optimizer.apply([a, b], w))
        for pair in gradients:
            dense = tf.constant(pair[1], tf.float32)
            step(pair[0] if which == "sparse" else dense, dense)
        return arrays(w)

    for a, b in zip(weights_after("sparse"), weights_after("dense")):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@EVERY_OPTIMIZER
def test_l2_and_accumulation_on_sparse_gradients_equal_the_dense_ones(rng, make):
    start = rng.normal(size=(8, 3)).astype("float32")
    gradients = [sparse_gradient(rng) for _ in range(4)]
    for options in ({"l2": 0.1}, {"gradient_accumulation_steps": 2}):
        results = []
        for which in (0, 1):
            w = variable(start, "e/embeddings")
            optimizer = make(**options)
            for pair in gradients:
                g = pair[0] if which == 0 else tf.constant(pair[1], tf.float32)
                optimizer.apply([g], [w])
            results.append(arrays([w])[0])
        np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


def test_plain_sgd_updates_a_million_rows_at_the_cost_of_those_touched(rng):
    def seconds(rows):
        w = variable(np.zeros((rows, 64), "float32"), "e/embeddings")
        optimizer = SGDNG(0.1, momentum=0.0)
        indices = rng.integers(0, rows, 4000)
        values = tf.constant(rng.normal(size=(4000, 64)), tf.float32)
        g = tf.IndexedSlices(values, tf.constant(indices), tf.constant([rows, 64]))
        step = tf.function(lambda g: optimizer.apply([g], [w]))
        optimizer.build([w])
        step(g)
        times = []
        for _ in range(15):
            start = time.perf_counter()
            step(g)
            times.append(time.perf_counter() - start)
        return np.median(times)

    small, large = (
        np.median([seconds(n) for _ in range(3)]) for n in (10_000, 1_000_000)
    )
    assert large < 10 * small  # dense, it would be 100 times


def test_plain_sgd_gets_a_sparse_gradient_from_an_embedding(rng):
    seen = []

    class Spy(SGDNG):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(type(gradient))
            super().update_step(gradient, variable, learning_rate)

    model = keras.Sequential(
        [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    model.build((None, 5))
    compiled(model, Spy(0.1, momentum=0.0), jit_compile=False)
    x, y = rng.integers(0, 50, (16, 5)), rng.integers(0, 3, 16)
    model.fit(x, y, verbose=0)
    assert seen[0] is tf.IndexedSlices


def test_an_eager_loop_over_batches_of_different_row_counts_traces_a_few_times(rng):
    w = variable(np.zeros((50, 3), "float32"), "e/embeddings")
    optimizer = SGDNG(0.1, momentum=0.0)
    traces = []
    update_step = optimizer.update_step

    def spy(*args):
        traces.append(1)
        return update_step(*args)

    optimizer.update_step = spy
    for rows in range(3, 20):
        slices, _ = sparse_gradient(rng, 50, 3, rng.integers(0, 50, rows))
        optimizer.apply([slices], [w])
    assert len(traces) <= 3


def test_rule_none_leaves_sparse_gradients_as_stock_keras_has_them(rng):
    start = rng.normal(size=(8, 3)).astype("float32")
    one, two = variable(start, "a/e"), variable(start, "b/e")
    ours = AdagradNG(0.1, initial_accumulator_value=0.1, rule=None)
    stock = keras.optimizers.Adagrad(0.1)
    for _ in range(5):
        g, _ = sparse_gradient(rng)
        ours.apply([g], [one])
        stock.apply([g], [two])
    np.testing.assert_array_equal(*arrays([one, two]))
