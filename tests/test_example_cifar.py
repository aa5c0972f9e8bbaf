"""`examples/cifar_resnet.py`: models, input, settings, resuming, claims."""

import dataclasses
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import cifar_resnet
import data
import harness
import report
import tensorflow as tf
from harness import Run
from reference import block_norm

from keras_bng import Adaptive, Clip

SCRIPT = pathlib.Path(cifar_resnet.__file__)
PUBLISHED = SCRIPT.parent / "results"
PAPER = {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85, 110: 1.7}  # He et al., in millions


def planned(*flags, monkeypatch):
    """The runs that the command would do."""
    seen = []

    def train_all(runs, train, out, provenance):
        seen.extend(runs)
        raise SystemExit

    monkeypatch.setattr(harness, "train_all", train_all)
    monkeypatch.setattr(data, "cifar", lambda classes, *_: data.cifar_sample(classes))
    with pytest.raises(SystemExit):
        cifar_resnet.main([*map(str, flags)])
    return seen


@pytest.mark.parametrize("depth, millions", PAPER.items())
def test_the_models_have_the_papers_layers_and_parameters(depth, millions):
    model = cifar_resnet.build_model(depth, 10)
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    assert len(kernels) == depth  # so the shortcuts have no parameters
    number = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert round(number / 1e6, 1 if depth == 110 else 2) == millions
    assert model.output_shape == (None, 10)
    by_channels = [v.shape[-1] for v in kernels[:-1]]
    n = depth // 6
    assert by_channels == [16] * (2 * n + 1) + [32] * (2 * n) + [64] * (2 * n)


def test_convolutions_are_initialized_as_by_he_et_al():
    keras.utils.set_random_seed(0)
    model = cifar_resnet.build_model(20, 100)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            kernel = np.asarray(layer.kernel)
            expected = np.sqrt(2 / np.prod(kernel.shape[:3]))
            assert kernel.std() == pytest.approx(expected, rel=0.12)
    assert model.output_shape == (None, 100)


def test_a_shortcut_is_every_second_pixel_with_zeros_for_new_channels(rng):
    x = keras.Input((4, 4, 16))
    model = keras.Model(x, cifar_resnet.residual(x, 32, 2))
    for layer in model.layers:  # no residual: what is left is the shortcut
        if isinstance(layer, keras.layers.Conv2D):
            layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    image = rng.uniform(size=(1, 4, 4, 16)).astype("float32")
    expected = np.zeros((1, 2, 2, 32), "float32")
    expected[..., 8:24] = image[:, ::2, ::2]
    np.testing.assert_allclose(model(image), expected, atol=1e-6)


@pytest.mark.long
def test_resnet_110_takes_a_real_step(tmp_path):
    settings = {"depth": 110, "classes": 10, "rate": 0.1, "epochs": 1, "images": 8}
    run = Run("deep", "SGDMNG_adap", settings | {"alpha": 0.02}, 0)
    model = cifar_resnet.compiled_model(run)
    before = [np.array(v) for v in model.trainable_variables]
    loss, _ = model.train_on_batch(
        np.random.default_rng(0).normal(size=(8, 32, 32, 3)), np.arange(8)
    )
    assert np.isfinite(loss)
    kernels = [
        (old, np.asarray(new))
        for old, new in zip(before, model.trainable_variables)
        if new.name == "kernel"
    ]
    assert len(kernels) == 110
    # The first step is rate x alpha x the norm of the weights, at every depth alike.
    for old, new in kernels:
        moved = block_norm([new - old]) / block_norm([old])
        assert moved == pytest.approx(0.1 * 0.02, rel=0.1)


def test_augmentation_pads_crops_and_flips():
    image = np.arange(1, 32 * 32 * 3 + 1, dtype="float32").reshape(32, 32, 3)
    padded = np.pad(image, [(4, 4), (4, 4), (0, 0)])
    possible = {}
    for top, left, step in itertools.product(range(9), range(9), (1, -1)):
        crop = padded[top : top + 32, left : left + 32][:, ::step]
        possible[crop.tobytes()] = (top, left, step)
    out = cifar_resnet.augment(np.stack([image] * 3000), tf.constant([0, 1]))
    seen = [possible[crop.tobytes()] for crop in np.asarray(out)]  # nothing else
    assert set(seen) == set(possible.values())
    flipped = np.mean([step < 0 for _, _, step in seen])
    assert 0.45 < flipped < 0.55
    again = cifar_resnet.augment(np.stack([image] * 3000), tf.constant([0, 1]))
    np.testing.assert_array_equal(again, out)


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, (300, 32, 32, 3), "uint8"), np.arange(300)


def labels_of(batches, number):
    return [np.asarray(y).tolist() for _, y in itertools.islice(batches, number)]


def test_an_epoch_has_every_example_once_in_an_order_of_its_own(images):
    epochs = cifar_resnet.training_batches(*images, seed=0, first=0, epochs=2)
    batches = labels_of(epochs, 99)
    assert [len(y) for y in batches] == [128, 128, 44] * 2
    first, second = np.concatenate(batches[:3]), np.concatenate(batches[3:])
    assert sorted(first) == sorted(second) == list(range(300))
    assert not np.array_equal(first, second) and not (np.diff(first) > 0).all()
    other = cifar_resnet.training_batches(*images, seed=1, first=0, epochs=1)
    assert labels_of(other, 3) != batches[:3]


def test_the_batches_of_an_epoch_do_not_depend_on_the_epochs_before(images):
    whole = cifar_resnet.training_batches(*images, seed=0, first=0, epochs=3)
    resumed = cifar_resnet.training_batches(*images, seed=0, first=2, epochs=3)
    for (x, y), (u, v) in zip(whole.skip(6), resumed, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)


def test_channels_are_standardized_by_the_training_images(rng):
    train = rng.normal([50, 100, 150], [5, 10, 20], (200, 32, 32, 3)).astype("uint8")
    ((x, _),) = cifar_resnet.test_batches(train, train, np.arange(200))
    np.testing.assert_allclose(np.mean(x, (0, 1, 2), "float64"), 0, atol=1e-3)
    np.testing.assert_allclose(np.std(x, (0, 1, 2), "float64"), 1, atol=1e-3)
    test = np.full((1, 32, 32, 3), 100, "uint8")
    ((x, _),) = cifar_resnet.test_batches(train, test, np.arange(1))
    mean, deviation = train.mean((0, 1, 2)), train.std((0, 1, 2))
    np.testing.assert_allclose(x[0, 0, 0], (100 - mean) / deviation, rtol=1e-4)
    ((x, _),) = cifar_resnet.training_batches(train[:9], np.arange(9), 0, 0, 1)
    assert np.isin(0.0, x)  # the padding is the mean colour, not black
    assert float(np.abs(x).max()) < 6


@pytest.mark.parametrize("epochs, drops", [(160, (80, 120)), (16, (8, 12))])
def test_the_rate_falls_at_half_and_three_quarters(epochs, drops):
    rate = cifar_resnet.schedule(0.1, epochs, 50_000)
    at = [float(rate((391 * epoch) + 1)) for epoch in range(epochs)]
    first, second = drops
    np.testing.assert_allclose(at[:first], 0.1, rtol=1e-6)
    np.testing.assert_allclose(at[first:second], 0.01, rtol=1e-6)
    np.testing.assert_allclose(at[second:], 0.001, rtol=1e-6)


def test_the_papers_protocol_is_the_default(monkeypatch):
    monkeypatch.setattr(
        data, "first", lambda images, number: images if number else None
    )
    runs = planned(monkeypatch=monkeypatch)
    assert {run.seed for run in runs} == {0, 1, 2, 3, 4}
    assert [run.algorithm for run in runs[:8]] == cifar_resnet.ALGORITHMS
    assert len(runs) == 40
    for run in runs:
        assert run.settings["epochs"] == 160 and run.settings["depth"] == 20
        assert run.settings["rate"] == (0.1 if "SGDM" in run.algorithm else 0.001)
    assert cifar_resnet.BATCH == 128 and cifar_resnet.L2 == 1e-4


@pytest.mark.parametrize(
    "flags, algorithm, rule, blocks",
    [
        ([], "SGDM", type(None), None),
        ([], "SGDMCLIP", Clip(0.1), "layer"),
        (["--clip", 5, "--clip-blocks", "model"], "AdamCLIP", Clip(5.0), "model"),
        ([], "AdamNG_adap", Adaptive(0.02), "layer"),
        (["--alpha", 0.05], "SGDMNG_adap", Adaptive(0.05), "layer"),
    ],
)
def test_flags_become_rules(flags, algorithm, rule, blocks, monkeypatch):
    run, *_ = planned("--algorithms", algorithm, *flags, monkeypatch=monkeypatch)
    run = Run(run.experiment, algorithm, run.settings | {"depth": 8}, 0)
    optimizer = cifar_resnet.compiled_model(run).optimizer
    assert optimizer.l2 == 1e-4
    if rule is type(None):
        assert optimizer.rule is None
    else:
        assert optimizer.rule.get_config() == rule.get_config()
        assert optimizer.get_config()["blocks"] == blocks


@pytest.mark.parametrize(
    "setting, algorithms, values",
    [
        ("rate", ["Adam"], [0.0005, 0.001, 0.005, 0.01]),
        ("clip", ["SGDMCLIP", "AdamCLIP"], [0.05, 0.1, 0.5, 1, 5]),
        ("alpha", ["SGDMNG_adap", "AdamNG_adap"], [0.01, 0.02, 0.05]),
    ],
)
def test_the_papers_searches_are_flags(setting, algorithms, values, monkeypatch):
    runs = planned("--search", setting, "--seeds", 1, monkeypatch=monkeypatch)
    assert [(run.algorithm, run.settings[setting]) for run in runs] == [
        (algorithm, value) for algorithm in algorithms for value in values
    ]
    assert {run.experiment for run in runs} == {"cifar_resnet_search"}
    assert all(
        run.settings["images"] == 3_600 for run in runs
    )  # of 4,000; 400 held out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--depth", "21"], r"6n \+ 2.*21"),
        (["--images", "0"], "--images must be 1 or more. Received: 0"),
        (["--search", "rate", "--algorithms", "SGDM"], r"is for \['Adam'\]"),
        (["--search", "rate", "--reduced"], "not allowed with"),
    ],
)
def test_bad_flags_exit_with_2(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cifar_resnet.main(flags)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_smoke_run_works_and_is_labelled(tmp_path, capsys):
    flags = ["--smoke", "--algorithms", "SGDMCLIP", "AdamNG_adap"]
    results = cifar_resnet.main([*flags, "--out", str(tmp_path)])
    assert [len(result["history"]["val_loss"]) for result in results] == [2, 2]
    text = (tmp_path / "cifar_resnet_10.md").read_text()
    assert "SMOKE RUN on coloured digits" in text
    assert "| ResNet-8 | AdamNG_adap | smoke run: " in text
    assert "SAMPLE in place of CIFAR-10" in text
    assert (tmp_path / "cifar_resnet_10.png").stat().st_size > 5_000
    assert "the paper says" not in text
    assert not list(tmp_path.glob("*/*.unfinished"))


def test_a_search_names_the_best(tmp_path, capsys):
    flags = ["--smoke", "--search", "alpha", "--algorithms", "SGDMNG_adap"]
    cifar_resnet.main([*flags, "--images", "128", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| alpha 0.01 | alpha 0.02 | alpha 0.05 |" in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| SGDMNG_adap")]
    assert row.count("**") == 2
    assert "400 of the training examples held out as the test" in printed


def test_the_input_is_faster_than_the_model(tmp_path, capsys):
    (result,) = cifar_resnet.main(["--smoke", "--speed", "--out", str(tmp_path)])
    ms = {name: np.median(v) for name, v in result["history"].items()}
    assert ms["input"] < ms["step"]  # of a ResNet-8 even
    assert "times as long" in capsys.readouterr().out


@pytest.mark.long
def test_mixed_precision_and_xla_are_flags(tmp_path):
    flags = ["--smoke", "--algorithms", "SGDMNG", "--epochs", "1", "--images", "128"]
    flags += ["--precision", "mixed_float16", "--xla", "--out", str(tmp_path)]
    compiled = []
    plain = cifar_resnet.compiled_model

    def remember(run):
        compiled.append(plain(run))
        return compiled[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar_resnet, "compiled_model", remember)
        (result,) = cifar_resnet.main(flags)
    (model,) = compiled
    assert model.jit_compile is True
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.layers[1].compute_dtype == "float16"
    assert model.layers[1].variable_dtype == "float32"
    assert model.layers[-1].compute_dtype == "float32"  # the logits
    assert np.isfinite(result["history"]["loss"][0])
    assert result["settings"]["precision"] == "mixed_float16"
    assert result["settings"]["xla"] is True


def test_several_gpus_are_used_by_a_mirrored_strategy(monkeypatch):
    made = []
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: made.append(1) or 7)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU:0"])
    assert harness.strategy() is tf.distribute.get_strategy()
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["0", "1"])
    assert harness.strategy() == 7 and made == [1]


REPLICAS = """
import sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
import cifar_resnet, harness
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
harness.strategy = lambda: strategy
(result,) = cifar_resnet.main(sys.argv[1:])
assert strategy.num_replicas_in_sync == 2
"""


def test_a_run_on_two_replicas_trains(tmp_path):
    flags = ["--smoke", "--algorithms", "SGDMNG", "--images", "256"]
    command = [sys.executable, "-c", REPLICAS, *flags, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = harness.read_all(tmp_path, "cifar_resnet")
    losses = result["history"]["loss"]
    assert len(losses) == 2 and losses[1] < losses[0]


def command(out, epochs=3):
    flags = ["--smoke", "--algorithms", "SGDMNG_adap", "--epochs", epochs]
    flags += ["--images", 384, "--out", out]
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # One thread: sums in one order, so that runs can be compared bit for bit.
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1"},
    )


def finished(process):
    printed, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return printed


@pytest.mark.long
def test_a_killed_run_goes_on_after_its_last_epoch_bit_for_bit(tmp_path):
    whole, process = (command(tmp_path / name) for name in ("whole", "killed"))
    deadline = time.time() + 200
    while not list(tmp_path.glob("killed/*/*.unfinished/1.weights.h5")):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    while not list(tmp_path.glob("killed/*/*.unfinished/state.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert harness.read_all(tmp_path / "killed", "cifar_resnet") == []
    finished(whole)
    printed = finished(command(tmp_path / "killed"))
    assert "epochs are in" in printed
    assert "Epoch 1/3" not in printed and "Epoch 3/3" in printed
    (killed,) = harness.read_all(tmp_path / "killed", "cifar_resnet")
    (whole,) = harness.read_all(tmp_path / "whole", "cifar_resnet")
    assert killed["history"] == whole["history"]
    assert killed["seconds"] > 0.5 * whole["seconds"]  # with those before the kill
    assert not list(tmp_path.glob("*/*/*.unfinished"))


def part_labelled(classes, number):
    images = np.zeros((number, 32, 32, 3), "uint8")
    labels = np.arange(number) % classes
    return lambda *_: ([(images, labels), (images, labels)], f"cifar{classes}/3.0.2")


def test_a_part_of_cifar_is_never_called_cifar(monkeypatch):
    monkeypatch.setattr(data, "load", part_labelled(100, 200))
    images = data.cifar(100, "full", None)
    assert images.kind == "part"
    assert images.label == "PART of CIFAR-100 (cifar100/3.0.2), 200 + 200"


@pytest.mark.parametrize("classes", [10, 100])
def test_the_sample_has_cifars_shape_and_all_classes(classes):
    images = data.cifar_sample(classes)
    x, y = images.train
    assert x.shape == (4000, 32, 32, 3) and x.dtype == "uint8"
    assert set(y) == set(images.test[1]) == set(range(classes))
    assert images.kind == "sample" and images.label.startswith("SAMPLE in place of")


def made_up(errors, losses=None, epochs=160, images=50_000, seeds=5, kind="full"):
    """Results with these test errors in percent."""
    losses = losses or dict.fromkeys(errors, 1.0)
    return [
        {
            "algorithm": name,
            "settings": {
                "depth": 20,
                "classes": 10,
                "rate": 0.1 if "SGDM" in name else 0.001,
                "epochs": epochs,
                "images": images,
                "data": kind,
            },
            "seed": seed,
            "data": "CIFAR-10",
            "date": "2026-11-16",
            "seconds": 60.0,
            "cores": 2,
            "versions": {"keras": "3", "tensorflow": "2"},
            "history": {
                "loss": [2.0, losses[name]],
                "val_accuracy": [0.1, 1 - error / 100],
            },
        }
        for name, error in errors.items()
        for seed in range(seeds)
    ]


ERRORS = {
    name: float(row.split()[0].split("±")[0])
    for name, row in cifar_resnet.PAPER[10].items()
}


def test_every_claim_holds_for_the_papers_own_numbers():
    losses = {name: 0.1 if name.endswith("NG") else 0.2 for name in ERRORS}
    claims = cifar_resnet.claims(made_up(ERRORS, losses))
    assert len(claims) == 9
    assert [claim.text for claim in claims if claim.verdict != report.HELD] == []
    assert "SGDMNG_adap 7.7 ± 0.0" in claims[0].evidence
    assert claims[7].text == "ResNet-20: SGDMNG is better than SGDM"


@pytest.mark.parametrize(
    "changed, losses, broken",
    [
        ({"SGDMNG_adap": 7.9}, {}, ["SGDMNG_adap has the lowest"]),
        ({"AdamCLIP": 9.3}, {}, ["AdamCLIP has the highest"]),
        ({"AdamNG": 9.0}, {}, ["Adam is slightly better than AdamNG"]),
        ({"SGDMCLIP": 10.2}, {}, ["SGD with momentum is ahead"]),
        ({}, {"SGDM": 0.05}, ["SGDMNG is the fastest"]),
    ],
)
def test_a_claim_that_does_not_hold_is_shown_so(changed, losses, broken):
    good = {name: 0.1 if name.endswith("NG") else 0.2 for name in ERRORS}
    claims = cifar_resnet.claims(made_up(ERRORS | changed, good | losses))
    failed = [claim.text for claim in claims if claim.verdict == report.NOT_HELD]
    assert len(failed) == len(broken)
    starts = [f"ResNet-20: {start}" for start in broken]
    assert all(text.startswith(start) for text, start in zip(failed, starts))


def test_a_reduced_protocol_is_named_beside_every_number(tmp_path):
    results = made_up(ERRORS, epochs=16, images=20_000, seeds=2)
    assert cifar_resnet.protocol(results) == (
        "REDUCED protocol: 16 of 160 epochs, 20,000 of 50,000 training images, "
        "2 of 5 seeds"
    )
    cifar_resnet.write_report(results, tmp_path)
    text = (tmp_path / "cifar_resnet_10.md").read_text()
    assert text.startswith("## CIFAR-10, REDUCED protocol: 16 of 160 epochs")
    rows = [line for line in text.splitlines() if line.startswith("| ResNet-20")]
    assert len(rows) == 8 and all(row.count("reduced: ") == 2 for row in rows)
    assert rows[3].endswith("| 7.71 ± 0.18 |")
    verdicts = report.HELD, report.NOT_HELD, report.UNDECIDED
    measured = [x for x in text.splitlines() if any(f"| {v} |" in x for v in verdicts)]
    assert len(measured) == 9 and all("| reduced: " in line for line in measured)


def test_a_third_seed_of_one_family_is_reported_and_the_heading_says_so(
    tmp_path, monkeypatch
):
    for result in harness.read_all(PUBLISHED, "cifar_resnet"):
        run = harness.run_of(result)
        seeds = (0, 1, 2) if "SGDM" in run.algorithm else (0, 1)
        for seed in seeds if run.settings["classes"] == 10 else ():
            same = dataclasses.replace(run, seed=seed)
            harness.write(same, result["history"], 1.0, tmp_path, "made up")
    x = np.broadcast_to(np.uint8(0), (50_000, 32, 32, 3))
    images = data.Data((x, np.zeros(50_000)), (x, np.zeros(50_000)), "full", "")
    monkeypatch.setattr(data, "cifar", lambda *_: images)
    results = cifar_resnet.main(["--reduced", "--out", str(tmp_path)])
    assert len(results) == 4 * 3 + 4 * 2
    heading = (tmp_path / "cifar_resnet_10.md").read_text().splitlines()[0]
    assert "training images, 3 (SGDM) and 2 (Adam) of 5 seeds" in heading


def test_the_papers_protocol_is_not_called_reduced(tmp_path):
    results = made_up(ERRORS)
    assert cifar_resnet.protocol(results) == "the paper's protocol"
    assert "reduced" not in cifar_resnet.results_table(results)


@pytest.mark.parametrize(
    "classes, words", [(10, "REDUCED"), (100, "SMOKE RUN on a part of CIFAR-100")]
)
def test_the_published_sections_are_labelled(classes, words):
    section = PUBLISHED / f"{cifar_resnet.EXPERIMENT}_{classes}.md"
    assert words in section.read_text().splitlines()[0]


def test_the_published_results_are_of_all_eight_and_of_the_reduced_protocol():
    results = harness.read_all(PUBLISHED, cifar_resnet.EXPERIMENT)
    results = [result for result in results if result["settings"]["classes"] == 10]
    runs = {(result["algorithm"], result["seed"]) for result in results}
    two = {(name, seed) for name in cifar_resnet.ALGORITHMS for seed in (0, 1)}
    third = {(name, 2) for name in cifar_resnet.ALGORITHMS if "SGDM" in name}
    assert runs in (two, two | third)
    assert len(results) == len(runs)
    for result in results:
        settings, history = result["settings"], result["history"]
        assert (settings["depth"], settings["images"]) == (20, 20_000)
        assert settings["epochs"] == len(history["val_loss"]) == 16
        assert settings["data"] == "full" and "10,000" in result["data"]
