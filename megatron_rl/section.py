"""What a section of the configuration is.  Imports no torch."""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Bound = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Frozen; an unknown key is an error, and so is a default that breaks its own rule."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, ser_json_inf_nan="constants")


def nearest(name: str, known: list[str]) -> str:
    """The end of a message about an unknown name: the closest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
