"""Groups and mini-batches without expert ids, and the ids that come back."""

from dataclasses import fields, replace

import pytest

from megatron_rl.batch.pack import PackRule, Sample
from megatron_rl.batch.split import batch_without_routes, make_mini_batch
from megatron_rl.records import (
    Prompt,
    Rollout,
    RolloutGroup,
    check_episode,
    with_routes,
    without_routes,
)
from tests.id_holders import has_ids
from tests.unit.batch.rollouts import make_rollout, make_tree

OTHERS = [
    field.name for field in fields(Rollout) if field.name not in ("routed_experts", "episode")
]


def make_group(name, *, seed=0):
    rollouts = (make_tree(f"{name}/0", seed=seed), make_rollout(f"{name}/1", 3, 5, seed=seed))
    return RolloutGroup(Prompt(name, "", (1, 2, 3), ""), rollouts)


def mini_batch(groups):
    samples = [Sample(rollout, 0.5) for group in groups for rollout in group.rollouts]
    return make_mini_batch(samples, max_tokens=40, rule=PackRule(), dp_group=None)


def test_only_the_expert_ids_of_every_sequence_are_left_out():
    groups = [make_group("p"), make_group("q", seed=7)]
    plain = without_routes(groups)
    assert has_ids(groups) and not has_ids(plain)
    for group, other in zip(groups, plain, strict=True):
        assert other.prompt is group.prompt
        for rollout, bare in zip(group.rollouts, other.rollouts, strict=True):
            assert check_episode(bare).episode.digest == rollout.episode.digest
            for sequence, twin in zip(rollout.sequences, bare.sequences, strict=True):
                assert all(getattr(twin, name) is getattr(sequence, name) for name in OTHERS)


def test_what_changed_meanwhile_stays_when_the_ids_come_back():
    groups = [make_group("p"), make_group("q", seed=7)]
    changed = [
        replace(group, rollouts=tuple(r.named(f"new/{r.id}") for r in group.rollouts))
        for group in without_routes(groups)
    ]
    for group, back in zip(groups, with_routes(changed, groups), strict=True):
        for rollout, new in zip(group.rollouts, back.rollouts, strict=True):
            assert new.id == f"new/{rollout.id}"
            for sequence, twin in zip(rollout.sequences, new.sequences, strict=True):
                assert twin.routed_experts is sequence.routed_experts
    parts = mini_batch(with_routes(changed, groups)).micro_batches
    names = [f"new/{g}/{k}" for g in "pq" for k in ("0/0", "0/1", "0", "1")]
    assert sorted(name for part in parts for name in part.rollout_ids) == sorted(names)


def test_ids_of_other_tokens_are_refused_where_they_are_packed():
    groups = [make_group("p"), make_group("q", seed=7)]
    with pytest.raises(ValueError, match="the routes are another rollout's"):
        mini_batch(with_routes(without_routes(groups), groups[::-1]))


def test_a_mini_batch_without_ids_has_everything_else():
    batch = mini_batch([make_group("p"), make_group("q", seed=7)])
    plain = batch_without_routes(batch)
    assert has_ids(batch) and not has_ids(plain) and plain.num_responses == 4
    assert plain.micro_batches is batch.micro_batches and not has_ids(batch.micro_batches)
    for samples, others in zip(batch.samples, plain.samples, strict=True):
        assert [replace(a, rollout=b.rollout) for a, b in zip(samples, others, strict=True)] == [
            *others
        ]
