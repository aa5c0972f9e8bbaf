"""Which learning rate: `find_learning_rate` tries a grid of them, and picks one."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_bng import rules
from keras_bng.optimizer import BlockNormalized
from keras_bng.tools.progress import Progress, check_verbose
from keras_bng.tools.rate_choice import Trial, picked
from keras_bng.tools.rate_search import Search
from keras_bng.tools.rates_found import RatesFound
from keras_bng.tools.watched import MULTI, held_optimizers

STEPS = 1000
# A part of the steps, and a number of them, in which the losses of the end are.
END, AT_LEAST = 10, 20


def find_learning_rate(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
    rates: Iterable[float] | None = None,
    steps: int | None = None,
    validation_data: Any = None,
    verbose: str | int = "auto",
) -> RatesFound:
    """Trains a model at several learning rates for a while, and says which is best.

    The model is left as it was: weights, optimizer, metrics. Each rate begins with the
    model's present weights and an optimizer that has made no step. All rates get the
    same batches and the same random numbers, and stay constant. A rate ends early only
    if its loss is not finite: others may look bad for long before they learn.

    The losses of two rates may differ by less than the noise of their batches. Such
    rates count as equally good, and the largest of them is taken. On a plateau, rates
    that are too low would otherwise win by a hair. A rate whose loss is above that at
    the start is never taken.

    The loss after a short training favours rates that are good at first. In a training
    ten times as long, at a constant rate, a third of the rate that was picked is better
    in most cases: try it, too. A tenth of the steps that you will train for is a good
    budget; do not trust it with less, or where it warns of a plateau.

    Args:
        model: A compiled model, with any Keras optimizer but a `MultiOptimizer`.
        x: As in `fit`. The batches of one epoch, or of `steps` if those are fewer, are
            kept in memory.
        y: As in `fit`.
        sample_weight: As in `fit`, where `x` is made of arrays.
        batch_size: As in `fit`.
        rates: Two or more rates to try. Default: three a decade, around what is usual
            for this optimizer and its rule.
        steps: How many batches each rate gets. Default: 1,000. A deep network needs
            enough to leave its first plateau.
        validation_data: As in `fit`. If given, its loss after the last step decides.
            Otherwise the mean loss of the last tenth of the steps does.
        verbose: 0 is silent, 1 prints a line that changes, 2 a line for each rate.
            "auto" is 1 in a terminal or notebook, else 2.

    Returns:
        An object with `best`, a float, and the arrays `rates` and `losses`. Printed, it
        is a table. `plot(path)` draws it.

    Raises:
        RuntimeError: No rate made the loss smaller by more than the batches' noise.

    Examples:
        >>> import keras, numpy as np
        >>> from keras_bng import SGDNG
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((3,)), layer])
        >>> model.compile(SGDNG(), "mse")
        >>> y = x @ [[3.0], [4.0], [0.0]]
        >>> found = find_learning_rate(
        ...     model, x, y, rates=[1e-3, 0.1], steps=40, verbose=0
        ... )
        >>> found.best
        0.1
        >>> model.optimizer.learning_rate = found.best
    """
    _check_model(model)
    _check_count("steps", steps)
    _check_count("batch_size", batch_size)
    check_verbose(verbose)
    tried = sorted(_checked(rates)) if rates is not None else grid(model.optimizer)
    steps = steps or STEPS
    last = range(steps - min(steps, max(steps // END, AT_LEAST)), steps)
    curves = np.full((len(tried), steps), np.nan)
    ends: list[np.ndarray] = []
    with Search(model) as search:
        search.prepare(steps, batch_size, x, y, sample_weight, validation_data)
        progress = Progress(verbose, tried, steps)
        start = search.losses_at_start(tried[0], last)
        weights = np.ones(len(last))
        if validation_data is not None:
            search.begin(tried[0])
            start, weights = search.validate()
        for i, rate in enumerate(tried):
            losses = search.train(rate, steps, progress.of(i))
            curves[i, : len(losses)] = losses
            if not np.isfinite(losses).all():
                ends.append(np.full(len(start), np.inf))
            elif validation_data is None:
                ends.append(losses[last.start :])
            else:
                ends.append(search.validate()[0])
        progress.close()
    judged_by = (
        f"of the last {len(last):,} of {steps:,} steps"
        if validation_data is None
        else f"of validation data after {steps:,} steps"
    )
    trial = Trial(np.array(tried), curves, start, np.array(ends), weights, judged_by)
    return picked(trial)


# The grids: three rates a decade, from the lowest to the highest.
ADAM = keras.optimizers.Adam, keras.optimizers.Adamax, keras.optimizers.Nadam
GRIDS: tuple[tuple[Any, float, float], ...] = (
    ((*ADAM, keras.optimizers.RMSprop), 1e-4, 1e-1),
    (keras.optimizers.SGD, 1e-3, 1.0),
    (keras.optimizers.Adagrad, 1e-3, 1.0),
    (keras.optimizers.Adadelta, 1e-2, 10.0),
)
LENGTH = 2e-3, 2.0  # of a step that makes a block's gradient a unit
LENGTH_OF_A_WEIGHT = 2e-5, 2e-2  # where it is not the whole block's that is given
LONGER = 100  # a gradient whose absolute values sum to 1 is the shorter, the larger
SHARE = 2e-4, 0.2  # of a block's weights, that a step moves it


def grid(optimizer: Any) -> list[float]:
    """The default rates for this optimizer, and its rule."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    rule = optimizer.rule if isinstance(optimizer, BlockNormalized) else None
    if isinstance(optimizer, keras.optimizers.SGD) and rule is not None:
        if isinstance(rule, rules.Adaptive):
            return _three_a_decade(*(share / rule.ratio for share in SHARE))
        if isinstance(rule, rules.Rms) or optimizer.norm == "max":
            return _three_a_decade(*LENGTH_OF_A_WEIGHT)
        if not isinstance(rule, rules.Clip):
            longer = LONGER if optimizer.norm == "l1" else 1
            return _three_a_decade(*(longer * length for length in LENGTH))
    for classes, lowest, highest in GRIDS:
        if isinstance(optimizer, classes):
            return _three_a_decade(lowest, highest)
    argument = inspect.signature(type(optimizer)).parameters.get("learning_rate")
    default = getattr(argument, "default", None)
    usual = default if isinstance(default, float) and default > 0 else 1e-3
    return _three_a_decade(usual / 20, usual * 50)


def _three_a_decade(lowest: float, highest: float) -> list[float]:
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    all_of_them = (float(f"{m}e{e}") for e in range(first, last + 1) for m in (1, 2, 5))
    return [r for r in all_of_them if 0.999 * lowest < r < 1.001 * highest]


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"find_learning_rate takes a model. Received: {model!r}")
    if not model.compiled or getattr(model, "optimizer", None) is None:
        raise ValueError(
            "The model must be compiled with an optimizer: call `model.compile(...)`. "
            f"Received: {model!r}"
        )
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if isinstance(inner, MULTI):
        raise ValueError(
            "A `MultiOptimizer` has several rates. Compile the model with one of its "
            "optimizers, find that one's rate, then the next one's. Received: "
            f"{model.optimizer!r}"
        )
    for other in held_optimizers(model):
        if not other.built and other is not model.optimizer:
            raise ValueError(
                "The model holds, beside `model.optimizer`, an optimizer that is not "
                "built, so that its state could not be put back. Build it first: "
                f"`optimizer.build(model.trainable_variables)`. Received: {other!r}"
            )


def _checked(rates: Any) -> set[float]:
    allowed = "`rates` must be two or more different numbers, finite and above 0."
    if isinstance(rates, (str, bytes)) or not isinstance(rates, Iterable):
        raise TypeError(f"{allowed} Received: rates={rates!r}")
    rates = list(rates)
    for rate in rates:
        rules.check_number("rates", rate, positive=True)
    if len(set(rates)) < 2:
        raise ValueError(f"{allowed} Received: rates={rates!r}")
    return {float(rate) for rate in rates}


def _check_count(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an int. Received: {name}={value!r}")
    if value < 1:
        raise ValueError(f"`{name}` must be 1 or more. Received: {name}={value!r}")
