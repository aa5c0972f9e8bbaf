"""`normalize`, the pure function, beside its NumPy twin."""

import keras
import numpy as np
import pytest
import reference
from helpers import BLOCKS, arrays, some_gradients, some_variables, tensors, variable
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import keras_bng
from keras_bng import Adaptive, Block, Clip, Rms, Unit, normalize, partition

RULES = [
    (Unit(), reference.unit),
    (Rms(), reference.rms),
    (Adaptive(0.02), reference.adaptive(0.02)),
    (Clip(0.1), reference.clip(0.1)),
    (None, None),
]


def norm(*values):
    return reference.block_norm(arrays(values))


def normalized(gradient, dtype="float32", rule="unit"):
    """One block of one variable."""
    gradient = np.asarray(gradient)
    w = variable(np.ones(gradient.shape, "float32"), "a/w")
    return arrays(normalize(tensors([gradient], dtype), [w], partition([w]), rule))[0]


@pytest.fixture
def float64():
    """JAX has it only when asked for."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("norm", reference.NORMS)
@pytest.mark.parametrize("rule, twin", RULES)
def test_equals_the_numpy_reference(rng, rule, twin, norm):
    variables = some_variables(rng)
    gradients = some_gradients(rng, variables)
    blocks = partition(variables)
    result = normalize(tensors(gradients), variables, blocks, rule, norm=norm)
    expected = reference.normalize(gradients, arrays(variables), BLOCKS, twin, norm)
    for ours, theirs in zip(arrays(result), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e30, 1e37])
def test_norm_one_from_1e_minus_37_to_1e37(rng, scale):
    direction = rng.normal(size=(7, 5))
    direction /= reference.block_norm([direction])
    result = normalized(direction * scale)
    assert abs(norm(result) - 1) < 1e-5
    # Entries below 1e-38 are 0 to the hardware.
    np.testing.assert_allclose(result, direction, atol=1e-37 / scale + 1e-6)


def test_a_block_of_tiny_and_huge_variables_has_one_norm():
    w = [variable(np.ones(2, "float32"), f"a/{n}") for n in "xyz"]
    g = tensors([[3e30, 0.0], [0.0, 4e30], [1e-30, 1e-30]])
    result = arrays(normalize(g, w, partition(w)))
    np.testing.assert_allclose(result, [[0.6, 0], [0, 0.8], [0, 0]], atol=1e-6)


def test_one_extreme_block_does_not_change_the_others(rng):
    variables = some_variables(rng)
    gradients = some_gradients(rng, variables)
    blocks = partition(variables)
    usual = arrays(normalize(tensors(gradients), variables, blocks))
    for value in (0.0, 1e-30, 1e30, np.nan):
        gradients[2] = np.full((3, 2), value)
        result = arrays(normalize(tensors(gradients), variables, blocks))
        for i in (0, 1, 3):
            np.testing.assert_allclose(result[i], usual[i], rtol=1e-6)


@pytest.mark.parametrize("dtype, scale", [("float32", 1e-30), ("float64", 1e-200)])
def test_a_zero_block_beside_an_extreme_one_is_not_dropped(float64, dtype, scale):
    w = [variable(np.zeros(2), f"{n}/w", dtype=dtype) for n in "ab"]
    optimizer = keras_bng.SGDNG(1.0, momentum=0.0)
    optimizer.apply(tensors([[0.0, 0.0], [0.0, scale]], dtype), w)
    assert [x.tolist() for x in arrays(w)] == [[0, 0], [0, -1]]
    assert int(optimizer.skipped_blocks.numpy()) == 0


def test_float16_gradients_whose_squares_overflow_come_out_with_norm_one(rng):
    result = normalized(rng.normal(size=(40, 10)) * 3e3, "float16")
    assert result.dtype == np.float16
    assert abs(norm(result) - 1) < 1e-3


def test_float16_gradients_whose_squares_vanish_come_out_with_norm_one():
    assert abs(norm(normalized(np.full((30,), 1e-6), "float16")) - 1) < 1e-3


def test_float16_gradients_so_small_that_the_factor_overflows_float16():
    assert normalized([6e-8, 0.0], "float16").tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_dtype_stays(float64, dtype):
    w = variable(np.ones(3, "float32"), "a/w")
    g = ops.cast(ops.array([1.0, 2.0, 3.0]), dtype)
    (result,) = normalize([g], [w], partition([w]))
    assert keras.backend.standardize_dtype(result.dtype) == dtype
    expected = np.array([1.0, 2.0, 3.0]) / 14**0.5
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-15}
    result = arrays([ops.cast(result, "float64")])[0]
    np.testing.assert_allclose(result, expected, rtol=tolerance[dtype])


@pytest.mark.parametrize("fill", [1e-3, 0.1, 0.3, 1e-25, "random"])
@pytest.mark.parametrize("measure", ["l2", "l1"])
@pytest.mark.parametrize(
    "shape", [(2**16,), (5_000_000,), (2000, 2001), (20, 50, 4001)]
)
def test_large_tensors_keep_their_digits(rng, fill, shape, measure):
    # Equal entries are the worst case: every rounding error goes the same way. How
    # many there are in a row is the CPU's to say: no more than 1e-5, the promise.
    g = rng.normal(size=shape) if fill == "random" else np.full(shape, fill, "float32")
    w = variable(np.ones(shape, "float32"), "a/w")
    found = normalize(tensors([g]), [w], partition([w]), norm=measure)
    assert abs(reference.NORMS[measure](arrays(found)) - 1) < 1e-5


@pytest.mark.parametrize("rule", ["unit", "adaptive", "clip"])
def test_zero_stays_zero(rule):
    assert normalized(np.zeros((3, 2)), rule=rule).tolist() == np.zeros((3, 2)).tolist()


@pytest.mark.parametrize("rule", ["unit", "adaptive", "clip"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_comes_back_as_zero(rule, bad):
    w = [variable(np.ones(2, "float32"), p) for p in ("a/k", "a/b", "b/k")]
    g = tensors([[1.0, bad], [1.0, 1.0], [0.0, 2.0]])
    result = arrays(normalize(g, w, partition(w), rule))
    assert result[0].tolist() == [0, 0] and result[1].tolist() == [0, 0]
    assert np.isfinite(result[2]).all() and result[2][1] > 0


def test_a_rule_that_returns_nan_drops_the_block():
    result = normalized([1.0, 2.0], rule=lambda g, w: g * float("nan"))
    assert result.tolist() == [0, 0]


def test_zero_weights_under_adaptive_count_as_norm_one():
    w = variable(np.zeros(2, "float32"), "a/w")
    (result,) = arrays(
        normalize(tensors([[3.0, 4.0]]), [w], partition([w]), "adaptive")
    )
    np.testing.assert_allclose(result, [0.012, 0.016], rtol=1e-6)


def test_weights_of_1e_minus_25_are_not_zero_weights():
    w = variable(np.full(4, 1e-25, "float32"), "a/w")
    g = tensors([[1.0, 0.0, 0.0, 0.0]])
    (result,) = arrays(normalize(g, [w], partition([w]), Adaptive(0.5)))
    np.testing.assert_allclose(result[0], 1e-25, rtol=1e-5)


def test_scalars_and_empty_variables_work():
    w = [variable(2.0, "a/s"), variable(np.zeros((0, 3), "float32"), "a/e")]
    result = arrays(normalize(tensors([-3.0, np.zeros((0, 3))]), w, partition(w)))
    assert result[0] == -1.0 and result[1].shape == (0, 3)


def test_none_gradients_stay_none_and_do_not_count(rng):
    variables = some_variables(rng)
    gradients = tensors(some_gradients(rng, variables))
    gradients[1] = gradients[3] = None
    result = normalize(gradients, variables, partition(variables))
    assert result[1] is None and result[3] is None
    assert abs(norm(result[0]) - 1) < 1e-6 and abs(norm(result[2]) - 1) < 1e-6


def test_left_out_variables_keep_their_gradient(rng):
    variables = some_variables(rng)
    gradients = tensors(some_gradients(rng, variables))
    blocks = partition(variables, lambda v: None if "bias" in v.path else "rest")
    result = arrays(normalize(gradients, variables, blocks))
    np.testing.assert_array_equal(result[1], arrays(gradients)[1])
    assert abs(norm(result[0], result[2], result[3]) - 1) < 1e-6


def test_values_in_the_order_of_partition_do_as_well_as_variables(rng):
    variables = some_variables(rng)
    gradients = tensors(some_gradients(rng, variables))
    blocks = partition(variables)
    by_variable = arrays(normalize(gradients, variables, blocks, "adaptive"))
    values = [ops.convert_to_tensor(v) for v in variables]
    by_value = arrays(normalize(gradients, values, blocks, "adaptive"))
    for a, b in zip(by_variable, by_value):
        np.testing.assert_array_equal(a, b)


def test_blocks_made_by_hand_and_a_subset_of_the_variables_work(rng):
    variables = some_variables(rng)
    gradients = tensors(some_gradients(rng, variables))
    by_hand = (Block("x", (variables[2], variables[0])),)
    result = normalize(gradients, variables, by_hand)
    assert abs(norm(result[0], result[2]) - 1) < 1e-6
    assert (
        result[1] is gradients[1] or (arrays(result)[1] == arrays(gradients)[1]).all()
    )
    last = normalize(gradients[2:], variables[2:], partition(variables))
    assert abs(norm(last[0]) - 1) < 1e-6 and abs(norm(last[1]) - 1) < 1e-6


@pytest.mark.parametrize("blocks", ["layer", "variable", "model"])
@pytest.mark.parametrize("given", ["variables", "values"])
def test_both_gradients_of_a_variable_listed_twice_are_in_its_block(blocks, given):
    tied, other = variable([1.0, 1.0], "a/w"), variable([1.0], "b/w")
    listed = [tied, other, tied]
    weights = listed
    if given == "values":
        weights = [ops.convert_to_tensor(v) for v in listed]
    g = tensors([[3.0, 0.0], [5.0], [0.0, 4.0]])
    result = arrays(normalize(g, weights, partition(listed, blocks)))
    length = 50**0.5 if blocks == "model" else 5.0
    for ours, theirs in zip(result, arrays(g)):
        np.testing.assert_allclose(ours, theirs / length, rtol=1e-6)


def test_a_variable_listed_twice_and_left_out_keeps_both_gradients():
    tied = variable([1.0], "a/w")
    listed = [tied, variable([1.0], "b/w"), tied]
    blocks = partition(listed, [("^a", None)])
    result = arrays(normalize(tensors([[3.0], [5.0], [4.0]]), listed, blocks))
    assert [float(x[0]) for x in result] == [3, 1, 4]


def complex_gradient():
    pair = tensors([[3.0, 0.0], [4.0, 1.0]])
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.complex(*pair)
    if keras.backend.backend() == "torch":
        import torch

        return torch.complex(*pair)
    return pair[0] + 1j * pair[1]


def test_a_complex_gradient_in_a_block_is_an_error():
    w = [variable([1.0, 1.0], "a/w"), variable([1.0], "b/w")]
    g = [complex_gradient(), *tensors([[2.0]])]
    message = r"must be real.*Received: .*complex64.* a/w\. .*two real variables"
    with pytest.raises(TypeError, match=message):
        normalize(g, w, partition(w))
    values = [ops.convert_to_tensor(np.ones(v.shape)) for v in w]
    with pytest.raises(TypeError, match=r"complex64 for the weight 0\."):
        normalize(g, values, partition(w))


def test_a_complex_gradient_in_no_block_or_without_a_rule_passes():
    w = [variable([1.0, 1.0], "a/w"), variable([1.0], "b/w")]
    g = [complex_gradient(), *tensors([[2.0]])]
    left_out = partition(w, [("^a", None)])
    result = arrays(normalize(g, w, left_out))
    assert result[0].tolist() == [3 + 4j, 1j] and result[1] == 1
    assert arrays(normalize(g, w, partition(w), None))[0].tolist() == [3 + 4j, 1j]


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integer_gradients_are_taken_as_numbers_of_the_weights_dtype(dtype):
    w = [variable([1.0, 1.0], "a/w", dtype="float16"), variable([1.0], "b/w")]
    given = np.array([1, 1] if dtype == "bool" else [3, 4], dtype)
    left_out = partition(w, [("^b", None)])
    result = normalize([given, np.array([7], dtype)], w, left_out)
    expected = [0.5**0.5] * 2 if dtype == "bool" else [0.6, 0.8]
    np.testing.assert_allclose(arrays(result)[0], expected, rtol=1e-3)
    kept = [keras.backend.standardize_dtype(r.dtype) for r in result]
    assert kept == ["float16", dtype]


def test_an_optimizer_takes_integer_gradients_as_stock_keras_does():
    w = variable([0.0, 0.0], "a/w")
    optimizer = keras_bng.SGDNG(1.0, momentum=0.0)
    optimizer.apply([ops.convert_to_tensor(np.array([3, 4], "int32"))], [w])
    np.testing.assert_allclose(arrays([w])[0], [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e160, 1e300])
@pytest.mark.parametrize("size", [2, 5000])
def test_float64_gradients_of_every_size_come_out_with_norm_one(float64, scale, size):
    g = ops.convert_to_tensor(np.full(size, scale / size**0.5), "float64")
    w = variable(np.ones(size), "a/w", dtype="float64")
    (result,) = arrays(normalize([g], [w], partition([w])))
    np.testing.assert_allclose(result, 1 / size**0.5, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_float64_weights_of_every_size_under_adaptive(float64, scale):
    w = variable(np.full(9, scale), "a/w", dtype="float64")
    g = ops.convert_to_tensor(np.eye(9)[0], "float64")
    (result,) = arrays(normalize([g], [w], partition([w]), Adaptive(0.5)))
    np.testing.assert_allclose(result[0], 1.5 * scale, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_an_optimizer_moves_float64_weights_by_the_learning_rate(float64, scale):
    w = variable(np.zeros(4), "a/w", dtype="float64")
    optimizer = keras_bng.SGDNG(0.5, momentum=0.0)
    optimizer.apply([ops.convert_to_tensor(np.full(4, scale), "float64")], [w])
    np.testing.assert_allclose(arrays([w])[0], -0.25, rtol=1e-12)


def test_weights_that_cannot_be_matched_are_an_error(rng):
    variables = some_variables(rng)
    gradients = tensors(some_gradients(rng, variables))
    with pytest.raises(ValueError, match="must have the same length. Received: 4 gr"):
        normalize(gradients, variables[:2], partition(variables))
    with pytest.raises(
        ValueError, match="neither the variables .* Received: 1 weights"
    ):
        normalize(gradients[:1], [ops.ones((4, 3))], partition(variables))


def test_nothing_in_nothing_out():
    assert normalize([], [], ()) == []
    assert normalize([], [], partition([])) == []


FLOATS = st.floats(-1, 1, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
VECTORS = st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(VECTORS, st.integers(-30, 30), st.sampled_from(["layer", "variable", "model"]))
def test_norms_are_one_or_zero_and_the_scale_does_not_matter(vectors, power, blocks):
    w = [variable(np.ones(3, "float32"), f"{i // 2}/{i}") for i in range(len(vectors))]
    parts = partition(w, blocks)
    result = normalize(tensors(vectors), w, parts)
    scaled = normalize(tensors(np.array(vectors) * 10.0**power), w, parts)
    for block in parts.positions:
        zero = not np.any([vectors[i] for i in block])
        assert abs(norm(*(result[i] for i in block)) - (0 if zero else 1)) < 1e-5
    for a, b in zip(arrays(result), arrays(scaled)):
        np.testing.assert_allclose(a, b, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(VECTORS, st.randoms())
def test_the_order_of_variables_does_not_matter(vectors, random):
    w = [variable(np.ones(3, "float32"), f"{i // 2}/{i}") for i in range(len(vectors))]
    order = list(range(len(w)))
    random.shuffle(order)
    usual = arrays(normalize(tensors(vectors), w, partition(w)))
    w_shuffled = [w[i] for i in order]
    g_shuffled = tensors([vectors[i] for i in order])
    shuffled = arrays(normalize(g_shuffled, w_shuffled, partition(w_shuffled)))
    for a, i in zip(shuffled, order):
        np.testing.assert_allclose(a, usual[i], atol=1e-6)


def test_public_names():
    for name in keras_bng.__all__:
        assert getattr(keras_bng, name) is not None
