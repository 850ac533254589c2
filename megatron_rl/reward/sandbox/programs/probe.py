"""Tries the walls around it, and prints a JSON list of those that do not hold.

probe.py PROCESSES PORT    the limit of processes; a port of 127.0.0.1 on which the caller listens
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator

from megatron_rl.reward.sandbox.programs.kernel import LIBC, NEW_USERS, SET_PARENT_DEATH_SIGNAL


def broken_walls(processes: int, port: int) -> Iterator[str]:
    """Yield the walls that do not hold, in words."""
    if 0 in (os.getuid(), os.geteuid()):
        yield "programs run as root"
    for path in ("/etc/passwd", "/proc/self/environ", "/root", "/home", "/sys"):
        if os.path.exists(path):
            yield f"{path} can be seen"
    for path in ("/x", "/usr/x", "/programs/x"):
        try:
            with open(path, "w"):
                yield f"{path} can be written"
        except OSError:
            pass
    if others := [name for _, name in socket.if_nameindex() if name != "lo"]:
        yield f"the network is there: {', '.join(others)}"
    with socket.socket() as connection:
        connection.settimeout(0.5)
        try:
            connection.connect(("127.0.0.1", port))
            yield "the loopback of the machine is there"
        except OSError:
            pass
    started = forks(processes)
    if started >= processes:
        yield f"{started} processes run under a limit of {processes}"
    if started == 0:
        yield "no second process can be started: processes of other programs are counted, too"
    try:
        bytearray(2**30)
        yield "1 GiB can be used under a limit of 256 MiB"
    except MemoryError:
        pass
    if LIBC.prctl(SET_PARENT_DEATH_SIGNAL, 0, 0, 0, 0) == 0:
        yield "a program may live longer than its caller"
    if (number := LIBC.shmget(0, 4096, 0o600)) >= 0:
        LIBC.shmctl(number, 0, None)  # IPC_RMID
        yield "shared memory that no limit counts can be made"
    if LIBC.unshare(NEW_USERS) == 0:
        yield "a user namespace can be made"


def forks(most: int) -> int:
    """Return the number of processes that could be started, `most` at most."""
    for count in range(most):
        try:
            child = os.fork()
        except OSError:
            return count
        if child == 0:
            time.sleep(1)
            os._exit(0)
    return most


if __name__ == "__main__":
    print(json.dumps(list(broken_walls(int(sys.argv[1]), int(sys.argv[2])))), flush=True)
