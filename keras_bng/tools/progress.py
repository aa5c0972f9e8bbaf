"""A line that says how far a search is, and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

ALLOWED = (0, 1, 2, "auto")
EVERY = 0.2  # seconds


class Progress:
    """0 is silent, 1 a line that changes, 2 a line for each rate that is done."""

    def __init__(self, verbose: int | str, rates: list[float], steps: int) -> None:
        self.verbose = _resolved(verbose)
        self.rates, self.steps = rates, steps
        self.begun, self.shown, self.width = time.monotonic(), 0.0, 0

    def of(self, i: int) -> Callable[[int, float], None]:
        """What is to be called after some steps at the rate number `i`."""

        def tell(step: int, loss: float) -> None:
            # A loss that is not finite is the last one.
            ends = step == self.steps or not abs(loss) < float("inf")
            now = time.monotonic()
            if self.verbose == 1 and (ends or now - self.shown > EVERY):
                self.shown = now
                self._write(self._text(i, step, loss, now - self.begun, ends), "\r")
            elif self.verbose == 2 and ends:
                self._write(self._text(i, step, loss, now - self.begun, ends), "\n")

        return tell

    def _text(self, i: int, step: int, loss: float, spent: float, ends: bool) -> str:
        done = (i + 1) * self.steps if ends else i * self.steps + step
        left = spent / done * (len(self.rates) * self.steps - done)
        return (
            f"Rate {i + 1} of {len(self.rates)} ({self.rates[i]:g}): step {step:,} of "
            f"{self.steps:,}, loss {loss:.4g}, {_time(left)} left"
        )

    def _write(self, text: str, end: str) -> None:
        sys.stdout.write(f"{text:<{self.width}}{end}")
        sys.stdout.flush()
        self.width = len(text)

    def close(self) -> None:
        if self.verbose == 1 and self.width:
            self._write("", "\r")


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def check_verbose(verbose: int | str) -> None:
    if verbose not in ALLOWED:
        raise ValueError(
            f"`verbose` must be 0, 1, 2 or 'auto'. Received: verbose={verbose!r}"
        )


def _resolved(verbose: int | str) -> int | str:
    if verbose != "auto":
        return int(verbose)
    return 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2
