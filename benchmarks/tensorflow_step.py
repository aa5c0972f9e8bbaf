"""A step on TensorFlow: called as it is, in a graph, or compiled by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.optimizers import OPTIMIZERS, built
from benchmarks.shapes import Shapes

OTHERS = tuple(OPTIMIZERS)[4:]


def new_step(name: str, mode: str, shapes: Shapes) -> Callable[[Any], Any]:
    """The step of a new optimizer in this mode, not yet traced."""
    optimizer, weights = built(name, shapes)

    def step(gradients: Any) -> None:
        optimizer.apply(gradients, weights)

    return step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
