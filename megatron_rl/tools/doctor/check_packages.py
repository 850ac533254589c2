"""Installed packages against megatron_rl/config/versions.py, and what SGLang's command line knows."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_rl.config.versions import NAMES, PACKAGES, STACKS, Package, admits, bad_pairs, lacks, package
from megatron_rl.tools.doctor.check import Check

SERVER_FLAGS = ("enable_return_routed_experts", "sleep_on_idle")
NVIDIA = ("transformer-engine", "apex", "nvidia-modelopt")
"""Only of use with a GPU."""


def installed_versions() -> dict[str, str]:
    """Name -> version of what a rule is about, python among them; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in NAMES:
        if name != "python" and (version := version_of(name)) is not None:
            found[name] = version
    return found


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(installed: Mapping[str, str], *, has_gpu: bool) -> list[Check]:
    """Each package, the combination, and pairs that do not go together."""
    stack = STACKS.get(installed["python"].rpartition(".")[0], {})
    wanted = [each for each in PACKAGES if has_gpu or each.name not in NVIDIA or each.name in installed]
    checks = [check_package(each, installed.get(each.name), stack.get(each.name)) for each in wanted]
    pairs = []
    for pair in bad_pairs(installed):
        first, second = pair.first.name, pair.second.name
        found = f"{installed[first]} with {installed[second]}: {pair.reason}"
        pairs.append(Check(pair.status, f"{first} + {second}", found, pair.remedy))
    return [*checks, *pairs, check_combination(installed, stack)]


def check_package(known: Package, found: str | None, tested: str | None) -> Check:
    if found is None:
        if known.without:
            return Check("WARN", known.name, "not installed", known.without)
        remedy = f"make install (CPU) or pip install -r requirements.txt (GPU){f'; tested: {tested}' if tested else ''}"
        return Check("FAIL", known.name, "not installed", remedy)
    if known.name == "sglang":
        return check_sglang(found)
    if not admits(known.versions, found):
        remedy = f"supported: {known.versions}, {known.source}{f'; tested: {tested}' if tested else ''}"
        return Check("FAIL", known.name, found, remedy)
    if tested is None or same(found, tested):
        return Check("OK", known.name, found)
    return Check("WARN", known.name, found, f"may run; tested: {tested}")


def check_sglang(found: str, name: str = "sglang") -> Check:
    """SGLang, installed here or as a server says it."""
    tested = next(iter(STACKS.values()))["sglang"]
    if same(found, tested):
        return Check("OK", name, found)
    rule = package("sglang")
    try:
        too_old = not admits(rule.versions, str(Version(found)))
    except InvalidVersion:
        return Check("WARN", name, found, f"no version number; tested: {tested}")
    if too_old:
        return Check("FAIL", name, found, f"supported: {rule.versions}: {rule.source}; upgrade it, tested: {tested}")
    return Check("WARN", name, found, "; ".join([*lacks(found), f"tested: {tested}"]))


def check_combination(installed: Mapping[str, str], stack: Mapping[str, str]) -> Check:
    if stack and all(same(installed.get(name, ""), version) for name, version in stack.items()):
        return Check("OK", "combination", "one that tests are run with")
    tested = "; ".join(
        f"Python {python}: " + ", ".join(f"{k} {v}" for k, v in each.items()) for python, each in STACKS.items()
    )
    return Check("WARN", "combination", "not tested", f"tested are {tested}")


def same(found: str, tested: str) -> bool:
    """Equal up to a local build (2.13.0+cpu)."""
    try:
        return Version(found).public == Version(tested).public
    except InvalidVersion:
        return False


def check_server_flags() -> list[Check]:
    """Read SGLang's argument definitions as text: importing them needs a GPU or the CPU launcher's preparations."""
    spec = util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return [Check("WARN", "sglang", "not installed here", "check the servers themselves with --url")]
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    sources = [*root.glob("arg_groups/**/*.py"), root / "server_args.py"]
    text = "\n".join(path.read_text(errors="replace") for path in sources if path.is_file())
    return [check_flag(flag, text) for flag in SERVER_FLAGS]


def check_flag(flag: str, definitions: str) -> Check:
    option = f"--{flag.replace('_', '-')}"
    if f"{flag}:" in definitions or option in definitions:
        return Check("OK", option, "known to the installed SGLang")
    tested = next(iter(STACKS.values()))["sglang"]
    return Check("FAIL", option, "unknown to the installed SGLang", f"install sglang {tested}")
