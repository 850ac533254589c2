"""Episodes of several sequences: packed once, counted as one response, and refused where a sequence
was lost or moved.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.batch.codec import from_bytes, to_bytes
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.split import make_mini_batch, make_samples, sequences_of
from megatron_rl.batch.transfer import decode_samples, encode_samples
from megatron_rl.config import LossConfig, load_config
from megatron_rl.loss import count_kept
from megatron_rl.loss.aggregate import aggregate
from megatron_rl.loss.sequences import Sequences
from megatron_rl.records import Prompt, RolloutGroup, check_episode
from megatron_rl.records.packed import RowState
from tests.thread_ranks import run_thread_ranks
from tests.unit.batch.rollouts import make_rollout, make_tree


def group_of(*rollouts, rewards=(1.0, 0.0, 0.0)):
    prompt = Prompt("p", "", (1, 2, 3), "")
    return RolloutGroup(prompt, rollouts, np.array(rewards[: len(rollouts)], np.float32))


def packed(samples, max_tokens=20):
    return make_mini_batch(samples, max_tokens=max_tokens, rule=PackRule(), dp_group=None)


def test_every_sampled_token_is_in_one_row_of_the_loss():
    tree, plain = make_tree("p/0", seed=1), make_rollout("p/1", 3, 5, seed=2)
    (group,) = with_advantages([group_of(tree, plain)], "mean")
    batch = packed(list(make_samples(group, filter_truncated=False)))
    assert len(batch.micro_batches) > 1
    expected, found = [], []
    for rollout, advantage in ((tree, 0.5), (plain, -0.5)):
        for each in rollout.sequences:
            rows = zip(each.sampled - 1, each.rollout_logprobs, strict=True)
            expected += [
                (p, each.tokens[t + 1], each.routed_experts[t].tobytes(), advantage)
                for t, p in rows
            ]
    for micro, samples in zip(batch.micro_batches, batch.samples, strict=True):
        starts = micro.cu_seqlens.tolist()
        for row in micro.loss_mask.nonzero().flatten().tolist():
            number = int(micro.sequence_ids[row])
            routes = samples[number].rollout.routed_experts
            route = routes[row - starts[number]].tobytes()
            found.append(
                (micro.rollout_logprobs[row], micro.labels[row], route, micro.advantages[row])
            )
    assert len({p for p, *_ in expected}) == len(expected) == 9 + 4 + 6 + 5, (
        "log-probs identify tokens"
    )
    key = [(*tuple(map(float, (p, t, a))), route) for p, t, route, a in found]
    assert sorted(key) == sorted(
        (*tuple(map(float, (p, t, a))), route) for p, t, route, a in expected
    )


def test_an_episode_is_one_response_in_every_count():
    tree, plain = make_tree("p/0", seed=1), make_rollout("p/1", 3, 5, seed=2)
    (group,) = with_advantages([group_of(tree, plain)], "mean")
    batch = packed(list(make_samples(group, filter_truncated=False)))
    assert (batch.num_responses, batch.num_response_tokens) == (2, 19 + 5)
    total = {"sequence_mean": 0.0, "sequence_sum": 0.0, "token_mean": 0.0, "kept_mean": 0.0}
    kept = [micro.loss_mask & (micro.rollout_logprobs < -0.5) for micro in batch.micro_batches]
    n = count_kept(
        torch.cat(kept), torch.cat([micro.response_ids for micro in batch.micro_batches]), 2
    )
    for micro, kept_lengths in zip(
        batch.micro_batches, n.split([len(part) for part in kept]), strict=True
    ):
        lengths = dict(
            zip(micro.sequence_ids.tolist(), micro.response_lengths.tolist(), strict=True)
        )
        assert [lengths[n] for n, name in enumerate(micro.rollout_ids)] == [
            19 if name.startswith("p/0") else 5 for name in micro.rollout_ids
        ]
        for how in total:
            sequences = Sequences(
                micro.sequence_ids,
                len(micro.rollout_ids),
                micro.response_lengths,
                kept_lengths=kept_lengths,
            )
            config = LossConfig(name="minirl", aggregation=how)
            per_token = torch.where(micro.loss_mask, micro.rollout_logprobs, 7.0)
            loss = FakeLoss(per_token, micro.loss_mask)
            counts = {
                "num_responses": batch.num_responses,
                "num_response_tokens": batch.num_response_tokens,
            }
            total[how] += float(aggregate(loss, sequences, config, **counts))
    of_tree = sum(float(each.rollout_logprobs.sum()) for each in tree.sequences)
    of_plain = float(plain.rollout_logprobs.sum())
    assert total["sequence_mean"] == pytest.approx((of_tree / 19 + of_plain / 5) / 2)
    assert total["sequence_sum"] == pytest.approx((of_tree + of_plain) / 2)
    assert total["token_mean"] == pytest.approx((of_tree + of_plain) / 24)
    left = [
        sum(int((each.rollout_logprobs < -0.5).sum()) for each in r.sequences)
        for r in (tree, plain)
    ]
    assert 0 < left[1] < 5 and total["kept_mean"] == pytest.approx(
        (of_tree / left[0] + of_plain / left[1]) / 2
    )


class FakeLoss:
    """What `aggregate` reads of a PolicyLoss."""

    def __init__(self, per_token, mask):
        self.per_token, self.mask = per_token, mask
        self.terms = 0 * per_token


def test_an_episode_leaves_the_loss_as_a_whole():
    tree = replace(make_tree("p/0", seed=1), finish_reason="length")
    (group,) = with_advantages([group_of(tree, make_rollout("p/1", 3, 5))], "mean")
    batch = packed(list(make_samples(group, filter_truncated=True)))
    assert (batch.num_responses, batch.num_response_tokens) == (1, 5)
    assert sum(int(micro.loss_mask.sum()) for micro in batch.micro_batches) == 5


@pytest.mark.parametrize(
    "rule",
    [PackRule(), PackRule(count_multiple=2), PackRule(padded=True), PackRule(equal_sizes=True)],
)
def test_any_number_of_long_sequences_has_a_plan(rule):
    """Seven sequences on two replicas, no two of which fit into a micro-batch: some are computed
    twice, and learned from once.
    """
    trees = [make_tree("a/0", seed=1), make_tree("b/0", seed=2)]
    owned = [
        [Sample(trees[0], 0.5), Sample(make_rollout("a/1", 3, 8), -0.5)],
        [Sample(trees[1], 0.5)],
    ]

    def deal(group, rank):
        return make_mini_batch(owned[rank], max_tokens=13, rule=rule, dp_group=group)

    batches = run_thread_ranks(deal, 2)
    assert [len(batch.micro_batches) for batch in batches] == [4, 4]
    learned, copied, numbers = [], [], {}
    for micro in (micro for batch in batches for micro in batch.micro_batches):
        assert len(micro.rollout_ids) == 1
        (learned if micro.loss_mask.any() else copied).append(micro.rollout_ids[0])
        numbers.setdefault(micro.rollout_ids[0][:3], set()).update(
            micro.response_ids[micro.loss_mask].tolist()
        )
        if not micro.loss_mask.any():
            assert (micro.response_ids == -1).all()
            assert not (micro.row_state == RowState.REPLAYED).any(), "in no metric of routes"
    assert sorted(learned) == ["a/0", "a/0/0", "a/0/1", "a/1", "b/0", "b/0/0", "b/0/1"]
    assert copied == ["a/1"], "the shortest"
    assert numbers == {"a/0": {0}, "a/1": {1}, "b/0": {2}}, (
        "one number for each response of the job"
    )
    assert all(
        batch.num_responses == 3 and batch.num_response_tokens == 2 * 19 + 8 for batch in batches
    )
    samples = [sample for batch in batches for part in batch.samples for sample in part]
    sent = decode_samples(encode_samples(samples))
    assert [s.response for s in sent] == [s.response for s in samples]
    once_more = make_mini_batch(
        sent, max_tokens=100, rule=PackRule(), dp_group=None
    )  # as a saved one in another layout
    assert {(s.rollout.id, s.is_copy, s.response) for part in once_more.samples for s in part} == {
        (s.rollout.id, s.is_copy, s.response) for s in samples
    }
    assert [s.is_copy for s in sent] == [s.is_copy for s in samples] and sum(
        s.is_copy for s in samples
    ) == 1


def test_a_response_that_is_left_out_has_no_number():
    """The numbers of the others have no gap: they index the counts of num_responses."""
    samples = [Sample(make_rollout(f"p/{i}", 3, 4, seed=i), 0.5, in_loss=i != 1) for i in range(3)]
    batch = packed(samples)
    numbers = {
        name: {*part.response_ids[part.sequence_ids == i].tolist()}
        for part in batch.micro_batches
        for i, name in enumerate(part.rollout_ids)
    }
    assert numbers == {"p/0": {0}, "p/1": {-1}, "p/2": {1}} and batch.num_responses == 2
    assert all(
        (part.response_ids[part.sequence_ids < 0] == -1).all() for part in batch.micro_batches
    )


def test_whitening_weighs_a_reward_by_all_tokens_of_its_episode():
    tree, plain = make_tree("p/0", seed=1), make_rollout("p/1", 3, 5)
    (group,) = with_advantages([group_of(tree, plain)], "batch_whitened")
    tokens = np.repeat([1.0, 0.0], [19, 5])
    assert group.advantages == pytest.approx(
        (np.array([1.0, 0.0]) - tokens.mean()) / (tokens.std() + 1e-6)
    )


def test_penalties_are_for_all_sampled_tokens_and_for_the_longest_sequence(tmp_path):
    base = {
        "model": {"path": str(tmp_path)},
        "data": {"train": "x.jsonl"},
        "rollout": {"max_response_tokens": 10},
        "batch": {"length_penalty": 0.5, "overlong_cache": 4},
    }
    (group,) = with_penalties([group_of(make_tree("p/0"))], load_config(None, [], base))
    assert group.penalties == pytest.approx([-0.5 * 19 / 10 + (6 - 9) / 4])


def test_a_tree_travels_unchanged_among_others():
    rollouts = [make_rollout("a/0", 2, 3), make_tree("p/0"), make_tree("p/1", seed=5, routes=False)]
    found, _ = from_bytes(to_bytes(rollouts))
    for one, other in zip(found, rollouts, strict=True):
        assert [each.id for each in one.sequences] == [each.id for each in other.sequences]
        assert (
            one.episode.digest == other.episode.digest
            and one.episode.reward == other.episode.reward
        )
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            for name in (
                "tokens",
                "rollout_logprobs",
                "routed_experts",
                "policy_versions",
                "prompt_length",
            ):
                assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    samples = sequences_of(Sample(rollouts[1], 0.25))
    back = decode_samples(encode_samples(samples))
    assert [(s.length, s.advantage, s.rollout.id) for s in back] == [
        (19, 0.25, r.id) for r in rollouts[1].sequences
    ]
    assert rollouts[1].named("x/3").sequences[1].id == "x/3/1" and check_episode(
        rollouts[1].named("x/3")
    )


def swapped(tree, other):
    return tree.with_episode(earlier=tree.episode.earlier[::-1])


def swapped_with_another_episode(tree, other):
    return tree.with_episode(earlier=(other.episode.earlier[0], tree.episode.earlier[1]))


def repeated(tree, other):
    return tree.with_episode(
        earlier=(*tree.episode.earlier, replace(tree.episode.earlier[0], id="p/0/2"))
    )


def lost(tree, other):
    return tree.with_episode(earlier=tree.episode.earlier[:1])


def all_lost(tree, other):
    return tree.with_episode(earlier=())


def begins_earlier(tree, other):
    """A token that the first sequence sampled is learned from again."""
    first, second = tree.episode.earlier
    more = {
        "prompt_length": second.prompt_length - 1,
        "rollout_logprobs": np.append(np.float32(-0.5), second.rollout_logprobs),
        "policy_versions": np.append(second.policy_versions[:1], second.policy_versions),
    }
    return tree.with_episode(earlier=(first, replace(second, **more)))


def other_logprobs(tree, other):
    first, second = tree.episode.earlier
    return tree.with_episode(
        earlier=(replace(first, rollout_logprobs=first.rollout_logprobs[::-1]), second)
    )


CHANGES = [
    swapped,
    swapped_with_another_episode,
    repeated,
    lost,
    all_lost,
    begins_earlier,
    other_logprobs,
]


@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_sequences_that_are_not_those_of_the_episode_are_refused(change, routes):
    tree, other = make_tree("p/0", routes=routes), make_tree("p/1", seed=50, routes=routes)
    wrong = change(tree, other)
    for sequence in wrong.sequences:
        pack([Sample(sequence, 0.0)])  # each alone is sound
    group = replace(group_of(wrong), advantages=np.zeros(1, np.float32))
    with pytest.raises(
        ValueError, match="rollout p/0: digest of its . sequences is .*lost, swapped or repeated"
    ):
        list(make_samples(group, filter_truncated=False))
    with pytest.raises(ValueError, match="rollout p/0: digest of its . sequences"):
        from_bytes(to_bytes([wrong]))


def test_an_episode_is_not_packed_as_one_sequence():
    with pytest.raises(ValueError, match="an episode of 3 sequences; pack sequences_of"):
        pack([Sample(make_tree("p/0"), 0.0)])
