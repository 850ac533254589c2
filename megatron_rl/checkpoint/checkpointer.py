"""Save and load runs.  Every method is collective; an error on one rank is raised on all of them.

A checkpoint folder holds
    __R_I.distcp, .metadata, common.pt, metadata.json   megatron-core's torch_dist format: model and optimizer
    rng_RRRRR.safetensors                               random generators of rank R
    rollouts_DDDDD.safetensors                          rollouts of replica D that are not trained on yet, if any
    state.json                                          step, progress (data cursor, policy version, ...), schedule, configuration
    manifest.json                                       digests of all these, written last
"""

from __future__ import annotations

import megatron_rl.distributed  # noqa: F401  before megatron-core: makes it work without CUDA, and quiet

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
from typing import NamedTuple, TypeVar, cast

import torch.distributed as dist
from megatron.core import __version__ as core_version
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from megatron_rl.checkpoint.config_diff import check_changes, matters
from megatron_rl.checkpoint.folder import (
    STATE,
    CheckpointError,
    Progress,
    State,
    checkpoints,
    commit,
    read_state,
    remove_leftovers,
    retire,
    sync,
    temporary_folder,
    write_text,
)
from megatron_rl.checkpoint.manifest import (
    MANIFEST,
    Facts,
    FileDigest,
    Manifest,
    ManifestError,
    damage,
    digest_files,
    manifest_text,
    read_manifest,
)
from megatron_rl.checkpoint.state import adam_step, load_state, rng_state, set_rng_state, sharded_state
from megatron_rl.checkpoint.write_progress import show_writing
from megatron_rl.checkpoint.writer import Planner, Shards, write_common
from megatron_rl.config import plain_values
from megatron_rl.distributed import from_rank_0
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.console import ShowProgress
from megatron_rl.records import Files
from megatron_rl.weights.safe_load import SafeCheckpoint

FORMAT_VERSION = 1
MAX_SHOWN = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint beside the engine.

    step: finished steps.  rng: of this rank, at that point.  value: of checkpoint.best_metric, where it is known.
    files: further files of this rank, perhaps written later in a thread.
    """

    step: int
    progress: Progress
    rng: Mapping[str, Tensor] = field(default_factory=rng_state)
    files: Files = field(default_factory=dict)
    value: float | None = None


class Written(NamedTuple):
    """Of one rank.  places: of its parts, for the metadata (places.piece); digests: of the rank's files."""

    places: bytes
    digests: dict[str, FileDigest]


@dataclass
class Pending:
    """A save in progress.  outcome: None until this rank has written; the text of its error if it could not."""

    temporary: Path
    shards: Shards
    facts: Facts
    thread: threading.Thread | None = None
    outcome: Written | str | None = None


@dataclass
class Restored:
    """The result of a load, for the run; `lines` are for the user.

    accepted: changed settings that matter for what is trained and that checkpoint.allow_changes names.
    """

    path: Path
    step: int
    progress: Progress
    lines: list[str]
    accepted: list[str]


class Checkpointer:
    """Checkpoints of `engine` in `folder`, as [checkpoint] configures.  `log` prints one line."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        log: Callable[[str], None] = lambda text: None,
        progress: ShowProgress | None = None,
    ) -> None:
        """progress: shows long work, metrics.console.Console.progress."""
        self.engine, self.cfg, self.folder, self.log = engine, engine.cfg.checkpoint, folder, log
        self._progress = progress
        self._pending: Pending | None = None
        self._planner = Planner(engine.parallel.dp_cp_group)
        from_rank_0(lambda: remove_leftovers(folder))

    # Saving

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint.  With checkpoint.async_save it is still being written on return: see `poll` and `wait`.

        Raises CheckpointError on every rank, and leaves no part of it, when any rank could not write.
        """
        self.wait()
        state = self._state_text(snapshot)  # before training changes anything
        temporary = from_rank_0(lambda: self._begin(snapshot.step, state))
        shards = self._planner.plan(sharded_state(self.engine), temporary)
        shards.stage(copy=self.cfg.async_save)
        serial = from_rank_0(lambda: 1 + max((item.serial for item in checkpoints(self.folder)), default=0))
        value = snapshot.value if snapshot.value is not None and math.isfinite(snapshot.value) else None
        rng = to_bytes(dict(snapshot.rng))
        files = {rng_name(self.engine.parallel.rank): lambda path: write_bytes(path, rng), **snapshot.files}
        pending = Pending(temporary, shards, {"step": snapshot.step, "serial": serial, "value": value})
        self._pending = pending
        if self.cfg.async_save:
            thread = threading.Thread(target=self._write, args=(pending, files), daemon=True, name="checkpoint")
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
        return show_writing(self._progress, f"checkpoint of step {step}, rank 0", files, shards.num_bytes)

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
        if pending.thread is not None:
            pending.thread.join()
        self._complete(pending)
        cfg, folder = self.cfg, self.folder
        best = cfg.best_mode if cfg.best_metric else None
        # only now: the new checkpoint is complete
        for path in from_rank_0(lambda: retire(folder, keep_last=cfg.keep_last, keep_every=cfg.keep_every, best=best)):
            self.log(f"removed checkpoint {path.name}")

    def _complete(self, pending: Pending) -> None:
        failures = gather_values(pending.outcome if isinstance(pending.outcome, str) else None)
        try:
            for rank, failure in enumerate(failures):
                if failure is not None:
                    raise CheckpointError(f"rank {rank}: {failure}")
            written = gather_on_rank_0(cast(Written, pending.outcome), self.engine.parallel.host_group)
            from_rank_0(lambda: self._finish(pending, written))
        except Exception as error:  # on every rank: whatever failed, nothing half written may stay
            from_rank_0(lambda: shutil.rmtree(pending.temporary, ignore_errors=True))
            raise CheckpointError(
                f"checkpoint of step {pending.facts['step']} in {self.folder}: {error}; it was removed, older checkpoints are "
                "complete"
            ) from error

    def _begin(self, step: int, state: str) -> Path:
        """On rank 0: the new folder, with the files that only rank 0 writes."""
        temporary = None
        try:
            temporary = temporary_folder(self.folder, step)
            write_common(temporary)
            write_text(temporary / STATE, state)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step}: {self.folder}: {error}; nothing was written, older checkpoints are complete"
            ) from error
        return temporary

    def _write(self, pending: Pending, files: Files) -> None:
        """On every rank, perhaps in a thread: this rank's files, and their digests."""
        try:
            places = pending.shards.write()
            for name, write in files.items():
                write(pending.temporary / name)
                sync(pending.temporary / name)
            pending.outcome = Written(places, digest_files(pending.temporary, [*pending.shards.names, *files]))
        except Exception as error:  # `wait` reports it on every rank
            pending.outcome = reason_of_error(error)

    def _finish(self, pending: Pending, ranks: list[Written]) -> None:
        """On rank 0, when every rank has written: the other files, the manifest, the name, `latest`."""
        temporary, started = pending.temporary, time.monotonic()
        pending.shards.write_metadata([rank.places for rank in ranks])
        files = {name: digest for rank in ranks for name, digest in rank.digests.items()}
        rest = [path.name for path in temporary.iterdir() if path.name not in files]
        for name in rest:
            sync(temporary / name)
        files |= digest_files(temporary, rest)
        write_text(temporary / MANIFEST, manifest_text(files, pending.facts))
        path = commit(temporary, pending.facts["step"])
        size = sum(digest.size for digest in files.values())
        self.log(f"checkpoint {path} ({size / 2**20:.1f} MiB, committed in {time.monotonic() - started:.1f} s)")

    def _state_text(self, snapshot: Snapshot) -> str:
        engine, optimizer = self.engine, self.engine.optimizer
        state: State = {
            "version": FORMAT_VERSION,
            "step": snapshot.step,
            "progress": snapshot.progress,
            "schedule": {"position": optimizer.scheduler.num_steps, "skipped_in_a_row": optimizer.skipped_in_a_row},
            "adam_step": adam_step(engine),
            "ranks": engine.parallel.world_size,
            "layout": layout_name(engine),
            "config": plain_values(engine.cfg),
            "megatron_core": core_version,
        }
        return json.dumps(state, indent=1) + "\n"

    # Loading

    def load(self, path: Path) -> Restored:
        """Check every file of checkpoint `path` and restore the engine and the random generators from it.

        Raises CheckpointError where a file is damaged or missing, naming it and the newest undamaged checkpoint, and ValueError
        where the configuration changed in a way that matters.  The engine is unchanged then.
        """
        started = time.monotonic()
        manifest = self._checked(path)
        state = read_state(path)
        missing = {"step", "progress", "schedule", "adam_step", "ranks", "layout", "config"} - state.keys()
        if state.get("version") != FORMAT_VERSION or missing:
            raise CheckpointError(
                f"{path / STATE}: version {state.get('version')} (known: {FORMAT_VERSION}), missing parts {sorted(missing)}"
            )
        changed = check_changes(state["config"], self.engine.cfg, str(path))
        checked_in = time.monotonic() - started
        saved_by = state.get("megatron_core", "(unknown)")
        checkpoint = on_every_rank(lambda: SafeCheckpoint(path, saved_by))
        request = sharded_state(self.engine)
        loaded = on_every_rank(lambda: checkpoint.load(request))
        load_state(self.engine, loaded, adam_step=state["adam_step"])
        optimizer, schedule = self.engine.optimizer, state["schedule"]
        optimizer.scheduler.num_steps = schedule["position"]
        optimizer.scheduler.step(increment=0)  # the learning rate of that position
        optimizer.skipped_in_a_row = schedule["skipped_in_a_row"]
        rng = on_every_rank(lambda: self._restore_rng(path, state))
        size = sum(digest.size for digest in manifest.files.values())
        lines = [
            f"  {len(manifest.files)} files, {size / 2**20:.1f} MiB, digests checked in {checked_in:.1f} s",
            f"  model and optimizer ({state['adam_step']:.0f} updates by Adam, schedule at {schedule['position']}), saved as "
            f"{state['layout']} on {state['ranks']} ranks, now {layout_name(self.engine)}; {rng}",
        ]
        if differing := [key for key in changed if not key.startswith("checkpoint.")]:
            lines.append(f"  settings that differ from the checkpoint's: {', '.join(differing)}")
        return Restored(path, state["step"], state["progress"], lines, accepted=matters(changed, self.engine.cfg))

    def _restore_rng(self, path: Path, state: State) -> str:
        parallel = self.engine.parallel
        if (state["ranks"], state["layout"]) != (parallel.world_size, layout_name(self.engine)):
            return "random generators seeded again, because the layout changed"
        file = path / rng_name(parallel.rank)
        try:
            state_of_rank = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: not a safetensors file: {error}") from error
        set_rng_state(state_of_rank)
        return "random generators of every rank"

    def _checked(self, path: Path) -> Manifest:
        """The manifest of an undamaged checkpoint.  Raises CheckpointError for a damaged one, with an alternative."""
        manifest, found = self._inspect(path)
        if manifest is not None and not found:
            return manifest
        others = (item for item in reversed(checkpoints(self.folder)) if item.path.resolve() != path.resolve())
        good = next((item for item in others if not self._inspect(item.path)[1]), None)
        if len(found) > MAX_SHOWN:
            found = [*found[:MAX_SHOWN], f"... and {len(found) - MAX_SHOWN} more"]
        offer = (
            f"The newest undamaged checkpoint is of step {good.step}: continue from it with --checkpoint.load {good.path}"
            if good
            else f"There is no undamaged checkpoint in {self.folder}; start over with --checkpoint.no_resume"
        )
        raise CheckpointError("\n".join([f"checkpoint {path} is damaged:", *found, offer]))

    def _inspect(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """(manifest, damage found by any rank).  Each rank reads a part of the files."""
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(path)
            parallel, files = self.engine.parallel, manifest.files
            by_size = sorted(files, key=lambda name: (-files[name].size, name))
            found = damage(path, manifest, by_size[parallel.rank :: parallel.world_size])
        except ManifestError as error:
            found = [str(error)]
        return manifest, list(dict.fromkeys(line for lines in gather_values(found) for line in lines))


def gather_values(value: T) -> list[T]:
    """The value of every rank, on every rank.  Collective."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def gather_on_rank_0(value: T, group: dist.ProcessGroup) -> list[T]:
    """The value of every rank of `group`, all ranks over gloo, on rank 0; [] on the others.  Collective."""
    values: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, group=group)
    return cast(list[T], values or [])


def on_every_rank(work: Callable[[], T]) -> T:
    """The result of `work` on this rank.  Collective: an error on any rank is raised as CheckpointError on all of them."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # raised below, on every rank
        failure = f"rank {dist.get_rank()}: {reason_of_error(error)}"
    if found := [text for text in gather_values(failure) if text is not None]:
        raise CheckpointError(found[0])
    return cast(T, result)


def reason_of_error(error: BaseException) -> str:
    """The first OSError among the causes, if any: torch reports a full disk as an unexpected position in its file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    found = cause or error
    return f"{type(found).__name__}: {found}"


def layout_name(engine: Engine) -> str:
    parallel = engine.parallel
    sizes = {
        "tp": parallel.tp_size, "pp": parallel.pp_size, "vp": parallel.vp_size, "cp": parallel.cp_size, "ep": parallel.ep_size,
        "etp": parallel.etp_size, "dp": parallel.dp_size,
    }  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def rng_name(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"
