"""Buckets handed to servers on this machine by reference: CUDA-IPC handles of GPU memory, or names of shared memory.

Interface (SGLang 0.5.21, /update_weights_from_tensor with load_format flattened_bucket): for each tensor-parallel rank a
base64 pickle of {"flattened_tensor": uint8, "metadata": [name, shape, dtype, start_idx, end_idx, numel in bytes]}, in which
torch's own reductions stand for the tensor.  We write pickles and read none; SGLang reads with a list of allowed names,
on which types.SimpleNamespace is, so that nothing of SGLang has to be imported here.
Every rank gets a pickle of its own: a reference that was pickled is counted until somebody has taken it.
"""

from __future__ import annotations

import base64
import io
import ipaddress
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing import reductions

from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.servers import Servers, WeightPushError

SHARED_MEMORY = "/dev/shm"
STORAGE_DEVICE = 6  # the argument of torch's rebuild_cuda_tensor that SGLang takes as a GPU's uuid


class Colocated:
    """One bucket at a time lies in memory that both sides map; the servers copy from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> tuple[int, int]:
        check_local(servers.urls)
        sizes = servers.each(servers.num_ranks)
        session = servers.each(servers.begin_update)
        num_bytes = num_buckets = 0
        loading: list[Future[Any]] = []
        flat: Tensor | None = None
        for bucket in buckets:
            servers.wait(loading)  # the servers load a bucket while the next one is gathered
            flat = None  # free before there is another
            flat = bucket.flat(shared_memory(bucket.num_bytes, self.device))
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)  # the servers read with streams of their own
            bodies = [
                {
                    "serialized_named_tensors": [reference(flat, bucket) for _ in range(size)],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                for size in sizes
            ]
            loading = servers.start_posts("/update_weights_from_tensor", bodies)
            num_bytes += bucket.num_bytes
            num_buckets += 1
        servers.wait(loading)
        if any(session):
            servers.post("/end_weight_update", {})
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
        return num_bytes, num_buckets

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


def check_local(urls: Sequence[str]) -> None:
    """Raise WeightPushError for a server that may be on another machine, which could not follow a reference to memory."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        if host != "localhost" and not (is_address(host) and ipaddress.ip_address(host).is_loopback):
            raise WeightPushError(
                f"rollout.weight_sync = colocated cannot reach server {url}: it hands over references to this "
                "machine's memory, only to "
                "servers that this run started on 127.0.0.1; set rollout.weight_sync = distributed or disk"
            )


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def shared_memory(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] that other processes can map: on a GPU any memory, on the CPU a file in /dev/shm without a name there
    once nobody maps it any more."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if num_bytes > free:
        raise WeightPushError(
            f"rollout.weight_sync = colocated needs {num_bytes} bytes of shared memory for a bucket, "
            f"{SHARED_MEMORY} has {free} free: "
            "lower rollout.weight_sync_bucket_mb, or give the container more (docker run --shm-size)"
        )
    with shared_by_name():
        storage = torch.UntypedStorage._new_shared(num_bytes, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))


def reference(flat: Tensor, bucket: Bucket) -> str:
    """What one rank of a server turns into the bucket's tensors, in the memory of `flat`."""
    metadata, start = [], 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        stop = start + torch.Size(shape).numel() * bucket.dtype.itemsize
        each = {"name": name, "shape": tuple(shape), "dtype": bucket.dtype}
        metadata.append(SimpleNamespace(**each, start_idx=start, end_idx=stop, numel=stop - start))
        start = stop
    buffer = io.BytesIO()
    with shared_by_name():
        ReferencePickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


class ReferencePickler(ForkingPickler):
    """torch's pickler of references, with a GPU named by its uuid: processes number the GPUs they see differently."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:STORAGE_DEVICE], uuid, *arguments[STORAGE_DEVICE + 1 :])


@contextmanager
def shared_by_name() -> Iterator[None]:
    """CPU memory is shared under a name: an open file, torch's default, passes only between parent and child."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
