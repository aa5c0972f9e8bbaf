"""What a saved optimizer holds beside Keras's own config: blocks, and rules."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np

from keras_bng.blocks import Block, Blocks, path_of


class SavedBlocks:
    """A plain object, because Keras would track, and wrap, lists in an attribute."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


def restored(saved: SavedBlocks | None, variables: list[Any]) -> Blocks | None:
    """The saved blocks, if these are variables like those that they were made of."""
    if saved is None:
        return None
    if as_saved(saved.config["variables"]) != [name_and_shape(v) for v in variables]:
        return None
    blocks = []
    for name, positions in saved.config["blocks"]:
        members = {id(variables[i]): variables[i] for i in positions}  # tied ones once
        blocks.append(Block(name, tuple(members.values())))
    positions = [positions for _, positions in saved.config["blocks"]]
    return Blocks(blocks, positions, len(variables))


def name_and_shape(variable: Any) -> list[Any]:
    """What a variable keeps when its model is loaded. Keras may number names anew."""
    name = path_of(variable).rpartition("/")[2]
    return [re.sub(r"(_\d+)?$", "", name), [int(n) for n in variable.shape]]


def as_saved(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, (list, tuple)):
        return [as_saved(v) for v in value]
    return value


def fits(saved: Any, variable: Any) -> bool:
    counts = "int" in keras.backend.standardize_dtype(variable.dtype)
    return tuple(saved.shape) == tuple(variable.shape) and counts == (
        np.dtype(saved.dtype).kind in "iu"
    )


def serialized(argument: str, value: Any) -> Any:
    """A callable or rule as a config, or an error that says how to make it one."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return as_saved(value)
    help_text = (
        f"The `{argument}` {value!r} cannot be saved. Define it at the top level of a "
        "module and register it: put `@keras.saving.register_keras_serializable()` "
        "above the function, or above the class, which then needs `get_config`."
    )
    if getattr(value, "__name__", "") == "<lambda>":
        raise ValueError(help_text)
    try:
        config = keras.saving.serialize_keras_object(value)
        keras.saving.deserialize_keras_object(config)
    except Exception as error:
        raise ValueError(help_text) from error
    return config
