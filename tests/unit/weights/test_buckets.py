"""A bucket on its way: files, broadcasts that end early, and the store of a group."""

from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.weights.sync import buckets
from megatron_rl.weights.sync.buckets import BroadcastError, Bucket
from megatron_rl.weights.sync.servers import WeightPushError


def test_the_tensors_of_a_file_have_no_gaps():
    """safetensors takes no others."""
    bucket, tensor = Bucket(torch.device("cpu")), torch.randn(7, 4).t()
    bucket.add("a", tensor, torch.bfloat16)
    saved = bucket.tensors()["a"]
    assert saved.is_contiguous() and not tensor.is_contiguous() and saved.equal(tensor.bfloat16())


def test_a_broadcast_ends_when_a_server_fails_first():
    """It would never join."""
    aborted, left = [], Future()
    left.set_exception(WeightPushError("server http://x answered 500"))
    work = SimpleNamespace(is_completed=lambda: False)
    group = SimpleNamespace(
        broadcast=lambda tensors, options: work, abort=lambda: aborted.append(1)
    )
    with pytest.raises(
        BroadcastError, match="^a server left the broadcast: server http://x answered 500$"
    ):
        buckets.BucketSender(group, "group").send(torch.zeros(1), [Future(), left], timeout=1.0)
    assert aborted == [1]


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        (("here", "elsewhere"), "10.0.0.1"),
        (("elsewhere", "here"), "10.0.0.1"),
        (("here", "here"), "127.0.0.1"),
        (("here6", "elsewhere6"), "fd00::1"),
    ],
)
def test_the_store_of_a_group_is_where_servers_on_every_machine_reach_it(
    monkeypatch, hosts, address
):
    """A server on this machine gets a loopback address only if all are here."""
    seen_by = {
        "here": "127.0.0.1",
        "elsewhere": "10.0.0.1",
        "here6": "::1",
        "elsewhere6": "fd00::1",
    }
    monkeypatch.setattr(
        buckets, "local_address", lambda url: seen_by[url.removeprefix("http://").split(":")[0]]
    )
    assert buckets.address_for([f"http://{host}:1" for host in hosts]) == address


def test_the_store_of_a_group_is_on_a_free_port_of_one_address():
    limit = timedelta(seconds=7)
    stores = [buckets.make_store("127.0.0.1", 2, limit) for _ in range(2)]
    ports = {port for _, port in stores}
    assert len(ports) == 2 and min(ports) >= 1024
    assert [(store.timeout, store.host) for store, _ in stores] == [(limit, "127.0.0.1")] * 2
