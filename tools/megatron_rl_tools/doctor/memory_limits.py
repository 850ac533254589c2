"""The memory that this process may use: a container's control group (cgroup) allows less than the
machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Controller in MEMBERSHIP, "" for version 2 -> the files with the limit and with what is used."""


def smallest_limit() -> tuple[int, int] | None:
    """Return (bytes, bytes free) of the group of this process, or one above it, that leaves least
    free; None without a limit."""
    limits = [(most, most - used) for most, used in limits_and_uses()]
    return min(limits, key=lambda limit: limit[1], default=None)


def limits_and_uses() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of every group that has a limit, in bytes."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in FILES.keys() & set(controllers.split(",")):
            root = CGROUPS / controller
            # within a container the path is that of the host, and the root is the container's group
            group = root / path.lstrip("/")
            for folder in dict.fromkeys([group, *group.parents, root]):
                if folder.is_relative_to(root) and (values := read_group(folder, controller)):
                    yield values


def read_group(folder: Path, controller: str) -> tuple[int, int] | None:
    """Return the limit and the use of a group; None where it has none.

    The page cache counts as free where the kernel would drop it first.
    """
    try:
        most, used = ((folder / name).read_text().strip() for name in FILES[controller])
        statistics = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
    except OSError:  # the root group has no such files, and a group may not be visible
        return None
    cache = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
    return None if most == "max" else (int(most), int(used) - int(cache))
