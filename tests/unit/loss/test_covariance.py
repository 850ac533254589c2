"""Tokens chosen by covariance: against a sort, with ties, over ranks, and wherever they are
packed.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.config.loss_presets import LossSwitches
from megatron_rl.loss import select_tokens, token_keys
from megatron_rl.loss.covariance import mixed, ordered_bits
from tests.thread_ranks import run_thread_ranks
from tests.unit.loss.cases import counts, loss_of, pack, prepare, responses, run

TOP = LossSwitches(select="cov_top", penalty="abs", penalty_coef=1.0)
BAND = LossSwitches(select="cov_band", cov_low=-0.1, cov_high=0.8)


def tokens(seed, size=200, levels=None):
    """(log pi_old, A, mask, keys); levels: few distinct values, so that many covariances are
    equal.
    """
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(size, generator=g, dtype=torch.float64)
    if levels:
        old = -(old.abs() * levels / 3).floor()
    advantages = torch.randn(size, generator=g, dtype=torch.float64).round(
        decimals=0 if levels else 9
    )
    keys = torch.randperm(size, generator=g) * 3 - size
    return old, advantages, torch.rand(size, generator=g) < 0.8, keys


def by_sorting(old, advantages, mask, keys, switches):
    rows = mask.nonzero().flatten().tolist()
    mean_a, mean_o = (sum(float(v[i]) for i in rows) / len(rows) for v in (advantages, old))
    cov = {i: (float(advantages[i]) - mean_a) * (float(old[i]) - mean_o) for i in rows}
    count = max(math.floor(switches.select_share * len(rows)), 1)
    if switches.select == "cov_band":
        order = sorted(
            (i for i in rows if switches.cov_low < cov[i] < switches.cov_high),
            key=lambda i: int(keys[i]),
        )
    else:
        order = sorted(rows, key=lambda i: (-round(cov[i], 10), int(keys[i])))
    return set(order[:count])


@pytest.mark.parametrize("share", [1e-9, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("levels", [None, 2, 1])
@pytest.mark.parametrize("switches", [TOP, BAND])
def test_against_a_sort(switches, levels, share):
    switches = replace(switches, select_share=share)
    for seed in range(3):
        given = tokens(seed, levels=levels)
        got = select_tokens(*given, switches)
        assert set(got.nonzero().flatten().tolist()) == by_sorting(*given, switches)


@pytest.mark.parametrize("switches", [TOP, BAND])
def test_the_ranks_together_choose_what_one_would(switches):
    """Sums over ranks only; one rank has no token at all."""
    old, advantages, mask, keys = tokens(5, levels=2)
    switches = replace(switches, select_share=0.1)
    whole = select_tokens(old, advantages, mask, keys, switches)
    parts = [torch.arange(0, 200, 2), torch.arange(1, 200, 2), torch.arange(0)]
    assert whole.sum() == int(0.1 * int(mask.sum()))

    def part(group, rank):
        mine = parts[rank]
        return select_tokens(old[mine], advantages[mine], mask[mine], keys[mine], switches, group)

    for mine, got in zip(parts, run_thread_ranks(part, 3), strict=True):
        assert torch.equal(got, whole[mine])


def test_the_ends_of_the_band_are_not_in_it():
    """Two tokens whose covariance is exactly 1."""
    inputs = (
        torch.tensor([-1.0, -3.0]),
        torch.tensor([1.0, -1.0]),
        torch.ones(2, dtype=torch.bool),
        torch.arange(2),
    )
    for low, high, chosen in ((0.5, 1.5, 2), (1.0, 1.5, 0), (0.5, 1.0, 0)):
        switches = replace(BAND, cov_low=low, cov_high=high, select_share=1.0)
        assert int(select_tokens(*inputs, switches).sum()) == chosen


def test_the_covariance_of_a_single_token_is_0():
    inputs = (
        torch.tensor([-4.0]),
        torch.tensor([4.0]),
        torch.ones(1, dtype=torch.bool),
        torch.arange(1),
    )
    assert select_tokens(*inputs, BAND).all()


def test_a_mini_batch_without_tokens_chooses_none():
    old, advantages, mask, keys = tokens(0)
    for switches in (TOP, BAND):
        assert not select_tokens(old, advantages, torch.zeros_like(mask), keys, switches).any()


def test_values_outside_the_mask_do_not_count():
    old, advantages, mask, keys = tokens(1)
    expected = select_tokens(old, advantages, mask, keys, replace(TOP, select_share=0.1))
    old[~mask], advantages[~mask] = float("nan"), 1e6
    assert torch.equal(
        select_tokens(old, advantages, mask, keys, replace(TOP, select_share=0.1)), expected
    )


def test_the_order_of_bits_is_that_of_numbers():
    values = torch.tensor(
        [-math.inf, -2.5, -1e-300, 0.0, 1e-300, 3.0, math.inf], dtype=torch.float64
    )
    assert (ordered_bits(values).diff() > 0).all()


def test_keys_name_a_token_wherever_it_is_packed():
    """Another order of sequences, pads between them, another prompt or position: the same key for
    the same token only.
    """
    mu = torch.tensor([-1.0, -2.0, -0.5, -0.25, 0.0])
    ids, positions = torch.tensor([0, 0, 1, 1, -1]), torch.tensor([3, 4, 3, 4, 0])
    first = token_keys(["p/0", "p/1"], ids, positions, mu)
    order = torch.tensor([4, 2, 3, 0, 1])
    moved = token_keys(
        ["x", "p/1", "p/0"], torch.tensor([-1, 1, 1, 2, 2]), positions[order], mu[order]
    )
    assert torch.equal(moved[1:], first[order[1:]])
    later = token_keys(["p/0", "p/1"], ids, positions, mu - 0.125)
    assert len({*first.tolist(), *later.tolist()}) == 10


def test_keys_are_spread_evenly():
    """SplitMix64 of 0, 1, 2: the published output function of a counter; and half of many keys are
    negative.
    """
    assert mixed(torch.tensor([0])).item() == 0
    golden = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, the generator's increment
    assert mixed(torch.tensor([golden])).item() % 2**64 == 0xE220A8397B1DCDAF, (
        "its first output for the seed 0"
    )
    keys = mixed(torch.arange(10_000))
    assert 4_700 < int((keys < 0).sum()) < 5_300 and len(set(keys.tolist())) == 10_000


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_what_was_chosen_is_dropped_or_alone_has_the_penalty(name):
    config = loss_of(
        name, select_share=0.3, **({"cov_low": -9.0, "cov_high": 9.0} if name == "clip_cov" else {})
    )
    batch = prepare(responses(2), config)
    packed = pack(batch)
    _, gradient, loss = run(packed, config, **counts(batch))
    plain = loss_of(
        name,
        select="none",
        select_share=None,
        **({} if name == "clip_cov" else {"penalty": "none", "penalty_coef": None}),
    )
    _, expected, _ = run(packed, plain, **counts(batch))
    chosen = packed.selected
    assert 0 < chosen.sum() == loss.selected.sum() < packed.mask.sum()
    assert torch.equal(gradient[~chosen], expected[~chosen])
    if name == "clip_cov":
        assert (gradient[chosen] == 0).all() and (loss.per_token[chosen] == 0).all()
    else:
        log_ratio = packed.logprobs - packed.old
        sign = (
            torch.where(log_ratio.abs() > 0.01, log_ratio.sign(), 0.0)
            / counts(batch)["num_response_tokens"]
        )
        torch.testing.assert_close(
            (gradient - expected)[chosen], sign[chosen], rtol=1e-10, atol=1e-13
        )


def test_a_missing_selection_is_named():
    packed = pack(responses(0))
    packed.selected = None
    with pytest.raises(ValueError, match="select = cov_top needs selected"):
        run(packed, loss_of("kl_cov"), **counts(responses(0)))
