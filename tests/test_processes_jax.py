"""JAX on two processes of two virtual devices each, and what a step sends.

Two processes are started once for all that is tried, and once more to be killed.
"""

import collections
import contextlib
import os
import pathlib
import re
import sys

import keras
import numpy as np
import processes
import pytest
from helpers import OPTIMIZERS, compiled, small_data

import keras_bng
from keras_bng import SGDNG, AdamNG, BlockMonitor

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")

STEPS, BATCH = 8, 16
THREE = ("SGDNG", "AdamNG", "block_normalized(Lion)")
WAYS = {"plain": {}, "accumulated": {"gradient_accumulation_steps": 2}, "NaN": {}}
# Devices in rows, a row a process. "across": weights are dealt out over processes.
DISTRIBUTIONS = ("data", "model", "model across")
CASES = [
    (how, name, way)
    for how in DISTRIBUTIONS
    for name in THREE
    for way in WAYS
    if how != "model" or (name, way) == ("AdamNG", "plain")
]
LOOP = "JAX jax.distributed"


def distribution(how):
    devices = np.array(keras.distribution.list_devices())
    if how == "data":
        return keras.distribution.DataParallel(auto_shard_dataset=False)
    names = ["batch", "model"] if how == "model" else ["model", "batch"]
    mesh = keras.distribution.DeviceMesh((2, 2), names, devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*dense.*kernel"] = (None, "model")
    layout[".*dense.*bias"] = ("model",)
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
    )


@contextlib.contextmanager
def distributed(how):
    """None: on one device."""
    keras.distribution.set_distribution(how and distribution(how))
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


def model(width=8, layers=1):
    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, "tanh") for _ in range(layers)]
    return keras.Sequential([keras.Input((6,)), *dense, keras.layers.Dense(4)])


def dataset(way):
    x, y = small_data(np.random.default_rng(0), count=STEPS * BATCH)
    if way == "NaN":
        x[3 * BATCH + 9] = np.nan  # the fourth step, on the second of two processes
    return x, y


def fit(net, how, way="plain", start=0, end=STEPS, callbacks=()):
    """Each process gives `fit` what its devices get of every batch."""
    x, y = (a.reshape(STEPS, BATCH, *a.shape[1:])[start:end] for a in dataset(way))
    part = BATCH
    if how in ("data", "model") and jax.process_count() == 2:
        part = BATCH // 2
        mine = slice(part * jax.process_index(), part * (jax.process_index() + 1))
        x, y = x[:, mine], y[:, mine]
    x, y = (a.reshape(-1, *a.shape[2:]) for a in (x, y))
    options = {"batch_size": part, "shuffle": False, "verbose": 0}
    net.fit(x, y, callbacks=list(callbacks), **options)


def whole(variables):
    """Values that may be in parts on several processes."""
    from jax.experimental import multihost_utils

    return [
        np.asarray(
            v.value
            if v.value.is_fully_addressable
            else multihost_utils.process_allgather(v.value, tiled=True)
        )
        for v in variables
    ]


def found(net):
    optimizer = net.optimizer
    (skipped,) = whole([optimizer.skipped_blocks])
    return whole(net.trainable_variables + optimizer.variables), int(skipped)


def trained(how, name, way):
    with distributed(how):
        make = OPTIMIZERS[name]
        net = compiled(model(), make(learning_rate=0.003, **WAYS[way]))
        fit(net, how, way)
        result = found(net)
        kinds = {v.value.sharding.is_fully_replicated for v in net.trainable_variables}
        return *result, kinds == {how in (None, "data")}


# In the processes.


def with_checkpoints(how, file, start=0, end=STEPS, dies=False):
    """The first process saves every second step; all read what it saved."""
    with distributed(how):
        net = compiled(model(), AdamNG(0.003))
        net.optimizer.build(net.trainable_variables)
        variables = net.trainable_variables + net.optimizer.variables
        if start and how == "data":
            net.load_weights(file)
        elif start:
            for variable, value in zip(variables, np.load(file).values()):
                variable.assign(value)
        for step in range(start, end):
            fit(net, how, start=step, end=step + 1)
            if step % 2 == 1:
                save(how, net, variables, file)
        if dies and jax.process_index() == 1:
            processes.die()
        return found(net)


def save(how, net, variables, file):
    part = file.with_name(f"part-{file.name}")
    values = how == "data" or whole(variables)  # of all processes
    if jax.process_index() == 0:
        present = keras.distribution.distribution()
        keras.distribution.set_distribution(None)  # or Keras waits for the others
        net.save_weights(part) if how == "data" else np.savez(part, *values)
        keras.distribution.set_distribution(present)
        part.replace(file)


def files(folder):
    names = {"data": "last.weights.h5", "model across": "last.npz"}
    return {how: pathlib.Path(folder, name) for how, name in names.items()}


def watched(folder):
    """In `fit`, and in a loop of one's own."""
    import warnings

    steps = {}
    with distributed("data"), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        net = compiled(model(), AdamNG(0.003))
        monitor = BlockMonitor(f"{folder}/fit", every=2)
        fit(net, "data", callbacks=[monitor])
        steps["fit"] = monitor.history["step"].tolist()
        result = found(net)
        optimizer = SGDNG(0.003)
        optimizer.build(net.trainable_variables)
        loop = BlockMonitor(f"{folder}/loop", every=2)
        with loop.watch(optimizer):
            step = jax.jit(optimizer.stateless_apply)
            weights = [v.value for v in net.trainable_variables]
            state = [v.value for v in optimizer.variables]
            for _ in range(4):
                weights, state = step(state, weights, weights)
        steps["loop"] = loop.history["step"].tolist()
    steps["warnings"] = [str(w.message) for w in heard if "BlockMonitor" in str(w)]
    return result, steps


def everything():
    checkpoints = files("../killed")
    return {
        "trained": {case: trained(*case) for case in CASES},
        "resumed": {
            how: with_checkpoints(how, file, 4) for how, file in checkpoints.items()
        },
        "watched": watched("logs"),
    }


def work(what):
    if what == "killed":
        names = processes.run_snippet(LOOP)
        keras.distribution.set_distribution(None)
        processes.leave(whole(names["model"].trainable_variables))
        for how, file in files(".").items():
            with_checkpoints(how, file, end=5, dies=how == "model across")
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, world, rank)
    processes.leave(everything())


# In the test.


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax")
    here = pathlib.Path(__file__)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for what in ("killed", "everything"):
        ranks = [{**rank, **flags} for rank in processes.ranks(2)]
        killed = what == "killed"
        processes.run([here, what], ranks, folder / what, killed=killed)
    answers = processes.answers(folder / "everything", 2)
    for answer, of_page in zip(answers, processes.answers(folder / "killed", 2)):
        answer["loop"] = of_page
        answer["logs"] = folder / "everything" / "logs"
    assert (folder / "killed" / "model.keras").exists()
    return answers


def check(both, results, expected, tolerance=1e-6):
    one, two = map(results, both)
    for a, b, c in zip(one, two, expected):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=0, atol=tolerance)


@pytest.mark.parametrize("how, name, way", CASES)
def test_two_processes_equal_one_device(both, how, name, way):
    expected = trained(None, name, way)
    assert expected[1] == (2 if way == "NaN" else 0)
    check(both, lambda found: found["trained"][how, name, way][0], expected[0])
    for found in both:
        _, skipped, laid_out = found["trained"][how, name, way]
        assert skipped == expected[1] and laid_out


@pytest.mark.parametrize("how", files("."))
def test_a_killed_process_comes_back_from_the_last_checkpoint(both, how):
    """Bit for bit: SIGKILL in the fifth step, both again from the fourth on."""
    for found in both:
        resumed = found["resumed"][how]
        expected = found["trained"][how, "AdamNG", "plain"]
        for a, b in zip(resumed[0], expected[0]):
            np.testing.assert_array_equal(a, b)


def test_the_monitor_records_on_the_first_process_each_line_once(both):
    first, second = (found["watched"][1] for found in both)
    assert first == {"fit": [0, 2, 4, 6], "loop": [0, 2], "warnings": []}
    assert second == {"fit": [], "loop": [], "warnings": []}
    for name, records in (("fit", 4), ("loop", 2)):
        (csv,) = both[0]["logs"].glob(f"{name}/*.csv")
        lines = csv.read_text().splitlines()
        assert len(lines) == len(set(lines)) == 1 + records * 2
    expected = trained(None, "AdamNG", "plain")
    check(both, lambda found: found["watched"][0][0], expected[0])


def test_the_loop_on_the_page_equals_one_process(both, tmp_path):
    last = "\nimport processes, test_processes_jax as t\n"
    last += "processes.leave(t.whole(model.trainable_variables))\n"
    code = ["-c", processes.snippet(LOOP) + last]
    processes.run(code, processes.ranks(1), tmp_path)
    (alone,) = processes.answers(tmp_path, 1)
    check(both, lambda found: found["loop"], alone)


# What a step sends: four devices of this process, the compiled step.

SENDS = r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)"


def sent(how, optimizer, width=8, layers=3):
    """Each collective of `fit`'s step, with its shapes; those that run in each step,
    and those that are in a branch: a norm out of range has a second look."""
    with distributed(how):
        net = compiled(model(width, layers), optimizer)
        optimizer.build(net.trainable_variables)
        x, y = small_data(np.random.default_rng(0), count=BATCH)
        groups = (
            net.trainable_variables,
            net.non_trainable_variables,
            optimizer.variables,
            net.metrics_variables,
        )
        here = keras.distribution.distribution()
        data = [
            jax.device_put(a, here.get_data_layout(a.shape).backend_layout)
            for a in (x, y)
        ]
        state = [[v.value for v in group] for group in groups]
        text = jax.jit(net.train_step).lower(state, data).compile().as_text()
    always: list = []
    in_branches: list = []
    inside = in_branches
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside = always if line.startswith("ENTRY") else in_branches
        match = re.search(rf"= (.*) {SENDS}(-start)?\(", line)
        if match:
            inside.append((match[2], *sorted(re.findall(r"\w+\[[\d,]*\]", match[1]))))
    return always, in_branches


PAIRS = {
    "SGDNG": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), lambda: SGDNG(0.1)),
    "AdamNG": (keras.optimizers.Adam, AdamNG),
    "adaptive": (keras.optimizers.Adam, lambda: AdamNG(rule="adaptive")),
    "l1": (keras.optimizers.Adam, lambda: AdamNG(norm="l1")),
    "Lion": (
        keras.optimizers.Lion,
        lambda: keras_bng.block_normalized(keras.optimizers.Lion()),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_data_parallel_sends_what_stock_sends(name):
    stock, ours = (sent("data", make())[0] for make in PAIRS[name])
    assert collections.Counter(ours) == collections.Counter(stock)
    assert [kind for kind, *_ in ours] == ["all-reduce"]


@pytest.mark.parametrize("width", [8, 80], ids=["small ones in stacks", "large ones"])
@pytest.mark.parametrize("name", PAIRS)
def test_norms_of_sharded_weights_are_one_more_collective_of_numbers(name, width):
    stock, ours = (sent("model", make(), width)[0] for make in PAIRS[name])
    extra = collections.Counter(ours) - collections.Counter(stock)
    assert not collections.Counter(stock) - collections.Counter(ours)
    ((kind, *shapes),) = extra.elements()
    assert kind == "all-reduce"
    numbers = sum(int(re.fullmatch(r"f32\[(\d*)\]", s)[1] or 1) for s in shapes)
    assert numbers <= 2 * 8, "one of each variable, at most: no gradient is gathered"


def test_a_second_look_at_norms_gathers_no_gradients():
    _, in_branches = sent("model", AdamNG())
    assert in_branches, "the premise"
    assert {kind for kind, *_ in in_branches} == {"all-reduce"}
    for _, *shapes in in_branches:
        assert all(re.fullmatch(r"f32\[\d*\]", shape) for shape in shapes)


if __name__ == "__main__":
    work(sys.argv[1])
