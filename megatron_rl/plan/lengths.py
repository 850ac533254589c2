"""Assumed response lengths: exponential, truncated at the cap, and determined by their mean.

An exponential has no memory: up to the cap, the rest of a running response is distributed like a
new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.plan.hardware import Assumptions


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths, in tokens."""

    mean: float
    cap: float
    """No response is longer."""
    scale: float
    """Scale of the exponential: S(t) = e^(-t / scale) for t < cap."""

    def survival(self, t: float) -> float:
        """Return S(t), the fraction of responses longer than t tokens; 0 from the cap on."""
        return math.exp(-t / self.scale) if t < self.cap else 0.0

    @property
    def second_moment(self) -> float:
        """E[length^2] = integral of 2 t S(t) = 2 s (s - (s + c) e^(-c / s)), s scale, c cap."""
        left = math.exp(-self.cap / self.scale)
        return 2 * self.scale * (self.scale - (self.scale + self.cap) * left)


def lengths_of(cfg: Config, assumed: Assumptions) -> Lengths:
    """Return the assumed response lengths of a configuration.

    Raises ValueError for a mean that is not below the cap.
    """
    cap = cfg.rollout.max_response_tokens
    return make_lengths(assumed.mean_response * cap, cap)


def make_lengths(mean: float, cap: float) -> Lengths:
    """Solve s (1 - e^(-cap / s)) = mean for the scale s.

    Raises ValueError unless 0 < mean < cap.
    """
    if not 0 < mean < cap:
        raise ValueError(
            f"mean response of {mean:g} tokens: it must be above 0 and below the cap of {cap:g}"
        )
    # bisection for x = cap / s with (1 - e^-x) / x = mean / cap: the left side falls from 1 with x,
    # and is below 1 / x
    low, high = 0.0, cap / mean
    # 100 halvings are more than a float64 has bits
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if -math.expm1(-x) / x > mean / cap else (low, x)
    return Lengths(mean, cap, cap / high)
