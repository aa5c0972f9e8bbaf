"""`BlockNormalized`, the mixin: the one place that touches Keras's insides.

Private hooks of Keras that it relies on; `tests/test_keras_hooks.py` watches them:

- `_all_reduce_sum_gradients` (TensorFlow): the gradients it returns are the first that
  are summed over replicas, and nothing but the update comes after it.
- `_backend_update_step` (JAX, torch): the last call that sees all gradients at once.
- `_backend_reset_gradient_accumulators`, `_accumulated_gradients` (torch): see there.
- `_get_variable_index`: from what a step is given back to the list given to `build`.
- `_check_variables_are_known`: Keras's own error, before a step is compiled.
- `_learning_rate`: whether the rate is a plain Python callable.
- `_trainable_variables`: to take over the state of an optimizer that was built.
- `_exclude_from_weight_decay*`: settings that `get_config` leaves out.
- `_iterations`: steps, where the public `iterations` counts accumulated updates.

`Watch` replaces the first two, and `apply`, on an instance, of whichever optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import numbers
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_bng import rules
from keras_bng.blocks import Block, BlockSpec, check_spec, partition
from keras_bng.normalize import (
    block_factors,
    check_factor,
    is_sparse,
    one_by_one,
    times,
)

PACKAGE = "keras_bng"
ACCUMULATION_ON_REPLICAS = (
    "Keras cannot accumulate gradients in a compiled step on more than one replica "
    "(its own optimizers raise here too). Use a larger batch, call `strategy.run` "
    "eagerly, or leave out `gradient_accumulation_steps`."
)


class _Built:
    """What `build` found. A plain object, because Keras takes the variables in any
    list, tuple or dict that an optimizer holds for the optimizer's own state."""

    def __init__(self, blocks: tuple[Block, ...], index_of: Any) -> None:
        self.blocks = blocks
        self.block_of = {
            index_of(v): i for i, block in enumerate(blocks) for v in block.variables
        }
        self.compiled_steps: dict[Any, Any] = {}


class BlockNormalized:
    """Mixin that normalizes gradients block by block before a Keras optimizer's update.

    Put it in front of a Keras optimizer: `class LionNG(BlockNormalized, Lion)`.

    Args:
        blocks: What makes a block: `"layer"` (default), `"variable"`, `"model"`, a
            callable `variable -> str | None`, or a list of `(regex, name | None)`
            searched in `variable.path`. See `keras_bng.partition`.
        rule: The factor of a block: `"unit"` (default), `"adaptive"`, `"clip"`, a rule
            object, a callable `(gradient_norm, weight_norm) -> factor` on vectors
            with one entry a block, or None for the base optimizer as it is.
        l2: Adds `l2 * w` to the gradient after normalization, as weight decay does in
            Torch. Keras's own `weight_decay` is decoupled from the gradient.
        jit_compile: How a step called eagerly on TensorFlow runs: `"auto"` as one
            compiled function, with XLA if there is a GPU; `True` always with XLA;
            `False` op by op.
    """

    def __init__(
        self,
        *args: Any,
        blocks: BlockSpec = "layer",
        rule: rules.RuleSpec = "unit",
        l2: float | None = None,
        jit_compile: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        blocks = check_spec(blocks)
        rule = rules.get(rule)
        if l2 is not None:
            rules.check_number("l2", l2)
        if not (isinstance(jit_compile, bool) or jit_compile == "auto"):
            raise ValueError(
                "`jit_compile` must be True, False or 'auto'. "
                f"Received: jit_compile={jit_compile!r}"
            )
        super().__init__(*args, **kwargs)
        self._block_spec = blocks
        self.rule = rule
        self.l2 = l2
        self.jit_compile = jit_compile
        self._built_blocks = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature(cls)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, after `build`; before it, an empty tuple."""
        return self._built_blocks.blocks if self._built_blocks else ()

    @property
    def skipped_blocks(self) -> Any:
        """How many block updates were dropped because the gradient was not finite."""
        if self._built_blocks is None:
            raise AttributeError(
                "`skipped_blocks` exists after `build`. Train a step, or call "
                "`optimizer.build(model.trainable_variables)`."
            )
        return self._skipped_blocks

    def build(self, variables: list[Any]) -> None:
        """Creates the base optimizer's state, the blocks and the counter."""
        if self.built:
            return
        blocks = partition(variables, self._block_spec)
        if self.rule is not None and blocks:
            ones = ops.ones((len(blocks),))
            check_factor(self.rule(ones, ones), len(blocks))
        super().build(variables)
        self._built_blocks = _Built(blocks, self._get_variable_index)
        self._skipped_blocks = self.add_variable(
            shape=(),
            dtype="int",
            aggregation="only_first_replica",
            name="skipped_blocks",
        )

    def _backend_reset_gradient_accumulators(self) -> None:
        """torch multiplies them by 0, so that a NaN micro-step would stay for ever."""
        if keras.backend.backend() != "torch":
            return super()._backend_reset_gradient_accumulators()
        for accumulator in self._accumulated_gradients:
            if accumulator is not None:
                accumulator.assign(ops.zeros_like(accumulator))

    # Where the gradients are normalized.

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """TensorFlow: after the sum over replicas, before the base update."""
        grads_and_vars = list(super()._all_reduce_sum_gradients(grads_and_vars))
        gradients, variables = zip(*grads_and_vars)
        return list(zip(self._normalized(gradients, variables), variables))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        """JAX and torch: the gradients are already those of the whole batch."""
        if keras.backend.backend() != "tensorflow":
            grads = self._normalized(grads, trainable_variables)
        super()._backend_update_step(grads, trainable_variables, learning_rate)

    def _normalized(self, gradients: Any, variables: Any) -> list[Any]:
        if self.rule is None:
            return [self._with_l2(g, w) for g, w in zip(gradients, variables)]
        block_of = self._built_blocks.block_of
        owners = [block_of.get(self._get_variable_index(v)) for v in variables]
        members = [[] for _ in self.blocks]
        for i, block in enumerate(owners):
            if block is not None:
                members[block].append(i)
        if not any(members):
            return [self._to_base(g, w) for g, w in zip(gradients, variables)]

        found = block_factors(gradients, variables, members, self.rule)
        dropped = ops.sum(ops.cast(ops.logical_not(found.kept), "int32"))
        self._skipped_blocks.assign_add(ops.cast(dropped, self._skipped_blocks.dtype))
        return self._scaled(found, owners, variables)

    def _scaled(self, found: Any, owners: Any, variables: Any) -> list[Any]:
        """The gradients times their block's factor, for the base optimizer."""
        factors = one_by_one(found.factor)
        kept = ops.unstack(found.kept, len(factors))
        return [
            self._to_base(g, w)
            if block is None
            else self._to_base(g, w, factors[block], kept[block])
            for g, w, block in zip(found.raw, variables, owners)
        ]

    def _to_base(
        self, gradient: Any, weight: Any, factor: Any = None, kept: Any = None
    ) -> Any:
        """What the base optimizer's `update_step` gets as the gradient."""
        if factor is not None:
            gradient = times(gradient, factor)
        return self._with_l2(gradient, weight, kept)

    def _with_l2(self, gradient: Any, weight: Any, kept: Any = None) -> Any:
        if not self.l2 or gradient is None:
            return gradient
        decay = ops.cast(self.l2, weight.dtype) * ops.convert_to_tensor(weight)
        if kept is not None:
            decay = decay * ops.cast(kept, decay.dtype)
        return ops.add(gradient, ops.cast(decay, gradient.dtype))

    # A step called eagerly on TensorFlow, compiled.

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates the variables; called eagerly on TensorFlow, as one compiled step."""
        if len(grads) == 0 or not self._compiles_eager_steps():
            try:
                return _unconverted(super().apply)(grads, trainable_variables)
            except RuntimeError as error:
                if self.gradient_accumulation_steps and "merge_call" in str(error):
                    raise RuntimeError(ACCUMULATION_ON_REPLICAS) from error
                raise
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name, caller=self):
                    self.build(trainable_variables)
        elif not self.built:
            return super().apply(grads)  # for its error message
        grads = [
            g if g is None or is_sparse(g) else ops.convert_to_tensor(g) for g in grads
        ]
        self._compiled_step(trainable_variables)(grads)

    def _compiles_eager_steps(self) -> bool:
        if keras.backend.backend() != "tensorflow" or self.jit_compile is False:
            return False
        if self.rule is None and not self.l2:
            return False  # bit for bit the stock optimizer
        import tensorflow as tf

        rate = self._learning_rate
        is_frozen_by_tracing = callable(rate) and not isinstance(
            rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule)
        )
        return (
            tf.executing_eagerly()
            and not tf.distribute.has_strategy()  # merge_call cannot be in a function
            and not is_frozen_by_tracing
        )

    def _compiled_step(self, variables: list[Any] | None) -> Any:
        """The compiled step for these variables and the settings of this moment."""
        settings = tuple(
            (name, value)
            for name, value in vars(self).items()
            if value is None or isinstance(value, (str, numbers.Number))
        )
        objects = (self.rule, self._learning_rate, *(variables or ()))
        key = settings, tuple(map(id, objects))
        steps = self._built_blocks.compiled_steps
        if key not in steps:
            import tensorflow as tf

            # Here, because its message about an unknown one needs eager values.
            self._check_variables_are_known(variables or ())

            use_xla = self.jit_compile is True or bool(
                tf.config.list_logical_devices("GPU")
            )
            apply = super().apply
            step = tf.function(
                lambda grads: apply(grads, variables),
                jit_compile=use_xla or None,
                reduce_retracing=True,
                autograph=False,
            )
            steps[key] = step, objects  # the ids stay taken while objects are held
        return steps[key][0]

    # Saving.

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._block_config()}

    def _block_config(self) -> dict[str, Any]:
        return {
            "blocks": _serialized("blocks", self._block_spec),
            "rule": _serialized("rule", self.rule),
            "l2": self.l2,
            "jit_compile": self.jit_compile,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        for name in ("blocks", "rule"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(
                    config[name], custom_objects=custom_objects
                )
        return super().from_config(config, custom_objects)

    def load_own_variables(self, store: Any) -> None:
        """Loads saved state; that of the stock optimizer too, which has no counter."""
        if self.built and len(store.keys()) == len(self.variables) - 1:
            stock = [v for v in self.variables if v is not self._skipped_blocks]
            for i, variable in enumerate(stock):
                variable.assign(store[str(i)])
        else:
            super().load_own_variables(store)


def backend_class(stock: type) -> type:
    """The class that Keras makes for `stock`: on torch, for some, a faster one."""
    return type(stock())


def _unconverted(function: Any) -> Any:
    """Spares a `tf.function` around us the translation of our Python by AutoGraph."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def take_over(source: Any, target: Any) -> None:
    """Gives `target` what `source` holds beside its config: exclusions and state."""
    for name, value in vars(source).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(target, name, value)
    if source.built:
        target.build(source._trainable_variables)
        for old, new in zip(source.variables, target.variables):
            new.assign(old)


def live_learning_rate(optimizer: Any) -> Any:
    """The learning rate as its owner passed it: a schedule, a callable, or a float."""
    rate = optimizer._learning_rate
    return (
        float(ops.convert_to_numpy(rate)) if isinstance(rate, keras.Variable) else rate
    )


def _serialized(argument: str, value: Any) -> Any:
    """A callable or rule as a config, or an error that says how to make it one."""
    if value is None or isinstance(value, (str, tuple)):
        return value
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


def _signature(cls: type) -> inspect.Signature:
    """The stock optimizer's arguments in its order, with our defaults, then our own."""
    own = inspect.signature(cls.__init__).parameters
    if not any(p.kind == p.VAR_POSITIONAL for p in own.values()):
        return inspect.Signature(list(own.values())[1:])
    stock = next(c for c in cls.__mro__ if not issubclass(c, BlockNormalized))
    ours = inspect.signature(BlockNormalized.__init__).parameters
    parameters = {}
    for source in (inspect.signature(stock.__init__).parameters, own, ours):
        for name, parameter in source.items():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                parameters[name] = parameter
    del parameters["self"]
    return inspect.Signature(sorted(parameters.values(), key=lambda p: p.kind))


def variables_of(optimizer: Any) -> list[Any]:
    """The trainable variables of an optimizer that is built."""
    return list(optimizer._trainable_variables)


def steps_of(optimizer: Any) -> Any:
    """The variable that counts steps; with accumulation, several make an update."""
    return optimizer._iterations


_WATCHES = itertools.count(1)


class Watch:
    """While it is entered, every update of an optimizer that is built is looked at.

    `see(factors)` is called within the update: `factors()` is what `block_factors`
    finds of `blocks`; an optimizer that normalizes has found it anyway. On every
    backend the gradients are those which the update gets, accumulated and summed over
    replicas. `around()` is a context in which all of `apply` runs.
    """

    def __init__(
        self,
        optimizer: Any,
        blocks: tuple[Block, ...],
        see: Callable[[Callable[[], Any]], None],
        around: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.optimizer, self.blocks = optimizer, blocks
        self.see, self.around = see, around
        # A number among an optimizer's settings: its compiled steps are told apart.
        self.hooks: dict[str, Any] = {"_watch": next(_WATCHES), "apply": self._apply}
        self.hidden: list[dict[str, Any]] = []
        if isinstance(optimizer, BlockNormalized) and optimizer.rule is not None:
            self.hooks["_scaled"] = self._scaled
            return
        index_of = optimizer._get_variable_index
        self.block_of = {
            index_of(v): i for i, b in enumerate(blocks) for v in b.variables
        }
        if keras.backend.backend() == "tensorflow":
            self.hooks["_all_reduce_sum_gradients"] = self._all_reduce_sum_gradients
        else:
            self.hooks["_backend_update_step"] = self._backend_update_step

    def __enter__(self) -> None:
        own = vars(self.optimizer)  # `setattr` would look for variables to track
        self.hidden.append({name: own[name] for name in self.hooks if name in own})
        for name, hook in self.hooks.items():
            if callable(hook):
                hook = functools.partial(hook, getattr(self.optimizer, name))
            own[name] = hook

    def __exit__(self, *_: Any) -> None:
        own = vars(self.optimizer)
        for name in self.hooks:
            del own[name]
        own.update(self.hidden.pop())  # of another one, entered before

    def _apply(self, original: Any, *args: Any, **kwargs: Any) -> None:
        with self.around():
            original(*args, **kwargs)

    def _scaled(self, original: Any, found: Any, owners: Any, variables: Any) -> Any:
        self.see(lambda: found)
        return original(found, owners, variables)

    def _all_reduce_sum_gradients(self, original: Any, grads_and_vars: Any) -> Any:
        grads_and_vars = list(original(grads_and_vars))
        self._look(*zip(*grads_and_vars))
        return grads_and_vars

    def _backend_update_step(
        self, original: Any, grads: Any, trainable_variables: Any, rate: Any
    ) -> None:
        self._look(grads, trainable_variables)
        original(grads, trainable_variables, rate)

    def _look(self, gradients: Any, variables: Any) -> None:
        members: list[list[int]] = [[] for _ in self.blocks]
        for i, variable in enumerate(variables):
            block = self.block_of.get(self.optimizer._get_variable_index(variable))
            if block is not None:
                members[block].append(i)
        self.see(lambda: block_factors(gradients, variables, members, _as_it_is))


def _as_it_is(gradient_norm: Any, weight_norm: Any) -> Any:
    """A rule that changes nothing."""
    return ops.ones_like(gradient_norm)


_as_it_is.uses_weights = False
