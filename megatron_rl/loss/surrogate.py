"""f_t, the factor of a token's advantage: log pi, PPO's ratio, or a soft function of the ratio.

Shapes: T packed tokens.  The ratios that come in carry no gradient.  f_t is a function of q_t *
pi/sg[pi], so that d f_t = f'(q_t) q_t d log pi.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config.loss_presets import LossSwitches
from megatron_rl.loss.custom import LossInputs


@dataclass(frozen=True)
class Surrogate:
    """f_t, and its bounds for the metrics."""

    term: Float[Tensor, " T"]
    """f_t, differentiable in the log-probs."""
    beyond_dual_clip: Bool[Tensor, " T"]
    gate: Float[Tensor, " T"] | None = None
    """f'(q_t) of a soft form: 1 where it does not damp, below 0 where the gradient turns; None for
    the other forms."""


def surrogate(
    inputs: LossInputs,
    ratio: Float[Tensor, " T"],
    dropped: Bool[Tensor, " T"],
    switches: LossSwitches,
) -> Surrogate:
    """Return f_t of `form`.  ratio: q_t at clip_level; dropped: tokens with M_t = 0.

    Collective over `inputs.sequences.group` for form_level = geometric.
    """
    logprobs = inputs.logprobs
    nothing = torch.zeros_like(dropped)
    if switches.form == "logp":
        # Eq. 7: A_t * log pi, with the importance weight in W_t; the gradient of a dropped token is
        # 0
        return Surrogate(torch.where(dropped, 0.0, logprobs), nothing)
    # pi/sg[pi]: exp(0) = 1 with the gradient grad log pi
    one = (logprobs - logprobs.detach()).exp()
    if switches.form == "sigmoid":
        return sigmoid_gate(inputs, ratio, one, switches)
    if switches.form == "quadratic":
        return quadratic_gate(inputs, ratio, one, switches)
    # PPO's min(q A, clip(q) A): q, or the constant bound where a token is dropped
    # without a clip both bounds are infinite, and nothing is clamped
    bound = ratio.clamp(1 - switches.clip_low, 1 + switches.clip_high)
    dual = (inputs.advantages < 0) & (ratio > switches.dual_clip)
    bound = torch.where(dual, switches.dual_clip, bound)
    dropped = dropped | dual
    if switches.form_level == "geometric":
        # the logarithm is finite: the ratio is at least exp(-20), and no bound is 0
        logs = torch.where(dropped, bound, ratio).log()
        # all tokens of a response have this mean; a dropped one has it without gradient
        ratio = bound = inputs.sequences.mean(logs, inputs.mask).exp()
    return Surrogate(torch.where(dropped, bound, ratio * one), dual)


def sigmoid_gate(
    inputs: LossInputs, ratio: Tensor, one: Tensor, switches: LossSwitches
) -> Surrogate:
    """Return f_t of SAPO (arXiv 2511.20347), 4/tau sigmoid(tau (q - 1)).

    Its slope, with s the sigmoid, is 4 s (1 - s): 1 at q = 1, and towards 0 away from it.
    """
    tau = torch.full_like(ratio, switches.tau_negative).masked_fill(
        inputs.advantages > 0, switches.tau_positive
    )
    soft = torch.sigmoid(tau * (ratio * one - 1))
    return Surrogate(
        4 / tau * soft, torch.zeros_like(inputs.mask), (4 * soft * (1 - soft)).detach()
    )


def quadratic_gate(
    inputs: LossInputs, ratio: Tensor, one: Tensor, switches: LossSwitches
) -> Surrogate:
    """Return f_t of DRPO (arXiv 2606.09821, Eq. 8), q - sign(A) p (q - 1)^2 / (2 delta), with p the
    anchor's probability of the token.

    Its slope is 1 - sign(A (q - 1)) |pi - p| / delta.  Where the update moves the probability away
    from p, the slope is 0 at a distance of delta, and negative beyond it.
    """
    anchor = inputs.old_logprobs if switches.clip_anchor == "old" else inputs.rollout_logprobs
    curvature = inputs.advantages.sign() * anchor.detach().exp() / switches.delta
    term = ratio * one - curvature * (ratio * one - 1).square() / 2
    return Surrogate(term, torch.zeros_like(inputs.mask), 1 - curvature * (ratio - 1))
