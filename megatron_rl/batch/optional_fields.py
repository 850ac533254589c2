"""Fields of a rollout that some runs lack, from their arrays: kept sets and a teacher's numbers.

Shapes: R sampled tokens of a rollout, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.records.teacher_scores import TeacherTop
from megatron_rl.records.token_sets import TokenSets


def to_mask(sizes: np.ndarray | None, codes: np.ndarray | None, name: str) -> TokenSets | None:
    """Return Rollout.sampling_mask from its arrays; ValueError where one of them is missing."""
    if sizes is None and codes is None:
        return None
    if sizes is None or codes is None:
        raise ValueError(f"rollout {name}: half of its kept sets is missing; record it again")
    return TokenSets(sizes, codes)


def teacher_of(logprobs: np.ndarray | None, num_sampled: int, name: str) -> np.ndarray | None:
    """Return Rollout.teacher_logprobs; ValueError where they are not one per sampled token."""
    if logprobs is not None and len(logprobs) != num_sampled:
        raise ValueError(
            f"rollout {name}: {len(logprobs)} log-probs of a teacher for {num_sampled} sampled"
            " tokens; record it again"
        )
    return logprobs


def to_top(arrays: Sequence[np.ndarray | None], num_sampled: int, name: str) -> TeacherTop | None:
    """Return Rollout.teacher_top from its arrays; ValueError where they do not fit."""
    sizes, codes, logprobs = arrays
    if sizes is None or codes is None or logprobs is None:
        if any(array is not None for array in arrays):
            raise ValueError(
                f"rollout {name}: a part of its teacher's tokens is missing; record it again"
            )
        return None
    try:
        return TeacherTop(TokenSets(sizes, codes), logprobs).check(num_sampled)
    except ValueError as error:
        raise ValueError(f"rollout {name}: {error}; record it again") from error
