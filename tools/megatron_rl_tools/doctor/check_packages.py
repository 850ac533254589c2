"""Installed packages compared with megatron_rl/config/versions.py, and the options of the installed
SGLang.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_rl.config.versions import (
    NAMES,
    PACKAGES,
    SGLANG_TESTED,
    STACKS,
    Package,
    admits,
    bad_pairs,
    lacks,
    package,
)
from megatron_rl_tools.doctor.check import Check, fail_if, warn_if

SERVER_FLAGS = ("enable_return_routed_experts", "sleep_on_idle")
NVIDIA = ("transformer-engine", "apex", "nvidia-modelopt")
"""Useful only with a GPU."""
TESTED_SGLANG = " or ".join(SGLANG_TESTED)


def installed_versions() -> dict[str, str]:
    """Name -> version of the packages in the rules, python included; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in NAMES:
        with suppress(metadata.PackageNotFoundError):  # "python" is no distribution
            found[name] = metadata.version(name)
    return found


def check_packages(installed: Mapping[str, str], *, has_gpu: bool) -> list[Check]:
    """Each package, bad pairs, and the combination."""
    stack = STACKS.get(installed["python"].rpartition(".")[0], {})
    relevant = [
        each for each in PACKAGES if has_gpu or each.name not in NVIDIA or each.name in installed
    ]
    checks = [
        check_package(each, installed.get(each.name), stack.get(each.name)) for each in relevant
    ]
    for pair in bad_pairs(installed):
        first, second = pair.first.name, pair.second.name
        found = f"{installed[first]} with {installed[second]}: {pair.reason}"
        checks.append(Check(pair.status, f"{first} + {second}", found, pair.remedy))
    is_tested = bool(stack) and all(
        same(installed.get(name, ""), version) for name, version in stack.items()
    )
    tested = [
        f"Python {python}: {', '.join(f'{name} {version}' for name, version in each.items())}"
        for python, each in STACKS.items()
    ]
    found = "a tested one" if is_tested else "not tested"
    return [
        *checks,
        warn_if(not is_tested, "combination", found, f"tested are {'; '.join(tested)}"),
    ]


def check_package(known: Package, found: str | None, tested: str | None) -> Check:
    hint = f"; tested: {tested}" if tested else ""
    if found is None:
        if known.without:
            return Check("WARN", known.name, "not installed", known.without)
        remedy = f"make install (CPU) or pip install -r requirements.txt (GPU){hint}"
        return Check("FAIL", known.name, "not installed", remedy)
    if known.name == "sglang":
        return check_sglang(found)
    if not admits(known.versions, found):
        return Check(
            "FAIL", known.name, found, f"supported: {known.versions}, {known.source}{hint}"
        )
    return warn_if(
        tested is not None and not same(found, tested), known.name, found, f"may run{hint}"
    )


def check_sglang(found: str, name: str = "sglang") -> Check:
    """SGLang's version, installed here or reported by a server."""
    rule = package("sglang")
    try:
        is_too_old = not admits(rule.versions, str(Version(found)))
    except InvalidVersion:
        return Check("WARN", name, found, f"not a version number; tested: {TESTED_SGLANG}")
    if is_too_old:
        remedy = f"supported: {rule.versions}: {rule.source}; upgrade it, tested: {TESTED_SGLANG}"
        return Check("FAIL", name, found, remedy)
    is_tested = any(same(found, tested) for tested in SGLANG_TESTED)
    return warn_if(
        not is_tested, name, found, "; ".join([*lacks(found), f"tested: {TESTED_SGLANG}"])
    )


def same(found: str, tested: str) -> bool:
    """Equal except for a local build (2.13.0+cpu)."""
    try:
        return Version(found).public == Version(tested).public
    except InvalidVersion:
        return False


def check_server_flags() -> list[Check]:
    """Read SGLang's argument definitions as text: importing them needs a GPU or the CPU launcher's
    patches.
    """
    spec = util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return [
            Check("WARN", "sglang", "not installed here", "check the servers themselves with --url")
        ]
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    sources = [*root.glob("arg_groups/**/*.py"), root / "server_args.py"]
    text = "\n".join(path.read_text(errors="replace") for path in sources if path.is_file())
    return [check_flag(flag, text) for flag in SERVER_FLAGS]


def check_flag(flag: str, definitions: str) -> Check:
    option = f"--{flag.replace('_', '-')}"
    is_known = f"{flag}:" in definitions or option in definitions
    found = f"{'known' if is_known else 'unknown'} to the installed SGLang"
    return fail_if(not is_known, option, found, f"install sglang {TESTED_SGLANG}")
