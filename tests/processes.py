"""Several processes on this machine, for a test: none of them outlives it."""

import contextlib
import os
import pathlib
import pickle
import re
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "devices.md").read_text()
SECONDS = 400  # on a busy machine; a run alone takes a tenth


def snippet(tag):
    """The code on the page "On several devices and machines" under `<!-- tag -->`."""
    pattern = rf"<!-- {re.escape(tag)} -->\n```python\n(.*?)^```"
    return re.search(pattern, PAGE, re.M | re.S)[1]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def ranks(count):
    """The environment of each of so many processes, as `torchrun` would set it."""
    port, *others = map(str, free_ports(4))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(count), "OTHER_PORTS": " ".join(others)}
    return [{**shared, "RANK": str(rank)} for rank in range(count)]


def run(arguments, environments, folder, killed=False, needed=None, seconds=SECONDS):
    """Runs Python once for each environment, all at a time, until the needed ones end.

    If one fails, or the time is over, all are stopped, and what they said is in the
    error. `killed`: one of them must end by SIGKILL, then the others are stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    logs = [folder / f"{i}.log" for i in range(len(environments))]
    needed = range(len(environments)) if needed is None else needed
    processes = []
    try:
        for environment, log in zip(environments, logs):
            own = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
            with open(log, "w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, arguments)],
                        env=own,
                        cwd=folder,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        end = time.monotonic() + seconds
        while True:
            codes = [process.poll() for process in processes]
            if killed and -signal.SIGKILL in codes:
                return
            if not killed and all(codes[i] == 0 for i in needed):
                return
            failed = any(code not in (None, 0) for code in codes)
            if failed or time.monotonic() > end or None not in codes:
                time.sleep(1)  # for what the others have to say
                raise AssertionError(f"Return codes: {codes}\n{_tails(logs)}")
            time.sleep(0.05)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tails(logs):
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)


def leave(found):
    """In a process: leaves what it found for `answers`."""
    name = f"{os.environ['RANK']}.pickle"
    pathlib.Path(name).write_bytes(pickle.dumps(found))


def answers(folder, count):
    """What each process has left."""
    files = [folder / f"{rank}.pickle" for rank in range(count)]
    return [pickle.loads(file.read_bytes()) for file in files]


def next_port():
    """In a process: for the next group of all of them."""
    port, *others = os.environ["OTHER_PORTS"].split()
    os.environ.update(MASTER_PORT=port, OTHER_PORTS=" ".join(others))


def run_snippet(tag):
    """The names that there are after the code of the page has run here."""
    names = {"__name__": "__main__"}
    exec(compile(snippet(tag), f"docs/devices.md: {tag}", "exec"), names)
    return names


def die():
    """As a machine that loses its power."""
    os.kill(os.getpid(), signal.SIGKILL)
