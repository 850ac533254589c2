"""Versions of the packages of a run, and the git revisions of this package and of the working
folder.
"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "megatron_rl", "torch", "megatron-core", "transformer-engine", "sglang", "transformers",
    "safetensors", "numpy",
)  # fmt: skip
GIT_SECONDS = 5.0


def versions() -> dict[str, str]:
    """Return {package: installed version}, with the revision of the working folder as "git" and
    that of this package as "megatron_rl git".
    """
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    revisions = {
        "megatron_rl git": git_revision(Path(__file__).parent),
        "git": git_revision(Path.cwd()),
    }
    return installed | {name: revision for name, revision in revisions.items() if revision}


def git_revision(folder: Path) -> str:
    """Return the commit that is checked out, with "+changes" where tracked files differ from it; ""
    without git or a repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return result.stdout.strip()

    try:
        head, changes = (
            git("rev-parse", "HEAD"),
            git("status", "--porcelain", "--untracked-files=no"),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}+changes" if changes else head
