"""What transformers computes for the sequences a server returned: the reference for rollouts."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeForCausalLM

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Rollout
from tests.referee import forced, rollout_routes

TINY_SPEC = ModelSizes(num_layers=4, moe_layers=(0, 1, 2, 3), top_k=2, num_experts=8, vocab_size=64)


@lru_cache(maxsize=8)
def hf_model(checkpoint: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def hf_logprobs_and_routes(
    checkpoint: Path, rollout: Rollout, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [R] log-probs of the sampled tokens, [S - 1, L, K] experts, sorted in each row) from
    one forward pass.
    """
    model = hf_model(checkpoint)
    output = model(torch.from_numpy(rollout.tokens)[None], output_router_logits=True)
    logprobs = torch.log_softmax(output.logits[0] / temperature, dim=-1)
    sampled = torch.from_numpy(rollout.sampled)
    top_k = model.config.num_experts_per_tok
    routes = torch.stack([logits.topk(top_k).indices for logits in output.router_logits], dim=1)
    return logprobs[sampled - 1, torch.from_numpy(rollout.tokens)[sampled]].numpy(), routes[
        :-1
    ].sort(-1).values.numpy()


@torch.no_grad()
def as_sampled(checkpoints: Mapping[int, Path], rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [R] log-probs, [S - 1, L] lost_probability) with the recorded experts, where the
    weights of checkpoints[version] compute each token whose next one they sampled, once, over the
    keys and values that older weights left: what a server does whose weights change in place.
    """
    versions, cache = of_rows(rollout), DynamicCache()
    logprobs, lost = [], []
    for version in dict.fromkeys(versions.tolist()):
        model, rows = hf_model(checkpoints[version]), versions == version
        tokens = torch.from_numpy(rollout.tokens[:-1][rows])
        with forced(model, [layer[rows] for layer in rollout_routes(rollout)]):
            output = model(
                tokens[None], past_key_values=cache, use_cache=True, output_router_logits=True
            )
        logprobs.append(torch.log_softmax(output.logits[0], dim=-1))
        lost.append(lost_by(rollout.routed_experts[rows], output.router_logits))
    sampled = torch.from_numpy(rollout.sampled)
    chosen = torch.cat(logprobs)[sampled - 1, torch.from_numpy(rollout.tokens)[sampled]]
    return chosen.numpy(), np.concatenate(lost)


def of_rows(rollout: Rollout) -> np.ndarray:
    """[S - 1]: the version that sampled the next token of each row; of the prompt's, the first
    one.
    """
    return np.concatenate(
        [np.full(rollout.prompt_length - 1, rollout.policy_versions[0]), rollout.policy_versions]
    )


TIE = 1e-5
"""Difference of two experts' probabilities that float32 may decide either way."""


def wrong_tokens(checkpoint: Path, rollout: Rollout, temperature: float = 1.0) -> tuple[int, int]:
    """(log-probs of the response that differ by 1e-4 or more, rows of prompt and response with
    another expert in a layer).

    Where experts differ, transformers runs again with the recorded ones: all later tokens follow
    from the choice.  A row is wrong unless each of its experts is, within TIE, as good as any that
    was not taken.
    """
    logprobs, routes = hf_logprobs_and_routes(checkpoint, rollout, temperature)
    recorded = rollout.routed_experts
    wrong_rows = 0
    if recorded is not None and (np.sort(recorded, axis=-1) != routes).any():
        with forced(hf_model(checkpoint), rollout_routes(rollout)):
            logprobs, _ = hf_logprobs_and_routes(checkpoint, rollout, temperature)
            lost = lost_probability(checkpoint, rollout)
        wrong_rows = int((lost > TIE).any(1).sum())
        print(
            f"{rollout.id}: {(lost > 0).sum()} ties, at most {lost.max():.1e} of probability lost"
        )
    return int((np.abs(rollout.rollout_logprobs - logprobs) >= 1e-4).sum()), wrong_rows


@torch.no_grad()
def lost_probability(checkpoint: Path, rollout: Rollout) -> np.ndarray:
    """[S - 1, L]: by how much the best expert that was not taken is better than the worst that was;
    0 where none is.
    """
    output = hf_model(checkpoint)(torch.from_numpy(rollout.tokens)[None], output_router_logits=True)
    return lost_by(rollout.routed_experts, [logits[:-1] for logits in output.router_logits])


def lost_by(routes: np.ndarray, router_logits: Sequence[Tensor]) -> np.ndarray:
    """[rows, L] from experts [rows, L, K] and, per layer, logits [rows, E]."""
    scores = torch.stack([logits.softmax(-1) for logits in router_logits], dim=1)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(
        2, torch.from_numpy(routes.astype(int)), True
    )
    best = scores.masked_fill(taken, 0).amax(-1)
    worst = scores.masked_fill(~taken, 1).amin(-1)
    return (best - worst).clamp(min=0).numpy()


def assert_is_from(checkpoint: Path, rollout: Rollout, temperature: float = 1.0) -> None:
    """Log-probs within 1e-4 and every expert of every token and layer the same."""
    assert wrong_tokens(checkpoint, rollout, temperature) == (0, 0)
