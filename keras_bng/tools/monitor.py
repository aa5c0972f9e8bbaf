"""What the blocks do: `BlockMonitor` records it while a model trains, and draws it."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_bng import backend
from keras_bng.blocks import BlockSpec, check_spec
from keras_bng.optimizer import steps_of
from keras_bng.tools import files, picture
from keras_bng.tools.group import Group
from keras_bng.tools.records import Records
from keras_bng.tools.stand_in import StandIn
from keras_bng.tools.watched import Watched, held_optimizers, inner_optimizers

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
    """Records, in `fit`, the gradient of each block and how far each block moves.

    In a loop of your own, `with monitor.watch(optimizer):` around it does the same.

    It works with our optimizers and with any other Keras optimizer, so that you can see
    a vanishing gradient before you switch. It works on every backend, compiled or not,
    on replicas, with accumulated gradients and with loss scaling. A model may hold
    other optimizers beside `model.optimizer`: they are watched too, from their first
    update on. With several processes, only the first one has records.

    Steps that are recorded run in a training function of their own. All others run in
    the one that `fit` has without a monitor, and cost nothing more.

    Args:
        log_dir: A folder for files. `blocks.csv` gets a line for each block and record.
            TensorBoard finds its scalars there and, at the end of each epoch, the
            picture of `plot`. None: records are in memory only.
        every: How many updates there are from one record to the next.
        blocks: What makes a block, as in `keras_bng.partition`, if the optimizer is not
            one of ours.
        tensorboard: Whether TensorBoard's files are written to `log_dir`, too.

    Attributes:
        blocks: The names of the blocks. Those of an optimizer that comes later are at
            the end.
        history: Arrays by name. `step` and `run` have an entry for each record. All
            others have a column for each block: `gradient_norm`; `weight_norm`, before
            the update; `factor`, which is 1 with a stock optimizer; `skipped`, which is
            1 where the gradient was not finite; `relative_step`, the length of the
            update divided by the weights' norm. NaN means that the block was not
            updated. `run` counts from 0, and rises where the steps begin again or
            another optimizer comes.

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
        self._stand_in = StandIn()
        self._of_model: Any = None  # the records
        self._watched: dict[int, Watched] = {}  # in loops of one's own

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
        self._stand_in.model = self.model  # which on JAX syncs at each look
        self._begun, self._missed = len(self._records.rows), 0
        self._stand_in.due = False
        self._put_in_place()
        for part in self._stand_in.group.parts:
            part.last()  # of a `fit` that was interrupted

    def _put_in_place(self) -> None:
        held = held_optimizers(self._stand_in.model)
        now = {id(part.optimizer) for part in self._entered()}  # by `watch`
        held = [o for o in held if not now & set(map(id, inner_optimizers(o)))]
        self._stand_in.put(held, self._watched_in_fit)

    def _watched_in_fit(self, optimizer: Any) -> Watched:
        return Watched(optimizer, self._spec, self.every, self._stand_in.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._counted, self._steps, self._next = False, 0, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._stand_in.is_there():  # somebody made another function
            self._put_in_place()
        self._first, self._due = batch, self._steps >= self._next
        if self._due and not self._counted:  # now, after all that callbacks loaded
            self._count()
            self._due = self._steps >= self._next
        self._stand_in.due = self._due

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += batch - self._first + 1
        if not self._due:
            return
        parts = [p for p in self._stand_in.group.parts if p.applied and p.blocks]
        found = [(part, *part.last()) for part in parts]
        found = [(part, number, rows) for part, number, rows in found if number >= 0]
        for part, _, _ in found:
            part.updated = True
        if found and all(part.updated for part in parts):
            for part, _, _ in found:
                self._name(part)
            self._of_model = self._stand_in.model
            self._records.begin_unless_of(self._stand_in.group.parts)
            self._records.add(max(number for _, number, _ in found), found)
            self._next = self._next_record()
        else:
            self._missed += 1
            self._count()  # a loss scale skipped the update

    def _name(self, part: Watched) -> None:
        """The first record of an optimizer gives its blocks their columns."""
        if part.columns:
            return
        names = self._records.names_for(
            part, [*self._stand_in.group.parts, *self._entered()]
        )
        known = self._of_model in (None, self._stand_in.model) or part.deliver
        if self._records.rows and not known and not set(names) <= set(self.blocks):
            self._stand_in.take_away()
            raise ValueError(
                "A BlockMonitor stays with one model: its records are of the blocks "
                f"{self.blocks}, and this model has {names}. Use a new BlockMonitor."
            )
        self._records.name(part, names)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._records.draw()

    def on_train_end(self, logs: Any = None) -> None:
        self._stand_in.take_away()
        self._records.close()
        recorded = len(self._records.rows) - self._begun
        if not recorded and self._missed >= self.every and backend.is_first_process():
            warnings.warn(NOTHING_IN_FIT, stacklevel=2)

    def _count(self) -> None:
        """Steps so far, of the first optimizer that has made any."""
        backend.sync(self._stand_in.model)
        parts = self._stand_in.group.parts
        counts = [(_steps(part.optimizer), part.accumulation) for part in parts]
        made = [count for count in counts if count[0]]
        self._steps, self._accumulation = (made or counts or [(0, 1)])[0]
        self._counted, self._next = True, self._next_record()

    def _next_record(self) -> int:
        """The number of steps from which on the next execution has one to record."""
        each = self._accumulation
        update = -(-(self._steps // each) // self.every) * self.every
        # The execution in which the last step of this update is.
        return (update + 1) * each - self._stand_in.model.steps_per_execution

    # In loops of one's own.

    @contextlib.contextmanager
    def watch(self, *optimizers: Any) -> Iterator[BlockMonitor]:
        """A context for loops of your own: records what these optimizers apply in it.

        The loop may be eager, in a `tf.function`, in a `jax.jit` with
        `stateless_apply`, or in torch. A function that is compiled is seen if it is
        traced within the context. XLA on TensorFlow does not allow this. With several
        optimizers, updates of the same number are one record.

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
        before = {part: (_steps(part.optimizer), part.sent) for part in group.parts}
        try:
            with group.watch():
                try:
                    yield self
                finally:
                    backend.wait()
        finally:
            self._records.draw()
            self._records.close()
        for part in group.parts:
            steps, sent = before.get(part, (0, 0))
            made = (_steps(part.optimizer) - steps) // part.accumulation
            if not backend.is_first_process():  # which have none
                continue
            if part.sent == sent and made >= self.every:
                name = part.optimizer.name
                warnings.warn(NOTHING_IN_WATCH.format(name), stacklevel=3)

    def _watched_in_loops(self, optimizer: Any) -> Watched:
        """The same each time, for the sake of what was traced for it."""
        if id(optimizer) not in self._watched:
            made = Watched(optimizer, self._spec, self.every, deliver=self._deliver)
            self._watched[id(optimizer)] = made
        return self._watched[id(optimizer)]

    def _deliver(self, part: Watched, number: int, rows: np.ndarray) -> None:
        self._name(part)
        self._records.add(number, [(part, number, rows)])

    def _entered(self) -> list[Watched]:
        return [part for part in self._watched.values() if part.watch.entered]

    def plot(self, path: str | pathlib.Path, title: str = "") -> None:
        """Draws a picture: blocks from top to bottom, steps from left to right.

        `keras_bng.tools.picture.plot` draws several monitors below each other.
        """
        picture.plot({title: self}, path)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> BlockMonitor:
        """Makes a monitor from a `blocks.csv`, to look at or to plot."""
        monitor = cls()
        found = monitor._records
        found.blocks, found.runs, found.rows = files.read(path)
        return monitor


def _steps(optimizer: Any) -> int:
    return int(steps_of(optimizer).numpy())
