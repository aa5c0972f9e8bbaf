"""CIFAR-10 and CIFAR-100 with ResNets of 20 to 110 layers (section 4.2).

The paper, 160 epochs, 5 seeds: NG_adap has the lowest test error (ResNet-20 on
CIFAR-10: 7.71 % with SGDMNG_adap, 7.93 % with SGDM; 8.52 % with AdamNG_adap, 9.14 %
with Adam), clipping the highest; SGD with momentum is ahead of Adam; NG is the fastest
in training.

    pip install -e ".[examples]"
    python examples/cifar_resnet.py             # the paper's protocol; take a GPU
    python examples/cifar_resnet.py --depth 20 32 44 56 110 --classes 100
    python examples/cifar_resnet.py --search alpha --depth 56
    python examples/cifar_resnet.py --reduced   # for two cores
    python examples/cifar_resnet.py --smoke     # two minutes, to see it work

`--reduced` is ResNet-20 on the first 20,000 images, 16 epochs with the rate's schedule
scaled to them, 2 seeds, tested on all 10,000: 20 to 40 minutes a run on one core. With
`--seeds 3 --algorithms SGDM SGDMCLIP SGDMNG SGDMNG_adap` it trains a third seed of that
family (not run yet); then without them it reports every seed that is in `--out`.
`--precision mixed_float16` and `--xla` are for GPUs; several GPUs are all used. A run
that is stopped goes on after its last whole epoch.

The paper does not say whether it clips each layer's gradient or the whole one. Here it
is each layer's, so that CLIP and NG see the same norms and differ in what they do with
them only; `--clip-blocks model` is the other reading.

Measured with `--reduced`, ResNet-20 on CIFAR-10, test error, REDUCED protocol
(RESULTS.md has all): SGDM 21.9 %, SGDMCLIP 22.9 %, SGDMNG 23.4 %, SGDMNG_adap 19.6 %;
Adam 24.3 %, AdamCLIP 23.8 %, AdamNG 24.2 %, AdamNG_adap 23.7 %; 16 runs, two at a time,
of half an hour each. NG_adap is the lowest in both families, and SGD is ahead of Adam;
two seeds decide none of it.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import data
import harness
import keras
import numpy as np
import report
import tensorflow as tf
from harness import Result, Run
from report import Claim, last, plus_minus

from keras_bng import Adaptive, Clip

EXPERIMENT = "cifar_resnet"
VERSIONS = ("", "CLIP", "NG", "NG_adap")
ALGORITHMS = [f"{base}{version}" for base in ("SGDM", "Adam") for version in VERSIONS]
BATCH = 128
L2 = 1e-4
RATES = {"SGDM": 0.1, "Adam": 0.001}

# The paper's protocol, what `--reduced` makes of it for two cores, and `--smoke`.
PROTOCOLS = {
    "paper": {"depth": [20], "epochs": 160, "images": 50_000, "seeds": 5},
    "reduced": {"depth": [20], "epochs": 16, "images": 20_000, "seeds": 2},
    "smoke": {"depth": [8], "epochs": 2, "images": 256, "seeds": 1},
}

# The values that the paper tried on 5,000 held-out examples, each with its algorithms.
SEARCH = f"{EXPERIMENT}_search"
SEARCHES = {
    "rate": (["Adam"], (0.0005, 0.001, 0.005, 0.01)),
    "clip": (["SGDMCLIP", "AdamCLIP"], (0.05, 0.1, 0.5, 1.0, 5.0)),
    "alpha": (["SGDMNG_adap", "AdamNG_adap"], (0.01, 0.02, 0.05)),
}
HELD_OUT = 5_000

SPEED = f"{EXPERIMENT}_speed"

# Test error in percent: Tables 1 and 2.
DEPTHS = (20, 32, 44, 56, 110)
PAPER = {
    10: {
        "SGDM": "7.93±0.15 7.15±0.20 7.09±0.21 7.34±0.52 7.07±0.65",
        "SGDMCLIP": "9.03±0.15 8.44±0.14 8.55±0.20 8.30±0.08 8.35±0.25",
        "SGDMNG": "7.82±0.26 7.09±0.13 6.60±0.21 6.59±0.23 6.28±0.22",
        "SGDMNG_adap": "7.71±0.18 6.90±0.11 6.43±0.03 6.19±0.11 5.87±0.10",
        "Adam": "9.14±0.07 8.33±0.17 7.794±0.22 7.33±0.19 6.75±0.30",
        "AdamCLIP": "10.18±0.16 9.18±0.06 8.89±0.14 9.24±0.19 9.96±0.29",
        "AdamNG": "9.42±0.20 8.50±0.17 8.06±0.20 7.69±0.19 7.29±0.08",
        "AdamNG_adap": "8.52±0.16 7.62±0.25 7.28±0.18 7.04±0.27 6.71±0.17",
    },
    100: {
        "SGDM": "32.28±0.16 30.62±0.36 29.96±0.66 29.07±0.41 28.79±0.63",
        "SGDMCLIP": "35.06±0.37 34.49±0.49 33.36±0.36 34.00±0.96 33.38±0.73",
        "SGDMNG": "32.46±0.37 31.16±0.37 30.05±0.29 29.42±0.51 27.49±0.25",
        "SGDMNG_adap": "31.43±0.35 29.56±0.25 28.92±0.28 28.48±0.19 26.72±0.39",
        "Adam": "34.44±0.33 32.94±0.16 31.53±0.13 30.80±0.30 28.20±0.14",
        "AdamCLIP": "38.10±0.48 35.78±0.20 35.41±0.19 35.62±0.39 39.10±0.35",
        "AdamNG": "35.06±0.39 33.78±0.07 32.26±0.29 31.86±0.21 29.87±0.49",
        "AdamNG_adap": "32.98±0.52 31.74±0.07 30.75±0.60 29.92±0.26 28.09±0.46",
    },
}


def build_model(depth: int, classes: int) -> keras.Model:
    """He et al.'s ResNet for CIFAR: `depth` = 6n + 2, shortcuts without parameters."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(conv_bn(inputs, 16))
    for channels in (16, 32, 64):
        for block in range(depth // 6):
            x = residual(x, channels, 2 if channels > 16 and block == 0 else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(
        classes, kernel_initializer="he_normal", dtype="float32"
    )(x)
    return keras.Model(inputs, outputs)


def residual(x: Any, channels: int, stride: int) -> Any:
    y = keras.layers.ReLU()(conv_bn(x, channels, stride))
    y = conv_bn(y, channels)
    if stride > 1:  # every second pixel, and zeros for the channels that are new
        x = keras.layers.MaxPooling2D(1, stride)(x)
        new = channels - x.shape[-1]
        x = keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [new // 2, new // 2]])
    return keras.layers.ReLU()(keras.layers.add([x, y]))


def conv_bn(x: Any, channels: int, stride: int = 1) -> Any:
    x = keras.layers.Conv2D(
        channels, 3, stride, "same", use_bias=False, kernel_initializer="he_normal"
    )(x)
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def training_batches(
    images: np.ndarray, labels: np.ndarray, seed: int, first: int, epochs: int
) -> tf.data.Dataset:
    """The epochs from `first` on, shuffled and augmented by seed and epoch alone."""
    mean, deviation = channel_statistics(images)
    images, labels = tf.constant(images), tf.constant(labels)

    def batch(step: tf.Tensor, chosen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = (tf.cast(tf.gather(images, chosen), tf.float32) - mean) / deviation
        x = augment(x, tf.stack([tf.cast(seed, tf.int64), step]))
        return x, tf.gather(labels, chosen)

    return (
        data.shuffled(len(labels), BATCH, seed, first, epochs)
        .map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def augment(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Pads 4 pixels, crops 32 x 32 anywhere, flips half of them: a batch at once."""
    padded = tf.pad(images, [[0, 0], [4, 4], [4, 4], [0, 0]])
    top, left, flip = tf.unstack(
        tf.random.stateless_uniform([3, tf.shape(images)[0], 1], seed, 0, 18, tf.int32)
    )
    rows = top % 9 + tf.range(32)
    columns = left % 9 + tf.where(flip % 2 == 0, tf.range(32), tf.range(31, -1, -1))
    cropped = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(cropped, columns, axis=2, batch_dims=1)


def test_batches(
    train: np.ndarray, images: np.ndarray, labels: np.ndarray
) -> tf.data.Dataset:
    mean, deviation = channel_statistics(train)
    return (
        tf.data.Dataset.from_tensor_slices((images, labels))
        .batch(500)
        .map(lambda x, y: ((tf.cast(x, tf.float32) - mean) / deviation, y))
        .prefetch(tf.data.AUTOTUNE)
    )


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of red, green and blue."""
    return (
        images.mean((0, 1, 2)).astype("float32"),
        images.std((0, 1, 2)).astype("float32"),
    )


def schedule(rate: float, epochs: int, examples: int) -> Any:
    """Times 0.1 after half and three quarters of the epochs: 80 and 120 of 160."""
    steps = data.steps(examples, BATCH)
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [steps * (epochs // 2), steps * (epochs * 3 // 4)],
        [rate, 0.1 * rate, 0.01 * rate],
    )


def compiled_model(run: Run) -> keras.Model:
    """The run's model, with its optimizer; on all GPUs, where there are several."""
    settings = run.settings
    options: dict[str, Any] = {"l2": L2}
    if "clip" in settings:
        options |= {"rule": Clip(settings["clip"]), "blocks": settings["blocks"]}
    if "alpha" in settings:
        options["rule"] = Adaptive(settings["alpha"])
    rate = schedule(settings["rate"], settings["epochs"], settings["images"])
    with harness.strategy().scope():
        model = build_model(settings["depth"], settings["classes"])
        model.compile(
            optimizer=harness.optimizer(run.algorithm, rate, **options),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=settings.get("xla", False),
        )
    return model


def train(run: Run, images: data.Data, out: pathlib.Path) -> dict[str, list[float]]:
    x, y = images.train
    epochs = run.settings["epochs"]
    return harness.fit(
        run,
        compiled_model(run),
        lambda first: training_batches(x, y, run.seed, first, epochs),
        out,
        steps_per_epoch=data.steps(len(y), BATCH),
        validation_data=test_batches(x, *images.test),
    )


def train_all(
    experiment: str,
    options: argparse.Namespace,
    images: data.Data,
    variants: list[tuple[str, dict[str, Any]]],
) -> list[Result]:
    """Trains (algorithm, settings that differ), at every depth, with every seed."""
    number = min(options.images, len(images.train[1]))
    images = data.first(images, number)

    def settings(algorithm: str, depth: int, others: dict[str, Any]) -> dict[str, Any]:
        base, version = report.family(algorithm)
        found = {
            "depth": depth,
            "classes": options.classes,
            "rate": options.adam_rate if base == "Adam" else RATES[base],
            "epochs": options.epochs,
            "images": number,
            "data": images.kind,
        }
        if version == "CLIP":
            found |= {"clip": options.clip, "blocks": options.clip_blocks}
        if version == "NG_adap":
            found |= {"alpha": options.alpha}
        return found | harness.accelerators(options) | others

    runs = [
        Run(experiment, algorithm, settings(algorithm, depth, others), seed)
        for seed in range(options.seeds)
        for depth in options.depth
        for algorithm, others in variants
    ]
    return harness.train_all(
        runs, lambda run: train(run, images, options.out), options.out, images.label
    )


def search(options: argparse.Namespace, images: data.Data) -> list[Result]:
    """The paper's values of one setting, judged on held-out training examples."""
    known, values = SEARCHES[options.search]
    images = data.held_out(images, min(HELD_OUT, len(images.train[1]) // 10))
    algorithms = [name for name in known if name in options.algorithms]
    variants = [(a, {options.search: value}) for a in algorithms for value in values]
    results = train_all(SEARCH, options, images, variants)
    rows = []
    for depth in options.depth:
        for name in algorithms:
            errors = [
                last(results, name, "val_error", depth=depth, **{options.search: value})
                for value in values
            ]
            best = int(np.argmin([error.mean() for error in errors]))
            cells = [plus_minus(error, 2) for error in errors]
            cells[best] = f"**{cells[best]}**"
            rows.append([name, str(depth), *cells])
    header = ["algorithm", "depth", *(f"{options.search} {v:g}" for v in values)]
    print("\nError in percent on held-out training examples:\n")
    print(report.table(header, rows))
    print(f"\n{protocol(results)}. {report.what_was_run(results)}")
    return results


def speed(options: argparse.Namespace, images: data.Data) -> list[Result]:
    """Milliseconds of a batch: the input alone, and a training step without it."""
    images = data.first(images, min(options.images, len(images.train[1])))
    x, y = images.train

    def measure(run: Run) -> dict[str, list[float]]:
        model = compiled_model(run)
        fixed = next(iter(training_batches(x, y, run.seed, 0, 1)))
        once = tf.data.Dataset.from_tensors(fixed).repeat()
        model.fit(once, steps_per_epoch=2, shuffle=False, verbose=0)
        history: dict[str, list[float]] = {"input": [], "step": []}
        for _ in range(3 if options.smoke else 10):  # by turns: the same noise for both
            # New each time: an old one has batches ready, made while the model trained.
            batches = iter(training_batches(x, y, run.seed, 0, 1_000))
            next(batches)
            before = time.perf_counter()
            for _ in range(50):
                next(batches)
            between = time.perf_counter()
            del batches  # so that it does not go on beside the model
            model.fit(once, steps_per_epoch=5, shuffle=False, verbose=0)
            history["input"].append(20 * (between - before))
            history["step"].append(200 * (time.perf_counter() - between))
        return history

    runs = [
        Run(
            SPEED,
            "SGDMNG",
            {
                "depth": depth,
                "classes": options.classes,
                "rate": RATES["SGDM"],
                "epochs": options.epochs,
                "images": len(y),
                "data": images.kind,
                **harness.accelerators(options),
            },
            seed=0,
        )
        for depth in options.depth
    ]
    results = harness.train_all(runs, measure, options.out, images.label)
    print("\n" + speed_text(results))
    return results


def speed_text(results: list[Result]) -> str:
    lines = []
    for result in results:
        ms = {name: np.median(values) for name, values in result["history"].items()}
        lines.append(
            f"ResNet-{result['settings']['depth']}, a batch of {BATCH}: input "
            f"{ms['input']:.1f} ms, training step {ms['step']:.0f} ms, "
            f"{ms['step'] / ms['input']:.0f} times as long (medians)."
        )
    return "\n".join([*lines, report.what_was_run(results)])


def seeds_of(results: list[Result]) -> dict[str, int]:
    """How many each family has, at least, of each of its algorithms."""
    seeds: dict[str, int] = {}
    for name in dict.fromkeys(result["algorithm"] for result in results):
        number = len({result["seed"] for result in report.matching(results, name)})
        base, _ = report.family(name)
        seeds[base] = min(number, seeds.get(base, number))
    return seeds


def protocol(results: list[Result]) -> str:
    """`the paper's protocol`, or in which ways it was reduced."""
    paper = PROTOCOLS["paper"]
    settings = results[0]["settings"]
    families = seeds_of(results)
    seeds = min(families.values())
    number = f"{seeds}"
    if max(families.values()) > seeds:
        number = " and ".join(f"{n} ({base})" for base, n in families.items())
    less = [
        f"{settings['epochs']} of {paper['epochs']} epochs",
        f"{settings['images']:,} of {paper['images']:,} training images",
        f"{number} of {paper['seeds']} seeds",
    ]
    full = (
        settings["epochs"] >= paper["epochs"],
        settings["images"] >= paper["images"] and settings["data"] == "full",
        seeds >= paper["seeds"],
    )
    less = [text for text, whole in zip(less, full) if not whole]
    return f"REDUCED protocol: {', '.join(less)}" if less else "the paper's protocol"


def qualifier(results: list[Result]) -> str:
    """The word that goes with every number which is not of the paper's protocol."""
    if results[0]["settings"]["data"] != "full":
        return "smoke run: "
    return "reduced: " if protocol(results).startswith("REDUCED") else ""


def results_table(results: list[Result]) -> str:
    settings = results[0]["settings"]
    word = qualifier(results)
    rows = []
    for depth in report.distinct(results, "depth"):
        for name in ALGORITHMS:
            found = report.matching(results, name, depth=depth)
            if not found:
                continue
            loss, test = (
                word + plus_minus(report.histories(found, metric)[:, -1], digits)
                for metric, digits in (("loss", 3), ("val_error", 2))
            )
            paper = "-"
            if depth in DEPTHS and settings["data"] == "full":
                paper = PAPER[settings["classes"]][name].split()[DEPTHS.index(depth)]
            rows.append(
                [f"ResNet-{depth}", name, loss, test, paper.replace("±", " ± ")]
            )
    return report.table(
        ["model", "algorithm", "train loss", "test error, %", "the paper's, %"], rows
    )


def claims(results: list[Result]) -> list[Claim]:
    """What section 4.2 says, checked at one depth."""
    errors = {a: last(results, a, "val_error") for a in ALGORITHMS}
    losses = {
        a: report.histories(report.matching(results, a), "loss").mean(1)
        for a in ALGORITHMS
    }
    word = qualifier(results)
    where = f"{word.replace(': ', ', ')}ResNet-{results[0]['settings']['depth']}"

    def claim(text: str, verdict: str, names: list[str], values: Any = errors) -> Claim:
        what = "test error, %" if values is errors else "train loss, mean of all epochs"
        digits = 1 if values is errors else 3
        numbers = (f"{n} {report.plus_minus(values[n], digits)}" for n in names)
        return Claim(f"{where}: {text}", verdict, f"{word}{what}: {', '.join(numbers)}")

    def of(names: list[str], values: dict[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in names}

    found = []
    for base in RATES:
        names = [f"{base}{version}" for version in VERSIONS]
        _, clip, ng, adap = names
        below = {name: -errors[name] for name in names}
        found += [
            claim(
                f"{adap} has the lowest test error of the {base} versions",
                report.is_lowest(adap, of(names, errors)),
                names,
            ),
            claim(f"{clip} has the highest", report.is_lowest(clip, below), names),
            claim(
                f"{ng} is the fastest in training",
                report.is_lowest(ng, of(names, losses)),
                names,
                losses,
            ),
        ]
    pairs = [(f"SGDM{version}", f"Adam{version}") for version in VERSIONS]
    for text, compared in (
        ("SGD with momentum is ahead of Adam in every version", pairs),
        ("SGDMNG is better than SGDM", [("SGDMNG", "SGDM")]),
        ("Adam is slightly better than AdamNG", [("Adam", "AdamNG")]),
    ):
        verdicts = (report.is_lower(errors[a], errors[b]) for a, b in compared)
        names = [name for pair in compared for name in pair]
        found.append(claim(text, report.all_of(verdicts), names))
    return found


def write_report(results: list[Result], out: pathlib.Path) -> None:
    settings = results[0]["settings"]
    what = {
        "full": f"CIFAR-{settings['classes']}",
        "part": f"SMOKE RUN on a part of CIFAR-{settings['classes']}",
        "sample": "SMOKE RUN on coloured digits",
    }[settings["data"]]
    title = f"{what}, {protocol(results)}"
    name = f"{EXPERIMENT}_{settings['classes']}"
    depths = report.distinct(results, "depth")
    panels = [
        (f"ResNet-{depth}, {base}", {"depth": depth, "rate": rate})
        for depth in depths
        for base, rate in distinct_rates(results).items()
    ]
    metrics = [("loss", "train loss"), ("val_error", "test error, %")]
    report.curves(results, panels, out / f"{name}.png", metrics, title)
    parts = [
        results_table(results),
        f"After the last epoch. {protocol(results)}; the paper's numbers are of 160 "
        f"epochs, 50,000 images and 5 seeds. {report.what_was_run(results)}",
    ]
    if settings["data"] == "full":
        for depth in depths:
            found = [r for r in results if r["settings"]["depth"] == depth]
            if {result["algorithm"] for result in found} == {*ALGORITHMS}:
                parts += [
                    f"What the paper says, at ResNet-{depth}, mean over seeds:",
                    report.claims_table(claims(found)),
                ]
        measured = harness.read_all(out, SPEED)
        if measured:
            parts += ["Is the input fast enough?", speed_text(measured)]
    report.section(out, name, f"{title} (section 4.2)", parts)


def distinct_rates(results: list[Result]) -> dict[str, float]:
    return {
        report.family(result["algorithm"])[0]: result["settings"]["rate"]
        for result in results
    }


def main(arguments: Any = None) -> list[Result]:
    parser = harness.parser(__doc__, ALGORITHMS)
    parser.add_argument(
        "--depth", type=int, nargs="+", help="6n + 2; the paper's: 20 32 44 56 110"
    )
    parser.add_argument("--classes", type=int, default=10, choices=(10, 100))
    parser.add_argument("--images", type=int, help="train on the first N of them")
    parser.add_argument("--adam-rate", type=float, default=RATES["Adam"])
    parser.add_argument("--clip", type=float, default=0.1, help="the threshold")
    parser.add_argument(
        "--clip-blocks",
        choices=["layer", "model"],
        default="layer",
        help="clip the norm of each layer's gradient, or of the whole gradient",
    )
    parser.add_argument("--alpha", type=float, default=0.02, help="of NG_adap")
    harness.add_accelerators(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--reduced", action="store_true", help="what was run for RESULTS.md: see above"
    )
    mode.add_argument(
        "--search",
        choices=list(SEARCHES),
        help="the paper's values of one setting, on held-out training examples; "
        "it did so with --depth 56",
    )
    mode.add_argument(
        "--speed", action="store_true", help="time the input against the training step"
    )
    options = harness.parse(parser, arguments)
    options.algorithms = options.algorithms or ALGORITHMS
    if options.search and not {*options.algorithms} & {*SEARCHES[options.search][0]}:
        parser.error(
            f"--search {options.search} is for {SEARCHES[options.search][0]}. "
            f"Received: {options.algorithms}"
        )
    name = "smoke" if options.smoke else "reduced" if options.reduced else "paper"
    for flag, value in PROTOCOLS[name].items():
        if getattr(options, flag) is None:
            setattr(options, flag, value)
    for depth in options.depth:
        if depth < 8 or depth % 6 != 2:
            parser.error(
                f"--depth must be 6n + 2, such as 20 or 110. Received: {depth}"
            )
    if options.images < 1:
        parser.error(f"--images must be 1 or more. Received: {options.images}")
    images = data.cifar(options.classes, options.data, options.data_dir)
    if options.search:
        return search(options, images)
    if options.speed:
        return speed(options, images)
    variants = [(algorithm, {}) for algorithm in options.algorithms]
    results = train_all(EXPERIMENT, options, images, variants)
    if options.reduced:
        results = report.all_seeds(results, options.out, EXPERIMENT)
    write_report(results, options.out)
    return results


if __name__ == "__main__":
    main()
