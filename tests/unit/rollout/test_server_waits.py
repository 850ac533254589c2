"""Every wait for a server ends, and names it: calls of a push, servers that start; the watchdog
reports them.
"""

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.rollout.client.load_balancer import LoadBalancer
from megatron_rl.rollout.inference import Inference
from megatron_rl.rollout.server import process, sampling_defaults
from megatron_rl.rollout.server import server_pool as fleets
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl.rollout.server.server_pool import ServerPool, Slot
from megatron_rl.trainer import build_inference as build
from megatron_rl.weights.sync.servers import Servers, WeightPushError
from tests.one_rank import one_rank_config


@pytest.fixture
def silent_url():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_call_of_a_push_has_a_deadline_and_is_reported_while_it_waits(silent_url):
    servers = Servers([silent_url], {}, timeout_seconds=3.0)
    error = []

    def push():
        with pytest.raises(WeightPushError) as raised:
            servers.post("/pause_generation", {"mode": "abort"})
        error.append(str(raised.value))

    thread = threading.Thread(target=push)
    thread.start()
    until = time.monotonic() + 60
    while not servers.unanswered and time.monotonic() < until:
        time.sleep(0.005)
    pusher = SimpleNamespace(servers=servers)
    inference = Inference(
        iter, client=None, pusher=pusher, server_pool=None, urls=[silent_url], log=print
    )
    assert inference.waiting_for() == f"{silent_url}/pause_generation"
    thread.join(60)
    assert error == [f"server {silent_url}/pause_generation did not answer within 3 s"]
    assert inference.waiting_for() == "", "nothing is waited for any more"
    servers.close()


def make_server_pool(tmp_path, *urls):
    rollout = RolloutConfig(num_servers=len(urls), start_timeout_seconds=0.1)
    server_pool = ServerPool(
        Path("m"), rollout, device="cpu", log_dir=tmp_path, seed=0, want_routes=False, log=print
    )
    server_pool.slots = [Slot(index, SimpleNamespace(url=url)) for index, url in enumerate(urls)]
    return server_pool


def test_servers_that_do_not_start_are_not_waited_for_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(fleets, "ANSWER_SECONDS", 0.2)
    server_pool = make_server_pool(tmp_path, "http://a:1", "http://b:2")
    with pytest.raises(
        ServerError, match=r"no server answers, 0.3 s after the last start: http://a:1, http://b:2"
    ):
        server_pool.take()
    server_pool.slots[1].ready = True
    assert server_pool.take() == ["http://b:2"] and server_pool.not_ready() == ["http://a:1"]


def test_servers_on_gpus_get_the_time_that_gpus_need(tmp_path, monkeypatch):
    """To start, and to answer each request of the checks."""
    started, timeouts = [], []
    monkeypatch.setattr(process, "spawn", lambda *args, **rest: None)
    monkeypatch.setattr(process, "server_command", lambda *args, **rest: [])
    for device in ("cpu", "cuda"):
        rollout = RolloutConfig()
        server = process.start_server(
            Path("m"), rollout, log_path=tmp_path / "log", device=device, seed=0
        )
        started.append(server.start_timeout)

    def client(**options):
        timeouts.append(options["timeout"])
        raise InterruptedError("this test needs no more")

    monkeypatch.setattr(sampling_defaults.httpx, "Client", client)
    for device in ("cpu", "cuda"):
        with pytest.raises(InterruptedError):
            sampling_defaults.check_sampling("http://a:1", rollout, vocab_size=8, device=device)
        with ExitStack() as stack, pytest.raises(InterruptedError):
            cfg = one_rank_config(tmp_path, urls=("http://a:1",))
            build.find_servers(cfg, None, device, None, stack, None)
    assert started == [900.0, 1200.0] and timeouts == [60.0, 60.0, 600.0, 600.0]


def test_a_run_reports_which_servers_it_waits_for(tmp_path):
    balancer = LoadBalancer(["http://b:2", "http://c:3"])
    balancer.pick().requests += 2
    client = SimpleNamespace(waiting_for=balancer.waiting_for)
    server_pool = make_server_pool(tmp_path, "http://a:1")
    inference = Inference(
        iter, client=client, pusher=None, server_pool=server_pool, urls=["http://b:2"], log=print
    )
    assert inference.waiting_for() == "http://b:2 (2 requests), http://a:1 to start"


def test_a_push_has_a_deadline_of_its_own():
    """Sampling may take hours; a server that does not take weights is known to hang after
    minutes.
    """
    for name in ("on_policy", "off_policy_n8_r3"):
        rollout = load_config(
            Path(__file__).parents[3] / f"examples/qwen3_30b_a3b/{name}.toml", []
        ).rollout
        assert rollout.weight_sync_timeout_seconds == 600.0 < rollout.request_timeout_seconds
