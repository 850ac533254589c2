"""Calls of the kernel that Python 3.11 does not have, for the programs beside this file."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442  # on every machine
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_NO_NEW_PRIVILEGES = 1, 4, 38
KILL = 9


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    checked(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = [text.encode() or None for text in (source, target, kind)]
    checked(LIBC.mount(*arguments, flags, options.encode() or None), f"mount {target}")


def unmount(target: str) -> None:
    checked(LIBC.umount2(target.encode(), DETACH), f"umount {target}")


def make_read_only(target: str, *, with_mounts_below: bool) -> None:
    """Make a mount read-only, without set-user-id programs; all mounts below it, too.

    Needs Linux 5.12.
    """
    attributes = struct.pack("=QQQQ", READ_ONLY | NO_SETUID, 0, 0, 0)
    flags = AT_RECURSIVE if with_mounts_below else 0
    number = LIBC.syscall(
        MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, attributes, len(attributes)
    )
    checked(number, f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    machine = os.uname().machine
    if machine not in PIVOT_ROOT:
        raise OSError(f"pivot_root on {machine}: its number is not known; install bubblewrap")
    checked(LIBC.syscall(PIVOT_ROOT[machine], new.encode(), old.encode()), "pivot_root")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; a change of users forgets it."""
    checked(LIBC.prctl(SET_PARENT_DEATH_SIGNAL, KILL, 0, 0, 0), "prctl")


def forbid_changes() -> None:
    """Let no other process of this user read or change this one (ptrace, pidfd_getfd); a program
    that it starts may be.
    """
    checked(LIBC.prctl(SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def forbid_new_privileges() -> None:
    checked(LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def set_limits(limits: dict[str, int]) -> None:
    """Set limits by their names in `resource`, such as "AS" or "NPROC"."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(number, (value, value))


def become_nobody(user: int) -> None:
    """Give up root for a user id that no other sandbox has now: its limit of processes counts the
    processes of this sandbox alone.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def user_of(number: int) -> int:
    """Return a user id above those of people and below 65,536, which containers may map."""
    return 20_000 + number % 40_000
