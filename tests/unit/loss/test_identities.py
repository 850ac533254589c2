"""Identities (a) to (f) of the MiniRL objective: losses that must agree in gradient, and where
truncation breaks them.
"""

import math

import numpy as np
import pytest
import torch

from megatron_rl.batch.advantage import group_advantages
from megatron_rl.loss import LossSwitches
from tests.unit.loss.cases import Response, loss_of, responses, run_whole

EXACT = {"rtol": 1e-13, "atol": 1e-13}


def gradients(batch, config):
    return torch.cat(run_whole(batch, config)[1])


def on_policy(seed):
    return [Response(r.logprobs, r.logprobs.clone(), r.mu, r.advantage) for r in responses(seed)]


@pytest.mark.parametrize("seed", range(4))
def test_a_without_truncation_minirl_is_token_sum_decoupled_ppo(seed):
    batch = responses(seed)
    minirl = gradients(batch, loss_of("minirl", weight_high=math.inf))
    torch.testing.assert_close(
        minirl, gradients(batch, loss_of("decoupled_ppo", clip_high=0.27)), **EXACT
    )


@pytest.mark.parametrize("seed", range(4))
def test_b_without_truncation_the_stop_gradient_does_not_matter(seed):
    """sum M k A, k with gradient: -d/dtheta of it is what the sg form has."""
    batch = responses(seed)
    minirl = gradients(batch, loss_of("minirl", weight_high=math.inf))
    for r in batch:
        x = r.logprobs.requires_grad_()
        ratio = (x.detach() - r.old).exp()
        kept = ~(((r.advantage > 0) & (ratio > 1.27)) | ((r.advantage < 0) & (ratio < 0.8)))
        (-(kept * (x - r.mu).exp() * r.advantage).sum() / len(batch)).backward()
    torch.testing.assert_close(minirl, torch.cat([r.logprobs.grad for r in batch]), **EXACT)


def test_c_with_truncation_the_forms_differ():
    """min(k, C) is not min(rho, C) r, and a clamp with gradient kills what sg * log pi keeps."""
    # k = 11.0, rho = 9.0, r = 1.22
    x, old, mu = (torch.tensor([v], dtype=torch.float64) for v in (-0.5, -0.7, -2.9))
    batch = [Response(x, old, mu, 1.0)]
    assert float(gradients(batch, loss_of("minirl"))) == -5.0
    other = gradients(
        batch, loss_of("decoupled_ppo", clip_high=0.27, weight_mode="truncate", weight_high=5.0)
    )
    assert float(other) == pytest.approx(-5.0 * math.exp(0.2), rel=1e-12)
    y = x.clone().requires_grad_()
    (-(y - mu).exp().clamp(max=5.0)).sum().backward()
    assert float(y.grad) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_d_on_policy_every_token_is_kept_and_the_weight_is_the_mismatch(seed):
    batch = on_policy(seed)
    got = gradients(batch, loss_of("minirl"))
    expected = torch.cat(
        [-(r.old - r.mu).exp().clamp(max=5.0) * r.advantage / len(batch) for r in batch]
    )
    torch.testing.assert_close(got, expected, **EXACT)
    torch.testing.assert_close(got, gradients(batch, loss_of("minirl_no_clip")), **EXACT)


def test_e_leave_one_out_is_scaled_mean_centred():
    rewards = np.random.default_rng(0).normal(size=16)
    np.testing.assert_allclose(
        group_advantages(rewards, "leave_one_out"),
        16 / 15 * group_advantages(rewards, "mean"),
        rtol=1e-14,
    )


@pytest.mark.parametrize("seed", range(4))
def test_f_on_policy_without_importance_sampling_minirl_is_dr_grpo_is_reinforce(seed):
    batch = on_policy(seed)
    no_is = gradients(batch, loss_of("minirl_no_is"))
    torch.testing.assert_close(no_is, gradients(batch, loss_of("dr_grpo")), **EXACT)
    torch.testing.assert_close(no_is, gradients(batch, loss_of("reinforce")), **EXACT)
    torch.testing.assert_close(
        no_is, gradients(batch, loss_of("minirl", weight="none", weight_mode="none")), **EXACT
    )


def test_no_is_off_policy_drops_the_mismatch_and_only_that():
    """Where mu = pi_old nothing changes; where they differ, mu does not show at all."""
    batch = responses(7)
    matched = [Response(r.logprobs, r.old, r.old.clone(), r.advantage) for r in batch]
    torch.testing.assert_close(
        gradients(matched, loss_of("minirl_no_is")), gradients(matched, loss_of("minirl")), **EXACT
    )
    torch.testing.assert_close(
        gradients(matched, loss_of("minirl_no_is")), gradients(batch, loss_of("minirl_no_is"))
    )


def test_gspo_gradient_is_that_of_the_sequence_ratio_without_clipping():
    """(1/G) sum s_i A_i with s_i differentiated as it stands."""
    batch = responses(1)
    got = gradients(batch, loss_of("gspo", clip="none", clip_low=None, clip_high=None))
    for r in batch:
        r.logprobs.requires_grad_()
        (-(r.logprobs - r.old).mean().exp() * r.advantage / len(batch)).backward()
    torch.testing.assert_close(got, torch.cat([r.logprobs.grad for r in batch]), **EXACT)


def test_switches_off_are_reinforce():
    assert LossSwitches() == loss_of("reinforce").switches
