"""TransformerEngine's layers on torch, for machines without it: the same parameters, their names,
shards and results.

Megatron-Bridge knows a model by the names of its parameters in TransformerEngine's layers.  With
these classes in place of TransformerEngine's, core makes the layer spec of a GPU, and all of
Bridge's tables hold as they are, on a CPU. Written for correctness: experts are a loop, and
attention with a window or a sink computes every score.
Shapes: S sequence, B batch, T packed tokens, t rows of this rank, A query heads and G key heads of
this rank, D head size.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_rl.engine import linear_attention
from megatron_rl.engine.attention import PackedAttention, PlannedSeqParams
from megatron_rl.engine.model import RMSNorm
from megatron_rl.models.spec import ModelError


class TENorm(RMSNorm):
    """RMSNorm; its weight is stored less 1 where the model says so (layernorm_zero_centered_gamma)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        if config.normalization != "RMSNorm":
            raise ModelError(
                f"normalization = {config.normalization}: without TransformerEngine only RMSNorm"
                " can be computed; run on a GPU with TransformerEngine"
            )
        super().__init__(config, hidden_size, eps)
        self.is_zero_centered = bool(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.is_zero_centered)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel layer that first normalises its input, whose norm's weight is its own
    parameter.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = TENorm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.eps, self.is_zero_centered = (
            norm.weight,
            norm.eps,
            norm.is_zero_centered,
        )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        x = rms_norm(x, self.layer_norm_weight, self.eps, self.is_zero_centered)
        return super().forward(x, *args, **kwargs)


def rms_norm(x: Tensor, weight: Tensor, eps: float, is_zero_centered: bool) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight + 1 if is_zero_centered else weight) * wide.to(x.dtype)


class TELinear(torch.nn.Module):
    """A layer that every tensor rank has whole ("duplicated"), each for its own rows under sequence
    parallelism.
    """

    parallel_mode: None = None  # TransformerEngine's name for it

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        bias: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias, "core uses it for latent attention only"
        # core leaves it None here
        self.tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype).normal_(0, 0.02)
        )
        # core reads it
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.allreduce = True  # type: ignore[attr-defined]  # core reads it

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None

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
            None,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class TEGroupedLinear(torch.nn.Module):
    """One layer for each local expert: weight0, weight1, ...

    and bias0, ..., over rows sorted by expert.
    """

    partition_dim: int  # of a weight, over the expert tensor ranks

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        self.groups = pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        is_apart = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for index in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype).normal_(0, 0.02)
            )
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            # False: other ranks hold replicas
            weight.allreduce = not is_apart  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)
            if bias:
                values = torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                set_tensor_model_parallel_attributes(values, self.partition_dim == 0, 0, 1)
                values.allreduce = not is_apart  # type: ignore[attr-defined]  # as above
                self.register_parameter(f"bias{index}", values)

    def forward(self, x: Tensor, rows: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """(outputs [t, output], biases to add later or None) for x [t, input]: rows[i] rows for
        local expert i.
        """
        biases = (
            [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
            if self.use_bias
            else None
        )
        added = biases is not None and not self.skip_bias_add
        parts = [
            F.linear(
                part, getattr(self, f"weight{index}"), biases[index] if biases and added else None
            )
            for index, part in enumerate(x.split(rows))
        ]
        return torch.cat(parts), None if added else biases

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Checkpoint tensors [global experts, ...] named as those of core's SequentialMLP."""
        assert metadata is not None
        ep, kinds = self.groups.ep, ("weight", "bias") if self.use_bias else ("weight",)
        axes = {"weight": self.partition_dim} | ({"bias": 0} if self.partition_dim == 0 else {})
        found: ShardedStateDict = {}
        for index in range(self.num_gemms):
            expert = (
                len(sharded_offsets),
                ep.rank() * self.num_gemms + index,
                ep.size() * self.num_gemms,
            )
            sharded = make_sharded_tensors_for_checkpoint(
                {kind: getattr(self, f"{kind}{index}") for kind in kinds},
                prefix,
                axes,
                (*sharded_offsets, expert),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for kind in kinds:
                tensor = sharded[f"{prefix}{kind}"]
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                found[f"{prefix}{kind}{index}"] = tensor
        return found


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    partition_dim = 0


class TERowParallelGroupedLinear(TEGroupedLinear):
    partition_dim = 1


class TEDotProductAttention(PackedAttention):
    """PackedAttention that also knows sliding windows and sinks: a learnable logit per head that
    takes part in the softmax.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        is_local = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # keys that a query sees, itself included
        self.window = config.window_size[0] + 1 if is_local else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ModelError(
                f"softmax_type = {config.softmax_type}: needs TransformerEngine on a GPU"
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
        """As PackedAttention: [S, B, A * D], or [T, A * D] for packed sequences."""
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
        assert metadata is not None
        own, tp = (
            self.state_dict(keep_vars=True),
            ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp,
        )
        return make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=tp,
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
    """Causal attention over the last `window` keys, [S, B, heads, D] -> [S, B, A * D]; `sinks` [A]
    join each softmax.
    """
    groups = query.size(2) // key.size(2)
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    scores = torch.einsum("sbad,tbad->bast", query, key).float() * scale
    rows = torch.arange(query.size(0), device=query.device)
    distance = rows[:, None] - rows
    hidden = (distance < 0) | (distance >= (window or len(rows)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : len(rows)].to(value.dtype)
    return torch.einsum("bast,tbad->sbad", weights, value).flatten(2)


LAYERS: dict[str, Any] = {
    "TENorm": TENorm,
    "TELinear": TELinear,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
    "TELayerNormColumnParallelLinear": TELayerNormColumnParallelLinear,
    "TEColumnParallelGroupedLinear": TEColumnParallelGroupedLinear,
    "TERowParallelGroupedLinear": TERowParallelGroupedLinear,
    "TEDotProductAttention": TEDotProductAttention,
    # core's choice for queries and keys where it finds no recent TransformerEngine
    "FusedLayerNorm": TENorm,
}
"""TransformerEngine's classes in core -> those of this module.

Bridge tells a parameter's shards by its class's name.
"""

WHERE = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.extensions.transformer_engine_spec_provider",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.mla_qk_norm_config",
)
"""Modules of core that look the classes up when they make a spec or a layer."""


_with_te: list[bool] = []  # what `choose` was first asked for in this process


def choose_layers(*, te: bool) -> None:
    """Whose layers core makes for Bridge in this process: TransformerEngine's (te), or these.

    Raises ModelError where the other ones were chosen before: classes that modules have imported
    cannot be put back.
    """
    if not _with_te:
        _with_te.append(te)
        if not te:
            install_layers()
    if _with_te != [te]:
        kinds = {True: "TransformerEngine's layers", False: "layers without TransformerEngine"}
        raise ModelError(
            f"model.provider = bridge: this process was set up for {kinds[not te]} and cannot build"
            f" {kinds[te]}; use another process"
        )


def install_layers() -> None:
    """Put these layers in the place of TransformerEngine's in core's layer specs.

    Its local specs do not change.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.transformer import transformer_block

    for path in WHERE:
        module = importlib.import_module(path)
        # not there without TransformerEngine
        module.TESpecProvider = TESpecProvider  # type: ignore[attr-defined]
        for name, layer in LAYERS.items():
            if hasattr(module, name):
                setattr(module, name, layer)
    transformer_block.LayerNormImpl = TENorm
    linear_attention.install_linear_attention()
