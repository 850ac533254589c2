"""Groups -> N mini-batches -> micro-batches under a token cap, the same number on every data-parallel replica.

With expert parallelism the all-to-all of every layer spans data-parallel replicas, so replicas move in lockstep, one
micro-batch at a time: an unequal count would hang the job, and unequal sizes make the fast ones wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.config import Config
from megatron_rl.records import MiniBatch, RolloutGroup


def split(
    groups: Sequence[RolloutGroup],
    config: Config,
    *,
    seed: int,
    rule: PackRule,
    dp_group: dist.ProcessGroup | None,
) -> list[MiniBatch]:
    """Split this replica's groups into N mini-batches of packed micro-batches.

    Whole prompt groups stay together; every response is used exactly once; the fixed partition is a permutation seeded
    with (run.seed, `seed`).  Responses without a reward (NaN: reward.on_error = drop) leave the loss and its denominators;
    with batch.filter_truncated also those cut off at the length limit (DAPO's overlong filtering).
    Collective over `dp_group` (None: a single replica).
    """
    run, filtered = config.run, config.batch.filter_truncated
    if len(groups) % run.num_mini_batches:
        raise ValueError(
            f"this replica has {len(groups)} prompt groups for run.num_mini_batches = {run.num_mini_batches}; "
            "run.prompts_per_step must be a multiple of num_mini_batches times the data-parallel size"
        )
    order = np.random.default_rng([run.seed, seed]).permutation(len(groups))
    batches = []
    for number, part in enumerate(np.array_split(order, run.num_mini_batches)):
        samples = [
            Sample(
                rollout,
                float(advantage),
                in_loss=not (filtered and rollout.finish_reason == "length") and not np.isnan(reward),
            )
            for index in part
            for rollout, advantage, reward in zip(
                groups[index].rollouts, advantages_of(groups[index]), rewards_of(groups[index]), strict=True
            )
        ]
        batch = make_mini_batch(samples, max_tokens=run.max_tokens_per_micro_batch, rule=rule, dp_group=dp_group)
        batches.append(replace(batch, index=number))
    return batches


def make_mini_batch(
    samples: Sequence[Sample], *, max_tokens: int, rule: PackRule, dp_group: dist.ProcessGroup | None
) -> MiniBatch:
    """Pack samples into micro-batches; counts (and sizes, where the rule says so) are agreed over `dp_group`.

    Raises ValueError where there are too few samples for the number of micro-batches.
    """
    lengths = [rule.sequence_rows(len(sample.rollout.tokens)) for sample in samples]
    learned = [sample.rollout.response_length for sample in samples if sample.in_loss]
    num_responses, num_response_tokens = agree([len(learned), sum(learned)], dist.ReduceOp.SUM, dp_group)
    if rule.equal_sizes:
        lengths = agree_lengths(lengths, dp_group)
    (count,) = agree([len(plan_micro_batches(lengths, max_tokens, padded=rule.padded))], dist.ReduceOp.MAX, dp_group)
    count = -(-count // rule.count_multiple) * rule.count_multiple
    plan = plan_micro_batches(lengths, max_tokens, at_least=count, padded=rule.padded)
    micro_batches = tuple(
        pack(
            [samples[i] for i in part if i < len(samples)],
            rule.rows([lengths[i] for i in part]),
            mask_gaps=rule.mask_gaps,
        )
        for part in plan
    )
    # with nothing left to learn from, the loss is 0 whatever divides it
    return MiniBatch(
        micro_batches, num_responses=max(num_responses, 1), num_response_tokens=max(num_response_tokens, 1)
    )


def agree_lengths(lengths: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """For the i-th longest sequence here, the rows of the longest i-th longest of any replica: one plan fits all.

    As many as the replica with most sequences has; indices beyond the own ones are pads.
    """
    (most,) = agree([len(lengths)], dist.ReduceOp.MAX, group)
    own = [*lengths, *[0] * (most - len(lengths))]
    order = sorted(range(most), key=lambda index: -own[index])
    longest = agree([own[index] for index in order], dist.ReduceOp.MAX, group)
    return [length for _, length in sorted(zip(order, longest, strict=True))]


def agree(values: Sequence[int], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> list[int]:
    """Reduce a few integers over `group`."""
    if group is None or group.size() == 1:
        return list(values)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=op, group=group)
    return [int(value) for value in tensor.tolist()]


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, at_least: int = 1, padded: bool = False
) -> list[list[int]]:
    """Assign sequences to micro-batches of at most `max_tokens` rows; padded ones count the rows of their longest for each.

    Returns lists of indices, each non-empty and ascending, heaviest micro-batch first so that replicas which run in
    lockstep meet equals.  A sequence longer than `max_tokens` gets a micro-batch of its own.
    Raises ValueError when `at_least` exceeds the number of sequences.
    """
    if at_least > len(lengths):
        raise ValueError(f"cannot make {at_least} non-empty micro-batches from {len(lengths)} sequences")
    plan = plan_padded if padded else plan_packed
    parts = [sorted(part) for part in plan(lengths, max_tokens, at_least)]
    return sorted(parts, key=lambda part: -num_rows([lengths[i] for i in part], padded))


def num_rows(lengths: Sequence[int], padded: bool) -> int:
    """Rows of a micro-batch, pads at its end not counted."""
    return max(lengths) * len(lengths) if padded else sum(lengths)


def plan_packed(lengths: Sequence[int], max_tokens: int, at_least: int) -> list[list[int]]:
    """Longest first into the lightest micro-batch (LPT), with as few of them as stay under the cap."""
    count = max(at_least, -(-sum(lengths) // max_tokens), 1)
    while True:
        bins: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
        loads = np.zeros(len(bins), np.int64)
        for index in np.argsort(-np.asarray(lengths), kind="stable"):
            lightest = int(np.argmin(loads))
            bins[lightest].append(int(index))
            loads[lightest] += lengths[index]
        fits = all(load <= max_tokens or len(part) == 1 for load, part in zip(loads, bins, strict=True))
        if fits or len(bins) == len(lengths):
            return bins
        count += 1


def plan_padded(lengths: Sequence[int], max_tokens: int, at_least: int) -> list[list[int]]:
    """Neighbours by length share a micro-batch, so that pads are few; as few and as equal micro-batches as the cap allows."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    sizes = [lengths[index] for index in order]
    count = max(at_least, len(cuts(sizes, max_tokens)))
    lowest_cap = bisect_left(range(max_tokens), -count, key=lambda cap: -len(cuts(sizes, cap)))
    parts = [order[a:b] for a, b in pairwise([*cuts(sizes, lowest_cap), len(order)])]
    while len(parts) < count:
        heaviest = max((part for part in parts if len(part) > 1), key=lambda part: len(part) * lengths[part[0]])
        parts.remove(heaviest)
        half = len(heaviest) // 2
        parts += [heaviest[:half], heaviest[half:]]
    return parts


def cuts(descending: Sequence[int], cap: int) -> list[int]:
    """Where the runs begin into which lengths fall, each filled as far as its first x its size stays under the cap."""
    starts, at = [], 0
    while at < len(descending):
        starts.append(at)
        at += max(1, cap // descending[at])
    return starts


def advantages_of(group: RolloutGroup) -> np.ndarray:
    if group.advantages is None:
        raise ValueError(f"prompt {group.prompt.id}: advantages are missing; call with_advantages first")
    return group.advantages


def rewards_of(group: RolloutGroup) -> np.ndarray:
    """[G]; zeros where advantages came without rewards."""
    return np.zeros(len(group.rollouts)) if group.rewards is None else group.rewards
