"""The packed order against a per-token loop written without looking at pack.py."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.records import RowState
from tests.unit.batch.rollouts import make_rollout

shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 8), st.sampled_from([1, 4, 6]), st.booleans())
def test_every_row_against_a_loop(lengths, multiple, sequence_multiple, padded):
    rollouts = [make_rollout(f"r{i}", p, r, seed=i) for i, (p, r) in enumerate(lengths)]
    rule = PackRule(pad_multiple=multiple * sequence_multiple, sequence_multiple=sequence_multiple, padded=padded)
    rows = rule.rows([rule.sequence_rows(p + r) for p, r in lengths])
    batch = pack([Sample(rollout, i + 0.5) for i, rollout in enumerate(rollouts)], rows)
    longest = max(p + r for p, r in lengths)
    if padded:  # all alike, no more than the longest needs
        assert set(rows) == {batch.num_tokens // len(lengths)} and 0 <= rows[0] - longest < sequence_multiple
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
                assert (batch.routed_experts[i][row - batch.cu_seqlens[i]] == rollout.routed_experts[s]).all()
            else:
                assert batch.row_state[row] == RowState.LIVE
            if predicts_response:
                assert batch.rollout_logprobs[row] == rollout.rollout_logprobs[s + 1 - rollout.prompt_length]
                assert batch.advantages[row] == i + 0.5
            else:
                assert batch.rollout_logprobs[row] == 0 and batch.advantages[row] == 0
            row += 1
        while (row - batch.cu_seqlens[i]) % sequence_multiple or (padded and row - batch.cu_seqlens[i] < longest):
            assert batch.positions[row] == row - batch.cu_seqlens[i]
            assert batch.row_state[row] == RowState.PAD and not batch.loss_mask[row] and batch.sequence_ids[row] == -1
            assert batch.tokens[row] == batch.labels[row] == batch.advantages[row] == batch.rollout_logprobs[row] == 0
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
        pack([Sample(replace(good, prompt_length=7, rollout_logprobs=np.zeros(0, np.float32)), 0.0)])
    with pytest.raises(ValueError, match=r"\['none'\] carry no routed experts"):
        pack([Sample(good, 0.0), Sample(make_rollout("none", 2, 2, routes=False), 0.0)])
