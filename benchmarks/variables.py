"""Variables and gradients of a workload, without a model around them."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np

from benchmarks.shapes import SPARSE_ROWS, Shapes


def make(shapes: Shapes) -> list[keras.Variable]:
    """Variables with these paths, as layers would make them."""
    return [_variable(path, shape) for path, shape in shapes.items()]


def _variable(path: str, shape: tuple[int, ...]) -> keras.Variable:
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(np.full(shape, 0.1, "float32"), name=name)


def gradients(shapes: Shapes) -> list[Any]:
    """Random ones; of an embedding on TensorFlow, `SPARSE_ROWS` rows."""
    rng = np.random.default_rng(0)
    sparse = keras.backend.backend() == "tensorflow"
    return [
        _rows(rng, shape)
        if sparse and path.endswith("/embeddings")
        else keras.ops.convert_to_tensor(rng.standard_normal(shape, "float32"))
        for path, shape in shapes.items()
    ]


def _rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    import tensorflow as tf

    values = rng.standard_normal((SPARSE_ROWS, *shape[1:]), "float32")
    indices = rng.integers(0, shape[0], SPARSE_ROWS)
    return tf.IndexedSlices(
        tf.constant(values), tf.constant(indices), tf.constant(shape)
    )
