"""TOML file and command line -> Config, and back."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from megatron_rl.config.arguments import base_type, section_values
from megatron_rl.config.base import ConfigError, Section, nearest
from megatron_rl.config.config import Config
from megatron_rl.config.renamed import refusals, with_new_names
from megatron_rl.config.rollout import FULL_VOCABULARY, NOT_SAMPLED_WITH

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    section_overrides: dict[str, Any] | None = None,
    *,
    of_a_run: bool = False,
) -> Config:
    """Read TOML, apply nested `section_overrides` ({"run": {"seed": 1}}), then `--section.key value` arguments.

    of_a_run: the file is the config.toml that a run wrote, perhaps of an earlier version: settings under former names are read.
    Raises ConfigError for an unreadable file, an unknown or renamed key (naming the nearest or new one) or an illegal value.
    """
    values = {} if path is None else read_toml(Path(path))
    values = with_new_names(values) if of_a_run else values
    check_keys(values)
    for section, keys in itertools.chain(
        (section_overrides or {}).items(), section_values(overrides, SECTIONS).items()
    ):
        values[section] = merged(values.get(section, {}), keys)
    check_keys(values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error.errors()))) from error


def merged(before: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """`before` with `keys` set; "key.name" sets one name of a key's table."""
    after = dict(before)
    for key, value in keys.items():
        table, _, name = key.partition(".")
        is_table = bool(name) and isinstance(after.get(table, {}), dict)
        after |= {table: {**after.get(table, {}), name: value}} if is_table else {key: value}
    return after


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"--config {path}: no such file; paths are relative to {Path.cwd()}") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error


def check_keys(values: dict[str, Any]) -> None:
    """Raise ConfigError for renamed keys, for the first unknown section or key, and for true in place of a number."""
    if renamed := refusals(values):
        raise ConfigError("\n".join(renamed))
    for section, keys in values.items():
        if section not in SECTIONS:
            if not isinstance(keys, dict):
                hint = elsewhere(section) or nearest(section, list(SECTIONS))
                raise ConfigError(f"{section} = {keys!r} is outside any section{hint}")
            raise ConfigError(f"unknown section [{section}]{nearest(section, list(SECTIONS))}")
        if not isinstance(keys, dict):
            raise ConfigError(f"[{section}] must be a section with keys, got {keys!r}")
        fields = SECTIONS[section].model_fields
        for key, value in keys.items():
            if section == "rollout" and key in NOT_SAMPLED_WITH:
                raise ConfigError(f"rollout.{key} = {value!r} is not supported: {FULL_VOCABULARY}")
            if key not in fields:
                hint = elsewhere(key) or nearest(key, list(fields))
                raise ConfigError(f"unknown key {section}.{key} = {value!r}{hint}")
            if isinstance(value, bool) and base_type(fields[key].annotation) in (int, float):
                raise ConfigError(f"{section}.{key} = {str(value).lower()}: must be a number{default_of(section, key)}")


def elsewhere(key: str) -> str:
    """Where a key is known, if it is anywhere."""
    places = [f"{section}.{key}" for section, kind in SECTIONS.items() if key in kind.model_fields]
    return f"; did you mean {' or '.join(places)}?" if places else ""


def explain(errors: Iterable[Any]) -> list[str]:
    """One line for each key that pydantic refused: key, value, rule and fix."""
    lines: list[str] = []
    for _, same in itertools.groupby(errors, key=lambda error: error["loc"][:2]):
        alternatives = list(same)
        first = alternatives[0]
        section, key = ([str(part) for part in first["loc"]] + ["", ""])[:2]
        if first["type"] == "missing":
            missing = (
                [key]
                if key
                else [name for name, field in SECTIONS[section].model_fields.items() if field.is_required()]
            )
            lines += [
                f"{section}.{name}: required; set it in the TOML file or as --{section}.{name} VALUE"
                for name in missing
            ]
        elif first["type"] == "value_error" and not key:
            lines.append(with_section(section, first["msg"].removeprefix("Value error, ")))
        else:
            lines.append(refused(section, key, alternatives))
    return lines


def with_section(section: str, message: str) -> str:
    """Rules of one section may name its keys alone."""
    word = message.partition(" ")[0].rstrip(":,")
    return f"{section}.{message}" if section and word in SECTIONS[section].model_fields else message


def refused(section: str, key: str, errors: Sequence[Any]) -> str:
    """A value that is not of its key's type, or of none of several types."""
    first = errors[0]
    place = "".join(f"[{part}]" for part in first["loc"][2:] if isinstance(part, int))
    if first["type"] == "value_error":
        return f"{section}.{key}{place} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
    rules = dict.fromkeys(rule_of(error["msg"]) for error in errors)
    names = [str(name) for error in errors if error["type"] == "literal_error" for name in literals(section, key)]
    close = [name for name in names if name.lower() == str(first["input"]).lower()]
    hint = f"; did you mean {close[0]!r}?" if close else default_of(section, key)
    return f"{section}.{key}{place} = {first['input']!r}: must {' or '.join(rules)}{hint}"


def rule_of(message: str) -> str:
    """pydantic's rule in the words of a configuration file: "Input should be a valid tuple" -> "be a list"."""
    rule = message.partition(", unable to parse")[0].partition(" should ")[2] or message
    return rule.replace("a valid tuple", "a list").replace("a valid dictionary", "a table of names and values")


def literals(section: str, key: str) -> list[Any]:
    """The names that a key may have."""
    found: list[Any] = []
    rest: list[Any] = [SECTIONS[section].model_fields[key].annotation]
    for each in rest:
        rest.extend(get_args(each))
        found += [each] if isinstance(each, str) else []
    return found


def default_of(section: str, key: str) -> str:
    default = SECTIONS[section].model_fields[key].get_default(call_default_factory=True)
    return "; change it" if default is PydanticUndefined else f"; change it, or remove it for the default, {default!r}"


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML that load_config reads back to an equal Config (None, always a default, is left out)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
