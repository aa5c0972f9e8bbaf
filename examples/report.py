"""From results to figures and Markdown; alone, it puts RESULTS.md together.

python examples/report.py  # examples/results/*.md -> examples/RESULTS.md
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from harness import Result, read_all, write_text

HERE = pathlib.Path(__file__).parent

# A colour a method; the base light and dashed, its NG version dark and solid.
_COLOURS = {
    "SGDM": ("#7fb2e5", "#0b4f9c"),
    "AdaGrad": ("#8fcf8f", "#1b6e1b"),
    "Adam": ("#f3a48b", "#b3200e"),
}
_LINES = {"": "--", "CLIP": ":", "NG": "-", "NG_adap": "-.", "NG_rms": ":", "BNG": "-"}


HELD, NOT_HELD, UNDECIDED = "held", "**did not hold**", "not decided"
RULE = (
    "A claim held, or did not, only if the seeds can tell: the means differ by more "
    "than Student's t (two-sided, 5 %) times the standard error, from the pooled "
    "spread of the seeds. Else it is not decided; one seed decides nothing. Where a "
    "claim compares several things, each comparison must hold."
)
NUMBERS = (
    "Where it is decided, the numbers are here; the others are in the section, with "
    "data, seeds and dates."
)
EDGE = '"(edge)": nothing beyond this rate was tried.'
# Student's t for this, by degrees of freedom: seeds of both less two. Then the last.
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


class Claim(NamedTuple):
    """Something that the paper says, how it went here, and the numbers.

    What stands before a colon is the setting: `"6 layers: AdamNG better than Adam"`.
    """

    text: str
    verdict: str
    evidence: str


def is_lower(a: Any, b: Any) -> str:
    """Whether `a` is lower than `b`, both with a value a seed: see `RULE`."""
    a, b = (np.asarray(values, float) for values in (a, b))
    freedom = len(a) + len(b) - 2
    if min(len(a), len(b)) < 2 or not np.isfinite([*a, *b]).all():
        return UNDECIDED
    squares = ((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()
    error = np.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    difference = b.mean() - a.mean()
    if abs(difference) <= T[min(freedom, len(T)) - 1] * error:
        return UNDECIDED
    return HELD if difference > 0 else NOT_HELD


def all_of(verdicts: Iterable[str]) -> str:
    """Of a claim that says several things: it held if each of them did."""
    found = set(verdicts)
    return next((v for v in (NOT_HELD, UNDECIDED) if v in found), HELD)


def is_lowest(name: str, values: dict[str, Any]) -> str:
    """Whether this one is lower than each of the others."""
    return all_of(is_lower(values[name], x) for n, x in values.items() if n != name)


def best(name: str, values: dict[str, Any], digits: int = 3) -> tuple[str, str]:
    """Verdict and evidence of "this is the best", the lowest: beside its nearest."""
    known = {n: x for n, x in values.items() if np.isfinite(x).all()}
    others = [n for n in known if n != name]
    nearest = min(others, key=lambda n: np.mean(known[n]), default=None)
    evidence = f"{name} {plus_minus(values[name], digits)}"
    if nearest is not None:
        evidence += f", {nearest} {plus_minus(known[nearest], digits)}"
    return is_lowest(name, known | {name: values[name]}), evidence


def lowest(losses: dict[Any, float]) -> Any:
    """Which one has the lowest loss; what is not a number is not low."""
    return min(losses, key=lambda key: np.nan_to_num(losses[key], nan=np.inf))


def chosen_rate(
    name: str,
    losses: dict[float, float],
    rates: Collection[float],
    flag: str,
    out: pathlib.Path,
) -> float:
    """The best rate of an algorithm's grid, which must be complete."""
    missing = [f"{rate:g}" for rate in rates if rate not in losses]
    if missing:
        raise SystemExit(
            f"The grid of {name} is not complete in {out}: no result at the rates "
            f"{', '.join(missing)}. Give the command with {flag} first."
        )
    return lowest(losses)


def marked(cells: dict[float, str], best: float) -> dict[float, str]:
    """The best rate's in bold; where it is at an edge, see `EDGE`."""
    edge = " (edge)" * (best in (min(cells), max(cells)))
    return cells | {best: f"**{cells[best]}**{edge}"}


def certain(holds: bool) -> str:
    """Where no seed has a say."""
    return HELD if holds else NOT_HELD


def family(algorithm: str) -> tuple[str, str]:
    """`family("SGDMNG_adap")` is `("SGDM", "NG_adap")`."""
    base = next(name for name in _COLOURS if algorithm.startswith(name))
    return base, algorithm.removeprefix(base)


def style(algorithm: str) -> dict[str, Any]:
    base, version = family(algorithm)
    return {
        "color": _COLOURS[base]["NG" in version],
        "linestyle": _LINES[version],
        "linewidth": 1.8,
    }


def matching(
    results: Iterable[Result], algorithm: str, **settings: Any
) -> list[Result]:
    """The seeds of one algorithm, with these settings."""
    return [
        result
        for result in results
        if result["algorithm"] == algorithm
        and settings.items() <= result["settings"].items()
    ]


def beside(
    results: Sequence[Result], out: pathlib.Path, experiment: str
) -> list[Result]:
    """The results of another experiment, on the same data."""
    kinds = distinct(results, "data")
    found = read_all(out, experiment)
    return [result for result in found if result["settings"]["data"] in kinds]


def all_seeds(
    results: Sequence[Result], out: pathlib.Path, *experiments: str
) -> list[Result]:
    """With them, what differs from one of them in nothing but its seed."""
    found = list(results)
    for result in (r for experiment in experiments for r in read_all(out, experiment)):
        same = matching(found, result["algorithm"], **result["settings"])
        if same and result["seed"] not in {other["seed"] for other in same}:
            found.append(result)
    return found


def distinct(results: Iterable[Result], setting: str) -> list[Any]:
    """The values of a setting, in their order."""
    return list(dict.fromkeys(result["settings"][setting] for result in results))


def histories(results: Sequence[Result], metric: str) -> np.ndarray:
    """One row a seed, one column an epoch.

    Of `accuracy`, `error` is made, in percent; of `perplexity`, `log_perplexity`.
    """
    if "log_" in metric:
        return np.log(histories(results, metric.replace("log_", "")))
    if metric.endswith("error"):
        return 100 * (1 - histories(results, metric.replace("error", "accuracy")))
    return np.array([result["history"][metric] for result in results])


def last(
    results: Iterable[Result], algorithm: str, metric: str, **settings: Any
) -> np.ndarray:
    """A metric after the last epoch, of each seed."""
    return histories(matching(results, algorithm, **settings), metric)[:, -1]


def plus_minus(values: Any, digits: int = 3) -> str:
    """Mean ± standard deviation; of one seed, the value."""
    values = np.asarray(values, float)
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def claims_table(claims: Iterable[Claim], protocol: str = "") -> str:
    """The protocol, where a claim is tested by several, comes before the setting."""
    rows = []
    for text, verdict, evidence in claims:
        if protocol:
            text = f"{protocol}{', ' if ': ' in text else ': '}{text}"
        rows.append([text, verdict, evidence])
    return table(["the paper says", "here", "measured"], rows)


def what_was_run(results: Sequence[Result]) -> str:
    """Data, seeds, date, versions: the line that goes with every table."""
    first = results[0]
    data = "; ".join(sorted({result["data"] for result in results}))
    seeds = sorted({result["seed"] for result in results})
    dates = sorted({result["date"] for result in results})
    minutes = sum(result["seconds"] for result in results) / 60
    versions = first["versions"]
    return (
        f"{data}; seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; "
        f"{' to '.join(sorted({dates[0], dates[-1]}))}; {len(results)} runs, "
        f"{minutes:.1f} minutes on {first['cores']} cores, Keras {versions['keras']}, "
        f"TensorFlow {versions['tensorflow']}."
    )


def curves(
    results: Sequence[Result],
    panels: Sequence[tuple[str, dict[str, Any]]],
    path: pathlib.Path,
    metrics: Sequence[tuple[str, str]] = (
        ("loss", "train loss"),
        ("val_loss", "test loss"),
    ),
    title: str = "",
) -> None:
    """A column a panel, a row a metric, a line an algorithm, its seeds as a band."""
    plt = pyplot()
    algorithms = list(dict.fromkeys(result["algorithm"] for result in results))
    figure, axes = plt.subplots(
        len(metrics),
        len(panels),
        figsize=(max(6.5, 4.2 * len(panels)), 3.1 * len(metrics) + 0.9),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, (name, settings) in enumerate(panels):
        for row, (metric, label) in enumerate(metrics):
            ax = axes[row, column]
            for algorithm in algorithms:
                found = matching(results, algorithm, **settings)
                if not found:
                    continue
                values = histories(found, metric)
                epochs = np.arange(1, values.shape[1] + 1)
                look = style(algorithm)
                ax.plot(epochs, values.mean(0), label=algorithm, **look)
                if len(found) > 1:
                    low, high = values.min(0), values.max(0)
                    ax.fill_between(epochs, low, high, color=look["color"], alpha=0.15)
            ax.set_yscale("log")
            plain_ticks(ax.yaxis)
            ax.grid(True, which="both", color="#e6e6e6", linewidth=0.6)
            if row == 0:
                ax.set_title(name)
            if row == len(metrics) - 1:
                ax.set_xlabel("epoch")
                ax.xaxis.get_major_locator().set_params(integer=True)
            if column == 0:
                ax.set_ylabel(label)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if set(labels) == set(algorithms):
        rows = -(-len(labels) // (4 * len(panels)))  # four fit below a panel
        columns = -(-len(labels) // rows)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    else:  # a panel has algorithms of its own
        for ax in axes[0]:
            ax.legend(fontsize="small")
    if title:
        figure.suptitle(title, fontsize="medium")
    save(figure, path)


def plain_ticks(axis: Any) -> None:
    """0.5 and 2 instead of powers of ten, on a logarithmic axis that is not long."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    axis.set_major_locator(
        ticker.LogLocator(subs=(1, 2, 5) if high / low < 1e4 else (1,))
    )
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=110, metadata={"Software": None})
    part.replace(path)
    pyplot().close(figure)


def section(out: pathlib.Path, name: str, heading: str, parts: Sequence[str]) -> None:
    """Prints the parts; writes `<out>/<name>.md`, with the figure of that name.

    What was written by hand on the very results in `out`, and is true of no others, is
    in `<out>/<name>.remarks.txt`, and comes last.
    """
    remarks = out / f"{name}.remarks.txt"
    if remarks.exists():
        parts = [*parts, remarks.read_text().strip()]
    figure = f"![{heading}]({out.name}/{name}.png)"
    text = "\n\n".join([f"## {heading}", figure, *parts])
    write_text(out / f"{name}.md", text + "\n")
    print("\n" + "\n\n".join(parts))
    print(f"\nFigure: {out / name}.png\nTable:  {out / name}.md")


def assemble(results: pathlib.Path = HERE / "results") -> pathlib.Path:
    """`RESULTS.md` beside the directory of results, from every `*.md` in it."""
    sections = sorted(results.glob("*.md"))
    if not sections:
        raise SystemExit(
            f"No *.md in {results}. Run an experiment first, with --out {results}."
        )
    texts = [section.read_text() for section in sections]
    head = "# Results\n\nPut together by `python examples/report.py` from `results/`.\n"
    path = results.parent / "RESULTS.md"
    write_text(path, "\n".join([head, summary(texts), *texts]))
    return path


def summary(sections: Iterable[str]) -> str:
    """A row for every claim of the paper that a section has, with a link to it.

    It says under which protocols, and at which of their settings, the claim held or did
    not, each with its numbers; and where that is not decided.
    """
    rows = []
    for text in sections:
        heading = text.partition("\n")[0].removeprefix("## ")
        link = f"[{_short(heading)}](#{_anchor(heading)})"
        claims: dict[str, dict[str, list[str]]] = {}
        for line in "".join(_CLAIMS.findall(text)).splitlines():
            said, verdict, evidence = line.strip("| ").split(" | ")
            where, _, claim = said.rpartition(": ")
            protocol, _, setting = where.partition(", ")
            if verdict != UNDECIDED:
                setting = f"{setting} ({evidence})" if setting else evidence
            how = f"{verdict}, {protocol}".removesuffix(", ")
            claims.setdefault(claim, {}).setdefault(how, []).append(setting)
        for claim, found in claims.items():
            here = (f"{how}: {'; '.join(at)}" for how, at in found.items())
            rows.append([link, claim, "<br>".join(h.removesuffix(": ") for h in here)])
        if "NOT RUN" in heading:
            rows.append([link, "every claim", "not run"])
    if not rows:
        return ""
    claims_by_row = table(["", "the paper says", "here"], rows)
    return f"## What held\n\n{RULE} {NUMBERS}\n\n{claims_by_row}\n"


# The rows of a table of `claims_table`.
_CLAIMS = re.compile(
    r"^\| the paper says \| here \| measured \|\n\|[ |-]+\n((?:\|.*\n?)+)", re.M
)


def _short(heading: str) -> str:
    return re.split("[,:]", heading)[0]


def _anchor(heading: str) -> str:
    """By which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    print(assemble(*map(pathlib.Path, sys.argv[1:2])))
