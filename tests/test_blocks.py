"""`partition`: which variables belong together."""

import copy
import pickle
import warnings

import keras
import pytest
from helpers import small_model, variable
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_bng
from keras_bng import Block, partition


def paths(blocks):
    return [[v.path for v in b.variables] for b in blocks]


class Fake:
    """All that `partition` needs of a variable."""

    def __init__(self, path):
        self.path = path


def fakes(*all_paths):
    return [Fake(p) for p in all_paths]


def test_kernel_and_bias_of_a_layer_are_one_block():
    model = keras.Sequential(
        [keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")], name="m"
    )
    model.build((None, 4))
    blocks = partition(model.trainable_variables, "layer")
    assert isinstance(blocks, tuple) and isinstance(blocks[0], Block)
    assert paths(blocks) == [["m/a/kernel", "m/a/bias"], ["m/b/kernel", "m/b/bias"]]
    assert [b.name for b in blocks] == ["m/a", "m/b"]
    assert blocks[0].variables[0] is model.layers[0].kernel


def test_an_lstm_is_one_block_and_attention_is_four():
    lstm = keras.layers.LSTM(3)
    lstm.build((None, 5, 2))
    assert [len(b.variables) for b in partition(lstm.trainable_variables)] == [3]
    attention = keras.layers.MultiHeadAttention(2, 3)
    attention.build((None, 4, 5), (None, 4, 5))
    blocks = partition(attention.trainable_variables)
    assert [len(b.variables) for b in blocks] == [2, 2, 2, 2]


def test_gamma_and_beta_of_a_batch_normalization_are_one_block():
    blocks = partition(small_model().trainable_variables)
    assert [[v.name for v in b.variables] for b in blocks] == [
        ["kernel", "bias"],
        ["gamma", "beta"],
        ["kernel", "bias"],
    ]


def test_a_shared_layer_is_one_block():
    shared = keras.layers.Dense(3, name="shared")
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Dense(1)(shared(shared(x))))
    assert [len(b.variables) for b in partition(model.trainable_variables)] == [2, 2]


def test_same_named_layers_of_nested_models_are_two_blocks():
    def inner(name):
        x = keras.Input((3,))
        return keras.Model(x, keras.layers.Dense(3, name="fc")(x), name=name)

    x = keras.Input((3,))
    model = keras.Model(x, inner("second")(inner("first")(x)))
    variables = model.trainable_variables
    assert variables[0].path == variables[2].path, "the premise: the paths repeat"
    blocks = partition(variables)
    assert [len(b.variables) for b in blocks] == [2, 2]
    assert blocks[0].variables == (variables[0], variables[1])
    assert len({b.name for b in blocks}) == 2


def test_a_repeated_path_starts_a_new_block_that_later_variables_join():
    variables = fakes("fc/kernel", "x/kernel", "fc/kernel", "fc/bias")
    blocks = partition(variables)
    assert [b.name for b in blocks] == ["fc", "x", "fc#2"]
    assert blocks[2].variables == (variables[2], variables[3])


def test_one_variable_listed_twice_counts_once():
    tied = Fake("embedding/embeddings")
    blocks = partition([tied, tied])
    assert [b.variables for b in blocks] == [(tied,)]
    assert blocks.positions == ((0, 1),), "its other gradient belongs to it, too"


@pytest.mark.parametrize("blocks", ["layer", "variable", "model", lambda v: v.path])
def test_the_positions_of_one_listed_twice_are_all_there(blocks):
    tied, other = fakes("a/w", "b/w")
    result = partition([tied, other, tied, Fake("a/b")], blocks)
    assert sorted(i for p in result.positions for i in p) == [0, 1, 2, 3]
    (first,) = (p for p in result.positions if 0 in p)
    assert 2 in first


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        *(
            lambda blocks, n=n: pickle.loads(pickle.dumps(blocks, n))
            for n in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_blocks_can_be_copied_and_pickled(again):
    tied, other = fakes("a/w", "b/w")
    blocks = partition([tied, other, tied])
    result = again(blocks)
    assert type(result) is type(blocks) and isinstance(result[0], Block)
    assert result.positions == ((0, 2), (1,)) and result.total == 3
    assert [b.name for b in result] == ["a", "b"] and paths(result) == paths(blocks)


def test_blocks_variable_and_model():
    variables = fakes("a/kernel", "a/bias", "a/kernel")
    by_variable = partition(variables, "variable")
    assert [b.name for b in by_variable] == ["a/kernel", "a/bias", "a/kernel#2"]
    (whole,) = partition(variables, "model")
    assert whole == Block("model", tuple(variables))


def test_a_callable_names_the_block_and_none_leaves_out():
    variables = fakes("a/kernel", "a/bias", "b/kernel", "b/bias")
    blocks = partition(variables, lambda v: None if "bias" in v.path else "kernels")
    assert blocks == (Block("kernels", (variables[0], variables[2])),)


def test_for_callables_the_name_decides_even_where_paths_repeat():
    variables = fakes("fc/kernel", "fc/kernel")
    assert len(partition(variables, lambda v: "one")) == 1
    assert len(partition(variables, [("fc", "one")])) == 1


def test_the_first_pattern_found_wins_and_the_rest_goes_by_layer():
    variables = fakes("enc/a/kernel", "enc/a/bias", "enc/b/kernel", "dec/kernel")
    blocks = partition(variables, [("bias$", None), ("^enc/", "encoder")])
    assert [b.name for b in blocks] == ["encoder", "dec"]
    assert blocks[0].variables == (variables[0], variables[2])


def test_a_chosen_name_is_not_merged_with_a_layer_of_that_name():
    blocks = partition(fakes("a/kernel", "b/kernel"), [("^b", "a")])
    assert [b.name for b in blocks] == ["a", "a#2"]


def test_a_pattern_that_matches_nothing_warns():
    with pytest.warns(UserWarning, match="'decoder' in `blocks` matches no variable"):
        partition(fakes("a/kernel"), [("decoder", "d")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(fakes("a/kernel"), [("kernel", "k"), ("a", "also matches")])


def test_variables_that_keras_overwrites_with_their_gradient_are_in_no_block():
    scale = Fake("a/scale")
    scale.overwrite_with_gradient = True
    kernel = Fake("a/kernel")
    assert partition([kernel, scale]) == (Block("a", (kernel,)),)


def test_no_variables_give_no_blocks():
    for blocks in ("layer", "variable", "model", [], lambda v: "x"):
        assert partition([], blocks) == ()


@pytest.mark.parametrize(
    "blocks, error, message",
    [
        ("layers", ValueError, "Received: blocks='layers'"),
        (3, TypeError, "Received: 3"),
        (None, TypeError, "Received: None"),
        ({"a": "b"}, TypeError, "Received: {'a': 'b'}"),
        (["kernel"], TypeError, "Received the entry: 'kernel'"),
        ([("a", 1)], TypeError, r"Received the entry: \('a', 1\)"),
        ([("a", "b", "c")], TypeError, "Received the entry"),
        ([("(", "b")], ValueError, r"not a valid regular expression.*Received: '\('"),
    ],
)
def test_bad_blocks_say_what_was_received(blocks, error, message):
    with pytest.raises(error, match=message):
        partition(fakes("a/kernel"), blocks)
    with pytest.raises(error, match=message):
        keras_bng.AdamNG(blocks=blocks)


def test_a_callable_that_returns_no_string_is_an_error_and_builds_nothing():
    optimizer = keras_bng.AdamNG(blocks=lambda v: 7)
    w = variable([1.0], "a/kernel")
    with pytest.raises(
        TypeError, match="Received: 7 of type int for the variable 'a/k"
    ):
        optimizer.build([w])
    assert not optimizer.built and len(optimizer.variables) == 2
    assert optimizer.blocks == ()


LAYERS = st.lists(
    st.tuples(
        st.sampled_from(["a", "a/b", "c", "d/e/f"]), st.sampled_from(["k", "b", "r"])
    ),
    max_size=12,
)


@settings(deadline=None)
@given(LAYERS, st.sampled_from(["layer", "variable", "model"]))
def test_every_variable_is_in_exactly_one_block(layers, blocks):
    variables = fakes(*("/".join(pair) for pair in layers))
    result = partition(variables, blocks)
    members = [id(v) for b in result for v in b.variables]
    assert sorted(members) == sorted(map(id, variables))
    assert len({b.name for b in result}) == len(result)
    assert [[variables[i] for i in positions] for positions in result.positions] == [
        list(b.variables) for b in result
    ]
    for block in result:
        own_paths = [v.path for v in block.variables]
        assert blocks == "model" or len(set(own_paths)) == len(own_paths)


@settings(deadline=None)
@given(LAYERS.map(set), st.randoms())
def test_the_order_of_variables_does_not_matter_where_no_path_repeats(layers, random):
    variables = fakes(*("/".join(pair) for pair in layers))
    shuffled = variables[:]
    random.shuffle(shuffled)

    def as_sets(result):
        return {(b.name, frozenset(b.variables)) for b in result}

    assert as_sets(partition(shuffled)) == as_sets(partition(variables))
