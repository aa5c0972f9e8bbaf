"""`examples/report.py`: what is decided, which runs count, what the summary says."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import harness
import report
from report import HELD, NOT_HELD, UNDECIDED

# Three seeds with a spread of 1: the standard error of a difference is 0.816, and
# Student's t for four degrees of freedom 2.78. So 2.27 is the least that decides.
SPREAD = np.array([-1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    "difference, expected",
    [
        (2.3, HELD),
        (2.2, UNDECIDED),
        (0.0, UNDECIDED),
        (-2.2, UNDECIDED),
        (-2.3, NOT_HELD),
    ],
)
def test_a_difference_decides_beyond_the_spread_of_the_seeds(difference, expected):
    assert report.is_lower(SPREAD, SPREAD + difference) == expected


def test_the_more_seeds_the_smaller_the_difference_that_decides():
    few, many = SPREAD, np.tile(SPREAD, 5)
    assert report.is_lower(few, few + 1.5) == UNDECIDED
    assert report.is_lower(many, many + 1.5) == HELD


def test_one_seed_and_what_is_not_a_number_decide_nothing():
    assert report.is_lower([1.0], [100.0, 101.0]) == UNDECIDED
    assert report.is_lower([1.0, 1.0], [np.nan, 2.0]) == UNDECIDED


def test_the_table_of_t_is_students():
    stats = pytest.importorskip("scipy.stats")
    freedom = np.arange(1, len(report.T) + 1)
    np.testing.assert_allclose(report.T, stats.t.ppf(0.975, freedom), atol=0.006)


@pytest.mark.parametrize(
    "verdicts, expected",
    [
        ([HELD, HELD], HELD),
        ([HELD, UNDECIDED], UNDECIDED),
        ([UNDECIDED, NOT_HELD, HELD], NOT_HELD),
    ],
)
def test_of_several_comparisons_each_must_hold(verdicts, expected):
    assert report.all_of(verdicts) == expected


def test_the_best_is_ahead_of_each_other_one():
    values = {"a": SPREAD, "b": SPREAD + 3, "c": SPREAD + 1}
    assert report.best("a", values) == (UNDECIDED, "a 0.000 ± 1.000, c 1.000 ± 1.000")
    assert report.best("b", values)[0] == NOT_HELD
    del values["c"]
    assert report.best("a", values)[0] == HELD


def test_the_summary_has_every_claim_with_a_link_to_its_section():
    claims = [
        report.Claim("x is better", HELD, "1 against 2"),
        report.Claim("y is better", UNDECIDED, "1 against 1"),
    ]
    section = f"## Data set, 3 epochs (4.1)\n\n{report.claims_table(claims)}\n\nText.\n"
    lines = report.summary([section, "## Another: NOT RUN\n\nText.\n"]).splitlines()
    link = "[Data set](#data-set-3-epochs-41)"
    assert f"| {link} | x is better | held: 1 against 2 |" in lines
    assert f"| {link} | y is better | not decided |" in lines
    assert "| [Another](#another-not-run) | every claim | not run |" in lines
    assert report.summary(["## Nothing claimed\n"]) == ""


def test_a_claim_is_one_row_of_the_summary_with_all_that_tested_it():
    def claims(*verdicts):
        return [
            report.Claim(f"{n} layers: x is better", verdict, f"number {n}")
            for n, verdict in enumerate(verdicts)
        ]

    constant = report.claims_table(claims(NOT_HELD, UNDECIDED, NOT_HELD), "constant")
    decayed = report.claims_table(claims(HELD, UNDECIDED, UNDECIDED), "cosine")
    (row,) = (
        line
        for line in report.summary([f"## A\n\n{constant}\n\n{decayed}\n"]).splitlines()
        if "x is better" in line
    )
    assert row.split(" | ")[1:] == [
        "x is better",
        "**did not hold**, constant: 0 layers (number 0); 2 layers (number 2)"
        "<br>not decided, constant: 1 layers"
        "<br>held, cosine: 0 layers (number 0)"
        "<br>not decided, cosine: 1 layers; 2 layers |",
    ]


@pytest.mark.parametrize("best, mark", [(0.1, " (edge)"), (0.3, ""), (1.0, " (edge)")])
def test_a_best_rate_at_an_edge_of_its_grid_is_marked(best, mark):
    cells = report.marked({0.1: "a", 0.3: "b", 1.0: "c"}, best)
    assert sum("**" in cell for cell in cells.values()) == 1
    assert cells[best].endswith(f"**{mark}")


def test_the_rate_of_a_grid_that_is_not_complete_is_not_chosen(tmp_path):
    losses = {0.1: 2.0, 0.3: 1.0, 1.0: np.nan}
    rates = (0.1, 0.3, 1.0)
    assert report.chosen_rate("Adam", losses, rates, "--grid", tmp_path) == 0.3
    with pytest.raises(SystemExit, match="The grid of Adam is not complete .* 3, 10"):
        report.chosen_rate("Adam", losses, (*rates, 3.0, 10.0), "--grid", tmp_path)


def test_more_seeds_are_those_of_the_same_settings_each_once(tmp_path):
    def write(experiment, seed, rate=0.1):
        run = harness.Run(experiment, "Adam", {"rate": rate}, seed)
        harness.write(run, {}, 1.0, tmp_path, "made up")

    for seed in (0, 1):
        write("new", seed)
    write("old", 1)
    write("old", 2)
    write("old", 3, rate=0.2)
    known = harness.read_all(tmp_path, "new")
    found = report.all_seeds(known, tmp_path, "new", "old")
    assert [(r["experiment"], r["seed"]) for r in found] == [
        *(("new", 0), ("new", 1), ("old", 2))
    ]
