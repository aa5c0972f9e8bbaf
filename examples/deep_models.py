"""Models that are hard to train, and their optimizers: what `trainability.py` maps.

Each task has a knob, its depth: layers of an MLP, blocks of a Transformer, or steps
over which a recurrent network must remember. Batches depend on the seed and the step
alone, the weights at the start on the seed and the depth alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import data
import harness  # noqa: F401  (it chooses the backend, before Keras)
import keras
import mnist_mlp
import numpy as np
import tensorflow as tf
from harness import ALGORITHMS
from keras import layers, ops, optimizers

from keras_bng import block_normalized

Arrays = tuple[Any, Any]
WIDTH, HEADS = 64, 4
CONTEXT, TEXTS = 96, 16  # characters of a text, and texts of a batch
CHECKED = 160  # texts of the validation part
DIGITS = 2_000  # of the test part: all 10,000, ten times a run, would take too long
UNITS, SEQUENCES = 64, 50  # of the recurrent network; of a batch


@dataclasses.dataclass(frozen=True)
class Task:
    """A family of models by depth, and what is known of it before it is trained."""

    title: str
    unit: str  # of the depth
    depths: tuple[int, ...]
    quoted: int  # the depth of which the text speaks
    steps: int  # of a training
    guessing: float  # the loss of who knows how frequent each answer is, and no more
    build: Callable[[int], keras.Model]
    batches: Callable[[int, int, int], tf.data.Dataset]  # of depth, seed, steps
    checked: Callable[[int], Arrays]  # the held-out examples, by depth
    loss: Any
    metrics: tuple[str, ...]
    xla: bool  # where it is clearly faster, for all optimizers
    kind: str
    label: str


def mlp(options: argparse.Namespace) -> Task:
    digits = data.mnist(options.data, options.data_dir)
    x, y = map(tf.constant, digits.train)
    held = tuple(part[:DIGITS] for part in digits.test)

    def batches(depth: int, seed: int, steps: int) -> tf.data.Dataset:
        epochs = -(-steps // data.steps(len(y), mnist_mlp.BATCH))
        order = data.shuffled(len(y), mnist_mlp.BATCH, seed, 0, epochs)
        return order.map(lambda _, i: (tf.gather(x, i), tf.gather(y, i))).take(steps)

    return Task(
        title="sigmoid MLP on MNIST",
        unit="layers",
        depths=(4, 8, 12, 18, 24, 32, 48),
        quoted=18,
        steps=1_200,
        guessing=float(np.log(10)),
        build=mnist_mlp.build_model,
        batches=batches,
        checked=lambda depth: held,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=("accuracy",),
        xla=True,
        kind=digits.kind,
        label=f"{digits.label}; judged on the first {len(held[1]):,} of the test part",
    )


class Attention(layers.Layer):
    """Causal self-attention; each of its four matrices is a layer, and so a block.

    (`MultiHeadAttention` has kernels of three dimensions. Keras's Muon would leave
    those to Adam.)
    """

    def build(self, shape: Any) -> None:
        names = ("query", "key", "value", "output")
        self.parts = [layers.Dense(shape[-1], name=name) for name in names]
        for part in self.parts:
            part.build(shape)

    def call(self, x: Any) -> Any:
        length, width = x.shape[1:]
        split = (-1, length, HEADS, width // HEADS)
        heads = [ops.reshape(part(x), split) for part in self.parts[:3]]
        mixed = ops.dot_product_attention(*heads, is_causal=True)
        return self.parts[3](ops.reshape(mixed, (-1, length, width)))


class Position(layers.Layer):
    """Adds a vector for each place in the text."""

    def build(self, shape: Any) -> None:
        self.places = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        return x + self.places


def transformer(depth: int, symbols: int, norm_first: bool) -> keras.Model:
    """`depth` blocks of attention and MLP, each in a residual branch."""
    inputs = keras.Input((CONTEXT,), dtype="int32")
    x = Position()(layers.Embedding(symbols, WIDTH)(inputs))
    for i in range(depth):
        feed = keras.Sequential(
            [layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH)],
            name=f"feed_{i}",
        )
        for branch in (Attention(name=f"attention_{i}"), feed):
            if norm_first:
                x = x + branch(layers.LayerNormalization()(x))
            else:
                x = layers.LayerNormalization()(x + branch(x))
    if norm_first:
        x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(symbols)(x))


def characters(options: argparse.Namespace, norm_first: bool) -> Task:
    """The next character of Penn Treebank; a rare word there is one character."""
    corpus = data.penn_treebank(options.data, options.data_dir)

    def text_of(words: np.ndarray) -> np.ndarray:
        text = " ".join(words).replace("<eos>", "\n").replace("<unk>", "?")
        return np.array(list(text))

    symbols, text = np.unique(text_of(corpus.train), return_inverse=True)
    held = text_of(corpus.validation)
    held = np.searchsorted(symbols, held[np.isin(held, symbols)])
    counts = np.bincount(text)
    numbers = tf.constant(text, tf.int32)
    places = np.linspace(0, len(held) - CONTEXT - 1, CHECKED).astype(int)
    windows = held[places[:, None] + np.arange(CONTEXT + 1)].astype("int32")

    def batches(depth: int, seed: int, steps: int) -> tf.data.Dataset:
        def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            begin = tf.random.stateless_uniform(
                [TEXTS, 1],
                [tf.cast(seed, tf.int64), step],
                maxval=len(text) - CONTEXT,
                dtype=tf.int32,
            )
            found = tf.gather(numbers, begin + tf.range(CONTEXT + 1))
            return found[:, :-1], found[:, 1:]

        return tf.data.Dataset.range(steps).map(batch)

    place = "pre" if norm_first else "post"
    return Task(
        title=f"{place}-LN Transformer on characters of Penn Treebank",
        unit="blocks",
        depths=(12,) if norm_first else (3, 6, 12, 24),
        quoted=12,
        steps=300,
        guessing=float(-np.mean(np.log((counts / counts.sum())[windows[:, 1:]]))),
        build=lambda depth: transformer(depth, len(symbols), norm_first),
        batches=batches,
        checked=lambda depth: (windows[:, :-1], windows[:, 1:]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=("accuracy",),
        xla=False,
        kind=corpus.kind,
        label=f"characters of {corpus.label}; judged on {windows[:, 1:].size:,} of the "
        "validation part",
    )


def recurrent(length: int) -> keras.Model:
    inputs = keras.Input((length, 2))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(UNITS)(inputs)))


def sums(length: int, number: int, seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """The adding problem: of numbers in [0, 1), two are marked, one in each half."""
    half = length // 2
    seeds = tf.random.split(seed)
    values = tf.random.stateless_uniform([number, length], seeds[0])
    at = tf.random.stateless_uniform([number, 2], seeds[1], maxval=half, dtype=tf.int32)
    at += tf.constant([0, half])
    marks = tf.reduce_sum(tf.one_hot(at, length), 1)
    return tf.stack([values, marks], -1), tf.reduce_sum(values * marks, 1)[:, None]


def adding(options: argparse.Namespace) -> Task:
    def batches(depth: int, seed: int, steps: int) -> tf.data.Dataset:
        return tf.data.Dataset.range(steps).map(
            lambda step: sums(depth, SEQUENCES, [tf.cast(seed, tf.int64), step])
        )

    return Task(
        title="LSTM on the adding problem",
        unit="steps",
        depths=(50, 100, 200, 400),
        quoted=200,
        steps=1_000,
        guessing=1 / 6,  # the variance of the sum of two such numbers
        build=recurrent,
        batches=batches,
        checked=lambda depth: tuple(x.numpy() for x in sums(depth, 1_000, [-1, 0])),
        loss="mean_squared_error",
        metrics=(),
        xla=True,
        kind="made",
        label="the adding problem, made as it is needed",
    )


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {
    "mlp": mlp,
    "post-ln": lambda options: characters(options, norm_first=False),
    "pre-ln": lambda options: characters(options, norm_first=True),
    "adding": adding,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An optimizer: what is not among its options is as in Keras, or as in ours."""

    title: str
    cls: Any
    options: dict[str, Any]
    normalized: bool = False  # by `block_normalized`

    @property
    def ours(self) -> bool:
        return self.normalized or self.cls.__module__.startswith("keras_bng")

    @property
    def default(self) -> float:
        """The class's own learning rate; of a normalized one, that of its base."""
        return inspect.signature(self.cls).parameters["learning_rate"].default

    def rates(self, reach: int) -> list[float]:
        """Two a decade, `reach` of them on either side of the default."""
        exponents = range(-reach, reach + 1)
        return [float(f"{self.default * 10 ** (k / 2):.3g}") for k in exponents]

    def made(self, model: keras.Model, rate: Any) -> Any:
        options = dict(self.options)
        if self.cls is optimizers.Muon:
            options["exclude_layers"] = not_for_muon(model)
        optimizer = self.cls(rate, **options)
        return block_normalized(optimizer) if self.normalized else optimizer


def not_for_muon(model: keras.Model) -> list[str]:
    """Patterns of what is not a hidden matrix: Keras's Muon leaves it to Adam."""
    tables = [x for x in model.layers if isinstance(x, (layers.Embedding, Position))]
    found = [v.path for x in (*tables, model.layers[-1]) for v in x.trainable_variables]
    return [f"^{re.escape(path)}$" for path in found]


def whole_attention(variable: Any) -> str:
    """The blocks "layer", but an attention's four matrices are one."""
    layer = variable.path.rpartition("/")[0]
    attention = re.search(r"attention_\d+", layer)
    return attention[0] if attention else layer


CLIP = {"global_clipnorm": 1.0}
MOMENTUM = {"momentum": 0.9}
RECIPES = {
    "SGDM": Recipe("SGD, momentum", optimizers.SGD, MOMENTUM),
    "SGDM_clip": Recipe("SGD, momentum, clipped", optimizers.SGD, MOMENTUM | CLIP),
    "Adam": Recipe("Adam", optimizers.Adam, {}),
    "Adam_1e-20": Recipe("Adam, epsilon 1e-20", optimizers.Adam, {"epsilon": 1e-20}),
    "Adam_clip": Recipe("Adam, clipped", optimizers.Adam, CLIP),
    "AdamW_clip": Recipe("AdamW, clipped", optimizers.AdamW, CLIP),
    "AdamW_98_clip": Recipe(
        "AdamW, 0.98, clipped", optimizers.AdamW, {"beta_2": 0.98} | CLIP
    ),
    "Lion": Recipe("Lion", optimizers.Lion, {}),
    "Lamb": Recipe("Lamb", optimizers.Lamb, {}),
    "Adafactor": Recipe("Adafactor", optimizers.Adafactor, {}),
    "Muon": Recipe("Muon", optimizers.Muon, {}),
    "SGDMNG": Recipe("SGDNG", *ALGORITHMS["SGDMNG"]),
    "SGDMNG_adap": Recipe("SGDNG, adaptive", *ALGORITHMS["SGDMNG_adap"]),
    "AdamNG": Recipe("AdamNG", *ALGORITHMS["AdamNG"]),
    "AdamNG_98": Recipe("AdamNG, 0.98", ALGORITHMS["AdamNG"][0], {"beta_2": 0.98}),
    "AdaGradNG": Recipe("AdagradNG", *ALGORITHMS["AdaGradNG"]),
    "LionNG": Recipe("block_normalized(Lion)", optimizers.Lion, {}, normalized=True),
    "MuonNG": Recipe("block_normalized(Muon)", optimizers.Muon, {}, normalized=True),
}
BLOCKS = {"variable": "variable", "model": "model", "attention": whole_attention}
for name, blocks in BLOCKS.items():
    RECIPES[f"AdamNG_{name}"] = dataclasses.replace(
        RECIPES["AdamNG"], title=f"AdamNG, blocks: {name}", options={"blocks": blocks}
    )


@keras.saving.register_keras_serializable("keras_bng_examples")
class Ramp(optimizers.schedules.LearningRateSchedule):
    """A rate that rises in a straight line over so many steps, and then stays.

    Both are variables: another value needs no other trace.
    """

    def __init__(self) -> None:
        self.rate = keras.Variable(0.0, trainable=False)
        self.steps = keras.Variable(1.0, trainable=False)

    def __call__(self, step: Any) -> Any:
        share = (ops.cast(step, "float32") + 1.0) / self.steps
        return self.rate * ops.minimum(share, 1.0)

    def get_config(self) -> dict[str, Any]:
        return {}


class Bench:
    """A model and its optimizer, built and traced once, for all rates and seeds."""

    def __init__(self, task: Task, recipe: Recipe, depth: int, points: int) -> None:
        self.task, self.depth, self.points = task, depth, points
        self.ramp = Ramp()
        self.model = task.build(depth)
        self.model.compile(
            recipe.made(self.model, self.ramp),
            loss=task.loss,
            metrics=list(task.metrics),
            jit_compile=task.xla,
            steps_per_execution=max(1, task.steps // points),
        )
        self.model.optimizer.build(self.model.trainable_variables)
        self.fresh = [ops.convert_to_numpy(v) for v in self.model.optimizer.variables]
        self.first: dict[int, list[np.ndarray]] = {}

    def reset(self, seed: int, rate: float, warmup: int) -> None:
        """As if it was new: the weights are those that any optimizer begins with."""
        if seed not in self.first:
            keras.utils.set_random_seed(seed)
            self.first[seed] = self.task.build(self.depth).get_weights()
        self.model.set_weights(self.first[seed])
        for variable, value in zip(self.model.optimizer.variables, self.fresh):
            variable.assign(value)
        self.ramp.rate.assign(rate)
        self.ramp.steps.assign(max(1, warmup))

    def train(self, seed: int) -> dict[str, list[float]]:
        """Held-out loss at `points` steps, evenly spaced; NaN after the first NaN."""
        steps = self.task.steps // self.points
        history = self.model.fit(
            self.task.batches(self.depth, seed, self.points * steps),
            epochs=self.points,
            steps_per_epoch=steps,
            validation_data=self.task.checked(self.depth),
            validation_batch_size=500,
            callbacks=[keras.callbacks.TerminateOnNaN()],
            shuffle=False,
            verbose=int(sys.stdout.isatty()),
        ).history
        missing = [math.nan] * (self.points - len(history["loss"]))
        return {
            name: [*(float(f"{x:.6g}") for x in values), *missing]
            for name, values in history.items()
            if name != "accuracy"
        }

    def execution(self, batches: Any) -> float:
        """The seconds of a few steps, as many as Keras runs at once."""
        started = time.perf_counter()
        logs = self.model.train_function(batches)
        float(logs["loss"])  # on a GPU, this waits for it
        return time.perf_counter() - started


def in_turns(benches: dict[str, Bench], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each, measured so that what slows one also slows the others."""
    found: dict[str, list[float]] = {name: [] for name in benches}
    batches = {}
    for name, bench in benches.items():
        steps = bench.model.steps_per_execution
        bench.model.make_train_function()
        batches[name] = iter(bench.task.batches(bench.depth, 0, (rounds + 1) * steps))
        bench.execution(batches[name])  # with its trace
    for _ in range(rounds):
        for name, bench in benches.items():
            seconds = bench.execution(batches[name])
            found[name].append(seconds / bench.model.steps_per_execution)
    return found
