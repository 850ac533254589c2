from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batch.codec import from_bytes, to_bytes
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.batch.split import make_mini_batch, split
from megatron_rl.config import BatchConfig, Config, DataConfig, ModelConfig, RunConfig
from tests.unit.batch.rollouts import make_groups


def config(**sections):
    return Config(model=ModelConfig(path="m"), data=DataConfig(train="d"), **sections)


@pytest.mark.parametrize(("multiple", "cap"), [(1, 30), (2, 30), (4, 30), (4, 10_000), (3, 10_000)])
def test_the_number_of_micro_batches_is_a_multiple_of_count_multiple(multiple, cap):
    samples = [Sample(rollout, 1.0) for group in make_groups(6, 2) for rollout in group.rollouts]
    plain = make_mini_batch(samples, max_tokens=cap, rule=PackRule(), dp_group=None)
    batch = make_mini_batch(
        samples, max_tokens=cap, rule=PackRule(count_multiple=multiple), dp_group=None
    )
    fewest = len(plain.micro_batches)
    assert len(batch.micro_batches) == -(-fewest // multiple) * multiple
    names = sorted(name for micro in batch.micro_batches for name in micro.rollout_ids)
    assert names == sorted(sample.rollout.id for sample in samples)


def test_padded_micro_batches_have_equal_rows_and_nothing_is_lost():
    samples = [Sample(rollout, 1.0) for group in make_groups(6, 4) for rollout in group.rollouts]
    rule = PackRule(sequence_multiple=4, padded=True, count_multiple=2)
    batch = make_mini_batch(samples, max_tokens=64, rule=rule, dp_group=None)
    assert len(batch.micro_batches) % 2 == 0
    tokens = {}
    for micro in batch.micro_batches:
        (rows,) = set(micro.cu_seqlens.diff().tolist())
        assert rows % 4 == 0 and micro.num_tokens == rows * len(micro.rollout_ids) <= 64
        for index, name in enumerate(micro.rollout_ids):
            tokens[name] = micro.tokens[micro.sequence_ids == index].tolist()
    assert tokens == {sample.rollout.id: sample.rollout.tokens.tolist() for sample in samples}


def test_too_few_samples_for_the_number_of_micro_batches():
    samples = [Sample(rollout, 1.0) for rollout in make_groups(1, 3)[0].rollouts]
    with pytest.raises(ValueError, match="4 non-empty micro-batches from 3 sequences"):
        make_mini_batch(samples, max_tokens=1000, rule=PackRule(count_multiple=4), dp_group=None)


def test_split_keeps_groups_together_uses_each_response_once_and_is_seeded():
    groups = make_groups(6, 4)
    run = config(
        run=RunConfig(num_mini_batches=3, max_tokens_per_micro_batch=30, prompts_per_step=6)
    )

    def members(seed):
        batches = split(groups, run, seed=seed, rule=PackRule(), dp_group=None)
        return [
            sorted(name for micro in batch.micro_batches for name in micro.rollout_ids)
            for batch in batches
        ]

    parts = members(0)
    assert [len(part) for part in parts] == [8, 8, 8]
    assert sorted(name for part in parts for name in part) == sorted(
        r.id for g in groups for r in g.rollouts
    )
    for part in parts:
        names = {name.split("/")[0] for name in part}
        assert len(names) == 2  # two whole groups of four
    assert members(0) == parts and any(members(seed) != parts for seed in range(1, 5))


def test_split_counts_the_entire_mini_batch():
    groups = make_groups(4, 3)
    batches = split(
        groups, config(run=RunConfig(num_mini_batches=2)), seed=1, rule=PackRule(), dp_group=None
    )
    assert [batch.num_responses for batch in batches] == [6, 6]
    assert [batch.index for batch in batches] == [0, 1]
    tokens = sum(batch.num_response_tokens for batch in batches)
    assert tokens == sum(r.response_length for g in groups for r in g.rollouts)


def test_truncated_responses_leave_the_loss_and_its_denominators_only_on_request():
    groups = [
        replace(
            g,
            rollouts=tuple(
                replace(r, finish_reason="length") if k == 1 else r
                for k, r in enumerate(g.rollouts)
            ),
        )
        for g in make_groups(2, 3)
    ]
    kept = [r.response_length for g in groups for r in g.rollouts if r.finish_reason == "stop"]
    every = [r.response_length for g in groups for r in g.rollouts]
    for filtered, lengths in ((False, every), (True, kept)):
        settings_ = config(batch=BatchConfig(filter_truncated=filtered))
        (batch,) = split(groups, settings_, seed=0, rule=PackRule(), dp_group=None)
        assert (batch.num_responses, batch.num_response_tokens) == (len(lengths), sum(lengths))
        for micro in batch.micro_batches:
            for index, name in enumerate(micro.rollout_ids):
                learned = int(micro.loss_mask[micro.sequence_ids == index].sum())
                length = next(r for g in groups for r in g.rollouts if r.id == name).response_length
                assert learned == (0 if filtered and name.endswith("/1") else length)
            assert (
                not micro.advantages[~micro.loss_mask].any()
                and not micro.rollout_logprobs[~micro.loss_mask].any()
            )


def test_a_response_without_a_reward_leaves_the_loss_and_its_denominators():
    groups = [
        replace(g, rewards=np.array([0.5, np.nan, 1.0], np.float32)) for g in make_groups(2, 3)
    ]
    (batch,) = split(groups, config(), seed=0, rule=PackRule(), dp_group=None)
    kept = [r.response_length for g in groups for r in (g.rollouts[0], g.rollouts[2])]
    assert (batch.num_responses, batch.num_response_tokens) == (4, sum(kept))
    for micro in batch.micro_batches:
        for index, name in enumerate(micro.rollout_ids):
            assert micro.loss_mask[micro.sequence_ids == index].any() == (not name.endswith("/1"))


def test_denominators_are_at_least_one():
    groups = [
        replace(g, rollouts=tuple(replace(r, finish_reason="length") for r in g.rollouts))
        for g in make_groups(1, 2)
    ]
    (batch,) = split(
        groups,
        config(batch=BatchConfig(filter_truncated=True)),
        seed=0,
        rule=PackRule(),
        dp_group=None,
    )
    assert (batch.num_responses, batch.num_response_tokens) == (1, 1)
    assert not any(micro.loss_mask.any() for micro in batch.micro_batches)


def test_split_error_names_the_keys():
    with pytest.raises(
        ValueError, match=r"5 prompt groups.*num_mini_batches = 2.*prompts_per_step"
    ):
        split(
            make_groups(5, 1),
            config(run=RunConfig(num_mini_batches=2)),
            seed=0,
            rule=PackRule(),
            dp_group=None,
        )


def sent(groups):
    """The groups' rollouts, encoded and decoded."""
    rollouts, columns = from_bytes(
        to_bytes([r for g in groups for r in g.rollouts], rewards=np.ones((2, 3), np.float32))
    )
    assert columns["rewards"].shape == (2, 3) and columns["rewards"].dtype == np.float32
    size = len(groups[0].rollouts)
    return [
        replace(g, rollouts=tuple(rollouts[i * size : (i + 1) * size]))
        for i, g in enumerate(groups)
    ]


@pytest.mark.parametrize(("routes", "has_missing"), [(True, False), (True, True), (False, False)])
def test_share_encoding_round_trips(routes, has_missing):
    groups = make_groups(3, 4, routes=routes)
    if has_missing:
        groups[1] = replace(
            groups[1],
            rollouts=tuple(
                with_missing_row(r, row=k % 2) for k, r in enumerate(groups[1].rollouts)
            ),
        )
    for group, copy in zip(groups, sent(groups), strict=True):
        for rollout, twin in zip(group.rollouts, copy.rollouts, strict=True):
            assert (rollout.id, rollout.prompt_length, rollout.finish_reason) == (
                twin.id,
                twin.prompt_length,
                twin.finish_reason,
            )
            assert np.array_equal(twin.policy_versions, rollout.policy_versions)
            assert twin.policy_versions.dtype == np.int32
            np.testing.assert_array_equal(rollout.tokens, twin.tokens)
            np.testing.assert_array_equal(rollout.rollout_logprobs, twin.rollout_logprobs)
            assert (
                twin.routes_digest == rollout.routes_digest
                and (twin.routes_digest is not None) == routes
            )
            if rollout.missing_routes is None:
                assert twin.missing_routes is None
            else:
                np.testing.assert_array_equal(rollout.missing_routes, twin.missing_routes)
            if routes:
                np.testing.assert_array_equal(rollout.routed_experts, twin.routed_experts)
            else:
                assert twin.routed_experts is None


def with_missing_row(rollout, row):
    missing = np.zeros(len(rollout.tokens) - 1, bool)
    missing[min(row, len(missing) - 1)] = True
    return replace(rollout, missing_routes=missing)


def test_routes_mixed_up_by_sending_are_noticed_when_packed():
    rollouts = [rollout for group in make_groups(2, 2) for rollout in group.rollouts]
    data = to_bytes(rollouts)
    pack([Sample(rollout, 0.0) for rollout in from_bytes(data)[0]])
    changed, _ = from_bytes(data.copy())
    routes = changed[1].routed_experts
    routes[:] = np.roll(routes, 1, axis=-1)  # experts of a row change places
    with pytest.raises(ValueError, match="rollout p0/1: digest"):
        pack([Sample(rollout, 0.0) for rollout in changed])


def test_groups_without_advantages_are_refused():
    groups = [replace(group, advantages=None) for group in make_groups(1, 2)]
    with pytest.raises(ValueError, match="prompt p0: advantages are missing"):
        split(groups, config(), seed=0, rule=PackRule(), dp_group=None)
