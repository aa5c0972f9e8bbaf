"""`BlockMonitor` in a `fit` that is not the simplest: on every backend."""

import copy
import pickle
import types
import warnings

import keras
import numpy as np
import pytest
from helpers import arrays, assert_same_run, compiled, small_data, small_model
from keras import ops

from keras_bng import SGDNG, AdamNG, BlockMonitor
from keras_bng.tools.watched import inner_optimizers, optimizers_of

BACKEND = keras.backend.backend()
NOT_ON_JAX = pytest.mark.skipif(
    BACKEND == "jax", reason="Keras's own training step cannot do it on JAX"
)
SGD = keras.optimizers.SGD


class Call(keras.callbacks.Callback):
    """Calls a function with the model when an epoch begins."""

    def __init__(self, epoch, function):
        super().__init__()
        self.epoch, self.function = epoch, function

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            self.function(self.model)


def freeze(model):
    model.layers[0].trainable = False
    model.make_train_function(force=True)


def half_as_fast(model):
    """Another training step, which `make_train_function` has to be called for."""
    plain = type(model).train_step

    def train_step(self, *args, **kwargs):
        *state, (x, y) = args
        return plain(self, *state, (0.5 * x, y), **kwargs)

    model.train_step = types.MethodType(train_step, model)
    model.make_train_function(force=True)


# How many monitors stand before the callback that makes a new training function, and
# how many behind it.
PLACES = pytest.mark.parametrize("before, behind", [(1, 0), (0, 1), (2, 0), (1, 1)])


@PLACES
@pytest.mark.parametrize(
    "change", [pytest.param(freeze, marks=NOT_ON_JAX), half_as_fast]
)
def test_a_training_function_that_somebody_else_made_stays(change, before, behind, rng):
    data = small_data(rng)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    found = []
    for watches in (False, True):
        keras.utils.set_random_seed(1)
        model = compiled(small_model(), SGD(0.1), jit_compile=BACKEND == "jax")
        monitors = [BlockMonitor(every=3 + 2 * i) for i in range(before + behind)]
        callbacks = [*monitors[:before], Call(1, change), *monitors[before:]]
        if not watches:
            callbacks = [Call(1, change)]
        model.fit(*data, epochs=3, callbacks=callbacks, **options)
        assert not hasattr(model.train_function, "__self__")
        first = arrays(model.layers[0].variables)
        model.fit(*data, **options)
        if change is freeze:
            for a, b in zip(first, arrays(model.layers[0].variables)):
                np.testing.assert_array_equal(a, b)
        found.append(arrays(model.variables))
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for i, monitor in enumerate(monitors):
        assert monitor.history["step"].tolist() == list(range(0, 24, 3 + 2 * i))
        assert not monitor.history["run"].any()
    if change is freeze:
        steps = monitors[0].history["relative_step"]
        assert (steps[:3] > 0).all() and not steps[3:, 0].any()


@pytest.mark.parametrize("count", [1, 2])
def test_a_training_function_that_was_made_at_the_end_stays(count, rng):
    data = small_data(rng)
    model = compiled(small_model(), SGD(0.1))
    made = []

    def remake(epoch, logs=None):
        model.make_train_function(force=True)
        made.append(model.train_function)

    callbacks = [BlockMonitor(every=3) for _ in range(count)]
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=remake))
    model.fit(*data, batch_size=8, verbose=0, callbacks=callbacks)
    assert model.train_function is made[-1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_that_is_compiled_between_two_fits(count, rng):
    data = small_data(rng)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    found = []
    for monitors in ([], [BlockMonitor() for _ in range(count)]):
        keras.utils.set_random_seed(1)
        optimizer = SGD(0.1)
        model = compiled(small_model(), optimizer)
        model.fit(*data, callbacks=monitors, **options)
        if BACKEND != "jax":  # where an optimizer wants all its variables
            model.layers[0].trainable = False
        compiled(model, optimizer)
        model.fit(*data, callbacks=monitors, **options)
        found.append(arrays(model.variables))
    for a, b in zip(*found):
        assert_same_run(a, b)
    for monitor in monitors:
        assert monitor.history["step"].tolist() == list(range(16))
        assert not monitor.history["run"].any()


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has it not on torch")
def test_a_model_that_is_compiled_for_several_steps_in_one_execution(rng):
    data = small_data(rng)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    optimizer = SGD(0.1)
    model = compiled(small_model(), optimizer)
    seen = BlockMonitor(every=3)
    model.fit(*data, callbacks=[seen], **options)
    compiled(model, optimizer, steps_per_execution=4)
    model.fit(*data, callbacks=[seen], **options)
    assert seen.history["step"].tolist() == [0, 3, 6, 9, 15]


def test_a_monitor_that_refused_a_model_is_as_it_was(rng):
    data = small_data(rng)
    model, other = (compiled(small_model(), SGD(0.1)) for _ in range(2))
    seen = BlockMonitor()
    model.fit(*data, verbose=0, callbacks=[seen])
    names = list(seen.blocks)
    with pytest.raises(ValueError, match="stays with one model"):
        other.fit(*data, verbose=0, callbacks=[seen])
    assert seen.blocks == names and len(seen.history["step"]) == 2
    assert not hasattr(other.train_function, "__self__")
    model.fit(*data, verbose=0, callbacks=[seen])
    assert seen.history["step"].tolist() == [0, 1, 2, 3]


# Optimizers of the model's own.


def gradients(loss, variables):
    """Of a function, on TensorFlow and torch."""
    if BACKEND == "torch":
        import torch

        return torch.autograd.grad(loss(), [v.value for v in variables])
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, [v.value for v in variables])


def apply(optimizer, found, variables):
    if BACKEND == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(found, variables)
    else:
        optimizer.apply(found, variables)


class Gan(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self, first, second, later=0):
        super().__init__()
        self.nets = [
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="dense")])
            for _ in range(2)
        ]
        self.first_optimizer, self.others = first, {"second": [second]}
        self.later, self.batches, self.built = later, 0, True

    def train_step(self, data):
        x, _ = data
        self.batches += 1  # in a graph: once
        pairs = list(zip(self.nets, (self.first_optimizer, self.others["second"][0])))
        for net, optimizer in pairs[: 2 if self.batches > self.later else 1]:
            variables = net.trainable_variables
            found = gradients(lambda: ops.mean((net(x) - 1.0) ** 2), variables)  # noqa: B023
            apply(optimizer, found, variables)
        return {"loss": ops.mean(net(x))}


def fit_gan(first, second, rng, every=1, **kwargs):
    model = Gan(first, second, **kwargs)
    model.compile(run_eagerly=bool(kwargs) and BACKEND == "tensorflow")
    seen = BlockMonitor(every=every)
    data = small_data(rng)
    model.fit(*data, batch_size=8, verbose=0, callbacks=[seen])
    return model, seen


@NOT_ON_JAX
def test_optimizers_of_the_models_own(rng):
    model, seen = fit_gan(SGDNG(0.1), SGD(0.1), rng, every=2)
    assert seen.history["step"].tolist() == [0, 2, 4, 6]
    names = [net.layers[0].kernel.path.rpartition("/")[0] for net in model.nets]
    assert seen.blocks == names
    factors = seen.history["factor"]
    assert (factors[:, 0] != 1).all() and (factors[:, 1] == 1).all()
    assert not np.isnan(seen.history["gradient_norm"]).any()


@NOT_ON_JAX
def test_equal_names_of_two_optimizers_are_told_apart(rng):
    first, second = SGDNG(0.1, blocks=lambda _: "all"), SGD(0.1)
    model = Gan(first, second)
    model.compile()
    seen = BlockMonitor(blocks=lambda _: "all")
    model.fit(*small_data(rng), batch_size=8, verbose=0, callbacks=[seen])
    assert seen.blocks == ["all", "all#2"]
    assert (seen.history["factor"][:, 0] != 1).all()


@NOT_ON_JAX
def test_an_optimizer_that_comes_later_has_no_values_before(rng):
    _, seen = fit_gan(SGD(0.1), SGD(0.1), rng, later=3)
    norms = seen.history["gradient_norm"]
    assert len(seen.blocks) == 2 and norms.shape == (8, 2)
    assert np.isnan(norms[:3, 1]).all() and not np.isnan(norms[3:]).any()
    assert not np.isnan(norms[:, 0]).any()


@NOT_ON_JAX
def test_an_optimizer_that_pauses_has_no_values_then(rng):
    """It accumulates over two steps, the other one updates in each."""
    second = SGD(0.1, gradient_accumulation_steps=2)
    _, seen = fit_gan(SGD(0.1), second, rng)
    norms = seen.history["gradient_norm"]
    assert seen.history["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.isnan(norms[:, 1]).tolist() == [False, True] * 3 + [False]
    assert not np.isnan(norms[:, 0]).any()


@NOT_ON_JAX
def test_an_optimizer_that_cannot_be_seen_is_a_warning(rng):
    model = Gan(SGD(0.1), SGD(0.1))
    model.compile()
    hidden = types.SimpleNamespace(first=model.first_optimizer, second=model.others)
    plain = type(model).train_step

    class Hidden(Gan):
        def train_step(self, data):
            names = "first_optimizer", "others"
            for name, value in zip(names, (hidden.first, hidden.second)):
                object.__setattr__(self, name, value)
            try:
                return plain(self, data)
            finally:
                for name in names:
                    object.__delattr__(self, name)

    model = Hidden(None, None)
    model.compile()
    data = small_data(rng)
    seen = BlockMonitor(every=4)
    with pytest.warns(UserWarning, match=r"recorded nothing.*monitor\.watch"):
        model.fit(*data, batch_size=8, verbose=0, callbacks=[seen])
    assert not len(seen.history["step"])
    with warnings.catch_warnings():  # too short to say so
        warnings.simplefilter("error", UserWarning)
        model.fit(*data, batch_size=32, verbose=0, callbacks=[seen])


def test_optimizers_of_a_model_are_found_once():
    model = small_model()
    first, second, third = SGD(0.1), AdamNG(), SGD(0.1)
    model.extra = {"a": [first, (keras.optimizers.LossScaleOptimizer(second), first)]}
    model.third, model.again = third, third
    model.compile(optimizer=first)
    found = optimizers_of(model)
    assert found[0] is first and len(found) == 3
    assert {id(o) for o in found} == {id(first), id(second), id(third)}
    assert optimizers_of(keras.Sequential()) == []
    assert inner_optimizers(first) == [first]


# A model that is not built yet.


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(8, "tanh")
        self.two = keras.layers.Dense(3)

    def call(self, x):
        return self.two(self.one(x))


UNBUILT = {
    "Sequential": lambda: keras.Sequential(
        [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    ),
    "subclass": Subclassed,
}


@pytest.mark.parametrize("make", UNBUILT.values(), ids=UNBUILT)
@pytest.mark.parametrize("optimizer", [SGD, SGDNG])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_model_that_is_not_built_yet(make, optimizer, run_eagerly, rng):
    data = small_data(rng)
    found = []
    for seen in (None, BlockMonitor(every=3)):
        keras.utils.set_random_seed(1)
        model = compiled(make(), optimizer(0.1), run_eagerly=run_eagerly)
        for _ in range(2):
            model.fit(
                *data,
                batch_size=8,
                shuffle=False,
                verbose=0,
                callbacks=[seen] if seen else [],
            )
        found.append(arrays(model.variables + model.optimizer.variables))
    assert len(found[0]) == len(found[1]) > 4
    for a, b in zip(*found):
        assert_same_run(a, b)
    assert seen.history["step"].tolist() == [0, 3, 6, 9, 12, 15]
    assert len(seen.blocks) == 2
    assert not np.isnan(seen.history["gradient_norm"]).any()


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_without_a_rule_the_gradient_is_the_one_before_l2(run_eagerly, rng):
    data = small_data(rng)
    norms = []
    for l2 in (None, 10.0):
        keras.utils.set_random_seed(1)
        optimizer = SGDNG(0.0, rule=None, l2=l2)
        model = compiled(small_model(), optimizer, run_eagerly=run_eagerly)
        seen = BlockMonitor()
        model.fit(*data, batch_size=32, shuffle=False, verbose=0, callbacks=[seen])
        norms.append(seen.history["gradient_norm"])
    assert (norms[0] > 0).all()
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)


# Copies and restarts.


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_has_records_and_settings_and_goes_its_own_way(copied, rng, tmp_path):
    data = small_data(rng)
    options = {"batch_size": 8, "verbose": 0}
    empty = copied(BlockMonitor(tmp_path / "new", every=2, blocks="variable"))
    assert (empty.every, empty.log_dir) == (2, tmp_path / "new")
    model = compiled(small_model(), SGD(0.1))
    seen = BlockMonitor(tmp_path, every=2)
    model.fit(*data, callbacks=[seen], **options)
    other = copied(seen)
    assert other.blocks == seen.blocks
    for name, values in seen.history.items():
        np.testing.assert_array_equal(other.history[name], values)
    model.fit(*data, callbacks=[other], **options)
    assert seen.history["step"].tolist() == [0, 2, 4, 6]
    assert other.history["step"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    model.fit(*data, callbacks=[seen, other], **options)
    read = BlockMonitor.read(tmp_path / "blocks.csv").history
    both = sorted([16, 18, 20, 22] * 2 + list(range(0, 16, 2)))
    assert sorted(read["step"].tolist()) == both
    for run in set(read["run"].tolist()):
        assert (np.diff(read["step"][read["run"] == run]) > 0).all()


def test_steps_are_counted_after_a_backup_was_restored(rng, tmp_path):
    data = small_data(rng, count=7 * 8)

    def fit(callbacks, epochs):
        keras.utils.set_random_seed(1)
        model = compiled(small_model(), SGD(0.1))
        model.optimizer.build(model.trainable_variables)
        model.fit(*data, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)

    def backup(**options):
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", **options)

    fit([backup(delete_checkpoint=False)], 1)
    seen = BlockMonitor(every=5)
    fit([seen, backup()], 3)
    assert seen.history["step"].tolist() == [10, 15, 20]
