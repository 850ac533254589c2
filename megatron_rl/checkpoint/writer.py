"""megatron-core's torch_dist format, planned by core and written by threads of this process.

core itself forks a process per file and starts one more for their results, which outlives a killed rank; and a rank that
cannot write leaves the others waiting.  Here every rank writes its own shards on a few threads, and what went wrong on any
of them is known to all before anything gets its name.
"""

from __future__ import annotations

import megatron_rl.distributed  # noqa: F401  before megatron-core: makes it work without CUDA, and quiet

# isort: split
import contextlib
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

FORMAT = ("torch_dist", 1)
FILES_PER_RANK = 2


@dataclass
class Shards:
    """What this rank writes: buckets of (path, name, items), one file each.  metadata: of the whole checkpoint, on rank 0."""

    writer: FileSystemWriterAsync
    metadata: Any
    buckets: list[Any]

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.buckets]

    def stage(self, *, copy: bool) -> None:
        """Bring the tensors to the host.  copy: also those that are there, for weights that go on changing meanwhile."""
        staged = []
        for path, name, (objects, tensors) in self.buckets:
            tensors = [(item, _on_host(tensor, copy=copy)) for item, tensor in tensors]
            staged.append((path, name, (objects, tensors)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.buckets = staged

    def write(self) -> list[Any]:
        """Write and sync the files; core's results, for `write_metadata`.  Raises what writing raised."""
        with ThreadPoolExecutor(FILES_PER_RANK) as pool:
            results = list(pool.map(self._write_bucket, self.buckets))
        self.buckets = []
        return [item for result in results for item in result]

    def _write_bucket(self, bucket: Any) -> list[Any]:
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        started: queue.Queue[int] = queue.Queue()
        started.put(0)
        FileSystemWriterAsync.write_preloaded_data(
            [self.writer.transforms], 0, bucket, results, started, True
        )  # the last: fsync
        _, outcome = results.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return list(outcome)

    def write_metadata(self, results: list[list[Any]]) -> None:
        """Rank 0, when all ranks have written: where each tensor lies."""
        self.writer.finish(self.metadata, results)


class _Strategy(TorchDistSaveShardedStrategy):
    """core's plan without its way of writing."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path, *how: str) -> Any:
        """core 0.19 names a way of writing, by default that of a package; we only plan, for which core's own will do."""
        return super().async_save(sharded_state_dict, checkpoint_dir, *("mcore" for _ in how))

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, plan: Any, *how: str) -> Shards:
        return Shards(writer, plan[1], writer.write_buckets or [])


def plan_shards(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> Shards:
    """Decide which rank writes what of `state`, replicated tensors spread over the ranks of `group`.  Collective."""
    sharded, plain = save_preprocess(state)
    assert not _leaves(plain), "only sharded tensors are written here"
    strategy = FullyParallelSaveStrategyWrapper(_Strategy(*FORMAT, thread_count=FILES_PER_RANK), group)
    with _without_manager():
        return strategy.async_save(sharded, folder)


def write_common(folder: Path) -> None:
    """Rank 0: the two files by which core knows the format; its common state is empty."""
    with open(folder / COMMON_STATE_FNAME, "wb") as file:
        torch.save({}, file)
    save_config(CheckpointingConfig(*FORMAT), str(folder))


@contextlib.contextmanager
def _without_manager() -> Any:
    """core starts a manager process for results on its first plan; ours come from threads."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _on_host(tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor.clone() if copy else tensor
    return tensor.to("cpu", non_blocking=True)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    return [leaf for value in tree for leaf in _leaves(value)] if isinstance(tree, list) else [tree]
