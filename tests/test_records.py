"""What `BlockMonitor` keeps of several runs, in memory and in files."""

import builtins
import struct
import sys
import warnings

import keras
import numpy as np
import pytest
from helpers import arrays, assert_same_run, compiled, small_data

from keras_bng import SGDNG, AdamNG, BlockMonitor

BACKEND = keras.backend.backend()
SGD = keras.optimizers.SGD


def net(optimizer, name="net"):
    layers = [keras.layers.Dense(8, name="a"), keras.layers.Dense(3, name="b")]
    model = keras.Sequential([keras.Input((6,)), *layers], name=name)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(True))
    return model


def fit(model, monitor, rng, epochs=1):
    """8 steps an epoch."""
    data = small_data(rng)
    model.fit(*data, batch_size=8, epochs=epochs, verbose=0, callbacks=[monitor])


def steps_and_runs(monitor):
    history = monitor.history
    return history["step"].tolist(), history["run"].tolist()


def assert_same(one, other):
    assert one.blocks == other.blocks
    for name, values in one.history.items():
        np.testing.assert_allclose(other.history[name], values, rtol=1e-6)


EIGHT = list(range(8))


def again(model, rng):
    """The model after a checkpoint of its beginning was loaded."""
    for v in model.optimizer.variables:
        if "iteration" in v.path:
            v.assign(0)
    return model


NEXT = {
    "compiled again": lambda model, rng: (model.compile(AdamNG(), "mse"), model)[1],
    "another model": lambda model, rng: net(SGDNG()),
    "an earlier checkpoint": again,
}


@pytest.mark.parametrize("change", NEXT.values(), ids=NEXT)
def test_no_record_of_a_second_run_is_lost(change, rng, tmp_path):
    model = net(AdamNG())
    seen = BlockMonitor(tmp_path)
    fit(model, seen, rng)
    if change is NEXT["compiled again"]:
        model.compile(AdamNG(), keras.losses.SparseCategoricalCrossentropy(True))
    else:
        model = change(model, rng)
    fit(model, seen, rng)
    assert steps_and_runs(seen) == (EIGHT * 2, [0] * 8 + [1] * 8)
    assert not np.isnan(seen.history["gradient_norm"]).any()
    assert_same(seen, BlockMonitor.read(tmp_path / "blocks.csv"))


def test_a_run_that_goes_on_is_one_and_models_in_turns_are_many(rng):
    models = net(SGD(0.1)), net(SGD(0.1))
    seen = BlockMonitor(every=4)
    for model in (models[0], models[0], models[1], models[0]):
        fit(model, seen, rng)
    assert seen.history["step"].tolist() == [0, 4, 8, 12, 0, 4, 16, 20]
    assert seen.history["run"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_a_new_process_goes_on_with_a_run_or_begins_one(rng, tmp_path):
    """A new monitor is what a new process has."""
    path = tmp_path / "blocks.csv"
    model = net(SGD(0.1))
    found = []
    for model_now, step, run in (
        (model, 0, 0),
        (model, 8, 0),  # goes on
        (net(SGD(0.1)), 0, 1),
        (model, 16, 1),  # looks like it: above the last step
    ):
        seen = BlockMonitor(tmp_path, every=4, tensorboard=False)
        fit(model_now, seen, rng)
        assert steps_and_runs(seen) == ([step, step + 4], [run, run])
        found.append(seen.history["gradient_norm"])
    read = BlockMonitor.read(path)
    assert read.history["step"].tolist() == [0, 4, 8, 12, 0, 4, 16, 20]
    assert read.history["run"].tolist() == [0] * 4 + [1] * 4
    np.testing.assert_allclose(
        read.history["gradient_norm"], np.concatenate(found), rtol=1e-6
    )
    assert path.read_text().splitlines()[0].startswith("step,run,block,gradient_norm")


def test_two_monitors_that_write_to_one_file_are_not_mixed(rng, tmp_path):
    model = net(SGD(0.1))
    monitors = [BlockMonitor(tmp_path, every=n, tensorboard=False) for n in (2, 3)]
    data = small_data(rng)
    model.fit(*data, batch_size=32, verbose=0)
    model.fit(*data, batch_size=8, verbose=0, callbacks=monitors)
    read = BlockMonitor.read(tmp_path / "blocks.csv").history
    assert read["step"].tolist() == [2, 4, 6, 8, 3, 6, 9]
    assert read["run"].tolist() == [0] * 4 + [1] * 3


OLD = "step,block,gradient_norm,weight_norm,factor,skipped,relative_step\r\n"


def old_file(path):
    lines = [
        f"{step},{block},{run + 1},1,1,0,0.1\r\n"
        for run, steps in enumerate(([0, 2, 4], [0, 2], [2, 4]))
        for step in steps
        for block in ("x", "y")
    ]
    path.write_text(OLD + "".join(lines), newline="")


def test_a_file_without_runs_is_read(tmp_path):
    old_file(tmp_path / "blocks.csv")
    read = BlockMonitor.read(tmp_path / "blocks.csv")
    assert read.blocks == ["x", "y"]
    assert read.history["step"].tolist() == [0, 2, 4, 0, 2, 2, 4]
    assert read.history["run"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(
        read.history["gradient_norm"][:, 0], [1, 1, 1, 2, 2, 3, 3]
    )


def test_a_file_without_runs_is_set_aside(rng, tmp_path):
    path = tmp_path / "blocks.csv"
    seen = BlockMonitor(tmp_path, tensorboard=False)
    for number in (1, 2):
        old_file(path)
        text = path.read_text()
        with pytest.warns(
            UserWarning, match=rf"no column `run`.*blocks\.{number}\.csv"
        ):
            fit(net(SGD(0.1)), seen, rng)
        assert (tmp_path / f"blocks.{number}.csv").read_text() == text
        assert len(BlockMonitor.read(path).history["step"]) == 8
    assert len(seen.history["step"]) == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(net(SGD(0.1)), seen, rng)


# TensorBoard.


def events(path):
    loading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader"
    )
    (file,) = path.glob("events.out.tfevents.*")
    return list(loading.LegacyEventFileLoader(str(file)).Load())


def scalars(path):
    return {
        (event.step, value.tag): value.simple_value
        for event in events(path)
        for value in event.summary.value
        if not value.HasField("image")
    }


def images(path):
    return [
        (event.step, value.tag, value.image)
        for event in events(path)
        for value in event.summary.value
        if value.HasField("image")
    ]


def test_later_runs_have_curves_of_their_own(rng, tmp_path):
    seen = BlockMonitor(tmp_path, every=4)
    for _ in range(3):
        fit(net(SGD(0.1)), seen, rng)
    for run, path in enumerate((tmp_path, tmp_path / "run_1", tmp_path / "run_2")):
        found = scalars(path)
        assert {step for step, _ in found} == {0, 4}
        values = seen.history["gradient_norm"][seen.history["run"] == run]
        for i, name in enumerate(seen.blocks):
            for step, row in zip((0, 4), values):
                value = found[step, f"gradient_norm/{name}"]
                assert value == pytest.approx(float(row[i]))


def test_tensorboard_gets_the_picture_when_an_epoch_ends(rng, tmp_path):
    pytest.importorskip("matplotlib")
    seen = BlockMonitor(tmp_path, every=3)
    fit(net(SGD(0.1)), seen, rng, epochs=2)
    found = images(tmp_path)
    assert [(step, tag) for step, tag, _ in found] == [(6, "blocks"), (15, "blocks")]
    for _, _, image in found:
        png = image.encoded_image_string
        assert png.startswith(b"\x89PNG")
        assert (image.width, image.height) == struct.unpack(">II", png[16:24])
    fit(net(SGD(0.1)), seen, rng)
    assert [step for step, _, _ in images(tmp_path / "run_1")] == [6]


def test_tensorboard_gets_the_picture_of_a_loop_when_it_ends(tmp_path):
    pytest.importorskip("matplotlib")
    optimizer, w = SGD(0.1), keras.Variable([1.0])
    seen = BlockMonitor(tmp_path)
    with seen.watch(optimizer):
        for _ in range(3):
            optimizer.apply([keras.ops.ones((1,))], [w])
    assert [step for step, _, _ in images(tmp_path)] == [2]


def test_without_matplotlib_there_is_one_warning_and_no_picture(
    rng, tmp_path, monkeypatch
):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    seen = BlockMonitor(tmp_path)
    model = net(SGD(0.1))
    with pytest.warns(UserWarning, match="pip install matplotlib") as caught:
        fit(model, seen, rng, epochs=3)
    assert len([w for w in caught if "matplotlib" in str(w.message)]) == 1
    monkeypatch.undo()
    assert len(scalars(tmp_path)) and not images(tmp_path)


def test_recording_does_not_change_what_is_trained(rng, tmp_path):
    found = []
    for monitors in ([], [BlockMonitor(tmp_path, every=2)]):
        keras.utils.set_random_seed(1)
        model = net(SGD(0.1))
        data = small_data(np.random.default_rng(0))
        model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=monitors)
        found.append(arrays(model.variables))
    for a, b in zip(*found):
        assert_same_run(a, b)


@pytest.mark.parametrize("name", ["SGD", "SGDNG"])
@pytest.mark.parametrize("first", ["front", "back"])
def test_runs_of_other_blocks_of_one_model_are_told_apart(name, first, rng):
    """Layers that are frozen, or no longer, in a model that is compiled again."""
    make = {"SGD": lambda: keras.optimizers.SGD(0.1), "SGDNG": lambda: SGDNG(0.1)}[name]
    layers = [keras.layers.Dense(6, name="front"), keras.layers.Dense(3, name="back")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    data = small_data(rng)
    seen = BlockMonitor(every=2)
    frozen = model.get_layer(first)
    for trainable in (True, False, True):
        frozen.trainable = trainable
        compiled(model, make(), jit_compile=False)
        model.fit(*data, batch_size=16, verbose=0, callbacks=[seen])
    assert seen.history["step"].tolist() == [0, 2] * 3
    assert seen.history["run"].tolist() == [0, 0, 1, 1, 2, 2]
    expected = np.zeros((6, 2), bool)
    expected[2:4, seen.blocks.index(f"model/{first}")] = True
    np.testing.assert_array_equal(np.isnan(seen.history["gradient_norm"]), expected)


def test_runs_that_have_no_block_in_common_are_told_apart(rng):
    layers = [keras.layers.Dense(6, name="front"), keras.layers.Dense(3, name="back")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    seen = BlockMonitor(every=2)
    for layer, other in (layers, layers[::-1]):
        layer.trainable, other.trainable = True, False
        compiled(model, SGDNG(0.1), jit_compile=False)
        model.fit(*small_data(rng), batch_size=16, verbose=0, callbacks=[seen])
    assert seen.history["step"].tolist() == [0, 2] * 2
    assert seen.history["run"].tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(
        np.isnan(seen.history["gradient_norm"]), [[0, 1], [0, 1], [1, 0], [1, 0]]
    )
