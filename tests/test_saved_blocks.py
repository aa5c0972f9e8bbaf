"""A loaded optimizer has the blocks that it had, whatever became of the paths."""

import copy
import importlib.util
import json
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from helpers import arrays, compiled, small_data, small_model, variable

import keras_bng
from keras_bng import SGDNG, AdagradBNG, AdamNG, block_normalized

L = keras.layers
HERE = pathlib.Path(__file__).parent


@keras.saving.register_keras_serializable("keras_bng_tests")
def by_part(v):
    return "encoder" if "encoder/" in v.path else "rest"


@keras.saving.register_keras_serializable("keras_bng_tests")
class Numbered(keras.Model):
    """Its layers have automatic names, which are others when it is made again."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [L.Dense(6, activation="tanh"), L.Dense(6), L.Dense(3)]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def build(self, shape):
        for part, inputs in zip(self.parts, (6, 6, 6)):
            part.build((None, inputs))
        self.built = True


@keras.saving.register_keras_serializable("keras_bng_tests")
def first_of_three(v):
    """By a number in a path that is another one after loading."""
    return "first" if v.path.split("/")[-2] == FIRST["name"] else "others"


FIRST = {}


def nested():
    """Two layers of one name, told apart by the names of the models around them."""
    encoder = [L.Dense(6, name="x", use_bias=False), L.Dense(6, name="p")]
    decoder = [L.LayerNormalization(name="x"), L.Dense(3, name="q")]
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.Sequential(encoder, name="encoder"),
            keras.Sequential(decoder, name="decoder"),
        ]
    )


def numbered():
    model = Numbered()
    model.build((None, 6))
    FIRST["name"] = model.parts[0].name
    return model


MODELS = {
    "by layer": (nested, "layer"),
    "patterns": (nested, [("encoder/", "encoder"), ("decoder/", "decoder")]),
    "callable": (nested, by_part),
    "left out": (nested, [("encoder/", None)]),
    "other numbers": (numbered, first_of_three),
    "variables": (nested, "variable"),
    "model": (nested, "model"),
}
MAKERS = {
    "SGDNG": lambda **k: SGDNG(0.05, **k),
    "AdagradBNG": lambda **k: AdagradBNG(0.05, **k),
    "LionNG": lambda **k: block_normalized(keras.optimizers.Lion(0.05), **k),
}


def positions(optimizer, variables):
    where = {id(v): i for i, v in enumerate(variables)}
    return [[where[id(v)] for v in block.variables] for block in optimizer.blocks]


def fit(model):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(*small_data(np.random.default_rng(0)), **options)


@pytest.mark.parametrize(
    "make, name",
    [("SGDNG", name) for name in MODELS]
    + [
        (make, name)
        for make in ("AdagradBNG", "LionNG")
        for name in ("callable", "by layer")
    ],
)
def test_a_loaded_model_has_the_same_blocks_and_goes_on_alike(make, name, tmp_path):
    build, spec = MODELS[name]
    model = compiled(build(), MAKERS[make](blocks=spec), jit_compile=False)
    fit(model)
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = keras.models.load_model(tmp_path / "model.keras")
    before, after = model.optimizer, loaded.optimizer
    assert [b.name for b in after.blocks] == [b.name for b in before.blocks]
    assert positions(after, loaded.trainable_variables) == positions(
        before, model.trainable_variables
    )
    assert after.get_config() == before.get_config()
    fit(model)
    fit(loaded)
    for a, b in zip(arrays(model.weights), arrays(loaded.weights)):
        np.testing.assert_array_equal(a, b)
    loaded.save(tmp_path / "again.keras")  # and once more
    again = keras.models.load_model(tmp_path / "again.keras")
    assert again.optimizer.get_config() == before.get_config()


GO_ON = """
import sys
import keras
import keras_bng
import numpy as np
from test_saved_blocks import MAKERS, fit

for name in MAKERS:
    model = keras.models.load_model(f"{name}.keras")
    fit(model)
    weights = map(keras.ops.convert_to_numpy, model.weights)
    np.savez(f"{name}-{keras.backend.backend()}.npz", *weights)
"""


@pytest.mark.parametrize("other", ["tensorflow", "jax", "torch"])
def test_a_run_goes_on_on_another_backend(other, tmp_path):
    if other == keras.backend.backend() or not importlib.util.find_spec(other):
        pytest.skip("the same, or not installed")
    models = {}
    for name, make in MAKERS.items():
        models[name] = compiled(nested(), make(), jit_compile=False)
        fit(models[name])
        models[name].save(tmp_path / f"{name}.keras")
        fit(models[name])
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", GO_ON],
        cwd=tmp_path,
        env={
            **os.environ,
            "KERAS_BACKEND": other,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for name, model in models.items():
        with np.load(tmp_path / f"{name}-{other}.npz") as file:
            for a, b in zip(arrays(model.weights), file.values()):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_under_mixed_float16_too(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(nested(), SGDNG(0.05), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    inner = [m.optimizer.inner_optimizer for m in (model, loaded)]
    assert positions(inner[1], loaded.trainable_variables) == positions(
        inner[0], model.trainable_variables
    )


KEEPS_THE_OUTER_NAME = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16),
    reason="from Keras 3.16 on, a loaded model's paths begin with its name",
)


@pytest.mark.parametrize(
    "build", [pytest.param(nested, marks=KEEPS_THE_OUTER_NAME), numbered]
)
def test_the_premise_paths_are_others_after_loading(build, tmp_path):
    model = compiled(build(), "sgd")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [v.path for v in model.trainable_variables] != [
        v.path for v in loaded.trainable_variables
    ]


def test_the_config_is_json_and_without_blocks_before_build():
    model = nested()
    optimizer = SGDNG(blocks=[("encoder/", "encoder"), ("x/gamma$", None)])
    assert "partition" not in optimizer.get_config()
    optimizer.build(model.trainable_variables)
    config = optimizer.get_config()
    assert json.loads(json.dumps(config)) == config


def test_a_config_made_for_one_model_makes_an_optimizer_for_another():
    optimizer = SGDNG()
    optimizer.build(nested().trainable_variables)
    other = small_model()
    again = SGDNG.from_config(optimizer.get_config())
    again.build(other.trainable_variables)
    expected = keras_bng.partition(other.trainable_variables)
    assert [b.name for b in again.blocks] == [b.name for b in expected]


def test_a_config_with_other_blocks_has_those():
    model = nested()
    optimizer = SGDNG()
    optimizer.build(model.trainable_variables)
    again = SGDNG.from_config({**optimizer.get_config(), "blocks": "model"})
    again.build(model.trainable_variables)
    assert [b.name for b in again.blocks] == ["model"]


def test_a_config_without_blocks_loads_as_before():
    config = {k: v for k, v in SGDNG().get_config().items() if k != "partition"}
    again = SGDNG.from_config(config)
    again.build(nested().trainable_variables)
    assert len(again.blocks) == 4


def test_a_variable_that_is_listed_twice_stays_in_its_block():
    w, b = variable([1.0, 2.0], "a/w"), variable([3.0], "b/b")
    optimizer = SGDNG(1.0, momentum=0.0)
    optimizer.build([w, b, w])
    again = SGDNG.from_config(optimizer.get_config())
    again.build([w, b, w])
    assert again.blocks == optimizer.blocks
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("name", ["Adam", "Lion", "Muon"])
def test_nothing_in_a_config_is_of_one_backend_only(name):
    if name == "Muon" and not hasattr(keras.optimizers, name):
        pytest.skip("this Keras has none")
    optimizer = block_normalized(getattr(keras.optimizers, name)(0.05))
    text = json.dumps(keras.saving.serialize_keras_object(optimizer))
    assert keras.backend.backend() not in text


# State that does not fit.


@pytest.mark.parametrize(
    "saved, loading",
    [
        # One entry less than ours, as stock state has, and yet none of it.
        ([(), (), (2, 3), (9,)], {"momentum": 0.9}),
        ([(), (), (3,), (2, 3)], {"momentum": 0.9}),
        # As many as ours, of other shapes.
        ([(), (), (4, 3), (3,), ()], {"momentum": 0.9}),
        # A momentum where the counter is, and a counter where a momentum is.
        ([(), (), (2, 3), (3,), (3,)], {"momentum": 0.9}),
        ([(), ()], {"momentum": 0.9}),
    ],
)
def test_state_that_does_not_fit_is_skipped_with_a_warning(saved, loading):
    w = [variable(np.ones((2, 3), "float32"), "a/k"), variable(np.ones(3), "a/b")]
    optimizer = SGDNG(0.5, **loading)
    optimizer.build(w)
    before = arrays(optimizer.variables)
    store = {str(i): np.full(shape, 7.0, "float32") for i, shape in enumerate(saved)}
    store["0"] = np.int64(7)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        optimizer.load_own_variables(store)
    for a, b in zip(arrays(optimizer.variables), before):
        np.testing.assert_array_equal(a, b)


def test_a_counter_is_not_a_momentum():
    """Scalar variables: shapes alone would fit."""
    optimizer, other = SGDNG(0.5), SGDNG(0.5, momentum=0.0)
    for o in (optimizer, other):
        o.build([variable(1.0, "a/s")])
    store = {}
    other.save_own_variables(store)  # iteration, rate, counter
    assert len(store) == len(optimizer.variables) - 1
    before = arrays(optimizer.variables)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        optimizer.load_own_variables(store)
    for a, b in zip(arrays(optimizer.variables), before):
        np.testing.assert_array_equal(a, b)


# Pickling and copying, as Joblib, Ray and KerasTuner do it.

PICKLED = {
    "AdamNG": lambda: AdamNG(0.05, rule="adaptive", blocks="variable"),
    "AdagradBNG": lambda: AdagradBNG(0.05, l2=0.1),
    "LionNG": lambda: block_normalized(keras.optimizers.Lion(0.05), rule="clip"),
}


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
@pytest.mark.parametrize(
    "way", [lambda o: pickle.loads(pickle.dumps(o)), copy.copy, copy.deepcopy]
)
def test_optimizers_can_be_pickled_and_copied(make, way):
    optimizer = make()
    again = way(optimizer)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


def test_a_pickled_optimizer_is_read_by_another_process(tmp_path):
    path = tmp_path / "optimizer.pickle"
    path.write_bytes(pickle.dumps(PICKLED["LionNG"]()))
    code = f"""
import pickle
with open({str(path)!r}, "rb") as file:
    optimizer = pickle.load(file)
print(type(optimizer).__name__, optimizer.rule)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert "LionNG Clip(threshold=0.1)" in result.stdout, result.stderr[-2000:]


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
def test_a_compiled_model_can_be_pickled(make):
    model = compiled(small_model(), make())
    fit(model)
    again = pickle.loads(pickle.dumps(model))
    assert again.optimizer.get_config() == model.optimizer.get_config()
    fit(model)
    fit(again)
    for a, b in zip(arrays(model.weights), arrays(again.weights)):
        np.testing.assert_allclose(a, b, rtol=1e-6)
