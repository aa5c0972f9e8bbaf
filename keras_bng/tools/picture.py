"""The picture of what a `BlockMonitor` recorded."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from keras_bng.tools.monitor import BlockMonitor

PANELS = (
    ("gradient_norm", "log10 of the gradient's norm"),
    ("relative_step", "log10 of the relative step |Δw| / |w|"),
)
DECADES = 6  # that colours span at least, so that what is even looks even


def plot(monitors: dict[str, BlockMonitor], path: str | pathlib.Path) -> None:
    """Gradient norms and relative steps, a row a monitor, in the same colours.

    Grey is zero or not finite.
    """
    for title, monitor in monitors.items():
        if not len(monitor.history["step"]):
            raise ValueError(f"Nothing to plot: {title or 'it'} has no records yet.")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "The plot needs matplotlib: `pip install matplotlib`."
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [0.17 * max(len(monitor.blocks), 8) for monitor in monitors.values()]
    figure = Figure(figsize=(9, sum(heights) + 1.1 + 0.6 * len(heights)))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(
        len(heights), 2, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#dddddd")
    for column, (name, label) in enumerate(PANELS):
        logs = [_logarithms(monitor.history, name) for monitor in monitors.values()]
        known = np.concatenate([part.compressed() for part in logs])
        top = known.max(initial=-np.inf) if known.size else 0.0
        bottom = min(known.min(initial=np.inf), top - DECADES)
        for ax, monitor, part in zip(axes[:, column], monitors.values(), logs):
            steps = monitor.history["step"]
            gap = np.diff(steps).min() if len(steps) > 1 else 1
            mesh = ax.pcolormesh(
                np.append(steps, steps[-1] + gap),
                np.arange(len(monitor.blocks) + 1) - 0.5,
                part.T,
                cmap=colours,
                vmin=bottom,
                vmax=top,
            )
            ax.set_ylim(len(monitor.blocks) - 0.5, -0.5)
        axes[-1, column].set_xlabel("step")
        figure.colorbar(
            mesh, ax=axes[:, column], label=label, location="bottom", pad=0.02
        )
    for row, (title, monitor) in zip(axes, monitors.items()):
        every = -(-len(monitor.blocks) // 40)
        names = _without_the_model(monitor.blocks)[::every]
        row[0].set_yticks(range(0, len(monitor.blocks), every), names, fontsize=8)
        row[1].set_yticks([])
        row[0].set_title(title, loc="left")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _without_the_model(names: Sequence[str]) -> Sequence[str]:
    """`model/dense` where all are in one model is `dense`."""
    parts = [name.partition("/") for name in names]
    one_model = len({first for first, _, _ in parts}) == 1
    short = [rest for _, _, rest in parts]
    return short if one_model and all(short) else names


def _logarithms(history: dict[str, np.ndarray], name: str) -> np.ma.MaskedArray:
    values = np.where(history["skipped"] > 0, np.nan, history[name])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.ma.masked_invalid(np.log10(values))
