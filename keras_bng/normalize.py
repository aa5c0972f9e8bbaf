"""The method itself: one factor a block, `rule(norm of gradient, norm of weights)`.

The division by the norm is `Unit.__call__` in `rules.py`; the norm that it gets is
`block_norms`, the multiplication `times`, both here in plain `keras.ops`. A step runs
faster ones, from `keras_bng/backend/`; tests compare them with these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_bng import backend, rules
from keras_bng.backend.common import is_sparse, tiny, with_values
from keras_bng.blocks import Block, Blocks


class Factors(NamedTuple):
    """What one step found out about each block; vectors have one entry a block."""

    raw: list[Any]  # the gradients as they came in, repeated sparse rows summed
    gradient_norm: Any  # each by the norm that was asked for
    weight_norm: Any  # None if the rule does not read it
    factor: Any
    kept: Any  # bool: False where the gradient was not finite


def normalize(
    gradients: Sequence[Any],
    weights: Sequence[Any],
    blocks: Sequence[Block],
    rule: rules.RuleSpec = "unit",
    *,
    norm: str = "l2",
) -> list[Any]:
    """Multiplies every block's gradient by `rule(gradient_norm, weight_norm)`.

    A pure function on every Keras backend, for custom loops without our optimizers.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None, one for each weight.
        weights: The variables, or their values in the order given to `partition`.
        blocks: What `partition` returned. Weights in none of the blocks keep their
            gradient.
        rule: `"unit"`, `"rms"`, `"adaptive"`, `"clip"`, a rule object, a callable, or
            None.
        norm: `"l2"` (default), `"l1"` or `"max"`: which norm a block's gradient is
            measured by, and for `"adaptive"` its weights.

    Returns:
        The list of scaled gradients, in the same order and of the same dtypes.
        (Integers become floats of their weight's dtype.) A zero gradient stays zero. A
        block with a NaN or Inf in it comes back as zero.

    Examples:
        >>> import keras, keras_bng
        >>> w = [keras.Variable([1.0, 1.0], name="w"), keras.Variable([1.0], name="b")]
        >>> g = [keras.ops.array([3.0, 0.0]), keras.ops.array([4.0])]
        >>> blocks = keras_bng.partition(w, "model")
        >>> a, b = normalize(g, w, blocks)
        >>> print(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))
        [0.6 0. ] [0.8]
    """
    rule, norm = rules.get(rule), check_norm(norm)
    if len(gradients) != len(weights):
        raise ValueError(
            "`gradients` and `weights` must have the same length. Received: "
            f"{len(gradients)} gradients and {len(weights)} weights"
        )
    if rule is None or not blocks:
        return list(gradients)
    members = _members(weights, blocks)
    found = block_factors(gradients, weights, members, rule, norm)
    scaled = list(found.raw)
    for block, factor in zip(members, backend.one_by_one(found.factor)):
        for i in block:
            scaled[i] = backend.times(scaled[i], factor)
    return scaled


def _members(weights: Sequence[Any], blocks: Sequence[Block]) -> list[list[int]]:
    """Where each block's weights stand: found by identity, else (values) by order."""
    where: dict[int, list[int]] = {}
    for i, weight in enumerate(weights):
        where.setdefault(id(weight), []).append(i)  # tied ones may be listed twice
    members = [[i for v in b.variables for i in where.get(id(v), ())] for b in blocks]
    if any(members):
        return members
    if isinstance(blocks, Blocks) and len(weights) == blocks.total:
        return [list(positions) for positions in blocks.positions]
    raise ValueError(
        "The weights are neither the variables that `blocks` was made from nor their "
        "values, all of them and in the same order. Received: "
        f"{len(weights)} weights for blocks of "
        f"{sum(len(b.variables) for b in blocks)} variables"
    )


def block_factors(
    gradients: Sequence[Any],
    weights: Sequence[Any],
    members: Sequence[Sequence[int]],
    rule: Any,
    norm: str = "l2",
) -> Factors:
    """The factor of each block, with blocks given by position in `gradients`."""
    raw = [backend.with_shape(_as_tensor(g), w) for g, w in zip(gradients, weights)]
    members = [[i for i in block if raw[i] is not None] for block in members]
    names = _names_of_dtypes(raw)
    for i in (i for block in members for i in block):
        if "float" not in names[raw[i].dtype]:
            raw[i] = _as_float(raw[i], weights[i], i)
            names |= _names_of_dtypes([raw[i]])
    dtype = "float64" if "float64" in names.values() else "float32"
    entries = [None if g is None else backend.values_of(g) for g in raw]
    gradient_norm = backend.block_norms(entries, members, dtype, norm)
    weight_norm = None
    if rules.uses_weights(rule):
        entries = [backend.values_of(w) for w in weights]
        weight_norm = backend.block_norms(entries, members, dtype, norm)

    finite = ops.isfinite(gradient_norm)
    usable = ops.logical_and(finite, gradient_norm >= tiny(dtype))
    ones = ops.ones_like(gradient_norm)
    norms = [ops.where(usable, gradient_norm, ones), weight_norm]
    if rules.uses_ones(rule):
        sizes = [sum(math.prod(weights[i].shape) for i in block) for block in members]
        ones_norm = [NORM_OF_ONES[norm](size) for size in sizes]
        norms.append(ops.convert_to_tensor(ones_norm, dtype))
    factor = rule(*norms)
    factor = ops.cast(check_factor(factor, len(members)), dtype)
    kept = ops.logical_and(finite, ops.isfinite(factor))
    factor = ops.where(ops.logical_and(usable, kept), factor, ops.zeros_like(factor))
    return Factors(raw, gradient_norm, weight_norm, factor, kept)


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


def block_norms(
    tensors: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
    norm: str = "l2",
) -> Any:
    """The norm of each block, `members` being positions in `tensors`."""
    norms = [ops.zeros((), dtype)]
    for block in members:
        entries = [ops.reshape(ops.cast(tensors[i], dtype), (-1,)) for i in block]
        entry = ops.concatenate(entries) if entries else ops.zeros((0,), dtype)
        norms.append(NORMS[norm](entry))
    return ops.stack(norms)[1:]


def _euclidean(entry: Any) -> Any:
    """Squares of 1e-25 are 0 in float32, and squares of 1e25 are infinite: so a block
    is divided by its largest entry before it is squared."""
    largest = ops.max(ops.abs(entry), initial=0)
    smallest = tiny(keras.backend.standardize_dtype(entry.dtype))
    usable = ops.logical_and(ops.isfinite(largest), largest >= smallest)
    scale = ops.where(usable, largest, ops.ones_like(largest))
    return scale * ops.sqrt(ops.sum(ops.square(entry / scale)))


NORMS: dict[str, Any] = {
    "l2": _euclidean,
    "l1": lambda entry: ops.sum(ops.abs(entry)),
    "max": lambda entry: ops.max(ops.abs(entry), initial=0),
}
# Of so many ones.
NORM_OF_ONES: dict[str, Any] = {
    "l2": math.sqrt,
    "l1": float,
    "max": lambda n: min(n, 1),
}


def check_norm(norm: Any) -> str:
    """Returns the `norm` argument, or says what is wrong with it."""
    if not isinstance(norm, str) or norm not in NORMS:
        raise ValueError(
            "`norm` must be 'l2' (Euclidean), 'l1' (the sum of absolute values) or "
            f"'max' (the largest of them). Received: norm={norm!r}"
        )
    return norm


def times(gradient: Any, factor: Any) -> Any:
    """`gradient * factor` in the factor's precision; 0 where the factor is 0."""
    if gradient is None:
        return None
    if is_sparse(gradient):
        return with_values(gradient, times(gradient.values, factor))
    product = ops.cast(gradient, factor.dtype) * factor
    # NaN times 0 is NaN, and a dropped block must be 0.
    product = ops.where(ops.equal(factor, 0), ops.zeros_like(product), product)
    return ops.cast(product, gradient.dtype)


def _as_tensor(gradient: Any) -> Any:
    """Sums the rows of `IndexedSlices` that have the same index.

    The number of rows stays (XLA needs it known): those left over are zero, under
    the largest index. `tf.unique` would not compile under XLA.
    """
    if gradient is None:
        return None
    if not is_sparse(gradient):
        return backend.as_tensor(gradient)
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


def _as_float(gradient: Any, weight: Any, position: int) -> Any:
    """Integers become floats, as in Keras's own updates; complex ones are refused."""
    dtype = keras.backend.standardize_dtype(gradient.dtype)
    if "complex" in dtype:
        name = getattr(weight, "path", None) or getattr(weight, "name", None)
        raise TypeError(
            "The gradient of a weight in a block must be real: floats or integers. "
            f"Received: a gradient of dtype {dtype} for the weight "
            f"{name or position}. Make the real and the imaginary part two real "
            "variables, or leave the weight out of all blocks."
        )
    target = keras.backend.standardize_dtype(weight.dtype)
    target = target if "float" in target else "float32"
    if is_sparse(gradient):
        return with_values(gradient, ops.cast(gradient.values, target))
    return ops.cast(gradient, target)


def _names_of_dtypes(tensors: Sequence[Any]) -> dict[Any, str]:
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return {dtype: keras.backend.standardize_dtype(dtype) for dtype in dtypes}
