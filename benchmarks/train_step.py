"""`model.fit` end to end, stock against ours, on four models of the paper's kinds.

    pip install -e ".[benchmarks]"
    python -m benchmarks.train_step           # about 15 minutes on 2 cores
    python -m benchmarks.train_step --quick   # a minute, to see that it works

Random data of the right shapes; a turn is one `fit` over a few batches, without XLA,
which on a CPU is no faster for these models. Compiling is not in it.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

from benchmarks import report, timing
from benchmarks.update_step import FIRST_STEPS, OPTIMIZERS

BASE = {"SGDNG": "SGD", "AdamNG": "Adam"}


def mlp() -> keras.Model:
    hidden = [layers.Dense(100, "sigmoid") for _ in range(17)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])


def resnet() -> keras.Model:
    """ResNet-20 of He et al., with parameter-free shortcuts."""
    images = keras.Input((32, 32, 3))
    x = layers.ReLU()(_convolution(images, 16))
    for width in (16, 32, 64):
        for i in range(3):
            stride = 2 if width > 16 and i == 0 else 1
            shortcut = x
            if stride == 2:
                shortcut = layers.AveragePooling2D(1, 2)(x)
                shortcut = keras.ops.pad(shortcut, [(0, 0)] * 3 + [(0, width // 2)])
            x = layers.ReLU()(_convolution(x, width, stride))
            x = layers.ReLU()(layers.Add()([_convolution(x, width), shortcut]))
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _convolution(x: Any, width: int, stride: int = 1) -> Any:
    x = layers.Conv2D(width, 3, stride, "same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def text_cnn() -> keras.Model:
    words = keras.Input((56,), dtype="int32")
    x = layers.Embedding(18_000, 128)(words)
    features = [
        layers.GlobalMaxPooling1D()(layers.Conv1D(100, window, activation="relu")(x))
        for window in (3, 4, 5)
    ]
    return keras.Model(
        words, layers.Dense(2)(layers.Dropout(0.5)(layers.Concatenate()(features)))
    )


def language_model() -> keras.Model:
    words = keras.Input((40,), dtype="int32")
    x = layers.Embedding(10_000, 200)(words)
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.LSTM(200, return_sequences=True)(x))
    return keras.Model(words, layers.Dense(10_000)(x))


# model, shape of a batch, words, shape of its labels, classes, batches a turn
MODELS: dict[str, tuple[Any, ...]] = {
    "MLP, 18 layers": (mlp, (100, 784), None, (100,), 10, 100),
    "ResNet-20": (resnet, (128, 32, 32, 3), None, (128,), 10, 3),
    "text CNN": (text_cnn, (50, 56), 18_000, (50,), 2, 20),
    "LSTM": (language_model, (100, 40), 10_000, (100, 40), 10_000, 2),
}


def measure(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """The time of each optimizer's `fit` on this model, and its ratio to the stock."""
    import tensorflow as tf

    make, shape, words, label_shape, classes, batches = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.random(shape, "float32") if words is None else rng.integers(0, words, shape)
    y = rng.integers(0, classes, label_shape)
    batches = 1 if quick else batches
    quiet = tf.data.Options()
    quiet.autotune.enabled = False  # at its end, a `fit` would wait for its thread
    data = tf.data.Dataset.from_tensors((x, y)).repeat(batches).with_options(quiet)

    cases = {}
    for optimizer in FIRST_STEPS:
        keras.utils.set_random_seed(0)
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=False)

        def fit(model: keras.Model = model) -> None:
            model.fit(data, shuffle=False, verbose=0)

        fit()
        cases[optimizer] = fit
    times = timing.interleaved(cases, rounds)
    return {
        "parameters": model.count_params(),
        "variables": len(model.trainable_variables),
        "batches_a_turn": batches,
        "rows": {
            optimizer: {
                "seconds_a_batch": timing.quartiles(seconds)[1] / batches,
                **(
                    {"ratio": timing.ratio(seconds, times[BASE[optimizer]])}
                    if optimizer in BASE
                    else {}
                ),
            }
            for optimizer, seconds in times.items()
        },
    }


def draw(results: Any, path: Any) -> None:
    fig, axis = report.figure(figsize=(6, 3.6))
    for i, optimizer in enumerate(BASE):
        found = [result["rows"][optimizer]["ratio"] for result in results.values()]
        middle = [r["median"] for r in found]
        errors = [
            [r["median"] - r["low"] for r in found],
            [r["high"] - r["median"] for r in found],
        ]
        places = [j + (i - 0.5) * 0.2 for j in range(len(results))]
        label = f"{optimizer} / {BASE[optimizer]}"
        axis.errorbar(places, middle, errors, fmt="o", capsize=3, label=label)
    axis.axhline(1, color="black", lw=0.8)
    axis.axhline(1.03, color="gray", lw=0.8, ls="--", label="target: 1.03")
    axis.set_xticks(range(len(results)), results)
    axis.set_ylabel("time of `fit` / stock optimizer's")
    axis.legend(fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME")
    args = report.parsed(parser)
    results = report.load(args.out, "train_step") if args.models else {}
    for name in args.models or (["MLP, 18 layers"] if args.quick else MODELS):
        results[name] = measure(name, args.rounds, args.quick)
        rows = [
            [
                optimizer,
                f"{1e3 * row['seconds_a_batch']:.2f}",
                report.spread(row["ratio"]) if "ratio" in row else "",
            ]
            for optimizer, row in results[name]["rows"].items()
        ]
        print(f"\n{name}: {results[name]['variables']} variables")
        header = ["optimizer", "ms a batch", "ratio to stock [quartiles]"]
        print(report.table(header, rows), flush=True)
        path = report.save(args.out, "train_step", {"results": results})
    draw(results, path.with_suffix(".png"))
    print(f"\nWritten: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
