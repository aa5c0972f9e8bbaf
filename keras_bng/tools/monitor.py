"""What the blocks do: `BlockMonitor` records it while a model trains, and draws it."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_bng.blocks import BlockSpec, check_spec
from keras_bng.optimizer import steps_of
from keras_bng.tools import files, picture
from keras_bng.tools.records import Records
from keras_bng.tools.watched import Group, Watched, held_optimizers

NOTHING_IN_FIT = (
    "BlockMonitor recorded nothing in this `fit`. It sees `model.optimizer` and the "
    "optimizers among the model's attributes. Is the one that trains held somewhere "
    "else? Then put `with monitor.watch(optimizer):` around `fit`. Or does a loss "
    "scale skip the updates?"
)
NOTHING_IN_WATCH = (
    "BlockMonitor.watch recorded nothing of {}, although it made updates. A function "
    "that was traced before cannot be seen: make it, or call it for the first time, "
    "within the context."
)


class BlockMonitor(keras.callbacks.Callback):
    """Records what each block's gradient was and how far the block moved, in `fit`.

    In a loop of one's own, `with monitor.watch(optimizer):` around it does the same.

    For our optimizers and, to see a vanishing gradient before switching, for any other
    Keras optimizer: its `factor` is 1. Works on every backend, compiled or not, on
    replicas, with accumulated gradients and with loss scaling. Steps that are recorded
    run in a training function of their own, which is traced when the first one comes;
    all others run in the one that `fit` has without a monitor. Optimizers that a model
    holds beside `model.optimizer` are watched too, from their first update on. With
    several JAX processes, only the first has records.

    Args:
        log_dir: Where `blocks.csv` grows, a line a block and record, and TensorBoard
            finds its scalars and, at the end of each epoch, the picture of `plot`. None
            keeps records in memory only.
        every: Records every so many updates.
        blocks: What makes a block where the optimizer has none of its own, as in
            `keras_bng.partition`.
        tensorboard: Whether TensorBoard's files are written to `log_dir` too.

    Attributes:
        blocks: The names of the blocks; of an optimizer that comes later, at the end.
        history: Arrays by name: `step`, `run`, and with a column a block
            `gradient_norm`, `weight_norm` (before the update), `factor`, `skipped` (1
            where the gradient was not finite), and `relative_step`, the length of the
            update divided by the weights' norm. `run` counts from 0: the next begins
            where steps begin again, or with another optimizer. NaN is a block that was
            not updated.

    Examples:
        >>> import keras, numpy as np
        >>> from keras_bng import AdamNG
        >>> layer = keras.layers.Dense(2, name="dense")
        >>> model = keras.Sequential([keras.Input((3,)), layer], name="model")
        >>> model.compile(optimizer=AdamNG(0.01), loss="mse")
        >>> monitor = BlockMonitor(every=2)
        >>> data = np.ones((8, 3)), np.ones((8, 2))
        >>> _ = model.fit(*data, batch_size=2, verbose=0, callbacks=[monitor])
        >>> monitor.blocks
        ['model/dense']
        >>> monitor.history["step"].tolist()
        [0, 2]
    """

    def __init__(
        self,
        log_dir: str | pathlib.Path | None = None,
        every: int = 1,
        blocks: BlockSpec = "layer",
        tensorboard: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"`every` must be an int from 1 on. Received: {every!r}")
        self.every = every
        self.log_dir = None if log_dir is None else pathlib.Path(log_dir)
        self._spec = check_spec(blocks)
        self._records = Records(self.log_dir, tensorboard)
        self._begin()

    def _begin(self) -> None:
        """What a copy begins anew."""
        self._trained: Any = None  # in `fit`
        self._of_model: Any = None  # the records
        self._group = Group([], self._watched_in_fit)
        self._watched: dict[int, Watched] = {}
        self._plain: Any = None
        self._watching: Any = None
        self._traced_for: Any = None
        self._stand_in = self._train_function  # the same object at each look

    def __getstate__(self) -> dict[str, Any]:
        """Settings and records."""
        names = "every", "log_dir", "_spec"
        kept = {name: vars(self)[name] for name in names}
        return {**kept, "_records": copy.copy(self._records)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        for name, value in state.items():
            setattr(self, name, value)
        self._begin()

    @property
    def blocks(self) -> list[str]:
        return self._records.blocks

    @property
    def history(self) -> dict[str, np.ndarray]:
        return self._records.history

    # In `fit`.

    def on_train_begin(self, logs: Any = None) -> None:
        self._trained = self.model  # which on JAX syncs the variables at each look
        self._due = self._looks = False
        self._recorded = self._missed = 0
        self._put_in_place()
        for part in self._group.parts:
            part.last()  # of a `fit` that was interrupted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._counted, self._steps, self._next = False, 0, 0

    def _put_in_place(self) -> None:
        """Stands in for the model's training function, which may be a new one."""
        held = held_optimizers(self._trained)
        in_place = self._is_in_place()
        plain = self._plain if in_place else self._trained.train_function
        if self._group.optimizers != held or self._of_model is not self._trained:
            self._group = Group(held, self._watched_in_fit)
            self._traced_for = None
        if plain is None:  # `compile` was called: Keras will say so
            return
        self._plain = plain
        if self._traced_for != _chain(plain):
            function = self._trained.train_function
            self._watching = _another_train_function(self._trained)
            self._trained.train_function = function
            self._traced_for = _chain(plain)
        if not in_place:
            self._trained.train_function = self._stand_in

    def _watched_in_fit(self, optimizer: Any) -> Watched:
        return Watched(optimizer, self._spec, self.every, self._trained)

    def _is_in_place(self) -> bool:
        """Also behind other monitors."""
        function = self._trained.train_function
        while function is not self._stand_in:
            other = _monitor_of(function)
            if other is None:
                return False
            function = other._plain
        return True

    def _train_function(self, *args: Any) -> Any:
        """Stands in for the model's: watches the steps that are to be recorded."""
        due, self._due = self._due, False
        if not due:
            return self._plain(*args)
        with self._watch():
            return self._watching(*args)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Also for another monitor, whose turn it may be in the same step."""
        other = _monitor_of(self._plain)
        with other._watch() if other else contextlib.nullcontext(), self._group.watch():
            yield

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._is_in_place():  # somebody made another one
            self._put_in_place()
        self._first = batch
        self._due = self._looks = self._steps >= self._next
        if self._due and not self._counted:  # now, after all that callbacks loaded
            self._count()
            self._due = self._looks = self._steps >= self._next

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += batch - self._first + 1
        if not self._looks:
            return
        parts = [part for part in self._group.parts if part.applied and part.blocks]
        found = [(part, *part.last()) for part in parts]
        found = [(part, number, rows) for part, number, rows in found if number >= 0]
        for part, _, _ in found:
            part.updated = True
        if found and all(part.updated for part in parts):
            self._name([part for part, _, _ in found])
            self._records.add(max(number for _, number, _ in found), found)
            self._recorded += 1
            self._next = self._next_record()
        else:
            self._missed += 1
            self._count()  # a loss scale skipped the update

    def _name(self, parts: Sequence[Watched]) -> None:
        """Finds the columns of those which are recorded for the first time."""
        for part in parts:
            if not part.columns:
                new = self._records.name(part, self._group.parts)
                if new and self._records.rows and self._of_model is not self._trained:
                    self.on_train_end()
                    raise ValueError(
                        "A BlockMonitor stays with one model: its records are of the "
                        f"blocks {self.blocks[: -len(new)]}, and this model has "
                        f"{part.names}. Use a new BlockMonitor."
                    )
        self._of_model = self._trained

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._records.draw()

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_in_place():  # the next `fit` pays nothing
            self._trained.train_function = _chain(self._plain)[-1]
        self._records.close()
        if not self._recorded and self._missed >= self.every:
            warnings.warn(NOTHING_IN_FIT, stacklevel=2)

    def _count(self) -> None:
        """Steps so far, of the first optimizer that has made any."""
        _sync(self._trained)
        self._counted, self._steps, self._accumulation = True, 0, 1
        for part in self._group.parts:
            steps = int(steps_of(part.optimizer).numpy())
            if steps or part is self._group.parts[0]:
                self._steps, self._accumulation = steps, part.accumulation
            if steps:
                break
        self._next = self._next_record()

    def _next_record(self) -> int:
        """The number of steps from which on the next execution has one to record."""
        each = self._accumulation
        update = -(-(self._steps // each) // self.every) * self.every
        # The execution in which the last step of this update is.
        return (update + 1) * each - self._trained.steps_per_execution

    # In loops of one's own.

    @contextlib.contextmanager
    def watch(self, *optimizers: Any) -> Iterator[BlockMonitor]:
        """Records what these optimizers apply within: a context for one's own loops.

        Called eagerly, in a `tf.function`, by `stateless_apply` in a `jax.jit`, or with
        torch. A function that is compiled is seen if it is traced within the context,
        which XLA on TensorFlow does not allow. Updates of several optimizers that have
        the same number are one record.

        Args:
            optimizers: Keras optimizers, built or not, ours or others.

        Examples:
            >>> import keras
            >>> from keras_bng import SGDNG
            >>> optimizer, w = SGDNG(0.1), keras.Variable([3.0, 4.0], name="w")
            >>> monitor = BlockMonitor(every=2)
            >>> with monitor.watch(optimizer):
            ...     for _ in range(4):
            ...         optimizer.apply([w.value], [w])
            >>> monitor.history["step"].tolist()
            [0, 2]
        """
        if not optimizers:
            raise ValueError("`watch` takes one optimizer or several. Received none.")
        for optimizer in optimizers:
            if not isinstance(optimizer, keras.optimizers.Optimizer):
                raise TypeError(
                    f"`watch` takes Keras optimizers. Received: {optimizer!r}"
                )
        group = Group(optimizers, self._watched_in_loops)
        before = [(o, _steps(o), len(self._records.rows)) for o in optimizers]
        try:
            with group.watch():
                yield self
                _wait()
        finally:
            self._records.draw()
            self._records.close()
        for optimizer, steps, rows in before:
            each = optimizer.gradient_accumulation_steps or 1
            if (
                len(self._records.rows) == rows
                and _steps(optimizer) - steps >= each * self.every
            ):
                warnings.warn(NOTHING_IN_WATCH.format(optimizer.name), stacklevel=3)

    def _watched_in_loops(self, optimizer: Any) -> Watched:
        """The same each time, for the sake of what was traced for it."""
        if id(optimizer) not in self._watched:
            made = Watched(optimizer, self._spec, self.every, deliver=self._deliver)
            self._watched[id(optimizer)] = made
        return self._watched[id(optimizer)]

    def _deliver(self, part: Watched, number: int, rows: np.ndarray) -> None:
        if not part.columns:
            now = [other for other in self._watched.values() if other.watch.entered]
            self._records.name(part, [*self._group.parts, *now])
        self._records.add(number, [(part, number, rows)])

    def plot(self, path: str | pathlib.Path, title: str = "") -> None:
        """A picture: blocks from input to output, steps from left to right.

        For several monitors below each other, in the same colours, there is
        `keras_bng.tools.picture.plot`.
        """
        picture.plot({title: self}, path)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> BlockMonitor:
        """A monitor with the records of a `blocks.csv`, to look at or to plot."""
        monitor = cls()
        found = monitor._records
        found.blocks, found.runs, found.rows = files.read(path)
        return monitor


def _monitor_of(train_function: Any) -> BlockMonitor | None:
    """Whose stand-in for a model's training function this is."""
    found = getattr(train_function, "__self__", None)
    return found if isinstance(found, BlockMonitor) else None


def _chain(train_function: Any) -> list[Any]:
    """What monitors that stand in for a model's own function watch; then that one."""
    monitor = _monitor_of(train_function)
    if monitor is None:
        return [train_function]
    return [monitor._group, *_chain(monitor._plain)]


def _another_train_function(model: keras.Model) -> Any:
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


def _sync(model: keras.Model) -> None:
    """On JAX, `fit` has the values, not the variables."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def _wait() -> None:
    """For records that are on their way."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def _steps(optimizer: Any) -> int:
    return int(steps_of(optimizer).numpy())
