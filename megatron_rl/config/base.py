"""The base class of all sections of the configuration, and their types of numbers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

FINITE = {"finite": True}  # JSON schemas cannot express it: `megatron-rl settings` reads this key

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Bound = Annotated[float, Field(ge=0)]
"""At least 0, and inf for no bound."""
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False, json_schema_extra=FINITE)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, json_schema_extra=FINITE)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False, json_schema_extra=FINITE)]


class ConfigError(ValueError):
    """A configuration that cannot run, or names what cannot be loaded; the message names key,
    value, rule and fix.  A rank that it ends has the exit status BAD_CONFIG: a restart would not
    help.
    """


class Section(BaseModel):
    """A section of the configuration: a field is a key, and the text under it documents it."""

    model_config = ConfigDict(
        extra="forbid",  # a misspelt key must not be ignored
        frozen=True,  # every rank and stage reads the same values for the entire run
        validate_default=True,  # else a wrong default would pass until a user repeats it
        ser_json_inf_nan="constants",  # loss.weight_high = inf must survive dump_config
        use_attribute_docstrings=True,  # the text under a setting is its description
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def check_number(cls, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        """Refuse true and false for a number, which pydantic would convert to 1 and 0."""
        checked: object = validate(value)
        if isinstance(value, bool) and not isinstance(checked, bool):
            raise PydanticCustomError("bool_as_number", "Input should be a number")
        return with_home(checked)

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        """Raise ValueError with the first broken rule."""
        if problem := next(iter(self.problems()), None):
            raise ValueError(problem)
        return self

    def problems(self) -> Iterable[str]:
        """Yield a message for every broken rule between settings; the first one is reported."""
        return ()


def with_home(value: object) -> object:
    """Replace ~ by the home directory, as a shell does, in a path or in a table of paths."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if isinstance(value, dict):
        return {name: with_home(entry) for name, entry in value.items()}
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is closest to an unknown one, or all known names."""
    known = list(known)
    # at this cutoff warmup suggests warmup_updates, but trainer does not suggest track
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
