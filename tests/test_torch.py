"""torch only: Keras's parallel classes carry our step, and do not go around it."""

import keras
import numpy as np
import pytest
import reference
from helpers import (
    OPTIMIZERS,
    arrays,
    some_gradients,
    some_variables,
    tensors,
    variable,
)

from keras_bng import SGDNG, AdagradNG, AdamNG, RMSpropNG, block_normalized

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch only")

PAIRS = [
    (SGDNG, keras.optimizers.SGD),
    (AdamNG, keras.optimizers.Adam),
    (AdagradNG, keras.optimizers.Adagrad),
    (RMSpropNG, keras.optimizers.RMSprop),
    (lambda **k: block_normalized(keras.optimizers.Lion(**k)), keras.optimizers.Lion),
]


@pytest.mark.parametrize("ours, stock", PAIRS)
def test_our_class_is_a_subclass_of_the_parallel_one_and_normalizes(ours, stock):
    optimizer = ours(learning_rate=0.5)
    parallel = type(stock(learning_rate=0.5))
    assert parallel is not stock, "the premise: Keras swaps the class"
    assert isinstance(optimizer, parallel) and isinstance(optimizer, stock)
    seen = []
    update = optimizer._parallel_update_step
    optimizer._parallel_update_step = lambda grads, *rest: (
        seen.extend(grads),
        update(grads, *rest),
    )
    w = variable([1.0, 1.0], "a/w")
    optimizer.apply(tensors([[3e-20, 4e-20]]), [w])
    np.testing.assert_allclose(arrays(seen), [[0.6, 0.8]], rtol=1e-5)


def test_a_nan_micro_step_is_gone_after_the_update(rng):
    for make in OPTIMIZERS.values():
        variables = some_variables(rng)
        optimizer = make(gradient_accumulation_steps=2)
        for i in range(6):
            gradients = some_gradients(rng, variables)
            if i == 0:
                gradients[2][0, 0] = np.nan
            before = arrays(variables)
            optimizer.apply(tensors(gradients), variables)
        assert not (arrays(variables)[2] == before[2]).any(), "it moves again"
        assert int(optimizer.skipped_blocks.numpy()) == 1


def test_parameters_of_a_module_that_need_a_gradient_can_be_updated(rng):
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    loss = dense(torch.ones(4, 3)).sum()
    loss.backward()
    gradients = [v.value.grad for v in dense.trainable_weights]
    optimizer = SGDNG(1.0, momentum=0.0)
    before = arrays(dense.trainable_weights)
    with torch.no_grad():
        optimizer.apply(gradients, dense.trainable_weights)
    moved = [b - a for a, b in zip(arrays(dense.trainable_weights), before)]
    length = reference.block_norm(moved)
    np.testing.assert_allclose(length, 1.0, rtol=1e-5)
