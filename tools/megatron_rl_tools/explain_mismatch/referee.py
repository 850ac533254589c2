"""transformers as the referee: its model of the trainer's checkpoint computes the same tokens.

Shapes: S tokens of a sequence, R sampled, L MoE layers, K top-k, H hidden.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.config import Config
from megatron_rl.records import Rollout
from megatron_rl_tools.explain_mismatch.evidence import Evidence, difference, kl
from megatron_rl_tools.explain_mismatch.server_side import Fresh
from megatron_rl_tools.explain_mismatch.trainer_side import Half
from megatron_rl_tools.explain_mismatch.trainer_side import logprobs as logprobs_of
from megatron_rl_tools.gpu_check.logits import expert_calls


@dataclass(frozen=True)
class Opinion:
    """The referee's values of one sequence."""

    logprobs: np.ndarray
    """Log-probs of the sampled tokens at the rollout's temperature, float32 [R]."""
    routes: np.ndarray | None
    """Expert ids, int64 [S - 1, L, K]; None for a dense model."""
    hidden: np.ndarray
    """Hidden states after the last norm, float32 [S, H]."""


@torch.no_grad()
def ask_referee(
    path: Path, rollouts: Sequence[Rollout], *, dtype: torch.dtype, device: str, temperature: float
) -> list[Opinion]:
    """Return the opinion on every sequence, computed one by one."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.eval().to(device)
    opinions = []
    for rollout in rollouts:
        calls = list[torch.Tensor]()
        tokens = torch.from_numpy(rollout.tokens).to(device)
        with expert_calls(model, calls):
            hidden = model.model(tokens[None], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)[0, rollout.sampled - 1].float() / temperature
        labels = tokens[rollout.sampled][:, None]
        logprobs = logits.log_softmax(-1).gather(-1, labels)[:, 0].cpu().numpy()
        routes = None
        if calls:
            layers = [ids.view(len(tokens), -1)[:-1] for ids in calls]
            routes = torch.stack(layers, 1).cpu().numpy()
        opinions.append(Opinion(logprobs, routes, hidden[0].float().cpu().numpy()))
    del model
    gc.collect()
    return opinions


def referee_evidence(
    cfg: Config,
    rollouts: Sequence[Rollout],
    live: Sequence[Half],
    *,
    fresh: Sequence[Fresh] | None,
    server_dtype: str,
    device: str,
) -> tuple[Evidence, list[np.ndarray]]:
    """Compare both sides with transformers: which one is nearer, and how much precision explains.

    Returns the evidence, and transformers' log-probs of each sequence in float32.
    """

    def ask(dtype: str) -> list[Opinion]:
        return ask_referee(
            cfg.model.path,
            rollouts,
            dtype=getattr(torch, dtype),
            device=device,
            temperature=cfg.rollout.temperature,
        )

    evidence = Evidence()
    mu, pi = [rollout.rollout_logprobs for rollout in rollouts], logprobs_of(live)
    exact = ask("float32")
    truth = [opinion.logprobs for opinion in exact]
    evidence.add("referee", server=difference(mu, truth), trainer=difference(pi, truth))
    floors = [0.0]
    for dtype in {cfg.model.dtype, server_dtype} - {"float32"}:
        floors.append(difference([opinion.logprobs for opinion in ask(dtype)], truth))
    evidence.add("floor", diff=max(floors))
    if cfg.model.dtype != server_dtype:
        # what remains with float32 on both sides: transformers replaces the less precise one
        sides = ((mu, server_dtype), (pi, cfg.model.dtype))
        mu, pi = (values if dtype == "float32" else truth for values, dtype in sides)
        evidence.add("kl", exact=kl(mu, pi))
    if fresh is not None and all(forward.hidden is not None for forward in fresh):
        hidden = [forward.hidden for forward in fresh if forward.hidden is not None]
        theirs = np.concatenate(hidden)
        ours = np.concatenate([opinion.hidden for opinion in exact])
        evidence.add("hidden", diff=float(np.abs(theirs - ours).mean() / np.abs(ours).mean()))
    return evidence, truth
