"""The end of training: a normalized step does not get shorter. What helps?

Not in the paper. MNIST with `mnist_mlp.py`'s networks of 6 and 18 layers, AdamNG and
SGDNG. Each is trained at a constant rate, with a cosine decay to zero, with a linear
decay to zero over the last third, and at a constant rate with Keras's moving average of
the weights (`use_ema=True`); AdamNG also with two smaller values of `beta_2`. One
learning rate for all four: that of `keras_bng.find_learning_rate`, 1,000 steps a rate.

    pip install -e ".[examples]"
    python examples/end_of_training.py                # all of MNIST, 10 epochs, 3 seeds
    python examples/end_of_training.py --data sample  # 4,000 digits, 75 epochs

Measured on all of MNIST, 96 runs, 20 seconds each on a core of its own (RESULTS.md has
all). At 6 layers each end is better than a constant rate: test accuracy 0.974 to 0.977
instead of 0.965 to 0.968; a lower test loss has only the average of weights. At 18
layers seeds differ in accuracy by up to 0.26, more than the ends.
The average of weights was better than the weights themselves in 24 of 24 runs. A cosine
decay was worst with AdamNG at 18 layers, 0.735 to 0.765, and best with SGDNG, 0.873.
`beta_2` made no difference that three seeds can show. The sample was not run. Finished
runs are kept in `--out`, also the rates that were found.
"""

from __future__ import annotations

import argparse
from typing import Any

import data
import harness
import keras
import mnist_mlp
import numpy as np
import report
from harness import Result, Run
from report import plus_minus

from keras_bng import find_learning_rate

EXPERIMENT = "end_of_training"
RATES = f"{EXPERIMENT}_rates"
DEPTHS = (6, 18)
# Of AdamNG; SGDNG has none.
BETAS = {"AdamNG": (0.999, 0.99, 0.95), "SGDMNG": (None,)}
ENDS = ("constant", "cosine", "linear, last third", "average of weights")
EPOCHS = {"full": 10, "sample": 75}  # 6,000 steps, or 3,000
STEPS = 1000
EMA = {"use_ema": True, "ema_momentum": 0.99}


@keras.saving.register_keras_serializable("keras_bng_examples")
class LinearEnd(keras.optimizers.schedules.LearningRateSchedule):
    """Constant, then in a straight line to zero over the last third of the steps."""

    def __init__(self, rate: float, steps: int) -> None:
        self.rate, self.steps = rate, steps

    def __call__(self, step: Any) -> Any:
        left = 1 - keras.ops.cast(step, "float32") / self.steps
        return self.rate * keras.ops.clip(3 * left, 0.0, 1.0)

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate, "steps": self.steps}


def optimizer(run: Run, rate: Any, **options: Any) -> keras.optimizers.Optimizer:
    beta_2 = run.settings["beta_2"]
    if beta_2 is not None:
        options["beta_2"] = beta_2
    return harness.optimizer(run.algorithm, rate, **options)


def ending(run: Run, steps: int) -> keras.optimizers.Optimizer:
    """The optimizer of a run of so many steps."""
    rate, end = run.settings["rate"], run.settings["end"]
    if end == "cosine":
        return optimizer(run, keras.optimizers.schedules.CosineDecay(rate, steps))
    if end == "linear, last third":
        return optimizer(run, LinearEnd(rate, steps))
    return optimizer(run, rate, **(EMA if end == "average of weights" else {}))


def search(run: Run, digits: data.Data) -> dict[str, list[float]]:
    """One rate for every end, found at a constant rate."""
    model = mnist_mlp.build_model(run.settings["depth"])
    mnist_mlp.compile_model(model, optimizer(run, 0.001), steps_per_execution=1)
    found = find_learning_rate(
        model,
        *digits.train,
        batch_size=mnist_mlp.BATCH,
        steps=run.settings["steps"],
        verbose=2,
    )
    return {
        "best": [found.best],
        "rates": found.rates.tolist(),
        "losses": found.losses.tolist(),
    }


def train(run: Run, digits: data.Data) -> dict[str, list[float]]:
    epochs = run.settings["epochs"]
    steps = epochs * data.steps(len(digits.train[1]), mnist_mlp.BATCH)
    model = mnist_mlp.build_model(run.settings["depth"])
    mnist_mlp.compile_model(model, ending(run, steps))
    history = model.fit(
        *digits.train,
        batch_size=mnist_mlp.BATCH,
        epochs=epochs,
        validation_data=digits.test,
        verbose=harness.verbosity(),
    ).history
    # At its end `fit` puts the average of weights, if there is one, into the model.
    tested = model.evaluate(*digits.test, verbose=0, return_dict=True)
    return history | {f"end_{name}": [value] for name, value in tested.items()}


def end_of(results: list[Result], metric: str, **settings: Any) -> np.ndarray:
    """A metric after training, of each seed; empty where nothing was run."""
    found = [r for r in results if settings.items() <= r["settings"].items()]
    return np.array([r["history"][metric][-1] for r in found])


def variants(results: list[Result]) -> list[tuple[str, Any]]:
    """Algorithm and `beta_2`, in the order of the tables."""
    there = {(r["algorithm"], r["settings"]["beta_2"]) for r in results}
    every = [(name, beta) for name, betas in BETAS.items() for beta in betas]
    return [variant for variant in every if variant in there]


def title_of(algorithm: str, beta_2: Any) -> str:
    name = "SGDNG" if algorithm == "SGDMNG" else algorithm
    return name if beta_2 is None else f"{name}, beta_2 {beta_2:g}"


def results_table(results: list[Result]) -> str:
    rows = []
    for depth in sorted(report.distinct(results, "depth")):
        for name, beta_2 in variants(results):
            mine = report.matching(results, name, depth=depth, beta_2=beta_2)
            means = {
                end: end_of(mine, "end_accuracy", end=end).mean()
                for end in ENDS
                if len(end_of(mine, "end_accuracy", end=end))
            }
            for end in means:
                ended = report.matching(mine, name, end=end)
                accuracy = plus_minus(end_of(ended, "end_accuracy"))
                best = means[end] == max(means.values())
                rows.append(
                    [
                        str(depth),
                        title_of(name, beta_2),
                        f"{ended[0]['settings']['rate']:g}",
                        end,
                        plus_minus(end_of(ended, "loss")),
                        plus_minus(end_of(ended, "end_loss")),
                        f"**{accuracy}**" if best else accuracy,
                    ]
                )
    header = ["layers", "optimizer", "rate", "end", "train loss", "test loss"]
    return report.table([*header, "test accuracy"], rows)


def plot(results: list[Result], path: Any, title: str) -> None:
    """A panel a depth: a row an optimizer and end, a dot a seed, a bar their mean."""
    plt = report.pyplot()
    depths = sorted(report.distinct(results, "depth"))
    rows = [(*variant, end) for variant in variants(results) for end in ENDS]
    colours = dict(zip(ENDS, ("#8c8c8c", "#b3200e", "#0b4f9c", "#1b6e1b")))
    figure, axes = plt.subplots(
        1,
        len(depths),
        figsize=(4.6 * len(depths) + 1.5, 0.27 * len(rows) + 1.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, depth in zip(axes[0], depths):
        for y, (name, beta_2, end) in enumerate(rows):
            found = report.matching(results, name, depth=depth, beta_2=beta_2, end=end)
            values = end_of(found, "end_accuracy")
            if len(values):
                look = {"color": colours[end]}
                ax.plot(values, [y] * len(values), "o", ms=4, alpha=0.6, **look)
                ax.plot([values.mean()] * 2, [y - 0.3, y + 0.3], lw=2.5, **look)
        ax.set_title(f"{depth} layers")
        ax.set_xlabel("test accuracy")
        ax.grid(True, axis="x", color="#e6e6e6", linewidth=0.6)
    names = [f"{title_of(name, beta_2)}: {end}" for name, beta_2, end in rows]
    axes[0, 0].set_yticks(range(len(rows)), names, fontsize="small")
    axes[0, 0].invert_yaxis()
    figure.suptitle(title, fontsize="medium")
    report.save(figure, path)


def write_report(
    results: list[Result], found_in: int, options: argparse.Namespace
) -> None:
    kind, epochs = (results[0]["settings"][key] for key in ("data", "epochs"))
    name = EXPERIMENT if kind == "full" else f"{EXPERIMENT}_{kind}"
    title = f"The end of training: {'SAMPLE of ' * (kind == 'sample')}MNIST, sigmoid "
    title += f"MLP, {epochs} epochs"
    plot(results, options.out / f"{name}.png", title)
    parts = [
        results_table(results),
        f"After {epochs} epochs; train loss is the mean over the last epoch. The best "
        "mean test accuracy of an optimizer is in bold. All ends of one optimizer have "
        f"the rate that `find_learning_rate` picked, {found_in:,} steps a rate. "
        + report.what_was_run(results),
    ]
    report.section(options.out, name, title, parts)


def main(arguments: Any = None) -> list[Result]:
    parser = harness.parser(__doc__, list(BETAS))
    parser.add_argument("--depths", type=int, nargs="+", choices=DEPTHS)
    options = harness.parse(parser, arguments)
    digits = data.mnist(options.data, options.data_dir)
    depths = options.depths or (DEPTHS[:1] if options.smoke else DEPTHS)
    steps = 30 if options.smoke else STEPS
    searches = [
        Run(
            RATES,
            name,
            {"depth": depth, "beta_2": beta_2, "steps": steps, "data": digits.kind},
            0,
        )
        for name in options.algorithms or BETAS
        for depth in depths
        for beta_2 in (BETAS[name][:1] if options.smoke else BETAS[name])
    ]
    found = harness.train_all(
        searches, lambda run: search(run, digits), options.out, digits.label
    )
    runs = [
        Run(
            EXPERIMENT,
            result["algorithm"],
            {
                "depth": result["settings"]["depth"],
                "beta_2": result["settings"]["beta_2"],
                "end": end,
                "rate": result["history"]["best"][0],
                "epochs": options.epochs or EPOCHS[digits.kind],
                "data": digits.kind,
            },
            seed,
        )
        for seed in range(options.seeds or (1 if options.smoke else 3))
        for result in found
        for end in ENDS
    ]
    results = harness.train_all(
        runs, lambda run: train(run, digits), options.out, digits.label
    )
    write_report(results, steps, options)
    return results


if __name__ == "__main__":
    main()
