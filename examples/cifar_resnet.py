"""CIFAR-10 and CIFAR-100 with ResNets of 20 to 110 layers (section 4.2)."""

from __future__ import annotations

import pathlib
from typing import Any

import data
import harness
import keras
import numpy as np
import tensorflow as tf
from harness import Result, Run

EXPERIMENT = "cifar_resnet"
ALGORITHMS = [
    f"{base}{version}"
    for base in ("SGDM", "Adam")
    for version in ("", "CLIP", "NG", "NG_adap")
]
DEPTHS = (20, 32, 44, 56, 110)
BATCH = 128
EPOCHS = 160
RATES = {"SGDM": 0.1, "Adam": 0.001}
L2 = 1e-4


def build_model(depth: int, classes: int) -> keras.Model:
    """He et al.'s ResNet for CIFAR: `depth` = 6n + 2, shortcuts without parameters."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"`depth` must be 6n + 2, such as 20. Received: {depth}")
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(conv_bn(inputs, 16))
    for channels in (16, 32, 64):
        for block in range(depth // 6):
            x = residual(x, channels, 2 if channels > 16 and block == 0 else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(
        classes, kernel_initializer="he_normal", dtype="float32"
    )(x)
    return keras.Model(inputs, outputs)


def residual(x: Any, channels: int, stride: int) -> Any:
    y = keras.layers.ReLU()(conv_bn(x, channels, stride))
    y = conv_bn(y, channels)
    if stride > 1:  # every second pixel, and zeros for the channels that are new
        x = keras.layers.MaxPooling2D(1, stride)(x)
        new = channels - x.shape[-1]
        x = keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [new // 2, new // 2]])
    return keras.layers.ReLU()(keras.layers.add([x, y]))


def conv_bn(x: Any, channels: int, stride: int = 1) -> Any:
    x = keras.layers.Conv2D(
        channels, 3, stride, "same", use_bias=False, kernel_initializer="he_normal"
    )(x)
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def training_batches(
    images: np.ndarray, labels: np.ndarray, seed: int, first: int, epochs: int
) -> tf.data.Dataset:
    """The epochs from `first` on, shuffled and augmented by seed and epoch alone."""
    mean, deviation = channel_statistics(images)
    images, labels = tf.constant(images), tf.constant(labels)

    def shuffled(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(len(labels)), [tf.cast(seed, tf.int64), epoch]
        )
        return tf.data.Dataset.from_tensor_slices(order).batch(BATCH).enumerate().map(
            lambda step, chosen: (epoch, step, chosen)
        )

    def batch(epoch: tf.Tensor, step: tf.Tensor, chosen: tf.Tensor) -> Any:
        x = (tf.cast(tf.gather(images, chosen), tf.float32) - mean) / deviation
        number = epoch * steps(len(labels)) + step
        x = augment(x, tf.stack([tf.cast(seed, tf.int64), number]))
        return x, tf.gather(labels, chosen)

    return (
        tf.data.Dataset.range(first, epochs)
        .flat_map(shuffled)
        .map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def steps(examples: int) -> int:
    return -(-examples // BATCH)


def augment(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Pads 4 pixels, crops 32 x 32 anywhere, flips half of them: a batch at once."""
    padded = tf.pad(images, [[0, 0], [4, 4], [4, 4], [0, 0]])
    top, left, flip = tf.unstack(
        tf.random.stateless_uniform([3, tf.shape(images)[0], 1], seed, 0, 18, tf.int32)
    )
    rows = top % 9 + tf.range(32)
    columns = left % 9 + tf.where(flip % 2 == 0, tf.range(32), tf.range(31, -1, -1))
    cropped = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(cropped, columns, axis=2, batch_dims=1)


def test_batches(
    train: np.ndarray, images: np.ndarray, labels: np.ndarray
) -> tf.data.Dataset:
    mean, deviation = channel_statistics(train)
    return (
        tf.data.Dataset.from_tensor_slices((images, labels))
        .batch(500)
        .map(lambda x, y: ((tf.cast(x, tf.float32) - mean) / deviation, y))
        .prefetch(tf.data.AUTOTUNE)
    )


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of red, green and blue."""
    return (
        images.mean((0, 1, 2)).astype("float32"),
        images.std((0, 1, 2)).astype("float32"),
    )


def schedule(rate: float, epochs: int, examples: int) -> Any:
    """Times 0.1 after half of the epochs and after three quarters: at 80 and 120."""
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [steps(examples) * (epochs // 2), steps(examples) * (epochs * 3 // 4)],
        [rate, 0.1 * rate, 0.01 * rate],
    )


def train(run: Run, images: data.Data, out: pathlib.Path) -> dict[str, list[float]]:
    settings = run.settings
    x, y = (part[: settings["images"]] for part in images.train)
    model = build_model(settings["depth"], settings["classes"])
    rate = schedule(settings["rate"], settings["epochs"], len(y))
    model.compile(
        optimizer=harness.optimizer(run.algorithm, rate, l2=L2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return harness.fit(
        run,
        model,
        lambda first: training_batches(x, y, run.seed, first, settings["epochs"]),
        out,
        steps_per_epoch=steps(len(y)),
        validation_data=test_batches(x, *images.test),
    )


def settings(algorithm: str, options: Any, images: data.Data) -> dict[str, Any]:
    base = next(name for name in RATES if algorithm.startswith(name))
    found = {
        "depth": options.depth,
        "classes": options.classes,
        "rate": RATES[base],
        "epochs": options.epochs,
        "images": options.images,
        "data": images.kind,
    }
    if algorithm.endswith("CLIP"):
        found |= {"clip": 0.1, "blocks": "layer"}
    if algorithm.endswith("adap"):
        found |= {"alpha": 0.02}
    return found


def main(arguments: Any = None) -> list[Result]:
    parser = harness.parser(__doc__, ALGORITHMS)
    parser.add_argument("--depth", type=int, default=20, choices=DEPTHS)
    parser.add_argument("--classes", type=int, default=10, choices=(10, 100))
    parser.add_argument("--images", type=int)
    options = harness.parse(parser, arguments)
    images = data.cifar(options.classes, options.data, options.data_dir)
    runs = [
        Run(EXPERIMENT, name, settings(name, options, images), seed)
        for seed in range(options.seeds)
        for name in options.algorithms or ALGORITHMS
    ]
    return harness.train_all(
        runs, lambda run: train(run, images, options.out), options.out, images.label
    )


if __name__ == "__main__":
    main()
