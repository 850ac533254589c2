"""Advantages A(x, y) of responses, computed within the group of one prompt or whitened over the
complete batch of a step.

Shapes: G responses of a group.
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
"""The term that keeps a division by a standard deviation finite."""


def with_advantages(
    groups: Sequence[RolloutGroup],
    kind: AdvantageKind,
    dp_group: dist.ProcessGroup | None = None,
    *,
    reward_weights: Mapping[str, float] | None = None,
    weight: float = 1.0,
) -> list[RolloutGroup]:
    """Fill `advantages`, float32 [G], of every group from its `rewards`: `weight` x A_i

    mean                    A_i = R_i - mean(R)                      MiniRL, arXiv 2512.01374 Eq. 7
    std                     A_i = (R_i - mean(R)) / (std(R) + 1e-6)  GRPO
    reward                  A_i = R_i                                no baseline; SFT, where R = 1
    leave_one_out           A_i = R_i - mean of the other G - 1      RLOO
    length_weighted         A_i = R_i - sum_j n_j R_j / sum_j n_j    OPO, arXiv 2505.23585
    rescaled_mean           A_i = (P / P+) (R_i - mean(R))           GPG, arXiv 2504.02546
    batch_whitened          A_i = (R_i - m) / (s + 1e-6)             REINFORCE++
    centred_batch_whitened  the same for R_i - mean(R)               REINFORCE++-baseline
    per_reward              A_i = (S_i - m') / (s' + 1e-6)           GDPO, arXiv 2601.05242
                            S_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + 1e-6)

    mean, std: over the group, response i included; std is the population std.  n_j: sampled tokens.
    P: the step's groups on all replicas; P+: those whose rewards differ; A = 0 where there is none.
    m, s: mean and population std over all response tokens of the step on all replicas, where a
    token has the value of its response.  R_k: the rewards named in `reward_weights`, from the
    metrics of the rollouts; w_k: their weights; m', s': mean and population std of S over all
    responses of the step on all replicas.

    Where a reward is NaN (reward.on_error = drop) the advantage is 0, and the response does not
    count in means, deviations and G.  The last four kinds are collective over `dp_group` (None: a
    single replica), the others are not.  Raises ValueError for a missing or infinite reward, and
    for a response without a metric of reward_weights.
    """
    rewards = [checked_rewards(group) for group in groups]
    if kind == "batch_whitened":
        advantages = whiten_over_tokens(rewards, rewards, groups, dp_group)
    elif kind == "centred_batch_whitened":
        centred = [group_advantages(r, "mean") for r in rewards]
        advantages = whiten_over_tokens(centred, rewards, groups, dp_group)
    elif kind == "length_weighted":
        advantages = [length_weighted(r, group) for r, group in zip(rewards, groups, strict=True)]
    elif kind == "rescaled_mean":
        num_differ = float(sum(not is_uniform(group) for group in groups))
        counts = all_reduce([float(len(groups)), num_differ], dist.ReduceOp.SUM, dp_group)
        num_groups, num_differ = counts.tolist()
        # where no group differs, all advantages are 0 whatever the scale is
        scale = num_groups / max(num_differ, 1.0)
        advantages = [scale * group_advantages(r, "mean") for r in rewards]
    elif kind == "per_reward":
        weights = reward_weights or {}
        sums = [per_reward(r, group, weights) for r, group in zip(rewards, groups, strict=True)]
        # responses without a reward count neither in the mean nor in the deviation
        advantages = whiten(sums, [(~np.isnan(r)).astype(np.float64) for r in rewards], dp_group)
    else:
        advantages = [group_advantages(r, kind) for r in rewards]
    return [
        # nothing is learned from a response without a reward
        replace(group, advantages=np.where(np.isnan(r), 0.0, weight * values).astype(np.float32))
        for group, r, values in zip(groups, rewards, advantages, strict=True)
    ]


def is_uniform(group: RolloutGroup) -> bool:
    """Return True where the group's rewards, penalties included, are all the same, so that its
    advantages are 0.
    """
    rewards = checked_rewards(group)
    scored = rewards[~np.isnan(rewards)]
    return len(scored) == 0 or float(np.ptp(scored)) == 0


def group_advantages(rewards: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    """Return the advantages float64 [G] of one group's rewards [G], 0 where a reward is NaN.

    kind: mean, std, leave_one_out or reward.
    """
    scored = ~np.isnan(rewards)
    if kind == "reward":
        return np.where(scored, rewards, 0.0)
    count = int(scored.sum())
    known = rewards[scored]
    # one response has no baseline; equal rewards give exact zeros, although their mean may round
    if count < 2 or np.ptp(known) == 0:
        return np.zeros_like(rewards)
    centred = np.where(scored, rewards - known.mean(), 0.0)
    if kind == "mean":
        return centred
    if kind == "std":
        return centred / (known.std() + STD_EPS)
    if kind == "leave_one_out":
        # R_i - mean of the others = G / (G - 1) (R_i - mean of all)
        return centred * count / (count - 1)
    raise ValueError(
        f"advantage.kind = {kind!r} is not computed within a group; use mean, std, leave_one_out or"
        " reward"
    )


def length_weighted(rewards: np.ndarray, group: RolloutGroup) -> np.ndarray:
    """Return the rewards [G] minus their mean weighted by response length, float64.

    It is the baseline of least variance where the squared norm of a response's gradient is
    proportional to its length.  The result is 0 where a reward is NaN, and where only one response
    has a reward.
    """
    scored = ~np.isnan(rewards)
    if int(scored.sum()) < 2:
        return np.zeros_like(rewards)
    lengths = np.array([rollout.episode_length for rollout in group.rollouts], np.float64)[scored]
    baseline = float((lengths * rewards[scored]).sum() / lengths.sum())
    return np.where(scored, rewards - baseline, 0.0)


def per_reward(
    rewards: np.ndarray, group: RolloutGroup, weights: Mapping[str, float]
) -> np.ndarray:
    """Return the weighted sum float64 [G] of the named rewards, every one normalised within the
    group; 0 where a response has no reward.
    """
    total = np.zeros(len(rewards))
    for name, weight in weights.items():
        values = np.full(len(rewards), np.nan)
        for index in np.flatnonzero(~np.isnan(rewards)):
            rollout = group.rollouts[index]
            metrics = {**rollout.episode.metrics, **rollout.reward_metrics}
            if name not in metrics:
                raise ValueError(
                    f"prompt {group.prompt.id}: response {rollout.id} has no metric {name!r} of"
                    f" advantage.rewards, only {sorted(metrics)}; return it from reward.function"
                )
            values[index] = metrics[name]
        total += weight * group_advantages(values, "std")
    return total


def whiten_over_tokens(
    values: Sequence[np.ndarray],
    rewards: Sequence[np.ndarray],
    groups: Sequence[RolloutGroup],
    dp_group: dist.ProcessGroup | None,
) -> list[np.ndarray]:
    """Whiten values [G] of every group, where a response counts once for every sampled token; a
    response whose reward is NaN does not count.
    """
    weights = []
    for r, group in zip(rewards, groups, strict=True):
        lengths = np.array([rollout.episode_length for rollout in group.rollouts], np.float64)
        weights.append(np.where(np.isnan(r), 0.0, lengths))
    # 0 x NaN is NaN: a value of weight 0 must be a number
    return whiten([np.nan_to_num(part) for part in values], weights, dp_group)


def whiten(
    values: Sequence[np.ndarray], weights: Sequence[np.ndarray], dp_group: dist.ProcessGroup | None
) -> list[np.ndarray]:
    """Return (values - m) / (s + 1e-6), with the weighted mean m and std s over all replicas."""
    flat, weight = np.concatenate(values), np.concatenate(weights)
    sums = [float((weight * flat).sum()), float(weight.sum())]
    total, count = all_reduce(sums, dist.ReduceOp.SUM, dp_group).tolist()
    mean = total / max(count, 1.0)
    # a second pass over the data, because sum(x^2) - n m^2 cancels for large values
    local_squares = float((weight * (flat - mean) ** 2).sum())
    (squares,) = all_reduce([local_squares], dist.ReduceOp.SUM, dp_group).tolist()
    scale = (squares / max(count, 1.0)) ** 0.5 + STD_EPS
    return [(part - mean) / scale for part in values]


def checked_rewards(group: RolloutGroup) -> np.ndarray:
    """Return the group's rewards plus their penalties, float64 [G]; NaN where a response has none.

    Raises ValueError where rewards are missing or infinite.
    """
    if group.rewards is None or len(group.rewards) != len(group.rollouts):
        raise ValueError(
            f"prompt {group.prompt.id}: needs one reward per response before advantages"
        )
    if np.isinf(group.rewards).any():
        raise ValueError(
            f"prompt {group.prompt.id}: reward is not finite: {group.rewards.tolist()};"
            " reward.function must return finite numbers"
        )
    rewards = np.asarray(group.rewards, np.float64)  # the mean of equal rewards is then exact
    return rewards if group.penalties is None else rewards + group.penalties
