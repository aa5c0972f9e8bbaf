"""Penn Treebank with a two-layer LSTM language model (section 4.4).

The paper: 2 layers of 200 units, dropout 0.5, batches of 100; AdamNG is better than
every other one with backpropagation through 40, 400 and 1000 words, in training and in
testing. It shows curves, and gives no numbers.

    pip install -e ".[examples]"
    python examples/penn_treebank_lstm.py --search  # a grid of rates, one epoch each
    python examples/penn_treebank_lstm.py --tenfold --bptt 40 400  # four, higher rates
    python examples/penn_treebank_lstm.py           # 6 epochs at 40, 3 at 400 and 1000
    python examples/penn_treebank_lstm.py --grid    # a wide grid for all six, 2 epochs
    python examples/penn_treebank_lstm.py --tuned   # 3 seeds at its rates; 2 at 400
    python examples/penn_treebank_lstm.py --smoke   # a minute, to see it work

The text is 100 streams; the state goes from window to window, and starts at zero with
each pass over a text. Dropout is on what goes into each layer, not on the state. The
logits of a step at 1000 words are 4 GB. With `--export DIR` each model becomes a
SavedModel that takes words and returns how probable each next word is. Data: Penn
Treebank's three files in TFDS's manual directory, else by download.

Measured with one seed, test log perplexity after the last epoch, base and NG:

    BPTT 40, 6 epochs:    SGDM 5.436, 5.098; AdaGrad 5.747, 5.675; Adam 5.739, 5.589
    BPTT 400, 3 epochs:   SGDM 6.591, 5.982; AdaGrad 6.493, 6.281; Adam 6.470, 6.483
    BPTT 1000, 3 epochs:  SGDM 6.900, 6.505; AdaGrad 6.491, 6.480; Adam 6.550, 6.521

At ten times the paper's rates:

    BPTT 40, 6 epochs:    AdaGrad 6.535, 4.971; Adam 5.444, 5.088
    BPTT 400, 3 epochs:   AdaGrad 6.493, 5.901; Adam 6.527, 6.358

So NG is ahead of its base where there are updates enough to tell (233 an epoch at 40;
24 at 400, 10 at 1000), and first is SGDMNG or AdaGradNG, not AdamNG. A run takes 21 to
26 minutes of one core at 40, 11 at 400 and 1000. RESULTS.md has all.

`--grid` and `--tuned` have not run yet: 42 runs of 2 epochs, and at most 26 of 5 or 6.
`--tuned` takes each rate from the grid that is in `--out`. Both can be split over
processes by `--algorithms`. A run without flags writes their results before its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

import data
import harness
import keras
import numpy as np
import report
import tensorflow as tf
from harness import Result, Run
from report import Claim, beside, last, lowest, plus_minus

EXPERIMENT = "penn_treebank_lstm"
PAIRS = {"SGDM": "SGDMNG", "AdaGrad": "AdaGradNG", "Adam": "AdamNG"}
ALGORITHMS = [name for pair in PAIRS.items() for name in pair]
LENGTHS = (40, 400, 1000)
EPOCHS = {40: 6, 400: 3, 1000: 3}
BATCH = 100
UNITS = 200
END = "<eos>"

# At every length. The paper's for AdaGrad and Adam. It gives none for SGDM: the best of
# `--search`, which is at a BPTT of 40.
RATES = {
    "SGDM": 1.0,
    "SGDMNG": 1.0,
    "AdaGrad": 0.01,
    "AdaGradNG": 0.01,
    "Adam": 0.001,
    "AdamNG": 0.001,
}
SEARCH = f"{EXPERIMENT}_search"
# A pair has one grid. Only SGDM's decides a rate; the others say what the paper's cost.
GRIDS = {
    "SGDM": (10.0, 3.0, 1.0, 0.3, 0.1),
    "AdaGrad": (0.3, 0.1, 0.03, 0.01),
    "Adam": (0.01, 0.003, 0.001, 0.0003),
}
# The grid says that the paper's rates are ten times too low for some of these.
TENFOLD = f"{EXPERIMENT}_tenfold"
TENFOLD_ALGORITHMS = ALGORITHMS[2:]
# A wider grid, as long for each, decides the rates of all six.
GRID = f"{EXPERIMENT}_grid"
WIDE = {
    "SGDM": (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01),
    "AdaGrad": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "Adam": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
}
TUNED = f"{EXPERIMENT}_tuned"
# At each length: which ones, how many epochs and seeds. At 1000 nothing can be decided.
TUNED_RUNS = {
    40: (ALGORITHMS, 6, 3),
    400: (["SGDM", "SGDMNG", "Adam", "AdamNG"], 5, 2),
}


def build_model(words: int, batch: int | None = BATCH) -> keras.Model:
    """Word numbers to logits of each next word; with a batch size it keeps state."""
    inputs = keras.Input(batch_shape=(batch, None), dtype="int32")
    x = keras.layers.Embedding(words, UNITS)(inputs)
    options: dict[str, Any] = {"return_sequences": True, "stateful": batch is not None}
    if keras.backend.backend() == "torch" and batch is not None:
        # torch's own LSTM needs the state that it began with once more, after Keras has
        # written the next one over it. Keras's loop works on a copy.
        options["use_cudnn"] = False
    for _ in range(2):
        x = keras.layers.Dropout(0.5)(x)
        x = keras.layers.LSTM(UNITS, **options)(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(words)(x))


def vocabulary(words: np.ndarray) -> keras.layers.StringLookup:
    """Numbers for words, the most frequent first; `<unk>` is a word of the text."""
    found, counts = np.unique(words, return_counts=True)
    ordered = [word for word in found[np.argsort(-counts)] if word != "<unk>"]
    return keras.layers.StringLookup(vocabulary=ordered, oov_token="<unk>")


def frequencies_alone(train: np.ndarray, test: np.ndarray) -> float:
    """Log perplexity of who knows how frequent each word is, and nothing more."""
    names, counts = np.unique(train, return_counts=True)
    chances = dict(zip(names, counts / len(train)))
    return float(-np.mean([np.log(chances[word]) for word in test]))


def streams(words: np.ndarray, lookup: keras.layers.StringLookup) -> np.ndarray:
    """The text as `BATCH` texts of one length, one below the other."""
    length = len(words) // BATCH
    numbers = np.asarray(lookup(words[: BATCH * length]), "int32")
    return numbers.reshape(BATCH, length)


def windows(text: np.ndarray, length: int) -> tf.data.Dataset:
    """(words, next words), `length` of each stream at a time, then the rest."""
    end = text.shape[1] - 1
    text = tf.constant(text)

    def window(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        stop = tf.minimum(start + length, end)
        return text[:, start:stop], text[:, start + 1 : stop + 1]

    return tf.data.Dataset.range(0, end, length).map(window)


def in_rows(model: keras.Model) -> keras.Model:
    """The same model with a row for each word, whatever its window.

    TensorFlow then sees that loss and metric need the same cross-entropy, which is a
    sixth of a step's time; and older `Perplexity` count windows instead of words.
    """
    logits = model.outputs[0]
    return keras.Model(model.inputs, keras.ops.reshape(logits, (-1, logits.shape[-1])))


def row_targets(words: tf.Tensor, following: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return words, tf.reshape(following, [-1, 1])


def compiled_rows(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> keras.Model:
    from keras_nlp.metrics import Perplexity

    rows = in_rows(model)
    rows.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[Perplexity(from_logits=True, name="perplexity")],
        jit_compile=False,
    )
    return rows


class ResetState(keras.callbacks.Callback):
    """No state goes from one pass over a text into the next."""

    def reset(self, *_: Any, **__: Any) -> None:
        for layer in self.model.layers:
            if isinstance(layer, keras.layers.LSTM):
                layer.reset_state()

    on_epoch_begin = on_test_begin = reset


def train(
    run: Run,
    text: np.ndarray,
    test: np.ndarray,
    lookup: keras.layers.StringLookup,
    out: pathlib.Path,
) -> dict[str, list[float]]:
    length, epochs = run.settings["bptt"], run.settings["epochs"]
    model = build_model(lookup.vocabulary_size())
    optimizer = harness.optimizer(run.algorithm, run.settings["rate"])
    rows = compiled_rows(model, optimizer)
    batches, tested = (windows(part, length).map(row_targets) for part in (text, test))
    history = harness.fit(
        run,
        rows,
        lambda first: batches.repeat(epochs - first),
        out,
        steps_per_epoch=int(batches.cardinality()),
        validation_data=tested,
        callbacks=[ResetState()],
    )
    model.save_weights(weights_path(run, out))
    print("It says:", " ".join(generate(model, lookup, seed=run.seed)))
    return history


def weights_path(run: Run, out: pathlib.Path) -> pathlib.Path:
    return run.path(out, ".weights.h5")


def generate(
    model: keras.Model,
    lookup: keras.layers.StringLookup,
    start: tuple[str, ...] = (END,),
    longest: int = 30,
    seed: int = 0,
) -> list[str]:
    """The words of a sentence, each drawn by its probability after those before it."""
    speaker = build_model(lookup.vocabulary_size(), batch=1)
    speaker.set_weights(model.get_weights())
    random = np.random.default_rng(seed)
    said, numbers = [], np.asarray(lookup(list(start)))[None]
    names = lookup.get_vocabulary()
    while len(said) < longest and said[-1:] != [END]:
        logits = keras.ops.convert_to_numpy(speaker(numbers)[0, -1]).astype("float64")
        chances = np.exp(logits - logits.max())
        number = random.choice(len(names), p=chances / chances.sum())
        said.append(names[number])
        numbers = np.array([[number]])
    return said


def export(
    weights: pathlib.Path, lookup: keras.layers.StringLookup, folder: pathlib.Path
) -> None:
    """A SavedModel: sentences as words, (n, length), to what the next word will be.

    Probabilities are in the order of `lookup.get_vocabulary()`, which is in
    `vocabulary.txt` beside it.
    """
    model = build_model(lookup.vocabulary_size(), batch=None)
    model.load_weights(weights)
    words = keras.Input((None,), dtype="string")
    served = keras.Model(words, keras.ops.softmax(model(lookup(words))[:, -1]))
    served.export(folder, verbose=False)
    names = "\n".join(lookup.get_vocabulary())
    harness.write_text(folder / "vocabulary.txt", names + "\n")
    print(f"SavedModel: {folder}", flush=True)


def runs_of(
    experiment: str,
    options: argparse.Namespace,
    kind: str,
    variants: list[tuple[str, int, float]],
    epochs: dict[int, int] = EPOCHS,
    seeds: int = 1,
) -> list[Run]:
    """(algorithm, length, rate) with every seed."""
    return [
        Run(
            experiment,
            name,
            {
                "bptt": length,
                "rate": rate,
                "epochs": options.epochs or epochs[length],
                "data": kind,
            },
            seed,
        )
        for seed in range(options.seeds or seeds)
        for name, length, rate in variants
    ]


def train_all(
    runs: list[Run],
    options: argparse.Namespace,
    corpus: data.Corpus,
    test: np.ndarray,
    label: str,
) -> list[Result]:
    lookup = vocabulary(corpus.train)
    text, test = streams(corpus.train, lookup), streams(test, lookup)
    results = harness.train_all(
        runs,
        lambda run: train(run, text, test, lookup, options.out),
        options.out,
        label,
    )
    if options.export:
        for run in runs:
            path = weights_path(run, options.out)
            export(path, lookup, options.export / run.name)
    return results


def search(
    options: argparse.Namespace,
    corpus: data.Corpus,
    experiment: str,
    grids: dict[str, tuple[float, ...]],
    epochs: int,
) -> list[Result]:
    """One grid for a base and its NG, judged on the validation text."""
    options.epochs = options.epochs or epochs
    label = f"{corpus.label}; judged on the validation text"
    variants = [
        (name, length, rate)
        for length in options.bptt
        for name in options.algorithms or ALGORITHMS
        for rate in grids[report.family(name)[0]]
    ]
    runs = runs_of(experiment, options, corpus.kind, variants)
    results = train_all(runs, options, corpus, corpus.validation, label)
    print(f"\n{search_table(results)}\n\n{report.what_was_run(results)}")
    return results


def search_table(results: list[Result]) -> str:
    rows = []
    rates = sorted(report.distinct(results, "rate"))
    for length in sorted(report.distinct(results, "bptt")):
        for name in ALGORITHMS:
            found = report.matching(results, name, bptt=length)
            if not found:
                continue
            losses = by_rate(found, name)
            cells = {rate: f"{x:.3f}" for rate, x in losses.items()}
            cells = report.marked(cells, lowest(losses))
            rows.append([str(length), name, *(cells.get(rate, "") for rate in rates)])
    return report.table(["BPTT", "algorithm", *(f"{r:g}" for r in rates)], rows)


def by_rate(results: list[Result], name: str) -> dict[float, float]:
    """Log perplexity of the validation text, for each rate that was tried."""
    found = report.matching(results, name)
    return {
        rate: float(last(found, name, "val_log_perplexity", rate=rate).mean())
        for rate in sorted(report.distinct(found, "rate"))
    }


def tenfold(options: argparse.Namespace, corpus: data.Corpus) -> list[Result]:
    """AdaGrad, Adam and their NG versions at ten times the paper's rates."""
    variants = [
        (name, length, 10 * RATES[name])
        for length in options.bptt
        for name in options.algorithms or TENFOLD_ALGORITHMS
    ]
    return train_and_print(
        runs_of(TENFOLD, options, corpus.kind, variants), options, corpus
    )


def tuned(options: argparse.Namespace, corpus: data.Corpus) -> list[Result]:
    """The rates that `--grid` chose. What has run with them before counts."""
    grid = harness.read_all(options.out, GRID)
    names = options.algorithms or ALGORITHMS
    rates = {}
    for name in names:
        tried = by_rate(report.matching(grid, name, bptt=40, data=corpus.kind), name)
        wide = WIDE[report.family(name)[0]]
        rates[name] = report.chosen_rate(name, tried, wide, "--grid", options.out)
    runs = []
    for length in options.bptt:
        known, epochs, seeds = TUNED_RUNS[length]
        variants = [(name, length, rates[name]) for name in names if name in known]
        runs += runs_of(TUNED, options, corpus.kind, variants, {length: epochs}, seeds)
    if not runs:
        raise SystemExit(f"--tuned has no {names} at a BPTT of {options.bptt}.")
    return train_and_print([done(run, options.out) for run in runs], options, corpus)


def done(run: Run, out: pathlib.Path) -> Run:
    """The same run of an older experiment, if that has it."""
    for experiment in (EXPERIMENT, TENFOLD):
        older = dataclasses.replace(run, experiment=experiment)
        if harness.results([older], out)[0]:
            return older
    return run


def train_and_print(
    runs: list[Run], options: argparse.Namespace, corpus: data.Corpus
) -> list[Result]:
    results = train_all(runs, options, corpus, corpus.test, corpus.label)
    print(f"\n{results_table(results)}\n\n{report.what_was_run(results)}")
    return results


def results_table(results: list[Result]) -> str:
    rows = []
    for length in sorted(report.distinct(results, "bptt")):
        for name in ALGORITHMS:
            found = report.matching(results, name, bptt=length)
            if not found:
                continue
            numbers = [
                plus_minus(last(found, name, metric), digits)
                for metric, digits in (
                    ("log_perplexity", 3),
                    ("val_log_perplexity", 3),
                    ("val_perplexity", 1),
                )
            ]
            rate = f"{found[0]['settings']['rate']:g}"
            epochs = str(found[0]["settings"]["epochs"])
            rows.append([str(length), name, rate, epochs, *numbers])
    return report.table(
        [
            "BPTT",
            "algorithm",
            "rate",
            "epochs",
            "train log perplexity",
            "test log perplexity",
            "test perplexity",
        ],
        rows,
    )


def claims(results: list[Result]) -> list[Claim]:
    """What section 4.4 says of its figure."""
    found = []
    for length in sorted(report.distinct(results, "bptt")):
        names = [n for n in ALGORITHMS if report.matching(results, n, bptt=length)]
        at = f"BPTT {length}" + " without AdaGrad" * ("AdaGrad" not in names)
        train, test = (
            {name: last(results, name, metric, bptt=length) for name in names}
            for metric in ("log_perplexity", "val_log_perplexity")
        )
        for losses, where in ((train, "train"), (test, "test")):
            text = f"{at}, {where}: AdamNG is the best"
            found.append(Claim(text, *report.best("AdamNG", losses)))
        for base, ng in PAIRS.items():
            if base not in names:
                continue
            evidence = ", ".join(
                f"{where} {plus_minus(of[ng])} against {plus_minus(of[base])}"
                for of, where in ((train, "train"), (test, "test"))
            )
            verdict = report.all_of(
                report.is_lower(of[ng], of[base]) for of in (train, test)
            )
            text = f"BPTT {length}: {ng} is better than {base}"
            found.append(Claim(text, verdict, evidence))
    return found


def complete(results: list[Result]) -> bool:
    """Whether all six were trained at each length that there is."""
    done = {(r["algorithm"], r["settings"]["bptt"]) for r in results}
    lengths = report.distinct(results, "bptt")
    return done == {(name, length) for name in ALGORITHMS for length in lengths}


def tuned_beside(results: list[Result], out: pathlib.Path) -> list[Result]:
    """The results at the grid's rates, on the same data, if they are complete."""
    found = report.all_seeds(beside(results, out, TUNED), out, EXPERIMENT, TENFOLD)
    whole = all(
        len(report.matching(found, name, bptt=length)) >= seeds
        for length, (names, _, seeds) in TUNED_RUNS.items()
        for name in names
    )
    found.sort(key=lambda result: ALGORITHMS.index(result["algorithm"]))
    return found if whole else []


def write_report(results: list[Result], out: pathlib.Path) -> None:
    sample = results[0]["settings"]["data"] == "sample"
    at_best = tuned_beside(results, out)
    decided = report.distinct(at_best, "bptt")
    shown = at_best + [r for r in results if r["settings"]["bptt"] not in decided]
    lengths = sorted(report.distinct(shown, "bptt"))
    epochs = {r["settings"]["bptt"]: r["settings"]["epochs"] for r in shown}
    title = f"{'SAMPLE in place of ' * sample}Penn Treebank, LSTM, batch {BATCH}, " + (
        ", ".join(f"{epochs[length]} epochs at BPTT {length}" for length in lengths)
    )
    panels = [
        (f"BPTT {length}" + ", tuned rates" * (length in decided), {"bptt": length})
        for length in lengths
    ]
    metrics = [
        ("log_perplexity", "train log perplexity"),
        ("val_log_perplexity", "test log perplexity"),
    ]
    report.curves(shown, panels, out / f"{EXPERIMENT}.png", metrics, title)
    parts = []
    if at_best:
        parts += [
            "At the rates that one grid chose for all six:",
            results_table(at_best),
            "After the last epoch, with 3 seeds at BPTT 40 and 2 at 400. At 1000 an "
            "epoch is 10 updates: the 30 that we could train decide nothing, so "
            f"nothing was tuned there. {report.what_was_run(at_best)}",
            "What the paper says, at these rates:",
            report.claims_table(claims(at_best), "tuned rates"),
            "At the paper's own rates (SGDM's and SGDMNG's: of one epoch's grid):",
        ]
    parts += [
        results_table(results),
        "After the last epoch. Train is with dropout, as `fit` gives it. "
        + report.what_was_run(results),
    ]
    if complete(results):
        parts += [
            "What the paper says, after the last epoch:",
            report.claims_table(claims(results), "paper's rates"),
        ]
    higher = beside(results, out, TENFOLD)
    if higher:
        parts += [
            "AdaGrad, Adam and their NG versions, at ten times the paper's rates:",
            results_table(higher),
            report.what_was_run(higher),
        ]
        at = report.distinct(higher, "bptt")
        higher += [
            result
            for result in results
            if result["algorithm"] not in TENFOLD_ALGORITHMS
            and result["settings"]["bptt"] in at
        ]
        if complete(higher):
            parts += [
                "What the paper says, with these in place of the four above:",
                report.claims_table(claims(higher), "tenfold rates"),
            ]
    searched = beside(results, out, SEARCH)
    if searched:
        parts += [
            "The paper gives no rate for SGDM. SGDM's and SGDMNG's, at every length, "
            "are from one grid; AdaGrad's and Adam's are the paper's, and the grid "
            "says what others would have given. Log perplexity of the validation text "
            f"after {searched[0]['settings']['epochs']} epoch; the lowest in bold. "
            + report.EDGE,
            search_table(searched),
            report.what_was_run(searched),
        ]
    if at_best:
        grid = beside(results, out, GRID)
        parts += [
            "The grid of all six, at BPTT 40: log perplexity of the validation text "
            f"after {grid[0]['settings']['epochs']} epochs; the lowest in bold. "
            + report.EDGE,
            search_table(grid),
            report.what_was_run(grid),
        ]
    report.section(out, EXPERIMENT, f"{title} (section 4.4)", parts)


def main(arguments: Any = None) -> list[Result]:
    parser = harness.parser(__doc__, ALGORITHMS)
    parser.add_argument("--bptt", type=int, nargs="+", choices=LENGTHS)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--search", action="store_true", help="a grid of rates")
    mode.add_argument(
        "--tenfold", action="store_true", help="ten times the rates of AdaGrad and Adam"
    )
    mode.add_argument("--grid", action="store_true", help="a wide grid for all six")
    mode.add_argument("--tuned", action="store_true", help="the rates that it chose")
    parser.add_argument(
        "--export", type=pathlib.Path, help="where each model goes as a SavedModel"
    )
    options = harness.parse(parser, arguments)
    short = options.smoke or options.search or options.tenfold or options.grid
    lengths = tuple(TUNED_RUNS) if options.tuned else LENGTHS
    options.bptt = options.bptt or (lengths[:1] if short else lengths)
    if not {*options.bptt} <= {*lengths}:
        parser.error(f"--tuned is for a --bptt of {lengths}. Received: {options.bptt}")
    corpus = data.penn_treebank(options.data, options.data_dir)
    if options.search:
        return search(options, corpus, SEARCH, GRIDS, 1)
    if options.grid:
        return search(options, corpus, GRID, WIDE, 2)
    if options.tuned:
        return tuned(options, corpus)
    if options.tenfold:
        return tenfold(options, corpus)
    baseline = frequencies_alone(corpus.train, corpus.test)
    print(f"Word frequencies alone: test log perplexity {baseline:.3f}", flush=True)
    variants = [
        (name, length, RATES[name])
        for length in options.bptt
        for name in options.algorithms or ALGORITHMS
    ]
    runs = runs_of(EXPERIMENT, options, corpus.kind, variants)
    results = train_all(runs, options, corpus, corpus.test, corpus.label)
    write_report(results, options.out)
    return results


if __name__ == "__main__":
    main()
