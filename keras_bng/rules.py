"""How far a block may move: one factor a block, from the norms it gets."""

from __future__ import annotations

import abc
import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
from keras import ops

RuleSpec: TypeAlias = "str | Rule | Callable[[Any, Any], Any] | None"


class Rule(abc.ABC):
    """Base of the rules. A rule says what each block's gradient is multiplied by.

    It is called as `rule(gradient_norm, weight_norm)`. Both are vectors with one entry
    for each block, and so is what it returns. `gradient_norm` is always positive and
    finite: where a gradient is zero or not finite, the rule sees 1, and what it returns
    is not used.
    """

    uses_weights = True
    """Whether the rule needs `weight_norm`. If False, it gets None instead."""

    uses_ones = False
    """Whether the rule takes a third argument, `ones_norm`: for each block, the norm of
    a gradient of ones. With `norm="l2"` this is the root of the number of weights."""

    @abc.abstractmethod
    def __call__(self, gradient_norm: Any, weight_norm: Any, *ones_norm: Any) -> Any:
        """Returns the number that multiplies each block's gradient."""

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rule:
        return cls(**config)


@keras.saving.register_keras_serializable("keras_bng")
@dataclasses.dataclass(frozen=True)
class Unit(Rule):
    """Every block's gradient gets norm 1, whatever its size was (the paper's NG)."""

    uses_weights = False

    def __call__(self, gradient_norm: Any, weight_norm: Any) -> Any:
        return 1.0 / gradient_norm


@keras.saving.register_keras_serializable("keras_bng")
@dataclasses.dataclass(frozen=True)
class Rms(Rule):
    """Every block's gradient gets root mean square 1.

    So with SGD the learning rate is the step of a typical weight, whatever the size of
    its block. (Under `Unit` it is the length of the whole block's step.) With
    `norm="l1"` the mean absolute value becomes 1, with `norm="max"` the largest one.
    """

    uses_weights = False
    uses_ones = True

    def __call__(self, gradient_norm: Any, weight_norm: Any, ones_norm: Any) -> Any:
        return ones_norm / gradient_norm


@keras.saving.register_keras_serializable("keras_bng")
@dataclasses.dataclass(frozen=True)
class Adaptive(Rule):
    """Every block's gradient gets norm `ratio` times that of its weights (NG_adap).

    Weights that are all zero count as norm 1, so that they can move.
    """

    ratio: float = 0.02

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, positive=True)

    def __call__(self, gradient_norm: Any, weight_norm: Any) -> Any:
        length = ops.where(weight_norm > 0, weight_norm, ops.ones_like(weight_norm))
        return self.ratio * length / gradient_norm

    def get_config(self) -> dict[str, Any]:
        return {"ratio": self.ratio}


@keras.saving.register_keras_serializable("keras_bng")
@dataclasses.dataclass(frozen=True)
class Clip(Rule):
    """A block's gradient with a norm above `threshold` gets that norm (CLIP).

    Smaller gradients stay as they are.
    """

    threshold: float = 0.1
    uses_weights = False

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, positive=True)

    def __call__(self, gradient_norm: Any, weight_norm: Any) -> Any:
        return ops.minimum(1.0, self.threshold / gradient_norm)

    def get_config(self) -> dict[str, Any]:
        return {"threshold": self.threshold}


NAMED_RULES = {"unit": Unit, "rms": Rms, "adaptive": Adaptive, "clip": Clip}
ALLOWED = (
    "Allowed: 'unit', 'rms', 'adaptive', 'clip', a rule object such as "
    "`Adaptive(ratio=0.02)`, a callable `(gradient_norm, weight_norm) -> factor`, "
    "or None."
)


def get(rule: RuleSpec) -> Rule | Callable[[Any, Any], Any] | None:
    """Turns the `rule` argument into a rule object, a callable or None."""
    if isinstance(rule, str):
        if rule not in NAMED_RULES:
            raise ValueError(f"Unknown `rule`. {ALLOWED} Received: rule={rule!r}")
        return NAMED_RULES[rule]()
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise TypeError(
            f"`rule` must be an instance: write `{rule.__name__}()`. Received: {rule!r}"
        )
    if rule is None or callable(rule):
        return rule
    raise TypeError(f"`rule` has the wrong type. {ALLOWED} Received: rule={rule!r}")


def uses_weights(rule: Any) -> bool:
    """Whether a rule, which may be any callable, reads `weight_norm`."""
    return getattr(rule, "uses_weights", True)


def uses_ones(rule: Any) -> bool:
    """Whether a rule, which may be any callable, takes `ones_norm`, too."""
    return getattr(rule, "uses_ones", False)


def is_constant(rule: Any) -> bool:
    """Whether a trace may hold this rule: ours cannot change, others may."""
    return rule is None or type(rule) in NAMED_RULES.values()


def check_number(name: str, value: Any, positive: bool = False) -> None:
    """Raises unless `value` is a finite number, not negative (or above zero)."""
    allowed = "above 0" if positive else "of 0 or more"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number {allowed}. Received: {name}={value!r}"
        )
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(
            f"`{name}` must be a finite number {allowed}. Received: {name}={value!r}"
        )
