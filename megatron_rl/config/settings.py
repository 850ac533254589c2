"""What `megatron-rl settings` prints: every setting with its type, default, allowed values and meaning, from the classes."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_rl.config import renamed
from megatron_rl.config.base import ConfigError, Section, nearest
from megatron_rl.config.loader import SECTIONS, elsewhere
from megatron_rl.config.loss_presets import LossSpec

WIDTH = 100
TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path", NoneType: "None"}
LIMITS = {"gt": "greater than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}"}


def explain(name: str = "") -> str:
    """Text about all sections (""), the keys of one ("run") or one setting ("run.seed").

    Raises ConfigError for an unknown name, with the nearest one.
    """
    section, _, key = name.removeprefix("--").replace("-", "_").partition(".")
    if not section:
        return f"{section_lines()}\n\nmegatron-rl settings SECTION lists its settings, SECTION.KEY explains one."
    if f"{section}.{key}" in renamed.SETTINGS:
        raise ConfigError(f"{section}.{key} was renamed to {renamed.SETTINGS[f'{section}.{key}']}")
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r}{elsewhere(section) or nearest(section, list(SECTIONS))}")
    fields = SECTIONS[section].model_fields
    if not key:
        return "\n".join([f"[{section}]  {summary(SECTIONS[section])}", "", *key_lines(section)])
    if key not in fields:
        raise ConfigError(f"unknown key {section}.{key}{elsewhere(key) or nearest(key, list(fields))}")
    return "\n".join(
        [
            f"{section}.{key}",
            f"  type     {type_of(fields[key])}",
            f"  default  {default_text(fields[key])}",
            textwrap.fill(meaning(section, key), WIDTH, initial_indent="  meaning  ", subsequent_indent=" " * 11),
        ]
    )


def section_lines() -> str:
    """One line for each section."""
    width = max(map(len, SECTIONS)) + 2
    return "\n".join(f"  {name:<{width}}{summary(kind)}" for name, kind in SECTIONS.items())


def key_lines(section: str) -> list[str]:
    """One line for each key: default, and the beginning of its meaning."""
    fields = SECTIONS[section].model_fields
    rows = [(key, default_text(field), meaning(section, key)) for key, field in fields.items()]
    keys, defaults = (max(len(row[column]) for row in rows) for column in (0, 1))
    room = max(30, WIDTH - keys - min(defaults, 16) - 6)
    return [
        f"  {key:<{keys}}  {default:<{min(defaults, 16)}}  {textwrap.shorten(words, room, placeholder=' ...')}"
        for key, default, words in rows
    ]


def summary(section: type[Section]) -> str:
    """The first line of a section's docstring."""
    return (inspect.getdoc(section) or "").partition("\n")[0]


def meaning(section: str, key: str) -> str:
    """The docstring under a setting, as one line; of a switch of the loss, what LossSpec says of it."""
    words = SECTIONS[section].model_fields[key].description or ""
    if not words and section == "loss":
        said = dict(re.findall(r"^(\w+) {2,}(.*(?:\n {4,}.*)*)", inspect.getdoc(LossSpec) or "", re.M))
        words = said.get(key) or said[key.partition("_")[0]]
    return " ".join(words.split())


def default_text(field: FieldInfo) -> str:
    """As a TOML file has it."""
    if field.is_required():
        return "none: required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def type_of(field: FieldInfo) -> str:
    """Type and allowed values in words."""
    return described(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def described(kind: Any) -> str:
    """A type annotation in words; the rules of Annotated follow their type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        metadata = [rule for extra in args[1:] for rule in getattr(extra, "metadata", [extra])]
        return ", ".join([described(args[0]), *(words for rule in metadata for words in rule_words(rule))])
    if origin is Literal:
        return " or ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in args)
    if origin in (Union, UnionType):
        return " or ".join(map(described, args))
    if origin is tuple:
        return f"list of: {described(args[0])}"
    if origin is dict:
        return f"table of names and: {described(args[1])}"
    return TYPES[kind]


def rule_words(rule: Any) -> list[str]:
    """One rule of pydantic's in words."""
    words = [text.format(getattr(rule, name)) for name, text in LIMITS.items() if hasattr(rule, name)]
    words += ["not empty"] if getattr(rule, "min_length", 0) else []
    return words + (["finite"] if getattr(rule, "allow_inf_nan", True) is False else [])
