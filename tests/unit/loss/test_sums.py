"""Sums over responses, and denominators when tokens are missing: pads, masked tokens, tokens with a
bad log-prob.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.loss import Sequences
from tests.unit.loss.cases import Response, loss_of, pack, run

IDS = torch.tensor([1, -1, 0, 1, -1, 1])
VALUES = torch.tensor([1.0, 100.0, 10.0, 2.0, 100.0, 4.0], dtype=torch.float64)
MASK = torch.tensor([True, False, True, False, False, True])


def test_sum_and_mean_of_a_small_example():
    """Pads belong to no response; the mean counts tokens of the mask only."""
    sequences = Sequences(IDS, 3, torch.ones_like(IDS))
    assert sequences.sum(VALUES).tolist() == [7.0, 0.0, 10.0, 7.0, 0.0, 7.0]
    assert sequences.mean(VALUES, MASK).tolist() == [2.5, 0.0, 10.0, 2.5, 0.0, 2.5]
    assert sequences.mean(VALUES, torch.zeros_like(MASK)).tolist() == [0.0] * 6


def test_lengths_from_ids_count_the_mask():
    made = Sequences.of(IDS, MASK)
    assert made.count == 2 and made.lengths[IDS >= 0].tolist() == [2, 1, 2, 2]
    nothing = Sequences.of(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))
    assert nothing.count == 0


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    [
        ("sequence_sum", (2, 2)),
        ("sequence_mean", (2 * 3, 2 * 1)),
        ("token_mean", (4, 4)),
        ("kept_mean", (2 * 3, 2 * 1)),  # n_i is counted before the update: pi does not matter
    ],
)
def test_denominators_with_a_bad_token(aggregation, divisors):
    """REINFORCE on responses of 3 and 1 tokens, one of the 3 with a NaN log-prob."""
    first = torch.tensor([-1.0, math.nan, -2.0], dtype=torch.float64)
    second = torch.tensor([-0.5], dtype=torch.float64)
    batch = [Response(x, torch.zeros_like(x), torch.zeros_like(x), 1.0) for x in (first, second)]
    config = loss_of("reinforce", aggregation=aggregation)
    total, _, _ = run(pack(batch), config, num_responses=2, num_response_tokens=4)
    assert float(total) == pytest.approx(3.0 / divisors[0] + 0.5 / divisors[1], rel=1e-14)


@pytest.mark.parametrize(
    "aggregation", ["sequence_sum", "sequence_mean", "token_mean", "kept_mean"]
)
def test_a_mini_batch_with_nothing_left(aggregation):
    packed = pack([Response(*(torch.zeros(2, dtype=torch.float64) for _ in range(3)), 1.0)])
    packed.mask[:] = False
    total, gradient, _ = run(
        packed, loss_of("minirl", aggregation=aggregation), num_responses=0, num_response_tokens=0
    )
    assert float(total) == 0 and (gradient == 0).all()


def test_a_sequence_ratio_leaves_bad_tokens_out():
    """s = exp of the mean log-ratio of the two good tokens, not of the three."""
    x = torch.tensor([0.2, math.nan, 0.4], dtype=torch.float64) - 1.0
    batch = [Response(x, torch.full_like(x, -1.0), torch.full_like(x, -1.0), 1.0)]
    config = loss_of("gspo", clip="none")
    total, _, _ = run(pack(batch), config, num_responses=1, num_response_tokens=3)
    assert float(total) == pytest.approx(-math.exp(0.3) * 2 / 3, rel=1e-14)


def test_sums_run_over_the_group_that_is_given(monkeypatch):
    """Context ranks hold parts of the same responses; the other ranks of the job hold other
    responses.
    """
    group, asked = SimpleNamespace(size=lambda: 2), []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, group=None: asked.append(group)
    )
    ids = torch.tensor([0, 0, 1])
    Sequences(ids, 2, torch.ones_like(ids), group).sum(torch.ones(3))
    assert asked == [group]
