"""Compares settings of SGLang's servers with the verdicts in sglang_settings.toml.

A server reports its settings; those of a server that a run starts are on its command line.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from megatron_rl.config.base import nearest
from megatron_rl.config.versions import SGLANG_TESTED

Verdict = Literal["proven", "refused", "unproven"]
Values = Mapping[str, object]
"""Name of a setting in the table -> its value on a server."""
TOUCHED = {"samples": ("routes", "log-probs"), "all": ("routes", "log-probs", "weights")}
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SET_BY_THE_RUN: dict[str, str] = TABLES["set_by_the_run"]
"""Option that rollout.server_args must not set -> what to do instead."""
CHECKED_BY_REQUEST = (
    "preferred_sampling_params", "SGLANG_RETURN_ORIGINAL_LOGPROB", "enable_return_routed_experts",
)  # fmt: skip
"""Settings whose harm /server_info hides; sampling_defaults.py and server_info.py test it."""

KEEPALIVE_SECONDS = 4.0
"""Time for which a connection without a request stays open; SGLang closes its end after 5 s,
perhaps as a request arrives."""


@dataclass(frozen=True)
class Setting:
    """A setting of an SGLang server that touches expert ids, log-probs or weights."""

    name: str
    usual: tuple[object, ...]
    """Values without a verdict: nothing depends on them."""
    verdict: Verdict
    """The verdict on every other value."""
    touches: tuple[str, ...]
    """Values that the setting may make wrong: routes, log-probs, weights."""
    because: str
    """The reason; for a proven setting, the test that shows it."""
    options: tuple[str, ...]
    """Names of its option on the command line."""
    unproven_values: tuple[object, ...]
    """Values of a proven setting that are unproven."""
    unproven_because: str


def read_table() -> Iterator[Setting]:
    """Yield the settings of [verdicts], in its order."""
    reasons = TABLES["reasons"]
    for name, (usual, verdict, touched, because) in TABLES["verdicts"].items():
        unproven, why = TABLES["unproven_values"].get(name, ((), ""))
        yield Setting(
            name,
            # TOML has no null
            tuple(None if value == "None" else value for value in usual),
            verdict,
            TOUCHED.get(touched, (touched,)),
            reasons.get(because, because),
            ("--" + name.replace("_", "-"), *TABLES["other_options"].get(name, ())),
            tuple(unproven),
            reasons.get(why, why),
        )


SETTINGS = tuple(read_table())
BY_NAME = {setting.name: setting for setting in SETTINGS}


def read_settings(server_info: Values) -> dict[str, object]:
    """Return the settings of the table that /server_info has, without its API key and others."""
    return {name: server_info[name] for name in BY_NAME if name in server_info}


def read_options(args: Sequence[str]) -> dict[str, object]:
    """Return the settings of the table that options of SGLang's command line set.

    Like SGLang's parser, this takes abbreviations.
    """
    values: dict[str, object] = {}
    for index, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if not option.startswith("--") or (setting := setting_of(option)) is None:
            continue
        following = args[index + 1] if index + 1 < len(args) else "--"
        # a switch takes no value: the next word is another option
        if not equals and any(isinstance(usual, bool) for usual in setting.usual):
            values[setting.name] = True
        else:
            values[setting.name] = parsed(value if equals else following)
    return values


def setting_of(option: str) -> Setting | None:
    """Return the setting that an option of the command line, or its abbreviation, sets."""
    name = option.replace("_", "-")
    by_option = {option: setting for setting in SETTINGS for option in setting.options}
    matching = {setting.name for option, setting in by_option.items() if option.startswith(name)}
    # SGLang itself refuses an abbreviation of several options
    is_clear = len(matching) == 1 and len(name) > 3
    return by_option.get(name) or (BY_NAME[matching.pop()] if is_clear else None)


def parsed(text: str) -> object:
    """Return a number as a number, as /server_info has it."""
    try:
        return int(text)
    except ValueError:
        return text


def is_usual(setting: Setting, value: object) -> bool:
    if setting.name == "version":
        return is_tested(str(value))
    # 0 == False in Python
    is_bool = isinstance(value, bool)
    return value in [usual for usual in setting.usual if isinstance(usual, bool) == is_bool]


def is_tested(version: str) -> bool:
    try:
        # public: a build may add a local part, as in 0.5.21+cu130
        return Version(version).public in SGLANG_TESTED
    except InvalidVersion:  # a private build
        return False


def unusual(values: Values, *, needs_routes: bool) -> Iterator[tuple[Setting, object]]:
    """Yield the settings whose value has a verdict, for a run that needs routes or not."""
    for name, value in values.items():
        setting = BY_NAME[name]
        if name in CHECKED_BY_REQUEST or is_usual(setting, value):
            continue
        if needs_routes or setting.touches != ("routes",):
            yield setting, value


def verdict(setting: Setting, value: object) -> Verdict:
    """Return the verdict on a value that is not a usual one."""
    return "unproven" if value in setting.unproven_values else setting.verdict


def reason(setting: Setting, value: object) -> str:
    """Return the reason for the verdict on a value that is not a usual one."""
    return setting.unproven_because if value in setting.unproven_values else setting.because


def problems(values: Values, allowed: Collection[str], *, needs_routes: bool) -> Iterator[str]:
    """Yield a line for every setting that is refused, or unproven and not allowed."""
    for setting, value in unusual(values, needs_routes=needs_routes):
        text = f"{setting.name} = {shown(value)}"
        if setting.verdict == "refused":
            yield f"{text} is refused: {setting.because}; remove it"
        elif verdict(setting, value) == "unproven" and setting.name not in allowed:
            yield (
                f"{text} is unproven and may make {', '.join(setting.touches)} wrong: "
                f"{reason(setting, value)}; remove it, or accept it with rollout.allow_unproven = "
                f'["{setting.name}"]'
            )


def accepted(values: Values, allowed: Collection[str], *, needs_routes: bool) -> Iterator[str]:
    """Yield a line for every unproven setting that the user accepts."""
    for setting, value in unusual(values, needs_routes=needs_routes):
        if verdict(setting, value) == "unproven" and setting.name in allowed:
            yield (
                f"unproven, accepted by rollout.allow_unproven: {setting.name} = {shown(value)} "
                f"may make {', '.join(setting.touches)} wrong: {reason(setting, value)}"
            )


def shown(value: object) -> str:
    """Return a value for a message, cut to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def check_allowed(names: Sequence[str]) -> None:
    """Raise ValueError for a name in rollout.allow_unproven whose setting is not "unproven"."""
    unproven = [s.name for s in SETTINGS if s.verdict == "unproven" or s.unproven_values]
    for name in names:
        setting, problem = BY_NAME.get(name), f"allow_unproven has {name!r}, which"
        if setting is None:
            hint = nearest(name, unproven)
            raise ValueError(
                f"{problem} has no verdict{hint}; names are those of SGLang's /server_info, listed "
                "in megatron_rl/config/sglang_settings.toml"
            )
        if setting.verdict == "refused":
            raise ValueError(f"{problem} is refused: {setting.because}; remove it")
        if name not in unproven:
            raise ValueError(f"{problem} is proven and allowed in every run; remove it")


def broadcast_problem(values: Values) -> str | None:
    """Return why a server takes weights from the disk alone; None if it takes them by broadcast."""
    stages, copies = values.get("pp_size", 1), values.get("dp_size", 1)
    if stages == 1 and (copies == 1 or values.get("enable_dp_attention")):
        return None
    return (
        f"pp_size = {stages}, dp_size = {copies}: it takes broadcast weights only with both 1 (or "
        "DP attention); set rollout.weight_sync = disk, or use more servers"
    )


def differences(values: Values, before: Values) -> Iterator[str]:
    """Yield "name = new, was old" for every setting that has changed."""
    for name in before:
        if values.get(name) != before[name]:
            yield f"{name} = {shown(values.get(name))}, was {shown(before[name])}"
