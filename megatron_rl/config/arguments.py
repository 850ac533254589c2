"""Command line -> values of sections: --section.key VALUE, --section.key=VALUE, a flag alone, --section.no_flag.

A key whose value is a list takes every word up to the next option (none: an empty list), one with names takes pairs in place of
those of the file, and --section.key.name VALUE sets one of them.  Words become numbers, paths and the rest where the whole
configuration is checked: one place, one kind of message.

By hand because pydantic-settings' command line takes no lists of words (--rollout.urls A B), no names in a table and no
--section.no_flag, and names neither the nearest key nor the default where it refuses one.
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
OF_OTHER_PROGRAMS = ("--rollout.server_args", "--rollout.server-args")
"""Settings whose words may look like options: they last until the next --section.key."""


def section_values(overrides: Sequence[str], sections: Mapping[str, type[Section]]) -> dict[str, dict[str, Any]]:
    """{"section": {"key": value}} of the options in `overrides`; of an option that comes again the last one counts.

    Raises ConfigError for a word that follows no option, an option without section, and a value that is missing or too many.
    Unknown sections and keys are kept: they are checked together with those of the file.
    """
    values: dict[str, dict[str, Any]] = {}
    for option, words in split(overrides):
        section, key = name_of(option, words, sections)
        equals, value = option.partition("=")[1:]
        values.setdefault(section, {}).update([typed(section, key, [value] if equals else words, sections)])
    return values


def split(overrides: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(option as it is written, the words after it) of each option."""
    position = 0
    while position < len(overrides):
        option = overrides[position]
        ends = is_setting if option in OF_OTHER_PROGRAMS else is_option
        # B023: takewhile is exhausted here, before `ends` is bound again
        words = list(itertools.takewhile(lambda word: not ends(word), overrides[position + 1 :]))  # noqa: B023
        position += 1 + len(words)
        yield option, words


def is_option(word: str) -> bool:
    return word.startswith("--")


def is_setting(word: str) -> bool:
    """Whether a word is --section.key; options of other programs have no dot in their names."""
    return is_option(word) and "." in word.partition("=")[0]


def name_of(option: str, words: Sequence[str], sections: Mapping[str, type[Section]]) -> tuple[str, str]:
    """(section, key) of an option.  The name in a table (--section.key.name) is the user's own and stays as it is written."""
    option, equals, value = option.partition("=")
    if not is_option(option):
        fix = f"; write --{option} {value}" if equals else ""
        raise ConfigError(
            f"{option + equals + value!r} does not follow an option: settings are --section.key VALUE{fix}"
        )
    if "." not in option:
        name = option[2:].replace("-", "_")
        raise ConfigError(f"unknown option {option}: settings are --section.key VALUE{meant(name, sections)}")
    if equals and words:
        raise ConfigError(f"{words[0]!r} after {option}={value}: write all values separated by spaces, or one after =")
    section, key, *item = option[2:].split(".", 2)
    return section.replace("-", "_"), ".".join([key.replace("-", "_"), *item])


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
    option, annotation = f"--{section}.{key}", fields[key].annotation
    kind = base_type(annotation)
    if words == ["None"] and NoneType in get_args(annotation):
        return key, None
    if kind is tuple:
        return key, words
    if kind is dict:
        if len(words) % 2:
            raise ConfigError(f"{option} {' '.join(words)}: takes pairs, NAME VALUE; {words[-1]!r} has no value")
        return key, {name: dict_value(annotation, word) for name, word in zip(words[::2], words[1::2], strict=True)}
    if kind is bool:
        words = words or ["true"]
    if len(words) != 1:
        have = f"{len(words)} values, {' '.join(words)}: it takes one" if words else "no value"
        raise ConfigError(f"{option} has {have}; write {option} VALUE")
    return key, TRUE_FALSE.get(words[0], words[0]) if kind is bool else words[0]


def base_type(annotation: Any) -> Any:
    """bool, tuple, dict, ...: a field's type without its rules and without None; None for one of several types."""
    if get_origin(annotation) is Annotated:
        return base_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [base_type(each) for each in get_args(annotation) if each is not NoneType]
        return kinds[0] if len(kinds) == 1 else None
    return get_origin(annotation) or annotation


def dict_value(annotation: Any, word: str) -> Any:
    """A word as TOML reads it (true, 3, 0.5), else the word itself; just that where values have one type."""
    if get_origin(get_args(annotation)[1]) is not UnionType:
        return word
    try:
        value = tomllib.loads(f"x = {word}")["x"]
    except tomllib.TOMLDecodeError:
        return word
    return value if isinstance(value, bool | int | float) else word
