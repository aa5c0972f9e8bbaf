"""What the blocks do: `BlockMonitor` records it while a model trains, and draws it."""

from __future__ import annotations

import contextlib
import csv
import io
import pathlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_bng.blocks import BlockSpec, check_spec
from keras_bng.optimizer import steps_of
from keras_bng.tools.picture import plot
from keras_bng.tools.watched import Watched, inner_optimizers

VERSION = "brain.Event:2"  # that TensorBoard reads
COLUMNS = ("gradient_norm", "weight_norm", "factor", "skipped", "relative_step")


class BlockMonitor(keras.callbacks.Callback):
    """Records what each block's gradient was and how far the block moved, in `fit`.

    For our optimizers and, to see a vanishing gradient before switching, for any other
    Keras optimizer: its `factor` is 1. Works on every backend, compiled or not, on
    replicas, with accumulated gradients and with loss scaling. Steps that are recorded
    run in a training function of their own, which is traced when the first one comes;
    all others run in the one that `fit` has without a monitor.

    Args:
        log_dir: Where `blocks.csv` grows, a line a block and record, and TensorBoard
            finds its scalars. None keeps records in memory only.
        every: Records every so many updates.
        blocks: What makes a block where the optimizer has none of its own, as in
            `keras_bng.partition`.
        tensorboard: Whether TensorBoard's files are written to `log_dir` too.

    Attributes:
        blocks: The names of the blocks.
        history: Arrays by name: `step`, and with a column a block `gradient_norm`,
            `weight_norm` (before the update), `factor`, `skipped` (1 where the gradient
            was not finite), and `relative_step`, the length of the update divided by
            the weights' norm.

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
        self.blocks: list[str] = []
        self._spec = check_spec(blocks)
        self._rows: list[tuple[int, np.ndarray]] = []
        self._events = _Events(self.log_dir) if log_dir and tensorboard else None
        self._file: Any = None
        self._watched: list[Watched] = []
        self._traced_for: Any = None

    @property
    def history(self) -> dict[str, np.ndarray]:
        steps = np.array([step for step, _ in self._rows], int)
        shape = (len(self._rows), len(COLUMNS), len(self.blocks))
        values = np.array([row for _, row in self._rows]).reshape(shape)
        return {"step": steps, **{name: values[:, i] for i, name in enumerate(COLUMNS)}}

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        plain = self.model.train_function
        if _monitor_of(plain) is self:  # left there by a `fit` that was interrupted
            plain = self._plain
        if self._traced_for != (plain, optimizer):
            self._watch_anew(plain, optimizer)
        self._due = False
        self.model.train_function = self._train_function
        self._steps = self._count_steps()
        self._next = self._next_record()
        if self.log_dir and self._file is None:
            self._file = _csv_file(self.log_dir / "blocks.csv")
            self._lines = [_csv_line(name) for name in self.blocks]

    def _watch_anew(self, plain: Any, optimizer: Any) -> None:
        watched = [
            Watched(inner, self._spec, self.every, self.model)
            for inner in inner_optimizers(optimizer)
        ]
        names = [block.name for part in watched for block in part.blocks]
        if self._rows and names != self.blocks:
            raise ValueError(
                "A BlockMonitor stays with one model: its records are of the blocks "
                f"{self.blocks}, and this model has {names}. Use a new BlockMonitor."
            )
        self.blocks, self._watched, self._plain = names, watched, plain
        self._watching = _another_train_function(self.model)
        self._traced_for = plain, optimizer

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
        with contextlib.ExitStack() as stack:
            if other:
                stack.enter_context(other._watch())
            for part in self._watched:
                stack.enter_context(part.watch)
            yield

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first = batch
        self._due = self._records = self._steps >= self._next

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += batch - self._first + 1
        if not self._records:
            return
        seen = [part.last() for part in self._watched]
        numbers = [number for number, _ in seen] or [-1]
        step = max(numbers)
        if min(numbers) < 0 or (self._rows and step <= self._rows[-1][0]):
            self._steps = self._count_steps()  # a loss scale skipped the update
        else:
            row = np.concatenate([rows for _, rows in seen], 1)
            self._rows.append((step, row))
            self._write(step, row)
        self._next = self._next_record()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._events:
            self._events.flush()

    def on_train_end(self, logs: Any = None) -> None:
        function = self._plain
        while _monitor_of(function):
            function = _monitor_of(function)._plain
        self.model.train_function = function  # the next `fit` pays nothing
        if self._file:
            self._file.close()
            self._file = None
        if self._events:
            self._events.flush()

    def plot(self, path: str | pathlib.Path, title: str = "") -> None:
        """A picture: blocks from input to output, steps from left to right.

        For several monitors below each other, in the same colours, there is
        `keras_bng.tools.picture.plot`.
        """
        plot({title: self}, path)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> BlockMonitor:
        """A monitor with the records of a `blocks.csv`, to look at or to plot."""
        monitor = cls()
        steps: dict[int, dict[str, list[float]]] = {}
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                if None in line.values() or line["relative_step"] == "":
                    continue  # the last line of a killed process
                row = [float(line[name]) for name in COLUMNS]
                steps.setdefault(int(line["step"]), {})[line["block"]] = row
        if not steps:
            raise ValueError(f"{path} has no records.")
        monitor.blocks = list(next(iter(steps.values())))
        for step, rows in steps.items():
            if list(rows) == monitor.blocks:
                monitor._rows.append((step, np.array(list(rows.values())).T))
        return monitor

    def _next_record(self) -> int:
        """The number of steps from which on the next execution has one to record."""
        each = self._watched[0].accumulation if self._watched else 1
        update = -(-(self._steps // each) // self.every) * self.every
        # The execution in which the last step of this update is.
        return (update + 1) * each - self.model.steps_per_execution

    def _count_steps(self) -> int:
        if not self._watched:
            return 0
        _sync(self.model)
        return int(steps_of(self._watched[0].optimizer).numpy())

    def _write(self, step: int, row: np.ndarray) -> None:
        if self._file:
            self._file.writelines(
                line % (step, *values)
                for line, values in zip(self._lines, row.T.tolist())
            )
            self._file.flush()  # so that a kill costs no record
        if self._events:
            self._events.add(step, self.blocks, row)


def _monitor_of(train_function: Any) -> BlockMonitor | None:
    """Whose stand-in for a model's training function this is."""
    found = getattr(train_function, "__self__", None)
    return found if isinstance(found, BlockMonitor) else None


def _another_train_function(model: keras.Model) -> Any:
    """Like the model's own, and traced apart from it."""
    own, train_step = "train_step" in vars(model), model.train_step
    # JAX would take two functions that call one `train_step` for the same.
    model.train_step = lambda *args, **kwargs: train_step(*args, **kwargs)
    model.make_train_function(force=True)
    if own:
        model.train_step = train_step
    else:
        del model.train_step
    return model.train_function


def _sync(model: keras.Model) -> None:
    """On JAX, `fit` has the values, not the variables."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def _csv_file(path: pathlib.Path) -> Any:
    """Opened to append to; what is left of a half-written line is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    file = open(path, "a", newline="")  # noqa: SIM115
    if file.tell() == 0:
        csv.writer(file).writerow(["step", "block", *COLUMNS])
        file.flush()
    return file


def _csv_line(block: str) -> str:
    """To be filled in with `%`, which takes a third of the time of a `csv.writer`."""
    name = io.StringIO()
    csv.writer(name, lineterminator="").writerow([block])
    values = ",".join(["%.9g"] * len(COLUMNS))  # of float32, these digits are all
    return f"%d,{name.getvalue().replace('%', '%%')},{values}\r\n"


class _Events:
    """TensorBoard's scalars, all of a step in one summary."""

    def __init__(self, log_dir: pathlib.Path) -> None:
        self.event: Any = None
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            # A file of events is one of records, which are written faster like this.
            log_dir.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
            file = tf.io.TFRecordWriter(str(log_dir / name))
            self.new_event, self.flush = tf.compat.v1.Event, file.flush
            self.write = lambda event: file.write(event.SerializeToString())
            self.write(self.new_event(wall_time=time.time(), file_version=VERSION))
            return
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise ImportError(
                "BlockMonitor writes to `log_dir` for TensorBoard, which is not "
                "installed: `pip install tensorboard`. For `blocks.csv` alone, use "
                "BlockMonitor(log_dir, tensorboard=False)."
            ) from error
        writer = event_file_writer.EventFileWriter(str(log_dir))
        self.new_event, self.flush = event_pb2.Event, writer.flush
        self.write = writer.add_event

    def add(self, step: int, blocks: Sequence[str], row: np.ndarray) -> None:
        if self.event is None:
            self.event = self.new_event()
            for name in COLUMNS:
                for block in blocks:
                    self.event.summary.value.add(tag=f"{name}/{block}")
        self.event.step, self.event.wall_time = step, time.time()
        for scalar, value in zip(self.event.summary.value, row.ravel().tolist()):
            scalar.simple_value = value
        self.write(self.event)
