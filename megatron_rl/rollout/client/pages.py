"""Large arrays in memory pages of their own.

The C library keeps what it frees for later, and arrays that live long lie between bodies of answers
that do not: open sessions then hold half as much again as their arrays.  Pages go back to the
system with the array.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
from numpy.typing import DTypeLike

MIN_BYTES = 128 * 1024
"""Smaller arrays share pages."""


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return what np.empty(shape, dtype) returns."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < MIN_BYTES:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)
