"""Models, configurations and batches of the steps, with random weights, sequences and routes.

Shapes: S tokens of a sequence.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config, load_config
from megatron_rl.config.device_limits import Device
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.model import uses_transformer_engine
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.verify_replay.fingerprints import make_sample, random_routes

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 65_536, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "pad_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V2 = QWEN3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": None,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "head_dim": 64,
    "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "topk_method": "greedy",
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3": QWEN3,
    "deepseek_v2": DEEPSEEK_V2,
}
"""Family -> config.json.  Widths are multiples of those that TransformerEngine's kernels need."""


def check_step_config(path: Path, device: Device, **sections: Mapping[str, object]) -> Config:
    """Return a configuration in bf16, without replay, with a small learning rate; `sections`
    override it.
    """
    base: dict[str, dict[str, object]] = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "data": {"train": "unused", "max_prompt_tokens": 64},
        "run": {"device": device, "max_tokens_per_micro_batch": 1024},
        "optim": {"lr": 1e-4},
        "replay": {"mode": "none", "measure": False},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return load_config(None, [], base)


@contextmanager
def engine_of(cfg: Config) -> Iterator[Engine]:
    """An engine in a world of one, with nccl on a GPU; its groups are destroyed afterwards, and
    its tensors when the next one is made.
    """
    gc.collect()  # the previous engine is in reference cycles
    if cfg.run.device == "cuda":
        torch.cuda.empty_cache()
    parallel = make_parallel(cfg.parallel, device=cfg.run.device, timeout_minutes=5)
    try:
        engine = Engine(cfg, parallel, total_updates=100)
        yield engine
        # core's dispatcher keeps a tensor with its graph, whose nodes have hooks of the wrapped
        # model: a cycle through autograd, which Python's collector cannot see
        for model in engine.models:
            vars(model).clear()
    finally:
        parallel.destroy()


def check_samples(spec: ModelSpec, lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """Make random sequences of these lengths S, with random routes if the model has experts."""
    rng = np.random.default_rng(seed)
    if not spec.moe_layers:
        samples = [
            make_sample(rng, f"s{i}", np.empty((S - 1, 0, 0), np.uint8), spec.vocab_size)
            for i, S in enumerate(lengths)
        ]
        return [
            replace(sample, rollout=replace(sample.rollout, routed_experts=None))
            for sample in samples
        ]
    sizes = len(spec.moe_layers), spec.num_experts, spec.top_k
    return [
        make_sample(rng, f"s{i}", random_routes(rng, S - 1, *sizes, None), spec.vocab_size)
        for i, S in enumerate(lengths)
    ]


def check_batch(engine: Engine, samples: Sequence[Sample]) -> MiniBatch:
    cfg = engine.cfg
    return make_mini_batch(
        list(samples),
        max_tokens=cfg.run.max_tokens_per_micro_batch,
        rule=engine.pack_rule,
        dp_group=engine.parallel.dp_group,
    )


def uses_te(cfg: Config) -> bool:
    """Return whether an engine of this configuration would have TransformerEngine's layers, without
    making one.
    """
    return uses_transformer_engine(cfg.model, torch.device(cfg.run.device))
