"""Our targets beside what the last full benchmarks measured, as a table for the README.

python -m benchmarks.targets
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks import report

LARGE = "6 dense 2048"

SMALLER = ("ResNet-20", "ResNet-110")
PAIRS = {"SGDNG": "SGD", "AdamNG": "Adam"}
LARGEST_BLOCK = 4 * (2048 * 2048 + 2048)  # bytes, in the workload LARGE
Measured = dict[str, Any]  # from a label to a ratio with its quartiles, or a number


def targets(steps: Any, fits: Any, growth: Any) -> Iterator[tuple[str, Any, Measured]]:
    """What, at most how much, and all that was measured of it."""

    def step(workload: str, mode: str, name: str, key: str = "ratio") -> Any:
        return steps[f"{workload}, {mode}"]["rows"][name][key]

    for name, target in (("AdamNG", 1.15), ("SGDNG", 1.25)):
        found = {mode: step(LARGE, mode, name) for mode in ("graph", "xla")}
        yield f"{name} / {PAIRS[name]}, 25 M parameters", target, found
    for mode in ("graph", "xla"):
        found = {
            f"{workload} {name}": step(workload, mode, name)
            for workload in SMALLER
            for name in PAIRS
        }
        yield f"NG / stock, shapes of ResNets, {mode}", 1.10, found
    for name, target in (("AdamNG", 0.05), ("SGDNG", 0.10)):
        found = {"": step("ResNet-110", "eager", name)}
        yield f"eager {name} / eager {PAIRS[name]}, ResNet-110", target, found
    for mode in ("graph", "xla"):
        found = {
            f"{workload} {name}": step(workload, mode, name, "first_ratio")
            for workload in (*SMALLER, LARGE)
            for name in PAIRS
        }
        yield f"first step / stock's, {mode}", 1.25, found
    found = {
        name: step("ResNet-110", "eager", name, "steps_to_pay_back") for name in PAIRS
    }
    yield "eager steps that pay back the trace, ResNet-110", 20, found
    for name, base in PAIRS.items():
        found = {model: result["rows"][name]["ratio"] for model, result in fits.items()}
        yield f"`fit` with {name} / with {base}", 1.03, found
    found = {
        workload: step(workload, "jax", "AdamNG")
        for workload in (*SMALLER, LARGE, "LSTM")
    }
    yield "JAX: AdamNG / optax chained by hand", 1.10, found
    found = {}
    for mode in ("graph", "xla"):
        for name, base in PAIRS.items():
            peak, stock = (
                step(LARGE, mode, n, "peak_extra_bytes") for n in (name, base)
            )
            found[f"{mode} {name}"] = (peak - stock) / LARGEST_BLOCK
    yield "peak memory over stock's, 25 M parameters, in largest blocks", 1, found
    ratio = growth["rows"]["plain SGDNG, 1000000 rows"]["ratio"]
    yield "sparse SGDNG, 1,000,000 rows / 10,000, 4,000 touched", 1.5, {"": ratio}


def cell(target: float, found: Measured) -> str:
    """The measured values, those that miss the target in bold."""
    parts = []
    for label, value in found.items():
        is_ratio = isinstance(value, dict)
        number = value["median"] if is_ratio else value
        text = report.spread(value) if is_ratio else f"{value:.1f}"
        text = text if round(number, 2) <= target else f"**{text}**"
        parts.append(f"{label} {text}".strip())
    return "; ".join(parts)


def table() -> str:
    results = [
        json.loads((report.RESULTS / f"{name}.json").read_text())["results"]
        for name in ("update_step", "train_step", "growth")
    ]
    rows = [
        f"| {what} | {target:g} | {cell(target, found)} |"
        for what, target, found in targets(*results)
    ]
    header = ["| what | at most | measured: median [quartiles] |", "|---|---|---|"]
    return "\n".join(header + rows)


if __name__ == "__main__":
    print(table())
