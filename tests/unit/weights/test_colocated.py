"""Buckets passed by reference: another process reads them; remote servers are refused; memory is
released and resumed.
"""

import re
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_rl.weights.sync import colocated
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.colocated import reference, shared_memory
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import TO_LOAD, TO_SERVE, ServerAccess, Servers
from megatron_rl.weights.sync.transports import TransportSettings
from tests.unit.weights.test_push_protocol import CPU, ORDER, ControlServer, checkpoint, stream  # noqa: F401

# as SGLang's SafeUnpickler.loads and FlattenedTensorBucket.reconstruct_tensors do, in a process
# that is not a child of this one
READER = """
import base64, io, pickle, sys
ALLOWED = {"types.SimpleNamespace", "torch.uint8", "torch.bfloat16",
           "torch.multiprocessing.reductions.rebuild_tensor",
           "torch.multiprocessing.reductions.rebuild_storage_filename",
           "torch.multiprocessing.reductions.rebuild_typed_storage",
           "torch.storage.UntypedStorage", "torch.Tensor", "torch.Size"}
class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)
for line in sys.stdin:
    read = Reader(io.BytesIO(base64.b64decode(line))).load()
    for meta in read["metadata"]:
        values = read["flattened_tensor"][meta.start_idx : meta.end_idx]
        values = values.view(meta.dtype).reshape(meta.shape)
        assert meta.numel == values.nbytes
        print(meta.name, values.dtype, values.tolist())
    read["flattened_tensor"].fill_(7)
"""


def make_bucket() -> tuple[Bucket, list[str]]:
    bucket = Bucket(CPU)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(4, 2).t(), "c": torch.tensor(2.5)}
    for name, tensor in tensors.items():
        bucket.add(name, tensor, torch.bfloat16)
    return bucket, [
        f"{name} torch.bfloat16 {tensor.bfloat16().tolist()}" for name, tensor in tensors.items()
    ]


def test_another_process_finds_the_tensors_in_the_same_memory():
    bucket, expected = make_bucket()
    flat = bucket.flat(shared_memory(bucket.num_bytes, CPU))
    before = torch.multiprocessing.get_sharing_strategy()
    payload = reference(flat, bucket)
    assert torch.multiprocessing.get_sharing_strategy() == before
    run = subprocess.run(
        [sys.executable, "-c", READER], input=payload, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == expected
    assert flat.tolist() == [7] * bucket.num_bytes, (
        "what the reader wrote is seen here: nothing was copied"
    )


def make_pusher(checkpoint, *urls, bucket_bytes=60):  # noqa: F811
    pusher = WeightPusher(
        ServerAccess(urls, 5.0),
        PushedWeights(checkpoint, torch.bfloat16),
        TransportSettings(
            "colocated", bucket_mb=1, device=CPU, disk_dir=checkpoint.parent / "push"
        ),
    )
    pusher.bucket_bytes = bucket_bytes
    return pusher


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setattr(Servers, "num_ranks", lambda servers, url: 2)


def test_every_bucket_goes_to_every_rank_between_begin_and_end(checkpoint):  # noqa: F811
    with ControlServer() as one, ControlServer() as two:
        report = make_pusher(checkpoint, one.url, two.url).push(lambda: stream(checkpoint), 4)
    update = ["/begin_weight_update", *["/update_weights_from_tensor"] * report.num_buckets]
    assert report.num_buckets == 4
    assert (
        one.paths == two.paths == [*ORDER[:5], *update, ORDER[5], "/end_weight_update", *ORDER[7:]]
    )
    bodies = [
        body
        for server in (one, two)
        for path, body in server.calls
        if path == "/update_weights_from_tensor"
    ]
    assert all(
        body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        for body in bodies
    )
    assert all(len(body["serialized_named_tensors"]) == 2 for body in bodies)


def test_a_server_elsewhere_is_refused_before_anything_is_sent(checkpoint, monkeypatch):  # noqa: F811
    with ControlServer() as server:
        pusher = make_pusher(checkpoint, server.url)
        monkeypatch.setattr(
            colocated, "urlsplit", lambda url: namedtuple("Parts", "hostname")("10.0.0.2")
        )
        with pytest.raises(
            WeightPushError,
            match=r"cannot reach server .*this machine's memory.*set rollout\.weight_sync",
        ):
            pusher.push(lambda: stream(checkpoint), 4)
    assert server.paths == ORDER[:5]


def test_a_bucket_that_shared_memory_cannot_hold_is_refused():
    too_many = shutil.disk_usage(colocated.SHARED_MEMORY).total + 2**20
    with pytest.raises(
        WeightPushError, match=rf"needs {too_many} bytes.*has \d+ free.*weight_sync_bucket_mb"
    ):
        shared_memory(too_many, CPU)


def test_shared_memory_is_reserved_before_anything_is_written():
    """So of two sources at the same time none finds that the other has taken its bytes."""
    flat = shared_memory(3 * 2**20, CPU)
    with colocated.shared_by_name():
        name = flat.untyped_storage()._share_filename_cpu_()[1].decode()
    file = Path(colocated.SHARED_MEMORY, name.lstrip("/"))
    assert file.stat().st_blocks * 512 >= 3 * 2**20


def test_memory_is_released_by_paused_servers_and_taken_again_around_the_weights(checkpoint):  # noqa: F811
    with ControlServer() as one, ControlServer() as two:
        pusher = make_pusher(checkpoint, one.url)
        pusher.release_memory()
        assert one.paths == ["/pause_generation", "/flush_cache", "/release_memory_occupation"]
        assert set(one.calls[-1][1]["tags"]) == {"weights", "kv_cache", "cuda_graph"}
        one.calls.clear()
        # one that was started since: SGLang dies of a resume without a release
        pusher.set_urls([one.url, two.url])
        pusher.push(lambda: stream(checkpoint), 4)
        tags = [
            (path, body["tags"]) for path, body in one.calls if path == "/resume_memory_occupation"
        ]
        assert [tag for _, tag in tags] == [["weights"], ["cuda_graph", "kv_cache"]]
        assert one.paths.index("/resume_memory_occupation") < one.paths.index(
            "/begin_weight_update"
        )
        assert (
            one.paths[-4:-3] == ["/resume_memory_occupation"]
            and one.paths[-1] == "/continue_generation"
        )
        assert "/resume_memory_occupation" not in two.paths
        one.calls.clear()
        pusher.push(lambda: stream(checkpoint), 5)
        assert "/resume_memory_occupation" not in one.paths


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_all_memory_that_sglang_can_release_is_released():
    source = metadata.distribution("sglang").locate_file("sglang/srt/constants.py").read_text()
    kinds = re.findall(r'^GPU_MEMORY_TYPE_\w+ = "(\w+)"', source, flags=re.MULTILINE)
    assert sorted(kinds) == sorted([*TO_LOAD, *TO_SERVE])


def test_every_gpu_of_the_servers_gets_a_bucket_of_its_own(checkpoint, monkeypatch):  # noqa: F811
    """GPUs are CPU devices with numbers here; a server's ranks get references to the memory of
    their own.
    """
    placed, made = {}, []

    def memory(num_bytes, device):
        made.append((device, shared_memory(num_bytes, CPU)))
        return made[-1][1]

    def note(flat, bucket):
        place = next(device for device, tensor in reversed(made) if tensor is flat)
        placed.setdefault(tuple(bucket.names), []).append((place.index, flat.tolist()))
        return reference(flat, bucket)

    monkeypatch.setattr(colocated, "shared_memory", memory)
    monkeypatch.setattr(colocated, "reference", note)
    with ControlServer() as one, ControlServer() as two:
        pusher = make_pusher(checkpoint, one.url, two.url)
        gpus = {one.url: [2, 3], two.url: [0, 1]}
        pusher.transport.places = lambda url: [torch.device("cpu", index) for index in gpus[url]]
        pusher.push(lambda: stream(checkpoint), 4)
        assert len(placed) == 4
        for entries in placed.values():
            assert [place for place, _ in entries] == [2, 3, 0, 1], (
                "in the order of the servers and their ranks"
            )
            assert all(content == entries[0][1] for _, content in entries)
        pusher.transport.places = lambda url: [CPU]
        with pytest.raises(
            WeightPushError,
            match=r"2 tensor-parallel ranks on 1 GPUs: must be equal; set --tp-size",
        ):
            pusher.push(lambda: stream(checkpoint), 5)
