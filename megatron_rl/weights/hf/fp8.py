"""Block-quantised FP8 weights, as FP8 checkpoints store them: e4m3 values, one scale for each
block.

Shapes: [O, I] a weight; [ceil(O / 128), ceil(I / 128)] its float32 scales, which such checkpoints
call `weight_scale_inv`: weight = value * scale of its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0  # the largest number of float8_e4m3fn
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that an all-zero block is not divided by zero


class QuantizeError(ValueError):
    """A weight that cannot be quantised; the message names it."""


def quantize_blocks(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise a weight [O, I] by blocks.

    Returns values float8_e4m3fn [O, I] and scales float32 [ceil(O / block), ceil(I / block)]: scale
    = max |w| over the block / 448, value = w / scale rounded to the nearest e4m3.  Blocks at the
    borders are smaller.  Raises QuantizeError for a weight that is not a matrix or not finite.
    """
    scales_shape(weight.shape, block)
    if not torch.isfinite(weight).all():
        raise QuantizeError("values are not finite: the weights are damaged, or training diverged")
    tiles = as_tiles(weight.float(), block)
    scales = (tiles.abs().amax(dim=(1, 3)) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    # w / scale may round to just above the maximum, which the cast would turn into NaN
    values = (tiles / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return from_tiles(values, weight.shape).to(torch.float8_e4m3fn), scales


def scales_shape(shape: Sequence[int], block: int = BLOCK) -> tuple[int, int]:
    """Return [ceil(O / block), ceil(I / block)] of a weight [O, I].

    Raises QuantizeError for another number of dimensions.
    """
    if len(shape) != 2:
        raise QuantizeError(
            f"shape {tuple(shape)}: only matrices have blocks; add its name to"
            " rollout.quantize_keep"
        )
    return -(-shape[0] // block), -(-shape[1] // block)


def dequantize_blocks(values: Tensor, scales: Tensor, block: int = BLOCK) -> Tensor:
    """Return float32 [O, I]: every value times the scale of its block."""
    return from_tiles(as_tiles(values.float(), block) * scales[:, None, :, None], values.shape)


def round_to_fp8(name: str, tensor: Tensor, keep: Sequence[str], block: int = BLOCK) -> Tensor:
    """Return a matrix quantised and de-quantised, in float32.

    A server with these weights has the rounding errors of FP8 weights, while its activations keep
    their dtype.  Vectors, and names that match a pattern of `keep` (shell style), are unchanged.
    Raises QuantizeError.
    """
    if tensor.dim() < 2 or any(fnmatchcase(name, pattern) for pattern in keep):
        return tensor
    try:
        return dequantize_blocks(*quantize_blocks(tensor, block), block)
    except QuantizeError as error:
        raise QuantizeError(f"cannot quantise {name} for the servers: {error}") from error


def as_tiles(matrix: Tensor, block: int) -> Tensor:
    """Return [O, I] as [row blocks, block, column blocks, block], with zeros beyond the borders."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % block, 0, -rows % block))
    return padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)


def from_tiles(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Return the inverse of `as_tiles`."""
    rows, columns = shape
    return tiles.reshape(tiles.shape[0] * tiles.shape[1], -1)[:rows, :columns].contiguous()
