"""Block FP8 against the format's definition: every e4m3 code spelled out from its bits, blocks cut
by loops.
"""

import bisect
import math

import pytest
import torch
from torch.testing import assert_close

from megatron_rl.weights.hf.fp8 import (
    QuantizeError,
    dequantize_blocks,
    quantize_blocks,
    round_to_fp8,
    scales_shape,
)

KEEP = ("*embed_tokens*", "*mlp.gate.*")


def e4m3_numbers() -> list[float]:
    """Every non-negative finite e4m3fn value: 4 exponent bits with bias 7, 3 fraction bits, no
    infinity, code 127 is NaN.
    """
    codes = [(code >> 3, code & 7) for code in range(127)]
    return [math.ldexp(f / 8, -6) if e == 0 else math.ldexp(1 + f / 8, e - 7) for e, f in codes]


NUMBERS = e4m3_numbers()


def nearest(value: float) -> float:
    """The e4m3 number next to `value`; of two equally near ones the one with an even code."""
    size = abs(value)
    above = min(bisect.bisect_left(NUMBERS, size), len(NUMBERS) - 1)
    below = max(above - 1, 0)
    gap_above, gap_below = NUMBERS[above] - size, size - NUMBERS[below]
    code = above if gap_above < gap_below or (gap_above == gap_below and above % 2 == 0) else below
    return math.copysign(NUMBERS[code], value)


def by_loops(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales), one float32 division per element, one block at a time."""
    rows, columns = weight.shape
    values = torch.zeros(rows, columns)
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scale = part.abs().max() / 448.0
            scales[i, j] = scale
            for (r, c), value in zip(
                torch.cartesian_prod(*map(torch.arange, part.shape)).tolist(),
                part.flatten(),
                strict=True,
            ):
                values[i * block + r, j * block + c] = nearest(float(value / scale))
    return values, scales


def test_the_table_is_the_format():
    assert (len(NUMBERS), NUMBERS[1], NUMBERS[-1]) == (127, 2.0**-9, 448.0)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((128, 128), 128), ((130, 257), 128), ((7, 5), 4), ((8, 8), 4), ((1, 9), 4), ((3, 3), 128)],
)
def test_values_and_scales_against_loops(shape, block):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 2, shape[1])  # blocks of very different size
    values, scales = quantize_blocks(weight, block)
    expected_values, expected_scales = by_loops(weight, block)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert_close(scales, expected_scales, rtol=0, atol=0)
    assert_close(values.float(), expected_values, rtol=0, atol=0)
    rows = torch.arange(shape[0])[:, None] // block
    columns = torch.arange(shape[1])[None] // block
    assert_close(
        dequantize_blocks(values, scales, block),
        expected_values * expected_scales[rows, columns],
        rtol=0,
        atol=0,
    )


def test_every_value_is_within_half_a_step():
    """Half the spacing of 3 fraction bits where e4m3 is normal, half its smallest number below."""
    torch.manual_seed(1)
    weight = torch.randn(300, 200).double()
    values, scales = quantize_blocks(weight)
    error = (dequantize_blocks(values, scales).double() - weight).abs()
    scale = scales.double().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    assert (error <= torch.maximum(weight.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-6)).all()
    assert (error / weight.abs()).median() > 0.01  # and it does round


def test_a_zero_block_stays_zero_and_disturbs_no_other():
    weight = torch.ones(8, 8)
    weight[:4, 4:] = 0.0
    values, scales = quantize_blocks(weight, 4)
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert_close(dequantize_blocks(values, scales, 4), weight, rtol=1e-6, atol=0)


def test_tiny_and_huge_blocks_keep_their_size():
    for size in (1e-30, 1e30):
        weight = torch.tensor([[1.0, -0.5], [0.25, 0.0]]) * size
        assert_close(dequantize_blocks(*quantize_blocks(weight)), weight, rtol=1e-6, atol=0)


def test_rounding_twice_is_rounding_once():
    """The codes are equal; a scale may move by its last bit."""
    torch.manual_seed(2)
    weight = torch.randn(200, 300)
    values, scales = quantize_blocks(weight)
    once = dequantize_blocks(values, scales)
    again, scales_again = quantize_blocks(once)
    assert torch.equal(values.float(), again.float())
    assert_close(scales_again, scales, rtol=2**-23, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(bad):
    weight = torch.ones(4, 4)
    weight[1, 2] = bad
    with pytest.raises(QuantizeError, match=r"cannot quantise layers\.0\.weight .* not finite"):
        round_to_fp8("layers.0.weight", weight, KEEP)


def test_a_stack_of_matrices_is_refused():
    with pytest.raises(QuantizeError, match=r"shape \(2, 3, 4\).*quantize_keep"):
        quantize_blocks(torch.ones(2, 3, 4))


def test_vectors_and_named_tensors_are_kept():
    torch.manual_seed(3)
    names = (
        "model.embed_tokens.weight",
        "l.0.mlp.gate.weight",
        "l.0.mlp.experts.3.gate_proj.weight",
        "l.0.norm.weight",
    )
    tensors = {name: torch.randn(4) if "norm" in name else torch.randn(4, 6) for name in names}
    passed = {name: round_to_fp8(name, tensor, KEEP) for name, tensor in tensors.items()}
    changed = [name for name in names if not torch.equal(passed[name], tensors[name])]
    assert changed == ["l.0.mlp.experts.3.gate_proj.weight"]
    assert_close(
        passed[changed[0]], dequantize_blocks(*quantize_blocks(tensors[changed[0]])), rtol=0, atol=0
    )
    everything = {name: round_to_fp8(name, tensor, ()) for name, tensor in tensors.items()}
    assert [name for name in names if torch.equal(everything[name], tensors[name])] == [
        "l.0.norm.weight"
    ]


def test_the_given_tensor_is_not_written_to():
    weight = torch.randn(4, 4)
    before = weight.clone()
    round_to_fp8("w", weight, ())
    assert torch.equal(weight, before)


def test_a_block_at_the_border_has_a_scale_of_its_own():
    assert scales_shape((128, 129)) == (1, 2) and scales_shape((301, 5), 100) == (4, 1)
