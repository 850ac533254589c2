"""What every section of the configuration is made of."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator, model_validator
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
    """A configuration that cannot run; the message names key, value, rule and fix."""


class Section(BaseModel):
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
        found: object = validate(value)
        if isinstance(value, bool) and not isinstance(found, bool):  # pydantic converts true to 1
            raise PydanticCustomError("bool_as_number", "Input should be a number")
        return with_home(found)

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        if problem := next(iter(self.problems()), None):
            raise ValueError(problem)
        return self

    def problems(self) -> Iterable[str]:
        """Rules between settings that are broken, as messages; the first one is reported."""
        return ()


def with_home(value: object) -> object:
    """The value; in a path, or in a table of paths, ~ is the home directory, as in a shell."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if isinstance(value, dict):
        return {name: with_home(entry) for name, entry in value.items()}
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggestion for an unknown name: the closest known one, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(
        name, known, n=1, cutoff=0.6
    )  # warmup -> warmup_updates, but not trainer -> track
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
