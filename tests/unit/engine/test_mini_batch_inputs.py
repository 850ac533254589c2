"""What the loss needs of the complete mini-batch, from packed rows."""

from types import SimpleNamespace

import pytest
import torch

import megatron_rl.distributed  # noqa: F401  (CPU support first)
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import LossConfig
from megatron_rl.engine.mini_batch_inputs import make_sequences
from megatron_rl.records.packed import MiniBatch
from tests.unit.batch.rollouts import make_rollout, make_tree

ALONE = SimpleNamespace(cp_group=None, dp_cp_group=None)


def test_kept_tokens_are_counted_over_the_sequences_of_an_episode():
    """pi_old = mu but for every third row of the loss, where it is e times as large: beyond
    weight_high = 2.
    """
    samples = [
        Sample(make_tree("p/0", seed=1), 0.5),
        Sample(make_rollout("p/1", 3, 5, seed=2), -0.5),
    ]
    batch = make_mini_batch(samples, max_tokens=20, rule=PackRule(), dp_group=None)
    assert len(batch.micro_batches) > 1
    old, expected = [], {"p/0": 0, "p/1": 0}
    for part in batch.micro_batches:
        values = part.rollout_logprobs.clone()
        for place, row in enumerate(part.loss_mask.nonzero().flatten().tolist()):
            values[row] += float(place % 3 == 0)
            expected[part.rollout_ids[int(part.sequence_ids[row])][:3]] += place % 3 != 0
        old.append(values)
    found = make_sequences(
        batch, batch.micro_batches, old, LossConfig(name="icepop", weight_high=2.0), ALONE
    )
    for part, sequences in zip(batch.micro_batches, found, strict=True):
        for row in part.loss_mask.nonzero().flatten().tolist():
            name = part.rollout_ids[int(part.sequence_ids[row])][:3]
            assert int(sequences.kept_lengths[row]) == expected[name] and int(
                sequences.lengths[row]
            ) in (19, 5)


def test_a_mini_batch_without_the_numbers_of_its_responses_is_refused():
    """As one that an earlier version saved; other losses do not need them."""
    samples = (Sample(make_rollout("p/0", 3, 5), 0.5),)
    part = pack(samples)
    arguments = MiniBatch((part,), 1, 5, (samples,)), [part], [torch.zeros(part.num_tokens)]
    with pytest.raises(
        ValueError, match=r"kept_mean needs Sample\.response .*the program that saved it"
    ):
        make_sequences(*arguments, LossConfig(name="icepop"), ALONE)
    assert make_sequences(*arguments, LossConfig(name="grpo"), ALONE)[0].kept_lengths is None
