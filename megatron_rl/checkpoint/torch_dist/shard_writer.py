"""megatron-core's torch_dist format, planned by core and written by threads of this process.

core itself forks a process for each file and one more for their results, which outlives a killed
rank; and when one rank cannot write, the others wait for it.  Here every rank writes its own shards
on a few threads, and all ranks know of a failure before the checkpoint gets its name.

core also plans every save, with the parts of all ranks on every rank.  The parts of a run do not
change from save to save: here the ranks plan once, and compare their own parts in later saves.
"""

from __future__ import annotations

# before megatron-core: makes it work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401

# isort: split
import contextlib
import inspect
import io
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.checkpoint.torch_dist import metadata_pieces

FORMAT = ("torch_dist", 1)
FILES_PER_RANK = 2
METADATA = ".metadata"
Parts = tuple[list[tuple[WriteItem, io.BytesIO]], list[tuple[WriteItem, torch.Tensor]]]
"""Objects and tensors of a file."""
Bucket = tuple[Path, str, Parts]
"""Path and name of a file, and its parts (core's WriteBucket)."""


@dataclass
class Shards:
    """The files that this rank writes, one for each bucket."""

    writer: FileSystemWriterAsync
    buckets: list[Bucket]
    metadata: bytes = b""
    """On rank 0, metadata_pieces.beginning of the checkpoint's metadata."""
    live: frozenset[int] = frozenset()
    """Addresses of the memory that training will change; core's plan has already copied views of
    memory on the host.
    """

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.buckets]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are still to be written."""
        return sum(tensor.nbytes for _, _, (_, tensors) in self.buckets for _, tensor in tensors)

    def stage(self, *, copy: bool) -> None:
        """Copy the tensors to the host.

        `copy` also copies those on the host, because training changes them during the write.  The
        copies are not pinned: torch rounds pinned memory up to powers of two, and keeps it for the
        process.
        """

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("cpu", copy=copy and address(tensor) in self.live)

        self.buckets = [
            (path, name, (objects, [(item, copied(tensor)) for item, tensor in tensors]))
            for path, name, (objects, tensors) in self.buckets
        ]

    def write(self) -> bytes:
        """Write and sync the files; return the places of their parts, for `write_metadata`.

        Raises what writing raised.
        """
        with ThreadPoolExecutor(FILES_PER_RANK) as pool:
            results = list(pool.map(self._write_bucket, self.buckets))
        self.buckets = []  # frees the copies
        return metadata_pieces.piece(item for result in results for item in result)

    def _write_bucket(self, bucket: Bucket) -> list[WriteResult]:
        results: queue.SimpleQueue[tuple[int, list[WriteResult] | BaseException]] = (
            queue.SimpleQueue()
        )
        # core's function counts its processes here, and takes one entry when it is done
        started: queue.Queue[int] = queue.Queue()
        started.put(0)
        # the last argument: fsync
        FileSystemWriterAsync.write_preloaded_data(
            [self.writer.transforms], 0, bucket, results, started, True
        )
        _, outcome = results.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def write_metadata(self, pieces: list[bytes]) -> None:
        """Write the file and offset of each tensor, on rank 0, when all ranks have written.

        The caller syncs the file.
        """
        with open(Path(self.writer.checkpoint_dir) / METADATA, "wb") as file:
            file.writelines(metadata_pieces.complete(self.metadata, pieces))


class _Strategy(TorchDistSaveShardedStrategy):
    """core's plan, without core's writing.

    It keeps the first plan; `Planner` decides whether that serves again.
    """

    def __init__(self) -> None:
        super().__init__(*FORMAT, thread_count=FILES_PER_RANK, cached_metadata=True)
        self.metadata = b""

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *how: str
    ) -> Shards:
        """Plan with core's own way of writing.

        core 0.19 has several ways, by default that of another package.
        """
        save = super().async_save
        has_ways = "async_strategy" in inspect.signature(save).parameters
        shards: Shards = save(sharded_state_dict, checkpoint_dir, *(["mcore"] if has_ways else []))
        return shards

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, plan: tuple[object, Metadata | None], *how: str
    ) -> Shards:
        # taken from the writer, so that they are freed once they are written
        buckets, writer.write_buckets = writer.write_buckets or [], None
        if plan[1] is not None:  # on rank 0, in the first save
            self.metadata = metadata_pieces.beginning(plan[1])
        self.validated_cache_reuse = True  # core would gather and compare all plans once more
        return Shards(writer, buckets, self.metadata)


class Planner:
    """Assigns the parts of every save to ranks; replicated tensors are spread over those of
    `group`.

    The first save gathers the parts of all ranks, on every rank.  Later ones take the same plan
    where all ranks have the same parts again: names, shapes and places.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._strategy: _Strategy | FullyParallelSaveStrategyWrapper = self._new()
        self._parts: list[ShardedBase] | None = None
        """Parts of this rank in the save that was planned."""

    def plan(self, state: ShardedStateDict, folder: Path) -> Shards:
        """Return what this rank writes of `state` into `folder`.  Collective."""
        sharded, plain = save_preprocess(state, validate_access_integrity=False)
        assert not list(nested_values(plain)), "only sharded tensors are written here"
        parts = [part.without_data() for part in nested_values(sharded)]
        live = frozenset(
            address(part.data) for part in nested_values(sharded) if isinstance(part, ShardedTensor)
        )
        strategy = self._strategy
        # the first save, or the parts of some rank have changed
        if not on_all_ranks(parts == self._parts):
            validate_sharding_integrity(determine_global_metadata(sharded)[1])
            strategy = self._new()
        # replicated tensors are divided, and each rank's tensors put into files, by core
        with _without_manager():
            shards: Shards = strategy.async_save(sharded, folder)
        # only now: a rank that fails to plan makes all of them plan again
        self._strategy, self._parts = strategy, parts
        shards.live = live
        return shards

    def _new(self) -> _Strategy | FullyParallelSaveStrategyWrapper:
        strategy = _Strategy()
        # nothing to spread, and core would gather all parts in every save
        if self._group.size() == 1:
            return strategy
        return FullyParallelSaveStrategyWrapper(strategy, self._group, do_cache_distribution=True)


def on_all_ranks(value: bool) -> bool:
    """Return True where `value` is true on every rank.  Collective."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(values)


def write_common(folder: Path) -> None:
    """Write the two files by which core recognises the format.  Called on rank 0.

    Its common state is empty.
    """
    with open(folder / COMMON_STATE_FNAME, "wb") as file:
        torch.save({}, file)
    save_config(CheckpointingConfig(*FORMAT), str(folder))


@contextlib.contextmanager
def _without_manager() -> Iterator[None]:
    """Keep core from starting a manager process for results on its first plan.

    Here results come from threads.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def address(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()
