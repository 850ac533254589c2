"""Every loss x replay x sampler x staleness for one set of weights.

Shapes: m responses, P parameters.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.exact_bias.estimators import (
    Situation,
    advantages,
    all_losses,
    first_order_gradient,
    moments,
    true_gradient,
    with_coefficients,
)
from benchmarks.exact_bias.policy import Policy, Routes, Step, Weights, one_rank, rounded
from benchmarks.exact_bias.responses import LONGEST, PROMPTS, Responses

WEIGHTS = ("random", "trained")
SAMPLERS = ("exact", "fp32", "bf16", "fp8")
STALENESS = (0, 1, 2, 4, 8)
WITH_GAPS = ("fp8",)
"""Samplers whose routes are also replayed with a gap."""
REPLAYS = ("none", "R2", "R3", "R3, gap live", "R3, gap masked", "R3, gap dropped")
GROUPS = (2, 4, 8, 16, 64)
"""Sizes of the group whose standard deviation is divided by."""
PASS_RATES = (0.15, 0.5)
"""Shares of the responses to each prompt whose reward is 1."""
UPDATE = 0.02
"""Length of one update, in the norm of the parameters."""
TRAINING, TRAINING_UPDATE = 12, 0.1
"""Number and length of the updates that make trained weights of random ones."""


@dataclass(frozen=True)
class Cell:
    """One loss in one situation, against the true gradient g at the current weights."""

    sampler: str
    replay: str
    staleness: int
    loss: str
    bias: float
    """|E[g_hat] / scale - g| / |g|; scale: what the loss multiplies g by on policy."""
    cosine: float
    first_order: float
    """The same distance to the gradient of the first-order surrogate with live routing."""
    noise: float
    """Standard deviation of one response's gradient / scale, relative to |g|."""


@dataclass(frozen=True)
class Facts:
    """Distances between the policies."""

    sampler: str
    staleness: int
    flips: float
    """Share of (row, layer) pairs whose set of experts differs from that of the sampler."""
    kl: float
    """KL(mu, pi) of a response, in nats, with live routing."""
    ratio: float
    """Mean of |pi / mu - 1| over mu's tokens."""


@dataclass(frozen=True)
class Sampler:
    logprobs: Tensor
    routes: Routes


class Study:
    """The policies of one set of weights: pi_old, samplers, and pi after some updates."""

    def __init__(self, policy: Policy, weights: Weights, seed: int) -> None:
        self.policy, self.weights = policy, weights
        self.responses = Responses.make()
        draws = torch.rand(len(self.responses.ids), generator=torch.Generator().manual_seed(seed))
        self.rewards = (draws < torch.tensor(PASS_RATES)[self.responses.prompts]).double()
        self.losses = all_losses()
        self.samplers = {name: self._sampler(name) for name in SAMPLERS}
        # pi_old: the trainer's weights before the updates, which are those of the exact sampler
        self.old = self.samplers["exact"]
        self._scales: dict[str, float] = {}
        self._old_logprobs: dict[tuple[str, bool], Tensor] = {}

    def _sampler(self, precision: str) -> Sampler:
        self.policy.weights = rounded(self.weights, precision)
        return Sampler(self.policy.logprobs(None), self.policy.live_routes())

    def true_gradient(self, weights: Weights) -> Tensor:
        """Return g [P] with live routing, by one backward pass."""
        self.policy.weights = weights
        responses = self.responses
        chances = responses.log_probabilities(self.policy.logprobs(None)).exp() / len(PROMPTS)
        values = responses.per_token(chances * self.rewards)
        zeros = torch.zeros(self.old.logprobs.numel(), dtype=torch.float64)
        sums = zeros.index_add(0, responses.steps, values)
        return self.policy.gradient(sums.view_as(self.old.logprobs))

    def updated(self, weights: Weights, number: int, length: float = UPDATE) -> Weights:
        """Return the weights after updates of this length along the true gradient."""
        for _ in range(number):
            weights = self.policy.moved(weights, self.true_gradient(weights), length)
        return weights

    def pass_rate(self, logprobs: Tensor) -> float:
        chances = self.responses.log_probabilities(logprobs).exp() / len(PROMPTS)
        return float((chances * self.rewards).sum())

    def run(
        self, staleness: Sequence[int] = STALENESS, samplers: Sequence[str] = SAMPLERS
    ) -> Iterator[Cell | Facts]:
        """Yield every cell.  staleness must begin with 0, samplers with exact."""
        weights, done = self.weights, 0
        for number in staleness:
            weights, done = self.updated(weights, number - done), number
            self.policy.weights = weights
            yield from self._cells(number, samplers)

    def _cells(self, number: int, samplers: Sequence[str]) -> Iterator[Cell | Facts]:
        live_routes, known = self.policy.live_routes(), dict[tuple[bytes, bool], Step]()

        def steps(routes: Routes, gap: bool = False) -> Step:
            key = b"".join(ids.tobytes() for ids in routes), gap
            if key not in known:
                known[key] = self.policy.steps(routes, gap=gap)
            return known[key]

        live = steps(live_routes)
        true = true_gradient(self.responses, self.rewards, live)
        for name in samplers:
            yield self._facts(name, number, live, live_routes)
        yield from self._estimates(number, "none", samplers, live, live, true)
        yield from self._estimates(number, "R2", samplers, steps(self.old.routes), live, true)
        for name in samplers:
            routes = self.samplers[name].routes
            yield from self._estimates(number, "R3", [name], steps(routes), live, true)
            if name in WITH_GAPS:
                for replay in REPLAYS[3:]:
                    pi = steps(routes, gap=True)
                    yield from self._estimates(number, replay, [name], pi, live, true)

    def _estimates(
        self,
        number: int,
        replay: str,
        samplers: Sequence[str],
        pi: Step,
        live: Step,
        true: Tensor,
    ) -> Iterator[Cell]:
        gram = pi.gradient @ pi.gradient.T
        for name in samplers:
            situation = self.situation(name, replay, pi)
            first = first_order_gradient(replace(situation, pi=live, masked=None, dropped=None))
            for loss, config in self.losses.items():
                estimate = moments(situation, config, gram)
                if loss not in self._scales:  # the first cell of every loss is on policy
                    self._scales[loss] = float(estimate.mean @ true / true.square().sum())
                scale = self._scales[loss]
                mean = estimate.mean / scale
                yield Cell(
                    sampler=name,
                    replay=replay,
                    staleness=number,
                    loss=loss,
                    bias=float((mean - true).norm() / true.norm()),
                    cosine=float(mean @ true / (mean.norm() * true.norm())),
                    first_order=float((mean - first).norm() / first.norm()),
                    noise=max(estimate.variance, 0.0) ** 0.5 / scale / float(true.norm()),
                )

    def situation(self, sampler: str, replay: str, pi: Step) -> Situation:
        """Return the policies and responses of a cell, pi_old with the routes of its replay."""
        responses, old = self.responses, self.old.logprobs
        if replay.startswith("R3"):
            old = self._replayed_old(sampler, "gap" in replay)
        longest = responses.lengths == LONGEST
        is_last = torch.ones(len(responses.steps), dtype=torch.bool)
        is_last[:-1] = responses.sequences.ids.diff() != 0
        return Situation(
            responses,
            self.rewards,
            self.samplers[sampler].logprobs,
            old,
            pi,
            dropped=longest if replay.endswith("dropped") else None,
            masked=is_last & responses.per_token(longest) if replay.endswith("masked") else None,
        )

    def _replayed_old(self, sampler: str, gap: bool) -> Tensor:
        """Return log pi_old [n, 8] with the routes of a sampler."""
        if (sampler, gap) not in self._old_logprobs:
            current, self.policy.weights = self.policy.weights, self.weights
            routes = self.samplers[sampler].routes
            self._old_logprobs[sampler, gap] = self.policy.logprobs(routes, gap=gap)
            self.policy.weights = current
        return self._old_logprobs[sampler, gap]

    def _facts(self, name: str, number: int, live: Step, routes: Routes) -> Facts:
        responses, mu = self.responses, self.samplers[name]
        chances = responses.log_probabilities(mu.logprobs).exp() / len(PROMPTS)
        shift = (live.logprobs - mu.logprobs).flatten()[responses.steps]
        weights = responses.per_token(chances)
        return Facts(
            sampler=name,
            staleness=number,
            flips=flips(mu.routes, routes),
            kl=-float((weights * shift).sum()),
            ratio=float((weights * shift.expm1().abs()).sum() / weights.sum()),
        )


def make_study(policy: Policy, kind: str, seed: int) -> Study:
    study = Study(policy, policy.random_weights(seed), seed)
    if kind == "random":
        return study
    # trained on the rewards that the study has
    return Study(policy, study.updated(study.weights, TRAINING, TRAINING_UPDATE), seed)


def group_biases(study: Study) -> list[float]:
    """Return the bias on policy of A = (R - mean) / std for every size of the group.

    It is a direction alone: the estimate is scaled to the true gradient.
    """
    study.policy.weights = study.weights
    pi = study.policy.steps(None)
    situation = study.situation("exact", "none", pi)
    loss, gram = study.losses["reinforce"], pi.gradient @ pi.gradient.T
    true = moments(situation, loss, gram).mean
    biases = []
    for group in GROUPS:
        mean, _ = advantages(situation, "std", group)
        weights = study.responses.per_token(situation.probabilities * mean)
        estimate = with_coefficients(study.responses, weights, pi)
        scale = float(estimate @ true / true.square().sum())
        biases.append(float((estimate / scale - true).norm() / true.norm()))
    return biases


@dataclass(frozen=True)
class Outcome:
    """Results of one set of weights."""

    cells: list[Cell | Facts]
    group_biases: list[float]
    """On policy, at every size of GROUPS."""
    pass_rate: float
    """Mean reward of pi_old."""


def run_study(staleness: Sequence[int], samplers: Sequence[str], kind: str, seed: int) -> Outcome:
    """Run one study in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder)) as policy:
        study = make_study(policy, kind, seed)
        biases, pass_rate = group_biases(study), study.pass_rate(study.old.logprobs)
        outcome = Outcome([*study.run(staleness, samplers)], biases, pass_rate)
    print(f"{kind} weights, seed {seed}: done", file=sys.stderr, flush=True)
    return outcome


def flips(first: Routes, second: Routes) -> float:
    """Return the share of (row, layer) pairs with different sets of experts."""
    differ = [
        (np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(-1).mean()
        for a, b in zip(first, second, strict=True)
    ]
    return float(np.mean(differ))
