"""What `find_learning_rate` returns: a choice, its table, and its picture."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

BEST, GREY = "#e34a33", "#999999"
SPAN = 0.5  # of the loss at the start: how far above it losses are drawn
POINTS = 100  # that a curve is drawn with: means over so many parts of the steps


class RatesFound:
    """What `find_learning_rate` returns. Printed, it is a table.

    Attributes:
        best: The rate to take.
        rates: All rates that were tried, from the lowest to the highest.
        losses: The loss that each rate was judged by. Infinite where it was not finite.
        curves: The loss of each batch, with a row for each rate. NaN after a rate
            was given up because its loss was not finite.
        loss_at_start: The loss of the weights that each rate began with.
    """

    def __init__(
        self,
        rates: np.ndarray,
        losses: np.ndarray,
        curves: np.ndarray,
        loss_at_start: float,
        judged_by: str,
        best: int | None,
        learned: np.ndarray,
        flat: np.ndarray,
    ) -> None:
        self.rates, self.losses, self.curves = rates, losses, curves
        self.loss_at_start, self.judged_by = loss_at_start, judged_by
        self.best = float("nan") if best is None else float(rates[best])
        self._best, self._learned, self._flat = best, learned, flat

    def __repr__(self) -> str:
        return f"<RatesFound best={self.best:g} of {len(self.rates)}>"

    def __str__(self) -> str:
        rows = [
            (f"{rate:g}", f"{loss:.4g}", self._became(i))
            for i, (rate, loss) in enumerate(zip(self.rates, self.losses))
        ]
        rows.insert(0, ("rate", "loss", ""))
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:>{wide[0]}}  {b:>{wide[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join([*lines, self._caption()])

    def _became(self, i: int) -> str:
        if i == self._best:
            return "the best"
        if not np.isfinite(self.losses[i]):
            (steps,) = np.nonzero(~np.isfinite(self.curves[i]))
            return (
                f"not finite, at step {steps[0] + 1:,}" if len(steps) else "not finite"
            )
        if self._learned[i]:
            return "no longer falls" if self._flat[i] else "still falls"
        worse = self.losses[i] > self.loss_at_start
        return "worse than at the start" if worse else "no better than at the start"

    def _caption(self) -> str:
        text = f"Loss: {self.judged_by}; at the start {self.loss_at_start:.4g}."
        if self._best is None:
            return text
        if self._best in (0, len(self.rates) - 1):
            side = "lower" if self._best == 0 else "higher"
            text += f" The best is at the end of what was tried: try {side} rates too."
        lowest = np.min(self.losses)
        if self.losses[self._best] > lowest:
            text += (
                f" The lowest loss, {lowest:.4g}, is not lower beyond the noise of the "
                "batches: of rates that are alike, the largest is the best."
            )
        return text

    def plot(self, path: str | pathlib.Path) -> None:
        """A picture: loss against rate, and the losses of each rate step by step."""
        path = pathlib.Path(path)
        figure = self._figure()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)

    def _figure(self) -> Any:
        try:
            import matplotlib
        except ImportError as error:
            raise ImportError(
                "The plot needs matplotlib: `pip install matplotlib`."
            ) from error
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5))
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained")
        left, right = figure.subplots(1, 2)
        self._draw_losses(left)
        colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(self.rates)))
        self._draw_curves(right, colours)
        return figure

    def _draw_losses(self, ax: Any) -> None:
        known = np.isfinite(self.losses)
        ax.plot(self.rates[known], self.losses[known], "o-", color="black", ms=4)
        for rate in self.rates[~known]:
            ax.plot(rate, 0.97, "x", color=GREY, transform=ax.get_xaxis_transform())
        ax.axhline(self.loss_at_start, color=GREY, ls="--", lw=1)
        if self._best is not None:
            at = self.best, self.losses[self._best]
            ax.plot(*at, "o", color=BEST, ms=9, label=f"best: {self.best:g}")
            ax.legend(frameon=False)
        ax.set_xscale("log")
        self._set_scale(ax, self.losses[known])
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        ax.set_title(
            f"loss {self.judged_by}\ndashed: at the start; x: not finite", fontsize=9
        )

    def _draw_curves(self, ax: Any, colours: Any) -> None:
        means = [_means(curve) for curve in self.curves]
        for i, (steps, losses) in enumerate(means):
            best = i == self._best
            ax.plot(
                steps,
                losses,
                color=BEST if best else colours[i],
                lw=2.5 if best else 1.2,
                zorder=3 if best else 2,
                label=f"{self.rates[i]:g}",
            )
        self._set_scale(ax, np.concatenate([losses for _, losses in means]))
        ax.set_xlabel("step")
        ax.set_title("loss of the batches, smoothed", fontsize=9)
        ax.legend(
            title="rate",
            frameon=False,
            fontsize=8,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )

    def _set_scale(self, ax: Any, losses: np.ndarray) -> None:
        """What is far above the start is cut off: the others are of interest."""
        top = self.loss_at_start + SPAN * abs(self.loss_at_start)
        shown = np.append(losses, self.loss_at_start)
        shown = shown[np.isfinite(shown) & (shown <= top)]
        if not len(shown):
            return
        low, high = shown.min(), shown.max()
        if low > 0 and high > 10 * low:
            ax.set_yscale("log")
            ax.set_ylim(low / 1.3, high * 1.3)
        else:
            space = 0.05 * (high - low) or 1.0
            ax.set_ylim(low - space, high + space)


def _means(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and mean losses of so many parts of a curve."""
    losses = curve[np.isfinite(curve)]
    steps = np.arange(1, len(losses) + 1)
    size = max(len(curve) // POINTS, 1)
    cuts = range(size, len(losses), size)
    parts = [p for p in zip(np.split(steps, cuts), np.split(losses, cuts)) if len(p[0])]
    return (
        np.array([part.mean() for part, _ in parts]),
        np.array([part.mean() for _, part in parts]),
    )
