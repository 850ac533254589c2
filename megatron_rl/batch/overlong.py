"""Responses that near the length limit: DAPO's overlong shaping (arXiv 2503.14476, section 3.4).  Shapes: G responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config import Config
from megatron_rl.records import RolloutGroup


def with_penalties(groups: Sequence[RolloutGroup], config: Config) -> list[RolloutGroup]:
    """Fill `penalties` of every group, which advantages add to the rewards; batch.overlong_cache = 0: groups as they are."""
    cache, limit = config.batch.overlong_cache, config.rollout.max_response_tokens
    if not cache:
        return list(groups)
    lengths = [np.array([rollout.response_length for rollout in group.rollouts]) for group in groups]
    return [replace(g, penalties=overlong_penalty(n, limit, cache)) for g, n in zip(groups, lengths, strict=True)]


def overlong_penalty(lengths: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """float32 [G] for response lengths [G]: 0 up to L_max - L_c, then falling linearly to -1 at L_max.

    penalty = ((L_max - L_c) - length) / L_c, within [-1, 0]; L_max = max_tokens, L_c = cache_tokens.
    """
    return np.clip((max_tokens - cache_tokens - lengths) / cache_tokens, -1.0, 0.0).astype(np.float32)
