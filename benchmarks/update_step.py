"""One optimizer step alone: ours beside stock Keras, and beside optax and torch.

    pip install -e ".[benchmarks]" torch
    python -m benchmarks.update_step --rounds 20  # about 20 minutes on 2 cores
    python -m benchmarks.update_step --quick      # a minute, to see that it works

Every case runs on the shapes of a model, with random gradients, taking turns with the
others. A figure is the median of the ratios round by round, with the quartiles. Each
mode has a process of its own.
"""

from __future__ import annotations

from typing import Any

from benchmarks import backends, memory, report
from benchmarks.shapes import LARGE, QUICK, WORKLOADS

MODES = {  # the backend, and what we call it
    "eager": ("tensorflow", "TensorFlow, eager"),
    "graph": ("tensorflow", "TensorFlow, graph"),
    "xla": ("tensorflow", "TensorFlow, XLA"),
    "jax": ("jax", "JAX, jitted"),
    "torch": ("torch", "torch"),
}


def add_peaks(rows: dict[str, Any], mode: str) -> None:
    for name in ("SGD", "SGDNG", "Adam", "AdamNG"):
        rows[name]["peak_extra_bytes"] = memory.first_peak(name, mode, LARGE)


def show(name: str, mode: str, result: Any) -> None:
    rows = []
    for optimizer, row in result["rows"].items():
        ratio, by_hand = row.get("ratio"), row.get("by_hand_ratio")
        limit, peak = row.get("over_physical_limit"), row.get("peak_extra_bytes")
        rows.append(
            [
                optimizer,
                f"{1e3 * row['seconds']:.2f}",
                f"{report.spread(ratio)} of {row['base']}" if ratio else "",
                report.spread(by_hand) if by_hand else "",
                f"{row['first_seconds'][0]:.2f}",
                f"{row['first_ratio']['median']:.2f}" if ratio else "",
                f"{limit:.1f}" if limit else "",
                f"{peak / 1e6:.0f}" if peak is not None else "",
            ]
        )
    header = ["optimizer", "ms", "ratio [quartiles]", "to by hand", "first step, s"]
    header += ["ratio", "times physical limit", "peak extra MB"]
    print(f"\n{name}, {mode}: {result['variables']} variables, ", end="")
    print(f"{result['parameters'] / 1e6:.2f} M parameters")
    print(report.table(header, rows), flush=True)


def draw(results: Any, path: Any) -> None:
    """Ratio to the stock optimizer with quartiles, a panel a mode, the legend last."""
    workloads = [*dict.fromkeys(key.rsplit(", ", 1)[0] for key in results)]
    panels = [m for m in MODES if any(key.endswith(f", {m}") for key in results)]
    fig, grid = report.figure(
        -(-(len(panels) + 1) // 3), 3, figsize=(12, 8), sharey=True, squeeze=False
    )
    axes = grid.flatten()
    for axis, mode in zip(axes, panels):
        names: dict[str, None] = {}
        for i, workload in enumerate(workloads):
            rows = results.get(f"{workload}, {mode}", {"rows": {}})["rows"]
            found = {name: row["ratio"] for name, row in rows.items() if "ratio" in row}
            names.update(dict.fromkeys(found))
            off = (i - (len(workloads) - 1) / 2) * 0.15
            places = [[*names].index(name) + off for name in found]
            report.points(axis, places, [*found.values()], workload)
        axis.axhline(1, color="black", lw=0.8)
        axis.set_yscale("log")
        ticks = [0.03, 0.1, 0.3, 0.5, 1, 1.5, 2, 3]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_xlim(-0.6, len(names) - 0.4)
        axis.set_title(MODES[mode][1])
        axis.grid(axis="y", alpha=0.3)
    for row in grid:
        row[0].set_ylabel("time of a step / stock Keras (log)")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    axes[len(panels)].legend(*axes[0].get_legend_handles_labels(), loc="center")
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES)
    args = report.parsed(parser)
    workloads = args.workloads or ([QUICK] if args.quick else WORKLOADS)
    part = args.workloads or args.modes
    results = report.load(args.out, "update_step") if part else {}
    for mode in args.modes or MODES:
        arguments = (mode, str(args.rounds), *workloads)
        for result in backends.answers(MODES[mode][0], "steps", *arguments):
            name = result.pop("workload")
            if name == LARGE and mode in ("graph", "xla"):
                add_peaks(result["rows"], mode)
            results[f"{name}, {mode}"] = result
            show(name, mode, result)
            report.save(args.out, "update_step", {"results": results})
    path = report.save(args.out, "update_step", {"results": results})
    draw(results, path.with_suffix(".png"))
    print(f"\nWritten: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
