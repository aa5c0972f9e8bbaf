"""Which variables belong together: `partition` splits a list of them into blocks."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from keras_bng import backend

BlockSpec: TypeAlias = (
    str | Callable[[Any], str | None] | Sequence[tuple[str, str | None]]
)
# A block's name, and what tells it apart from others of that name.
Key: TypeAlias = tuple[str, int | str]

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
    """A tuple of `Block`s that remembers where in the list their variables stood.

    `positions` has every place of a variable that was listed more than once; `total`
    is how long that list was.
    """

    positions: tuple[tuple[int, ...], ...]
    total: int

    def __new__(
        cls,
        blocks: Sequence[Block],
        positions: Sequence[Sequence[int]],
        total: int,
    ) -> Blocks:
        self = super().__new__(cls, blocks)
        self.positions = tuple(tuple(p) for p in positions)
        self.total = total
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`."""
        return tuple(self), self.positions, self.total


def path_of(variable: Any) -> str:
    """The variable's path; for a `tf.Variable`, which has none, its name."""
    path = getattr(variable, "path", None)
    return path if path is not None else variable.name.split(":")[0]


def paths_of(variables: Sequence[Any]) -> list[str]:
    """The path of each variable, by which `partition` finds its layer."""
    return backend.paths_of(variables, [path_of(variable) for variable in variables])


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
            - `"layer"`: everything that the innermost layer owns. `variable.path`
              decides which layer that is. Two layers may have the same path: where
              a path repeats, a new block starts. In a `TorchModuleWrapper` the
              layers are torch's modules, with their names.
            - `"variable"`: every variable is a block.
            - `"model"`: all variables are one block.
            - a callable `variable -> str | None`: variables that get the same name
              are one block.
            - a list of `(regex, name | None)`: the first pattern that is found in
              `variable.path` names the block. Where none is found, the variable's
              layer is its block.

            A variable whose name is None is in no block: it is still trained, on its
            raw gradient.

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
    key_of: dict[int, Key | None] = {}
    members: dict[Key, list[Any]] = {}
    positions: dict[Key, list[int]] = {}
    for position, variable in enumerate(variables):
        # Keras overwrites float8 scales with their gradient: they take no step.
        if getattr(variable, "overwrite_with_gradient", False):
            continue
        is_new = id(variable) not in key_of  # and not a tied one, listed twice
        if is_new:
            key_of[id(variable)] = name_of(variable)
        key = key_of[id(variable)]
        if key is None:
            continue
        positions.setdefault(key, []).append(position)
        if is_new:
            members.setdefault(key, []).append(variable)
    return Blocks(
        [
            Block(name, tuple(group))
            for name, group in zip(_unique_names(members), members.values())
        ],
        list(positions.values()),
        len(variables),
    )


def _naming(variables: Sequence[Any], blocks: BlockSpec) -> Callable[[Any], Key | None]:
    """Returns the function `variable -> key`; equal keys are one block, None none."""
    if blocks == "model":
        return lambda variable: ("model", 0)
    if callable(blocks):
        return functools.partial(_checked_name, blocks)
    paths = paths_of(variables)
    path_by_id = dict(zip(map(id, variables), paths))
    by_path: Callable[[str], Key | None]
    if isinstance(blocks, str):
        by_path = _by_variable() if blocks == "variable" else _by_layer()
    else:
        _warn_of_idle_patterns(paths, blocks)
        by_path = _by_pattern(blocks)
    return lambda variable: by_path(path_by_id[id(variable)])


def _by_variable() -> Callable[[str], Key]:
    seen: dict[str, int] = {}

    def key(path: str) -> Key:
        seen[path] = seen.get(path, -1) + 1
        return path, seen[path]

    return key


def _by_layer() -> Callable[[str], Key]:
    current: dict[str, tuple[int, set[str]]] = {}

    def key(path: str) -> Key:
        layer = path.rpartition("/")[0] or path
        count, paths = current.get(layer, (0, set()))
        if path in paths:
            count, paths = count + 1, set()
        paths.add(path)
        current[layer] = count, paths
        return layer, count

    return key


def _by_pattern(
    patterns: Sequence[tuple[str, str | None]],
) -> Callable[[str], Key | None]:
    by_layer = _by_layer()

    def key(path: str) -> Key | None:
        for pattern, name in patterns:
            if re.search(pattern, path):
                # "pattern" keeps a chosen name apart from a layer of that name.
                return None if name is None else (name, "pattern")
        return by_layer(path)

    return key


def _checked_name(blocks: Callable[[Any], Any], variable: Any) -> Key | None:
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
    paths: Sequence[str], patterns: Sequence[tuple[str, str | None]]
) -> None:
    for pattern, _ in patterns:
        if not any(re.search(pattern, path) for path in paths):
            warnings.warn(
                f"The pattern {pattern!r} in `blocks` matches no variable. The paths "
                f"begin with: {paths[:5]}",
                stacklevel=2,
            )


def _unique_names(keys: Iterable[Key]) -> list[str]:
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
