"""Check (c): compare the outcome of a layout with that of one rank with the same routes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_tools.verify_replay.router_hooks import RouteCheck

LOGPROB_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4
"""Relative to the largest element of a tensor."""


@dataclass(frozen=True)
class PassOutcome:
    """Results of an update with known routes, for comparison with another layout."""

    loss: float
    logprobs: dict[tuple[str, int], float]
    """(rollout, position) -> log pi_old."""
    gradients: dict[str, Tensor]
    """HF name -> float32 gradient, on rank 0 only."""


def compare_outcomes(ours: PassOutcome, reference: PassOutcome) -> list[RouteCheck]:
    """Check the largest differences of log-probs, loss and gradients, and say where they are."""
    checks = []
    if ours.logprobs.keys() == reference.logprobs.keys():
        worst, who = max(
            (abs(ours.logprobs[key] - reference.logprobs[key]), key) for key in ours.logprobs
        )
        detail = (
            f"largest difference {worst:.2g} at rollout {who[0]}, position {who[1]} (limit"
            f" {LOGPROB_TOLERANCE:.0e})"
        )
        checks.append(RouteCheck("(c) log-probs, one rank", worst <= LOGPROB_TOLERANCE, detail))
    else:
        odd = sorted(ours.logprobs.keys() ^ reference.logprobs.keys())
        detail = f"{len(odd)} tokens on one side only, first {odd[0]}"
        checks.append(RouteCheck("(c) log-probs, one rank", False, detail))
    difference = abs(ours.loss - reference.loss)
    limit = LOGPROB_TOLERANCE * max(1.0, abs(reference.loss))
    detail = f"{ours.loss:.7g}, one rank {reference.loss:.7g} (limit {limit:.1g})"
    checks.append(RouteCheck("(c) loss, one rank", difference <= limit, detail))
    checks.append(compare_gradients(ours.gradients, reference.gradients))
    return checks


def compare_gradients(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> RouteCheck:
    """Check each HF tensor's difference relative to its largest element.

    The divisor is at least 1e-4 of the largest element of all tensors: below it is rounding noise.
    """
    name = "(c) gradients, one rank"
    if ours.keys() != reference.keys():
        odd = sorted(ours.keys() ^ reference.keys())
        return RouteCheck(name, False, f"{len(odd)} tensors on one side only, first {odd[0]}")
    floor = 1e-4 * max(float(tensor.abs().max()) for tensor in reference.values())
    ratios = {}
    for key, tensor in reference.items():
        size = max(float(tensor.abs().max()), floor)
        ratio = (ours[key] - tensor).abs().max() / size
        ratios[key] = float(ratio.nan_to_num(nan=torch.inf))
    worst = max(ratios, key=lambda key: ratios[key])
    wrong = sum(ratio > GRADIENT_TOLERANCE for ratio in ratios.values())
    detail = (
        f"largest relative difference {ratios[worst]:.2g} in {worst} (limit"
        f" {GRADIENT_TOLERANCE:.0e})"
    )
    if wrong:
        detail = f"{wrong} of {len(ratios)} tensors differ; {detail}"
    return RouteCheck(name, not wrong, detail)
