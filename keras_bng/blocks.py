"""Which variables belong together: `partition` splits a list of them into blocks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

BlockSpec: TypeAlias = (
    str | Callable[[Any], str | None] | Sequence[tuple[str, str | None]]
)

NAMED_SPECS = ("layer", "variable", "model")
ALLOWED = (
    "Allowed: 'layer', 'variable', 'model', a callable `variable -> str | None`, "
    "or a list of `(regex, name | None)` pairs."
)


class Block(NamedTuple):
    """Variables whose gradients share one norm."""

    name: str
    variables: tuple[Any, ...]


class Blocks(tuple):
    """A tuple of `Block`s that remembers where in the list their variables stood."""

    positions: tuple[tuple[int, ...], ...]
    count: int

    def __new__(
        cls,
        blocks: Sequence[Block],
        positions: Sequence[Sequence[int]],
        count: int,
    ) -> Blocks:
        self = super().__new__(cls, blocks)
        self.positions = tuple(tuple(p) for p in positions)
        self.count = count
        return self


def path_of(variable: Any) -> str:
    """The variable's path; for a `tf.Variable`, which has none, its name."""
    path = getattr(variable, "path", None)
    return path if path is not None else variable.name.split(":")[0]


def check_spec(blocks: BlockSpec) -> BlockSpec:
    """Returns a checked copy of the `blocks` argument, or says what is wrong."""
    if isinstance(blocks, str):
        if blocks not in NAMED_SPECS:
            raise ValueError(
                f"Unknown value for `blocks`. {ALLOWED} Received: blocks={blocks!r}"
            )
        return blocks
    if callable(blocks):
        return blocks
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(f"`blocks` has the wrong type. {ALLOWED} Received: {blocks!r}")
    return tuple(_check_pair(pair) for pair in blocks)


def _check_pair(pair: Any) -> tuple[str, str | None]:
    if not (
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and (pair[1] is None or isinstance(pair[1], str))
    ):
        raise TypeError(
            "Every entry of the list `blocks` must be a pair `(regex, name | None)` "
            f"of strings. Received the entry: {pair!r}"
        )
    try:
        re.compile(pair[0])
    except re.error as error:
        raise ValueError(
            f"A pattern in `blocks` is not a valid regular expression: {error}. "
            f"Received: {pair[0]!r}"
        ) from error
    return tuple(pair)


def partition(variables: Sequence[Any], blocks: BlockSpec = "layer") -> Blocks:
    """Splits variables into blocks, in the order of their first variable.

    Args:
        variables: Keras variables, for instance `model.trainable_variables`.
        blocks: What makes a block.
            - `"layer"`: everything that the innermost layer owns. Decided by
              `variable.path`; a path that repeats starts a new block, because
              two layers may have the same path.
            - `"variable"`: every variable by itself.
            - `"model"`: all in one.
            - a callable `variable -> str | None`: variables with the same name
              are one block, `None` leaves a variable out of all blocks.
            - a list of `(regex, name | None)`: the first pattern found in
              `variable.path` names the block. Unmatched variables go by layer.

    Returns:
        A tuple of `Block(name, variables)`. Names are unique.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Dense(3, name="a"),
        ...                           keras.layers.Dense(1, name="b")], name="net")
        >>> model.build((None, 2))
        >>> [(b.name, len(b.variables)) for b in partition(model.trainable_variables)]
        [('net/a', 2), ('net/b', 2)]
        >>> [b.name for b in partition(model.trainable_variables, [("bias", None)])]
        ['net/a', 'net/b']
    """
    name_of = _naming(variables, check_spec(blocks))
    members: dict[Any, list[int]] = {}
    seen = set()
    for position, variable in enumerate(variables):
        # A tied variable listed twice stays where it was; Keras overwrites
        # float8 scales with their gradient, so they take no step.
        if id(variable) in seen or getattr(variable, "overwrite_with_gradient", False):
            continue
        seen.add(id(variable))
        key = name_of(variable)
        if key is not None:
            members.setdefault(key, []).append(position)
    return Blocks(
        [
            Block(name, tuple(variables[i] for i in positions))
            for name, positions in zip(_unique_names(members), members.values())
        ],
        list(members.values()),
        len(variables),
    )


def _naming(variables: Sequence[Any], blocks: BlockSpec) -> Callable[[Any], Any]:
    """Returns the function `variable -> key`; equal keys are one block, None is none.

    A key is a pair (name, count); count tells apart layers that share a path.
    """
    if blocks == "model":
        return lambda variable: ("model", 0)
    if blocks == "layer":
        return _by_layer()
    if blocks == "variable":
        seen: dict[str, int] = {}

        def by_variable(variable: Any) -> tuple[str, int]:
            path = path_of(variable)
            seen[path] = seen.get(path, -1) + 1
            return path, seen[path]

        return by_variable
    if callable(blocks):
        return lambda variable: _checked_name(blocks, variable)
    _warn_of_idle_patterns(variables, blocks)
    by_layer = _by_layer()

    def by_pattern(variable: Any) -> tuple[str, int | str] | None:
        for pattern, name in blocks:
            if re.search(pattern, path_of(variable)):
                # "pattern" keeps a chosen name apart from a layer of that name.
                return None if name is None else (name, "pattern")
        return by_layer(variable)

    return by_pattern


def _by_layer() -> Callable[[Any], tuple[str, int]]:
    current: dict[str, tuple[int, set[str]]] = {}

    def key(variable: Any) -> tuple[str, int]:
        path = path_of(variable)
        layer = path.rpartition("/")[0] or path
        count, paths = current.get(layer, (0, set()))
        if path in paths:
            count, paths = count + 1, set()
        paths.add(path)
        current[layer] = count, paths
        return layer, count

    return key


def _checked_name(
    blocks: Callable[[Any], Any], variable: Any
) -> tuple[str, int] | None:
    name = blocks(variable)
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(
            "The callable `blocks` must return the block's name as a string, or None "
            f"to leave the variable out. Received: {name!r} of type "
            f"{type(name).__name__} for the variable '{path_of(variable)}'"
        )
    return name, 0


def _warn_of_idle_patterns(
    variables: Sequence[Any], patterns: Sequence[tuple[str, str | None]]
) -> None:
    paths = [path_of(variable) for variable in variables]
    for pattern, _ in patterns:
        if not any(re.search(pattern, path) for path in paths):
            warnings.warn(
                f"The pattern {pattern!r} in `blocks` matches no variable. The paths "
                f"begin with: {paths[:5]}",
                stacklevel=2,
            )


def _unique_names(keys: Sequence[tuple[str, Any]]) -> list[str]:
    names: list[str] = []
    taken: set[str] = set()
    for name, _ in keys:
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}#{count}"
        taken.add(unique)
        names.append(unique)
    return names
