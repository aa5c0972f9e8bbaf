"""Trains a model at one rate after the other, and leaves it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_bng import backend
from keras_bng.optimizer import SET_BY_FIT, hooked
from keras_bng.tools import rate_batches
from keras_bng.tools.stand_in import another_train_function
from keras_bng.tools.watched import held_optimizers

# Attributes of a model that `fit`, `evaluate` and a search set.
ATTRIBUTES = (
    "optimizer",
    "train_function",
    "test_function",
    "stop_training",
    "stop_evaluating",
    "history",
    *SET_BY_FIT,
)
LOOK = 10  # steps after which losses are fetched: a GPU need not wait at each
Tell = Callable[[int, float], None]


class Search:
    """A context: within it the model is trained, after it the model is as it was.

    What trains is the function that Keras makes for `model.fit`, called with batches
    as `fit` makes them. So a `train_step` of one's own, XLA, replicas and weights of
    samples are what they are in `fit`. It is made once, for a copy of the optimizer
    whose rate is a variable; the optimizer itself is not touched.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kept = Kept(model)

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *error: Any) -> None:
        self.kept.put_back()

    def prepare(
        self,
        steps: int,
        batch_size: int | None,
        x: Any,
        y: Any,
        sample_weight: Any,
        validation_data: Any,
    ) -> None:
        """Takes the batches, builds what is not built, and makes the functions."""
        model = self.model
        with _scope_of(model):
            optimizer = fresh_copy(model.optimizer)
        self.batches = rate_batches.for_training(
            model, steps, x, y, sample_weight, batch_size
        )
        self.validation = (
            []
            if validation_data is None
            else rate_batches.for_validation(model, steps, validation_data, batch_size)
        )
        with _scope_of(model):
            _build(model, self.batches[0])
            optimizer.build(model.trainable_variables)
        self.kept.set_optimizer(optimizer)
        self.fresh = [backend.keeper(v) for v in optimizer.variables]
        self.kept.add()
        train = another_train_function(model)
        model.make_test_function(force=True)
        self.steps = backend.Calls(model, train, model.test_function)

    def begin(self, rate: float) -> None:
        """From the start, with an optimizer that has made no step yet."""
        self.kept.put_back_values()
        for put_back in self.fresh:
            put_back()
        self.model.optimizer.learning_rate = rate
        self.steps.begin()

    def train(self, rate: float, steps: int, tell: Tell) -> np.ndarray:
        """The loss of each batch, up to the first that is not finite."""
        self.begin(rate)
        losses: list[float] = []
        while len(losses) < steps and np.isfinite(losses).all():
            first = len(losses)
            chunk = range(first, min(first + LOOK, steps))
            losses += _fetched([self._train(step) for step in chunk])
            tell(len(losses), losses[-1])
        finite = np.isfinite(losses)
        return np.array(losses if finite.all() else losses[: np.argmin(finite) + 1])

    def losses_at_start(self, rate: float, steps: range) -> np.ndarray:
        """Of the batches of these steps, if no step had been made before."""
        losses = []
        for step in steps:
            self.begin(rate)
            losses += _fetched([self._train(step)])
        return np.array(losses)

    def _train(self, step: int) -> Any:
        return _loss(self.steps.train(self.batches[step % len(self.batches)]))

    def validate(self) -> tuple[np.ndarray, np.ndarray]:
        """The loss of each batch of validation data, and its rows."""
        losses = _fetched([_loss(self.steps.test(batch)) for batch in self.validation])
        return np.array(losses), np.array(
            list(map(rate_batches.rows_of, self.validation))
        )


class Kept:
    """A model as it is now, to be put back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        own = vars(model)
        # A model may hold its optimizer under another name too.
        self.names = [name for name in own if own[name] is model.optimizer]
        names = {*ATTRIBUTES, *self.names}
        self.attributes = {name: own[name] for name in names if name in own}
        self.missing = names - set(self.attributes)
        self.others = [o for o in held_optimizers(model) if o is not model.optimizer]
        self.put_back_beside = backend.keeper_beside(model)
        self.values: dict[int, Any] = {}
        self.add()

    def add(self) -> None:
        """Variables that are new, because the model was built since."""
        model, of_others = self.model, [v for o in self.others for v in o.variables]
        for variable in [*model.variables, *model.metrics_variables, *of_others]:
            if id(variable) not in self.values:
                self.values[id(variable)] = variable, backend.keeper(variable)

    def set_optimizer(self, optimizer: Any) -> None:
        vars(self.model).update(dict.fromkeys(self.names, optimizer))

    def put_back_values(self) -> None:
        self.model.reset_metrics()  # also those that were built since
        for _, put_back in self.values.values():
            put_back()
        self.put_back_beside()

    def put_back(self) -> None:
        own = vars(self.model)
        own.update(self.attributes)
        for name in self.missing:
            own.pop(name, None)
        self.put_back_values()


def fresh_copy(optimizer: Any) -> Any:
    """An optimizer with the same settings, no state, and a constant rate."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = fresh_copy(optimizer.inner_optimizer)
        return type(optimizer)(
            inner,
            initial_scale=optimizer.initial_scale,
            dynamic_growth_steps=optimizer.dynamic_growth_steps,
        )
    # Settings of ours that need not be fit to be saved, as a rate need not.
    ours = {"_block_spec": "layer", "_rule": None}
    ours = {name: value for name, value in ours.items() if name in vars(optimizer)}
    try:
        with hooked(optimizer, {**ours, "_learning_rate": 0.5}):
            config = optimizer.get_config()
        copy = type(optimizer).from_config(config)
        copy.learning_rate = 0.5
    except Exception as error:
        raise ValueError(
            "find_learning_rate trains with a copy of the optimizer, which is made by "
            "`from_config(get_config())` and must have a rate that can be set. "
            f"Received: {optimizer!r}, with which that raises: {error}"
        ) from error
    for name, value in vars(optimizer).items():
        if name in ours or name.startswith("_exclude_from_weight_decay"):
            vars(copy)[name] = value
    return copy


def _scope_of(model: Any) -> Any:
    """Where the model's variables are made, on TensorFlow."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def _build(model: Any, batch: Any) -> None:
    """On TensorFlow, `fit` builds a model only in its first step."""
    if model.built:
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        model(keras.tree.map_structure(lambda part: backend.parts_of(part)[0], x))
    except Exception as error:
        raise ValueError(
            f"The model {model.name!r} has no variables yet, and calling it on a batch "
            "does not make them. Build it, then compile it, first."
        ) from error


def _loss(logs: Any) -> Any:
    if "loss" not in logs:
        raise ValueError(
            "find_learning_rate compares `loss`, which must be among what `train_step` "
            f"and `test_step` return. Received: {sorted(logs)}"
        )
    return logs["loss"]


def _fetched(losses: list[Any]) -> list[float]:
    return [float(np.mean(ops.convert_to_numpy(loss))) for loss in losses]
