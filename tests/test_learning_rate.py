"""`find_learning_rate`, on every backend."""

import keras
import numpy as np
import pytest
from helpers import OPTIMIZERS, arrays, compiled, small_data, small_model
from keras import ops

import keras_bng
from keras_bng import SGDNG, AdamNG, find_learning_rate
from keras_bng.tools import learning_rate, rate_search

BACKEND = keras.backend.backend()
RATES = [1e-4, 1e-2, 1.0]
FEW = {"rates": RATES, "steps": 20, "batch_size": 8, "verbose": 0}
pytestmark = pytest.mark.filterwarnings("ignore:find_learning_rate. several rates")


def dropout_model(**options):
    """With all that a model has beside its weights: seeds, and moving averages."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(0.2),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    options = {"optimizer": SGDNG(0.03), "metrics": ["accuracy"], **options}
    return compiled(model, options.pop("optimizer"), **options)


def state_of(model):
    """All that a search must leave as it was: values, then objects."""
    optimizer = model.optimizer
    values = [*model.variables, *model.metrics_variables, *optimizer.variables]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    modules = model.modules() if BACKEND == "torch" else ()
    objects = (
        [module.training for module in modules],
        optimizer,
        optimizer.built,
        len(optimizer.variables),
        vars(inner)["_learning_rate"],
        model.train_function,
        model.test_function,
        model.stop_training,
        vars(model).get("history"),
        "train_step" in vars(model),
        "get_metrics_result" in vars(model),
    )
    return arrays(values), objects


def assert_same_state(model, before):
    values, objects = state_of(model)
    assert len(values) == len(before[0])
    for now, then in zip(values, before[0]):
        np.testing.assert_array_equal(now, then)
        assert now.dtype == then.dtype
    assert all(a is b or a == b for a, b in zip(objects, before[1]))


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.5)


OPTIMIZERS_LEFT = {
    "new": lambda: SGDNG(0.03),
    "new callable": lambda: keras.optimizers.SGD(lambda: 0.1, use_ema=True),
    "trained, with a rule and blocks in Python": lambda: SGDNG(
        0.03, rule=lambda g, w: 1 / g, blocks=lambda v: "one"
    ),
    "trained, with a schedule in a loss scale": lambda: (
        keras.optimizers.LossScaleOptimizer(AdamNG(schedule()))
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS_LEFT)
def test_the_model_is_left_as_it_was_bit_for_bit(name, rng):
    model, data = dropout_model(optimizer=OPTIMIZERS_LEFT[name]()), small_data(rng)
    if name.startswith("trained"):
        model.fit(*data, batch_size=8, verbose=0)
    else:
        model.test_on_batch(*data)  # so that there are metrics
        if BACKEND == "torch":
            model.train()
    before = state_of(model)
    find_learning_rate(model, *data, validation_data=data, **FEW)
    assert_same_state(model, before)


def test_the_next_fit_is_the_one_without_a_search(rng):
    """Also its Dropout, its moving averages and its optimizer."""
    found = []
    for search in (False, True):
        keras.utils.set_random_seed(3)
        model, data = dropout_model(), small_data(np.random.default_rng(0))
        options = {"batch_size": 8, "verbose": 0, "shuffle": False}
        model.fit(*data, **options)
        if search:
            find_learning_rate(model, *data, **FEW)
        model.fit(*data, **options)
        found.append(arrays([*model.variables, *model.optimizer.variables]))
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("where", ["batches", "steps", "validation"])
def test_the_model_is_left_as_it_was_after_an_error(where, rng, monkeypatch):
    model, data = dropout_model(), small_data(rng)
    model.fit(*data, batch_size=8, verbose=0)
    before = state_of(model)
    plain, error = rate_search._fetched, KeyboardInterrupt
    calls = []

    def fails(losses):
        calls.append(len(losses))
        if len(calls) > (23 if where == "steps" else 20):  # 20 are of the start
            raise error
        return plain(losses)

    def batches():
        yield tuple(part[:8] for part in data)
        raise ZeroDivisionError

    x, y, validation = *data, None
    if where == "batches":
        x, y, error = batches(), None, Exception  # TensorFlow has its own
    else:
        monkeypatch.setattr(rate_search, "_fetched", fails)
        validation = data if where == "validation" else None
    options = {**FEW, "batch_size": None if y is None else 8}
    with pytest.raises(error):
        find_learning_rate(model, x, y, validation_data=validation, **options)
    monkeypatch.undo()
    assert_same_state(model, before)
    model.fit(*data, batch_size=8, verbose=0)


EVERY = {
    "Adam": keras.optimizers.Adam,
    "SGD": keras.optimizers.SGD,
    **{name: OPTIMIZERS[name] for name in ("AdamNG", "AdagradBNG")},
    "block_normalized(Lion)": OPTIMIZERS["block_normalized(Lion)"],
}
XLA = [] if BACKEND == "torch" else [EVERY["AdamNG"], EVERY["Adam"]]


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_it_finds_the_rate_that_learns(make, rng):
    model = compiled(small_model(), make(), jit_compile=make in XLA)
    x, y = small_data(rng)
    found = find_learning_rate(
        model, x, y, rates=[1e-7, 1e-2, 1e30], steps=20, batch_size=16, verbose=0
    )
    assert found.best == 1e-2 and isinstance(found.best, float)
    np.testing.assert_array_equal(found.rates, [1e-7, 1e-2, 1e30])
    assert found.losses[1] < found.losses[0] and found.losses[1] < found.losses[2]


def test_each_rate_trains_as_fit_does_from_the_same_start(rng):
    """Fresh state and the same batches, whatever rate came before."""
    model = compiled(small_model(), keras.optimizers.SGD(0.5, momentum=0.9))
    x, y = (part[:8] for part in small_data(rng))  # one batch: in whatever order
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    weights = model.get_weights()
    found = find_learning_rate(model, x, y, rates=RATES, steps=20, verbose=0)
    for rate, curve in zip(found.rates, found.curves):
        model.set_weights(weights)
        compiled(model, keras.optimizers.SGD(float(rate), momentum=0.9))
        history = model.fit(x, y, batch_size=8, epochs=20, verbose=0, shuffle=False)
        np.testing.assert_allclose(curve, history.history["loss"], rtol=2e-4)


def test_dropout_and_batches_are_the_same_for_every_rate(rng):
    """Nearly the same rates have nearly the same curves."""
    model, data = dropout_model(), small_data(rng)
    few = {**FEW, "rates": [1e-2, 1e-2 * (1 + 1e-6)], "steps": 40}
    curves = find_learning_rate(model, *data, **few).curves
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)
    assert curves[0].std() > 1e-2


def test_the_rate_is_constant_whatever_the_schedule_was(rng):
    x, y = (part[:8] for part in small_data(rng))
    found = []
    for rate in (0.5, schedule()):
        keras.utils.set_random_seed(1)
        model = compiled(small_model(), keras.optimizers.SGD(rate))
        found.append(find_learning_rate(model, x, y, **FEW).curves)
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.skipif(BACKEND == "torch", reason="it traces nothing")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_there_is_one_trace_for_all_rates_and_none_in_the_next_fit(jit_compile, rng):
    calls = []

    class Counted(keras.Sequential):
        def call(self, *args, **kwargs):
            calls.append(len(calls))
            return super().call(*args, **kwargs)

    model = Counted([keras.Input((6,)), keras.layers.Dense(3)])
    compiled(model, SGDNG(0.1), jit_compile=jit_compile or BACKEND == "jax")
    x, y = small_data(rng, count=60)  # the last batch is smaller
    model.fit(x, y, batch_size=8, verbose=0)
    before = len(calls)
    two = {**FEW, "rates": RATES[:2]}
    find_learning_rate(model, x, y, **two)
    of_two, before = len(calls) - before, len(calls)
    find_learning_rate(model, x, y, **FEW)
    of_three, before = len(calls) - before, len(calls)
    assert of_three == of_two == 1
    model.fit(x, y, batch_size=8, verbose=0)
    assert len(calls) == before


class Days(keras.utils.PyDataset):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, i):
        return self.parts[i]


def generator(parts, endless=False):
    while True:
        yield from parts
        if not endless:
            return


def filling_the_same_arrays(parts):
    buffers = [np.array(part) for part in parts[0]]
    for part in parts:
        for buffer, values in zip(buffers, part):
            buffer[:] = values
        yield tuple(buffers)


SOURCES = {
    "PyDataset": Days,
    "generator": generator,
    "endless generator": lambda parts: generator(parts, endless=True),
    "same arrays": filling_the_same_arrays,
    "tf.data": lambda parts: (
        pytest.importorskip("tensorflow")
        .data.Dataset.from_tensor_slices(tuple(np.concatenate(p) for p in zip(*parts)))
        .batch(8)
    ),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_data_of_every_kind_is_what_it_is_in_arrays(make, rng):
    arrays = *small_data(rng), rng.uniform(size=64).astype("float32")
    parts = [tuple(a[i : i + 8] for a in arrays) for i in range(0, 64, 8)]
    model = compiled(small_model(), keras.optimizers.SGD())
    options = {"rates": [1e-6, 0.5], "steps": 40, "verbose": 0}
    found = find_learning_rate(model, make(parts), **options).curves[0]
    model.set_weights(weights := model.get_weights())
    wanted = []
    for part in parts:
        model.reset_metrics()  # else older Keras gives a running mean
        wanted.append(model.train_on_batch(*part))
        model.set_weights(weights)
    if make is filling_the_same_arrays:  # Keras looks at two of them beforehand
        assert len(np.unique(found[:8].round(3))) >= 6
        return
    if make is not Days:  # which Keras shuffles
        np.testing.assert_allclose(found[:8], wanted, rtol=1e-2)
    for epoch in np.split(found, 5):
        np.testing.assert_allclose(np.sort(epoch), np.sort(wanted), rtol=1e-2)


def test_weights_of_samples_count(rng):
    x, y = small_data(rng)
    model = compiled(small_model(), SGDNG(0.1))
    weights = np.ones(len(x), "float32")
    one, two = (
        find_learning_rate(model, x, y, sample_weight=w, **{**FEW, "batch_size": 64})
        for w in (weights, 2 * weights)
    )
    np.testing.assert_allclose(2 * one.curves[:, 0], two.curves[:, 0], rtol=1e-5)


def test_several_inputs_and_outputs_in_dicts_and_lists(rng):
    a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
    both = keras.layers.Concatenate()([a, b])
    outputs = {"p": keras.layers.Dense(1, name="p")(both), "q": 1.0 * both[:, :1]}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(AdamNG(), {"p": "mse", "q": "mse"})
    x, _ = small_data(rng)
    inputs = {"a": x, "b": x[:, :2]}
    targets = {"p": x[:, :1], "q": x[:, :1]}
    assert find_learning_rate(model, inputs, targets, **FEW).best == 1e-2
    model = keras.Model([a, b], outputs["p"])
    model.compile(AdamNG(), "mse")
    assert find_learning_rate(model, [x, x[:, :2]], x[:, :1], **FEW).best == 1e-2


def test_with_validation_data_its_loss_decides(rng):
    """Here what is learned of the training data is wrong."""
    x, y = small_data(rng)
    model = compiled(small_model(), AdamNG())
    wrong = (y + 1) % 3
    found = find_learning_rate(model, x, y, **FEW)
    assert found.losses[1] < found.loss_at_start
    with pytest.raises(RuntimeError, match="No rate made the loss smaller") as error:
        find_learning_rate(model, x, y, validation_data=(x, wrong), **FEW)
    start = model.evaluate(x, wrong, batch_size=8, verbose=0)
    assert f"at the start {start:.4g}" in str(error.value)
    weights = np.where(y == 0, 1.0, 0.1)  # three arrays, and batches that are not alike
    data = x[:61], y[:61], weights[:61]
    found = find_learning_rate(model, x, y, validation_data=data, **FEW)
    start = model.evaluate(*data[:2], 8, sample_weight=data[2], verbose=0)
    assert found.loss_at_start == pytest.approx(start, rel=1e-5)


def test_a_step_of_ones_own_is_what_trains(rng):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, *args):
            if BACKEND == "jax":
                logs, state = super().train_step(*args)
                return {"loss": logs["loss"] + 100}, state
            return {"loss": super().train_step(*args)["loss"] + 100}

    model = compiled(Own(), AdamNG(), metrics=["accuracy"])  # which is not built
    found = find_learning_rate(model, *small_data(rng), **FEW)
    assert found.best in RATES and 100 < found.loss_at_start < 110
    assert not model.optimizer.built
    assert len(model.metrics_variables) > 2  # that were built in the search
    assert not np.any(
        np.concatenate([a.ravel() for a in arrays(model.metrics_variables)])
    )


def test_a_model_that_cannot_be_built_says_so(rng):
    class Odd(keras.Model):
        def call(self, x):
            raise ValueError("odd")

    model = compiled(Odd(), AdamNG())
    with pytest.raises(ValueError, match="odd|Build it"):
        find_learning_rate(model, *small_data(rng), **FEW)
    assert model.train_function is None and isinstance(model.optimizer, AdamNG)


def test_another_optimizer_of_the_model_must_be_built(rng):
    model = dropout_model()
    model.other = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="beside `model.optimizer`"):
        find_learning_rate(model, *small_data(rng), **FEW)


@pytest.mark.skipif(BACKEND == "jax", reason="there `fit` has one optimizer")
def test_other_optimizers_of_the_model_are_put_back_too(rng):
    seen = []

    class Own(keras.Sequential):
        def train_step(self, data):
            seen.append(self.same is self.optimizer)
            self.other.iterations.assign_add(1)
            return super().train_step(data)

    model = compiled(Own(small_model().layers), AdamNG())
    model.other = keras.optimizers.SGD(0.1)
    model.other.build(model.trainable_variables)
    model.same = model.optimizer  # under another name
    find_learning_rate(model, *small_data(rng), **FEW)
    assert int(model.other.iterations.numpy()) == 0
    assert all(seen) and model.same is model.optimizer


def test_a_rate_whose_loss_is_not_finite_ends_early_and_ranks_last(rng):
    x, y = rng.normal(size=(64, 6)).astype("float32"), rng.normal(size=(64, 1))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse")
    options = {**FEW, "rates": [1e-4, 1e-1, 1e20]}
    found = find_learning_rate(model, x, y, **options)
    assert found.best == 0.1 and found.losses[2] == np.inf
    assert np.isnan(found.curves[2, -1]) and "not finite, at step" in str(found)


def test_no_rate_that_learns_is_an_error_with_the_table(rng):
    model = compiled(small_model(), SGDNG())
    x, y = small_data(rng)
    with pytest.raises(RuntimeError, match="BlockMonitor") as error:
        find_learning_rate(model, x, y, **{**FEW, "rates": [1e-9, 1e-8]})
    assert "1e-08" in str(error.value) and "no better than at the start" in str(
        error.value
    )
    x[:] = np.nan
    with pytest.raises(RuntimeError, match="not finite, at step 1"):
        find_learning_rate(model, x, y, **FEW)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.distribute")
def test_on_two_replicas(rng):
    from test_replicas import two_replicas

    x, y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 4))
    found = []
    for strategy in (None, two_replicas()):
        keras.utils.set_random_seed(1)

        def make():
            layers = keras.layers.Dense(4), keras.layers.BatchNormalization()
            model = keras.Sequential([keras.Input((6,)), layers[0]])
            model.compile(SGDNG(), "mse", metrics=["mae"], jit_compile=False)
            return model

        if strategy is None:
            model = make()
        else:
            with strategy.scope():
                model = make()
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        before = state_of(model)
        batches = Days([(x[i : i + 8], y[i : i + 8]) for i in range(0, 8, 8)])
        options = {"rates": RATES, "steps": 10, "verbose": 0}
        found.append(find_learning_rate(model, batches, **options).curves)
        assert_same_state(model, before)
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has it not on torch")
def test_several_steps_in_one_execution(rng):
    model = compiled(small_model(), AdamNG(), steps_per_execution=3)
    assert find_learning_rate(model, *small_data(rng), **FEW).best == 1e-2


def test_progress_says_rate_step_and_time(rng, capsys):
    model, data = compiled(small_model(), AdamNG()), small_data(rng)
    find_learning_rate(model, *data, **{**FEW, "verbose": 2})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("Rate 2 of 3 (0.01): step 20 of 20, loss ")
    assert lines[2].strip().endswith("0:00 left")
    few = {**FEW, "rates": RATES[:2]}
    find_learning_rate(model, *data, **{**few, "verbose": 0})
    assert capsys.readouterr() == ("", "")
    find_learning_rate(model, *data, **{**few, "verbose": 1})
    assert "\n" not in (out := capsys.readouterr().out) and out.count("\r") >= 2


def test_the_table_and_the_picture(rng, tmp_path):
    pytest.importorskip("matplotlib")
    model, data = compiled(small_model(), AdamNG()), small_data(rng)
    found = find_learning_rate(model, *data, **FEW)
    lines = str(found).splitlines()
    assert lines[0].split() == ["rate", "loss"] and lines[2].endswith("  the best")
    assert lines[2].split()[:2] == ["0.01", f"{found.losses[1]:.4g}"]
    found.plot(tmp_path / "new" / "rates.png")
    assert (tmp_path / "new" / "rates.png").stat().st_size > 8_000
    texts = [
        t.get_text() for t in found._figure().findobj(lambda a: hasattr(a, "get_text"))
    ]
    assert {"best: 0.01", "0.0001", "learning rate", "step"} <= set(texts)


def test_the_default_rates_are_three_a_decade_for_class_and_rule():
    lengths = learning_rate.grid(SGDNG())
    assert lengths[:4] == [0.002, 0.005, 0.01, 0.02] and lengths[-1] == 2
    shares = learning_rate.grid(SGDNG(rule=keras_bng.Adaptive(0.2)))
    assert shares[0] == 0.001 and shares[-1] == 1
    of_a_weight = learning_rate.grid(SGDNG(rule="rms"))
    assert of_a_weight[0] == 2e-5 and of_a_weight[-1] == 0.02
    assert learning_rate.grid(SGDNG(norm="max")) == of_a_weight
    assert learning_rate.grid(SGDNG(norm="l1"))[::9] == [0.2, 200]
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    assert learning_rate.grid(scaled) == learning_rate.grid(AdamNG())
    assert len(learning_rate.grid(AdamNG())) == 10
    for optimizer in (keras.optimizers.Lion(), keras.optimizers.SGD()):
        rates = learning_rate.grid(optimizer)
        assert 9 <= len(rates) <= 11 and rates[0] < 1e-3 * 1.1 < rates[-1]


WRONG = {
    "rates": [[], [0.1], [0.1, 0.1], [0.1, -1.0], [0.1, 0.0], [0.1, np.inf]],
    "steps": [0, -1],
    "batch_size": [0],
    "verbose": [3, "loud"],
}
OF_WRONG_TYPE = {
    "rates": ["0.1", 0.1, [0.1, "1"], [0.1, True]],
    "steps": [1.5, True, "9"],
    "batch_size": [1.5],
}


@pytest.mark.parametrize("name, value", [(n, v) for n in WRONG for v in WRONG[n]])
def test_a_bad_value_is_an_error(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be .* Received"):
        find_learning_rate(dropout_model(), np.zeros((8, 6)), **{name: value})


@pytest.mark.parametrize(
    "name, value", [(n, v) for n in OF_WRONG_TYPE for v in OF_WRONG_TYPE[n]]
)
def test_a_bad_type_is_an_error(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be .* Received"):
        find_learning_rate(dropout_model(), np.zeros((8, 6)), **{name: value})


def test_a_bad_model_or_no_data_is_an_error(rng):
    with pytest.raises(TypeError, match="takes a model. Received"):
        find_learning_rate("model", np.zeros((8, 6)))
    with pytest.raises(ValueError, match="must be compiled"):
        find_learning_rate(small_model(), np.zeros((8, 6)))
    model = compiled(small_model(), AdamNG())
    before = model.optimizer
    nothing = (part[:0] for part in small_data(rng)), [Days([])]
    for data in nothing:
        with pytest.raises(ValueError):
            find_learning_rate(model, *data, **{**FEW, "batch_size": None})
    assert model.optimizer is before and model.train_function is None


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)
def test_several_optimizers_in_one_are_an_error(rng):
    both = keras.optimizers.MultiOptimizer(lambda v: keras.optimizers.SGD())
    with pytest.raises(ValueError, match="has several rates"):
        find_learning_rate(compiled(small_model(), both), *small_data(rng), **FEW)


def test_an_optimizer_that_cannot_be_copied_says_so(rng):
    class Odd(keras.optimizers.SGD):
        def __init__(self, odd):
            super().__init__(0.1)

    with pytest.raises(ValueError, match="get_config"):
        find_learning_rate(compiled(small_model(), Odd(1)), *small_data(rng), **FEW)


def test_what_is_left_out_of_the_config_is_kept(rng):
    """Blocks of a built optimizer, and variables without weight decay."""
    model = small_model()
    optimizer = SGDNG(0.1, weight_decay=0.1, blocks="variable", rule="adaptive")
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    optimizer.build(model.trainable_variables)
    copy = rate_search.fresh_copy(optimizer)
    copy.build(model.trainable_variables)
    assert [b.name for b in copy.blocks] == [b.name for b in optimizer.blocks]
    assert copy.rule == optimizer.rule
    decays = [copy._use_weight_decay(v) for v in model.trainable_variables]
    assert decays == [False, *[True] * (len(decays) - 1)]
    assert float(ops.convert_to_numpy(copy.iterations)) == 0
