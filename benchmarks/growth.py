"""How the cost of a step grows with the number of variables, parameters and rows.

    pip install -e ".[benchmarks]"
    python -m benchmarks.growth           # about 10 minutes on 2 cores
    python -m benchmarks.growth --quick   # a minute, to see that it works

In a `tf.function` on TensorFlow. Adam is traced for up to 1,000 variables only: stock
Keras alone takes minutes for 10,000.
"""

from __future__ import annotations

from typing import Any

from benchmarks import report, timing, variables
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.steps import first_step
from benchmarks.tensorflow_step import new_step

PAIRS = {"SGDNG": "SGD", "AdamNG": "Adam"}


def by_variables(counts: list[int], rounds: int) -> dict[str, Any]:
    """Vectors of 100 numbers, ten to a layer."""
    results = {}
    for count in counts:
        shapes = {f"layer_{i // 10}/v{i % 10}": (100,) for i in range(count)}
        names = ["SGD", "SGDNG"] + (["Adam", "AdamNG"] if count <= 1000 else [])
        results[str(count)] = measure(shapes, names, rounds)
    return results


def by_parameters(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Ten square matrices."""
    results = {}
    for size in sizes:
        width = max(int((size / 10) ** 0.5), 1)
        shapes = {f"layer_{i}/kernel": (width, width) for i in range(10)}
        results[str(size)] = measure(shapes, [*PAIRS.values(), *PAIRS], rounds)
    return results


def measure(shapes: Any, names: list[str], rounds: int) -> dict[str, Any]:
    gradients = variables.gradients(shapes)
    cases, first = {}, {}
    for name in names:
        step = new_step(name, "graph", shapes)
        cases[name], first[name] = first_step(step, gradients)
        cases[name]()
    times = timing.interleaved(cases, rounds, seconds=0.1 * rounds)
    return {
        name: {
            "seconds": timing.quartiles(times[name])[1],
            "first_seconds": first[name],
            **(
                {"ratio": timing.ratio(times[name], times[PAIRS[name]])}
                if name in PAIRS
                else {}
            ),
        }
        for name in names
    }


def by_rows(rows: list[int], rounds: int) -> dict[str, Any]:
    """SGD without momentum on an embedding, of which 4,000 rows are touched."""
    import keras

    import keras_bng

    OPTIMIZERS["plain SGD"] = lambda: keras.optimizers.SGD(1e-4)
    OPTIMIZERS["plain SGDNG"] = lambda: keras_bng.SGDNG(1e-4, momentum=0.0)
    cases = {}
    for count in rows:
        shapes = {"embedding/embeddings": (count, 100)}
        gradients = variables.gradients(shapes)
        for name in ("plain SGD", "plain SGDNG"):
            key = f"{name}, {count} rows"
            cases[key], _ = first_step(new_step(name, "graph", shapes), gradients)
            cases[key]()
    times = timing.interleaved(cases, rounds, seconds=0.1 * rounds)
    results = {}
    for key, seconds in times.items():
        name = key.split(",")[0]
        results[key] = {
            "seconds": timing.quartiles(seconds)[1],
            "ratio": timing.ratio(seconds, times[f"{name}, {rows[0]} rows"]),
            "ratio_to_stock": timing.ratio(seconds, times[key.replace("NG", "")]),
        }
    return results


def draw(results: Any, path: Any) -> None:
    fig, axes = report.figure(1, 3, figsize=(13, 4))
    colors = {"SGD": "C0", "SGDNG": "C0", "Adam": "C1", "AdamNG": "C1"}
    panels = (
        ("variables", "seconds", "a step", "variables of 100 numbers"),
        ("variables", "first_seconds", "the first step (trace)", "variables"),
        ("parameters", "seconds", "a step", "parameters in ten matrices"),
    )
    for axis, (part, key, title, label) in zip(axes, panels):
        for name, color in colors.items():
            points = [
                (int(x), rows[name][key])
                for x, rows in results[part].items()
                if name in rows
            ]
            style = "o--" if name.endswith("NG") else "o-"
            axis.plot(*zip(*points), style, color=color, label=name, mfc="none")
        axis.set(xscale="log", yscale="log", xlabel=label, title=f"seconds for {title}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    fig.savefig(path, dpi=130)


def main() -> None:
    args = report.parsed(report.arguments(__doc__))
    quick, rounds = args.quick, args.rounds
    results: dict[str, Any] = {}
    parts = {
        "rows": (by_rows, [100, 1000] if quick else [10_000, 1_000_000]),
        "parameters": (
            by_parameters,
            [1000, 10_000] if quick else [10**k for k in range(4, 9)],
        ),
        "variables": (by_variables, [2, 20] if quick else [10, 100, 1000, 10_000]),
    }
    for part, (measured, sizes) in parts.items():
        results[part] = measured(sizes, rounds)
        path = report.save(args.out, "growth", {"results": results})
        if part == "rows":
            rows = [
                [
                    key,
                    f"{1e3 * r['seconds']:.2f}",
                    report.spread(r["ratio"]),
                    report.spread(r["ratio_to_stock"]),
                ]
                for key, r in results[part].items()
            ]
            header = ["4,000 rows touched", "ms", f"ratio to {sizes[0]}", "to stock"]
        else:
            rows = [
                [
                    size,
                    name,
                    f"{1e3 * r['seconds']:.2f}",
                    f"{r['first_seconds']:.2f}",
                    report.spread(r["ratio"]) if "ratio" in r else "",
                ]
                for size, found in results[part].items()
                for name, r in found.items()
            ]
            header = [part, "optimizer", "ms", "first step, s", "ratio to stock"]
        print("\n" + report.table(header, rows), flush=True)
    draw(results, path.with_suffix(".png"))
    print(f"\nWritten: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
