"""Our targets beside what the last full benchmarks measured, as a table for the README.

python -m benchmarks.targets
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks import report

LARGE, SMALLER = "6 dense 2048", ("ResNet-20", "ResNet-110")
PAIRS = {"SGDNG": "SGD", "AdamNG": "Adam"}
LARGEST_BLOCK = 4 * (2048 * 2048 + 2048)  # bytes, in the workload LARGE


def targets(results: Any) -> Iterator[tuple[str, float, str, float]]:
    """What, the target, the measured value as text and as a number."""
    steps, fits, growth = (
        results[name]["results"] for name in ("update_step", "train_step", "growth")
    )

    def step(workload: str, mode: str, name: str, key: str = "ratio") -> Any:
        return steps[f"{workload}, {mode}"]["rows"][name][key]

    def line(what: str, target: float, ratio: Any) -> tuple[str, float, str, float]:
        return what, target, report.spread(ratio), ratio["median"]

    for name, target in (("AdamNG", 1.15), ("SGDNG", 1.25)):
        for mode in ("graph", "xla"):
            what = f"{name} / {PAIRS[name]}, 25 M parameters, {mode}"
            yield line(what, target, step(LARGE, mode, name))
    for workload in SMALLER:
        for name, base in PAIRS.items():
            for mode in ("graph", "xla"):
                what = f"{name} / {base}, {workload}, {mode}"
                yield line(what, 1.10, step(workload, mode, name))
    for name, target in (("AdamNG", 0.05), ("SGDNG", 0.10)):
        what = f"{name} / {PAIRS[name]}, ResNet-110, eager"
        yield line(what, target, step("ResNet-110", "eager", name))
    for workload in (*SMALLER, LARGE):
        for mode in ("graph", "xla"):
            for name, base in PAIRS.items():
                what = f"first step, {name} / {base}, {workload}, {mode}"
                yield line(what, 1.25, step(workload, mode, name, "first_ratio"))
    for name in PAIRS:
        value = step("ResNet-110", "eager", name, "steps_to_pay_back")
        what = f"eager steps that pay back the trace, {name}, ResNet-110"
        yield what, 20, f"{value:.0f}", value
    for model, result in fits.items():
        for name, base in PAIRS.items():
            what = f"`fit`, {name} / {base}, {model}"
            yield line(what, 1.03, result["rows"][name]["ratio"])
    for workload in (*SMALLER, LARGE, "LSTM"):
        what = f"JAX: AdamNG / optax chained by hand, {workload}"
        yield line(what, 1.10, step(workload, "jax", "AdamNG"))
    for mode in ("graph", "xla"):
        for name, base in PAIRS.items():
            peak, stock = (
                step(LARGE, mode, n, "peak_extra_bytes") for n in (name, base)
            )
            blocks = (peak - stock) / LARGEST_BLOCK
            what = f"peak memory over {base}'s in blocks, {name}, 25 M, {mode}"
            yield what, 1, f"{blocks:.1f}", blocks
    rows = growth["rows"]["plain SGDNG, 1000000 rows"]
    what = "sparse SGDNG, 1,000,000 rows / 10,000 rows, 4,000 touched"
    yield line(what, 1.5, rows["ratio"])


def table() -> str:
    results = {
        name: json.loads((report.RESULTS / f"{name}.json").read_text())
        for name in ("update_step", "train_step", "growth")
    }
    rows = [
        [what, f"{target:g}", text, "yes" if value <= target else "**no**"]
        for what, target, text, value in targets(results)
    ]
    return report.table(["what", "at most", "measured [quartiles]", "met"], rows)


if __name__ == "__main__":
    print(table())
