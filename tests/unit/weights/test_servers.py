"""Calls of all servers during a push of weights."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from megatron_rl.weights.sync.servers import Servers, start_of
from megatron_rl.weights.sync.transports import Disk


def test_every_call_has_the_key_and_no_proxy():
    servers = Servers(["http://127.0.0.1:1/"], {"Authorization": "Bearer key"}, 1.0)
    assert servers.http.headers["Authorization"] == "Bearer key" and not servers.http.trust_env
    servers.close()


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
