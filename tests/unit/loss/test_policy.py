"""Each loss against a formula written out in float64, value and gradient; identities (a), (b), (d) of paper.md section 2."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import LossConfig
from megatron_rl.loss import LOSSES, aggregate, policy_loss

LOW, HIGH, CAP = 0.2, 0.27, 5.0


def tokens(seed, lengths=(3, 5, 2)):
    """logprobs, old, mu, advantages, mask, response_lengths for sequences with one masked prompt row each; float32."""
    g = torch.Generator().manual_seed(seed)
    size = sum(lengths) + len(lengths)
    logp = -3 * torch.rand(size, generator=g) - 0.05
    old = logp + 0.4 * torch.randn(size, generator=g)
    mu = old + 0.8 * torch.randn(size, generator=g)
    advantages, mask, response = (
        torch.zeros(size),
        torch.zeros(size, dtype=torch.bool),
        torch.ones(size, dtype=torch.long),
    )
    row = 0
    for i, length in enumerate(lengths):
        a = [1.3, -0.7, 0.0][i % 3]
        advantages[row + 1 : row + 1 + length] = a
        mask[row + 1 : row + 1 + length] = True
        response[row : row + 1 + length] = length
        row += 1 + length
    return logp, old, mu, advantages, mask, response


def coefficient(name, logp, old, mu, a):
    """d(loss)/d(logp) and loss of one token, scalar float64, straight from the papers."""
    r, w = math.exp(logp - old), math.exp(logp - mu)
    kept = not ((a > 0 and r > 1 + HIGH) or (a < 0 and r < 1 - LOW))
    if name in ("minirl", "minirl_length_norm"):
        c = kept * min(w, CAP) * a
    elif name == "minirl_no_clip":
        c = min(w, CAP) * a
    elif name == "minirl_no_is":
        c = kept * min(r, CAP) * a
    elif name == "cispo":
        c = min(max(r, 1 - LOW), 1 + HIGH) * a
    elif name == "grpo":
        clipped = min(max(r, 1 - LOW), 1 + HIGH)
        inside = 1 - LOW <= r <= 1 + HIGH
        if r * a <= clipped * a:
            return -r * a, -r * a
        return -clipped * a, (-r * a if inside else 0.0)
    return -c * logp, -c


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_against_the_formula(name, seed):
    logp, old, mu, a, mask, response = tokens(seed)
    logp.requires_grad_()
    config = LossConfig(name=name)
    loss = policy_loss(logp, old, mu, a, mask, config)
    num_responses, num_tokens = 7, 40
    how = LOSSES[name].aggregation
    total = aggregate(
        loss.per_token, loss.mask, response, how, num_responses=num_responses, num_response_tokens=num_tokens
    )
    total.backward()
    expected, grads = 0.0, []
    for t in range(len(logp)):
        value, slope = coefficient(name, *(float(x[t]) for x in (logp.detach(), old, mu, a)))
        divisor = {
            "sequence_sum": num_responses,
            "sequence_mean": num_responses * int(response[t]),
            "token_mean": num_tokens,
        }[how]
        expected += value / divisor if mask[t] else 0.0
        grads.append(slope / divisor if mask[t] else 0.0)
    assert float(total) == pytest.approx(expected, rel=2e-6, abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor(grads), rtol=1e-5, atol=1e-6)


def test_identities_a_and_b_without_truncation():
    """(a) = token-sum decoupled PPO, (b) = sum M (pi/mu) A, in gradient."""
    logp, old, mu, a, mask, _ = (x.double() if x.is_floating_point() else x for x in tokens(9))
    config = LossConfig(name="minirl", tis_cap=math.inf)
    x = logp.clone().float().requires_grad_()
    policy_loss(x, old.float(), mu.float(), a.float(), mask, config).per_token.sum().backward()
    y = logp.clone().requires_grad_()
    r = (y - old).exp()
    surrogate = (old - mu).exp() * torch.minimum(r * a, r.clamp(1 - LOW, 1 + HIGH) * a)
    (-surrogate[mask].sum()).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-6)
    z = logp.clone().requires_grad_()
    r = (logp - old).exp()
    kept = ~(((a > 0) & (r > 1 + HIGH)) | ((a < 0) & (r < 1 - LOW)))
    (-(kept * (z - mu).exp() * a)[mask].sum()).backward()
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-5, atol=1e-6)


def test_identity_d_on_policy_keeps_every_token():
    logp, _, mu, a, mask, _ = tokens(3)
    loss = policy_loss(logp, logp.clone(), mu, a, mask, LossConfig())
    assert not loss.clipped_high.any() and not loss.clipped_low.any()
    expected = -(logp - mu).exp().clamp(max=CAP) * a * logp
    torch.testing.assert_close(loss.per_token[mask], expected[mask])


def test_bounds_are_strict():
    old = torch.zeros(4)
    logp = torch.tensor([1.5, 1.5 + 1e-6, 0.5, 0.5 - 1e-6]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = policy_loss(
        logp, old, old, advantages, torch.ones(4, dtype=torch.bool), LossConfig(clip_low=0.5, clip_high=0.5)
    )
    assert loss.clipped_high.tolist() == [False, True, False, False]
    assert loss.clipped_low.tolist() == [False, False, False, True]


def test_truncated_token_keeps_its_gradient():
    logp = torch.tensor([-0.1], requires_grad=True)
    mu = torch.tensor([-5.0])
    policy_loss(
        logp, logp.detach(), mu, torch.ones(1), torch.ones(1, dtype=torch.bool), LossConfig()
    ).per_token.sum().backward()
    assert logp.grad.item() == -CAP


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_non_finite_token_is_masked_and_others_untouched(name, which, bad):
    values = list(tokens(5))
    clean = [v.clone() for v in values]
    position = int(values[4].nonzero()[1])
    values[which][position] = bad
    values[0] = values[0].requires_grad_()
    loss = policy_loss(*values[:5], LossConfig(name=name))
    assert int((values[4] & ~loss.mask).sum()) == 1 and not loss.mask[position]
    loss.per_token.sum().backward()
    assert values[0].grad.isfinite().all() and values[0].grad[position] == 0
    without = policy_loss(*clean[:5], LossConfig(name=name)).per_token
    others = torch.arange(len(without)) != position
    torch.testing.assert_close(loss.per_token[others], without[others])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(sorted(LOSSES)))
def test_splitting_into_micro_batches_adds_up(seed, name):
    """The same loss and gradient whole or sequence by sequence, in any order: denominators are global."""
    lengths = (3, 5, 2, 4)
    values = tokens(seed, lengths)
    how = LOSSES[name].aggregation
    counts = {"num_responses": len(lengths), "num_response_tokens": sum(lengths)}

    def share(rows):
        part = [v[rows].clone() for v in values]
        part[0].requires_grad_()
        loss = policy_loss(*part[:5], LossConfig(name=name))
        total = aggregate(loss.per_token, loss.mask, part[5], how, **counts)
        total.backward()
        return total.detach(), part[0].grad

    whole, gradient = share(torch.arange(len(values[0])))
    starts = [0, 4, 10, 13, 18]
    pieces = [share(torch.arange(a, b)) for a, b in itertools.pairwise(starts)]
    torch.testing.assert_close(sum(p[0] for p in reversed(pieces)), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), gradient)
