"""torch only: Keras's parallel classes carry our step, and do not go around it."""

import keras
import numpy as np
import pytest
import reference
from helpers import (
    OPTIMIZERS,
    arrays,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

import keras_bng
from keras_bng import (
    SGDNG,
    AdagradNG,
    AdamNG,
    RMSpropNG,
    block_normalized,
    partition,
)
from keras_bng.blocks import paths_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch only")

PAIRS = [
    (SGDNG, keras.optimizers.SGD),
    (AdamNG, keras.optimizers.Adam),
    (AdagradNG, keras.optimizers.Adagrad),
    (RMSpropNG, keras.optimizers.RMSprop),
    (lambda **k: block_normalized(keras.optimizers.Lion(**k)), keras.optimizers.Lion),
]


@pytest.mark.parametrize("ours, stock", PAIRS)
def test_our_class_is_a_subclass_of_the_parallel_one_and_normalizes(ours, stock):
    optimizer = ours(learning_rate=0.5)
    parallel = type(stock(learning_rate=0.5))
    assert parallel is not stock, "the premise: Keras swaps the class"
    assert isinstance(optimizer, parallel) and isinstance(optimizer, stock)
    seen = []
    update = optimizer._parallel_update_step
    optimizer._parallel_update_step = lambda grads, *rest: (
        seen.extend(grads),
        update(grads, *rest),
    )
    w = variable([1.0, 1.0], "a/w")
    optimizer.apply(tensors([[3e-20, 4e-20]]), [w])
    np.testing.assert_allclose(arrays(seen), [[0.6, 0.8]], rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        SGDNG,
        lambda: SGDNG(momentum=0.0),
        lambda: SGDNG(nesterov=True, l2=0.01),
        AdamNG,
        lambda: AdamNG(rule="adaptive"),
        AdagradNG,
        RMSpropNG,
    ],
    ids=[
        "SGD",
        "no momentum",
        "Nesterov, l2",
        "Adam",
        "adaptive",
        "AdaGrad",
        "RMSprop",
    ],
)
def test_torch_compile_makes_one_graph_of_a_step_that_does_what_it_did(rng, make):
    """And of all later steps: what is new in each of them would be traced anew."""
    torch._dynamo.reset()
    ours, twin = some_variables(rng), some_variables(np.random.default_rng(0))
    one, other = make(), make()
    one.build(ours)
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    step = torch.compile(
        lambda *g: one.apply(list(g), ours), backend=backend, fullgraph=True
    )
    for i in range(5):
        g = tensors(some_gradients(rng, ours, 10.0 ** (8 * i - 20)))
        if i == 3:
            g[2][0, 0] = float("nan")
        step(*g)
        other.apply(g, twin)
    assert len(traced) == 1
    assert int(one.skipped_blocks.numpy()) == 1
    for a, b in zip(arrays(ours), arrays(twin)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_nan_micro_step_is_gone_after_the_update(rng):
    for make in OPTIMIZERS.values():
        variables = some_variables(rng)
        optimizer = make(gradient_accumulation_steps=2)
        for i in range(6):
            gradients = some_gradients(rng, variables)
            if i == 0:
                gradients[2][0, 0] = np.nan
            before = arrays(variables)
            optimizer.apply(tensors(gradients), variables)
        assert not (arrays(variables)[2] == before[2]).any(), "it moves again"
        assert int(optimizer.skipped_blocks.numpy()) == 1


def test_parameters_of_a_module_that_need_a_gradient_can_be_updated(rng):
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    loss = dense(torch.ones(4, 3)).sum()
    loss.backward()
    gradients = [v.value.grad for v in dense.trainable_weights]
    optimizer = SGDNG(1.0, momentum=0.0)
    before = arrays(dense.trainable_weights)
    with torch.no_grad():
        optimizer.apply(gradients, dense.trainable_weights)
    moved = [b - a for a, b in zip(arrays(dense.trainable_weights), before)]
    length = reference.block_norm(moved)
    np.testing.assert_allclose(length, 1.0, rtol=1e-5)


# Modules of torch in a `keras.layers.TorchModuleWrapper`.


def wrapper(*modules, name):
    return keras.layers.TorchModuleWrapper(torch.nn.Sequential(*modules), name=name)


def linear():
    return torch.nn.Linear(2, 2)


def names(layer, blocks="layer"):
    found = partition(layer.trainable_variables, blocks)
    return {b.name: len(b.variables) for b in found}


def test_a_module_in_a_wrapper_is_a_block_under_its_own_name(rng):
    net = wrapper(linear(), torch.nn.Tanh(), linear(), name="net")
    model = keras.Sequential([keras.Input((2,)), net, keras.layers.Dense(1, name="d")])
    assert "/" not in net.trainable_variables[0].path, "the premise"
    optimizer = SGDNG(0.1, momentum=0.0)
    model.compile(optimizer, "mse")
    x = rng.normal(size=(8, 2)).astype("float32")
    before = arrays(net.trainable_variables)
    model.fit(x, x[:, :1], verbose=0)
    assert [b.name for b in optimizer.blocks[:2]] == ["net/0", "net/2"]
    assert [len(b.variables) for b in optimizer.blocks] == [2, 2, 2]
    moved = [a - b for a, b in zip(arrays(net.trainable_variables), before)]
    for block in (moved[:2], moved[2:]):
        np.testing.assert_allclose(reference.block_norm(block), 0.1, rtol=1e-5)
    assert paths_of(net.trainable_variables)[2:] == ["net/2/weight", "net/2/bias"]


def test_the_modules_names_are_those_of_variables_and_patterns():
    net = wrapper(linear(), linear(), name="net")
    assert list(names(net, "variable")) == [
        "net/0/weight",
        "net/0/bias",
        "net/1/weight",
        "net/1/bias",
    ]
    assert names(net, [("bias$", None), ("^net/1", "last")]) == {"net/0": 1, "last": 1}
    with pytest.warns(UserWarning, match="begin with: .'net/0/weight', 'net/0/bias'"):
        names(net, [("kernel", None)])


def test_a_wrapper_of_one_module_is_one_block():
    assert names(keras.layers.TorchModuleWrapper(linear(), name="only")) == {"only": 2}


def test_names_stay_when_the_module_is_moved_or_frozen_in_part():
    net = wrapper(linear(), linear(), name="net")
    net.module.to("cpu").to(torch.float64)
    assert names(net) == {"net/0": 2, "net/1": 2}
    frozen = wrapper(linear(), linear(), name="frozen")
    frozen.module[0].weight.requires_grad = False
    again = keras.layers.TorchModuleWrapper(frozen.module, name="again")
    assert names(again) == {"again/0": 1, "again/1": 2}
    frozen.trainable = False
    assert names(frozen) == {}


def test_tied_modules_are_one_block_each():
    tied = linear()
    assert names(wrapper(tied, linear(), tied, name="net")) == {"net/0": 2, "net/1": 2}
    # In two wrappers Keras has two variables for each parameter, and two blocks.
    one, two = wrapper(tied, name="one"), wrapper(linear(), tied, name="two")
    assert names(one) == {"one/0": 2}
    assert names(two) == {"two/0": 2, "two/1": 2}


def test_two_wrappers_of_one_name_are_not_merged():
    pair = keras.Sequential(
        [
            wrapper(linear(), name="net"),
            keras.Sequential([wrapper(linear(), name="net")]),
        ]
    )
    assert names(pair) == {"net/0": 2, "net/0#2": 2}


def test_a_wrapper_within_a_wrapper():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.TorchModuleWrapper(linear(), name="inner")
            self.own = linear()
            self.scale = torch.nn.Parameter(torch.ones(2))

    outer = keras.layers.TorchModuleWrapper(Outer(), name="outer")
    assert names(outer) == {"outer": 1, "outer/inner/module": 2, "outer/own": 2}
    assert names(outer.module.inner) == {"inner": 2}


def test_a_wrapper_made_while_a_layer_is_built():
    class Late(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), name="scale")
            self.net = wrapper(linear(), name="net")

    late = Late(name="late")
    late.build((None, 2))
    assert names(late) == {"late": 1, "late/net/0": 2}


def test_objects_that_do_not_tell_their_class_do_no_harm():
    class Dead:
        @property
        def __class__(self):
            raise ReferenceError("weakly-referenced object no longer exists")

    dead, broken = (
        Dead(),
        keras.layers.TorchModuleWrapper.__new__(keras.layers.TorchModuleWrapper),
    )
    assert names(wrapper(linear(), name="net")) == {"net/0": 2}
    del dead, broken


def test_variables_of_no_wrapper_keep_their_path():
    alone = keras.Variable([1.0])
    assert paths_of([alone, variable([1.0], "a/w")]) == [alone.path, "a/w"]


def test_the_summary_names_the_parameters_of_a_wrapped_module(capsys):
    wrapper = keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 2), name="wrapped")
    keras_bng.block_summary(keras.Sequential([keras.Input((4,)), wrapper]))
    assert "wrapped/weight (2, 4)" in capsys.readouterr().out
