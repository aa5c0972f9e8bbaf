"""Times of several functions taken in turns, so that noise hits all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any


def interleaved(
    cases: dict[str, Callable[[], Any]], rounds: int, seconds: float = 0.0
) -> dict[str, list[float]]:
    """Calls A, B, C, A, B, C, ...: the seconds of each, `rounds` times or more.

    With `seconds`, quick functions get more rounds: about as long as that in all. The
    order turns around in each round, so that nobody always comes after the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()
    try:
        start, done = time.perf_counter(), 0
        while done < rounds or (
            time.perf_counter() - start < seconds and done < 20 * rounds
        ):
            order = list(cases.items())
            for name, function in order if done % 2 else reversed(order):
                before = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - before)
            done += 1
    finally:
        gc.enable()
    return times


def ratio(ours: Iterable[float], base: Iterable[float]) -> dict[str, float]:
    """Median and quartiles of ours / base, taken round by round."""
    ratios = [a / b for a, b in zip(ours, base)]
    low, middle, high = quartiles(ratios)
    return {"median": middle, "low": low, "high": high, "rounds": len(ratios)}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))
