"""Small random HF checkpoints of architectures that Megatron-Bridge knows, and whether it is
installed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.families import BIASED, COMMON, EXPERTS, FAMILIES, LATENT, save_random

HAS_BRIDGE = (
    importlib.util.find_spec("megatron") is not None
    and importlib.util.find_spec("megatron.bridge") is not None
)
needs_bridge = pytest.mark.skipif(
    not HAS_BRIDGE, reason="Megatron-Bridge is not installed here: make test-bridge"
)

BOTH: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},  # Bridge's Qwen3-MoE knows no dense layers in between
    "olmoe": {"num_key_value_heads": 4},  # nor its OLMoE fewer keys than queries
    "deepseek_v3": {},
    "glm4_moe": {"n_shared_experts": 1},  # nor its GLM-4.5 more than one shared expert
    "qwen3": {},
}
"""Families that both providers know -> settings in addition to tests.families.FAMILIES."""

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,  # the fourth has softmax attention
    "head_dim": 16,
}
WINDOW = 6
BRIDGE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,  # every other layer
            "max_position_embeddings": 131072,
            # Bridge takes these of gpt-oss for granted
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**BIASED, **LATENT, "q_lora_rank": 20, "rms_norm_eps": 1e-5}),
    "hy_v3": ("HYV3", {**EXPERTS, "head_dim": 16, "first_k_dense_replace": 1}),
    "exaone_moe": (
        "ExaoneMoe",
        {**EXPERTS, "head_dim": 16, "first_k_dense_replace": 1, "num_shared_experts": 1},
    ),
    "kimi_k2": (
        "DeepseekV3",
        {
            **BIASED,
            **LATENT,
            "q_lora_rank": 20,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
    "bailing": (
        "BailingMoeV2",
        {
            **EXPERTS,
            "num_experts_per_tok": 4,
            "num_shared_experts": 1,
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 0.5,
        },
    ),
}
"""Architectures that only Bridge knows -> (class prefix, settings in addition to COMMON)."""

DELTA_NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **LINEAR}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**EXPERTS, **LINEAR}),
}
"""The same, with gated delta nets."""
DELTA_NET_LIMIT = 1e-3
"""Of logits (standard deviation 2): transformers' own float32 differs from its float64 by up to
4.1e-4, as the output of a delta net may be nearly 0 before its norm."""

CONFIGS = {"qwen3_5_moe": "Qwen3_5MoeTextConfig"}
"""Class of the configuration, where it is not the prefix and Config."""
WRITTEN = {
    "kimi_k2": {
        "architectures": ["KimiK2ForCausalLM"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "exaone_moe": {"architectures": ["ExaoneMoEForCausalLM"]},
    "hy_v3": {"route_norm": True, "qk_norm": True},
    "minimax_m2": {
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "rotary_dim": 8,
    },
}
"""What published files have in config.json beside transformers' own keys."""


def bridge_checkpoint(
    path: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random checkpoint of this family to `path`."""
    prefix, own = {**FAMILIES, **BRIDGE_ONLY, **DELTA_NETS}[name]
    source: Any = transformers
    if name == "bailing":  # transformers has no class for it: Bridge brings the authors'
        from megatron_rl.engine.bridge_package import open_package

        open_package(te=False)
        from megatron.bridge.models.bailing import (
            configuration_bailing_moe_v2,
            modeling_bailing_moe_v2,
        )

        config = configuration_bailing_moe_v2.BailingMoeV2Config(**{**COMMON, **own})
        config.architectures = ["BailingMoeV2ForCausalLM"]
        return save_random(
            modeling_bailing_moe_v2.BailingMoeV2ForCausalLM, config, path, seed=seed, dtype=dtype
        )
    settings = {**COMMON, **own, **BOTH.get(name, {})}
    if "rope_parameters" in own:
        settings.pop("rope_theta")
    config = getattr(source, CONFIGS.get(name, prefix + "Config"))(**settings)
    save_random(getattr(source, prefix + "ForCausalLM"), config, path, seed=seed, dtype=dtype)
    if name in WRITTEN:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | WRITTEN[name]))
    return path
