"""Fails loudly when Keras changes one of the private hooks that `optimizer.py` uses."""

import inspect

import keras
import numpy as np
import pytest
from helpers import (
    arrays,
    compiled,
    small_data,
    small_model,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

import keras_bng
from keras_bng import SGDNG
from keras_bng.optimizer import (
    SET_BY_FIT,
    Watch,
    backend_class,
    chooser_of,
    steps_of,
    variables_of,
)

SGD = keras.optimizers.SGD


def recorded():
    """The private calls of one step of the stock optimizer, in order."""
    order = []
    optimizer = SGD(0.1, weight_decay=0.1, clipnorm=1.0)
    for name in (
        "_backend_apply_gradients",
        "_clip_gradients",
        "_apply_weight_decay",
        "_backend_update_step",
        "_all_reduce_sum_gradients",
        "update_step",
    ):
        if hasattr(optimizer, name):
            original = getattr(optimizer, name)

            def spy(*args, name=name, original=original, **kwargs):
                order.append(name)
                return original(*args, **kwargs)

            setattr(optimizer, name, spy)
    w = variable([1.0, 2.0], "a/w")
    optimizer.apply(tensors([[1.0, 1.0]]), [w])
    return order


def test_keras_calls_its_hooks_in_the_order_that_we_rely_on():
    on_tensorflow = keras.backend.backend() == "tensorflow"
    assert recorded() == [
        "_backend_apply_gradients",
        "_clip_gradients",
        "_apply_weight_decay",
        "_backend_update_step",
        *(["_all_reduce_sum_gradients"] if on_tensorflow else []),
        *(["update_step"] if keras.backend.backend() != "torch" else []),
    ]


def test_the_hooks_exist_with_the_arguments_that_we_pass():
    def arguments(name):
        return list(inspect.signature(getattr(SGD, name)).parameters)

    assert arguments("_backend_update_step")[1:] == [
        "grads",
        "trainable_variables",
        "learning_rate",
    ]
    assert arguments("_get_variable_index") == ["self", "variable"]
    assert arguments("apply")[1:] == ["grads", "trainable_variables"]
    assert arguments("_backend_apply_gradients")[1:] == ["grads", "trainable_variables"]
    assert arguments("load_own_variables") == ["self", "store"]
    if keras.backend.backend() == "tensorflow":
        assert arguments("_all_reduce_sum_gradients") == ["self", "grads_and_vars"]


def test_what_fit_and_evaluate_leave_on_a_model_is_known(rng):
    """What is new on it, or another object than before, is put back by a search."""
    model = compiled(small_model(), SGD(0.1))
    x, y = small_data(rng)
    before = dict(vars(model))
    model.fit(x, y, verbose=0, validation_data=(x, y))
    changed = {k for k, v in vars(model).items() if before.get(k, model) is not v}
    assert {name for name in changed if name.startswith("_")} <= {
        *SET_BY_FIT,
        "_called",  # that it was called once does no harm
        "_compile_metrics",  # which is built, and its variables are put back
        "_tracker",
    }


def test_the_private_attributes_hold_what_we_read(rng):
    optimizer = SGD(0.1)
    assert isinstance(optimizer._learning_rate, keras.Variable)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert SGD(schedule)._learning_rate is schedule
    variables = some_variables(rng)
    optimizer.exclude_from_weight_decay(var_names=["bias"])  # newer Keras: not later
    names = [n for n in vars(optimizer) if n.startswith("_exclude_from_weight_decay")]
    assert len(names) >= 2
    optimizer.build(variables)
    assert list(optimizer._trainable_variables) == variables
    assert [optimizer._get_variable_index(v) for v in variables] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Lion", "Lamb"])
def test_the_class_that_keras_makes_is_decided_before_there_is_a_variable(name):
    stock = getattr(keras.optimizers, name)
    assert backend_class(stock) is type(stock())


def test_a_tensor_in_the_place_of_the_learning_rate_is_the_learning_rate():
    optimizer = SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    rate = keras.ops.array(0.25)
    vars(optimizer)["_learning_rate"] = rate
    assert optimizer.learning_rate is rate


def test_our_hook_is_called_once_a_step_and_sees_every_gradient(rng):
    seen = []

    class Spy(SGDNG):
        def _found(self, gradients, variables):
            seen.append((len(gradients), len(variables)))
            return super()._found(gradients, variables)

    variables = some_variables(rng)
    optimizer = Spy(jit_compile=False)
    for _ in range(3):
        optimizer.apply(tensors(some_gradients(rng, variables)), variables)
    assert seen == [(4, 4)] * 3


def test_keras_takes_variables_in_an_attribute_for_state_and_ours_are_hidden(rng):
    variables = some_variables(rng)
    optimizer = SGD(0.1)
    optimizer.mine = tuple(variables)
    assert any(v is variables[0] for v in optimizer.variables), "the premise"
    ours = SGDNG()
    ours.build(variables)
    assert not any(v is w for v in ours.variables for w in variables)


def test_the_state_of_a_step_is_what_the_hook_returned(rng):
    class Twice(SGDNG):
        def _found(self, gradients, variables):
            found = super()._found(gradients, variables)
            return found._replace(factor=2.0 * found.factor)

    w = variable([0.0], "a/w")
    Twice(1.0, momentum=0.0).apply(tensors([[5.0]]), [w])
    np.testing.assert_allclose(arrays([w])[0], [-2.0])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow only")
def test_update_step_gets_a_variable_without_path(rng):
    seen = []

    class Spy(SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(hasattr(variable, "path"))

    Spy(0.1).apply(tensors([[1.0]]), [variable([1.0], "a/w")])
    assert seen == [False], "the path must be read in `build`"


def test_steps_are_counted_apart_from_accumulated_updates():
    optimizer = SGD(0.1, gradient_accumulation_steps=2)
    w = keras.Variable([1.0])
    optimizer.build([w])
    for _ in range(3):
        optimizer.apply([keras.ops.ones((1,))], [w])
    assert int(steps_of(optimizer).numpy()) == 3
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 1
    assert variables_of(optimizer) == [w]


@pytest.mark.parametrize(
    "make", [SGD, SGDNG, lambda rate: SGDNG(rate, rule=None, l2=1.0)]
)
def test_a_hook_on_an_instance_is_called_and_can_be_taken_away(make):
    optimizer, w, seen = make(0.1), keras.Variable([1.0]), []
    optimizer.build([w])
    watch = Watch(
        optimizer,
        keras_bng.partition([w], "variable"),
        lambda factors: seen.append(factors().gradient_norm),
    )
    optimizer.apply([keras.ops.ones((1,))], [w])  # maybe compiled, without it
    before = set(vars(optimizer))
    with watch:
        optimizer.apply([3 * keras.ops.ones((1,))], [w])
        assert len(seen) == 1
    optimizer.apply([keras.ops.ones((1,))], [w])
    assert len(seen) == 1 and set(vars(optimizer)) == before


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)
def test_a_multi_optimizer_says_who_takes_a_variable_before_it_is_built():
    one, two = SGD(0.1), SGDNG(0.1)
    a, b = keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")
    both = keras.optimizers.MultiOptimizer(lambda v: one if v is a else two)
    choose = chooser_of(both)
    assert choose(a) is one and choose(b) is two and not one.built
    assert chooser_of(one) is None
