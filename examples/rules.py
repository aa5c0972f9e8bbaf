"""How far should a block move? SGDNG with `rule="unit"`, `"adaptive"` and `"rms"`.

Not in the paper, which has the first two. Under "unit" every block moves as far as any
other; under "adaptive" by the same share of its length; under "rms" by a length per
weight, so that a block of n weights moves the root of n times as far as a single one.
MLPs of 6 and 18 layers on MNIST, the text CNN, and ResNet-20, the last REDUCED: 4,500
images, 5 epochs. Each rule at the rate that `keras_bng.find_learning_rate` picks, a
tenth of the training's steps for each rate; for the MLPs 1,000.

    pip install -e ".[examples]"
    python examples/rules.py          # all four, 3 seeds
    python examples/rules.py --smoke  # a minute, to see it work

Not run in full yet. Finished runs are kept in `--out`.
"""

from __future__ import annotations

from typing import Any

import harness
import keras
import numpy as np
import report
import tasks
from harness import Result, Run
from report import plus_minus

from keras_bng import find_learning_rate

EXPERIMENT = "rules"
RATES = f"{EXPERIMENT}_rates"
RULES = {"SGDMNG": "unit", "SGDMNG_adap": "adaptive", "SGDMNG_rms": "rms"}
TASKS = ("mnist-6", "mnist-18", "text", "resnet")
SHARE, DEEP = 10, 1000  # of a training's steps a tenth; of an MLP's no fewer
SEEDS = 3


def search(run: Run, task: tasks.Task) -> dict[str, list[float]]:
    model = task.compiled(tasks.optimizer(run.settings["task"], run.algorithm))
    found = find_learning_rate(
        model, **task.examples(), steps=run.settings["steps"], verbose=2
    )
    print(found, flush=True)
    return {
        "best": [found.best],
        "rates": found.rates.tolist(),
        "losses": np.where(np.isfinite(found.losses), found.losses, np.nan).tolist(),
    }


def results_table(results: list[Result], known: dict[str, tasks.Task]) -> str:
    rows = []
    for name, task in known.items():
        mine = [r for r in results if r["settings"]["task"] == name]
        judged = {
            algorithm: np.array(
                [task.judged_by(r) for r in report.matching(mine, algorithm)]
            )
            for algorithm in RULES
            if report.matching(mine, algorithm)
        }
        best = min(judged, key=lambda algorithm: judged[algorithm].mean())
        for algorithm, values in judged.items():
            found = report.matching(mine, algorithm)
            cell = plus_minus(values)
            rows.append(
                [
                    task.name,
                    RULES[algorithm],
                    f"{found[0]['settings']['rate']:g}",
                    task.measure,
                    f"**{cell}**" if algorithm == best else cell,
                    plus_minus([r["history"]["loss"][-1] for r in found]),
                ]
            )
    return report.table(
        ["model", "rule", "rate found", "judged by", "lower is better", "train loss"],
        rows,
    )


def plot(results: list[Result], known: dict[str, tasks.Task], path: Any) -> None:
    """Train loss by epoch, a panel a model."""
    titles = [(task.name, {"task": name}) for name, task in known.items()]
    report.curves(
        results,
        titles,
        path,
        [("loss", "train loss")],
        "SGDNG: unit (solid), adaptive (dash-dot), rms (dotted)",
    )


def main(arguments: Any = None) -> list[Result]:
    parser = harness.parser(__doc__, list(RULES))
    tasks.add_tasks(parser)
    parser.set_defaults(tasks=list(TASKS))
    options = harness.parse(parser, arguments)
    if options.smoke:
        options.tasks = ["mnist-6"]
    known = {name: tasks.TASKS[name](options) for name in options.tasks}
    results = []
    for name, task in known.items():
        keras.backend.clear_session()
        epochs = options.epochs or task.epochs
        # Deep ones need as many to leave their first plateau.
        least = DEEP if name.startswith("mnist") else 1
        steps = 30 if options.smoke else max(epochs * task.steps // SHARE, least)
        searches = [
            Run(RATES, algorithm, tasks.settings(name, task, steps=steps), 0)
            for algorithm in options.algorithms or RULES
        ]
        found = harness.train_all(
            searches, lambda run, task=task: search(run, task), options.out, task.label
        )
        runs = [
            Run(
                EXPERIMENT,
                result["algorithm"],
                tasks.settings(
                    name, task, rate=result["history"]["best"][0], epochs=epochs
                ),
                seed,
            )
            for seed in range(options.seeds or (1 if options.smoke else SEEDS))
            for result in found
        ]
        results += harness.train_all(
            runs,
            lambda run, task=task: task.train(run, options.out),
            options.out,
            task.label,
        )
    plot(results, known, options.out / f"{EXPERIMENT}.png")
    sample = any(task.kind == "sample" for task in known.values())
    title = "SAMPLES: " * sample + "SGDNG: unit, adaptive and rms"
    parts = [
        results_table(results, known),
        "The last epoch's, or the lowest of all epochs where it says so; the best mean "
        "of a model is in bold. " + report.what_was_run(results),
    ]
    report.section(options.out, EXPERIMENT, title, parts)
    return results


if __name__ == "__main__":
    main()
