"""`examples/mnist_mlp.py`: models, seeds, claims, and the published results."""

import argparse
import pathlib

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import data
import harness
import mnist_blocks
import mnist_mlp
import report

PUBLISHED = pathlib.Path(mnist_mlp.__file__).parent / "results"


@pytest.mark.parametrize(
    "depth, parameters", [(6, 119_910), (12, 180_510), (18, 241_110)]
)
def test_the_models_have_as_many_layers_and_parameters_as_the_papers(depth, parameters):
    model = mnist_mlp.build_model(depth)
    assert len(model.layers) == depth
    assert [layer.units for layer in model.layers] == [100] * (depth - 1) + [10]
    assert all(layer.activation.__name__ == "sigmoid" for layer in model.layers[:-1])
    # 784 x 100 and 100 x 100 and 100 x 10, with biases
    assert parameters == 78_500 + (depth - 2) * 10_100 + 1_010
    assert model.count_params() == parameters


@pytest.mark.long
def test_adam_ng_learns_where_adam_is_stuck(tmp_path, capsys):
    flags = ["--data", "sample", "--epochs", "60", "--out", str(tmp_path)]
    results = mnist_mlp.main(flags)
    accuracy = {r["algorithm"]: r["history"]["val_accuracy"][-1] for r in results}
    assert accuracy["Adam"] < 0.15
    assert accuracy["AdamNG"] > 0.25  # on 4,000 digits; see RESULTS.md for all of them
    printed = capsys.readouterr().out
    assert "| 18 | AdamNG | 0.001 |" in printed
    assert "SAMPLE of MNIST" in printed
    assert (tmp_path / "mnist_mlp_short.png").stat().st_size > 5_000
    assert "SAMPLE of MNIST" in (tmp_path / "mnist_mlp_short.md").read_text()


def test_a_smoke_run_works(tmp_path):
    two_epochs_of_the_sample([], tmp_path)


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize("mode", ["--search", "--cosine"])
def test_a_smoke_run_of_another_mode_works(mode, tmp_path):
    two_epochs_of_the_sample([mode, "--algorithms", "SGDMNG", "--seeds", "1"], tmp_path)


def two_epochs_of_the_sample(mode, out):
    results = mnist_mlp.main([*mode, "--smoke", "--out", str(out)])
    assert results
    assert all(len(result["history"]["loss"]) == 2 for result in results)
    assert all(result["settings"]["data"] == "sample" for result in results)


def test_the_picture_shows_what_vanishes_under_adam_and_moves_under_adam_ng(
    tmp_path, capsys
):
    monitors = mnist_blocks.main(["--smoke", "--epochs", "1", "--out", str(tmp_path)])
    first = {name: seen.history for name, seen in monitors.items()}
    for history in first.values():
        norms = history["gradient_norm"][0]
        assert len(norms) == 18 and norms[0] < 1e-8 < 0.1 < norms[-1]
    assert first["Adam"]["relative_step"][:, 0].max() < 1e-6
    assert first["AdamNG"]["relative_step"].min() > 1e-4
    assert (tmp_path / "mnist_blocks.png").stat().st_size > 20_000
    assert "| AdamNG | first (0) |" in capsys.readouterr().out


def test_a_picture_of_several_seeds_exits_with_2():
    with pytest.raises(SystemExit) as stopped:
        mnist_blocks.main(["--seeds", "2"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("flags", [["--paper"], ["--algorithms", "SGDM", "Adam"]])
def test_what_does_not_go_with_search_exits_with_2(flags):
    with pytest.raises(SystemExit) as stopped:
        mnist_mlp.main(["--search", *flags])
    assert stopped.value.code == 2


@pytest.mark.usefixtures("without_xla")
def test_a_seed_gives_the_same_run_bit_for_bit(tmp_path):
    digits = data.mnist("sample", None)
    histories = []
    for i, seed in enumerate([0, 0, 1]):
        settings = mnist_mlp.settings(6, 0.01, 3, digits)
        run = harness.Run("same", "AdamNG", settings, seed)
        (result,) = harness.train_all(
            [run], lambda run: mnist_mlp.train(run, digits), tmp_path / str(i), ""
        )
        histories.append(result["history"])
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]


def made_up(**losses):
    """Results in which every claim holds, but for the losses given."""
    final = {}
    for depth in (6, 12, 18):
        final |= {("SGDM", depth): 1.0, ("SGDMNG", depth): 0.5}
        final |= {("AdaGrad", depth): 0.9, ("AdaGradNG", depth): 0.4}
        final |= {("Adam", depth): 0.8, ("AdamNG", depth): 0.1}
    final["Adam", 18] = 2.301
    results = []
    for (algorithm, depth), value in final.items():
        value = losses.get(f"{algorithm}_{depth}", value)
        test = losses.get(f"test_{algorithm}_{depth}", value)
        jump = losses.get(
            f"jump_{algorithm}_{depth}", 0.2 if "SGD" in algorithm else 0.01
        )
        curve, test_curve = (
            [2.3] + [last * (1 + jump), last] * 2 for last in (value, test)
        )
        results += [
            {
                "algorithm": algorithm,
                "settings": {"depth": depth},
                "seed": seed,
                "history": {"loss": curve, "val_loss": test_curve},
            }
            for seed in range(2)
        ]
    return results


def broken(**losses):
    claims = mnist_mlp.claims(made_up(**losses))
    return [c.text for c in claims if c.verdict != report.HELD]


def test_the_claims_hold_where_they_should():
    assert broken() == []
    assert len(mnist_mlp.claims(made_up())) == 16


@pytest.mark.parametrize(
    "losses, claim",
    [
        ({"SGDMNG_6": 1.1}, "6 layers: SGDMNG no worse than SGDM"),
        ({"test_SGDMNG_6": 1.1}, "6 layers: SGDMNG no worse than SGDM"),
        ({"SGDMNG_12": 1.1}, "12 layers: SGDMNG better than SGDM"),
        ({"AdaGradNG_18": 1.1}, "18 layers: AdaGradNG better than AdaGrad"),
        ({"AdamNG_12": 1.1}, "12 layers: AdamNG better than Adam"),
        (
            {"Adam_18": 2.2},
            "18 layers: Adam is stuck from the beginning, AdamNG is not",
        ),
        ({"jump_AdamNG_12": 0.3}, "12 layers: SGDMNG fluctuates more than AdamNG"),
        ({"SGDMNG_6": 0.05}, "6 layers, train loss: AdamNG is the best"),
        ({"SGDMNG_18": 0.05}, "18 layers, test loss: AdamNG is the best"),
    ],
)
def test_a_claim_that_fails_is_reported(losses, claim):
    assert claim in broken(**losses)


def test_a_cosine_run_begins_at_the_same_rate_and_ends_at_zero(monkeypatch):
    made = []

    def compile_model(model, optimizer):
        made.append((optimizer, float(optimizer.learning_rate)))
        model.compile(optimizer, "sparse_categorical_crossentropy")

    monkeypatch.setattr(mnist_mlp, "compile_model", compile_model)
    digits = data.first(data.mnist("sample", None), 250)  # three batches
    run = harness.Run("r", "AdamNG", mnist_mlp.settings(6, 0.5, 2, digits), 0)
    mnist_mlp.train(run, digits)
    mnist_mlp.train(mnist_mlp.with_cosine(run), digits)
    (constant, first), (decayed, begin) = made
    assert first == begin == 0.5
    assert float(constant.learning_rate) == 0.5
    assert int(decayed.iterations) == 6 and float(decayed.learning_rate) < 1e-7


def test_the_cosine_runs_stand_beside_the_constant_ones_once_they_are_complete(
    tmp_path,
):
    runs = []
    for made in made_up():
        settings = made["settings"] | {"rate": 0.1, "epochs": 5, "data": "full"}
        run = harness.Run("mnist_mlp", made["algorithm"], settings, made["seed"])
        history = made["history"] | {"val_accuracy": [0.9]}
        for each in (run, mnist_mlp.with_cosine(run)):
            harness.write(each, history, 1.0, tmp_path, "made up")
        runs.append(run)

    def section():
        options = argparse.Namespace(out=tmp_path, paper=True)
        mnist_mlp.write_report(harness.results(runs, tmp_path), options)
        return (tmp_path / "mnist_mlp.md").read_text()

    text = section()
    for end in ("constant rate", "cosine decay"):
        assert f"| {end}, 6 layers, train loss: AdamNG is the best | held |" in text
    path = tmp_path / f"{mnist_mlp.COSINE}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert "cosine decay" not in section()


def test_the_rate_is_the_best_on_held_out_examples_and_nan_is_the_worst():
    results = [
        {
            "algorithm": "SGDM",
            "settings": {"depth": 6, "rate": rate},
            "seed": seed,
            "history": {"val_loss": [0.1, loss]},
        }
        for rate, loss in ((1.0, np.nan), (0.1, 0.5), (0.01, 0.4), (0.001, 2.0))
        for seed in (0, 1)
    ]
    assert mnist_mlp.best_rate(results, "SGDM", 6) == 0.01
    assert "| SGDM | 6 | 2.000 | **0.400** | 0.500 | inf |" in mnist_mlp.search_table(
        results
    )


def test_the_rates_in_use_are_those_that_the_published_search_found():
    results = harness.read_all(PUBLISHED, mnist_mlp.SEARCH)
    for algorithm in mnist_mlp.SEARCHED:
        for depth in mnist_mlp.DEPTHS:
            found = mnist_mlp.best_rate(results, algorithm, depth)
            assert mnist_mlp.RATES[algorithm][depth] == found
    assert {r["settings"]["rate"] for r in results} == {*mnist_mlp.GRID}


def test_the_published_results_are_complete_and_on_all_of_mnist():
    results = [
        result
        for result in harness.read_all(PUBLISHED, mnist_mlp.EXPERIMENT)
        if result["settings"]["epochs"] == 30
    ]
    combinations = {
        (r["algorithm"], r["settings"]["depth"], r["seed"]) for r in results
    }
    assert len(combinations) == len(results) == 18 * 3
    for result in results:
        depth = result["settings"]["depth"]
        assert result["settings"]["rate"] == mnist_mlp.RATES[result["algorithm"]][depth]
        assert "60,000 + 10,000" in result["data"]
        assert len(result["history"]["val_loss"]) == 30


def test_the_readme_shows_the_published_short_runs():
    results = [
        result
        for result in harness.read_all(PUBLISHED, mnist_mlp.EXPERIMENT)
        if result["settings"]["epochs"] == mnist_mlp.SHORT["full"]
    ]
    assert len(results) == 6
    readme = (PUBLISHED.parent.parent / "README.md").read_text().replace("*", "")
    assert mnist_mlp.results_table(results) in readme
    assert "(examples/results/mnist_mlp_short.png)" in readme


def test_what_the_readme_says_it_does_is_what_the_published_runs_say():
    def mean(experiment, algorithm, metric, **settings):
        results = harness.read_all(PUBLISHED, experiment)
        return float(report.last(results, algorithm, metric, **settings).mean())

    readme = " ".join((PUBLISHED.parent.parent / "README.md").read_text().split())
    for metric, depth, text in (
        ("val_accuracy", 18, "accuracy is {:.2f} with AdamNG and {:.2f} with Adam."),
        ("loss", 6, "and AdamNG at {:.3f}; on"),
    ):
        found = [
            mean(mnist_mlp.EXPERIMENT, name, metric, depth=depth, epochs=30)
            for name in ("AdamNG", "Adam")
        ]
        assert text.format(*found) in readme
    assert f"ends at a train loss of {found[1]:.3f} and AdamNG" in readme
    errors = [
        100 - 100 * mean("cifar_resnet", name, "val_accuracy", classes=10, epochs=16)
        for name in ("SGDM", "SGDMNG", "SGDMNG_adap")
    ]
    text = (
        "{:.1f} % with SGD, {:.1f} % with the default rule and {:.1f} % with adaptive"
    )
    assert text.format(*errors) in readme
