"""`examples/harness.py` and `examples/report.py`: runs, results, flags, reports."""

import json
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import harness
import report
import shelf
from harness import Run

EXAMPLES = pathlib.Path(harness.__file__).parent


def some_runs(number=3):
    return [Run("try", "Adam", {"rate": 0.1}, seed) for seed in range(number)]


def train(run):
    return {"loss": [1.0, 0.5 + run.seed]}


def script(*arguments, cwd, **kwargs):
    command = [sys.executable, str(EXAMPLES / "mnist_mlp.py"), *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


@pytest.mark.parametrize("name", harness.ALGORITHMS)
def test_every_algorithm_of_the_paper_makes_an_optimizer(name):
    optimizer = harness.optimizer(name, 0.25, l2=1e-4)
    assert float(optimizer.learning_rate.numpy()) == 0.25
    assert optimizer.l2 == 1e-4
    base, version = report.family(name)
    assert (getattr(optimizer, "rule", None) is None) == (version == "")
    stock = {"SGDM": keras.optimizers.SGD, "AdaGrad": keras.optimizers.Adagrad}
    if version != "BNG":
        assert isinstance(optimizer, stock.get(base, keras.optimizers.Adam))
    if base == "SGDM":
        assert optimizer.momentum == 0.9


def test_a_result_says_all_that_was_run(tmp_path):
    (run,) = some_runs(1)
    (result,) = harness.train_all([run], train, tmp_path, "digits, 4,000")
    assert shelf.read(tmp_path / "try.jsonl") == [result]
    assert result["algorithm"] == "Adam" and result["seed"] == 0
    assert result["settings"] == {"rate": 0.1}
    assert result["data"] == "digits, 4,000"
    assert result["history"] == {"loss": [1.0, 0.5]}
    assert result["versions"]["keras"] == keras.__version__
    assert result["seconds"] >= 0 and result["date"] and result["cores"]


def test_finished_runs_are_skipped(tmp_path, capsys):
    runs, trained = some_runs(), []
    harness.train_all(runs[:2], train, tmp_path, "")

    def train_and_tell(run):
        trained.append(run.seed)
        return train(run)

    results = harness.train_all(runs, train_and_tell, tmp_path, "")
    assert trained == [2]
    assert [result["seed"] for result in results] == [0, 1, 2]
    assert "2 of 3 runs are in" in capsys.readouterr().out


def test_runs_that_differ_in_anything_are_not_taken_for_one_another(tmp_path):
    first = Run("try", "Adam", {"rate": 0.1, "epochs": 2}, 0)
    others = [
        Run("other", "Adam", {"rate": 0.1, "epochs": 2}, 0),
        Run("try", "AdamNG", {"rate": 0.1, "epochs": 2}, 0),
        Run("try", "Adam", {"rate": 0.01, "epochs": 2}, 0),
        Run("try", "Adam", {"rate": 0.1, "epochs": 3}, 0),
        Run("try", "Adam", {"rate": 0.1, "epochs": 2}, 1),
    ]
    assert len({run.backup(tmp_path) for run in [first, *others]}) == 6
    harness.train_all([first], train, tmp_path, "")
    assert [bool(x) for x in harness.results([first, *others], tmp_path)] == [
        True,
        *[False] * 5,
    ]


def test_of_a_run_that_is_there_twice_the_last_counts(tmp_path):
    runs = some_runs()
    for loss, run in enumerate([runs[2], runs[0], runs[1], runs[0]]):
        harness.write(run, {"loss": [loss]}, 1.0, tmp_path, "")
    assert len(shelf.read(tmp_path / "try.jsonl")) == 4
    found = harness.read_all(tmp_path, "try")  # by name, whoever was the first
    assert [result["seed"] for result in found] == [0, 1, 2]
    assert [result["history"]["loss"] for result in found] == [[3], [2], [0]]
    assert harness.train_all(runs, None, tmp_path, "") == found


def test_results_of_before_with_a_file_each_count_as_well(tmp_path):
    runs = some_runs()
    harness.train_all(runs[1:2], train, tmp_path / "now", "")
    (old,) = shelf.read(tmp_path / "now" / "try.jsonl")
    file = runs[1].path(tmp_path, ".json")
    harness.write_text(file, json.dumps(old, indent=1) + "\n")
    before = file.read_bytes()
    found = harness.train_all([runs[2], runs[0]], train, tmp_path, "")
    found = [found[1], old, found[0]]
    assert harness.train_all(runs, None, tmp_path, "") == found
    assert harness.read_all(tmp_path, "try") == found
    assert file.read_bytes() == before
    harness.write(runs[1], {"loss": [7.0]}, 1.0, tmp_path, "")
    assert harness.read_all(tmp_path, "try")[1]["history"] == {"loss": [7.0]}


def test_half_a_result_does_not_count(tmp_path):
    runs = some_runs(2)
    first = harness.train_all(runs[:1], train, tmp_path, "")
    size = (tmp_path / "try.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:  # as on a full disk
        with pytest.raises(OSError, match="File too large"):
            harness.train_all(runs, train, tmp_path, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "try.jsonl").stat().st_size == size + 100
    assert harness.read_all(tmp_path, "try") == first
    assert len(harness.train_all(runs, train, tmp_path, "")) == 2
    assert len(harness.read_all(tmp_path, "try")) == 2


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path, capsys):
    def interrupted(run):
        if run.seed == 1:
            raise KeyboardInterrupt
        return train(run)

    with pytest.raises(SystemExit) as stopped:
        harness.train_all(some_runs(), interrupted, tmp_path, "")
    assert stopped.value.code == 130
    printed = capsys.readouterr().out
    assert "1 of 3 runs are kept" in printed and "same command again" in printed
    assert len(harness.read_all(tmp_path, "try")) == 1


@pytest.mark.parametrize("name", ["try.jsonl", "try/old.json"])
def test_a_result_that_is_not_json_is_named(name, tmp_path):
    (run,) = some_runs(1)
    harness.write_text(tmp_path / name, '{"experiment": "tr\n')
    with pytest.raises(SystemExit, match="is not a result .* Delete (it|that line)"):
        harness.train_all([run], train, tmp_path, "")


def test_seeds_are_set_before_each_run(tmp_path):
    drawn = []
    for out in ("a", "b"):
        harness.train_all(
            some_runs(2),
            lambda run: drawn.append(float(keras.random.uniform(()))) or {},
            tmp_path / out,
            "",
        )
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--algorithms", "Adamm"], r"unknown algorithms \['Adamm'\]; known: \['SGDM'"),
        (["--epochs", "0"], "--epochs must be 1 or more. Received: 0"),
        (["--epochs", "many"], "invalid int value: 'many'"),
        (["--seeds", "-1"], "--seeds must be 1 or more. Received: -1"),
        (["--data", "moon"], "invalid choice: 'moon'"),
        (["--data-dir", "no/such"], "--data-dir is not a directory. Received: no/such"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_bad_flags_end_with_2_and_a_message(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        harness.parse(harness.parser("doc", ["SGDM", "Adam"]), flags)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_script_exits_with_2(tmp_path):
    process = script("--algorithms", "Adamm", cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "unknown algorithms ['Adamm']; known: ['SGDM', 'SGDMNG'" in errors


@pytest.mark.long
def test_a_killed_command_loses_only_the_run_it_was_in(tmp_path):
    flags = ["--data", "sample", "--epochs", 3, "--seeds", 2, "--algorithms", "Adam"]
    process = script(*flags, cwd=tmp_path)
    path = tmp_path / "runs" / "mnist_mlp.jsonl"
    deadline = time.time() + 100
    while not shelf.read(path) and time.time() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (first,) = path.read_bytes().splitlines()

    process = script(*flags, cwd=tmp_path)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "1 of 2 runs are in runs already." in printed
    lines = path.read_bytes().splitlines()
    assert len(lines) == 2 and lines[0] == first


def test_the_report_gives_mean_and_standard_deviation():
    assert report.plus_minus([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert report.plus_minus([1.25], 1) == "1.2"


def test_the_figure_has_a_panel_a_setting_and_a_line_an_algorithm(
    tmp_path, monkeypatch
):
    results = [
        {
            "algorithm": name,
            "settings": {"depth": depth},
            "seed": seed,
            "history": {"loss": [2.0, 1.0 + seed], "val_loss": [2.0, 1.5]},
        }
        for name in ("Adam", "AdamNG", "SGDMNG_adap")
        for depth in (6, 12)
        for seed in (0, 1)
    ]
    kept = []
    monkeypatch.setattr(report.pyplot(), "close", kept.append)
    panels = [("6 layers", {"depth": 6}), ("12 layers", {"depth": 12})]
    report.curves(results, panels, tmp_path / "a.png")
    (figure,) = kept
    assert (tmp_path / "a.png").stat().st_size > 5_000
    assert len(figure.axes) == 4
    assert [ax.get_title() for ax in figure.axes[:2]] == ["6 layers", "12 layers"]
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["Adam", "AdamNG", "SGDMNG_adap"]
    assert np.allclose(lines[0].get_ydata(), [2.0, 1.5])  # the mean over seeds
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == 3


def test_every_algorithm_has_a_look_of_its_own():
    looks = [tuple(report.style(name).values()) for name in harness.ALGORITHMS]
    drawn_together = [n for n in harness.ALGORITHMS if n != "AdaGradBNG"]
    assert len({*looks}) == len(drawn_together)


def test_results_md_is_put_together_from_the_sections(tmp_path):
    (tmp_path / "results").mkdir()
    with pytest.raises(SystemExit, match="Run an experiment first"):
        report.assemble(tmp_path / "results")
    report.section(tmp_path / "results", "b", "Second", ["two"])
    report.section(tmp_path / "results", "a", "First", ["one"])
    text = report.assemble(tmp_path / "results").read_text()
    assert text.index("## First") < text.index("one") < text.index("## Second")
    assert "](results/a.png)" in text


def test_the_published_results_md_is_what_the_sections_say(tmp_path):
    published = EXAMPLES / "RESULTS.md"
    copy = tmp_path / "results"
    copy.mkdir()
    for section in (EXAMPLES / "results").glob("*.md"):
        (copy / section.name).write_text(section.read_text())
    assert report.assemble(copy).read_text() == published.read_text()
    for figure in re.findall(r"\]\((\S+\.png)\)", published.read_text()):
        assert (EXAMPLES / figure).exists()


def test_remarks_go_with_the_results_beside_which_they_are(tmp_path, capsys):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "ours" / "mlp.remarks.txt").write_text("SGD paused.\n")
    for name in ("ours", "theirs"):
        report.section(tmp_path / name, "mlp", "MLP", ["A table."])
    assert (
        (tmp_path / "ours" / "mlp.md").read_text().endswith("A table.\n\nSGD paused.\n")
    )
    assert (tmp_path / "theirs" / "mlp.md").read_text().endswith("A table.\n")
    assert report.assemble(tmp_path / "ours").read_text().count("SGD paused.") == 1
