"""Restore a run from a checkpoint whose files are all undamaged.  Collective over all ranks."""

from __future__ import annotations

# before megatron-core: makes it work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401

# isort: split
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_rl.checkpoint.all_ranks import gather_values, layout_name, on_every_rank
from megatron_rl.checkpoint.config_diff import check_changes, matters
from megatron_rl.checkpoint.folder import (
    STATE,
    CheckpointError,
    Progress,
    State,
    checkpoints,
    read_state,
)
from megatron_rl.checkpoint.manifest import Manifest, ManifestError, damage, read_manifest
from megatron_rl.checkpoint.state import load_state, set_rng_state, sharded_state
from megatron_rl.checkpoint.torch_dist.safe_checkpoint import SafeCheckpoint
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.lora_state import base_digest

FORMAT_VERSION = 1
REQUIRED = {"step", "progress", "schedule", "adam_step", "ranks", "layout", "config"}
"""Keys that state.json must have."""
MAX_SHOWN = 5


@dataclass
class Restored:
    """The result of a load."""

    path: Path
    step: int
    """Finished steps."""
    progress: Progress
    lines: list[str]
    """Lines for the user about the loaded state."""
    accepted: list[str]
    """Changed settings that matter for what is trained and that checkpoint.allow_changes names."""


def load_checkpoint(engine: Engine, folder: Path, path: Path) -> Restored:
    """Restore the engine and the random generators from `path`, after checking all of its files.

    `folder` holds the run's checkpoints: where `path` is damaged, the error names the newest
    undamaged one there.  Raises CheckpointError for files that are damaged or missing, and
    ValueError where the configuration changed in a way that matters.  The engine is unchanged then.
    """
    started = time.monotonic()
    # before anything changes: a damaged checkpoint must leave the engine as it is
    manifest = undamaged_manifest(engine, folder, path)
    state = read_state(path)
    if state.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / STATE}: version {state.get('version')}, must be {FORMAT_VERSION}; load it"
            " with the program that saved it"
        )
    if missing := REQUIRED - state.keys():
        raise CheckpointError(
            f"{path / STATE}: keys are missing: {', '.join(sorted(missing))}; choose another"
            " checkpoint with --checkpoint.load"
        )
    # also before the engine changes
    changed = check_changes(state["config"], engine.cfg, str(path))
    check_base(engine, path, state)
    checked_in = time.monotonic() - started
    restore_engine(engine, path, state)
    rng = on_every_rank(lambda: restore_rng(engine, path, state))
    size = sum(digest.size for digest in manifest.files.values())
    lines = [
        (
            f"  {len(manifest.files)} files, {size / 2**20:.1f} MiB, digests checked in"
            f" {checked_in:.1f} s"
        ),
        (
            f"  model and optimizer ({state['adam_step']:.0f} updates by Adam, schedule at"
            f" {state['schedule']['position']}), saved as {state['layout']} on {state['ranks']}"
            f" ranks, now {layout_name(engine)}; {rng}"
        ),
    ]
    if differing := [key for key in changed if not key.startswith("checkpoint.")]:
        lines.append(f"  settings that differ from the checkpoint's: {', '.join(differing)}")
    accepted = matters(changed, engine.cfg)
    return Restored(path, state["step"], state["progress"], lines, accepted)


def check_base(engine: Engine, path: Path, state: State) -> None:
    """Raise CheckpointError where the adapters belong to another base.  Collective."""
    if not engine.cfg.lora.rank:
        return
    found, saved = base_digest(engine.chunks, engine.spec, engine.parallel), state.get("base")
    if found != saved:
        raise CheckpointError(
            f"{path}: its adapters belong to other weights (digest {saved}) than those of"
            f" model.path = {engine.cfg.model.path} ({found}); set model.path to the model that the"
            " run was started from"
        )


def restore_engine(engine: Engine, path: Path, state: State) -> None:
    """Load model, optimizer and the position in the schedule.  Collective."""
    saved_by = state.get("megatron_core", "(unknown)")
    checkpoint = on_every_rank(lambda: SafeCheckpoint(path, saved_by))
    # tensors are filled in place: the request shares the engine's memory
    request = sharded_state(engine)
    loaded = on_every_rank(lambda: checkpoint.load(request))
    load_state(engine, loaded, adam_step=state["adam_step"])
    optimizer, schedule = engine.optimizer, state["schedule"]
    optimizer.scheduler.num_steps = schedule["position"]
    optimizer.scheduler.step(increment=0)  # sets the learning rate of that position
    optimizer.skipped_in_a_row = schedule["skipped_in_a_row"]


def restore_rng(engine: Engine, path: Path, state: State) -> str:
    """Restore this rank's random generators where the layout is the saved one; say what was done.

    In another layout no saved generator belongs to this rank: it keeps those that it has seeded.
    """
    parallel = engine.parallel
    if (state["ranks"], state["layout"]) != (parallel.world_size, layout_name(engine)):
        return "random generators seeded again, because the layout changed"
    file = path / rng_name(parallel.rank)
    try:
        state_of_rank = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from error
    set_rng_state(state_of_rank)
    return "random generators of every rank"


def undamaged_manifest(engine: Engine, folder: Path, path: Path) -> Manifest:
    """Return the manifest of checkpoint `path`.  Collective.

    Raises CheckpointError for a damaged one; it names the newest undamaged checkpoint in `folder`.
    """
    manifest, problems = inspect_files(engine, path)
    if manifest is not None and not problems:
        return manifest
    # the newest one first
    others = (
        item for item in reversed(checkpoints(folder)) if item.path.resolve() != path.resolve()
    )
    good = next((item for item in others if not inspect_files(engine, item.path)[1]), None)
    if len(problems) > MAX_SHOWN:
        problems = [*problems[:MAX_SHOWN], f"... and {len(problems) - MAX_SHOWN} more"]
    offer = (
        f"The newest undamaged checkpoint is of step {good.step}: continue from it with"
        f" --checkpoint.load {good.path}"
        if good
        else (
            f"There is no undamaged checkpoint in {folder}; start over with --checkpoint.no_resume"
        )
    )
    raise CheckpointError("\n".join([f"checkpoint {path} is damaged:", *problems, offer]))


def inspect_files(engine: Engine, path: Path) -> tuple[Manifest | None, list[str]]:
    """Return (manifest, damage that any rank has found).  Collective.

    The files are divided among the ranks, the large ones evenly: each rank reads its part.
    """
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        parallel, files = engine.parallel, manifest.files
        # by name among equals: every rank must divide them in the same way
        by_size = sorted(files, key=lambda name: (-files[name].size, name))
        problems = damage(path, manifest, by_size[parallel.rank :: parallel.world_size])
    except ManifestError as error:
        problems = [str(error)]
    unique = dict.fromkeys(line for lines in gather_values(problems) for line in lines)
    return manifest, list(unique)


def rng_name(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"
