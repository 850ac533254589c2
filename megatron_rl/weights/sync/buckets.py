"""Buckets of tensors, and the process group over which they are broadcast to the SGLang workers.

Interface (SGLang's init_custom_process_group and FlattenedTensorBucket, up to 0.5.23): a TCP store
on rank 0 with keys prefixed by the group's name.  SGLang receives from rank 0 of a group only, so
each source of a push (a training rank that sends) has a group of its own, in which it is rank 0.  A
bucket is the tensors' bytes end to end, in the order of the names, dtypes and shapes that go to the
server as JSON.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper

from megatron_rl.weights.sync.servers import Calls, Json, WeightPushError

POLL_SECONDS = 0.001
CONNECT_TIMEOUT_SECONDS = 120.0
SPARE_SECONDS = 60.0
"""Added to the limit of send() for torch's own limit of the group: send() must give up first,
because nccl's watchdog ends the process."""
GROUP_NUMBERS = itertools.count()  # torch needs a new name for every group of a process


class BroadcastError(WeightPushError):
    """The group could not be made, or a bucket did not reach every server."""


class Bucket:
    """Tensors of one dtype, end to end in one flat uint8 tensor on `device`.

    `number` counts from 0 over all sources of a push.  The tensors are cast and copied when the
    bucket is sent; until then they must not change.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self.device = device
        self.number = number
        self.names: list[str] = []
        self.shapes: list[list[int]] = []
        self.parts: list[torch.Tensor] = []
        self.dtype = torch.float32
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Append `tensor`, of any layout; the bucket's dtype is that of its first tensor."""
        assert not self.names or self.dtype == dtype, (
            "the tensors of a bucket must have one dtype: so each is aligned in the flat bytes"
        )
        self.dtype = dtype
        self.names.append(name)
        self.shapes.append(list(tensor.shape))
        self.parts.append(tensor.detach())
        self.num_bytes += tensor.numel() * dtype.itemsize

    def flat(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bucket as uint8 [num_bytes], in `memory` if that is given.

        It is contiguous: gloo silently sends wrong bytes for anything else.
        """
        if memory is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        # casts, too; one call, not one for each of thousands of tensors
        torch.cat([part.reshape(-1) for part in self.parts], out=memory.view(self.dtype))
        return memory

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return name -> contiguous CPU tensor in the bucket's dtype."""
        return {
            name: part.to("cpu", self.dtype).contiguous()
            for name, part in zip(self.names, self.parts, strict=True)
        }

    def describe(self) -> Json:
        """Return names, dtypes and shapes in the order of the bytes."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"names": self.names, "dtypes": [dtype] * len(self.names), "shapes": self.shapes}


class BucketSender:
    """Rank 0 of a process group with the servers."""

    def __init__(self, group: dist.ProcessGroup, group_name: str) -> None:
        self.group = group
        self.group_name = group_name

    def send(self, flat: torch.Tensor, receivers: Calls, timeout: float) -> None:
        """Broadcast a bucket.

        Raises BroadcastError when a receiver's call fails first, or after `timeout` seconds.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self.group.broadcast([flat], options)
            deadline = time.monotonic() + timeout
            # polled, not waited for: a server that fails in its call would never join the broadcast
            while not work.is_completed():
                failed = [
                    future
                    for future in receivers
                    if future.done() and future.exception() is not None
                ]
                if failed:
                    raise BroadcastError(f"a server left the broadcast: {failed[0].exception()}")
                if time.monotonic() > deadline:
                    raise BroadcastError(
                        f"a broadcast of {flat.nbytes} bytes did not end within {timeout:g} s"
                    )
                time.sleep(POLL_SECONDS)
            work.wait()
        except BroadcastError:
            self.group.abort()  # ends the broadcast in progress
            raise
        except RuntimeError as error:  # torch's error for a lost peer
            self.group.abort()
            raise BroadcastError(f"broadcast failed: {error}") from error

    def close(self, *, is_complete: bool = True) -> None:
        """End the group.

        `is_complete` means that every other rank ends it, too; NCCL would wait for one that died.
        """
        if is_complete:
            self.group.shutdown()
        else:
            self.group.abort()


def connect(
    urls: Sequence[str],
    *,
    world_size: int,
    device: torch.device,
    timeout: float,
    join: Callable[[Json], Calls],
    source: int = 0,
) -> BucketSender:
    """Make the group.

    `join(body)` starts the servers' /init_weights_update_group calls; `body` lacks rank_offset.
    `source` is this process's rank in the job, for the name of the group: processes on two machines
    may have the same id.  `timeout` is the number of seconds that a broadcast may take; joining the
    group may take as long, but at most CONNECT_TIMEOUT_SECONDS.  The store listens on one address
    only (address_for).  Raises BroadcastError.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=min(timeout, CONNECT_TIMEOUT_SECONDS))
    address = address_for(urls)
    store, port = make_store(address, world_size, limit)
    # servers know a group by its name alone
    name = f"megatron_rl_{source}_{os.getpid()}_{next(GROUP_NUMBERS)}"
    place = {"master_address": address, "master_port": port, "world_size": world_size}
    joining = join(place | {"group_name": name, "backend": backend})
    try:
        # not init_process_group or new_group: the servers are not part of this job's default group
        group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            backend,
            dist.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # newer torch has its own type for this str
            timeout=limit,
        )
        for future in joining:
            future.result()
        group._get_backend(device)._set_default_timeout(timedelta(seconds=timeout + SPARE_SECONDS))
    except RuntimeError as error:
        answers = [
            str(future.exception()) for future in joining if future.done() and future.exception()
        ]
        message = f"no process group with the servers within {limit}: {'; '.join(answers) or error}"
        raise BroadcastError(message) from error
    return BucketSender(group, name)


def address_for(urls: Sequence[str]) -> str:
    """Return one address of this machine that the servers at `urls` reach: those on other machines
    not its loopback, those on this machine any.
    """
    addresses = [local_address(url) for url in urls]
    return next(
        (address for address in addresses if not ipaddress.ip_address(address).is_loopback),
        addresses[0],
    )


def local_address(url: str) -> str:
    """Return this machine's address as the server at `url` sees it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = addresses[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]


def make_store(address: str, world_size: int, timeout: timedelta) -> tuple[dist.TCPStore, int]:
    """Return a TCP store on a free port of `address` only, and the port.

    By default it would listen on every interface.  torch's rendezvous() does not serve: under
    torchrun it returns torchrun's own store instead.
    """
    family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.bind(target)
    listener.listen()
    port = listener.getsockname()[1]
    # the store takes over the bound socket, so no other process can get the port in between
    store = dist.TCPStore(
        address,
        port,
        world_size=world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
