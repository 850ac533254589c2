"""The transports of a push: how buckets of tensors reach the servers.  The interface, with
Distributed and Disk; colocated.py has the third.

push.py decides when, and under which version.  Rank 0 opens and finishes a push; in between each
source sends its own buckets, one at a time over all sources.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.files import write_index
from megatron_rl.weights.sync.bucket_order import one_at_a_time
from megatron_rl.weights.sync.buckets import BroadcastError, Bucket, BucketSender, connect
from megatron_rl.weights.sync.servers import Calls, Json, Servers, WeightPushError

SETTLE_SECONDS = 10.0
"""Time for the other servers to notice that a broadcast was aborted."""
LEAVE_SECONDS = 30.0
"""Time for the source before this one to leave its group."""
Turn = Callable[[], bool]
"""Waits until it is the bucket's turn; False where the push has failed meanwhile, so that nothing
is to be sent.
"""

Targets = list[list[torch.device]]
"""The GPU of each rank of each server; [] where that does not matter."""

Places = Callable[[str], Sequence[torch.device]]
"""URL of a server -> the GPU of each of its tensor-parallel ranks, as this process numbers them."""


@dataclass(frozen=True)
class TransportSettings:
    """The way of a push to the servers."""

    transport: Literal["distributed", "disk", "colocated"]
    """distributed: one broadcast for each bucket.  disk: safetensors files in `disk_dir`.
    colocated: memory that servers on this machine map."""
    bucket_mb: int
    """Most MiB of a bucket."""
    device: torch.device
    """Device on which buckets are built.  cpu broadcasts over gloo and shares host memory; cuda
    broadcasts over nccl and shares CUDA-IPC handles."""
    disk_dir: Path
    """Folder of `disk`, which the servers must be able to read."""
    places: Places | None = None
    """The servers' GPUs, for `colocated` on rank 0; None: `device` for all of them."""


class Transport(ABC):
    """Sends buckets to running servers, inside a weight-update session of each (SGLang from
    0.5.21).  Disk opens no session.
    """

    has_sessions = False
    """Some server has opened a session; SGLang before 0.5.21 has none."""
    keeps_tensors = True
    """Servers keep the tensors that a push does not send."""

    def open(self, servers: Servers, version: int) -> Targets:
        """Prepare the servers before the first bucket.  Called on rank 0.

        Returns the GPUs of each server, for `join`.
        """
        self.has_sessions = any(servers.each(servers.begin_update))
        return []

    def join(self, targets: Targets) -> None:  # noqa: B027  most need nothing
        """Take what `open` returned on rank 0, before the first bucket.  Called on every rank."""

    @abstractmethod
    def send(self, servers: Servers, bucket: Bucket, version: int, turn: Turn) -> Calls:
        """Start to load the bucket into every server when it is its turn.

        The bucket before it, of this source, is loaded.  Returns [] where the push has failed
        meanwhile; raises WeightPushError.
        """

    def release_bucket(self) -> None:  # noqa: B027  not every transport keeps something
        """Free what was kept for the servers: the last bucket of this source is loaded."""

    def finish(
        self, servers: Servers, version: int, numbers: Mapping[str, int], num_bytes: int
    ) -> None:
        """Let the servers take the new weights into use.  Called on rank 0.

        All sources have sent their last bucket.  `numbers` maps an HF name to the number of its
        bucket; `num_bytes` is the sum over all buckets.
        """
        if self.has_sessions:
            servers.post("/end_weight_update", {})

    # not every transport has a connection
    def leave(self, servers: Servers, urls: Sequence[str]) -> None:  # noqa: B027
        """Close the connection to `servers`, of which those at `urls` still run.

        The next send makes a new one.
        """

    def close(self) -> None:  # noqa: B027
        """Remove what is left on this machine, after the last push and `leave`."""


class Distributed(Transport):
    """One process group of this source and all servers' ranks, with one broadcast for each bucket.

    The group is kept from push to push.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.device = device
        self.ranks = ranks
        self.sender: BucketSender | None = None

    def send(self, servers: Servers, bucket: Bucket, version: int, turn: Turn) -> Calls:
        flat = bucket.flat()
        if not turn():
            return []
        sender = self.sender = self.sender or self._connect(servers)
        group = {
            "group_name": sender.group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        bodies = [bucket.describe() | group] * len(servers.urls)
        # the servers join the broadcast inside this call
        loading = servers.start_posts("/update_weights_from_distributed", bodies)
        try:
            sender.send(flat, loading, servers.timeout)
        except BroadcastError as error:
            # its connections are in an unknown state; the next push makes new ones
            self.sender = None
            ended, _ = wait_for_all(loading, SETTLE_SECONDS)
            servers.wait(ended)  # a server's own error says more than that of the broadcast
            raise WeightPushError(f"{error} ({', '.join(servers.urls)})") from error
        return loading

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        """End this rank's communicator while the servers end theirs.

        NCCL's ranks of one machine end a communicator together, waiting for one another.  If a
        server began meanwhile to end the communicator of another source, others would wait for
        that: so sources leave one at a time.
        """
        sender, self.sender = self.sender, None
        if sender is None:
            return
        with one_at_a_time(self.ranks.store, "weight_sync_leave", LEAVE_SECONDS):
            left = servers.running(urls)
            leaving = servers.start_leaving(sender.group_name, left)
            try:
                sender.close(is_complete=len(left) == len(servers.urls))
            finally:
                servers.wait(leaving)

    def _connect(self, servers: Servers) -> BucketSender:
        """Make one process group of this process and all tensor-parallel ranks of all servers."""
        sizes = servers.each(servers.num_ranks)
        # rank 0 is this process; the ranks of each server follow those of the one before
        offsets = [1 + sum(sizes[:i]) for i in range(len(sizes))]

        def join(body: Json) -> Calls:
            bodies = [body | {"rank_offset": offset} for offset in offsets]
            return servers.start_posts("/init_weights_update_group", bodies)

        return connect(
            servers.urls,
            world_size=1 + sum(sizes),
            device=self.device,
            timeout=servers.timeout,
            join=join,
            source=self.ranks.rank,
        )


class Disk(Transport):
    """A checkpoint in `folder`, which the sources and the servers can reach, until the next push.

    The sources write their files at the same time: there are no turns.
    """

    keeps_tensors = False  # servers load the folder as a whole checkpoint

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.last: Path | None = None

    def open(self, servers: Servers, version: int) -> Targets:
        shutil.rmtree(self._folder(version), ignore_errors=True)  # left by a push that failed
        self._folder(version).mkdir(parents=True)
        return []

    def send(self, servers: Servers, bucket: Bucket, version: int, turn: Turn) -> Calls:
        file = self._folder(version) / bucket_file_name(bucket.number)
        save_file(bucket.tensors(), file, metadata={"format": "pt"})
        return []

    def finish(
        self, servers: Servers, version: int, numbers: Mapping[str, int], num_bytes: int
    ) -> None:
        folder = self._folder(version)
        write_index(
            folder, {name: bucket_file_name(number) for name, number in numbers.items()}, num_bytes
        )
        # SGLang reads the model's architecture there
        shutil.copy(self.checkpoint / "config.json", folder)
        servers.post(
            "/update_weights_from_disk",
            {"model_path": str(folder.absolute()), "flush_cache": False},
        )
        # only now: the servers have loaded the new files
        if self.last != folder:
            self.close()
        self.last = folder

    def _folder(self, version: int) -> Path:
        return self.folder / f"weights_{version}"

    def close(self) -> None:
        if self.last is not None:
            shutil.rmtree(self.last)
            self.last = None


def bucket_file_name(bucket: int) -> str:
    return f"model-{bucket + 1:05d}.safetensors"
