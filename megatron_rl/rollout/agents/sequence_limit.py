"""The longest sequence of an episode that the run's servers and its trainer take."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.models.fit import SERVER_TOKENS


def sequence_limit(cfg: Config, max_positions: int | None) -> tuple[int, str]:
    """Return (tokens, setting): the longest sequence, prompt and response, and what limits it.

    max_positions: positions of the model, None where they are not known.
    """
    rows, cache = cfg.run.max_tokens_per_micro_batch, cfg.rollout.max_total_tokens
    # a sequence above the cap of a micro-batch is one by itself: memory is planned for the longest
    # prompt and response
    longest = max(rows, cfg.longest_sequence)
    limits = [(longest, f"run.max_tokens_per_micro_batch = {rows}")]
    if not cfg.rollout.urls:
        limits.append((cache - SERVER_TOKENS, f"rollout.max_total_tokens = {cache}"))
        has_context = any(arg.startswith("--context") for arg in cfg.rollout.server_args)
        if max_positions is not None and not has_context:
            setting = f"the model's max_position_embeddings = {max_positions}"
            limits.append((max_positions - SERVER_TOKENS, setting))
    return min(limits)
