"""What replicas send each other, over gloo between threads, against one process that has
everything.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.batch import assignment, transfer
from megatron_rl.batch.advantage import whiten, with_advantages
from megatron_rl.batch.balance import Work, plan_slots
from megatron_rl.batch.codec import ALIGNMENT, encode, from_bytes, to_bytes
from megatron_rl.batch.collectives import all_reduce
from megatron_rl.batch.pack import PackRule, Sample
from megatron_rl.batch.split import gather_rows, make_mini_batch, split
from megatron_rl.batch.transfer import (
    broadcast_bytes,
    decode_samples,
    encode_samples,
    exchange,
    share_groups,
)
from megatron_rl.config import Config, DataConfig, ModelConfig, RunConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.missing_routes import MissingRouteCounts
from megatron_rl.rollout.selection import Replica, divide_prompts, interleave, refill
from tests.thread_ranks import node_ranks, run_thread_ranks
from tests.unit.batch.rollouts import make_groups, make_rollout

CPU = torch.device("cpu")
FIRSTS = [(0, 0, 0), (0, 1, 2), (0, 0, 2), (0, 1, 1), (0, 1, 0)]
"""Nodes of three ranks: one, three, and two of unequal sizes, not always of neighbours."""


def make_samples(count, seed, *, kind="routes"):
    """Rollouts of unequal lengths; kind: with routes, without, or with routes of which some are
    missing.
    """
    samples = []
    for k in range(count):
        rollout = make_rollout(
            f"{seed}/{k}",
            1 + k % 3,
            2 + (5 * k + seed) % 7,
            seed=100 * seed + k,
            routes=kind != "none",
        )
        reason = "length" if k % 2 else "stop"
        missing = (
            np.arange(len(rollout.tokens) - 1) % 3 == 1 if kind == "missing" and k != 1 else None
        )
        rollout = replace(rollout, finish_reason=reason, missing_routes=missing)
        samples.append(Sample(rollout, k / 8 - seed, in_loss=k % 4 != 3))
    return samples


def fields_of_sample(sample):
    """Everything in a sample, to compare."""
    return (sample.advantage, sample.in_loss, *fields_of(sample.rollout))


def fields_of(r):
    optional = [
        None if a is None else (a.tolist(), a.dtype) for a in (r.routed_experts, r.missing_routes)
    ]
    arrays = [(a.tolist(), a.dtype) for a in (r.tokens, r.rollout_logprobs, r.policy_versions)]
    return r.id, r.prompt_length, r.finish_reason, r.routes_digest, *arrays, *optional


@pytest.mark.parametrize("kind", ["routes", "none", "missing"])
def test_samples_are_unchanged_by_encoding(kind):
    samples = make_samples(5, 1, kind=kind)
    data = encode_samples(samples)
    assert data.dtype == np.uint8 and len(data) % ALIGNMENT == 0
    assert [fields_of_sample(s) for s in decode_samples(data)] == [
        fields_of_sample(s) for s in samples
    ]
    assert decode_samples(encode_samples([])) == []
    assert all(
        r.rollout.tokens.ctypes.data % 8 == data.ctypes.data % 8 for r in decode_samples(data)
    ), "arrays are aligned"


@pytest.mark.parametrize("kind", ["routes", "none", "missing"])
def test_every_sample_arrives_at_its_replica_in_its_owners_order(kind):
    rng = np.random.default_rng(0)
    owned = [make_samples(count, seed, kind=kind) for seed, count in enumerate((6, 0, 3))]
    to = [rng.integers(0, 3, len(samples)).tolist() for samples in owned]
    to[0][:3] = [1, 1, 0]

    def send(group, rank):
        return [
            [fields_of_sample(s) for s in those] for those in exchange(owned[rank], to[rank], group)
        ]

    for rank, arrived in enumerate(run_thread_ranks(send, 3)):
        for owner in range(3):
            assert arrived[owner] == [
                fields_of_sample(s)
                for s, at in zip(owned[owner], to[owner], strict=True)
                if at == rank
            ]
    assert exchange(owned[0], to[0], None) == [owned[0]]
    assert run_thread_ranks(lambda group, _: exchange(owned[0], to[0], group), 1) == [[owned[0]]]


def test_rows_of_all_replicas_are_in_their_order():
    rows = [[5, 3], [], [8, 1, 2]]
    for counts, everyone in run_thread_ranks(lambda group, rank: gather_rows(rows[rank], group), 3):
        assert (
            counts == [2, 0, 3]
            and everyone.tolist() == [5, 3, 8, 1, 2]
            and everyone.dtype == np.int64
        )
    counts, alone = gather_rows(rows[0], None)
    assert counts == [2] and alone.tolist() == [5, 3]


def test_integers_are_summed_or_the_largest_taken():
    for op, expected in ((dist.ReduceOp.SUM, [3, 3]), (dist.ReduceOp.MAX, [2, 2])):
        got = run_thread_ranks(lambda group, rank: all_reduce([rank, 2 - rank], op, group), 3)  # noqa: B023
        assert all(found.tolist() == expected and found.dtype == np.int64 for found in got)
    assert all_reduce(np.array([4]), dist.ReduceOp.MAX, None).tolist() == [4]
    assert all_reduce([0.5], dist.ReduceOp.SUM, None).dtype == np.float64


@pytest.mark.parametrize(
    "settings",
    [{}, {"equal_sizes": True, "pad_multiple": 4}, {"equal_sizes": True, "padded": True}],
)
@pytest.mark.parametrize("masks", [False, True])
def test_a_mini_batch_of_three_replicas_has_every_sample_once(settings, masks):
    """Each with its own advantage and mask; counts are global; micro-batches side by side are equal
    where required.
    """
    owned = [make_samples(count, seed, kind="missing") for seed, count in enumerate((9, 4, 6))]
    rule = PackRule(balance_length=20, mask_missing_routes=masks, **settings)

    def deal(group, rank):
        return make_mini_batch(owned[rank], max_tokens=30, rule=rule, dp_group=group)

    batches = run_thread_ranks(deal, 3)
    samples = {s.rollout.id: s for those in owned for s in those}
    learned = [s.rollout.response_length for s in samples.values() if s.in_loss]
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    if settings:
        for slot in zip(*(batch.micro_batches for batch in batches), strict=True):
            assert len({micro.num_tokens for micro in slot}) == 1
    found = []
    for batch in batches:
        assert (batch.num_responses, batch.num_response_tokens) == (len(learned), sum(learned))
        assert (
            0.5 < batch.lockstep_efficiency <= 1
            and batch.lockstep_efficiency == batches[0].lockstep_efficiency
        )
        for micro, parts in zip(batch.micro_batches, batch.samples, strict=True):
            assert micro.num_tokens <= 30 or len(micro.rollout_ids) == 1 or settings
            for index, name in enumerate(micro.rollout_ids):
                own, sample = micro.sequence_ids == index, samples[name]
                found.append(name)
                assert micro.tokens[own].tolist() == sample.rollout.tokens.tolist()
                routes = parts[index].rollout.routed_experts
                assert routes.tolist() == sample.rollout.routed_experts.tolist()
                missing = sample.rollout.missing_routes
                gone = (
                    0
                    if not masks or missing is None
                    else int(missing[sample.rollout.prompt_length - 1 :].sum())
                )
                learns = (sample.rollout.response_length - gone) * sample.in_loss
                assert int(micro.loss_mask[own].sum()) == learns
                assert set(micro.advantages[own & micro.loss_mask].tolist()) <= {
                    np.float32(sample.advantage)
                }
    assert sorted(found) == sorted(samples)


def test_a_mini_batch_without_responses_in_the_loss_divides_by_one():
    samples = [replace(s, in_loss=False) for s in make_samples(3, 0)]
    batch = make_mini_batch(samples, max_tokens=100, rule=PackRule(), dp_group=None)
    assert (batch.num_responses, batch.num_response_tokens) == (1, 1)


# Sharing inside a replica -------------------------------------------------------------------------


@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("firsts", FIRSTS)
def test_the_leaders_groups_reach_every_rank(routes, firsts):
    groups = [replace(g, advantages=None) for g in make_groups(3, 2, routes=routes)]
    prompts = [group.prompt for group in groups]

    def share(group, rank):
        node = node_ranks(group, firsts)
        return share_groups(groups if rank == 0 else None, prompts, node)

    expected = [[fields_of(r) for r in g.rollouts] for g in groups]
    for shared in run_thread_ranks(share, 3):
        assert [[fields_of(r) for r in g.rollouts] for g in shared] == expected
        assert [g.rewards.tolist() for g in shared] == [g.rewards.tolist() for g in groups]
        assert [g.prompt for g in shared] == prompts
    assert run_thread_ranks(lambda g, _: share_groups(groups, prompts, node_ranks(g, (0,))), 1) == [
        groups
    ]


def test_groups_are_unchanged_by_encoding():
    """More than 256 experts (int16), missing routes, responses truncated at the limit."""
    groups = []
    for group in make_groups(2, 3):
        rollouts = [
            replace(
                r, routed_experts=r.routed_experts.astype(np.int16) + 300, routes_digest=None,
                finish_reason="length",
                missing_routes=np.arange(len(r.tokens) - 1) == 0 if k else None,
            )
            for k, r in enumerate(group.rollouts)
        ]  # fmt: skip
        groups.append(RolloutGroup(group.prompt, tuple(rollouts), group.rewards))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    again, _ = from_bytes(to_bytes(rollouts))
    assert [fields_of(r) for r in again] == [fields_of(r) for r in rollouts]


def test_bytes_are_broadcast_in_chunks(monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 7)
    sent = []
    broadcast = dist.broadcast
    monkeypatch.setattr(
        dist, "broadcast", lambda t, **where: (sent.append(t.nbytes), broadcast(t, **where))
    )
    rollouts = [make_rollout(str(k), 2, 3 + k) for k in range(3)]
    data = to_bytes(rollouts)
    _, file = run_thread_ranks(
        lambda g, rank: broadcast_bytes(None if rank else encode(rollouts), g), 2
    )
    assert np.array_equal(file.array(0, np.uint8, data.shape), data)
    assert max(sent) == 8, "the size, then chunks of 7 bytes"


@pytest.mark.parametrize("is_copied", [False, True])
def test_samples_are_exchanged_in_rounds(is_copied, monkeypatch):
    """Of at most CHUNK_BYTES on the device; also through another device, here other memory of the
    CPU.
    """
    samples = [make_samples(count, seed) for seed, count in enumerate((5, 0, 3))]
    to = [[0, 1, 2, 1, 1], [], [2, 1, 0]]

    def deal(group, rank):
        return [
            [fields_of_sample(s) for s in part] for part in exchange(samples[rank], to[rank], group)
        ]

    expected = run_thread_ranks(deal, 3)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)
    sent = []
    all_to_all = dist.all_to_all_single
    monkeypatch.setattr(
        dist, "all_to_all_single", lambda out, data, *sizes, **on: (sent.append(data.nbytes),
        all_to_all(out, data, *sizes, **on))
    )  # fmt: skip
    if is_copied:
        monkeypatch.setattr(torch.Tensor, "to", lambda self, _: self.clone())
    assert run_thread_ranks(deal, 3) == expected
    assert len(sent) > 6 and max(sent) <= 100
    assert max(sent) == 100, (
        "two of three replicas share a round's bytes, as no rank sends to or receives from more"
    )


# Advantages over the batch ------------------------------------------------------------------------


def test_whitening_over_replicas_is_that_of_all_values():
    rng = np.random.default_rng(0)
    values = [rng.normal(1e4, 3, size) for size in (4, 7, 2)]
    weights = [rng.integers(0, 5, size).astype(float) for size in (4, 7, 2)]
    got = np.concatenate(
        [part for (part,) in run_thread_ranks(lambda g, r: whiten([values[r]], [weights[r]], g), 3)]
    )
    flat, weight = np.concatenate(values), np.concatenate(weights)
    mean = np.average(flat, weights=weight)
    std = np.average((flat - mean) ** 2, weights=weight) ** 0.5
    np.testing.assert_allclose(got, (flat - mean) / (std + 1e-6), rtol=1e-9)


@pytest.mark.parametrize("kind", ["batch_whitened", "centred_batch_whitened"])
def test_whitened_advantages_weigh_responses_by_their_tokens(kind):
    """Repeated token by token, the values of all replicas have mean 0 and deviation 1; a response
    without reward has none.
    """
    groups = make_groups(6, 4)
    groups[1] = replace(groups[1], rewards=np.array([1.0, np.nan, 0.0, 3.0], np.float32))
    parts = run_thread_ranks(lambda g, rank: with_advantages(groups[rank::2], kind, g), 2)
    done = [group for part in parts for group in part]
    pairs = [
        (a, r.response_length)
        for group in done
        for a, r, reward in zip(group.advantages, group.rollouts, group.rewards, strict=True)
        if not np.isnan(reward)
    ]
    every_token = np.repeat([a for a, _ in pairs], [n for _, n in pairs])
    assert abs(every_token.mean()) < 1e-6 and every_token.std() == pytest.approx(1, abs=1e-4)
    (gone,) = [group.advantages[1] for group in done if np.isnan(group.rewards).any()]
    assert gone == 0
    rewards = np.array(
        [r for g in done for r in g.rewards - (np.nanmean(g.rewards) if kind[0] == "c" else 0)]
    )
    known = ~np.isnan(rewards)
    order = np.argsort(rewards[known], kind="stable")
    assert (np.diff(np.concatenate([g.advantages for g in done])[known][order]) >= -1e-6).all()


# Which prompts stay -------------------------------------------------------------------------------


def prompts_of(count, start=0):
    return [Prompt(f"p{start + i}", "", (i,), "") for i in range(count)]


def test_over_sampling_every_rank_gets_what_leaders_kept():
    prompts = prompts_of(9)
    kept = [[True, False, True], [True, True, False], [False, True, True]]

    def tell(group, rank):  # ranks 3 to 5 follow a leader each
        is_leader = rank < 3
        replica = Replica(rank % 3, 3, CPU)
        return divide_prompts(prompts, kept[rank] if is_leader else None, replica)

    for chosen, others in run_thread_ranks(tell, 6):
        assert [[p.id for p in mine] for mine in chosen] == [
            ["p0", "p6"],
            ["p1", "p4"],
            ["p5", "p8"],
        ]
        assert [p.id for p in interleave(chosen)] == ["p0", "p1", "p5", "p6", "p4", "p8"]
        assert [p.id for p in interleave(others)] == ["p3", "p7", "p2"]
    assert interleave([[1, 2], [3, 4]]) == [1, 3, 2, 4]


class Source:
    """Groups whose rewards differ where the prompt's number is not in `uniform`; every rank draws
    the same.
    """

    def __init__(self, uniform, rank, dp_size, is_leader):
        self.uniform, self.rank, self.dp_size, self.is_leader = uniform, rank, dp_size, is_leader
        self.next, self.asked = 0, []

    def __call__(self, count):
        prompts = prompts_of(count, self.next)
        self.next += count
        self.asked.append(count)
        mine = prompts[self.rank :: self.dp_size] if self.is_leader else []
        rollouts = tuple(make_rollout("r", 1, 2, seed=k) for k in range(2))
        return prompts, [
            RolloutGroup(
                p, rollouts, np.array([0.0, float(int(p.id[1:]) not in self.uniform)], np.float32)
            )
            for p in mine
        ]


@pytest.mark.parametrize(
    ("uniform", "max_rounds", "ids", "asked", "sampled"),
    [
        ((), 3, ["p0", "p1", "p2", "p3"], [4], 4),
        # replica 0 lacks two, replica 1 one: both draw two
        ((0, 2, 3), 3, ["p4", "p1", "p6", "p5"], [4, 4], 8),
        ((0, 2, 3), 0, ["p0", "p1", "p2", "p3"], [4], 4),  # filled with equal rewards
        ((0, 1, 2, 3, 4, 6), 2, ["p8", "p5", "p10", "p7"], [4, 4, 4], 12),
        ((0, 1, 2, 3, 4, 6), 1, ["p0", "p5", "p2", "p7"], [4, 4], 8),
    ],
)
def test_dynamic_sampling_refills_every_replica_equally(uniform, max_rounds, ids, asked, sampled):
    """Two replicas of two ranks, of which the first is the leader; informative groups first, in the
    order they came.
    """

    def fill(group, rank):
        source = Source(uniform, rank % 2, 2, rank < 2)
        prompts, groups = source(4)
        done = refill(
            prompts, groups, source, Replica(rank % 2, 2, CPU), is_leader=rank < 2,
            max_rounds=max_rounds,
        )  # fmt: skip
        return done, source.asked

    for rank, (done, counts) in enumerate(run_thread_ranks(fill, 4)):
        assert [p.id for p in done.prompts] == ids and counts == asked
        assert (done.rounds, done.sampled) == (len(asked) - 1, sampled)
        assert [g.prompt.id for g in done.groups] == (ids[rank::2] if rank < 2 else [])


# A plan's evenness, and what counts before anything is counted ------------------------------------


def test_slots_share_the_work_and_the_last_takes_the_rest():
    for count in (24, 96):
        work = Work([10] * count, 1000, 100)
        slots = plan_slots(work, 2, count_multiple=3)
        costs = [work.cost(part) for slot in slots for part in slot]
        assert len(slots) == 3 and max(costs) <= 1.3 * sum(costs) / 6 + work.cost([0])
    (last,) = plan_slots(Work([10] * 3, 1000, 100), 2)
    assert sorted(map(len, last)) == [1, 2]


def test_counts_of_missing_routes_start_at_zero():
    assert MissingRouteCounts().values() == (0,) * 6


def test_advantages_without_rewards_are_in_the_loss():
    groups = [replace(group, rewards=None) for group in make_groups(2, 3)]
    config = Config(
        model=ModelConfig(path="m"), data=DataConfig(train="d"), run=RunConfig(num_mini_batches=1)
    )
    (batch,) = split(groups, config, seed=0, rule=PackRule(), dp_group=None)
    assert batch.num_responses == 6


# Two replicas, two ranks of one -------------------------------------------------------------------


def test_two_replicas_balance_and_report_the_efficiency():
    """Both sequences are of replica 0; replica 1 computes one of them."""
    samples = [Sample(make_rollout(f"r{n}", 2, n - 2), 1.0) for n in (10, 20)]

    def deal(group, rank):
        rule = PackRule(balance_length=30)
        batch = make_mini_batch([] if rank else samples, max_tokens=20, rule=rule, dp_group=group)
        return [micro.rollout_ids for micro in batch.micro_batches], batch.lockstep_efficiency

    (first, efficiency), (second, same) = run_thread_ranks(deal, 2)
    assert sorted(first + second) == [("r10",), ("r20",)]
    assert efficiency == same == pytest.approx((10 * 40 + 20 * 50) / (2 * 20 * 50))


def test_where_pads_are_shared_replicas_are_one_pod(monkeypatch):
    owned = [make_samples(count, seed) for seed, count in enumerate((9, 4))]
    rule = PackRule(balance_length=20, padded=True, equal_sizes=True)

    def deal(group, rank):
        batch = make_mini_batch(owned[rank], max_tokens=30, rule=rule, dp_group=group)
        return [micro.rollout_ids for micro in batch.micro_batches]

    expected = run_thread_ranks(deal, 2)
    for name in ("POD", "LEAST_POD"):
        monkeypatch.setattr(assignment, name, 1)
    assert run_thread_ranks(deal, 2) == expected


def test_a_leader_of_two_keeps_its_own_groups():
    """With their texts, which are not sent."""
    groups = [
        replace(g, rollouts=tuple(replace(r, response_text="x") for r in g.rollouts))
        for g in make_groups(2, 2)
    ]
    prompts = [group.prompt for group in groups]

    def share(group, rank):
        return share_groups(groups if rank == 0 else None, prompts, node_ranks(group, (0, 0)))

    own, sent = run_thread_ranks(share, 2)
    assert {r.response_text for g in own for r in g.rollouts} == {"x"}
    assert [[fields_of(r) for r in g.rollouts] for g in own] == [
        [fields_of(r) for r in g.rollouts] for g in groups
    ]
    assert [[fields_of(r) for r in g.rollouts] for g in sent] == [
        [fields_of(r) for r in g.rollouts] for g in groups
    ]
    assert len(encode_samples([])) == 0, "no bytes for no samples"


def test_sums_are_over_the_group_that_is_given(monkeypatch):
    """Not over the default group, which is the same one in threads."""
    given, asked = SimpleNamespace(size=lambda: 2), []
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None, group=None: asked.append(group))
    all_reduce([1.0], dist.ReduceOp.SUM, given)
    assert asked == [given]
