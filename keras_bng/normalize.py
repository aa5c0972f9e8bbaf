"""The method itself: one factor a block, `rule(norm of gradient, norm of weights)`.

The division by the norm is `Unit.__call__` in `rules.py`; here are the norms that it
gets, and the multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_bng import rules
from keras_bng.blocks import Block, Blocks

# One float32 accumulator over more terms than this may lose digits (under XLA).
LONG_SUM = 2**14


class Scaled(NamedTuple):
    """What one step did to each block; vectors have one entry a block."""

    gradients: list[Any]
    raw: list[Any]  # as they came in, repeated sparse rows summed
    gradient_norm: Any
    weight_norm: Any  # None if the rule does not read it
    factor: Any
    kept: Any  # bool: False where the gradient was not finite


def normalize(
    gradients: Sequence[Any],
    weights: Sequence[Any],
    blocks: Sequence[Block],
    rule: rules.RuleSpec = "unit",
) -> list[Any]:
    """Multiplies every block's gradient by `rule(gradient_norm, weight_norm)`.

    A pure function on every Keras backend, for custom loops without our optimizers.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None, one for each weight.
        weights: The variables, or their values in the order given to `partition`.
        blocks: What `partition` returned. Weights in none of the blocks keep their
            gradient.
        rule: `"unit"`, `"adaptive"`, `"clip"`, a rule object, a callable, or None.

    Returns:
        The list of scaled gradients, in the same order and dtypes. Zero stays zero; a
        block with a NaN or Inf in it comes back as zero.

    Example:

    >>> import keras, keras_bng
    >>> w = [keras.Variable([1.0, 1.0], name="w"), keras.Variable([1.0], name="b")]
    >>> g = [keras.ops.array([3.0, 0.0]), keras.ops.array([4.0])]
    >>> blocks = keras_bng.partition(w, "model")
    >>> a, b = normalize(g, w, blocks)
    >>> print(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))
    [0.6 0. ] [0.8]
    """
    rule = rules.get(rule)
    if len(gradients) != len(weights):
        raise ValueError(
            "`gradients` and `weights` must have the same length. Received: "
            f"{len(gradients)} gradients and {len(weights)} weights"
        )
    if rule is None or not blocks:
        return list(gradients)
    return scale_blocks(gradients, weights, _members(weights, blocks), rule).gradients


def _members(weights: Sequence[Any], blocks: Sequence[Block]) -> list[list[int]]:
    """Where each block's weights stand: found by identity, else (values) by order."""
    where = {id(weight): i for i, weight in enumerate(weights)}
    members = [[where[id(v)] for v in b.variables if id(v) in where] for b in blocks]
    if any(members):
        return members
    if isinstance(blocks, Blocks) and len(weights) == blocks.count:
        return [list(positions) for positions in blocks.positions]
    raise ValueError(
        "The weights are neither the variables that `blocks` was made from nor their "
        "values, all of them and in the same order. Received: "
        f"{len(weights)} weights for blocks of "
        f"{sum(len(b.variables) for b in blocks)} variables"
    )


def scale_blocks(
    gradients: Sequence[Any],
    weights: Sequence[Any],
    members: Sequence[Sequence[int]],
    rule: Any,
) -> Scaled:
    """`normalize` for blocks given by position, with all that it found out."""
    raw = [_as_tensor(g) for g in gradients]
    members = [[i for i in block if raw[i] is not None] for block in members]
    dtype = _norm_dtype(raw)
    gradient_norm = _norms(raw, weights, members, dtype)
    weight_norm = None
    if getattr(rule, "uses_weights", True):
        weight_norm = _norms(weights, weights, members, dtype)

    finite = ops.isfinite(gradient_norm)
    usable = ops.logical_and(finite, gradient_norm >= _tiny(dtype))
    ones = ops.ones_like(gradient_norm)
    factor = rule(ops.where(usable, gradient_norm, ones), weight_norm)
    factor = ops.cast(check_factor(factor, len(members)), dtype)
    kept = ops.logical_and(finite, ops.isfinite(factor))
    factor = ops.where(ops.logical_and(usable, kept), factor, ops.zeros_like(factor))

    scaled = list(raw)
    for block, number in zip(members, ops.unstack(factor, len(members))):
        for i in block:
            scaled[i] = _times(raw[i], number)
    return Scaled(scaled, raw, gradient_norm, weight_norm, factor, kept)


def check_factor(factor: Any, count: int) -> Any:
    """Raises unless a rule returned one number a block."""
    try:
        factor = ops.convert_to_tensor(factor)
        numeric = keras.backend.standardize_dtype(factor.dtype) not in (
            "string",
            "bool",
        )
    except (TypeError, ValueError):
        numeric = False
    if not numeric or tuple(factor.shape) != (count,):
        raise TypeError(
            "`rule` must return a tensor with one number a block, here of shape "
            f"({count},), like the norms that it gets. Received: {factor!r}"
        )
    return factor


def _times(gradient: Any, number: Any) -> Any:
    """`gradient * number` in the number's precision; 0 where the number is 0."""
    if is_sparse(gradient):
        return with_values(gradient, _times(gradient.values, number))
    product = ops.cast(gradient, number.dtype) * number
    # NaN times 0 is NaN: a dropped block needs `where`.
    product = ops.where(ops.equal(number, 0), ops.zeros_like(product), product)
    return ops.cast(product, gradient.dtype)


def _norms(
    tensors: Sequence[Any],
    weights: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
) -> Any:
    """The Euclidean norm of each block, right from the smallest to the largest float.

    Squares of 1e-25 are 0 in float32, and squares of 1e25 are infinite. Only if a sum
    of squares says that this may have happened is it taken again, scaled by the
    block's largest entry.
    """
    entries, owner = [], []
    sizes = np.zeros(len(members))
    for block, positions in enumerate(members):
        for i in positions:
            sizes[block] += math.prod(weights[i].shape)
            if math.prod(weights[i].shape):
                entries.append(ops.cast(_entries(tensors[i]), dtype))
                owner.append(block)
    if not entries:
        return ops.zeros((len(members),), dtype=dtype)
    segments = np.array(owner, "int32")

    def sums(values: Sequence[Any]) -> Any:
        return ops.segment_sum(ops.stack(values), segments, num_segments=len(members))

    def careful() -> Any:
        largest = ops.segment_max(
            ops.stack([ops.max(ops.abs(x), initial=0) for x in entries]),
            segments,
            num_segments=len(members),
        )
        usable = ops.logical_and(ops.isfinite(largest), largest >= _tiny(dtype))
        scale = ops.where(usable, largest, ops.ones_like(largest))
        by_block = ops.unstack(scale, len(members))
        return scale * ops.sqrt(
            sums([_sum_of_squares(x / by_block[b]) for x, b in zip(entries, owner)])
        )

    squares = sums([_sum_of_squares(x) for x in entries])
    # Entries whose squares vanish add up to less than this: one rounding error.
    limit = ops.convert_to_tensor(sizes * _tiny(dtype) / np.finfo(dtype).eps, dtype)
    in_range = ops.logical_and(squares >= limit, ops.isfinite(squares))
    return _cond(ops.all(in_range), lambda: ops.sqrt(squares), careful)


def _cond(predicate: Any, if_true: Any, if_false: Any) -> Any:
    """`ops.cond`; JAX called eagerly would compile it anew in each step."""
    if keras.backend.backend() == "jax":
        import jax

        if not isinstance(predicate, jax.core.Tracer):
            return if_true() if predicate else if_false()
    return ops.cond(predicate, if_true, if_false)


def _sum_of_squares(x: Any) -> Any:
    """Long sums in two stages; XLA would merge them but for the square root between."""
    if None in x.shape:  # sparse rows, whose number is not known
        return ops.sum(ops.square(ops.sqrt(ops.sum(ops.square(x), axis=-1))))
    count = math.prod(x.shape)
    if count <= LONG_SUM:
        return ops.sum(ops.square(x))
    width = math.isqrt(count)
    flat = ops.reshape(x, (-1,))
    rows = ops.reshape(flat[: count // width * width], (-1, width))
    row_norms = ops.sqrt(ops.sum(ops.square(rows), axis=1))
    rest = ops.square(flat[count // width * width :])
    return ops.sum(ops.square(row_norms)) + ops.sum(rest)


def is_sparse(gradient: Any) -> bool:
    """Whether this is a `tf.IndexedSlices`, the gradient of an embedding."""
    return hasattr(gradient, "dense_shape") and hasattr(gradient, "indices")


def _entries(tensor: Any) -> Any:
    return tensor.values if is_sparse(tensor) else ops.convert_to_tensor(tensor)


def with_values(sparse: Any, values: Any, indices: Any = None) -> Any:
    """The same `IndexedSlices` with other values."""
    indices = sparse.indices if indices is None else indices
    return type(sparse)(values, indices, sparse.dense_shape)


def _as_tensor(gradient: Any) -> Any:
    """Sums the rows of `IndexedSlices` that have the same index.

    The number of rows stays (XLA needs it known): those left over are zero, under
    the largest index. `tf.unique` would not compile under XLA.
    """
    if gradient is None:
        return None
    if not is_sparse(gradient):
        return ops.convert_to_tensor(gradient)
    order = ops.argsort(gradient.indices)
    indices = ops.take(gradient.indices, order)
    is_new = ops.cast(indices[1:] != indices[:-1], "int32")
    row = ops.concatenate(
        [ops.zeros_like(indices[:1], dtype="int32"), ops.cumsum(is_new)]
    )
    count = ops.shape(indices)[0]
    values = ops.segment_sum(
        ops.take(gradient.values, order, axis=0), row, num_segments=count
    )
    first = ops.segment_max(indices, row, num_segments=count)
    left_over = ops.arange(count) > ops.sum(is_new)
    return with_values(
        gradient, values, ops.where(left_over, ops.max(indices, initial=0), first)
    )


def _norm_dtype(tensors: Sequence[Any]) -> str:
    dtypes = {
        keras.backend.standardize_dtype(t.dtype) for t in tensors if t is not None
    }
    return "float64" if "float64" in dtypes else "float32"


def _tiny(dtype: str) -> float:
    """The smallest number with full precision; hardware may flush smaller ones to 0."""
    return float(np.finfo(dtype).tiny)
