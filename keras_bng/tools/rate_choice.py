"""Which of the rates that were tried to take."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np

from keras_bng.tools.rates_found import RatesFound

# Of the loss: on a plateau, less than this is nothing.
HAIR = 0.01
NOTHING = (
    "No rate made the loss smaller than it is at the start, beyond the noise of the "
    "batches. Try more than {steps:,} `steps`, other `rates`, or another optimizer: "
    "where gradients vanish, `keras_bng.AdamNG`. Which layers move at all, "
    "`keras_bng.BlockMonitor` shows.\n\n{table}"
)
NO_DIFFERENCE = (
    "All rates gave the very same losses. Does `train_step` use another optimizer than "
    "`model.optimizer`?\n\n{table}"
)
PLATEAU = (
    "find_learning_rate: several rates ended at about the same loss, {loss:.4g}, which "
    "has not become smaller since the first half of the {steps:,} steps. Unless that "
    "is as small as it gets, it is a plateau, where nothing tells rates apart: try "
    "more `steps`, or another optimizer."
)


class Trial(NamedTuple):
    """What was measured: `ends` has a row a rate, and a column a batch as `start`."""

    rates: np.ndarray
    curves: np.ndarray
    start: np.ndarray
    ends: np.ndarray
    weights: np.ndarray
    judged_by: str


def picked(trial: Trial) -> RatesFound:
    """The largest rate of those that are as good as the one with the lowest loss."""
    _, curves, start, ends, weights, _ = trial
    steps = curves.shape[1]
    at_start = float(np.average(start, weights=weights))
    losses = np.full(len(ends), np.inf)
    known = np.isfinite(ends).all(1)
    losses[known] = np.average(ends[known], axis=1, weights=weights)
    lowest = int(np.argmin(losses))
    noises = np.array([_noise(start - end) for end in ends])
    learned = losses < at_start - np.maximum(noises, _hair(start, at_start))
    flat = np.array([_is_flat(curve, _noise(end)) for curve, end in zip(curves, ends)])
    margins = np.array([_margin(end, ends[lowest]) for end in ends])
    if flat[lowest]:
        margins = np.maximum(margins, _hair(ends[lowest], losses[lowest]))
    alike = learned & (losses <= losses[lowest] + margins)
    best = int(np.flatnonzero(alike)[-1]) if alike.any() else None
    found = RatesFound(
        trial.rates, losses, curves, at_start, trial.judged_by, best, learned, flat
    )
    if steps > 1 and (curves == curves[0]).all():
        raise RuntimeError(NO_DIFFERENCE.format(table=found))
    if best is None:
        raise RuntimeError(NOTHING.format(steps=steps, table=found))
    if flat[lowest] and alike.sum() > 1:
        text = PLATEAU.format(loss=losses[lowest], steps=steps)
        warnings.warn(text, stacklevel=3)
    return found


def _margin(end: np.ndarray, lowest: np.ndarray) -> float:
    """How far above the lowest loss a rate may end, and count as equally good.

    That is the noise of the difference; but a rate whose losses jump is not excused by
    its jumps.
    """
    if not np.isfinite(end).all():
        return 0.0
    return min(_noise(end - lowest), math.sqrt(2) * _noise(lowest))


def _hair(losses: np.ndarray, mean: float) -> float:
    """What is no progress, although on the same batches it may be beyond their noise.

    On a plateau differences are tiny and steady, and mean nothing: there, what one
    batch differs from another by counts, up to a hundredth of the loss.
    """
    if len(losses) < 2 or not np.isfinite(losses).all():
        return 0.0
    return float(min(2 * losses.std(ddof=1), HAIR * abs(mean)))


def _noise(losses: np.ndarray) -> float:
    """Two standard errors of the mean."""
    if len(losses) < 2 or not np.isfinite(losses).all():
        return 0.0
    return float(2 * losses.std(ddof=1) / math.sqrt(len(losses)))


def _is_flat(curve: np.ndarray, noise: float) -> bool:
    """Whether the last quarter of the losses is not below the second, beyond noise."""
    if len(curve) < 4 or not np.isfinite(curve).all():
        return False
    _, second, _, last = np.array_split(curve, 4)
    return bool(last.mean() > second.mean() - noise)
