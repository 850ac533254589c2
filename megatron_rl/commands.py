"""The commands of `megatron-rl`: entry points of the group megatron_rl.commands, of any installed
package.

An entry point names a function without arguments that reads sys.argv and returns an exit status
(None: 0).  The first line of its docstring is the command's help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "megatron_rl.commands"
PACKAGES = {
    ".": ("new", "sft", "train", "launch", "dry-run", "settings", "evaluate"),
    "./tools": (
        "check-rollouts", "convert", "doctor", "explain-mismatch", "gpu-check", "make-tiny-model",
        "plan", "play", "quantize", "rehearse", "replay-batch", "top", "trace", "verify-replay",
    ),
    "./viewer": ("report", "view"),
}  # fmt: skip
"""Folder of a package in a checkout -> its commands, in the order of the overview."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Name -> entry point of every installed command, ours first, in the order of PACKAGES."""
    ours = [name for names in PACKAGES.values() for name in names]
    points = {point.name: point for point in entry_points(group=GROUP)}
    return {
        name: points[name] for name in [*ours, *sorted(points.keys() - set(ours))] if name in points
    }


def folder_of(name: str) -> str | None:
    """The folder that `pip install` needs for a command of ours; None for an unknown one."""
    return next((folder for folder, names in PACKAGES.items() if name in names), None)


def load(name: str) -> Callable[[], int | None]:
    """The function of an installed command; ImportError where its package misses something."""
    return installed()[name].load()


def help_of(name: str) -> str:
    """One line: what an installed command does."""
    try:
        return (load(name).__doc__ or "").strip().partition("\n")[0].rstrip(".")
    except ImportError as error:
        return f"cannot be loaded: {error}"
