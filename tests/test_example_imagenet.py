"""`examples/imagenet_resnet.py`, from start to end on mocked ImageNet."""

import pathlib

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import data
import harness
import imagenet_resnet
import report
import tensorflow as tf
from harness import Run

SETTINGS = {"rate": 0.1, "epochs": 50, "batch": 64, "data": "full"}


def test_the_model_is_a_resnet_34_of_21_8_million_parameters():
    model = imagenet_resnet.build_model()
    number = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert round(number / 1e6, 1) == 21.8
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    shortcuts = [kernel for kernel in kernels if kernel.shape[:2] == (1, 1)]
    assert len(shortcuts) == 3 and len(kernels) - len(shortcuts) == 34
    assert model.input_shape == (None, 224, 224, 3)
    assert model.output_shape == (None, 1000)


def test_a_block_is_batch_norm_then_relu_then_convolution():
    x = keras.Input((8, 8, 64))
    model = keras.Model(x, imagenet_resnet.residual(x, 64, 1))
    kinds = [type(layer).__name__ for layer in model.layers[1:]]
    pre = ["BatchNormalization", "ReLU", "Conv2D"]
    assert kinds == [*pre, *pre, "Add"]  # nothing after the sum
    assert model.layers[-1].input[0] is x  # the shortcut is the block's own input


@pytest.mark.parametrize("algorithm", imagenet_resnet.PAPER)
def test_the_rate_falls_to_a_thousandth_over_the_training(algorithm, monkeypatch):
    tiny = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    monkeypatch.setattr(imagenet_resnet, "build_model", lambda: tiny)
    run = Run("try", algorithm, SETTINGS, 0)
    optimizer = imagenet_resnet.compiled_model(run, steps=100).optimizer
    assert optimizer.l2 == 1e-4
    assert optimizer.get_config().get("momentum", 0.9) == 0.9
    rate = optimizer._learning_rate
    at = [float(rate(step)) for step in (0, 2500, 5000)]
    np.testing.assert_allclose(at, [0.1, 0.1 * 0.001**0.5, 0.0001], rtol=1e-5)


def test_absent_data_gives_the_instructions(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        imagenet_resnet.main(["--data-dir", str(tmp_path), "--out", str(tmp_path)])
    message = str(stopped.value)
    assert "ILSVRC2012_img_train.tar" in message and "image-net.org" in message
    assert str(tmp_path) in message and "--data-dir" in message and "--smoke" in message


@pytest.mark.parametrize("batch", ["0", "9"])
def test_a_batch_that_cannot_be_exits_with_2(batch, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        imagenet_resnet.main(["--smoke", "--batch", batch, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"Received: {batch}" in capsys.readouterr().err


def jpeg(image):
    return tf.io.encode_jpeg(tf.cast(image, tf.uint8), quality=100)


def test_the_test_crop_is_the_middle_of_the_image_at_256():
    y, x = np.meshgrid(np.arange(512), np.arange(1024), indexing="ij")
    image = np.stack([y / 2, x / 4, np.full_like(x, 77)], -1)
    crop = np.asarray(imagenet_resnet.central_crop(jpeg(image)))
    assert crop.shape == (224, 224, 3)
    # 512 x 1024 at 256 x 512: rows 16 to 240, columns 144 to 368.
    np.testing.assert_allclose(crop[:, 100, 0], np.arange(16, 240) + 0.25, atol=2.5)
    np.testing.assert_allclose(crop[100, :, 1], np.arange(144, 368) / 2, atol=2.5)
    np.testing.assert_allclose(crop[..., 2], 77, atol=5)


def test_the_training_crop_scales_and_flips():
    y, x = np.meshgrid(np.arange(300), np.arange(400), indexing="ij")
    image = jpeg(np.stack([y * 0.8, x * 0.6, 0 * x], -1))
    areas, flips = [], 0
    for seed in range(60):
        crop = np.asarray(imagenet_resnet.random_crop(image, tf.constant([seed, 0])))
        assert crop.shape == (224, 224, 3) and crop.min() >= 0 and crop.max() <= 255
        height = (crop[-8, 112, 0] - crop[8, 112, 0]) / 0.8 / 208 * 224
        width = (crop[112, -8, 1] - crop[112, 8, 1]) / 0.6 / 208 * 224
        flips += width < 0
        areas.append(height * abs(width) / (300 * 400))
        assert 0.6 < abs(width) / height < 1.6
    assert 15 < flips < 45
    assert 0.05 < min(areas) < 0.3 and 0.6 < max(areas) < 1.1
    first, again = (
        imagenet_resnet.random_crop(image, tf.constant([5, 6])) for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)


def test_batches_of_an_epoch_do_not_depend_on_the_epochs_before():
    images = data.imagenet("sample", None)
    whole = imagenet_resnet.training_batches(images, 4, seed=0, first=0, epochs=2)
    resumed = imagenet_resnet.training_batches(images, 4, seed=0, first=1, epochs=2)
    whole, resumed = list(whole), list(resumed)
    assert len(whole) == 4 and len(resumed) == 2
    for (x, y), (u, v) in zip(whole[2:], resumed):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)
    assert not np.array_equal(whole[0][0], whole[2][0])


def test_it_trains_resumes_saves_and_serves(tmp_path, monkeypatch, capsys):
    out, export = tmp_path / "out", tmp_path / "export"
    flags = ["--smoke", "--algorithms", "SGDMNG", "--out", str(out)]
    backup = harness.Backup.on_epoch_end

    def stopped_after(self, epoch, logs=None):
        backup(self, epoch, logs)
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.Backup, "on_epoch_end", stopped_after)
    with pytest.raises(SystemExit) as stopped:
        imagenet_resnet.main(flags)
    assert stopped.value.code == 130
    monkeypatch.undo()

    (result,) = imagenet_resnet.main([*flags, "--export", str(export)])
    printed = capsys.readouterr().out
    assert "1 epochs are in" in printed and "Epoch 2/2" in printed
    assert "smoke run: " in printed and "MOCK" in printed
    for metric in ("loss", "val_loss", "val_accuracy", "val_top_5_accuracy"):
        assert len(result["history"][metric]) == 2
        assert np.isfinite(result["history"][metric]).all()

    (path,) = out.glob("*/*.keras")
    model = keras.models.load_model(path)
    assert int(model.optimizer.iterations) == 4
    image = np.random.default_rng(0).uniform(0, 255, (1, 224, 224, 3)).astype("float32")
    loaded = tf.saved_model.load(str(export / path.stem))
    served = loaded.serve(image)
    assert float(tf.reduce_sum(served)) == pytest.approx(1, abs=1e-4)
    expected = tf.nn.softmax(model(image, training=False))
    np.testing.assert_allclose(served, expected, atol=1e-5)


@pytest.mark.parametrize(
    "error, broken", [(28.43, []), (29.5, ["SGDMNG is better than SGDM"])]
)
def test_claims(error, broken):
    paper = imagenet_resnet.PAPER | {"SGDMNG": (error, 9.57)}
    results = [
        {
            "algorithm": name,
            "settings": SETTINGS,
            "history": {
                "val_accuracy": [1 - top1 / 100],
                "val_top_5_accuracy": [1 - top5 / 100],
            },
        }
        for name, (top1, top5) in paper.items()
        for _ in range(2)
    ]
    claims = imagenet_resnet.claims(results)
    assert [claim.text for claim in claims if claim.verdict != report.HELD] == broken


def test_the_published_section_has_the_papers_table_and_says_that_it_was_not_run():
    published = pathlib.Path(imagenet_resnet.__file__).parent / "results"
    text = (published / f"{imagenet_resnet.EXPERIMENT}.md").read_text()
    assert "NOT RUN" in text
    assert harness.read_all(published, imagenet_resnet.EXPERIMENT) == []
    for name, (top_1, top_5) in imagenet_resnet.PAPER.items():
        assert f"| {name} | {top_1:.2f} | {top_5:.2f} | not run |" in text
