"""What transformers computes for the sequences a server returned: the reference for rollouts."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Rollout

TINY_SPEC = ModelSizes(num_layers=4, moe_layers=(0, 1, 2, 3), top_k=2, num_experts=8, vocab_size=64)


@lru_cache(maxsize=8)
def hf_model(checkpoint: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def hf_logprobs_and_routes(checkpoint: Path, rollout: Rollout, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [R] log-probs of the sampled tokens, [S - 1, L, K] experts, sorted in each row) from one forward pass."""
    model = hf_model(checkpoint)
    output = model(torch.from_numpy(rollout.tokens)[None], output_router_logits=True)
    logprobs = torch.log_softmax(output.logits[0] / temperature, dim=-1)
    sampled = torch.from_numpy(rollout.sampled)
    top_k = model.config.num_experts_per_tok
    routes = torch.stack([logits.topk(top_k).indices for logits in output.router_logits], dim=1)
    return logprobs[sampled - 1, torch.from_numpy(rollout.tokens)[sampled]].numpy(), routes[:-1].sort(-1).values.numpy()


def wrong_tokens(checkpoint: Path, rollout: Rollout, temperature: float = 1.0) -> tuple[int, int]:
    """(log-probs of the response that differ by 1e-4 or more, rows of prompt and response with another expert in a layer)."""
    logprobs, routes = hf_logprobs_and_routes(checkpoint, rollout, temperature)
    wrong_logprobs = int((np.abs(rollout.rollout_logprobs - logprobs) >= 1e-4).sum())
    if rollout.routed_experts is None:
        return wrong_logprobs, 0
    rows = np.sort(rollout.routed_experts, axis=-1) != routes
    return wrong_logprobs, int(rows.any(axis=(1, 2)).sum())


def assert_is_from(checkpoint: Path, rollout: Rollout, temperature: float = 1.0) -> None:
    """Log-probs within 1e-4 and every expert of every token and layer the same."""
    assert wrong_tokens(checkpoint, rollout, temperature) == (0, 0)
