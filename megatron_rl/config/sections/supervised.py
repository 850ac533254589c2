"""[sft]: supervised training on rows that have their answers (`megatron-rl sft`)."""

from __future__ import annotations

from megatron_rl.config.base import AboveZero, Finite, Positive, Section


class SftConfig(Section):
    """Supervised training (docs/guides/sft.md); read by `megatron-rl sft` only."""

    epochs: AboveZero | None = None
    """Passes over data.train, which then set run.num_steps.  With several sources set
    run.num_steps."""
    response_key: str = "auto"
    """The response's key in a row with a prompt, or a path; auto: response, completion, output or
    answer."""
    max_row_tokens: Positive = 4096
    """Longest row, prompt and responses; data.on_long_prompt says what happens to a longer one."""
    min_reward: Finite | None = None
    """Least reward of a saved rollout that is learned from, where data.train names the folder of a
    run (rejection sampling); default: all that have a reward."""
