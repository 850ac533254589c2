"""Save runs, and load them.

Every method is collective; an error on one rank is raised on all of them.  A checkpoint folder has
    __R_I.distcp, .metadata, common.pt, metadata.json
                             model and optimizer in megatron-core's torch_dist format
    rng_RRRRR.safetensors    random generators of rank R
    rollouts_DDDDD.safetensors
                             rollouts of replica D that are not trained on yet, if there are any
    state.json               step, progress (data cursor, policy version, ...), schedule,
                             configuration
    manifest.json            digests of all these files, written last
"""

from __future__ import annotations

# before megatron-core: makes it work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401

# isort: split
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from megatron.core import __version__ as core_version
from safetensors.torch import save as to_bytes
from torch import Tensor

from megatron_rl.checkpoint.all_ranks import (
    gather_on_rank_0,
    gather_values,
    layout_name,
    reason_of_error,
)
from megatron_rl.checkpoint.checkpoint_loader import (
    FORMAT_VERSION,
    Restored,
    load_checkpoint,
    rng_name,
)
from megatron_rl.checkpoint.folder import (
    STATE,
    CheckpointError,
    Progress,
    State,
    checkpoints,
    commit,
    remove_leftovers,
    retire,
    sync,
    temporary_folder,
    write_text,
)
from megatron_rl.checkpoint.manifest import MANIFEST, Facts, FileDigest, digest_files, manifest_text
from megatron_rl.checkpoint.state import adam_step, rng_state, sharded_state
from megatron_rl.checkpoint.torch_dist.shard_writer import Planner, Shards, write_common
from megatron_rl.checkpoint.write_progress import show_writing
from megatron_rl.config import plain_values
from megatron_rl.distributed import from_rank_0
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.lora_state import base_digest
from megatron_rl.metrics.console import ShowProgress
from megatron_rl.records import Files


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint beside the engine."""

    step: int
    """Finished steps."""
    progress: Progress
    rng: Mapping[str, Tensor] = field(default_factory=rng_state)
    """Random generators of this rank after `step` steps."""
    files: Files = field(default_factory=dict)
    """Further files of this rank by name; they may be written later, in a thread."""
    value: float | None = None
    """Value of checkpoint.best_metric, where it is known."""


class Written(NamedTuple):
    """Result of a save on one rank."""

    places: bytes
    """Places of the rank's parts, pickled for `.metadata` (metadata_pieces.piece)."""
    digests: dict[str, FileDigest]
    """Digests of the rank's files by name."""


@dataclass
class Pending:
    """A save in progress."""

    temporary: Path
    shards: Shards
    facts: Facts
    thread: threading.Thread | None = None
    outcome: Written | str | None = None
    """None until this rank has written; the text of its error where it could not."""


class Checkpointer:
    """Checkpoints of `engine` in `folder`, as the section [checkpoint] configures them.

    `log` prints one line.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        log: Callable[[str], None] = lambda text: None,
        progress: ShowProgress | None = None,
    ) -> None:
        """Remove what an earlier process left unfinished.

        `progress` shows long work (metrics.console.Console.progress).
        """
        self.engine, self.cfg, self.folder, self.log = engine, engine.cfg.checkpoint, folder, log
        self._progress = progress
        self._pending: Pending | None = None
        self._planner = Planner(engine.parallel.dp_cp_group)
        self._base = (
            base_digest(engine.chunks, engine.spec, engine.parallel)
            if engine.cfg.lora.rank
            else None
        )
        from_rank_0(lambda: remove_leftovers(folder))

    # Saving

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint.

        With checkpoint.async_save it is still being written on return: call `poll` or `wait`.
        Raises CheckpointError on every rank, and leaves no part of the checkpoint, when any rank
        could not write.
        """
        self.wait()
        state = self._state_text(snapshot)  # before training changes anything
        temporary = from_rank_0(lambda: self._begin(snapshot.step, state))
        # the plan refers to the engine's memory; `stage` copies what training would change
        shards = self._planner.plan(sharded_state(self.engine), temporary)
        shards.stage(copy=self.cfg.async_save)
        # counted where the manifest is written: other machines may not see the folder, or not as it
        # is now
        serial = from_rank_0(lambda: next_serial(self.folder))
        value = snapshot.value
        if value is not None and not math.isfinite(value):
            value = None  # NaN: the evaluation scored nothing
        rng = to_bytes(dict(snapshot.rng))
        files = {
            rng_name(self.engine.parallel.rank): lambda path: write_bytes(path, rng),
            **snapshot.files,
        }
        facts: Facts = {"step": snapshot.step, "serial": serial, "value": value}
        if self.cfg.best_metric:
            facts["metric"] = self.cfg.best_metric
        self._pending = pending = Pending(temporary, shards, facts)
        if self.cfg.async_save:
            # a daemon: an error of the training loop must not wait for the disk
            thread = threading.Thread(
                target=self._write, args=(pending, files), daemon=True, name="checkpoint"
            )
            pending.thread = thread
            thread.start()
        else:
            with self._shown(pending):
                self._write(pending, files)
            self.wait()

    def _shown(self, pending: Pending) -> AbstractContextManager[None]:
        if self._progress is None:
            return nullcontext()
        shards, step = pending.shards, pending.facts["step"]
        files = [pending.temporary / name for name in shards.names]
        return show_writing(
            self._progress, f"checkpoint of step {step}, rank 0", files, shards.num_bytes
        )

    def poll(self) -> None:
        """Finish a background save once all ranks have written.  Raises as `save` does."""
        # all ranks must decide alike: `wait` is collective
        if self._pending is not None and all(gather_values(self._pending.outcome is not None)):
            self.wait()

    def wait(self) -> None:
        """Finish a background save now.  Raises as `save` does."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # a synchronous save has no thread
        if pending.thread is not None:
            pending.thread.join()
        self._complete(pending)
        cfg, folder = self.cfg, self.folder
        # only now: older checkpoints may go once the new one is complete
        removed = from_rank_0(
            lambda: retire(
                folder,
                keep_last=cfg.keep_last,
                keep_every=cfg.keep_every,
                best=cfg.best_mode if cfg.best_metric else None,
                metric=cfg.best_metric,
            )
        )
        for path in removed:
            self.log(f"removed checkpoint {path.name}")

    def _complete(self, pending: Pending) -> None:
        # collective: a rank that could not write tells all others
        failures = gather_values(pending.outcome if isinstance(pending.outcome, str) else None)
        try:
            for rank, failure in enumerate(failures):
                if failure is not None:
                    raise CheckpointError(f"rank {rank}: {failure}")
            # places and digests, which are large, go to rank 0 alone, over gloo
            written = gather_on_rank_0(
                cast(Written, pending.outcome), self.engine.parallel.host_group
            )
            from_rank_0(lambda: self._finish(pending, written))
        except Exception as error:  # on every rank: whatever failed, nothing half written may stay
            from_rank_0(lambda: shutil.rmtree(pending.temporary, ignore_errors=True))
            raise CheckpointError(
                f"checkpoint of step {pending.facts['step']} in {self.folder}: {error}; it was"
                " removed, older checkpoints are complete"
            ) from error

    def _begin(self, step: int, state: str) -> Path:
        """Create the new folder on rank 0, with the files that only rank 0 writes."""
        temporary = None
        try:
            temporary = temporary_folder(self.folder, step)
            write_common(temporary)
            write_text(temporary / STATE, state)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step}: {self.folder}: {error}; nothing was written, older"
                " checkpoints are complete"
            ) from error
        return temporary

    def _write(self, pending: Pending, files: Files) -> None:
        """Write this rank's files and compute their digests, perhaps in a thread."""
        try:
            places = pending.shards.write()
            for name, write in files.items():
                write(pending.temporary / name)
                # before the manifest says that the file is complete
                sync(pending.temporary / name)
            pending.outcome = Written(
                places, digest_files(pending.temporary, [*pending.shards.names, *files])
            )
        except Exception as error:  # `wait` reports it on every rank
            pending.outcome = reason_of_error(error)

    def _finish(self, pending: Pending, ranks: list[Written]) -> None:
        """Complete the checkpoint on rank 0, when every rank has written.

        The other files are synced, then the manifest is written; then the folder gets its name, and
        `latest` names it.
        """
        temporary, started = pending.temporary, time.monotonic()
        # only rank 0 knows where the parts of all ranks are
        pending.shards.write_metadata([rank.places for rank in ranks])
        files = {name: digest for rank in ranks for name, digest in rank.digests.items()}
        # files that rank 0 wrote outside `_write`: state.json, common.pt, metadata.json, .metadata
        others = [path.name for path in temporary.iterdir() if path.name not in files]
        for name in others:
            sync(temporary / name)
        files |= digest_files(temporary, others)
        write_text(temporary / MANIFEST, manifest_text(files, pending.facts))
        path = commit(temporary, pending.facts["step"])
        size = sum(digest.size for digest in files.values())
        self.log(
            f"checkpoint {path} ({size / 2**20:.1f} MiB, committed in"
            f" {time.monotonic() - started:.1f} s)"
        )

    def _state_text(self, snapshot: Snapshot) -> str:
        engine, optimizer = self.engine, self.engine.optimizer
        state: State = {
            "version": FORMAT_VERSION,
            "step": snapshot.step,
            "progress": snapshot.progress,
            "schedule": {
                "position": optimizer.scheduler.num_steps,
                "skipped_in_a_row": optimizer.skipped_in_a_row,
            },
            "adam_step": adam_step(engine),
            "ranks": engine.parallel.world_size,
            "layout": layout_name(engine),
            "config": plain_values(engine.cfg),
            "megatron_core": core_version,
            "base": self._base,
        }
        return json.dumps(state, indent=1) + "\n"

    # Loading

    def load(self, path: Path) -> Restored:
        """Restore the engine and the random generators from checkpoint `path`.

        Raises as `load_checkpoint` does.
        """
        return load_checkpoint(self.engine, self.folder, path)


def next_serial(folder: Path) -> int:
    """Return the number of the next save into `folder`, which counts all saves from 1."""
    return 1 + max((item.serial for item in checkpoints(folder)), default=0)


def write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
