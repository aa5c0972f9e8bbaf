"""`examples/data.py`: TFDS, the sample in its place, and damaged files."""

import time

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import data
import tensorflow_datasets as tfds


class TinyDigits(tfds.core.GeneratorBasedBuilder):
    """40 + 20 images, prepared by TFDS itself; `url` makes it download something."""

    VERSION = tfds.core.Version("1.0.0")
    url = None

    def _info(self):
        image = tfds.features.Image(shape=(28, 28, 1))
        label = tfds.features.ClassLabel(num_classes=10)
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"image": image, "label": label}),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, manager):
        if self.url:
            manager.download(self.url)
        splits = {"train": 40, "test": 20}
        return {name: self._generate_examples(n) for name, n in splits.items()}

    def _generate_examples(self, number):
        for i in range(number):
            image = np.random.default_rng(i).integers(0, 256, (28, 28, 1), "uint8")
            yield i, {"image": image, "label": i % 10}


def load(choice, data_dir):
    return data.load("tiny_digits", data.mnist_sample, choice, str(data_dir))


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(TinyDigits, "url", "http://127.0.0.1:9/digits.zip")


@pytest.mark.parametrize("choice", ["auto", "full"])
def test_data_that_is_absent_is_prepared_and_then_found(choice, tmp_path, no_network):
    TinyDigits.url = None
    (train, test), name = load(choice, tmp_path)
    assert name == "tiny_digits/1.0.0"
    assert train[0].shape == (40, 28, 28, 1) and test[1].shape == (20,)
    TinyDigits.url = "http://127.0.0.1:9/digits.zip"  # from here on, only from disk
    assert np.array_equal(load(choice, tmp_path)[0][0][0], train[0])


def test_auto_falls_back_to_the_sample_and_says_so_loudly(tmp_path, no_network, capsys):
    started = time.perf_counter()
    found = load("auto", tmp_path)
    assert time.perf_counter() - started < 30  # nobody waits for minutes
    assert found.kind == "sample" and found.label.startswith("SAMPLE of MNIST")
    assert "using a SAMPLE in its place. ***" in capsys.readouterr().out


def test_full_does_not_fall_back(tmp_path, no_network):
    with pytest.raises(SystemExit, match="could not be downloaded .* --data sample"):
        load("full", tmp_path)


@pytest.mark.parametrize("choice", ["auto", "full"])
@pytest.mark.parametrize(
    "damage", ["truncated", "first record only", "flipped", "empty", "gone"]
)
def test_a_damaged_file_is_a_clear_error_and_never_the_sample(choice, damage, tmp_path):
    load("full", tmp_path)
    (path,) = tmp_path.rglob("*train.tfrecord*")
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "truncated": content[:middle],
                "first record only": content[
                    : 16 + int.from_bytes(content[:8], "little")
                ],
                "flipped": content[:middle] + b"????" + content[middle + 4 :],
                "empty": b"",
            }[damage]
        )
    with pytest.raises(SystemExit, match="'train' in .* is damaged .* Delete"):
        load(choice, tmp_path)


def test_the_sample_is_real_digits_of_all_classes_in_two_disjoint_parts():
    digits = data.mnist("sample", None)
    assert digits.train[0].shape == (4000, 784) and digits.test[0].shape == (1000, 784)
    assert digits.train[0].min() == 0 and digits.train[0].max() == 1
    counts = np.bincount(np.concatenate([digits.train[1], digits.test[1]]))
    assert counts.tolist() == [500] * 10
    both = np.concatenate([digits.train[0], digits.test[0]])
    assert len(np.unique(both, axis=0)) == len(both)


def test_held_out_examples_come_from_the_training_set_and_leave_it():
    digits = data.mnist("sample", None)
    held = data.held_out(digits, 400)
    assert len(held.train[1]) == 3600 and len(held.test[1]) == 400
    together = np.concatenate([held.train[0], held.test[0]])
    assert np.array_equal(np.sort(together, 0), np.sort(digits.train[0], 0))
    assert "400 of the training examples held out" in held.label
