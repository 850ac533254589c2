"""Torch's stand-ins for the kernels of gated delta nets: packed sequences do not see one
another.
"""

import pytest
import torch

from megatron_rl.engine.linear_attention import causal_conv1d, l2norm, per_sequence

BOUNDS = torch.tensor([0, 3, 3, 8])


@pytest.fixture
def x():
    return torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0))


def test_a_convolution_is_causal_and_apart_for_each_sequence(x):
    weight, bias = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.arange(4.0)
    found, _ = causal_conv1d(
        x, weight, bias, activation="silu", cu_seqlens=BOUNDS, initial_state=None
    )
    for first, row in ((0, 0), (0, 2), (3, 3), (3, 6)):
        taps = [
            (x[0, row - back] * weight[:, 2 - back]) for back in range(3) if row - back >= first
        ]
        assert torch.allclose(
            found[0, row], torch.nn.functional.silu(sum(taps) + bias), atol=1e-6
        ), row
    one = causal_conv1d(x[:, 3:], weight, bias, activation="silu")[0]
    assert torch.allclose(found[:, 3:], one, atol=1e-6)


def test_a_rule_starts_again_in_each_sequence(x):
    rule = per_sequence(lambda q, k, v, *, g, beta, scale: (scale * v.cumsum(1), None))
    found, state = rule(x, x, x, g=x, beta=x, cu_seqlens=BOUNDS, scale=2.0)
    assert state is None
    assert torch.allclose(found, 2 * torch.cat([x[:, :3].cumsum(1), x[:, 3:].cumsum(1)], dim=1))


def test_l2norm_is_computed_in_float32():
    x = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert (
        torch.allclose(l2norm(x).float(), torch.tensor([0.6, 0.8]), atol=2e-3)
        and l2norm(x).dtype == torch.bfloat16
    )
    assert not l2norm(torch.zeros(2)).any()
