import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch.balance import Work, assign, lockstep_efficiency, plan_slots
from megatron_rl.batch.exchange import from_bytes, to_bytes
from megatron_rl.batch.pack import Sample
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
def test_every_sequence_once_under_the_cap_and_none_empty(share, replicas, multiple, cap, balance_length, padded):
    rows = (share * replicas * multiple)[::-1]  # as many as replicas x multiple divide, so that a plan always exists
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


def test_padded_micro_batches_hold_neighbours_by_length_and_are_even():
    lengths = [10, 100, 11, 101, 12, 102, 13, 103]
    slots = plan_slots(Work(lengths, 250, 0, padded=True), 1)
    assert [sorted(lengths[i] for i in part) for (part,) in slots] == [[102, 103], [100, 101], [10, 11, 12, 13]]
    (parts,) = plan_slots(Work([7] * 9, 1000, 0, padded=True), 3)
    assert [len(part) for part in parts] == [3, 3, 3]


def test_too_few_sequences_are_refused():
    with pytest.raises(ValueError, match="6 non-empty micro-batches from 5 sequences: 2 for each of 3"):
        plan_slots(Work([4] * 5, 100, 0), 3, count_multiple=2)
    with pytest.raises(ValueError, match=r"5 sequences do not fit into 2 micro-batches of 10 rows on each of 2"):
        plan_slots(Work([9] * 5, 10, 0), 2)


def drawn_lengths(kind, seed):
    """1,024 lengths, lognormal, cut at 32,768; kind "capped": 12 % of them there."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(np.log(4000), 1.0, 1024), 32_768).astype(int) + 1
    return np.where(rng.random(1024) < 0.12, 32_768, lengths).tolist() if kind == "capped" else lengths.tolist()


@pytest.mark.parametrize(("replicas", "least"), [(8, 0.985), (32, 0.95)])
@pytest.mark.parametrize("kind", ["lognormal", "capped"])
def test_replicas_hardly_wait_for_one_another(kind, replicas, least):
    for seed in range(3):
        work = Work(drawn_lengths(kind, seed), 32_768, 16_800)
        slots = plan_slots(work, replicas)
        assert lockstep_efficiency(slots, work) >= least
        full = sum(work.rows) / (len(slots) * replicas * work.max_rows)
        assert full >= 0.85, "and not by many small micro-batches"


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=24), st.integers(1, 4), st.randoms())
def test_assignment_changes_who_computes_and_nothing_else(rows, replicas, random):
    slots = plan_slots(Work(rows * replicas, 200, 10), replicas)
    owners = [random.randrange(replicas) for _ in rows * replicas]
    given_out = assign(slots, owners, rows * replicas, replicas)
    for slot, dealt in zip(slots, given_out, strict=True):
        assert sorted(map(sorted, slot)) == sorted(dealt)


def test_a_micro_batch_stays_with_whoever_holds_most_of_it():
    slots = [[[0, 1, 2], [3, 4]], [[5], [6]]]
    assert assign(slots, [1, 1, 0, 0, 0, 1, 1], [5, 5, 9, 1, 1, 7, 7], 2) == [[[3, 4], [0, 1, 2]], [[6], [5]]]


@pytest.mark.parametrize("routes", [True, False])
def test_samples_survive_the_trip_bit_for_bit(routes):
    samples = [
        Sample(make_rollout(f'ä"{k}\n/0', 3, k + 1, seed=k, routes=routes), 0.1 * k - 0.3, in_loss=k != 2)
        for k in range(5)
    ]
    back = from_bytes(to_bytes(samples))
    assert len(back) == 5 and from_bytes(to_bytes([])) == []
    for sample, twin in zip(samples, back, strict=True):
        assert (twin.advantage, twin.in_loss, twin.rollout.id) == (sample.advantage, sample.in_loss, sample.rollout.id)
        assert twin.rollout.routes_digest == sample.rollout.routes_digest
        assert twin.rollout.prompt_length == 3
        for name in ("tokens", "rollout_logprobs", "routed_experts", "policy_versions"):
            mine, its = getattr(sample.rollout, name), getattr(twin.rollout, name)
            assert (mine is None) == (its is None)
            if mine is not None:
                assert mine.dtype == its.dtype
                np.testing.assert_array_equal(mine, its)
