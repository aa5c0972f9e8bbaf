"""What the blocks are: `block_summary`, before training."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_bng.blocks import BlockSpec, partition
from keras_bng.optimizer import BlockNormalized, variables_of
from keras_bng.tools.watched import inner_optimizers


def block_summary(
    model_or_optimizer: Any,
    blocks: BlockSpec | None = None,
    print_fn: Callable[[str], Any] = print,
) -> None:
    """Prints the blocks as a table, before training: variables, parameters, share.

    Args:
        model_or_optimizer: A built model, or an optimizer of ours that is built.
        blocks: What makes a block, as in `keras_bng.partition`: to try a setting.
            Default: the optimizer's own, if it is one of ours, else `"layer"`.
        print_fn: Gets the table, as in `model.summary`.

    Examples:
        >>> import keras
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(3, name="one")]
        ... )
        >>> block_summary(model, print_fn=lambda table: print("one" in table))
        True
    """
    variables, spec = _variables_and_spec(model_or_optimizer)
    parts = partition(variables, spec if blocks is None else blocks)
    total = sum(int(np.prod(v.shape)) for v in variables)
    rows = []
    covered = 0
    for block in parts:
        size = sum(int(np.prod(v.shape)) for v in block.variables)
        covered += size
        names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in block.variables)
        rows.append((block.name, names, size))
    if covered < total:
        inside = {id(v) for block in parts for v in block.variables}
        names = ", ".join(v.path for v in variables if id(v) not in inside)
        rows.append(("(in no block)", names, total - covered))
    print_fn(_table(rows, total, len(parts)))


def _variables_and_spec(model_or_optimizer: Any) -> tuple[list[Any], BlockSpec]:
    found = model_or_optimizer
    if isinstance(found, keras.Model):
        if not found.built:
            raise ValueError(
                f"The model {found.name!r} has no variables yet. Call it on data, or "
                "`model.build(input_shape)`, first."
            )
        ours = [
            inner
            for inner in inner_optimizers(getattr(found, "optimizer", None))
            if isinstance(inner, BlockNormalized)
        ]
        return found.trainable_variables, ours[0]._block_spec if ours else "layer"
    if not isinstance(found, keras.optimizers.Optimizer):
        raise TypeError(
            f"block_summary takes a model or an optimizer. Received: {found!r}"
        )
    (inner, *_) = inner_optimizers(found)
    if not inner.built:
        raise ValueError(
            "The optimizer has no variables yet: call "
            "`optimizer.build(model.trainable_variables)`, or give the model."
        )
    spec = inner._block_spec if isinstance(inner, BlockNormalized) else "layer"
    return variables_of(inner), spec


def _table(rows: Sequence[tuple[str, str, int]], total: int, blocks: int) -> str:
    """As `model.summary()` draws it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{blocks} blocks, {total:,} trainable parameters")
    table.add_column("Block", style="bold")
    table.add_column("Variables")
    table.add_column("Parameters", justify="right")
    table.add_column("Share", justify="right")
    for name, variables, size in rows:
        table.add_row(name, variables, f"{size:,}", f"{size / max(total, 1):.1%}")
    text = io.StringIO()
    Console(file=text, width=100, color_system=None).print(table)
    return text.getvalue()
