"""The picture of what a `BlockMonitor` recorded."""

from __future__ import annotations

import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

PANELS = (
    ("gradient_norm", "norm of the gradient"),
    ("relative_step", "relative step: |update| / |weights|"),
)
DECADES = 6  # that colours of gradients span at least, so that what is even looks even
STEPS = 1e-7, 1e-1  # that colours of relative steps span, always
USUAL = 1e-4, 1e-2
RUNS, RECORDS = 6, 1000  # that are drawn at most, of a monitor and of a run
LINES = 60  # of text, that a panel is high at most
NAME = 60  # characters, that are shown of a name at most: the last ones
GREY, BELOW, ABOVE = "#dddddd", "#000000", "#e34a33"
NOTE = "Grey: zero, not finite, or not updated. Black and red: beyond the scale."


class Recorded(Protocol):
    """What a picture needs of a `BlockMonitor`."""

    @property
    def blocks(self) -> Sequence[str]: ...

    @property
    def history(self) -> dict[str, np.ndarray]: ...


class Run(NamedTuple):
    """What is drawn in one row of panels."""

    title: str
    blocks: Sequence[str]
    history: dict[str, np.ndarray]


def plot(monitors: Mapping[str, Recorded], path: str | pathlib.Path) -> None:
    """Draws gradient norms (left) and relative steps (right), a row for each monitor.

    All rows have the same colours. If a monitor has several runs, each of its last six
    has a row. Grey means zero, not finite, or not updated.

    Args:
        monitors: Each a `BlockMonitor`, by the title of its row.
        path: Of the picture, a PNG file.
    """
    path = pathlib.Path(path)
    picture = figure_of(monitors)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)


def png(monitors: Mapping[str, Recorded]) -> bytes:
    """The picture that `plot` draws, as the bytes of a PNG file."""
    file = io.BytesIO()
    figure_of(monitors).savefig(file, format="png", dpi=110)
    return file.getvalue()


def figure_of(monitors: Mapping[str, Recorded]) -> Any:
    """The picture as a figure of matplotlib."""
    runs, notes = [], [NOTE]
    for title, monitor in monitors.items():
        found = _runs(title, monitor)
        runs += found[-RUNS:]
        if len(found) > RUNS:
            notes.append(f"{title or 'Shown'}: the last {RUNS} of {len(found)} runs.")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "The plot needs matplotlib: `pip install matplotlib`."
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    most = max(min(LINES, 2 * LINES // len(runs)), 8)
    lines = [min(max(len(run.blocks), 8), most) for run in runs]
    names = [_short_names(run.blocks) for run in runs]
    width = 8 + 0.065 * max(len(name) for part in names for name in part)
    figure = Figure(figsize=(width, 0.17 * sum(lines) + 1.3 + 0.5 * len(runs)))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    *axes, bars = figure.subplots(
        len(runs) + 1, 2, squeeze=False, gridspec_kw={"height_ratios": [*lines, 1]}
    )
    colours = matplotlib.colormaps["viridis"].with_extremes(
        bad=GREY, under=BELOW, over=ABOVE
    )
    for column, (name, label) in enumerate(PANELS):
        values = [_positive(run.history, name) for run in runs]
        scale = STEPS if name == "relative_step" else _whole_decades(values)
        for row, run, part in zip(axes, runs, values):
            steps = run.history["step"]
            row[column].set_label(name)
            mesh = row[column].pcolormesh(
                np.append(steps, steps[-1] + max(steps[-1] - steps[-2:][0], 1)),
                np.arange(len(run.blocks) + 1) - 0.5,
                part.T,
                cmap=colours,
                norm=LogNorm(*scale),
            )
            row[column].set_ylim(len(run.blocks) - 0.5, -0.5)
            row[column].set_yticks([])
        axes[-1][column].set_xlabel("step")
        figure.colorbar(
            mesh,
            cax=bars[column],
            label=label,
            orientation="horizontal",
            extend="both" if name == "relative_step" else "neither",
            format=lambda value, _: f"1e{round(math.log10(value))}",
        )
        bars[column].minorticks_off()
    _mark_the_usual(bars[1])
    for (left, _), run, shown, height in zip(axes, runs, names, lines):
        every = -(-len(shown) // height)
        left.set_yticks(range(0, len(shown), every), shown[::every], fontsize=8)
        left.set_title(run.title, loc="left")
    figure.supxlabel(" ".join(notes), fontsize=8, x=0.01, ha="left")
    return figure


def _runs(title: str, monitor: Recorded) -> list[Run]:
    """The runs of a monitor, in each at most so many records, and the last one."""
    history = monitor.history
    if not len(history["step"]):
        raise ValueError(f"Nothing to plot: {title or 'it'} has no records yet.")
    number = history.get("run", np.zeros(len(history["step"]), int))
    found = []
    for run in np.unique(number):
        (records,) = np.nonzero(number == run)
        count = min(len(records), RECORDS)
        kept = records[np.linspace(0, len(records) - 1, count).round().astype(int)]
        found.append({name: values[kept] for name, values in history.items()})
    titles = [title]
    if len(found) > 1:
        titles = [f"{title} run {i}".lstrip() for i in range(1, len(found) + 1)]
    return [Run(name, monitor.blocks, part) for name, part in zip(titles, found)]


def _mark_the_usual(bar: Any) -> None:
    """A line above the colour bar, from where to where relative steps usually are."""
    place = bar.get_xaxis_transform()
    bar.plot(USUAL, (1.35, 1.35), color="black", lw=3, transform=place, clip_on=False)
    bar.text(
        math.sqrt(math.prod(USUAL)),
        1.6,
        "usual",
        transform=place,
        fontsize=8,
        ha="center",
        va="bottom",
    )


def _whole_decades(values: Sequence[np.ma.MaskedArray]) -> tuple[float, float]:
    """From below the least to above the largest."""
    known = np.concatenate([part.compressed() for part in values])
    top = math.ceil(math.log10(known.max())) if known.size else 0
    bottom = math.floor(math.log10(known.min())) if known.size else 0
    return 10.0 ** min(bottom, top - DECADES), 10.0**top


def _positive(history: dict[str, np.ndarray], name: str) -> np.ma.MaskedArray:
    """What can be drawn: what is zero, not finite or was skipped is masked."""
    values = np.where(history["skipped"] > 0, np.nan, history[name]).astype("float64")
    return np.ma.masked_where(~(np.isfinite(values) & (values > 0)), values)


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """`model/dense` where all are in one model is `dense`."""
    parts = [name.partition("/") for name in names]
    one_model = len({first for first, _, _ in parts}) == 1
    short = [rest for _, _, rest in parts]
    chosen = short if one_model and all(short) else names
    return [name if len(name) <= NAME else f"…{name[1 - NAME :]}" for name in chosen]
