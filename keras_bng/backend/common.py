"""What every backend starts from, in plain `keras.ops`: others have their own instead.

The norms: one pass over the gradients, right at any size. Squares of 1e-25 are 0 in
float32, squares of 1e25 are infinite. So sums of squares are taken once; only if a
block's sum is out of range does anything more happen, and only to what is out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

# Tensors of equal shape up to this size are stacked: one sum does for all of them.
SMALL = 2**12


def is_sparse(gradient: Any) -> bool:
    """Whether this is a `tf.IndexedSlices`, the gradient of an embedding."""
    return hasattr(gradient, "dense_shape") and hasattr(gradient, "indices")


def with_values(sparse: Any, values: Any, indices: Any = None) -> Any:
    """The same `IndexedSlices` with other values."""
    indices = sparse.indices if indices is None else indices
    return type(sparse)(values, indices, sparse.dense_shape)


def tiny(dtype: str) -> float:
    """The smallest number with full precision; hardware may flush smaller ones to 0."""
    return float(np.finfo(dtype).tiny)


def as_tensor(gradient: Any) -> Any:
    return ops.convert_to_tensor(gradient)


def values_of(tensor: Any) -> Any:
    """The values of a tensor or variable; of a sparse one, its rows."""
    if is_sparse(tensor):
        return tensor.values
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    return ops.convert_to_tensor(tensor)


def with_shape(gradient: Any, weight: Any) -> Any:
    """A gradient out of a loop, such as an LSTM's, may have forgotten its shape."""
    return gradient


def times(gradient: Any, factor: Any) -> Any:
    """`normalize.times` as it is."""
    from keras_bng.normalize import times  # which needs this module first

    return times(gradient, factor)


def one_by_one(vector: Any) -> list[Any]:
    """The numbers in a vector, each a tensor of its own, or a float."""
    return ops.unstack(vector, vector.shape[0])


def alike(tensors: dict[int, Any]) -> list[list[int]]:
    """The positions of those that have one shape and dtype, together."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in tensors.items():
        groups.setdefault((tuple(tensor.shape), tensor.dtype), []).append(i)
    return list(groups.values())


# Norms.


def _size(tensor: Any) -> int:
    return 2**31 if None in tensor.shape else math.prod(tensor.shape)


class Rows:
    """The tensors of all blocks: small ones in stacks of shape (k, n), others alone.

    If they are not `flat`, a stack of k tensors has the shape (k, *shape): a row of
    what is dealt out to devices along an axis of its own would have to be gathered.
    A stack has k rows, and what is alone is one row. `owner` is the block of each row,
    `row_sizes` the length of a row in each group.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        members: Sequence[Sequence[int]],
        flat: bool = True,
    ) -> None:
        self.flat = flat
        owner = {i: block for block, positions in enumerate(members) for i in positions}
        sizes = {i: _size(tensors[i]) for i in owner if _size(tensors[i])}
        self.sizes = np.zeros(len(members))
        for i, size in sizes.items():
            self.sizes[owner[i]] += size
        stacks = alike({i: tensors[i] for i, size in sizes.items() if size <= SMALL})
        alone = [i for i, size in sizes.items() if size > SMALL]
        self.groups = [
            self.rows_of(ops.stack([tensors[i] for i in group])) for group in stacks
        ] + [tensors[i] for i in alone]
        self.stacks = len(stacks)
        order = [i for group in stacks for i in group] + alone
        self.owner = np.array([owner[i] for i in order], "int32")
        self.row_sizes = [sizes[i] for i in (*(group[0] for group in stacks), *alone)]

    def rows_of(self, stack: Any) -> Any:
        return ops.reshape(stack, (stack.shape[0], -1)) if self.flat else stack

    def by_block(self, rows: Any, largest: bool = False) -> Any:
        """From one number a row to one a block: their sum, or the largest.

        None may be below 0.
        """
        combine = ops.segment_max if largest else ops.segment_sum
        return combine(rows, self.owner, num_segments=len(self.sizes))


def least(sizes: Any, dtype: str) -> Any:
    """Sums of so many squares that are above this have not lost any to underflow.

    Entries whose squares vanish add up to less: one rounding error.
    """
    return sizes * tiny(dtype) / np.finfo(dtype).eps


def careful_norms(rows: Any, sums: Any, limit: Any, cond: Any, squares: Any) -> Any:
    """Norms of what is in a stack, whose squares may have over- or underflowed.

    `sums` are of their squares, by `squares` of `norms_of`; those of at least `limit`
    are right. A row of zeros alone, of a layer that is dead, is looked at once more and
    no further.
    """
    smallest = tiny(keras.backend.standardize_dtype(sums.dtype))
    axes = in_a_row(rows)

    def as_it_is(rows: Any, sums: Any) -> Any:
        return ops.sqrt(sums)

    def look(rows: Any, sums: Any) -> Any:
        largest = ops.maximum(ops.max(rows, axis=axes), -ops.min(rows, axis=axes))
        only_zeros = ops.all(ops.equal(largest, 0) & ops.equal(sums, 0))
        return cond(only_zeros, zeros, divided, rows, largest)

    def zeros(rows: Any, largest: Any) -> Any:
        return largest

    def divided(rows: Any, largest: Any) -> Any:
        usable = ops.isfinite(largest) & (largest >= smallest)
        scale = ops.where(usable, largest, ops.ones_like(largest))
        scaled = rows / ops.reshape(scale, (-1, *[1] * len(axes)))
        return scale * ops.sqrt(squares(scaled, True))

    in_range = ops.all(ops.isfinite(sums) & (sums >= limit))
    return cond(in_range, as_it_is, look, rows, sums)


def in_a_row(stack: Any) -> tuple[int, ...]:
    """The axes of a stack but for the first."""
    return tuple(range(1, len(stack.shape)))


def other_norms(rows: Rows, dtype: str, norm: str, sums_of: Any = None) -> Any:
    """ "l1" or "max", which need no second look: what is in range overflows nowhere."""
    if norm == "l1":
        return rows.by_block(of_rows(rows, (sums_of or summed)(ops.abs, dtype)))

    def largest(group: Any, is_stack: bool) -> Any:
        # Of a NaN and a number, XLA may take the number for the larger one.
        known = ops.abs(ops.cast(group, dtype))
        known = ops.where(ops.isnan(known), np.inf, known)
        return ops.max(known, axis=in_a_row(known) if is_stack else None)

    # A block of nothing has -inf for its largest.
    return ops.maximum(rows.by_block(of_rows(rows, largest), largest=True), 0)


def of_rows(rows: Rows, measure: Any) -> Any:
    """One number a row, by `measure(group, is_stack)`."""
    parts = [measure(group, i < rows.stacks) for i, group in enumerate(rows.groups)]
    return ops.concatenate([ops.reshape(part, (-1,)) for part in parts])


def norms_of(
    rows: Rows,
    dtype: str,
    any_size: bool,
    squares: Any,
    cond: Any,
    careful_norms: Any = careful_norms,
) -> Any:
    """The norm of each block.

    `squares(group, is_stack)` sums those of each row of a group, and
    `cond(condition, if_true, if_false, *inputs)` calls one of the two with the inputs.
    """
    parts = [
        ops.reshape(squares(group, i < rows.stacks), (-1,))
        for i, group in enumerate(rows.groups)
    ]
    sums = rows.by_block(ops.concatenate(parts))
    if not any_size:
        return ops.sqrt(sums)

    def plain(sums: Any, parts: Any, groups: Any) -> Any:
        return ops.sqrt(sums)

    def careful(sums: Any, parts: Any, groups: Any) -> Any:
        found = []
        for i, (part, group) in enumerate(zip(parts, groups)):
            if i >= rows.stacks:
                group = rows.rows_of(ops.expand_dims(group, 0))
            limit = ops.convert_to_tensor(least(rows.row_sizes[i], dtype), dtype)
            group = ops.cast(group, dtype)
            found.append(careful_norms(group, part, limit, cond, squares))
        norms = ops.concatenate(found)
        largest = rows.by_block(norms, largest=True)
        usable = ops.isfinite(largest) & (largest >= tiny(dtype))
        scale = ops.where(usable, largest, ops.ones_like(largest))
        scaled = norms / ops.take(scale, rows.owner)
        return scale * ops.sqrt(rows.by_block(ops.square(scaled)))

    limit = ops.convert_to_tensor(least(rows.sizes, dtype), dtype)
    in_range = ops.all(ops.isfinite(sums) & (sums >= limit))
    return cond(in_range, plain, careful, sums, parts, rows.groups)


def block_norms(
    tensors: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
    norm: str = "l2",
    any_size: bool = True,
) -> Any:
    """A vector with the norm of each block, `members` being positions in `tensors`.

    Without `any_size`, what `dtype` cannot square counts as 0, or as infinite.
    """
    rows = Rows(tensors, members)
    if not rows.groups:
        return ops.zeros((len(members),), dtype=dtype)
    if norm != "l2":
        return other_norms(rows, dtype, norm)
    return norms_of(rows, dtype, any_size, summed(ops.square, dtype), call_one)


def summed(entry: Callable[[Any], Any], dtype: str) -> Callable[[Any, bool], Any]:
    """Of a group, the sum of `entry` of what is in each row."""

    def sums(group: Any, is_stack: bool) -> Any:
        of_each = entry(ops.cast(group, dtype))
        return ops.sum(of_each, axis=in_a_row(of_each) if is_stack else None)

    return sums


def call_one(condition: Any, if_true: Any, if_false: Any, *inputs: Any) -> Any:
    """Where a condition has its value now."""
    return if_true(*inputs) if condition else if_false(*inputs)


# The update.


def summed_over_replicas(sum_over_replicas: Any, gradients: Any, variables: Any) -> Any:
    """The gradients as they are: those of the whole batch already."""
    return gradients


def update(
    base: str,
    settings: dict[str, Any],
    gradients: Sequence[Any],
    factors: Sequence[Any],
    variables: Sequence[Any],
    states: Sequence[Sequence[Any]],
    rate: Any,
    step: Any,
) -> list[int]:
    """Updates variables by the formula of `base`, in one pass where there is a kernel.

    Args:
        base: The name of the base optimizer, such as "Adam".
        settings: What it was given: `beta_1` and so on.
        gradients: Of each variable.
        factors: What each gradient is multiplied by, or None.
        variables: The variables.
        states: For each kind of state, that of each variable, or an empty list.
        rate: The learning rate, or a list of one for each variable.
        step: The number of this update; the first is 1.

    Returns:
        The positions of the variables that are left, for the plain path.
    """
    return list(range(len(variables)))


def each(step: Any, gradients: Any, variables: Any, rates: Any) -> None:
    """Calls `step(gradient, variable, rate)` for each variable."""
    for arguments in zip(gradients, variables, rates):
        step(*arguments)


def counts_here(counter: Any) -> bool:
    """Whether this replica is the one that counts for all."""
    return True


def reset(accumulators: Sequence[Any]) -> bool:
    """Whether accumulated gradients were set to 0 here, rather than by Keras."""
    return False


# A step called eagerly.


def is_eager() -> bool:
    """Whether a step called now would run op by op, where it could be compiled."""
    return False


def unconverted(function: Any) -> Any:
    """Spares a function around us the translation of our Python by AutoGraph."""
    return function


# Several processes.


def is_first_process() -> bool:
    """Whether this is the one of several processes that writes records."""
    return True


def check_shards(variables: Sequence[Any], state: Sequence[Any]) -> None:
    """Raises where the state of variables that are dealt out would not be."""


# What the tools need, to look into a step.


def paths_of(variables: Sequence[Any], paths: list[str]) -> list[str]:
    """The paths by which the layer of each variable is found; `paths` are Keras's."""
    return paths


def strategy_of(variable: Any) -> Any:
    """The `tf.distribute.Strategy` that a variable belongs to; None elsewhere."""
    return None


def record_slots(shapes: Sequence[Any], strategy: Any) -> list[Any] | None:
    """Variables in which a step leaves what was found; None where it can hand it over.

    `shapes` are pairs of a shape and a dtype.
    """
    return None


def as_they_are(weights: list[Any]) -> list[Any]:
    """Values that an update in place does not change."""
    return weights


def is_known(tensor: Any) -> bool:
    """Whether it has its value now, and the same for all replicas."""
    return True


def send(
    receive: Callable[[Any, Any], None], number: Any, due: Any, rows: Callable[[], Any]
) -> None:
    """If a step is due, calls `receive(number, rows())` with their values."""
    if due:
        receive(number, rows())


def wait() -> None:
    """Until all that was sent is received."""


def sync(model: Any) -> None:
    """Within `fit`, gives the variables of a model their present values."""


def event_writers() -> Callable[[Any], tuple[Any, Any, Any]]:
    """What opens a file for TensorBoard; an error, if it is not installed."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "BlockMonitor writes to `log_dir` for TensorBoard, which is not "
            "installed: `pip install tensorboard`. For `blocks.csv` alone, use "
            "BlockMonitor(log_dir, tensorboard=False)."
        ) from error
    return _event_writer


def _event_writer(log_dir: Any) -> tuple[Any, Any, Any]:
    """The class of an event, how one is written, and how the file is flushed."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer import event_file_writer

    writer = event_file_writer.EventFileWriter(str(log_dir))
    return event_pb2.Event, writer.add_event, writer.flush


class Calls:
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


def keeper(variable: Any) -> Callable[[], Any]:
    """Puts the present value back, on each replica its own."""
    value = np.array(ops.convert_to_numpy(variable))
    return lambda: variable.assign(value)


def keeper_beside(model: Any) -> Callable[[], Any]:
    """Puts back what a model has beside its variables."""
    return lambda: None


def parts_of(array: Any) -> list[Any]:
    """Those of an array that was dealt out to replicas; else only itself."""
    return [array]
