"""Log-probs of a micro-batch from what the last pipeline stage returns.

Shapes: T packed rows of a micro-batch (this rank's, under context parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.engine.adapter import Adapters
from megatron_rl.engine.fused_logprobs import HeadSettings, fused_logprobs, lm_head_weight
from megatron_rl.engine.logprobs import TokenLogprobs, token_logprobs
from megatron_rl.records.packed import PackedBatch


class FusedHead(NamedTuple):
    """The LM head whose weight is read here, not in the model's forward."""

    model: GPTModel
    """The last stage's model, which returns hidden states."""
    settings: HeadSettings
    adapters: Adapters


@dataclass(frozen=True)
class OutputLogprobs:
    """The function from the output of the last stage to log-probs; on other stages it is not
    called.
    """

    vocab_size: int
    temperature: float
    tp_group: dist.ProcessGroup | None
    fused: FusedHead | None
    """None without model.fused_lm_head: the last stage's model returns logits."""

    def __call__(
        self, output: Tensor, micro_batch: PackedBatch, *, with_top: bool = False
    ) -> TokenLogprobs:
        """Return the log-probs of the labels; of the ids of micro_batch.top too with `with_top`.

        The backward pass writes over logits: nothing else may read them.
        """
        labels, kept, top = micro_batch.labels, micro_batch.kept, None
        if with_top and micro_batch.top is not None:
            top = micro_batch.top.sets
        if self.fused is None:
            return token_logprobs(
                output.flatten(0, 1),
                labels,
                kept,
                vocab_size=self.vocab_size,
                temperature=self.temperature,
                tp_group=self.tp_group,
                overwrite=True,
                top=top,
            )
        model, settings, adapters = self.fused
        with adapters.in_use(model.output_layer):
            weight = lm_head_weight(model)
            return fused_logprobs(output, weight, labels, kept, settings, top)
