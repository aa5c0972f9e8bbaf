"""`BlockNormalized`, the mixin: the one place that touches Keras's insides.

Private hooks of Keras that it relies on; `tests/test_keras_hooks.py` watches them:

- `_backend_update_step`: the last call that sees all gradients at once.
- `_all_reduce_sum_gradients` (TensorFlow): sums them over replicas, within that call.
- `_backend_apply_gradients` (TensorFlow): the part of an eager step that is compiled;
  what is Python in it (schedules, constraints) comes before and after.
- `_backend_reset_gradient_accumulators`, `_accumulated_gradients` (torch): see there.
- `_get_variable_index`: from what a step is given back to the list given to `build`.
- `_learning_rate`: a variable, or what Keras calls for the rate of this step.
- `_trainable_variables`: to take over the state of an optimizer that was built.
- `_exclude_from_weight_decay*`: settings that `get_config` leaves out.
- `_optimizer_map`: which of its optimizers a `MultiOptimizer` will give a variable.
- what `SET_BY_FIT` names, of a model: `find_learning_rate` puts it back.
- `_momentums` and so on, in `FUSED`: the state of the bases with a fused update.

`Watch` replaces one of the first two, and `apply`, on an instance of any Keras
optimizer; on one of ours it replaces `_found` instead.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import numbers
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_bng import backend, rules
from keras_bng.backend.common import is_sparse
from keras_bng.blocks import Block, Blocks, BlockSpec, check_spec, partition
from keras_bng.normalize import Factors, block_factors, check_factor, check_norm
from keras_bng.saving import (
    SavedBlocks,
    as_saved,
    fits,
    name_and_shape,
    restored,
    serialized,
)

# A mixin is always in front of a Keras optimizer.
Base: Any = object

PACKAGE = "keras_bng"
ONLY_NOW_AND_THEN = (
    "Keras cannot {} in a compiled step on more than one replica, or where parameter "
    "servers or a central device have the weights (its own optimizers raise here too). "
    "Call `strategy.run` eagerly, or leave out `{}`."
)
EAGER_STEPS = 8  # that an optimizer remembers: sets of variables and settings
SET_BY_FIT = ("_eval_epoch_iterator", "_jax_state", "_jax_state_synced")
# In these dtypes the square of a smaller number is 0, and with it a second moment.
SMALLEST_ROOTS = {"float16": 2.0**-12}


class Fused(NamedTuple):
    """A base whose formula `backend.update` knows, by its name."""

    name: str
    settings: tuple[str, ...]
    states: tuple[tuple[str, str | None], ...]  # and the setting that it needs


FUSED: dict[Any, Fused] = {
    keras.optimizers.SGD: Fused(
        "SGD", ("momentum", "nesterov"), (("momentums", "momentum"),)
    ),
    keras.optimizers.Adam: Fused(
        "Adam",
        ("beta_1", "beta_2", "epsilon", "amsgrad"),
        (("_momentums", None), ("_velocities", None), ("_velocity_hats", "amsgrad")),
    ),
    keras.optimizers.Adagrad: Fused(
        "Adagrad", ("epsilon",), (("_accumulators", None),)
    ),
    keras.optimizers.RMSprop: Fused(
        "RMSprop",
        ("rho", "momentum", "epsilon", "centered"),
        (
            ("_velocities", None),
            ("_momentums", "momentum"),
            ("_average_gradients", "centered"),
        ),
    ),
}


class _Built:
    """What `build` found. A plain object, because Keras takes the variables in any
    list, tuple or dict that an optimizer holds for the optimizer's own state."""

    def __init__(
        self, blocks: Blocks, variables: list[Any], index_of: Any, base: Fused | None
    ) -> None:
        self.blocks = blocks
        self.base = base
        self.variables = [name_and_shape(v) for v in variables]
        self.block_of = {
            index_of(v): i for i, block in enumerate(blocks) for v in block.variables
        }
        self.eager_steps: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.places: dict[Any, Any] = {}
        self.places_of(variables, index_of)

    def places_of(self, variables: list[Any], index_of: Any) -> _Places:
        """Of the variables of a step, which mostly are those of the last one."""
        key = tuple(map(id, variables))
        if key not in self.places:
            index = list(map(index_of, variables))
            owners = [self.block_of.get(i) for i in index]
            members: list[list[int]] = [[] for _ in self.blocks]
            for position, block in enumerate(owners):
                if block is not None:
                    members[block].append(position)
            if len(self.places) == EAGER_STEPS:
                self.places.clear()
            # With the variables, so that nobody else can have their ids.
            self.places[key] = variables, _Places(index, owners, members)
        return self.places[key][1]


class _Places(NamedTuple):
    """Where a step's variables stand."""

    indices: list[int]  # in the list given to `build`
    owners: list[int | None]  # the block of each
    members: list[list[int]]  # of each block, positions in this step


class BlockNormalized(Base):
    """Mixin that normalizes gradients block by block before a Keras optimizer's update.

    Put it in front of a Keras optimizer: `class LionNG(BlockNormalized, Lion)`.

    `rule`, `l2`, `jit_compile` and `norm` are attributes that can be set later. A step
    called eagerly follows at once. `fit` has a traced function, which does not follow:
    call `model.make_train_function(force=True)`, or compile the model again. (The same
    holds for all settings of Keras's optimizers, except for the learning rate.)

    Args:
        blocks: What makes a block: `"layer"` (default), `"variable"`, `"model"`, a
            callable `variable -> str | None`, or a list of `(regex, name | None)`
            searched in `variable.path`. See `keras_bng.partition`.
        rule: What a block's gradient is multiplied by: `"unit"` (default), `"rms"`,
            `"adaptive"`, `"clip"`, a rule object, or a callable
            `(gradient_norm, weight_norm) -> factor` on vectors with one entry for each
            block. None leaves the base optimizer as it is.
        l2: Adds `l2 * w` to the gradient after normalization, as weight decay does in
            Torch. Keras's own `weight_decay` does not touch the gradient.
        jit_compile: How a step that is called eagerly on TensorFlow runs. `"auto"`: as
            one compiled function, with XLA if there is a GPU. `True`: with XLA.
            `False`: one operation after the other. So run, whatever this is, steps
            whose Python code may change: with an `update_step` of your own, or with
            settings that are new.
        norm: Which norm a block's gradient is measured by, and for `"adaptive"` its
            weights: `"l2"` (default, Euclidean), `"l1"` (the sum of absolute values) or
            `"max"` (the largest of them).
    """

    def __init__(
        self,
        *args: Any,
        blocks: BlockSpec = "layer",
        rule: rules.RuleSpec = "unit",
        l2: float | None = None,
        jit_compile: bool | str = "auto",
        norm: str = "l2",
        **kwargs: Any,
    ) -> None:
        blocks = check_spec(blocks)
        rule = rules.get(rule)
        norm = check_norm(norm)
        _check_l2(l2)
        _check_jit_compile(jit_compile)
        super().__init__(*args, **kwargs)
        self._block_spec = blocks
        self._rule = rule
        self._l2 = l2
        self._jit_compile = jit_compile
        self._norm = norm
        self._built_blocks: _Built | None = None
        self._saved_blocks: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature(cls)
        cls._updates_like_keras = _updates_like_keras(cls)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, after `build`; before it, an empty tuple."""
        return self._built_blocks.blocks if self._built_blocks else ()

    @property
    def rule(self) -> Any:
        """What each block's gradient is multiplied by; None for nothing."""
        return self._rule

    @rule.setter
    def rule(self, rule: rules.RuleSpec) -> None:
        rule = rules.get(rule)
        _check_factors_of(rule, self.blocks)
        self._rule = rule

    @property
    def l2(self) -> float | None:
        """`l2 * w` is added to a gradient after normalization."""
        return self._l2

    @l2.setter
    def l2(self, l2: float | None) -> None:
        _check_l2(l2)
        self._l2 = l2

    @property
    def jit_compile(self) -> bool | str:
        """How a step called eagerly on TensorFlow runs."""
        return self._jit_compile

    @jit_compile.setter
    def jit_compile(self, jit_compile: bool | str) -> None:
        _check_jit_compile(jit_compile)
        self._jit_compile = jit_compile

    @property
    def norm(self) -> str:
        """Which norm a block is measured by."""
        return self._norm

    @norm.setter
    def norm(self, norm: str) -> None:
        self._norm = check_norm(norm)

    @property
    def skipped_blocks(self) -> Any:
        """How many updates of a block were dropped for a NaN or Inf in the gradient."""
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
        blocks = restored(self._saved_blocks, variables)
        if blocks is None:
            blocks = partition(variables, self._block_spec)
        _check_factors_of(self.rule, blocks)
        super().build(variables)
        backend.check_shards(variables, self.variables)
        base = fused_base(type(self))
        self._built_blocks = _Built(blocks, variables, self._get_variable_index, base)
        self._skipped_blocks = self.add_variable(
            shape=(),
            dtype="int",
            aggregation="only_first_replica",
            name="skipped_blocks",
        )

    def _backend_reset_gradient_accumulators(self) -> None:
        """torch multiplies them by 0, so that a NaN micro-step would stay for ever."""
        if not backend.reset(self._accumulated_gradients):
            super()._backend_reset_gradient_accumulators()

    # Where the gradients are normalized.

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        """TensorFlow. They were summed already, in our `_backend_update_step`."""
        return grads_and_vars

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        """After the sum over replicas, before the base update."""
        variables = list(trainable_variables)

        def summed(pairs: Any) -> Any:
            return super(BlockNormalized, self)._all_reduce_sum_gradients(pairs)

        grads = backend.summed_over_replicas(summed, grads, variables)
        found = self._found(grads, variables)
        if found is None and not self.l2:
            return super()._backend_update_step(grads, variables, learning_rate)
        factors: list[Any] = [None] * len(variables)
        if found is not None:
            grads, factors = found.raw, self._of_each(found.factor, variables)
            learning_rate = self._rates(learning_rate, found.factor, variables)
        if self.l2:
            kept: list[Any] = [None] * len(variables)
            if found is not None:
                share = ops.cast(found.kept, found.factor.dtype)
                kept = self._of_each(share, variables)
            scaled = map(_scaled, grads, factors)
            grads = list(map(self._with_l2, scaled, variables, kept))
            factors = [None] * len(variables)
        left = self._fused_update(grads, factors, variables, learning_rate)
        if left:
            rates = learning_rate
            self._base_update(
                [_scaled(grads[i], factors[i]) for i in left],
                [variables[i] for i in left],
                [rates[i] for i in left] if isinstance(rates, list) else rates,
            )

    def _found(self, gradients: Any, variables: Any) -> Factors | None:
        """The factor of each block, or None if there is nothing to normalize."""
        if self.rule is None:
            return None
        members = self._places(variables).members
        if not any(members):
            return None
        found = block_factors(gradients, variables, members, self.rule, self.norm)
        dropped = ops.sum(ops.cast(ops.logical_not(found.kept), "int32"))
        if not backend.counts_here(self._skipped_blocks):
            dropped = ops.zeros_like(dropped)
        self._skipped_blocks.assign_add(ops.cast(dropped, self._skipped_blocks.dtype))
        return found

    def _places(self, variables: list[Any]) -> _Places:
        assert self._built_blocks is not None
        return self._built_blocks.places_of(variables, self._get_variable_index)

    def _of_each(self, vector: Any, variables: list[Any]) -> list[Any]:
        """Of each variable, what a vector has for its block; None if it is in none."""
        numbers = backend.one_by_one(vector)
        owners = self._places(variables).owners
        return [None if b is None else numbers[b] for b in owners]

    def _rates(self, learning_rate: Any, factor: Any, variables: list[Any]) -> Any:
        """The learning rate, or a list of one for each variable."""
        return learning_rate

    def _fused_update(
        self, gradients: Any, factors: Any, variables: Any, learning_rate: Any
    ) -> list[int]:
        """Updates what has a kernel; the positions of what is left."""
        everything = list(range(len(variables)))
        assert self._built_blocks is not None
        base = self._built_blocks.base
        if base is None or not {"update_step", "_parallel_update_step"}.isdisjoint(
            vars(self)
        ):
            return everything
        states = [
            getattr(self, name, [])
            for name, setting in base.states
            if setting is None or getattr(self, setting)
        ]
        if not all(states):  # a momentum, say, that was set after `build`
            return everything
        indices = self._places(variables).indices
        return backend.update(
            base.name,
            {name: getattr(self, name) for name in base.settings},
            gradients,
            factors,
            variables,
            [[kind[i] for i in indices] for kind in states],
            learning_rate,
            self.iterations + 1,
        )

    def _base_update(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        """The base optimizer's own update."""
        super()._backend_update_step(gradients, variables, learning_rate)

    def _with_l2(self, gradient: Any, weight: Any, share: Any = None) -> Any:
        """`gradient + share * l2 * weight`."""
        if not self.l2 or gradient is None:
            return gradient
        dtype = keras.backend.standardize_dtype(weight.dtype)
        dtype = "float64" if dtype == "float64" else "float32"
        decay = ops.cast(ops.convert_to_tensor(weight), dtype) * self.l2
        if share is not None:
            decay = decay * ops.cast(share, dtype)
        return ops.add(gradient, ops.cast(decay, gradient.dtype))

    # A step called eagerly on TensorFlow, compiled.

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates the variables; called eagerly on TensorFlow, as one compiled step."""
        try:
            backend.unconverted(super().apply)(grads, trainable_variables)
        except RuntimeError as error:
            if "merge_call" in str(error):
                for setting, what in (
                    ("gradient_accumulation_steps", "accumulate gradients"),
                    ("ema_overwrite_frequency", "overwrite weights by their average"),
                ):
                    if getattr(self, setting):
                        text = ONLY_NOW_AND_THEN.format(what, setting)
                        raise RuntimeError(text) from error
            raise

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        step = super()._backend_apply_gradients
        if not self._compiles_eager_steps():
            return step(grads, trainable_variables)
        assert self._built_blocks is not None
        key = self._settings(), *map(self._get_variable_index, trainable_variables)
        steps = self._built_blocks.eager_steps
        if key not in steps and steps:  # a setting that is new at each step is not
            steps[key] = None  # compiled at each step: only if it comes back
            if len(steps) > EAGER_STEPS:
                steps.popitem(last=False)
            return step(grads, trainable_variables)
        if steps.get(key) is None:
            steps[key] = self._compiled(step, trainable_variables)
        steps.move_to_end(key)
        grads = [g if is_sparse(g) else ops.convert_to_tensor(g) for g in grads]
        steps[key](grads, self._rate_of_this_step())

    def _compiles_eager_steps(self) -> bool:
        if self.jit_compile is False or not backend.is_eager():
            return False
        if self.rule is None and not self.l2:
            return False  # bit for bit the stock optimizer
        if not rules.is_constant(self.rule) and self._uses_xla():
            return False  # which cannot call back
        return self._updates_like_keras

    def _uses_xla(self) -> bool:
        if self.jit_compile == "auto":
            return backend.has_gpu()
        return self.jit_compile is True

    def _settings(self) -> tuple[Any, ...]:
        """What a trace of the step freezes, to be compared with that of other steps."""
        rule = self.rule
        if not rules.is_constant(rule):
            rule = rules.uses_weights(rule), rules.uses_ones(rule)
        return rule, *(
            (name, _plain(value))
            for name, value in vars(self).items()
            if _plain(value) is not None
        )

    def _rate_of_this_step(self) -> Any:
        """As a tensor, unless it is a variable, which a trace reads by itself."""
        if isinstance(self._learning_rate, keras.Variable):
            return None
        return backend.as_input(self.learning_rate)

    def _compiled(self, step: Any, variables: list[Any]) -> Any:
        def traced(grads: Any, rate: Any) -> None:
            rule = None if rules.is_constant(self.rule) else _PresentRule(self)
            with (
                _set_for_now(self, "_learning_rate", rate),
                _set_for_now(self, "_rule", rule),
            ):
                step(grads, variables)

        return backend.compiled(traced, self._uses_xla())

    # Saving.

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._block_config()}

    def _block_config(self) -> dict[str, Any]:
        blocks = serialized("blocks", self._block_spec)
        config = {
            "blocks": blocks,
            "rule": serialized("rule", self.rule),
            "l2": self.l2,
            "jit_compile": self.jit_compile,
            "norm": self.norm,
        }
        built = self._built_blocks
        if built is not None:
            positions = built.blocks.positions
            config["partition"] = {
                "of": blocks,
                "blocks": [[b.name, list(p)] for b, p in zip(built.blocks, positions)],
                "variables": built.variables,
            }
        elif self._saved_blocks is not None:
            config["partition"] = self._saved_blocks.config
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        saved = config.pop("partition", None)
        if saved is not None and saved["of"] != as_saved(config.get("blocks")):
            saved = None  # somebody has asked for other blocks since
        for name in ("blocks", "rule"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(
                    config[name], custom_objects=custom_objects
                )
        optimizer = cls._made_from(config, custom_objects)
        if saved is not None:
            optimizer._saved_blocks = SavedBlocks(saved)
        return optimizer

    @classmethod
    def _made_from(cls, config: dict[str, Any], custom_objects: Any) -> Any:
        return super().from_config(config, custom_objects)

    def load_own_variables(self, store: Any) -> None:
        """Loads saved state; that of the stock optimizer too, which has no counter."""
        ours = list(self.variables)
        if self.built and len(store.keys()) == len(ours) - 1:
            ours = [v for v in ours if v is not self._skipped_blocks]
        if len(store.keys()) != len(ours):
            return super().load_own_variables(store)  # for its warning
        saved = [store[str(i)] for i in range(len(ours))]
        if all(map(fits, saved, ours)):
            for variable, value in zip(ours, saved):
                variable.assign(value)
        elif len(ours) < len(self.variables):
            super().load_own_variables(store)  # for its warning
        else:
            warnings.warn(
                f"Skipping variable loading for optimizer '{self.name}', because the "
                "saved variables have other shapes or dtypes than its own.",
                stacklevel=2,
            )


class _PresentRule(rules.Rule):
    """In a compiled step: the optimizer's rule, called in Python at each step.

    It is somebody's own, and may read what changes.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.uses_weights = rules.uses_weights(optimizer.rule)
        self.uses_ones = rules.uses_ones(optimizer.rule)

    def __call__(self, *norms: Any) -> Any:
        def factor(*known: Any) -> Any:
            of_each = iter(known)
            found = self.optimizer.rule(
                *(None if n is None else next(of_each) for n in norms)
            )
            return ops.cast(check_factor(found, len(known[0])), dtype)

        dtype = norms[0].dtype
        return backend.called_in_python(factor, [n for n in norms if n is not None])


def _check_l2(l2: Any) -> None:
    if l2 is not None:
        rules.check_number("l2", l2)


def _check_jit_compile(jit_compile: Any) -> None:
    if not (isinstance(jit_compile, bool) or jit_compile == "auto"):
        raise ValueError(
            "`jit_compile` must be True, False or 'auto'. "
            f"Received: jit_compile={jit_compile!r}"
        )


def _check_factors_of(rule: Any, blocks: tuple[Block, ...]) -> None:
    if rule is not None and blocks:
        ones = ops.ones((len(blocks),))
        weight_norm = ones if rules.uses_weights(rule) else None
        known = [ones, weight_norm, ones][: 2 + rules.uses_ones(rule)]
        check_factor(rule(*known), len(blocks))


def backend_class(stock: Any) -> Any:
    """The class that Keras makes for `stock`: on torch, for some, a faster one.

    It decides in `__new__`; an instance would have variables and start the runtime.
    """
    return type(stock.__new__(stock))


def _scaled(gradient: Any, factor: Any) -> Any:
    return gradient if factor is None else backend.times(gradient, factor)


def fused_base(cls: Any) -> Fused | None:
    """The base whose formula a class updates by, if nobody else has changed it."""
    if not cls._updates_like_keras:
        return None
    for c in cls.__mro__:
        ours = c.__module__.partition(".")[0] == PACKAGE
        if c in FUSED or ("update_step" in vars(c) and not ours):
            return FUSED.get(c)
    return None


def _plain(value: Any) -> Any:
    """A setting as something to compare and hash; None if it is not plain."""
    if isinstance(value, (str, numbers.Number, re.Pattern)):
        return value
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    return None


def _updates_like_keras(cls: Any) -> bool:
    """Whether all that a step does is Keras's code and ours, which reads settings only.

    An `update_step` of somebody else may read whatever it likes, at each step.
    """
    own = {"__init__", "get_config", "from_config", "build"}
    return not any(
        hasattr(keras.optimizers.Optimizer, name) or name == "_parallel_update_step"
        for c in cls.__mro__
        if c.__module__.partition(".")[0] not in ("keras", PACKAGE, "tensorflow")
        for name in vars(c)
        if name not in own and not name.startswith("__")
    )


@contextlib.contextmanager
def _set_for_now(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value, past Keras's tracking; None changes nothing."""
    own = vars(owner)
    before = own[name]
    if value is not None:
        own[name] = value
    try:
        yield
    finally:
        own[name] = before


def raised_for(dtype: Any, optimizer: Any, name: str) -> Any:
    """A context in which this setting, added to a root, is not too small for `dtype`.

    In float16 an epsilon of 1e-8 is 0, and so is the square of what is below 2.4e-4:
    a step would be 0 / 0, or a gradient divided by almost nothing.
    """
    smallest = SMALLEST_ROOTS.get(keras.backend.standardize_dtype(dtype), 0.0)
    if optimizer.rule is None or getattr(optimizer, name) >= smallest:
        return contextlib.nullcontext()
    return _set_for_now(optimizer, name, smallest)


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


def _signature(cls: Any) -> inspect.Signature:
    """The stock optimizer's arguments in its order, with our defaults, then our own."""
    own = inspect.signature(cls.__init__).parameters
    if not any(p.kind == p.VAR_POSITIONAL for p in own.values()):
        return inspect.Signature(list(own.values())[1:])
    optimizers = [c for c in cls.__mro__ if issubclass(c, keras.optimizers.Optimizer)]
    stock = next((c for c in optimizers if not issubclass(c, BlockNormalized)), object)
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


def chooser_of(optimizer: Any) -> Callable[[Any], Any] | None:
    """The function by which a `MultiOptimizer` deals out variables in its `build`."""
    return getattr(optimizer, "_optimizer_map", None)


def steps_of(optimizer: Any) -> Any:
    """The variable that counts steps; with accumulation, several make an update.

    The public `iterations` counts updates; the first of `variables` is what it reads.
    """
    return optimizer.variables[0]


_WATCHES = itertools.count(1)


@contextlib.contextmanager
def hooked(optimizer: Any, hooks: dict[str, Any]) -> Iterator[None]:
    """Meanwhile these are on an instance; functions get the original first."""
    own = vars(optimizer)  # `setattr` would look for variables to track
    hidden = {name: own[name] for name in hooks if name in own}
    for name, hook in hooks.items():
        if callable(hook):
            hook = functools.partial(
                backend.unconverted(hook), getattr(optimizer, name)
            )
        own[name] = hook
    try:
        yield
    finally:
        for name in hooks:
            del own[name]
        own.update(hidden)  # of another one, entered before


class Watch:
    """While it is entered, every update of an optimizer is looked at.

    `see(factors)` is called within the update: `factors()` is what `block_factors`
    finds of `blocks`; an optimizer that normalizes has found it anyway. On every
    backend the gradients are those which the update gets, accumulated and summed over
    replicas. `around()` is a context in which all of `apply` runs, once the optimizer
    is built; if it gives False, nothing is seen.
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
        self.number = next(_WATCHES)
        self.entered: list[Any] = []
        self.idle = False
        self.hooks: dict[str, Any] = {"apply": self._apply}
        if isinstance(optimizer, BlockNormalized):
            self.hooks["_found"] = self._found
        elif hasattr(optimizer, "_all_reduce_sum_gradients"):  # on TensorFlow
            self.hooks["_all_reduce_sum_gradients"] = self._all_reduce_sum_gradients
        else:
            self.hooks["_backend_update_step"] = self._backend_update_step

    def __enter__(self) -> None:
        # A text among an optimizer's settings: its compiled steps are told apart.
        watches = vars(self.optimizer).get("_watch", "/")
        hooks = {**self.hooks, "_watch": f"{watches}{self.number}/"}
        self.entered.append(hooked(self.optimizer, hooks))
        self.entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)

    def _apply(
        self, original: Any, grads: Any, trainable_variables: Any = None
    ) -> None:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.optimizer.built:  # as Keras would, further inside
                with keras.name_scope(self.optimizer.name, caller=self.optimizer):
                    self.optimizer.build(trainable_variables)
        if len(grads) == 0 or not self.optimizer.built:
            return original(grads, trainable_variables)
        with self.around() as sees:
            if sees is False:
                with self._unseen():
                    return original(grads, trainable_variables)
            original(grads, trainable_variables)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        own = vars(self.optimizer)
        watches, self.idle = own["_watch"], True
        own["_watch"] = watches.replace(f"/{self.number}/", "/")
        if own["_watch"] == "/":  # the step that is compiled without a watch
            del own["_watch"]
        try:
            yield
        finally:
            own["_watch"], self.idle = watches, False

    def _found(self, original: Any, gradients: Any, variables: Any) -> Any:
        found = original(gradients, variables)
        if found is None:
            self._look(gradients, variables)
        elif not self.idle:
            self.see(lambda: found)
        return found

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
        if self.idle:
            return
        index_of = self.optimizer._get_variable_index
        position = {index_of(v): i for i, v in enumerate(variables)}
        members = [
            [position[i] for i in map(index_of, block.variables) if i in position]
            for block in self.blocks
        ]

        def as_they_are() -> Any:
            found = block_factors(gradients, variables, members, _AsItIs())
            return found._replace(factor=ops.ones_like(found.factor))

        self.see(as_they_are)


class _AsItIs(rules.Rule):
    """Changes nothing."""

    uses_weights = False

    def __call__(self, gradient_norm: Any, weight_norm: Any) -> Any:
        return ops.ones_like(gradient_norm)
