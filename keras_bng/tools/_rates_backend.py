"""What a search for a rate does in another way on each backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops


class Steps:
    """Calls Keras's train and test functions, a batch a time: as on TensorFlow.

    Metrics are reset before each, so that the loss which comes back is the batch's.
    """

    def __init__(self, model: Any, train: Any, test: Any) -> None:
        self.model, self.train_function, self.test_function = model, train, test

    def begin(self) -> None:
        """From the values that the variables have now."""

    def train(self, batch: Any) -> dict[str, Any]:
        self.model.reset_metrics()
        return self.train_function(iter([batch]))

    def test(self, batch: Any) -> dict[str, Any]:
        self.model.reset_metrics()
        return self.test_function(iter([batch]))


class _TorchSteps(Steps):
    def train(self, batch: Any) -> dict[str, Any]:
        self.model.train()
        self.model.reset_metrics()
        return self.train_function([batch])

    def test(self, batch: Any) -> dict[str, Any]:
        self.model.eval()
        self.model.reset_metrics()
        return self.test_function([batch])


class _JaxSteps(Steps):
    """Values go from step to step; the variables see nothing of it."""

    def begin(self) -> None:
        model = self.model
        model.reset_metrics()
        self.reset = [np.array(v.value) for v in model.metrics_variables]
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
        )
        self.values = [[v.value for v in group] for group in groups]

    def train(self, batch: Any) -> dict[str, Any]:
        state = (*self.values, list(self.reset))
        logs, (*self.values, _) = self.train_function(state, iter([batch]))
        return logs

    def test(self, batch: Any) -> dict[str, Any]:
        state = (*self.values[:2], list(self.reset))
        logs, (*self.values[:2], _) = self.test_function(state, iter([batch]))
        return logs


def steps_of(model: Any, train: Any, test: Any) -> Steps:
    kinds = {"jax": _JaxSteps, "torch": _TorchSteps}
    return kinds.get(keras.backend.backend(), Steps)(model, train, test)


def keeper(variable: Any) -> Callable[[], Any]:
    """Puts the present value back, on each replica its own."""
    if keras.backend.backend() != "tensorflow":
        value = np.array(ops.convert_to_numpy(variable))
        return lambda: variable.assign(value)
    import tensorflow as tf

    held = variable.value
    is_one = not isinstance(held, tf.distribute.DistributedValues)
    parts = [(part, part.numpy()) for part in ((held,) if is_one else held.values)]
    return lambda: [part.assign(value) for part, value in parts]


def keeper_beside(model: Any) -> Callable[[], Any]:
    """Puts back what a torch model has beside its variables, and the random state.

    Dropout without a seed draws from the latter.
    """
    if keras.backend.backend() != "torch":
        return lambda: None
    import torch

    # By name: Keras makes those that hold parameters anew.
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back() -> None:
        for name, module in model.named_modules():
            module.training = modes.get(name, model.training)
        for weight, gradient in gradients:
            weight.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
        torch.set_rng_state(random)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)

    return put_back


def scope_of(model: Any) -> Any:
    """Where the model's variables are made, on TensorFlow."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def parts_of(array: Any) -> list[Any]:
    """Those of an array that was dealt out to replicas; else only itself."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if isinstance(array, tf.distribute.DistributedValues):
            return list(array.values)
    return [array]
