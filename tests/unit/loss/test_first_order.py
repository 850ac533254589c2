"""J_token against J_seq (Eq. 1 to 4) where both can be enumerated: every response of a small
vocabulary, with an end token.

pi = softmax of a table of logits, one row per prefix; mu = the same table moved by eps in a random
direction.
"""

import itertools
import math

import pytest
import torch

from tests.unit.loss.cases import Response, loss_of, run_whole

V, MAX_LENGTH, END = 3, 3, 0


def all_responses():
    """Every response: ends with END or is cut at MAX_LENGTH."""
    found = []
    for length in range(1, MAX_LENGTH + 1):
        for y in itertools.product(range(V), repeat=length):
            if END not in y[:-1] and (y[-1] == END or length == MAX_LENGTH):
                found.append(y)
    return found


RESPONSES = all_responses()
PREFIXES = {p: i for i, p in enumerate(sorted({y[:t] for y in RESPONSES for t in range(len(y))}))}


def token_logprobs(table, y):
    """log pi(y_t | y_<t) for every t."""
    rows = table.log_softmax(dim=1)
    return torch.stack([rows[PREFIXES[y[:t]], y[t]] for t in range(len(y))])


def setting(eps, seed=0):
    """(theta with gradient, mu's table, a reward per response) in float64."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(len(PREFIXES), V, generator=g, dtype=torch.float64)
    theta = (mu + eps * torch.randn(mu.shape, generator=g, dtype=torch.float64)).requires_grad_()
    return theta, mu, torch.rand(len(RESPONSES), generator=g, dtype=torch.float64)


def j_seq(theta, mu, rewards):
    """Eq. 1 by enumeration; its autograd gradient is Eq. 2."""
    return sum(
        token_logprobs(theta, y).sum().exp() * r for y, r in zip(RESPONSES, rewards, strict=True)
    )


def j_token(theta, mu, rewards):
    """Eq. 3 by enumeration, less the constant that makes it J_seq at pi = mu: E[(|y| - 1) R]."""
    total = torch.zeros((), dtype=torch.float64)
    for y, r in zip(RESPONSES, rewards, strict=True):
        log_mu = token_logprobs(mu, y)
        ratios = (token_logprobs(theta, y) - log_mu).exp()
        total = total + log_mu.sum().exp() * r * (ratios.sum() - (len(y) - 1))
    return total


def kernel_gradient(theta, mu, rewards):
    """Eq.

    4 by our kernel: the gradient of log pi from run_whole, pulled back to the table.  A_i = N
    mu(y_i) R_i.
    """
    batch = []
    for y, r in zip(RESPONSES, rewards, strict=True):
        now, log_mu = token_logprobs(theta, y).detach(), token_logprobs(mu, y)
        batch.append(Response(now, log_mu, log_mu, float(len(RESPONSES) * log_mu.sum().exp() * r)))
    _, gradients = run_whole(batch, loss_of("minirl_no_clip", weight_high=math.inf))
    surrogate = sum(
        (-g * token_logprobs(theta, y)).sum() for y, g in zip(RESPONSES, gradients, strict=True)
    )
    return torch.autograd.grad(surrogate, theta)[0]


def test_the_enumeration_is_a_distribution():
    _, mu, _ = setting(0.0)
    assert float(sum(token_logprobs(mu, y).sum().exp() for y in RESPONSES)) == pytest.approx(
        1.0, abs=1e-14
    )
    assert {len(y) for y in RESPONSES} == {1, 2, 3}


@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
def test_the_kernel_is_equation_4(eps):
    theta, mu, rewards = setting(eps)
    expected = torch.autograd.grad(j_token(theta, mu, rewards), theta)[0]
    torch.testing.assert_close(
        kernel_gradient(theta, mu, rewards), expected, rtol=1e-12, atol=1e-14
    )


def test_at_pi_equal_mu_both_gradients_are_one():
    theta, mu, rewards = setting(0.0)
    sequence = torch.autograd.grad(j_seq(theta, mu, rewards), theta)[0]
    assert sequence.abs().max() > 1e-2
    torch.testing.assert_close(
        kernel_gradient(theta, mu, rewards), sequence, rtol=1e-12, atol=1e-14
    )


def order(errors, steps):
    """Slope of log error over log step."""
    return math.log(errors[0] / errors[-1]) / math.log(steps[0] / steps[-1])


@pytest.mark.parametrize("seed", range(3))
def test_the_objectives_differ_quadratically_and_the_gradients_linearly(seed):
    """|J_seq - J_token| = O(eps^2), |grad J_seq - grad J_token| = O(eps): equal to first order, and
    no better.
    """
    steps = [1e-2, 1e-3, 1e-4]
    values, gradients = [], []
    for eps in steps:
        theta, mu, rewards = setting(eps, seed)
        sequence = j_seq(theta, mu, rewards)
        values.append(float((sequence - j_token(theta, mu, rewards)).abs().detach()))
        difference = torch.autograd.grad(sequence, theta)[0] - kernel_gradient(theta, mu, rewards)
        gradients.append(float(difference.norm()))
    assert order(values, steps) == pytest.approx(2.0, abs=0.05)
    assert order(gradients, steps) == pytest.approx(1.0, abs=0.05)
