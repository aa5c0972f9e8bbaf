"""What the blocks are: `block_summary`, before training."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_bng.blocks import Block, BlockSpec, partition, paths_of
from keras_bng.optimizer import BlockNormalized, chooser_of, variables_of
from keras_bng.rules import uses_ones
from keras_bng.tools.watched import inner_optimizers, optimizers_of

# Whatever the gradient's size, they move each weight by about the rate.
STEADY = tuple(
    getattr(keras.optimizers, name) for name in ("Adam", "Adamax", "Nadam", "Lion")
)


class Row(NamedTuple):
    """A block, or with no name what is in none; of one optimizer, or of none yet."""

    name: str | None
    variables: list[Any]
    optimizer: Any


def block_summary(
    model_or_optimizer: Any,
    blocks: BlockSpec | None = None,
    print_fn: Callable[[str], Any] = print,
) -> None:
    """Prints a table of the blocks, and how far one step will move each of them.

    The column "Relative step" has the length of one update divided by the norm of the
    weights, at the present learning rate and without weight decay. A dash means that it
    depends on the gradient, as with SGD or clipping, or that there is no optimizer.

    Args:
        model_or_optimizer: A model that has variables, or an optimizer that is built.
        blocks: What makes a block, as in `keras_bng.partition`, to try a setting.
            Default: the optimizer's own blocks, if it is one of ours, else `"layer"`.
        print_fn: Called with the text of the table, as in `model.summary`.

    Examples:
        >>> import keras
        >>> from keras_bng import SGDNG
        >>> layer = keras.layers.Dense(2, kernel_initializer="ones", name="a")
        >>> model = keras.Sequential([keras.Input((8,)), layer], name="m")
        >>> model.compile(SGDNG(0.1, momentum=0.0), "mse")
        >>> lines = []
        >>> block_summary(model, print_fn=lambda text: lines.extend(text.split("\\n")))
        >>> print(*lines[4].split())
        │ m/a │ m/a/kernel (8, 2) │ 18 │ 100.0% │ 4 │ 2.5e-02 │
    """
    variables, optimizers = _variables_and_optimizers(model_or_optimizer)
    owners = _owners(variables, optimizers, model_or_optimizer)
    rows = _rows(variables, owners, optimizers, blocks)
    norms = np.array([_norm(row.variables) for row in rows])
    lengths = _lengths(rows, norms)
    steps = [length / norm if norm else np.nan for length, norm in zip(lengths, norms)]
    print_fn(_table(rows, norms, steps) + _caption(rows, norms, steps))


def _variables_and_optimizers(found: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(found, keras.Model):
        if not found.trainable_variables and not found.built:
            raise ValueError(
                f"The model {found.name!r} has no variables yet. Call it on data, or "
                "`model.build(input_shape)`, first."
            )
        return found.trainable_variables, optimizers_of(found)
    if not isinstance(found, keras.optimizers.Optimizer):
        raise TypeError(
            f"block_summary takes a model or an optimizer. Received: {found!r}"
        )
    optimizers = [inner for inner in inner_optimizers(found) if inner.built]
    if not optimizers:
        raise ValueError(
            "The optimizer has no variables yet: call "
            "`optimizer.build(model.trainable_variables)`, or give the model."
        )
    return [v for inner in optimizers for v in variables_of(inner)], optimizers


def _owners(variables: list[Any], optimizers: list[Any], model: Any) -> dict[int, Any]:
    """By a variable's id the optimizer that moves it, or None if that is not known."""
    owners = {
        id(v): inner for inner in optimizers if inner.built for v in variables_of(inner)
    }
    waiting = [inner for inner in optimizers if not inner.built]
    only = waiting[0] if len(waiting) == 1 else None
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a loss scale
    choose = chooser_of(optimizer) or (lambda variable: only)
    return {id(v): owners[id(v)] if id(v) in owners else choose(v) for v in variables}


def _rows(
    variables: list[Any],
    owners: dict[int, Any],
    optimizers: list[Any],
    blocks: BlockSpec | None,
) -> list[Row]:
    """In the order of the variables; what is in no block comes last."""
    tried = None if blocks is None else partition(variables, blocks)
    found = []
    for owner in _once(owners.values()):
        places = {id(v): i for i, v in enumerate(variables) if owners[id(v)] is owner}
        own = [variables[i] for i in places.values()]
        for name, members in (
            _blocks(own, owner, optimizers) if tried is None else tried
        ):
            # Another optimizer may move the others, or they were frozen since.
            kept = [v for v in members if id(v) in places]
            if kept:
                found.append((places[id(kept[0])], Row(name, kept, owner)))
        inside = {id(v) for _, row in found for v in row.variables}
        rest = [v for v in own if id(v) not in inside]
        if rest:
            found.append((len(variables), Row(None, rest, owner)))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def _blocks(own: list[Any], owner: Any, optimizers: list[Any]) -> tuple[Block, ...]:
    """As the optimizer has them, or will have them once it is built."""
    if owner is None:
        ours = [
            inner
            for inner in optimizers
            if isinstance(inner, BlockNormalized) and not inner.built
        ]
        owner = ours[0] if len(ours) == 1 else None
    if not isinstance(owner, BlockNormalized):
        return partition(own, "layer")
    return owner.blocks if owner.built else partition(own, owner._block_spec)


def _once(found: Any) -> list[Any]:
    """Each object once: optimizers are not to be compared by what they hold."""
    return list({id(x): x for x in found}.values())


def _size(variables: list[Any]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _norm(variables: list[Any]) -> float:
    squares = [ops.sum(ops.square(ops.cast(v, "float32"))) for v in variables]
    return math.sqrt(sum(float(ops.convert_to_numpy(square)) for square in squares))


def _rate(optimizer: Any) -> float:
    """The present one, also of a schedule or a callable."""
    return float(ops.convert_to_numpy(optimizer.learning_rate))


def _lengths(rows: list[Row], norms: np.ndarray) -> np.ndarray:
    """How far one update moves each row; NaN where that depends on the gradient."""
    lengths = np.full(len(rows), np.nan)
    for owner in _once(row.optimizer for row in rows):
        mine = [i for i, row in enumerate(rows) if row.optimizer is owner]
        in_blocks = [i for i in mine if rows[i].name is not None]
        if not _has_update_of_its_base(owner):
            continue
        if isinstance(owner, STEADY):
            sizes = [_size(rows[i].variables) for i in mine]
            lengths[mine] = _rate(owner) * np.sqrt(sizes)
            continue
        ours = isinstance(owner, BlockNormalized) and owner.rule is not None
        # With another norm, what else is in a gradient counts, too.
        known = ours and isinstance(owner, keras.optimizers.SGD) and owner.norm == "l2"
        if known and in_blocks:
            sizes = [_size(rows[i].variables) for i in in_blocks]
            found = _rule_lengths(owner.rule, norms[in_blocks], np.sqrt(sizes))
            lengths[in_blocks] = _rate(owner) * found
    return lengths


def _has_update_of_its_base(optimizer: Any) -> bool:
    """Else it is somebody's own, of which nothing is known."""
    update = getattr(type(optimizer), "update_step", None)
    return getattr(update, "__module__", "").split(".")[0] in ("keras", "keras_bng")


def _rule_lengths(
    rule: Any, weight_norms: np.ndarray, ones_norms: np.ndarray
) -> np.ndarray:
    """Of the gradients that a rule makes; NaN where they differ between examples."""
    count = len(weight_norms)
    examples = [np.full(count, norm) for norm in (1e-3, 1.0, 1e3)]
    examples.append(np.geomspace(1e-3, 1e3, count))  # not the same for all blocks
    known = [weight_norms, ones_norms][: 1 + uses_ones(rule)]
    found = []
    for norms in examples:
        inputs = [ops.convert_to_tensor(x, "float32") for x in (norms, *known)]
        found.append(norms * ops.convert_to_numpy(rule(*inputs)))
    same = np.ptp(found, 0) < 1e-4 * np.abs(found).max(0)
    return np.where(same, found[0], np.nan)


def _table(rows: list[Row], norms: np.ndarray, steps: list[float]) -> str:
    """As `model.summary()` draws it, and as wide as the names are."""
    from rich.console import Console
    from rich.table import Table

    variables = [v for row in rows for v in row.variables]
    path = dict(zip(map(id, variables), paths_of(variables)))
    total = _size(variables)
    count = sum(row.name is not None for row in rows)
    several = len(_once(row.optimizer for row in rows)) > 1
    table = Table(title=f"{count} blocks, {total:,} trainable parameters")
    table.add_column("Block", style="bold")
    table.add_column("Variables")
    for name in ("Parameters", "Share", "Weight norm", "Relative step"):
        table.add_column(name, justify="right")
    if several:
        table.add_column("Optimizer, rate")
    for row, norm, step in zip(rows, norms, steps):
        size = _size(row.variables)
        table.add_row(
            "(in no block)" if row.name is None else row.name,
            "\n".join(f"{path[id(v)]} {tuple(v.shape)}" for v in row.variables),
            f"{size:,}",
            f"{size / max(total, 1):.1%}",
            f"{norm:.3g}",
            "-" if np.isnan(step) else f"{step:.1e}",
            *([_name_and_rate(row.optimizer)] if several else []),
        )
    text = io.StringIO()
    # Names are no markup, and no name is longer than this.
    Console(
        file=text,
        width=10**6,
        color_system=None,
        markup=False,
        emoji=False,
        force_jupyter=False,
    ).print(table)
    return text.getvalue()


def _name_and_rate(optimizer: Any) -> str:
    if optimizer is None:
        return "-"
    return f"{type(optimizer).__name__} {_rate(optimizer):.3g}"


def _caption(rows: list[Row], norms: np.ndarray, steps: list[float]) -> str:
    """What the last column is, in a sentence, and what a dash in it means."""
    known = [row.optimizer for row, step in zip(rows, steps) if not np.isnan(step)]
    rates = {f"{_rate(optimizer):.3g}" for optimizer in _once(known)}
    text = "Relative step: the length of one update / the weights' norm"
    if rates:
        text += f", at the learning rate {' or '.join(sorted(rates))}"
    momentum = max((getattr(o, "momentum", 0.0) for o in known), default=0.0)
    if 0 < momentum < 1:
        text += (
            f"; with momentum {momentum:g} up to {1 / (1 - momentum):.3g} times that"
        )
    for name in sorted({type(o).__name__ for o in known if hasattr(o, "epsilon")}):
        text += f"; with {name} less where gradients change sign or vanish"
    text += "."
    dashes = [
        row
        for row, norm, step in zip(rows, norms, steps)
        if norm > 0 and np.isnan(step)
    ]
    if any(row.optimizer is None for row in dashes):
        text += " -: no optimizer has these weights yet."
    elif dashes:
        text += " -: it depends on the gradient."
    return text
