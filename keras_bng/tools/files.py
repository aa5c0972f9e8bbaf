"""The files that `BlockMonitor` writes: `blocks.csv`, and those of TensorBoard."""

from __future__ import annotations

import csv
import io
import pathlib
import struct
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from keras_bng import backend

COLUMNS = ("gradient_norm", "weight_norm", "factor", "skipped", "relative_step")
HEADER = ("step", "run", "block", *COLUMNS)

NEVER = 2**62


class BlocksFile:
    """`blocks.csv`, to append to: a line a block and record."""

    in_use: ClassVar[weakref.WeakSet[BlocksFile]] = weakref.WeakSet()

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.file: Any = None

    def open(self) -> tuple[int, int] | None:
        """The last run that it has, and the step where that is; None if it is new.

        A run that is still being written, by another monitor, is at no step.
        """
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend(self.path)
            # Without a buffer: a kill costs no record, and nobody writes in between.
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            if self.file.tell() == 0:
                self.file.write(",".join(HEADER).encode() + b"\r\n")
        self.in_use.add(self)
        shared = any(o is not self and o.path.samefile(self.path) for o in self.in_use)
        last: tuple[int, int] | None = None
        for run, step, _, _ in _lines(self.path):
            last = max((run, step), last or (run, step))
        return (last[0], NEVER) if last and shared else last

    def write(self, run: int, step: int, lines: Sequence[str], rows: Any) -> None:
        """`lines` are of `csv_line`; rows have a column a line."""
        if self.file is None:
            self.open()
        text = "".join(
            line % (step, run, *values) for line, values in zip(lines, rows.T.tolist())
        )
        self.file.write(text.encode())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
            self.in_use.discard(self)


def csv_line(block: str) -> str:
    """To be filled in with `%`, which takes a third of the time of a `csv.writer`."""
    name = io.StringIO()
    csv.writer(name, lineterminator="").writerow([block])
    values = ",".join(["%.9g"] * len(COLUMNS))  # of float32, these digits are all
    return f"%d,%d,{name.getvalue().replace('%', '%%')},{values}\r\n"


def _mend(path: pathlib.Path) -> None:
    """What is left of a half-written line is cut off; another file is set aside."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
    first = text[: text.find(b"\n") + 1].decode(errors="replace").strip()
    if first in ("", ",".join(HEADER)):
        return
    names = (path.with_name(f"{path.stem}.{i}{path.suffix}") for i in range(1, 10**6))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    warnings.warn(
        f"{path} has no column `run`, as those of an earlier version. It is now "
        f"{aside}, where BlockMonitor.read reads it, and a new file begins.",
        stacklevel=2,
    )


def _lines(path: pathlib.Path) -> Any:
    """Run, step, block and numbers of each line; of a file without runs, these begin
    where the steps begin again."""
    run, last = 0, -1
    blocks: set[str] = set()  # of the last step
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            if None in line.values() or line["relative_step"] == "":
                continue  # the last line of a killed process
            step, block = int(line["step"]), line["block"]
            if "run" in line:
                run = int(line["run"])
            elif step < last or (step == last and block in blocks):
                run, last = run + 1, -1
            if step != last:
                blocks, last = set(), step
            blocks.add(block)
            yield run, step, block, line


def read(path: str | pathlib.Path) -> tuple[list[str], list[int], list[Any]]:
    """The blocks of a file; and of each record the run, and the step with its rows."""
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    blocks: dict[str, int] = {}
    for run, step, block, line in _lines(pathlib.Path(path)):
        blocks.setdefault(block, len(blocks))
        found.setdefault((run, step), {})[block] = [float(line[n]) for n in COLUMNS]
    if not found:
        raise ValueError(f"{path} has no records.")
    rows = []
    for (_, step), values in sorted(found.items()):
        row = np.full((len(COLUMNS), len(blocks)), np.nan)
        row[:, [blocks[name] for name in values]] = np.array(list(values.values())).T
        rows.append((step, row))
    return list(blocks), [run for run, _ in sorted(found)], rows


class Events:
    """TensorBoard's files: the first run's in `log_dir`, others' in `run_1` and so on.

    They are opened when there is something to write.
    """

    def __init__(self, log_dir: pathlib.Path) -> None:
        self.log_dir = log_dir
        self.run = -1
        self.scalars: dict[tuple[str, ...], Any] = {}
        self.flush: Any = lambda: None
        self.writer = backend.event_writers()

    def _open(self, run: int) -> None:
        if run == self.run:
            return
        self.flush()
        self.run = run
        log_dir = self.log_dir / f"run_{run}" if run else self.log_dir
        self.new_event, self.write, self.flush = self.writer(log_dir)

    def add(self, run: int, step: int, blocks: Sequence[str], row: np.ndarray) -> None:
        """All scalars of a step in one summary."""
        self._open(run)
        key = tuple(blocks)
        if key not in self.scalars:
            event = self.scalars[key] = self.new_event()
            for name in COLUMNS:
                for block in blocks:
                    event.summary.value.add(tag=f"{name}/{block}")
        event = self.scalars[key]
        event.step, event.wall_time = step, time.time()
        for scalar, value in zip(event.summary.value, row.ravel().tolist()):
            scalar.simple_value = value
        self.write(event)

    def add_picture(self, run: int, step: int, png: bytes) -> None:
        self._open(run)
        event = self.new_event(step=step, wall_time=time.time())
        image = event.summary.value.add(tag="blocks").image
        image.width, image.height = struct.unpack(">II", png[16:24])
        image.colorspace, image.encoded_image_string = 4, png
        self.write(event)
