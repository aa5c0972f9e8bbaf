"""Weights in half precision, where an epsilon of 1e-8 is 0."""

import keras
import numpy as np
import pytest
from helpers import OPTIMIZERS, arrays, compiled, some_variables, tensors, variable
from test_optimizers import CONSTRUCTIBLE

import keras_bng
from keras_bng import SGDNG, AdagradBNG, AdamNG, block_normalized

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def finite(variables):
    return all(np.isfinite(np.float32(a)).all() for a in arrays(variables))


@DTYPES
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_entries_without_a_gradient_stay_where_they_are(make, dtype):
    w = variable(np.ones(4), "a/w", dtype=dtype)
    optimizer = make()
    for _ in range(3):
        optimizer.apply(tensors([[0.3, 0.0, 0.0, 0.4]], dtype), [w])
    moved = np.float32(arrays([w])[0])
    assert moved[1] == moved[2] == 1
    if dtype == "float16" or not isinstance(optimizer, keras.optimizers.Adam):
        assert moved[0] < 1 and moved[3] < 1  # Adam's 0.999 is 1 in bfloat16
    assert finite([w, *optimizer.variables])
    assert int(optimizer.skipped_blocks.numpy()) == 0


@pytest.mark.parametrize("name", CONSTRUCTIBLE)
def test_where_a_stock_optimizer_stays_finite_ours_does(rng, name):
    """On gradients of usual sizes, with zeros among them."""
    make = getattr(keras.optimizers, name)
    stays = {}
    for ours in (False, True):
        w = some_variables(np.random.default_rng(0), dtype="float16")
        optimizer = block_normalized(make()) if ours else make()
        for _ in range(3):
            g = [rng.normal(size=v.shape) * (rng.random(v.shape) > 0.5) for v in w]
            optimizer.apply(tensors(g, "float16"), w)
        stays[ours] = finite([*w, *optimizer.variables])
    assert stays[True] or not stays[False]


@pytest.mark.parametrize(
    "make",
    [AdamNG, lambda rate: block_normalized(keras.optimizers.AdamW(rate)), AdagradBNG],
    ids=["AdamNG", "AdamW", "AdagradBNG"],
)
def test_no_weight_moves_further_than_the_rate_where_squares_are_zero(rng, make):
    """A large block has small entries: 1e-3, whose squares float16 rounds to 0."""
    w = variable(np.zeros((1000, 1000)), "a/w", dtype="float16")
    g = rng.normal(size=(1000, 1000))
    g /= np.sqrt(np.sum(np.square(g)))
    optimizer = make(0.01)
    for i in range(1, 4):
        optimizer.apply(tensors([g], "float16"), [w])
        # With bias correction, and room for float16's own rounding.
        assert np.abs(np.float32(arrays([w])[0])).max() < 0.013 * i
    assert np.abs(np.float32(arrays([w])[0])).max() > 0


def test_other_dtypes_of_one_optimizer_keep_their_epsilon():
    values = np.array([3.0, 4.0])
    both = [variable(values, "a/w", dtype=d) for d in ("float16", "float32")]
    alone = variable(values, "a/w")
    one, two = AdamNG(0.1), AdamNG(0.1)
    for _ in range(3):
        g = np.array([1.0, 1e-6])
        one.apply([*tensors([g], "float16"), *tensors([g])], both)
        two.apply(tensors([g / np.sqrt(2)]), [alone])
    assert one.epsilon == 1e-8
    np.testing.assert_allclose(*arrays([both[1], alone]), rtol=1e-5)


def test_rule_none_is_the_stock_optimizer_here_too():
    w = [variable(np.ones(4), "a/w", dtype="float16") for _ in range(2)]
    for optimizer, v in zip(
        (AdamNG(epsilon=1e-5, rule=None), keras.optimizers.Adam(epsilon=1e-5)), w
    ):
        for _ in range(3):
            optimizer.apply(tensors([[0.3, 1e-3, 0.0, 0.4]], "float16"), [v])
    np.testing.assert_array_equal(*arrays(w))


def test_l2_smaller_than_float16_can_hold():
    w = variable(np.full(2, 1000.0), "a/w", dtype="float16")
    optimizer = SGDNG(1.0, momentum=0.0, l2=1e-8)
    optimizer.apply(tensors([[0.0, 0.0]], "float16"), [w])
    assert finite([w])
    # 1e-8 * 1000 is a number of float16, though 1e-8 is none.
    seen = []
    plain = keras_bng.BlockNormalized._with_l2

    class Spy(SGDNG):
        def _with_l2(self, *args):
            seen.append(plain(self, *args))
            return seen[-1]

    spy = Spy(1.0, momentum=0.0, l2=1e-8, jit_compile=False)
    spy.apply(tensors([[0.0, 0.0]], "float16"), [w])
    np.testing.assert_allclose(np.float32(arrays(seen)[0]), 1e-5, rtol=0.01)


@pytest.mark.parametrize("make", [AdamNG, AdagradBNG, SGDNG])
def test_fit_under_the_policy_float16(rng, make):
    keras.config.set_dtype_policy("float16")
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    )
    x = rng.random((64, 8)).astype("float16")
    x[:, 0] = 0
    y = np.argmax(x[:, 1:4], 1)
    compiled(model, make(0.01))
    losses = model.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert finite(model.variables)
