"""Advantages A(x, y) of responses: within the group of one prompt, or whitened over the step's
whole batch.

Shapes: G responses of a group, P' groups of this data-parallel replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce
from megatron_rl.config.loss_presets import AdvantageKind
from megatron_rl.records import RolloutGroup

STD_EPS = 1e-6


def with_advantages(
    groups: Sequence[RolloutGroup],
    kind: AdvantageKind,
    dp_group: dist.ProcessGroup | None = None,
    *,
    reward_weights: Mapping[str, float] | None = None,
) -> list[RolloutGroup]:
    """Fill `advantages`, float32 [G], of every group from its `rewards`.  Where a reward is NaN
    (reward.on_error = drop) the advantage is 0, and it does not count in means, deviations and G.

    mean                    A_i = R_i - mean(R)                      MiniRL, arXiv 2512.01374 Eq. 7
                            (own sample included)
    std                     A_i = (R_i - mean(R)) / (std(R) + 1e-6)  GRPO (population std)
    leave_one_out           A_i = R_i - mean of the other G - 1      RLOO = G / (G - 1) times the
                            mean-centred one
    length_weighted         A_i = R_i - sum_j n_j R_j / sum_j n_j    OPO, arXiv 2505.23585 (n:
                            sampled tokens)
    rescaled_mean           A_i = P / P+ (R_i - mean(R))             GPG, arXiv 2504.02546
    batch_whitened          A_i = (R_i - m) / (s + 1e-6)             REINFORCE++
    centred_batch_whitened  the same of R_i - mean(R)                REINFORCE++-baseline
    per_reward              A_i = (S_i - m') / (s' + 1e-6), S_i = sum_k w_k (R_ik - mean(R_k)) /
                            (std(R_k) + 1e-6) GDPO, arXiv 2601.05242: R_k the rewards named in
                            `reward_weights` (w_k), of the rollouts' metrics; m', s': mean and
                            population std of S over the step's responses on all replicas
    m, s: mean and population std over the response TOKENS of the step's batch on all replicas, each
    with its response's value.  P: the step's groups on all replicas, P+: those whose rewards
    differ; with none A = 0. The last four are collective over `dp_group` (None: a single replica),
    the others are not. Raises ValueError on a missing or infinite reward, and on a metric of
    reward_weights that a response lacks.
    """
    rewards = [checked_rewards(group) for group in groups]
    if kind in ("batch_whitened", "centred_batch_whitened"):
        values = (
            rewards if kind == "batch_whitened" else [group_advantages(r, "mean") for r in rewards]
        )
        tokens = [
            np.array([rollout.episode_length for rollout in group.rollouts], np.float64)
            for group in groups
        ]
        weights = [
            np.where(np.isnan(r), 0.0, count) for r, count in zip(rewards, tokens, strict=True)
        ]
        # NaN has weight 0
        advantages = whiten([np.nan_to_num(part) for part in values], weights, dp_group)
    elif kind == "length_weighted":
        advantages = [length_weighted(r, group) for r, group in zip(rewards, groups, strict=True)]
    elif kind == "rescaled_mean":
        taught = [float(not is_uniform(group)) for group in groups]
        total, useful = all_reduce(
            [float(len(groups)), sum(taught)], dist.ReduceOp.SUM, dp_group
        ).tolist()
        advantages = [total / max(useful, 1.0) * group_advantages(r, "mean") for r in rewards]
    elif kind == "per_reward":
        values = [
            per_reward(r, group, reward_weights or {})
            for r, group in zip(rewards, groups, strict=True)
        ]
        advantages = whiten(values, [(~np.isnan(r)).astype(np.float64) for r in rewards], dp_group)
    else:
        advantages = [group_advantages(r, kind) for r in rewards]
    return [
        replace(group, advantages=np.where(np.isnan(r), 0.0, values).astype(np.float32))
        for group, r, values in zip(groups, rewards, advantages, strict=True)
    ]


def is_uniform(group: RolloutGroup) -> bool:
    """Whether the group's rewards, plus their penalties, are all the same: the advantages are then
    0.
    """
    rewards = checked_rewards(group)
    scored = rewards[~np.isnan(rewards)]
    return len(scored) == 0 or float(np.ptp(scored)) == 0


def group_advantages(rewards: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    """Advantages float64 [G] of one group's rewards [G]; mean, std or leave_one_out.

    0 where a reward is NaN.
    """
    scored = ~np.isnan(rewards)
    count = int(scored.sum())
    known = rewards[scored]
    # a response alone has no baseline; the mean of equal values need not be that value
    if count < 2 or np.ptp(known) == 0:
        return np.zeros_like(rewards)
    centred = np.where(scored, rewards - known.mean(), 0.0)
    if kind == "mean":
        return centred
    if kind == "std":
        return centred / (known.std() + STD_EPS)
    if kind == "leave_one_out":
        return centred * count / (count - 1)
    raise ValueError(
        f"advantage.kind = {kind!r} is not computed within a group; use mean, std or leave_one_out"
    )


def length_weighted(rewards: np.ndarray, group: RolloutGroup) -> np.ndarray:
    """Rewards [G] less their mean weighted by response length, float64: the baseline of least
    variance where the squared norm of a response's gradient is proportional to its length.  0 where
    a reward is NaN, and where one response alone has any."""
    scored = ~np.isnan(rewards)
    if int(scored.sum()) < 2:
        return np.zeros_like(rewards)
    lengths = np.array([rollout.episode_length for rollout in group.rollouts], np.float64)[scored]
    baseline = float((lengths * rewards[scored]).sum() / lengths.sum())
    return np.where(scored, rewards - baseline, 0.0)


def per_reward(
    rewards: np.ndarray, group: RolloutGroup, weights: Mapping[str, float]
) -> np.ndarray:
    """Weighted sum [G], float64, of each named reward normalised within the group; 0 where a
    response has no reward.
    """
    total = np.zeros(len(rewards))
    for name, weight in weights.items():
        values = np.full(len(rewards), np.nan)
        for index in np.flatnonzero(~np.isnan(rewards)):
            rollout = group.rollouts[index]
            found = {**rollout.episode.metrics, **rollout.reward_metrics}
            if name not in found:
                raise ValueError(
                    f"prompt {group.prompt.id}: response {rollout.id} has no metric {name!r} of"
                    f" advantage.rewards, only {sorted(found)}; return it from reward.function"
                )
            values[index] = found[name]
        total += weight * group_advantages(values, "std")
    return total


def whiten(
    values: Sequence[np.ndarray], weights: Sequence[np.ndarray], dp_group: dist.ProcessGroup | None
) -> list[np.ndarray]:
    """(values - m) / (s + 1e-6) with weighted mean m and std s over all replicas."""
    flat, weight = np.concatenate(values), np.concatenate(weights)
    sums = [float((weight * flat).sum()), float(weight.sum())]
    total, count = all_reduce(sums, dist.ReduceOp.SUM, dp_group).tolist()
    mean = total / max(count, 1.0)
    # a second pass over the data: sum(x^2) - n m^2 would cancel for large values
    (squares,) = all_reduce(
        [float((weight * (flat - mean) ** 2).sum())], dist.ReduceOp.SUM, dp_group
    ).tolist()
    scale = (squares / max(count, 1.0)) ** 0.5 + STD_EPS
    return [(part - mean) / scale for part in values]


def checked_rewards(group: RolloutGroup) -> np.ndarray:
    """The group's rewards plus their penalties, float64 [G]; NaN where a response has none."""
    if group.rewards is None or len(group.rewards) != len(group.rollouts):
        raise ValueError(
            f"prompt {group.prompt.id}: needs one reward per response before advantages"
        )
    if np.isinf(group.rewards).any():
        raise ValueError(
            f"prompt {group.prompt.id}: reward is not finite: {group.rewards.tolist()}"
        )
    rewards = np.asarray(group.rewards, np.float64)  # the mean of equal rewards is then exact
    return rewards if group.penalties is None else rewards + group.penalties
