"""`examples/trainability.py` and `deep_models.py`: maps over depth and rate."""

import argparse
import collections
import dataclasses
import math

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import deep_models
import harness
import trainability
from deep_models import RECIPES, Bench
from harness import Run

from keras_bng import partition

GREY = np.array([0x8C] * 3) / 255


@pytest.fixture(scope="module")
def tasks():
    options = argparse.Namespace(data="sample", data_dir=None)
    made = {name: task(options) for name, task in deep_models.TASKS.items()}
    small = {"steps": 20, "xla": False}
    return {name: dataclasses.replace(task, **small) for name, task in made.items()}


def study(tmp_path, *flags):
    """The study of these flags, of which nothing is run."""
    found = []

    class Kept(trainability.Study):
        def stage(self, stage):
            found.append(self)
            return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainability, "Study", Kept)
        trainability.main([*flags, "--data", "sample", "--out", str(tmp_path)])
    return found[0]


def result(algorithm, depth, rate, losses, seed=0, warmup=False, accuracy=0.5):
    settings = {"task": "mlp", "steps": 1200, "data": "sample"}
    settings |= {"depth": depth, "rate": rate, "warmup": warmup}
    losses = losses if isinstance(losses, list) else [losses] * 10
    return {
        "algorithm": algorithm,
        "settings": settings,
        "seed": seed,
        "history": {"val_loss": losses, "val_accuracy": [accuracy], "guessing": [2.0]},
    }


# What is decided beforehand.


def test_everybody_has_as_many_cells(tmp_path):
    made = study(tmp_path)
    for name, number in {"mlp": 35, "post-ln": 20, "pre-ln": 5, "adding": 20}.items():
        runs = [r for r in made.map(name) if r.algorithm not in trainability.ABLATION]
        cells = collections.Counter((r.algorithm, r.settings["warmup"]) for r in runs)
        assert set(cells.values()) == {number}
        assert {algorithm for algorithm, _ in cells} == {*trainability.COMPARED[name]}
    blocks = [r for r in made.map("post-ln") if r.algorithm in trainability.ABLATION]
    assert collections.Counter(r.algorithm for r in blocks) == dict.fromkeys(
        trainability.ABLATION, 5
    )
    assert {run.settings["depth"] for run in blocks} == {12}


@pytest.mark.parametrize(
    "algorithm, middle",
    [
        ("SGDM", 0.01),
        ("Adam_1e-20", 0.001),
        ("Muon", 0.001),
        ("SGDMNG", 0.01),
        ("AdamNG", 0.001),
        ("LionNG", keras.optimizers.Lion().get_config()["learning_rate"]),
    ],
)
def test_rates_are_two_a_decade_around_the_optimizers_own_default(algorithm, middle):
    rates = RECIPES[algorithm].rates(2)
    assert len(rates) == 5
    assert rates[2] == pytest.approx(middle)
    np.testing.assert_allclose(np.diff(np.log10(rates)), 0.5, atol=0.001)
    assert RECIPES[algorithm].rates(1) == rates[1:-1]


@pytest.mark.parametrize(
    "losses, expected",
    [
        ([1.0, 2.0], 1.5),  # half of the way from 2 to 1
        ([0.0, math.inf], 1.0),
        ([1.8, 1.9], 1.9),  # a tenth below guessing is enough
        ([1.81, 1.9], -math.inf),  # less is not: nobody trains
        ([math.inf], -math.inf),
    ],
)
def test_half_of_the_way_from_guessing_to_the_best_is_trained(losses, expected):
    assert trainability.bar(2.0, losses) == pytest.approx(expected)


def test_each_depth_has_its_own_bar_and_other_seeds_and_blocks_do_not_move_it():
    results = [
        result("Adam", 4, 0.1, 1.0),
        result("AdamNG", 4, 0.1, 0.4),
        result("AdamNG", 8, 0.1, 1.0),
        result("AdamNG", 4, 0.1, 0.0, seed=1),
        result("AdamNG_model", 4, 0.1, 0.0),
    ]
    assert trainability.bars(results) == {4: pytest.approx(1.2), 8: pytest.approx(1.5)}


def test_what_is_not_a_number_never_trains():
    cells = {(4, 0.1): result("Adam", 4, 0.1, [0.1] * 9 + [math.nan])}
    assert trainability.trained_cells(cells, {4: 1.0}) == []
    assert trainability.trained_cells(cells, {4: math.inf}) != []
    assert trainability.final(result("Adam", 4, 0.1, math.inf)) == math.inf
    assert trainability.best_rate(cells, 4) is None
    assert trainability.best_rate(cells, 8) is None
    cells[4, 0.2] = result("Adam", 4, 0.2, 5.0)
    assert trainability.best_rate(cells, 4) == 0.2


def test_at_equal_time_a_slow_optimizer_has_done_fewer_steps():
    losses = [1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0]
    found = [trainability.at_equal_time(losses, x, 2.0) for x in (0.5, 1, 2, 2.5, 100)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 1.6, 1.99])


# What is trained.


def test_all_optimizers_begin_with_the_same_weights(tasks):
    first = {}
    for algorithm in trainability.COMPARED["mlp"]:
        bench = Bench(tasks["mlp"], RECIPES[algorithm], 3, 10)
        for seed in (1, 0):
            bench.reset(seed, 0.1, 0)
            weights = [w.copy() for w in bench.model.get_weights()]
            for mine, others in zip(weights, first.setdefault(seed, weights)):
                np.testing.assert_array_equal(mine, others)
    assert not np.array_equal(first[0][0], first[1][0])


@pytest.mark.parametrize("name, algorithm", [("mlp", "MuonNG"), ("adding", "AdamNG")])
def test_the_same_run_in_another_order_gives_the_same_numbers(
    name, algorithm, tasks, tmp_path
):
    """One trace serves all, through `harness.train_all`, which clears the session."""
    made = study(tmp_path, "--smoke", "--tasks", name)
    cells = [(0.01, 0, False), (0.03, 1, False), (0.01, 0, True)]
    runs = [made.run(name, (algorithm, w), 4, rate, seed) for rate, seed, w in cells]
    there = harness.train_all(runs, made.train, tmp_path / "there", "")
    traced = made.bench
    back = harness.train_all(runs[::-1], made.train, tmp_path / "back", "")
    assert made.bench is traced
    histories = [r["history"]["val_loss"] for r in there]
    assert histories == [r["history"]["val_loss"] for r in back[::-1]]
    alone = Bench(made.tasks[name], RECIPES[algorithm], 4, 10)
    alone.reset(1, 0.03, 0)
    assert alone.train(1)["val_loss"] == histories[1]
    assert len({tuple(history) for history in histories}) == 3


def test_a_bench_trains_like_plain_keras_also_when_it_was_used_before(tasks):
    task = dataclasses.replace(tasks["adding"], xla=True)
    bench = Bench(task, RECIPES["Adam"], 4, 10)
    bench.reset(1, 0.03, 6)
    bench.train(1)
    bench.reset(0, 0.003, 0)
    found = bench.train(0)["val_loss"][-1]

    keras.utils.set_random_seed(0)
    model = task.build(4)
    model.compile(keras.optimizers.Adam(0.003), task.loss)
    model.fit(task.batches(4, 0, task.steps), shuffle=False, verbose=0)
    plain = model.evaluate(*task.checked(4), verbose=0)
    assert found == pytest.approx(plain, rel=1e-4)


def test_a_run_that_is_not_a_number_stops_and_has_as_many_points(tasks):
    bench = Bench(tasks["mlp"], RECIPES["SGDM"], 3, 10)
    bench.reset(0, 3e38, 0)
    losses = bench.train(0)["val_loss"]
    assert len(losses) == 10 and np.isnan(losses[-9:]).all()
    assert int(bench.model.optimizer.iterations) < 20
    bench.reset(0, 0.1, 0)
    assert np.isfinite(bench.train(0)["val_loss"]).all()


def test_a_warm_up_is_a_straight_line_to_a_rate_that_then_stays():
    ramp = deep_models.Ramp()
    ramp.rate.assign(0.3)
    assert [float(ramp(step)) for step in (0, 99)] == pytest.approx([0.3, 0.3])
    ramp.steps.assign(100)
    found = [float(ramp(step)) for step in (0, 49, 99, 299)]
    assert found == pytest.approx([0.003, 0.15, 0.3, 0.3])


@pytest.mark.parametrize("algorithm", ["Muon", "MuonNG"])
def test_muon_has_the_hidden_matrices_and_adam_the_rest(algorithm, tasks):
    hidden = {
        "mlp": lambda path: "kernel" in path and "dense_3/" not in path,
        "post-ln": lambda path: (
            "kernel" in path and ("attention_" in path or "feed_" in path)
        ),
        "adding": lambda path: "lstm_cell" in path and "kernel" in path,
    }
    for name, number in {"mlp": 3, "post-ln": 12, "adding": 2}.items():
        keras.utils.clear_session()
        model = tasks[name].build({"mlp": 4}.get(name, 2))
        optimizer = RECIPES[algorithm].made(model, 0.1)
        optimizer.build(model.trainable_variables)
        by_muon = [
            variable.path
            for variable, velocity in zip(
                model.trainable_variables, optimizer.adam_velocities
            )
            if velocity is None
        ]
        paths = [variable.path for variable in model.trainable_variables]
        assert by_muon == [path for path in paths if hidden[name](path)]
        assert len(by_muon) == number


def test_an_attention_as_one_block_has_a_quarter_of_the_blocks(tasks):
    variables = tasks["post-ln"].build(2).trainable_variables

    def attention_blocks(blocks):
        found = partition(variables, blocks)
        return [b for b in found if "attention" in b.variables[0].path], len(found)

    of_four, all_of_four = attention_blocks("layer")
    whole, all_whole = attention_blocks(deep_models.whole_attention)
    assert (len(of_four), len(whole)) == (8, 2)
    assert all_of_four - all_whole == 6  # the other blocks are the same
    assert all(len(block.variables) == 8 for block in whole)
    assert RECIPES["AdamNG_attention"].options["blocks"] is deep_models.whole_attention


def test_batches_depend_on_seed_and_step_alone(tasks):
    for task in tasks.values():
        first, again, other = (
            [np.asarray(x) for x, _ in task.batches(4, seed, 3)] for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
        assert not np.array_equal(first[0], first[1])


def test_the_adding_problem_is_the_sum_of_the_two_marked_numbers(tasks):
    x, y = tasks["adding"].checked(50)
    assert x.shape == (1000, 50, 2)
    np.testing.assert_array_equal(x[:, :25, 1].sum(1), 1)
    np.testing.assert_array_equal(x[:, 25:, 1].sum(1), 1)
    np.testing.assert_allclose((x[..., 0] * x[..., 1]).sum(1), y[:, 0], rtol=1e-6)
    assert y.var() == pytest.approx(tasks["adding"].guessing, rel=0.1)


def test_a_transformer_does_not_look_ahead(tasks):
    for name in ("post-ln", "pre-ln"):
        x = tasks[name].checked(2)[0][:1]
        changed = x.copy()
        changed[:, 50:] = (changed[:, 50:] + 1) % 10
        model = tasks[name].build(2)
        before, after = (keras.ops.convert_to_numpy(model(t)) for t in (x, changed))
        np.testing.assert_array_equal(before[:, :50], after[:, :50])
        assert not np.allclose(before[:, 50:], after[:, 50:])


# What is written.


def made_up():
    ends = {
        "Adam": {4: (1.0, 0.6), 8: (1.9, math.nan)},
        "Muon": {4: (0.2, 0.3), 8: (1.0, 1.2)},
        "AdamNG": {4: (1.2, 0.8), 8: (1.4, 1.6)},
    }
    results = [
        result(algorithm, depth, rate, list(np.linspace(2, loss, 11)[1:]))
        for algorithm, depths in ends.items()
        for depth, losses in depths.items()
        for rate, loss in zip((0.001, 0.01), losses)
    ]
    return [*results, result("AdamNG", 8, 0.001, 1.5, seed=1, accuracy=0.6)]


def test_the_table_of_made_up_results_is_as_counted_by_hand():
    results = made_up()
    times = {"Adam": 1.0, "Muon": 2.0, "AdamNG": 1.25}
    lines = {
        row[0]: trainability.summary(row, cells, results, 8, times[row[0]])
        for row, cells in trainability.by_row(results).items()
    }
    # Bars are at (2 + 0.2) / 2 and (2 + 1) / 2.
    assert {a: x["trained"] for a, x in lines.items()} == {
        **{"Adam": 2, "Muon": 4, "AdamNG": 2}
    }
    assert {a: x["deepest"] for a, x in lines.items()} == {
        **{"Adam": 4, "Muon": 8, "AdamNG": 8}
    }
    assert lines["AdamNG"]["losses"] == [1.4, 1.5] and lines["AdamNG"]["at edge"]
    assert lines["Muon"]["equal"] == pytest.approx(1.5)  # half of the steps
    assert lines["AdamNG"]["equal"] == pytest.approx(2 - 0.8 * 0.6)
    text = trainability.map_table([*lines.values()], "layers", 8, 3)
    assert "| Adam | 2 of 4 | 4 | 1.900 | 0.500 | 0.001 (edge) | 1.00 | 1.900 |" in text
    assert "| AdamNG | 2 of 4 | 8 | 1.450 ± 0.071 | 0.550 ± 0.071 | 0.001 " in text
    assert "| 8 | 1.000 | Muon | at most 1.500 |" in trainability.depth_table(
        results, "layers", 3
    )


def test_the_table_of_blocks_has_in_bold_what_trains():
    results = [
        result("AdamNG", 12, 0.1, 1.0),
        result("AdamNG_model", 12, 0.1, 1.9),
        result("AdamNG_attention", 12, 0.1, math.nan),
    ]
    text = trainability.ablation_table(trainability.by_row(results), 12, 1.5)
    assert "| layer | **1.000** |" in text and "| model | 1.900 |" in text
    assert "| variable |  |" in text and "| attention | inf |" in text


def test_what_is_not_a_number_is_grey_and_what_is_missing_is_not(tasks, tmp_path):
    import matplotlib.pyplot as plt

    def share_of_grey(results):
        rows = trainability.by_row(results)
        trainability.picture(rows, results, tasks["mlp"], tmp_path / "map.png")
        pixels = plt.imread(tmp_path / "map.png")[..., :3]
        return (np.abs(pixels - GREY).max(-1) < 0.003).mean()

    results = made_up()
    with_nan = share_of_grey(results)
    assert with_nan > 0.01
    assert share_of_grey(
        [r for r in results if math.isfinite(trainability.final(r))]
    ) < (with_nan / 4)


def test_times_are_the_median_of_pairs():
    timed = {"algorithm": "Muon", "history": {}}
    timed["history"]["seconds"] = [2.0, 9.0, 4.0]
    timed["history"]["adam_seconds"] = [1.0, 3.0, 2.0]
    assert trainability.relative_times([timed]) == {"Adam": 1.0, "Muon": 2.0}


# What is run.


def test_two_parts_are_the_whole_and_neither_has_much_more(tmp_path):
    whole = study(tmp_path)
    parts = [study(tmp_path, "--part", f"{i}/2") for i in (1, 2)]
    for name in deep_models.TASKS:
        runs = [[run.name for run in part.map(name)] for part in parts]
        assert sorted(runs[0] + runs[1]) == sorted(r.name for r in whole.map(name))
        assert not {*runs[0]} & {*runs[1]}
    work = [
        sum(
            run.settings["depth"] * run.settings["steps"]
            for name in deep_models.TASKS
            for run in part.map(name)
        )
        for part in parts
    ]
    assert max(work) < 1.1 * min(work)


def test_seeds_are_of_the_best_rate_and_wait_for_all_rates(tmp_path, capsys):
    made = study(tmp_path, "--tasks", "mlp", "--algorithms", "Adam", "AdamNG")
    loss = dict(zip(RECIPES["Adam"].rates(2), (2.2, 1.5, 1.0, 1.2, 9.0)))
    runs = [run for run in made.map("mlp") if run.settings["depth"] == 18]
    for run in runs[:-1]:  # AdamNG's last is missing
        history = {"val_loss": [loss[run.settings["rate"]]] * 10, "guessing": [2.3]}
        harness.write(run, history, 1.0, tmp_path, "")
    found = made.seeds("mlp")
    assert [(r.algorithm, r.settings["rate"], r.seed) for r in found] == [
        ("Adam", 0.001, 1),
        ("Adam", 0.001, 2),
    ]
    assert "No best rate of AdamNG, 18 layers, yet." in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--part", "3/2"],
        ["--part", "1"],
        ["--epochs", "3"],
        ["--depths", "1"],
        ["--reach", "0"],
    ],
)
def test_flags_that_make_no_sense_exit_with_2(flags):
    with pytest.raises(SystemExit) as stopped:
        trainability.main(flags)
    assert stopped.value.code == 2


def test_a_smoke_run_trains_all_stages_once(tmp_path, capsys):
    flags = ["--smoke", "--tasks", "mlp", "--depths", "3", "--out", str(tmp_path)]
    results = trainability.main(flags)
    assert (
        len(results) == 2 * 3 + 2
    )  # two optimizers at three rates, and two seeds more
    assert {result["seed"] for result in results} == {0, 1}
    assert all(len(result["history"]["val_loss"]) == 10 for result in results)
    text = (tmp_path / "trainability.md").read_text()
    assert "SAMPLE" in text and "| AdamNG |" in text
    assert "All have the same number of cells, 3." in text
    assert (tmp_path / "trainability.png").stat().st_size > 5_000
    (timed,) = harness.read_all(tmp_path, trainability.TIMES)
    assert len(timed["history"]["seconds"]) == trainability.ROUNDS
    assert min(timed["history"]["adam_seconds"]) > 0
    capsys.readouterr()
    assert trainability.main(flags) == results
    assert "[1/" not in capsys.readouterr().out  # nothing is trained again
    assert (tmp_path / "trainability.md").read_text() == text


@pytest.mark.long
def test_the_other_tasks_train_with_and_without_warm_up_and_with_other_blocks(tmp_path):
    flags = ["--smoke", "--tasks", "post-ln", "adding", "--depths", "2"]
    flags += ["--stages", "train", "report", "--algorithms", "AdamNG"]
    flags += ["AdamNG_attention", "--out", str(tmp_path)]
    results = trainability.main(flags)
    assert len(results) == (6 + 3) + 3
    for name in ("post-ln", "adding"):
        text = (tmp_path / f"trainability_{name}.md").read_text()
        assert ("| attention |" in text) == (name == "post-ln")
        assert ("| AdamNG, warm-up |" in text) == (name != "adding")
        assert (tmp_path / f"trainability_{name}.png").stat().st_size > 5_000


def test_a_runs_name_tells_all_cells_apart(tmp_path):
    made = study(tmp_path)
    runs = [run for name in deep_models.TASKS for run in made.map(name)]
    assert len({run.name for run in runs}) == len(runs) == 490 + 295 + 70 + 120
    assert all(isinstance(run, Run) for run in runs)
