"""The named optimizers, and `block_normalized` for all others."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_bng import backend, rules
from keras_bng.blocks import BlockSpec
from keras_bng.optimizer import (
    FUSED,
    PACKAGE,
    Base,
    BlockNormalized,
    Fused,
    backend_class,
    live_learning_rate,
    raised_for,
    take_over,
)

SGD: Any = backend_class(keras.optimizers.SGD)
Adam: Any = backend_class(keras.optimizers.Adam)
Adagrad: Any = backend_class(keras.optimizers.Adagrad)
RMSprop: Any = backend_class(keras.optimizers.RMSprop)

NO_RULE = (
    "`AdagradBNG` takes no `rule`: Algorithm 2 is defined for unit norms. "
    "`AdagradNG` takes one. Received: rule={!r}"
)


@keras.saving.register_keras_serializable(PACKAGE)
class SGDNG(BlockNormalized, SGD):
    """SGD with momentum on block-normalized gradients (the paper's SGDMNG).

    Takes the arguments of `keras.optimizers.SGD` in their order, then the keywords
    `blocks`, `rule`, `l2`, `jit_compile` and `norm`: see `keras_bng.BlockNormalized`.
    Here `momentum` defaults to 0.9.

    The learning rate is the length of a step, so that a rate of `SGD` does not carry
    over: see `keras_bng.find_learning_rate`. With `momentum=0.0`, the gradient of an
    `Embedding` stays sparse, and a step costs what its touched rows cost.

    Examples:
        >>> import keras
        >>> w = keras.Variable([3.0, 4.0])
        >>> optimizer = SGDNG(learning_rate=0.1)
        >>> optimizer.apply([keras.ops.array([30.0, 40.0])], [w])
        >>> print(w.numpy().round(3))
        [2.94 3.92]
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, *args, **kwargs)


class _EpsilonBesideRoot(Base):
    """For bases that divide by `sqrt(v) + epsilon`: see `raised_for`."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        with raised_for(variable.dtype, self, "epsilon"):
            super().update_step(gradient, variable, learning_rate)

    def _parallel_update_step(self, grads: Any, variables: Any, rate: Any) -> None:
        """torch: all variables at once, here those of each dtype."""
        alike: dict[str, list[int]] = {}
        for i, variable in enumerate(variables):
            alike.setdefault(variable.dtype, []).append(i)
        for dtype, group in alike.items():
            with raised_for(dtype, self, "epsilon"):
                super()._parallel_update_step(
                    [grads[i] for i in group], [variables[i] for i in group], rate
                )


@keras.saving.register_keras_serializable(PACKAGE)
class AdamNG(BlockNormalized, _EpsilonBesideRoot, Adam):
    """Adam on block-normalized gradients.

    Takes the arguments of `keras.optimizers.Adam` in their order, then the keywords
    `blocks`, `rule`, `l2`, `jit_compile` and `norm`: see `keras_bng.BlockNormalized`.
    Here `epsilon` defaults to the paper's 1e-8. Adam's learning rate is a good start.

    Examples:
        >>> import keras
        >>> w = keras.Variable([1.0, 2.0])
        >>> optimizer = AdamNG(learning_rate=0.1)
        >>> optimizer.apply([keras.ops.array([1e-30, 0.0])], [w])  # Adam would not move
        >>> print(w.numpy().round(3))
        [0.9 2. ]
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, *args, **kwargs)


@keras.saving.register_keras_serializable(PACKAGE)
class AdagradNG(BlockNormalized, Adagrad):
    """AdaGrad on block-normalized gradients (the paper's AdaGradNG).

    Takes the arguments of `keras.optimizers.Adagrad` in their order, then the keywords
    `blocks`, `rule`, `l2`, `jit_compile` and `norm`: see `keras_bng.BlockNormalized`.
    Here the learning rate defaults to 0.01 and `initial_accumulator_value` to 0:
    Keras's 0.1 would be far above the squares of normalized gradients, which add up to
    1 over a whole block.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        initial_accumulator_value: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, initial_accumulator_value, *args, **kwargs)


@keras.saving.register_keras_serializable(PACKAGE)
class RMSpropNG(BlockNormalized, RMSprop):
    """RMSprop on block-normalized gradients.

    Takes the arguments of `keras.optimizers.RMSprop` in their order, with its
    defaults, then the keywords `blocks`, `rule`, `l2`, `jit_compile` and `norm`: see
    `keras_bng.BlockNormalized`.
    """


@keras.saving.register_keras_serializable(PACKAGE)
class AdagradBNG(BlockNormalized, keras.optimizers.Optimizer):
    """AdaGradBNG, Algorithm 2 of the paper's appendix, for which it proves convergence.

    It accumulates the squares of the *normalized* gradients, but steps along the *raw*
    one: `w -= learning_rate * g / (delta + sqrt(sum of squares of g / ||g||))`. So it
    is not `AdagradNG`, and it stops where the gradient vanishes.

    With `l2`, `l2 * w` is added to `g / ||g||`, and `||g||` times that is added to `g`.
    So the accumulated gradient and the step still have the same direction.

    Args:
        learning_rate: The paper's eta. Defaults to `0.01`.
        delta: A number above 0, added to the root of the accumulator. Defaults to
            `1e-8`.

    All other arguments are those of every Keras optimizer, and `blocks`, `l2`,
    `jit_compile` and `norm` of `keras_bng.BlockNormalized`. There is no `rule`. `norm`
    says which norm `||g||` is.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        delta: float = 1e-8,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        *,
        blocks: BlockSpec = "layer",
        l2: float | None = None,
        jit_compile: bool | str = "auto",
        norm: str = "l2",
        **kwargs: Any,
    ) -> None:
        if "rule" in kwargs:
            raise TypeError(NO_RULE.format(kwargs["rule"]))
        _check_delta(delta)
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
            blocks=blocks,
            l2=l2,
            jit_compile=jit_compile,
            norm=norm,
            **kwargs,
        )
        self._delta = delta

    @property
    def delta(self) -> float:
        """What is added to the root of the accumulator."""
        return self._delta

    @delta.setter
    def delta(self, delta: float) -> None:
        _check_delta(delta)
        self._delta = delta

    @property
    def rule(self) -> Any:
        """Always `Unit()`: Algorithm 2 has no other."""
        return self._rule

    @rule.setter
    def rule(self, rule: Any) -> None:
        raise TypeError(NO_RULE.format(rule))

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._accumulators = self.add_optimizer_variables(variables, "accumulator")
        backend.check_shards(variables, self._accumulators)

    def _rates(self, learning_rate: Any, factor: Any, variables: Any) -> list[Any]:
        """Times the block's norm: the raw gradient is the normalized one times that."""
        known = factor > 0
        norm = ops.where(known, 1.0 / ops.where(known, factor, 1.0), 0.0)
        rates = self._of_each(ops.cast(learning_rate, norm.dtype) * norm, variables)
        return [learning_rate if rate is None else rate for rate in rates]

    def _base_update(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        rates = learning_rate
        if not isinstance(rates, list):
            rates = [learning_rate] * len(variables)
        backend.each(self.update_step, gradients, variables, rates)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update step; the rate is the learning rate times the norm of the block."""
        accumulator = self._accumulators[self._get_variable_index(variable)]
        gradient = ops.cast(gradient, variable.dtype)
        self.assign_add(accumulator, ops.square(gradient))
        with raised_for(variable.dtype, self, "_delta"):
            root = ops.add(ops.sqrt(accumulator), self.delta)
        # The rate may be more than float16 can hold; the step is not.
        of_variable = keras.backend.standardize_dtype(variable.dtype)
        dtype = "float64" if of_variable == "float64" else "float32"
        step = ops.multiply(ops.cast(gradient, dtype), ops.cast(learning_rate, dtype))
        self.assign_sub(variable, ops.divide(ops.cast(step, variable.dtype), root))

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "delta": self.delta}
        del config["rule"]
        return config


def _check_delta(delta: Any) -> None:
    rules.check_number("delta", delta, positive=True)


FUSED[AdagradBNG] = Fused("AdagradBNG", ("delta",), (("_accumulators", None),))
EPSILON_BESIDE_ROOT = (
    keras.optimizers.Adam,
    keras.optimizers.Nadam,
    keras.optimizers.Lamb,
)
_NORMALIZED_CLASSES: dict[Any, Any] = {
    SGD: SGDNG,
    Adam: AdamNG,
    Adagrad: AdagradNG,
    RMSprop: RMSpropNG,
}


@keras.saving.register_keras_serializable(PACKAGE, "block_normalized")
class _Wrapped(BlockNormalized):
    """Base of the classes that `block_normalized` makes. All are saved under one name,
    with the stock optimizer's config inside, so that any process can load them."""

    stock_class: Any

    def get_config(self) -> dict[str, Any]:
        config = self.stock_class.get_config(self)
        config["learning_rate"] = live_learning_rate(self)
        stock = self.stock_class.from_config(config)
        saved = keras.saving.serialize_keras_object(stock)
        if self.stock_class.__module__.startswith("keras."):
            # Not Keras's class for torch, which other backends do not have.
            names = {
                cls: name
                for name, cls in vars(keras.optimizers).items()
                if isinstance(cls, type)
            }
            name = next(names[c] for c in self.stock_class.__mro__ if c in names)
            saved |= {"module": "keras.optimizers", "class_name": name}
            saved["registered_name"] = None
        return {"optimizer": saved, **self._block_config()}

    @classmethod
    def _made_from(cls, config: dict[str, Any], custom_objects: Any) -> Any:
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects
        )
        return block_normalized(optimizer, **config)

    def __reduce__(self) -> Any:
        load, arguments = super().__reduce__()
        return _unpickled, (self.stock_class, load.__name__, *arguments)


def _unpickled(stock_class: Any, load: str, *arguments: Any) -> Any:
    """By Keras, in a process that has imported us and not made the class yet."""
    return getattr(stock_class, load)(*arguments)


def block_normalized(
    optimizer: keras.optimizers.Optimizer,
    *,
    blocks: BlockSpec = "layer",
    rule: rules.RuleSpec = "unit",
    l2: float | None = None,
    jit_compile: bool | str = "auto",
    norm: str = "l2",
) -> keras.optimizers.Optimizer:
    """Makes any Keras optimizer normalize its gradients block by block.

    Args:
        optimizer: An instance of a Keras optimizer. It is not changed. Its settings and
            its schedule are taken over, and its state if it was built.
        blocks: What makes a block. This and the following arguments are those of
            `keras_bng.BlockNormalized`.
        rule: What each block's gradient is multiplied by.
        l2: Adds `l2 * w` to the gradient after normalization.
        jit_compile: How a step that is called eagerly on TensorFlow runs.
        norm: Which norm a block is measured by.

    Returns:
        An optimizer of a subclass of `optimizer`'s class. It is not a wrapper, so that
        callbacks, saving and `optimizer.learning_rate` work as with the original.

    Examples:
        >>> import keras
        >>> optimizer = block_normalized(keras.optimizers.Lion(1e-4, beta_1=0.95))
        >>> type(optimizer).__name__, isinstance(optimizer, keras.optimizers.Lion)
        ('LionNG', True)
        >>> optimizer.beta_1
        0.95
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` must be an instance of a Keras optimizer, for example "
            f"`keras.optimizers.Lion(1e-4)`. Received: {optimizer!r}"
        )
    if isinstance(optimizer, BlockNormalized):
        raise TypeError(
            "`optimizer` normalizes its gradients already: pass `blocks`, `rule` and "
            f"`l2` when you make it. Received: {optimizer!r}"
        )
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise TypeError(
            "`optimizer` only passes gradients on to other optimizers. Make those "
            "block-normalized instead: `LossScaleOptimizer(block_normalized(...))`. "
            f"Received: {optimizer!r}"
        )
    config = optimizer.get_config()
    config["learning_rate"] = live_learning_rate(optimizer)
    config |= {"blocks": blocks, "rule": rule, "l2": l2}
    config |= {"jit_compile": jit_compile, "norm": norm}
    cls = _normalized_class(type(optimizer))
    normalized = super(BlockNormalized, cls).from_config(config)
    take_over(optimizer, normalized)
    return normalized


def _normalized_class(stock: Any) -> Any:
    if stock not in _NORMALIZED_CLASSES:
        beside_root = issubclass(stock, EPSILON_BESIDE_ROOT)
        cls = type(
            f"{stock.__name__}NG",
            (_Wrapped, *[_EpsilonBesideRoot] * beside_root, stock),
            {
                "__doc__": f"`{stock.__name__}` on block-normalized gradients.",
                "__module__": __name__,
                "stock_class": stock,
            },
        )
        keras.saving.register_keras_serializable(PACKAGE, "block_normalized")(cls)
        _NORMALIZED_CLASSES[stock] = cls
    return _NORMALIZED_CLASSES[stock]
