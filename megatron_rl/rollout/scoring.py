"""Texts and rewards of sampled groups: the one way to score, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.records import Rollout, RolloutGroup
from megatron_rl.reward.pool import RewardPool


def score_groups(
    groups: Sequence[RolloutGroup], pool: RewardPool, tokenizer: PreTrainedTokenizerBase, *, for_training: bool
) -> list[RolloutGroup]:
    """Fill `response_text` and `rewards`, float32 [G].

    A rollout function's own reward stays as it is.  for_training: other rewards include reward.format_penalty, and a failed
    one is reward.on_error.  Evaluation has the task's reward alone, and NaN where it failed.  Raises RewardError, see
    RewardPool.score.
    """
    groups = [with_text(group, tokenizer) for group in groups]
    items = [(g.prompt.text, r.response_text, g.prompt.label) for g in groups for r in g.rollouts if r.reward is None]
    scores = iter(pool.score(items, shaped=for_training, failed=None if for_training else float("nan")))
    rewards = [[next(scores) if r.reward is None else r.reward for r in group.rollouts] for group in groups]
    return [replace(g, rewards=np.array(own, np.float32)) for g, own in zip(groups, rewards, strict=True)]


def with_text(group: RolloutGroup, tokenizer: PreTrainedTokenizerBase) -> RolloutGroup:
    """Fill `response_text`, of all sequences."""
    rollouts = (replace(r, earlier=decoded(r.earlier, tokenizer)) for r in decoded(group.rollouts, tokenizer))
    return replace(group, rollouts=tuple(rollouts))


def decoded(rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase) -> tuple[Rollout, ...]:
    if not rollouts:  # transformers decodes [] to one text
        return ()
    texts = tokenizer.batch_decode([r.tokens[r.prompt_length :] for r in rollouts], skip_special_tokens=True)
    return tuple(replace(r, response_text=text) for r, text in zip(rollouts, texts, strict=True))
