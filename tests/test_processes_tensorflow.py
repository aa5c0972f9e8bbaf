"""TensorFlow on several processes: workers, and a parameter server.

Two workers are started once for all that is tried, and once more to be killed; and a
coordinator with one worker and one parameter server.
"""

import collections
import contextlib
import json
import os
import pathlib
import sys

import keras
import numpy as np
import processes
import pytest
from helpers import OPTIMIZERS, arrays, small_data

from keras_bng import BlockMonitor

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow only"
)

STEPS, BATCH = 8, 16
THREE = ("SGDNG", "AdamNG", "block_normalized(Lion)")
WAYS = {"plain": {}, "accumulated": {"gradient_accumulation_steps": 2}, "NaN": {}}
CASES = [(name, way) for name in THREE for way in WAYS]
# What a coordinator schedules is compiled, where Keras cannot accumulate gradients.
SCHEDULED = [case for case in CASES if case[1] != "accumulated"]
SINGLE = {
    "OneDeviceStrategy": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "CentralStorageStrategy": lambda: tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0"]
    ),
}
STOCK = {"SGDNG": keras.optimizers.SGD, "AdamNG": keras.optimizers.Adam}


def dataset(way="plain"):
    x, y = small_data(np.random.default_rng(0), count=STEPS * BATCH)
    if way == "NaN":
        x[3 * BATCH + 9] = np.nan  # the fourth step, on the second of two workers
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def made(strategy, make):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        )
        optimizer = make()
        optimizer.build(model.trainable_variables)
    return model, optimizer


def maker(name, way="plain"):
    return lambda: OPTIMIZERS[name](learning_rate=0.003, **WAYS[way])


def replica_step(model, optimizer):
    """Of one replica: its part of the batch, the loss by the whole one."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(True, reduction=None)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return step


def train(
    strategy, model, optimizer, way="plain", start=0, end=STEPS, each=None, eager=False
):
    step = replica_step(model, optimizer)

    def run(data):
        strategy.run(step, data)

    run = run if eager else tf.function(run)
    data = dataset(way).skip(start).take(end - start)
    for number, batch in enumerate(strategy.experimental_distribute_dataset(data)):
        run(batch)
        if each:
            each(start + number)
    return model, optimizer


def found(model, optimizer):
    state = arrays(model.trainable_variables + optimizer.variables)
    return state, int(optimizer.skipped_blocks.numpy())


def trained(strategy, name, way):
    # With a strategy, Keras accumulates gradients only in an eager step.
    eager = way == "accumulated"
    model, optimizer = made(strategy, maker(name, way))
    return found(*train(strategy, model, optimizer, way, eager=eager))


def alone(name, way):
    return trained(tf.distribute.get_strategy(), name, way)


# In the workers.


def with_checkpoints(strategy, file, start=0, dies=False):
    """The first worker saves every second step; all read what it saved."""
    model, optimizer = made(strategy, maker("AdamNG"))
    model.compile(optimizer)
    if start:
        model.load_weights(file)
    index = int(os.environ["RANK"])

    def each(step):
        if step % 2 == 1 and index == 0:
            part = file.with_name(f"part-{file.name}")
            model.save_weights(part)
            part.replace(file)
        if dies and step == 4 and index == 1:
            processes.die()

    return found(*train(strategy, model, optimizer, start=start, each=each))


def watched(strategy, folder):
    model, optimizer = made(strategy, maker("AdamNG"))
    monitor = BlockMonitor(folder, every=2, tensorboard=False)
    with monitor.watch(optimizer):
        result = found(*train(strategy, model, optimizer))
    return result, monitor.history["step"].tolist()


def collectives(strategy, make):
    """Of the graph of a step: each one, with the shape of what it sends."""
    model, optimizer = made(strategy, make)
    step = tf.function(lambda data: strategy.run(replica_step(model, optimizer), data))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset())))
    graph = step.get_concrete_function(batch).graph
    graphs = [graph, *(f.graph for f in graph._functions.values())]
    return collections.Counter(
        (operation.type, *(str(x.shape) for x in operation.inputs))
        for graph in graphs
        for operation in graph.get_operations()
        if "Collective" in operation.type or "AllReduce" in operation.type
    )


def everything(strategy):
    return {
        "trained": {case: trained(strategy, *case) for case in CASES},
        "resumed": with_checkpoints(
            strategy, pathlib.Path("../killed/last.weights.h5"), start=4
        ),
        "watched": watched(strategy, "logs"),
        "sent": {
            name: [collectives(strategy, make) for make in (STOCK[name], maker(name))]
            for name in STOCK
        },
    }


def killed(strategy):
    with_checkpoints(strategy, pathlib.Path("last.weights.h5"), dies=True)


# In the coordinator.


def coordinated(strategy, coordinator, model, optimizer, way="plain", **options):
    step = replica_step(model, optimizer)
    run = tf.function(lambda data: strategy.run(step, next(data)))
    start, end = options.get("start", 0), options.get("end", STEPS)

    def batches():
        return dataset(way).skip(start).take(end - start)

    data = iter(coordinator.create_per_worker_dataset(batches))
    for _ in range(start, end):
        coordinator.schedule(run, args=(data,))
        coordinator.join()
    return model, optimizer


def with_parameter_servers():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    both = strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)
    results = {
        (name, way): found(*coordinated(*both, *made(strategy, maker(name, way)), way))
        for name, way in SCHEDULED
    }
    message = ""
    try:
        coordinated(*both, *made(strategy, maker("AdamNG", "accumulated")))
    except RuntimeError as error:
        message = str(error)
    monitor = BlockMonitor("logs", every=2, tensorboard=False)
    model, optimizer = made(strategy, maker("AdamNG"))
    with monitor.watch(optimizer):
        watched = found(*coordinated(*both, model, optimizer))
    parts = []
    for start in (0, 4):  # the second with a model of its own, from the file
        model, optimizer = made(strategy, maker("AdamNG"))
        model.compile(optimizer)
        if start:
            model.load_weights("last.weights.h5")
        coordinated(*both, model, optimizer, start=start, end=start + 4)
        model.save_weights("last.weights.h5")
        parts.append(found(model, optimizer))
    return {
        "trained": results,
        "resumed": parts[-1],
        "accumulated": message,
        "watched": (watched, monitor.history),
    }


def work(what):
    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if what in ("killed", "everything"):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        found = {"killed": killed, "everything": everything}[what](strategy)
    elif task == "chief":
        found = with_parameter_servers()
    else:
        config = json.loads(os.environ["TF_CONFIG"])
        tf.distribute.Server(
            config["cluster"], job_name=task, task_index=0, protocol="grpc"
        ).join()
    processes.leave(found)


# In the test.


def cluster(**jobs):
    """The environment of each process of so many chiefs, workers and servers."""
    ports = iter(processes.free_ports(sum(jobs.values())))
    addresses = {
        job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        for job, count in jobs.items()
    }
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": addresses, "task": {"type": job, "index": index}}
            ),
            "RANK": str(rank),
        }
        for rank, (job, index) in enumerate(
            (job, index) for job, count in jobs.items() for index in range(count)
        )
    ]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    here = pathlib.Path(__file__)
    for what in ("killed", "everything"):
        dies = what == "killed"
        processes.run([here, what], cluster(worker=2), folder / what, killed=dies)
    (csv,) = (folder / "everything").glob("logs/*.csv")
    lines = csv.read_text().splitlines()
    return *processes.answers(folder / "everything", 2), lines


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    jobs = cluster(chief=1, worker=1, ps=1)
    here = pathlib.Path(__file__)
    processes.run([here, "servers"], jobs, folder, needed=[0])
    return processes.answers(folder, 1)[0]


def check(results, expected, tolerance=1e-6):
    assert results[1] == expected[1], "what was skipped"
    for a, b in zip(results[0], expected[0]):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def check_same(results, others):
    for a, b in zip(results[0], others[0]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name, way", CASES)
def test_two_workers_equal_one_process(workers, name, way):
    expected = alone(name, way)
    assert expected[1] == (2 if way == "NaN" else 0)
    one, two = (found["trained"][name, way] for found in workers[:2])
    check(one, expected)
    check_same(one, two)


def test_accumulation_with_a_parameter_server_is_a_clear_error(coordinator):
    message = "Keras cannot accumulate gradients in a compiled step"
    assert message in coordinator["accumulated"]


def test_the_monitor_of_a_coordinator_records_what_its_worker_does(coordinator):
    result, history = coordinator["watched"]
    model, optimizer = made(tf.distribute.get_strategy(), maker("AdamNG"))
    monitor = BlockMonitor(every=2)
    with monitor.watch(optimizer):
        check(result, found(*train(tf.distribute.get_strategy(), model, optimizer)))
    assert history["step"].tolist() == [0, 2, 4, 6]
    for name, values in monitor.history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name, way", SCHEDULED)
def test_a_worker_with_a_parameter_server_equals_one_process(coordinator, name, way):
    check(coordinator["trained"][name, way], alone(name, way))


def test_what_a_coordinator_saves_goes_on_bit_for_bit(coordinator):
    check_same(coordinator["resumed"], coordinator["trained"]["AdamNG", "plain"])


@pytest.mark.parametrize("name, way", CASES)
@pytest.mark.parametrize("strategy", SINGLE)
def test_a_strategy_of_one_device_equals_none(strategy, name, way):
    check(trained(SINGLE[strategy](), name, way), alone(name, way))


def test_a_killed_worker_comes_back_from_the_last_checkpoint(workers):
    """Bit for bit: SIGKILL in the fifth step, both again from the fourth on."""
    for found in workers[:2]:
        check_same(found["resumed"], found["trained"]["AdamNG", "plain"])


def test_the_monitor_records_on_the_first_worker_each_line_once(workers):
    first, second, lines = workers
    assert first["watched"][1] == [0, 2, 4, 6] and second["watched"][1] == []
    assert len(lines) == len(set(lines)) == 1 + 4 * 2
    for found in workers[:2]:
        check(found["watched"][0], alone("AdamNG", "plain"))


@pytest.mark.parametrize("name", STOCK)
def test_a_step_sends_what_a_stock_step_sends(workers, name):
    for found in workers[:2]:
        stock, ours = found["sent"][name]
        assert ours == stock
        ((kind, shape, *_),) = stock.elements()
        assert (kind, shape) == ("CollectiveReduceV2", "(83,)"), "all gradients in one"


def test_the_loop_of_parameter_servers_on_the_page_runs(tmp_path):
    last = "\nimport processes\n"
    last += "processes.leave([v.numpy() for v in model.trainable_variables])\n"
    code = ["-c", processes.snippet("ParameterServerStrategy") + last]
    jobs = cluster(chief=1, worker=1, ps=1)
    processes.run(code, jobs, tmp_path, needed=[0])
    (weights,) = processes.answers(tmp_path, 1)
    assert all(np.isfinite(w).all() for w in weights)


def test_the_mirrored_snippet_of_the_page_runs(tmp_path):
    code = ["-c", processes.snippet("MirroredStrategy")]
    processes.run(code, [{}], tmp_path)


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)
    work(sys.argv[1])
