"""The bandwidth of this machine, and how much memory a step takes at its peak."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np


class Copy:
    """Copies `size` bytes on all cores: what moving memory costs at the very least."""

    def __init__(self, size: int) -> None:
        cores = os.cpu_count() or 1
        self.parts = [
            (np.zeros(size // cores, "uint8"), np.ones(size // cores, "uint8"))
            for _ in range(cores)
        ]
        self.bytes_moved = 2 * sum(part[0].size for part in self.parts)
        self.pool = concurrent.futures.ThreadPoolExecutor(cores)

    def __call__(self) -> None:
        list(self.pool.map(lambda part: np.copyto(*part), self.parts))


def peak_extra_bytes(step: Callable[[], Any]) -> int | None:
    """By how much a step raises the process's memory for a while; Linux only."""
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the peak to what there is now
    before = _status("VmRSS")
    step()
    return max(_status("VmHWM") - before, 0)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])
