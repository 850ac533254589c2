"""The digests that megatron-rl saves with its rollouts, computed again: blake2b of 16 bytes.

Written from docs/reference/token_data.md, without the trainer's code, so that each implementation
shows a fault of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from megatron_rl_tools.check_rollouts.dumped import Dumped, Spans


def digest_of_routes(tokens: np.ndarray, routes: np.ndarray, environment: Spans) -> bytes:
    """Bind the expert ids [S - 1, L, K] of the first MoE layer to their tokens [S]."""
    first_layer = routes[:, 0] if routes.ndim == 3 and routes.shape[1] else routes
    return digest_of([(tokens, "<i8"), (first_layer, "<i2"), (environment, "<i8")])


def digest_of_episode(sequences: Sequence[Dumped]) -> bytes:
    """Bind the sequences of an episode to one another, in their order."""
    parts: list[tuple[ArrayLike, str]] = []
    for sequence in sequences:
        record, tokens = sequence.record, sequence.tokens
        head = [record.prompt_length, len(tokens), *np.ravel(sequence.environment)]
        versions, counts = np.array(record.policy_versions, np.int64).reshape(-1, 2).T
        parts += [([len(head), *head], "<i8"), (tokens, "<i8"), (sequence.logprobs, "<f4")]
        parts.append((np.repeat(versions, counts), "<i4"))
    return digest_of(parts)


def digest_of(parts: Sequence[tuple[ArrayLike, str]]) -> bytes:
    """Return the digest of parts, which are values and the dtype in which they are hashed."""
    data = b"".join(np.asarray(values).astype(dtype).tobytes() for values, dtype in parts)
    return hashlib.blake2b(data, digest_size=16).digest()
