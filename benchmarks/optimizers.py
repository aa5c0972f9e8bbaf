"""The optimizers that are measured, and what each is compared with."""

from __future__ import annotations

from collections.abc import Callable

import keras

import keras_bng
from benchmarks import variables
from benchmarks.shapes import Shapes

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
    "SGDNG": lambda: keras_bng.SGDNG(1e-4, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-5),
    "AdamNG": lambda: keras_bng.AdamNG(1e-5),
    "AdamNG adaptive": lambda: keras_bng.AdamNG(1e-5, rule="adaptive"),
    "Lamb": lambda: keras.optimizers.Lamb(1e-5),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-5),
    "RMSpropNG": lambda: keras_bng.RMSpropNG(1e-5),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-5),
    "AdagradNG": lambda: keras_bng.AdagradNG(1e-5),
    "AdagradBNG": lambda: keras_bng.AdagradBNG(1e-5),
}
MAIN = ("SGD", "SGDNG", "Adam", "AdamNG")
BASE = {
    "SGDNG": "SGD",
    "SGDNG by hand": "SGD",
    "AdamNG": "Adam",
    "AdamNG by hand": "Adam",
    "AdamNG adaptive": "Adam",
    "Lamb": "Adam",
    "RMSpropNG": "RMSprop",
    "AdagradNG": "Adagrad",
    "AdagradBNG": "Adagrad",
    "optax adam": "Adam",
    "optax lamb": "Adam",
    "optax lars": "Adam",
}


def built(
    name: str, shapes: Shapes
) -> tuple[keras.optimizers.Optimizer, list[keras.Variable]]:
    """A new optimizer and the new variables that it is built for."""
    weights = variables.make(shapes)
    optimizer = OPTIMIZERS[name]()
    optimizer.build(weights)
    return optimizer, weights
