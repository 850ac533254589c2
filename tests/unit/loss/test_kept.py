"""n_i of kept_mean: the kept tokens of a response, over its sequences, micro-batches and ranks."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.config import ConfigError, LossConfig
from megatron_rl.loss import aggregate, count_kept, kept_tokens
from tests.thread_ranks import run_thread_ranks
from tests.unit.loss.cases import (
    Response,
    counts,
    loss_of,
    pack,
    prepare,
    responses,
    run,
    run_whole,
)


def even(size, episode=None, advantage=1.0):
    """A sequence with pi = pi_old = mu."""
    x = torch.full((size,), -1.0, dtype=torch.float64)
    return Response(x, x.clone(), x.clone(), advantage, episode)


@pytest.mark.parametrize("sequences", [1, 2, 16])
def test_an_episode_weighs_as_much_as_one_sequence_of_its_tokens(sequences):
    """A response of 16 tokens in any number of sequences has half of the loss of two responses."""
    batch = [even(16 // sequences, episode=0) for _ in range(sequences)] + [even(16)]
    _, gradients = run_whole(batch, loss_of("icepop"))
    of_episode, of_other = torch.cat(gradients[:-1]), gradients[-1]
    assert float(of_episode.sum()) == pytest.approx(-0.5) and float(
        of_other.sum()
    ) == pytest.approx(-0.5)
    assert of_episode.tolist() == pytest.approx([-0.5 / 16] * 16)


def test_tokens_that_the_mask_removed_leave_the_count_of_the_complete_episode():
    """4 + 4 tokens, of which 3 have pi_old/mu = e^9: each of the other 5 weighs 1/5, in either
    sequence.
    """
    first, second = even(4, episode=0), even(4, episode=0)
    first.mu[:3] -= 9.0
    _, gradients = run_whole([first, second], loss_of("icepop"))
    assert [g.tolist() for g in gradients] == [[0.0, 0.0, 0.0, -0.2], [-0.2] * 4]


@pytest.mark.parametrize("which", ["old", "mu"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_ratio_is_not_kept(which, bad):
    """The tokens of the same response do not weigh less for it."""
    batch = [even(4)]
    getattr(batch[0], which)[1] = bad
    _, gradients = run_whole(batch, loss_of("icepop"))
    assert gradients[0].tolist() == pytest.approx([-1 / 3, 0.0, -1 / 3, -1 / 3])


def test_values_outside_the_mask_are_not_kept():
    packed = pack(responses(3))
    packed.mask[:3] = False
    kept = kept_tokens(
        packed.old,
        packed.mu,
        packed.mask,
        packed.sequences,
        loss_of("icepop", weight_high=math.inf),
    )
    assert kept.any() and not kept[~packed.mask].any()


def test_a_mask_of_complete_sequences_decides_for_each_sequence():
    """weight_level = product: the first sequence's product of 1.5^2 is out of bounds, the second's
    1.5 is not.
    """
    batch = [even(2, episode=0), even(1, episode=0)]
    for r in batch:
        r.mu -= math.log(1.5)
    config = loss_of("icepop", weight_level="product", weight_high=2.0)
    prepare(batch, config)
    assert [r.kept for r in batch] == [1, 1]


def test_the_count_runs_over_ranks_and_stays_at_least_one():
    kept = [torch.tensor([True, True, False, True]), torch.tensor([True, False, True])]
    ids = [torch.tensor([0, 1, 1, -1]), torch.tensor([1, 2, 0])]
    found = run_thread_ranks(
        lambda group, rank: count_kept(kept[rank], ids[rank], 3, group)[ids[rank] >= 0].tolist(), 2
    )
    assert found == [[2, 2, 2], [2, 1, 2]]


def test_a_users_loss_keeps_all_its_tokens():
    packed = pack([even(3)])
    packed.mu[:] = -20.0
    config = loss_of(
        "examples.losses.sapo:sapo", aggregation="kept_mean", mask="train_infer", mask_high=2.0
    )
    assert kept_tokens(packed.old, packed.mu, packed.mask, packed.sequences, config).equal(
        packed.mask
    )


def test_an_aggregate_without_the_count_is_refused():
    packed, config = pack(batch := [even(3)]), loss_of("icepop")
    _, _, loss = run(packed, config, **counts(batch))
    with pytest.raises(ValueError, match=r"kept_mean needs Sequences\.kept_lengths"):
        aggregate(loss, replace(packed.sequences, kept_lengths=None), config, **counts(batch))


@pytest.mark.parametrize("ratio", ["total", "staleness"])
@pytest.mark.parametrize("key", ["mask", "weight"])
def test_a_count_that_the_update_changes_is_refused(key, ratio):
    bounds = {"weight_mode": "mask", "weight_high": 2.0} if key == "weight" else {"mask_high": 2.0}
    with pytest.raises(
        (ConfigError, ValueError),
        match=f"loss.{key} = {ratio} masks by pi.*set loss.{key} = train_infer",
    ):
        LossConfig(name="reinforce", aggregation="kept_mean", **{key: ratio}, **bounds)
    LossConfig(name="reinforce", aggregation="sequence_mean", **{key: ratio}, **bounds)
    LossConfig(name="reinforce", aggregation="kept_mean", **{key: "train_infer"}, **bounds)
