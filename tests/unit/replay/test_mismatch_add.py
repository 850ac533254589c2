"""What a router call adds: nothing is read back from the device, and gate weights follow the score
function.
"""

import math

import pytest
import torch

from megatron_rl.replay.mismatch import COLUMNS, Mismatch

ROWS, EXPERTS, K = 6, 8, 2


def call(mismatch, scores, live, rollout):
    mismatch.add(0, 0, scores, live, live, rollout)
    return dict(zip(COLUMNS, mismatch.sums[0].tolist(), strict=True))


def test_add_never_waits_for_the_device():
    """Tensors without storage refuse every read of a value: .item(), bool(), boolean indexing,
    nonzero().
    """
    with torch.device("meta"):
        scores, ids = torch.empty(ROWS, EXPERTS), torch.empty(ROWS, K, dtype=torch.int64)
        mismatch = Mismatch((0, 3), [torch.empty(ROWS, dtype=torch.bool)])
        for local in (0, 1):
            mismatch.add(local, 0, scores, ids, ids, ids.to(torch.uint8))
        with pytest.raises((RuntimeError, NotImplementedError)):
            mismatch.sums[0, 0].item()


def test_gate_mass_of_logits_is_a_softmax_and_of_probabilities_a_share():
    live, rollout = torch.tensor([[0, 1]]), torch.tensor([[1, 5]], dtype=torch.uint8)
    probabilities = torch.tensor([[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.0]])
    one = [torch.tensor([True])]
    shares = call(Mismatch((0,), one, scores_are_logits=False), probabilities, live, rollout)
    assert shares["replaced_mass"] == pytest.approx(0.4 / 0.6)
    # exp(log p) / sum = the same share
    logits = call(Mismatch((0,), one), probabilities.log(), live, rollout)
    assert logits["replaced_mass"] == pytest.approx(0.4 / 0.6)


def test_an_expert_bias_selects_but_carries_no_gate_mass():
    """Margins are of what the router selects by; the gate weights of experts 0 and 1 are 0.4 and
    0.2, whatever the bias.
    """
    live, rollout = torch.tensor([[0, 1]]), torch.tensor([[1, 5]], dtype=torch.uint8)
    sigmoid = torch.tensor([[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.0]])
    bias = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0])
    mismatch = Mismatch((0,), [torch.tensor([True])], scores_are_logits=False)
    mismatch.add(0, 0, sigmoid + bias, live, live, rollout, bias=bias)
    sums = dict(zip(COLUMNS, mismatch.sums[0].tolist(), strict=True))
    assert sums["replaced_mass"] == pytest.approx(0.4 / 0.6)
    assert sums["flipped_margin"] == pytest.approx(0.4 - 0.15)


def test_scores_of_16_bits_are_compared_in_32():
    """Differences and shares of bf16 scores, made in bf16, would be off by up to 1 in 256."""
    scores = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    live, rollout = scores.topk(K).indices, torch.tensor([[0, 1]] * ROWS, dtype=torch.uint8)
    every = [torch.ones(ROWS, dtype=torch.bool)]
    rough, exact = Mismatch((0,), every), Mismatch((0,), every)
    assert call(rough, scores, live, rollout) == call(exact, scores.float(), live, rollout)
    assert rough.largest_gap == exact.largest_gap > 0


def test_a_micro_batch_without_rows_counts_nothing():
    none = torch.empty(0, K, dtype=torch.int64)
    sums = call(
        Mismatch((0,), [torch.empty(0, dtype=torch.bool)]), torch.empty(0, EXPERTS), none, none
    )
    assert set(sums.values()) == {0.0}


def test_choosing_every_expert_never_flips():
    live = torch.arange(EXPERTS).expand(ROWS, -1)
    sums = call(
        Mismatch((0,), [torch.ones(ROWS, dtype=torch.bool)]),
        torch.randn(ROWS, EXPERTS),
        live,
        live.flip(1),
    )
    assert (sums["pairs"], sums["flips"], sums["replaced_mass"]) == (ROWS, 0, 0)


def test_sums_over_many_rows_are_those_of_single_rows_in_64_bits():
    """A sum of 2,000 margins in 32 bits is off by some 1e-7."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2000, EXPERTS, generator=generator)
    live = scores.topk(K).indices
    rollout = torch.rand(2000, EXPERTS, generator=generator).argsort(1)[:, :K]
    rollout[::2] = live[::2]
    mismatch = Mismatch((0,), [torch.ones(2000, dtype=torch.bool)])
    together = call(mismatch, scores, live, rollout)
    ranked = scores.sort(1, descending=True).values
    margin = (ranked[:, K - 1] - ranked[:, K]).tolist()
    flips = [set(a) != set(b) for a, b in zip(live.tolist(), rollout.tolist(), strict=True)]
    weights = scores.gather(1, live).softmax(1).tolist()
    lost = [
        w
        for row, ids, others in zip(weights, live.tolist(), rollout.tolist(), strict=True)
        for w, i in zip(row, ids, strict=True)
        if i not in others
    ]
    assert sum(flips) > 100
    for name, expected in {
        "flipped_margin": math.fsum(m for m, flip in zip(margin, flips, strict=True) if flip),
        "kept_margin": math.fsum(m for m, flip in zip(margin, flips, strict=True) if not flip),
        "replaced_mass": math.fsum(lost),
    }.items():
        assert together[name] == pytest.approx(expected, rel=1e-12), name


def test_nothing_that_is_kept_holds_the_graph_of_a_forward():
    scores = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mismatch = Mismatch((0,), [torch.ones(ROWS, dtype=torch.bool)])
    call(mismatch, scores, scores.topk(K).indices, torch.tensor([[0, 1]] * ROWS))
    assert (
        mismatch.largest_gap > 0
        and not mismatch.sums.requires_grad
        and not mismatch.largest_gap.requires_grad
    )
