"""megatron-core's torch_dist format, planned by core and written by threads of this process.

core itself forks a process per file and one more for their results, which outlives a killed rank; and when one rank cannot
write, the others wait for it.  Here every rank writes its own shards on a few threads, and all ranks know of a failure before
the checkpoint gets its name.

core also plans every save, with the parts of all ranks on every rank.  What a run saves does not change: here the ranks
plan once, and compare their own parts in later saves.
"""

from __future__ import annotations

import megatron_rl.distributed  # noqa: F401  before megatron-core: makes it work without CUDA, and quiet

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
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.checkpoint import places

FORMAT = ("torch_dist", 1)
FILES_PER_RANK = 2
METADATA = ".metadata"
Bucket = tuple[Path, str, tuple[list[tuple[WriteItem, io.BytesIO]], list[tuple[WriteItem, torch.Tensor]]]]
"""Path and name of a file, and the objects and tensors in it (core's WriteBucket)."""


@dataclass
class Shards:
    """What this rank writes, one file per bucket.  metadata: on rank 0, places.beginning of the checkpoint's.

    live: addresses of the memory that training will change; core's plan has already copied views of memory on the host.
    """

    writer: FileSystemWriterAsync
    buckets: list[Bucket]
    metadata: bytes = b""
    live: frozenset[int] = frozenset()

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.buckets]

    @property
    def num_bytes(self) -> int:
        """Of the tensors that are still to be written."""
        return sum(tensor.nbytes for _, _, (_, tensors) in self.buckets for _, tensor in tensors)

    def stage(self, *, copy: bool) -> None:
        """Copy the tensors to the host.  copy: also those on the host, because training changes them during the write.

        The copies are not pinned: torch rounds pinned memory up to powers of two, and keeps it for the process.
        """

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("cpu", copy=copy and address(tensor) in self.live)

        self.buckets = [
            (path, name, (objects, [(item, copied(tensor)) for item, tensor in tensors]))
            for path, name, (objects, tensors) in self.buckets
        ]

    def write(self) -> bytes:
        """Write and sync the files; where their parts are, for `write_metadata`.  Raises what writing raised."""
        with ThreadPoolExecutor(FILES_PER_RANK) as pool:
            results = list(pool.map(self._write_bucket, self.buckets))
        self.buckets = []  # frees the copies
        return places.piece(item for result in results for item in result)

    def _write_bucket(self, bucket: Bucket) -> list[WriteResult]:
        results: queue.SimpleQueue[tuple[int, list[WriteResult] | BaseException]] = queue.SimpleQueue()
        started: queue.Queue[int] = queue.Queue()
        started.put(0)
        # the last argument: fsync
        FileSystemWriterAsync.write_preloaded_data([self.writer.transforms], 0, bucket, results, started, True)
        _, outcome = results.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def write_metadata(self, pieces: list[bytes]) -> None:
        """On rank 0, when all ranks have written: the file and offset of each tensor.  The caller syncs the file."""
        with open(Path(self.writer.checkpoint_dir) / METADATA, "wb") as file:
            file.writelines(places.complete(self.metadata, pieces))


class _Strategy(TorchDistSaveShardedStrategy):
    """core's plan, without core's writing.  It keeps the first one: `Planner` decides whether that serves again."""

    def __init__(self) -> None:
        super().__init__(*FORMAT, thread_count=FILES_PER_RANK, cached_metadata=True)
        self.metadata = b""

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *how: str) -> Shards:
        """core 0.19 has ways of writing, by default that of another package; the plan needs only core's own."""
        save = super().async_save
        own = ("mcore",) if "async_strategy" in inspect.signature(save).parameters else ()
        shards: Shards = save(sharded_state_dict, checkpoint_dir, *own)
        return shards

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, plan: tuple[object, Metadata | None], *how: str
    ) -> Shards:
        buckets, writer.write_buckets = writer.write_buckets or [], None  # only here: freed when they are written
        if plan[1] is not None:  # on rank 0, in the first save
            self.metadata = places.beginning(plan[1])
        self.validated_cache_reuse = True  # core would gather and compare all plans once more
        return Shards(writer, buckets, self.metadata)


class Planner:
    """Assigns the parts of every save to ranks, replicated tensors spread over the ranks of `group`.

    The first save gathers the parts of all ranks, on every rank.  Later ones take the same plan where all ranks have the same
    parts again: names, shapes and places.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._strategy: _Strategy | FullyParallelSaveStrategyWrapper = self._new()
        self._parts: list[ShardedBase] | None = None  # of this rank in the save that was planned

    def plan(self, state: ShardedStateDict, folder: Path) -> Shards:
        """What this rank writes of `state` into `folder`.  Collective."""
        sharded, plain = save_preprocess(state, validate_access_integrity=False)
        assert not list(nested_values(plain)), "only sharded tensors are written here"
        parts = [part.without_data() for part in nested_values(sharded)]
        live = frozenset(address(each.data) for each in nested_values(sharded) if isinstance(each, ShardedTensor))
        strategy = self._strategy
        if not on_all_ranks(parts == self._parts):
            validate_sharding_integrity(determine_global_metadata(sharded)[1])
            strategy = self._new()
        with _without_manager():
            shards: Shards = strategy.async_save(sharded, folder)
        self._strategy, self._parts = (
            strategy,
            parts,
        )  # only now: a rank that fails to plan makes all of them plan again
        shards.live = live
        return shards

    def _new(self) -> _Strategy | FullyParallelSaveStrategyWrapper:
        strategy = _Strategy()
        if self._group.size() == 1:  # nothing to spread, and core would gather all parts in every save
            return strategy
        return FullyParallelSaveStrategyWrapper(strategy, self._group, do_cache_distribution=True)


def on_all_ranks(value: bool) -> bool:
    """Whether it is true on every rank.  Collective."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(values)


def write_common(folder: Path) -> None:
    """On rank 0: the two files by which core recognises the format; its common state is empty."""
    with open(folder / COMMON_STATE_FNAME, "wb") as file:
        torch.save({}, file)
    save_config(CheckpointingConfig(*FORMAT), str(folder))


@contextlib.contextmanager
def _without_manager() -> Iterator[None]:
    """On its first plan core starts a manager process for results; ours come from threads."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def address(tensor: torch.Tensor) -> int:
    """Of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()
