"""Context-parallel attention on real gloo ranks: each rank's rows and gradients equal those of
attention on one rank.
"""

import itertools

import pytest

from tests.dist.launch import run_ranks

LENGTHS = (16, 8, 40, 0, 8, 24)


def largest_difference(pairs):
    return max(float((got - expected).abs().max()) for got, expected in pairs)


def on_four_ranks():
    """On a rank: the comparison in a group of all four and in groups of two."""
    import torch.distributed as dist

    import megatron_rl.distributed  # noqa: F401  (CPU support first)

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = [
        compare_with_one_rank(group) for group in (dist.group.WORLD, pairs[dist.get_rank() // 2])
    ]
    dist.destroy_process_group()
    return results


def compare_with_one_rank(group):
    """Largest difference of outputs and of query, key, value gradients, packed and padded."""
    import torch

    from megatron_rl.engine.attention import packed_attention, padded_attention, plan_attention
    from megatron_rl_tools.verify_replay.fingerprints import rows_on_rank

    size = group.size()
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    device = cu_seqlens.device
    total, differences = sum(LENGTHS), {}
    for form, shape, lengths in (("packed", (total,), LENGTHS), ("padded", (24, 3), (24,))):
        heads = (4, 2, 2)  # grouped queries
        everything = [torch.randn(*shape, n, 8, requires_grad=True) for n in heads]
        weight = torch.randn(*shape, heads[0] * 8)
        rows = rows_on_rank([0, *itertools.accumulate(lengths)], group.rank(), group.size())
        mine = [tensor.detach()[rows].requires_grad_() for tensor in everything]
        if form == "packed":
            expected = packed_attention(*everything, plan_attention(cu_seqlens, device), 0.3)
            got = packed_attention(*mine, plan_attention(cu_seqlens, device, group), 0.3, group)
        else:
            expected = padded_attention(*everything, 0.3)
            got = padded_attention(*mine, 0.3, group)
        (expected * weight).sum().backward()
        (got * weight[rows]).sum().backward()
        gradients = [(a.grad, b.grad[rows]) for a, b in zip(mine, everything, strict=True)]
        differences[form] = (
            largest_difference([(got, expected[rows])]),
            largest_difference(gradients),
        )
    with pytest.raises(ValueError, match=r"7 rows is not a multiple of 2 x parallel\.cp"):
        plan_attention(torch.tensor([0, 7, 6 * size]), device, group)
    with pytest.raises(ValueError, match="3 rows on a CP rank"):
        padded_attention(*(torch.randn(3, 1, n, 8) for n in heads), 0.3, group)
    return differences


def test_context_parallel_attention_equals_one_rank():
    for results in run_ranks(on_four_ranks, 4):
        assert len(results) == 2
        for differences in results:
            for form, (output, gradient) in differences.items():
                assert output < 2e-6 and gradient < 5e-6, (form, output, gradient)
