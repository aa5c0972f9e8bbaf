"""`examples/shelf.py`: lines that survive kills, full disks and other writers."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import shelf

A, B, C, D = ({"settings": {"é": n}, "history": [0.1, n / 3]} for n in range(4))

# Adds lines, numbered and of several lengths, and says so after each.
WRITER = """
import pathlib, sys
import shelf
path, first, count, size = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
for n in range(first, first + count):
    shelf.append(path, [n, "x" * (size * (n % 7) // 7)])
    print(n, flush=True)
"""


def writer(path, first, count, size):
    numbers = map(str, (first, count, size))
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), *numbers],
        cwd=shelf.__file__.rpartition("/")[0],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "try.jsonl"


def test_what_is_added_is_read_again_to_the_last_digit(path):
    assert shelf.read(path) == []
    results = [{"b": [0.1 + 0.2, 1e-320, -0.0], "a": None}, {"loss": float("inf")}]
    for result in results:
        shelf.append(path, result)
    assert [repr(result) for result in shelf.read(path)] == [*map(repr, results)]
    assert path.read_text().startswith('{"b":[0.30000000000000004,1e-320,-0.0],"a":n')
    assert path.read_text().count("\n") == 2


def test_a_line_cut_off_anywhere_costs_no_other_line(path):
    for result in (A, B, C):
        shelf.append(path, result)
    whole = path.read_bytes()
    start = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        kept = [A, B, C] if end == len(whole) - 1 else [A, B]
        assert shelf.read(path) == kept
        for _ in range(2):
            shelf.append(path, D)
            kept = [*kept, D]
            assert shelf.read(path) == kept
        assert path.read_bytes().startswith(whole[:end])  # nor is the half of it lost
        assert path.read_bytes().count(shelf.CUT_OFF) == (end > start)


def test_nothing_that_was_added_is_lost_to_kills(path):
    random.seed(0)
    kept, halves = [], 0
    for _ in range(12):
        process = writer(path, len(kept), 1_000, 1_000_000)
        said = [int(process.stdout.readline())]
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        said += map(int, process.communicate()[0].split())
        halves += not path.read_bytes().endswith(b"\n")
        found = [n for n, _ in shelf.read(path)]
        assert found in (kept + said, [*kept, *said, said[-1] + 1])  # killed unsaid
        kept = found
    assert kept == [*range(len(kept))]
    print(f"{halves} of 12 kills left half a line")


def test_two_processes_lose_nothing(path):
    writers = [writer(path, first, 200, 40_000) for first in (0, 200)]
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    found = shelf.read(path)
    assert sorted(n for n, _ in found) == [*range(400)]
    assert all(len(text) == 40_000 * (n % 7) // 7 for n, text in found)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line[: len(line) // 2],
        lambda line: b"<<<<<<< HEAD",
        lambda line: line + line,
        lambda line: b"",
        lambda line: b"\0" * len(line),
    ],
)
def test_a_line_that_something_else_spoilt_is_named_and_kept(number, spoil, path):
    for result in (A, B, C):
        shelf.append(path, result)
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = spoil(lines[number - 1])
    path.write_bytes(b"\n".join(lines))
    message = rf"try.jsonl, line {number}, is not a result .* Delete that line"
    for _ in range(2):
        with pytest.raises(SystemExit, match=message):
            shelf.read(path)
        shelf.append(path, D)
    assert path.read_bytes().startswith(b"\n".join(lines))


def test_a_writer_waits_for_another_and_then_looks_at_the_end(path):
    shelf.append(path, A)
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=shelf.append, args=(path, B))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and shelf.read(path) == [A]
        other.write(b'{"half')
    waiting.join(10)
    assert shelf.read(path) == [A, B]


def test_a_line_is_on_the_disk_when_it_counts_as_added(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    shelf.append(path, A)
    assert synced == [path.read_bytes()]


def test_a_disk_without_locks_gets_the_line_as_well(path, monkeypatch):
    def none(*_):
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    shelf.append(path, A)
    assert shelf.read(path) == [A]


def test_windows_locks_a_byte_that_no_reader_gets_to(path, monkeypatch):
    locked = []

    def locking(number, mode, count):
        locked.append((os.lseek(number, 0, os.SEEK_CUR), mode, count))

    windows = types.SimpleNamespace(LK_LOCK="wait", locking=locking)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    for result in (A, B):
        shelf.append(path, result)
    assert locked == [(2**30, "wait", 1)] * 2
    assert path.read_text() == "".join(
        json.dumps(result, separators=(",", ":")) + "\n" for result in (A, B)
    )
