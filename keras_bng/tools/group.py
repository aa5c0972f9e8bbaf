"""Several optimizers, watched together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_bng.optimizer import hooked
from keras_bng.tools.watched import MULTI, Watched, inner_optimizers


class Group:
    """Optimizers that are watched together: `parts`, as far as they are known."""

    def __init__(
        self, optimizers: Sequence[Any], make: Callable[[Any], Watched]
    ) -> None:
        self.optimizers, self.make = list(optimizers), make
        self.parts: list[Watched] = []
        self._find_parts()

    def _find_parts(self) -> list[Watched]:
        known = {id(part.optimizer) for part in self.parts}
        found = {id(o): o for held in self.optimizers for o in inner_optimizers(held)}
        new = [self.make(o) for key, o in found.items() if key not in known]
        self.parts += new
        return new

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def enter(parts: Sequence[Watched]) -> None:
                for part in parts:
                    if not part.watch.entered:  # by a context around this one
                        stack.enter_context(part.watch)

            def build(original: Any, variables: Any) -> None:
                original(variables)
                enter(self._find_parts())

            for optimizer in map(_multi_in, self.optimizers):
                if optimizer is not None and not optimizer.built:
                    stack.enter_context(hooked(optimizer, {"build": build}))
            enter(self.parts)
            yield


def _multi_in(optimizer: Any) -> Any:
    """A `MultiOptimizer`, which may learn its parts as late as in `build`."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _multi_in(optimizer.inner_optimizer)
    return optimizer if isinstance(optimizer, MULTI) else None
