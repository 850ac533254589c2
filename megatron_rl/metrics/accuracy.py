"""avg@n and pass@k from n responses to each prompt, with 95 % confidence intervals.

Shapes: P prompts, n responses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean over num_prompts prompts and its 95 % interval."""

    value: float
    low: float
    high: float
    num_prompts: int


def average(rewards: np.ndarray) -> Estimate:
    """Return avg@n, the mean over prompts of the mean of their rewards [P, n].

    A reward of NaN was not scored, and is left out.
    """
    rows = [row[~np.isnan(row)] for row in rewards]
    return interval([float(row.mean()) for row in rows if len(row)], draws=rewards.shape[1])


def pass_at(rewards: np.ndarray, k: int) -> Estimate:
    """Return pass@k, the mean over prompts of the expected best of k responses, estimated without
    bias from rewards [P, n], n >= k.

    For rewards 0 and 1 this is 1 - C(n - c, k) / C(n, k) with c correct (arXiv 2107.03374, Eq. 1).
    In general it is sum_j C(j, k - 1) / C(n, k) r_j, j = 0 .. n - 1, with the rewards in ascending
    order: the weight of r_j is the share of the subsets of k whose best is r_j.  A reward of NaN
    was not scored, and is left out, as is a prompt with fewer than k scored responses.
    """
    best = []
    for row in rewards:
        scored = np.sort(row[~np.isnan(row)])
        if len(scored) >= k:
            best.append(float(shares_of_the_best(len(scored), k) @ scored))
    return interval(best, draws=rewards.shape[1] // k)


@functools.lru_cache(maxsize=64)  # most prompts of a set have the same n
def shares_of_the_best(n: int, k: int) -> np.ndarray:
    """Return float64 [n]: for j, the share of the subsets of k of n whose largest element is the
    j-th smallest of all.
    """
    total = math.comb(n, k)
    return np.array([math.comb(j, k - 1) / total for j in range(n)])


def interval(scores: Sequence[float], *, draws: int) -> Estimate:
    """Return the mean of the prompts' scores, and the interval of the mean for another set of
    prompts from the same distribution.

    Prompts are the sampling unit.  For scores in [0, 1] it is Wilson's interval of p = mean with
    the effective size N = P p (1 - p) / s^2, s^2 the variance of the scores.  N is P for scores of
    0 and 1, more where the scores vary less, and at most P x draws (independent responses per
    score); it is P where p is 0 or 1, or where P = 1.  For other scores it is
    p +- 1.96 s / sqrt(P - 1).  Without prompts everything is NaN.
    """
    count = len(scores)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, 0)
    values = np.asarray(scores, np.float64)
    p = float(values.mean())
    variance = float(values.var())
    if values.min() < 0 or values.max() > 1:  # Wilson's interval is for shares
        half = Z * math.sqrt(variance / (count - 1)) if count > 1 else math.inf
        return Estimate(p, p - half, p + half, count)
    spread = p * (1 - p)
    size = float(count)
    if spread > 0 and count > 1:
        size = count * min(spread / variance, draws) if variance else count * draws
    centre = (p + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * math.sqrt(spread / size + Z**2 / (4 * size**2))
    # rounding must not put p outside its own interval
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), count)
