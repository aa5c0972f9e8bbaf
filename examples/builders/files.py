"""Where a builder's files come from: the manual directory, else a download."""

from __future__ import annotations

import hashlib
from typing import Any


def manual(manager: Any, folder: str, checksums: dict[str, str]) -> dict[str, Any]:
    """The files of `folder` in the manual directory, checked; none if it is not there.

    `checksums` are SHA-256 sums by file name.
    """
    try:
        directory = manager.manual_dir / folder
    except AssertionError:  # TFDS's word for: there is no manual directory
        return {}
    if not directory.exists():
        return {}
    for name, expected in checksums.items():
        path = directory / name
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing. Allowed: {sorted(checksums)} all in {directory}, "
                "or no such directory, to download."
            )
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != expected:
            raise ValueError(
                f"{path} is damaged or another version: its SHA-256 is {found}, not "
                f"{expected}. Replace it, or remove {directory} to download."
            )
    return {name: directory / name for name in checksums}
