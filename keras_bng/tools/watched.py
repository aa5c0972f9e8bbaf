"""What an optimizer's updates do to each block, seen from within the training step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_bng import backend
from keras_bng.blocks import Block, BlockSpec, partition
from keras_bng.optimizer import (
    BlockNormalized,
    Watch,
    steps_of,
    variables_of,
)

NOT_IN_XLA = (
    "BlockMonitor.watch cannot see into a function that XLA compiles. Leave "
    "`jit_compile=True` out of this tf.function while you watch it, or train with "
    "`model.fit(..., callbacks=[monitor])`, which can."
)

# Before Keras 3.13 there is none.
MULTI: Any = getattr(keras.optimizers, "MultiOptimizer", ())


class Watched:
    """One optimizer, of whose updates those that are due are looked at.

    What was found is left where `last` reads it; with `deliver` it goes there at once.
    """

    def __init__(
        self,
        optimizer: Any,
        spec: BlockSpec,
        every: int,
        model: Any = None,
        deliver: Callable[[Watched, int, np.ndarray], None] | None = None,
    ) -> None:
        self.optimizer, self.spec, self.every = optimizer, spec, every
        self.deliver = deliver
        self.accumulation = optimizer.gradient_accumulation_steps or 1
        # In `fit`, only the training function of steps that are due is watched.
        only_due = model.steps_per_execution == 1 if model else every == 1
        self.always = only_due and self.accumulation == 1
        self.applied = False  # so far, as those of a model that do nothing
        self.updated = False
        self.sent = 0
        self.blocks: tuple[Block, ...] | None = None
        self.names: list[str] = []
        self.columns: list[int] = []  # in the monitor's rows
        self.found: tuple[int, Any] = (-1, None)
        self.gradient_rows: Any = None
        self.record: Any = None
        self.watch = Watch(optimizer, (), self.see, self.around)
        strategy = backend.strategy_of(steps_of(optimizer))
        self.strategy: Any = getattr(model, "distribute_strategy", strategy)
        if optimizer.built:
            self.prepare()

    def prepare(self) -> None:
        """When the optimizer is built, which may be within a trace."""
        if self.blocks is not None:
            return
        ours = isinstance(self.optimizer, BlockNormalized)
        self.blocks = self.watch.blocks = (
            self.optimizer.blocks
            if ours
            else partition(variables_of(self.optimizer), self.spec)
        )
        count = len(self.blocks)
        slots = ((3, count), "float32"), ((6, count), "float64")
        variables = backend.record_slots(slots, self.strategy)
        if variables:
            self.gradient_rows, self.record = variables
            self.read, self.forget = backend.reader(self.record)

    def see(self, factors: Callable[[], Any]) -> None:
        """Within an update: norms of gradients, factors and what was skipped."""

        def rows() -> Any:
            found = factors()
            norm, factor, kept = found.gradient_norm, found.factor, found.kept
            three = norm, factor, ops.logical_not(kept)
            return ops.stack([ops.cast(x, "float32") for x in three])

        if self.record is None:
            self.gradient_rows = rows()
        else:
            self.assign(self.gradient_rows, self.is_due(), rows)

    @contextlib.contextmanager
    def around(self) -> Iterator[bool]:
        """Around an update: norms of weights, and of the way that they went."""
        self.prepare()
        self.applied = True
        number, due = self.number(), self.is_due()
        if due is False:
            yield False
            return
        if self.deliver and self.record is not None and backend.under_xla():
            raise RuntimeError(NOT_IN_XLA)
        before = backend.as_they_are(self.weights())
        if self.record is None:
            self.gradient_rows = None
        yield True
        if self.gradient_rows is None:  # gradients were accumulated, and no more
            return

        def rows() -> Any:
            moved = [after - then for after, then in zip(self.weights(), before)]
            both = [*before, *moved]
            norms = backend.block_norms(both, self.members(), "float32", any_size=False)
            norm, moved = ops.unstack(ops.reshape(norms, (2, -1)))
            relative = moved / ops.where(norm > 0, norm, ops.ones_like(norm))
            gradient_norm, *others = ops.unstack(self.gradient_rows, 3)
            return ops.stack([gradient_norm, norm, *others, relative])

        def numbered_rows() -> Any:
            found = ops.cast(rows(), "float64")
            line = ops.broadcast_to(ops.cast(number, "float64"), found[:1].shape)
            return ops.concatenate([found, line])

        if self.record is None or self.deliver:
            backend.send(self.receive, number, due, rows)
        else:
            self.assign(self.record, due, numbered_rows)

    def weights(self) -> list[Any]:
        return [
            ops.cast(backend.values_of(v), "float32")
            for block in self.blocks or ()
            for v in block.variables
        ]

    def members(self) -> list[list[int]]:
        """Positions in the weights of all blocks, then in what comes after them."""
        sizes = [len(block.variables) for block in self.blocks or ()]
        ends = np.cumsum([0, *sizes])
        return [
            list(range(first + start, first + end))
            for first in (0, int(ends[-1]))
            for start, end in itertools.pairwise(ends)
        ]

    def assign(self, record: Any, due: Any, rows: Callable[[], Any]) -> None:
        """TensorFlow. Not assigned in a branch: on replicas it cannot be."""
        if due is True:
            record.assign(rows())
        else:
            kept = ops.convert_to_tensor(record)
            record.assign(ops.cond(due, rows, lambda: ops.copy(kept)))

    def number(self) -> Any:
        """Of the update that is being made; the first is 0."""
        return ops.convert_to_tensor(steps_of(self.optimizer)) // self.accumulation

    def is_due(self) -> Any:
        """Whether this step makes an update, and one that is to be recorded."""
        if self.always:
            return True
        steps = ops.convert_to_tensor(steps_of(self.optimizer)) + 1
        due = ops.logical_and(
            ops.equal(steps % self.accumulation, 0),
            ops.equal(self.number() % self.every, 0),
        )
        return bool(due) if backend.is_known(due) else due

    def receive(self, number: Any, rows: Any) -> None:
        found = int(number), ops.convert_to_numpy(rows)
        if not self.deliver:
            self.found = found
        elif self.watch.entered and self.blocks:  # else, of a function traced earlier
            self.sent += 1
            self.deliver(self, *found)

    def last(self) -> tuple[int, np.ndarray]:
        """The number of an update seen since the last call, or -1, and its rows."""
        if not self.blocks:
            return -1, np.empty(0)
        if self.record is not None:
            rows = self.read()
            number = int(rows[-1, 0])
            if number >= 0:
                self.forget()
            return number, rows[:-1]
        backend.wait()
        found, self.found = self.found, (-1, None)
        return found


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Those that do the updates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    if isinstance(optimizer, MULTI):
        return [
            inner for part in optimizer.optimizers for inner in inner_optimizers(part)
        ]
    return [optimizer]


def optimizers_of(model: Any) -> list[Any]:
    """Those that may update a model: its own, then those among its attributes.

    Each once, without what wraps it, as `inner_optimizers` gives them.
    """
    found: dict[int, Any] = {}
    for held in held_optimizers(model):
        for inner in inner_optimizers(held):
            found.setdefault(id(inner), inner)
    return list(found.values())


def held_optimizers(model: Any) -> list[Any]:
    """Optimizers as a model holds them, also in its lists and dicts."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
            seen.add(id(value))
            for part in list(value.values() if isinstance(value, dict) else value):
                look(part)

    look(getattr(model, "optimizer", None))
    look(list(vars(model).values()))
    return list(found.values())
