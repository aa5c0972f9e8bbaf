"""What `BlockMonitor` recorded: rows of numbers, in memory and in files."""

from __future__ import annotations

import bisect
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_bng import backend
from keras_bng.tools import files, picture
from keras_bng.tools.files import COLUMNS
from keras_bng.tools.watched import Watched

NO_PICTURE = (
    "TensorBoard gets no picture of the blocks, for which matplotlib is missing: `pip "
    "install matplotlib`."
)


class Records:
    """A row a record, with a column a block, in the order of runs and steps."""

    def __init__(self, log_dir: pathlib.Path | None, tensorboard: bool) -> None:
        self.log_dir, self.tensorboard = log_dir, tensorboard
        self.blocks: list[str] = []
        self.rows: list[tuple[int, np.ndarray]] = []
        self.runs: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """What a copy begins anew: a run, and files that are opened to write."""
        self.start = len(self.rows)  # of the present run
        self.last: dict[str, tuple[Any, int]] = {}  # who updated a block, and when
        self.lines: dict[str, str] = {}
        self.pictured = len(self.rows)
        self.file = self.events = None
        if self.log_dir is not None:
            self.file = files.BlocksFile(self.log_dir / "blocks.csv")
            if self.tensorboard:
                self.events = files.Events(self.log_dir)

    def __getstate__(self) -> dict[str, Any]:
        lists = {name: list(vars(self)[name]) for name in ("blocks", "rows", "runs")}
        return {"log_dir": self.log_dir, "tensorboard": self.tensorboard, **lists}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def history(self) -> dict[str, np.ndarray]:
        values = np.full((len(self.rows), len(COLUMNS), len(self.blocks)), np.nan)
        for i, (_, row) in enumerate(self.rows):
            values[i, :, : row.shape[1]] = row
        return {
            "step": np.array([step for step, _ in self.rows], int),
            "run": np.array(self.runs, int),
            **{name: values[:, i] for i, name in enumerate(COLUMNS)},
        }

    def names_for(self, part: Watched, others: Sequence[Watched]) -> list[str]:
        """Of an optimizer's blocks, other than those of the optimizers beside it."""
        taken = {name for other in others for name in other.names}
        names = []
        for block in part.blocks or ():
            name, count = block.name, 1
            while name in taken:
                count += 1
                name = f"{block.name}#{count}"
            taken.add(name)
            names.append(name)
        return names

    def name(self, part: Watched, names: list[str]) -> None:
        """Gives an optimizer's blocks their columns; new ones come at the end."""
        self.blocks += [name for name in names if name not in self.blocks]
        self.lines.update({name: files.csv_line(name) for name in names})
        part.names, part.columns = names, [self.blocks.index(name) for name in names]

    def add(self, step: int, found: Sequence[tuple[Watched, int, np.ndarray]]) -> None:
        """Parts, with the number of their update and its rows: one record, or more of
        one that is there."""
        if not backend.is_first_process():
            return
        if not self.last or any(self._begins_again(*part[:2]) for part in found):
            run = self._next_run(step)
            self.last, self.start = {}, len(self.rows)
        else:
            run = self.runs[-1]
        at = len(self.rows)
        if at > self.start and step <= self.rows[-1][0]:
            at = bisect.bisect_left(self.rows, step, self.start, key=lambda row: row[0])
        row = np.full((len(COLUMNS), len(self.blocks)), np.nan)
        if at < len(self.rows) and self.rows[at][0] == step:
            known = self.rows[at][1]
            row[:, : known.shape[1]] = known
            self.rows[at] = step, row
        else:
            self.rows.insert(at, (step, row))
            self.runs.insert(at, run)
        for part, number, values in found:
            self.last.update(dict.fromkeys(part.names, (part.optimizer, number)))
            row[:, part.columns] = values
            if self.file:
                lines = [self.lines[name] for name in part.names]
                self.file.write(run, step, lines, values)
            if self.events:
                self.events.add(run, step, part.names, values)

    def begin_unless_of(self, parts: Sequence[Watched]) -> None:
        """A new run, if the last record was of none of these optimizers."""
        now = {id(part.optimizer) for part in parts}
        if not any(id(optimizer) in now for optimizer, _ in self.last.values()):
            self.last = {}

    def _begins_again(self, part: Watched, number: int) -> bool:
        # Not all of its blocks may be known: a layer was frozen, and is no longer.
        known = [self.last[name] for name in part.names if name in self.last]
        return any(
            optimizer is not part.optimizer or number <= last
            for optimizer, last in known
        )

    def _next_run(self, step: int) -> int:
        """The next number, unless a run in the file goes on."""
        last = self.file.open() if self.file else None
        if self.runs or last is None:
            return max([-1, *self.runs[-1:], *(last or ())[:1]]) + 1
        return last[0] + (step <= last[1])

    def draw(self) -> None:
        """The picture for TensorBoard, if there is something new."""
        if not self.events:
            return
        if self.pictured < len(self.rows):
            try:
                recorded: Any = self
                png = picture.png({"": recorded})
                self.events.add_picture(self.runs[-1], self.rows[-1][0], png)
            except ImportError:
                if not self.pictured:
                    warnings.warn(NO_PICTURE, stacklevel=3)
            self.pictured = len(self.rows)
        self.events.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()
        if self.events:
            self.events.flush()
