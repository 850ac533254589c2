"""Save and load whole runs.  Every method is collective; what fails on one rank is raised on all of them.

A checkpoint folder holds
    __R_I.distcp, .metadata, common.pt, metadata.json   megatron-core's torch_dist format: model and optimizer
    rng_RRRRR.safetensors                               random generators of rank R
    rollouts_DDDDD.safetensors                          what replica D had sampled and not trained on yet, if anything
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from megatron.core import __version__ as core_version
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from megatron_rl.checkpoint.config_diff import check_changes, matters
from megatron_rl.checkpoint.folder import (
    STATE,
    checkpoints,
    commit,
    remove_leftovers,
    retire,
    sync,
    temporary_folder,
    write_text,
)
from megatron_rl.checkpoint.manifest import (
    MANIFEST,
    FileDigest,
    Manifest,
    ManifestError,
    damage,
    digest_files,
    manifest_text,
    read_manifest,
)
from megatron_rl.checkpoint.state import Loading, adam_step, rng_state, set_rng_state, sharded_state
from megatron_rl.checkpoint.writer import Shards, plan_shards, write_common
from megatron_rl.distributed import from_rank_0
from megatron_rl.engine.engine import Engine
from megatron_rl.records import Files
from megatron_rl.weights.safe_load import SafeCheckpoint

FORMAT_VERSION = 1
MAX_SHOWN = 5


T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or must not be loaded; the message names the file and what can be done."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds beside the model.

    step: finished steps.  progress: of the run, JSON.  rng: of this rank, as it was at that point.
    files: this rank's own further files, and what writes each, perhaps later and in a thread.
    value: of checkpoint.best_metric, where it is known.
    """

    step: int
    progress: Mapping[str, Any]
    rng: Mapping[str, Tensor] = field(default_factory=rng_state)
    files: Files = field(default_factory=dict)
    value: float | None = None


@dataclass
class Pending:
    """A save that is being written.  outcome: core's results and the digests of this rank's files, or what went wrong."""

    step: int
    temporary: Path
    shards: Shards
    facts: dict[str, Any]
    thread: threading.Thread | None = None
    outcome: tuple[list[Any], dict[str, FileDigest]] | str | None = None


@dataclass
class Restored:
    """What a load put back, for the run and for the person who reads `lines`.

    accepted: settings that changed, which checkpoint.allow_changes admits though they matter for what is trained.
    """

    path: Path
    step: int
    progress: dict[str, Any]
    lines: list[str]
    accepted: list[str]


class Checkpointer:
    """Checkpoints of `engine` in `folder`, as [checkpoint] says.  `say` prints one line."""

    def __init__(self, engine: Engine, folder: Path, log: Callable[[str], None] = lambda text: None) -> None:
        self.engine, self.cfg, self.folder, self.log = engine, engine.cfg.checkpoint, folder, log
        self._pending: Pending | None = None
        from_rank_0(lambda: remove_leftovers(folder))

    # Saving

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint.  With checkpoint.async_save it is still being written on return: see `poll` and `wait`.

        Raises CheckpointError on every rank, with nothing left of it, when any rank could not write.
        """
        self.wait()
        state = self._state_text(snapshot)  # of this moment, as is what follows
        temporary = Path(from_rank_0(lambda: self._begin(snapshot.step, state)))
        shards = plan_shards(sharded_state(self.engine), temporary, self.engine.parallel.dp_cp_group)
        shards.stage(copy=self.cfg.async_save)
        serial = from_rank_0(lambda: 1 + max((item.serial for item in checkpoints(self.folder)), default=0))
        value = snapshot.value if snapshot.value is not None and math.isfinite(snapshot.value) else None
        pending = Pending(snapshot.step, temporary, shards, {"step": snapshot.step, "serial": serial, "value": value})
        rng = to_bytes(dict(snapshot.rng))
        files = {rng_name(self.engine.parallel.rank): lambda path: write_bytes(path, rng), **snapshot.files}
        self._pending = pending
        if not self.cfg.async_save:
            self._write(pending, files)
            self.wait()
            return
        pending.thread = threading.Thread(target=self._write, args=(pending, files), daemon=True, name="checkpoint")
        pending.thread.start()

    def poll(self) -> None:
        """Finish a background save once all ranks have written.  Raises as `save` does."""
        if self._pending is not None:
            is_written: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(is_written, self._pending.outcome is not None)
            if all(is_written):
                self.wait()

    def wait(self) -> None:
        """Finish a background save now.  Raises as `save` does."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.thread is not None:
            pending.thread.join()
        self._complete(pending)
        for name in from_rank_0(self._retire):
            self.log(f"removed checkpoint {name}")

    def _complete(self, pending: Pending) -> None:
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, pending.outcome)
        try:
            failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)]
            if failed:
                raise CheckpointError(failed[0])
            from_rank_0(lambda: self._finish(pending, outcomes))
        except Exception as error:
            from_rank_0(lambda: shutil.rmtree(pending.temporary, ignore_errors=True))
            raise CheckpointError(
                f"checkpoint of step {pending.step} in {self.folder}: {error}; it was given up, older checkpoints are whole"
            ) from error

    def _begin(self, step: int, state: str) -> str:
        """On rank 0: the folder with the files that are its own."""
        temporary = None
        try:
            temporary = temporary_folder(self.folder, step)
            write_common(temporary)
            write_text(temporary / STATE, state)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step}: {self.folder}: {error}; nothing was written, older checkpoints are whole"
            ) from error
        return str(temporary)

    def _write(self, pending: Pending, files: Files) -> None:
        """On every rank, perhaps in a thread: this rank's files, and their digests."""
        try:
            results = pending.shards.write()
            for name, write in files.items():
                write(pending.temporary / name)
                sync(pending.temporary / name)
            pending.outcome = results, digest_files(pending.temporary, [*pending.shards.names, *files])
        except Exception as error:  # reported by `wait` on every rank
            pending.outcome = reason(error)

    def _finish(self, pending: Pending, outcomes: list[Any]) -> None:
        """On rank 0, when every rank has written: the rest, the manifest, the name, `latest`."""
        temporary, started = pending.temporary, time.monotonic()
        pending.shards.write_metadata([results for results, _ in outcomes])
        files = {name: digest for _, digests in outcomes for name, digest in digests.items()}
        rest = [path.name for path in temporary.iterdir() if path.name not in files]
        for name in rest:
            sync(temporary / name)
        files |= digest_files(temporary, rest)
        write_text(temporary / MANIFEST, manifest_text(files, pending.facts))
        path = commit(temporary, pending.step)
        size = sum(digest.size for digest in files.values())
        self.log(f"checkpoint {path} ({size / 2**20:.1f} MiB, committed in {time.monotonic() - started:.1f} s)")

    def _retire(self) -> list[str]:
        best = self.cfg.best_mode if self.cfg.best_metric else None
        gone = retire(self.folder, keep_last=self.cfg.keep_last, keep_every=self.cfg.keep_every, best=best)
        return [path.name for path in gone]

    def _state_text(self, snapshot: Snapshot) -> str:
        engine, parallel = self.engine, self.engine.parallel
        state = {
            "version": FORMAT_VERSION,
            "step": snapshot.step,
            "progress": dict(snapshot.progress),
            "schedule": {
                "position": engine.optimizer.scheduler.num_steps,
                "skipped_in_a_row": engine.optimizer.skipped_in_a_row,
            },
            "adam_step": adam_step(engine),
            "ranks": parallel.world_size,
            "layout": layout_name(engine),
            "config": engine.cfg.model_dump(mode="json"),
            "megatron_core": core_version,
        }
        return json.dumps(state, indent=1) + "\n"

    # Loading

    def load(self, path: Path) -> Restored:
        """Check every file of checkpoint `path` and restore the engine and the random generators from it.

        Raises CheckpointError where a file is damaged or missing, naming it and the newest good checkpoint, and ValueError
        where the configuration changed in a way that matters.  The engine is untouched then.
        """
        started = time.monotonic()
        manifest = self._checked(path)
        state = read_state(path / STATE)
        missing = {"step", "progress", "schedule", "adam_step", "ranks", "layout", "config"} - state.keys()
        if state.get("version") != FORMAT_VERSION or missing:
            raise CheckpointError(
                f"{path / STATE}: version {state.get('version')} (known: {FORMAT_VERSION}), missing parts {sorted(missing)}"
            )
        changed = check_changes(state["config"], self.engine.cfg, str(path))
        checked_in = time.monotonic() - started
        checkpoint = on_every_rank(lambda: SafeCheckpoint(path))
        loading = Loading(self.engine)
        loaded = on_every_rank(lambda: checkpoint.load(loading.request))
        loading.apply(loaded, adam_step=state["adam_step"])
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

    def _restore_rng(self, path: Path, state: dict[str, Any]) -> str:
        parallel = self.engine.parallel
        if (state["ranks"], state["layout"]) != (parallel.world_size, layout_name(self.engine)):
            return "random generators seeded anew, as the layout is another one"
        file = path / rng_name(parallel.rank)
        try:
            state_of_rank = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: not a safetensors file: {error}") from error
        set_rng_state(state_of_rank)
        return "random generators of every rank"

    def _checked(self, path: Path) -> Manifest:
        """The manifest of an undamaged checkpoint; ranks share the files among them."""
        manifest, found = self._inspect(path)
        if manifest is not None and not found:
            return manifest
        good = None
        for item in reversed(checkpoints(self.folder)):
            if item.path.resolve() != path.resolve() and not self._inspect(item.path)[1]:
                good = item
                break
        more = f"\n... and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        offer = (
            f"The newest undamaged checkpoint is of step {good.step}: continue from it with --checkpoint.load {good.path}"
            if good
            else f"There is no undamaged checkpoint in {self.folder}; start over with --checkpoint.no_resume"
        )
        raise CheckpointError("\n".join([f"checkpoint {path} is damaged:", *found[:MAX_SHOWN]]) + f"{more}\n{offer}")

    def _inspect(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """(manifest, damage found by any rank)."""
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(path)
            parallel = self.engine.parallel
            by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
            found = damage(path, manifest, by_size[parallel.rank :: parallel.world_size])
        except ManifestError as error:
            found = [str(error)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        return manifest, list(dict.fromkeys(line for lines in everyone for line in lines))


def read_state(file: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is not a JSON object."""
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: holds a {type(state).__name__}, rule: a JSON object")
    return state


def on_every_rank(work: Callable[[], T]) -> T:
    """What `work` returns on this rank.  Collective: where it fails on any, CheckpointError is raised on all of them."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # raised below, everywhere
        failure = f"rank {dist.get_rank()}: {reason(error)}"
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if found := [text for text in failures if text is not None]:
        raise CheckpointError(found[0])
    return cast(T, result)


def reason(error: BaseException) -> str:
    """The OSError that began it, where there is one: torch reports a full disk as an unexpected position in its file."""
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
