"""`block_summary`, on every backend."""

import re

import keras
import numpy as np
import pytest
from helpers import arrays, compiled, small_model
from keras import ops
from reference import block_norm

from keras_bng import (
    SGDNG,
    AdagradBNG,
    AdamNG,
    Adaptive,
    block_normalized,
    block_summary,
)

needs_multi = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)


def summary(*args, **kwargs):
    lines = []
    block_summary(*args, print_fn=lines.append, **kwargs)
    return "\n".join(lines)


def row(text, name):
    """The cells of the line that has this name in it."""
    (line,) = [line for line in text.splitlines() if name in line]
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def two_layers(**first):
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="first", **first),
            keras.layers.Dense(1, name="second"),
        ]
    )


def norm_of(layer):
    return block_norm(arrays(layer.trainable_variables))


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


def test_names_are_shown_in_full_whatever_their_length():
    long = "encoder_" * 40
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name=f"{long}query"),
            keras.layers.Dense(3, name=f"{long}value"),
        ],
        name="net",
    )
    text = summary(model)
    for variable in model.trainable_variables:  # one a line
        assert f"{variable.path} {tuple(variable.shape)}" in row(text, variable.path)
    assert row(text, f"{long}query/kernel")[0] == f"net/{long}query"
    assert row(text, f"{long}query/bias")[0] == ""


def test_names_with_brackets_are_no_markup():
    text = summary(two_layers(), blocks=[("first", "[bold]a[/bold] :cat:")])
    assert "[bold]a[/bold] :cat:" in text


def test_the_norm_of_the_weights():
    model = two_layers(bias_initializer="ones")
    text = summary(model)
    assert row(text, "first/kernel")[4] == f"{norm_of(model.layers[0]):.3g}"
    assert row(text, "second/kernel")[4] == f"{norm_of(model.layers[1]):.3g}"


KNOWN = {
    "unit": (lambda: SGDNG(0.1, momentum=0.0), lambda size, norm: 0.1 / norm),
    "adaptive": (
        lambda: SGDNG(0.1, momentum=0.0, rule=Adaptive(0.02)),
        lambda size, norm: 0.002,
    ),
    "a rule": (
        lambda: SGDNG(0.1, momentum=0.0, rule=lambda n, w: 3 / n),
        lambda size, norm: 0.3 / norm,
    ),
    "AdamNG": (lambda: AdamNG(0.01), lambda size, norm: 0.01 * size**0.5 / norm),
    **{
        name: (
            lambda name=name: getattr(keras.optimizers, name)(0.01),
            lambda size, norm: 0.01 * size**0.5 / norm,
        )
        for name in ("Adam", "AdamW", "Nadam", "Adamax", "Lion")
    },
    "a schedule": (
        lambda: AdamNG(keras.optimizers.schedules.PolynomialDecay(0.01, 100)),
        lambda size, norm: 0.01 * size**0.5 / norm,
    ),
    "a callable": (
        lambda: AdamNG(lambda: 0.01),
        lambda size, norm: 0.01 * size**0.5 / norm,
    ),
    "loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(SGDNG(0.1, momentum=0.0)),
        lambda size, norm: 0.1 / norm,
    ),
    "wrapped": (
        lambda: block_normalized(keras.optimizers.Lion(0.01)),
        lambda size, norm: 0.01 * size**0.5 / norm,
    ),
}


@pytest.mark.parametrize("make, expected", KNOWN.values(), ids=KNOWN)
def test_the_relative_step_where_it_is_known(make, expected):
    keras.utils.set_random_seed(3)
    model = compiled(two_layers(), make())
    text = summary(model)
    for layer, size in zip(model.layers, (15, 4)):
        shown = row(text, f"{layer.name}/kernel")[5]
        assert float(shown) == pytest.approx(expected(size, norm_of(layer)), rel=0.06)


@pytest.mark.parametrize("name", ["unit", "adaptive", "AdamNG", "Lion", "Adamax"])
def test_the_first_update_makes_the_relative_step_that_is_shown(name, rng):
    model = two_layers(kernel_initializer="ones")
    optimizer = KNOWN[name][0]()
    model.compile(optimizer=optimizer, loss="mse")
    shown = float(row(summary(model), "first/kernel")[5])
    weights = model.layers[0].trainable_variables
    before = [np.array(w) for w in arrays(weights)]
    x = rng.normal(size=(8, 4)).astype("float32")
    model.fit(x, np.ones((8, 1)), batch_size=8, verbose=0)
    moved = block_norm([a - b for a, b in zip(arrays(weights), before)])
    assert moved / block_norm(before) == pytest.approx(shown, rel=0.06)


class OwnAdam(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, 3 * learning_rate)


UNKNOWN = {
    "not compiled": None,
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "clip": lambda: SGDNG(0.1, rule="clip"),
    "rule=None": lambda: SGDNG(0.1, rule=None),
    "coupled": lambda: SGDNG(0.1, rule=lambda n, w: n * 0 + 1 / ops.mean(n)),
    "AdagradBNG": lambda: AdagradBNG(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "own": lambda: OwnAdam(0.1),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_where_the_step_depends_on_the_gradient_there_is_no_number(make):
    model = two_layers()
    if make:
        compiled(model, make())
    text = summary(model)
    assert row(text, "first/kernel")[5] == row(text, "second/kernel")[5] == "-"


def test_weights_that_are_zero_have_no_relative_step():
    model = compiled(two_layers(kernel_initializer="zeros"), AdamNG(0.1))
    assert row(summary(model), "first/kernel")[4:] == ["0", "-"]
    assert row(summary(model), "second/kernel")[5] != "-"


def test_what_is_in_no_block_has_the_step_of_the_stock_optimizer():
    for optimizer, known in ((AdamNG, True), (SGDNG, False)):
        model = two_layers(bias_initializer="ones")
        compiled(model, optimizer(0.01, blocks=[("first/", None)]))
        step = row(summary(model), "(in no block)")[5]
        assert (step != "-") == known


def test_a_rule_is_not_asked_about_no_blocks():
    def rule(gradient_norm, weight_norm):
        assert len(gradient_norm)
        return 1 / gradient_norm

    model = compiled(two_layers(), SGDNG(0.1, rule=rule, blocks=lambda variable: None))
    assert "0 blocks, 19 trainable parameters" in summary(model)


def test_the_caption_says_what_the_step_is_and_at_which_rate(rng):
    model = compiled(two_layers(), SGDNG(0.125, momentum=0.9))
    caption = summary(model).splitlines()[-1]
    assert "at the learning rate 0.125" in caption and "up to 10 times" in caption
    assert "-:" not in caption
    model.optimizer.learning_rate = 0.25
    assert "at the learning rate 0.25" in summary(model)
    x, y = rng.normal(size=(8, 4)).astype("float32"), np.zeros((8, 1))
    decay = keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.0)
    model.compile(optimizer=SGDNG(decay), loss="mse")
    assert "at the learning rate 0.5" in summary(model)
    model.fit(x, y, batch_size=4, verbose=0)  # 2 steps
    assert "at the learning rate 0.375" in summary(model)
    model.compile(optimizer=keras.optimizers.SGD(), loss="mse")
    assert "-: it depends on the gradient." in summary(model)
    text = summary(two_layers())
    assert "learning rate" not in text and "-: no optimizer" in text


@needs_multi
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("as_map", [False, True])
def test_each_of_two_optimizers_has_its_own_blocks_and_rate(built, as_map):
    model = two_layers()
    ours, stock = (
        SGDNG(0.5, momentum=0.0, blocks="variable"),
        keras.optimizers.Lion(0.01),
    )
    chosen = lambda v: ours if "first" in v.path else stock  # noqa: E731
    if as_map:
        chosen = keras.optimizers.OptimizerMap(stock, {".*first/.*": ours})
    both = keras.optimizers.MultiOptimizer(chosen)
    model.compile(optimizer=both, loss="mse")
    if built:
        both.build(model.trainable_variables)
    text = summary(model)
    assert both.built == ours.built == stock.built == built
    assert "3 blocks" in text
    names = [row(text, v.path)[0] for v in model.trainable_variables]
    assert [name.split("/", 1)[-1] for name in names] == [
        "first/kernel",
        "first/bias",
        "second",
        "",
    ]
    kernel, second = row(text, "first/kernel"), row(text, "second/kernel")
    norm = norm_of(model.layers[1])
    assert float(kernel[5]) == pytest.approx(0.5 / float(kernel[4]), rel=0.06)
    assert float(second[5]) == pytest.approx(0.01 * 2 / norm, rel=0.06)
    assert "SGDNG 0.5" in kernel and "Lion 0.01" in second
    # One setting for all is one for each of them.
    assert "2 blocks" in summary(model, blocks="model")
    if built:
        assert summary(both) == text


class Gan(keras.Model):
    """It trains itself, with two optimizers, and is never called."""

    def __init__(self, d_optimizer, g_optimizer):
        super().__init__()
        self.discriminator = two_layers()
        self.generator = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(4, name="third")]
        )
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer


def test_a_model_that_trains_itself():
    d, g = SGDNG(0.5, momentum=0.0, blocks="variable"), AdamNG(0.01)
    model = Gan(d, g)
    assert not model.built
    text = summary(model)  # which optimizer takes what is not known yet
    assert "3 blocks, 31 trainable parameters" in text
    assert row(text, "first/kernel")[5] == row(text, "third/kernel")[5] == "-"
    d.build(model.discriminator.trainable_variables)
    text = summary(model)
    assert "5 blocks" in text and "SGDNG 0.5" in row(text, "first/kernel")
    assert row(text, "first/kernel")[5] != "-"
    assert "AdamNG 0.01" in row(text, "third/kernel")  # the only one that is left
    g.build(model.generator.trainable_variables)
    assert "5 blocks" in summary(model)


def test_what_no_optimizer_has_yet_goes_by_the_only_one_of_ours():
    model = Gan(keras.optimizers.SGD(), AdamNG(blocks="variable"))
    assert "6 blocks" in summary(model)
    model = Gan(AdamNG(blocks="model"), AdamNG(blocks="variable"))
    assert "3 blocks" in summary(model)


def test_blocks_that_are_built_are_shown_as_they_are():
    """Not found anew: a model that was loaded has other paths."""
    names = iter(["upper", "upper", "lower", "lower"])
    optimizer = AdamNG(blocks=lambda variable: next(names))
    model = compiled(two_layers(), optimizer)
    optimizer.build(model.trainable_variables)
    for shown in (model, optimizer):
        text = summary(shown)
        assert row(text, "first/kernel")[0] == "upper"
        assert row(text, "second/kernel")[0] == "lower"


def test_a_layer_that_was_frozen_later_is_not_shown(rng):
    model = compiled(two_layers(), AdamNG(0.01))
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    text = summary(model)
    assert "1 blocks, 4 trainable parameters" in text and "first" not in text
    model.trainable = False
    assert "0 blocks, 0 trainable parameters" in summary(model)


def test_looking_changes_nothing():
    model = compiled(two_layers(), AdamNG(0.01))
    before = arrays(model.variables)
    summary(model)
    assert not model.optimizer.built
    for a, b in zip(before, arrays(model.variables)):
        np.testing.assert_array_equal(a, b)


def test_a_notebook_gets_the_whole_text_too(monkeypatch):
    # There, rich would show the table itself, and keep it from `print_fn`.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    lines = []
    block_summary(small_model(), print_fn=lines.append)
    assert "Relative step" in lines[0] and "dense" in lines[0]
