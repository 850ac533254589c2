"""Results of the engine's two passes: of the old-logprob pass for the update after it, and of one
micro-batch of the update for its observers.

Shapes: T packed rows of a micro-batch and t router rows, both of this rank; l this stage's MoE
layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_rl.loss import PolicyLoss
from megatron_rl.records.packed import PackedBatch
from megatron_rl.replay.mismatch import Mismatch
from megatron_rl.replay.router_shift import RouterRecord

ReplayMode = Literal["none", "R2", "R3"]
"""Routes of a pass: the router's live choice, those of the old-logprob pass, or the rollout's."""


@dataclass(frozen=True)
class OldPass:
    """Results of the old-logprob pass over one mini-batch, with one entry per micro-batch.

    They stay on the rank until the update of the same mini-batch.
    """

    logprobs: tuple[Tensor, ...]
    """float32 [T] log pi_old, on the last pipeline stage; empty on the others."""
    recorded: tuple[Tensor, ...] | None
    """uint8 | int16 [l, t, K] ids of the experts that were used; None except under R2."""
    mismatch: Mismatch | None
    """Comparison with the rollout's experts; None where it was not measured."""
    flips: tuple[Tensor, ...] | None
    """uint8 [T] number of MoE layers in which a token's live choice differs from the rollout's;
    None where it was not measured."""
    reference: tuple[Tensor, ...] | None = None
    """float32 [T] log pi_ref, as `logprobs`; None without loss.kl_coef."""
    router: RouterRecord | None = None
    """Router probabilities of the experts that were used; None without loss.router_shift."""


@dataclass(frozen=True)
class UpdateTokens:
    """Inputs and result of the loss of one micro-batch: this rank's rows, detached, on the last
    pipeline stage."""

    index: int
    """Index of the micro-batch in its mini-batch."""
    micro_batch: PackedBatch
    logprobs: Tensor
    """float32 [T] log pi."""
    old_logprobs: Tensor
    """float32 [T] log pi_old."""
    entropy: Tensor
    """float32 [T] entropy of pi, in nats."""
    loss: PolicyLoss
    shares: Tensor
    """[T] what every token adds to the mini-batch loss."""


ObserveTokens = Callable[[UpdateTokens], None]
