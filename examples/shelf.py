"""Results on disk: one file an experiment, one run a line, each line a JSON.

Lines are only ever added. What a kill or a full disk cuts off is the end of the file:
readers pass over it. The next writer marks it, and so it is never mistaken for a line
that something else spoilt.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

CUT_OFF = b" (cut off)"


def append(path: pathlib.Path, result: Any) -> None:
    """Adds a line: all of it is on the disk when this returns. Other writers wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result, separators=(",", ":")).encode() + b"\n"
    with path.open("a+b", buffering=0) as file:
        with contextlib.suppress(OSError):  # no locks on this disk: one write is safe
            _lock(file)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() not in (b"", b"\n"):
            line = CUT_OFF + b"\n" + line
        while line:  # one write; where the disk gets full, the second says so
            line = line[file.write(line) :]
        os.fsync(file.fileno())


def read(path: pathlib.Path) -> list[Any]:
    """What all lines say, the oldest first; of no file, nothing."""
    found = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        text = line.rstrip()
        try:
            found.append(json.loads(text.removesuffix(CUT_OFF)))
        except ValueError as error:
            if line.endswith(b"\n") and not text.endswith(CUT_OFF):
                raise SystemExit(
                    f"{path}, line {number}, is not a result ({error}). Delete that "
                    "line, and the run is done again."
                ) from error
    return found


def _lock(file: Any) -> None:
    """Waits for other writers; a lock ends with its file's closing, or a kill."""
    try:
        import fcntl
    except ImportError:  # Windows: who locks a byte keeps readers away from it, too
        import msvcrt

        file.seek(1 << 30)  # so it is one that no reader gets to
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
