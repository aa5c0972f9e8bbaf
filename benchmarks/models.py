"""Four models of the paper's kinds, and random data of the right shapes for them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers


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


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    _, shape, words, label_shape, classes, _ = MODELS[name]
    rng = np.random.default_rng(0)
    x = rng.random(shape, "float32") if words is None else rng.integers(0, words, shape)
    return x, rng.integers(0, classes, label_shape)


def compiled(name: str, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """A new model, ready for `fit`: jitted on JAX, on TensorFlow without XLA."""
    keras.utils.set_random_seed(0)
    model = MODELS[name][0]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=keras.backend.backend() == "jax")
    return model
