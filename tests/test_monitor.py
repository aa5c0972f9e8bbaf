"""`BlockMonitor`, on every backend."""

import builtins
import csv
import json
import sys

import keras
import numpy as np
import pytest
from helpers import arrays, assert_same_run, compiled, small_data, small_model
from keras import ops
from reference import block_norm

import keras_bng
from keras_bng import SGDNG, Adaptive, BlockMonitor
from keras_bng.tools.files import COLUMNS

BACKEND = keras.backend.backend()
MAKE = {
    "SGD": lambda **k: keras.optimizers.SGD(0.1, **k),
    "SGDNG": lambda **k: SGDNG(0.1, momentum=0.0, **k),
    "adaptive": lambda **k: SGDNG(0.1, momentum=0.0, rule=Adaptive(0.02), **k),
    "rule=None": lambda **k: SGDNG(0.1, momentum=0.0, rule=None, **k),
}
EVERY = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
COMPILED = pytest.mark.parametrize(
    "jit_compile", [False, True] if BACKEND != "torch" else [False]
)


def watched(make, rng, epochs=2, every=1, jit_compile=False, monitors=True, **options):
    """A model after 4 steps an epoch, and its monitor."""
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), make(), jit_compile=jit_compile, **options)
    seen = BlockMonitor(every=every)
    data = small_data(np.random.default_rng(0))
    model.fit(
        *data,
        batch_size=len(data[0]) // 4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[seen] if monitors else [],
    )
    return model, seen


@EVERY
@COMPILED
def test_with_plain_sgd_the_step_is_rate_times_factor_times_gradient(
    make, jit_compile, rng
):
    model, seen = watched(make, rng, jit_compile=jit_compile)
    history = seen.history
    assert history["step"].tolist() == list(range(8))
    assert seen.blocks == [
        block.name for block in keras_bng.partition(model.trainable_variables, "layer")
    ]
    np.testing.assert_allclose(
        history["relative_step"] * history["weight_norm"],
        0.1 * history["factor"] * history["gradient_norm"],
        rtol=2e-3,
        atol=1e-7,
    )
    assert (history["gradient_norm"] > 0).all() and not history["skipped"].any()
    if isinstance(model.optimizer, SGDNG) and model.optimizer.rule is not None:
        assert not np.allclose(history["factor"], 1)
    else:
        np.testing.assert_array_equal(history["factor"], 1)


def test_the_gradient_is_the_one_of_the_loss(rng):
    x, y = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 1))
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, use_bias=False, name="only")]
    )
    w = np.array(ops.convert_to_numpy(model.trainable_variables[0]), "float64")
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    seen = BlockMonitor()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[seen])
    gradient = 2 / 8 * x.T @ (x @ w - y)
    history = seen.history
    assert history["gradient_norm"][0, 0] == pytest.approx(
        block_norm([gradient]), rel=1e-5
    )
    assert history["weight_norm"][0, 0] == pytest.approx(block_norm([w]), rel=1e-5)


@EVERY
def test_watching_changes_nothing_and_leaves_nothing(make, rng):
    plain, _ = watched(make, rng, monitors=False)
    model, _ = watched(make, rng)
    for a, b in zip(*map(arrays, (plain.variables, model.variables))):
        assert_same_run(a, b)
    assert len(model.optimizer.variables) == len(plain.optimizer.variables)
    assert set(vars(model.optimizer)) == set(vars(plain.optimizer))
    assert not hasattr(model.train_function, "__self__")  # the model's own again


@pytest.mark.parametrize("name", ["SGD", "SGDNG"])
def test_only_every_so_many_updates(name, rng):
    _, seen = watched(MAKE[name], rng, every=3)
    _, all_of_them = watched(MAKE[name], rng)
    assert seen.history["step"].tolist() == [0, 3, 6]
    for key, values in all_of_them.history.items():
        np.testing.assert_allclose(seen.history[key], values[::3], rtol=1e-5)


@EVERY
@COMPILED
def test_steps_that_are_not_recorded_are_not_watched(make, jit_compile, rng):
    _, seen = watched(make, rng, every=5, jit_compile=jit_compile)
    assert seen.history["step"].tolist() == [0, 5]
    assert [part.last()[0] for part in seen._stand_in.group.parts] == [-1]  # 5 was read


@pytest.mark.parametrize("name", ["SGD", "SGDNG"])
def test_accumulated_gradients(name, rng):
    """The accumulated gradient, once an update, is that of the larger batch."""
    keras.utils.set_random_seed(1)
    data = small_data(np.random.default_rng(0))
    found = []
    for steps, batch in ((None, len(data[0])), (4, len(data[0]) // 4)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input(data[0].shape[1:]), keras.layers.Dense(4)]
        )
        optimizer = MAKE[name](gradient_accumulation_steps=steps)
        model.compile(optimizer=optimizer, loss="mse")
        seen = BlockMonitor()
        x, y = data[0], np.zeros((len(data[0]), 4))
        model.fit(
            x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0, callbacks=[seen]
        )
        found.append(seen.history)
    assert found[0]["step"].tolist() == found[1]["step"].tolist() == [0, 1, 2]
    for key in ("gradient_norm", "relative_step", "weight_norm"):
        np.testing.assert_allclose(found[0][key], found[1][key], rtol=1e-4)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has it not on torch")
def test_several_steps_in_one_execution(rng):
    _, seen = watched(MAKE["SGDNG"], rng, every=2, steps_per_execution=4)
    _, alone = watched(MAKE["SGDNG"], rng, every=2)
    # The last one that was due in each execution.
    assert seen.history["step"].tolist() == [2, 6]
    np.testing.assert_allclose(
        seen.history["gradient_norm"], alone.history["gradient_norm"][[1, 3]], rtol=1e-4
    )


def test_a_gradient_that_is_not_finite_is_a_skip(rng):
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), MAKE["SGDNG"]())
    x, y = small_data(rng)
    x = np.array(x)
    x[len(x) // 2] = np.nan
    seen = BlockMonitor()
    half = len(x) // 2
    model.fit(x, y, batch_size=half, shuffle=False, verbose=0, callbacks=[seen])
    np.testing.assert_array_equal(seen.history["skipped"][0], 0)
    np.testing.assert_array_equal(seen.history["skipped"][1], 1)
    np.testing.assert_array_equal(seen.history["relative_step"][1], 0)


def test_loss_scaling(rng):
    optimizer = keras.optimizers.LossScaleOptimizer(MAKE["SGDNG"]())
    _, scaled = watched(lambda: optimizer, rng, epochs=1)
    _, plain = watched(MAKE["SGDNG"], rng, epochs=1)
    np.testing.assert_allclose(
        scaled.history["gradient_norm"], plain.history["gradient_norm"], rtol=1e-3
    )


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)
@pytest.mark.parametrize("accumulation", [None, 2])
def test_two_optimizers_in_one(accumulation, rng):
    model = small_model()
    first = model.layers[0]
    both = keras.optimizers.MultiOptimizer(
        lambda v: ours if any(v is w for w in first.trainable_variables) else stock
    )
    ours = MAKE["SGDNG"]()
    stock = MAKE["SGD"](gradient_accumulation_steps=accumulation)
    model.compile(optimizer=both, loss=keras.losses.SparseCategoricalCrossentropy(True))
    data = small_data(rng)
    seen = BlockMonitor()
    model.fit(*data, epochs=2, batch_size=len(data[0]), verbose=0, callbacks=[seen])
    if accumulation:  # until both have updated, there is nothing to record
        assert len(seen.history["step"]) == 1
        return
    assert sorted(seen.blocks) == sorted(
        block.name for block in keras_bng.partition(model.trainable_variables, "layer")
    )
    assert len(seen.history["step"]) == 2
    factors = dict(zip(seen.blocks, seen.history["factor"][0]))
    mine = keras_bng.partition(first.trainable_variables, "layer")[0].name
    assert factors.pop(mine) != 1 and set(factors.values()) == {1.0}


def test_it_can_be_used_again_and_after_a_fit_without_it(rng):
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), MAKE["SGD"]())
    data = small_data(rng)
    options = {"batch_size": len(data[0]) // 2, "verbose": 0}
    seen = BlockMonitor()
    model.fit(*data, **options)
    model.fit(*data, callbacks=[seen], **options)
    model.fit(*data, **options)
    model.fit(*data, callbacks=[seen], **options)
    assert seen.history["step"].tolist() == [2, 3, 6, 7]
    other = keras.Sequential([keras.Input(data[0].shape[1:]), keras.layers.Dense(9)])
    other.compile(loss=keras.losses.SparseCategoricalCrossentropy(True))
    with pytest.raises(ValueError, match="stays with one model"):
        other.fit(*data, callbacks=[seen], **options)


def test_an_interrupted_fit_leaves_no_hook_for_the_next(rng):
    model = compiled(small_model(), MAKE["SGDNG"]())
    x, y = small_data(rng)
    seen = BlockMonitor()

    def interrupt(batch, logs=None):
        raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0, callbacks=[seen, stop])
    model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[seen])
    assert not {"_found", "apply"} & set(vars(model.optimizer))
    assert not hasattr(model.train_function, "__self__")
    assert seen.history["step"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["SGD", "SGDNG"])
def test_two_monitors_at_once_see_the_same(name, rng):
    model = compiled(small_model(), MAKE[name]())
    data = small_data(rng)
    often, seldom = BlockMonitor(every=2), BlockMonitor(every=3)
    model.fit(*data, batch_size=8, verbose=0, callbacks=[often, seldom])
    assert often.history["step"].tolist() == [0, 2, 4, 6]
    assert seldom.history["step"].tolist() == [0, 3, 6]
    for key, values in seldom.history.items():
        np.testing.assert_allclose(often.history[key][[0, 3]], values[[0, 2]])
    assert not hasattr(model.train_function, "__self__")


@EVERY
def test_steps_that_run_eagerly(make, rng):
    """Also when a step was compiled before, without the monitor."""
    data = small_data(rng)
    found = []
    for run_eagerly in (False, True):
        keras.utils.set_random_seed(1)
        model = compiled(small_model(), make(), run_eagerly=run_eagerly)
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        model.fit(*data, **options)
        for _ in range(2):
            seen = BlockMonitor(every=2)
            model.fit(*data, callbacks=[seen], **options)
        found.append(seen.history)
    assert found[0]["step"].tolist() == found[1]["step"].tolist() == [8, 10]
    for key, values in found[0].items():
        np.testing.assert_allclose(found[1][key], values, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(BACKEND == "torch", reason="it traces nothing")
def test_a_training_function_is_traced_once_for_each_kind_of_step(rng):
    calls = []

    class Counted(keras.Sequential):
        def call(self, *args, **kwargs):
            calls.append(len(calls))
            return super().call(*args, **kwargs)

    model = Counted([keras.Input((6,)), keras.layers.Dense(3)])
    compiled(model, MAKE["SGDNG"](), jit_compile=BACKEND == "jax")
    x, y = small_data(rng)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    seen = BlockMonitor(every=3)
    model.fit(x, y, callbacks=[seen], **options)
    count = len(calls)
    model.fit(x, y, callbacks=[seen], **options)
    model.fit(x, y, **options)
    assert len(calls) == count
    assert seen.history["step"].tolist() == [0, 3, 6, 9, 12, 15]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.distribute")
@pytest.mark.parametrize("name", ["SGD", "SGDNG"])
def test_on_two_replicas(name, rng):
    from test_replicas import two_replicas

    x, y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 4))
    found = []
    for strategy in (None, two_replicas()):
        keras.utils.set_random_seed(1)

        def make():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            model.compile(optimizer=MAKE[name](), loss="mse", jit_compile=False)
            return model

        if strategy is None:
            model = make()
        else:
            with strategy.scope():
                model = make()
        seen = BlockMonitor(every=2)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[seen])
        found.append(seen.history)
    assert found[1]["step"].tolist() == [0, 2]
    for key in ("gradient_norm", "weight_norm", "factor", "relative_step"):
        np.testing.assert_allclose(found[0][key], found[1][key], rtol=1e-4)


def test_files_have_what_memory_has(rng, tmp_path):
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), MAKE["SGDNG"]())
    seen = BlockMonitor(tmp_path / "logs", every=2)
    data = small_data(rng)
    options = {"batch_size": len(data[0]) // 4, "verbose": 0}
    model.fit(*data, callbacks=[seen], **options)
    read = BlockMonitor.read(tmp_path / "logs" / "blocks.csv")
    assert read.blocks == seen.blocks
    for key, values in seen.history.items():
        np.testing.assert_allclose(read.history[key], values, rtol=1e-6)
    with open(tmp_path / "logs" / "blocks.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * len(seen.blocks)


def test_files_take_any_name_of_a_block_and_any_number(rng, tmp_path):
    name = 'all, "50 %s"'
    model = compiled(small_model(), MAKE["SGD"]())
    seen = BlockMonitor(tmp_path, blocks=lambda _: name, tensorboard=False)
    x, y = small_data(rng)
    x[0] = np.nan
    model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[seen])
    read = BlockMonitor.read(tmp_path / "blocks.csv")
    assert read.blocks == seen.blocks == [name]
    assert np.isnan(read.history["gradient_norm"]).all()
    for key, values in seen.history.items():  # all digits of a float32
        np.testing.assert_array_equal(
            read.history[key].astype("float32"), values.astype("float32")
        )


def test_scalars_for_tensorboard(rng, tmp_path):
    loading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader"
    )
    model = compiled(small_model(), MAKE["SGDNG"]())
    seen = BlockMonitor(tmp_path, every=2)
    data = small_data(rng)
    model.fit(*data, batch_size=len(data[0]) // 4, verbose=0, callbacks=[seen])
    (path,) = tmp_path.glob("events.out.tfevents.*")
    found = {}
    for event in loading.LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if not value.HasField("image"):
                found[event.step, value.tag] = value.simple_value
    tags = {f"{name}/{block}" for name in COLUMNS for block in seen.blocks}
    assert {tag for _, tag in found} == tags and {s for s, _ in found} == {0, 2}
    first = seen.blocks[0]
    assert found[2, f"gradient_norm/{first}"] == pytest.approx(
        float(seen.history["gradient_norm"][1, 0])
    )


def test_a_killed_process_costs_no_record(rng, tmp_path):
    path = tmp_path / "blocks.csv"
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = compiled(small_model(), MAKE["SGD"]())
        seen = BlockMonitor(tmp_path, tensorboard=False)
        x, y = small_data(rng)

        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 1:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=len(x) // 4, verbose=0, callbacks=[seen, Kill()])
        lines = path.read_text().splitlines()
        assert len(lines) == 1 + 2 * len(seen.blocks)  # flushed as they came
        path.write_text("\n".join(lines[: 1 + len(seen.blocks)]) + "\n1,dense,0.3")
        assert len(BlockMonitor.read(path).history["step"]) == 1
        (tmp_path / "kept.csv").write_text(path.read_text())
        path.unlink()
    path.write_text((tmp_path / "kept.csv").read_text())
    seen = BlockMonitor(tmp_path, tensorboard=False)
    model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[seen])
    text = path.read_text()
    assert "1,dense,0.3" not in text and text.count("gradient_norm") == 1


@pytest.mark.parametrize("package", ["matplotlib", "tensorboard"])
def test_a_missing_package_is_named(package, tmp_path, monkeypatch):
    if package == "tensorboard" and BACKEND == "tensorflow":
        pytest.skip("TensorFlow writes the files itself")
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    seen = BlockMonitor()
    seen.blocks.append("a")
    seen._records.rows, seen._records.runs = [(0, np.ones((len(COLUMNS), 1)))], [0]
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        if package == "matplotlib":
            seen.plot(tmp_path / "x.png")
        else:
            BlockMonitor(tmp_path)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_bad_every_is_an_error(every):
    with pytest.raises(ValueError, match=r"`every` must be an int from 1 on. Received"):
        BlockMonitor(every=every)


def test_bad_blocks_are_an_error():
    with pytest.raises((ValueError, TypeError)):
        BlockMonitor(blocks="layers")


def test_history_is_json_after_tolist(rng):
    _, seen = watched(MAKE["SGD"], rng, every=4)
    text = json.dumps({key: values.tolist() for key, values in seen.history.items()})
    assert json.loads(text)["step"] == [0, 4]
