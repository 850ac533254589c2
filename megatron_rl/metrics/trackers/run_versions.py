"""What a run was made with: versions of packages, and the git revisions of this package and of the
working folder.
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
    """Package -> installed version; "git": the revision of the working folder, "megatron_rl git":
    of this package.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    revisions = {
        "megatron_rl git": git_revision(Path(__file__).parent),
        "git": git_revision(Path.cwd()),
    }
    return found | {name: revision for name, revision in revisions.items() if revision}


def git_revision(folder: Path) -> str:
    """The commit that is checked out, with "+changes" where tracked files differ from it; ""
    without git or a repository.
    """
    command = ["git", "-C", str(folder)]
    try:
        head = subprocess.run(
            [*command, "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
        changes = subprocess.run(
            [*command, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
