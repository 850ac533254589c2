"""TOML file and command line -> Config, and back."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
import tyro
from pydantic import ValidationError

from megatron_rl.config.base import Section, nearest
from megatron_rl.config.config import Config
from megatron_rl.config.rollout import NOT_SAMPLED_WITH, WHOLE_VOCABULARY


class ConfigError(ValueError):
    """A configuration that cannot run; the message names key, value, rule and fix."""


def load_config(
    path: Path | None, overrides: list[str] | None = None, section_overrides: dict[str, Any] | None = None
) -> Config:
    """Read TOML, apply nested `section_overrides` ({"run": {"seed": 1}}), then `--section.key value` arguments.

    Raises ConfigError for an unreadable file, an unknown key (naming the nearest one) or an illegal value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"--config {path}: no such file") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    for section, keys in (section_overrides or {}).items():
        values.setdefault(section, {}).update(keys)
    check_keys(values)
    overrides = list(overrides or [])
    if {"-h", "--help"} & set(overrides):
        tyro.cli(Config, args=["--help"], prog="megatron_rl.train", use_underscores=True)
    for option, value in itertools.pairwise(overrides):  # required keys may come from the command line alone
        section, _, key = option.removeprefix("--").partition(".")
        if option in ("--model.path", "--data.train"):
            values.setdefault(section, {})[key] = value
    try:
        config = Config.model_validate(values)
        if overrides:
            config = tyro.cli(Config, default=config, args=overrides, prog="megatron_rl.train", use_underscores=True)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item) for item in error.errors())) from error
    return config


def check_keys(values: dict[str, Any]) -> None:
    """Raise ConfigError for the first unknown section or key, with the nearest known name."""
    for section, keys in values.items():
        if section not in Config.model_fields:
            raise ConfigError(f"unknown section [{section}]{nearest(section, list(Config.model_fields))}")
        known = Config.model_fields[section].annotation
        assert isinstance(known, type) and issubclass(known, Section)
        if not isinstance(keys, dict):
            raise ConfigError(f"[{section}] must be a section with keys, got {keys!r}")
        for key in keys:
            if section == "rollout" and key in NOT_SAMPLED_WITH:
                raise ConfigError(f"rollout.{key} = {keys[key]!r} is not supported: {WHOLE_VOCABULARY}")
            if key not in known.model_fields:
                raise ConfigError(f"unknown key {section}.{key}{nearest(key, list(known.model_fields))}")


def explain(error: Any) -> str:
    """One line for one pydantic error: key, rule, value."""
    key = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "missing":
        return f"{key}: required; set it in the TOML file or as --{key} VALUE"
    value = "" if error["type"] == "value_error" else f" (got {error['input']!r})"
    return f"{key}: {error['msg']}{value}"


def dump_config(config: Config) -> str:
    """The resolved configuration as TOML that load_config reads back to an equal Config (None, always a default, is left out)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
