"""All optimizers' steps in one mode, taking turns.

    KERAS_BACKEND=torch python -m benchmarks.steps torch 20 MLP ResNet-20

prints a line of JSON for each workload; 20 is the number of rounds. Called by
`python -m benchmarks.update_step`.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import keras

from benchmarks import memory, timing, variables
from benchmarks.optimizers import BASE, MAIN
from benchmarks.shapes import LARGE, QUICK, WORKLOADS, Shapes, dense

WORDS_MOVED = {"SGD": 5, "SGDNG": 6, "Adam": 7, "AdamNG": 8}  # a parameter, at least


def first_step(step: Callable[[Any], Any], gradients: Any) -> Any:
    """The step on these gradients, and the seconds that its first call took."""
    start = time.perf_counter()
    step(gradients)
    return functools.partial(step, gradients), time.perf_counter() - start


def measure(
    new_step: Callable[[str, Shapes], Callable[[Any], Any]],
    names: tuple[str, ...],
    shapes: Shapes,
    rounds: int,
    first_rounds: int,
) -> dict[str, Any]:
    """Times and first steps of all optimizers on one workload."""
    gradients = variables.gradients(shapes)
    few = dense(1, 2)  # so that the first case does not pay for all that comes once
    first_step(new_step("Adam", few), variables.gradients(few))
    cases, first = {}, {}
    for name in names:
        cases[name], seconds = first_step(new_step(name, shapes), gradients)
        first[name] = [seconds]
        cases[name]()
    parameters = sum(map(math.prod, shapes.values()))
    copy = memory.Copy(4 * parameters)
    copy()
    times = timing.interleaved({**cases, "copy": copy}, rounds, seconds=0.5 * rounds)
    del cases
    for _ in range(first_rounds - 1):
        for name in MAIN:
            first[name].append(first_step(new_step(name, shapes), gradients)[1])

    seconds_a_word = timing.quartiles(times.pop("copy"))[1] / copy.bytes_moved * 4
    rows = {name: row(name, times, first) for name in names}
    for name, words in WORDS_MOVED.items():
        limit = seconds_a_word * words * parameters
        rows[name]["over_physical_limit"] = rows[name]["seconds"] / limit
    return {
        "parameters": parameters,
        "variables": len(shapes),
        "bytes_a_second": 4 / seconds_a_word,
        "rows": rows,
    }


def row(name: str, times: Any, first: Any) -> dict[str, Any]:
    """An optimizer's times, and its ratios to the stock one and to one by hand."""
    found = {
        "seconds": timing.quartiles(times[name])[1],
        "first_seconds": first[name],
    }
    if name in BASE:
        base = found["base"] = BASE[name]
        found["ratio"] = timing.ratio(times[name], times[base])
        found["first_ratio"] = timing.ratio(first[name], first[base])
    if f"{name} by hand" in times:
        by_hand = times[f"{name} by hand"]
        found["by_hand_ratio"] = timing.ratio(times[name], by_hand)
    return found


def main() -> None:
    mode, rounds, *workloads = sys.argv[1:]
    backend = importlib.import_module(f"benchmarks.{keras.backend.backend()}_step")
    for name in workloads:
        small = mode == "graph" and name not in (LARGE, QUICK)
        names = MAIN if small or mode in ("eager", "xla") else MAIN + backend.OTHERS
        again = mode in ("graph", "xla") and name in ("ResNet-110", LARGE)
        result = measure(
            lambda optimizer, shapes: backend.new_step(optimizer, mode, shapes),
            names,
            WORKLOADS.get(name, dense(3, 64)),
            int(rounds),
            first_rounds=3 if again else 1,
        )
        print(json.dumps({"workload": name, **result}), flush=True)


if __name__ == "__main__":
    main()
