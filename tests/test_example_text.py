"""`examples/penn_treebank_lstm.py` and `examples/rotten_tomatoes_cnn.py`."""

import pathlib

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import data
import harness
import penn_treebank_lstm as penn
import report
import rotten_tomatoes_cnn as rotten
import tensorflow as tf
from harness import Run

PUBLISHED = pathlib.Path(penn.__file__).parent / "results"
WORDS = np.array([*["the", "cat", "sat", "on", "the", "mat", "<eos>"]] * 50)


def test_the_language_model_is_the_papers():
    model = penn.build_model(10_000)
    kinds = [type(layer).__name__ for layer in model.layers[1:]]
    drop_then_lstm = ["Dropout", "LSTM"]
    assert kinds == ["Embedding", *drop_then_lstm, *drop_then_lstm, "Dropout", "Dense"]
    assert [x.rate for x in model.layers if hasattr(x, "rate")] == [0.5] * 3
    assert [x.units for x in model.layers if hasattr(x, "units")] == [200, 200, 10_000]
    assert model.output_shape == (100, None, 10_000)


def test_words_get_numbers_by_their_frequency():
    lookup = penn.vocabulary(np.array(["b", "a", "b", "<unk>", "b", "a", "c"]))
    assert lookup.get_vocabulary() == ["<unk>", "b", "a", "c"]
    assert np.asarray(lookup(["c", "never", "<unk>"])).tolist() == [3, 0, 0]


def test_word_frequencies_alone_have_the_entropy_of_the_text():
    found = penn.frequencies_alone(np.array([*"aabc"]), np.array([*"ab"]))
    assert found == pytest.approx((np.log(2) + np.log(4)) / 2)


@pytest.mark.parametrize("length", [7, 40, 1000])
def test_windows_are_contiguous_and_targets_are_the_next_words(length):
    text = np.arange(100 * 90).reshape(100, 90)
    batches = list(penn.windows(text, length))
    x = np.concatenate([x for x, _ in batches], 1)
    y = np.concatenate([y for _, y in batches], 1)
    np.testing.assert_array_equal(x, text[:, :-1])  # nothing left out
    np.testing.assert_array_equal(y, text[:, 1:])
    assert {x.shape[1] for x, _ in batches[:-1]} <= {length}


def test_streams_are_the_text_in_order():
    lookup = penn.vocabulary(WORDS)
    numbers = penn.streams(WORDS, lookup)
    assert numbers.shape == (100, 3)
    np.testing.assert_array_equal(numbers.ravel(), np.asarray(lookup(WORDS[:300])))


def states(model):
    return [
        np.array(state)
        for layer in model.layers
        if isinstance(layer, keras.layers.LSTM)
        for state in layer.states
    ]


def test_state_goes_from_window_to_window_and_not_further():
    model = penn.build_model(20)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    text = np.random.default_rng(0).integers(0, 20, (100, 25))
    seen = []

    class Watch(keras.callbacks.Callback):
        def note(self, *_, **__):
            seen.append([np.abs(state).max() > 0 for state in states(self.model)])

        on_train_batch_begin = on_test_batch_begin = note

    model.fit(
        penn.windows(text, 8),
        epochs=2,
        validation_data=penn.windows(text, 8),
        callbacks=[penn.ResetState(), Watch()],
        shuffle=False,
        verbose=0,
    )
    # Three windows of training, three of testing, twice: each pass starts at zero.
    carried = [all(states) for states in seen]
    assert carried == [False, True, True] * 4
    assert [any(states) for states in seen] == carried


def test_windows_with_state_give_what_the_whole_text_gives():
    text = np.random.default_rng(0).integers(0, 20, (100, 25))
    model, whole = penn.build_model(20), penn.build_model(20, batch=None)
    whole.set_weights(model.get_weights())
    parts = [model(x, training=False) for x, _ in penn.windows(text, 8)]
    np.testing.assert_allclose(
        np.concatenate(parts, 1), whole(text[:, :-1], training=False), atol=1e-5
    )


def test_perplexity_is_of_all_words_and_log_perplexity_its_log(tmp_path):
    """The last window is shorter, which a mean over windows would get wrong."""
    import keras_nlp

    text = np.random.default_rng(0).integers(0, 20, (100, 21))
    model = penn.build_model(20)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rows = penn.in_rows(model)
    rows.compile(loss=loss, metrics=[keras_nlp.metrics.Perplexity(from_logits=True)])
    found = rows.evaluate(
        penn.windows(text, 16).map(penn.row_targets),
        callbacks=[penn.ResetState()],
        verbose=0,
        return_dict=True,
    )
    whole = penn.build_model(20, batch=None)
    whole.set_weights(model.get_weights())
    expected = float(loss(text[:, 1:], whole(text[:, :-1], training=False)))
    assert np.log(found["perplexity"]) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A smoke run: its directory and results."""
    out = tmp_path_factory.mktemp("penn")
    flags = ["--smoke", "--algorithms", "Adam", "AdamNG", "--epochs", "3"]
    flags += ["--out", str(out), "--export", str(out / "served")]
    return out, penn.main(flags)


def test_a_smoke_run_of_the_language_model_learns_and_is_labelled(spoken):
    out, results = spoken
    for result in results:
        perplexity = result["history"]["val_perplexity"]
        assert len(perplexity) == 3 and perplexity[-1] < 60 < perplexity[0] < 170
    text = (out / "penn_treebank_lstm.md").read_text()
    assert "SAMPLE in place of Penn Treebank" in text
    assert (out / "penn_treebank_lstm.png").stat().st_size > 5_000


def test_a_trained_model_generates_a_sentence(spoken):
    out, _ = spoken
    corpus = data.penn_treebank("sample", None)
    lookup = penn.vocabulary(corpus.train)
    model = penn.build_model(lookup.vocabulary_size())
    model.load_weights(next(out.glob("*/AdamNG*.weights.h5")))
    said = penn.generate(model, lookup, seed=1)
    assert said == penn.generate(model, lookup, seed=1)
    assert 1 <= len(said) <= 30 and set(said) <= {*lookup.get_vocabulary()}
    assert said[-1] == "<eos>" or len(said) == 30


def test_the_exported_language_model_gives_next_word_probabilities(spoken):
    out, _ = spoken
    (folder,) = (out / "served").glob("AdamNG*")
    names = (folder / "vocabulary.txt").read_text().split("\n")[:-1]
    loaded = tf.saved_model.load(str(folder))
    sentences = tf.constant([["<eos>", "the"], ["the", "noun3"]])
    chances = np.asarray(loaded.serve(sentences))
    assert chances.shape == (2, len(names))
    np.testing.assert_allclose(chances.sum(1), 1, atol=1e-4)
    lookup = penn.vocabulary(data.penn_treebank("sample", None).train)
    assert names == lookup.get_vocabulary()
    model = penn.build_model(lookup.vocabulary_size(), batch=None)
    model.load_weights(next(out.glob("*/AdamNG*.weights.h5")))
    expected = tf.nn.softmax(model(lookup(sentences))[:, -1])
    np.testing.assert_allclose(chances, expected, atol=1e-5)


def test_dropout_goes_on_where_it_was_after_a_stop(tmp_path, monkeypatch):
    """Its random numbers are part of the backup."""
    corpus = data.penn_treebank("sample", None)
    lookup = penn.vocabulary(corpus.train)
    text = penn.streams(corpus.train, lookup)[:, :50]
    run = Run("stop", "AdamNG", {"bptt": 40, "rate": 0.01, "epochs": 2}, 0)

    def train(run, out):
        return penn.train(run, text, text, lookup, out)

    (whole,) = harness.train_all(
        [run], lambda run: train(run, tmp_path / "a"), tmp_path / "a", ""
    )
    backup = harness.Backup.on_epoch_end

    def stopped(self, epoch, logs=None):
        backup(self, epoch, logs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(harness.Backup, "on_epoch_end", stopped)
        with pytest.raises(SystemExit):
            harness.train_all(
                [run], lambda run: train(run, tmp_path / "b"), tmp_path / "b", ""
            )
    (resumed,) = harness.train_all(
        [run], lambda run: train(run, tmp_path / "b"), tmp_path / "b", ""
    )
    np.testing.assert_allclose(
        resumed["history"]["loss"], whole["history"]["loss"], rtol=1e-5
    )


def results_of(numbers, settings, histories):
    return [
        {
            "algorithm": name,
            "settings": settings,
            "seed": seed,
            "history": histories(value),
            "data": "text",
            "date": "2026-11-16",
            "seconds": 1.0,
            "cores": 2,
            "versions": {"keras": "3", "tensorflow": "2"},
        }
        for name, value in numbers.items()
        for seed in range(2)
    ]


def language_results(perplexities):
    return results_of(
        perplexities,
        {"bptt": 40, "rate": 0.1, "epochs": 2, "data": "full"},
        lambda x: {"perplexity": [900.0, x + 1], "val_perplexity": [900.0, x]},
    )


PERPLEXITIES = dict(zip(penn.ALGORITHMS, [600.0, 500.0, 400.0, 300.0, 200.0, 150.0]))


def test_claims_of_the_language_model():
    claims = penn.claims(language_results(PERPLEXITIES))
    assert len(claims) == 5 and {claim.verdict for claim in claims} == {report.HELD}
    claims = penn.claims(language_results(PERPLEXITIES | {"Adam": 100.0}))
    failed = [claim for claim in claims if claim.verdict == report.NOT_HELD]
    assert [claim.text for claim in failed] == [
        "BPTT 40, train: AdamNG is the best",
        "BPTT 40, test: AdamNG is the best",
        "BPTT 40: AdamNG is better than Adam",
    ]
    assert failed[1].evidence == "AdamNG 5.011 ± 0.000, Adam 4.605 ± 0.000"
    diverged = penn.claims(language_results(PERPLEXITIES | {"SGDM": float("nan")}))
    assert (
        diverged[0].verdict == report.HELD
    )  # a loss that is not a number is not the best


def test_a_search_of_the_language_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(penn, "GRIDS", {"SGDM": (1.0, 0.1), "Adam": (0.01,)})
    flags = ["--smoke", "--search", "--algorithms", "SGDMNG", "Adam", "--epochs", "1"]
    results = penn.main([*flags, "--out", str(tmp_path)])
    assert [result["settings"]["rate"] for result in results] == [1.0, 0.1, 0.01]
    printed = capsys.readouterr().out
    assert "| BPTT | algorithm | 0.01 | 0.1 | 1 |" in printed
    assert "judged on the validation text" in printed and "**" in printed


def test_ten_times_the_rates_of_the_language_model(tmp_path, capsys):
    flags = ["--smoke", "--tenfold", "--algorithms", "AdamNG", "--epochs", "1"]
    (result,) = penn.main([*flags, "--out", str(tmp_path)])
    assert result["settings"]["rate"] == 0.01
    assert "| 40 | AdamNG | 0.01 | 1 |" in capsys.readouterr().out
    assert {*penn.TENFOLD_ALGORITHMS} == {"AdaGrad", "AdaGradNG", "Adam", "AdamNG"}
    # They are on the sample, and do not go beside results on all of the data.
    penn.write_report(language_results(PERPLEXITIES), tmp_path)
    assert "ten times" not in (tmp_path / f"{penn.EXPERIMENT}.md").read_text()
    penn.write_report([result], tmp_path)
    assert "ten times" in (tmp_path / f"{penn.EXPERIMENT}.md").read_text()


def write(out, experiment, name, seed=0, history=(), **settings):
    run = Run(experiment, name, settings, seed)
    harness.write(run, dict(history), 1.0, out, "made up")


def write_grid(out, name, best, kind, rates=None):
    for rate in rates or penn.WIDE[report.family(name)[0]]:
        perplexity = [900.0, 100.0 if rate == best else 500.0]
        history = {"perplexity": perplexity, "val_perplexity": perplexity}
        settings = {"bptt": 40, "rate": rate, "epochs": 2, "data": kind}
        write(out, penn.GRID, name, 0, history, **settings)


def test_every_algorithm_has_a_grid_of_its_own_family_about_two_rates_a_decade():
    assert {*penn.WIDE} == {*penn.PAIRS}
    for rates in penn.WIDE.values():
        np.testing.assert_allclose(np.divide(rates[2:], rates[:-2]), 0.1, rtol=1e-9)
        assert len(rates) == 7 and rates[0] / rates[-1] == pytest.approx(1000)


def test_the_wide_grid_of_the_language_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(penn, "WIDE", {"Adam": (0.01,)})
    flags = ["--smoke", "--grid", "--algorithms", "AdamNG", "--out", str(tmp_path)]
    (result,) = penn.main(flags)
    assert result["experiment"] == penn.GRID and result["settings"]["epochs"] == 2
    assert "(edge)" in capsys.readouterr().out


def test_tuned_runs_have_the_grids_rate_and_those_of_before_count(tmp_path):
    """Each algorithm needs no grid but its own."""
    write_grid(tmp_path, "AdamNG", 0.03, "sample")
    write_grid(tmp_path, "Adam", 0.03, "sample", penn.WIDE["Adam"][1:])
    settings = {"bptt": 40, "rate": 0.03, "epochs": 1, "data": "sample"}
    perplexity = {"perplexity": [9.0], "val_perplexity": [9.0]}
    write(tmp_path, penn.TENFOLD, "AdamNG", 0, perplexity, **settings)
    flags = ["--smoke", "--tuned", "--epochs", "1", "--seeds", "2"]
    flags += ["--out", str(tmp_path), "--algorithms"]
    for _ in range(2):
        results = penn.main([*flags, "AdamNG"])
        assert [r["experiment"] for r in results] == [penn.TENFOLD, penn.TUNED]
        assert [r["seed"] for r in results] == [0, 1]
        assert {r["settings"]["rate"] for r in results} == {0.03}
        assert len(harness.read_all(tmp_path, penn.TUNED)) == 1
    with pytest.raises(SystemExit, match="The grid of Adam is not complete .* 0.1. "):
        penn.main([*flags, "Adam"])


def test_tuned_is_not_for_1000_words():
    with pytest.raises(SystemExit) as stopped:
        penn.main(["--smoke", "--tuned", "--bptt", "1000"])
    assert stopped.value.code == 2


def test_the_section_begins_with_the_tuned_runs_once_they_are_complete(tmp_path):
    for name, best in PERPLEXITIES.items():
        write_grid(tmp_path, name, penn.WIDE[report.family(name)[0]][2], "full")
        for length, (names, epochs, seeds) in penn.TUNED_RUNS.items():
            settings = {"bptt": length, "rate": 0.1, "epochs": epochs, "data": "full"}
            history = {"perplexity": [900.0, best], "val_perplexity": [900.0, best]}
            for seed in range(seeds * (name in names)):
                experiment = penn.TUNED if seed else penn.EXPERIMENT
                write(tmp_path, experiment, name, seed, history, **settings)

    def section():
        penn.write_report(language_results(PERPLEXITIES), tmp_path)
        return (tmp_path / f"{penn.EXPERIMENT}.md").read_text()

    text = section()
    said = [line for line in text.splitlines() if "AdamNG is the best | held" in line]
    assert [line.split(":")[0] for line in said] == [
        "| tuned rates, BPTT 40, train",
        "| tuned rates, BPTT 40, test",
        "| tuned rates, BPTT 400 without AdaGrad, train",
        "| tuned rates, BPTT 400 without AdaGrad, test",
        "| paper's rates, BPTT 40, train",
        "| paper's rates, BPTT 40, test",
    ]
    assert "decide nothing" in text and "| 40 | AdamNG | 0.1 | 6 |" in text
    assert "6 epochs at BPTT 40, 5 epochs at BPTT 400" in text.splitlines()[0]
    assert "**4.605**" in text and "(edge)" not in text.replace(report.EDGE, "")
    path = tmp_path / f"{penn.TUNED}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert "tuned" not in section()


def test_the_cnn_is_kims():
    model = rotten.build_model(1000, 20)
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv1D)]
    assert [(c.kernel_size, c.filters) for c in convolutions] == [
        ((3,), 100),
        ((4,), 100),
        ((5,), 100),
    ]
    assert model.get_layer(index=1).output_dim == 128
    *_, dropout, dense = model.layers
    assert dropout.rate == 0.5 and dropout.output.shape == (None, 300)
    assert isinstance(dense.kernel_constraint, keras.constraints.MaxNorm)
    assert dense.kernel_constraint.max_value == 3


def test_words_are_those_of_the_training_sentences():
    train = (np.array(["a b c d e f", "a b !"]), np.array([0, 1]))
    reviews = data.Data(train, (np.array(["A b z"]), np.array([1])), "full", "")
    numbers, words = rotten.vectors(reviews)
    assert words == 2 + 7  # padding, unknown, a b c d e f !
    assert numbers.train[0].shape == (2, 6)
    known = int(numbers.train[0][0, 1])
    assert numbers.test[0].tolist() == [[1, known, 1, 0, 0, 0]]


@pytest.mark.parametrize("name", ["SGDMNG", "AdaGradNG", "AdamNG", "Adam"])
def test_the_embeddings_gradient_stays_sparse(name, monkeypatch):
    optimizer = harness.optimizer(name, 0.01)
    model = rotten.compiled_model(optimizer, 500, 12)
    seen = {}
    update = type(optimizer).update_step

    def watch(self, gradient, variable, rate):
        seen[tuple(variable.shape)] = type(gradient)
        return update(self, gradient, variable, rate)

    monkeypatch.setattr(type(optimizer), "update_step", watch)
    x = np.random.default_rng(0).integers(0, 500, (50, 12))
    model.train_on_batch(x, np.arange(50) % 2)
    assert seen.pop((500, 128)) is tf.IndexedSlices
    assert tf.IndexedSlices not in seen.values()


def test_a_smoke_run_of_the_cnn(tmp_path, capsys):
    flags = ["--smoke", "--seeds", "1", "--algorithms", "AdamNG", "--epochs", "6"]
    (result,) = rotten.main([*flags, "--out", str(tmp_path)])
    history = result["history"]
    assert {len(history[f"{part}_accuracy"]) for part in ("val", "dev")} == {6}
    assert history["accuracy"][-1] > 0.8
    text = (tmp_path / "rotten_tomatoes_cnn.md").read_text()
    assert "SAMPLE in place of Rotten Tomatoes" in text
    assert "REDUCED: 6 of 150 epochs" in text
    assert "100 of the training sentences are for development" in text
    assert (tmp_path / "rotten_tomatoes_cnn.png").stat().st_size > 5_000


@pytest.mark.parametrize("mode", ["--search", "--speed"])
def test_other_modes_of_the_cnn(mode, tmp_path, capsys):
    flags = ["--smoke", mode, "--algorithms", "AdamNG", "--epochs", "1"]
    assert rotten.main([*flags, "--out", str(tmp_path)])
    assert "| AdamNG | " in capsys.readouterr().out


def test_speed_has_sgd_without_momentum_whose_update_is_sparse(tmp_path, capsys):
    flags = ["--smoke", "--speed", "--algorithms", "SGDMNG", "--out", str(tmp_path)]
    rotten.main(flags)
    text = capsys.readouterr().out
    assert "| SGDMNG, no momentum | " in text and "| SGDMNG | " in text


def sentiment_results(accuracies):
    """Best of all epochs is the given one; development chooses the epoch after it."""
    return results_of(
        accuracies,
        {"rate": 0.1, "epochs": 150, "data": "full"},
        lambda x: {
            "loss": [1.0, 0.5, 0.1],
            "val_accuracy": [0.5, x / 100, x / 100 - 0.1],
            "dev_accuracy": [0.5, 0.6, 0.7],
        },
    )


def test_tuned_runs_of_the_cnn_have_the_rate_that_its_grid_chose(tmp_path, capsys):
    flags = ["--smoke", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]
    flags += ["--algorithms", "Adam", "AdamNG"]
    tuned = [*flags[:-1], "--tuned"]
    with pytest.raises(SystemExit, match="The grid of Adam is not complete"):
        rotten.main(tuned)
    for rate, accuracy in zip(rotten.GRID[:2], (0.5, 0.6)):
        history = {"dev_accuracy": [0.5, accuracy], "val_accuracy": [0.5, 0.5]}
        settings = {"rate": rate, "epochs": 10, "data": "sample"}
        write(tmp_path, rotten.SEARCH, "Adam", 0, history, **settings)
    (result,) = rotten.main(tuned)
    assert result["experiment"] == rotten.TUNED
    assert result["settings"]["rate"] == rotten.GRID[1]
    assert f"| Adam | {rotten.GRID[1]:g} | " in capsys.readouterr().out


def test_the_tuned_runs_of_the_cnn_stand_beside_the_others(tmp_path):
    results = sentiment_results(rotten.PAPER)
    for seed in range(rotten.TUNED_SEEDS):
        rotten.write_report(results, tmp_path)
        text = (tmp_path / f"{rotten.EXPERIMENT}.md").read_text()
        assert "paper's rates, chosen epoch: AdamNG is the best" in text
        assert "tuned rates" not in text
        for result in results[::2]:
            settings = result["settings"] | {"epochs": 20}
            name, history = result["algorithm"], result["history"]
            write(tmp_path, rotten.TUNED, name, seed, history, **settings)
    rotten.write_report(results, tmp_path)
    text = (tmp_path / f"{rotten.EXPERIMENT}.md").read_text()
    assert text.count("| tuned rates, chosen epoch: ") == 6
    assert "tuned rates, best" not in text
    assert text.count("| AdamNG | 0.1 | 77.11 ± 0.00 |") == 2


def test_the_rates_of_sgdm_are_those_that_the_published_search_found():
    results = harness.read_all(PUBLISHED, rotten.SEARCH)
    for name in rotten.ALGORITHMS:
        found = rotten.by_rate(results, name)
        assert {*found} == {*rotten.GRID}
        if name in ("SGDM", "SGDMNG"):
            assert max(found, key=found.__getitem__) == rotten.RATES[name]


def test_the_table_says_how_the_epoch_was_chosen():
    table = rotten.results_table(sentiment_results(rotten.PAPER))
    assert "| AdamNG | 0.1 | 77.11 ± 0.00 | 2, 2 | 67.11 ± 0.00 |" in table
    header = table.split("\n")[0]
    assert "best of all epochs" in header and "chosen on development" in header


def test_claims_of_the_cnn():
    claims = rotten.claims(sentiment_results(rotten.PAPER))
    assert len(claims) == 12 and {claim.verdict for claim in claims} == {report.HELD}
    claims = rotten.claims(sentiment_results(rotten.PAPER | {"Adam": 78.0}))
    failed = [claim.text for claim in claims if claim.verdict == report.NOT_HELD]
    assert failed == [
        "best of all epochs: AdamNG is better than Adam",
        "best of all epochs: AdamNG is the best",
        "chosen epoch: AdamNG is better than Adam",
        "chosen epoch: AdamNG is the best",
    ]


def test_the_published_rates_of_the_language_model_are_those_of_its_search():
    results = harness.read_all(PUBLISHED, penn.SEARCH)
    assert {result["settings"]["bptt"] for result in results} == {40}
    for base, ng in penn.PAIRS.items():
        for name in (base, ng):
            found = penn.by_rate(results, name)
            assert {*found} == {*penn.GRIDS[base]}
            if base == "SGDM":
                assert penn.lowest(found) == penn.RATES[name]
            else:
                assert penn.RATES[name] in found


def test_the_published_results_of_the_cnn_are_complete():
    results = harness.read_all(PUBLISHED, rotten.EXPERIMENT)
    runs = {(result["algorithm"], result["seed"]) for result in results}
    assert runs == {(name, seed) for name in rotten.ALGORITHMS for seed in (0, 1)}
    assert len(results) == len(runs)
    for result in results:
        settings, history = result["settings"], result["history"]
        assert settings["rate"] == rotten.RATES[result["algorithm"]]
        assert settings["epochs"] == len(history["val_loss"]) == 150
        assert settings["data"] == "full" and "9,596 + 1,066" in result["data"]


@pytest.mark.parametrize(
    "experiment, algorithms, lengths, times",
    [
        (penn.EXPERIMENT, penn.ALGORITHMS, penn.LENGTHS, 1),
        (penn.TENFOLD, penn.TENFOLD_ALGORITHMS, (40, 400), 10),
    ],
)
def test_the_published_results_of_the_language_model_are_complete(
    experiment, algorithms, lengths, times
):
    results = harness.read_all(PUBLISHED, experiment)
    runs = {(result["algorithm"], result["settings"]["bptt"]) for result in results}
    assert runs == {(name, n) for name in algorithms for n in lengths}
    assert len(results) == len(runs)
    for result in results:
        settings, history = result["settings"], result["history"]
        assert settings["rate"] == times * penn.RATES[result["algorithm"]]
        assert settings["epochs"] == penn.EPOCHS[settings["bptt"]]
        assert settings["epochs"] == len(history["val_perplexity"])
        assert settings["data"] == "full"
        assert "929,589 + 73,760 + 82,430 tokens" in result["data"]
