"""`BlockMonitor.watch`, in loops of one's own, on every backend."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from helpers import arrays, compiled, small_data, small_model, variable
from keras import ops

from keras_bng import SGDNG, AdamNG, BlockMonitor

BACKEND = keras.backend.backend()
TENSORFLOW = pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.function")
SGD = keras.optimizers.SGD
MAKE = {
    "SGD": lambda **k: SGD(0.1, **k),
    "SGDNG": lambda **k: SGDNG(0.1, momentum=0.0, **k),
    "AdamNG": lambda **k: AdamNG(0.1, **k),
    "rule=None": lambda **k: SGDNG(0.1, momentum=0.0, rule=None, l2=0.1, **k),
}
EVERY = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
# How a step is called: as it is, or in a function of the backend.
WAYS = ["eager"] if BACKEND == "torch" else ["eager", "function"]
IN_EACH_WAY = pytest.mark.parametrize("way", WAYS)


def weights(layer="a"):
    return [
        variable([3.0, 4.0], f"{layer}/kernel"),
        variable([1.0], f"{layer}/bias"),
        variable([2.0], f"{layer}2/kernel"),
    ]


class Loop:
    """Steps with gradient `weights + number of the call`."""

    def __init__(self, optimizer, way="eager", variables=None):
        self.optimizer, self.way = optimizer, way
        self.variables = weights() if variables is None else variables
        self.calls = 0
        self.function = None

    def __call__(self, count=1):
        for _ in range(count):
            getattr(self, f"{self.way}_{BACKEND}", self.eager)(float(self.calls))
            self.calls += 1

    def eager(self, more):
        found = [ops.convert_to_tensor(v) + more for v in self.variables]
        if BACKEND == "torch":
            import torch

            with torch.no_grad():
                return self.optimizer.apply(found, self.variables)
        self.optimizer.apply(found, self.variables)

    def function_tensorflow(self, more):
        import tensorflow as tf

        if self.function is None:
            self.function = tf.function(self.eager)
        self.function(tf.constant(more))

    def function_jax(self, more):
        import jax

        if not self.optimizer.built:
            self.optimizer.build(self.variables)
        own = self.optimizer.variables
        if self.function is None:

            def step(state, values, more):
                found = [value + more for value in values]
                return self.optimizer.stateless_apply(state, found, values)

            self.function = jax.jit(step)
        values, state = self.function(
            [v.value for v in own], [v.value for v in self.variables], more
        )
        for v, value in zip([*own, *self.variables], [*state, *values]):
            v.assign(value)


def recorded(monitor):
    return monitor.history["step"].tolist()


@EVERY
@IN_EACH_WAY
@pytest.mark.parametrize("built", [False, True])
def test_a_loop_is_recorded_and_not_changed(make, way, built):
    found = []
    for watches in (False, True):
        loop = Loop(make(), way)
        if built:
            loop.optimizer.build(loop.variables)
        seen = BlockMonitor(every=2)
        with seen.watch(loop.optimizer) if watches else contextlib.nullcontext():
            loop(5)
        loop(2)
        found.append(arrays([*loop.variables, *loop.optimizer.variables]))
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert recorded(seen) == [0, 2, 4] and seen.blocks == ["a", "a2"]
    history = seen.history
    np.testing.assert_allclose(history["gradient_norm"][0], [26**0.5, 2], rtol=1e-5)
    np.testing.assert_allclose(history["weight_norm"][0], [26**0.5, 2], rtol=1e-5)
    if make in (MAKE["SGD"], MAKE["SGDNG"]):
        np.testing.assert_allclose(
            history["relative_step"] * history["weight_norm"],
            0.1 * history["factor"] * history["gradient_norm"],
            rtol=1e-3,
        )
    assert not {"apply", "_watch", "_scaled"} & set(vars(loop.optimizer))


@IN_EACH_WAY
def test_all_that_fit_writes_is_written(way, tmp_path):
    pytest.importorskip("matplotlib")
    loop = Loop(SGDNG(0.1), way)
    seen = BlockMonitor(tmp_path)
    with seen.watch(loop.optimizer) as entered:
        loop(3)
    assert entered is seen
    read = BlockMonitor.read(tmp_path / "blocks.csv")
    for name, values in seen.history.items():
        np.testing.assert_allclose(read.history[name], values, rtol=1e-6)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    seen.plot(tmp_path / "picture.png")


@IN_EACH_WAY
def test_several_optimizers_are_one_record_a_step(way):
    first = Loop(SGDNG(0.1), way)
    second = Loop(SGD(0.1), way, weights("b"))
    seen = BlockMonitor()
    with seen.watch(first.optimizer, second.optimizer):
        first(2)
        second(1)
        first(1)
        second(1)
    assert recorded(seen) == [0, 1, 2] and not seen.history["run"].any()
    assert seen.blocks == ["a", "a2", "b", "b2"]
    norms = seen.history["gradient_norm"]
    assert not np.isnan(norms[:2]).any() and np.isnan(norms[2, 2:]).all()
    np.testing.assert_allclose(norms[0, 2:], [26**0.5, 2], rtol=1e-5)


@IN_EACH_WAY
def test_loss_scaling_is_looked_behind(way):
    if (BACKEND, way) == ("jax", "eager"):
        pytest.skip("Keras's own raises")
    inner = SGDNG(0.1)
    loop = Loop(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0), way)
    seen = BlockMonitor()
    with seen.watch(loop.optimizer):
        loop(3)
    assert recorded(seen) == [0, 1, 2]
    half = [26**0.5 / 2, 1]
    np.testing.assert_allclose(seen.history["gradient_norm"][0], half, rtol=1e-5)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)
def test_the_parts_of_a_multi_optimizer_are_looked_behind():
    one, other = SGDNG(0.1), SGD(0.1)
    both = keras.optimizers.MultiOptimizer(
        lambda v: one if v.path.startswith("a/") else other
    )
    loop = Loop(both)
    seen = BlockMonitor()
    with seen.watch(both):
        loop(2)
    assert recorded(seen) == [0, 1] and sorted(seen.blocks) == ["a", "a2"]
    assert not np.isnan(seen.history["factor"]).any()
    assert not {"build", "apply"} & set(vars(both))


@IN_EACH_WAY
@pytest.mark.parametrize("make", [MAKE["SGD"], MAKE["SGDNG"]], ids=["SGD", "SGDNG"])
def test_only_updates_count_when_gradients_are_accumulated(make, way):
    loop = Loop(make(gradient_accumulation_steps=2), way)
    seen = BlockMonitor(every=2)
    with seen.watch(loop.optimizer):
        loop(8)
    assert recorded(seen) == [0, 2]
    expected = np.hypot(3.5, 4.5), 1.5
    norms = seen.history["gradient_norm"][0]
    np.testing.assert_allclose(norms, [np.hypot(*expected), 2.5], rtol=1e-5)


def scaled():
    return keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=2.0)


@pytest.mark.skipif(BACKEND == "torch", reason="it traces nothing")
@pytest.mark.parametrize("make", [MAKE["SGD"], scaled], ids=["SGD", "LossScale"])
def test_what_was_traced_before_is_a_warning(make):
    loop = Loop(make(), "function")
    loop(1)
    seen = BlockMonitor(every=2)
    first_time = pytest.warns(UserWarning, match="call it for the first time")
    with first_time, seen.watch(loop.optimizer):
        loop(2)
    assert recorded(seen) == []
    with warnings.catch_warnings():  # too few steps to say so
        warnings.simplefilter("error", UserWarning)
        with seen.watch(loop.optimizer):
            loop(1)


@IN_EACH_WAY
def test_what_was_traced_within_records_nothing_after_it_and_again_in_the_next(way):
    loop = Loop(SGDNG(0.1), way)
    seen = BlockMonitor()
    with seen.watch(loop.optimizer):
        loop(2)
    loop(2)
    assert recorded(seen) == [0, 1]
    with seen.watch(loop.optimizer):
        loop(2)
    assert recorded(seen) == [0, 1, 4, 5] and not seen.history["run"].any()


@IN_EACH_WAY
def test_contexts_within_each_other(way):
    loop = Loop(SGDNG(0.1), way)
    seen, other = BlockMonitor(), BlockMonitor(every=2)
    with seen.watch(loop.optimizer), seen.watch(loop.optimizer):
        with other.watch(loop.optimizer):
            loop(3)
        loop(1)
    loop(1)
    loop.function = None
    with other.watch(loop.optimizer):  # alone
        loop(2)
    with seen.watch(loop.optimizer), other.watch(loop.optimizer):
        loop.function = None
        loop(2)
    assert recorded(seen) == [0, 1, 2, 3, 7, 8]
    assert recorded(other) == [0, 2, 6, 8]
    for name in ("gradient_norm", "factor"):
        a, b = seen.history[name], other.history[name]
        np.testing.assert_allclose(a[[0, 2, 5]], b[[0, 1, 3]], rtol=1e-6)
    assert not {"apply", "_watch"} & set(vars(loop.optimizer))


def test_a_step_that_is_compiled_for_one_monitor_is_another_for_two():
    loop = Loop(SGDNG(0.1))
    inner, outer = BlockMonitor(), BlockMonitor()
    with inner.watch(loop.optimizer):
        loop(4)
    with outer.watch(loop.optimizer), inner.watch(loop.optimizer):
        loop(4)
    assert recorded(outer) == [4, 5, 6, 7]
    a, b = (m.history["gradient_norm"][-4:] for m in (inner, outer))
    np.testing.assert_array_equal(a, b)


def test_an_exception_within_leaves_nothing():
    loop = Loop(SGD(0.1))
    seen = BlockMonitor()
    with pytest.raises(KeyError), seen.watch(loop.optimizer):
        loop(2)
        raise KeyError
    loop(2)
    assert recorded(seen) == [0, 1]
    assert "apply" not in vars(loop.optimizer)


def test_a_run_that_begins_again(tmp_path):
    loop = Loop(SGD(0.1))
    seen = BlockMonitor(tmp_path, tensorboard=False)
    with seen.watch(loop.optimizer):
        loop(3)
        loop.optimizer._iterations.assign(1)  # as from a checkpoint
        loop(2)
    again = Loop(SGD(0.1))
    with seen.watch(again.optimizer):
        again(1)
    assert recorded(seen) == [0, 1, 2, 1, 2, 0]
    assert seen.history["run"].tolist() == [0, 0, 0, 1, 1, 2]
    read = BlockMonitor.read(tmp_path / "blocks.csv").history
    for name, values in seen.history.items():
        np.testing.assert_allclose(read[name], values, rtol=1e-6)


def test_a_fit_with_another_monitor_and_one_that_holds_the_optimizer_elsewhere(rng):
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), SGDNG(0.1), jit_compile=False)
    data = small_data(rng)
    outer, inner = BlockMonitor(every=2), BlockMonitor(every=3)
    with outer.watch(model.optimizer):
        model.fit(*data, batch_size=8, verbose=0, callbacks=[inner])
    model.fit(*data, batch_size=8, verbose=0, callbacks=[inner])
    assert recorded(outer) == [0, 2, 4, 6]
    assert recorded(inner) == [0, 3, 6, 9, 12, 15]
    a, b = (m.history["gradient_norm"] for m in (outer, inner))
    np.testing.assert_allclose(a[[0, 3]], b[[0, 2]], rtol=1e-5)


def test_a_monitor_that_is_a_callback_of_a_fit_it_watches_records_once(rng):
    model = compiled(small_model(), SGDNG(0.1), jit_compile=False)
    seen = BlockMonitor(every=2)
    options = {"batch_size": 8, "verbose": 0, "callbacks": [seen]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with seen.watch(model.optimizer):
            model.fit(*small_data(rng), **options)
        model.fit(*small_data(rng), **options)
    assert recorded(seen) == list(range(0, 16, 2)) and not seen.history["run"].any()
    assert len(seen.blocks) == 3


def test_what_is_no_optimizer_is_an_error():
    seen = BlockMonitor()
    with pytest.raises(ValueError, match="one optimizer or several"), seen.watch():
        pass
    wrong = pytest.raises(TypeError, match=r"takes Keras optimizers. Received: 'adam'")
    with wrong, seen.watch(SGD(0.1), "adam"):
        pass


@TENSORFLOW
def test_a_function_that_xla_compiles_is_an_error():
    import tensorflow as tf

    loop = Loop(SGD(0.1))
    loop.optimizer.build(loop.variables)
    function = tf.function(loop.eager, jit_compile=True)
    wrong = pytest.raises(RuntimeError, match="that XLA compiles")
    with wrong, BlockMonitor().watch(loop.optimizer):
        function(tf.constant(1.0))
    function(tf.constant(1.0))  # without it, as ever
    compiled_step = Loop(SGDNG(0.1, jit_compile=True))  # of ours, eager: fine
    seen = BlockMonitor()
    with seen.watch(compiled_step.optimizer):
        compiled_step(3)
    assert recorded(seen) == [0, 1, 2]


@TENSORFLOW
@EVERY
@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_on_two_replicas_there_is_one_record_a_step(make, in_function, every):
    import tensorflow as tf
    from test_replicas import two_replicas

    strategy = two_replicas()
    with strategy.scope():
        loop = Loop(make())
        loop.optimizer.build(loop.variables)

    def step(more):
        strategy.run(
            lambda: loop.optimizer.apply(
                [tf.convert_to_tensor(v.value) + more for v in loop.variables],
                loop.variables,
            )
        )

    if in_function:
        step = tf.function(step)
    seen = BlockMonitor(every=every)
    with seen.watch(loop.optimizer):
        for i in range(4):
            step(tf.constant(float(i)))
    assert recorded(seen) == list(range(0, 4, every))
    norms = seen.history["gradient_norm"][0]
    np.testing.assert_allclose(norms, [2 * 26**0.5, 4], rtol=1e-5)


@TENSORFLOW
def test_an_optimizer_that_is_built_on_two_replicas():
    """Eagerly: in a `tf.function`, Keras's own raises."""
    import tensorflow as tf
    from test_replicas import two_replicas

    strategy = two_replicas()
    with strategy.scope():
        loop = Loop(SGD(0.1, momentum=0.9))
    seen = BlockMonitor()
    with seen.watch(loop.optimizer):
        for _ in range(2):
            strategy.run(loop.eager, args=(tf.constant(0.0),))
    assert recorded(seen) == [0, 1]
    norms = seen.history["gradient_norm"][0]
    np.testing.assert_allclose(norms, [2 * 26**0.5, 4], rtol=1e-5)
