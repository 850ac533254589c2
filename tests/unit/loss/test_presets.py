"""Every preset against a formula of its own, value and gradient to 1e-10; boundary cases; bad
numbers.
"""

import math

import pytest
import torch

from megatron_rl.loss import PRESETS
from tests.unit.loss import formulas
from tests.unit.loss.cases import (
    EPISODES,
    Response,
    counts,
    loss_of,
    pack,
    responses,
    run,
    run_whole,
)

NAMES = sorted(PRESETS)
# 16 has a response that opsm drops
BATCHES = [(seed, (4, 7, 1, 0, 5, 6, 3)) for seed in (*range(8), 16)]


def one(logp, old, mu, a):
    return Response(*(torch.tensor([v], dtype=torch.float64) for v in (logp, old, mu)), a)


def test_the_presets_of_the_documentation_exist():
    assert set(NAMES) == {
        "minirl", "minirl_no_is", "minirl_length_norm", "minirl_no_clip", "reinforce", "grpo",
        "dapo", "dr_grpo", "gspo",
        "cispo", "decoupled_ppo", "tis", "icepop", "seq_mis", "geo_rs", "opsm", "dppo", "rloo",
        "reinforce_pp",
        "dppo_tau", "drpo", "vaco", "sapo", "gmpo", "gpg", "opo", "clip_cov", "kl_cov", "rspo",
        "kpop", "dis",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("episodes", [(), EPISODES])
def test_value_and_gradient_against_the_formula(name, episodes):
    for seed, lengths in BATCHES:
        batch = responses(seed, lengths, episodes=episodes)
        total, gradients = run_whole(batch, loss_of(name))
        for r in batch:
            r.logprobs.requires_grad_()
        expected = formulas.loss(name, batch)
        expected.backward()
        assert total.dtype == torch.float64
        torch.testing.assert_close(total, expected.detach(), rtol=1e-10, atol=1e-10)
        for got, r in zip(gradients, batch, strict=True):
            expected_gradient = (
                torch.zeros_like(r.logprobs) if r.logprobs.grad is None else r.logprobs.grad
            )
            torch.testing.assert_close(got, expected_gradient, rtol=1e-10, atol=1e-10)


def test_the_random_batches_reach_every_branch():
    """Otherwise the comparison above could pass on a formula that never differs from plain
    REINFORCE.
    """
    for name in (
        "minirl",
        "seq_mis",
        "geo_rs",
        "opsm",
        "dppo",
        "dppo_tau",
        "gspo",
        "gmpo",
        "icepop",
        "vaco",
        "kpop",
        "dis",
    ):
        batches = [responses(*case) for case in BATCHES]
        losses = [run(pack(b), loss_of(name), **counts(b))[2] for b in batches]
        found = {
            "high": sum(int(x.clipped_high.sum()) for x in losses),
            "low": sum(int(x.clipped_low.sum()) for x in losses),
            "bounded": sum(int(x.bounded.sum()) for x in losses),
            "rejected": sum(int(x.rejected.sum()) for x in losses),
            "masked": sum(int((x.mask & ~x.in_weight_mask).sum()) for x in losses),
        }
        if name in ("minirl", "dppo", "dppo_tau", "gspo", "gmpo"):
            assert found["high"] and found["low"], name
        if name in ("minirl", "icepop", "seq_mis"):
            assert found["bounded"], name
        if name in ("icepop", "kpop", "dis"):
            assert 0 < found["masked"] < sum(int(x.mask.sum()) for x in losses), name
        if name in ("geo_rs", "opsm", "vaco"):
            assert 0 < found["rejected"] < sum(int(x.mask.sum()) for x in losses), name


def test_float32_stays_float32_and_close():
    for name in NAMES:
        exact, _ = run_whole(responses(1), loss_of(name))
        rough, gradients = run_whole(responses(1, dtype=torch.float32), loss_of(name))
        assert rough.dtype == torch.float32 and gradients[0].dtype == torch.float32
        assert float(rough) == pytest.approx(float(exact), rel=1e-4, abs=1e-5), name


def test_bfloat16_log_probs_are_computed_in_float32():
    packed = pack(responses(1, dtype=torch.bfloat16))
    total, gradient, loss = run(packed, loss_of("minirl"), **counts(responses(1)))
    assert total.dtype == loss.ratio.dtype == torch.float32 and gradient.dtype == torch.bfloat16


# Exactly at the bound -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["logp", "ratio"])
def test_clip_bounds_are_strict(form):
    """r = 1.5 and r = 0.5 exactly, bounds 0.5: kept.  The next float beyond: dropped."""
    config = loss_of("minirl", weight="none", form=form, clip_low=0.5, clip_high=0.5)
    over, under = math.log(1.5) + 1e-15, math.log(0.5) - 1e-15
    assert math.exp(over) > 1.5 and math.exp(under) < 0.5
    for logp, a, high, low in [
        (math.log(1.5), 1.0, False, False),
        (over, 1.0, True, False),
        (over, -1.0, False, False),
        (math.log(0.5), -1.0, False, False),
        (under, -1.0, False, True),
        (under, 1.0, False, False),
    ]:
        batch = [one(logp, 0.0, 0.0, a)]
        _, gradient, loss = run(pack(batch), config, **counts(batch))
        assert (bool(loss.clipped_high.any()), bool(loss.clipped_low.any())) == (high, low), (
            logp,
            a,
        )
        assert bool((gradient != 0).any()) == (not (high or low))


def test_a_weight_exactly_at_its_bounds_is_inside():
    config = loss_of("icepop", weight_low=0.5, weight_high=2.0)
    for old, inside in [(math.log(2.0), True), (math.log(0.5), True), (0.7, False), (-0.7, False)]:
        batch = [one(old, old, 0.0, 1.0)]
        _, gradient, loss = run(pack(batch), config, **counts(batch))
        assert bool(loss.bounded.any()) != inside and bool((gradient != 0).any()) == inside


def test_a_response_exactly_at_the_rejection_bound_is_kept():
    config = loss_of("geo_rs", reject_low=1.0, reject_high=1.0)
    for old, kept in [(0.0, True), (1e-9, False), (-1e-9, False)]:
        batch = [one(old, old, 0.0, 1.0)]
        _, gradient, loss = run(pack(batch), config, **counts(batch))
        assert bool(loss.rejected.any()) != kept and bool((gradient != 0).any()) == kept


def test_opsm_measures_the_sampler_against_the_policy():
    """DeepSeek-V3.2, Eq.

    9: log pi_old there is what the inference engine returned, log mu here; no other one counts.
    """
    for a, mu, old, dropped in [
        (-1.0, -1.0, -2.0, True),  # mean log(mu/pi) = 1 > 0.5
        (1.0, -1.0, -2.0, False),  # it drops bad responses only
        (-1.0, -1.6, -1.0, False),  # 0.4, however far pi_old is
        (-1.0, -4.0, -2.0, False),  # pi is the more likely one
    ]:
        x = torch.full((3,), -2.0, dtype=torch.float64)
        batch = [Response(x, torch.full_like(x, old), torch.full_like(x, mu), a)]
        _, _, loss = run(pack(batch), loss_of("opsm"), **counts(batch))
        assert bool(loss.rejected.any()) == dropped, (a, mu, old)


def test_a_truncated_token_keeps_its_gradient():
    """Identity (c): the coefficient of a token with pi/mu > 5 is 5, not 0."""
    batch = [one(-0.1, -0.1, -5.0, 1.0)]
    assert float(run_whole(batch, loss_of("minirl"))[1][0]) == -5.0


def test_dppo_truncates_far_beyond_minirl():
    """Its code in verl has 20, and warns of the bias of a smaller bound."""
    for k, weight in [(12.0, 12.0), (25.0, 20.0)]:
        batch = [one(math.log(0.1), -9.0, math.log(0.1 / k), 1.0)]  # pi - mu stays below 0.15
        assert float(run_whole(batch, loss_of("dppo"))[1][0]) == pytest.approx(-weight)


def test_dual_clip_holds_a_bad_token_that_became_likely():
    """A < 0: max(min(r A, clip(r) A), c A); beyond c the gradient is gone, below it is r A."""
    config = loss_of("grpo", dual_clip=3.0)
    for r, value, slope in [(2.9, 2.9, 2.9), (3.1, 3.0, 0.0)]:
        total, gradients = run_whole([one(math.log(r), 0.0, 0.0, -1.0)], config)
        assert float(total) == pytest.approx(value) and float(gradients[0]) == pytest.approx(slope)


def test_divergence_masks_of_a_small_example():
    """Binary KL of 0.2 -> 0.4 is 0.2 ln(1/2) + 0.8 ln(0.8/0.6); the token is dropped only for a
    bound below that.
    """
    divergence = 0.2 * math.log(0.5) + 0.8 * math.log(0.8 / 0.6)
    for bound, dropped in [(divergence + 1e-9, False), (divergence - 1e-9, True)]:
        config = loss_of("dppo", clip="kl", clip_low=bound, clip_high=bound)
        for a, pi, mu in [(1.0, 0.4, 0.2), (-1.0, 0.4, 0.2), (1.0, 0.2, 0.4)]:
            batch = [one(math.log(pi), -9.0, math.log(mu), a)]
            _, gradient, _ = run(pack(batch), config, **counts(batch))
            assert bool((gradient == 0).all()) == (dropped and a > 0 and pi > mu), (bound, a, pi)


def test_kpop_drops_a_token_by_either_direction_of_the_binary_kl():
    """D(0.9 || 0.2) = 1.146 and D(0.2 || 0.9) = 1.363, whichever of the two policies has 0.9.
    The sign of A and the current policy do not matter.
    """
    one_way, other_way = (
        p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        for p, q in [(0.9, 0.2), (0.2, 0.9)]
    )
    assert one_way < 1.2 < other_way
    for bound, dropped in [(one_way + 1e-9, True), (other_way - 1e-9, True), (1.364, False)]:
        config = loss_of("kpop", mask_high=bound)
        for old, mu, a in [(0.9, 0.2, 1.0), (0.9, 0.2, -1.0), (0.2, 0.9, 1.0), (0.2, 0.9, -1.0)]:
            batch = [one(math.log(old), math.log(old), math.log(mu), a)]
            _, gradient, loss = run(pack(batch), config, **counts(batch))
            assert bool((gradient == 0).all()) == dropped, (bound, old, mu, a)
            assert not loss.clipped_high.any() and not loss.clipped_low.any()


def test_dis_reads_no_pi_old():
    """DIS has no third policy: the gradient does not depend on log pi_old."""
    batch = responses(0)
    moved = [Response(r.logprobs, r.old - 1.7, r.mu, r.advantage) for r in batch]
    (total, gradients), (other, others) = (run_whole(b, loss_of("dis")) for b in (batch, moved))
    assert total == other and all(map(torch.equal, gradients, others))
    assert any((g != 0).any() for g in gradients)


# Nothing to learn from ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantage_empty_and_all_masked_give_zero(name):
    zero = [Response(r.logprobs, r.old, r.mu, 0.0) for r in responses(2)]
    everywhere = {"penalty_dead_zone": 0.0} if PRESETS[name].penalty == "abs" else {}
    total, gradients = run_whole(zero, loss_of(name, **everywhere))
    if PRESETS[name].penalty == "none":
        assert float(total) == 0 and all((g == 0).all() for g in gradients)
    else:  # it needs no advantage
        assert float(total) > 0
    empty = responses(2, lengths=(0, 0))
    packed = pack(empty)
    total, gradient, _ = run(packed, loss_of(name), num_responses=2, num_response_tokens=1)
    assert float(total) == 0 and (gradient == 0).all()
    packed = pack(responses(2))
    packed.mask[:] = False
    total, gradient, loss = run(packed, loss_of(name), num_responses=6, num_response_tokens=26)
    assert float(total) == 0 and (gradient == 0).all() and not loss.mask.any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_response_counts_in_the_number_of_responses_only(name):
    batch = responses(3, lengths=(4, 5))
    total, _ = run_whole(batch, loss_of(name))
    with_empty, _ = run_whole([batch[0], *responses(0, lengths=(0,)), batch[1]], loss_of(name))
    factor = 1.0 if PRESETS[name].aggregation == "token_mean" else 2 / 3
    assert float(with_empty) == pytest.approx(factor * float(total), rel=1e-12)


# Bad numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["logprobs", "old", "mu"])
@pytest.mark.parametrize("name", NAMES)
def test_a_non_finite_token_is_masked_and_counted(name, which, bad):
    """The same loss and gradient as if the token were not there; denominators that count tokens
    still count it.
    """
    packed = pack(responses(5))
    position = int(packed.rows[1][2])
    getattr(packed, which)[position] = bad
    global_counts = counts(responses(5))
    total, gradient, loss = run(packed, loss_of(name), **global_counts)
    assert total.isfinite() and gradient.isfinite().all() and gradient[position] == 0
    assert int((packed.mask & ~loss.mask).sum()) == 1 and not loss.mask[position]
    absent = pack(responses(5))
    absent.mask[position] = False
    absent.sequences = packed.sequences
    expected, expected_gradient, _ = run(absent, loss_of(name), **global_counts)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_stay_finite(name):
    """Log-ratios of +-1000, alone and summed over a response, in float32."""
    for sign in (1, -1):
        for a in (1.0, -1.0):
            far = [
                torch.full((4,), v) for v in (-1000.0 * (sign < 0), -500.0, -1000.0 * (sign > 0))
            ]
            total, gradients = run_whole([Response(*far, a)], loss_of(name))
            assert total.isfinite() and gradients[0].isfinite().all()


def test_a_bad_advantage_is_not_hidden():
    """The caller counts on it: the gradient turns NaN and the optimizer skips the step."""
    batch = responses(4)
    batch[1].advantage = math.nan  # fresh and matched: no preset rejects this response
    for name in NAMES:
        assert run_whole(batch, loss_of(name))[0].isnan(), name
