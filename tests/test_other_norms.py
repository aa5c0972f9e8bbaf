"""`norm="l1"` and `"max"`, and rules that ask for the norm of a gradient of ones."""

import keras
import numpy as np
import pytest
import reference
from helpers import (
    BLOCKS,
    OPTIMIZERS,
    arrays,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

import keras_bng
from keras_bng import SGDNG, AdagradBNG, Adaptive, backend, normalize, partition
from keras_bng.rules import Rule

BACKEND = keras.backend.backend()
MODES = ["eager", "compiled"] + ["xla"] * (BACKEND == "tensorflow")
EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
NORMS = pytest.mark.parametrize("norm", ["l1", "max"])
# Stacked, alone, in several pieces, of nothing, of one.
SHAPES = [(), (7,), (7,), (0,), (4097,), (131, 1001), (300, 1000)]


def run(mode, function, *inputs):
    """A function of tensors, called eagerly or as its backend compiles it."""
    if mode == "eager":
        return function(*inputs)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)(*inputs)
    if BACKEND == "torch":
        import torch

        return torch.compile(function, backend="eager")(*inputs)
    import tensorflow as tf

    return tf.function(function, jit_compile=mode == "xla")(*inputs)


@NORMS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1.0, 1e25, 1e36])
def test_every_size_of_tensor_and_gradient_comes_out_with_norm_one(
    rng, norm, mode, scale
):
    w = [variable(np.ones(s, "float32"), f"{i}/w") for i, s in enumerate(SHAPES)]
    g = [rng.normal(size=s) + 0.1 for s in SHAPES]
    if scale == 1e-36:  # few entries, so that none is below what hardware keeps
        g = [np.where(np.arange(x.size).reshape(x.shape) < 3, x, 0.0) for x in g]
    g = [x / max(reference.NORMS[norm]([x]), 1e-9) * scale for x in g]
    blocks = partition(w)
    found = run(mode, lambda *g: normalize(g, w, blocks, norm=norm), *tensors(g))
    for x in arrays(found):
        if x.size:
            assert abs(reference.NORMS[norm]([x]) - 1) < 1e-5


@NORMS
@pytest.mark.parametrize("mode", MODES)
def test_a_block_of_several_and_one_that_is_not_finite_and_one_of_zeros(norm, mode):
    paths = ["a/x", "a/y", "b/x", "b/y", "c/x", "d/x", "d/y", "e/x"]
    g = [[1.0, -3.0], [2.0], [1.0, np.nan], [5.0], [0.0], [-np.inf], [1.0, 1.0], [-4.0]]
    w = [variable(np.ones(len(x), "float32"), p) for x, p in zip(g, paths)]
    blocks = partition(w)
    found = run(mode, lambda *g: normalize(g, w, blocks, norm=norm), *tensors(g))
    size = {"l1": 6, "max": 3}[norm]
    a = [np.divide([1, -3], size), [2 / size]]
    for ours, theirs in zip(arrays(found), [*a, [0, 0], [0], [0], [0], [0, 0], [-1]]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@NORMS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_measured_in_float32(rng, norm, dtype):
    w = variable(np.ones(3000, "float32"), "a/w", dtype=dtype)
    g = tensors([np.full(3000, 60.0)], dtype)  # their sum is no float16
    (found,) = normalize(g, [w], partition([w]), norm=norm)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    expected = {"l1": 1 / 3000, "max": 1.0}[norm]
    found = arrays([keras.ops.cast(found, "float32")])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-2)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has float64 where it is turned on")
@NORMS
@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_float64_of_every_size(norm, scale):
    w = variable(np.ones(4), "a/w", dtype="float64")
    g = tensors([np.array([1.0, -2.0, 0.5, 0.5]) * scale], "float64")
    (found,) = normalize(g, [w], partition([w]), norm=norm)
    size = {"l1": 4, "max": 2}[norm]
    np.testing.assert_allclose(arrays([found])[0] * size, [1, -2, 0.5, 0.5], rtol=1e-12)


@NORMS
@pytest.mark.parametrize("mode", MODES)
def test_fast_norms_are_those_of_the_plain_twin(rng, norm, mode):
    plain = normalize.__globals__["block_norms"]
    members = [[0, 1], [2, 5], [3], [], [4, 6]]
    g = tensors([rng.normal(size=s) * 10.0**i for i, s in enumerate(SHAPES)])
    fast = run(mode, lambda *g: backend.block_norms(g, members, "float32", norm), *g)
    twin = plain(g, members, "float32", norm)
    np.testing.assert_allclose(*arrays([fast, twin]), rtol=1e-5)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="sparse gradients: TensorFlow's")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", reference.NORMS)
def test_repeated_sparse_rows_count_once_summed(norm, mode):
    import tensorflow as tf

    w = [variable(np.ones((8, 2), "float32"), "e/embeddings")]
    rows, values = [5, 2, 5], [[1.0, -2.0], [3.0, 0.5], [-4.0, 2.0]]
    slices = tf.IndexedSlices(
        tf.constant(values), tf.constant(rows), tf.constant([8, 2])
    )
    dense = np.zeros((8, 2))
    np.add.at(dense, rows, values)
    blocks = partition(w)
    (found,) = run(mode, lambda g: normalize([g], w, blocks, "rms", norm=norm), slices)
    assert isinstance(found, tf.IndexedSlices)
    (expected,) = reference.normalize([dense], arrays(w), [[0]], reference.rms, norm)
    np.testing.assert_allclose(tf.convert_to_tensor(found), expected, rtol=1e-6)


@EVERY_OPTIMIZER
@NORMS
def test_optimizers_normalize_by_it(rng, make, norm):
    """What they do is what they do with `rule=None` on gradients normalized before."""
    weights, twins = (some_variables(np.random.default_rng(0)) for _ in range(2))
    ours = make(norm=norm)
    if isinstance(ours, AdagradBNG):
        pytest.skip("has two gradients: see below")
    plain = make(rule=None)
    for _ in range(10):
        g = some_gradients(rng, weights, 10.0 ** rng.uniform(-6, 6))
        ours.apply(tensors(g), weights)
        g = reference.normalize(g, arrays(twins), BLOCKS, reference.unit, norm)
        plain.apply(tensors(g), twins)
    for a, b in zip(arrays(weights), arrays(twins)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@NORMS
@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_adagrad_bng_by_it_for_100_steps(rng, norm, l2):
    weights = some_variables(rng)
    twin = reference.AdaGradBNG(arrays(weights), BLOCKS, l2=l2, norm=norm)
    optimizer = AdagradBNG(l2=l2, norm=norm)
    for _ in range(100):
        g = some_gradients(rng, weights, 10.0 ** rng.uniform(-6, 2))
        optimizer.apply(tensors(g), weights)
        twin.step([np.float32(x) for x in g])
    for a, b in zip(arrays(weights), twin.weights):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@NORMS
def test_adaptive_measures_weights_by_it(norm):
    w = variable([1.0, -3.0], "a/w")
    g = tensors([[2.0, 0.0]])
    (found,) = normalize(g, [w], partition([w]), Adaptive(0.5), norm=norm)
    size = {"l1": 4, "max": 3}[norm]
    np.testing.assert_allclose(arrays([found])[0], [0.5 * size, 0], rtol=1e-6)


@pytest.mark.parametrize("norm", reference.NORMS)
def test_under_rms_the_rate_is_a_length_per_weight_whatever_the_width(rng, norm):
    for width in (1, 10, 1000):
        w = variable(np.zeros((width, 3), "float32"), "a/w")
        optimizer = SGDNG(0.01, momentum=0.0, rule="rms", norm=norm)
        g = rng.choice([-1e-20, 1e-20], size=w.shape)  # all as large as each other
        optimizer.apply(tensors([g]), [w])
        np.testing.assert_allclose(np.abs(arrays([w])[0]), 0.01, rtol=1e-5)


def test_rms_of_part_of_a_block_is_by_the_part_that_has_gradients():
    w = [variable(np.zeros(n, "float32"), f"a/{n}") for n in (4, 12)]
    optimizer = SGDNG(1.0, momentum=0.0, rule="rms")
    optimizer.build(w)
    optimizer.apply(tensors([[3.0, -3.0, 3.0, 3.0]]), w[:1])
    np.testing.assert_allclose(arrays(w)[0], [-1, 1, -1, -1], rtol=1e-6)


class Half(Rule):
    """Somebody's own, which asks for sizes."""

    uses_weights = False
    uses_ones = True

    def __init__(self):
        self.share = 0.5

    def __call__(self, gradient_norm, weight_norm, ones_norm):
        assert weight_norm is None
        return self.share * ones_norm / gradient_norm


@pytest.mark.parametrize("jit_compile", [True, False, "auto"])
def test_a_rule_of_ones_own_may_ask_for_the_norm_of_ones(jit_compile):
    rule, w = Half(), variable(np.zeros(4, "float32"), "a/w")
    optimizer = SGDNG(1.0, momentum=0.0, rule=rule, jit_compile=jit_compile)
    g = tensors([[3.0, 3.0, -3.0, 3.0]])
    for share in (0.5, 0.25, 0.125):  # followed from step to step
        rule.share = share
        before = arrays([w])[0].copy()
        optimizer.apply(g, [w])
        np.testing.assert_allclose(
            arrays([w])[0] - before, share * np.array([-1, -1, 1, -1]), rtol=1e-6
        )


def test_rules_of_two_arguments_stay_as_they_were():
    w = variable([3.0, 4.0], "a/w")
    (found,) = normalize(tensors([[6.0, 8.0]]), [w], partition([w]), lambda g, w: w / g)
    np.testing.assert_allclose(arrays([found])[0], [3, 4], rtol=1e-6)


@pytest.mark.parametrize("norm", ["L2", "", 2, None, ["l1"]])
@EVERY_OPTIMIZER
def test_a_bad_norm_says_what_is_allowed(make, norm):
    message = r"`norm` must be 'l2' .*'l1' .*'max' .*Received: norm="
    with pytest.raises(ValueError, match=message):
        make(norm=norm)
    optimizer = make()
    with pytest.raises(ValueError, match=message):
        optimizer.norm = norm
    assert optimizer.norm == "l2"
    with pytest.raises(ValueError, match=message):
        normalize([], [], (), norm=norm)


@EVERY_OPTIMIZER
def test_norm_is_set_saved_and_followed(make, tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(make(norm="l1"), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras").optimizer
    assert loaded.norm == "l1" and loaded.get_config()["norm"] == "l1"
    old = {k: v for k, v in loaded.get_config().items() if k != "norm"}
    assert type(loaded).from_config(old).norm == "l2"  # files from before


def test_an_eager_step_follows_a_norm_that_is_set():
    optimizer, w = SGDNG(1.0, momentum=0.0), variable(np.zeros(2, "float32"), "a/w")
    for norm, size in (("l2", 5), ("l1", 7), ("max", 4), ("l2", 5)):
        optimizer.norm = norm
        before = arrays([w])[0].copy()
        optimizer.apply(tensors([[3.0, -4.0]]), [w])
        moved = before - arrays([w])[0]
        np.testing.assert_allclose(moved, [3 / size, -4 / size], rtol=1e-6)


def test_a_monitor_records_the_norm_that_is_used():
    x = np.ones((4, 3), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="d")])
    model.compile(SGDNG(1e-9, momentum=0.0, norm="max"), "mse")
    monitor = keras_bng.BlockMonitor()
    model.fit(x, np.zeros((4, 2)), verbose=0, callbacks=[monitor])
    out = arrays([model(x)])[0][0]
    largest = np.abs(out).max()  # of the mean over two outputs: 2 · out / 2
    recorded = monitor.history["gradient_norm"][0][0]
    np.testing.assert_allclose(recorded, largest, rtol=1e-4)
