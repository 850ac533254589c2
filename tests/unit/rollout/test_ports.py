"""Ports of servers: no outgoing connection takes one between its choice and the server's start."""

import errno
import socket

import pytest

from megatron_rl.rollout.server import ports
from megatron_rl.rollout.server.ports import USUAL, check_port_is_free, free_port


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """Return a function that sets the kernel's range of ports of outgoing connections."""
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    return (tmp_path / "range").write_text


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (None, USUAL),
        ("32768\t60999\n", USUAL),
        ("1024\t27999\n", range(28000, 29000)),
        ("10900\t65535\n", range(10000, 10900)),
    ],
)
def test_no_port_is_one_that_the_kernel_gives_away(ephemeral, text, allowed):
    if text is not None:
        ephemeral(text)
    chosen = [free_port() for _ in range(50)]
    assert set(chosen) <= set(allowed) and len(set(chosen)) > 25


def test_the_kernel_chooses_where_it_gives_every_port_away(ephemeral, monkeypatch):
    ephemeral("1024\t65535\n")
    listened = []
    listen = ports.listen
    monkeypatch.setattr(
        ports, "listen", lambda host, port: listened.append(port) or listen(host, port)
    )
    check_port_is_free("127.0.0.1", free_port())
    assert listened[0] == 0


def test_a_port_in_use_is_not_chosen(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "USUAL", range(port, port + 1))
        assert free_port() != port


def test_a_host_that_is_not_of_this_machine_is_refused_at_the_first_try(monkeypatch):
    tries = []

    def listen(host, port):
        tries.append(port)
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(ports, "listen", listen)
    with pytest.raises(OSError, match="Cannot assign"):
        free_port("192.0.2.1")
    assert len(tries) == 1
