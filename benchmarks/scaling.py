"""Step times on 1, 2 and 4 processes, ours beside stock Keras's: does the ratio stay?

    pip install -e ".[benchmarks]" torch
    python -m benchmarks.scaling            # about 10 minutes on 2 cores
    python -m benchmarks.scaling --quick    # two minutes, to see that it works
    python -m benchmarks.scaling --backends torch --processes 1 2

Data parallel, the MLP of 18 layers, 100 rows a process, one thread a process: torch's
DistributedDataParallel, TensorFlow's MultiWorkerMirroredStrategy, and JAX with
`jax.distributed` and `keras.distribution.DataParallel`. Optimizers take turns in the
same processes; a turn is some training steps. Where there are more processes than cores
they wait for each other, with ours as with stock: only the ratio means something there.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import report

MODEL = "MLP, 18 layers"
BACKENDS = ("torch", "tensorflow", "jax")
# One thread for each, so that processes do not take each other's cores.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


# From what makes a compiled model, what makes a step of it.
Stepper = Callable[[Callable[[], Any]], Callable[[], None]]


# In each process.


def torch_steps() -> Stepper:
    """Joins the other processes. From what makes a compiled model, a step of it."""
    import torch

    from benchmarks import models

    torch.distributed.init_process_group("gloo")
    x, y = (torch.from_numpy(a) for a in models.batch(MODEL))

    def step_of(make: Callable[[], Any]) -> Callable[[], None]:
        model = make()
        weights = model.trainable_variables
        parallel = torch.nn.parallel.DistributedDataParallel(model)

        def step() -> None:
            model.zero_grad()
            model.loss(y, parallel(x)).backward()
            with torch.no_grad():
                model.optimizer.apply([w.value.grad for w in weights], weights)

        return step

    return step_of


def jax_steps() -> Stepper:
    import jax

    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    jax.distributed.initialize(address, world, rank)
    import keras

    from benchmarks import models

    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    batch = models.batch(MODEL)

    def step_of(make: Callable[[], Any]) -> Callable[[], None]:
        model = make()
        data = [
            jax.make_array_from_process_local_data(
                distribution.get_data_layout(a.shape).backend_layout, a
            )
            for a in batch
        ]
        model.optimizer.build(model.trainable_variables)
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        state: Any = [[v.value for v in group] for group in groups]
        jitted = jax.jit(model.train_step, donate_argnums=0)

        def step() -> None:
            nonlocal state
            _, state = jitted(state, data)
            jax.block_until_ready(state)

        return step

    return step_of


def tensorflow_steps() -> Stepper:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before all else
    import keras

    from benchmarks import models

    rows, labels = models.batch(MODEL)
    data = strategy.experimental_distribute_values_from_function(
        lambda _: (tf.constant(rows), tf.constant(labels))
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(True, reduction=None)
    batch = len(rows) * strategy.num_replicas_in_sync

    def step_of(make: Callable[[], Any]) -> Callable[[], None]:
        with strategy.scope():
            model = make()
            optimizer, weights = model.optimizer, model.trainable_variables
            optimizer.build(weights)

        def replica_step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / batch
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        @tf.function
        def step() -> None:
            strategy.run(replica_step, data)

        return step

    return step_of


STEPS = {"torch": torch_steps, "jax": jax_steps, "tensorflow": tensorflow_steps}


def work(rounds: int, steps: int) -> None:
    """Times all optimizers; the first process prints them, a line of JSON."""
    import keras

    step_of = STEPS[keras.config.backend()]()
    from benchmarks import models, timing
    from benchmarks.optimizers import BASE, MAIN, OPTIMIZERS

    cases = {}
    for name in MAIN:

        def make(name: str = name) -> Any:
            return models.compiled(MODEL, OPTIMIZERS[name]())

        step = step_of(make)

        def turn(step: Callable[[], None] = step) -> None:
            for _ in range(steps):
                step()

        turn()
        cases[name] = turn
    times = timing.interleaved(cases, rounds)  # as many rounds in each process
    rows: dict[str, Any] = {}
    for name, seconds in times.items():
        rows[name] = {"seconds": timing.quartiles(seconds)[1] / steps}
        if name in BASE:
            rows[name]["ratio"] = timing.ratio(seconds, times[BASE[name]])
    if os.environ["RANK"] == "0":
        print(f"\n{json.dumps(rows)}", flush=True)


# Above them.


def environments(backend: str, count: int) -> list[dict[str, str]]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    workers = [f"127.0.0.1:{port}" for port in ports]
    found = []
    for rank in range(count):
        own = {**os.environ, **ONE_THREAD, "KERAS_BACKEND": backend}
        own |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
        if backend == "tensorflow":
            task = {"type": "worker", "index": rank}
            config = {"cluster": {"worker": workers}, "task": task}
            own["TF_CONFIG"] = json.dumps(config)
        found.append(own)
    return found


def measure(backend: str, count: int, rounds: int, steps: int) -> dict[str, Any]:
    """What the first of so many processes has found."""
    command = [sys.executable, "-m", "benchmarks.scaling"]
    command += ["--work", str(steps), "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{rank}.log") for rank in range(count)]
        running = []
        for log, environment in zip(logs, environments(backend, count)):
            with open(log, "w") as output:
                running.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            for process in running:
                process.wait(3600)
        finally:
            for process in running:
                process.kill()
        texts = [log.read_text() for log in logs]
    if any(process.returncode for process in running):
        raise SystemExit("\n".join(text[-2000:] for text in texts))
    line = next(line for line in texts[0].splitlines() if line.startswith('{"SGD"'))
    return json.loads(line)


def table(results: dict[str, Any]) -> str:
    rows = []
    for backend, counts in results.items():
        for count, found in counts.items():
            times = [f"{1e3 * found[name]['seconds']:.2f}" for name in found]
            ratios = [
                report.spread(row["ratio"]) for row in found.values() if "ratio" in row
            ]
            rows.append([backend, count, *times, *ratios])
    names = ["SGD", "SGDNG", "Adam", "AdamNG"]
    header = ["backend", "processes", *(f"{name}, ms" for name in names)]
    header += ["SGDNG / SGD", "AdamNG / Adam"]
    return report.table(header, rows)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--processes", nargs="+", type=int, default=(1, 2, 4))
    parser.add_argument("--work", type=int, help="steps a turn; called by itself")
    args = report.parsed(parser)
    if args.work:
        return work(args.rounds, args.work)
    part = tuple(args.backends) != BACKENDS or tuple(args.processes) != (1, 2, 4)
    results = report.load(args.out, "scaling") if part else {}
    for backend in args.backends:
        for count in args.processes:
            if args.quick and count > 2:
                continue
            found = measure(backend, count, args.rounds, 2 if args.quick else 20)
            results.setdefault(backend, {})[str(count)] = found
            report.save(args.out, "scaling", {"model": MODEL, "results": results})
            print(f"{backend}, {count} processes: done", file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
