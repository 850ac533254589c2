"""What every section of the configuration is made of."""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Bound = Annotated[float, Field(ge=0)]
"""At least 0, and inf where there is no bound."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConfigError(ValueError):
    """A configuration that cannot run; the message names key, value, rule and fix."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,  # the text under a setting is its description
    )


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
