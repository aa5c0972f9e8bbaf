"""Our targets beside what the last full benchmarks measured, as three tables.

python -m benchmarks.targets
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.shapes import LARGE, WORKLOADS
from benchmarks.train_step import MLP
from benchmarks.update_step import MODES

NAMES = {"AdamNG": "Adam", "SGDNG": "SGD"}
COLUMNS = {"MLP": "MLP", "ResNet-20": "ResNet-20", "ResNet-110": "ResNet-110"}
COLUMNS |= {LARGE: "25 M", "other": "other"}
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
LARGEST_LAYER = 4 * (2048 * 2048 + 2048) / 1e6  # megabytes, in the workload LARGE

# A step / stock Keras's, at most: on the MLP, ResNet-20, ResNet-110 and 25 M.
STEPS = {
    ("eager", "AdamNG"): (0.08, 0.08, 0.05, 0.25),
    ("eager", "SGDNG"): (0.12, 0.1, 0.1, 0.45),
    ("graph", "AdamNG"): (1.05, 1.0, 1.0, 0.5),
    ("graph", "SGDNG"): (1.0, 1.0, 1.0, 0.75),
    ("xla", "AdamNG"): (1.1, 1.05, 1.05, 1.2),
    ("xla", "SGDNG"): (1.1, 1.05, 1.05, 1.25),
    ("jax", "AdamNG"): (1.1, 1.1, 1.1, 1.2),
    ("jax", "SGDNG"): (1.1, 1.1, 1.1, 1.3),
    ("torch", "AdamNG"): (0.65, 0.65, 0.6, 0.25),
    ("torch", "SGDNG"): (2.0, 2.0, 2.0, 1.6),
}
BY_HAND = 1.1  # on torch, a step / the same by hand
OTHERS = ("RMSpropNG", "AdagradNG", "AdagradBNG")
BELOW_STOCK = 0.99  # those in a graph, 25 M: below 1.00
FIRST_STEPS = {  # ResNet-110 and 25 M
    ("graph", "AdamNG"): 0.7,
    ("graph", "SGDNG"): 1.1,
    ("xla", "AdamNG"): 1.1,
    ("xla", "SGDNG"): 2.0,
}
FITS = {  # of the MLP
    ("tensorflow", "AdamNG"): 1.03,
    ("tensorflow", "SGDNG"): 1.03,
    ("jax", "AdamNG"): 1.05,
    ("jax", "SGDNG"): 1.05,
    ("torch", "AdamNG"): 1.0,
    ("torch", "SGDNG"): 1.1,
}
LARGER_FITS = 1.02  # ResNet-20, text CNN, LSTM on TensorFlow
EXTRA_MEMORY = 1.0  # peak memory minus stock's, at most: so many times that layer
SPARSE = 1.5  # a step on 1,000,000 rows / on 10,000


class Results:
    """What was measured: a ratio with its quartiles, a number, or None."""

    def __init__(self, folder: pathlib.Path) -> None:
        names = ("update_step", "train_step", "growth")
        self.results = {name: report.load(folder, name) for name in names}

    def at(self, *keys: str) -> Any:
        found: Any = self.results
        for key in keys:
            found = (found or {}).get(key)
        return found

    def step(self, workload: str, mode: str, name: str, key: str = "ratio") -> Any:
        return self.at("update_step", f"{workload}, {mode}", "rows", name, key)

    def fit(self, model: str, backend: str, name: str) -> Any:
        return self.at("train_step", f"{model}, {backend}", "rows", name, "ratio")

    def memory(self, mode: str, name: str) -> float | None:
        """The peak memory of a step minus that of stock's, in megabytes."""
        peaks = [
            self.step(LARGE, mode, n, "peak_extra_bytes") for n in (name, NAMES[name])
        ]
        return None if None in peaks else (peaks[0] - peaks[1]) / 1e6


def rows(found: Results) -> Iterator[tuple[str, str, dict[str, str]]]:
    """What, which optimizer, and the cells by column."""
    for (mode, name), limits in STEPS.items():
        cells = {
            workload: cell(limit, found.step(workload, mode, name))
            for workload, limit in zip(COLUMNS, limits)
        }
        yield MODES[mode][1], name, cells
    for name in OTHERS:
        ratio = found.step(LARGE, "graph", name)
        yield "TensorFlow, graph", name, {LARGE: cell(BELOW_STOCK, ratio)}
    for name in NAMES:
        by_hand = {w: found.step(w, "torch", name, "by_hand_ratio") for w in WORKLOADS}
        cells = {w: cell(BY_HAND, ratio) for w, ratio in by_hand.items()}
        yield "torch / by hand in torch", name, cells
    for (mode, name), limit in FIRST_STEPS.items():
        cells = {
            workload: cell(limit, found.step(workload, mode, name, "first_ratio"))
            for workload in ("ResNet-110", LARGE)
        }
        yield f"first step, {MODES[mode][1]}", name, cells
    for (backend, name), limit in FITS.items():
        cells = {"MLP": cell(limit, found.fit(MLP, backend, name))}
        if backend == "tensorflow":
            larger = {
                model: cell(LARGER_FITS, found.fit(model, backend, name))
                for model in ("ResNet-20", "text CNN", "LSTM")
            }
            cells["ResNet-20"] = larger.pop("ResNet-20")
            cells["other"] = "; ".join(f"{m} {text}" for m, text in larger.items())
        yield f"`fit`, {BACKENDS[backend]}", name, cells
    for mode in ("graph", "xla"):
        for name in NAMES:
            what = f"peak memory minus stock's, MB, {MODES[mode][1]}"
            limit = EXTRA_MEMORY * LARGEST_LAYER
            yield what, name, {LARGE: cell(limit, found.memory(mode, name))}
    ratio = found.at("growth", "rows", "plain SGDNG, 1000000 rows", "ratio")
    what = "1,000,000 sparse rows / 10,000, 4,000 touched, TensorFlow, graph"
    yield what, "SGDNG", {"other": cell(SPARSE, ratio)}


def cell(limit: float, value: Any) -> str:
    """What was measured and what it should be at most; a miss in bold."""
    if value is None:
        return "not measured"
    is_ratio = isinstance(value, dict)
    text = report.spread(value) if is_ratio else f"{value:.1f}"
    met = round(value["median"] if is_ratio else value, 2) <= limit
    return f"{text} ≤ {limit:.3g}" if met else f"**{text} > {limit:.3g}**"


def table(folder: pathlib.Path = report.RESULTS) -> str:
    """All targets: median [quartiles] ≤ target, or in bold > target."""
    lines = [
        [what, name, *(cells.get(column, "") for column in COLUMNS)]
        for what, name, cells in rows(Results(folder))
    ]
    return report.table(["time / stock Keras's", "", *COLUMNS.values()], lines)


def readme_table(folder: pathlib.Path = report.RESULTS) -> str:
    """What a user gains and pays: an update of large layers, `fit` of four models."""
    found = Results(folder)
    updates = {"graph": "update, 25 M weights", "torch": "the same, torch"}
    fits = {
        "ResNet-20": "`fit`, ResNet-20",
        "LSTM": "LSTM",
        "text CNN": "text CNN",
        MLP: "MLP, 18 layers",
    }
    lines = []
    for name in NAMES:
        ratios = [found.step(LARGE, mode, name) for mode in updates]
        ratios += [found.fit(model, "tensorflow", name) for model in fits]
        lines.append([name, *(f"{r['median']:.2f}" if r else "" for r in ratios)])
    header = ["time / stock Keras's", *updates.values(), *fits.values()]
    return report.table(header, lines)


def small_table(folder: pathlib.Path = report.RESULTS) -> str:
    """What a user gains: only medians, of the smallest and the largest workload."""
    found = Results(folder)
    header = ["time / stock Keras's"]
    lines = [[title] for _, title in MODES.values()]
    lines += [[f"`fit`, {title}"] for title in BACKENDS.values()]
    for name in NAMES:
        for workload in ("MLP", LARGE):
            header.append(f"{name}, {COLUMNS[workload]}")
            ratios = [found.step(workload, mode, name) for mode in MODES]
            fits = [found.fit(MLP, backend, name) for backend in BACKENDS]
            ratios += fits if workload == "MLP" else [None] * len(fits)
            for line, ratio in zip(lines, ratios):
                line.append(f"{ratio['median']:.2f}" if ratio else "")
    return report.table(header, lines)


if __name__ == "__main__":
    print(f"{readme_table()}\n\n{small_table()}\n\n{table()}")
