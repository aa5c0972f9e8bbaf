"""The theorem of the appendix: AdaGradBNG's average regret against its bound.

The paper proves, for AdaGrad with block-normalized gradients on a convex problem, a
bound that falls with 1 / sqrt(T), and remarks that it can be smaller with two blocks
than with one, where a small block has most of the gradient. Here the problem is to tell
odd digits from even ones by logistic regression on features of two scales, a block
each: the ink in the four quadrants (0 to 196), and the 784 pixels (0 to 1).

    pip install -e ".[examples]"
    python examples/convex_bound.py    # T = 10,000, five rates, B = 2 and B = 1

Measured on all of MNIST, 2 cores (RESULTS.md has all): the regret is at most 7 % of the
bound at every T. At its best rate the bound is 3.3 with B = 2 and 5.6 with B = 1. A run
takes half a minute to a minute.
"""

from __future__ import annotations

from typing import Any

import data
import harness
import keras
import numpy as np
import report
from harness import Result, Run
from keras import ops
from report import Claim

EXPERIMENT = "convex_bound"
ALGORITHM = "AdaGradBNG"
BLOCKS = ("layer", "model")  # B = 2 and B = 1
RATES = (0.1, 0.03, 0.01, 0.003, 0.001)
SIZES = (4, 784)
BATCH = 30
RIDGE = 0.01
DELTA = 1e-3
EPOCHS = {"full": 5, "sample": 76}  # T = 10,000, a little more with the sample
NAMES = {"layer": "B = 2", "model": "B = 1"}


def features(pixels: np.ndarray) -> list[Any]:
    """The ink in each quadrant, and the pixels."""
    quadrants = pixels.reshape(-1, 2, 14, 2, 14).sum(axis=(2, 4)).reshape(-1, 4)
    return [tensor(part) for part in (quadrants, pixels)]


def tensor(array: np.ndarray) -> Any:
    return ops.convert_to_tensor(array, "float64")


def objective(blocks: list[Any], labels: Any, weights: list[Any]) -> Any:
    """F(x, ξ) of the theorem, convex in the weights: cross entropy + ridge."""
    z = logits(blocks, weights)
    losses = ops.relu(z) - z * labels + ops.log1p(ops.exp(-ops.abs(z)))
    penalty = sum(ops.sum(ops.square(w)) for w in weights)
    # Not by `mean`, which on JAX and torch is in float32 whatever it gets.
    return ops.sum(losses) / len(labels) + RIDGE / 2 * penalty


def logits(blocks: list[Any], weights: list[Any]) -> Any:
    # Not by `matmul`, which on torch is in float32 whatever it gets.
    return sum(ops.einsum("ij,j->i", x, w) for x, w in zip(blocks, weights))


def gradients(blocks: list[Any], labels: Any, weights: list[Any]) -> list[Any]:
    """Of the objective, on every backend."""
    error = (ops.sigmoid(logits(blocks, weights)) - labels) / len(labels)
    sums = [ops.einsum("i,ij->j", error, x) for x in blocks]
    return [g + RIDGE * w for g, w in zip(sums, weights)]


def minimum(blocks: list[Any], labels: Any) -> list[np.ndarray]:
    """x*: where the objective on all examples is least, by Newton's method."""
    x = np.concatenate([ops.convert_to_numpy(part) for part in blocks], axis=1)
    y = ops.convert_to_numpy(labels)
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-(x @ w)))
        gradient = x.T @ (p - y) / len(y) + RIDGE * w
        hessian = (x * (p * (1 - p))[:, None]).T @ x / len(y) + RIDGE * np.eye(len(w))
        w -= np.linalg.solve(hessian, gradient)
        if np.abs(gradient).max() < 1e-10:
            return np.split(w, [blocks[0].shape[1]])
    raise RuntimeError(f"No minimum after 50 steps: {np.abs(gradient).max():.1e} left.")


def build_weights() -> list[keras.Variable]:
    """x_1 = 0, and for each part a layer, hence a block, of its own."""
    layers = []
    for name, size in zip(("quadrants", "pixels"), SIZES):
        layer = keras.layers.Layer(name=name)
        layer.add_weight(shape=(size,), initializer="zeros", dtype="float64", name="w")
        layers.append(layer)
    return [layer.weights[0] for layer in layers]


def train(
    run: Run, blocks: list[Any], labels: Any, minimum: list[np.ndarray]
) -> dict[str, list[float]]:
    """Steps through the data; the theorem's numbers at T, for about 300 of all T."""
    weights = build_weights()
    optimizer = harness.optimizer(
        ALGORITHM, run.settings["rate"], delta=DELTA, blocks=run.settings["blocks"]
    )
    optimizer.build(weights)
    squares = [v for v in optimizer.variables if "accumulator" in v.path]
    best = [tensor(w) for w in minimum]
    mean = [keras.Variable(np.zeros_like(w), dtype="float64") for w in minimum]

    def step(x: Any, y: Any, t: Any) -> Any:
        current = [ops.copy(w.value) for w in weights]
        for average, w in zip(mean, current):
            average.assign(average.value + (w - average.value) / t)
        value, gradient = objective(x, y, current), gradients(x, y, current)
        optimizer.apply(gradient, weights)
        s = [ops.sqrt(v.value) for v in squares]
        away = [(w - b) for w, b in zip(current, best)]
        return ops.stack(
            [
                value - objective(x, y, best),
                ops.max(ops.stack([ops.max(ops.abs(a)) for a in away])),
                sum(ops.sum(ops.square(a) * (DELTA + r)) for a, r in zip(away, s)),
                *[ops.sqrt(ops.sum(ops.square(g))) for g in gradient],
                *[ops.sum(r) for r in s],
            ]
        )

    import tensorflow as tf  # the order of the examples

    one_step = compiled(step)
    arrays = [ops.convert_to_numpy(part) for part in (*blocks, labels)]
    batches = (
        tf.data.Dataset.from_tensor_slices(((*arrays[:-1],), arrays[-1]))
        .shuffle(len(labels), seed=run.seed)
        .batch(BATCH, drop_remainder=True)
        .repeat(run.settings["epochs"])
    )
    steps = len(labels) // BATCH * run.settings["epochs"]
    shown = np.unique(np.geomspace(1, steps, 300).round().astype(int))
    progress = keras.utils.Progbar(steps, verbose=harness.verbosity())
    rows, gaps = [], []
    least = objective(blocks, labels, best)
    for t, (inputs, targets) in enumerate(batches.as_numpy_iterator(), 1):
        batch = [tensor(part) for part in inputs], tensor(targets)
        rows.append(ops.convert_to_numpy(one_step(*batch, tensor(t))))
        if t in shown:
            averages = [average.value for average in mean]
            gaps.append(float(objective(blocks, labels, averages) - least))
        if t % 100 == 0 or t == steps:
            progress.update(t)
    numbers = theorem(np.array(rows), run.settings["rate"], run.settings["blocks"])
    share = numbers["regret"] / numbers["bound"]
    kept = {name: values[shown - 1].tolist() for name, values in numbers.items()}
    return {
        "T": shown.tolist(),
        **kept,
        "gap": gaps,
        "largest_share_of_bound_at_any_T": [float(share.max())],
    }


def compiled(step: Any) -> Any:
    """A graph, where that is all it takes; elsewhere it runs op by op."""
    if keras.backend.backend() != "tensorflow":
        return step
    import tensorflow as tf

    return tf.function(step)


def use_float64() -> None:
    """JAX has it only where it is told so, before the first number."""
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


def theorem(rows: np.ndarray, rate: float, blocks: str) -> dict[str, np.ndarray]:
    """Both right-hand sides at every T, with M_i and D as measured up to T."""
    regrets, distance, first = rows[:, 0], rows[:, 1], rows[0, 2]
    norms, s, sizes = rows[:, 3:5], rows[:, 5:7], np.array(SIZES)
    if blocks == "model":
        norms = np.sqrt(np.sum(norms**2, axis=1, keepdims=True))
        s, sizes = s.sum(1, keepdims=True), sizes.sum(keepdims=True)
    t = np.arange(1, len(rows) + 1)
    m = np.maximum.accumulate(norms)
    d = np.maximum.accumulate(distance)
    common = first / (2 * rate * t)
    common = common + d**2 * np.sqrt(norms.shape[1] * sizes.sum()) / (2 * rate * t**0.5)
    return {
        "regret": np.cumsum(regrets) / t,
        "bound": common + rate * np.sum(m**2 * s, axis=1) / t,
        "bound_by_size": common + rate * (m**2 @ np.sqrt(sizes)) / np.sqrt(t),
        "D": d,
        **{f"M_{i + 1}": m[:, i] for i in range(m.shape[1])},
    }


def claims(results: list[Result]) -> list[Claim]:
    two, one = (
        {r["settings"]["rate"]: r for r in results if r["settings"]["blocks"] == blocks}
        for blocks in BLOCKS
    )
    share = max(r["history"]["largest_share_of_bound_at_any_T"][0] for r in results)
    best, regrets = (
        [min(final(r, name) for r in of.values()) for of in (two, one)]
        for name in ("bound_by_size", "regret")
    )
    m = [final(two[max(two)], f"M_{i}") for i in (1, 2)]
    return [
        Claim(
            "the average regret is below the bound at every T",
            report.certain(share < 1),
            f"at most {share:.2%} of it, {len(results)} runs, every T",
        ),
        Claim(
            "the bound with B = 2 can be the smaller one",
            report.certain(best[0] < best[1]),
            f"at its best rate {best[0]:.3g} with B = 2, {best[1]:.3g} with B = 1; "
            f"M_1 = {m[0]:.3g}, M_2 = {m[1]:.3g}, d_1 = 4, d_2 = 784. "
            "The regret itself is another matter: at best "
            f"{regrets[0]:.3g} with B = 2, {regrets[1]:.3g} with B = 1",
        ),
    ]


def final(result: Result, name: str) -> float:
    return result["history"][name][-1]


def rates_table(results: list[Result]) -> str:
    return report.table(
        [
            "blocks",
            "rate",
            "average regret",
            "f(mean x) - f(x*)",
            "bound",
            "bound by size",
        ],
        [
            [
                NAMES[r["settings"]["blocks"]],
                f"{r['settings']['rate']:g}",
                *(
                    f"{final(r, k):.4g}"
                    for k in ("regret", "gap", "bound", "bound_by_size")
                ),
            ]
            for r in results
        ],
    )


def draw(results: list[Result], path: Any, title: str) -> None:
    """Regret and bound against T at each one's best rate; both against the rate."""
    plt = report.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    lines = {
        "bound_by_size": ("bound by block sizes", "#b3200e", "-"),
        "bound": ("bound with measured sums", "#f3a48b", "-"),
        "regret": ("average regret", "#0b4f9c", "-"),
        "gap": ("f(mean x) - f(x*)", "#7fb2e5", "--"),
    }
    for ax, blocks in zip(axes, BLOCKS):
        mine = [r for r in results if r["settings"]["blocks"] == blocks]
        best = min(mine, key=lambda r: final(r, "bound_by_size"))
        for name, (label, colour, line) in lines.items():
            history = best["history"]
            ax.loglog(history["T"], history[name], line, color=colour, label=label)
        ax.set_title(f"{NAMES[blocks]}, rate {best['settings']['rate']:g}")
        ax.set_xlabel("T")
        for name, marker in (("bound_by_size", "o"), ("regret", "s")):
            label, colour, _ = lines[name]
            axes[2].loglog(
                [r["settings"]["rate"] for r in mine],
                [final(r, name) for r in mine],
                marker=marker,
                color=colour,
                linestyle="-" if blocks == "layer" else ":",
                label=f"{label}, {NAMES[blocks]}",
            )
    low = min(ax.get_ylim()[0] for ax in axes[:2])
    high = max(ax.get_ylim()[1] for ax in axes[:2])
    for ax in axes[:2]:
        ax.set_ylim(low, high)
    axes[0].legend(fontsize="small")
    axes[2].legend(fontsize="small")
    axes[2].set_title("at the last T")
    axes[2].set_xlabel("rate")
    for ax in axes:
        ax.grid(True, color="#e6e6e6", linewidth=0.6)
    figure.suptitle(title, fontsize="medium")
    report.save(figure, path)


def main(arguments: Any = None) -> list[Result]:
    options = harness.parse(harness.parser(__doc__, [ALGORITHM]), arguments)
    use_float64()
    digits = data.mnist(options.data, options.data_dir)
    runs = [
        Run(
            EXPERIMENT,
            ALGORITHM,
            {
                "blocks": blocks,
                "rate": rate,
                "epochs": options.epochs or EPOCHS[digits.kind],
                "data": digits.kind,
            },
            seed,
        )
        for seed in range(options.seeds or 1)
        for blocks in BLOCKS
        for rate in (RATES[:2] if options.smoke else RATES)
    ]
    blocks = features(digits.train[0])
    labels = tensor(digits.train[1] % 2)
    if not all(harness.results(runs, options.out)):
        print("Looking for the minimum x*.", flush=True)
        best = minimum(blocks, labels)
    results = harness.train_all(
        runs,
        lambda run: train(run, blocks, labels, best),
        options.out,
        digits.label,
    )
    steps = results[0]["history"]["T"][-1]
    title = f"AdaGradBNG, logistic regression, batch {BATCH}, T up to {steps:,}"
    first = [result for result in results if result["seed"] == 0]
    draw(first, options.out / f"{EXPERIMENT}.png", f"{title}; {digits.label}")
    parts = [
        rates_table(results),
        f"{title}. {report.what_was_run(results)}",
        report.claims_table(claims(first)),
    ]
    report.section(options.out, EXPERIMENT, "Regret and bound (appendix)", parts)
    return results


if __name__ == "__main__":
    main()
