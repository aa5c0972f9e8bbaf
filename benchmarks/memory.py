"""The bandwidth of this machine, and how much memory a step takes at its peak.

`python -m benchmarks.memory AdamNG graph "6 dense 2048"` prints the latter in bytes, in
a process of its own: TensorFlow keeps what it once had; only a first step shows it.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import backends


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


def first_peak(optimizer: str, mode: str, workload: str) -> int | None:
    """By how many bytes a process's first step raises its memory; median of five."""
    peaks = []
    for _ in range(5):
        [peak] = backends.answers("tensorflow", "memory", optimizer, mode, workload)
        if peak is None:
            return None
        peaks.append(peak)
    return int(np.median(peaks))


def peak_extra_bytes(step: Callable[[], Any]) -> int | None:
    """By how much a function raises the process's memory for a while; Linux only."""
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the peak to what there is now
    before = _status("VmRSS")
    step()
    return max(_status("VmHWM") - before, 0)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])


def main() -> None:
    from benchmarks import tensorflow_step, variables
    from benchmarks.shapes import WORKLOADS, dense

    name, mode, workload = sys.argv[1:]
    few = dense(1, 2)  # what comes once in a process
    tensorflow_step.new_step(name, mode, few)(variables.gradients(few))
    shapes = WORKLOADS[workload]
    step = tensorflow_step.new_step(name, mode, shapes)
    gradients = variables.gradients(shapes)
    print(json.dumps(peak_extra_bytes(lambda: step(gradients))))


if __name__ == "__main__":
    main()
