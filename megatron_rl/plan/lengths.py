"""How long responses are thought to be: exponential, cut at the cap.  One number, the mean, gives shape and share at the cap.

What is left of such a response is distributed like a whole one (until the cap), so that slots which drain behave like a batch
that has just begun.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Responses of `mean` tokens, none above `cap`; scale: of the exponential.  Survival S(t) = e^(-t / scale) for t < cap."""

    mean: float
    cap: float
    scale: float

    def survival(self, t: float) -> float:
        """Share of the responses that are longer than t tokens (0 beyond the cap)."""
        return math.exp(-t / self.scale) if t < self.cap else 0.0

    @property
    def second_moment(self) -> float:
        """E[length^2] = integral of 2 t S(t) = 2 s (s - (s + c) e^(-c / s))."""
        left = math.exp(-self.cap / self.scale)
        return 2 * self.scale * (self.scale - (self.scale + self.cap) * left)


def make_lengths(mean: float, cap: float) -> Lengths:
    """Solve s (1 - e^(-cap / s)) = mean for the scale s.  Raises ValueError unless 0 < mean < cap."""
    if not 0 < mean < cap:
        raise ValueError(f"mean response of {mean:g} tokens: it must be above 0 and below the cap of {cap:g}")
    low, high = mean, mean
    while high * -math.expm1(-cap / high) < mean * (1 - 1e-9) and high < 1e6 * cap:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if middle * -math.expm1(-cap / middle) < mean:
            low = middle
        else:
            high = middle
    return Lengths(mean, cap, high)
