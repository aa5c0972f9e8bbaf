"""What `BlockMonitor` costs in `fit`: a training step with it beside one without.

    pip install -e ".[benchmarks]"
    python -m benchmarks.monitor --rounds 6  # three models, six minutes
    python -m benchmarks.monitor --quick     # a minute, to see that it works

Records every 10 steps, in memory and to `blocks.csv` and TensorBoard; beside them, a
callback that does nothing at each batch, for `fit` gives that the batch's metrics as
Python numbers. A turn is a `fit` of some hundred milliseconds or more, without XLA and
without a progress bar. The first one, which traces, does not count.
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

STEPS = {"MLP, 18 layers": 100, "ResNet-20": 10, "text CNN": 40}  # a turn
CASES = ("nothing", "memory", "files")
EVERY = 10
SECONDS = 40  # at least, for each model and optimizer


class Nothing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def trained(name: str, optimizer: str) -> Any:
    """From a callback, or None, to a function that does a turn: all train one model."""
    import tensorflow as tf

    make, shape, words, label_shape, classes, _ = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.random(shape, "float32") if words is None else rng.integers(0, words, shape)
    y = rng.integers(0, classes, label_shape)
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=False)
    options = tf.data.Options()
    options.autotune.enabled = False  # at its end, a `fit` would wait for its thread
    batches = tf.data.Dataset.from_tensors((x, y)).repeat().with_options(options)

    def turns(callback: keras.callbacks.Callback | None) -> Any:
        def turn() -> None:
            model.fit(
                batches,
                steps_per_epoch=STEPS[name],
                shuffle=False,
                verbose=0,
                callbacks=[callback] if callback else None,
            )

        turn()
        return turn

    return turns


def measure(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in ("Adam", "AdamNG"):
            turns = trained(name, optimizer)
            log_dir = pathlib.Path(folder) / optimizer
            times = timing.interleaved(
                {
                    "without": turns(None),
                    "nothing": turns(Nothing()),
                    "memory": turns(BlockMonitor(every=EVERY)),
                    "files": turns(BlockMonitor(log_dir, every=EVERY)),
                },
                rounds,
                seconds,
            )
            rows[optimizer] = {
                "seconds_a_step": timing.quartiles(times["without"])[1] / STEPS[name],
                **{
                    where: timing.ratio(times[where], times["without"])
                    for where in CASES
                },
            }
    return {"rows": rows}


def main() -> None:
    args = report.parsed(report.arguments(__doc__))
    results: dict[str, Any] = {}
    for name in [*STEPS][:1] if args.quick else STEPS:
        print(f"{name} ...", flush=True)
        results[name] = measure(name, args.rounds, 0 if args.quick else SECONDS)
        report.save(args.out, "monitor", {"every": EVERY, "models": results})
        for optimizer, row in results[name]["rows"].items():
            cost = ", ".join(
                f"{where} {row[where]['median'] - 1:+.1%}"
                f" ({row[where]['low'] - 1:+.1%} to {row[where]['high'] - 1:+.1%})"
                for where in CASES
            )
            step = 1e3 * row["seconds_a_step"]
            print(f"  {optimizer}: a step takes {step:.1f} ms; every {EVERY}: {cost}")


if __name__ == "__main__":
    main()
