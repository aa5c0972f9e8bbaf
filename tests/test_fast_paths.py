"""Every fast path beside its plain twin: `keras_bng/backend/` beside `keras.ops`."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
from helpers import arrays, some_variables, tensors, traced, variable, wrapped

import keras_bng
from keras_bng import backend, normalize
from keras_bng.backend import common
from keras_bng.optimizer import FUSED

plain = normalize.__globals__  # of the module, whose name the function has
TENSORFLOW = keras.backend.backend() == "tensorflow"
MODES = ["eager", "op by op", "xla", "graph"] if TENSORFLOW else ["eager"]

LR = {"learning_rate": 0.05}
CASES = {
    "SGD": (keras_bng.SGDNG, {**LR, "momentum": 0.0}),
    "momentum": (keras_bng.SGDNG, LR),
    "Nesterov": (keras_bng.SGDNG, {**LR, "nesterov": True}),
    "Adam": (keras_bng.AdamNG, LR),
    "AMSGrad": (keras_bng.AdamNG, {**LR, "amsgrad": True}),
    "AdaGrad": (keras_bng.AdagradNG, LR),
    "RMSprop": (keras_bng.RMSpropNG, LR),
    "RMSprop, momentum": (keras_bng.RMSpropNG, {**LR, "momentum": 0.5}),
    "RMSprop, centered": (keras_bng.RMSpropNG, {**LR, "centered": True}),
    "RMSprop, both": (keras_bng.RMSpropNG, {**LR, "momentum": 0.5, "centered": True}),
    "AdaGradBNG": (keras_bng.AdagradBNG, {"learning_rate": 1e-3, "delta": 0.01}),
    "AdamW": (lambda **k: wrapped(keras.optimizers.AdamW, 0.05, k), {}),
    "Lion": (lambda **k: wrapped(keras.optimizers.Lion, 0.05, k), {}),
}
# Small and alike, large (see `sizes`), and one in no block.
SHAPES = {
    "a/kernel": (4, 3),
    "a/bias": (3,),
    "b/kernel": (4, 3),
    "c/kernel": (130, 70),
    "d/kernel": (70, 90),
    "d/bias": (90,),
    "free/scale": (),
}
SPEC = [("free", None)]


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """What counts as large, made small: rows are summed first, rates are folded."""
    name = {"tensorflow": "LARGE", "torch": "LONG"}.get(keras.backend.backend())
    if name is not None:
        monkeypatch.setattr(backend._OF_THIS_BACKEND, name, 2**10)


def gradients(count=100):
    """Blocks of all sizes, and now and then a NaN, an Inf, or nothing but zeros."""
    rng = np.random.default_rng(1)
    layers = [path.split("/")[0] for path in SHAPES]
    for step in range(count):
        reach = [25, 3][step % 2]  # of the usual sizes, factors are folded
        scale = {layer: 10.0 ** rng.uniform(-reach, reach) for layer in layers}
        scale["free"] = 1
        if step % 10 == 3:
            scale["abcd"[step // 10 % 4]] = [1e-33, 1e33][step // 10 % 2]
        g = [rng.normal(size=s) * scale[n] for n, s in zip(layers, SHAPES.values())]
        if step % 10 == 5:
            bad = g[[0, 3, 4][step // 10 % 3]]
            bad.flat[bad.size // 2] = [np.nan, -np.inf][step // 10 % 2]
        if step % 10 == 7:
            g[2] *= 0
            g[[3, 4][step // 10 % 2]] *= 0
        yield g


def new(case, dtype, l2, **options):
    make, settings = CASES[case]
    weights = some_variables(np.random.default_rng(0), SHAPES, dtype)
    optimizer = make(**settings, l2=l2, blocks=SPEC, **options)
    optimizer.build(weights)
    return optimizer, weights


def found(optimizer, weights, step, dtype):
    for g in gradients():
        step(tensors(g, dtype))
    return [np.float64(a) for a in arrays([*weights, *optimizer.variables])]


@functools.cache
def of_twin(case, dtype, l2):
    """Plain operations, and the stock optimizer's update."""
    optimizer, weights = new(case, dtype, l2, jit_compile=False)
    with mock.patch.multiple(
        backend,
        create=True,
        update=common.update,
        block_norms=plain["block_norms"],
        times=plain["times"],
        one_by_one=common.one_by_one,
    ):
        # On TensorFlow a graph is many times faster than its operations one by one.
        step = traced("graph" if TENSORFLOW else "eager", step_of(optimizer, weights))
        return found(optimizer, weights, step, dtype)


def step_of(optimizer, weights):
    return lambda g: optimizer.apply(g, weights)


@pytest.mark.parametrize(
    "mode, dtype, l2",
    [
        *((mode, "float32", None) for mode in MODES),
        (MODES[-1], "float32", 0.01),
        (MODES[-1], "float64", None),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_100_steps_beside_the_plain_twin(case, dtype, l2, mode):
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has float64 only where it is turned on")
    options = {"jit_compile": False} if mode == "op by op" else {}
    optimizer, weights = new(case, dtype, l2, **options)

    step = step_of(optimizer, weights)
    if mode in ("graph", "xla"):
        step = traced(mode, step)
    ours, twin = found(optimizer, weights, step, dtype), of_twin(case, dtype, l2)
    assert int(optimizer.skipped_blocks.numpy()) == 10
    # Rounding of 100 steps of 0.05: in float64, too, Keras's settings are float32.
    for a, b in zip(ours, twin):
        tolerance = {"rtol": 2e-4, "atol": 2e-5 * max(1.0, np.abs(b).max(initial=0))}
        if case == "Lion":  # signs turn over
            assert np.mean(~np.isclose(a, b, **tolerance)) < 1e-3
        else:
            np.testing.assert_allclose(a, b, **tolerance)


class Counted:
    """How many variables an optimizer updates with its plain `update_step`."""

    def __init__(self, optimizer):
        self.count = 0
        base = optimizer._base_update

        def counted(gradients, variables, learning_rate):
            self.count += len(variables)
            base(gradients, variables, learning_rate)

        vars(optimizer)["_base_update"] = counted


def plainly_updated(optimizer, gradients, weights):
    optimizer.build(weights)
    counted = Counted(optimizer)
    optimizer.apply(gradients, weights)
    return counted.count


# What `docs/how.md` says: with a kernel, or several that do less than Keras.
FAST = {
    "tensorflow": {"SGD", "Adam", "Adagrad", "RMSprop", "AdagradBNG"},
    "torch": {"SGD", "Adam", "Adagrad", "RMSprop", "AdagradBNG"},
    "jax": set(),
}[keras.backend.backend()]


def test_the_bases_that_are_known_are_those_of_the_table():
    assert {base.name for base in FUSED.values()} == {
        "SGD",
        "Adam",
        "Adagrad",
        "RMSprop",
        "AdagradBNG",
    }
    assert set(getattr(backend, "KERNELS", ())) == FAST


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dense_floats_of_a_known_base_are_updated_fast(case, dtype):
    optimizer, weights = new(case, dtype, None, jit_compile=False)
    g = tensors([np.ones(v.shape) for v in weights], dtype)
    fast = FAST and case != "Lion" and dtype == "float32"
    assert plainly_updated(optimizer, g, weights) == (0 if fast else len(weights))


@pytest.mark.parametrize("rule", ["unit", None])
def test_what_somebody_has_changed_is_updated_by_their_own_update(rule):
    moved = []

    class Own(keras_bng.AdamNG):
        def update_step(self, gradient, variable, learning_rate):
            moved.append(gradient)

        def _parallel_update_step(self, grads, variables, learning_rate):
            moved.extend(grads)

    weights = some_variables(np.random.default_rng(0))
    g = tensors([np.ones(v.shape) for v in weights])
    before = arrays(weights)
    Own(rule=rule, jit_compile=False).apply(g, weights)
    assert len(moved) == len(weights)
    for old, v in zip(before, arrays(weights)):
        np.testing.assert_array_equal(old, v)


def test_an_update_step_on_an_instance_is_called():
    optimizer, w, seen = keras_bng.SGDNG(jit_compile=False), variable([3.0], "a/w"), []
    optimizer.build([w])
    vars(optimizer)["update_step"] = lambda g, *rest: seen.append(g)
    vars(optimizer)["_parallel_update_step"] = lambda g, *rest: seen.extend(g)
    optimizer.apply(tensors([[5.0]]), [w])
    assert len(seen) == 1 and float(arrays([w])[0][0]) == 3.0


def test_a_momentum_that_came_after_build_is_kerass_matter():
    """There is no state for it: the same error, or the same step, as in Keras."""
    outcomes = []
    for make in (keras.optimizers.SGD, keras_bng.SGDNG):
        optimizer, w = make(0.1, momentum=0.0), variable([3.0], "a/w")
        optimizer.build([w])
        optimizer.momentum = 0.9
        try:
            optimizer.apply(tensors([[1.0]]), [w])
            outcomes.append(float(arrays([w])[0][0]))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("scale, rate", [(1e36, 1e-6), (1e-36, 1e3)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_times_a_factor_that_float32_cannot_hold(scale, rate, momentum):
    optimizer = keras_bng.SGDNG(rate, momentum=momentum)
    w = variable(np.zeros(2, "float32"), "a/w")
    optimizer.apply(tensors([[3 * scale, 4 * scale]]), [w])
    np.testing.assert_allclose(arrays([w])[0], [-0.6 * rate, -0.8 * rate], rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="float64 is off there")
@pytest.mark.parametrize("case", CASES)
def test_variables_and_gradients_of_several_dtypes(case):
    dtypes = ("float32", "float64", "float16", "float32"), ("float32",) * 4
    if keras.backend.backend() == "torch" and case == "Lion":
        pytest.skip("Keras's own takes one dtype for all there")
    for of_variables, of_gradients in (dtypes, dtypes[::-1]):
        found = []
        for update in (backend.update, common.update):
            with mock.patch.object(backend, "update", update):
                make, settings = CASES[case]
                optimizer = make(**settings, jit_compile=False)
                w = [
                    variable(np.ones(3), f"{i}/w", dtype=d)
                    for i, d in enumerate(of_variables)
                ]
                g = [tensors([[1.0, 2.0, -2.0]], d)[0] for d in of_gradients]
                try:
                    optimizer.apply(g, w)
                    found.append([np.float64(a) for a in arrays(w)])
                except Exception as error:
                    found.append(type(error))
        if isinstance(found[1], type):  # Keras's own cannot do this: ours may
            continue
        for a, b in zip(*found):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3)
