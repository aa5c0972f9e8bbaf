"""What every benchmark shares: how it is called, its table, its JSON, its picture."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("keras", "tensorflow", "jax", "optax", "torch", "numpy")


def arguments(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="only show that it works, in a minute"
    )
    parser.add_argument(
        "--rounds", type=int, help="turns that each case gets (default 60; --quick 2)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="where JSON and PNG go (default: results/)"
    )
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 2:
        parser.error(f"--rounds must be 2 or more. Received: {args.rounds}")
    args.rounds = args.rounds or (2 if args.quick else 60)
    if args.out is None:
        args.out = pathlib.Path("benchmark-quick") if args.quick else RESULTS
    return args


def machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def save(out: pathlib.Path, name: str, results: Any) -> pathlib.Path:
    """Writes the JSON in one go: a killed run leaves the old one as it was."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**machine(), **results}, indent=1) + "\n")
    part.replace(path)
    return path


def load(out: pathlib.Path, name: str) -> dict[str, Any]:
    """The results of a run before, so that a part can be measured again."""
    path = out / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that is legible as text, too."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths)) + " |"
        for line in lines
    )


def spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def points(axis: Any, places: list[float], ratios: list[Any], label: str) -> None:
    """Medians with their quartiles."""
    errors = [
        [r["median"] - r["low"] for r in ratios],
        [r["high"] - r["median"] for r in ratios],
    ]
    medians = [r["median"] for r in ratios]
    axis.errorbar(places, medians, errors, fmt="o", ms=5, capsize=2, label=label)


def figure(*args: Any, **kwargs: Any) -> Any:
    """`plt.subplots` for a file, without a display."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("The plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*args, layout="constrained", **kwargs)
