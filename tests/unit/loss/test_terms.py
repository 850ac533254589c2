"""The optional terms: entropy bonus and KL to a reference, value and gradient; the estimators'
expectations.
"""

import math

import pytest
import torch

from megatron_rl.config.loss_presets import PRESETS
from megatron_rl.loss import aggregate, policy_loss
from megatron_rl.loss.kl import kl_to_reference, weighted_by_sampler
from tests.unit.loss.cases import Response, count_alone, counts, inputs_of, loss_of, pack, responses


def run_with(packed, config, entropy=None, reference=None, batch=None):
    count_alone(packed, config)
    logprobs = packed.logprobs.clone().requires_grad_()
    entropy = None if entropy is None else entropy.clone().requires_grad_()
    inputs = inputs_of(packed, config, logprobs, entropy=entropy, reference_logprobs=reference)
    loss = policy_loss(inputs, config)
    total = aggregate(loss, packed.sequences, config, **counts(batch))
    total.backward()
    return total.detach(), logprobs.grad, None if entropy is None else entropy.grad, loss


@pytest.mark.parametrize("name", ["minirl", "grpo", "dapo", "geo_rs"])
def test_the_terms_add_to_any_loss(name):
    """Differences to the loss without them, token by token, divided as the loss is."""
    batch = responses(2)
    packed = pack(batch)
    g = torch.Generator().manual_seed(0)
    entropy = torch.rand(len(packed.mask), generator=g, dtype=torch.float64)
    reference = packed.logprobs + 0.3 * torch.randn(
        len(packed.mask), generator=g, dtype=torch.float64
    )
    plain, plain_gradient, _, _ = run_with(packed, loss_of(name), batch=batch)
    both = loss_of(name, entropy_coef=0.1, kl_coef=0.5, kl_estimator="k3")
    total, gradient, entropy_gradient, loss = run_with(packed, both, entropy, reference, batch)
    expected, expected_gradient = 0.0, torch.zeros_like(gradient)
    for rows in packed.rows:
        divisor = {"minirl": len(batch), "grpo": len(batch) * len(rows)}.get(
            name, sum(len(b.old) for b in batch)
        )
        for row in rows.tolist():
            x = float(reference[row] - packed.logprobs[row])
            expected += (-0.1 * float(entropy[row]) + 0.5 * (math.exp(x) - 1 - x)) / divisor
            expected_gradient[row] = 0.5 * (1 - math.exp(x)) / divisor
            assert float(entropy_gradient[row]) == pytest.approx(-0.1 / divisor, rel=1e-12)
            assert float(loss.kl[row]) == pytest.approx(math.exp(x) - 1 - x, rel=1e-9)
    assert float(total - plain) == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(gradient - plain_gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert (entropy_gradient[~packed.mask] == 0).all()


def test_the_terms_of_masked_tokens_are_divided_by_all_of_them():
    """IcePop divides the loss by the tokens that its mask left; the KL and the entropy are of every
    token, so by |y|.
    """
    size = 10
    old = torch.full((size,), -1.0, dtype=torch.float64)
    batch = [Response(old + 0.1, old, old - 9.0, 1.0)]  # pi_old/mu = e^9: none is left
    for left in (0, 1, 4):
        batch[0].mu[:left] = -1.0
        packed = pack(batch)
        entropy, reference = torch.ones_like(packed.logprobs), packed.logprobs - 0.2
        config = loss_of(
            "icepop", entropy_coef=0.1, kl_coef=0.5, penalty="square", penalty_coef=0.3
        )
        plain, *_ = run_with(packed, loss_of("icepop"), batch=batch)
        total, gradient, entropy_gradient, loss = run_with(
            packed, config, entropy, reference, batch
        )
        assert int(loss.in_weight_mask.sum()) == left
        k3 = math.exp(-0.2) - 1 + 0.2
        assert float(total - plain) == pytest.approx(0.5 * k3 - 0.1 + 0.3 * 0.1**2, rel=1e-9), left
        torch.testing.assert_close(
            entropy_gradient[packed.rows[0]], torch.full_like(old, -0.1 / size), rtol=1e-12, atol=0
        )
        slope = 0.5 * (1 - math.exp(-0.2)) + 0.3 * 2 * 0.1
        assert float(gradient[packed.rows[0][-1]]) == pytest.approx(slope / size, rel=1e-9)


def test_estimators_by_enumeration():
    """Over samples of pi: k1, k3 have the value of KL(pi || ref); k2 its gradient; k3 that of
    KL(ref || pi); k1 none.
    """
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
    pi = theta.log_softmax(0)
    kl = (pi.exp() * (pi - ref)).sum()
    reverse = (ref.exp() * (ref - pi)).sum()
    grad = {
        "forward": torch.autograd.grad(kl, theta, retain_graph=True)[0],
        "reverse": torch.autograd.grad(reverse, theta, retain_graph=True)[0],
        "none": torch.zeros_like(theta),
    }
    weights = pi.detach().exp()
    for estimator, same in (("k1", "none"), ("k2", "forward"), ("k3", "reverse")):
        value = (weights * kl_to_reference(pi, ref, estimator)).sum()
        if estimator != "k2":
            assert float(value) == pytest.approx(float(kl), rel=1e-12)
        got = torch.autograd.grad(value, theta, retain_graph=True)[0]
        torch.testing.assert_close(got, grad[same], rtol=1e-12, atol=1e-14)


def test_the_weighted_estimate_over_samples_of_another_policy_by_enumeration():
    """DeepSeek-V3.2: over samples of pi_old, pi/pi_old * k3 has the value of KL(pi || ref) and its
    gradient; k3 alone neither.
    """
    g = torch.Generator().manual_seed(1)
    theta = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_()
    ref, old = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    pi = theta.log_softmax(0)
    kl = (pi.exp() * (pi - ref)).sum()
    (expected,) = torch.autograd.grad(kl, theta, retain_graph=True)
    plain = kl_to_reference(pi, ref, "k3")
    estimate = (old.exp() * weighted_by_sampler(plain, pi, old)).sum()
    assert float(estimate) == pytest.approx(float(kl), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(estimate, theta, retain_graph=True)[0], expected, rtol=1e-12, atol=1e-14
    )
    biased = torch.autograd.grad((old.exp() * plain).sum(), theta)[0]
    assert (biased - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("weight", "column"), [("staleness", "old"), ("total", "mu")])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_weight_of_the_kl_is_the_ratio_to_the_sampler(weight, column, estimator):
    """Value and gradient token by token; without it, those of the plain estimate."""
    batch = responses(4)
    packed = pack(batch)
    reference = packed.logprobs - 0.2
    settings = {"kl_coef": 0.5, "kl_estimator": estimator}
    base, base_gradient, _, _ = run_with(packed, loss_of("grpo"), batch=batch)
    total, gradient, _, loss = run_with(
        packed, loss_of("grpo", kl_weight=weight, **settings), reference=reference, batch=batch
    )
    x = packed.logprobs.clone().requires_grad_()
    expected = 0.0
    for rows in packed.rows:
        y = reference[rows] - x[rows]
        value = {"k1": -y, "k2": y**2 / 2, "k3": y.exp() - 1 - y}[estimator]
        term = (x[rows] - getattr(packed, column)[rows]).exp() * value
        torch.testing.assert_close(
            loss.kl[rows], term.detach(), rtol=1e-10, atol=1e-12, check_dtype=False
        )
        expected = expected + 0.5 * term.sum() / len(rows) / len(batch)
    expected.backward()
    assert float(total - base) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    wanted = torch.where(packed.mask, x.grad, 0.0)
    torch.testing.assert_close(gradient - base_gradient, wanted, rtol=1e-9, atol=1e-12)


def test_a_missing_argument_is_named():
    batch = responses(0)
    for switches, message in (
        ({"kl_coef": 0.1}, "kl_coef = 0.1 needs reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropy_coef = 0.1 needs entropy;"),
    ):
        with pytest.raises(ValueError, match=message):
            run_with(pack(batch), loss_of("minirl", **switches), batch=batch)


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_but_logprobs_carries_gradient(name):
    """Also where old, rollout and reference log-probs come from a graph; and no metric keeps the
    graph alive.
    """
    batch = responses(1)
    packed = pack(batch)
    reference = packed.logprobs.clone()
    for value in (packed.old, packed.mu, reference):
        value.requires_grad_()
    config = loss_of(name, kl_coef=0.1)
    _, gradient, _, loss = run_with(packed, config, reference=reference, batch=batch)
    assert (
        gradient.abs().max() > 0
        and [value.grad for value in (packed.old, packed.mu, reference)] == [None] * 3
    )
    found = [
        field for field, value in vars(loss).items() if value is not None and value.requires_grad
    ]
    assert found == ["per_token", "terms", "kl"]


@pytest.mark.parametrize("which", ["entropy", "reference"])
def test_a_bad_number_of_a_term_masks_its_token(which):
    batch = responses(0)
    packed = pack(batch)
    values = {"entropy": torch.ones_like(packed.logprobs), "reference": packed.logprobs.clone()}
    position = int(packed.rows[0][1])
    values[which][position] = math.nan
    config = loss_of("minirl", kl_coef=0.1, entropy_coef=0.1)
    total, gradient, entropy_gradient, loss = run_with(
        packed, config, values["entropy"], values["reference"], batch
    )
    assert total.isfinite() and gradient.isfinite().all() and entropy_gradient.isfinite().all()
    assert not loss.mask[position] and gradient[position] == 0 == entropy_gradient[position]
