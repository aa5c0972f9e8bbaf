"""Saving: resuming exactly, other processes, other options, files that are damaged."""

import os
import pathlib
import signal
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
from helpers import (
    OPTIMIZERS,
    arrays,
    compiled,
    small_data,
    small_model,
    some_gradients,
    tensors,
)

import keras_bng

HERE = pathlib.Path(__file__).parent
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
TENSORFLOW_ONLY = pytest.mark.skipif(not ON_TENSORFLOW, reason="TensorFlow only")
STATE_FILES = ["by_hand.weights.h5", *["by_hand.ckpt"] * ON_TENSORFLOW]
CALLBACK_FILES = ["callback-2.weights.h5", "callback-2.keras"]
RESUMED = [*STATE_FILES, *CALLBACK_FILES, "by_hand.keras"]
EPOCHS = 3


def on_a_schedule():
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7)
    return keras_bng.block_normalized(keras.optimizers.Nadam(rate), rule="adaptive")


MAKERS = {**OPTIMIZERS, "block_normalized(Nadam) on a schedule": on_a_schedule}


def run(code, *arguments, cwd, status=0):
    """Runs Python code in a new process, which may import what this one has."""
    paths = [str(HERE), str(pathlib.Path(keras_bng.__file__).parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == status, result.stderr[-3000:]


def built(optimizer):
    """A compiled model with its optimizer built, as loading weights needs it."""
    # XLA may round differently in two processes.
    options = {"jit_compile": False} if ON_TENSORFLOW else {}
    model = compiled(small_model(), optimizer, **options)
    optimizer.build(model.trainable_variables)
    return model


def train(model, callbacks=(), first_epoch=0):
    model.fit(
        *small_data(np.random.default_rng(0)),
        batch_size=16,
        shuffle=False,
        initial_epoch=first_epoch,
        epochs=EPOCHS,
        callbacks=list(callbacks),
        verbose=0,
    )


def filled(rng, model):
    """The model with some value other than 0 in all its variables."""
    for v in model.weights + model.optimizer.variables:
        value = rng.integers(1, 9, size=v.shape)
        v.assign(value if "int" in v.dtype else value / 8)
    return model


def state(model):
    return arrays(model.weights + model.optimizer.variables)


def assert_equal(actual, expected, message=""):
    assert len(actual) == len(expected), message
    for a, b in zip(actual, expected):
        np.testing.assert_array_equal(a, b, err_msg=message)


def saved_arrays(path):
    with np.load(path) as file:
        return list(file.values())


def tf_checkpoint(model):
    import tensorflow as tf

    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def write(model, folder):
    model.save(folder / "by_hand.keras")
    model.save_weights(folder / "by_hand.weights.h5")
    if ON_TENSORFLOW:
        tf_checkpoint(model).write(str(folder / "by_hand.ckpt"))


def read(model, path):
    """Reads into this model, or, from the file of a whole one, a new model."""
    if path.suffix == ".keras":
        return keras.models.load_model(path)
    if path.suffix == ".h5":
        model.load_weights(path)
    else:
        tf_checkpoint(model).read(str(path)).assert_existing_objects_matched()
    return model


# Resuming.


def started(name):
    keras.utils.set_random_seed(0)
    model = built(MAKERS[name]())
    model.optimizer.skipped_blocks.assign(3)
    return model


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A model an optimizer, trained to the end, and what it wrote in the middle."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    models = {}
    for name in MAKERS:
        (folder / name).mkdir()
        models[name] = started(name)
        train(models[name], writing_callbacks(models[name], folder / name))
    return folder, models


def writing_callbacks(model, folder):
    def write_in_the_middle(epoch, logs):
        if epoch == 1:
            write(model, folder)

    checkpoint = keras.callbacks.ModelCheckpoint
    return [
        keras.callbacks.LambdaCallback(on_epoch_end=write_in_the_middle),
        checkpoint(str(folder / "callback-{epoch}.keras")),
        checkpoint(str(folder / "callback-{epoch}.weights.h5"), save_weights_only=True),
    ]


def resume(folder):
    """In a new process: reads what was written after epoch 2 and goes on."""
    for name, make in MAKERS.items():
        model = built(make())
        for file in RESUMED:
            model = read(model, pathlib.Path(folder, name, file))
            train(model, first_epoch=2)
            np.savez(pathlib.Path(folder, name, f"{file}.npz"), *state(model))


def test_a_new_process_resumes_bit_for_bit(uninterrupted):
    folder, models = uninterrupted
    run("import sys, test_saving; test_saving.resume(sys.argv[1])", folder, cwd=folder)
    for name, model in models.items():
        for file in RESUMED:
            resumed = saved_arrays(folder / name / f"{file}.npz")
            assert_equal(resumed, state(model), f"{name}, {file}")


class KilledOnce(keras.callbacks.Callback):
    """Notes the epochs that begin; kills its process in the third, the first time."""

    def __init__(self, folder):
        super().__init__()
        self.epochs = folder / "epochs"
        self.was_killed = self.epochs.exists()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        with self.epochs.open("a") as file:
            file.write(f"{epoch} ")

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 2 and batch == 1 and not self.was_killed:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_backup(name, folder):
    folder = pathlib.Path(folder)
    model = started(name)
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    train(model, [KilledOnce(folder), backup])
    np.savez(folder / "end.npz", *state(model))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("name", ["AdamNG", "block_normalized(Nadam) on a schedule"])
def test_a_killed_process_started_again_ends_as_if_it_had_not_been(
    uninterrupted, name, tmp_path
):
    code = "import sys, test_saving; test_saving.train_with_backup(*sys.argv[1:])"
    run(code, name, tmp_path, cwd=tmp_path, status=-signal.SIGKILL)
    run(code, name, tmp_path, cwd=tmp_path)
    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "2", "2"]
    _, models = uninterrupted
    assert_equal(saved_arrays(tmp_path / "end.npz"), state(models[name]))


# SavedModels, in a process that cannot import keras_bng.

WITHOUT_KERAS_BNG = """
import pathlib, sys
sys.modules["keras_bng"] = None
try:
    import keras_bng
except ImportError:
    pass
else:
    raise AssertionError("keras_bng is there")
import numpy as np
import tensorflow as tf
"""

PREDICT = """
x = tf.constant(np.load("x.npy"))
for file in pathlib.Path().glob("*/*/saved_model.pb"):
    predict = tf.saved_model.load(str(file.parent)).signatures["serving_default"]
    (name,) = predict.structured_input_signature[1]
    (y,) = predict(**{name: x}).values()
    np.save(f"{file.parent}.npy", y)
"""


@TENSORFLOW_ONLY
def test_exported_and_saved_models_predict_the_same_without_keras_bng(
    uninterrupted, rng, tmp_path
):
    import tensorflow as tf

    x, _ = small_data(rng)
    np.save(tmp_path / "x.npy", x)
    _, models = uninterrupted
    for name, model in models.items():
        model.export(str(tmp_path / name / "export"), verbose=False)
        tf.saved_model.save(model, str(tmp_path / name / "saved_model"))
    run(WITHOUT_KERAS_BNG + PREDICT, cwd=tmp_path)
    for name, model in models.items():
        for way in ("export", "saved_model"):
            y = np.load(tmp_path / name / f"{way}.npy")
            np.testing.assert_allclose(y, model(x), 1e-5, 1e-6, err_msg=name + way)


def trainer(model, optimizer):
    """What a user writes who wants to train where keras_bng is not installed."""
    import tensorflow as tf

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.TensorSpec([None, 6], tf.float32, name="x")
    y = tf.TensorSpec([None], tf.int32, name="y")

    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer = model, optimizer
            optimizer.build(model.trainable_variables)

        @tf.function(input_signature=[x, y])
        def train_step(self, x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, self.model(x, training=True))
            weights = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

        @tf.function(input_signature=[])
        def state(self):
            variables = self.model.variables + self.optimizer.variables
            return {f"{i:03}": v.value for i, v in enumerate(variables)}

    return Trainer()


TRAIN = """
with np.load("data.npz") as file:
    x, y = map(tf.constant, file.values())
for file in pathlib.Path().glob("*/saved_model.pb"):
    signatures = tf.saved_model.load(str(file.parent)).signatures
    losses = [signatures["train"](x=x, y=y)["loss"].numpy() for _ in range(5)]
    state = [v.numpy() for _, v in sorted(signatures["state"]().items())]
    np.savez(f"{file.parent}.npz", losses, *state)
"""


@TENSORFLOW_ONLY
def test_an_exported_training_step_trains_the_same_without_keras_bng(rng, tmp_path):
    import tensorflow as tf

    x, y = small_data(rng)
    np.savez(tmp_path / "data.npz", x, y)
    expected = {}
    for name in ("AdamNG", "SGDNG", "block_normalized(Lion)"):
        original = trainer(small_model(), MAKERS[name]())
        original.train_step(x, y)
        signatures = {"train": original.train_step, "state": original.state}
        tf.saved_model.save(original, str(tmp_path / name), signatures)
        losses = [original.train_step(x, y)["loss"] for _ in range(5)]
        expected[name] = [losses, *original.state().values()]
    run(WITHOUT_KERAS_BNG + TRAIN, cwd=tmp_path)
    for name, values in expected.items():
        loaded = saved_arrays(tmp_path / f"{name}.npz")
        assert len(loaded) == len(values), name
        for a, b in zip(loaded, values):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


# Other options, and the stock optimizers' state.

OPTIONS = [
    *({"rule": rule} for rule in (None, "adaptive")),
    *({"blocks": blocks} for blocks in ("variable", "model")),
    *({"jit_compile": jit_compile} for jit_compile in (True, False)),
    {"l2": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_was_written_with_some_options_is_read_with_others(rng, options, tmp_path):
    for written_with, read_with in (({}, options), (options, {})):
        writer = filled(rng, built(keras_bng.AdamNG(**written_with)))
        gradients = tensors(some_gradients(rng, writer.trainable_variables))
        writer.optimizer.apply(gradients, writer.trainable_variables)
        write(writer, tmp_path)
        for file in STATE_FILES:
            reader = read(built(keras_bng.AdamNG(**read_with)), tmp_path / file)
            assert_equal(state(reader), state(writer))


STOCK = {
    "SGDNG": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "AdamNG": lambda: keras.optimizers.Adam(0.05, epsilon=1e-8),
    "AdagradNG": lambda: keras.optimizers.Adagrad(0.05),
    "RMSpropNG": lambda: keras.optimizers.RMSprop(0.05),
    "block_normalized(Lion)": lambda: keras.optimizers.Lion(0.05),
}


def from_weights_file(name, folder):
    model = built(MAKERS[name](jit_compile=False))
    model.load_weights(folder / "by_hand.weights.h5")
    return model


def from_keras_file(name, folder):
    model = keras.models.load_model(folder / "by_hand.keras")
    ours = keras_bng.block_normalized(model.optimizer, jit_compile=False)
    return compiled(model, ours)


def from_checkpoint(name, folder):
    model = built(MAKERS[name](jit_compile=False))
    # Partial, for it has no counter.
    tf_checkpoint(model).read(str(folder / "by_hand.ckpt")).expect_partial()
    return model


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize(
    "load",
    [
        from_weights_file,
        from_keras_file,
        pytest.param(from_checkpoint, marks=TENSORFLOW_ONLY),
    ],
)
def test_training_with_a_stock_optimizer_goes_on_with_ours(rng, name, load, tmp_path):
    stock = filled(rng, built(STOCK[name]()))
    write(stock, tmp_path)
    ours = load(name, tmp_path)
    *loaded, counter = state(ours)
    assert_equal(loaded, state(stock))
    assert counter == 0

    gradients = some_gradients(rng, ours.trainable_variables, scale=100.0)
    ours.optimizer.apply(tensors(gradients), ours.trainable_variables)
    for block in (slice(0, 2), slice(2, 4), slice(4, 6)):
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients[block]))
        gradients[block] = [g / norm for g in gradients[block]]
    stock.optimizer.apply(tensors(gradients), stock.trainable_variables)
    for a, b in zip(state(ours), state(stock)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Damaged files.


def truncated(content):
    return content[: len(content) // 2]


def flipped(content):
    middle = len(content) // 2
    flip = bytes(255 - byte for byte in content[middle : middle + 16])
    return content[:middle] + flip + content[middle + 16 :]


@pytest.mark.parametrize("name", ["AdamNG", "block_normalized(Lion)"])
@pytest.mark.parametrize(
    ("file", "damaged", "error"),
    [
        ("by_hand.keras", truncated, (ValueError, zipfile.BadZipFile)),
        ("by_hand.keras", flipped, zipfile.BadZipFile),
        ("by_hand.weights.h5", truncated, OSError),
        # HDF5 has no checksum: flipped bytes load, with stock optimizers too.
    ],
)
def test_a_damaged_file_raises_and_changes_nothing(
    rng, name, file, damaged, error, tmp_path
):
    write(filled(rng, built(MAKERS[name]())), tmp_path)
    path = tmp_path / file
    path.write_bytes(damaged(path.read_bytes()))
    model = filled(rng, built(MAKERS[name]()))
    before = state(model)
    with pytest.raises(error):
        model.load_weights(path)
    with pytest.raises(error):
        read(model, path)
    assert_equal(state(model), before)
