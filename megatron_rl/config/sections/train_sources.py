"""The tables of [[data.train]]: files of prompts that are mixed by weight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron_rl.config.base import AboveZero, Section, nearest

MOST_SOURCES = 32
"""Every source has metrics of its own."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


class TrainSource(Section):
    """One file of prompts in a mixture."""

    name: str
    """The source's name in metrics, rollouts and reward functions."""
    path: Path
    """jsonl or parquet with one prompt per row."""
    weight: AboveZero = 1.0
    """Share of the prompts that come from here, relative to the other sources' weights."""
    when_used_up: Literal["repeat", "stop", "drop"] = "repeat"
    """After the last prompt of the file: repeat = all of them again, in another order; stop = the
    run ends; drop = the other sources continue without this one."""
    prompt_key: str | None = None
    """prompt_key of this file; default: that of [data]."""
    label_key: str | None = None
    """label_key of this file; default: that of [data]."""
    template: str | None = None
    """template of this file; default: that of [data]."""

    def problems(self) -> Iterator[str]:
        if not NAME.fullmatch(self.name):
            yield (
                f"name = {self.name!r}: must be letters, digits, _, - and ., 64 at most, as"
                " metrics have it; rename it"
            )


def sources_of(value: object) -> object:
    """Return the value of data.train with its tables as TrainSource; a path stays as it is.

    Raises ValueError for a table that is no source, and for names that are not unique.
    """
    if not isinstance(value, list | tuple):
        return value
    # the command line gives a list of words, of which one is a path
    if len(value) == 1 and isinstance(value[0], str | Path):
        return value[0]
    if not value:
        raise ValueError("train names no file; write train = FILE, or a table [[data.train]]")
    if len(value) > MOST_SOURCES:
        raise ValueError(
            f"train has {len(value)} sources: must have {MOST_SOURCES} at most, as each has metrics"
            " of its own; join files of one kind"
        )
    sources = tuple(source_of(number, table) for number, table in enumerate(value, start=1))
    name, count = Counter(source.name for source in sources).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"train has {count} sources with name = {name!r}: metrics and rollouts name the"
            " source; rename one"
        )
    return sources


def source_of(number: int, table: object) -> TrainSource:
    if isinstance(table, TrainSource):
        return table
    if not isinstance(table, Mapping):
        raise ValueError(
            f"train, source {number}: must be a table, got {table!r}; write [[data.train]] with"
            " name and path for every file"
        )
    try:
        return TrainSource.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        name = table.get("name")
        which = f"source {number}" + (f" ({name})" if isinstance(name, str) else "")
        raise ValueError(f"train, {which}: {problem_text(first)}") from error


def problem_text(error: Mapping[str, Any], table: type[Section] = TrainSource) -> str:
    """Return the problem of a table in the words of the other settings' messages."""
    key = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "missing":
        return f"{key} is missing; set it"
    if error["type"] == "extra_forbidden":
        return f"unknown key {key} = {error['input']!r}{nearest(key, table.model_fields)}"
    if not key:
        return str(error["msg"]).removeprefix("Value error, ")
    rule = str(error["msg"]).partition(" should ")[2] or error["msg"]
    rule = rule.replace("a valid tuple", "a list")
    default = table.model_fields[key].default
    return f"{key} = {error['input']!r}: must {rule}; change it, or remove it for {default!r}"


def names_of(train: Path | Sequence[TrainSource]) -> tuple[str, ...]:
    """Return the names of the sources, () where data.train is one file."""
    return () if isinstance(train, Path) else tuple(source.name for source in train)
