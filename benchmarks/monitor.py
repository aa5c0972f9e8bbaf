"""What `BlockMonitor` costs in `fit`: steps that it records beside those around them.

    pip install -e ".[benchmarks]"
    python -m benchmarks.monitor --rounds 4  # three models, five minutes
    python -m benchmarks.monitor --quick     # a minute, to see that it works

Records every 10 steps, in memory and to `blocks.csv` and TensorBoard, in `fit` without
XLA and without a progress bar. What a record costs is what its step and the next one
(it finds cold caches) take longer than the median of the other eight, in parts of all
ten. The first turn, which traces, does not count.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any

import keras
import numpy as np

from benchmarks import models, report, timing
from benchmarks.optimizers import OPTIMIZERS
from keras_bng import BlockMonitor

EVERY = 10
STEPS = {"MLP, 18 layers": 200, "ResNet-20": 20, "text CNN": 50}  # a turn
SECONDS = 30  # at least, for each model and optimizer
CASES = ("memory", "files")


class Clock(keras.callbacks.Callback):
    """When each step begins; first of the callbacks, so that theirs count."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.times: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def trained(name: str, optimizer: str, monitor: BlockMonitor) -> tuple[Any, list[Any]]:
    """A function that does a turn, and where its steps go: a row for each record."""
    import tensorflow as tf

    model = models.compiled(name, OPTIMIZERS[optimizer]())
    batches = tf.data.Dataset.from_tensors(models.batch(name)).repeat()
    clock, rows = Clock(), []

    def turn() -> None:
        model.fit(
            batches,
            steps_per_epoch=STEPS[name],
            shuffle=False,
            verbose=0,
            callbacks=[clock, monitor],
        )
        rows.extend(np.diff(clock.times).reshape(-1, EVERY))

    turn()
    rows.clear()
    return turn, rows


def measure(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in ("Adam", "AdamNG"):
            log_dirs = {"memory": None, "files": pathlib.Path(folder) / optimizer}
            cases = {
                case: trained(name, optimizer, BlockMonitor(log_dir, every=EVERY))
                for case, log_dir in log_dirs.items()
            }
            timing.interleaved(
                {case: turn for case, (turn, _) in cases.items()}, rounds, seconds
            )
            rows[optimizer] = {case: cost(steps) for case, (_, steps) in cases.items()}
    return {"rows": rows}


def cost(rows: Any) -> dict[str, float]:
    """Of a record, relative to all steps from one to the next."""
    rows = np.array(rows)
    plain = np.median(rows[:, 2:], axis=1)
    low, middle, high = np.percentile(
        (rows[:, 0] + rows[:, 1] - 2 * plain) / (EVERY * plain), [25, 50, 75]
    )
    return {
        "seconds_a_step": float(np.median(plain)),
        "median": float(middle),
        "low": float(low),
        "high": float(high),
        "records": len(rows),
    }


def table(results: dict[str, Any]) -> str:
    """What a record costs, for the documentation: median [quartiles]."""
    lines = [
        "| model | optimizer | a step | in memory | to files |",
        "|---|---|---|---|---|",
    ]
    for name, model in results["models"].items():
        for optimizer, row in model["rows"].items():
            cells = [
                "{median:+.1%} [{low:+.1%}, {high:+.1%}]".format(**row[case])
                for case in CASES
            ]
            step = f"{1e3 * row['memory']['seconds_a_step']:.1f} ms"
            lines.append(f"| {' | '.join([name, optimizer, step, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    args = report.parsed(report.arguments(__doc__))
    models: dict[str, Any] = {}
    for name in [*STEPS][:1] if args.quick else STEPS:
        print(f"{name} ...", flush=True)
        models[name] = measure(name, args.rounds, 0 if args.quick else SECONDS)
        results = {"every": EVERY, "models": models}
        report.save(args.out, "monitor", results)
    print(f"\nOf {EVERY} steps, a record costs\n\n{table(results)}")


if __name__ == "__main__":
    main()
