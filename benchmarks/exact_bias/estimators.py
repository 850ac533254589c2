"""The exact mean and variance of the gradient that one response gives, for every loss.

With weights mu(y) of the sampler, c_t(y) = d(-loss)/d(log pi_t) from megatron_rl.loss, and the
gradients of all steps:

    E[g]     =  1/2 sum_prompts sum_y mu(y) sum_t c_t(y) grad log pi_t
    Var[g]   =  E |g|^2 - |E[g]|^2      (a trace)

A loss is linear in |A|, and the sign of A follows from the reward, which is 0 or 1: so only the
mean and the mean square of A, over the other responses of the group, enter.

Shapes: m responses, T tokens, n prefixes, P parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.exact_bias.policy import Step
from benchmarks.exact_bias.responses import PROMPTS, Responses
from megatron_rl.batch.advantage import group_advantages
from megatron_rl.config.loss_presets import AdvantageKind
from megatron_rl.loss import (
    PRESETS,
    LossConfig,
    LossInputs,
    aggregate,
    count_kept,
    kept_tokens,
    policy_loss,
)

GROUP = 8
"""Responses of a group, G."""
LEFT_OUT = ("clip_cov", "kl_cov", "rspo")
"""Presets that choose tokens from the complete mini-batch, or need another pass of the routers."""
SWITCHES: dict[str, dict[str, object]] = {
    "exact sequence ratio": {"name": "reinforce", "weight": "total", "weight_level": "product"},
    "token ratio": {"name": "reinforce", "weight": "total"},
    "token ratio, truncated at 1.28": {
        "name": "reinforce", "weight": "total", "weight_mode": "truncate", "weight_high": 1.28,
    },
    "token ratio, clipped to 0.8, 1.28": {
        "name": "reinforce", "weight": "total", "weight_mode": "clip", "weight_low": 0.8,
        "weight_high": 1.28,
    },
    "token ratio, masked outside 0.8, 1.28": {
        "name": "reinforce", "weight": "total", "weight_mode": "mask", "weight_low": 0.8,
        "weight_high": 1.28,
    },
    "sequence ratio, masked above 2": {
        "name": "reinforce", "weight": "total", "weight_level": "product", "weight_mode": "mask",
        "weight_high": 2.0,
    },
    "sequence ratio, truncated at 2": {
        "name": "reinforce", "weight": "total", "weight_level": "product",
        "weight_mode": "truncate", "weight_high": 2.0,
    },
    "minirl, clip against mu": {"name": "minirl", "clip_anchor": "rollout"},
}  # fmt: skip


def all_losses() -> dict[str, LossConfig]:
    presets = {name: LossConfig(name=name) for name in PRESETS if name not in LEFT_OUT}
    return presets | {name: LossConfig.model_validate(keys) for name, keys in SWITCHES.items()}


@dataclass(frozen=True)
class Situation:
    """The inputs of one loss: the policies, and the responses that are trained on."""

    responses: Responses
    rewards: Tensor
    """float64 [m], 0 or 1."""
    mu: Tensor
    """float64 [n, 8], log-probs of the sampler; old, pi: as this."""
    old: Tensor
    pi: Step
    dropped: Tensor | None = None
    """bool [m], responses that are sampled again."""
    masked: Tensor | None = None
    """bool [T], tokens that leave the loss."""

    @property
    def probabilities(self) -> Tensor:
        """mu(y) [m] of the responses that are trained on; the sum for a prompt is 1."""
        chances = self.responses.log_probabilities(self.mu).exp()
        if self.dropped is not None:
            chances = torch.where(self.dropped, 0.0, chances)
        return chances / self.responses.total(chances)


@dataclass(frozen=True)
class Moments:
    mean: Tensor
    """float64 [P], E[g]."""
    variance: float


def true_gradient(responses: Responses, rewards: Tensor, pi: Step) -> Tensor:
    """Return the gradient [P] of the mean reward of the policy."""
    chances = responses.log_probabilities(pi.logprobs).exp() / len(PROMPTS)
    return with_coefficients(responses, responses.per_token(chances * rewards), pi)


def first_order_gradient(situation: Situation) -> Tensor:
    """Return E_mu[sum_t k_t (R - E_mu R) grad log pi_t] [P], the gradient of J_token with k_t =
    pi / mu, from the equation.
    """
    s, steps = situation, situation.responses.steps
    chances = s.responses.log_probabilities(s.mu).exp()
    centred = s.rewards - s.responses.mean(chances, s.rewards)
    ratio = (s.pi.logprobs - s.mu).flatten()[steps].exp()
    weights = s.responses.per_token(chances * centred) / len(PROMPTS)
    return with_coefficients(s.responses, weights * ratio, s.pi)


def with_coefficients(responses: Responses, coefficients: Tensor, pi: Step) -> Tensor:
    """Return sum_t coefficients_t grad log pi_t [P]."""
    return by_step(responses, coefficients) @ pi.gradient


def by_step(responses: Responses, coefficients: Tensor) -> Tensor:
    """Return the sums [n * 8] of coefficients [T] over the tokens of every step."""
    num_steps = int(responses.steps.max()) + 1
    zeros = torch.zeros(num_steps, dtype=torch.float64)
    return zeros.index_add(0, responses.steps, coefficients)


def moments(situation: Situation, config: LossConfig, gram: Tensor) -> Moments:
    """Return mean and variance of the gradient of one response.

    gram: float64 [n * 8, n * 8], products of the gradients of all steps.
    """
    s = situation
    chances = s.probabilities / len(PROMPTS)
    mean, square = advantages(s, config.switches.advantage)
    coefficients = token_coefficients(s, config, mean)
    without = torch.zeros_like(coefficients)
    if config.switches.penalty != "none":
        without = token_coefficients(s, config, torch.zeros_like(mean))
    expected = with_coefficients(s.responses, s.responses.per_token(chances) * coefficients, s.pi)
    # g = |A| h + q, with q the part of a penalty: E|g|^2 is that at the mean of A, and the
    # variance of A times |h|^2
    spread = torch.where(mean == 0, 0.0, square / mean.square() - 1)
    squares = norms(s.responses, coefficients, gram)
    squares = squares + spread * norms(s.responses, coefficients - without, gram)
    variance = float((chances * squares).sum() - expected.square().sum())
    return Moments(expected, variance)


def token_coefficients(situation: Situation, config: LossConfig, advantage: Tensor) -> Tensor:
    """Return d(-loss)/d(log pi) [T] of every response trained alone, from megatron_rl.loss."""
    responses, steps = situation.responses, situation.responses.steps
    old, mu = (logprobs.flatten()[steps] for logprobs in (situation.old, situation.mu))
    pi = situation.pi.logprobs.flatten()[steps].requires_grad_()
    mask = torch.ones(len(steps), dtype=torch.bool)
    if situation.masked is not None:
        mask = ~situation.masked
    sequences = responses.sequences
    if config.switches.aggregation == "kept_mean":
        kept = kept_tokens(old, mu, mask, sequences, config)
        lengths = count_kept(kept, sequences.ids, sequences.count)
        sequences = replace(sequences, kept_lengths=lengths)
    inputs = LossInputs(pi, old, mu, responses.per_token(advantage), mask, sequences)
    loss = policy_loss(inputs, config)
    total = aggregate(loss, sequences, config, num_responses=1, num_response_tokens=1)
    return -torch.autograd.grad(total, pi)[0]


def norms(responses: Responses, coefficients: Tensor, gram: Tensor) -> Tensor:
    """Return |sum_t c_t grad log pi_t|^2 [m] of every response."""
    owners, lengths = responses.sequences.ids, responses.lengths
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(len(owners)) - starts[owners]
    shape = (len(lengths), int(lengths.max()))
    padded = torch.zeros(shape, dtype=torch.float64).index_put((owners, place), coefficients)
    steps = torch.zeros(shape, dtype=torch.int64).index_put((owners, place), responses.steps)
    products = gram[steps[:, :, None], steps[:, None, :]]
    return torch.einsum("ma,mab,mb->m", padded, products, padded)


def advantages(
    situation: Situation, kind: AdvantageKind, group: int = GROUP
) -> tuple[Tensor, Tensor]:
    """Return E[A | y] and E[A^2 | y] [m].

    mean, std, leave_one_out: over the other group - 1 responses, from the code of the trainer.
    The other kinds have their limit for large groups and batches.
    """
    s, mu = situation, situation.probabilities
    pass_rate = s.responses.mean(mu, s.rewards)
    if kind in ("mean", "std", "leave_one_out"):
        table = {
            (rate, reward): group_moments(kind, group, rate, reward)
            for rate in set(pass_rate.tolist())
            for reward in (0.0, 1.0)
        }
        pairs = zip(pass_rate.tolist(), s.rewards.tolist(), strict=True)
        both = torch.tensor([table[pair] for pair in pairs], dtype=torch.float64)
        return both[:, 0], both[:, 1]
    lengths = s.responses.lengths.double()
    if kind == "rescaled_mean":  # its factor is a constant
        limit = s.rewards - pass_rate
    elif kind == "length_weighted":
        limit = s.rewards - s.responses.mean(mu * lengths, s.rewards)
    elif kind == "batch_whitened":
        limit = s.rewards - (mu * lengths * s.rewards).sum() / (mu * lengths).sum()
    else:
        raise ValueError(f"no limit for the advantage {kind}")
    return limit, limit.square()


def group_moments(
    kind: AdvantageKind, group: int, pass_rate: float, reward: float
) -> tuple[float, float]:
    """Return E[A] and E[A^2] of a response with this reward, where `group` - 1 others have the
    reward 1 with probability `pass_rate`.
    """
    others = group - 1
    first = second = 0.0
    chance = partial(binomial, others, pass_rate)
    for passes in range(others + 1):
        rewards = np.array([reward] + [1.0] * passes + [0.0] * (others - passes))
        value = float(group_advantages(rewards, kind)[0])
        first, second = first + chance(passes) * value, second + chance(passes) * value**2
    return first, second


def binomial(number: int, rate: float, successes: int) -> float:
    ways = math.comb(number, successes)
    return ways * rate**successes * (1 - rate) ** (number - successes)
