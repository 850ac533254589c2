"""The ways of a push: buckets of tensors reach servers that are paused.  push.py decides when, and under which version."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import wait as wait_for_all
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.weights.sync.buckets import BroadcastError, Bucket, BucketSender, connect
from megatron_rl.weights.sync.servers import Calls, Json, Servers, WeightPushError

SETTLE_SECONDS = 10.0  # for the other servers to notice that a broadcast was aborted


class Transport(ABC):
    @abstractmethod
    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> None:
        """Load every bucket into every server.  Raises WeightPushError."""

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:  # noqa: B027  not every transport has a connection
        """Close the connection to `servers`, of which those at `urls` still run.  The next send makes a new one."""

    def close(self) -> None:  # noqa: B027
        """After the last push and leave."""


class Distributed(Transport):
    """One process group of this process and all servers' ranks, kept from push to push; a broadcast for each bucket."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sender: BucketSender | None = None

    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> None:
        sender = self.sender = self.sender or self._connect(servers)
        group = {"group_name": sender.group_name, "load_format": "flattened_bucket", "flush_cache": False}

        def start(bucket: Bucket) -> Calls:
            bodies = [bucket.describe() | group] * len(servers.urls)
            loading = servers.start_posts("/update_weights_from_distributed", bodies)
            try:
                sender.send(bucket, loading, servers.timeout)
            except BroadcastError as error:
                self.sender = None  # its connections are in an unknown state; the next push makes new ones
                ended, _ = wait_for_all(loading, SETTLE_SECONDS)
                servers.wait(ended)  # a server's own error says more than that of the broadcast
                raise WeightPushError(f"{error} ({', '.join(servers.urls)})") from error
            return loading

        servers.load(buckets, start)

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        if self.sender is not None:
            servers.leave_group(self.sender.group_name, urls)
            self.sender.close()
            self.sender = None

    def _connect(self, servers: Servers) -> BucketSender:
        """One process group of this process (rank 0) and every tensor-parallel rank of every server."""
        sizes = servers.each(servers.num_ranks)
        offsets = [1 + sum(sizes[:i]) for i in range(len(sizes))]

        def join(body: Json) -> Calls:
            bodies = [body | {"rank_offset": offset} for offset in offsets]
            return servers.start_posts("/init_weights_update_group", bodies)

        return connect(
            servers.urls[0], world_size=1 + sum(sizes), device=self.device, timeout=servers.timeout, join=join
        )


class Disk(Transport):
    """A checkpoint in `folder`, which the servers can read; it is there until the next push."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.last: Path | None = None

    def send(self, servers: Servers, buckets: Iterator[Bucket], version: int) -> None:
        folder = self.folder / f"weights_{version}"
        shutil.rmtree(folder, ignore_errors=True)  # left by a push that failed
        folder.mkdir(parents=True)
        for number, bucket in enumerate(buckets, 1):
            save_file(bucket.tensors(), folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        shutil.copy(self.checkpoint / "config.json", folder)
        servers.post("/update_weights_from_disk", {"model_path": str(folder.absolute()), "flush_cache": False})
        if self.last != folder:
            self.close()
        self.last = folder

    def close(self) -> None:
        if self.last is not None:
            shutil.rmtree(self.last)
            self.last = None
