"""Starts a program in namespaces of its own, where bubblewrap is not installed.

    launch.py SPEC    SPEC: that of inside.py, with "binds": {path inside: path outside},
                      "hidden": [folder inside, ...], "links": {path inside: target},
                      "box_bytes", "parent": the caller's process

Namespaces: users (unless it is root, which becomes another user), mounts, processes, network, IPC,
host name.  Process 1 of its namespace is this file's, which the program cannot change: the kernel
ends it with the caller, and all others with it.  With "is_first" the program itself is process 1:
one that runs no code of others.  It sees a root of its own: "binds", read-only and with the folders
"hidden" empty, and an empty folder /box.
"""

from __future__ import annotations

import json
import os
import sys

from megatron_rl.reward.sandbox.programs import inside, kernel

APART = kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_NAMES
DEVICES = ("null", "zero", "full", "random", "urandom")
USER = 1000
"""User and group inside a user namespace."""


def enter_namespaces(user: int) -> None:
    """Leave the namespaces of the caller.

    Root needs no user namespace where it may make the others: it becomes `user` in the end.  Root
    of a container that may not, and everybody else, needs one.
    """
    if os.geteuid() == 0:
        try:
            return kernel.unshare(APART)
        except PermissionError:
            # the limit of processes has no effect on root, also not in a user namespace
            kernel.become_nobody(user)
    outside = os.geteuid(), os.getegid()
    kernel.unshare(APART | kernel.NEW_USERS)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{USER} {outside[0]} 1")
    write("/proc/self/gid_map", f"{USER} {outside[1]} 1")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(
    binds: dict[str, str], hidden: list[str], links: dict[str, str], box_bytes: int
) -> None:
    """Replace the root of the file system, in this mount namespace."""
    flags = kernel.NO_SETUID | kernel.NO_DEVICES
    kernel.mount("", "/", "", kernel.RECURSIVE | kernel.PRIVATE)
    # over /tmp, which every system has; what it hides is in /old afterwards
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, "mode=755,size=1m")
    os.chdir("/tmp")
    for name in ("old", "new"):
        os.mkdir(name)
    kernel.pivot_root(".", "old")
    os.chdir("/")
    kernel.mount("tmpfs", "/new", "tmpfs", flags, "mode=755,size=1m")
    for target, source in binds.items():
        bind(f"/old{source}", f"/new{target}")
        kernel.make_read_only(f"/new{target}", with_mounts_below=True)
    for folder in hidden:
        kernel.mount("tmpfs", f"/new{folder}", "tmpfs", flags | kernel.READ_ONLY, "size=4k")
    for name in DEVICES:
        bind(f"/old/dev/{name}", f"/new/dev/{name}")
    os.mkdir("/new/box")
    kernel.mount("tmpfs", "/new/box", "tmpfs", flags, f"mode=1777,size={box_bytes},nr_inodes=1000")
    for name, target in links.items():
        os.makedirs(os.path.dirname(f"/new{name}"), exist_ok=True)
        os.symlink(target, f"/new{name}")
    kernel.unmount("/old")
    kernel.make_read_only("/new", with_mounts_below=False)
    os.chdir("/new")
    # the second root is put over the first one, which is taken away then
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/box")


def bind(source: str, target: str) -> None:
    """Show the folder or file `source` at `target`."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    kernel.mount(source, target, "", kernel.BIND | kernel.RECURSIVE)


def run(spec: dict) -> int:
    """Run the program; return its exit status, or 256 - the signal that killed it."""
    kernel.die_with_parent()
    if os.getppid() != spec["parent"]:  # it died before
        return 1
    enter_namespaces(spec["user"])
    build_root(spec["binds"], spec["hidden"], spec["links"], spec["box_bytes"])
    kernel.die_with_parent()  # a change of users has forgotten it
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        try:
            if spec["is_first"]:
                inside.start(spec, read_end)
            elif inside.follow_parent(read_end):
                be_first(spec)
        except BaseException as error:
            print(f"sandbox: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(LAUNCH_FAILED)
    os.close(read_end)
    return status_of(child, spec)


def be_first(spec: dict) -> None:
    """Be process 1 of the namespace: start the program, and end with it, and so end all others."""
    kernel.forbid_changes()
    if os.geteuid() != 0:  # this process has the program's user, and is counted
        spec["limits"]["NPROC"] += 1
    program = os.fork()
    if program == 0:
        inside.start(spec)
    os._exit(status_of(program, spec))


def status_of(child: int, spec: dict) -> int:
    """Wait for a child; return its exit status, or 256 - the signal that killed it."""
    for number in (0, 1, *spec["keep"]):  # else a reader would wait for this process
        os.close(number)
    while True:
        ended, status = os.wait()  # process 1 gets all orphans of its namespace
        if ended == child:
            return os.waitstatus_to_exitcode(status) % 256


LAUNCH_FAILED = 97


if __name__ == "__main__":
    try:
        code = run(json.loads(sys.argv[1]))
    except OSError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        code = LAUNCH_FAILED
    os._exit(code)
