"""transformers as the referee: the same tokens through its model of the trainer's checkpoint.

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

from megatron_rl.records import Rollout
from megatron_rl_tools.gpu_check.logits import expert_calls


@dataclass(frozen=True)
class Opinion:
    """Of one sequence: log-probs float32 [R] at a temperature, routes int64 [S - 1, L, K] or None,
    hidden float32 [S, H] after the last norm, and log-probs float32 [R] at temperature 1."""

    logprobs: np.ndarray
    routes: np.ndarray | None
    hidden: np.ndarray
    plain: np.ndarray


@torch.no_grad()
def ask_referee(
    path: Path, rollouts: Sequence[Rollout], *, dtype: torch.dtype, device: str, temperature: float
) -> list[Opinion]:
    """Of every sequence, one by one."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.eval().to(device)
    found = []
    for rollout in rollouts:
        calls = list[torch.Tensor]()
        tokens = torch.from_numpy(rollout.tokens).to(device)
        with expert_calls(model, calls):
            hidden = model.model(tokens[None], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)[0, rollout.sampled - 1].float()
        labels = tokens[rollout.sampled][:, None]
        scaled, plain = (
            (logits / divisor).log_softmax(-1).gather(-1, labels)[:, 0].cpu().numpy()
            for divisor in (temperature, 1.0)
        )
        routes = (
            torch.stack([ids.view(len(tokens), -1)[:-1] for ids in calls], 1).cpu().numpy()
            if calls
            else None
        )
        found.append(Opinion(scaled, routes, hidden[0].float().cpu().numpy(), plain))
    del model
    gc.collect()
    return found
