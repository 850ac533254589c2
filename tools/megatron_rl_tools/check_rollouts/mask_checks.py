"""The check of saved kept sets (rollout.top_p, top_k, min_p): see check_rollouts.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.rollout.recorder import RecordedRollout
from megatron_rl.sampling_mask import SamplingMask, check_mask


def check_kept_sets(
    record: RecordedRollout,
    tokens: np.ndarray,
    environment: Sequence[tuple[int, int]],
    mask: tuple[np.ndarray | None, np.ndarray | None],
    vocab_size: int | None,
) -> Iterator[tuple[str, str]]:
    """(found, cause) unless every sampled token is in its own set, of ids in the vocabulary.  mask: sizes and codes."""
    sizes, codes = mask
    if sizes is None and codes is None:
        return
    if sizes is None or codes is None:
        yield f"{'sizes' if sizes is None else 'codes'} are missing", "files of two runs mixed"
        return
    is_sampled = np.arange(len(tokens)) >= record.prompt_length
    for start, end in environment:
        is_sampled[start:end] = False
    try:
        ids = check_mask(record.id, SamplingMask(sizes, codes), tokens[is_sampled])
    except ValueError as error:
        yield str(error), "sets of another rollout or shifted by a token, or tokens edited after sampling"
        return
    if vocab_size is not None and len(ids) and ids.max() >= vocab_size:
        yield f"kept id {ids.max()}, must be below the vocabulary {vocab_size}", "another model"
