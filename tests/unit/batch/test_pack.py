"""The packed order against an independent per-token loop."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.records.packed import RowState
from tests.unit.batch.rollouts import make_rollout

shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 8), st.sampled_from([1, 4, 6]), st.booleans())
def test_every_row_against_a_loop(lengths, multiple, sequence_multiple, padded):
    rollouts = [make_rollout(f"r{i}", p, r, seed=i) for i, (p, r) in enumerate(lengths)]
    rule = PackRule(
        pad_multiple=multiple * sequence_multiple,
        sequence_multiple=sequence_multiple,
        padded=padded,
    )
    rows = rule.rows([rule.sequence_rows(p + r) for p, r in lengths])
    batch = pack([Sample(rollout, i + 0.5) for i, rollout in enumerate(rollouts)], rows)
    longest = max(p + r for p, r in lengths)
    if padded:  # all equal, as long as the longest
        assert (
            set(rows) == {batch.num_tokens // len(lengths)}
            and 0 <= rows[0] - longest < sequence_multiple
        )
    else:
        assert batch.num_tokens % (multiple * sequence_multiple) == 0
    row = 0
    for i, rollout in enumerate(rollouts):
        size = len(rollout.tokens)
        assert batch.cu_seqlens[i] == row
        for s in range(size):
            assert batch.tokens[row] == rollout.tokens[s]
            assert batch.positions[row] == s
            assert batch.sequence_ids[row] == i
            assert batch.response_lengths[row] == rollout.response_length
            predicts_response = rollout.prompt_length <= s + 1 < size
            assert bool(batch.loss_mask[row]) == predicts_response
            if s + 1 < size:
                assert batch.labels[row] == rollout.tokens[s + 1]
                assert batch.row_state[row] == RowState.REPLAYED
            else:
                assert batch.row_state[row] == RowState.LIVE
            if predicts_response:
                assert (
                    batch.rollout_logprobs[row]
                    == rollout.rollout_logprobs[s + 1 - rollout.prompt_length]
                )
                assert batch.advantages[row] == i + 0.5
            else:
                assert batch.rollout_logprobs[row] == 0 and batch.advantages[row] == 0
            row += 1
        while (row - batch.cu_seqlens[i]) % sequence_multiple or (
            padded and row - batch.cu_seqlens[i] < longest
        ):
            assert batch.positions[row] == row - batch.cu_seqlens[i]
            assert (
                batch.row_state[row] == RowState.PAD
                and not batch.loss_mask[row]
                and batch.sequence_ids[row] == -1
            )
            assert (
                batch.tokens[row]
                == batch.labels[row]
                == batch.advantages[row]
                == batch.rollout_logprobs[row]
                == 0
            )
            row += 1
        assert padded or row - batch.cu_seqlens[i] < size + sequence_multiple
    assert batch.cu_seqlens[len(rollouts)] == row
    assert batch.cu_seqlens[-1] == batch.num_tokens and (not padded or row == batch.num_tokens)
    assert (batch.row_state[row:] == RowState.PAD).all() and not batch.loss_mask[row:].any()
    assert int(batch.loss_mask.sum()) == sum(r for _, r in lengths)


def test_disagreeing_lengths_name_the_rollout():
    good = make_rollout("bad-one", 3, 4)
    with pytest.raises(ValueError, match="bad-one.*routed_experts has 5 rows.*= 6"):
        pack([Sample(replace(good, routed_experts=good.routed_experts[:-1]), 0.0)])
    with pytest.raises(ValueError, match="bad-one.*3 rollout_logprobs for 4"):
        pack([Sample(replace(good, rollout_logprobs=good.rollout_logprobs[1:]), 0.0)])
    with pytest.raises(ValueError, match="bad-one.*no response"):
        pack(
            [Sample(replace(good, prompt_length=7, rollout_logprobs=np.zeros(0, np.float32)), 0.0)]
        )
    with pytest.raises(ValueError, match="bad-one: 3 policy_versions for 4"):
        pack([Sample(replace(good, policy_versions=good.policy_versions[1:]), 0.0)])
    with pytest.raises(ValueError, match="at least one sequence"):
        pack([])
    with pytest.raises(ValueError, match=r"\['none'\] have no routed experts"):
        pack([Sample(good, 0.0), Sample(make_rollout("none", 2, 2, routes=False), 0.0)])


MISSING_ROWS = [
    (0, 5),
    (3, 4),
]  # rows of each of two rollouts of 4 prompt and 3 response tokens: in prompt and response


@pytest.mark.parametrize("mask", [False, True])
def test_rows_without_a_route_are_live_and_masked_on_request(mask):
    rollouts = []
    for number, rows in enumerate(MISSING_ROWS):
        missing = np.zeros(6, bool)
        missing[list(rows)] = True
        rollouts.append(
            replace(make_rollout(f"r{number}", 4, 3, seed=number), missing_routes=missing)
        )
    samples = [Sample(rollout, 1.5) for rollout in rollouts]
    batch = pack(samples, [7, 7, 2], mask_missing_routes=mask)
    plain = pack(
        [Sample(replace(rollout, missing_routes=None), 1.5) for rollout in rollouts], [7, 7, 2]
    )
    live = {6, 13} | {
        7 * number + row for number, rows in enumerate(MISSING_ROWS) for row in rows
    }  # last tokens and missing routes
    for row in range(16):
        state = RowState.PAD if row >= 14 else RowState.LIVE if row in live else RowState.REPLAYED
        assert batch.row_state[row] == state
        learned = row in (3, 4, 5, 10, 11, 12) and not (mask and row in live)
        assert bool(batch.loss_mask[row]) == learned
        assert (batch.advantages[row] == 1.5) == learned
        assert (batch.rollout_logprobs[row] != 0) == learned
    assert (batch.response_lengths == plain.response_lengths).all(), (
        "other tokens weigh what they did"
    )


def test_masking_does_not_change_the_denominators_of_a_mini_batch():
    missing = np.array([False, False, False, True, True, False])
    rollouts = [replace(make_rollout("a", 4, 3), missing_routes=missing), make_rollout("b", 2, 5)]
    rule = PackRule(mask_missing_routes=True)
    batch = make_mini_batch(
        [Sample(rollout, 1.0) for rollout in rollouts], max_tokens=99, rule=rule, dp_group=None
    )
    assert (batch.num_responses, batch.num_response_tokens) == (2, 8)
    assert sum(int(micro.loss_mask.sum()) for micro in batch.micro_batches) == 6


def swapped_routes(good, other):
    return replace(good, routed_experts=other.routed_experts)


def swapped_with_digest(good, other):
    return replace(good, routed_experts=other.routed_experts, routes_digest=other.routes_digest)


def edited_token(good, other):
    tokens = good.tokens.copy()
    tokens[5] += 1
    return replace(good, tokens=tokens)


def truncated(good, other):
    return replace(
        good,
        tokens=good.tokens[:-1],
        rollout_logprobs=good.rollout_logprobs[:-1],
        routed_experts=good.routed_experts[:-1],
        policy_versions=good.policy_versions[:-1],
    )


def shifted_rows(good, other):
    return replace(good, routed_experts=np.roll(good.routed_experts, 1, axis=0))


@pytest.mark.parametrize(
    "change", [swapped_routes, swapped_with_digest, edited_token, truncated, shifted_rows]
)
def test_the_digest_finds_changes_that_keep_all_lengths(change):
    good, other = make_rollout("good", 3, 4, seed=1), make_rollout("other", 3, 4, seed=2)
    pack([Sample(good, 0.0), Sample(other, 0.0)])
    with pytest.raises(
        ValueError,
        match=(
            "rollout good: digest of tokens and routed experts is .*, must be that of the payload"
        ),
    ):
        pack([Sample(other, 0.0), Sample(change(good, other), 0.0)])


def test_the_digest_does_not_depend_on_memory_layout_or_id_type():
    good = make_rollout("good", 3, 4)
    layer_major = np.ascontiguousarray(good.routed_experts.transpose(1, 0, 2)).transpose(1, 0, 2)
    pack(
        [
            Sample(
                replace(
                    good,
                    routed_experts=layer_major.astype(np.int16),
                    tokens=good.tokens.astype(np.int32),
                ),
                0.0,
            )
        ]
    )


def test_missing_routes_of_another_length_are_refused():
    wrong = replace(make_rollout("bad-one", 3, 4), missing_routes=np.zeros(7, bool))
    with pytest.raises(
        ValueError, match=r"bad-one: missing_routes is bool \[7\], must be bool \[6\]"
    ):
        pack([Sample(wrong, 0.0)])
    with pytest.raises(
        ValueError, match=r"bad-one: missing_routes is uint8 \[6\], must be bool \[6\]"
    ):
        pack([Sample(replace(wrong, missing_routes=np.zeros(6, np.uint8)), 0.0)])


def test_rows_of_a_rule_for_known_lengths():
    assert PackRule().rows([3, 4]) == [3, 4], "no pads, no sequence of them"
    assert PackRule().rows([3], beside=[[9, 9]]) == [3], "replicas may differ"
    assert PackRule(equal_sizes=True).rows([3], beside=[[9, 9]]) == [3, 15]
    assert PackRule(equal_sizes=True, pad_multiple=8).rows([3, 4], beside=[[9]]) == [3, 4, 9]
    assert PackRule(equal_sizes=True, padded=True).rows([3], beside=[[9, 2]]) == [9, 9]


def test_the_default_rule_adds_no_rows():
    assert astuple(PackRule()) == (1, False, 1, 1, False, False, 16_384)
    assert Sample(make_rollout("a", 1, 1), 0.0).in_loss


def test_without_routes_every_row_is_live():
    batch = pack([Sample(make_rollout("a", 2, 3, routes=False), 1.0)], [5, 2])
    assert batch.row_state.tolist() == [RowState.LIVE] * 5 + [RowState.PAD] * 2
    assert batch.response_lengths.tolist() == [3] * 5 + [1] * 2, (
        "what a pad's length divides stays finite"
    )
    assert batch.cu_seqlens.dtype == torch.int32


def test_tokens_of_missing_routes_stay_in_the_loss_by_default():
    missing = np.array([False, False, True, False])
    assert (
        pack(
            [Sample(replace(make_rollout("a", 2, 3), missing_routes=missing), 1.0)]
        ).loss_mask.sum()
        == 3
    )
