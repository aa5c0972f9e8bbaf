"""What the experiments share: algorithms by the paper's names, flags, runs, results.

A run is one training: an algorithm, its settings, a seed. Its result is one line of
`<out>/<experiment>.jsonl`, written when the run is done. Giving a command again trains
only what has no line yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import shelf

from keras_bng import SGDNG, AdagradBNG, AdagradNG, AdamNG, Adaptive, Clip

PACKAGES = ("keras_bng", "keras", "tensorflow", "tensorflow-datasets", "numpy")

# The paper's names. With `rule=None` the optimizer is Keras's own, bit for bit.
ALGORITHMS: dict[str, tuple[type[keras.optimizers.Optimizer], dict[str, Any]]] = {
    "SGDM": (SGDNG, {"momentum": 0.9, "rule": None}),
    "SGDMCLIP": (SGDNG, {"momentum": 0.9, "rule": Clip(0.1)}),
    "SGDMNG": (SGDNG, {"momentum": 0.9}),
    "SGDMNG_adap": (SGDNG, {"momentum": 0.9, "rule": Adaptive(0.02)}),
    "SGDMNG_rms": (SGDNG, {"momentum": 0.9, "rule": "rms"}),  # not the paper's
    "AdaGrad": (AdagradNG, {"rule": None}),
    "AdaGradNG": (AdagradNG, {}),
    "AdaGradBNG": (AdagradBNG, {}),
    "Adam": (AdamNG, {"rule": None}),
    "AdamCLIP": (AdamNG, {"rule": Clip(0.1)}),
    "AdamNG": (AdamNG, {}),
    "AdamNG_adap": (AdamNG, {"rule": Adaptive(0.02)}),
}


def optimizer(algorithm: str, rate: Any, **options: Any) -> keras.optimizers.Optimizer:
    """`optimizer("AdamNG", 0.001)`; options go to the optimizer's class."""
    cls, fixed = ALGORITHMS[algorithm]
    return cls(rate, **{**fixed, **options})


def parser(doc: str, algorithms: Sequence[str]) -> argparse.ArgumentParser:
    """The flags that every experiment has; `algorithms` are those that it knows."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--algorithms", nargs="+", metavar="NAME", help=", ".join(algorithms)
    )
    made.set_defaults(known=list(algorithms))
    made.add_argument("--epochs", type=int, help="passes over the data")
    made.add_argument("--seeds", type=int, help="how many, from 0 on")
    made.add_argument(
        "--data",
        choices=["auto", "full", "sample"],
        default="auto",
        help="auto: all of it from disk, else by download, else a small sample",
    )
    made.add_argument("--data-dir", help="the TFDS data directory")
    made.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("runs"),
        help="where results go, and finished ones are found (default: runs)",
    )
    made.add_argument(
        "--smoke", action="store_true", help="sample, 2 epochs: only to see it work"
    )
    return made


def add_accelerators(made: argparse.ArgumentParser) -> None:
    """The flags of the long experiments, for those who have a GPU."""
    made.add_argument(
        "--precision",
        choices=["float32", "mixed_float16", "mixed_bfloat16"],
        default="float32",
    )
    made.add_argument("--xla", action="store_true", help="compile the training step")


def accelerators(options: argparse.Namespace) -> dict[str, Any]:
    """What of these flags belongs to a run's settings: what is not the default."""
    chosen: dict[str, Any] = {}
    if options.precision != "float32":
        chosen["precision"] = options.precision
    if options.xla:
        chosen["xla"] = True
    return chosen


def strategy() -> Any:
    """All GPUs, where there are several: `with strategy().scope(): build, compile`."""
    import tensorflow as tf

    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def parse(made: argparse.ArgumentParser, arguments: Any = None) -> argparse.Namespace:
    """Parses and checks; bad flags end with exit code 2 and a message."""
    options = made.parse_args(arguments)
    unknown = [name for name in options.algorithms or () if name not in options.known]
    if unknown:
        made.error(f"unknown algorithms {unknown}; known: {options.known}")
    for name in ("epochs", "seeds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            made.error(
                f"--{name} must be 1 or more. Received: {getattr(options, name)}"
            )
    if options.data_dir and not pathlib.Path(options.data_dir).is_dir():
        made.error(f"--data-dir is not a directory. Received: {options.data_dir}")
    if options.smoke:
        options.data = "sample"
        options.epochs = options.epochs or 2
    return options


@dataclasses.dataclass(frozen=True)
class Run:
    """One training. The settings are all that decides its numbers."""

    experiment: str
    algorithm: str
    settings: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """What tells it from the other runs of its experiment."""
        settings = "_".join(f"{k}={v}" for k, v in self.settings.items())
        name = f"{self.algorithm}_{settings}_seed={self.seed}"
        return re.sub(r"[^\w=.,-]+", "-", name)

    def path(self, out: pathlib.Path, suffix: str) -> pathlib.Path:
        """Where it keeps what is no line of results, such as its model."""
        return out / self.experiment / (self.name + suffix)

    def backup(self, out: pathlib.Path) -> pathlib.Path:
        """The directory of the last whole epoch, while the run is not done."""
        return self.path(out, ".unfinished")

    def __str__(self) -> str:
        settings = ", ".join(f"{k} {v}" for k, v in self.settings.items())
        return f"{self.algorithm}: {settings}, seed {self.seed}"


Result = dict[str, Any]


def train_all(
    runs: Sequence[Run],
    train: Callable[[Run], dict[str, list[float]]],
    out: pathlib.Path,
    provenance: str,
) -> list[Result]:
    """Trains what has no result yet. Returns all results, in the order of `runs`."""
    left = [run for run, done in zip(runs, results(runs, out)) if not done]
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs are in {out} already.")
    started = time.perf_counter()
    try:
        for i, run in enumerate(left):
            print(f"\n[{i + 1}/{len(left)}] {run}", flush=True)
            before = time.perf_counter() - _seconds(run.backup(out))
            keras.utils.clear_session()  # in Keras 3.10 its own generator stays
            keras.utils.set_random_seed(run.seed)
            precision = run.settings.get("precision", "float32")
            keras.config.set_dtype_policy(precision)
            history = train(run)
            now = time.perf_counter()
            write(run, history, now - before, out, provenance)
            shutil.rmtree(run.backup(out), ignore_errors=True)
            rest = (now - started) / (i + 1) * (len(left) - i - 1)
            print(f"{now - before:.0f} s; left: about {rest / 60:.1f} min", flush=True)
    except KeyboardInterrupt:
        done = sum(map(bool, results(runs, out)))
        print(f"\nStopped. {done} of {len(runs)} runs are kept in {out}.")
        print("Give the same command again to go on.")
        sys.exit(130)
    return results(runs, out)


class Backup(keras.callbacks.Callback):
    """All that a run needs to go on after each epoch, until it is done: weights,
    optimizer state, history, and the states of random generators (dropout's), which
    are not among the weights.

    `state.json` is replaced last and names the weights that belong to it, so that a
    kill at any moment leaves one whole epoch. (Keras's `BackupAndRestore` keeps no
    history, and overwrites its one file of weights.)
    """

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        self.folder = folder
        self.history: dict[str, list[float]] = {}
        self.started = time.perf_counter()

    def restore(self, model: keras.Model) -> int:
        """Loads what there is, and returns how many epochs that is."""
        state = self.folder / "state.json"
        if not state.exists():
            return 0
        saved = read(state)
        try:
            model.optimizer.build(model.trainable_variables)
            model.load_weights(self.folder / saved["weights"])
            for generator, state in zip(_generators(model), saved["random"]):
                generator.assign(state)
        except Exception as error:
            raise SystemExit(
                f"{self.folder} cannot be loaded ({error!r:.300}). Delete it, and the "
                "run starts from its first epoch."
            ) from error
        self.history = saved["history"]
        self.started -= saved["seconds"]
        print(f"{saved['epochs']} epochs are in {self.folder} already.", flush=True)
        return saved["epochs"]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = f"{epoch + 1}.weights.h5"
        self.model.save_weights(self.folder / weights)
        state = {
            "epochs": epoch + 1,
            "weights": weights,
            "history": self.history,
            "random": [
                generator.numpy().tolist() for generator in _generators(self.model)
            ],
            "seconds": time.perf_counter() - self.started,
        }
        write_text(self.folder / "state.json", json.dumps(state))
        for old in self.folder.glob("*.weights.h5"):
            if old.name != weights:
                old.unlink()


def _generators(model: keras.Model) -> list[Any]:
    """The states of a model's `keras.random.SeedGenerator`s."""
    return [v for v in model.variables if v.path.endswith("seed_generator_state")]


def fit(
    run: Run,
    model: keras.Model,
    batches: Callable[[int], Any],
    out: pathlib.Path,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **options: Any,
) -> dict[str, list[float]]:
    """`model.fit` that goes on after the last whole epoch, when it was stopped.

    `batches(n)` are the training batches from epoch n on (0 is the first). They must
    depend on the epoch and the seed alone, for a stopped run to end like another.
    """
    backup = Backup(run.backup(out))
    first, epochs = backup.restore(model), run.settings["epochs"]
    if first < epochs:
        model.fit(
            batches(first),
            epochs=epochs,
            initial_epoch=first,
            callbacks=[*callbacks, backup],
            shuffle=False,
            verbose=verbosity(),
            **options,
        )
    return backup.history


def _seconds(backup: pathlib.Path) -> float:
    state = backup / "state.json"
    return read(state)["seconds"] if state.exists() else 0.0


def write(
    run: Run,
    history: dict[str, list[float]],
    seconds: float,
    out: pathlib.Path,
    provenance: str,
) -> None:
    result = {
        **dataclasses.asdict(run),
        "data": provenance,
        "history": history,
        "seconds": round(seconds, 1),
        "date": datetime.date.today().isoformat(),
        "backend": keras.backend.backend(),
        "cores": os.cpu_count(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    shelf.append(out / f"{run.experiment}.jsonl", result)


def write_text(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def read(path: pathlib.Path) -> Result:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(
            f"{path} is not a result ({error}). Delete it, and the run is done again."
        ) from error


def _finished(out: pathlib.Path, experiment: str) -> dict[str, Result]:
    """Results by the names of their runs; of a run that is there twice, the last.

    Once each was a file, `<out>/<experiment>/<name>.json`: those count as well.
    """
    found = [read(path) for path in sorted((out / experiment).glob("*.json"))]
    found += shelf.read(out / f"{experiment}.jsonl")
    return {run_of(result).name: result for result in found}


def run_of(result: Result) -> Run:
    """The run that this is the result of."""
    return Run(**{field.name: result[field.name] for field in dataclasses.fields(Run)})


def results(runs: Sequence[Run], out: pathlib.Path) -> list[Any]:
    """The result of each run, or None where it is not finished."""
    done = {name: _finished(out, name) for name in {run.experiment for run in runs}}
    return [done[run.experiment].get(run.name) for run in runs]


def read_all(out: pathlib.Path, experiment: str) -> list[Result]:
    """Every finished run of an experiment, whichever command made it, by name."""
    return [result for _, result in sorted(_finished(out, experiment).items())]


def verbosity() -> int:
    """Keras's progress bar for people, a line an epoch for files."""
    return 1 if sys.stdout.isatty() else 2


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
