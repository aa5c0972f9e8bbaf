"""TensorFlow only: eager steps, loops, checkpoints, export."""

import keras
import numpy as np
import pytest
import reference
from helpers import (
    BLOCKS,
    MODES,
    OPTIMIZERS,
    arrays,
    call,
    compiled,
    small_data,
    small_model,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

import keras_bng
from keras_bng import SGDNG, AdagradNG, AdamNG, block_normalized, normalize, partition

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow only"
)

EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@MODES
@pytest.mark.parametrize("shape", [(5_000_000,), (2000, 2001), (300_000, 8)])
def test_large_tensors_keep_their_digits_compiled_too(mode, shape):
    # Equal entries are the worst case: every rounding error goes the same way.
    w = [variable(np.ones(shape, "float32"), "a/w")]
    g = tf.fill(shape, 0.1)
    result = call(mode, lambda g: normalize([g], w, partition(w))[0], g)
    assert abs(reference.block_norm([result.numpy()]) - 1) < 1e-5


@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-10, 1.0, 1e10, 1e25, 1e37])
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_norm_one_from_1e_minus_37_to_1e37_compiled(rng, mode, scale):
    direction = rng.normal(size=(6, 2))
    direction /= reference.block_norm([direction])
    w = [variable(np.ones((6, 2), "float32"), "a/w")]
    g = tf.constant(direction * scale, tf.float32)
    result = call(mode, lambda g: normalize([g], w, partition(w))[0], g)
    assert abs(reference.block_norm([result.numpy()]) - 1) < 1e-5


@EVERY_OPTIMIZER
def test_a_custom_loop_does_not_retrace(rng, make):
    model, optimizer = small_model(), make()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    traces = []

    @tf.function
    def step(x, y):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    data = small_data(rng)
    losses = [float(step(*data)) for _ in range(20)]
    assert len(traces) == 1
    assert losses[-1] < losses[0]


@EVERY_OPTIMIZER
@pytest.mark.parametrize("jit_compile", ["auto", True])
def test_an_eager_step_is_compiled_once_and_equals_the_uncompiled(
    rng, make, jit_compile
):
    calls = []
    start = some_variables(rng)
    steps = [some_gradients(rng, start, 0.01) for _ in range(5)]
    results = []
    for jit in (jit_compile, False):
        variables = [variable(arrays([v])[0], v.path) for v in start]
        optimizer = make(jit_compile=jit)
        update_step = optimizer.update_step

        def spy(*args, update_step=update_step):
            calls.append(1)
            return update_step(*args)

        optimizer.update_step = spy
        calls.clear()
        for gradients in steps:
            optimizer.apply(tensors(gradients), variables)
        assert len(calls) == len(variables) * (1 if jit else len(steps))
        results.append(arrays(variables))
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_compiled_eager_step_is_keyed_by_the_variables_that_have_gradients(rng):
    variables = some_variables(rng)
    optimizer = SGDNG(1.0, momentum=0.0)
    gradients = tensors(some_gradients(rng, variables))
    for missing in (0, 2):
        some = list(gradients)
        some[missing] = None
        before = arrays(variables)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply(some, variables)
        for i, (a, b) in enumerate(zip(arrays(variables), before)):
            assert (a == b).all() == (i == missing)
    for subset in ([0, 1], [2]):
        before = arrays(variables)
        optimizer.apply([gradients[i] for i in subset], [variables[i] for i in subset])
        for i, (a, b) in enumerate(zip(arrays(variables), before)):
            assert (a == b).all() == (i not in subset)


def test_rule_none_is_the_stock_optimizer_bit_for_bit_in_fit(rng):
    data = small_data(rng)
    pairs = [
        (lambda: SGDNG(0.1, rule=None), lambda: keras.optimizers.SGD(0.1, 0.9)),
        (lambda: AdamNG(rule=None), lambda: keras.optimizers.Adam(epsilon=1e-8)),
        (
            lambda: AdagradNG(rule=None),
            lambda: keras.optimizers.Adagrad(0.01, initial_accumulator_value=0.0),
        ),
        (lambda: keras_bng.RMSpropNG(rule=None), keras.optimizers.RMSprop),
    ]
    for jit in (True, False):
        for pair in pairs:
            results = []
            for make in pair:
                keras.utils.set_random_seed(0)
                model = compiled(small_model(), make(), jit_compile=jit)
                model.fit(*data, epochs=5, verbose=0, shuffle=False)
                results.append(arrays(model.trainable_variables))
            for a, b in zip(*results):
                np.testing.assert_array_equal(a, b)


def test_an_optimizer_can_be_built_by_its_first_step_in_a_function(rng):
    w = [variable([3.0, 4.0], "a/kernel"), variable([1.0], "a/bias")]
    optimizer = SGDNG(1.0, momentum=0.5)
    step = tf.function(lambda a, b: optimizer.apply([a, b], w))
    for _ in range(2):
        step(*tensors([[0.0, 3.0], [4.0]]))
    np.testing.assert_allclose(arrays(w)[0], [3.0, 4.0 - 0.6 * 2.5], rtol=1e-6)


def test_tf_variables_work_in_a_custom_loop(rng):
    w = [tf.Variable([3.0, 4.0], name="a/kernel"), tf.Variable([1.0], name="a/bias")]
    optimizer = SGDNG(1.0, momentum=0.0)
    optimizer.apply_gradients(zip(tensors([[0.0, 3.0], [4.0]]), w))
    assert [b.name for b in optimizer.blocks] == ["a"]
    np.testing.assert_allclose(w[0].numpy(), [3.0, 3.4], rtol=1e-6)
    np.testing.assert_allclose(w[1].numpy(), [0.2], rtol=1e-5)


@EVERY_OPTIMIZER
def test_a_tf_checkpoint_brings_back_the_state(rng, make, tmp_path):
    data = small_data(rng)
    model, other = (compiled(small_model(), make()) for _ in range(2))
    model.fit(*data, verbose=0)
    other.optimizer.build(other.trainable_variables)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(
        str(tmp_path / "checkpoint")
    )
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
    restored.assert_existing_objects_matched()
    for a, b in zip(other.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(*arrays([a, b]))
    for a, b in zip(other.trainable_variables, model.trainable_variables):
        np.testing.assert_array_equal(*arrays([a, b]))


@EVERY_OPTIMIZER
def test_export_gives_the_same_predictions(rng, make, tmp_path):
    x, y = small_data(rng)
    model = compiled(small_model(), make())
    model.fit(x, y, verbose=0)
    model.export(str(tmp_path / "exported"), verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(exported.serve(x), model(x), rtol=1e-5, atol=1e-6)


def test_saved_model_save_of_a_compiled_model_works_after_an_eager_step(rng, tmp_path):
    x, y = small_data(rng)
    model = compiled(small_model(), AdamNG(), run_eagerly=True)
    model.fit(x, y, verbose=0)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    assert tf.saved_model.load(str(tmp_path / "saved")) is not None


def test_keras_file_in_a_process_that_only_imports_keras_bng(rng, tmp_path):
    import subprocess
    import sys

    lion = keras.optimizers.Lion(keras.optimizers.schedules.CosineDecay(0.1, 50))
    model = compiled(small_model(), block_normalized(lion, rule="clip"))
    data = small_data(rng)
    model.fit(*data, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    code = f"""
import keras, keras_bng
optimizer = keras.models.load_model({str(path)!r}).optimizer
assert type(optimizer).__name__ == "LionNG", optimizer
assert isinstance(optimizer, keras.optimizers.Lion)
assert isinstance(optimizer._learning_rate, keras.optimizers.schedules.CosineDecay)
assert optimizer.rule == keras_bng.Clip()
print("steps", int(optimizer.iterations.numpy()))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert "steps 2" in result.stdout, result.stderr[-2000:]


def test_100_steps_beside_the_reference_compiled_by_xla(rng):
    variables = some_variables(rng)
    twin = reference.Adam(arrays(variables), BLOCKS, learning_rate=0.05)
    optimizer = AdamNG(0.05, jit_compile=True)
    for _ in range(100):
        gradients = some_gradients(rng, variables, 10.0 ** rng.uniform(-30, 5))
        optimizer.apply(tensors(gradients), variables)
        twin.step([np.float32(g) for g in gradients])
    for ours, theirs in zip(arrays(variables), twin.weights):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("shape", [None, (None, None)])
@pytest.mark.parametrize("cls", [SGDNG, AdamNG])
def test_gradients_that_do_not_know_their_shape(cls, shape, jit_compile):
    """Loops forget shapes: `fit` with a stateful LSTM met this."""
    large = np.random.default_rng(0).normal(size=(600, 700)).astype("float32")
    w = keras.Variable(np.ones_like(large))
    expected = keras.Variable(np.ones_like(large))
    optimizer, other = cls(0.1), cls(0.1)
    optimizer.build([w])

    @tf.function(
        input_signature=[tf.TensorSpec(shape, "float32")], jit_compile=jit_compile
    )
    def step(gradient):
        optimizer.apply([gradient], [w])

    step(tf.constant(large))
    other.apply([large], [expected])
    np.testing.assert_allclose(w.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_fit_with_an_lstm_of_unknown_length():
    inputs = keras.Input(batch_shape=(4, None), dtype="int32")
    x = keras.layers.Embedding(30, 8)(inputs)
    x = keras.layers.LSTM(300, return_sequences=True, stateful=True)(x)
    model = keras.Model(inputs, keras.layers.Dense(30)(x))
    model.compile(
        optimizer=SGDNG(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    text = tf.constant(np.random.default_rng(0).integers(0, 30, (4, 30)))
    batches = tf.data.Dataset.range(0, 28, 10).map(
        lambda i: (text[:, i : i + 10], text[:, i + 1 : i + 11][:, :10])
    )
    losses = model.fit(batches.take(2), epochs=5, shuffle=False, verbose=0).history[
        "loss"
    ]
    assert losses[-1] < losses[0]
