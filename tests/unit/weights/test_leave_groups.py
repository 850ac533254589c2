"""Sources leave their process groups with the servers: NCCL's ranks of one machine end a
communicator together or wait.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.sync.bucket_order import one_at_a_time
from megatron_rl.weights.sync.servers import Servers
from megatron_rl.weights.sync.transports import Distributed

PATIENCE = 8.0


class Communicator:
    """Ends when every rank ends it, as ncclCommDestroy does on one machine."""

    def __init__(self, group_name: str, size: int) -> None:
        self.group_name = group_name
        self.together = threading.Barrier(size, timeout=PATIENCE)
        self.aborted = False

    def close(self, *, is_complete: bool = True) -> None:
        self.aborted = not is_complete
        if is_complete:
            self.together.wait()


class NodeServer:
    """One of the servers of a machine; like SGLang's scheduler it does one thing at a time.."""

    def __init__(self, communicators: dict[str, Communicator]) -> None:
        self.lock, self.ended = threading.Lock(), []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))[
                    "group_name"
                ]
                with server.lock:
                    communicators[name].together.wait()
                    server.ended.append(name)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()


class Unequal(Servers):
    """Reaches its servers in an order of its own, as two sources may; one call is on its way before
    the next starts.
    """

    def start_leaving(self, group_name, urls):
        calls = []
        for url in urls if group_name == "a" else reversed(urls):
            calls += super().start_leaving(group_name, [url])
            time.sleep(0.1)
        return calls


@pytest.fixture
def machine():
    """(communicators by name, two servers on the machine of two sources)."""
    communicators = {name: Communicator(name, 3) for name in ("a", "b")}
    servers = [NodeServer(communicators) for _ in range(2)]
    yield communicators, servers
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def test_sources_and_servers_of_one_machine_end_each_communicator_together(machine):
    """A source that waited for the answers of servers first, or two that came to them in two
    orders, would wait in vain.
    """
    communicators, servers = machine
    urls, store, errors = [server.url for server in servers], dist.HashStore(), []

    def leave(rank: int, name: str) -> None:
        control = Unequal(urls, {}, PATIENCE)
        transport = Distributed(torch.device("cpu"), Ranks(rank, None, store))
        transport.sender = communicators[name]
        try:
            transport.leave(control, urls)
            assert transport.sender is None
        except BaseException as error:
            errors.append(error)
        control.close()

    sources = [threading.Thread(target=leave, args=source) for source in enumerate(communicators)]
    start = time.monotonic()
    for source in sources:
        source.start()
    for source in sources:
        source.join()
    assert not errors and time.monotonic() - start < PATIENCE
    assert servers[0].ended == servers[1].ended and sorted(servers[0].ended) == ["a", "b"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_group_with_a_server_that_died_is_aborted(machine, is_known):
    """Known where others are pushed to since; not where the run ends."""
    communicators, servers = machine
    servers[1].http.shutdown()
    servers[1].http.server_close()
    communicators["a"].together = threading.Barrier(1)  # the server that is left
    control = Servers([server.url for server in servers], {}, PATIENCE)
    transport = Distributed(torch.device("cpu"), Ranks())
    transport.sender = communicators["a"]
    transport.leave(control, [server.url for server in servers[: 1 if is_known else 2]])
    control.close()
    assert communicators["a"].aborted and servers[0].ended == ["a"] and not servers[1].ended


def test_many_sources_are_inside_one_at_a_time_however_long_all_of_them_take():
    store, inside, most = dist.HashStore(), 0, 0

    def leave() -> None:
        nonlocal inside, most
        with one_at_a_time(store, "leave", 0.6):
            inside += 1
            most = max(most, inside)
            time.sleep(0.2)
            inside -= 1

    sources = [threading.Thread(target=leave) for _ in range(8)]
    for source in sources:
        source.start()
    for source in sources:
        source.join()
    assert most == 1


def test_a_rank_that_died_inside_holds_the_next_one_up_for_a_while_only():
    store = dist.HashStore()
    assert store.add("leave/came", 1) == 1  # and it never leaves
    start = time.monotonic()
    with one_at_a_time(store, "leave", 0.3):
        assert 0.3 <= time.monotonic() - start < 2
