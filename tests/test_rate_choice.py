"""Which rate is picked, from curves made up to have one trait each."""

import warnings

import numpy as np
import pytest

from keras_bng.tools.rate_choice import Trial, picked

STEPS, END = 400, 40


def choice(curves, start=2.4, noise=0.003, rates=None):
    """The best, of curves given as the last loss, or as a function of the step."""
    rng = np.random.default_rng(0)
    batches = rng.normal(size=STEPS) * noise  # the same for every rate
    t = np.linspace(0, 1, STEPS)
    curves = [c(t) if callable(c) else falling(c, start)(t) for c in curves]
    rows = np.array([c + batches for c in curves])
    rates = np.geomspace(0.001, 10, len(curves)) if rates is None else rates
    ends = np.where(np.isfinite(rows).all(1, keepdims=True), rows, np.inf)[:, -END:]
    start = start + batches[-END:]
    found = picked(Trial(np.array(rates), rows, start, ends, np.ones(END), "of tests"))
    return int(np.flatnonzero(found.rates == found.best)[0]), found


def falling(last, start=2.4):
    return lambda t: last + (start - last) * (1 - t)


def plateau(loss):
    """Reached after a tenth of the steps."""
    return lambda t: np.where(t < 0.1, 2.4 - (2.4 - loss) * 10 * t, loss)


def quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return choice(*args, **kwargs)[0]


def test_the_lowest_loss_is_picked_where_losses_still_fall():
    assert quietly([1.5, 0.9, 0.5, 0.8]) == 2


def test_of_rates_that_the_noise_hides_the_largest_is_picked():
    jitter = np.random.default_rng(1).normal(size=STEPS) * 0.05
    assert quietly([1.5, lambda t: falling(0.5)(t) + jitter, 0.5, 0.8], noise=0.05) == 2
    below = [1.5, 0.5, lambda t: falling(0.505)(t) + jitter, 0.8]
    assert quietly(below, noise=0.05) == 2


def test_a_steady_difference_is_no_noise_where_losses_still_fall():
    assert quietly([1.5, 0.5, 0.51, 0.8], noise=0.05) == 1


def test_a_rate_is_not_excused_by_its_own_jumps():
    def jumps(t):
        return falling(0.5)(t) + 20 * (np.arange(STEPS) % 37 == 0)

    assert quietly([1.5, 0.5, jumps]) == 1


def test_on_a_plateau_the_largest_that_did_no_harm_is_picked_with_a_warning():
    """The lowest rate is ahead by a hair, as SGD's on six sigmoid layers."""
    losses = 2.3029, 2.3037, 2.3050, 2.3062, 2.3236, 2.45
    with pytest.warns(UserWarning, match="it is a plateau.*try more `steps`"):
        best, found = choice([plateau(loss) for loss in losses])
    assert best == 3
    assert "worse than at the start" in str(found).splitlines()[6]


def test_a_rate_that_left_the_plateau_is_picked():
    def late(t):
        return np.where(t < 0.6, 2.303, 2.303 - 2 * (t - 0.6))

    assert quietly([plateau(2.3029), late, plateau(2.304), plateau(2.33)]) == 1


def test_what_has_converged_is_no_plateau():
    """Losses near 0: a larger one is worse, however the batches vary."""
    assert quietly([0.5, plateau(0.05), plateau(0.09)], noise=0.03) == 1


def test_losses_that_are_not_finite_rank_last():
    def ends_early(t):
        return np.where(t > 0.5, np.nan, 0.0)

    best, found = choice([1.5, 0.9, ends_early])
    assert best == 1 and found.losses[2] == np.inf
    assert "not finite, at step" in str(found)


@pytest.mark.parametrize("losses", [(2.4, 2.3999), (2.41, 3.0), (2.4, 2.395)])
def test_no_progress_is_an_error_with_a_table(losses):
    with pytest.raises(RuntimeError, match="(?s)more than 400 `steps`.*at the start"):
        choice(losses, noise=0.01)


def test_no_finite_loss_is_an_error_too():
    with pytest.raises(RuntimeError, match="not finite, at step 1"):
        choice([lambda t: t * np.nan, lambda t: t * np.nan])


def test_the_same_losses_at_all_rates_are_an_error():
    with pytest.raises(RuntimeError, match="another optimizer than"):
        choice([1.0, 1.0])


def test_the_end_of_the_grid_is_pointed_out():
    assert "try higher rates too" in str(choice([1.5, 0.9])[1])
    assert "try lower rates too" in str(choice([0.9, 1.5])[1])
    assert "rates too" not in str(choice([1.5, 0.9, 1.5])[1])
