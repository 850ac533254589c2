"""The ways of a push: buckets of tensors reach servers that are paused.  push.py decides when, and under which version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file

from megatron_rl.weights.sync.buckets import BroadcastError, Bucket, BucketSender, connect
from megatron_rl.weights.sync.colocated import Colocated
from megatron_rl.weights.sync.servers import Servers, WeightPushError

SETTLE_SECONDS = 10.0  # for the other servers to notice that a broadcast was given up
TransportName = Literal["distributed", "disk", "colocated"]


class Transport(Protocol):
    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> tuple[int, int]:
        """Load every bucket into every server; (bytes of one copy, buckets).  Raises WeightPushError."""

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        """Undo what binds it to `servers`, of which those at `urls` are still there.  The next send begins anew."""

    def close(self) -> None:
        """After the last push and leave."""


def make_transport(name: TransportName, *, checkpoint: Path, device: torch.device, disk_dir: Path) -> Transport:
    if name == "disk":
        return Disk(checkpoint, disk_dir)
    return Distributed(device) if name == "distributed" else Colocated(device)


class Distributed:
    """One process group of this process and all servers' ranks, kept from push to push; a broadcast for each bucket."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sender: BucketSender | None = None

    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> tuple[int, int]:
        if self.sender is None:
            self.sender = self._connect(servers)
        session = servers.each(servers.begin_update)
        num_bytes = num_buckets = 0
        loading: list[Future[Any]] = []
        for bucket in buckets:
            servers.wait(loading)  # the servers load a bucket while the next one is gathered
            body = bucket.describe() | {
                "group_name": self.sender.group_name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            loading = servers.start_post("/update_weights_from_distributed", body)
            try:
                self.sender.send(bucket, loading, servers.timeout)
            except BroadcastError as error:
                self.sender = None  # its connections are in an unknown state; the next push makes new ones
                ended, _ = wait_for_all(loading, SETTLE_SECONDS)
                servers.wait(ended)
                raise WeightPushError(f"{error} ({', '.join(servers.urls)})") from error
            num_bytes += bucket.num_bytes
            num_buckets += 1
        servers.wait(loading)
        if any(session):
            servers.post("/end_weight_update", {})
        return num_bytes, num_buckets

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        if self.sender is not None:
            servers.leave_group(self.sender.group_name, urls)
            self.sender.close()
            self.sender = None

    def close(self) -> None:
        pass

    def _connect(self, servers: Servers) -> BucketSender:
        """One process group of this process (rank 0) and every tensor-parallel rank of every server."""
        sizes = servers.each(servers.num_ranks)
        offsets = [1 + sum(sizes[:i]) for i in range(len(sizes))]

        def join(body: dict[str, Any]) -> list[Future[Any]]:
            bodies = [body | {"rank_offset": offset} for offset in offsets]
            return servers.start_posts("/init_weights_update_group", bodies)

        try:
            return connect(
                servers.urls[0],
                world_size=1 + sum(sizes),
                device=self.device,
                timeout=servers.timeout,
                join=join,
            )
        except BroadcastError as error:
            raise WeightPushError(str(error)) from error


class Disk:
    """A checkpoint in `folder`, which the servers can read; it is there until the next push."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.last: Path | None = None

    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> tuple[int, int]:
        folder = self.folder / f"weights_{version}"
        shutil.rmtree(folder, ignore_errors=True)  # left by a push that failed
        folder.mkdir(parents=True)
        num_bytes = num_buckets = 0
        for bucket in buckets:
            num_buckets += 1
            num_bytes += bucket.num_bytes
            save_file(bucket.tensors(), folder / f"model-{num_buckets:05d}.safetensors", metadata={"format": "pt"})
        shutil.copy(self.checkpoint / "config.json", folder)
        servers.post("/update_weights_from_disk", {"model_path": str(folder.absolute()), "flush_cache": False})
        if self.last is not None and self.last != folder:
            shutil.rmtree(self.last)
        self.last = folder
        return num_bytes, num_buckets

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        if self.last is not None:
            shutil.rmtree(self.last)
            self.last = None
