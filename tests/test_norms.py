"""Norms of small, large and odd tensors, in every way that TensorFlow runs a step."""

import importlib
import logging
import re

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow only: eager, graph, XLA", allow_module_level=True)

import tensorflow as tf
from helpers import MODES, call, tensors, traced, variable
from reference import block_norm

import keras_bng


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    """So that the factors of 70,000 entries, too, are left to the kernel."""
    monkeypatch.setattr("keras_bng.backend.tensorflow.LARGE", 2**16)


# One more or less than a power of two; alone or stacked; in whole rows of 32 or not.
SHAPES = [(), (7,), (4096,), (4097,), (36, 1024), (131, 1001), (700, 1000)]


@MODES
def test_every_size_comes_out_with_norm_one(rng, mode):
    w = [variable(np.ones(s, "float32"), f"{i}/w") for i, s in enumerate(SHAPES)]
    blocks = keras_bng.partition(w)
    step = traced(mode, lambda *g: keras_bng.normalize(g, w, blocks))
    for scale in (1e-36, 1e-25, 1.0, 1e25, 1e34):
        # The norm, not an entry: entries of 1e-38 are zero to TensorFlow.
        g = [rng.normal(size=s) + 0.1 for s in SHAPES]
        g = [x / block_norm([x]) * scale for x in g]
        if scale == 1e-36:  # few entries only, so that none is flushed to zero
            few = [np.arange(x.size).reshape(x.shape) < 3 for x in g]
            g = [np.where(some, scale, 0.0) for some in few]
        for x in step(*tensors(g)):
            assert abs(block_norm([x.numpy()]) - 1) < 1e-5, scale


@MODES
def test_one_block_of_all_sizes_and_magnitudes(rng, mode):
    w = [variable(np.ones(s, "float32"), f"all/{i}") for i, s in enumerate(SHAPES)]
    g = [rng.normal(size=s) * 10.0**-i for i, s in enumerate(SHAPES)]
    g[3] *= 1e22
    expected = block_norm(g)
    blocks = keras_bng.partition(w)
    result = call(mode, lambda *g: keras_bng.normalize(g, w, blocks), *tensors(g))
    for x, r in zip(g, result):
        np.testing.assert_allclose(r.numpy(), x / expected, rtol=1e-5, atol=1e-30)


@MODES
def test_weights_of_every_size_under_adaptive(rng, mode):
    values = [rng.normal(size=s) for s in SHAPES]
    w = [variable(x.astype("float32"), f"{i}/w") for i, x in enumerate(values)]
    g = tensors([rng.normal(size=s) for s in SHAPES])
    optimizer = keras_bng.SGDNG(1.0, momentum=0.0, rule=keras_bng.Adaptive(0.5))
    optimizer.build(w)
    before = [v.numpy().astype("float64") for v in w]
    call(mode, lambda *g: optimizer.apply(g, w), *g)
    for old, v in zip(before, w):
        step = block_norm([v.numpy() - old])
        assert abs(step / block_norm([old]) - 0.5) < 1e-4


@MODES
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_moves_large_variables_by_the_learning_rate(mode, nesterov):
    # In a graph the factor is folded into the learning rate, if their product fits.
    w = [variable(np.zeros(70_000, "float32"), f"{i}/w") for i in range(2)]
    optimizer = keras_bng.SGDNG(1e-3, momentum=0.5, nesterov=nesterov)
    optimizer.build(w)
    new = [v.numpy() for v in (*w, *optimizer.variables)]
    step = traced(mode, lambda *g: optimizer.apply(g, w))
    expected = 1e-3 * (1.5 + 1.75 if nesterov else 1 + 1.5)
    for scale in (1e-36, 1e-20, 1.0, 1e20, 1e36):
        for v, value in zip((*w, *optimizer.variables), new):
            v.assign(value)
        g = [np.zeros(70_000), np.zeros(70_000)]
        g[0][5], g[1][7] = scale, 1.0
        for _ in range(2):
            step(*tensors(g))
        for v, i in zip(w, (5, 7)):
            np.testing.assert_allclose(v.numpy()[i], -expected, rtol=1e-5)
            assert np.count_nonzero(v.numpy()) == 1


@MODES
def test_large_variables_in_float64(rng, mode):
    w = variable(np.zeros(70_000), "a/w", dtype="float64")
    g = rng.normal(size=70_000) * 1e-60
    optimizer = keras_bng.SGDNG(0.1, momentum=0.0)
    optimizer.build([w])
    call(mode, lambda g: optimizer.apply([g], [w]), tf.constant(g))
    np.testing.assert_allclose(w.numpy(), -0.1 * g / block_norm([g]), rtol=1e-6)


FLOAT64_SHAPES = [(), (7,), (4097,), (70_000,)]  # stacked or alone, folded or not


@MODES
def test_float64_of_every_size_comes_out_with_norm_one(rng, mode):
    w = [
        variable(np.ones(s), f"{i}/w", dtype="float64")
        for i, s in enumerate(FLOAT64_SHAPES)
    ]
    blocks = keras_bng.partition(w)
    step = traced(mode, lambda *g: keras_bng.normalize(g, w, blocks))
    for scale in (1e-300, 1e-160, 1e-3, 1e160, 1e300):
        g = [rng.normal(size=s) for s in FLOAT64_SHAPES]
        expected = [x / block_norm([x]) for x in g]
        result = step(*tensors([x * scale for x in expected], "float64"))
        for ours, theirs in zip(result, expected):
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12)


@MODES
def test_a_float64_block_of_all_magnitudes(rng, mode):
    w = [variable(np.ones(5), f"a/{i}", dtype="float64") for i in range(3)]
    g = tensors([np.full(5, x) for x in (3e170, 4e170, 1e-170)], "float64")
    blocks = keras_bng.partition(w)
    result = call(mode, lambda *g: keras_bng.normalize(g, w, blocks), *g)
    for x, expected in zip(result, (0.6, 0.8, 0.0)):
        np.testing.assert_allclose(x.numpy(), expected / 5**0.5, atol=1e-15)


@MODES
@pytest.mark.parametrize("scale", [1e-160, 1e160])
@pytest.mark.parametrize("shape", [(5,), (70_000,)])
def test_sgd_in_float64_of_every_size(mode, scale, shape):
    w = variable(np.zeros(shape), "a/w", dtype="float64")
    optimizer = keras_bng.SGDNG(0.5, momentum=0.0)
    optimizer.build([w])
    g = tf.fill(shape, tf.constant(-scale, tf.float64))
    call(mode, lambda g: optimizer.apply([g], [w]), g)
    np.testing.assert_allclose(w.numpy(), 0.5 / shape[0] ** 0.5, rtol=1e-12)


@MODES
@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_float64_weights_of_every_size_under_adaptive(mode, scale):
    w = variable(np.full(9, scale), "a/w", dtype="float64")
    blocks, rule = keras_bng.partition([w]), keras_bng.Adaptive(0.5)
    g = tf.one_hot(0, 9, dtype=tf.float64)
    (result,) = call(mode, lambda g: keras_bng.normalize([g], [w], blocks, rule), g)
    np.testing.assert_allclose(result.numpy()[0], 1.5 * scale, rtol=1e-12)


@MODES
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_float64_block_that_is_not_finite_comes_back_as_zero(mode, bad):
    w = [variable(np.ones(2), f"{n}/w", dtype="float64") for n in "ab"]
    g = tensors([[1.0, bad], [0.0, 1e-200]], "float64")
    blocks = keras_bng.partition(w)
    result = call(mode, lambda *g: keras_bng.normalize(g, w, blocks), *g)
    assert [x.numpy().tolist() for x in result] == [[0, 0], [0, 1]]


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("cls", [keras_bng.SGDNG, keras_bng.AdamNG])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tracing_logs_nothing(mode, cls, dtype):
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    tf.get_logger().addHandler(handler)
    try:
        w = [variable(np.zeros(n), f"{n}/w", dtype=dtype) for n in (3, 70_000)]
        optimizer = cls()
        g = tensors([np.ones(v.shape) for v in w], dtype)
        step_of(optimizer, w, jit_compile=mode == "xla").get_concrete_function(*g)
    finally:
        tf.get_logger().removeHandler(handler)
    assert [record.getMessage() for record in seen] == []


@MODES
def test_sgd_drops_a_large_variable_that_is_not_finite(mode):
    w = [variable(np.zeros(70_000, "float32"), f"{i}/w") for i in range(3)]
    g = [np.ones(70_000), np.ones(70_000), np.zeros(70_000)]
    g[0][3] = np.nan
    optimizer = keras_bng.SGDNG(1.0, momentum=0.0)
    optimizer.build(w)
    call(mode, lambda *g: optimizer.apply(g, w), *tensors(g))
    assert int(optimizer.skipped_blocks) == 1
    assert not w[0].numpy().any() and not w[2].numpy().any()
    assert abs(block_norm([w[1].numpy()]) - 1) < 1e-5


def test_a_subclass_of_sgd_with_an_update_of_its_own_gets_plain_gradients():
    class Own(keras_bng.SGDNG):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, gradient)

    w = variable(np.zeros(70_000, "float32"), "a/w")
    optimizer = Own()
    optimizer.build([w])
    step = tf.function(lambda g: optimizer.apply([g], [w]))
    step(tf.ones(70_000))
    assert abs(block_norm([w.numpy()]) - 1) < 1e-5


@pytest.mark.parametrize("cls", [keras_bng.SGDNG, keras_bng.AdamNG])
def test_fit_with_xla_when_the_number_of_sparse_rows_is_not_known(rng, cls):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(50, 200),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(cls(0.01), loss, jit_compile=True)
    x, y = rng.integers(0, 50, (70, 5)), rng.integers(0, 2, 70)
    history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)  # the last batch: 6
    assert history.history["loss"][1] < history.history["loss"][0]


def resnet_like(rng):
    shapes = {}
    for i in range(20):
        shapes[f"conv_{i}/kernel"] = (3, 3, 16, 32) if i % 2 else (3, 3, 32, 32)
        shapes[f"norm_{i}/gamma"] = shapes[f"norm_{i}/beta"] = (32,)
    w = [variable(np.ones(s, "float32"), p) for p, s in shapes.items()]
    return w, tensors([rng.normal(size=v.shape) for v in w])


def step_of(optimizer, w, **options):
    optimizer.build(w)
    return tf.function(lambda *g: optimizer.apply(g, w), **options)


@pytest.mark.parametrize("cls", [keras_bng.SGDNG, keras_bng.AdamNG])
def test_a_compiled_step_is_one_computation_without_the_host(rng, cls, monkeypatch):
    # As for a GPU, which none of us has: the module that XLA gets is the same.
    module = importlib.import_module("keras_bng.backend.tensorflow")
    monkeypatch.setattr(module, "compiled_for_cpu", lambda: False)
    w, g = resnet_like(rng)
    step = step_of(cls(), w, jit_compile=True)
    hlo = step.experimental_get_compiler_ir(*g)(stage="hlo")
    assert hlo.count("HloModule") == 1 and hlo.count("ENTRY") == 1
    found = set(re.findall(r"[\w\])}] ([a-z][a-z\-]*)\(", hlo))
    assert "reduce" in found and "multiply" in found  # the pattern finds instructions
    host = {"custom-call", "infeed", "outfeed", "send", "recv", "conditional", "while"}
    assert not found & host
    # Small variables share one, so that there are no more than variables.
    assert 1 < len(re.findall(r"\breduce\(", hlo)) <= len(w)


@pytest.mark.parametrize(
    "ours, stock",
    [
        (keras_bng.SGDNG(momentum=0.9), keras.optimizers.SGD(momentum=0.9)),
        (keras_bng.AdamNG(), keras.optimizers.Adam()),
    ],
    ids=["SGD", "Adam"],
)
def test_tracing_adds_few_operations_a_variable(rng, ours, stock):
    def operations(optimizer):
        w, g = resnet_like(rng)
        graph = step_of(optimizer, w).get_concrete_function(*g).graph
        inner = graph.as_graph_def().library.function
        return len(graph.get_operations()) + sum(len(f.node_def) for f in inner)

    extra = operations(ours) - operations(stock)
    variables = 60
    assert extra < 4 * variables  # more would show in the time to the first step
