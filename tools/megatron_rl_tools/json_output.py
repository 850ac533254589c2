"""Results of commands as JSON that every parser reads.  Imports no torch."""

from __future__ import annotations

import json
import math


def json_text(value: object) -> str:
    """Return the value as JSON, with null for NaN and infinity, which JSON does not have."""
    return json.dumps(finite_values(value), indent=1, allow_nan=False)


def finite_values(value: object) -> object:
    """Return dicts, lists and plain values with None in the place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_values(item) for item in value]
    return value
