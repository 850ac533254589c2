"""Sections and keys of a configuration as data, for the command line, error messages and documentation."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_rl.config.base import Section
from megatron_rl.config.config import Config

Schema = dict[str, Any]
"""JSON schema of a key: type, limits, allowed names, description."""
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


@cache  # pydantic builds a schema in milliseconds, and the help reads all of them
def schemas(section: str) -> dict[str, Schema]:
    """Key -> schema of one section; empty for an unknown section."""
    return SECTIONS[section].model_json_schema()["properties"] if section in SECTIONS else {}


def types_of(schema: Schema) -> set[str]:
    """JSON types of a key's values: array, object, boolean, integer, number, string, null."""
    return {each["type"] for each in schema.get("anyOf", [schema]) if "type" in each}  # older pydantic: none with const


def elsewhere(key: str) -> str:
    """Suggestion for a key that is in the wrong section, or in none: the sections that have it."""
    places = [f"{section}.{key}" for section in SECTIONS if key in schemas(section)]
    return f"; did you mean {' or '.join(places)}?" if places else ""
