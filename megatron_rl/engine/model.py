"""The model: ModelSpec -> TransformerConfig -> GPTModel chunks of this pipeline stage.

models/families.py reads a family's ModelSpec.  With TransformerEngine and a GPU the TE layer spec
is used, otherwise core's local one with the RMSNorm of this file and PackedAttention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.engine.core_fields import check_fields, has_transformer_engine, make_core
from megatron_rl.engine.latent_attention import LATENT_EPS, LatentAttention
from megatron_rl.models.experts import expert_settings, routing_settings
from megatron_rl.models.fit import check_fit
from megatron_rl.models.spec import ModelError, ModelSpec, padded_vocab_size
from megatron_rl.replay.router import GroupLimit
from megatron_rl.weights.names import te_keys


def uses_transformer_engine(model: ModelConfig, device: torch.device) -> bool:
    """Return True if the TE layer spec is used: in bfloat16, where TransformerEngine is installed
    and there is a GPU, unless model.layer_spec = local.

    Raises ModelError where the setting requires TransformerEngine and it cannot be used.
    """
    available = has_transformer_engine() and device.type == "cuda"
    if model.layer_spec == "transformer_engine" and not available:
        raise ModelError(
            "model.layer_spec = transformer_engine: needs a GPU and transformer_engine; use auto"
        )
    return available and model.layer_spec != "local" and not model.is_exact


def make_transformer_config(
    spec: ModelSpec,
    model: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> TransformerConfig:
    """Return megatron-core's configuration of this model, with the user's [megatron] fields.

    Raises ModelError where sizes do not divide, ConfigError for fields that cannot be set.
    """
    check_fit(spec, model, parallel)
    kind = MLATransformerConfig if spec.is_mla else TransformerConfig
    ours = core_settings(spec, model, parallel, device)
    check_fields(fields, ours, is_mla=spec.is_mla)
    return make_core(kind, ours, fields)


def core_settings(
    spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig, device: torch.device
) -> dict[str, object]:
    """Return the fields of core's configuration that the checkpoint and our settings define."""
    checkpoint: dict[str, object] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_eps,
        # in latent attention this is the norm of latents
        qk_layernorm=spec.qk_norm != "none" or spec.is_mla,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        **latent_settings(spec),
        **expert_settings(spec),
    )
    return checkpoint | run_settings(spec, model, parallel, device)


def run_settings(
    spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig, device: torch.device
) -> dict[str, object]:
    """Return the fields of core's configuration that this program sets for every provider."""
    te, dtype = uses_transformer_engine(model, device), getattr(torch, model.dtype)
    return dict(
        # dropout would make pi_old and pi differ at equal weights
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        **routing_settings(spec, model, te),
        # parallel sizes
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vp if parallel.vp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        sequence_parallel=parallel.use_sequence_parallel and parallel.tp > 1,
        # only stages exchange shapes; core refuses this setting with allgather dispatch
        variable_seq_lengths=parallel.pp > 1,
        **pipeline_settings(parallel, device),
        # dtypes
        params_dtype=dtype,
        pipeline_dtype=dtype,  # of activations between stages
        bf16=dtype is torch.bfloat16,
        # the loss carries its own global denominator: core must not divide gradients
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        transformer_impl="transformer_engine" if te else "local",
        # fused kernels of optional packages (Apex): [megatron] can turn them on
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=te,
        bias_dropout_fusion=te,
        apply_rope_fusion=te and not spec.is_mla,
        gradient_accumulation_fusion=False,
        **recompute_settings(model),
    )


def latent_settings(spec: ModelSpec) -> dict[str, object]:
    """Return core's settings for multi-latent attention, which makes its own rotary embedding."""
    if not spec.is_mla:
        return {}
    yarn: dict[str, object] = {}
    if spec.yarn is not None:
        yarn = {
            "rotary_scaling_factor": spec.yarn.factor,
            "original_max_position_embeddings": spec.yarn.original_max_positions,
            "beta_fast": spec.yarn.beta_fast,
            "beta_slow": spec.yarn.beta_slow,
            "mscale": spec.yarn.mscale,
            "mscale_all_dim": spec.yarn.mscale_all_dim,
        }
    return {
        "q_lora_rank": spec.q_lora_rank or None,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_head_dim": spec.qk_nope_dim,
        "qk_pos_emb_head_dim": spec.qk_rope_dim,
        "v_head_dim": spec.v_head_dim,
        "rope_type": "rope" if spec.yarn is None else "yarn",
        "rotary_base": spec.rope_theta,
        "rotary_percent": spec.rotary_fraction,
        # core's default factor, 40, would scale the softmax
        **(yarn or {"rotary_scaling_factor": 1.0}),
    }


def pipeline_settings(parallel: ParallelConfig, device: torch.device) -> dict[str, object]:
    """Return core's settings for the layers of every stage and for communication of stages."""
    # Interleaved stages send in both directions at the same time.  Batched, with two pipeline
    # ranks, both messages go to one peer and core posts them in an order that swaps them silently.
    # Overlapped, each direction is a separate call.
    interleaved = parallel.vp > 1
    # core counts the embedding and the loss as layers of their stages
    layout = [["decoder"] * count for count in parallel.layers_per_stage]
    if layout:
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
    return {
        "pipeline_model_parallel_layout": layout or None,
        "batch_p2p_comm": device.type == "cuda" and not interleaved,
        "overlap_p2p_comm": interleaved,
    }


def recompute_settings(model: ModelConfig) -> dict[str, object]:
    """Return core's settings for activation recompute."""
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform" if model.recompute == "full" else "block",
        "recompute_num_layers": model.recompute_layers,
    }


def make_model(
    spec: ModelSpec, model: ModelConfig, config: TransformerConfig, parallel: Parallel
) -> list[GPTModel]:
    """Make the `parallel.vp_size` chunks of this pipeline stage, with random weights."""
    te = uses_transformer_engine(model, parallel.device)
    chunks = []
    for vp_stage in range(parallel.vp_size):
        stage = vp_stage if parallel.vp_size > 1 else None  # core's number of an interleaved stage
        chunk = GPTModel(
            config,
            _layer_spec(config, te, stage, qk_norm=spec.qk_norm),
            vocab_size=padded_vocab_size(spec, parallel.tp_size),
            max_sequence_length=spec.max_positions,
            pre_process=parallel.is_first_stage and vp_stage == 0,
            post_process=parallel.is_last_stage and vp_stage == parallel.vp_size - 1,
            position_embedding_type="rope",
            rotary_percent=spec.rotary_fraction,
            rotary_base=spec.rope_theta,  # annotated int, used as a float
            share_embeddings_and_output_weights=spec.tie_embeddings,
            # logits stay sharded over the vocabulary: engine/shards.py reduces them
            parallel_output=True,
            vp_stage=stage,
        )
        # core's gradient norm reads these attributes of every parameter
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if not te:
            save_under_te_names(chunk)
        chunks.append(chunk.to(parallel.device))
    limit = spec.router
    if limit.num_groups and limit.group_topk and not limit.core_limits_groups(spec.top_k):
        # core's group limit would select other groups than transformers
        for _, router in moe_routers(chunks):
            router.router_replay = GroupLimit(limit.num_groups, limit.group_topk, limit.group_best)
    return chunks


def save_under_te_names(chunk: GPTModel) -> None:
    """Let core save local layers under the checkpoint keys of TransformerEngine's layers."""
    for layer in chunk.decoder.layers:
        is_moe = getattr(layer.mlp, "router", None) is not None
        names = te_keys(is_latent=chunk.config.multi_latent_attention, is_moe=is_moe)
        layer.submodules_config = dataclasses.replace(
            layer.submodules_config, sharded_state_dict_keys_map=names
        )


def moe_routers(chunks: list[GPTModel]) -> list[tuple[int, TopKRouter]]:
    """Return (global 0-based layer, router) of every MoE layer of these chunks, in ascending order.

    Layers are identified by core's layer_number.
    """
    routers = []
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                routers.append((layer.layer_number - 1, router))
    return sorted(routers, key=lambda item: item[0])


class RMSNorm(torch.nn.Module):
    """RMSNorm in the order of transformers: normalise in float32 (float64 for float64 inputs), cast
    to the input's dtype, then multiply by the weight.  torch's norm differs from it in bf16.

    It marks its weight for sequence parallelism, which megatron-core's torch norm refuses.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # core then sums the weight's gradient over tensor ranks, which have other rows
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LatentNorm(RMSNorm):
    """Norm of compressed queries, keys and values; its epsilon does not depend on rms_norm_eps."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)


class VectorNorm(RMSNorm):
    """RMSNorm over all heads of queries together: x [..., heads, D], weight [heads x D].

    It is correct for tp = 1 only.
    """

    heads = "num_attention_heads"

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        super().__init__(config, getattr(config, self.heads) * hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class KeyVectorNorm(VectorNorm):
    """RMSNorm over all heads of keys together."""

    heads = "num_query_groups"


def _layer_spec(
    config: TransformerConfig, te: bool, vp_stage: int | None, qk_norm: str = "head"
) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=vp_stage
    )
    if qk_norm == "vector":
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.q_layernorm = VectorNorm
            layer.submodules.self_attention.submodules.k_layernorm = KeyVectorNorm
    if config.multi_latent_attention:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = LatentAttention
    if te:
        return block
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if config.multi_latent_attention:
            if not isinstance(multi_latent_attention.TELinear, type):
                # core 0.16 mistakes its own placeholders for TE, and fails
                multi_latent_attention.HAVE_TE = False
            attention.kv_layernorm = LatentNorm
            # only compressed queries have a norm
            attention.q_layernorm = LatentNorm if config.q_lora_rank else IdentityOp
        _replace_modules(layer, {WrappedTorchNorm: RMSNorm, DotProductAttention: PackedAttention})
    block.layer_norm = RMSNorm  # the last norm, before the output layer
    return block


def _replace_modules(spec: Any, replacements: dict[type, type]) -> None:
    """Replace module classes in a tree of specs and submodules, in place.

    core builds a new tree for every call, so other models do not change.
    """
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, type) and value in replacements:
            setattr(spec, field.name, replacements[value])
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _replace_modules(value, replacements)
