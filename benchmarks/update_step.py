"""One optimizer step alone: ours beside stock Keras, and on JAX beside optax.

    pip install -e ".[benchmarks]"
    python -m benchmarks.update_step           # about 25 minutes on 2 cores
    python -m benchmarks.update_step --quick   # a minute, to see that it works

Every case runs on the shapes of a model, with random gradients, taking turns with the
others. A figure is the median of the ratios round by round, with the quartiles.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import keras_bng
from benchmarks import memory, report, timing, variables
from benchmarks.shapes import WORKLOADS, dense

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
    "SGDNG": lambda: keras_bng.SGDNG(1e-4, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-5),
    "AdamNG": lambda: keras_bng.AdamNG(1e-5),
    "AdamNG adaptive": lambda: keras_bng.AdamNG(1e-5, rule="adaptive"),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-5),
    "AdagradNG": lambda: keras_bng.AdagradNG(1e-5),
    "Lamb": lambda: keras.optimizers.Lamb(1e-5),
}
BASE = {
    "SGDNG": "SGD",
    "AdamNG": "Adam",
    "AdamNG adaptive": "Adam",
    "AdagradNG": "Adagrad",
    "Lamb": "Adam",
}
LARGE = "6 dense 2048"
WORDS_MOVED = {"SGD": 5, "SGDNG": 6, "Adam": 7, "AdamNG": 8}  # a parameter, at least
FIRST_STEPS = ("SGD", "SGDNG", "Adam", "AdamNG")
MODES = ("eager", "graph", "xla")


def new_step(name: str, mode: str, workload: Any) -> Callable[[Any], None]:
    """The step of a new optimizer in this mode, not yet traced."""
    import tensorflow as tf

    weights = variables.make(workload)
    optimizer = OPTIMIZERS[name]()
    optimizer.build(weights)

    def step(gradients: Any) -> None:
        optimizer.apply(gradients, weights)

    return step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")


def first_step(name: str, mode: str, workload: Any, gradients: Any) -> Any:
    """A new optimizer's step in this mode, and the seconds that its first call took."""
    step = new_step(name, mode, workload)
    start = time.perf_counter()
    step(gradients)
    return lambda: step(gradients), time.perf_counter() - start


def measure(workload: Any, mode: str, rounds: int, first_rounds: int) -> dict[str, Any]:
    """Times, first steps and peak memory of all optimizers on one workload."""
    gradients = variables.gradients(workload)
    few = dense(1, 2)  # so that the first case does not pay for all that comes once
    first_step("Adam", mode, few, variables.gradients(few))
    cases, first = {}, {}
    for name in OPTIMIZERS:
        cases[name], seconds = first_step(name, mode, workload, gradients)
        first[name] = [seconds]
        cases[name]()
    parameters = sum(map(math.prod, workload.values()))
    copy = memory.Copy(4 * parameters)
    copy()
    times = timing.interleaved({**cases, "copy": copy}, rounds, seconds=0.2 * rounds)
    del cases
    for _ in range(first_rounds - 1):
        for name in FIRST_STEPS:
            first[name].append(first_step(name, mode, workload, gradients)[1])

    seconds_a_word = timing.quartiles(times.pop("copy"))[1] / copy.bytes_moved * 4
    return {
        "parameters": parameters,
        "variables": len(workload),
        "bytes_a_second": 4 / seconds_a_word,
        "rows": {
            name: {
                "seconds": timing.quartiles(times[name])[1],
                "first_seconds": first[name],
                "over_physical_limit": timing.quartiles(times[name])[1]
                / (seconds_a_word * WORDS_MOVED[name] * parameters)
                if name in WORDS_MOVED
                else None,
                **ratios(name, times, first),
            }
            for name in times
        },
    }


def ratios(name: str, times: Any, first: Any) -> dict[str, Any]:
    """How this optimizer compares with the stock one that it builds on."""
    if name not in BASE:
        return {}
    base = BASE[name]
    result = {
        "base": base,
        "ratio": timing.ratio(times[name], times[base]),
        "first_ratio": timing.ratio(first[name], first[base]),
    }
    step, base_step = (timing.quartiles(times[n])[1] for n in (name, base))
    if base_step > step:
        one_time = min(first[name]) - min(first[base])
        result["steps_to_pay_back"] = one_time / (base_step - step)
    return result


def on_jax(quick: bool, rounds: int) -> Any:
    """The JAX part, in a process of its own; None without JAX and optax."""
    missing = [name for name in ("jax", "optax") if not importlib.util.find_spec(name)]
    if missing:
        print(f"The JAX part is left out; it needs: pip install {' '.join(missing)}")
        return None
    command = [sys.executable, "-m", "benchmarks.jax_step", str(rounds)]
    command += ["quick"] if quick else []
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, mode: str, result: Any) -> None:
    rows = []
    for optimizer, row in result["rows"].items():
        ratio = row.get("ratio")
        limit, peak = row.get("over_physical_limit"), row.get("peak_extra_bytes")
        rows.append(
            [
                optimizer,
                f"{1e3 * row['seconds']:.2f}",
                f"{report.spread(ratio)} of {row['base']}" if ratio else "",
                f"{row['first_seconds'][0]:.2f}",
                f"{row['first_ratio']['median']:.2f}" if ratio else "",
                f"{limit:.1f}" if limit else "",
                f"{peak / 1e6:.0f}" if peak is not None else "",
            ]
        )
    header = ["optimizer", "ms", "ratio [quartiles]", "first step, s", "ratio"]
    print(f"\n{name}, {mode}: {result['variables']} variables, ", end="")
    print(f"{result['parameters'] / 1e6:.2f} M parameters")
    header += ["times physical limit", "peak extra MB"]
    print(report.table(header, rows), flush=True)


def draw(results: Any, path: Any) -> None:
    """Ratio to the base, a panel a mode, with quartiles."""
    modes = {key.split(", ")[1] for key in results}
    panels = [mode for mode in (*MODES, "jax") if mode in modes]
    fig, axes = report.figure(
        1, len(panels), figsize=(4 * len(panels), 4.2), sharey=True, squeeze=False
    )
    for axis, mode in zip(axes[0], panels):
        of_mode = {k.split(", ")[0]: v for k, v in results.items() if k.endswith(mode)}
        names = [
            n for n, r in next(iter(of_mode.values()))["rows"].items() if "ratio" in r
        ]
        for i, (workload, result) in enumerate(of_mode.items()):
            found = [result["rows"][name]["ratio"] for name in names]
            middle = [r["median"] for r in found]
            places = [j + (i - 1.5) * 0.17 for j in range(len(names))]
            errors = [
                [r["median"] - r["low"] for r in found],
                [r["high"] - r["median"] for r in found],
            ]
            axis.errorbar(
                places, middle, errors, fmt="o", ms=5, capsize=2, label=workload
            )
        axis.axhline(1, color="black", lw=0.8)
        axis.set_yscale("log")
        ticks = [0.03, 0.1, 0.3, 1, 1.25, 2, 3]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axis.set_title(mode)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("time of a step / stock optimizer's (log)")
    axes[0][0].legend(fontsize=8)
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=(*MODES, "jax"))
    args = report.parsed(parser)
    workloads = {name: WORKLOADS[name] for name in args.workloads or WORKLOADS}
    if args.quick and not args.workloads:
        workloads = {"3 dense 64": dense(3, 64)}
    first_rounds = 1 if args.quick else 3

    part = args.workloads or args.modes
    results = report.load(args.out, "update_step") if part else {}
    for name, shapes in workloads.items():
        for mode in args.modes or MODES:
            if mode != "jax":
                key = f"{name}, {mode}"
                results[key] = measure(shapes, mode, args.rounds, first_rounds)
                if name == LARGE and mode != "eager":
                    for row in FIRST_STEPS:
                        peak = memory.first_peak(row, mode, name)
                        results[key]["rows"][row]["peak_extra_bytes"] = peak
                show(name, mode, results[key])
                report.save(args.out, "update_step", {"results": results})
    if not args.modes or "jax" in args.modes:
        for name, result in (on_jax(args.quick, args.rounds) or {}).items():
            results[f"{name}, jax"] = result
            show(name, "jax", result)
    path = report.save(args.out, "update_step", {"results": results})
    draw(results, path.with_suffix(".png"))
    print(f"\nWritten: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
