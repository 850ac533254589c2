"""Histograms against NumPy on the raw values: moments exactly, quantiles within the stated
resolution.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.metrics.histogram import HISTOGRAMS, QUANTILES, describe_histogram, tabulate
from megatron_rl.metrics.reduce import MetricSums

RESOLUTION = 10 ** (0.5 / 64) - 1


def by_numpy(values, statistic):
    sizes = np.abs(values)
    exact = {"mean": values.mean, "std": values.std, "max": sizes.max}
    if statistic in exact:
        return exact[statistic]()
    return np.quantile(sizes, QUANTILES[statistic], method="inverted_cdf")


def check(found, values):
    for statistic, got in found.items():
        expected = by_numpy(values, statistic)
        if statistic in QUANTILES:
            assert got == pytest.approx(expected, rel=1.01 * RESOLUTION, abs=1e-9), statistic
        else:
            assert got == pytest.approx(expected, rel=1e-9, abs=1e-12 * np.abs(values).max()), (
                statistic
            )


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("size", [1, 2, 7, 5000])
def test_every_statistic_of_every_group(size, scale):
    rng = np.random.default_rng(size)
    values = scale * rng.standard_t(3, size) + 0.1 * scale
    groups, mask = rng.integers(0, 3, size), rng.random(size) < 0.8
    mask[0] = True
    values[~mask] = np.nan  # such rows hold anything
    spread = tabulate(torch.tensor(values), torch.tensor(mask), torch.tensor(groups), 4)
    found = describe_histogram(spread.sums, spread.largest)
    for group in range(4):
        mine = values[mask & (groups == group)]
        got = {statistic: column[group].item() for statistic, column in found.items()}
        if len(mine):
            check(got, mine)
        else:
            assert all(math.isnan(value) for value in got.values())
    whole = spread.together()
    check(
        {
            name: value.item()
            for name, value in describe_histogram(whole.sums, whole.largest).items()
        },
        values[mask],
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=30))
def test_any_values(values):
    ones = torch.ones(len(values), dtype=torch.bool)
    spread = tabulate(
        torch.tensor(values, dtype=torch.float64),
        ones,
        torch.zeros(len(values), dtype=torch.long),
        1,
    )
    found = {
        name: value.item()
        for name, value in describe_histogram(spread.sums, spread.largest).items()
    }
    sizes = np.abs(values)
    for name in QUANTILES:
        exact = by_numpy(np.array(values), name)
        if exact < 1e9:
            assert found[name] == pytest.approx(exact, rel=1.01 * RESOLUTION, abs=1.01e-9)
        else:
            assert found[name] == sizes.max()  # above the range


def test_zeros_give_zero_and_no_values_give_nan():
    one = torch.ones(3, dtype=torch.bool)
    found = tabulate(torch.zeros(3), one, torch.zeros(3, dtype=torch.long), 1)
    assert {value.item() for value in describe_histogram(found.sums, found.largest).values()} == {
        0.0
    }
    for nothing in (
        tabulate(torch.ones(3), ~one, torch.zeros(3, dtype=torch.long), 1),
        tabulate(torch.ones(0), one[:0], torch.ones(0, dtype=torch.long), 1),
    ):
        assert all(
            value.isnan() for value in describe_histogram(nothing.sums, nothing.largest).values()
        )


def test_it_never_waits_for_the_device():
    """Meta tensors raise on every read of a value."""
    with torch.device("meta"):
        spread = tabulate(
            torch.empty(9), torch.empty(9, dtype=torch.bool), torch.empty(9, dtype=torch.uint8), 5
        )
        MetricSums().add_histogram("logratio/staleness", spread.together())
    assert spread.sums.is_meta and spread.largest.is_meta


def test_calls_add_up_and_statistics_are_those_of_the_table():
    rng = np.random.default_rng(0)
    values, mask = rng.normal(0, 0.01, 400), torch.ones(200, dtype=torch.bool)
    sums = MetricSums()
    for part in (values[:200], values[200:]):
        spread = tabulate(torch.tensor(part), mask, torch.arange(200) % 2, 2)
        sums.add_histogram("logratio/staleness", spread, ("flips_0", "flips_1"))
        sums.add_histogram("logratio/staleness", spread.together())
    got = sums.reduce(None, "cpu")
    groups = {"": values, "/flips_0": values[::2], "/flips_1": values[1::2]}
    assert got.keys() == {
        f"logratio/staleness_{s}{group}"
        for s in HISTOGRAMS["logratio/staleness"]
        for group in groups
    }
    for group, mine in groups.items():
        check(
            {s: got[f"logratio/staleness_{s}{group}"] for s in HISTOGRAMS["logratio/staleness"]},
            mine,
        )
