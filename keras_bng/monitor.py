"""What the blocks do: `BlockMonitor` records it while a model trains, and draws it."""

from __future__ import annotations

import csv
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_bng.blocks import Block, BlockSpec, check_spec, partition
from keras_bng.optimizer import BlockNormalized, steps_of, variables_of, watch

COLUMNS = ("gradient_norm", "weight_norm", "factor", "skipped", "relative_step")


class BlockMonitor(keras.callbacks.Callback):
    """Records what each block's gradient was and how far the block moved, in `fit`.

    For our optimizers and, to see a vanishing gradient before switching, for any other
    Keras optimizer: its `factor` is 1. Works on every backend, compiled or not, on
    replicas, with accumulated gradients and with loss scaling. While it is not in use,
    a step costs what it always does.

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
        self._watched: list[_Watched] = []

    @property
    def history(self) -> dict[str, np.ndarray]:
        steps = np.array([step for step, _ in self._rows], int)
        shape = (len(self._rows), len(COLUMNS), len(self.blocks))
        values = np.array([row for _, row in self._rows]).reshape(shape)
        return {"step": steps, **{name: values[:, i] for i, name in enumerate(COLUMNS)}}

    def on_train_begin(self, logs: Any = None) -> None:
        for part in self._watched:  # of a `fit` that was interrupted
            part.end()
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._watched = [
            _Watched(inner, self._spec, self.every, self.model)
            for inner in inner_optimizers(optimizer)
        ]
        blocks = [block for part in self._watched for block in part.blocks]
        names = [block.name for block in blocks]
        if self._rows and names != self.blocks:
            raise ValueError(
                "A BlockMonitor stays with one model: its records are of the blocks "
                f"{self.blocks}, and this model has {names}. Use a new BlockMonitor."
            )
        self.blocks = names
        self._movement = _Movement(blocks, self.model)
        self._steps = self._count_steps()
        if self.log_dir and self._file is None:
            self._file = _csv_file(self.log_dir / "blocks.csv")
        self.model.make_train_function(force=True)  # traced anew, with the watching

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first = batch
        self._due = self._is_due(self.model.steps_per_execution)
        if self._due:
            self._movement.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += batch - self._first + 1
        if not self._due:
            return
        seen = [part.last() for part in self._watched]
        numbers = [number for number, _ in seen] or [-1]
        step = max(numbers)
        if min(numbers) < 0 or (self._rows and step <= self._rows[-1][0]):
            self._steps = self._count_steps()  # a loss scale skipped the update
            return
        gradient_norm, factor, kept = np.concatenate([rows for _, rows in seen], 1)
        weight_norm, moved = self._movement.end()
        relative = moved / np.where(weight_norm > 0, weight_norm, 1)
        row = np.stack([gradient_norm, weight_norm, factor, 1 - kept, relative])
        self._rows.append((step, row))
        self._write(step, row)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._events:
            self._events.flush()

    def on_train_end(self, logs: Any = None) -> None:
        for part in self._watched:
            part.end()
        self._watched = []
        self.model.train_function = None  # the next `fit` pays nothing
        if self._file:
            self._file.close()
            self._file = None
        if self._events:
            self._events.flush()

    def plot(self, path: str | pathlib.Path, title: str = "") -> None:
        """A picture: blocks from input to output, steps from left to right.

        For several monitors below each other, in the same colours, there is
        `keras_bng.monitor.plot`.
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

    def _is_due(self, steps: int) -> bool:
        """Whether an update that is to be recorded ends within so many steps."""
        each = self._accumulation()
        first = -(-(self._steps + 1) // each) - 1
        last = (self._steps + steps) // each - 1
        return first <= last // self.every * self.every

    def _accumulation(self) -> int:
        return self._watched[0].accumulation if self._watched else 1

    def _count_steps(self) -> int:
        if not self._watched:
            return 0
        _sync(self.model)
        return int(steps_of(self._watched[0].optimizer).numpy())

    def _write(self, step: int, row: np.ndarray) -> None:
        if self._file:
            lines = csv.writer(self._file)
            lines.writerows(
                [step, name, *map(float, values)]
                for name, values in zip(self.blocks, row.T)
            )
            self._file.flush()  # so that a kill costs no record
        if self._events:
            self._events.add(step, self.blocks, row)


class _Watched:
    """One optimizer, whose updates leave what they found where `last` can read it."""

    def __init__(
        self, optimizer: Any, spec: BlockSpec, every: int, model: keras.Model
    ) -> None:
        self.optimizer = optimizer
        self.every = every
        self.accumulation = optimizer.gradient_accumulation_steps or 1
        ours = isinstance(optimizer, BlockNormalized)
        self.normalizes = ours and optimizer.rule is not None
        self.always = self.normalizes and model.steps_per_execution == 1
        self.blocks = (
            optimizer.blocks if ours else partition(variables_of(optimizer), spec)
        )
        self.found: tuple[int, Any] = (-1, None)
        self.record: Any = None
        if keras.backend.backend() == "tensorflow":
            with model.distribute_strategy.scope():
                self.record = keras.Variable(
                    np.zeros((3, len(self.blocks))),
                    trainable=False,
                    dtype="float32",
                    aggregation="only_first_replica",
                )
        self.end = watch(optimizer, self.blocks, self.see)

    def see(self, factors: Callable[[], Any]) -> None:
        """Within an update: norms, factors and what was kept, for `last`."""

        def rows() -> Any:
            found = factors()
            norm = ops.cast(found.gradient_norm, "float32")
            factor = found.factor if self.normalizes else ops.ones_like(norm)
            rows = norm, ops.cast(factor, "float32"), ops.cast(found.kept, "float32")
            return ops.stack(rows)

        backend = keras.backend.backend()
        if backend == "tensorflow":
            # What a normalizing optimizer has found is kept each time: that is
            # cheaper than to ask. Not assigned in a branch: on replicas it cannot be.
            if self.always:
                self.record.assign(rows())
            else:
                kept = ops.convert_to_tensor(self.record)
                due = ops.equal(self.number() % self.every, 0)
                self.record.assign(ops.cond(due, rows, lambda: ops.copy(kept)))
            return
        number = self.number()
        # On JAX, steps that only accumulate come here too.
        steps = ops.convert_to_tensor(steps_of(self.optimizer)) + 1
        due = ops.logical_and(
            ops.equal(steps % self.accumulation, 0), ops.equal(number % self.every, 0)
        )
        if backend == "jax" and _is_traced(due):
            import jax

            jax.lax.cond(
                due,
                lambda: jax.debug.callback(self.receive, number, rows()),
                lambda: None,
            )
        elif due:
            self.receive(number, rows())

    def number(self) -> Any:
        """Of the update that is being made; the first is 0."""
        return ops.convert_to_tensor(steps_of(self.optimizer)) // self.accumulation

    def receive(self, number: Any, rows: Any) -> None:
        self.found = int(number), ops.convert_to_numpy(rows)

    def last(self) -> tuple[int, np.ndarray]:
        """The number of the last update that was seen, and its rows."""
        if self.record is None:
            if keras.backend.backend() == "jax":
                import jax

                jax.effects_barrier()
            return self.found
        number = int(steps_of(self.optimizer).numpy()) // self.accumulation - 1
        if not self.always:
            number -= number % self.every
        return number, self.record.numpy()


def _sync(model: keras.Model) -> None:
    """On JAX, `fit` has the values, not the variables."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def _is_traced(x: Any) -> bool:
    import jax

    return isinstance(x, jax.core.Tracer)


class _Movement:
    """How far each block's weights go between `start` and `end`, and their norm."""

    def __init__(self, blocks: Sequence[Block], model: keras.Model) -> None:
        self.model = model
        self.readers = [[_reader(v) for v in block.variables] for block in blocks]

    def weights(self) -> list[np.ndarray]:
        _sync(self.model)
        return [
            np.concatenate([np.ravel(read()) for read in readers], dtype="float32")
            for readers in self.readers
        ]

    def start(self) -> None:
        self.before = self.weights()

    def end(self) -> tuple[np.ndarray, np.ndarray]:
        """Norms of the weights before, and of the way that they went."""
        moved = [after - before for after, before in zip(self.weights(), self.before)]
        norms = [np.array([*map(_norm, parts)]) for parts in (self.before, moved)]
        self.before = []
        return norms[0], norms[1]


def _norm(part: np.ndarray) -> float:
    square = float(np.vdot(part, part))
    if not 1e-30 < square < 1e30:  # some may have under- or overflowed
        square = float(np.square(part, dtype="float64").sum())
    return square**0.5


def _reader(variable: Any) -> Callable[[], Any]:
    """Reads the value: for TensorFlow in a quarter of the time of `variable.numpy`."""
    if keras.backend.backend() != "tensorflow":
        return variable.numpy
    import tensorflow as tf

    value = getattr(variable.value, "values", [variable.value])[0]  # of replicas
    read = tf.raw_ops.ReadVariableOp
    return lambda: read(resource=value.handle, dtype=value.dtype).numpy()


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


class _Events:
    """TensorBoard's scalars, all of a step in one summary."""

    def __init__(self, log_dir: pathlib.Path) -> None:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            self.summary = tf.compat.v1.Summary
            self.writer = tf.summary.create_file_writer(str(log_dir))
            return
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise ImportError(
                "BlockMonitor writes to `log_dir` for TensorBoard, which is not "
                "installed: `pip install tensorboard`. For `blocks.csv` alone, use "
                "BlockMonitor(log_dir, tensorboard=False)."
            ) from error
        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.writer = event_file_writer.EventFileWriter(str(log_dir))

    def add(self, step: int, blocks: Sequence[str], row: np.ndarray) -> None:
        summary = self.summary()
        for name, values in zip(COLUMNS, row):
            for block, value in zip(blocks, values):
                summary.value.add(tag=f"{name}/{block}", simple_value=float(value))
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with self.writer.as_default():
                raw = tf.constant(summary.SerializeToString())
                tf.summary.experimental.write_raw_pb(raw, step)
        else:
            event = self.event(wall_time=time.time(), step=step, summary=summary)
            self.writer.add_event(event)

    def flush(self) -> None:
        self.writer.flush()


PANELS = (
    ("gradient_norm", "log10 of the gradient's norm"),
    ("relative_step", "log10 of the relative step |Δw| / |w|"),
)
DECADES = 6  # that colours span at least, so that what is even looks even


def plot(monitors: dict[str, BlockMonitor], path: str | pathlib.Path) -> None:
    """Gradient norms and relative steps, a row a monitor, in the same colours.

    Grey is zero or not finite.
    """
    for title, monitor in monitors.items():
        if not monitor._rows:
            raise ValueError(f"Nothing to plot: {title or 'it'} has no records yet.")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "The plot needs matplotlib: `pip install matplotlib`."
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [0.17 * max(len(monitor.blocks), 8) for monitor in monitors.values()]
    figure = Figure(figsize=(9, sum(heights) + 1.1 + 0.6 * len(heights)))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(
        len(heights), 2, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#dddddd")
    for column, (name, label) in enumerate(PANELS):
        logs = [_logarithms(monitor.history, name) for monitor in monitors.values()]
        known = np.concatenate([part.compressed() for part in logs])
        top = known.max(initial=-np.inf) if known.size else 0.0
        bottom = min(known.min(initial=np.inf), top - DECADES)
        for ax, monitor, part in zip(axes[:, column], monitors.values(), logs):
            steps = monitor.history["step"]
            gap = np.diff(steps).min() if len(steps) > 1 else 1
            mesh = ax.pcolormesh(
                np.append(steps, steps[-1] + gap),
                np.arange(len(monitor.blocks) + 1) - 0.5,
                part.T,
                cmap=colours,
                vmin=bottom,
                vmax=top,
            )
            ax.set_ylim(len(monitor.blocks) - 0.5, -0.5)
        axes[-1, column].set_xlabel("step")
        figure.colorbar(
            mesh, ax=axes[:, column], label=label, location="bottom", pad=0.02
        )
    for row, (title, monitor) in zip(axes, monitors.items()):
        every = -(-len(monitor.blocks) // 40)
        names = _without_the_model(monitor.blocks)[::every]
        row[0].set_yticks(range(0, len(monitor.blocks), every), names, fontsize=8)
        row[1].set_yticks([])
        row[0].set_title(title, loc="left")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _without_the_model(names: Sequence[str]) -> Sequence[str]:
    """`model/dense` where all are in one model is `dense`."""
    parts = [name.partition("/") for name in names]
    one_model = len({first for first, _, _ in parts}) == 1
    short = [rest for _, _, rest in parts]
    return short if one_model and all(short) else names


def _logarithms(history: dict[str, np.ndarray], name: str) -> np.ma.MaskedArray:
    values = np.where(history["skipped"] > 0, np.nan, history[name])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.ma.masked_invalid(np.log10(values))
