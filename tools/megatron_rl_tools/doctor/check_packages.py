"""Checks of the installed packages against megatron_rl/config/versions.py, and of the installed
SGLang's options.
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
"""Packages that are useful only with a GPU."""
TESTED_SGLANG = " or ".join(SGLANG_TESTED)


def installed_versions() -> dict[str, str]:
    """Return name -> version of the packages in the rules and of python, importing nothing."""
    versions = {"python": platform.python_version()}
    for name in NAMES:
        with suppress(metadata.PackageNotFoundError):  # "python" is no distribution
            versions[name] = metadata.version(name)
    return versions


def check_packages(installed: Mapping[str, str], *, has_gpu: bool) -> list[Check]:
    """Check each package, pairs that do not work together, and the combination."""
    stack = STACKS.get(installed["python"].rpartition(".")[0], {})
    checks = [
        check_package(package, installed.get(package.name), stack.get(package.name))
        for package in PACKAGES
        if has_gpu or package.name not in NVIDIA or package.name in installed
    ]
    for pair in bad_pairs(installed):
        first, second = pair.first.name, pair.second.name
        result = f"{installed[first]} with {installed[second]}: {pair.reason}"
        checks.append(Check(pair.status, f"{first} + {second}", result, pair.remedy))
    is_tested = bool(stack) and all(
        same(installed.get(name, ""), version) for name, version in stack.items()
    )
    tested = [
        f"Python {python}: {', '.join(f'{name} {version}' for name, version in versions.items())}"
        for python, versions in STACKS.items()
    ]
    result = "a tested one" if is_tested else "not tested"
    remedy = f"tested are {'; '.join(tested)}"
    return [*checks, warn_if(not is_tested, "combination", result, remedy)]


def check_package(known: Package, version: str | None, tested: str | None) -> Check:
    hint = f"; tested: {tested}" if tested else ""
    if version is None:
        if known.without:
            return Check("WARN", known.name, "not installed", known.without)
        remedy = f"make install (CPU) or pip install -r requirements.txt (GPU){hint}"
        return Check("FAIL", known.name, "not installed", remedy)
    if known.name == "sglang":
        return check_sglang(version)
    if not admits(known.versions, version):
        remedy = f"supported: {known.versions}, {known.source}{hint}"
        return Check("FAIL", known.name, version, remedy)
    is_other = tested is not None and not same(version, tested)
    return warn_if(is_other, known.name, version, f"may run{hint}")


def check_sglang(version: str, name: str = "sglang") -> Check:
    """Check SGLang's version, which is installed here or reported by a server."""
    rule = package("sglang")
    try:
        is_too_old = not admits(rule.versions, str(Version(version)))
    except InvalidVersion:
        return Check("WARN", name, version, f"not a version number; tested: {TESTED_SGLANG}")
    if is_too_old:
        remedy = f"supported: {rule.versions}: {rule.source}; upgrade it, tested: {TESTED_SGLANG}"
        return Check("FAIL", name, version, remedy)
    is_tested = any(same(version, tested) for tested in SGLANG_TESTED)
    remedy = "; ".join([*lacks(version), f"tested: {TESTED_SGLANG}"])
    return warn_if(not is_tested, name, version, remedy)


def same(version: str, tested: str) -> bool:
    """Return whether the versions are equal except for a local build (2.13.0+cpu)."""
    try:
        return Version(version).public == Version(tested).public
    except InvalidVersion:
        return False


def check_server_flags() -> list[Check]:
    """Look for options in SGLang's argument definitions, as text: importing these needs a GPU or
    the CPU launcher's patches.
    """
    spec = util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        remedy = "check the servers themselves with --url"
        return [Check("WARN", "sglang", "not installed here", remedy)]
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    sources = [*root.glob("arg_groups/**/*.py"), root / "server_args.py"]
    text = "\n".join(path.read_text(errors="replace") for path in sources if path.is_file())
    return [check_flag(flag, text) for flag in SERVER_FLAGS]


def check_flag(flag: str, definitions: str) -> Check:
    option = f"--{flag.replace('_', '-')}"
    is_known = f"{flag}:" in definitions or option in definitions
    result = f"{'known' if is_known else 'unknown'} to the installed SGLang"
    return fail_if(not is_known, option, result, f"install sglang {TESTED_SGLANG}")
