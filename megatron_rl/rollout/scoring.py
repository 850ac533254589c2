"""Texts and rewards of sampled groups: the one way to score, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.reward.pool import Rewarded, RewardPool
from megatron_rl.reward.scored_response import Episode, EpisodeTurn


def score_groups(
    groups: Sequence[RolloutGroup],
    pool: RewardPool,
    tokenizer: PreTrainedTokenizerBase,
    *,
    for_training: bool,
    is_last: bool = True,
) -> list[RolloutGroup]:
    """Return the groups with `response_text`, `reward_metrics` and `rewards`, float32 [G].

    A reward that the rollout function gave stays as it is.  for_training: other rewards include
    reward.format_penalty, and reward.on_error replaces one that failed.  Evaluation has the task's
    reward alone, and NaN where it failed.  is_last: False where more of a step's groups follow.
    Raises RewardError, see RewardPool.score_episodes.
    """
    groups = [with_text(group, tokenizer) for group in groups]
    episodes = [
        [
            make_episode(group.prompt, rollout, tokenizer)
            for rollout in group.rollouts
            if rollout.episode.reward is None
        ]
        for group in groups
    ]
    failed = None if for_training else float("nan")
    scores = pool.score_episodes(episodes, shaped=for_training, failed=failed, is_last=is_last)
    return [with_rewards(group, rewarded) for group, rewarded in zip(groups, scores, strict=True)]


def with_rewards(group: RolloutGroup, rewarded: Sequence[Rewarded]) -> RolloutGroup:
    """Return the group with rewards and their metrics.

    rewarded: results for the rollouts whose episode gave no reward, in order.
    """
    scored = iter(rewarded)
    results = [
        next(scored) if rollout.episode.reward is None else Rewarded(rollout.episode.reward)
        for rollout in group.rollouts
    ]
    rollouts = tuple(
        replace(rollout, reward_metrics=result.metrics)
        for rollout, result in zip(group.rollouts, results, strict=True)
    )
    rewards = np.array([result.reward for result in results], np.float32)
    return replace(group, rollouts=rollouts, rewards=rewards)


def with_text(group: RolloutGroup, tokenizer: PreTrainedTokenizerBase) -> RolloutGroup:
    """Return the group with `response_text` in all sequences."""
    rollouts = (
        r.with_episode(earlier=decoded(r.episode.earlier, tokenizer))
        for r in decoded(group.rollouts, tokenizer)
    )
    return replace(group, rollouts=tuple(rollouts))


def decoded(rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase) -> tuple[Rollout, ...]:
    if not rollouts:  # transformers would decode [] to one text
        return ()
    texts = tokenizer.batch_decode(
        [r.tokens[r.prompt_length :] for r in rollouts], skip_special_tokens=True
    )
    return tuple(replace(r, response_text=text) for r, text in zip(rollouts, texts, strict=True))


def make_episode(prompt: Prompt, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Episode:
    """Return what a reward function sees of `rollout`, which has its text."""
    return Episode(
        prompt=prompt.text,
        response=rollout.response_text,
        label=prompt.label,
        turns=tuple(
            turn for sequence in rollout.sequences for turn in make_turns(sequence, tokenizer)
        ),
        messages=tuple(
            message for sequence in rollout.sequences for message in sequence.episode.messages
        ),
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.episode_length,
        metadata=prompt.metadata,
        source=prompt.source,
        metrics=rollout.episode.metrics,
    )


def make_turns(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Iterator[EpisodeTurn]:
    """Yield the turns of one sequence, each with the environment's answer to it."""
    spans, count = rollout.turn_spans, rollout.num_spans
    parts = [rollout.tokens[start:end] for start, end in (*spans, *rollout.environment)]
    texts = tokenizer.batch_decode(parts, skip_special_tokens=True)
    ends: Sequence[str] = rollout.span_finish_reasons or [
        *[""] * (count - 1),
        rollout.finish_reason,
    ]
    rewards = rollout.episode.turn_rewards or (0.0,) * count
    for (start, end), text, observation, reason, reward in zip(
        spans, texts[:count], (*texts[count:], ""), ends, rewards, strict=True
    ):
        yield EpisodeTurn(text, observation, reason, end - start, reward)
