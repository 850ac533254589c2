"""The versions that this project runs with.

requirements*.txt, pyproject.toml, the doctor, the check of servers, README.md and
docs/reference/versions.md must agree with this file (tests/unit/config/test_versions.py).  Every
rule names its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Package:
    """A package that this project runs with."""

    name: str
    versions: SpecifierSet
    """The versions that may work."""
    source: str
    """The evidence for them."""
    without: str = ""
    """The consequence if an optional package is missing; empty if it is required."""


@dataclass(frozen=True)
class BadPair:
    """Two packages that do not work together in one environment; "python" is one of them too."""

    first: Requirement
    second: Requirement
    status: Literal["WARN", "FAIL"]
    reason: str
    remedy: str

    def holds(self, installed: Mapping[str, str]) -> bool:
        """Return True if both are installed in such versions.

        A version that is not a number (a custom build) passes.
        """
        needs = (self.first, self.second)
        return all(admits(need.specifier, installed.get(need.name, "")) for need in needs)


STACKS: dict[str, dict[str, str]] = {
    python: {
        "megatron-core": core, "sglang": "0.5.21", "torch": "2.13.0", "transformers": "5.12.1",
    }
    for python, core in (("3.11", "0.16.1"), ("3.12", "0.19.2"))
}  # fmt: skip
"""Python -> the tested combination: all tests ran on 3.11, those of `make test-stacks` on 3.12."""

SGLANG_TESTED = ("0.5.21", "0.5.23")
"""Versions that ran the end-to-end tests of rollouts and weight sync on both stacks.

0.5.23 asks for torch 2.14.1, transformers 5.19.0 and tokenizers 0.23.2; it was run on the CPU with
torch 2.13.0 and the others.
"""

PACKAGES = (
    Package(
        "megatron-core", SpecifierSet(">=0.16,<0.20"),
        "tested at both ends; other versions have other hooks and defaults",
    ),
    Package("torch", SpecifierSet(">=2.6"), "megatron-core's own metadata, both 0.16.1 and 0.19.2"),
    Package(
        "transformers", SpecifierSet(">=5.12"),
        "tested with 5.12.1, the one that sglang 0.5.21 pins",
    ),
    Package(
        "sglang", SpecifierSet(">=0.5.11"),
        "before, expert ids were physical ids or not encoded (its sources)",
        without="run servers elsewhere and name them in rollout.urls",
    ),
    Package(
        "transformer-engine", SpecifierSet(">=2.9.0a0"),
        "megatron-core 0.16.1's metadata (extra dev)",
        without="layers run on plain torch (model.layer_spec = local)",
    ),
    Package(
        "apex", SpecifierSet(), "no version is known to fail",
        without="the optimizer runs on torch's Adam",
    ),
    Package(
        "nvidia-modelopt", SpecifierSet(), "megatron-rl quantize tested with 0.47.0",
        without="megatron-rl quantize modelopt refuses; its FP8 blocks need none",
    ),
)  # fmt: skip

SGLANG_SINCE = {
    "0.5.19": "a response says which weights sampled which of its tokens",
    "0.5.20": "megatron_rl.rollout.server.sglang_cpu can serve without a GPU",
    "0.5.21": "weights change inside a session (begin/end_weight_update)",
}
"""Abilities of a server from a version on, above the required minimum; from SGLang's sources."""

BAD_PAIRS = (
    BadPair(
        Requirement("megatron-core>=0.19"), Requirement("python<3.12"), "FAIL",
        "0.19 is made for Python 3.12 and later (its metadata)",
        "use Python 3.12, or megatron-core 0.16.1",
    ),
    BadPair(
        Requirement("megatron-core<0.17"), Requirement("transformer-engine>=2.12"), "WARN",
        "0.16.1 asks for transformer-engine below 2.12 (its metadata)",
        "use an older container, or megatron-core 0.19.2",
    ),
    BadPair(
        Requirement("megatron-core>=0.19"), Requirement("nvidia-modelopt<0.44"), "WARN",
        "0.19.2 asks for nvidia-modelopt 0.44 or later (its metadata)",
        "pip install -U nvidia-modelopt",
    ),
    BadPair(
        Requirement("transformers>=5.12,<5.13"), Requirement("tokenizers>0.23.0"), "FAIL",
        "5.12 refuses tokenizers above 0.23.0 when it is imported",
        "pip install tokenizers==0.22.2",
    ),
    BadPair(
        Requirement("sglang==0.5.17"), Requirement("transformers>=5.17"), "FAIL",
        "its import ends in \"'qwen3_asr' is already used\"",
        "pip install transformers==5.12.1, or upgrade sglang",
    ),
    *(
        BadPair(
            Requirement(f"sglang{versions}"), Requirement(f"torch!={torch}.*"), "WARN",
            f"it pins torch {torch}, which its GPU kernels are built for",
            "give servers an environment of their own",
        )
        for versions, torch in (
            (">=0.5.11,<0.5.18", "2.11.0"), (">=0.5.18,<0.5.22", "2.13.0"),
            (">=0.5.22,<0.5.24", "2.14.1"),
        )
    ),
    BadPair(
        Requirement("torchvision"), Requirement("torch===2.13.0+cpu"), "WARN",
        "torchvision 0.28 cannot be imported beside this torch, and transformers imports it if it "
        "is installed",
        "pip uninstall torchvision",
    ),
)  # fmt: skip
"""Taken from metadata and sources of the versions named, and from trying them."""

PAIRED = [need.name for pair in BAD_PAIRS for need in (pair.first, pair.second)]
NAMES = tuple(dict.fromkeys([*(package.name for package in PACKAGES), *PAIRED]))
"""All names in the rules; "python" is one."""


def package(name: str) -> Package:
    return next(package for package in PACKAGES if package.name == name)


def least(name: str) -> Version:
    """Return the lowest version that may work.

    Raises StopIteration for an unknown package.
    """
    return min(Version(rule.version) for rule in package(name).versions if rule.operator == ">=")


def admits(versions: SpecifierSet, installed: str) -> bool:
    """Return True if `installed` is one of `versions`, pre-releases and local builds included."""
    try:
        version = Version(installed)
    except InvalidVersion:
        return False
    # == of a public version ignores the local build; only === compares it
    is_local = any(rule.operator == "===" for rule in versions)
    # containers have pre-releases such as 2.12.0a0
    return versions.contains(version if is_local else version.public, prereleases=True)


def bad_pairs(installed: Mapping[str, str]) -> Iterator[BadPair]:
    """Return the bad pairs among `installed` (name -> version, including "python")."""
    return (pair for pair in BAD_PAIRS if pair.holds(installed))


def lacks(sglang: str) -> list[str]:
    """Return a line for everything that a server of this version lacks.

    A version that is not a number lacks nothing.
    """
    try:
        version = Version(sglang)
    except InvalidVersion:
        return []
    missing = {since: what for since, what in SGLANG_SINCE.items() if version < Version(since)}
    return [f"from {since} on {what}" for since, what in missing.items()]
