"""The digests that megatron-rl saves with its rollouts, computed again: blake2b of 16 bytes.

Written from docs/reference/token_data.md, without the trainer's code: a fault of one implementation
is then seen by the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from megatron_rl_tools.check_rollouts.dumped import Dumped, Spans

Parts: TypeAlias = Iterable[tuple[ArrayLike, str]]
"""(values, dtype in which they are hashed)"""


def digest_of_routes(tokens: np.ndarray, routes: np.ndarray, environment: Spans) -> bytes:
    """Bind expert ids [S - 1, L, K] to their tokens [S]; of the ids, only the first MoE layer's."""
    first_layer = routes[:, 0] if routes.ndim == 3 and routes.shape[1] else routes
    return hashed([(tokens, "<i8"), (first_layer, "<i2"), (environment, "<i8")])


def digest_of_episode(sequences: Sequence[Dumped]) -> bytes:
    """Bind the sequences of an episode to one another, in their order."""
    return hashed(part for sequence in sequences for part in parts_of(sequence))


def parts_of(sequence: Dumped) -> Parts:
    head = [sequence.record.prompt_length, len(sequence.tokens), *np.ravel(sequence.environment)]
    versions, counts = np.array(sequence.record.policy_versions, np.int64).reshape(-1, 2).T
    return [
        ([len(head), *head], "<i8"),
        (sequence.tokens, "<i8"),
        (sequence.logprobs, "<f4"),
        (np.repeat(versions, counts), "<i4"),
    ]


def hashed(parts: Parts) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for values, dtype in parts:
        digest.update(np.asarray(values).astype(dtype).tobytes())
    return digest.digest()
