"""Buckets passed by reference to servers on this machine.

A reference is a CUDA-IPC handle of GPU memory, or the name of shared memory.  Interface (SGLang
0.5.21, /update_weights_from_tensor with load_format flattened_bucket): for each tensor-parallel
rank a base64 pickle of {"flattened_tensor": uint8, "metadata": [name, shape, dtype, start_idx,
end_idx, numel in bytes]}, in which torch's own reductions represent the tensor.

We write pickles and read none; SGLang reads them with a list of allowed names.  The list includes
types.SimpleNamespace, so nothing of SGLang has to be imported here.  Every rank gets its own
pickle: torch counts each pickled reference until a process has opened it.
"""

from __future__ import annotations

import base64
import io
import ipaddress
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from urllib.parse import urlsplit

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing import reductions

from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.servers import Calls, Servers, WeightPushError
from megatron_rl.weights.sync.transports import Places, Targets, Transport, Turn

SHARED_MEMORY = "/dev/shm"
STORAGE_DEVICE = 6  # the argument of torch's rebuild_cuda_tensor that SGLang takes as a GPU's uuid


class Colocated(Transport):
    """One bucket of each source at a time, in memory that both sides map; the servers copy from it.

    A server sees its own GPUs alone.  So every GPU of `places` gets a copy of the bucket from its
    source, which sees all.
    """

    def __init__(self, device: torch.device, places: Places | None = None) -> None:
        self.device = device
        self.places = places
        self.targets: Targets = []
        self.shared: dict[torch.device, Tensor] = {}
        """Device -> the bucket that the servers load, in its memory."""

    def open(self, servers: Servers, version: int) -> Targets:
        check_local(servers.urls)
        sizes = servers.each(servers.num_ranks)
        targets = [
            list(self._places(url, size)) for url, size in zip(servers.urls, sizes, strict=True)
        ]
        # last: a server in a session would keep it if a check failed
        super().open(servers, version)
        return targets

    def join(self, targets: Targets) -> None:
        self.targets = targets

    def send(self, servers: Servers, bucket: Bucket, version: int, turn: Turn) -> Calls:
        shared = self.shared
        shared.clear()  # freed before the next one is allocated
        flat = bucket.flat(shared_memory(bucket.num_bytes, self.device))
        for place in {device for server in self.targets for device in server}:
            is_here = place == self.device
            shared[place] = flat if is_here else shared_memory(bucket.num_bytes, place).copy_(flat)
        for place in shared:
            if place.type == "cuda":
                torch.cuda.synchronize(place)  # the servers read on streams of their own
        references = [
            [reference(shared[place], bucket) for place in server] for server in self.targets
        ]
        common = {"load_format": "flattened_bucket", "flush_cache": False}
        bodies = [common | {"serialized_named_tensors": of_server} for of_server in references]
        return servers.start_posts("/update_weights_from_tensor", bodies) if turn() else []

    def release_bucket(self) -> None:
        self.shared.clear()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()  # frees memory whose handles the servers have closed

    def _places(self, url: str, num_ranks: int) -> Sequence[torch.device]:
        """Return the device of each rank of this server.

        Raises WeightPushError where it has another number of ranks than GPUs.
        """
        if self.places is None:
            return [self.device] * num_ranks
        places = self.places(url)
        if len(places) != num_ranks:
            raise WeightPushError(
                f"server {url} runs with {num_ranks} tensor-parallel ranks on {len(places)} GPUs:"
                " must be equal; set --tp-size in rollout.server_args to its number of"
                " rollout.gpus, or rollout.weight_sync = disk"
            )
        return places


def check_local(urls: Sequence[str]) -> None:
    """Raise WeightPushError for a server that may be on another machine.

    There a reference to memory means nothing.
    """
    for url in urls:
        host = urlsplit(url).hostname or ""
        if host != "localhost" and not (
            is_address(host) and ipaddress.ip_address(host).is_loopback
        ):
            raise WeightPushError(
                f"rollout.weight_sync = colocated cannot reach server {url}: it passes references"
                " to this machine's memory, only to servers that this run started on 127.0.0.1;"
                " set rollout.weight_sync = distributed or disk"
            )


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def shared_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return uint8 [num_bytes] that other processes can map.

    On a GPU that is any memory; on the CPU a file in /dev/shm that is removed with its last
    mapping.
    """
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    try:
        with shared_by_name():
            # reserves the bytes, so that of several sources at once none takes those of another
            storage = torch.UntypedStorage._new_shared(num_bytes, device="cpu")
    except RuntimeError as error:
        raise WeightPushError(
            f"rollout.weight_sync = colocated needs {num_bytes} bytes of shared memory for a"
            f" bucket, {SHARED_MEMORY} has {shutil.disk_usage(SHARED_MEMORY).free} free ({error}):"
            " lower rollout.weight_sync_bucket_mb, or give the container more (docker run"
            " --shm-size)"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))


def reference(flat: Tensor, bucket: Bucket) -> str:
    """Return a base64 pickle that refers to the bucket's tensors in the memory of `flat`.

    One rank of a server makes the tensors from it.
    """
    metadata, start = [], 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        stop = start + torch.Size(shape).numel() * bucket.dtype.itemsize
        tensor = {"name": name, "shape": tuple(shape), "dtype": bucket.dtype}
        span = {"start_idx": start, "end_idx": stop, "numel": stop - start}
        metadata.append(SimpleNamespace(**tensor, **span))
        start = stop
    buffer = io.BytesIO()
    with shared_by_name():
        ReferencePickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


class ReferencePickler(ForkingPickler):
    """torch's pickler of references, with the GPU's uuid instead of its number.

    Each process numbers the GPUs that it sees.
    """

    def reducer_override(self, value: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:STORAGE_DEVICE], uuid, *arguments[STORAGE_DEVICE + 1 :])


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Share CPU memory under a name.

    torch's default, an open file, works only between parent and child.
    """
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
