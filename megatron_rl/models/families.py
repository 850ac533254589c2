"""Model families: one reader each, config.json -> ModelSpec.

A reader covers every key that changes what the model computes: its value goes into the spec, or it
must be a value for which this engine computes the same as transformers (`only`).  Names of tensors
are in weights/hf/rules.py.  docs/guides/checkpoints.md says how every family was checked.
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
"""Fields of ModelSpec, by name."""


def make_spec(hf: HfConfig) -> ModelSpec:
    """Read a config.json with the key names of transformers 4 or 5.

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
    """Read Qwen2-MoE, which has a bias for queries, keys and values, and a gated shared expert."""
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
    """Read OLMoE, which normalises queries and keys over all heads together."""
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
    """Read Mixtral; its configs have no norm_topk_prob: gate weights always sum to 1."""
    refuse_bias_and_windows(config)
    config.only("router_jitter_noise", 0, None)
    return ModelSpec(
        **sizes(config),
        **rope(config),
        **every_layer_experts(config, renormalised=True),
        qk_norm="none",
    )


def read_glm4_moe(config: ConfigReader) -> ModelSpec:
    """Read GLM-4.5, which rotates half of every head unless its config says otherwise."""
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
    """Read DeepSeek-V3, R1, Moonlight and Kimi-K2."""
    # rotary pairs are adjacent in the weights, as in core's latent attention
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
    """Read DeepSeek-V2: softmax over all experts, never renormalised."""
    config.only("mlp_bias", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    # they have no effect on greedy selection, but are in its configs
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
    """Read the sizes that every family has, and check the rules that hold for all."""
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
    """Read rotary embeddings: rope_theta and rope_scaling (transformers 4), or rope_parameters (5).

    partial: the rotated fraction of a head where the config has none; None: the family rotates all
    of it.
    """
    parameters = config.get("rope_parameters", None) or {}
    scaling = dict(config.get("rope_scaling", None) or parameters)
    # transformers 5 has it in rope_parameters, 4 beside the other keys
    theta = float(ConfigReader({**config.hf, **parameters}).need("rope_theta"))
    config.get("rope_theta", None)  # marks it as read: another reader read it above
    fraction = config.get("partial_rotary_factor", partial or 1.0)
    fraction = ConfigReader(scaling).get("partial_rotary_factor", fraction)
    scaling.pop("partial_rotary_factor", None)
    if partial is None and fraction != 1.0:
        raise config.refuse("partial_rotary_factor", f"{fraction} would be ignored")
    # some configs have both names; this removes both
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("rope_theta", None)  # read above
    if kind != "default" and not (yarn and kind == "yarn"):
        key = "rope_scaling" if config.hf.get("rope_scaling") else "rope_parameters"
        raise config.refuse(key, f"only {'default or yarn' if yarn else 'default'}")
    fields: Fields = {"rope_theta": theta, "rotary_fraction": float(fraction)}
    if kind == "yarn":
        fields["yarn"] = read_yarn(config, scaling)
    elif scaling:
        raise config.refuse("rope_parameters", f"{', '.join(sorted(scaling))} would be ignored")
    return fields


def read_yarn(config: ConfigReader, scaling: HfConfig) -> Yarn:
    """Read YaRN scaling; raise ModelError for a key that is missing or would be ignored.

    mscale and mscale_all_dim, which DeepSeek's models have, are required: without them engines
    disagree on the scale.
    """
    unread = {key: value for key, value in scaling.items() if value is not None}
    try:
        yarn = Yarn(
            factor=float(unread.pop("factor")),
            original_max_positions=int(unread.pop("original_max_position_embeddings")),
            # the defaults of transformers and of the paper
            beta_fast=float(unread.pop("beta_fast", 32)),
            beta_slow=float(unread.pop("beta_slow", 1)),
            mscale=float(unread.pop("mscale")),
            mscale_all_dim=float(unread.pop("mscale_all_dim")),
        )
    except KeyError as error:
        raise ModelError(f"config.json: yarn rope scaling without {error}; add the key") from error
    except (TypeError, ValueError) as error:
        raise config.refuse("rope_scaling", f"its values must be numbers ({error})") from error
    if unread:
        raise config.refuse("rope_scaling", f"{', '.join(sorted(unread))} would be ignored")
    return yarn


def dense(config: ConfigReader) -> Fields:
    """Read the MLP size of a model without experts."""
    return {
        "moe_layers": (),
        "num_experts": 0,
        "top_k": 0,
        "router": RouterKind(),
        "expert_ffn_size": 0,
        "ffn_size": config.need("intermediate_size"),
    }


ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Keys of the number of experts in DeepSeek's and GLM's configs, by version of transformers."""


def expert_sizes(
    config: ConfigReader,
    moe_layers: Iterable[int],
    *,
    size_key: str = "moe_intermediate_size",
    number_keys: Sequence[str] = ("num_experts", "num_local_experts"),
) -> Fields:
    """Read the sizes of the experts.

    size_key: key of the size of an expert's MLP.  number_keys: keys of the number of experts.
    """
    return {
        "moe_layers": tuple(moe_layers),
        "num_experts": config.need(*number_keys),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_size": config.need("intermediate_size"),
        "expert_ffn_size": config.need(size_key),
    }


def qwen_experts(config: ConfigReader) -> Fields:
    """Read experts that are in the layers selected by decoder_sparse_step and mlp_only_layers."""
    layers = range(config.need("num_hidden_layers"))
    step, without = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers", []))
    moe_layers = [layer for layer in layers if layer not in without and (layer + 1) % step == 0]
    if not moe_layers:
        raise ModelError(
            f"decoder_sparse_step = {step}, mlp_only_layers = {sorted(without)}: no layer has"
            " experts"
        )
    # a softmax over the selected experts is the renormalised top-k of a softmax over all
    return {
        **expert_sizes(config, moe_layers),
        "router": RouterKind(pre_softmax=not config.need("norm_topk_prob")),
    }


def every_layer_experts(config: ConfigReader, *, renormalised: bool) -> Fields:
    """Read experts that are in every layer; renormalised: gate weights sum to 1."""
    layers = range(config.need("num_hidden_layers"))
    return {
        **expert_sizes(config, layers, size_key="intermediate_size"),
        "router": RouterKind(pre_softmax=not renormalised),
    }


def late_experts(config: ConfigReader) -> Fields:
    """Read experts that follow the first dense layers, shared experts, and the number of layers for
    multi-token prediction.
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
    """Read experts with sigmoid scores, a bias for the selection, and groups; gate weights are
    renormalised and scaled.
    """
    config.only("norm_topk_prob", True)
    router = RouterKind(
        score_function="sigmoid",
        expert_bias=True,
        **groups(config, best=2),
        scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
    )
    return {**late_experts(config), "router": router}


def groups(config: ConfigReader, *, best: int) -> Fields:
    """Read the fields of RouterKind for groups of experts, ranked by the sum of their `best`."""
    number, kept = config.get("n_group", 1), config.get("topk_group", 1)
    top_k = config.need("num_experts_per_tok")
    if kept >= number:  # every group is selected
        return {}
    size = config.need(*ROUTED_EXPERTS) // number
    if kept * size < top_k or size < best:
        raise config.refuse(
            "topk_group",
            f"{kept} groups of {size} experts are too few for the best {best} and for top-{top_k}",
        )
    return {"num_groups": number, "group_topk": kept, "group_best": best}


def latent_attention(config: ConfigReader) -> Fields:
    """Read the sizes of multi-latent attention."""
    config.only("attention_bias", False)
    refuse_windows(config)
    config.get("qk_head_dim", None)  # redundant: the sum of qk_nope_head_dim and qk_rope_head_dim
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
    """Raise ModelError for a config with sliding windows."""
    # use_sliding_window enables them where a family has that key, elsewhere sliding_window
    config.only("use_sliding_window", False)
    if "use_sliding_window" not in config.hf:
        config.only("sliding_window", None)
    config.get("sliding_window", None)
    kinds = set(config.get("layer_types", []))
    if kinds - {"full_attention"}:
        raise config.refuse("layer_types", "only full_attention")
