"""Checks settings of SGLang servers, on a command line or as a server reports them, against the table in server_verdicts.py."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from megatron_rl.config.base import nearest
from megatron_rl.config.server_verdicts import SETTINGS, Setting, Verdict
from megatron_rl.config.versions import SGLANG_TESTED

if TYPE_CHECKING:
    from megatron_rl.config.rollout import RolloutConfig

Values = Mapping[str, object]
"""Name of a setting in the table -> its value on a server."""
BY_NAME = {setting.name: setting for setting in SETTINGS}
CHECKED_BY_REQUEST = ("preferred_sampling_params", "SGLANG_RETURN_ORIGINAL_LOGPROB", "enable_return_routed_experts")
"""/server_info does not tell whether they do harm; sampling_defaults.py and server_info.py ask the server."""


def read_settings(server_info: Values) -> dict[str, object]:
    """The settings of the table that /server_info has.  Its API key and the rest are left out."""
    return {name: server_info[name] for name in BY_NAME if name in server_info}


def read_options(args: Sequence[str]) -> dict[str, object]:
    """The settings of the table that options of SGLang's command line set; like its parser, this takes abbreviations."""
    found: dict[str, object] = {}
    for index, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if not option.startswith("--") or (setting := setting_of(option)) is None:
            continue
        following = args[index + 1] if index + 1 < len(args) else "--"
        if not equals and any(isinstance(usual, bool) for usual in setting.usual):
            found[setting.name] = True
        else:
            found[setting.name] = parsed(value if equals else following)
    return found


def check_options(rollout: RolloutConfig, *, needs_routes: bool) -> None:
    """Raise ValueError for rollout.server_args that may make expert ids, log-probs or weights wrong."""
    values = read_options(rollout.server_args)
    found = list(problems(values, rollout.allow_unproven, needs_routes=needs_routes))
    if rollout.weight_sync != "disk" and (problem := broadcast_problem(values)):
        found.append(problem)
    if found:
        raise ValueError(f"rollout.server_args = {list(rollout.server_args)}: {found[0]}")


def setting_of(option: str) -> Setting | None:
    name = option.replace("_", "-")
    exact = [setting for setting in SETTINGS if name in setting.options]
    matching = [setting for setting in SETTINGS if any(each.startswith(name) for each in setting.options)]
    if exact:
        return exact[0]
    # of several, SGLang itself refuses the abbreviation
    return matching[0] if len(matching) == 1 and len(name) > 3 else None


def parsed(text: str) -> object:
    """A number as a number, as /server_info has it."""
    try:
        return int(text)
    except ValueError:
        return text


def is_usual(setting: Setting, value: object) -> bool:
    if setting.name == "version":
        return is_tested(str(value))
    # 0 == False in Python, and () == []
    return any(value == usual and isinstance(value, bool) == isinstance(usual, bool) for usual in setting.usual)


def is_tested(version: str) -> bool:
    try:
        return Version(version).public in SGLANG_TESTED
    except InvalidVersion:  # a private build
        return False


def unusual(values: Values, *, needs_routes: bool) -> Iterator[tuple[Setting, object]]:
    """The settings whose value has a verdict, for a run that needs routes or not."""
    for name, value in values.items():
        setting = BY_NAME[name]
        if name in CHECKED_BY_REQUEST or is_usual(setting, value):
            continue
        if needs_routes or setting.touches != ("routes",):
            yield setting, value


def verdict(setting: Setting, value: object) -> Verdict:
    """On a value that is not a usual one."""
    return "unproven" if value in setting.unproven_values else setting.verdict


def reason(setting: Setting, value: object) -> str:
    return setting.unproven_because if value in setting.unproven_values else setting.because


def problems(values: Values, allowed: Collection[str], *, needs_routes: bool) -> Iterator[str]:
    """One line, without its subject, for each setting that is refused, or unproven and not in rollout.allow_unproven."""
    for setting, value in unusual(values, needs_routes=needs_routes):
        what = f"{setting.name} = {shown(value)}"
        may = f"may make {', '.join(setting.touches)} wrong"
        if setting.verdict == "refused":
            yield f"{what} is refused: {setting.because}; remove it"
        elif verdict(setting, value) == "unproven" and setting.name not in allowed:
            yield (
                f"{what} is unproven and {may}: {reason(setting, value)}; remove it, or accept it with rollout.allow_unproven = "
                f'["{setting.name}"]'
            )


def accepted(values: Values, allowed: Collection[str], *, needs_routes: bool) -> Iterator[str]:
    """One line for each unproven setting that the user accepts."""
    for setting, value in unusual(values, needs_routes=needs_routes):
        if verdict(setting, value) == "unproven" and setting.name in allowed:
            yield (
                f"unproven, accepted by rollout.allow_unproven: {setting.name} = {shown(value)} may make "
                f"{', '.join(setting.touches)} wrong: {reason(setting, value)}"
            )


def shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def check_allowed(names: Sequence[str]) -> None:
    """Raise ValueError for a name in rollout.allow_unproven that is unknown, or whose verdict is not "unproven"."""
    for name in names:
        setting = BY_NAME.get(name)
        if setting is None:
            known = [each.name for each in SETTINGS if each.verdict == "unproven" or each.unproven_values]
            raise ValueError(
                f"allow_unproven has {name!r}, which is no setting with a verdict{nearest(name, known)}; names are those of "
                "SGLang's /server_info, in the table of docs/guides/servers.md"
            )
        if setting.verdict == "refused":
            raise ValueError(f"allow_unproven has {name!r}, which is refused: {setting.because}; remove it")
        if setting.verdict == "proven" and not setting.unproven_values:
            raise ValueError(f"allow_unproven has {name!r}, which is proven and needs no leave; remove it")


def broadcast_problem(values: Values) -> str | None:
    """Why a server with these settings takes weights from the disk alone; None if it takes them by broadcast, too."""
    stages, copies = values.get("pp_size", 1), values.get("dp_size", 1)
    if stages == 1 and (copies == 1 or values.get("enable_dp_attention")):
        return None
    return (
        f"pp_size = {stages}, dp_size = {copies}: it takes broadcast weights only with both 1 (or DP attention); set "
        "rollout.weight_sync = disk, or use more servers"
    )


def differences(values: Values, before: Values) -> Iterator[str]:
    """One "name = new, was old" for each setting that is not as it was."""
    for name in before:
        if values.get(name) != before[name]:
            yield f"{name} = {shown(values.get(name))}, was {shown(before[name])}"
