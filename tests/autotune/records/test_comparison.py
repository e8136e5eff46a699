"""Comparing timings: differences are found and ties are ties, in simulations as noisy as measurements."""

import math

import numpy as np
import pytest
from auxhead.autotune.records.comparison import (
    Difference,
    Paired,
    compare,
    compare_runs,
    runs_tie,
    student_quantile,
    tie,
    typical,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from support.noisy_timings import ROUNDS, constant, noisy


def test_identical_variants_seldom_win():
    """A/A, 1,000 times."""
    values = noisy(np.random.default_rng(1), 200.0, pairs=1000, variants=2)
    found = [compare(b, a) for a, b in values]
    false = [one for one in found if not one.is_tie and one.median_ratio < 1]
    assert len(false) <= 10
    covered = sum(one.low <= 1 <= one.high for one in found)
    assert 980 <= covered < 1000, "neither too narrow nor so wide that nothing can be found"


EXACT = [([[110.0] * 3] * 2, 1.1), ([[100.0]] * 4, 1.0), ([[50.0, 50.0]] * 3, 0.5)]


@pytest.mark.parametrize(("own", "ratio"), EXACT)
def test_without_noise_the_ratio_is_exact(own, ratio):
    other = [[100.0] * len(own[0])] * 2
    found = compare(own, other)
    assert tuple(found) == pytest.approx((ratio,) * 3, rel=1e-12)
    assert tie(own, other) == found.is_tie == (ratio == 1.0)
    assert Paired(own, other, "run").over_baseline == pytest.approx(ratio)


def test_a_time_is_the_geometric_mean_of_the_medians_of_captures():
    """Worked out by hand: medians 4 and 9, whose mean is 6; of two rounds the median is theirs, 2 of 1 and 4."""
    assert typical([[4.0, 1.0, 700.0], [9.0, 9.0, 2.0]]) == pytest.approx(6.0)
    assert typical([[1.0, 4.0]]) == pytest.approx(2.0) and typical([[1.0, 4.0, 16.0, 700.0]]) == pytest.approx(8.0)
    # in every round the four times have one median in common, which is taken off and changes no ratio
    own, other = [[40.0], [90.0]], [[10.0], [40.0]]
    assert compare(own, other).median_ratio == pytest.approx(3.0)
    # a round in which all took three times as long, and one in which one of them did
    assert compare([[40.0, 120.0, 40.0], [90.0, 270.0, 999.0]], [[10.0, 30.0, 10.0], [40.0, 120.0, 40.0]])[
        0
    ] == pytest.approx(3.0)


def test_the_confidence_asked_for_is_the_interval_s():
    generator = np.random.default_rng(4)
    a, b = (noisy(generator, us)[0, 0].tolist() for us in (100.0, 101.0))
    widths = [math.log(one.high / one.low) for one in (compare(a, b, confidence=part) for part in (0.9, 0.99, 0.995))]
    quantiles = [1.8595, 3.3554, 3.8325]  # of Student's t with 8 degrees of freedom, of tables
    assert [width / widths[0] for width in widths] == pytest.approx([one / quantiles[0] for one in quantiles], rel=2e-3)
    assert compare(a, b) == compare(a, b, confidence=0.99), "where nothing is asked for"
    own, other = Paired(a, b, "run"), Paired(b, a, "run")
    assert compare_runs(own, other) == compare(a, b, confidence=0.995), "and where configurations are decided between"
    elsewhere = Paired(b, a, "another")
    by_default, asked = compare_runs(own, elsewhere), compare_runs(own, elsewhere, confidence=0.995)
    assert by_default == asked != compare_runs(own, elsewhere, confidence=0.99)
    freedom = 2 * (len(a) + len(b) - 2)
    halves = [math.log(one.high / one.median_ratio) for one in (compare(a, b), compare(b, a))]
    error = math.hypot(*halves) / student_quantile(len(a) + len(b) - 2, 0.995)
    half = math.log(asked.high / asked.median_ratio)
    assert half == pytest.approx(student_quantile(freedom, 0.9975) * error, rel=0.05)


@pytest.mark.parametrize("sign", [1, -1])
def test_less_than_half_a_per_cent_is_a_tie_however_sure(sign):
    sure = {part: math.exp(sign * part) for part in (0.0, 0.0049, 0.0051)}
    assert [Difference(ratio, ratio, ratio).is_tie for ratio in sure.values()] == [True, True, False]
    for part, ratio in sure.items():
        own, other = [[100.0 * ratio] * 2] * 3, [[100.0] * 2] * 3
        assert tie(own, other) == (part < 0.005)
        assert runs_tie(Paired(own, other, "one"), Paired(other, other, "two")) == (part < 0.005)
    faster, slower = ([[100.0 * 1.1**power] * 2] * 3 for power in (-sign, sign))
    assert not runs_tie(Paired(slower, other, "one"), Paired(faster, other, "two")), "as far from 1 on either side"
    ends = sorted((math.exp(sign * 0.1), 1.0))
    assert Difference(math.exp(sign * 0.05), *ends).is_tie, "an interval that ends at 1"


def test_one_capture_tells_no_error():
    own, other = [[1.0, 2.0]], [[1.0, 1.0]]
    with pytest.raises(ValueError, match="timings: got 1 captures and 2 of the baseline, wants two or more of each"):
        compare_runs(Paired(own, other * 2, "one"), Paired(other, own, "two"))
    with pytest.raises(ValueError, match="wants two or more of each"):
        compare_runs(Paired(other * 2, own, "one"), Paired(other * 2, own, "two"))
    assert Paired(own, own, "run").over_baseline == 1.0
    with pytest.raises(ValueError, match=r"timings: got timings of shape \(0,\), wants \[captures >= 1\]"):
        assert Paired([], own, "run").over_baseline


def test_a_real_difference_is_found():
    generator = np.random.default_rng(3)
    slow, fast = (noisy(generator, us, pairs=100) for us in (206.0, 200.0))
    differences = [compare(a[0], b[0]) for a, b in zip(slow, fast, strict=True)]
    assert sum(not one.is_tie and one.median_ratio > 1 for one in differences) >= 70
    assert np.median([one.median_ratio for one in differences]) == pytest.approx(1.03, abs=0.003)


def test_what_all_have_in_common_is_no_noise():
    """A clock that falls by a third half-way through touches both alike."""
    drift = np.where(np.arange(ROUNDS) < 10, 1.0, 1.5)
    offset = np.array([0.999, 1.0, 1.001, 1.0, 1.0])[:, None]
    found = compare(102.0 * offset * drift, 100.0 * offset * drift)
    assert found.low > 1.0 and found.median_ratio == pytest.approx(1.02) and found.high < 1.03


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 6), st.integers(1, 8), st.floats(0.5, 2.0))
def test_comparing_the_other_way_round_turns_the_ratio_round(seed, captures, rounds, factor):
    generator = np.random.default_rng(seed)
    a = noisy(generator, 100.0, captures=captures, rounds=rounds)[0, 0]
    b = noisy(generator, 100.0 * factor, captures=captures, rounds=rounds)[0, 0]
    there, back = compare(a.tolist(), b.tolist()), compare(b.tolist(), a.tolist())
    assert there == compare(a.tolist(), b.tolist()), "deterministic"
    assert there.median_ratio == pytest.approx(1 / back.median_ratio)
    assert there.low <= there.median_ratio <= there.high
    scaled = compare(7.0 * a, 7.0 * b)
    assert scaled == pytest.approx(there), "in any unit"


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 12), st.integers(2, 5), st.integers(1, 21))
def test_the_error_is_that_of_medians_of_drawn_rounds(seed, captures, others, rounds):
    """Written out: medians of the rounds that are drawn, and the scatter of their means over drawn captures."""
    generator = np.random.default_rng(seed)
    a, b = (np.round(generator.uniform(5.0, 5.3, (count, rounds)), 2) for count in (captures, others))  # many are equal
    both = np.log(np.concatenate([a, b]))
    both = both - np.median(both, axis=0)
    drawn = np.random.default_rng(0)
    of_a, of_b = (drawn.integers(count, size=(count, 500)) for count in (captures, others))
    medians = np.median(both[:, drawn.integers(rounds, size=(500, rounds))], axis=2)
    means = [np.take_along_axis(medians, of_one, axis=0).mean(axis=0) for of_one in (of_a, captures + of_b)]
    least = min(captures, others)
    error = np.std(means[0] - means[1], ddof=1) * math.sqrt(least / (least - 1))
    found = compare(a.tolist(), b.tolist())
    half = student_quantile(captures + others - 2, 0.995) * error
    assert math.log(found.high / found.median_ratio) == pytest.approx(half, rel=1e-9, abs=1e-12)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.floats(0.98, 1.02), st.sampled_from([0.9, 0.99, 0.9999]))
def test_ties_are_those_of_intervals(seed, factor, confidence):
    generator = np.random.default_rng(seed)
    a, b, other = (noisy(generator, us, captures=4, rounds=6)[0, 0].tolist() for us in (100.0, 100.0 * factor, 90.0))
    assert tie(a, b, confidence=confidence) == compare(a, b, confidence=confidence).is_tie
    for run in ("one", "another"):
        one, two = Paired(a, other, "one"), Paired(b, a, run)
        assert runs_tie(one, two, confidence=confidence) == compare_runs(one, two, confidence=confidence).is_tie


def test_variants_of_different_runs_are_compared_by_their_baseline():
    """In the second run the clock was a tenth lower."""
    samples = {"simple": constant(100.0), "slower": constant(105.0, "second", 110.0)}
    found = compare_runs(samples["simple"], samples["slower"])
    assert found.median_ratio == pytest.approx(110.0 / 105.0)
    generator = np.random.default_rng(5)
    own, other, base, later = (noisy(generator, 100.0)[0, 0] for _ in range(4))
    one, two = Paired(own.tolist(), base.tolist(), "first"), Paired(other.tolist(), later.tolist(), "second")
    apart, together = compare_runs(one, two), compare(own, other)
    assert apart.high / apart.low > together.high / together.low, "two more sources of noise"
    itself = compare_runs(Paired(one.baseline, one.baseline, "first"), two)
    assert itself.median_ratio == pytest.approx(1 / two.over_baseline), "the baseline of another run is the baseline"
    assert itself.high / itself.low < apart.high / apart.low


def test_bad_timings():
    for a, b, message in (
        ([[1.0]], [[1.0]], r"a: got timings of shape \(1, 1\), wants \[captures >= 2\]"),
        ([[1.0, 2.0], [1.0]], [[1.0]] * 2, "a: got captures of different numbers of rounds"),
        ([[], []], [[], []], r"a: got timings of shape \(2, 0\), wants \[captures >= 2\]\[rounds >= 1\]"),
        ([[1.0]] * 2, [[1.0, 1.0]] * 2, "b: got 2 rounds, wants 1"),
        ([[1.0]] * 2, [[0.0]] * 2, "b: got times that are not positive"),
        ([[math.nan]] * 2, [[1.0]] * 2, "a: got times that are not positive"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(a, b)


def test_student_quantile():
    of_tables = {(1, 0.975): 12.706, (4, 0.995): 4.604, (8, 0.995): 3.355, (8, 0.9995): 5.041, (30, 0.975): 2.042}
    assert {one: student_quantile(*one) for one in of_tables} == pytest.approx(of_tables, rel=2e-3)
