"""config.json -> ModelSpec, one reader per model family.  Names of tensors: weights/hf/rules.py.

A reader covers every key that changes what the model computes: it goes into the spec, or must have
a value for which this engine computes the same as transformers (`only`).
docs/guides/checkpoints.md: how each family was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from megatron_rl.models.spec import (
    ConfigReader,
    HfConfig,
    ModelError,
    ModelSpec,
    QkNorm,
    RouterKind,
    Yarn,
)

Fields: TypeAlias = dict[str, Any]
"""Of ModelSpec, by name."""


def make_spec(hf: HfConfig) -> ModelSpec:
    """Reads key names of transformers 4 and 5.

    Raises ModelError for a model that is not supported.
    """
    config = ConfigReader(hf)
    if config.architecture not in READERS:
        names = hf.get("architectures") or ["(none)"]
        raise ModelError(
            f"architectures = {names}: not supported; supported: {', '.join(READERS)}; others with"
            " model.provider = bridge (Megatron-Bridge)"
        )
    spec = READERS[config.architecture](config)
    config.finish()
    return spec


def read_qwen3(config: ConfigReader) -> ModelSpec:
    refuse_bias_and_windows(config)
    return ModelSpec(**sizes(config), **rope(config), **dense(config), qk_norm="head")


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    refuse_bias_and_windows(config)
    return ModelSpec(**sizes(config), **rope(config), **qwen_experts(config), qk_norm="head")


def read_qwen2_moe(config: ConfigReader) -> ModelSpec:
    refuse_windows(config)
    return ModelSpec(
        **sizes(config),
        **rope(config),
        **qwen_experts(config),
        qk_norm="none",
        qkv_bias=bool(config.get("qkv_bias", True)),
        shared_ffn_size=config.need("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_olmoe(config: ConfigReader) -> ModelSpec:
    refuse_bias_and_windows(config)
    config.only("clip_qkv", None)
    spec = ModelSpec(
        **sizes(config),
        **rope(config),
        **every_layer_experts(config, renormalised=config.need("norm_topk_prob")),
        qk_norm="vector",
    )
    if spec.num_heads * spec.head_dim != spec.hidden_size:
        raise config.refuse("head_dim", "head_dim x num_attention_heads must be hidden_size")
    return spec


def read_mixtral(config: ConfigReader) -> ModelSpec:
    refuse_bias_and_windows(config)
    config.only("router_jitter_noise", 0, None)
    return ModelSpec(
        **sizes(config),
        **rope(config),
        **every_layer_experts(config, renormalised=True),
        qk_norm="none",
    )


def read_glm4_moe(config: ConfigReader) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    refuse_windows(config)
    norm: QkNorm = "head" if config.get("use_qk_norm", False) else "none"
    return ModelSpec(
        **sizes(config),
        **rope(config, partial=0.5),
        **biased_experts(config),
        qk_norm=norm,
        qkv_bias=bias,
    )


def read_deepseek_v3(config: ConfigReader) -> ModelSpec:
    """Also Moonlight.

    rope_interleave: rotary pairs are adjacent in the weights, as in core's latent attention.
    """
    config.only("rope_interleave", True)
    config.only("topk_method", "noaux_tc")
    config.only("scoring_func", "sigmoid")
    return ModelSpec(
        **sizes(config),
        **rope(config, yarn=True),
        **latent_attention(config),
        **biased_experts(config),
    )


def read_deepseek_v2(config: ConfigReader) -> ModelSpec:
    """Softmax over all experts, never renormalised; "greedy" selection ignores n_group."""
    config.only("mlp_bias", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    # present, without effect, in configs with greedy selection
    for key in ("n_group", "topk_group"):
        config.get(key, None)
    limited = config.get("topk_method", "greedy") == "group_limited_greedy"
    router = RouterKind(
        pre_softmax=True,
        **(groups(config, best=1) if limited else {}),
        scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
    )
    return ModelSpec(
        **sizes(config),
        **rope(config, yarn=True),
        **latent_attention(config),
        **late_experts(config),
        router=router,
    )


READERS: dict[str, Callable[[ConfigReader], ModelSpec]] = {
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3ForCausalLM": read_qwen3,
    "OlmoeForCausalLM": read_olmoe,
    "MixtralForCausalLM": read_mixtral,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
}


# Parts that families share ------------------------------------------------------------------------


def sizes(config: ConfigReader) -> Fields:
    """Sizes of every family, and the rules for all."""
    config.only("hidden_act", "silu")
    config.only("attention_dropout", 0, 0.0)
    if config.get("quantization_config", None) is not None:
        raise config.refuse(
            "quantization_config",
            "only plain weights; for block FP8: megatron-rl quantize dequantize",
        )
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    return {
        "architecture": config.architecture,
        "num_layers": config.need("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", hidden // heads),
        "vocab_size": config.need("vocab_size"),
        "rms_eps": float(config.need("rms_norm_eps")),
        "max_positions": config.need("max_position_embeddings"),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def rope(config: ConfigReader, *, partial: float | None = None, yarn: bool = False) -> Fields:
    """Rotary embeddings: rope_theta and rope_scaling (transformers 4), or rope_parameters (5).

    partial: the rotated fraction of a head where the config has none; None: the family rotates all
    of it.
    """
    scaling = dict(config.get("rope_scaling", None) or config.get("rope_parameters", None) or {})
    theta = float(
        ConfigReader({**config.hf, **(config.get("rope_parameters", None) or {})}).need(
            "rope_theta"
        )
    )
    config.get("rope_theta", None)  # read above by another reader
    fraction = float(
        scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", partial or 1.0))
    )
    if partial is None and fraction != 1.0:
        raise config.refuse("partial_rotary_factor", f"{fraction} would be ignored")
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    scaling.pop("rope_theta", None)
    if kind != "default" and not (yarn and kind == "yarn"):
        key = "rope_scaling" if config.hf.get("rope_scaling") else "rope_parameters"
        raise config.refuse(key, f"only {'default or yarn' if yarn else 'default'}")
    found: Fields = {"rope_theta": theta, "rotary_fraction": fraction}
    if kind == "yarn":
        found["yarn"] = read_yarn(config, scaling)
    elif scaling:
        raise config.refuse("rope_parameters", f"{', '.join(sorted(scaling))} would be ignored")
    return found


def read_yarn(config: ConfigReader, scaling: HfConfig) -> Yarn:
    """Needs mscale and mscale_all_dim, which DeepSeek's models have: engines disagree on the scale
    without them.
    """
    rest = {key: value for key, value in scaling.items() if value is not None}
    try:
        found = Yarn(
            factor=float(rest.pop("factor")),
            original_max_positions=int(rest.pop("original_max_position_embeddings")),
            beta_fast=float(rest.pop("beta_fast", 32)),
            beta_slow=float(rest.pop("beta_slow", 1)),
            mscale=float(rest.pop("mscale")),
            mscale_all_dim=float(rest.pop("mscale_all_dim")),
        )
    except KeyError as error:
        raise ModelError(f"config.json: yarn rope scaling without {error}") from error
    if rest:
        raise config.refuse("rope_scaling", f"{', '.join(sorted(rest))} would be ignored")
    return found


def dense(config: ConfigReader) -> Fields:
    ffn = config.need("intermediate_size")
    none = {
        "moe_layers": (),
        "num_experts": 0,
        "top_k": 0,
        "router": RouterKind(),
        "expert_ffn_size": 0,
    }
    return {**none, "ffn_size": ffn}


ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def expert_sizes(
    config: ConfigReader,
    moe_layers: Iterable[int],
    *,
    size_key: str = "moe_intermediate_size",
    number_keys: Sequence[str] = ("num_experts", "num_local_experts"),
) -> Fields:
    """Sizes of the experts.

    size_key: of an expert's MLP; number_keys: of the number of experts.
    """
    return {
        "moe_layers": tuple(moe_layers),
        "num_experts": config.need(*number_keys),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_size": config.need("intermediate_size"),
        "expert_ffn_size": config.need(size_key),
    }


def qwen_experts(config: ConfigReader) -> Fields:
    """Experts in the layers that decoder_sparse_step and mlp_only_layers select."""
    layers = range(config.need("num_hidden_layers"))
    step, without = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers", []))
    moe_layers = [layer for layer in layers if layer not in without and (layer + 1) % step == 0]
    if not moe_layers:
        raise ModelError(
            f"decoder_sparse_step = {step}, mlp_only_layers = {sorted(without)}: no layer has"
            " experts"
        )
    # softmax over the selected == renormalised top-k
    return {
        **expert_sizes(config, moe_layers),
        "router": RouterKind(pre_softmax=not config.need("norm_topk_prob")),
    }


def every_layer_experts(config: ConfigReader, *, renormalised: bool) -> Fields:
    layers = range(config.need("num_hidden_layers"))
    return {
        **expert_sizes(config, layers, size_key="intermediate_size"),
        "router": RouterKind(pre_softmax=not renormalised),
    }


def late_experts(config: ConfigReader) -> Fields:
    """Experts after the first dense layers, with shared ones; then the layers of multi-token
    prediction.
    """
    config.only("moe_layer_freq", 1)
    num_layers, first = config.need("num_hidden_layers"), config.get("first_k_dense_replace", 0)
    if first >= num_layers:
        raise config.refuse("first_k_dense_replace", f"no layer of {num_layers} has experts")
    return {
        **expert_sizes(config, range(first, num_layers), number_keys=ROUTED_EXPERTS),
        "shared_ffn_size": config.need("moe_intermediate_size") * config.need("n_shared_experts"),
        "mtp_layers": config.get("num_nextn_predict_layers", 0),
    }


def biased_experts(config: ConfigReader) -> Fields:
    """Sigmoid scores, a bias for selection, groups; gate weights renormalised and scaled."""
    config.only("norm_topk_prob", True)
    router = RouterKind(
        score_function="sigmoid",
        expert_bias=True,
        **groups(config, best=2),
        scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
    )
    return {**late_experts(config), "router": router}


def groups(config: ConfigReader, *, best: int) -> Fields:
    """Fields of RouterKind for groups of experts, ranked by the sum of their `best` experts."""
    number, kept, top_k = (
        config.get("n_group", 1),
        config.get("topk_group", 1),
        config.need("num_experts_per_tok"),
    )
    if kept >= number:
        return {}
    size = config.need(*ROUTED_EXPERTS) // number
    if kept * size < top_k or size < best:
        raise config.refuse(
            "topk_group",
            f"{kept} groups of {size} experts are too few for the best {best} and for top-{top_k}",
        )
    return {"num_groups": number, "group_topk": kept, "group_best": best}


def latent_attention(config: ConfigReader) -> Fields:
    config.only("attention_bias", False)
    refuse_windows(config)
    config.get("qk_head_dim", None)  # the sum of the two below
    return {
        "qk_norm": "none",
        "q_lora_rank": config.get("q_lora_rank", 0),
        "kv_lora_rank": config.need("kv_lora_rank"),
        "qk_nope_dim": config.need("qk_nope_head_dim"),
        "qk_rope_dim": config.need("qk_rope_head_dim"),
        "v_head_dim": config.need("v_head_dim"),
    }


def refuse_bias_and_windows(config: ConfigReader) -> None:
    config.only("attention_bias", False)
    refuse_windows(config)


def refuse_windows(config: ConfigReader) -> None:
    """Sliding windows: enabled by use_sliding_window where a family has that key, elsewhere by
    sliding_window.
    """
    config.only("use_sliding_window", False)
    if "use_sliding_window" not in config.hf:
        config.only("sliding_window", None)
    config.get("sliding_window", None)
    kinds = set(config.get("layer_types", []))
    if kinds - {"full_attention"}:
        raise config.refuse("layer_types", "only full_attention")
