"""Command line -> values of sections: --section.key VALUE, --section.key=VALUE, a flag alone, --section.no_flag.

A key whose value is a list takes every word up to the next option (none: an empty list), one with names takes pairs in place of
those of the file, and --section.key.name VALUE sets one of them.  Words become numbers, paths and the rest where the whole
configuration is checked: one place, one kind of message.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from megatron_rl.config.base import ConfigError, Section

TRUE_FALSE = {"true": True, "True": True, "false": False, "False": False}


def section_values(overrides: Sequence[str], sections: Mapping[str, type[Section]]) -> dict[str, dict[str, Any]]:
    """{"section": {"key": value}} of the options in `overrides`; of an option that comes again the last one counts.

    Raises ConfigError for a word that belongs to no option, an option without section, and a value that is missing or too many.
    Keys that a section has not are let through: they are judged together with those of the file.
    """
    values: dict[str, dict[str, Any]] = {}
    for name, words in options(overrides, sections):
        section, _, key = name.partition(".")
        values.setdefault(section, {}).update([typed(section, key, words, sections)])
    return values


def options(overrides: Sequence[str], sections: Mapping[str, type[Section]]) -> Iterator[tuple[str, list[str]]]:
    """(section.key, its words) of each option."""
    position = 0
    while position < len(overrides):
        option, equals, value = overrides[position].partition("=")
        if not option.startswith("--"):
            written = f"; write --{option.lstrip('-')} {value}" if equals else ""
            raise ConfigError(f"{overrides[position]!r} belongs to no option: options are --section.key VALUE{written}")
        parts = option[2:].split(".", 2)
        name = ".".join(
            [part.replace("-", "_") for part in parts[:2]] + parts[2:]
        )  # names in a table are the user's own
        if "." not in name:
            raise ConfigError(
                f"{option} is no option: those of the configuration are --section.key VALUE{meant(name, sections)}"
            )
        words = list(itertools.takewhile(lambda word: not word.startswith("--"), overrides[position + 1 :]))
        position += 1 + len(words)
        if equals and words:
            raise ConfigError(
                f"{words[0]!r} after {option}={value} belongs to no option: write all values apart, or one after ="
            )
        yield name, [value] if equals else words


def meant(name: str, sections: Mapping[str, type[Section]]) -> str:
    """The keys that a name without section may mean."""
    every = [f"{section}.{key}" for section, kind in sections.items() for key in kind.model_fields]
    same = [known for known in every if known.partition(".")[2] == name]
    near = same or difflib.get_close_matches(name, every, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join('--' + each for each in near)}?" if near else ""


def typed(section: str, key: str, words: list[str], sections: Mapping[str, type[Section]]) -> tuple[str, Any]:
    """(key, value) of one option, as far as the type of its key says how many words it has."""
    fields = sections[section].model_fields if section in sections else {}
    if key.startswith("no_") and key not in fields and key[3:] in fields and not words:
        return key[3:], False
    name, _, item = key.partition(".")
    if item and name in fields and base_type(fields[name].annotation) is dict and len(words) == 1:
        return key, dict_value(fields[name].annotation, words[0])
    if key not in fields:
        return key, " ".join(words)
    option, kind = f"--{section}.{key}", base_type(fields[key].annotation)
    if words == ["None"] and is_optional(fields[key].annotation):
        return key, None
    if kind is tuple:
        return key, words
    if kind is dict:
        if len(words) % 2:
            raise ConfigError(f"{option} {' '.join(words)}: takes pairs, NAME VALUE; {words[-1]!r} has no value")
        return key, {
            name: dict_value(fields[key].annotation, value) for name, value in zip(words[::2], words[1::2], strict=True)
        }
    if kind is bool:
        words = words or ["true"]
    if len(words) != 1:
        have = f"{len(words)} values, {' '.join(words)}: it takes one" if words else "no value"
        raise ConfigError(f"{option} has {have}; write {option} VALUE")
    return key, TRUE_FALSE.get(words[0], words[0]) if kind is bool else words[0]


def base_type(annotation: Any) -> Any:
    """bool, tuple, dict, or whatever else a field's type is at heart."""
    if get_origin(annotation) is Annotated:
        return base_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [base_type(each) for each in get_args(annotation) if each is not NoneType]
        return kinds[0] if len(kinds) == 1 else None
    return get_origin(annotation) or annotation


def is_optional(annotation: Any) -> bool:
    return NoneType in get_args(annotation)


def dict_value(annotation: Any, word: str) -> Any:
    """A word as TOML reads it (true, 3, 0.5), else the word itself; just that where values have one type."""
    if get_origin(get_args(annotation)[1]) is not UnionType:
        return word
    try:
        value = tomllib.loads(f"x = {word}")["x"]
    except tomllib.TOMLDecodeError:
        return word
    return value if isinstance(value, bool | int | float) else word
