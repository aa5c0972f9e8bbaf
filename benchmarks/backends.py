"""The backends of Keras, each in a process of its own, for there it cannot change."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

NEEDED = {"tensorflow": ("tensorflow",), "jax": ("jax", "optax"), "torch": ("torch",)}


def answers(backend: str, module: str, *arguments: str) -> Iterator[Any]:
    """What a module prints, a JSON a line; nothing without the backend's packages."""
    missing = [name for name in NEEDED[backend] if not importlib.util.find_spec(name)]
    if missing:
        print(f"\nWithout {backend}; it needs: pip install {' '.join(missing)}")
        return
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        yield from map(json.loads, process.stdout or ())
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed on {backend}")
