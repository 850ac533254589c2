"""Metrics of a step's rollouts (docs/reference/metrics.md), counted on the leader of the replica
that holds them.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.batch.advantage import is_uniform
from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.histogram import tabulate
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Rollout, RolloutGroup
from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.client.teachers import Teachers
from megatron_rl.rollout.missing_routes import count_missing_routes


def count_step(
    cfg: Config, parallel: Parallel, sums: MetricSums, groups: Sequence[RolloutGroup], version: int
) -> None:
    """Count the groups that are trained on from weights `version`, once per replica."""
    if not parallel.is_replica_leader:
        return
    if cfg.replay.on_missing_route == "mask_token":
        sums.add_total(
            "replay/masked_tokens_total", count_missing_routes(groups).missing_response_rows
        )
    count_groups(sums, groups, version=version)
    count_sources(sums, groups, cfg.data.source_names, cfg.data.pass_reward)
    count_teachers(sums, groups, cfg)
    if cfg.agent.name:
        count_episodes(sums, groups)


def count_groups(sums: MetricSums, groups: Sequence[RolloutGroup], *, version: int) -> None:
    """Count rewards with their metrics, lengths and ages of the groups that are trained on from
    weights `version`.
    """
    for group in groups:
        rewards = np.asarray(group.rewards)
        unscored = np.isnan(rewards)  # reward.on_error = drop
        scored = rewards[~unscored].astype(np.float64)
        sums.add("rollout/reward_mean", float(scored.sum()), len(scored))
        sums.add("rollout/reward_square_mean", float((scored**2).sum()), len(scored))
        if len(scored):
            sums.add_max("rollout/reward_max", float(scored.max()))
            # the minimum as a maximum of negatives: ranks reduce only sums and maxima; derived()
            # turns it back
            sums.add_max("rollout/negative_reward_max", float(-scored.min()))
        sums.add("rollout/unscored_frac", int(unscored.sum()), len(rewards))
        if group.penalties is not None:
            sums.add("rollout/length_penalty_mean", float(group.penalties.sum()), len(rewards))
        beta = largest_beta(group)
        sums.add("rollout/zero_advantage_groups_frac", float(teaches_nothing(group)), 1)
        if group.advantages is not None:
            sums.add_max("rollout/advantage_max", float(np.abs(group.advantages).max()) + beta)
        for rollout in group.rollouts:
            sums.add("rollout/response_length_mean", rollout.episode_length, 1)
            sums.add_max("rollout/response_length_max", float(rollout.episode_length))
            sums.add("rollout/truncated_frac", float(rollout.finish_reason == "length"), 1)
            for name, value in rollout.reward_metrics.items():
                sums.add(f"reward/{name}", value, 1)
            sums.add("rollout/mixed_versions_frac", float(rollout.is_mixed), 1)
            for sequence in rollout.sequences:
                sums.add_total("perf/step_tokens", len(sequence.tokens))
                count_age(sums, sequence, version)
                if (mask := sequence.sampling_mask) is not None:
                    sums.add("rollout/kept_tokens_mean", int(mask.sizes.sum()), len(mask))
                    sums.add("rollout/kept_bytes_mean", mask.nbytes, len(mask))


def largest_beta(group: RolloutGroup) -> float:
    return 0.0 if group.teacher_weights is None else float(group.teacher_weights.max())


def teaches_nothing(group: RolloutGroup) -> bool:
    """Return True where all rewards are equal and give no advantage, and no teacher teaches.

    With advantage.kind = batch_whitened or reward equal rewards have advantages.
    """
    if largest_beta(group) or not is_uniform(group):
        return False
    return group.advantages is None or bool(np.abs(group.advantages).max() < 1e-6)


def count_sources(
    sums: MetricSums, groups: Sequence[RolloutGroup], names: Sequence[str], pass_reward: float
) -> None:
    """Count groups, rewards, pass rates and lengths by the sources `names` of data.train."""
    for group in groups:
        for name in names:
            sums.add(f"source/{name}/groups_frac", float(group.prompt.source == name), 1)
        name = group.prompt.source
        if name not in names:  # saved by a run with other sources
            continue
        rewards = np.asarray(group.rewards)
        scored = rewards[~np.isnan(rewards)].astype(np.float64)
        sums.add(f"source/{name}/reward_mean", float(scored.sum()), len(scored))
        passed, count = pass_counts([group], pass_reward)[0].tolist()
        sums.add(f"source/{name}/pass_rate", passed, count)
        sums.add(f"source/{name}/zero_advantage_groups_frac", float(teaches_nothing(group)), 1)
        lengths = [rollout.episode_length for rollout in group.rollouts]
        sums.add(f"source/{name}/response_length_mean", sum(lengths), len(lengths))


def count_teachers(sums: MetricSums, groups: Sequence[RolloutGroup], cfg: Config) -> None:
    """Count log mu - log pi_T of the sampled tokens, over all and by the sources of data.train, and
    how many are the teacher's most probable ones.

    Over samples of mu its mean is KL(mu || pi_T), the reverse KL of the weights that sampled.
    """
    for group in groups:
        if not cfg.teachers.name_for(source := group.prompt.source):
            continue
        if group.teacher_weights is not None:
            sums.add("teacher/beta_mean", float(group.teacher_weights.sum()), len(group.rollouts))
        for sequence in (s for rollout in group.rollouts for s in rollout.sequences):
            if sequence.teacher_logprobs is None:
                continue
            gap = sequence.rollout_logprobs.astype(np.float64) - sequence.teacher_logprobs
            sums.add("teacher/reverse_kl", float(gap.sum()), len(gap))
            sums.add("teacher/higher_frac", int((gap < 0).sum()), len(gap))
            sums.add_max("teacher/gap_abs_max", float(np.abs(gap).max()))
            if (top := sequence.teacher_top) is not None:
                best = top.logprobs.reshape(len(gap), -1).argmax(1)[:, None]
                ids = np.take_along_axis(top.sets.ids().reshape(len(gap), -1), best, 1)[:, 0]
                equal = int((ids == sequence.tokens[sequence.sampled]).sum())
                sums.add("teacher/top1_frac", equal, len(gap))
            if source in cfg.data.source_names:
                sums.add(f"source/{source}/teacher_reverse_kl", float(gap.sum()), len(gap))


def count_requests_to_teachers(sums: MetricSums, teachers: Teachers, parallel: Parallel) -> None:
    """Count the requests to teachers, and how long they took in this step."""
    for name, count in teachers.totals().items():
        sums.add_total(name, count)
    count_seconds(sums, "teacher/request_seconds", teachers.take_seconds(), parallel)


def pass_counts(groups: Sequence[RolloutGroup], pass_reward: float) -> np.ndarray:
    """Return int32 [n, 2]: of each group the responses whose reward is at least `pass_reward`, and
    those that have a reward.
    """
    rows = [
        (int((rewards >= pass_reward).sum()), int((~np.isnan(rewards)).sum()))
        for rewards in (np.asarray(group.rewards) for group in groups)
    ]
    return np.array(rows, np.int32).reshape(-1, 2)


def count_episodes(sums: MetricSums, groups: Sequence[RolloutGroup]) -> None:
    """Count sequences, turns, tokens of environments, and the metrics of agent.function."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        turns = sum(sequence.num_spans for sequence in rollout.sequences)
        sums.add("rollout/sequences_mean", len(rollout.sequences), 1)
        sums.add_max("rollout/sequences_max", float(len(rollout.sequences)))
        sums.add("rollout/turns_mean", turns, 1)
        sums.add_max("rollout/turns_max", float(turns))
        sums.add(
            "rollout/environment_length_mean",
            sum(sequence.environment_length for sequence in rollout.sequences),
            1,
        )
        for name, value in rollout.episode.metrics.items():
            sums.add(f"episode/{name}", value, 1)


def count_age(sums: MetricSums, rollout: Rollout, version: int) -> None:
    """Count the weight versions between the sampling of each token and this step."""
    ages = version - rollout.policy_versions
    sums.add("rollout/staleness_mean", float(ages.sum()), len(ages))
    sums.add_max("rollout/staleness_max", float(ages.max()))
    sums.add("rollout/staleness_0_frac", float((ages <= 0).sum()), len(ages))
    sums.add("rollout/staleness_1_frac", float((ages == 1).sum()), len(ages))
    sums.add("rollout/staleness_2_up_frac", float((ages >= 2).sum()), len(ages))


def check_age(groups: Sequence[RolloutGroup], *, version: int, max_staleness: int) -> None:
    """Raise RuntimeError for tokens older than rollout.max_staleness.

    It checks the scheduler, independently of it.
    """
    oldest = version - max_staleness
    old = [
        rollout.id
        for group in groups
        for rollout in group.rollouts
        if rollout.oldest_version < oldest
    ]
    if old:
        raise RuntimeError(
            f"rollouts {old} hold tokens of weights older than version {oldest} = {version} -"
            " rollout.max_staleness: a bug of the scheduler; the run stops before it trains on"
            " them"
        )


def count_call(sums: MetricSums, call: CallStats, parallel: Parallel) -> None:
    """Count request latency, environments' time, prefix-cache hits and throughput, which is summed
    over replicas.
    """
    count_seconds(sums, "rollout/request_seconds", call.request_seconds, parallel)
    if call.environment_seconds:
        count_seconds(sums, "rollout/environment_seconds", call.environment_seconds, parallel)
    sums.add("rollout/cache_hit_frac", call.cached_tokens, call.prompt_tokens)
    # a mean is reduced as sum / sum over replicas: times dp it is the throughput of all of them
    sums.add("rollout/tokens_per_second", call.tokens * parallel.dp_size, call.seconds)


def count_seconds(sums: MetricSums, name: str, values: Sequence[float], parallel: Parallel) -> None:
    seconds = torch.tensor(values, device=parallel.device)
    mask = torch.ones_like(seconds, dtype=torch.bool)
    # tabulate counts by group: here all values are one
    one_group = torch.zeros_like(seconds, dtype=torch.int64)
    sums.add_histogram(name, tabulate(seconds, mask, one_group, 1))


def derived(metrics: dict[str, float]) -> dict[str, float]:
    """Return the step's reduced metrics, with functions of several in place of their inputs.

    metrics: `_total` since the run's first start.
    perf/train_tokens_per_second = tokens of the step / (time/old_logprob + time/update);
    train/ess = mean(weight)^2 / mean(weight^2).
    """
    all_metrics = dict(metrics)
    square = all_metrics.pop("rollout/reward_square_mean", None)
    if square is not None:
        variance = square - all_metrics["rollout/reward_mean"] ** 2
        # max in this order, so that NaN stays NaN: no reward is known
        all_metrics["rollout/reward_std"] = max(variance, 0.0) ** 0.5
    if (advantage := all_metrics.pop("rollout/advantage_max", None)) is not None:
        all_metrics["rollout/zero_advantages"] = float(advantage == 0)
    if (largest := all_metrics.pop("rollout/negative_reward_max", None)) is not None:
        all_metrics["rollout/reward_min"] = -largest
        # a teacher, a penalty or a metric may teach where every reward is 0
        all_metrics["rollout/zero_rewards"] = float(
            all_metrics["rollout/reward_min"] == all_metrics["rollout/reward_max"] == 0
            and not advantage
        )
    weight_square = all_metrics.pop("train/is_weight_square_mean", None)
    if weight_square is not None:
        weight = all_metrics["train/is_weight_mean"]
        all_metrics["train/ess"] = weight**2 / weight_square if weight_square else 0.0
    all_metrics |= discarded_length(all_metrics)
    tokens = all_metrics.pop("perf/step_tokens", None)
    seconds = all_metrics.get("time/old_logprob", 0.0) + all_metrics.get("time/update", 0.0)
    if tokens is not None and seconds > 0:
        all_metrics["perf/train_tokens_per_second"] = tokens / seconds
    return all_metrics


def discarded_length(metrics: dict[str, float]) -> dict[str, float]:
    """Return the mean length of discarded responses; {} where there are none."""
    tokens, samples = (
        sum(
            metrics.get(f"rollout/{kind}_{unit}_total", 0.0)
            for kind in ("dropped", "cancelled", "stale")
        )
        for unit in ("tokens", "samples")
    )
    return {"rollout/discarded_length_mean": tokens / samples} if samples else {}


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak allocation in GiB on this rank's GPU since the last call; on a CPU the peak
    resident size of the process.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
