"""Reads a Config from a TOML file and a command line, and writes it back as TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from megatron_rl.config.arguments import is_open, section_values, split_key
from megatron_rl.config.base import ConfigError, nearest
from megatron_rl.config.config import Config
from megatron_rl.config.loss_presets import SFT
from megatron_rl.config.redact import Redactor
from megatron_rl.config.renamed import SETTINGS, with_new_names
from megatron_rl.config.rules.sft_rules import DEFAULTS
from megatron_rl.config.schema import SECTIONS, elsewhere
from megatron_rl.config.sections.rollout import FULL_VOCABULARY, NOT_SAMPLED_WITH
from megatron_rl.config.toml_places import key_places, located, syntax_place

Values = dict[str, dict[str, object]]
"""{"section": {"key": value}}"""


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    section_overrides: Mapping[str, Mapping[str, object]] | None = None,
    *,
    defaults: Mapping[str, Mapping[str, object]] | None = None,
    of_a_run: bool = False,
) -> Config:
    """Read TOML, then apply `section_overrides`, then `--section.key value` arguments.

    section_overrides: nested tables, {"run": {"seed": 1}}.
    defaults: the same, for keys that nothing else sets.
    of_a_run: the file is the config.toml that a run wrote, perhaps with an earlier version: former
    names are accepted.  Raises ConfigError for an unreadable file, an unknown or renamed key (with
    the nearest or new one) or an illegal value.  Its message begins with FILE:LINE:COLUMN where the
    file sets the key.
    """
    text = "" if path is None else read_text(Path(path))
    values = {} if path is None else parse_toml(Path(path), text)
    # all sections are present, so that a missing required key is reported by its own name
    values = {name: {} for name in SECTIONS} | (with_new_names(values) if of_a_run else values)
    for section, keys in (defaults or {}).items():
        values[section] = {**keys, **values[section]}
    replaced: set[str] = set()
    # in this order, so that the command line has the last word
    changes = chain((section_overrides or {}).items(), section_values(overrides).items())
    for section, keys in changes:
        values[section] = merged(section, values.get(section, {}), keys)
        replaced |= {f"{section}.{split_key(section, key)[0]}" for key in keys}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        places = {name: f"{path}:{place}" for name, place in key_places(text).items()}
        # the command line has no lines and columns
        in_file = {name: place for name, place in places.items() if name not in replaced}
        lines = [located(message, in_file) for message in messages(error.errors())]
        raise ConfigError("\n".join(lines)) from error


def load_rl_or_sft(
    path: Path | None,
    overrides: Sequence[str] = (),
    section_overrides: Mapping[str, Mapping[str, object]] | None = None,
) -> Config:
    """Read a configuration of `megatron-rl train` or of `megatron-rl sft`, with the defaults of
    its command: that of sft with a section [sft] or loss.name = sft.

    Arguments and errors as of `load_config`.
    """
    tables = [
        {} if path is None else parse_toml(Path(path), read_text(Path(path))),
        section_overrides or {},
        section_values(overrides),
    ]
    names = [table["loss"]["name"] for table in tables if "name" in table.get("loss", {})]
    is_sft = names[-1] == SFT if names else any("sft" in table for table in tables)
    defaults = DEFAULTS if is_sft else None
    return load_config(path, overrides, section_overrides, defaults=defaults)


def merged(
    section: str, before: Mapping[str, object], keys: Mapping[str, object]
) -> dict[str, object]:
    """Return `before` with `keys` set; "key.name" sets one name of a key's table.

    A whole table of an open section is set by its name, which may have dots.
    """
    after = dict(before)
    for key, value in keys.items():
        is_table = is_open(section) and isinstance(value, Mapping)
        table, name = (key, "") if is_table else split_key(section, key)
        entries = after.get(table, {})
        if name and isinstance(entries, dict):
            after[table] = {**entries, name: value}
        else:
            after[key] = value
    return after


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError as error:
        where = f"paths are relative to {Path.cwd()}"
        raise ConfigError(f"--config {path}: no such file; {where}") from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; name a TOML file"
        raise ConfigError(f"--config {path}: {problem}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error


def parse_toml(path: Path, text: str) -> Values:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{syntax_place(error, text)}: not valid TOML: {error}") from error
    # checked before the command line is merged into the sections
    for name, keys in values.items():
        if isinstance(keys, dict):
            continue
        place = f"{path}:{key_places(text).get(name, '1:1')}"
        if name in SECTIONS:
            raise ConfigError(f"{place}: [{name}] must be a section with keys, got {keys!r}")
        hint = elsewhere(name) or nearest(name, SECTIONS)
        raise ConfigError(f"{place}: {name} = {keys!r} is outside any section{hint}")
    return values


def messages(errors: Iterable[ErrorDetails]) -> Iterator[str]:
    """Yield one line for every key that pydantic refused: key, value, rule and fix."""
    # padded: an error of a section has no key, and a rule of the entire Config no section either
    by_key = groupby(errors, key=lambda error: [*map(str, error["loc"]), "", ""][:2])
    for (section, key), group in by_key:
        alternatives = list(group)  # a union reports one error for every type that it has
        first = alternatives[0]
        if first["type"] == "missing":
            name = f"{section}.{key}"
            yield f"{name}: required; set it in the TOML file or as --{name} VALUE"
        elif first["type"] == "extra_forbidden":
            yield unknown(section, key, first["input"])
        elif first["type"] == "value_error" and not key:
            rule = first["msg"].removeprefix("Value error, ")
            word = rule.partition(" ")[0].rstrip(":,")
            # rules within a section name its keys alone
            is_key = bool(section) and word in SECTIONS[section].model_fields
            yield f"{section}.{rule}" if is_key else rule
        else:
            yield refused(section, key, alternatives)


def unknown(section: str, key: str, value: object) -> str:
    """Return the message about a key that its section does not have."""
    name = f"{section}.{key}"
    if section not in SECTIONS:
        return f"unknown section [{section}]{nearest(section, SECTIONS)}"
    if name in SETTINGS:
        return f"{name} was renamed to {SETTINGS[name]}; use the new name"
    if section == "rollout" and key in NOT_SAMPLED_WITH:
        return f"{name} = {value!r} is not supported: {FULL_VOCABULARY}"
    hint = elsewhere(key) or nearest(key, SECTIONS[section].model_fields)
    return f"unknown key {name} = {value!r}{hint}"


def refused(section: str, key: str, alternatives: Sequence[ErrorDetails]) -> str:
    """Return the message about a value that has none of its key's types, or breaks their limits."""
    first = alternatives[0]
    value = first["input"]
    text = str(value).lower() if isinstance(value, bool) else repr(value)  # TOML writes true
    index = "".join(f"[{part}]" for part in first["loc"][2:] if isinstance(part, int))
    place = f"{section}.{key}{index} = {text}"
    if first["type"] == "value_error":
        return f"{place}: {first['msg'].removeprefix('Value error, ')}"
    rules = " or ".join(dict.fromkeys(rule_of(error["msg"]) for error in alternatives))
    if other_case := re.search(f"'{re.escape(str(value))}'", rules, re.IGNORECASE):
        return f"{place}: must {rules}; did you mean {other_case[0]}?"
    default = SECTIONS[section].model_fields[key].get_default(call_default_factory=True)
    hint = "" if default is PydanticUndefined else f", or remove it for the default, {default!r}"
    return f"{place}: must {rules}; change it{hint}"


def rule_of(message: str) -> str:
    """Return pydantic's rule in terms of TOML: "Input should be a valid tuple" -> "be a list"."""
    rule = message.partition(", unable to parse")[0].partition(" should ")[2] or message
    rule = rule.replace("a valid tuple", "a list")
    return rule.replace("a valid dictionary", "a table of names and values")


def dump_config(config: Config) -> str:
    """Return the resolved configuration as TOML, which load_config reads back to an equal Config.

    Secrets are replaced by ***.
    """
    return tomli_w.dumps(plain_values(config, exclude_none=True))  # None is always a default


def plain_values(config: Config, *, exclude_none: bool = False) -> Values:
    """Return the resolved configuration as JSON values, without secrets."""
    values = config.model_dump(mode="json", exclude_none=exclude_none)
    return Redactor(hidden=config.key_variables).tree(values)
