"""Models and data of the other experiments, as tasks with one face.

For experiments that do the same with each of them: `find_rate.py` and `rules.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import cifar_resnet
import data
import harness
import keras
import mnist_mlp
import numpy as np
import penn_treebank_lstm as penn
import rotten_tomatoes_cnn as rotten
from harness import Result, Run

History = dict[str, list[float]]
# Of CIFAR-10, so that a ResNet can be trained many times on two cores.
IMAGES, IMAGE_EPOCHS = 5_000, 5
BPTT = 40


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with its data; `judged_by` is low where a training was good."""

    name: str  # of the model, for tables
    label: str  # of the data
    kind: str
    measure: str  # what `judged_by` is, in words
    epochs: int  # of a whole training
    steps: int  # of an epoch
    compiled: Callable[[keras.optimizers.Optimizer], keras.Model]
    examples: Callable[[], dict[str, Any]]  # what `fit` takes, for so many steps
    train: Callable[[Run, pathlib.Path], History]
    judged_by: Callable[[Result], float]


def mnist(depth: int, options: argparse.Namespace) -> Task:
    digits = data.mnist(options.data, options.data_dir)
    digits = data.held_out(digits, min(mnist_mlp.HELD_OUT, len(digits.train[1]) // 10))

    def compiled(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        model = mnist_mlp.build_model(depth)
        mnist_mlp.compile_model(model, optimizer, steps_per_execution=1)
        return model

    return Task(
        name=f"MLP, {depth} layers",
        label=digits.label,
        kind=digits.kind,
        measure="held-out loss",
        epochs=10,
        steps=data.steps(len(digits.train[1]), mnist_mlp.BATCH),
        compiled=compiled,
        examples=lambda: {
            "x": digits.train[0],
            "y": digits.train[1],
            "batch_size": mnist_mlp.BATCH,
        },
        train=lambda run, out: mnist_mlp.train(run, digits),
        judged_by=lambda result: result["history"]["val_loss"][-1],
    )


def text_cnn(options: argparse.Namespace) -> Task:
    reviews = data.rotten_tomatoes(options.data, options.data_dir)
    numbers, words = rotten.vectors(reviews)
    develop = data.held_out(numbers, len(numbers.train[1]) // 10)
    x, y = develop.train
    return Task(
        name="text CNN",
        label=f"{reviews.label}; {rotten.development(develop)}",
        kind=reviews.kind,
        measure="lowest development error",
        epochs=10,
        steps=data.steps(len(y), rotten.BATCH),
        compiled=lambda made: rotten.compiled_model(made, words, x.shape[1]),
        examples=lambda: {"x": x, "y": y, "batch_size": rotten.BATCH},
        train=lambda run, out: rotten.train(run, numbers, develop, words, out),
        judged_by=lambda result: 1 - max(result["history"]["dev_accuracy"]),
    )


def language_model(options: argparse.Namespace) -> Task:
    corpus = data.penn_treebank(options.data, options.data_dir)
    lookup = penn.vocabulary(corpus.train)
    text, validation = (
        penn.streams(part, lookup) for part in (corpus.train, corpus.validation)
    )
    batches = penn.windows(text, BPTT).map(penn.row_targets)
    words = lookup.vocabulary_size()
    return Task(
        name=f"LSTM, BPTT {BPTT}",
        label=f"{corpus.label}; judged on the validation text",
        kind=corpus.kind,
        measure="validation log perplexity",
        epochs=1,
        steps=int(batches.cardinality()),
        compiled=lambda made: penn.compiled_rows(penn.build_model(words), made),
        examples=lambda: {"x": batches},
        train=lambda run, out: penn.train(run, text, validation, lookup, out),
        judged_by=lambda result: float(np.log(result["history"]["val_perplexity"][-1])),
    )


def resnet(options: argparse.Namespace) -> Task:
    """ResNet-20, REDUCED: few images, few epochs, no schedule."""
    images = data.cifar(10, options.data, options.data_dir)
    images = data.first(images, min(IMAGES, len(images.train[1])))
    images = data.held_out(images, len(images.train[1]) // 10)
    x, y = images.train

    def compiled(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        model = cifar_resnet.build_model(20, 10)
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
        return model

    def train(run: Run, out: pathlib.Path) -> History:
        epochs = run.settings["epochs"]
        rate = run.settings["rate"]
        return harness.fit(
            run,
            compiled(harness.optimizer(run.algorithm, rate, l2=cifar_resnet.L2)),
            lambda first: cifar_resnet.training_batches(x, y, run.seed, first, epochs),
            out,
            steps_per_epoch=data.steps(len(y), cifar_resnet.BATCH),
            validation_data=cifar_resnet.test_batches(x, *images.test),
        )

    return Task(
        name="ResNet-20, REDUCED",
        label=images.label,
        kind=images.kind,
        measure="held-out loss",
        epochs=IMAGE_EPOCHS,
        steps=data.steps(len(y), cifar_resnet.BATCH),
        compiled=compiled,
        examples=lambda: {"x": cifar_resnet.training_batches(x, y, 0, 0, IMAGE_EPOCHS)},
        train=train,
        judged_by=lambda result: result["history"]["val_loss"][-1],
    )


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {
    "mnist-6": lambda options: mnist(6, options),
    "mnist-12": lambda options: mnist(12, options),
    "mnist-18": lambda options: mnist(18, options),
    "text": text_cnn,
    "language": language_model,
    "resnet": resnet,
}


def add_tasks(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--tasks", nargs="+", choices=[*TASKS], default=[*TASKS], metavar="TASK"
    )


def optimizer(task: str, algorithm: str) -> keras.optimizers.Optimizer:
    """For a search of rates; the ResNet has weight decay as in the paper."""
    more = {"l2": cifar_resnet.L2} if task == "resnet" else {}
    return harness.optimizer(algorithm, 0.001, **more)


def settings(task: str, known: Task, **more: Any) -> dict[str, Any]:
    """Of a run; an MLP's depth, and a language model's length, are among them."""
    found: dict[str, Any] = {"task": task}
    if task.startswith("mnist"):
        found["depth"] = int(task.partition("-")[2])
    if task == "language":
        found["bptt"] = BPTT
    return found | more | {"data": known.kind}
