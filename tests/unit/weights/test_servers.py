"""Calls of all servers during a push of weights."""

import contextlib
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from megatron_rl.config.sglang_settings import KEEPALIVE_SECONDS
from megatron_rl.weights.sync import servers as servers_module
from megatron_rl.weights.sync.servers import Servers, start_of
from megatron_rl.weights.sync.transports import Disk


def test_every_call_has_the_key_and_no_proxy():
    servers = Servers(["http://127.0.0.1:1/"], {"Authorization": "Bearer key"}, 1.0)
    assert servers.http.headers["Authorization"] == "Bearer key" and not servers.http.trust_env
    servers.close()


class Answers(BaseHTTPRequestHandler):
    """Answers once as many calls have arrived as the barrier of its server waits for."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connected.append(self.client_address)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with contextlib.suppress(threading.BrokenBarrierError):
            self.server.barrier.wait(5)
        self.send_response(500 if self.server.barrier.broken else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def answering():
    """answering(n) -> (URLs of n servers that answer a call once all n have theirs, the addresses
    that have connected).
    """
    with contextlib.ExitStack() as stack:

        def start(num_servers):
            kind = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 1024})
            server = stack.enter_context(kind(("127.0.0.1", 0), Answers))
            stack.callback(server.shutdown)
            server.barrier, server.connected = threading.Barrier(num_servers), []
            threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
            return [f"http://127.0.0.1:{server.server_port}"] * num_servers, server.connected

        yield start


def test_hundreds_of_servers_get_their_calls_at_the_same_time(answering):
    urls, _ = answering(220)
    servers = Servers(urls, {}, 30.0)
    servers.post("/init_weights_update_group", {})
    servers.close()


def test_a_connection_is_closed_before_the_server_closes_it(answering, monkeypatch):
    urls, connected = answering(1)
    for seconds, connections in ((5.0, 1), (0.05, 2)):
        connected.clear()
        monkeypatch.setattr(servers_module, "KEEPALIVE_SECONDS", seconds)
        servers = Servers(urls, {}, 30.0)
        servers.post("/pause_generation", {})
        time.sleep(0.2)
        servers.post("/pause_generation", {})
        servers.close()
        assert len(connected) == connections
    assert KEEPALIVE_SECONDS < 5, "SGLang's own (uvicorn's timeout_keep_alive)"


def test_all_calls_have_ended_before_an_error_is_raised():
    servers = Servers(["http://127.0.0.1:1"], {}, 1.0)
    failed: Future = Future()
    failed.set_exception(KeyError("first"))
    slow = servers.threads.submit(time.sleep, 0.3)
    with pytest.raises(KeyError, match="first"):
        servers.wait([failed, slow])
    assert slow.done()
    servers.close()


def test_close_waits_for_no_call_and_starts_no_other():
    servers, release = Servers(["http://127.0.0.1:1"], {}, 1.0), threading.Event()
    running = [servers.threads.submit(release.wait, 30) for _ in range(2)]
    queued = servers.threads.submit(release.wait, 30)
    servers.close()
    assert queued.cancelled() and not any(call.done() for call in running)
    release.set()
    with pytest.raises(RuntimeError, match="shutdown"):
        servers.threads.submit(time.sleep, 0)


def test_two_starts_of_a_server_differ_by_their_seconds_or_their_seed():
    info = {"startup_time": 1.5, "random_seed": 7, "tp_size": 1}
    assert start_of(info) == {"startup_time": 1.5, "random_seed": 7}


def test_a_checkpoint_of_the_last_push_is_removed_when_the_next_one_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    disk, loaded = Disk(tmp_path, tmp_path / "pushed"), []
    servers = SimpleNamespace(post=lambda path, body: loaded.append((path, body["model_path"])))
    for version in (1, 2, 2):
        disk.open(servers, version)
        bucket = SimpleNamespace(number=0, tensors=lambda: {"a": torch.ones(2)})
        disk.send(servers, bucket, version, None)
        disk.finish(servers, version, {"a": 0}, 8)
        folder = tmp_path / f"pushed/weights_{version}"
        assert list((tmp_path / "pushed").iterdir()) == [folder]
        assert loaded[-1] == ("/update_weights_from_disk", str(folder))
        with safe_open(folder / "model-00001.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"} and list(file.keys()) == ["a"]
    disk.close()
    assert not list((tmp_path / "pushed").iterdir())
