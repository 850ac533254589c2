"""Token ids of users' code and of clients: they are checked before a server gets them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np

from megatron_rl.rollout.agents.episode import EpisodeError


def checked_tokens(tokens: Sequence[object], vocab_size: int, where: str) -> array[int]:
    """Return `tokens` as ints.

    where: the beginning of the error.  Raises EpisodeError for a value that is no token id (the
    digits of a text and bytes are none), and for one outside the vocabulary, which kills an SGLang
    server.
    """
    check_no_bytes(tokens, where)
    try:
        ids = array("q", cast("Sequence[int]", tokens))
    except (TypeError, OverflowError) as error:
        raise EpisodeError(f"{where}: must be integers, got {tokens!r:.80}: {error}") from error
    values = np.asarray(ids)
    wrong = values[(values < 0) | (values >= vocab_size)]
    if wrong.size:
        raise EpisodeError(f"{where} token id {wrong[0]}, the model's vocabulary has {vocab_size}")
    return ids


def check_no_bytes(values: object, where: str) -> None:
    """Raise EpisodeError for bytes, whose values would be read as token ids."""
    if isinstance(values, bytes | bytearray | memoryview):
        raise EpisodeError(
            f"{where}: bytes are no token ids, got {bytes(values)!r:.80}; decode them to text"
        )
