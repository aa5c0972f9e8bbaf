"""What `BlockMonitor` costs in `fit`: a training step with it beside one without.

    pip install -e ".[benchmarks]"
    python -m benchmarks.monitor           # three models
    python -m benchmarks.monitor --quick   # a minute, to see that it works

Records every 10 steps, in memory and to `blocks.csv` and TensorBoard. A turn is 20
training steps, without XLA, as `fit` makes them, called by hand: `fit` itself would
trace its step anew at each turn.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks import report, timing
from benchmarks.train_step import MODELS
from benchmarks.update_step import OPTIMIZERS
from keras_bng import BlockMonitor

CASES = ("MLP, 18 layers", "ResNet-20", "text CNN")
EVERY = 10
STEPS = 20


def trained(name: str, optimizer: str, monitor: BlockMonitor | None) -> Any:
    """A function that does a turn of training steps."""
    import tensorflow as tf

    make, shape, words, label_shape, classes, _ = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.random(shape, "float32") if words is None else rng.integers(0, words, shape)
    y = rng.integers(0, classes, label_shape)
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    model.make_train_function()
    if monitor:
        monitor.set_model(model)
        monitor.on_train_begin()

    def turn() -> None:
        for step in range(STEPS):
            if monitor:
                monitor.on_train_batch_begin(step)
            model.train_function(batches)
            if monitor:
                monitor.on_train_batch_end(step)

    turn()
    return turn


def measure(name: str, rounds: int) -> dict[str, Any]:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in ("Adam", "AdamNG"):
            memory = BlockMonitor(every=EVERY)
            files = BlockMonitor(pathlib.Path(folder) / optimizer, every=EVERY)
            times = timing.interleaved(
                {
                    "without": trained(name, optimizer, None),
                    "memory": trained(name, optimizer, memory),
                    "files": trained(name, optimizer, files),
                },
                rounds,
            )
            rows[optimizer] = {
                "seconds_a_step": timing.quartiles(times["without"])[1] / STEPS,
                **{
                    where: timing.ratio(times[where], times["without"])
                    for where in ("memory", "files")
                },
            }
            files.on_train_end()
            memory.on_train_end()
    return {"rows": rows}


def main() -> None:
    args = report.parsed(report.arguments(__doc__))
    results: dict[str, Any] = {}
    for name in CASES[:1] if args.quick else CASES:
        print(f"{name} ...", flush=True)
        results[name] = measure(name, args.rounds)
        report.save(args.out, "monitor", {"rounds": args.rounds, "models": results})
        for optimizer, row in results[name]["rows"].items():
            cost = ", ".join(
                f"{where} {row[where]['median'] - 1:+.1%}"
                f" ({row[where]['low'] - 1:+.1%} to {row[where]['high'] - 1:+.1%})"
                for where in ("memory", "files")
            )
            step = 1e3 * row["seconds_a_step"]
            print(f"  {optimizer}: a step takes {step:.1f} ms; every {EVERY}: {cost}")


if __name__ == "__main__":
    main()
