"""HF config.json -> ModelSpec -> TransformerConfig -> megatron-core GPTModel chunks of this pipeline stage.

Supported architecture: Qwen3MoeForCausalLM.  With TransformerEngine and a GPU the TE layer spec is used, otherwise the
local one with our RMSNorm and PackedAttention.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.engine.parallel import Parallel

SUPPORTED = ("Qwen3MoeForCausalLM",)


@dataclass(frozen=True)
class RouterKind:
    """How a router scores experts and selects among them; core's `moe_router_*` settings.

    score_function   softmax | sigmoid
    pre_softmax      softmax over all experts, not over the selected ones: gate weights do not add up to 1
    expert_bias      a bias per expert on sigmoid scores that selects, but is no part of gate weights
    num_groups       experts come in so many equal groups, of which group_topk may be selected from
    scaling_factor   what gate weights are multiplied by
    """

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    expert_bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None

    def core_settings(self) -> dict[str, Any]:
        return {
            "moe_router_score_function": self.score_function,
            "moe_router_pre_softmax": self.pre_softmax,
            "moe_router_enable_expert_bias": self.expert_bias,
            "moe_router_bias_update_rate": 0.0,  # core would move it with the load of replayed routes, pads included
            "moe_router_num_groups": self.num_groups,
            "moe_router_group_topk": self.group_topk,
            "moe_router_topk_scaling_factor": self.scaling_factor,
        }


@dataclass(frozen=True)
class ModelSpec:
    """What the checkpoint's config.json says about the model, under one name each."""

    architecture: str
    num_layers: int
    moe_layers: tuple[int, ...]
    """0-based global indices of the layers with experts, ascending."""
    num_experts: int
    top_k: int
    router: RouterKind
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    expert_ffn_size: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool


class ModelError(ValueError):
    """A checkpoint or a model setting that cannot be built; the message names the key, its value and the rule."""


def load_hf_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint directory, as on disk (transformers' attributes change between versions)."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"model.path = {path}: no config.json there; give an HF checkpoint directory") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must hold one JSON object")
    return config


def make_spec(hf: dict[str, Any]) -> ModelSpec:
    """Read old (transformers 4) and new (5) key names; raise ModelError for what this project cannot train."""
    names = hf.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED:
        raise ModelError(f"architectures = {names}: not supported; supported: {', '.join(SUPPORTED)}")
    _refuse_unsupported(hf)
    num_layers, num_heads = _get(hf, "num_hidden_layers"), _get(hf, "num_attention_heads")
    step, dense = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or [])
    moe_layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not moe_layers:
        raise ModelError(f"decoder_sparse_step = {step}, mlp_only_layers = {sorted(dense)}: no layer has experts")
    return ModelSpec(
        architecture=names[0],
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_experts=_get(hf, "num_experts", "num_local_experts"),
        top_k=_get(hf, "num_experts_per_tok"),
        router=RouterKind(pre_softmax=not _get(hf, "norm_topk_prob")),  # softmax over the selected == renormalised top-k
        hidden_size=_get(hf, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=_get(hf, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or _get(hf, "hidden_size") // num_heads,
        ffn_size=_get(hf, "intermediate_size"),
        expert_ffn_size=_get(hf, "moe_intermediate_size"),
        vocab_size=_get(hf, "vocab_size"),
        rms_eps=float(_get(hf, "rms_norm_eps")),
        rope_theta=float(_get({**hf, **(hf.get("rope_parameters") or {})}, "rope_theta")),
        max_positions=_get(hf, "max_position_embeddings"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def padded_vocab_size(spec: ModelSpec, tp: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of tp.  Logits from vocab_size on mean nothing."""
    return -(-spec.vocab_size // tp) * tp


def uses_transformer_engine(model: ModelConfig, device: torch.device) -> bool:
    """Whether the TE layer spec is built: where TE is installed and there is a GPU, unless layer_spec says local."""
    available = importlib.util.find_spec("transformer_engine") is not None and device.type == "cuda"
    if model.layer_spec == "transformer_engine" and not available:
        raise ModelError("model.layer_spec = transformer_engine: needs a GPU and transformer_engine; use auto")
    return available and model.layer_spec != "local"


def make_transformer_config(
    spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig, device: torch.device
) -> TransformerConfig:
    """megatron-core's configuration of this model.  Raises ModelError where sizes do not divide."""
    check_fit(spec, model, parallel)
    te = uses_transformer_engine(model, device)
    sparse = [int(layer in spec.moe_layers) for layer in range(spec.num_layers)]
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        # experts
        num_moe_experts=spec.num_experts,
        moe_layer_freq=sparse if 0 in sparse else 1,
        moe_ffn_hidden_size=spec.expert_ffn_size,
        moe_router_topk=spec.top_k,
        **spec.router.core_settings(),
        moe_router_dtype=None if model.router_dtype == "model" else model.router_dtype,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type=model.token_dispatcher,
        moe_grouped_gemm=te,
        # sizes
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vp if parallel.vp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        sequence_parallel=parallel.use_sequence_parallel and parallel.tp > 1,
        variable_seq_lengths=parallel.pp > 1,  # only stages exchange shapes; core refuses it with allgather dispatch
        **pipeline_settings(parallel, device),
        # numbers
        **precision(model.dtype),
        calculate_per_token_loss=True,  # our loss carries its own global denominator: core must not divide gradients
        use_cpu_initialization=device.type == "cpu",
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=te,
        bias_dropout_fusion=te,
        apply_rope_fusion=te,
        gradient_accumulation_fusion=False,
        **recompute_settings(model),
    )


def precision(dtype: str) -> dict[str, Any]:
    """core's settings for parameters, activations between stages and the optimizer's main copy."""
    torch_dtype = getattr(torch, dtype)
    return {"params_dtype": torch_dtype, "pipeline_dtype": torch_dtype, "bf16": torch_dtype is torch.bfloat16}


def pipeline_settings(parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    """core's settings for how layers are cut into stages and how stages talk.

    Interleaved stages send in two directions at once.  Batched, with two pipeline ranks, both go to the same peer and core
    posts them in an order that crosses them over, silently; overlapped, each direction is a call of its own.
    """
    interleaved = parallel.vp > 1
    layout = [["decoder"] * count for count in parallel.layers_per_stage]
    if layout:
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
    return {
        "pipeline_model_parallel_layout": layout or None,
        "batch_p2p_comm": device.type == "cuda" and not interleaved,
        "overlap_p2p_comm": interleaved,
    }


def recompute_settings(model: ModelConfig) -> dict[str, Any]:
    """core's settings for activation recompute."""
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform" if model.recompute == "full" else "block",
        "recompute_num_layers": model.recompute_layers,
    }


def make_model(spec: ModelSpec, model: ModelConfig, config: TransformerConfig, parallel: Parallel) -> list[GPTModel]:
    """The chunks of this pipeline stage (`parallel.vp_size` of them), with random weights: load a checkpoint next."""
    te = uses_transformer_engine(model, parallel.device)
    chunks = []
    for vp_stage in range(parallel.vp_size):
        chunk = GPTModel(
            config,
            _layer_spec(config, te, vp_stage if parallel.vp_size > 1 else None),
            vocab_size=padded_vocab_size(spec, parallel.tp_size),
            max_sequence_length=spec.max_positions,
            pre_process=parallel.is_first_stage and vp_stage == 0,
            post_process=parallel.is_last_stage and vp_stage == parallel.vp_size - 1,
            position_embedding_type="rope",
            rotary_percent=1.0,
            rotary_base=spec.rope_theta,  # type: ignore[arg-type]  # annotated int, used as a float
            share_embeddings_and_output_weights=spec.tie_embeddings,
            parallel_output=True,
            vp_stage=vp_stage if parallel.vp_size > 1 else None,
        )
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.to(parallel.device))
    return chunks


def moe_routers(chunks: list[GPTModel]) -> list[tuple[int, TopKRouter]]:
    """(global 0-based layer, router) of every decoder MoE layer here, ascending; identity is core's layer_number."""
    routers = []
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                routers.append((layer.layer_number - 1, router))
    return sorted(routers, key=lambda item: item[0])


class RMSNorm(torch.nn.Module):
    """HF's order: normalise in float32, cast to the input's dtype, then multiply by the weight (torch differs in bf16).

    Marks its weight for sequence parallelism, which megatron-core's torch norm refuses.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def check_fit(spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ModelError for parallel sizes that do not divide this model, naming key, value and rule."""

    def divides(key: str, size: int, what: str, total: int) -> None:
        if total % size:
            raise ModelError(f"parallel.{key} = {size} must divide the model's {what}, {total}")

    divides("tp", parallel.tp, "num_attention_heads", spec.num_heads)
    divides("tp", parallel.tp, "num_key_value_heads", spec.num_kv_heads)
    divides("ep", parallel.ep, "number of experts", spec.num_experts)
    divides("etp", parallel.expert_tp, "moe_intermediate_size", spec.expert_ffn_size)
    if len(spec.moe_layers) < spec.num_layers:
        divides("tp", parallel.tp, "intermediate_size", spec.ffn_size)
    if not parallel.layers_per_stage:
        divides("pp x vp", parallel.pp * parallel.vp, "num_hidden_layers (or set layers_per_stage)", spec.num_layers)
    elif sum(parallel.layers_per_stage) != spec.num_layers:
        raise ModelError(
            f"parallel.layers_per_stage = {list(parallel.layers_per_stage)} adds up to {sum(parallel.layers_per_stage)}, "
            f"the model's num_hidden_layers is {spec.num_layers}"
        )
    stages = parallel.layers_per_stage or (spec.num_layers // (parallel.pp * parallel.vp),)
    if model.recompute == "full" and any(count % model.recompute_layers for count in stages):
        raise ModelError(
            f"model.recompute_layers = {model.recompute_layers} must divide the layers of every pipeline stage, {list(stages)}"
        )
    if model.token_dispatcher == "allgather" and parallel.pp > 1:
        raise ModelError(
            f"model.token_dispatcher = allgather with parallel.pp = {parallel.pp}: megatron-core refuses it for "
            "sequences of different lengths; use alltoall"
        )


def _layer_spec(config: TransformerConfig, te: bool, vp_stage: int | None) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=vp_stage)
    if te:
        return block
    for layer in block.layer_specs:
        _replace_modules(layer, {WrappedTorchNorm: RMSNorm, DotProductAttention: PackedAttention})
        # core files an MoE layer's norm under the dense layer's fused name here, but not in the TE spec: use one name.
        if hasattr(layer.submodules.mlp, "module") and layer.submodules.mlp.module.__name__ == "MoELayer":
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    block.layer_norm = RMSNorm
    return block


def _replace_modules(spec: Any, stand_ins: dict[type, type]) -> None:
    """Swap module classes in a tree of specs and submodules, in place (core builds a fresh tree each time)."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, type) and value in stand_ins:
            setattr(spec, field.name, stand_ins[value])
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _replace_modules(value, stand_ins)


def _refuse_unsupported(hf: dict[str, Any]) -> None:
    """Raise ModelError for settings of the family that would be computed wrongly."""
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    wrong = {
        "attention_bias": hf.get("attention_bias", False) is not False,
        "use_sliding_window": hf.get("use_sliding_window", False) is not False,
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "rope_scaling": rope_type != "default",
        "quantization_config": hf.get("quantization_config") is not None,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            value = scaling if key == "rope_scaling" else hf[key]
            raise ModelError(f"config.json {key} = {value!r}: not supported for {SUPPORTED[0]}")


def _get(hf: dict[str, Any], *keys: str) -> Any:
    for key in keys:
        if hf.get(key) is not None:
            return hf[key]
    raise ModelError(f"config.json: key {' or '.join(keys)} is missing")
