"""MNIST with deep sigmoid MLPs: AdamNG learns where Adam is stuck (section 4.1).

The paper: MLPs of 6, 12 and 18 layers, 100 sigmoid units each, batches of 100; SGD with
momentum, AdaGrad and Adam, and their NG versions. The deeper the network, the more
normalization helps; at 18 layers Adam is stuck from the beginning and AdamNG is not.

    pip install -e ".[examples]"
    python examples/mnist_mlp.py           # 18 layers, Adam and AdamNG: a minute or two
    python examples/mnist_mlp.py --search  # learning rates of SGDM and SGDMNG
    python examples/mnist_mlp.py --paper   # all 18 combinations, 30 epochs, 3 seeds
    python examples/mnist_mlp.py --cosine  # the same, each rate falling to zero

Measured on all of MNIST, Keras 3.15.1, TensorFlow 2.21, 2 cores (RESULTS.md has all):
after 30 epochs at 18 layers, 3 seeds, test accuracy 0.11 with Adam, 0.85 with AdamNG;
at 6 layers Adam is the better one. The short version takes half a minute a run;
`--search` took 32 minutes and `--paper` 96, on one core each, with other work beside.
`--cosine` has not run yet; `--paper` writes its results beside the constant rates'.
Finished runs are kept in `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import data
import harness
import keras
import numpy as np
import report
from harness import Result, Run
from report import Claim, last, plus_minus

EXPERIMENT = "mnist_mlp"
PAIRS = {"SGDM": "SGDMNG", "AdaGrad": "AdaGradNG", "Adam": "AdamNG"}
PAPER = [name for pair in PAIRS.items() for name in pair]
DEPTHS = (6, 12, 18)
ALL = {(algorithm, depth) for algorithm in PAPER for depth in DEPTHS}
BATCH = 100
# As many steps of the sample as of all of MNIST, nearly.
SHORT = {"full": 5, "sample": 75}

# The paper's for AdaGrad and Adam. It gives none for SGDM: these are `--search`'s.
RATES = {
    "SGDM": {6: 0.3, 12: 0.3, 18: 0.3},
    "SGDMNG": {6: 0.03, 12: 0.01, 18: 0.01},
    "AdaGrad": dict.fromkeys(DEPTHS, 0.01),
    "AdaGradNG": dict.fromkeys(DEPTHS, 0.01),
    "Adam": dict.fromkeys(DEPTHS, 0.001),
    "AdamNG": dict.fromkeys(DEPTHS, 0.001),
}
COSINE = f"{EXPERIMENT}_cosine"
SEARCH = f"{EXPERIMENT}_search"
SEARCHED = ("SGDM", "SGDMNG")
GRID = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
HELD_OUT = 5_000


def build_model(depth: int = 18) -> keras.Model:
    """`depth` dense layers: all but the last have 100 sigmoid units."""
    hidden = [keras.layers.Dense(100, "sigmoid") for _ in range(depth - 1)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def compile_model(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    steps_per_execution: int = 10,  # with XLA, a third off the time of such small steps
) -> None:
    on_torch = keras.backend.backend() == "torch"
    if on_torch:  # Keras has no other there
        steps_per_execution = 1
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=not on_torch,  # there it is `torch.compile`, which needs a compiler
        steps_per_execution=steps_per_execution,
    )


def train(run: Run, digits: data.Data) -> dict[str, list[float]]:
    rate, epochs = run.settings["rate"], run.settings["epochs"]
    if run.settings.get("end") == "cosine":
        steps = epochs * data.steps(len(digits.train[1]), BATCH)
        rate = keras.optimizers.schedules.CosineDecay(rate, steps)
    model = build_model(run.settings["depth"])
    compile_model(model, harness.optimizer(run.algorithm, rate))
    return model.fit(
        *digits.train,
        batch_size=BATCH,
        epochs=epochs,
        validation_data=digits.test,
        verbose=harness.verbosity(),
    ).history


def settings(depth: int, rate: float, epochs: int, digits: data.Data) -> dict[str, Any]:
    return {"depth": depth, "rate": rate, "epochs": epochs, "data": digits.kind}


def with_cosine(run: Run) -> Run:
    """The same run, whose rate falls to zero over the whole training."""
    ending = run.settings | {"end": "cosine"}
    return dataclasses.replace(run, experiment=COSINE, settings=ending)


def search(options: argparse.Namespace, digits: data.Data) -> list[Result]:
    """One grid for both; judged by the loss on held-out training examples."""
    digits = data.held_out(digits, min(HELD_OUT, len(digits.train[1]) // 10))
    runs = [
        Run(
            SEARCH, algorithm, settings(depth, rate, options.epochs or 10, digits), seed
        )
        for algorithm in options.algorithms or SEARCHED
        for depth in (DEPTHS[:1] if options.smoke else DEPTHS)
        for rate in (GRID[:2] if options.smoke else GRID)
        for seed in range(options.seeds or 1)
    ]
    results = harness.train_all(
        runs, lambda run: train(run, digits), options.out, digits.label
    )
    print(f"\n{search_table(results)}\n\n{report.what_was_run(results)}")
    return results


def held_out_loss(
    results: list[Result], algorithm: str, depth: int, rate: float
) -> float:
    """The mean over seeds; not a number counts as infinite."""
    losses = last(results, algorithm, "val_loss", depth=depth, rate=rate)
    return float(np.nan_to_num(losses, nan=np.inf).mean())


def best_rate(results: list[Result], algorithm: str, depth: int) -> float:
    """The largest rate whose loss is within 0.01 of the best: where no rate learns
    anything, the smallest difference should not choose one that never could."""
    rates = report.distinct(report.matching(results, algorithm, depth=depth), "rate")
    losses = {rate: held_out_loss(results, algorithm, depth, rate) for rate in rates}
    return max(r for r in rates if losses[r] <= min(losses.values()) + 0.01)


def search_table(results: list[Result]) -> str:
    rates = sorted(report.distinct(results, "rate"))
    rows = []
    for algorithm in SEARCHED:
        found = report.matching(results, algorithm)
        for depth in sorted(report.distinct(found, "depth")):
            best = best_rate(results, algorithm, depth)
            losses = {r: held_out_loss(results, algorithm, depth, r) for r in rates}
            cells = report.marked({r: f"{x:.3f}" for r, x in losses.items()}, best)
            rows.append([algorithm, str(depth), *cells.values()])
    return report.table(["algorithm", "layers", *(f"{rate:g}" for rate in rates)], rows)


def results_table(results: list[Result]) -> str:
    rows = []
    for depth in sorted(report.distinct(results, "depth")):
        for algorithm in PAPER:
            found = report.matching(results, algorithm, depth=depth)
            if not found:
                continue
            numbers = [
                plus_minus(report.histories(found, metric)[:, -1])
                for metric in ("loss", "val_loss", "val_accuracy")
            ]
            rate = f"{found[0]['settings']['rate']:g}"
            rows.append([str(depth), algorithm, rate, *numbers])
    return report.table(
        ["layers", "algorithm", "rate", "train loss", "test loss", "test accuracy"],
        rows,
    )


def fluctuation(
    results: list[Result], algorithm: str, depth: int, metric: str
) -> np.ndarray:
    """How far an epoch's loss is from the mean of its two neighbours', relative to it.

    Mean over the second half of the epochs, of each seed; a straight descent does not
    fluctuate.
    """
    losses = report.histories(report.matching(results, algorithm, depth=depth), metric)
    losses = losses[:, losses.shape[1] // 2 :]
    neighbours = (losses[:, :-2] + losses[:, 2:]) / 2
    return np.mean(np.abs(losses[:, 1:-1] - neighbours) / losses[:, 1:-1], axis=1)


def claims(results: list[Result]) -> list[Claim]:
    """What section 4.1 of the paper says of its figure, each sentence checked."""

    def losses(depth: int, metric: str) -> dict[str, np.ndarray]:
        return {a: last(results, a, metric, depth=depth) for a in PAPER}

    def compare(better: str, worse: str, depth: int) -> tuple[str, str]:
        train, test = (losses(depth, metric) for metric in ("loss", "val_loss"))
        evidence = ", ".join(
            f"{name} {plus_minus(of[better])} against {plus_minus(of[worse])}"
            for name, of in (("train", train), ("test", test))
        )
        both = (report.is_lower(of[better], of[worse]) for of in (train, test))
        return report.all_of(both), evidence

    found = [
        Claim("6 layers: SGDMNG no worse than SGDM", *compare("SGDMNG", "SGDM", 6))
    ]
    for depth in (12, 18):
        for base, ng in PAIRS.items():
            text = f"{depth} layers: {ng} better than {base}"
            found.append(Claim(text, *compare(ng, base, depth)))
    adam, adam_ng = (losses(18, "loss")[name] for name in ("Adam", "AdamNG"))
    stuck = np.log(10) - 0.05
    found.append(
        Claim(
            "18 layers: Adam is stuck from the beginning, AdamNG is not",
            report.certain(bool(adam.min() > stuck > adam_ng.max())),
            f"train {plus_minus(adam)} and {plus_minus(adam_ng)}, each seed on its "
            f"side; guessing has {np.log(10):.3f}",
        )
    )
    for depth in (12, 18):
        jumps = {
            name: [fluctuation(results, name, depth, m) for m in ("loss", "val_loss")]
            for name in ("SGDMNG", "AdamNG")
        }
        found.append(
            Claim(
                f"{depth} layers: SGDMNG fluctuates more than AdamNG",
                report.all_of(map(report.is_lower, jumps["AdamNG"], jumps["SGDMNG"])),
                "distance from the neighbours' mean, second half, %: "
                + ", ".join(
                    f"{name} {plus_minus(100 * train, 1)} train, "
                    f"{plus_minus(100 * test, 1)} test"
                    for name, (train, test) in jumps.items()
                ),
            )
        )
    for metric, name in (("loss", "train"), ("val_loss", "test")):
        for depth in DEPTHS:
            text = f"{depth} layers, {name} loss: AdamNG is the best"
            found.append(Claim(text, *report.best("AdamNG", losses(depth, metric))))
    return found


def write_report(results: list[Result], options: argparse.Namespace) -> None:
    epochs = results[0]["settings"]["epochs"]
    sample = results[0]["settings"]["data"] == "sample"
    title = f"{'SAMPLE of ' * sample}MNIST, sigmoid MLP, batch {BATCH}, {epochs} epochs"
    name = EXPERIMENT if options.paper else f"{EXPERIMENT}_short"
    depths = report.distinct(results, "depth")
    panels = [(f"{depth} layers", {"depth": depth}) for depth in depths]
    report.curves(results, panels, options.out / f"{name}.png", title=title)
    parts = [
        results_table(results),
        f"After {epochs} epochs; train loss is the mean over the last epoch, as `fit` "
        f"gives it. {report.what_was_run(results)}",
    ]
    if {(r["algorithm"], r["settings"]["depth"]) for r in results} == ALL:
        parts += [
            "What the paper says of its figure, mean over seeds, after the last epoch:",
            report.claims_table(claims(results), "constant rate"),
        ]
        decayed = [with_cosine(harness.run_of(result)) for result in results]
        decayed = harness.results(decayed, options.out)
        if all(decayed):
            parts += [
                "The same with a cosine decay to zero over the whole training:",
                results_table(decayed),
                report.what_was_run(decayed),
                "What the paper says, with this decay:",
                report.claims_table(claims(decayed), "cosine decay"),
            ]
    searched = harness.read_all(options.out, SEARCH)
    if options.paper and searched:
        parts += [
            "The paper gives no rate for SGDM. For SGDM and SGDMNG each depth's is "
            "from one grid: the largest within 0.01 of the best, by the loss on "
            "held-out training examples:",
            search_table(searched),
            f"After {searched[0]['settings']['epochs']} epochs. "
            + report.what_was_run(searched),
        ]
    report.section(options.out, name, f"{title} (section 4.1)", parts)


def main(arguments: Any = None) -> list[Result]:
    parser = harness.parser(__doc__, PAPER)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--search", action="store_true", help="find SGDM's rates")
    mode.add_argument("--paper", action="store_true", help="the whole experiment")
    mode.add_argument(
        "--cosine", action="store_true", help="the same with a cosine decay to zero"
    )
    options = harness.parse(parser, arguments)
    if options.search and not {*(options.algorithms or ())} <= {*SEARCHED}:
        parser.error(f"--search is for {SEARCHED}. Received: {options.algorithms}")
    digits = data.mnist(options.data, options.data_dir)
    if options.search:
        return search(options, digits)
    algorithms, depths, seeds, epochs = (
        (PAPER, DEPTHS, 3, 30)
        if options.paper or options.cosine
        else (["Adam", "AdamNG"], (18,), 1, SHORT[digits.kind])
    )
    epochs = options.epochs or epochs
    runs = [
        Run(EXPERIMENT, name, settings(depth, RATES[name][depth], epochs, digits), seed)
        for seed in range(options.seeds or seeds)
        for depth in (depths[:1] if options.smoke else depths)
        for name in options.algorithms or algorithms
    ]
    if options.cosine:
        runs = [with_cosine(run) for run in runs]
    results = harness.train_all(
        runs, lambda run: train(run, digits), options.out, digits.label
    )
    if options.cosine:
        print(f"\n{results_table(results)}\n\n{report.what_was_run(results)}")
    else:
        write_report(results, options)
    return results


if __name__ == "__main__":
    main()
