"""The folder of a run's checkpoints: names, atomic commit, the `latest` pointer, retention.

A checkpoint is written to .step_NNNNNN.tmp and renamed to step_NNNNNN when all of it is on the disk
(step_NNNNNN.2, ... where the name is taken: no checkpoint is ever replaced).  Then `latest` is
renamed into place.  So at every moment each visible checkpoint is complete and `latest` names one
of them.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from megatron_rl.checkpoint.manifest import ManifestError, read_manifest
from megatron_rl.config import CheckpointConfig

logger = logging.getLogger(__name__)

LATEST = "latest"
STATE = "state.json"
"""File of a checkpoint with a State."""
STOPPED = "stopped"
"""File that exists when a signal ended the run and its state is saved, for job scripts whose
launcher hides exit codes.
"""
NAME = re.compile(r"step_(\d+)(?:\.\d+)?")
Progress = dict[str, Any]
"""Position of a run, beside the engine, as plain values.  Each source of rollouts has its own keys
(trainer/rollout_source.py).
"""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or must not be loaded.

    The message names the file and the remedy.
    """


class Schedule(TypedDict):
    """The place of a run in its learning-rate schedule."""

    position: int
    skipped_in_a_row: int


class State(TypedDict):
    """The content of state.json."""

    version: int
    step: int
    """Finished steps."""
    progress: Progress
    schedule: Schedule
    adam_step: float
    """Updates that Adam has made."""
    ranks: int
    """Number of ranks that saved it."""
    layout: str
    """Parallel sizes of the run that saved it (all_ranks.layout_name)."""
    config: dict[str, dict[str, object]]
    """All settings, by section."""
    megatron_core: str
    """Version that saved it."""
    base: NotRequired[str | None]
    """Digest of the frozen weights that the adapters belong to (engine.lora_state.base_digest)."""


@dataclass(frozen=True)
class Kept:
    """A checkpoint that was complete when it got its name."""

    path: Path
    step: int
    serial: int
    """Number of the save (Facts.serial); -1 without a manifest that can be read."""
    value: float | None
    """Value of checkpoint.best_metric (Facts.value)."""
    metric: str | None = None
    """The metric of `value`; None: not known."""


def checkpoints(folder: Path) -> list[Kept]:
    """Return the checkpoints of `folder` in the order of saving.

    Those without a manifest that can be read come first, by step.
    """
    items = []
    for path in folder.glob("step_*"):
        match = NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            facts = read_manifest(path).facts
            serial, value, metric = facts.get("serial", -1), facts.get("value"), facts.get("metric")
            items.append(Kept(path, int(match[1]), serial, value, metric))
        except ManifestError:
            items.append(Kept(path, int(match[1]), -1, None))
    return sorted(items, key=lambda item: (item.serial, item.step, item.path.name))


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None where there is none.

    Without that file (the first commit was interrupted) it is the one saved last.  Raises
    ValueError, listing the checkpoints, when `latest` is damaged or names one that does not exist
    or was replaced.
    """
    # the pointer has the manifest's digest: a folder that was replaced under its name is noticed
    pointer, kept = folder / LATEST, checkpoints(folder)
    if not pointer.exists():
        return kept[-1].path if kept else None
    there = ", ".join(item.path.name for item in reversed(kept)) or "none"
    fix = f"checkpoints there: {there}; choose one with --checkpoint.load {folder}/NAME"
    try:
        named = json.loads(pointer.read_bytes())
        path, digest = folder / str(named["name"]), named["manifest"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{pointer}: does not name a checkpoint; {fix}") from error
    if path not in [item.path for item in kept]:
        raise ValueError(f"{pointer}: names {path.name}, which is not there; {fix}")
    try:
        actual = read_manifest(path).digest
    except ManifestError:
        return path  # loading it reports the damage
    if actual != digest:
        raise ValueError(
            f"{pointer}: {path.name} is not the checkpoint it was written for (another manifest);"
            f" {fix}"
        )
    return path


def choose_checkpoint(folder: Path, cfg: CheckpointConfig) -> str | None:
    """Return the checkpoint to continue from, or None to start over.  Called on rank 0.

    A run that was started with checkpoint.load and is restarted by the same command continues from
    its own newest checkpoint.
    """
    # checkpoint.no_resume: start over
    if not cfg.resume:
        return None
    is_own = cfg.load is None or origin_of(folder) == origin(cfg)
    if is_own and (latest := latest_checkpoint(folder)):
        return str(latest)
    if cfg.load is not None:
        if not cfg.load.is_dir():
            raise ValueError(
                f"checkpoint.load = {cfg.load}: no such directory; it must be like"
                f" {folder}/step_000010"
            )
        return str(cfg.load)
    if cfg.require:
        raise ValueError(
            f"checkpoint.require = true (--resume), but {folder} holds no checkpoint; omit it to"
            " start over"
        )
    return None


def origin(cfg: CheckpointConfig) -> str | None:
    """Return checkpoint.load as the checkpoints of the run that was started with it record it."""
    return None if cfg.load is None else str(cfg.load.resolve())


def origin_of(folder: Path) -> str | None:
    """Return the origin that the newest checkpoint in `folder` records; None without one."""
    try:
        path = latest_checkpoint(folder)
        return None if path is None else read_state(path)["progress"].get("origin")
    except (CheckpointError, ValueError, KeyError):  # loading it reports the damage
        return None


def value_of(checkpoint: Path, metric: str | None) -> float | None:
    """Return the value of `metric` with which a checkpoint was saved; None: not known."""
    for item in checkpoints(checkpoint.parent):
        if item.path == checkpoint and item.metric in (None, metric):
            return item.value
    return None


def read_state(checkpoint: Path) -> State:
    """Read state.json.  Raises CheckpointError where the file is not a JSON object."""
    file = checkpoint / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: holds a {type(state).__name__}, must be a JSON object")
    return cast(State, state)


def temporary_folder(folder: Path, step: int) -> Path:
    """Make an empty folder to write a checkpoint into.  Raises OSError where that fails."""
    temporary = folder / f".step_{step:06d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(folder)
    temporary.mkdir()
    return temporary


def commit(temporary: Path, step: int) -> Path:
    """Give `temporary` its name, let `latest` name it, and return the checkpoint.

    Every file in it is synced, and the manifest came last: with it `write_text` has synced the
    names of them all.
    """
    folder = temporary.parent
    # a step that is trained again is saved beside its first checkpoint
    names = itertools.chain(
        [f"step_{step:06d}"], (f"step_{step:06d}.{again}" for again in itertools.count(2))
    )
    final = next(folder / name for name in names if not (folder / name).exists())
    os.rename(temporary, final)
    sync(folder)  # `latest` must not be on the disk before what it names
    write_text(
        folder / LATEST,
        json.dumps({"name": final.name, "manifest": read_manifest(final).digest}) + "\n",
    )
    return final


def retire(
    folder: Path,
    *,
    keep_last: int,
    keep_every: int,
    best: str | None,
    metric: str | None = None,
) -> list[Path]:
    """Remove the checkpoints that no rule keeps, once a new one is complete, and return them.

    keep_last = 0 keeps all.  Else these are kept: the `keep_last` saved last; every one whose step
    is a multiple of `keep_every` (0: none); the best by value (`best` is "max" or "min"; of equals
    the last), among those with a value of `metric`; and all whose manifest cannot be read, about
    which the user decides.
    """
    if not keep_last:
        return []
    readable = [item for item in checkpoints(folder) if item.serial >= 0]
    kept = {item.path for item in readable[-keep_last:]}
    kept |= {item.path for item in readable if keep_every and item.step % keep_every == 0}
    # NaN, from an evaluation that scored nothing, is neither above nor below the others: it might
    # hide the best of them
    values = {
        item.path: item.value
        for item in reversed(readable)
        if item.value is not None and isfinite(item.value) and item.metric in (None, metric)
    }
    # max and min return the first of equals, which is the last saved
    if best is not None and values:
        kept.add((max if best == "max" else min)(values, key=lambda path: values[path]))
    # checkpoints without a readable manifest are in neither list, and so stay
    removed = [item.path for item in readable if item.path not in kept]
    # hidden first: a part of one must never look like a checkpoint
    remove_hidden(folder, [path.rename(free_name(folder, path.name)) for path in removed])
    return removed


def free_name(folder: Path, name: str) -> Path:
    """Return a hidden name that nothing has; `remove_leftovers` finds it."""
    names = (folder / f".{name}{'.' * bool(n)}{n or ''}.old" for n in itertools.count())
    return next(path for path in names if not path.exists())


def remove_hidden(folder: Path, hidden: Iterable[Path]) -> None:
    """Remove folders of `folder` once their hidden names are on the disk.

    A power cut must not bring back a part of one under its visible name.
    """
    sync(folder)
    for path in hidden:
        try:
            shutil.rmtree(path)
        # as on NFS, where another process reads a file: what is saved is complete all the same
        except OSError as error:
            logger.warning("%s stays on the disk until the next start: %s", path, error)


def remove_leftovers(folder: Path) -> None:
    """Remove the remains of a killed save or removal, and the file STOPPED of an earlier start."""
    if not folder.is_dir():
        return
    remove_hidden(folder, [*folder.glob(".step_*.tmp"), *folder.glob(".step_*.old")])
    for name in (f".{LATEST}.tmp", f".{STOPPED}.tmp", STOPPED):
        (folder / name).unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Create `folder` and those above it that are missing; after a crash they still exist."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file so that after a crash it has either its old content or all of `text`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(text.encode())
        file.flush()
        # the content first: after a crash the name must not lead to an empty file
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
