"""`model.fit` end to end, ours beside stock Keras, on four models of the paper's kinds.

    pip install -e ".[benchmarks]" torch
    python -m benchmarks.train_step --rounds 40  # about 10 minutes on 2 cores
    python -m benchmarks.train_step --quick      # a minute, to see that it works

Random data of the right shapes; a turn is one `fit` over a few batches, on TensorFlow
without XLA, which on a CPU is no faster for these models. Compiling is not in it. Each
backend has a process of its own; JAX and torch get the MLP only.
"""

from __future__ import annotations

from typing import Any

from benchmarks import backends, report

MLP = "MLP, 18 layers"
MODELS = (MLP, "ResNet-20", "text CNN", "LSTM")


def show(key: str, result: Any) -> None:
    rows = [
        [
            optimizer,
            f"{1e3 * row['seconds_a_batch']:.2f}",
            report.spread(row["ratio"]) if "ratio" in row else "",
        ]
        for optimizer, row in result["rows"].items()
    ]
    print(f"\n{key}: {result['variables']} variables")
    header = ["optimizer", "ms a batch", "ratio to stock [quartiles]"]
    print(report.table(header, rows), flush=True)


def draw(results: Any, path: Any) -> None:
    fig, axis = report.figure(figsize=(8, 4))
    for i, (name, base) in enumerate({"SGDNG": "SGD", "AdamNG": "Adam"}.items()):
        ratios = [result["rows"][name]["ratio"] for result in results.values()]
        places = [j + (i - 0.5) * 0.2 for j in range(len(results))]
        report.points(axis, places, ratios, f"{name} / {base}")
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xticks(
        range(len(results)), ["\n".join(key.rsplit(", ", 1)) for key in results]
    )
    axis.set_ylabel("time of `fit` / with the stock optimizer")
    axis.legend(fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=backends.NEEDED)
    args = report.parsed(parser)
    part = args.models or args.backends
    results = report.load(args.out, "train_step") if part else {}
    batches = "1" if args.quick else "all"
    for backend in args.backends or backends.NEEDED:
        all_models = backend == "tensorflow" and not args.quick
        names = args.models or (MODELS if all_models else [MLP])
        arguments = (str(args.rounds), batches, *names)
        for result in backends.answers(backend, "fits", *arguments):
            key = f"{result.pop('model')}, {backend}"
            results[key] = result
            show(key, result)
            report.save(args.out, "train_step", {"results": results})
    path = report.save(args.out, "train_step", {"results": results})
    draw(results, path.with_suffix(".png"))
    print(f"\nWritten: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
