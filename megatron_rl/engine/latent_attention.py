"""megatron-core's latent attention (MLA) with two corrections: gradients under tp, and queries
without a norm.

Shapes: T packed rows or [S, B], A heads of this tensor rank, D = N + R with N the part of a head
without position and R the part with position.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from torch import Tensor

LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values: transformers fixes it for every
rms_norm_eps.
"""


class LatentAttention(MLASelfAttention):
    """core's latent attention with a rotary key that gets the gradient of all heads, for core
    0.16.1 to 0.19.2.

    core's local layers compute the latents with a column-parallel projection and gather them over
    the tensor ranks; in backward every rank keeps its own columns of the gradient.  That is correct
    for the compressed keys and values, whose gradient the up-projection has summed over the ranks.
    The rotary key goes directly to the heads of this rank: its gradient, and with it the gradient
    of every layer below, lacks the other ranks' heads (results/upstream_defects.md).
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        for name in ("linear_q_up_proj", "linear_kv_up_proj"):
            linear = getattr(self, name, None)  # absent for queries that are not compressed
            if linear is not None and hasattr(linear, "layer_norm_weight"):
                # TransformerEngine fuses the norm, with the epsilon of all norms
                linear.eps = LATENT_EPS

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, ...]:
        """Return core's query, key [T, A, D] or [S, B, A, D], value, compressed queries, and
        compressed keys and values.
        """
        bounds = packed_seq_params
        # unfused RoPE reads the sequences' bounds on the host, its fused kernels on the device
        if not self.config.apply_rope_fusion:
            bounds = getattr(packed_seq_params, "on_host", None) or packed_seq_params
        query, key, *others = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, bounds, **kwargs
        )
        # Only column-parallel latents are gathered.  TransformerEngine's are computed in full on
        # every rank; with sequence parallelism, which tp > 1 needs here, core scatters the rotary
        # key's gradient as a sum over the ranks.
        is_gathered = isinstance(self.linear_kv_down_proj, ColumnParallelLinear)
        if self.config.tensor_model_parallel_size > 1 and is_gathered:
            key = sum_rotary_gradient(key, self.config.qk_head_dim, self.pg_collection.tp)
        return query, key, *others

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        """Return the norms that core builds; core 0.19 calls this method, 0.16 does not.

        With qk_layernorm, core 0.19 requires a norm in the queries' projection and rejects local
        layers, which have none.  Queries that are not compressed have no norm in the supported
        models.
        """
        if self.config.q_lora_rank is not None:
            return dict(super()._resolve_qk_norm_config(submodules))
        if self.config.transformer_impl != "local":
            return dict(super()._resolve_qk_norm_config(submodules)) | {
                "linear_q_proj": submodules.linear_q_proj
            }
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,  # nothing was compressed, so there is nothing to expand
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


def sum_rotary_gradient(key: Tensor, plain_size: int, tp_group: dist.ProcessGroup) -> Tensor:
    """Return `key` [..., A, N + R], N = plain_size, unchanged; in backward sum the gradient of its
    R part over heads and ranks.
    """
    # all heads share the R part: reading it from the first one alone makes backward reduce one
    # head's gradient, not A
    plain, rotary = key[..., :plain_size], key[..., :1, plain_size:]
    # identity in forward, all-reduce in backward
    rotary = copy_to_tensor_model_parallel_region(rotary, group=tp_group)
    return torch.cat([plain, rotary.expand(*plain.shape[:-1], -1)], dim=-1)
