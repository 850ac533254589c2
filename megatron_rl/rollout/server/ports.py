"""Ports on which servers listen: a free one, and a check of a given one."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from megatron_rl.rollout.server.server_info import ServerError

USUAL = range(10000, 29000)
"""Ports to choose from: above are those of torchrun (29500), SGLang (30000) and Kubernetes."""
TRIES = 100
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` on which a server can listen that starts later, maybe seconds.

    The kernel gives ports of its ephemeral range to outgoing connections, so a free one of them may
    be taken before the server listens.  A random port outside the range stays free unless another
    program asks for this number.  The kernel chooses where its range covers USUAL, or where all
    TRIES ports are in use.  Raises OSError when nothing can listen on `host`.
    """
    choices = outside_ephemeral(USUAL)
    # the system's generator: runs with the same seed would choose the same ports
    tries = random.SystemRandom().sample(choices, min(TRIES, len(choices)))
    for port in tries:
        try:
            listen(host, port).close()
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    with listen(host, 0) as probe:
        return probe.getsockname()[1]


def outside_ephemeral(ports: range) -> list[int]:
    """Return the ports that the kernel does not give to outgoing connections."""
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
    except FileNotFoundError:  # not mounted; Linux's default range begins at 32768
        return list(ports)
    return [port for port in ports if not first <= port <= last]


def check_port_is_free(host: str, port: int) -> None:
    """Raise ServerError when no server can listen on `port` of `host`."""
    try:
        listen(host, port).close()
    except OSError as error:
        raise ServerError(
            f"rollout.port = {port}: cannot listen on {host}: {error}; use another port, or 0"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of `host`; 0 is a port that the kernel chooses.

    Raises OSError.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # with SO_REUSEADDR, as in the server: a port in TIME_WAIT is free
    return socket.create_server((host, address[1]), family=family)
