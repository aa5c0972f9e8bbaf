"""`examples/mnist_mlp.py`: the README's claim, on the sample of real digits."""

import pathlib
import subprocess
import sys

import keras
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

mnist_mlp = pytest.importorskip("mnist_mlp")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow only")
def test_adam_ng_learns_where_adam_is_stuck(capsys):
    rows = mnist_mlp.main(["--data", "sample", "--epochs", "60"])
    accuracy = {name: history["val_accuracy"][-1] for name, _, history in rows}
    assert accuracy["Adam"] < 0.15
    assert accuracy["AdamNG"] > 0.25  # and 0.6 on all of MNIST: see the README
    table = capsys.readouterr().out
    assert "SAMPLE of MNIST, 4,000 + 1,000" in table
    assert "| AdamNG | 0 |" in table


def test_the_model_has_18_layers_of_100_units():
    model = mnist_mlp.build_model()
    assert len(model.layers) == 18
    assert model.count_params() == 784 * 100 + 100 + 16 * 10_100 + 1_010


def test_bad_flags_exit_with_2_and_a_message():
    command = [sys.executable, str(EXAMPLES / "mnist_mlp.py"), "--algorithms", "Adamm"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "unknown algorithms ['Adamm']; known: ['Adam', 'AdamNG']" in result.stderr
