"""How `BlockMonitor` gets into `fit`: it stands in for the training function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_bng.tools.group import Group
from keras_bng.tools.watched import Watched


class StandIn:
    """For a model's training function; steps that are due run in one of its own.

    That one is made anew, and the optimizers are watched anew, when there is a new
    training function: the model may have changed.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.group = Group([], _no_optimizer)
        self.due = False
        self.function = self._call  # the same object at each look
        self.plain: Any = None
        self.watching: Any = None
        self.made_for: list[Any] = []

    def _call(self, *args: Any) -> Any:
        due, self.due = self.due, False
        if not due:
            return self.plain(*args)
        with self.watch():
            return self.watching(*args)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Also for another monitor, whose turn it may be in the same step."""
        other = _stand_in(self.plain)
        with other.watch() if other else contextlib.nullcontext(), self.group.watch():
            yield

    def is_there(self) -> bool:
        """Also behind those of other monitors."""
        function = self.model.train_function
        while function is not self.function:
            other = _stand_in(function)
            if other is None:
                return False
            function = other.plain
        return True

    def put(self, optimizers: Sequence[Any], make: Callable[[Any], Watched]) -> None:
        """In the place of the training function that is there now."""
        model, there = self.model, self.is_there()
        plain = self.plain if there else model.train_function
        if plain is None:  # `compile` was called: Keras will say so
            return
        self.plain = plain
        made_for = [model, *optimizers, *_behind(plain)]
        if self.made_for != made_for:
            self.group = Group(optimizers, make)
            function = model.train_function
            self.watching = another_train_function(model)
            model.train_function = function
            self.made_for = made_for
        if not there:
            model.train_function = self.function

    def take_away(self) -> None:
        """So that the next `fit` pays nothing."""
        if self.is_there():
            self.model.train_function = _behind(self.plain)[-1]


def _no_optimizer(optimizer: Any) -> Watched:
    raise AssertionError(optimizer)


def _stand_in(train_function: Any) -> StandIn | None:
    found = getattr(train_function, "__self__", None)
    return found if isinstance(found, StandIn) else None


def _behind(train_function: Any) -> list[Any]:
    """What those that stand in watch; at the end, the model's own function."""
    other = _stand_in(train_function)
    return [other.group, *_behind(other.plain)] if other else [train_function]


def another_train_function(model: keras.Model) -> Any:
    """Like the model's own, and traced apart from it."""
    own, train_step = "train_step" in vars(model), model.train_step
    # JAX would take two functions that call one `train_step` for the same.
    model.train_step = lambda *args, **kwargs: train_step(*args, **kwargs)
    try:
        model.make_train_function(force=True)
    finally:
        if own:
            model.train_step = train_step
        else:
            del model.train_step
    return model.train_function
