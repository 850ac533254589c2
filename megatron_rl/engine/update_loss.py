"""The loss of one mini-batch's update, one micro-batch at a time, with its statistics.

Shapes: T packed rows of a micro-batch (this rank's, under context parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.engine.logprobs import TokenLogprobs
from megatron_rl.engine.pass_results import ObserveTokens, OldPass, UpdateTokens
from megatron_rl.engine.statistics import add_divergence, add_update
from megatron_rl.loss import LossInputs, PolicyLoss, policy_loss, token_shares
from megatron_rl.loss.teacher import teacher_divergence, with_divergence
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records.packed import MiniBatch, PackedBatch


@dataclass(frozen=True)
class UpdateLoss:
    """The loss function of the pipeline schedule (engine.forward.LossFn) for one mini-batch.

    The schedule calls it on the ranks of the last pipeline stage, once per micro-batch.
    """

    config: LossConfig
    batch: MiniBatch
    old: OldPass
    further: Sequence[Mapping[str, Any]]
    """Per micro-batch: the fields of LossInputs that need the complete mini-batch."""
    token_logprobs: Callable[..., TokenLogprobs]
    """OutputLogprobs: log-probs of a micro-batch from the model's output, with gradient."""
    sums: MetricSums | None
    """Statistics are added here; None on ranks whose statistics do not count."""
    num_parts: int
    """Parts of the mini-batch loss over micro-batches, data- and context-parallel ranks."""
    observe: ObserveTokens | None = None
    seen: list[Tensor] = field(default_factory=list)
    """float32 [T] log pi, detached, of the micro-batches so far, where statistics count."""

    def __call__(self, index: int, micro_batch: PackedBatch, output: Tensor) -> Tensor:
        """Return this rank's part of the mini-batch loss, a scalar to differentiate."""
        form = self.config.teacher_form
        values = self.token_logprobs(output, micro_batch, with_top=form != "token")
        inputs = LossInputs(
            values.logprobs,
            self.old.logprobs[index],
            micro_batch.rollout_logprobs,
            micro_batch.advantages,
            micro_batch.loss_mask,
            entropy=values.entropy,
            **self.further[index],
        )
        loss = policy_loss(inputs, self.config)
        divergence = None
        if values.top is not None and micro_batch.top is not None:
            divergence = teacher_divergence(values.top, micro_batch.top, form, len(values.logprobs))
            loss = with_divergence(loss, divergence, micro_batch)
        shares = token_shares(
            loss,
            self.further[index]["sequences"],
            self.config,
            num_responses=self.batch.num_responses,
            num_response_tokens=self.batch.num_response_tokens,
        )
        # shares have the mini-batch's global denominator: parts of ranks and micro-batches add up
        total = self.config.scale * shares.sum()
        if self.observe is not None:
            self.observe(self._tokens(index, micro_batch, values, loss, shares))
        if self.sums is not None:
            version, number = self.batch.policy_version, self.batch.index
            add_update(self.sums, total, self.num_parts, loss, values, micro_batch, version, number)
            if divergence is not None:
                add_divergence(self.sums, divergence, values, micro_batch, loss)
            self.seen.append(values.logprobs.detach())
        return total

    def _tokens(
        self,
        index: int,
        micro_batch: PackedBatch,
        values: TokenLogprobs,
        loss: PolicyLoss,
        shares: Tensor,
    ) -> UpdateTokens:
        return UpdateTokens(
            index=index,
            micro_batch=micro_batch,
            logprobs=values.logprobs.detach(),
            old_logprobs=self.old.logprobs[index],
            entropy=values.entropy.detach(),
            loss=loss,
            shares=self.config.scale * shares.detach(),
        )
