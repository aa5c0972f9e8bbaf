"""`block_summary`, on every backend."""

import keras
import pytest

from keras_bng import AdamNG, block_summary


def summary(*args, **kwargs):
    lines = []
    block_summary(*args, print_fn=lines.append, **kwargs)
    return "\n".join(lines)


def test_the_summary_shows_blocks_parameters_and_shares():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="first"),
            keras.layers.Dense(1, name="second"),
        ]
    )
    text = summary(model)
    assert "2 blocks, 19 trainable parameters" in text
    (row,) = [line for line in text.splitlines() if "first/kernel" in line]
    assert "15" in row and "78.9%" in row
    assert "1 blocks" in summary(model, blocks="model")
    text = summary(model, blocks=[("first", "front"), ("second", None)])
    assert "front" in text and "(in no block)" in text and "21.1%" in text


def test_the_summary_takes_the_optimizers_own_blocks():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = AdamNG(blocks="variable")
    with pytest.raises(ValueError, match="no variables yet"):
        summary(optimizer)
    model.compile(optimizer=optimizer, loss="mse")
    assert "2 blocks" in summary(model)
    optimizer.build(model.trainable_variables)
    assert "2 blocks" in summary(optimizer)
    assert "1 blocks" in summary(optimizer, blocks="layer")


def test_a_model_that_is_not_built_and_other_things():
    with pytest.raises(ValueError, match="no variables yet"):
        summary(keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(TypeError, match=r"takes a model or an optimizer. Received: 3"):
        summary(3)
