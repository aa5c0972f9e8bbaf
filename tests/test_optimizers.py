"""The optimizers beside their NumPy twins and beside stock Keras."""

import inspect

import keras
import numpy as np
import pytest
import reference
from helpers import (
    BLOCKS,
    OPTIMIZERS,
    arrays,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

from keras_bng import (
    SGDNG,
    AdagradBNG,
    AdagradNG,
    AdamNG,
    Adaptive,
    Clip,
    Rms,
    RMSpropNG,
    block_normalized,
)

LR = {"learning_rate": 0.05}
TWINS = [
    (SGDNG, {**LR, "momentum": 0.9}, reference.SGDM),
    (SGDNG, {**LR, "momentum": 0.0}, reference.SGDM),
    (AdamNG, LR, reference.Adam),
    (AdagradNG, LR, reference.AdaGrad),
    (RMSpropNG, LR, reference.RMSProp),
]
RULES = [
    ("unit", reference.unit),
    (Rms(), reference.rms),
    (Adaptive(0.3), reference.adaptive(0.3)),
    (Clip(1.5), reference.clip(1.5)),
    (None, None),
]
PAIRS = [
    (SGDNG, keras.optimizers.SGD, {**LR, "momentum": 0.9, "nesterov": True}),
    (SGDNG, keras.optimizers.SGD, {**LR, "momentum": 0.0}),
    (AdamNG, keras.optimizers.Adam, {**LR, "epsilon": 1e-7, "amsgrad": True}),
    (AdagradNG, keras.optimizers.Adagrad, {**LR, "initial_accumulator_value": 0.1}),
    (RMSpropNG, keras.optimizers.RMSprop, {**LR, "centered": True, "momentum": 0.5}),
]


def constructible():
    """Every optimizer in `keras.optimizers` that defaults can make and that works."""
    for name, cls in sorted(vars(keras.optimizers).items()):
        if inspect.isclass(cls) and issubclass(cls, keras.optimizers.Optimizer):
            try:
                cls().apply(
                    [keras.ops.ones((2, 2))],
                    [variable(np.eye(2, dtype="float32"), "a/w")],
                )
            except (TypeError, AttributeError):
                continue  # Muon of Keras 3.10 fails on TensorFlow
            yield name


CONSTRUCTIBLE = list(constructible())


def test_the_optimizers_that_are_tried_are_most_that_keras_has():
    expected = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl"}
    expected |= {"Lamb", "Lion", "Nadam", "RMSprop", "SGD"}
    if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # not in the lowest Keras
        expected |= {"Muon", "ScheduleFreeAdamW"}
    assert expected <= set(CONSTRUCTIBLE)


def check_beside_twin(rng, optimizer, twin, variables, steps=100):
    for _ in range(steps):
        # From step to step and from layer to layer, sizes that vary a lot.
        gradients = some_gradients(rng, variables, 10.0 ** rng.uniform(-6, 2))
        optimizer.apply(tensors(gradients), variables)
        twin.step([np.float32(g) for g in gradients])
    for ours, theirs in zip(arrays(variables), twin.weights):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("l2", [0.0, 0.01])
@pytest.mark.parametrize("rule, twin_rule", RULES)
@pytest.mark.parametrize("cls, settings, twin", TWINS)
def test_100_steps_beside_the_reference(rng, cls, settings, twin, rule, twin_rule, l2):
    variables = some_variables(rng)
    reference_run = twin(arrays(variables), BLOCKS, twin_rule, l2, **settings)
    optimizer = cls(**settings, rule=rule, l2=l2)
    check_beside_twin(rng, optimizer, reference_run, variables)


@pytest.mark.parametrize("delta", [1e-8, 0.5])
@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_adagrad_bng_is_algorithm_2_for_100_steps(rng, delta, l2):
    variables = some_variables(rng)
    twin = reference.AdaGradBNG(arrays(variables), BLOCKS, l2=l2, delta=delta)
    optimizer = AdagradBNG(delta=delta, l2=l2)
    check_beside_twin(rng, optimizer, twin, variables)


def test_adagrad_bng_steps_along_the_raw_gradient_and_accumulates_the_normalized():
    w = variable([0.0, 0.0], "a/w")
    AdagradBNG(learning_rate=1.0, delta=1.0).apply(tensors([[30.0, 40.0]]), [w])
    # Normalized (0.6, 0.8): accumulator roots 0.6 and 0.8, delta 1.
    np.testing.assert_allclose(arrays([w])[0], [-30 / 1.6, -40 / 1.8], rtol=1e-6)


def test_adagrad_bng_l2_is_part_of_one_gradient_at_two_lengths():
    """A weight without a gradient decays as fast as one with a gradient moves."""
    w = variable([1.0, 1.0], "a/w")
    AdagradBNG(learning_rate=0.1, l2=0.01).apply(tensors([[3.0, 0.0]]), [w])
    # Normalized (1.01, 0.01), raw 3 times that; divided by the root: 3 and 3.
    np.testing.assert_allclose(arrays([w])[0], [0.7, 0.7], rtol=1e-5)


@pytest.mark.parametrize("l2", [None, 1e-4, 1e-3, 1e-2, 0.1])
def test_adagrad_bng_moves_no_weight_further_than_the_rate_times_the_norm(rng, l2):
    """Also where `l2 * w` cancels the normalized gradient, and `delta` is left."""
    w = variable(rng.uniform(-0.07, 0.07, (1000, 100)).astype("float32"), "a/w")
    optimizer = AdagradBNG(1e-3, l2=l2)
    for _ in range(5):
        before = np.float64(arrays([w])[0])
        gradient = rng.normal(size=before.shape)
        optimizer.apply(tensors([gradient]), [w])
        moved = np.abs(arrays([w])[0] - before).max()
        assert moved <= 1e-3 * reference.block_norm([gradient]) * 1.001


def test_adagrad_bng_takes_no_rule_and_needs_a_positive_delta():
    with pytest.raises(TypeError, match="takes no `rule`.*Received: rule='unit'"):
        AdagradBNG(rule="unit")
    with pytest.raises(ValueError, match="`delta` must be a finite number above 0"):
        AdagradBNG(delta=0.0)
    assert "rule" not in AdagradBNG().get_config()
    assert "rule" not in inspect.signature(AdagradBNG).parameters


@pytest.mark.parametrize("blocks", ["variable", "model", [("kernel", "kernels")]])
def test_other_blocks_beside_the_reference(rng, blocks):
    variables = some_variables(rng)
    positions = {
        "variable": [[0], [1], [2], [3]],
        "model": [[0, 1, 2, 3]],
    }.get(str(blocks), [[0, 2], [1], [3]])
    twin = reference.SGDM(arrays(variables), positions, **LR)
    check_beside_twin(rng, SGDNG(**LR, blocks=blocks), twin, variables)


@pytest.mark.parametrize("ours, stock, settings", PAIRS)
@pytest.mark.parametrize("weight_decay", [None, 0.1])
def test_rule_none_is_the_stock_optimizer_bit_for_bit(
    rng, ours, stock, settings, weight_decay
):
    one = some_variables(rng)
    two = [variable(arrays([v])[0], v.path) for v in one]
    a = ours(**settings, rule=None, weight_decay=weight_decay)
    b = stock(**settings, weight_decay=weight_decay)
    for _ in range(50):
        gradients = tensors(some_gradients(rng, one))
        a.apply(gradients, one)
        b.apply(gradients, two)
    for x, y in zip(arrays(one), arrays(two)):
        np.testing.assert_array_equal(x, y)


def test_defaults_follow_the_paper():
    adam = AdamNG()
    assert float(adam.learning_rate.numpy()) == np.float32(1e-3)
    assert (adam.beta_1, adam.beta_2, adam.epsilon) == (0.9, 0.999, 1e-8)
    adagrad = AdagradNG()
    assert float(adagrad.learning_rate.numpy()) == np.float32(1e-2)
    assert adagrad.initial_accumulator_value == 0.0
    assert SGDNG().momentum == 0.9
    bng = AdagradBNG()
    assert (float(bng.learning_rate.numpy()), bng.delta) == (np.float32(0.01), 1e-8)


@pytest.mark.parametrize("ours, stock, _", PAIRS)
def test_the_stock_arguments_in_the_stock_order_then_ours_by_keyword(ours, stock, _):
    def positional(cls):
        parameters = inspect.signature(cls).parameters.values()
        return [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]

    assert positional(ours) == positional(stock)
    keywords = [
        p.name
        for p in inspect.signature(ours).parameters.values()
        if p.kind == p.KEYWORD_ONLY
    ]
    assert keywords == ["blocks", "rule", "l2", "jit_compile", "norm"]
    # The signature is not only shown: positions mean the same.
    defaults = inspect.signature(ours).parameters
    values = [defaults[name].default for name in positional(ours)]
    values[positional(ours).index("weight_decay")] = 0.25
    assert ours(*values).weight_decay == 0.25


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"l2": -1e-4}, ValueError, "`l2` must be .* 0 or more. Received: l2=-0.0001"),
        ({"l2": "x"}, TypeError, "`l2` must be a number.*Received: l2='x'"),
        ({"l2": True}, TypeError, "Received: l2=True"),
        ({"jit_compile": "yes"}, ValueError, "Received: jit_compile='yes'"),
        ({"jit_compile": None}, ValueError, "True, False or 'auto'"),
        ({"momentumm": 1}, ValueError, "momentumm"),
    ],
)
def test_bad_arguments_say_what_was_received(options, error, message):
    for make in (SGDNG, AdamNG, AdagradNG, RMSpropNG, AdagradBNG):
        with pytest.raises(error, match=message):
            make(**options)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("rule", "adaptiv", ValueError, "Unknown `rule`.*Received: rule='adaptiv'"),
        ("rule", 3, TypeError, "`rule` has the wrong type"),
        ("rule", Adaptive, TypeError, "must be an instance"),
        ("l2", -5, ValueError, "`l2` must be .* 0 or more. Received: l2=-5"),
        ("l2", "x", TypeError, "`l2` must be a number.*Received: l2='x'"),
        ("jit_compile", "yes", ValueError, "Received: jit_compile='yes'"),
    ],
)
def test_what_is_assigned_is_checked_as_in_the_constructor(
    rng, name, value, error, message, built
):
    for make in OPTIMIZERS.values():
        optimizer = make()
        if built:
            optimizer.build(some_variables(rng))
        expected = error, message
        if name == "rule" and isinstance(optimizer, AdagradBNG):
            expected = TypeError, "takes no `rule`"
        before = getattr(optimizer, name)
        with pytest.raises(expected[0], match=expected[1]):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before


def test_a_rule_that_is_assigned_to_a_built_optimizer_must_return_a_number_a_block(rng):
    optimizer = SGDNG()
    optimizer.build(some_variables(rng))
    with pytest.raises(TypeError, match="one number a block"):
        optimizer.rule = lambda gradient_norm, weight_norm: 1.0
    optimizer.rule = "clip"
    assert optimizer.rule == Clip()
    with pytest.raises(ValueError, match="`delta` must be a finite number above 0"):
        AdagradBNG().delta = 0.0


def test_l2_reaches_left_out_variables_but_not_a_dropped_block():
    w = [variable([1.0], p) for p in ("a/k", "b/k", "c/k")]
    optimizer = SGDNG(
        1.0, momentum=0.0, l2=0.1, blocks=lambda v: None if "c" in v.path else v.path
    )
    optimizer.apply(tensors([[np.nan], [5.0], [0.5]]), w)
    np.testing.assert_allclose(arrays(w), [[1.0], [1 - 1.1], [1 - 0.6]], rtol=1e-6)


def test_skipped_blocks_counts_and_nothing_bad_reaches_the_weights(rng):
    for name, make in OPTIMIZERS.items():
        variables = some_variables(rng)
        optimizer = make()
        optimizer.build(variables)
        assert int(optimizer.skipped_blocks.numpy()) == 0
        for bad in (np.nan, np.inf, -np.inf):
            gradients = some_gradients(rng, variables)
            gradients[1][0] = bad  # block a
            gradients[3] = np.float64(bad)  # block c
            before = arrays(variables)
            optimizer.apply(tensors(gradients), variables)
            after = arrays(variables)
            assert all(np.isfinite(x).all() for x in after), name
            assert not (after[2] == before[2]).any(), "the other block goes on"
        assert int(optimizer.skipped_blocks.numpy()) == 6, name
        assert all(np.isfinite(v).all() for v in arrays(optimizer.variables))


def test_skipped_blocks_before_build_says_what_to_do():
    with pytest.raises(AttributeError, match="exists after `build`"):
        _ = AdamNG().skipped_blocks
    assert AdamNG().blocks == ()


@pytest.mark.parametrize("ours, stock, settings", PAIRS)
@pytest.mark.parametrize("options", [{}, {"rule": None}, {"rule": "clip", "l2": 0.1}])
def test_state_is_that_of_the_stock_optimizer_and_one_counter(
    rng, ours, stock, settings, options
):
    variables = some_variables(rng)
    a, b = ours(**settings, **options), stock(**settings)
    a.build(variables)
    b.build(variables)
    extra = [v for v in a.variables if v is not a.skipped_blocks]
    assert [tuple(v.shape) for v in extra] == [tuple(v.shape) for v in b.variables]
    assert len(a.variables) == len(b.variables) + 1
    assert a.skipped_blocks.shape == ()
    a.apply(tensors(some_gradients(rng, variables)))
    assert len(a.variables) == len(b.variables) + 1


def test_blocks_after_build_are_a_tuple_of_blocks(rng):
    variables = some_variables(rng)
    optimizer = AdamNG()
    optimizer.build(variables)
    assert isinstance(optimizer.blocks, tuple)
    assert [(b.name, b.variables) for b in optimizer.blocks] == [
        ("a", (variables[0], variables[1])),
        ("b", (variables[2],)),
        ("c", (variables[3],)),
    ]


def test_apply_on_a_subset_of_the_variables(rng):
    variables = some_variables(rng)
    optimizer = SGDNG(1.0, momentum=0.0)
    optimizer.build(variables)
    before = arrays(variables)
    gradients = some_gradients(rng, variables)
    subset = [3, 0]
    optimizer.apply(
        tensors([gradients[i] for i in subset]), [variables[i] for i in subset]
    )
    moved = [b - a for a, b in zip(arrays(variables), before)]
    assert abs(moved[1]).max() == 0 and abs(moved[2]).max() == 0
    for i in subset:
        expected = gradients[i] / reference.block_norm([gradients[i]])
        np.testing.assert_allclose(moved[i], expected, rtol=1e-4, atol=1e-6)


def test_a_variable_listed_twice_at_build_is_normalized():
    w = variable([0.0], "a/w")
    optimizer = SGDNG(1.0, momentum=0.0)
    optimizer.build([w, w])
    optimizer.apply(tensors([[5.0]]), [w])
    assert arrays([w])[0] == [-1.0]


def test_unknown_variables_get_kerass_error(rng):
    variables = some_variables(rng)
    optimizer = SGDNG()
    optimizer.build(variables[:2])
    gradients = tensors(some_gradients(rng, variables))
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(gradients, variables)
    with pytest.raises(ValueError, match="must already be built"):
        SGDNG().apply(gradients)


@pytest.mark.parametrize("name", CONSTRUCTIBLE)
def test_block_normalized_beside_the_stock_optimizer_on_normalized_gradients(rng, name):
    stock = getattr(keras.optimizers, name)()
    one = some_variables(rng)
    two = [variable(arrays([v])[0], v.path) for v in one]
    ours = block_normalized(stock)
    assert isinstance(ours, getattr(keras.optimizers, name))
    assert ours is not stock and not stock.built
    for _ in range(5):
        gradients = some_gradients(rng, one, 1e-4)
        normalized = reference.normalize(gradients, arrays(two), BLOCKS, reference.unit)
        ours.apply(tensors(gradients), one)
        stock.apply(tensors(normalized), two)
    for x, y in zip(arrays(one), arrays(two)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    ours_state = [v for v in ours.variables if v is not ours.skipped_blocks]
    assert len(ours_state) == len(stock.variables), "saved once"


@pytest.mark.parametrize("name", CONSTRUCTIBLE)
def test_block_normalized_keeps_all_settings(name):
    cls = getattr(keras.optimizers, name)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    stock = cls(learning_rate=schedule, weight_decay=0.03, clipnorm=2.0, use_ema=True)
    ours = block_normalized(stock, rule="clip", blocks="model", l2=0.1)
    stock_config = stock.get_config()
    for key, value in ours.get_config().get("optimizer", {}).get("config", {}).items():
        assert value == stock_config[key], key
    for key in stock_config:
        if key not in ("learning_rate", "name"):
            assert getattr(ours, key) == getattr(stock, key), key
    assert ours._learning_rate is schedule
    assert (ours.rule, ours.l2) == (Clip(), 0.1)


def test_block_normalized_gives_the_named_class_where_there_is_one():
    for ours, stock, settings in PAIRS:
        assert type(block_normalized(stock(**settings))) is ours


def test_block_normalized_takes_over_exclusions_and_state(rng):
    stock = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    variables = some_variables(rng)
    for _ in range(3):
        stock.apply(tensors(some_gradients(rng, variables)), variables)
    ours = block_normalized(stock)
    assert int(ours.iterations.numpy()) == 3
    for a, b in zip(stock.variables, ours.variables):
        np.testing.assert_array_equal(*arrays([a, b]))

    plain = keras.optimizers.SGD(0.1, weight_decay=0.5)
    plain.exclude_from_weight_decay(var_names=["bias"])
    before = arrays(variables)
    zero = tensors([np.zeros(v.shape) for v in variables])
    block_normalized(plain).apply(zero, variables)
    assert (arrays(variables)[1] == before[1]).all()
    assert not (arrays(variables)[0] == before[0]).any()


def test_what_is_excluded_from_weight_decay_after_build_is_as_in_stock_keras():
    """Keras 3.16 refuses it; before, the next step follows."""

    def outcome(optimizer):
        variables = some_variables(np.random.default_rng(0))
        optimizer.build(variables)
        try:
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        except ValueError as error:
            return str(error)
        optimizer.apply(tensors([np.zeros(v.shape) for v in variables]), variables)
        return [array.tolist() for array in arrays(variables)]

    options = {"learning_rate": 0.1, "weight_decay": 0.5}
    stock = outcome(keras.optimizers.SGD(**options))
    assert outcome(SGDNG(momentum=0.0, **options)) == stock
    assert outcome(block_normalized(keras.optimizers.SGD(**options))) == stock


@pytest.mark.parametrize(
    "optimizer, message",
    [
        ("lion", "must be an instance of a Keras optimizer.*Received: 'lion'"),
        (keras.optimizers.Lion, "must be an instance"),
        (AdamNG(), "normalizes its gradients already"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "Make those block-normalized instead",
        ),
    ],
)
def test_block_normalized_says_what_it_takes(optimizer, message):
    with pytest.raises(TypeError, match=message):
        block_normalized(optimizer)


def test_block_normalized_works_on_an_optimizer_of_the_users_own(rng):
    class Sign(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, keras.ops.sign(gradient) * learning_rate)

    w = variable([1.0, 1.0], "a/w")
    optimizer = block_normalized(Sign(learning_rate=0.5))
    optimizer.apply(tensors([[1e-30, -1e-30]]), [w])
    assert arrays([w])[0].tolist() == [0.5, 1.5]
