"""Where does it train? Maps of final loss over depth and learning rate.

Not in the paper. Is normalization no more than Adam's epsilon, clipping or a warm-up?
What do Lion, Lamb, Adafactor and Muon do? Does it help a Transformer, and a recurrent
network? Each optimizer trains each depth at each of its rates.

- `mlp`: sigmoid MLPs on MNIST, 4 to 48 layers, 14 optimizers, 5 rates, 1,200 steps.
- `post-ln`: Transformers with a LayerNormalization after each branch, on characters of
  Penn Treebank; 3 to 24 blocks, 7 optimizers with and without warm-up, 5 rates, 300
  steps. At 12 blocks also AdamNG with other blocks: each variable, the whole model, and
  an attention's four matrices as one.
- `pre-ln`: the same with a LayerNormalization before each branch; 12 blocks only.
- `adding`: an LSTM that adds two marked numbers, which it saw somewhere in the last 50
  to 400 steps; 6 optimizers, 5 rates, 1,000 steps.

All commands can be stopped and given again. On two cores, a process each:

    pip install -e ".[examples]"
    for stage in train seeds; do
        for i in 1 2; do
            taskset -c $((i - 1)) python examples/trainability.py --stages $stage \\
                --part $i/2 --out examples/results &
        done
        wait
    done
    # Steps are timed with nothing else beside.
    python examples/trainability.py --stages time report --out examples/results

    python examples/trainability.py                             # all of it in one
    python examples/trainability.py --tasks mlp --depths 64 96  # a deeper map
    python examples/trainability.py --reach 3                   # a wider one
    python examples/trainability.py --smoke                     # three minutes

Not run in full yet. By the times of single steps, the map takes 4 to 5 hours of one
core, and the seeds 40 minutes. Finished runs are kept in `--out`.

Decided before the first run:

- *Rates.* An optimizer's own default, as its signature has it, times 10 ** (k / 2) for
  k from -2 to 2. For `block_normalized(Lion)` it is Lion's. So all have the same number
  of cells. Where the best is at an edge, no rate is added; the table says so.
- *Trains.* A cell trains if its held-out loss at the end is at least half of the way
  from guessing to the best that any of the compared optimizers reached at that depth
  with seed 0. Guessing knows how frequent each answer is, and nothing else. What is not
  a number never trains. Where even the best is not a tenth below guessing, nobody does.
- *Settings.* Keras's defaults, or ours, but for what the name says. SGD has momentum
  0.9. Clipped is `global_clipnorm=1`, 0.98 is `beta_2`, adaptive is `Adaptive(0.02)`.
  A warm-up is a straight line over the first third of the steps, and else the rate is
  constant. In `mlp` only AdamW has a warm-up.
- *Muon* gets all hidden matrices, also the MLP's first and both of the LSTM. Its own
  Adam gets the output layer and the table of positions, by `exclude_layers`, and what
  Keras always gives it: embeddings, and all that is no matrix. So does
  `block_normalized(Muon)`. Their weight decay of 0.004 is Keras's default, as AdamW's.
- *Start and batches.* The same for all optimizers and rates.
- *Equal time.* The stage `time` measures steps in turns with Adam's, at one depth; the
  median of the ratios counts. Where a step costs 2 of Adam's, the loss at half of the
  steps counts, from a curve of 10 points. Who is faster than Adam gets no more steps.
  Neither rate nor warm-up is fitted to the shorter training.
- *Seeds.* One. At the depth of the text (18 layers, 12 blocks, 200 steps) the rate that
  was best with seed 0 has three.

Left out, for time, and for all alike: k of -3 and 3, which would make it 7 rates;
pre-LN at other depths. Also left out: the other blocks with warm-up; AdamW of `mlp`
without one; all but 2,000 of MNIST's test digits; longer trainings, and decays of the
rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import harness
import numpy as np
import report
from deep_models import BLOCKS, RECIPES, TASKS, Bench, Task, in_turns
from harness import Result, Run

EXPERIMENT = "trainability"
TIMES = f"{EXPERIMENT}_time"
STAGES = ("train", "seeds", "time", "report")
POINTS = 10  # of a curve
SEEDS = 3
FLOOR = 0.1  # the best is at least so far below guessing, or nobody trains
REACH = 2  # rates on either side of the default
ROUNDS, SHORT = 21, 100  # timed pieces of training, each 1/100 of a training
SMOKE_TASKS, SMOKE_DEPTHS = ("mlp", "post-ln"), (2, 3)

_TRANSFORMER = ("Adam", "AdamW_98_clip", "Lion", "Muon", "AdamNG", "AdamNG_98")
_TRANSFORMER += ("LionNG",)
COMPARED = {
    "mlp": (
        *("SGDM", "Adam", "Adam_1e-20", "AdamW_clip"),
        *("Lion", "Lamb", "Adafactor", "Muon"),
        *("SGDMNG", "SGDMNG_adap", "AdamNG", "AdaGradNG", "LionNG", "MuonNG"),
    ),
    "post-ln": _TRANSFORMER,
    "pre-ln": _TRANSFORMER,
    "adding": ("Adam", "Adam_clip", "SGDM_clip", "Muon", "AdamNG", "SGDMNG"),
}
ABLATION = tuple(f"AdamNG_{name}" for name in BLOCKS)  # of `post-ln`, at one depth

Cells = dict[tuple[int, float], Result]  # by depth and rate
Row = tuple[str, bool]  # an optimizer, and whether it has a warm-up


def warmups(name: str, algorithm: str) -> tuple[bool, ...]:
    if name in ("post-ln", "pre-ln") and algorithm not in ABLATION:
        return (False, True)
    return (algorithm == "AdamW_clip",)


def quoted(task: Task, depths: Iterable[int]) -> int:
    """The depth of the text; if it is not there, the deepest."""
    return task.quoted if task.quoted in depths else max(depths)


# What was found.


def final(result: Result) -> float:
    """The held-out loss at the end; what is not a number is worse than any."""
    loss = result["history"]["val_loss"][-1]
    return float(loss) if np.isfinite(loss) else math.inf


def bar(guessing: float, losses: Iterable[float]) -> float:
    """What a final loss must not exceed for its cell to train: see the docstring."""
    best = min(losses)
    return (guessing + best) / 2 if best <= (1 - FLOOR) * guessing else -math.inf


def bars(results: list[Result]) -> dict[int, float]:
    """The bar of each depth, from what was compared."""
    losses: dict[int, list[float]] = {}
    for result in results:
        if result["seed"] == 0 and result["algorithm"] not in ABLATION:
            losses.setdefault(result["settings"]["depth"], []).append(final(result))
    return {
        depth: bar(results[0]["history"]["guessing"][0], losses[depth])
        for depth in sorted(losses)
    }


def at_equal_time(losses: list[float], relative: float, guessing: float) -> float:
    """The loss when Adam is done, whose steps are so many times shorter."""
    steps = np.linspace(0, 1, len(losses) + 1)
    return float(np.interp(min(1, 1 / relative), steps, [guessing, *losses]))


def by_row(results: list[Result]) -> dict[Row, Cells]:
    """The cells with seed 0, in the order of `RECIPES`."""
    found: dict[Row, Cells] = {}
    for result in results:
        settings = result["settings"]
        if result["seed"] == 0:
            cells = found.setdefault((result["algorithm"], settings["warmup"]), {})
            cells[settings["depth"], settings["rate"]] = result
    order = [*RECIPES]
    return {row: found[row] for row in sorted(found, key=lambda r: order.index(r[0]))}


def best_rate(cells: Cells, depth: int) -> float | None:
    """Of one depth; None, if there is no finite loss."""
    losses = {rate: final(found) for (d, rate), found in cells.items() if d == depth}
    best = min(losses, key=losses.__getitem__, default=None)
    return None if best is None or losses[best] == math.inf else best


def trained_cells(cells: Cells, limits: dict[int, float]) -> list[tuple[int, float]]:
    """Those that train, given the bar of each depth."""
    return [cell for cell, found in cells.items() if final(found) <= limits[cell[0]]]


def relative_times(timed: list[Result]) -> dict[str, float]:
    """A step's time in Adam's: the median of pairs that were measured in turns."""
    found = {"Adam": 1.0}
    for result in timed:
        own, adam = (result["history"][key] for key in ("seconds", "adam_seconds"))
        found[result["algorithm"]] = float(np.median(np.divide(own, adam)))
    return found


def summary(
    row: Row, cells: Cells, results: list[Result], depth: int, relative: float | None
) -> dict[str, Any]:
    """A line of the table; `relative` is a step's time in Adam's, if it is known."""
    limits = bars(results)
    trained = [depth for depth, _ in trained_cells(cells, limits)]
    here = {rate: found for (d, rate), found in cells.items() if d == depth}
    rate = best_rate(cells, depth)
    seeds = [
        found["history"]
        for found in report.matching(
            results, row[0], depth=depth, rate=rate, warmup=row[1]
        )
    ]
    guessing = results[0]["history"]["guessing"][0]
    equal = [
        at_equal_time(found["history"]["val_loss"], relative, guessing)
        for found in here.values()
        if relative is not None
    ]
    return {
        "row": row,
        "trained": len(trained),
        "cells": len(cells),
        "deepest": max(trained, default=None),
        "rate": rate,
        "at edge": rate is not None and rate in (min(here), max(here)),
        "losses": [history["val_loss"][-1] for history in seeds],
        "accuracies": [h["val_accuracy"][-1] for h in seeds if "val_accuracy" in h],
        "relative": relative,
        "equal": min((x for x in equal if np.isfinite(x)), default=None),
    }


# What is written.


def title_of(row: Row) -> str:
    algorithm, warmup = row
    return RECIPES[algorithm].title + ", warm-up" * warmup


def map_table(lines: list[dict[str, Any]], unit: str, depth: int, digits: int) -> str:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def mean(values: list[float], digits: int) -> str:
        return report.plus_minus(values, digits) if values else ""

    def cells(line: dict[str, Any]) -> dict[str, str]:
        return {
            "optimizer": title_of(line["row"]),
            "cells that train": f"{line['trained']} of {line['cells']}",
            f"deepest that trains, {unit}": str(line["deepest"] or "none"),
            f"best loss at {depth}": mean(line["losses"], digits),
            "accuracy": mean(line["accuracies"], 3),
            "rate": number(line["rate"], "g") + " (edge)" * line["at edge"],
            "time a step, in Adam's": number(line["relative"], ".2f"),
            "best loss in Adam's time": number(line["equal"], f".{digits}f"),
        }

    rows = [cells(line) for line in lines]
    header = [name for name in rows[0] if any(row[name] for row in rows)]
    return report.table(header, [[row[name] for name in header] for row in rows])


def depth_table(results: list[Result], unit: str, digits: int) -> str:
    """What was the best at each depth, and what it takes there to train."""
    rows = []
    for depth, limit in bars(results).items():
        cells = [r for r in results if r["settings"]["depth"] == depth]
        cells = [r for r in cells if r["seed"] == 0 and r["algorithm"] not in ABLATION]
        best = min(cells, key=final)
        who = title_of((best["algorithm"], best["settings"]["warmup"]))
        trains = "nobody" if limit == -math.inf else f"at most {limit:.{digits}f}"
        rows.append([str(depth), f"{final(best):.{digits}f}", who, trains])
    return report.table([unit, "best loss", "by", "who trains has"], rows)


def ablation_table(rows: dict[Row, Cells], depth: int, limit: float) -> str:
    """Losses of AdamNG by its blocks; those that train are in bold."""
    found = {"layer": rows.get(("AdamNG", False), {})}
    found |= {name: rows.get((f"AdamNG_{name}", False), {}) for name in BLOCKS}
    rates = sorted({r for cells in found.values() for d, r in cells if d == depth})

    def cell(cells: Cells, rate: float) -> str:
        if (depth, rate) not in cells:
            return ""
        loss = final(cells[depth, rate])
        return f"**{loss:.3f}**" if loss <= limit else f"{loss:.3f}"

    return report.table(
        ["blocks", *(f"rate {rate:g}" for rate in rates)],
        [[name, *(cell(cells, r) for r in rates)] for name, cells in found.items()],
    )


def panel(
    ax: Any, row: Row, cells: Cells, limits: dict[int, float], scale: Any, colours: Any
) -> None:
    """The map of one optimizer."""
    depths, half = list(limits), 10**0.25
    for (depth, rate), found in cells.items():
        y, loss = depths.index(depth), np.ma.masked_invalid([[final(found)]])
        edges = [rate / half, rate * half], [y - 0.5, y + 0.5]
        ax.pcolormesh(*edges, loss, cmap=colours, norm=scale)
    trained = trained_cells(cells, limits)
    for depth, rate in trained:
        y = depths.index(depth)
        ax.plot(rate, y, "o", ms=3.2, color="white", mec="black", mew=0.6)
    ax.set_title(
        f"{title_of(row)}\n{len(trained)} of {len(cells)} train",
        fontsize="small",
        weight="bold" if RECIPES[row[0]].ours else None,
    )
    rates = [rate for _, rate in cells]
    ax.set_xscale("log")
    ax.set_xlim(min(rates) / half, max(rates) * half)
    ax.minorticks_off()
    ax.set_ylim(-0.5, len(depths) - 0.5)
    ax.set_yticks(range(len(depths)), depths)
    ax.tick_params(labelsize="small")


def picture(
    rows: dict[Row, Cells], results: list[Result], task: Task, path: Any
) -> None:
    """A map an optimizer: its loss, from the best of all to guessing; NaN is grey."""
    plt = report.pyplot()
    columns, with_warmup = min(4, len(rows)), sum(warmup for _, warmup in rows)
    if 2 * with_warmup == len(rows):  # a line of maps without, and one with
        rows = dict(sorted(rows.items(), key=lambda item: item[0][1]))
        columns = with_warmup
    lines = -(-len(rows) // columns)
    limits = bars(results)
    guessing = results[0]["history"]["guessing"][0]
    losses = [final(result) for cells in rows.values() for result in cells.values()]
    colours = plt.get_cmap("YlGnBu_r").with_extremes(bad="#8c8c8c")
    scale = plt.Normalize(min(*losses, 0.99 * guessing), guessing)
    size = 2.3 * columns + 1.2, (0.22 * len(limits) + 1.0) * lines + 0.8
    figure, axes = plt.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained", sharey=True
    )
    for ax in axes.flat[len(rows) :]:
        ax.set_visible(False)
    for ax, (row, cells) in zip(axes.flat, rows.items()):
        panel(ax, row, cells, limits, scale, colours)
    for ax in axes[:, 0]:
        ax.set_ylabel(task.unit)
    figure.supxlabel("learning rate", fontsize="medium")
    figure.colorbar(
        plt.cm.ScalarMappable(scale, colours),
        ax=axes,
        extend="max",
        extendfrac=0.03,
        aspect=12 * lines,
        fraction=0.05,
        label="held-out loss",
    )
    figure.suptitle(
        f"{task.title}, {task.steps:,} steps; guessing has {guessing:.2f}. "
        "A dot: it trains. Grey: NaN. Bold: normalized",
        fontsize="medium",
    )
    report.save(figure, path)


def write_report(name: str, task: Task, results: list[Result], options: Any) -> None:
    section = EXPERIMENT if name == "mlp" else f"{EXPERIMENT}_{name}"
    limits, rows = bars(results), by_row(results)
    depth = quoted(task, limits)
    compared = {row: cells for row, cells in rows.items() if row[0] not in ABLATION}
    picture(compared, results, task, options.out / f"{section}.png")
    timing = task_of(name, task) | {"depth": depth}
    timed = [r for r in harness.read_all(options.out, TIMES) if timing == r["settings"]]
    relative = relative_times(timed)
    lines = [
        summary(row, cells, results, depth, relative.get(row[0]))
        for row, cells in compared.items()
    ]
    guessing = results[0]["history"]["guessing"][0]
    digits = 3 if guessing > 1 else 4
    parts = [
        map_table(lines, task.unit, depth, digits),
        "A cell is a depth and a rate. It trains if its held-out loss is at least half "
        f"of the way from guessing ({guessing:.{digits}f}) to the best at that depth. "
        f"Best loss: at {depth} {task.unit}, over the rates of seed 0; where that rate "
        "has more seeds, their mean and standard deviation. In Adam's time: the best "
        "loss after as many steps as Adam's whole training takes, seed 0. "
        + found_alike(lines),
        depth_table(results, task.unit, digits),
        report.what_was_run(results),
    ]
    if timed:
        parts[-1] += f" Times, at {depth} {task.unit}: {report.what_was_run(timed)}"
    if len(rows) > len(compared):
        blocks = ablation_table(rows, depth, limits[depth])
        parts += [f"AdamNG at {depth} {task.unit}, no warm-up, by its blocks:", blocks]
    heading = "SAMPLE: " * (task.kind == "sample") + f"Where it trains: {task.title}"
    report.section(options.out, section, heading, parts)


def found_alike(lines: list[dict[str, Any]]) -> str:
    """That all have the same number of cells, or that some are missing."""
    numbers = {line["cells"] for line in lines}
    if len(numbers) > 1:
        return "NOT COMPLETE: some have cells that others do not have yet."
    return f"All have the same number of cells, {numbers.pop()}."


# What is run.


def task_of(name: str, task: Task) -> dict[str, Any]:
    """The settings that all runs of a task share."""
    return {"task": name, "steps": task.steps, "data": task.kind}


class Study:
    """The runs that are asked for; one bench, which serves all that have its trace."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tasks = {name: TASKS[name](options) for name in options.tasks}
        if options.smoke:
            # So few steps take less time than XLA's compilation.
            small = {"depths": SMOKE_DEPTHS, "steps": 2 * POINTS, "xla": False}
            self.tasks = {
                name: dataclasses.replace(task, **small)
                for name, task in self.tasks.items()
            }
        self.bench: Any = None
        self.traced: Any = None

    def depths(self, name: str) -> tuple[int, ...]:
        return tuple(self.options.depths or self.tasks[name].depths)

    def groups(self, name: str) -> list[tuple[str, int]]:
        """Optimizers and depths of this process; each has one trace."""
        part, parts = self.options.part
        algorithms = [*COMPARED[name], *ABLATION * (name == "post-ln")]
        asked = self.options.algorithms or algorithms
        depths = self.depths(name)
        return [
            (algorithm, depth)
            for i, depth in enumerate(depths)
            for j, algorithm in enumerate(algorithms)
            if (i + j) % parts == part - 1 and algorithm in asked
            if algorithm not in ABLATION or depth == quoted(self.tasks[name], depths)
        ]

    def run(self, name: str, row: Row, depth: int, rate: float, seed: int = 0) -> Run:
        settings = {"depth": depth, "rate": rate, "warmup": row[1]}
        return Run(EXPERIMENT, row[0], task_of(name, self.tasks[name]) | settings, seed)

    def map(self, name: str) -> list[Run]:
        return [
            self.run(name, (algorithm, warmup), depth, rate)
            for algorithm, depth in self.groups(name)
            for warmup in warmups(name, algorithm)
            for rate in RECIPES[algorithm].rates(self.options.reach)
        ]

    def results(self, name: str) -> list[Result]:
        """All that there is of a task, whichever command made it."""
        alike = task_of(name, self.tasks[name]).items()
        found = harness.read_all(self.options.out, EXPERIMENT)
        return [result for result in found if alike <= result["settings"].items()]

    def seeds(self, name: str) -> list[Run]:
        """More seeds of each optimizer's best rate, at the depth of the text."""
        task, rows = self.tasks[name], by_row(self.results(name))
        runs = []
        for algorithm, depth in self.groups(name):
            if depth != quoted(task, self.depths(name)):
                continue
            for warmup in warmups(name, algorithm):
                row = algorithm, warmup
                cells = rows.get(row, {})
                rates = RECIPES[algorithm].rates(self.options.reach)
                rate = best_rate(cells, depth)
                if rate is None or not all((depth, r) in cells for r in rates):
                    print(f"No best rate of {title_of(row)}, {depth} {task.unit}, yet.")
                    continue
                more = range(
                    1, self.options.seeds or (2 if self.options.smoke else SEEDS)
                )
                runs += [self.run(name, row, depth, rate, seed) for seed in more]
        return runs

    def timings(self, name: str) -> list[Run]:
        """All optimizers beside Adam, at the depth of the text."""
        depth = quoted(self.tasks[name], self.depths(name))
        settings = task_of(name, self.tasks[name]) | {"depth": depth}
        asked = self.options.algorithms or COMPARED[name]
        return [
            Run(TIMES, algorithm, settings, 0)
            for algorithm in COMPARED[name]
            if algorithm in asked and algorithm != "Adam"
        ]

    def train(self, run: Run) -> dict[str, list[float]]:
        settings = run.settings
        task, depth = self.tasks[settings["task"]], settings["depth"]
        if self.traced != (key := (settings["task"], run.algorithm, depth)):
            self.bench = None  # before there is another one
            self.bench = Bench(task, RECIPES[run.algorithm], depth, POINTS)
            self.traced = key
        warmup = task.steps // 3 if settings["warmup"] else 0
        self.bench.reset(run.seed, settings["rate"], warmup)
        history = self.bench.train(run.seed)
        loss = history["val_loss"][-1]
        print(f"Loss {loss:.3f}; guessing has {task.guessing:.3f}.")
        return history | {"guessing": [task.guessing]}

    def time(self, run: Run) -> dict[str, list[float]]:
        task, depth = self.tasks[run.settings["task"]], run.settings["depth"]
        if self.traced != (key := (run.settings["task"], "time", depth)):
            self.bench = Bench(task, RECIPES["Adam"], depth, SHORT)
            self.traced = key
        own = Bench(task, RECIPES[run.algorithm], depth, SHORT)
        self.bench.reset(0, RECIPES["Adam"].default, 0)
        own.reset(0, RECIPES[run.algorithm].default, 0)
        return in_turns({"seconds": own, "adam_seconds": self.bench}, ROUNDS)

    def stage(self, stage: str) -> list[Result]:
        """Its results, of all tasks."""
        found = []
        for name, task in self.tasks.items():
            if stage == "report":
                results = self.results(name)
                if bars(results):
                    write_report(name, task, results, self.options)
                found += results
                continue
            runs = {"train": self.map, "seeds": self.seeds, "time": self.timings}[stage]
            train = self.time if stage == "time" else self.train
            found += harness.train_all(runs(name), train, self.options.out, task.label)
        return found


def part_of(text: str) -> tuple[int, int]:
    """`part_of("1/2")` is `(1, 2)`."""
    found, of = map(int, text.split("/"))
    if not 1 <= found <= of:
        raise ValueError(text)
    return found, of


def main(arguments: Any = None) -> list[Result]:
    """Returns the results of the last stage."""
    parser = harness.parser(__doc__, list(RECIPES))
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS])
    parser.add_argument(
        "--depths", nargs="+", type=int, help="in place of a task's own"
    )
    parser.add_argument(
        "--reach",
        type=int,
        help="rates on either side of the default one, two a decade; all have as many",
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), help="1/2 and 2/2: two processes share"
    )
    options = harness.parse(parser, arguments)
    if options.epochs and not options.smoke:
        parser.error("--epochs is not for this experiment, which counts steps")
    if min(options.depths or [2]) < 2:
        parser.error(f"--depths must be 2 or more. Received: {options.depths}")
    if options.reach is not None and options.reach < 1:
        parser.error(f"--reach must be 1 or more. Received: {options.reach}")
    options.tasks = options.tasks or (SMOKE_TASKS if options.smoke else [*TASKS])
    options.reach = options.reach or (1 if options.smoke else REACH)
    if options.smoke:
        options.algorithms = options.algorithms or ["Adam", "AdamNG"]
    study = Study(options)
    found: list[Result] = []
    for stage in STAGES:
        if stage in options.stages:
            found = study.stage(stage)
    return found


if __name__ == "__main__":
    main()
