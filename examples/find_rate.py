"""Is `keras_bng.find_learning_rate` any good? Its picks beside whole grids of rates.

Not in the paper. For every task and algorithm there is a grid: each rate trained to the
end and judged as in that task's own experiment, by held-out data. The finder gets the
same rates and a tenth of the steps, and sees training batches only.

    pip install -e ".[examples]"
    python examples/find_rate.py                  # picks, grids, seeds: a night
    python examples/find_rate.py --stages search  # the picks alone: half an hour
    python examples/find_rate.py --stages         # only the report of what is there
    python examples/find_rate.py --smoke          # a minute, to see it work

Where the pick is not the grid's best rate, both are trained with two more seeds. The
pick is as good if the difference of the means is not above two standard errors. At the
grid's best rate, a `BlockMonitor` says how far a step moves each block of weights.
Grids that `--search` of the other experiments left in `--out` are not trained again.

Not run in full yet. Finished runs are kept in `--out`.
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import harness
import mnist_mlp
import numpy as np
import penn_treebank_lstm as penn
import report
import rotten_tomatoes_cnn as rotten
import tasks
from harness import Result, Run

from keras_bng import BlockMonitor, find_learning_rate

SEARCH = "find_rate_search"
GRID = "find_rate_grid"
MOVES = "find_rate_moves"
STAGES = ("search", "grid", "seeds", "moves")
ALGORITHMS = ["SGDM", "SGDMNG", "SGDMNG_adap", "Adam", "AdamNG", "AdaGradNG"]
SHARE = 10  # of the steps of a whole training, the finder gets one
SEEDS = 3

_ADAM = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003)
# Where the task's own experiment has a grid, it is that one.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "mnist": dict.fromkeys(ALGORITHMS, mnist_mlp.GRID)
    | dict.fromkeys(["Adam", "AdamNG"], _ADAM),
    "text": dict.fromkeys(ALGORITHMS, rotten.GRID) | {"SGDMNG_adap": mnist_mlp.GRID},
    "language": {name: penn.GRIDS[report.family(name)[0]] for name in ALGORITHMS},
    "resnet": dict.fromkeys(ALGORITHMS, mnist_mlp.GRID)
    | dict.fromkeys(["Adam", "AdamNG"], _ADAM),
}
PUBLISHED = {"mnist": mnist_mlp.SEARCH, "text": rotten.SEARCH, "language": penn.SEARCH}


def search(run: Run, task: tasks.Task) -> dict[str, list[Any]]:
    """The pick, or None with what the error said."""
    model = task.compiled(tasks.optimizer(run.settings["task"], run.algorithm))
    try:
        found = find_learning_rate(
            model,
            **task.examples(),
            rates=run.settings["rates"],
            steps=run.settings["steps"],
            verbose=2,
        )
    except RuntimeError as error:
        print(error, flush=True)
        return {"best": [None], "error": [str(error)]}
    print(found, flush=True)
    losses = np.where(np.isfinite(found.losses), found.losses, np.nan)
    return {"best": [found.best], "losses": losses.tolist()}


def moves(run: Run, task: tasks.Task) -> dict[str, list[float]]:
    """How far a step moves each block, as a share of its length: the median step."""
    model = task.compiled(tasks.optimizer(run.settings["task"], run.algorithm))
    model.optimizer.learning_rate = run.settings["rate"]
    monitor = BlockMonitor(every=max(1, run.settings["steps"] // 50))
    examples = task.examples()
    steps, batch = run.settings["steps"], examples.get("batch_size")
    if batch:
        examples = {"x": examples["x"][: steps * batch]} | {
            "y": examples["y"][: steps * batch],
            "batch_size": batch,
        }
    else:
        examples = {"x": examples["x"].take(steps)}
    model.fit(**examples, verbose=0, callbacks=[monitor])
    return {"relative_step": np.median(monitor.history["relative_step"], 0).tolist()}


class Study:
    """What was found of the tasks and algorithms that are asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cases = [(t, a) for t in options.tasks for a in options.algorithms]
        self.tasks = {name: tasks.TASKS[name](options) for name in options.tasks}

    def rates(self, name: str, algorithm: str) -> tuple[float, ...]:
        rates = GRIDS[name.partition("-")[0]][algorithm]
        return rates[2:5] if self.options.smoke else rates

    def search_run(self, name: str, algorithm: str) -> Run:
        task = self.tasks[name]
        steps = max(1, task.epochs * task.steps // SHARE)
        if self.options.smoke:
            steps = 25
        rates = list(self.rates(name, algorithm))
        settings = tasks.settings(name, task, steps=steps, rates=rates)
        return Run(SEARCH, algorithm, settings, 0)

    def pick(self, name: str, algorithm: str) -> Any:
        """The result of the finder; None, if it has not been run."""
        (found,) = harness.results([self.search_run(name, algorithm)], self.options.out)
        return found

    def grid_run(self, name: str, algorithm: str, rate: float, seed: int) -> Run:
        task = self.tasks[name]
        epochs = self.options.epochs or task.epochs
        settings = tasks.settings(name, task, rate=rate, epochs=epochs)
        return Run(GRID, algorithm, settings, seed)

    def trained(self, name: str, algorithm: str) -> dict[float, dict[int, Result]]:
        """The results by seed, of each rate: the own search's, and those from here."""
        task, rates = self.tasks[name], self.rates(name, algorithm)
        found: dict[float, dict[int, Result]] = {rate: {} for rate in rates}
        published = PUBLISHED.get(name.partition("-")[0])
        known = harness.read_all(self.options.out, published) if published else []
        alike = tasks.settings(name, task, epochs=self.options.epochs or task.epochs)
        for result in [*known, *harness.read_all(self.options.out, GRID)]:
            own = {"task": name} | result["settings"]
            same = result["algorithm"] == algorithm and own["rate"] in found
            if same and alike.items() <= own.items():
                found[own["rate"]].setdefault(result["seed"], result)
        return found

    def best(self, name: str, algorithm: str) -> float | None:
        """The rate of the whole grid that was judged best; None, if one is missing."""
        trained = self.trained(name, algorithm)
        if not all(0 in seeds for seeds in trained.values()):
            return None
        judged = {rate: self.judged(name, seeds[0]) for rate, seeds in trained.items()}
        return min(judged, key=judged.__getitem__)

    def judged(self, name: str, result: Result) -> float:
        """What is not a number is worse than any."""
        return float(np.nan_to_num(self.tasks[name].judged_by(result), nan=np.inf))

    def train(self, runs: list[tuple[str, Run]]) -> None:
        """Those that are not done, a task after the other."""
        by_task = collections.defaultdict(list)
        for name, run in runs:
            by_task[name].append(run)
        for name, mine in by_task.items():
            task = self.tasks[name]
            kinds = {
                SEARCH: lambda run, task=task: search(run, task),
                GRID: lambda run, task=task: task.train(run, self.options.out),
                MOVES: lambda run, task=task: moves(run, task),
            }
            harness.train_all(
                mine, kinds[mine[0].experiment], self.options.out, task.label
            )

    def grid(self) -> list[tuple[str, Run]]:
        return [
            (name, self.grid_run(name, algorithm, rate, 0))
            for name, algorithm in self.cases
            for rate, seeds in self.trained(name, algorithm).items()
            if 0 not in seeds
        ]

    def seeds(self) -> list[tuple[str, Run]]:
        """Where pick and best differ, both with more seeds."""
        runs = []
        for name, algorithm in self.cases:
            found, best = self.pick(name, algorithm), self.best(name, algorithm)
            if not found or best is None or found["history"]["best"][0] in (None, best):
                continue
            for rate in (found["history"]["best"][0], best):
                done = self.trained(name, algorithm)[rate]
                runs += [
                    (name, self.grid_run(name, algorithm, rate, seed))
                    for seed in range(self.options.seeds or SEEDS)
                    if seed not in done
                ]
        return runs

    def moves_run(self, name: str, algorithm: str) -> Run | None:
        best = self.best(name, algorithm)
        if best is None:
            return None
        search = self.search_run(name, algorithm).settings
        settings = {key: value for key, value in search.items() if key != "rates"}
        return Run(MOVES, algorithm, settings | {"rate": best}, 0)

    def lower(self, name: str, algorithm: str, picked: float | None) -> bool | None:
        """Whether the next lower rate of the grid is better than the pick, seed 0."""
        trained = self.trained(name, algorithm)
        below = [rate for rate in trained if picked is not None and rate < picked]
        if not below:
            return None
        rates = max(below), picked
        a, b = (self.judged(name, trained[rate][0]) for rate in rates)
        return a < b

    def row(self, name: str, algorithm: str) -> dict[str, Any] | None:
        """A case of the table; None, if pick or grid are not done."""
        found, best = self.pick(name, algorithm), self.best(name, algorithm)
        if not found or best is None:
            return None
        trained, picked = self.trained(name, algorithm), found["history"]["best"][0]

        def values(rate: float) -> np.ndarray:
            return np.array([self.judged(name, r) for r in trained[rate].values()])

        steps = found["settings"]["steps"]
        task = self.tasks[name]
        whole = (self.options.epochs or task.epochs) * task.steps
        moved = self.moves_run(name, algorithm)
        (moved,) = harness.results([moved], self.options.out) if moved else (None,)
        return {
            "task": name,
            "algorithm": algorithm,
            "picked": picked,
            "best": best,
            "at picked": None if picked is None else values(picked),
            "at best": values(best),
            "verdict": verdict(picked, best, values),
            "lower": self.lower(name, algorithm, picked),
            "cost": steps / whole,
            "moved": moved["history"]["relative_step"] if moved else None,
        }


def verdict(picked: float | None, best: float, values: Any) -> str:
    """Whether the pick is as good as the grid's best."""
    if picked is None:
        return "no pick"
    if picked == best:
        return "the same"
    ours, theirs = values(picked), values(best)
    if min(len(ours), len(theirs)) < 2:
        return "one seed"
    difference = ours.mean() - theirs.mean()
    noise = np.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    if difference <= 0:
        return "better"
    return "as good" if difference <= 2 * noise else "**worse**"


GOOD = ("the same", "better", "as good")


def table(study: Study, rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        task = study.tasks[row["task"]]
        moved = "" if row["moved"] is None else f"{np.median(row['moved']):.1e}"
        cells.append(
            [
                task.name,
                row["algorithm"],
                "none" if row["picked"] is None else f"{row['picked']:g}",
                f"{row['best']:g}",
                "" if row["at picked"] is None else report.plus_minus(row["at picked"]),
                report.plus_minus(row["at best"]),
                row["verdict"],
                moved,
            ]
        )
    return report.table(
        [
            "task",
            "algorithm",
            "picked",
            "best of the grid",
            "judged, at the picked",
            "judged, at the best",
            "the pick is",
            "relative step at the best",
        ],
        cells,
    )


def plot(study: Study, rows: list[dict[str, Any]], path: Any) -> None:
    """Picked and best rates of each case, on one line; the grid as grey dots."""
    plt = report.pyplot()
    figure, ax = plt.subplots(
        figsize=(8.0, 0.26 * len(rows) + 1.4), layout="constrained"
    )
    for y, row in enumerate(rows):
        rates = study.rates(row["task"], row["algorithm"])
        ax.plot(rates, [y] * len(rates), ".", color="#c8c8c8", zorder=1)
        ax.plot(row["best"], y, "o", ms=9, mfc="none", mew=1.8, color="#0b4f9c")
        if row["picked"] is not None:
            bad = row["verdict"] not in GOOD
            ax.plot(row["picked"], y, "X" if bad else "o", ms=5, color="#b3200e")
    names = [f"{study.tasks[r['task']].name}: {r['algorithm']}" for r in rows]
    ax.set_yticks(range(len(rows)), names, fontsize="small")
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlabel("learning rate")
    ax.grid(True, axis="x", color="#e6e6e6", linewidth=0.6)
    ax.set_title(
        "blue ring: best of the grid; red: the finder's pick (x: a worse one)",
        fontsize="medium",
    )
    report.save(figure, path)


def write_report(study: Study) -> list[dict[str, Any]]:
    rows = [row for case in study.cases if (row := study.row(*case))]
    if not rows:
        print("No task has both a pick and a grid yet.")
        return rows
    out = study.options.out
    plot(study, rows, out / "find_rate.png")
    good = sum(row["verdict"] in GOOD for row in rows)
    lower = [row["lower"] for row in rows if row["lower"] is not None]
    searched = [study.pick(row["task"], row["algorithm"]) for row in rows]
    trained = [
        result
        for row in rows
        for seeds in study.trained(row["task"], row["algorithm"]).values()
        for result in seeds.values()
    ]
    low, high = (100 * edge(row["cost"] for row in rows) for edge in (min, max))
    measures = "; ".join(
        f"{task.name}: {task.measure}, {task.epochs} epochs"
        for name, task in study.tasks.items()
        if name in {row["task"] for row in rows}
    )
    sample = any(task.kind == "sample" for task in study.tasks.values())
    parts = [
        f"The pick is as good as the grid's best in {good} of {len(rows)} cases, for "
        f"{low:.0f} to {high:.0f} % of the grid's steps. The grid's next lower rate is "
        f"better than the pick in {sum(lower)} of {len(lower)}, with seed 0.",
        table(study, rows),
        f"Judged, lower is better: {measures}. Several seeds where pick and best "
        "differ; worse means by more than two standard errors. Relative step: how far "
        "a step at the best rate moves a block, as a share of its length; median of "
        "the steps of a search, then of the blocks. The searches: "
        + report.what_was_run(searched),
        "The grids: " + report.what_was_run(trained),
    ]
    heading = "SAMPLES: " * sample + "The learning rate that `find_learning_rate` picks"
    report.section(out, "find_rate", heading, parts)
    return rows


def main(arguments: Any = None) -> list[dict[str, Any]]:
    parser = harness.parser(__doc__, ALGORITHMS)
    tasks.add_tasks(parser)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=[*STAGES])
    options = harness.parse(parser, arguments)
    options.algorithms = options.algorithms or ALGORITHMS
    if options.smoke:
        options.tasks, options.algorithms = ["mnist-6"], ["SGDMNG"]
        options.seeds = options.seeds or 1
    study = Study(options)
    stages = {
        "search": lambda: [(t, study.search_run(t, a)) for t, a in study.cases],
        "grid": study.grid,
        "seeds": study.seeds,
        "moves": lambda: [
            (t, run) for t, a in study.cases if (run := study.moves_run(t, a))
        ],
    }
    for stage in options.stages:
        study.train(stages[stage]())
    return write_report(study)


if __name__ == "__main__":
    main()
