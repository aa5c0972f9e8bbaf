"""torch on two processes: DistributedDataParallel and `fully_shard`.

Two processes are started once for all that is tried, and once more to be killed.
"""

import contextlib
import os
import pathlib
import sys

import keras
import numpy as np
import processes
import pytest
from helpers import OPTIMIZERS, small_data

import keras_bng
from keras_bng import SGDNG, AdamNG, BlockMonitor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch only")

STEPS, BATCH = 8, 16
THREE = ("SGDNG", "AdamNG", "block_normalized(Lion)")
WAYS = {"plain": {}, "accumulated": {"gradient_accumulation_steps": 2}, "NaN": {}}
MORE = {
    "adaptive, l2": lambda: AdamNG(0.003, rule="adaptive", l2=0.01),
    "AdagradBNG": lambda: keras_bng.AdagradBNG(0.003),
}
LOOPS = ("torch DistributedDataParallel", "torch fully_shard")
# Without state, which Keras cannot deal out.
SHARDED = {
    "unit": {},
    "adaptive": {"rule": "adaptive"},
    "clip": {"rule": "clip"},
    "rms": {"rule": "rms"},
    "l1": {"norm": "l1"},
    "max": {"norm": "max"},
    "model": {"blocks": "model"},
    "l2, decay": {"l2": 0.1, "weight_decay": 0.1},
    "NaN": {},
}
STATEFUL = {
    "momentum": lambda: SGDNG(0.1),
    "Adam": lambda: AdamNG(),
    "Lion": lambda: keras_bng.block_normalized(keras.optimizers.Lion()),
    "AdagradBNG": lambda: keras_bng.AdagradBNG(),
    "accumulation": lambda: SGDNG(momentum=0.0, gradient_accumulation_steps=2),
    "average": lambda: SGDNG(momentum=0.0, use_ema=True),
}


def dataset(way):
    x, y = small_data(np.random.default_rng(0), count=STEPS * BATCH)
    if way == "NaN":
        x[3 * BATCH + 1] = np.nan  # the fourth step, on the second of two processes
    return x, y


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    )


def module():
    torch.manual_seed(1)  # 9 rows: an uneven part for each process
    parts = torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    return torch.nn.Sequential(*parts)


def wrapped(net):
    layer = keras.layers.TorchModuleWrapper(net, name="net")
    return keras.Sequential([keras.Input((6,)), layer])


def in_parallel(world):
    if world == 1:
        return lambda net: net
    return torch.nn.parallel.DistributedDataParallel


def train(net, model, optimizer, way="plain", start=0, end=STEPS, each=None):
    """The loop: each process has its part of every batch."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = map(torch.from_numpy, dataset(way))
    for step in range(start, end):
        rows = slice(BATCH * step + rank, BATCH * (step + 1), world)
        model.zero_grad()
        loss_of(y[rows], net(x[rows])).backward()
        weights = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([w.value.grad for w in weights], weights)
        if each:
            each(step)
    return model, optimizer


def whole(tensor):
    parts = getattr(tensor, "full_tensor", None)
    return (parts() if parts else tensor).detach().numpy().copy()


def found(model, optimizer):
    state = model.trainable_variables + optimizer.variables
    return [whole(v.value) for v in state], int(optimizer.skipped_blocks.numpy())


def data_parallel(name, way, world, compiled=False):
    make = MORE.get(name) or OPTIMIZERS[name]
    net = model()
    parallel = in_parallel(world)(net)
    if compiled:
        parallel = torch.compile(parallel, backend="aot_eager")
    options = {} if name in MORE else {"learning_rate": 0.003, **WAYS[way]}
    return found(*train(parallel, net, make(**options), way))


def sharded(options, way, shard=lambda net: net):
    net = wrapped(shard(module()))
    optimizer = SGDNG(0.1, momentum=0.0, **options)
    return found(*train(net, net, optimizer, way))


DATA_PARALLEL = [(name, way) for name in THREE for way in WAYS] + [
    (name, "plain") for name in MORE
]


# In the processes.


def with_checkpoints(file, start=0, end=STEPS, dies_at=None):
    """The first process saves every second step; all read what it saved."""
    net = model()
    optimizer = AdamNG(0.003)
    optimizer.build(net.trainable_variables)
    net.compile(optimizer)
    if start:
        net.load_weights(file)

    def each(step):
        if (step + 1) % 2 == 0 and torch.distributed.get_rank() == 0:
            part = file.with_name(f"part-{file.name}")
            net.save_weights(part)
            part.replace(file)
        if step == dies_at and torch.distributed.get_rank() == 1:
            processes.die()

    return found(*train(in_parallel(2)(net), net, optimizer, "plain", start, end, each))


def watched(name):
    monitor = BlockMonitor(name, every=2)
    net = model()
    optimizer = AdamNG(0.003)
    with monitor.watch(optimizer):
        result = found(*train(in_parallel(2)(net), net, optimizer))
    return result, monitor.history["step"].tolist()


def watched_shards(shard):
    monitor = BlockMonitor(every=4)
    net = wrapped(shard(module()))
    optimizer = SGDNG(0.1, momentum=0.0)
    with monitor.watch(optimizer):
        train(net, net, optimizer)
    return monitor.history


def collectives(make, shard=None):
    """What three steps send, and how many numbers."""
    net = wrapped(shard(module())) if shard else model()
    parallel, optimizer = net if shard else in_parallel(2)(net), make()
    train(parallel, net, optimizer, end=3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        train(parallel, net, optimizer, end=3)
    return [
        (event.name, sum(np.prod(shape) for shape in event.input_shapes if shape))
        for event in profile.events()
        if event.name.startswith("gloo:")
    ]


def message_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def keras_layer_sharded(shard):
    net = shard(model())
    train(net, net, SGDNG(0.1, momentum=0.0), end=1)


def stateful(make, shard):
    net = wrapped(shard(module()))
    train(net, net, make(), end=2)


def everything():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def shard(net):
        return fully_shard(net, mesh=mesh) or net  # older ones return nothing

    def stock():
        return keras.optimizers.SGD(0.1)

    def ours():
        return SGDNG(0.1, momentum=0.0)

    return {
        "DDP": {case: data_parallel(*case, 2) for case in DATA_PARALLEL},
        "compiled": data_parallel("AdamNG", "plain", 2, compiled=True),
        "resumed": with_checkpoints(pathlib.Path("../killed/last.weights.h5"), 4),
        "sharded": {
            name: sharded(options, "NaN" if name == "NaN" else "plain", shard)
            for name, options in SHARDED.items()
        },
        "refused": {
            name: message_of(lambda make=make: stateful(make, shard))
            for name, make in STATEFUL.items()
        },
        "a layer of Keras": message_of(lambda: keras_layer_sharded(shard)),
        "watched": watched("logs"),
        "watched shards": watched_shards(shard),
        "sent": {
            name: [collectives(make) for make in pair]
            for name, pair in {
                "AdamNG": (keras.optimizers.Adam, AdamNG),
                "SGDNG": (stock, ours),
            }.items()
        },
        "sent of shards": [collectives(make, shard) for make in (stock, ours)],
    }


def loops():
    """Those of the page; each ends with a group of its own."""
    weights = {}
    for tag in LOOPS:
        names = processes.run_snippet(tag)
        weights[tag] = [whole(v.value) for v in names["weights"]]
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        processes.next_port()
    return weights


def work(what):
    torch.set_num_threads(1)
    if what == "killed":
        processes.leave(loops())
    torch.distributed.init_process_group("gloo")
    if what == "killed":
        with_checkpoints(pathlib.Path("last.weights.h5"), dies_at=4)
    else:
        processes.leave(everything())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# In the test.


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    here = pathlib.Path(__file__)
    processes.run([here, "killed"], processes.ranks(2), folder / "killed", killed=True)
    processes.run([here, "everything"], processes.ranks(2), folder / "all")
    (csv,) = (folder / "all").glob("logs/*.csv")
    lines = csv.read_text().splitlines()
    answers = processes.answers(folder / "all", 2)
    for found, of_page in zip(answers, processes.answers(folder / "killed", 2)):
        found["loops"] = of_page
    return *answers, lines


def check(both, results, expected, tolerance=1e-6):
    for one in map(results, both[:2]):
        assert one[1] == expected[1], "what was skipped"
        for a, b in zip(one[0], expected[0]):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    for a, b in zip(results(both[0])[0], results(both[1])[0]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name, way", DATA_PARALLEL)
def test_two_processes_of_ddp_equal_one(both, name, way):
    expected = data_parallel(name, way, 1)
    assert expected[1] == (2 if way == "NaN" else 0)
    check(both, lambda found: found["DDP"][name, way], expected)


def test_a_compiled_module_under_ddp_equals_one_process(both):
    check(both, lambda found: found["compiled"], data_parallel("AdamNG", "plain", 1))


@pytest.mark.parametrize("name", SHARDED)
def test_the_norm_of_a_sharded_block_is_that_of_the_whole(both, name):
    """`fully_shard`: parameters of two processes, each with a part of every one."""
    way = "NaN" if name == "NaN" else "plain"
    expected = sharded(SHARDED[name], way)
    assert expected[1] == (2 if way == "NaN" else 0)
    check(both, lambda found: found["sharded"][name], expected)


@pytest.mark.parametrize("name", STATEFUL)
def test_state_that_keras_cannot_shard_is_a_clear_error(both, name):
    for found in both[:2]:
        assert "ValueError: Keras keeps the state" in found["refused"][name]
        assert "net/" in found["refused"][name] or "variable" in found["refused"][name]


def test_a_sharded_layer_of_keras_is_a_clear_error(both):
    for found in both[:2]:
        assert "`fully_shard` has no effect on layers" in found["a layer of Keras"]


def test_a_killed_process_comes_back_from_the_last_checkpoint(both):
    """Bit for bit: SIGKILL in the fifth step, both again from the fourth on."""
    for found in both[:2]:
        resumed, expected = found["resumed"], found["DDP"]["AdamNG", "plain"]
        for a, b in zip(resumed[0], expected[0]):
            np.testing.assert_array_equal(a, b)


def test_the_monitor_records_on_the_first_process_each_line_once(both):
    first, second, lines = both
    assert first["watched"][1] == [0, 2, 4, 6] and second["watched"][1] == []
    assert len(lines) == len(set(lines)) == 1 + 4 * 2
    expected = data_parallel("AdamNG", "plain", 1)
    check(both, lambda found: found["watched"][0], expected)


def test_the_monitor_sees_the_norms_of_whole_blocks(both):
    monitor = BlockMonitor(every=4)
    net = wrapped(module())
    optimizer = SGDNG(0.1, momentum=0.0)
    with monitor.watch(optimizer):
        train(net, net, optimizer)
    assert monitor.history["step"].tolist() == [0, 4]
    for name, values in monitor.history.items():
        seen = both[0]["watched shards"][name]
        np.testing.assert_allclose(seen, values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["SGDNG", "AdamNG"])
def test_a_step_under_ddp_sends_what_a_stock_step_sends(both, name):
    for found in both[:2]:
        stock, ours = found["sent"][name]
        assert ours == stock and len(stock) >= 3


def test_norms_of_shards_take_one_collective_of_a_number_a_block(both):
    for found in both[:2]:
        stock, ours = found["sent of shards"]
        extra = list(ours)
        for event in stock:
            extra.remove(event)
        assert len(extra) == 3, "three steps"
        assert {name for name, _ in extra} == {"gloo:all_gather"}


def test_the_loops_on_the_page_equal_one_process(both, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in processes.ranks(1)[0].items():
        monkeypatch.setenv(name, value)
    alone = loops()
    assert (tmp_path / "model.keras").exists()
    for tag in LOOPS:
        check(both, lambda found, tag=tag: (found["loops"][tag], 0), (alone[tag], 0))


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)
    work(sys.argv[1])
