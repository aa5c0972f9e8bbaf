"""Small things that several tests share."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_bng

# One table drives every cross-cutting test.
OPTIMIZERS = {
    "SGDNG": lambda **k: keras_bng.SGDNG(**{"learning_rate": 0.05, **k}),
    "AdamNG": lambda **k: keras_bng.AdamNG(**{"learning_rate": 0.05, **k}),
    "AdagradNG": lambda **k: keras_bng.AdagradNG(**{"learning_rate": 0.05, **k}),
    "RMSpropNG": lambda **k: keras_bng.RMSpropNG(**{"learning_rate": 0.05, **k}),
    "AdagradBNG": lambda **k: keras_bng.AdagradBNG(**{"learning_rate": 0.05, **k}),
    "block_normalized(Lion)": lambda **k: wrapped(keras.optimizers.Lion, 0.05, k),
}

SHAPES = {"a/kernel": (4, 3), "a/bias": (3,), "b/kernel": (3, 2), "c/scale": ()}
BLOCKS = [[0, 1], [2], [3]]


OURS = ("blocks", "rule", "l2", "jit_compile", "norm")


def wrapped(stock, learning_rate, options):
    """`block_normalized` of a stock optimizer, our options and its own mixed."""
    ours = {name: value for name, value in options.items() if name in OURS}
    own = {name: value for name, value in options.items() if name not in OURS}
    return keras_bng.block_normalized(
        stock(**{"learning_rate": learning_rate, **own}), **ours
    )


def variable(value, path, **kwargs):
    """A variable with this path, like one that a layer made."""
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(value, name=name, **kwargs)


def some_variables(rng, shapes=None, dtype="float32"):
    shapes = SHAPES if shapes is None else shapes
    return [
        variable(rng.normal(size=s).astype("float32"), p, dtype=dtype)
        for p, s in shapes.items()
    ]


def some_gradients(rng, variables, scale=1.0):
    return [rng.normal(size=v.shape) * scale for v in variables]


def tensors(arrays, dtype="float32"):
    return [ops.convert_to_tensor(np.asarray(a), dtype) for a in arrays]


def arrays(values):
    return [ops.convert_to_numpy(v) for v in values]


def small_model(inputs=6, classes=3, units=8):
    """Two dense layers around a batch normalization, built."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(units, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(classes),
        ]
    )


def small_data(rng, count=64, inputs=6, classes=3):
    x = rng.normal(size=(count, inputs)).astype("float32")
    return x, (np.argmax(x[:, :classes], axis=1)).astype("int32")


def compiled(model, optimizer, **kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **kwargs)
    return model


MODES = pytest.mark.parametrize("mode", ["eager", "graph", "xla"])


def call(mode, function, *args):
    """Calls a function on TensorFlow eagerly, in a graph, or compiled by XLA."""
    return traced(mode, function)(*args)


def traced(mode, function):
    """The same, to be called several times."""
    if mode == "eager":
        return function
    import tensorflow as tf

    return tf.function(function, jit_compile=mode == "xla")


def assert_same_run(a, b):
    """Weights of two runs that differ in how their steps were traced.

    TensorFlow may fuse, and so round, the same step differently in another graph.
    """
    if keras.backend.backend() == "tensorflow":
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(a, b)
