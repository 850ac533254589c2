"""PackedAttention against one plain softmax per sequence and head, outputs and gradients."""

import pytest
import torch

from megatron_rl.engine.attention import (
    PackedAttention,
    PlannedSeqParams,
    packed_attention,
    padded_attention,
    plan_attention,
)


def brute_force(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of one sequence [S, heads, D] with explicit softmax -> [S, A * D]."""
    length, heads, _ = query.shape
    per_group = heads // key.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // per_group].T * scale
        outputs.append(
            scores.masked_fill(future, float("-inf")).softmax(-1) @ value[:, head // per_group]
        )
    return torch.cat(outputs, dim=-1)


def random_qkv(tokens: int, heads: int = 4, groups: int = 2, size: int = 8) -> list[torch.Tensor]:
    return [torch.randn(tokens, n, size, requires_grad=True) for n in (heads, groups, groups)]


@pytest.mark.parametrize(
    "lengths",
    [[7], [1, 1, 1], [5, 11, 3, 17, 1], [8, 9, 16, 2, 2, 33], [4, 0, 6], [5, 20, 6, 1, 18, 7, 1]],
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_packed_equals_each_sequence_alone(lengths: list[int], groups: int) -> None:
    torch.manual_seed(0)
    tensors = random_qkv(sum(lengths), groups=groups)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    got = packed_attention(*tensors, plan_attention(cu_seqlens, tensors[0].device), 0.3)
    parts = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    expected = torch.cat([brute_force(*part, 0.3) for part in parts])
    weight = torch.randn_like(expected)
    got_grads = torch.autograd.grad((got * weight).sum(), tensors)
    expected_grads = torch.autograd.grad((expected * weight).sum(), tensors)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=0, atol=2e-6)


def test_padded_equals_each_sequence_alone() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 3, n, 8) for n in (4, 2, 2))
    got = padded_attention(query, key, value, 0.3)
    for row in range(3):
        torch.testing.assert_close(
            got[:, row],
            brute_force(query[:, row], key[:, row], value[:, row], 0.3),
            rtol=0,
            atol=1e-6,
        )


def test_rows_outside_the_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="ends at 4, but there are 6"):
        packed_attention(
            *random_qkv(6), plan_attention(torch.tensor([0, 4]), torch.device("cpu")), 1.0
        )


def test_layers_share_a_plan_and_read_nothing_from_the_device() -> None:
    class Config:
        attention_dropout, kv_channels, context_parallel_size = 0.0, 8, 1

    bounds = torch.tensor([0, 5, 8, 24], dtype=torch.int32)
    params = PlannedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    # no values there: reading one raises
    on_meta = [tensor.to("meta") for tensor in random_qkv(24)]
    layers = [PackedAttention(Config(), number, None, "self") for number in (1, 2)]  # type: ignore[arg-type]
    plans = []
    for layer in layers:
        assert layer(*on_meta, None, packed_seq_params=params).shape == (24, 4 * 8)
        plans.append(params.plan)
    assert plans[0] is not None and plans[0] is plans[1]


def test_dropout_is_refused() -> None:
    class Config:
        attention_dropout = 0.1

    with pytest.raises(ValueError, match=r"attention_dropout = 0\.1"):
        PackedAttention(Config(), 1, None, "self")  # type: ignore[arg-type]
