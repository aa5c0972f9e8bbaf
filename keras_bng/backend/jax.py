"""JAX: XLA fuses the plain formulas, so that only the norms need care."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_bng.backend import common
from keras_bng.backend.common import Rows, call_one, norms_of, other_norms

# Until 0.10.2, XLA adds up several axes of a CPU's array one number after the other: of
# 4 million equal entries the fourth digit was wrong.
ONE_AXIS_AT_A_TIME = jax.__version_info__ < (0, 10, 2)


def block_norms(
    tensors: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
    norm: str = "l2",
    any_size: bool = True,
) -> Any:
    """See `common`."""
    rows = Rows(tensors, members, flat=False)
    if not rows.groups:
        return jnp.zeros((len(members),), dtype)
    if norm != "l2":
        return other_norms(rows, dtype, norm, summed)
    return norms_of(rows, dtype, any_size, summed(jnp.square, dtype), cond)


def summed(entry: Callable[[Any], Any], dtype: str) -> Callable[[Any, bool], Any]:
    """See `common`."""
    if not ONE_AXIS_AT_A_TIME:
        return common.summed(entry, dtype)

    def sums(group: Any, is_stack: bool) -> Any:
        left = entry(jnp.asarray(group, dtype))
        while left.ndim > is_stack:
            # The barrier, or XLA makes one sum of all of them again.
            left = jax.lax.optimization_barrier(jnp.sum(left, axis=-1))
        return left

    return sums


def cond(condition: Any, if_true: Any, if_false: Any, *inputs: Any) -> Any:
    """`jax.lax.cond`, which outside of a jitted function would compile each time."""
    if is_traced(condition):
        return jax.lax.cond(condition, if_true, if_false, *inputs)
    return call_one(condition, if_true, if_false, *inputs)


def is_traced(x: Any) -> bool:
    """Whether a tensor is one of a function that is being jitted."""
    return isinstance(x, jax.core.Tracer)


def is_first_process() -> bool:
    """See `common`."""
    return jax.process_index() == 0


# What the tools need, to look into a step.


def is_known(tensor: Any) -> bool:
    """See `common`."""
    return not is_traced(tensor)


def send(
    receive: Callable[[Any, Any], None], number: Any, due: Any, rows: Callable[[], Any]
) -> None:
    """See `common`."""
    if not is_traced(number):
        return common.send(receive, number, due, rows)

    def send_now() -> None:
        jax.debug.callback(receive, number, rows())

    send_now() if due is True else jax.lax.cond(due, send_now, lambda: None)


def wait() -> None:
    """See `common`."""
    jax.effects_barrier()


def sync(model: Any) -> None:
    """See `common`. `fit` has the values, not the variables."""
    model.jax_state_sync()


class Calls(common.Calls):
    """See `common`. Values go from step to step; the variables see nothing of it."""

    def begin(self) -> None:
        model = self.model
        model.reset_metrics()
        self.reset = [np.array(v.value) for v in model.metrics_variables]
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
        )
        self.values = [[v.value for v in group] for group in groups]

    def train(self, batch: Any) -> dict[str, Any]:
        state = (*self.values, list(self.reset))
        logs, (*self.values, _) = self.train_function(state, iter([batch]))
        return logs

    def test(self, batch: Any) -> dict[str, Any]:
        state = (*self.values[:2], list(self.reset))
        logs, (*self.values[:2], _) = self.test_function(state, iter([batch]))
        return logs
