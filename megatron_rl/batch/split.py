"""The division of groups into N mini-batches, and of these into micro-batches under a token cap,
the same number on every data-parallel replica.

assignment.py and balance.py choose the micro-batch and the replica of every sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.assignment import Plan, make_plan
from megatron_rl.batch.balance import Work
from megatron_rl.batch.collectives import all_reduce, all_reduce_ints
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.batch.transfer import exchange
from megatron_rl.config import Config
from megatron_rl.distributed.node_ranks import NodeRanks
from megatron_rl.records import RolloutGroup, check_episode
from megatron_rl.records.packed import MiniBatch


def split(
    groups: Sequence[RolloutGroup],
    config: Config,
    *,
    seed: int,
    rule: PackRule,
    dp_group: dist.ProcessGroup | None,
    save_tokens: Collection[int] = (),
    policy_version: int | None = None,
    node: NodeRanks | None = None,
) -> list[MiniBatch]:
    """Split this replica's groups into N mini-batches of packed micro-batches.

    All responses to a prompt are in one mini-batch, and every response is used exactly once; the
    partition is a permutation seeded with (run.seed, `seed`).  Responses without a reward (NaN:
    reward.on_error = drop) are left out of the loss and its denominators; with
    batch.filter_truncated also responses cut off at the length limit (DAPO's overlong filtering).
    save_tokens: indices of the groups whose token data is written, on whatever replica they are
    trained.
    policy_version: see MiniBatch.
    node: the ranks that share memory, see exchange.
    Collective over `dp_group` (None: a single replica).
    """
    run = config.run
    if len(groups) % run.num_mini_batches:
        raise ValueError(
            f"this replica has {len(groups)} prompt groups for run.num_mini_batches ="
            f" {run.num_mini_batches}; run.prompts_per_step must be a multiple of num_mini_batches"
            " times the data-parallel size"
        )
    # NumPy's generator of its own: the draw depends on both seeds alone
    order = np.random.default_rng([run.seed, seed]).permutation(len(groups))
    replica = 0 if dp_group is None else dp_group.rank()
    batches = []
    for number, part in enumerate(np.array_split(order, run.num_mini_batches)):
        samples = [
            replace(sample, sampled_by=replica, save_tokens=int(index) in save_tokens)
            for index in part
            for sample in make_samples(groups[index], config.batch.filter_truncated)
        ]
        batch = make_mini_batch(
            samples,
            max_tokens=run.max_tokens_per_micro_batch,
            rule=rule,
            dp_group=dp_group,
            node=node,
        )
        batches.append(replace(batch, index=number, policy_version=policy_version))
    return batches


def make_mini_batch(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    rule: PackRule,
    dp_group: dist.ProcessGroup | None,
    node: NodeRanks | None = None,
) -> MiniBatch:
    """Assign the sequences of all replicas' samples to micro-batches of equal work side by side,
    send them to their replicas, and pack those of this one.  Collective over `dp_group`.

    Raises ValueError where there are too few samples for the number of micro-batches.
    """
    num_replicas, replica = (1, 0) if dp_group is None else (dp_group.size(), dp_group.rank())
    # one sum: a vector with an entry per replica, which gathers the counts, and the tokens
    lengths = [sample.length for sample in samples if sample.in_loss]
    sizes = [len(lengths) * (other == replica) for other in range(num_replicas)]
    *sizes, num_response_tokens = all_reduce_ints(
        [*sizes, sum(lengths)], dist.ReduceOp.SUM, dp_group
    )
    num_responses = sum(sizes)
    # an episode of several sequences is one response, whose sequences have one number
    episodes = numbered(samples, sum(sizes[:replica]))
    samples = [sequence for episode in episodes for sequence in sequences_of(episode)]
    counts, rows = gather_rows(
        [rule.sequence_rows(len(sample.rollout.tokens)) for sample in samples], dp_group
    )
    try:
        plan, work = make_job_plan(counts, rows, max_tokens, rule, dp_group)
    except ValueError:  # the same on every rank
        multiple = num_replicas * rule.count_multiple
        # copies help only where the number of sequences does not divide
        if len(rows) < multiple or len(rows) % multiple == 0:
            raise
        samples, counts, rows = with_copies(samples, counts, rows, replica, -len(rows) % multiple)
        plan, work = make_job_plan(counts, rows, max_tokens, rule, dp_group)
    start = sum(counts[:replica])  # this replica's first sequence in the job's order
    destinations = plan.destinations(slice(start, start + len(samples)))
    arrived = exchange(samples, destinations, dp_group, node)
    parts = plan.micro_batches(replica)
    # samples arrive in the job's order: replica by replica, and in its order from each
    indices = sorted(i for part in parts for i in part)
    sample_of = dict(zip(indices, chain.from_iterable(arrived), strict=True))
    micro_batches, chosen = [], []
    for number, part in enumerate(parts):
        others = plan.side_by_side(number) if rule.equal_sizes else []
        beside = [rows[other].tolist() for other in others]
        part_rows = rule.rows(rows[part].tolist(), beside=beside)
        chosen.append(tuple(sample_of[i] for i in part))
        micro_batches.append(
            pack(chosen[-1], part_rows, mask_missing_routes=rule.mask_missing_routes)
        )
    # at least 1: a loss without responses is 0, and must not become NaN by a division by 0
    return MiniBatch(
        tuple(micro_batches),
        num_responses=max(num_responses, 1),
        num_response_tokens=max(num_response_tokens, 1),
        lockstep_efficiency=plan.lockstep_efficiency(work),
        samples=tuple(chosen),
    )


def sequences_of(sample: Sample) -> list[Sample]:
    """Return the sequences of the rollout, which is one response however many they are."""
    if not sample.rollout.episode.earlier:
        return [sample]
    return [
        replace(sample, rollout=sequence, episode_length=sample.length)
        for sequence in sample.rollout.sequences
    ]


def batch_without_routes(batch: MiniBatch) -> MiniBatch:
    """Return the mini-batch without expert ids, for observers of a pass."""
    return replace(
        batch,
        samples=tuple(
            tuple(replace(sample, rollout=sample.rollout.without_routes) for sample in part)
            for part in batch.samples
        ),
    )


def numbered(samples: Sequence[Sample], first: int) -> Iterator[Sample]:
    """Yield the samples; those in the loss get the numbers from `first` on as their `response`."""
    numbers = count(first)
    for sample in samples:
        # a sequence of a saved mini-batch keeps its number, because its response may have several
        # sequences
        is_new = sample.in_loss and sample.episode_length is None
        yield replace(sample, response=next(numbers)) if is_new else sample


def make_job_plan(
    counts: Sequence[int],
    rows: np.ndarray,
    max_tokens: int,
    rule: PackRule,
    dp_group: dist.ProcessGroup | None,
) -> tuple[Plan, Work]:
    """Return the plan of all replicas' sequences, and the work that it divides.

    counts, rows: the result of gather_rows.  Collective over `dp_group`.  Raises ValueError, on
    every rank, where no plan exists.
    """
    work = Work(rows, max_tokens, rule.balance_length, padded=rule.padded)
    plan = make_plan(
        work,
        np.repeat(np.arange(len(counts)), counts),
        len(counts),
        0 if dp_group is None else dp_group.rank(),
        lambda values, op: all_reduce(values, op, dp_group),
        count_multiple=rule.count_multiple,
        equal_sizes=rule.equal_sizes,
    )
    return plan, work


def with_copies(
    samples: Sequence[Sample], counts: Sequence[int], rows: np.ndarray, replica: int, number: int
) -> tuple[list[Sample], list[int], np.ndarray]:
    """Return (samples, counts, rows) with `number` copies of the job's shortest sequence, at the
    end of the sequences of its owner.  replica: the one of this rank.

    Episodes have any number of sequences: where no two fit into one micro-batch, some replicas
    would have fewer micro-batches than others.  A copy is computed and not learned from; all its
    rows route live, so that no metric counts them.
    """
    shortest, ends = int(rows.argmin()), np.cumsum(counts)
    owner = int(np.searchsorted(ends, shortest, side="right"))
    samples = list(samples)
    if owner == replica:
        sample = samples[shortest - int(ends[owner])]  # negative: counted from the end
        no_routes = np.ones(len(sample.rollout.tokens) - 1, bool)
        copy = replace(
            sample,
            rollout=replace(sample.rollout, missing_routes=no_routes),
            in_loss=False,
            episode_length=0,  # marks the copy (Sample.is_copy)
            save_tokens=False,
            response=None,
        )
        samples += [copy] * number
    counts = [count + number * (other == owner) for other, count in enumerate(counts)]
    return samples, counts, np.insert(rows, int(ends[owner]), [rows[shortest]] * number)


def gather_rows(
    rows: Sequence[int], group: dist.ProcessGroup | None
) -> tuple[list[int], np.ndarray]:
    """Return (the number of sequences of every replica, the rows int64 [N] of all sequences, in the
    order of the replicas).  Collective over `group`.
    """
    if group is None or group.size() == 1:
        return [len(rows)], np.array(rows, np.int64)
    sizes = [len(rows) * (replica == group.rank()) for replica in range(group.size())]
    counts = all_reduce_ints(sizes, dist.ReduceOp.SUM, group)
    start = sum(counts[: group.rank()])
    # a sum of disjoint parts is a gather of unequal sizes
    all_rows = np.zeros(sum(counts), np.int64)
    all_rows[start : start + len(rows)] = rows
    return counts, all_reduce(all_rows, dist.ReduceOp.SUM, group)


def make_samples(group: RolloutGroup, filter_truncated: bool) -> Iterator[Sample]:
    """Yield the responses of one prompt as samples with their advantages.

    Filtered responses and responses without a reward are not in the loss.  Raises ValueError where
    the group has no advantages.
    """
    if group.advantages is None:
        raise ValueError(
            f"prompt {group.prompt.id}: advantages are missing; call with_advantages first"
        )
    zeros = np.zeros(len(group.rollouts))
    rewards = zeros if group.rewards is None else group.rewards
    betas = zeros if group.teacher_weights is None else group.teacher_weights
    for rollout, advantage, reward, beta in zip(
        group.rollouts, group.advantages, rewards, betas, strict=True
    ):
        is_filtered = filter_truncated and rollout.finish_reason == "length"
        yield Sample(
            check_episode(rollout),
            float(advantage),
            in_loss=not is_filtered and not np.isnan(reward),
            teacher_weight=float(beta),
        )
