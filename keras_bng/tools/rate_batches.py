"""The batches of a search for a rate: taken once, as `fit` and `evaluate` make them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_bng import backend


class _Batches(keras.callbacks.Callback):
    """Stands in for a train or test function: takes the batches, and does not train."""

    def __init__(self, model: Any, most: int) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.most, self.each = most, model.steps_per_execution

    def __call__(self, *args: Any) -> Any:
        iterator = iter(args[-1])  # on JAX, the state comes before it
        for _ in range(self.each):
            self.found.append(keras.tree.map_structure(_copied, next(iterator)))
        return ({}, args[0]) if len(args) > 1 else {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = len(self.found) >= self.most

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = len(self.found) >= self.most


def for_training(
    model: Any, most: int, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> list[Any]:
    """Those of an epoch, or so many; without a smaller one at its end."""
    batches = _Batches(model, most)
    model.train_function = batches
    # `fit` builds the optimizer that it finds, and lets it finish its averages. Past
    # `setattr`, by which TensorFlow would track it for checkpoints.
    vars(model)["optimizer"] = keras.optimizers.SGD(0.0)
    # Which Keras raises, on JAX, where there is no batch.
    with contextlib.suppress(StopIteration), _nothing_else(model, batches) as options:
        model.fit(x, y, batch_size, sample_weight=sample_weight, **options)
    found = _some(batches.found[:most], "x")
    if len(found) > 1 and rows_of(found[-1]) < rows_of(found[0]):
        del found[-1]  # of another shape, it would be traced by itself
    return found


def for_validation(
    model: Any, most: int, data: Any, batch_size: int | None
) -> list[Any]:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    batches = _Batches(model, most)
    model.test_function = batches
    with _nothing_else(model, batches) as options:
        model.evaluate(x, y, batch_size, sample_weight=sample_weight, **options)
    return _some(batches.found[:most], "validation_data")


@contextlib.contextmanager
def _nothing_else(model: Any, batches: _Batches) -> Iterator[dict[str, Any]]:
    """In which `fit` and `evaluate` do nothing but make batches."""
    vars(model)["get_metrics_result"] = dict  # metrics may not be built yet
    try:
        with warnings.catch_warnings():
            # As `fit` warns: of data that ends, and of data that is in its own order.
            for text in ("Your input ran out of data", "`shuffle=True` was passed"):
                warnings.filterwarnings("ignore", text)
            yield {"callbacks": [batches], "verbose": 0}
    finally:
        del vars(model)["get_metrics_result"]


def _some(batches: list[Any], name: str) -> list[Any]:
    if not batches:
        raise ValueError(f"`{name}` must have a batch or more. Received: none.")
    return batches


def _copied(array: Any) -> Any:
    """To be kept: a generator may fill the same array again."""
    return np.array(array) if isinstance(array, np.ndarray) else array


def rows_of(batch: Any) -> int:
    """How many examples a batch has; 1 if its shape does not say."""
    arrays = (a for a in keras.tree.flatten(batch) if a is not None)
    return sum(
        (_shape(part) or (1,))[0] or 1 for part in backend.parts_of(next(arrays))
    )


def _shape(array: Any) -> tuple[Any, ...]:
    return tuple(getattr(array, "shape", ()))
