"""Published sizes of well-known models, to plan a layout before the checkpoint is downloaded.

Each entry is the model's public config.json without the keys that do not change its sizes, and
without quantization, because training is in 16 bits.  tests/unit/plan/test_plan_time.py compares
parameter totals with the published ones.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import HfConfig, ModelError, ModelSpec, load_hf_config

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151_936,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}

OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 50_304,
}

KNOWN: dict[str, HfConfig] = {
    "olmoe-1b-7b": OLMOE,
    "qwen3-30b-a3b": {
        **QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
    },
    "qwen3-235b-a22b": {
        **QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
    "deepseek-v3": {
        **DEEPSEEK_V3,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163_840,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "rope_theta": 1e4,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129_280,
    },
    "kimi-k2": {
        **DEEPSEEK_V3,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131_072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_theta": 5e4,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163_840,
    },
}
"""Name -> config.json.

kimi-k2: about 10^12 parameters, DeepSeek-V3's architecture with half its heads and 384 experts.
"""


HUB = {
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0125-Instruct",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
}
"""Name -> a checkpoint of that size on the Hugging Face hub."""

RENDERERS = {
    "qwen3-30b-a3b": "qwen3",
    "qwen3-235b-a22b": "qwen3",
    "deepseek-v3": "deepseek-v3",
    "kimi-k2": "kimi-k2",
}
"""Name -> agent.renderer of that checkpoint; the `renderers` package has none for OLMoE."""


PUBLISHED_DTYPE = "bfloat16"
"""The dtype in which all known models are published, apart from quantized copies."""


def is_known(model: str | Path) -> bool:
    """Return True for the name of a well-known model, unless it is also a directory."""
    return str(model).lower() in KNOWN and not Path(model).is_dir()


def find_spec(model: str | Path) -> ModelSpec:
    """Return the spec of a checkpoint directory, or of a well-known model by its name.

    Raises ModelError for anything else, with the most similar name.
    """
    if is_known(model):
        return make_spec(KNOWN[str(model).lower()])
    if not Path(model).is_dir():
        close = difflib.get_close_matches(str(model).lower(), KNOWN, n=1, cutoff=0.4)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ModelError(
            f"model {model}: no such checkpoint directory, nor one of {', '.join(KNOWN)}{hint}"
        )
    return make_spec(load_hf_config(Path(model)))
