"""What `megatron-rl settings` prints: type, default, allowed values and meaning of every setting, from the section classes."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_rl.config.base import ConfigError, nearest
from megatron_rl.config.loss_presets import LossSpec
from megatron_rl.config.renamed import SETTINGS
from megatron_rl.config.schema import SECTIONS, Schema, elsewhere, schemas

WIDTH = 100
TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "None"}
LIMITS = {
    "exclusiveMinimum": "greater than {}", "minimum": "at least {}", "exclusiveMaximum": "less than {}", "maximum": "at most {}",
    "minLength": "not empty", "finite": "finite",
}  # fmt: skip


def explain(name: str = "") -> str:
    """Text about all sections (""), the keys of one ("run") or one setting ("run.seed").

    Raises ConfigError for an unknown name, with the nearest one.
    """
    section, _, key = name.removeprefix("--").replace("-", "_").partition(".")
    if not section:
        return f"{section_lines()}\n\nmegatron-rl settings SECTION lists its settings, SECTION.KEY explains one."
    if f"{section}.{key}" in SETTINGS:
        raise ConfigError(f"{section}.{key} was renamed to {SETTINGS[f'{section}.{key}']}")
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r}{elsewhere(section) or nearest(section, SECTIONS)}")
    fields = SECTIONS[section].model_fields
    if not fields:
        return f"[{section}]  {inspect.getdoc(SECTIONS[section])}"
    if not key:
        return "\n".join([f"[{section}]  {summary(section)}", "", *key_lines(section)])
    if key not in fields:
        raise ConfigError(f"unknown key {section}.{key}{elsewhere(key) or nearest(key, fields)}")
    return "\n".join(
        [
            f"{section}.{key}",
            f"  type     {type_text(schemas(section)[key])}",
            f"  default  {default_text(fields[key])}",
            textwrap.fill(meaning(section, key), WIDTH, initial_indent="  meaning  ", subsequent_indent=" " * 11),
        ]
    )


def section_lines() -> str:
    """One line for each section."""
    width = max(map(len, SECTIONS)) + 2
    return "\n".join(f"  {name:<{width}}{summary(name)}" for name in SECTIONS)


def key_lines(section: str) -> list[str]:
    """One line for each key: default, and the beginning of its meaning."""
    rows = [(key, default_text(field), meaning(section, key)) for key, field in SECTIONS[section].model_fields.items()]
    width = max(len(key) for key, _, _ in rows)
    default_width = min(16, max(len(default) for _, default, _ in rows))
    room = max(30, WIDTH - width - default_width - 6)
    return [
        f"  {key:<{width}}  {default:<{default_width}}  {textwrap.shorten(text, room, placeholder=' ...')}"
        for key, default, text in rows
    ]


def summary(section: str) -> str:
    """The first line of a section's docstring."""
    return (inspect.getdoc(SECTIONS[section]) or "").partition("\n")[0]


def meaning(section: str, key: str) -> str:
    """The docstring under a setting, as one line; for a switch of the loss, its line in the docstring of LossSpec."""
    text = schemas(section)[key].get("description", "")
    if not text and section == "loss":  # switches are documented once, in LossSpec
        switches = dict(re.findall(r"^(\w+) {2,}(.*(?:\n {4,}.*)*)", inspect.getdoc(LossSpec) or "", re.M))
        text = switches.get(key) or switches[key.partition("_")[0]]  # clip_low: see clip
    return " ".join(text.split())


def default_text(field: FieldInfo) -> str:
    """The default as TOML."""
    if field.is_required():
        return "none: required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):  # before str(): TOML writes true, not True
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def type_text(schema: Schema) -> str:
    """Type and allowed values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(map(type_text, schema["anyOf"]))
    if names := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(map(json.dumps, names))
    if schema["type"] == "array":
        return f"list of: {type_text(schema['items'])}"
    if schema["type"] == "object":
        return f"table of names and: {type_text(schema['additionalProperties'])}"
    kind = "path" if schema.get("format") == "path" else TYPES[schema["type"]]
    return ", ".join([kind, *(text.format(schema[limit]) for limit, text in LIMITS.items() if limit in schema)])
