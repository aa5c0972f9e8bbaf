"""The Euclidean norm of each block: one pass over the gradients, right at any size.

Squares of 1e-25 are 0 in float32, and squares of 1e25 are infinite. TensorFlow adds
them up in float64 where XLA compiles the step. Elsewhere that would cost a copy: sums
are in float32, and only if one is out of range are they taken again, with more care.
So it is in float64 itself, whose squares end at 1e-154 and 1e154.
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


def block_norms(
    tensors: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
    any_size: bool = True,
) -> Any:
    """A vector with the norm of each block, `members` being positions in `tensors`.

    Without `any_size`, what `dtype` cannot square counts as 0, or as infinite.
    """
    rows = _Rows(tensors, members)
    if not rows.owner.size:
        return ops.zeros((len(members),), dtype=dtype)
    if keras.backend.backend() == "tensorflow" and dtype != "float64":
        return _tensorflow_norms(rows, dtype, any_size)
    return _scaled_norms(rows, dtype, any_size)


class _Rows:
    """The tensors of all blocks: small ones in stacks of shape (k, n), others alone."""

    def __init__(
        self, tensors: Sequence[Any], members: Sequence[Sequence[int]]
    ) -> None:
        owner = {i: block for block, positions in enumerate(members) for i in positions}
        alike: dict[Any, list[int]] = {}
        alone: list[int] = []
        self.sizes = np.zeros(len(members))
        for i, block in owner.items():
            shape = tuple(tensors[i].shape)
            size = math.inf if None in shape else math.prod(shape)
            if size > SMALL:
                alone.append(i)
            elif size:
                alike.setdefault((shape, tensors[i].dtype), []).append(i)
            self.sizes[block] += min(size, 2**31)
        self.stacks = [
            ops.reshape(ops.stack([tensors[i] for i in group]), (len(group), -1))
            for group in alike.values()
        ]
        self.singles = [tensors[i] for i in alone]
        order = [i for group in alike.values() for i in group] + alone
        self.owner = np.array([owner[i] for i in order], "int32")

    def by_block(self, parts: list[Any], largest: bool = False) -> Any:
        """From a vector for each stack, then one for all singles, to one a block.

        An entry is the sum of what is in the block, or the largest, if none is below 0.
        """
        vector, count = ops.concatenate(parts), len(self.sizes)
        if keras.backend.backend() == "torch":
            import torch  # because `ops.segment_sum` of float64 is float32 there

            owner = torch.as_tensor(self.owner, dtype=torch.int64, device=vector.device)
            how = "amax" if largest else "sum"
            return vector.new_zeros(count).scatter_reduce(0, owner, vector, how)
        combine = ops.segment_max if largest else ops.segment_sum
        return combine(vector, self.owner, num_segments=count)

    def in_range(self, sums_of_squares: Any) -> Any:
        """Whether no square in these sums, one a block, has over- or underflowed."""
        dtype = keras.backend.standardize_dtype(sums_of_squares.dtype)
        # Entries whose squares vanish add up to less than this: one rounding error.
        limit = self.sizes * tiny(dtype) / np.finfo(dtype).eps
        limit = ops.convert_to_tensor(limit, dtype)
        finite = ops.isfinite(sums_of_squares)
        return ops.all(ops.logical_and(finite, sums_of_squares >= limit))


def tiny(dtype: str) -> float:
    """The smallest number with full precision; hardware may flush smaller ones to 0."""
    return float(np.finfo(dtype).tiny)


# TensorFlow.


def _tensorflow_norms(rows: _Rows, dtype: str, any_size: bool) -> Any:
    import tensorflow as tf

    def squares(dtype: str, stacks: list[Any], singles: list[Any]) -> Any:
        parts = [tf.reduce_sum(tf.square(tf.cast(x, dtype)), 1) for x in stacks]
        if singles and under_xla():
            parts.append(_sums_for_xla([tf.cast(x, dtype) for x in singles]))
        elif singles:  # of all that there is, `l2_loss` is the fastest
            parts.append(
                2 * tf.stack([tf.nn.l2_loss(tf.cast(x, dtype)) for x in singles])
            )
        return rows.by_block(parts)

    def careful(stacks: list[Any], singles: list[Any]) -> Any:
        return tf.cast(tf.sqrt(squares("float64", stacks, singles)), dtype)

    if under_xla():
        return careful(rows.stacks, rows.singles)
    sums = squares(dtype, rows.stacks, rows.singles)
    if not any_size:
        return tf.sqrt(sums)
    if tf.executing_eagerly():
        in_range = bool(rows.in_range(sums))
        return tf.sqrt(sums) if in_range else careful(rows.stacks, rows.singles)

    (norms,) = graph_if(
        rows.in_range(sums),
        lambda sums, stacks, singles: [tf.sqrt(sums)],
        lambda sums, stacks, singles: [careful(stacks, singles)],
        sums,
        rows.stacks,
        rows.singles,
    )
    return norms


def graph_if(condition: Any, if_true: Any, if_false: Any, *inputs: Any) -> list[Any]:
    """`tf.cond` as a call: merged into the graph around it, it would slow each step."""
    import tensorflow as tf

    then_branch, else_branch = (
        tf.function(function, autograph=False).get_concrete_function(*inputs)
        for function in (if_true, if_false)
    )
    return tf.raw_ops.StatelessIf(
        cond=condition,
        input=tf.nest.flatten(inputs),
        Tout=[x.dtype for x in else_branch.structured_outputs],
        then_branch=then_branch,
        else_branch=else_branch,
        output_shapes=[x.shape for x in else_branch.structured_outputs],
    )


def _sums_for_xla(tensors: list[Any]) -> Any:
    """The sum of squares of each tensor, as XLA adds up fastest on a CPU.

    It adds up to 32 rows with vectors, on all cores; more rows, or what is in a row,
    with several kernels and a copy. But for `abs` it would merge the steps again.
    """
    import tensorflow as tf

    alike: dict[int, list[Any]] = {}
    for i, x in enumerate(tensors):
        if None in x.shape:  # sparse rows, whose number is not known yet
            columns = tf.reshape(tf.reduce_sum(tf.square(x)), (1,))
        else:
            columns = _sum_of_32_rows(tf.square(tf.reshape(x, (-1,))))
        if columns.shape[0] > SMALL:
            columns = tf.reduce_sum(tf.abs(columns), keepdims=True)
        alike.setdefault(columns.shape[0], []).append((i, columns))
    order = [i for group in alike.values() for i, _ in group]
    sums = [
        tf.reduce_sum(tf.abs(tf.stack([columns for _, columns in group])), 1)
        for group in alike.values()
    ]
    return tf.gather(tf.concat(sums, 0), np.argsort(order))


def _sum_of_32_rows(x: Any) -> Any:
    import tensorflow as tf

    rest = x.shape[0] % 32
    sums = tf.reduce_sum(tf.reshape(x[rest:], (32, -1)), 0)
    return tf.concat([sums, x[:rest]], 0) if rest else sums


def in_plain_graph() -> bool:
    """Whether TensorFlow is tracing a function that XLA will not compile."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return not tf.executing_eagerly() and not under_xla()


def under_xla() -> bool:
    """Whether TensorFlow is tracing a function that XLA will compile."""
    import tensorflow as tf

    return not tf.executing_eagerly() and bool(
        tf.__internal__.get_enclosing_xla_context()
    )


# Where nothing wider can be had: JAX, torch, and float64.


def _scaled_norms(rows: _Rows, dtype: str, any_size: bool) -> Any:
    stacks = [ops.cast(x, dtype) for x in rows.stacks]
    singles = [ops.cast(x, dtype) for x in rows.singles]

    def squares(stacks: list[Any], singles: list[Any]) -> Any:
        parts = [ops.sum(ops.square(x), axis=1) for x in stacks]
        if singles:
            parts.append(ops.stack([ops.sum(ops.square(x)) for x in singles]))
        return rows.by_block(parts)

    def careful() -> Any:
        """Each block divided by its largest entry before it is squared."""
        parts = [ops.max(ops.abs(x), axis=1) for x in stacks]
        if singles:
            parts.append(ops.stack([ops.max(ops.abs(x)) for x in singles]))
        largest = rows.by_block(parts, largest=True)
        usable = ops.logical_and(ops.isfinite(largest), largest >= tiny(dtype))
        scale = ops.where(usable, largest, ops.ones_like(largest))
        by_row = ops.take(scale, rows.owner)
        ends = np.cumsum([x.shape[0] for x in stacks] + [1] * len(singles))
        *scales, _ = ops.split(by_row, ends)
        scaled = [x / ops.reshape(s, (-1, 1)) for x, s in zip(stacks, scales)]
        alone = [x / s[0] for x, s in zip(singles, scales[len(stacks) :])]
        return scale * ops.sqrt(squares(scaled, alone))

    sums = squares(stacks, singles)
    if not any_size:
        return ops.sqrt(sums)
    return _cond(rows.in_range(sums), lambda: ops.sqrt(sums), careful)


def _cond(
    predicate: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]
) -> Any:
    """`ops.cond`; JAX called eagerly would compile it anew in each step."""
    if keras.backend.backend() == "jax":
        import jax

        if not isinstance(predicate, jax.core.Tracer):
            return if_true() if predicate else if_false()
    return ops.cond(predicate, if_true, if_false)
