"""Groups -> N mini-batches -> micro-batches under a token cap, the same number on every data-parallel replica.

With expert parallelism the all-to-all of every layer spans data-parallel replicas, so replicas move in lockstep, one
micro-batch at a time: an unequal count would hang the job, and unequal sizes make the fast ones wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.pack import Sample, pack
from megatron_rl.records import MiniBatch, RolloutGroup


def split(
    groups: Sequence[RolloutGroup],
    *,
    num_mini_batches: int,
    max_tokens: int,
    seed: int,
    pad_multiple: int,
    dp_group: dist.ProcessGroup | None,
) -> list[MiniBatch]:
    """Split this replica's groups into N mini-batches of packed micro-batches.

    Whole prompt groups stay together; every response is used exactly once; the fixed partition is a permutation
    seeded with `seed`.  Collective over `dp_group` (None: a single replica).
    """
    if len(groups) % num_mini_batches:
        raise ValueError(
            f"this replica has {len(groups)} prompt groups for run.num_mini_batches = {num_mini_batches}; "
            "run.prompts_per_step must be a multiple of num_mini_batches times the data-parallel size"
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    batches = []
    for part in np.array_split(order, num_mini_batches):
        samples = [
            Sample(rollout, float(advantage))
            for index in part
            for rollout, advantage in zip(groups[index].rollouts, advantages_of(groups[index]), strict=True)
        ]
        batches.append(make_mini_batch(samples, max_tokens=max_tokens, pad_multiple=pad_multiple, dp_group=dp_group))
    return batches


def make_mini_batch(
    samples: Sequence[Sample], *, max_tokens: int, pad_multiple: int, dp_group: dist.ProcessGroup | None
) -> MiniBatch:
    """Pack samples into micro-batches; counts are agreed over `dp_group`."""
    lengths = [len(sample.rollout.tokens) for sample in samples]
    num_tokens = sum(sample.rollout.response_length for sample in samples)
    needed = len(plan_micro_batches(lengths, max_tokens))
    totals = torch.tensor([len(samples), num_tokens], dtype=torch.int64)
    most = torch.tensor([needed], dtype=torch.int64)
    if dp_group is not None and dp_group.size() > 1:
        device = torch.device("cuda") if dist.get_backend(dp_group) == "nccl" else torch.device("cpu")
        totals, most = totals.to(device), most.to(device)
        dist.all_reduce(totals, group=dp_group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dp_group)
    plan = plan_micro_batches(lengths, max_tokens, at_least=int(most))
    micro_batches = tuple(pack([samples[i] for i in part], pad_multiple=pad_multiple) for part in plan)
    return MiniBatch(micro_batches, num_responses=int(totals[0]), num_response_tokens=int(totals[1]))


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """Assign sequences to micro-batches: longest first into the lightest one with room (LPT under a token cap).

    Returns lists of indices, each non-empty and ascending, heaviest micro-batch first so that replicas which run in
    lockstep meet equals.  A sequence longer than `max_tokens` gets a micro-batch of its own.
    Raises ValueError when `at_least` exceeds the number of sequences.
    """
    if at_least > len(lengths):
        raise ValueError(f"cannot make {at_least} non-empty micro-batches from {len(lengths)} sequences")
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
            heaviest_first = np.argsort(-loads, kind="stable")
            return [sorted(bins[i]) for i in heaviest_first]
        count += 1


def advantages_of(group: RolloutGroup) -> np.ndarray:
    if group.advantages is None:
        raise ValueError(f"prompt {group.prompt.id}: advantages are missing; call with_advantages first")
    return group.advantages
