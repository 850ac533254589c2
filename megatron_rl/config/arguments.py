"""Reads the command line: --section.key VALUE, --section.key=VALUE, --section.flag, .no_flag.

A list takes all words up to the next option (none: an empty list).  A table takes pairs NAME VALUE
and replaces that of the file; --section.key.name VALUE sets one name.  Values stay text: the
validation of the configuration converts them.

pydantic-settings is not used: its command line has no lists of words (--rollout.urls A B), no names
in a table, no --section.no_flag, and suggests no key in its errors.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence

from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import SECTIONS, TABLES, Schema, elsewhere, schemas, types_of

OPTIONS_AS_VALUES = re.compile(r"--(rollout|teachers\..+)\.server[_-]args|--agent\.command")
"""Settings whose values are options of another program: they extend to the next --section.key."""
RULE = "settings are --section.key VALUE"


def section_values(overrides: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return {"section": {"key": value}}; a repeated option replaces the earlier one.

    Raises ConfigError for a word without an option, an option without a section, and too few or too
    many values.  Unknown sections and keys are kept: they are refused with those of the file.
    """
    values: dict[str, dict[str, object]] = {}
    for option, words in split(overrides):
        name, equals, value = option.partition("=")
        if not option.startswith("--"):
            fix = f"; write --{name} {value}" if equals else ""
            raise ConfigError(f"{option!r} does not follow an option: {RULE}{fix}")
        if "." not in name:
            raise ConfigError(f"unknown option {name}: {RULE}{suggestion(name)}")
        if equals and words:
            fix = "write all values separated by spaces, or one after ="
            raise ConfigError(f"{words[0]!r} after {option}: {fix}")
        section, _, key = name[2:].partition(".")
        section = section.replace("-", "_")
        key, read = read_value(
            section, with_underscores(section, key), [value] if equals else words
        )
        values.setdefault(section, {})[key] = read
    return values


def is_open(section: str) -> bool:
    """Return True for a section whose keys are tables with names of the user's."""
    return f"{section}.NAME" in TABLES


def split_key(section: str, key: str) -> tuple[str, str]:
    """Return the two parts of "table.name"; the second is "" without a dot.

    The tables of an open section have names of the user's, perhaps with dots; its keys have none.
    """
    if "." not in key:
        return key, ""
    table, _, name = key.rpartition(".") if is_open(section) else key.partition(".")
    return table, name


def with_underscores(section: str, key: str) -> str:
    """Return a key with _ for -, except in a name that is the user's: of a table, or its entry."""
    table, name = split_key(section, key)
    if is_open(section):
        name = name.replace("-", "_")
    else:
        table = table.replace("-", "_")
    return f"{table}.{name}" if name else table


def split(overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return every option as written, with the words after it."""
    options: list[tuple[str, list[str]]] = []
    for word in overrides:
        is_option = word.startswith("--")
        if options and OPTIONS_AS_VALUES.fullmatch(options[-1][0]):
            # names of their options contain no dot
            is_option = is_option and "." in word.partition("=")[0]
        if is_option or not options:
            options.append((word, []))
        else:
            options[-1][1].append(word)
    return options


def suggestion(option: str) -> str:
    """Suggest the settings that an option without a section may mean."""
    name = option[2:].replace("-", "_")
    if not (hint := elsewhere(name)):
        known = [f"{section}.{key}" for section in SECTIONS for key in schemas(section)]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return f"; did you mean --{close[0]}?" if close else ""
    return hint.replace("mean ", "mean --").replace(" or ", " or --")


def read_value(section: str, key: str, words: list[str]) -> tuple[str, object]:
    """Return (key, value) of one option; the schema of the key says how many words it takes."""
    known = schemas(section)
    if key.startswith("no_") and key not in known and key[3:] in known and not words:
        return key[3:], False
    table, item = split_key(section, key)
    if item in schemas(f"{section}.NAME"):  # a key of an open section's table
        return key, read_value(f"{section}.NAME", item, words)[1]
    if table not in known:
        # validation refuses it, or its type converts the text: a field of megatron-core
        return key, " ".join(words) or True
    option, types = f"--{section}.{key}", types_of(known[table])
    if words == ["None"] and "null" in types:
        return key, None
    if "array" in types:
        if len(words) == 1 and words[0].startswith(('["', "['")) and words[0].endswith("]"):
            fix = f"write its words, {option} A B"
            raise ConfigError(f"{option} {words[0]}: a list of a TOML file; {fix}")
        return key, words
    if "object" in types and not item:
        if len(words) % 2:
            rule = f"takes pairs, NAME VALUE; {words[-1]!r} has no value"
            raise ConfigError(f"{option} {' '.join(words)}: {rule}")
        pairs = zip(words[::2], words[1::2], strict=True)
        return key, {name: table_value(known[table], word) for name, word in pairs}
    if "boolean" in types and not words:
        return key, True  # a word after it is validated: --replay.measure false
    if len(words) != 1:
        problem = f"{len(words)} values, {' '.join(words)}: it takes one" if words else "no value"
        raise ConfigError(f"{option} has {problem}; write {option} VALUE")
    return key, table_value(known[table], words[0]) if item else words[0]


def table_value(schema: Schema, word: str) -> object:
    """Read true, 3 and 0.5 as TOML does, where a table has values of several types."""
    if "anyOf" not in schema.get("additionalProperties", {}):
        return word
    try:
        value = tomllib.loads(f"x = {word}")["x"]
    except tomllib.TOMLDecodeError:
        return word
    return value if isinstance(value, bool | int | float) else word
