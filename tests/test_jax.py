"""JAX only: stateless steps under `jit`, four devices, other platforms."""

import functools

import keras
import numpy as np
import pytest
import reference
from helpers import (
    BLOCKS,
    OPTIMIZERS,
    arrays,
    compiled,
    small_data,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

from keras_bng import AdamNG, normalize, partition

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")

EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def values(variables):
    return [v.value for v in variables]


@EVERY_OPTIMIZER
def test_stateless_apply_under_jit_equals_apply(rng, make):
    variables = some_variables(rng)
    others = [variable(arrays([v])[0], v.path) for v in variables]
    stateless, stateful = make(), make()
    stateless.build(variables)
    step = jax.jit(stateless.stateless_apply)
    weights, state = values(variables), values(stateless.variables)
    for i in range(10):
        gradients = some_gradients(rng, variables, 10.0 ** rng.uniform(-30, 5))
        gradients[2][0, 0] = np.nan if i == 4 else 1.0
        weights, state = step(state, tensors(gradients), weights)
        stateful.apply(tensors(gradients), others)
    for a, b in zip(weights, arrays(others)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    counter = [v is stateless.skipped_blocks for v in stateless.variables].index(True)
    assert int(state[counter]) == int(stateful.skipped_blocks.numpy()) == 1
    assert step._cache_size() == 1, "no retracing"


def test_100_stateless_steps_beside_the_reference(rng):
    variables = some_variables(rng)
    twin = reference.Adam(arrays(variables), BLOCKS, learning_rate=0.05)
    optimizer = AdamNG(0.05)
    optimizer.build(variables)
    step = jax.jit(optimizer.stateless_apply)
    weights, state = values(variables), values(optimizer.variables)
    for _ in range(100):
        gradients = some_gradients(rng, variables, 10.0 ** rng.uniform(-30, 5))
        weights, state = step(state, tensors(gradients), weights)
        twin.step([np.float32(g) for g in gradients])
    for ours, theirs in zip(weights, twin.weights):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_normalize_is_pure_and_can_be_jitted_with_values(rng):
    variables = some_variables(rng)
    blocks = partition(variables)
    gradients = tensors(some_gradients(rng, variables))
    jitted = jax.jit(lambda g, w: normalize(g, w, blocks, "adaptive"))
    plain = normalize(gradients, variables, blocks, "adaptive")
    for a, b in zip(jitted(gradients, values(variables)), plain):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@EVERY_OPTIMIZER
def test_the_rollback_of_micro_steps_leaves_the_counters_right(rng, make):
    variables = some_variables(rng)
    optimizer = make(gradient_accumulation_steps=3)
    optimizer.build(variables)
    step = jax.jit(optimizer.stateless_apply)
    weights, state = values(variables), values(optimizer.variables)
    counter = [v is optimizer.skipped_blocks for v in optimizer.variables].index(True)
    counts = []
    for i in range(9):
        gradients = some_gradients(rng, variables)
        if i == 1:  # spoils the first update; micro-steps of their own do not count
            gradients[0][0, 0] = gradients[2][0, 0] = np.inf
        weights, state = step(state, tensors(gradients), weights)
        counts.append(int(state[counter]))
    assert counts == [0, 0, 2, 2, 2, 2, 2, 2, 2]
    assert int(state[0]) == 9
    assert all(np.isfinite(w).all() for w in weights)


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
    )


def weights_after_fit(make, data, distribution=None):
    keras.distribution.set_distribution(distribution)
    try:
        net = compiled(model(), make())
        net.fit(*data, batch_size=16, epochs=3, shuffle=False, verbose=0)
        where = net.layers[0].kernel.value.sharding
        dealt_out = not where.is_fully_replicated
        return arrays(net.trainable_variables), (len(where.device_set), dealt_out)
    finally:
        keras.distribution.set_distribution(None)


def model_parallel():
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], keras.distribution.list_devices()
    )
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*dense.*kernel"] = (None, "model")  # all of a path, in newer Keras
    layout[".*dense.*bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


@EVERY_OPTIMIZER
@pytest.mark.parametrize("how", ["DataParallel", "ModelParallel"])
def test_four_devices_equal_one(rng, make, how):
    assert len(keras.distribution.list_devices()) == 4, "see conftest.py"
    make = functools.partial(make, learning_rate=0.003)
    data = small_data(rng)
    expected, one = weights_after_fit(make, data)
    distribution = (
        keras.distribution.DataParallel() if how == "DataParallel" else model_parallel()
    )
    result, four = weights_after_fit(make, data, distribution)
    assert (one, four) == ((1, False), (4, how == "ModelParallel"))
    for a, b in zip(result, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_jitted_update_lowers_for_other_platforms(rng, make, platform):
    variables = some_variables(rng)
    optimizer = make()
    optimizer.build(variables)
    gradients = tensors(some_gradients(rng, variables))
    lower = jax.export.export(jax.jit(optimizer.stateless_apply), platforms=[platform])
    exported = lower(values(optimizer.variables), gradients, values(variables))
    assert exported.platforms == (platform,)
    assert "callback" not in exported.mlir_module()
