"""More than one replica (TensorFlow only): the same run as one device on the batch."""

import contextlib
import functools
import json

import keras
import numpy as np
import processes
import pytest
import reference
from helpers import OPTIMIZERS, arrays, compiled, small_data, tensors

from keras_bng import SGDNG, AdamNG

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow only"
)

LOSS = functools.partial(
    keras.losses.SparseCategoricalCrossentropy, from_logits=True, reduction=None
)
CASES = [
    pytest.param(name, rule, id=f"{name}-{rule}")
    for name in OPTIMIZERS
    for rule in ("unit", "adaptive", "clip")
    if name != "AdagradBNG" or rule == "unit"
]
# Every one in one of the two ways to train, every optimizer in both.
IN_FIT, IN_A_LOOP = CASES[::2], [*CASES[1::2], ("AdagradBNG", "unit")]


@functools.cache
def two_replicas():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def dense_model():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    )


def embedding_model():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(9, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def words(rng):
    # Nine words in 320 places: rows repeat within and across replicas.
    return rng.integers(0, 9, (64, 5)), rng.integers(0, 3, 64)


def optimizer(name, rule="unit", **options):
    if name != "AdagradBNG":
        options["rule"] = rule
    return OPTIMIZERS[name](learning_rate=0.003, **options)


def fitted(make, data, strategy, model=dense_model, **compile_args):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = compiled(model(), make(), **compile_args)
    model.fit(*data, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return model


def looped(make, data, strategy, model=dense_model, steps=8):
    """A loop of one's own with `strategy.run`, the loss by the global batch."""
    keras.utils.set_random_seed(1)
    strategy = strategy or tf.distribute.get_strategy()
    batches = tf.data.Dataset.from_tensor_slices(data).batch(16).repeat()
    with strategy.scope():
        model, optimizer = model(), make()
        optimizer.build(model.trainable_variables)
        loss_of = LOSS()

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / 16
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @tf.function
    def step(batch):
        strategy.run(replica_step, batch)

    for batch, _ in zip(
        strategy.experimental_distribute_dataset(batches), range(steps)
    ):
        step(batch)
    return model, optimizer


def on_each_replica(variable):
    return [
        v.numpy() for v in two_replicas().experimental_local_results(variable.value)
    ]


def check_equal(model, other, tolerance=1e-5):
    # Rounding is 1e-7 a step, more after Adam's division; a wrong norm shows at 1e-4.
    for a, b in zip(
        arrays(model.trainable_variables), arrays(other.trainable_variables)
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    for variable in model.trainable_variables:
        one, two = on_each_replica(variable)
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("run", ["fit", "loop"])
@pytest.mark.parametrize("name", ["SGDNG", "AdagradNG", "RMSpropNG"])
def test_factors_that_are_left_to_the_kernels(rng, monkeypatch, name, run):
    # Only those of large gradients are; here, all of them, against none of them.
    data, make = small_data(rng), functools.partial(optimizer, name)
    results = []
    for large, strategy in ((0, two_replicas()), (2**31, None)):
        monkeypatch.setattr("keras_bng.backend.tensorflow.LARGE", large)
        trained = (fitted if run == "fit" else looped)(make, data, strategy)
        results.append(trained if run == "fit" else trained[0])
    check_equal(*results)


@pytest.mark.parametrize("name, rule", IN_FIT)
def test_fit_on_two_replicas_equals_one_device(rng, name, rule):
    make = functools.partial(optimizer, name, rule)
    data = small_data(rng)
    check_equal(fitted(make, data, two_replicas()), fitted(make, data, None))


@pytest.mark.parametrize("name, rule", IN_A_LOOP)
def test_a_custom_loop_on_two_replicas_equals_one_device(rng, name, rule):
    make = functools.partial(optimizer, name, rule, l2=0.01)
    data = small_data(rng)
    two, _ = looped(make, data, two_replicas())
    check_equal(two, looped(make, data, None)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_embeddings_on_two_replicas_equal_one_device(rng, name):
    make = functools.partial(optimizer, name)
    data = words(rng)
    one, two = (
        fitted(make, data, s, embedding_model, jit_compile=False)
        for s in (None, two_replicas())
    )
    check_equal(two, one)
    loops = [looped(make, data, s, embedding_model)[0] for s in (two_replicas(), None)]
    check_equal(*loops)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loss_scaling_on_two_replicas_equals_one_device(rng, name):
    def make():
        return keras.optimizers.LossScaleOptimizer(optimizer(name), initial_scale=64.0)

    data = small_data(rng)
    check_equal(fitted(make, data, two_replicas()), fitted(make, data, None))


def test_mixed_float16_on_two_replicas_equals_one_device_to_its_rounding(rng):
    keras.config.set_dtype_policy("mixed_float16")
    make = functools.partial(optimizer, "SGDNG")
    data = small_data(rng)
    check_equal(fitted(make, data, two_replicas()), fitted(make, data, None), 1e-3)


def test_the_norm_is_of_the_sum_over_replicas():
    """Two aligned replicas, then two that are at right angles: a step of length 1."""
    strategy = two_replicas()
    with strategy.scope():
        w = keras.Variable([0.0, 0.0])
        optimizer = SGDNG(1.0, momentum=0.0)
        optimizer.build([w])

    @tf.function
    def step(values):
        strategy.run(lambda g: optimizer.apply([g], [w]), (values,))

    for gradients in ([[3.0, 0.0], [4.0, 0.0]], [[3.0, 0.0], [0.0, 4.0]]):
        w.assign([0.0, 0.0])
        step(
            strategy.experimental_distribute_values_from_function(
                lambda c, g=gradients: tf.constant(g[c.replica_id_in_sync_group])
            )
        )
        total = np.sum(gradients, axis=0)
        for copy in on_each_replica(w):
            expected = -total / reference.block_norm([total])
            np.testing.assert_allclose(copy, expected, rtol=1e-6)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scaled"])
@pytest.mark.parametrize(
    "name, replica, bad",
    [(name, 1, np.nan) for name in OPTIMIZERS]
    + [("AdamNG", 0, np.nan), ("AdamNG", 0, np.inf), ("AdamNG", 1, np.inf)],
)
def test_what_is_not_finite_on_one_replica_reaches_no_weight(
    rng, name, replica, bad, scaled
):
    def make():
        inner = optimizer(name)
        if not scaled:
            return inner
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)

    x, y = small_data(rng, count=48)
    x[16 + 8 * replica, 2] = bad  # the second step, on this replica only
    model = fitted(make, (x, y), two_replicas())
    for variable in model.trainable_variables:
        one, two = on_each_replica(variable)
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, two)
    ours = model.optimizer.inner_optimizer if scaled else model.optimizer
    dropped = int(ours.skipped_blocks.numpy())
    # An Inf saturates the tanh: only the first layer's gradient is bad.
    bad_blocks = 1 if bad == np.inf else 2
    # Loss scaling skips the whole step where it looks, and it looks at replica 0.
    assert dropped == (0 if scaled and replica == 0 else 3 * bad_blocks)


def test_stock_adam_is_wrong_here_which_is_why_we_test_it(rng):
    x, y = small_data(rng, count=48)
    x[24, 2] = np.inf

    def make():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())

    model = fitted(make, (x, y), two_replicas())
    assert not all(np.isfinite(w).all() for w in arrays(model.trainable_variables))


def test_one_bad_block_on_one_replica_leaves_the_other_blocks_going():
    strategy = two_replicas()
    with strategy.scope():
        w = [keras.Variable([0.0, 0.0], name=n) for n in ("a", "b")]
        optimizer = AdamNG(0.1)
        optimizer.build(w)

    @tf.function
    def step(values):
        strategy.run(lambda g: optimizer.apply([g, tf.ones(2)], w), (values,))

    step(
        strategy.experimental_distribute_values_from_function(
            lambda c: tf.constant([1.0, [1.0, np.nan][c.replica_id_in_sync_group]])
        )
    )
    assert arrays(w)[0].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(arrays(w)[1], [-0.1, -0.1], rtol=1e-5)
    assert int(optimizer.skipped_blocks.numpy()) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gradient_accumulation_steps": 2}, "accumulate gradients in a compiled step"),
        ({"use_ema": True, "ema_overwrite_frequency": 2}, "overwrite weights by their"),
    ],
)
def test_what_keras_cannot_do_in_a_compiled_step_on_replicas_is_a_clear_error(
    rng, options, message
):
    def make():
        return AdamNG(**options)

    with pytest.raises(RuntimeError, match=f"Keras cannot {message}"):
        fitted(make, small_data(rng), two_replicas())


def test_xla_across_cpu_replicas_raises_and_is_off_by_default(rng):
    make = functools.partial(optimizer, "AdamNG")
    with pytest.raises(tf.errors.InvalidArgumentError):
        fitted(make, small_data(rng), two_replicas(), jit_compile=True)
    assert not fitted(make, small_data(rng), two_replicas()).jit_compile


def test_accumulation_on_replicas_works_eagerly(rng):
    strategy = two_replicas()
    with strategy.scope():
        w = keras.Variable([0.0, 0.0])
        optimizer = SGDNG(1.0, momentum=0.0, gradient_accumulation_steps=2)
        optimizer.build([w])
    for gradient in ([3.0, 0.0], [0.0, 4.0]):
        assert not arrays([w])[0].any()
        (g,) = tensors([gradient])
        strategy.run(lambda g=g: optimizer.apply([g], [w]))
    np.testing.assert_allclose(arrays([w])[0], [-0.6, -0.8], rtol=1e-6)


def test_averages_and_accumulation_on_replicas_are_those_of_one_device(rng):
    options = {
        "use_ema": True,
        "ema_overwrite_frequency": 2,
        "gradient_accumulation_steps": 2,
    }
    results = []
    for strategy in (None, two_replicas()):
        with strategy.scope() if strategy else contextlib.nullcontext():
            w = keras.Variable([1.0, 2.0])
            optimizer = AdamNG(0.1, l2=0.1, **options)
            optimizer.build([w])
        for gradient in np.random.default_rng(0).normal(size=(8, 2)):
            # Each of two replicas has half of the gradient.
            (g,) = tensors([gradient / (2 if strategy else 1)])
            run = strategy.run if strategy else (lambda step: step())
            run(lambda g=g, o=optimizer, w=w: o.apply([g], [w]))
        results.append(arrays([w, *optimizer.variables]))
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_eager_step_under_a_strategy_is_not_compiled(rng):
    with two_replicas().scope():
        w = keras.Variable([0.0])
        optimizer = SGDNG(1.0, momentum=0.0)
        optimizer.build([w])
    two_replicas().run(lambda: optimizer.apply([tf.constant([2.0])], [w]))
    assert arrays([w])[0] == [-1.0]


def run_workers(count, folder):
    """The loop of the page, by so many workers; the weights of each."""
    workers = [f"127.0.0.1:{port}" for port in processes.free_ports(count)]
    environments = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        environments.append({"TF_CONFIG": config, "RANK": str(index)})
    last = "\nimport processes\n"
    last += "processes.leave([v.numpy() for v in model.trainable_variables])\n"
    code = ["-c", processes.snippet("two processes") + last]
    processes.run(code, environments, folder)
    return processes.answers(folder, count)


def test_two_workers_on_loopback_equal_one_process(tmp_path):
    """The loop of docs/devices.md, `MultiWorkerMirroredStrategy`."""
    first, second = run_workers(2, tmp_path / "two")
    (alone,) = run_workers(1, tmp_path / "one")
    for a, b, c in zip(first, second, alone):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inside", [True, False], ids=["in the scope", "outside of it"])
def test_a_skip_is_counted_once_wherever_the_optimizer_was_built(inside):
    strategy = two_replicas()
    with strategy.scope():
        w = keras.Variable([0.0, 0.0])
    with strategy.scope() if inside else contextlib.nullcontext():
        optimizer = SGDNG(0.1, momentum=0.0)
        optimizer.build([w])

    @tf.function
    def step(values):
        strategy.run(lambda g: optimizer.apply([g], [w]), (values,))

    for count in (1, 2):
        step(
            strategy.experimental_distribute_values_from_function(
                lambda c: tf.constant([1.0, [1.0, np.nan][c.replica_id_in_sync_group]])
            )
        )
        assert int(optimizer.skipped_blocks.numpy()) == count
