"""The rules: vectors of norms in, a vector of factors out."""

import keras
import pytest
from helpers import arrays, variable
from keras import ops

import keras_bng
from keras_bng import Adaptive, Clip, Unit
from keras_bng.rules import get

G = [0.5, 2.0]
W = [3.0, 0.0]


def factors(rule):
    return arrays([rule(ops.array(G), ops.array(W))])[0].tolist()


def test_unit_divides_by_the_gradient_norm():
    assert factors(Unit()) == [2.0, 0.5]


def test_adaptive_gives_a_share_of_the_weight_norm_and_takes_zero_weights_as_one():
    assert factors(Adaptive(0.25)) == [1.5, 0.125]


def test_clip_only_shortens():
    assert factors(Clip(1.0)) == [1.0, 0.5]


def test_names_and_defaults():
    assert get("unit") == Unit()
    assert get("adaptive") == Adaptive(ratio=0.02)
    assert get("clip") == Clip(threshold=0.1)
    assert get(None) is None


@pytest.mark.parametrize("rule", [Unit(), Adaptive(0.3), Clip(0.7)])
def test_rules_survive_serialization(rule):
    config = keras.saving.serialize_keras_object(rule)
    assert config["registered_name"] == f"keras_bng>{type(rule).__name__}"
    assert keras.saving.deserialize_keras_object(config) == rule


@pytest.mark.parametrize("make", [Adaptive, Clip])
@pytest.mark.parametrize("value", [-0.1, 0.0, float("nan"), float("inf")])
def test_ratio_and_threshold_must_be_positive(make, value):
    with pytest.raises(ValueError, match=f"above 0. Received: .*={value!r}"):
        make(value)
    with pytest.raises(TypeError, match="must be a number above 0. Received: .*'x'"):
        make("x")


@pytest.mark.parametrize(
    "rule, error, message",
    [
        (
            "units",
            ValueError,
            "Unknown `rule`. Allowed: 'unit'.*Received: rule='units'",
        ),
        (0.1, TypeError, "wrong type.*Received: rule=0.1"),
        (Unit, TypeError, r"write `Unit\(\)`"),
    ],
)
def test_bad_rules_say_what_was_received(rule, error, message):
    with pytest.raises(error, match=message):
        keras_bng.SGDNG(rule=rule)
    with pytest.raises(error, match=message):
        keras_bng.normalize([], [], (), rule)


@pytest.mark.parametrize(
    "rule",
    [
        lambda g, w: 1.0,
        lambda g, w: "no",
        lambda g, w: None,
        lambda g, w: ops.ones((3,)),
        lambda g, w: g > 0,
    ],
)
def test_a_rule_that_returns_no_vector_is_an_error_at_build_and_builds_nothing(rule):
    optimizer = keras_bng.AdamNG(rule=rule)
    variables = [variable([1.0], "a/kernel"), variable([1.0], "b/kernel")]
    with pytest.raises(TypeError, match=r"one number a block, here of shape \(2,\)"):
        optimizer.build(variables)
    assert not optimizer.built and len(optimizer.variables) == 2


def test_any_callable_is_a_rule():
    w = [variable([1.0, 1.0], "a/kernel"), variable([2.0], "b/kernel")]
    g = [ops.array([3.0, 4.0]), ops.array([8.0])]
    seen = []

    def rule(gradient_norm, weight_norm):
        seen.append((arrays([gradient_norm])[0], arrays([weight_norm])[0]))
        return weight_norm * 10.0

    result = arrays(keras_bng.normalize(g, w, keras_bng.partition(w), rule))
    assert seen[0][0].tolist() == [5.0, 8.0]
    assert abs(seen[0][1] - [2**0.5, 2.0]).max() < 1e-6
    assert result[1].tolist() == [160.0]
