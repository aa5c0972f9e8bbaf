"""What works with a stock Keras optimizer works with ours."""

import keras
import numpy as np
import pytest
import reference
from helpers import (
    BLOCKS,
    OPTIMIZERS,
    arrays,
    compiled,
    small_data,
    small_model,
    some_gradients,
    some_variables,
    tensors,
    variable,
)
from keras import ops

from keras_bng import SGDNG, AdamNG, Adaptive, block_normalized

EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def apply_on_any_backend(optimizer, gradients, variables):
    """`apply`; on JAX, where `LossScaleOptimizer` has only a stateless one, that."""
    if keras.backend.backend() != "jax":
        return optimizer.apply(gradients, variables)
    values = [[v.value for v in vs] for vs in (optimizer.variables, variables)]
    weights, state = optimizer.stateless_apply(values[0], gradients, values[1])
    for v, value in zip(variables + optimizer.variables, weights + state):
        v.assign(value)


def step_of(optimizer, variables):
    """`apply`; on JAX jitted, where it would compile the accumulation at each call."""
    if keras.backend.backend() != "jax":
        return lambda gradients: optimizer.apply(gradients, variables)
    import jax

    optimizer.build(variables)
    jitted = jax.jit(optimizer.stateless_apply)

    def step(gradients):
        state, weights = (
            [v.value for v in vs] for vs in (optimizer.variables, variables)
        )
        weights, state = jitted(state, gradients, weights)
        for v, value in zip(variables + optimizer.variables, weights + state):
            v.assign(value)

    return step


def weights_after_fit(make, data, epochs=3, batch_size=16, **compile_args):
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), make(), **compile_args)
    model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return arrays(model.trainable_variables)


@EVERY_OPTIMIZER
def test_fit_converges(rng, make):
    keras.utils.set_random_seed(1)
    model = compiled(small_model(), make(learning_rate=0.01))
    losses = model.fit(*small_data(rng), epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


@EVERY_OPTIMIZER
def test_jit_compile_and_run_eagerly_give_the_same_run(rng, make):
    data = small_data(rng)
    expected = weights_after_fit(make, data, jit_compile=False)
    for how in ({"jit_compile": True}, {"jit_compile": "auto"}, {"run_eagerly": True}):
        for a, b in zip(weights_after_fit(make, data, **how), expected):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("rule", ["unit", "adaptive", "clip"])
def test_accumulation_equals_the_k_fold_batch(rng, make, rule):
    options = {} if make is OPTIMIZERS["AdagradBNG"] else {"rule": rule}
    variables = some_variables(rng)
    others = [variable(arrays([v])[0], v.path) for v in variables]
    micro = step_of(make(gradient_accumulation_steps=3, **options), variables)
    whole = step_of(make(**options), others)
    for _ in range(4):
        parts = [some_gradients(rng, variables, 0.1) for _ in range(3)]
        before = arrays(variables)
        for i, part in enumerate(parts):
            micro(tensors(part))
            if i < 2:
                for a, b in zip(arrays(variables), before):
                    np.testing.assert_array_equal(a, b)
        whole(tensors([np.mean(p, axis=0) for p in zip(*parts)]))
    for a, b in zip(arrays(variables), arrays(others)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_accumulation_counts_a_bad_micro_step_once(rng):
    variables = some_variables(rng)
    optimizer = AdamNG(gradient_accumulation_steps=2)
    bad = some_gradients(rng, variables)
    bad[2][0, 0] = np.nan
    for gradients in (bad, *(some_gradients(rng, variables) for _ in range(3))):
        optimizer.apply(tensors(gradients), variables)
    assert int(optimizer.skipped_blocks.numpy()) == 1
    assert all(np.isfinite(w).all() for w in arrays(variables))


def test_a_schedule_is_followed(rng):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.25])
    for make in (
        lambda: SGDNG(schedule, momentum=0.0),
        lambda: block_normalized(keras.optimizers.SGD(schedule)),
    ):
        w = variable([0.0], "a/w")
        optimizer, seen = make(), []
        for _ in range(4):
            optimizer.apply(tensors([[7.0]]), [w])
            seen.append(float(arrays([w])[0][0]))
        assert seen == [-1.0, -2.0, -2.25, -2.5]


def test_a_learning_rate_from_a_python_callable_is_not_frozen():
    rates = iter([1.0, 0.5, 0.25])
    w = variable([0.0], "a/w")
    optimizer = SGDNG(lambda: next(rates), momentum=0.0)
    for expected in (-1.0, -1.5, -1.75):
        optimizer.apply(tensors([[3.0]]), [w])
        assert arrays([w])[0] == [expected]


def test_settings_changed_between_eager_steps_take_effect():
    w = variable([0.0], "a/w")
    optimizer = SGDNG(1.0, momentum=0.0)
    optimizer.apply(tensors([[3.0]]), [w])
    optimizer.learning_rate = 0.5
    optimizer.apply(tensors([[3.0]]), [w])
    optimizer.rule = Adaptive(0.1)
    optimizer.apply(tensors([[3.0]]), [w])
    np.testing.assert_allclose(arrays([w])[0], [-1.5 - 0.5 * 0.15], rtol=1e-6)
    optimizer.l2 = 1.0
    before = arrays([w])[0]
    optimizer.apply(tensors([[3.0]]), [w])
    step = 0.5 * (0.1 * abs(before) + before)
    np.testing.assert_allclose(arrays([w])[0], before - step, rtol=1e-5)


@EVERY_OPTIMIZER
def test_callbacks_that_set_the_learning_rate_work(rng, make):
    model = compiled(small_model(), make(learning_rate=0.5))
    seen = []
    model.fit(
        *small_data(rng),
        epochs=3,
        verbose=0,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr / 2),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(logs["learning_rate"])
            ),
        ],
    )
    assert [float(x) for x in seen] == [0.25, 0.125, 0.0625]


def test_reduce_lr_on_plateau_works_on_a_wrapped_optimizer(rng):
    model = compiled(small_model(), block_normalized(keras.optimizers.Lion(0.5)))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 0, min_delta=100.0)
    model.fit(*small_data(rng), epochs=3, verbose=0, callbacks=[plateau])
    assert float(model.optimizer.learning_rate.numpy()) < 0.5


def test_ema_averages_the_weights(rng):
    w = variable([0.0], "a/w")
    optimizer = SGDNG(1.0, momentum=0.0, use_ema=True, ema_momentum=0.5)
    for _ in range(3):
        optimizer.apply(tensors([[2.0]]), [w])
    assert arrays([w])[0] == [-3.0]
    optimizer.finalize_variable_values([w])
    assert arrays([w])[0] == [-2.25]  # -1, then (-1 - 2) / 2, then (-1.5 - 3) / 2


def test_constraints_hold_after_the_step():
    w = keras.layers.Dense(2, kernel_constraint="non_neg")
    w.build((None, 2))
    optimizer = SGDNG(5.0, momentum=0.0)
    optimizer.apply(tensors([[[1.0, -1.0], [1.0, -1.0]], [0, 0]]), [w.kernel, w.bias])
    kernel = arrays([w.kernel])[0]
    assert (kernel[:, 0] == 0).all() and (kernel[:, 1] > 1).all()


def test_frozen_layers_stay_and_the_others_learn(rng):
    model = small_model()
    model.layers[0].trainable = False
    compiled(model, AdamNG())
    before = arrays(model.layers[0].weights)
    model.fit(*small_data(rng), verbose=0)
    for a, b in zip(arrays(model.layers[0].weights), before):
        np.testing.assert_array_equal(a, b)
    assert len(model.optimizer.blocks) == 2


def test_weight_decay_comes_first_so_adaptive_sees_the_decayed_weights():
    w = variable([4.0], "a/w")
    optimizer = SGDNG(1.0, momentum=0.0, rule=Adaptive(0.1), weight_decay=0.5)
    optimizer.apply(tensors([[3.0]]), [w])
    np.testing.assert_allclose(arrays([w])[0], [2.0 - 0.1 * 2.0], rtol=1e-6)


@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_kerass_clipping_runs_before_and_so_only_matters_by_its_direction(clip):
    w = variable([0.0, 0.0], "a/w")
    optimizer = SGDNG(1.0, momentum=0.0, **{clip: 1.0})
    optimizer.apply(tensors([[30.0, 0.4]]), [w])
    expected = np.array([1.0, 0.4] if clip == "clipvalue" else [30.0, 0.4])
    expected /= -reference.block_norm([expected])
    np.testing.assert_allclose(arrays([w])[0], expected, rtol=1e-5)


def test_loss_scale_factor_is_undone_before(rng):
    w = variable([0.0], "a/w")
    optimizer = SGDNG(1.0, momentum=0.0, rule="clip", loss_scale_factor=100.0)
    optimizer.apply(tensors([[5.0]]), [w])  # really 0.05: under the threshold
    np.testing.assert_allclose(arrays([w])[0], [-0.05], rtol=1e-5)


def test_loss_scale_optimizer_skips_an_overflow_and_goes_on(rng):
    variables = some_variables(rng)
    inner = SGDNG(1.0, momentum=0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build(variables)
    before = arrays(variables)
    gradients = some_gradients(rng, variables)
    bad = [g.copy() for g in gradients]
    bad[0][0, 0] = np.inf
    apply_on_any_backend(optimizer, tensors(bad), variables)
    for a, b in zip(arrays(variables), before):
        np.testing.assert_array_equal(a, b)
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    apply_on_any_backend(optimizer, tensors(gradients), variables)
    expected = reference.normalize(gradients, before, BLOCKS, reference.unit)
    for a, b, g in zip(arrays(variables), before, expected):
        np.testing.assert_allclose(a, b - g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@EVERY_OPTIMIZER
def test_mixed_precision_learns(rng, make, policy):
    keras.config.set_dtype_policy(policy)
    model = compiled(small_model(), make(learning_rate=0.02))
    losses = model.fit(*small_data(rng), epochs=10, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    wrapped = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert wrapped == (policy == "mixed_float16")


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)
def test_multi_optimizer_gives_each_part_its_own(rng):
    model = small_model()
    ours, stock = SGDNG(0.1, momentum=0.0), keras.optimizers.SGD(0.1)
    both = keras.optimizers.MultiOptimizer(
        lambda v: ours if "dense" in v.path else stock
    )
    compiled(model, both).fit(*small_data(rng), epochs=2, verbose=0)
    assert [len(b.variables) for b in ours.blocks] == [2, 2]


def test_train_on_batch(rng):
    model = compiled(small_model(), AdamNG(0.05))
    data = small_data(rng)
    losses = [float(model.train_on_batch(*data)) for _ in range(30)]
    assert losses[-1] < losses[0]


@EVERY_OPTIMIZER
def test_a_keras_file_brings_back_settings_and_state(rng, make, tmp_path):
    data = small_data(rng)
    options = {"blocks": [("kernel", "kernels"), ("beta", None)], "l2": 0.01}
    if make is not OPTIMIZERS["AdagradBNG"]:
        options["rule"] = Adaptive(0.3)
    model = compiled(small_model(), make(**options))
    model.fit(*data, epochs=2, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert [b.name for b in loaded.optimizer.blocks][:1] == ["kernels"]
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(*arrays([a, b]))
    for m in (model, loaded):
        m.fit(*data, epochs=2, verbose=0, shuffle=False)
    for a, b in zip(loaded.trainable_variables, model.trainable_variables):
        np.testing.assert_array_equal(*arrays([a, b]))


@EVERY_OPTIMIZER
def test_a_weights_file_brings_back_the_state(rng, make, tmp_path):
    model, other = (compiled(small_model(), make()) for _ in range(2))
    model.fit(*small_data(rng), verbose=0)
    other.optimizer.build(other.trainable_variables)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    for a, b in zip(other.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(*arrays([a, b]))


@pytest.mark.parametrize("options", [{"rule": None}, {"blocks": "model", "l2": 0.1}])
def test_a_checkpoint_loads_whatever_options_are_on(rng, options, tmp_path):
    model, other = (compiled(small_model(), AdamNG(**o)) for o in ({}, options))
    model.fit(*small_data(rng), verbose=0)
    other.optimizer.build(other.trainable_variables)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    for a, b in zip(other.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(*arrays([a, b]))


def test_the_state_of_stock_adam_loads_into_adam_ng(rng, tmp_path):
    model = compiled(small_model(), keras.optimizers.Adam())
    model.fit(*small_data(rng), verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled(small_model(), AdamNG())
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    for a, b in zip(model.optimizer.variables, other.optimizer.variables):
        np.testing.assert_array_equal(*arrays([a, b]))
    assert int(other.optimizer.skipped_blocks.numpy()) == 0


@keras.saving.register_keras_serializable("keras_bng_tests")
def half(gradient_norm, weight_norm):
    return 0.5 / gradient_norm


@keras.saving.register_keras_serializable("keras_bng_tests")
def by_first_letter(variable):
    return variable.path[0]


def not_registered(gradient_norm, weight_norm):
    return 1.0 / gradient_norm


def test_registered_callables_are_saved():
    for make in (AdamNG, lambda **k: block_normalized(keras.optimizers.Lion(), **k)):
        optimizer = make(rule=half, blocks=by_first_letter)
        config = keras.saving.serialize_keras_object(optimizer)
        again = keras.saving.deserialize_keras_object(config)
        assert again.rule is half and again._block_spec is by_first_letter


@pytest.mark.parametrize("argument", ["rule", "blocks"])
@pytest.mark.parametrize(
    "value", [not_registered, lambda *_: None], ids=["def", "lambda"]
)
def test_a_callable_that_cannot_be_saved_says_how_to_register_it(argument, value):
    optimizer = AdamNG(**{argument: value})
    with pytest.raises(
        ValueError, match=f"`{argument}` .* cannot be saved.*register_k"
    ):
        keras.saving.serialize_keras_object(optimizer)


@EVERY_OPTIMIZER
def test_classes_are_registered_and_configs_make_the_same_optimizer(make):
    optimizer = make(weight_decay=0.1, l2=0.2, blocks="variable")
    config = keras.saving.serialize_keras_object(optimizer)
    assert config["registered_name"].startswith("keras_bng>")
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert type(optimizer).from_config(optimizer.get_config()).l2 == 0.2
    assert (again.weight_decay, again.l2, again._block_spec) == (0.1, 0.2, "variable")


def test_a_block_without_gradient_this_step_is_left_alone(rng):
    variables = some_variables(rng)
    optimizer = AdamNG()
    gradients = tensors(some_gradients(rng, variables))
    gradients[2] = None
    before = arrays(variables)
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        optimizer.apply(gradients, variables)
    np.testing.assert_array_equal(arrays(variables)[2], before[2])
    assert not (arrays(variables)[0] == before[0]).any()


def test_zero_gradients_move_nothing(rng):
    for make in OPTIMIZERS.values():
        variables = some_variables(rng)
        before = arrays(variables)
        optimizer = make()
        optimizer.apply([ops.zeros(v.shape) for v in variables], variables)
        for a, b in zip(arrays(variables), before):
            np.testing.assert_array_equal(a, b)
        assert int(optimizer.skipped_blocks.numpy()) == 0
