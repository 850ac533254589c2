"""The estimators against brute force over all subsets, the intervals against simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.metrics.accuracy import average, interval, pass_at

NAN = math.nan


def best_of_all_subsets(row, k):
    subsets = list(itertools.combinations(row, k))
    return sum(max(subset) for subset in subsets) / len(subsets)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 7), binary=st.booleans())
def test_pass_at_k_is_the_mean_best_over_all_subsets(data, n, binary):
    reward = st.sampled_from([0.0, 1.0]) if binary else st.floats(-3, 3, width=32)
    rows = np.array(
        data.draw(st.lists(st.lists(reward, min_size=n, max_size=n), min_size=1, max_size=4))
    )
    for k in range(1, n + 1):
        expected = np.mean([best_of_all_subsets(row, k) for row in rows])
        assert pass_at(rows, k).value == pytest.approx(expected, abs=1e-9)
    assert pass_at(rows, 1).value == pytest.approx(average(rows).value, abs=1e-9)
    assert pass_at(rows, n).value == pytest.approx(rows.max(axis=1).mean(), abs=1e-9)


def test_pass_at_k_of_right_and_wrong_is_the_known_formula_without_overflow():
    for right in (0, 1, 17, 1023, 1024):
        row = np.array([[1.0] * right + [0.0] * (1024 - right)])
        expected = 1 - math.comb(1024 - right, 64) / math.comb(1024, 64)
        assert pass_at(row, 64).value == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_is_unbiased():
    """The mean over many draws of n = 6 is the chance that one of k = 3 new ones is right; 1 - (1 -
    pass@1)^3 is not.
    """
    rng = np.random.default_rng(0)
    chances = rng.beta(0.4, 0.8, size=40_000)
    rows = (rng.random((len(chances), 6)) < chances[:, None]).astype(float)
    truth = np.mean(1 - (1 - chances) ** 3)
    assert abs(pass_at(rows, 3).value - truth) < 0.005
    assert abs(np.mean(1 - (1 - rows.mean(axis=1)) ** 3) - truth) > 0.01, (
        "the plug-in estimate: the test could not fail"
    )


def test_what_was_not_scored_is_left_out():
    rows = np.array([[1.0, NAN, 0.0], [NAN, NAN, 1.0], [NAN, NAN, NAN]])
    assert (average(rows).value, average(rows).num_prompts) == (0.75, 2)
    assert (pass_at(rows, 2).value, pass_at(rows, 2).num_prompts) == (1.0, 1)
    assert math.isnan(pass_at(rows, 3).value) and pass_at(rows, 3).num_prompts == 0


@pytest.mark.parametrize("shape", [(0.3, 0.5), (2.0, 2.0), (8.0, 0.8)])
@pytest.mark.parametrize(
    ("prompts", "samples", "k"), [(30, 1, 1), (30, 8, 1), (30, 8, 4), (100, 4, 2)]
)
def test_the_interval_covers_the_truth_in_19_of_20_sets(shape, prompts, samples, k):
    """Prompts whose chance is Beta(shape); the truth is the mean over all such prompts."""
    rng = np.random.default_rng(5)
    truth = np.mean(1 - (1 - rng.beta(*shape, size=100_000)) ** k)
    hits = 0
    for _ in range(400):
        rows = (rng.random((prompts, samples)) < rng.beta(*shape, size=(prompts, 1))).astype(float)
        found = pass_at(rows, k)
        hits += found.low <= truth <= found.high
    assert hits / 400 > 0.91, hits / 400


def test_the_interval_is_wilsons_for_one_sample_a_prompt_and_not_empty_at_the_ends():
    found = interval([1.0] * 7 + [0.0] * 3, draws=1)
    assert (found.low, found.high) == (
        pytest.approx(0.3968, abs=2e-4),
        pytest.approx(0.8922, abs=2e-4),
    )
    assert interval([0.0] * 30, draws=8).high == pytest.approx(1.96**2 / (30 + 1.96**2), abs=1e-3)
    assert interval([0.0] * 30, draws=8).low == 0 and interval([1.0] * 30, draws=8).high == 1
    equal = interval([0.5] * 30, draws=8)  # no spread seen: as if all 240 draws were independent
    assert equal.high - equal.low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 240), rel=0.02)
    one = interval([0.5], draws=4)
    assert one.low < 0.1 and one.high > 0.9


def test_rewards_beyond_0_and_1_have_a_normal_interval():
    found = interval([-1.0, 0.0, 4.0], draws=2)
    assert found.value == 1.0 and found.high - 1 == pytest.approx(1.96 * math.sqrt(7 / 3), rel=1e-3)
    assert math.isinf(interval([3.0], draws=2).high)
