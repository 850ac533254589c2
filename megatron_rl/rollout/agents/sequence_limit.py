"""The limits of an episode's sequences, among them the longest one that the run's servers and its
trainer take.
"""

from __future__ import annotations

from typing import Protocol

from megatron_rl.config import Config
from megatron_rl.models.fit import SERVER_TOKENS


def sequence_limit(cfg: Config, server_tokens: int | None) -> tuple[int, str]:
    """Return (tokens, setting): the longest sequence, prompt and response, and what limits it.

    server_tokens: the servers' max_req_input_len, by the model's positions (or --context-length)
    and by the KV cache; None where it is not known.
    """
    rows, cache = cfg.run.max_tokens_per_micro_batch, cfg.rollout.max_total_tokens
    # a sequence above the cap of a micro-batch is one by itself: memory is planned for the longest
    # prompt and response
    longest = max(rows, cfg.longest_sequence)
    limits = [(longest, f"run.max_tokens_per_micro_batch = {rows}")]
    if not cfg.rollout.urls:
        limits.append((cache - SERVER_TOKENS, f"rollout.max_total_tokens = {cache}"))
    if server_tokens is not None:
        limits.append((server_tokens, f"the servers' max_req_input_len = {server_tokens}"))
    return min(limits)


class Limits(Protocol):
    """The limits of an episode, and what they count: see SessionSettings."""

    max_tokens: int
    max_episode_tokens: int
    sequence_limit: tuple[int, str] | None

    @property
    def num_tokens(self) -> int: ...


def room(episode: Limits, num_tokens: int, length: int) -> tuple[int, str]:
    """Return (tokens, setting): the room that the tightest limit leaves in a sequence, and its
    setting.

    num_tokens: turns and observations of the sequence.  length: with its start.
    """
    setting = f"rollout.max_response_tokens = {episode.max_tokens}"
    limits = [(episode.max_tokens - num_tokens, setting)]
    if episode.max_episode_tokens:
        setting = f"agent.max_episode_tokens = {episode.max_episode_tokens}"
        limits.append((episode.max_episode_tokens - episode.num_tokens, setting))
    if episode.sequence_limit is not None:
        most, setting = episode.sequence_limit
        limits.append((most - length, setting))
    return min(limits, key=lambda limit: limit[0])
