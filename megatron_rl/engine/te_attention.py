"""Attention with sliding windows and sinks on torch, in place of TransformerEngine's.

It computes every score.  Shapes: S sequence, B batch, T packed tokens, A query heads and G key
heads of this tensor rank, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_rl.engine.attention import PackedAttention, PlannedSeqParams
from megatron_rl.models.spec import ModelError


class TEDotProductAttention(PackedAttention):
    """PackedAttention with sliding windows and sinks.

    A sink is a learnable logit of a head that takes part in every softmax.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        is_local = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # number of keys that a query sees, its own included; core's window_size excludes it
        self.window = config.window_size[0] + 1 if is_local else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ModelError(
                f"softmax_type = {config.softmax_type}: needs TransformerEngine on a GPU; run there"
            )
        if self.cp_group is not None and (self.window or config.softmax_type == "learnable"):
            raise ModelError(
                f"parallel.cp = {config.context_parallel_size}: windows and sinks need"
                " TransformerEngine under context parallelism; set it to 1"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PlannedSeqParams | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Return [S, B, A * D], or [T, A * D] for packed sequences; see PackedAttention."""
        sinks = getattr(self, "softmax_offset", None)
        if self.window is None and sinks is None:
            return super().forward(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params
            )
        if packed_seq_params is None:
            return local_attention(query, key, value, self.softmax_scale, self.window, sinks)
        outputs = []
        for rows in (slice(*pair) for pair in pairwise(packed_seq_params.cu_seqlens_q.tolist())):
            part = local_attention(
                query[rows, None],
                key[rows, None],
                value[rows, None],
                self.softmax_scale,
                self.window,
                sinks,
            )
            outputs.append(part[:, 0])
        return torch.cat(outputs)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        assert metadata is not None  # core passes the groups in it
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp,
            dp_cp_group=metadata["dp_cp_group"],
        )


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute causal attention over the last `window` keys, [S, B, heads, D] -> [S, B, A * D].

    window: None means all keys.  sinks [A]: logits that join every softmax of their head.
    """
    groups = query.size(2) // key.size(2)
    # neighbouring query heads share a key head
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    scores = torch.einsum("sbad,tbad->bast", query, key).float() * scale
    rows = torch.arange(query.size(0), device=query.device)
    distance = rows[:, None] - rows
    hidden = (distance < 0) | (distance >= (window or len(rows)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        # one more key, without a value: its column is dropped after the softmax
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : len(rows)].to(value.dtype)
    return torch.einsum("bast,tbad->sbad", weights, value).flatten(2)
