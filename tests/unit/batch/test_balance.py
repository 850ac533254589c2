import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch import balance
from megatron_rl.batch.assignment import LEAST_POD, POD, Plan, make_plan, plan_of, pod_size
from megatron_rl.batch.balance import Work, assign, fill_slot, plan_padded, plan_slots
from megatron_rl.batch.locality import assign_pods
from megatron_rl.batch.pack import Sample
from megatron_rl.batch.transfer import decode_samples, encode_samples
from tests.unit.batch.rollouts import make_rollout


def used(slots):
    return sorted(i for slot in slots for part in slot for i in part)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(10, 200),
    st.integers(0, 100),
    st.booleans(),
)
def test_every_sequence_once_under_the_cap_and_none_empty(
    share, replicas, multiple, cap, balance_length, padded
):
    # a multiple of replicas x multiple, so that a plan always exists
    rows = (share * replicas * multiple)[::-1]
    work = Work(rows, cap, balance_length, padded)
    slots = plan_slots(work, replicas, count_multiple=multiple)
    assert used(slots) == list(range(len(rows)))
    assert len(slots) % multiple == 0
    for slot in slots:
        assert len(slot) == replicas and all(slot)
        for part in slot:
            size = len(part) * max(rows[i] for i in part) if padded else sum(rows[i] for i in part)
            assert size <= cap or len(part) == 1
    costliest = [max(work.cost(part) for part in slot) for slot in slots]
    assert costliest == sorted(costliest, reverse=True)
    assert len(slots) * replicas * cap >= sum(rows) or max(rows) > cap


def all_plans(items):
    """Every way to put the items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for plan in all_plans(rest):
        yield [[first], *plan]
        for index in range(len(plan)):
            yield [*plan[:index], [first, *plan[index]], *plan[index + 1 :]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(10, 120))
def test_a_padded_plan_has_as_few_micro_batches_as_any(lengths, cap):
    slots = plan_slots(Work(lengths, cap, 100, padded=True), 1)
    fits = [
        len(other)
        for other in all_plans(lengths)
        if all(len(part) * max(part) <= cap or len(part) == 1 for part in other)
    ]
    assert len(slots) == min(fits)


def test_padded_micro_batches_have_similar_lengths_and_equal_sizes():
    lengths = [10, 100, 11, 101, 12, 102, 13, 103]
    slots = plan_slots(Work(lengths, 250, 0, padded=True), 1)
    assert [sorted(lengths[i] for i in part) for (part,) in slots] == [
        [102, 103],
        [100, 101],
        [10, 11, 12, 13],
    ]
    (parts,) = plan_slots(Work([7] * 9, 1000, 0, padded=True), 3)
    assert [len(part) for part in parts] == [3, 3, 3]


def test_a_slot_leaves_the_shortest_for_later_slots():
    slot, left = fill_slot(Work([10] * 6, 1000, 0), [100] * 6, range(6), 1, 10**9, keep=3)
    assert (slot, left) == ([[0, 1, 2]], [3, 4, 5])


def test_the_remainder_goes_where_it_just_fits():
    (slot,) = plan_slots(Work([10] * 3, 20, 0, padded=True), 2)
    assert sorted(map(len, slot)) == [1, 2]
    with pytest.raises(ValueError, match="3 sequences do not fit"):
        plan_slots(Work([10] * 3, 19, 0, padded=True), 2)
    assert len(plan_slots(Work([10] * 4, 20, 0), 1)) == 2, "two fill the cap"


def test_too_few_sequences_are_refused():
    with pytest.raises(
        ValueError, match="6 non-empty micro-batches from 5 sequences: 2 for each of 3"
    ):
        plan_slots(Work([4] * 5, 100, 0), 3, count_multiple=2)
    with pytest.raises(
        ValueError, match=r"5 sequences do not fit into 2 micro-batches of 10 rows on each of 2"
    ):
        plan_slots(Work([9] * 5, 10, 0), 2)


def test_sequences_above_half_of_the_cap_are_counted_before_plans_are_tried(monkeypatch):
    """Every plan takes a tenth of a second, and most responses may end at half of the cap."""
    tried, plan = [], balance.plan_packed
    monkeypatch.setattr(
        balance,
        "plan_packed",
        lambda work, count, *rest: tried.append(count) or plan(work, count, *rest),
    )
    slots = plan_slots(Work([51] * 60 + [10] * 40, 100, 0), 2)
    assert tried == [30] == [len(slots)]


def drawn_lengths(kind, seed):
    """1,024 lengths, lognormal, at most 32,768; kind "capped": 12 % of them there."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(np.log(4000), 1.0, 1024), 32_768).astype(int) + 1
    return (
        np.where(rng.random(1024) < 0.12, 32_768, lengths).tolist()
        if kind == "capped"
        else lengths.tolist()
    )


@pytest.mark.parametrize(("replicas", "least"), [(8, 0.985), (32, 0.95)])
@pytest.mark.parametrize("kind", ["lognormal", "capped"])
def test_replicas_rarely_wait_for_each_other(kind, replicas, least):
    for seed in range(3):
        work = Work(drawn_lengths(kind, seed), 32_768, 16_800)
        slots = plan_slots(work, replicas)
        assert plan_of(slots).lockstep_efficiency(work) >= least
        full = sum(work.rows) / (len(slots) * replicas * work.max_rows)
        assert full >= 0.85, "and not by many small micro-batches"


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=24), st.integers(1, 4), st.randoms())
def test_assignment_changes_only_the_replica(rows, replicas, random):
    slots = plan_slots(Work(rows * replicas, 200, 10), replicas)
    owners = [random.randrange(replicas) for _ in rows * replicas]
    given_out = assign(slots, owners, rows * replicas, replicas)
    for slot, dealt in zip(slots, given_out, strict=True):
        assert sorted(map(sorted, slot)) == sorted(dealt)


# Many replicas: pods ------------------------------------------------------------------------------


def plans_of(work, owners, replicas, *, count_multiple=1):
    """make_plan on every replica, in threads with a real barrier; what each returned or raised."""
    barrier, brought, agreed = threading.Barrier(replicas, timeout=20), [], []

    def all_reduce(values, op):
        brought.append(values)
        if barrier.wait() == 0:
            agreed.append(np.max(brought, 0) if op == dist.ReduceOp.MAX else np.sum(brought, 0))
            brought.clear()
        barrier.wait()
        return agreed[-1]

    def plan(own):
        try:
            return make_plan(work, owners, replicas, own, all_reduce, count_multiple=count_multiple)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(plan, range(replicas)))


def make_owners(count, replicas):
    return np.arange(count) * replicas // count


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("replicas", "multiple"), [(64, 1), (40, 2), (48, 4)])
def test_pods_agree_on_one_plan_with_every_sequence_once(replicas, multiple, padded):
    assert LEAST_POD <= pod_size(replicas) < replicas
    rows = np.random.default_rng(replicas).integers(1, 400, 8 * replicas)
    work, owners = Work(rows, 800, 300, padded), make_owners(len(rows), replicas)
    first, *others = plans_of(work, owners, replicas, count_multiple=multiple)
    for other in others:
        np.testing.assert_array_equal(first.places, other.places)
    assert first.num_slots % multiple == 0
    slots = [first.side_by_side(slot) for slot in range(first.num_slots)]
    assert used(slots) == list(range(len(rows))) and all(part for slot in slots for part in slot)
    for replica in range(replicas):
        assert first.micro_batches(replica) == [slot[replica] for slot in slots]
    for part in (part for slot in slots for part in slot):
        assert (len(part) * rows[part].max() if padded else rows[part].sum()) <= 800
    costs = [[work.cost(part) for part in slot] for slot in slots]
    efficiency = sum(map(sum, costs)) / (replicas * sum(map(max, costs)))
    assert first.lockstep_efficiency(work) == pytest.approx(efficiency)
    size = pod_size(replicas)
    pods = assign_pods(work, owners // size, replicas // size, size)
    assert all(
        pods[i] == replica // size
        for slot in slots
        for replica, part in enumerate(slot)
        for i in part
    )
    shares = np.bincount(pods, rows * (300 + rows))
    assert shares.max() <= 1.02 * shares.min(), "every pod gets as much work"


def test_all_pods_have_the_slots_of_the_one_that_needs_most():
    # 64 replicas of 100 rows: the pod with the 51 needs a second slot
    rows = np.array([51] + [50] * 127)
    work, owners = Work(rows, 100, 10), make_owners(len(rows), 64)
    plans = plans_of(work, owners, 64)
    assert {plan.num_slots for plan in plans} == {2}
    pods = assign_pods(work, owners // 32, 2, 32)
    for slot in (0, 1):
        assert all(
            pods[i] == replica // 32
            for replica, part in enumerate(plans[0].side_by_side(slot))
            for i in part
        )


def test_where_a_pod_has_no_plan_all_replicas_plan_together_or_all_raise():
    # one slot takes the three short ones together, which are dealt to two pods
    rows = np.array([95] * 95 + [30] * 3)
    plans = plans_of(Work(rows, 100, 10), make_owners(len(rows), 96), 96)
    assert {plan.num_slots for plan in plans} == {1}
    assert [95, 96, 97] in plans[0].side_by_side(0)
    for count, words in (
        (63, "64 non-empty micro-batches from 63 sequences"),
        (65, "do not fit into 1 micro-batches"),
    ):
        rows = np.full(count, 60)
        refused = plans_of(Work(rows, 100, 10), make_owners(count, 64), 64)
        assert len(set(refused)) == 1 and words in refused[0]


@pytest.mark.slow
def test_1024_replicas_rarely_wait_for_each_other():
    """The plan of one pod, without the all-reduces: its own work alone."""
    lengths = np.concatenate([drawn_lengths("capped", seed) for seed in range(32)])
    work, owners = Work(lengths, 32_768, 16_800), make_owners(len(lengths), 1024)
    pods = [
        make_plan(work, owners, 1024, pod * POD, lambda values, op: values)
        for pod in range(1024 // POD)
    ]
    assert len({plan.num_slots for plan in pods}) == 1
    # each fills in its own sequences
    whole = Plan(sum(plan.places for plan in pods), pods[0].num_slots, 1024)
    assert used([whole.side_by_side(slot) for slot in range(whole.num_slots)]) == list(
        range(len(lengths))
    )
    assert whole.lockstep_efficiency(work) >= 0.97
    assert lengths[whole.places % 1024 != owners].sum() < 0.43 * lengths.sum(), (
        "the others stay where they were sampled"
    )


def test_a_rank_of_1024_does_what_a_rank_of_64_does():
    """Counted in calls, not in seconds: over all sequences of the job there are array operations
    only.
    """

    def calls(replicas):
        lengths = np.random.default_rng(0).integers(64, 8000, 32 * replicas)
        work, owners = Work(lengths, 32_768, 16_800), make_owners(len(lengths), replicas)
        counted = 0

        def count(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            plan = make_plan(work, owners, replicas, 0, lambda values, op: values)
            plan.micro_batches(0)
            plan.lockstep_efficiency(work)
        finally:
            sys.setprofile(None)
        return counted

    few, many = calls(64), calls(1024)
    assert few > 5_000 and many < 1.2 * few, "the sequences of one pod, each a few times"


def test_pods_divide_the_replicas_or_there_is_one():
    assert [pod_size(n) for n in (1, 8, 32, 48, 64, 96, 1000, 1024)] == [
        1,
        8,
        32,
        24,
        32,
        32,
        25,
        32,
    ]
    assert pod_size(37) == 37 and pod_size(2 * 37) == 74, "no divisor between 8 and 32"
    assert pod_size(66) == 22, "33 are too many"
    assert pod_size(8 * 37) == 8 and pod_size(7 * 37) == 7 * 37


def test_a_micro_batch_stays_with_the_replica_that_holds_most_of_it():
    slots = [[[0, 1, 2], [3, 4]], [[5], [6]]]
    assert assign(slots, [1, 1, 0, 0, 0, 1, 1], [5, 5, 9, 1, 1, 7, 7], 2) == [
        [[3, 4], [0, 1, 2]],
        [[6], [5]],
    ]
    assert assign([[[0, 1, 2], [3]]], [0, 0, 1, 1], [5, 5, 9, 1], 2) == [[[0, 1, 2], [3]]], (
        "10 rows of it, not 9"
    )


@pytest.mark.parametrize("routes", [True, False])
def test_samples_are_unchanged_by_encoding(routes):
    samples = [
        Sample(
            make_rollout(f'ä"{k}\n/0', 3, k + 1, seed=k, routes=routes),
            0.1 * k - 0.3,
            in_loss=k != 2,
        )
        for k in range(5)
    ]
    back = decode_samples(encode_samples(samples))
    assert len(back) == 5 and decode_samples(encode_samples([])) == []
    for sample, twin in zip(samples, back, strict=True):
        assert (twin.advantage, twin.in_loss, twin.rollout.id) == (
            sample.advantage,
            sample.in_loss,
            sample.rollout.id,
        )
        assert twin.rollout.routes_digest == sample.rollout.routes_digest
        assert twin.rollout.prompt_length == 3
        for name in ("tokens", "rollout_logprobs", "routed_experts", "policy_versions"):
            mine, its = getattr(sample.rollout, name), getattr(twin.rollout, name)
            assert (mine is None) == (its is None)
            if mine is not None:
                assert mine.dtype == its.dtype
                np.testing.assert_array_equal(mine, its)


# Known plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tens", "sizes"), [(40, [[1, 25], [8, 7]]), (20, [[1, 18], [1, 1]])])
def test_a_slot_is_filled_up_to_the_cost_of_its_longest_sequence(tens, sizes):
    """40: 25 sequences of cost 100 equal one of 2,500; 20: one for each replica is kept for the
    second slot.
    """
    slots = plan_slots(Work([50] + [10] * tens, 10_000, 0), 2, at_least=2)
    assert [[len(part) for part in slot] for slot in slots] == sizes
    assert slots[0][0] == [0]


def test_where_the_cheapest_is_full_another_takes_the_rest():
    rows = [60, 30, 30, 30, 10, 10]  # three of 30 cost less than one of 60, and have more rows
    slot, left = fill_slot(Work(rows, 95, 0), [n * n for n in rows], range(6), 2, 10**9, keep=0)
    assert (slot, left) == ([[0, 4, 5], [1, 2, 3]], [])


def test_the_costliest_run_is_halved_until_there_are_enough_slots():
    assert plan_padded(Work([10] * 8, 200, 0, padded=True), 3, 1) == [
        [[6, 7]],
        [[3, 4, 5]],
        [[0, 1, 2]],
    ], "even"
    slots = plan_padded(Work([100, 50, 50, 50, 50, 30, 30], 300, 0, padded=True), 5, 1)
    assert slots == [[[5, 6]], [[3, 4]], [[2]], [[1]], [[0]]], "of 100 | 50 50 | 50 50 | 30 30"


def test_a_plan_is_read_by_replica_and_by_slot():
    places = np.random.default_rng(0).integers(0, 12, 2000)
    plan = Plan(places, 4, 3)
    for slot in range(4):
        expected = [
            [i for i in range(2000) if places[i] == slot * 3 + replica] for replica in range(3)
        ]
        assert (
            plan.side_by_side(slot)
            == expected
            == [plan.micro_batches(replica)[slot] for replica in range(3)]
        )
    assert Plan(np.array([0]), 1, 3).side_by_side(0) == [[0], [], []]


def test_a_sequence_in_its_owners_pod_stays_with_its_owner():
    plan, *_ = plans_of(Work(np.full(64, 10), 10, 0), np.arange(64), 64)
    assert (plan.places == np.arange(64)).all()


def test_a_single_pod_does_not_communicate():
    def never(values, op):
        raise AssertionError

    work = Work(np.arange(1, 129), 800, 300, padded=True)
    plan = make_plan(work, make_owners(128, 64), 64, 0, never, equal_sizes=True)
    assert used([plan.side_by_side(slot) for slot in range(plan.num_slots)]) == list(range(128))
    assert make_plan(Work([3, 3, 3], 9, 0), np.zeros(3, int), 1, 0, never).num_slots == 1


def test_pods_take_no_more_slots_than_they_need():
    plan, *_ = plans_of(Work(np.full(128, 10), 20, 0), make_owners(128, 64), 64)
    assert plan.num_slots == 1


def test_the_slot_with_the_costliest_micro_batch_comes_first():
    work = Work([30, 5, 20, 20, 5], 60, 20, padded=True)
    slots = plan_slots(work, 2, at_least=2)
    assert [[work.cost(part) for part in slot] for slot in slots] == [[1600, 125], [1500, 800]]
