"""Answers as JSON that every browser reads: NaN and infinity are null, arrays lists or packed."""

from __future__ import annotations

import base64
import json
import math

import numpy as np


def answer_json(value: object) -> str:
    # ASCII, because half a surrogate pair has no UTF-8
    return json.dumps(clean(value), allow_nan=False, separators=(",", ":"))


def clean(value: object) -> object:
    """Convert to dicts, lists and plain values."""
    if isinstance(value, float):  # np.float64 too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, np.generic):
        return clean(value.item())
    if value is None or isinstance(value, str | int):
        return value
    return str(value)  # a date of a TOML file


def packed(array: np.ndarray | None) -> dict[str, object] | None:
    """Return {"dtype", "shape", "data"}: data in base64, little-endian, last axis fastest.

    As lists, the ids of 32k tokens x 48 layers x 8 experts would have 40 MB.
    """
    if array is None:
        return None
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "data": base64.b64encode(data.tobytes()).decode(),
    }
