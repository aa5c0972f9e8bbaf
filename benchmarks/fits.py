"""`model.fit` of all optimizers on one backend, taking turns.

    KERAS_BACKEND=jax python -m benchmarks.fits 20 all "MLP, 18 layers"

prints a line of JSON for each model; 20 is the number of rounds, and `1` instead of
`all` batches a turn is quick. Called by `python -m benchmarks.train_step`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import keras

from benchmarks import models, timing
from benchmarks.optimizers import BASE, MAIN, OPTIMIZERS


class Same(keras.utils.PyDataset):
    """The same arrays again and again."""

    def __init__(self, batch: Any, count: int) -> None:
        super().__init__()
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batch


def repeated(batch: Any, count: int) -> Any:
    """Data that costs a step as little as the backend allows."""
    if keras.backend.backend() != "tensorflow":
        return Same(batch, count)
    import tensorflow as tf

    quiet = tf.data.Options()
    quiet.autotune.enabled = False  # at its end, a `fit` would wait for its thread
    return tf.data.Dataset.from_tensors(batch).repeat(count).with_options(quiet)


def measure(name: str, rounds: int, batches: int) -> dict[str, Any]:
    """The time of each optimizer's `fit` on this model, and its ratio to the stock."""
    data = repeated(models.batch(name), batches)
    cases = {}
    for optimizer in MAIN:
        model = models.compiled(name, OPTIMIZERS[optimizer]())

        def fit(model: keras.Model = model) -> None:
            model.fit(data, shuffle=False, verbose=0)

        fit()
        cases[optimizer] = fit
    times = timing.interleaved(cases, rounds)
    rows: dict[str, Any] = {}
    for optimizer, seconds in times.items():
        rows[optimizer] = {"seconds_a_batch": timing.quartiles(seconds)[1] / batches}
        if optimizer in BASE:
            ratio = timing.ratio(seconds, times[BASE[optimizer]])
            rows[optimizer]["ratio"] = ratio
    return {
        "parameters": model.count_params(),
        "variables": len(model.trainable_variables),
        "batches_a_turn": batches,
        "rows": rows,
    }


def main() -> None:
    rounds, batches, *names = sys.argv[1:]
    for name in names:
        count = models.MODELS[name][-1] if batches == "all" else int(batches)
        result = measure(name, int(rounds), count)
        print(json.dumps({"model": name, **result}), flush=True)


if __name__ == "__main__":
    main()
