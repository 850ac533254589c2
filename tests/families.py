"""Small random HF checkpoints of every supported family, and transformers' outputs for them
(float32).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

# smallest measured effect of a wrong setting: 4.4e-5, latent norms with another epsilon
LIMIT = 2e-5
COMMON = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_theta=5e5,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
BIASED = dict(
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
)
LATENT = dict(
    kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, num_key_value_heads=4
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
}
DEEPSEEK_V2 = dict(
    **LATENT,
    q_lora_rank=None,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.5,
    topk_method="greedy",
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **BIASED,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**BIASED, **LATENT, "q_lora_rank": 20, "rope_parameters": YARN}),
    "moonlight": (
        "DeepseekV3",
        {
            **BIASED,
            **LATENT,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2_yarn": ("DeepseekV2", {**DEEPSEEK_V2, "q_lora_rank": 20, "rope_parameters": YARN}),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {
            **DEEPSEEK_V2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
        },
    ),
    "deepseek_v3_top2": (
        "DeepseekV3",
        {**BIASED, **LATENT, "q_lora_rank": None, "num_experts_per_tok": 2},
    ),
}
"""Name -> (class prefix in transformers, settings in addition to COMMON)."""


def family_checkpoint(
    path: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any
) -> Path:
    """Write a random checkpoint of this family to `path`; no two tensors are equal, norms and
    biases included.
    """
    prefix, own = FAMILIES[name]
    config = getattr(transformers, prefix + "Config")(**{**COMMON, **own, **settings})
    return save_random(
        getattr(transformers, prefix + "ForCausalLM"), config, path, seed=seed, dtype=dtype
    )


def save_random(
    model_class: Any, config: Any, path: Path, *, seed: int, dtype: torch.dtype
) -> Path:
    """Write a checkpoint of this class with random weights to `path`."""
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.5 if key.endswith(("gate.weight", "router.weight")) else 0.15)
    model.to(dtype).save_pretrained(path)
    return Path(path)


@dataclass(frozen=True)
class Reference:
    """sequences: token ids; logits [sum S, V]; experts: of each MoE layer, ascending, the chosen
    ids [sum S, K].
    """

    sequences: list[torch.Tensor]
    logits: torch.Tensor
    experts: list[torch.Tensor]


def reference(path: Path, lengths: tuple[int, ...], *, seed: int = 0) -> Reference:
    """transformers' outputs for random sequences, one by one."""
    model = load_reference(path)
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        torch.randint(0, model.config.vocab_size, (length,), generator=generator)
        for length in lengths
    ]
    logits, chosen = [], {}
    with torch.no_grad(), expert_calls(model, chosen):
        for tokens in sequences:
            logits.append(model(tokens[None], use_cache=False).logits[0])
    experts = [torch.cat(chosen[layer]) for layer in sorted(chosen)]
    return Reference(sequences, torch.cat(logits), experts)


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with eager attention and experts, corrected where 5.12.1 differs from the
    authors' code.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if is_v2_with_yarn(model.config):
        scale = (
            0.1
            * model.config.rope_parameters["mscale_all_dim"]
            * math.log(model.config.rope_parameters["factor"])
            + 1
        )
        for layer in model.model.layers:
            layer.self_attn.scaling *= scale**2
    if getattr(model.config, "topk_method", None) == "group_limited_greedy":
        # transformers 5.12.1 reads this attribute and never sets it
        for layer in model.model.layers:
            layer.mlp.num_experts = model.config.n_routed_experts
    if (
        model.config.model_type == "bailing_moe_v2"
    ):  # the authors' code is for transformers 4: 5 initialises weights again
        # and knows no partial_rotary_factor
        model.load_state_dict(load_file(path / "model.safetensors"))
        size = int(model.config.head_dim * model.config.partial_rotary_factor)
        model.model.rotary_emb.inv_freq = model.config.rope_theta ** (
            -torch.arange(0, size, 2).float() / size
        )
    return model


def is_v2_with_yarn(config: Any) -> bool:
    """Whether transformers omits YaRN's softmax scale, as it does for DeepSeek-V2; the authors'
    code and SGLang apply it.
    """
    return config.model_type == "deepseek_v2" and config.rope_parameters["rope_type"] == "yarn"


@contextmanager
def expert_calls(model: Any, chosen: dict[int, list[torch.Tensor]]) -> Iterator[None]:
    """Collect, by layer, the ids that each call of the layer's experts gets: their second argument
    in every family.
    """
    hooks = []
    for index, layer in enumerate(model.model.layers):
        module = getattr(layer.mlp, "experts", None)
        if module is not None:
            keep = chosen.setdefault(index, [])
            # never called itself: the ids that the gate returns
            if isinstance(module, torch.nn.ModuleList):
                hooks.append(
                    layer.mlp.gate.register_forward_hook(
                        lambda *args, keep=keep: keep.append(args[2][0])
                    )
                )
            else:
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, args, keep=keep: keep.append(args[1])
                    )
                )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_same(
    logits: torch.Tensor | None,
    maps: dict,
    expected: Reference,
    rows: Any,
    spec: Any,
    what: str = "",
    limit: float = LIMIT,
) -> None:
    """Raise unless this stage's logits (None: not the last stage) and the experts of its layers
    equal transformers'.

    maps: MoE layer -> which experts each row uses, bool [rows, E].
    """
    if logits is not None:
        worst = (logits[:, : spec.vocab_size] - expected.logits[rows]).abs().max()
        print(
            f"{spec.architecture} {what}: logits off by {worst:.2g} at most, deviation"
            f" {expected.logits.std():.2g}"
        )
        assert worst < limit, f"{what}: {worst}"
    for layer, used in maps.items():
        ids = expected.experts[spec.moe_layers.index(layer)][rows]
        assert used.equal(torch.zeros_like(used).scatter(1, ids, True)), (
            f"{what}: expert sets of layer {layer}"
        )
