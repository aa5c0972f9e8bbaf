"""What an optimizer's updates do to each block, seen from within the training step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_bng.blocks import BlockSpec, partition
from keras_bng.normalize import values_of
from keras_bng.norms import block_norms
from keras_bng.optimizer import BlockNormalized, Watch, steps_of, variables_of


class Watched:
    """One optimizer, whose updates leave what they found where `last` can read it."""

    def __init__(
        self, optimizer: Any, spec: BlockSpec, every: int, model: keras.Model
    ) -> None:
        self.optimizer = optimizer
        self.every = every
        self.accumulation = optimizer.gradient_accumulation_steps or 1
        # Else a watched training function makes updates that are not due, too.
        self.always = model.steps_per_execution == 1 and self.accumulation == 1
        ours = isinstance(optimizer, BlockNormalized)
        self.normalizes = ours and optimizer.rule is not None
        self.blocks = (
            optimizer.blocks if ours else partition(variables_of(optimizer), spec)
        )
        self.found: tuple[int, Any] = (-1, None)
        self.gradient_rows: Any = None
        self.record: Any = None
        if keras.backend.backend() == "tensorflow":
            with model.distribute_strategy.scope():
                self.gradient_rows, self.record = (
                    keras.Variable(
                        np.full((rows, len(self.blocks)), -1),
                        trainable=False,
                        dtype=dtype,
                        aggregation="only_first_replica",
                    )
                    for rows, dtype in ((3, "float32"), (6, "float64"))
                )
            self.read = _reader(self.record)
        self.watch = Watch(optimizer, self.blocks, self.see, self.around)

    def see(self, factors: Callable[[], Any]) -> None:
        """Within an update: norms of gradients, factors and what was skipped."""

        def rows() -> Any:
            found = factors()
            norm = ops.cast(found.gradient_norm, "float32")
            factor = found.factor if self.normalizes else ops.ones_like(norm)
            skipped = ops.cast(ops.logical_not(found.kept), "float32")
            return ops.stack([norm, ops.cast(factor, "float32"), skipped])

        if self.record is None:
            self.gradient_rows = rows()
        else:
            self.assign(self.gradient_rows, self.is_due(), rows)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around an update: norms of weights, and of the way that they went."""
        number, due = self.number(), self.is_due()
        before = self.weights()
        if keras.backend.backend() == "torch":  # it updates weights in their place
            before = [ops.copy(weight) for weight in before]
        if self.record is None:
            self.gradient_rows = None
        yield
        if self.gradient_rows is None:  # gradients were accumulated, and no more
            return

        def rows() -> Any:
            moved = [after - then for after, then in zip(self.weights(), before)]
            norms = block_norms([*before, *moved], self.members(), "float32", False)
            norm, moved = ops.unstack(ops.reshape(norms, (2, len(self.blocks))))
            relative = moved / ops.where(norm > 0, norm, ops.ones_like(norm))
            gradient_norm, *others = ops.unstack(self.gradient_rows, 3)
            return ops.stack([gradient_norm, norm, *others, relative])

        def numbered_rows() -> Any:
            found = ops.cast(rows(), "float64")
            line = ops.broadcast_to(ops.cast(number, "float64"), found[:1].shape)
            return ops.concatenate([found, line])

        if self.record is None:
            self.send(number, due, rows())
        else:
            self.assign(self.record, due, numbered_rows)

    def weights(self) -> list[Any]:
        return [
            ops.cast(values_of(v), "float32")
            for block in self.blocks
            for v in block.variables
        ]

    def members(self) -> list[list[int]]:
        """Positions in the weights of all blocks, then in what comes after them."""
        ends = np.cumsum([0, *(len(block.variables) for block in self.blocks)])
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

    def send(self, number: Any, due: Any, rows: Any) -> None:
        """JAX and torch."""
        if keras.backend.backend() == "jax" and _is_traced(number):
            import jax

            def send() -> None:
                jax.debug.callback(self.receive, number, rows)

            send() if due is True else jax.lax.cond(due, send, lambda: None)
        elif due:
            self.receive(number, rows)

    def number(self) -> Any:
        """Of the update that is being made; the first is 0."""
        return ops.convert_to_tensor(steps_of(self.optimizer)) // self.accumulation

    def is_due(self) -> Any:
        """Whether this step makes an update, and one that is to be recorded."""
        if self.always:
            return True
        steps = ops.convert_to_tensor(steps_of(self.optimizer)) + 1
        return ops.logical_and(
            ops.equal(steps % self.accumulation, 0),
            ops.equal(self.number() % self.every, 0),
        )

    def receive(self, number: Any, rows: Any) -> None:
        self.found = int(number), ops.convert_to_numpy(rows)

    def last(self) -> tuple[int, np.ndarray]:
        """The number of the last update that was seen, and its rows."""
        if self.record is not None:
            rows = self.read()
            return int(rows[-1, 0]) if self.blocks else -1, rows[:-1]
        if keras.backend.backend() == "jax":
            import jax

            jax.effects_barrier()
        return self.found


def _reader(variable: Any) -> Callable[[], np.ndarray]:
    """Reads a TensorFlow variable, in a quarter of the time of `variable.numpy`."""
    import tensorflow as tf

    value = getattr(variable.value, "values", [variable.value])[0]  # of replicas
    read = tf.raw_ops.ReadVariableOp
    return lambda: read(resource=value.handle, dtype=value.dtype).numpy()


def _is_traced(x: Any) -> bool:
    import jax

    return isinstance(x, jax.core.Tracer)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Those that do the updates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    if hasattr(keras.optimizers, "MultiOptimizer") and isinstance(
        optimizer, keras.optimizers.MultiOptimizer
    ):
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
