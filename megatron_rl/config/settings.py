"""The text of `megatron-rl settings`: type, default, allowed values and meaning of settings."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_rl.config.base import ConfigError, nearest
from megatron_rl.config.loss_presets import LossSwitches
from megatron_rl.config.renamed import SETTINGS
from megatron_rl.config.schema import MODELS, SECTIONS, TABLES, Schema, elsewhere, schemas

WIDTH = 100
TYPES = {
    "integer": "integer", "number": "number", "boolean": "true or false", "string": "text",
    "null": "None",
}  # fmt: skip
LIMITS = {
    "exclusiveMinimum": "greater than {}", "minimum": "at least {}",
    "exclusiveMaximum": "less than {}", "maximum": "at most {}",
    "minLength": "not empty", "finite": "finite",
}  # fmt: skip


def explain(name: str = "") -> str:
    """Return a text about all sections (""), the keys of one ("run") or one setting ("run.seed").

    Raises ConfigError for an unknown name, with the nearest one.
    """
    section, _, key = name.removeprefix("--").replace("-", "_").partition(".")
    if not section:
        usage = "megatron-rl settings SECTION lists its settings, SECTION.KEY explains one."
        return f"{section_lines()}\n\n{usage}"
    if f"{section}.{key}" in SETTINGS:
        raise ConfigError(f"{section}.{key} was renamed to {SETTINGS[f'{section}.{key}']}")
    if section not in SECTIONS:
        hint = elsewhere(section) or nearest(section, SECTIONS)
        raise ConfigError(f"unknown section {section!r}{hint}")
    fields = SECTIONS[section].model_fields
    if not fields:
        text = f"[{section}]  {inspect.getdoc(SECTIONS[section])}"
        paragraphs = [textwrap.fill(paragraph, WIDTH) for paragraph in text.split("\n\n")]
        tables = [table for table in TABLES if table.startswith(f"{section}.")]
        lines = ["\n".join([f"[{table}]", "", *key_lines(table)]) for table in tables]
        return "\n\n".join([*paragraphs, *lines])
    if not key:
        return "\n".join([f"[{section}]  {summary(section)}", "", *key_lines(section)])
    if key not in fields:
        raise ConfigError(f"unknown key {section}.{key}{elsewhere(key) or nearest(key, fields)}")
    # further lines begin under the first: "  meaning  " has 11 characters
    text = textwrap.fill(meaning(section, key), WIDTH - 11).replace("\n", "\n" + " " * 11)
    return (
        f"{section}.{key}\n"
        f"  type     {type_text(schemas(section)[key])}\n"
        f"  default  {default_text(fields[key])}\n"
        f"  meaning  {text}"
    )


def section_lines() -> str:
    """Return one line for every section."""
    width = max(map(len, SECTIONS)) + 2
    return "\n".join(f"  {name:<{width}}{summary(name)}" for name in SECTIONS)


def key_lines(section: str) -> list[str]:
    """Return one line for every key: default, and the beginning of its meaning."""
    fields = MODELS[section].model_fields
    defaults = {key: default_text(field) for key, field in fields.items()}
    width = max(map(len, defaults))
    default_width = min(16, max(map(len, defaults.values())))
    room = max(30, WIDTH - width - default_width - 6)
    texts = {
        key: textwrap.shorten(meaning(section, key), room, placeholder=" ...") for key in fields
    }
    return [
        f"  {key:<{width}}  {default:<{default_width}}  {texts[key]}"
        for key, default in defaults.items()
    ]


def summary(section: str) -> str:
    """Return the first paragraph of a section's docstring, as one line."""
    paragraph = (inspect.getdoc(SECTIONS[section]) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def meaning(section: str, key: str) -> str:
    """Return the text under a setting, as one line."""
    text = schemas(section)[key].get("description", "")
    if not text and section == "loss":
        texts = switch_texts()
        word = key.partition("_")[0]  # clip_low has the text of clip
        text = texts.get(key) or next(texts[name] for name in texts if name.startswith(word))
    return " ".join(text.split())


@cache
def switch_texts() -> dict[str, str]:
    """Return the text under every switch in LossSwitches that has one.

    pydantic reads the texts under fields of its models only, and LossSwitches is a dataclass.
    """
    texts = {}
    statements = ast.parse(inspect.getsource(LossSwitches)).body[0]
    # the text of a field is the statement after it
    for field, text in pairwise(ast.iter_child_nodes(statements)):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(value))):
                texts[name] = value
    return texts


def default_text(field: FieldInfo) -> str:
    """Return the default as TOML."""
    if field.is_required():
        return "none: required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):  # before str(): TOML writes true, not True
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def type_text(schema: Schema) -> str:
    """Return type and allowed values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(map(type_text, schema["anyOf"]))
    if names := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(map(json.dumps, names))
    if schema["type"] == "array":
        return f"list of: {type_text(schema['items'])}"
    if "properties" in schema:
        return f"table of {', '.join(schema['properties'])}"
    if schema["type"] == "object":
        return f"table of names and: {type_text(schema['additionalProperties'])}"
    kind = "path" if schema.get("format") == "path" else TYPES[schema["type"]]
    return ", ".join(
        [kind, *(text.format(schema[limit]) for limit, text in LIMITS.items() if limit in schema)]
    )
