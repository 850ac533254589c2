"""Length penalties: DAPO's overlong shaping (arXiv 2503.14476, section 3.4) and a constant penalty
per token.

Shapes: G responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config import Config
from megatron_rl.records import RolloutGroup


def with_penalties(groups: Sequence[RolloutGroup], config: Config) -> list[RolloutGroup]:
    """Fill `penalties` of every group, which advantages add to the rewards.  Without a configured
    penalty the groups are unchanged.

    penalty = overlong_penalty (batch.overlong_cache) - batch.length_penalty x sampled tokens /
    rollout.max_response_tokens.  The second term counts all sampled tokens of an episode, and not
    the tokens of its environment.  The first term is that of the episode's longest sequence, the
    tokens of the environment included, because the limit is a limit of a sequence.
    """
    cache, price = config.batch.overlong_cache, config.batch.length_penalty
    limit = config.rollout.max_response_tokens
    if not cache and not price:
        return list(groups)
    shaped = []
    for group in groups:
        sampled = np.array([rollout.episode_length for rollout in group.rollouts])
        longest = np.array(
            [max(len(s.tokens) - s.prompt_length for s in r.sequences) for r in group.rollouts]
        )
        penalties = (-price * sampled / limit).astype(np.float32)
        if cache:  # 0 would be a division by 0
            penalties += overlong_penalty(longest, limit, cache)
        shaped.append(replace(group, penalties=penalties))
    return shaped


def overlong_penalty(lengths: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """Return float32 [G] for response lengths [G]: 0 up to L_max - L_c, then falling linearly to -1
    at L_max.

    penalty = ((L_max - L_c) - length) / L_c, within [-1, 0]; L_max = max_tokens, L_c =
    cache_tokens.
    """
    penalties = (max_tokens - cache_tokens - lengths) / cache_tokens
    return np.clip(penalties, -1.0, 0.0).astype(np.float32)
