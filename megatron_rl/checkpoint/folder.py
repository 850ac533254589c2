"""The folder of a run's checkpoints: names, atomic commit, the `latest` pointer, what is kept.

A checkpoint is written to .step_NNNNNN.tmp and renamed to step_NNNNNN (step_NNNNNN.2, ... where the name is taken: nothing is
ever replaced) when all of it is on the disk; then `latest` is renamed into place.  So at every moment each visible
checkpoint is whole and `latest` names one of them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.manifest import ManifestError, read_manifest
from megatron_rl.config import CheckpointConfig

LATEST = "latest"
STATE = "state.json"
"""In a checkpoint: step, progress, schedule and configuration, as plain values."""
STOPPED = "stopped"
"""A file that says that a signal ended the run, which is saved; for job scripts behind launchers that hide exit codes."""
NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Kept:
    """A checkpoint that was complete when it got its name.

    serial: counts the saves into this folder; value: of checkpoint.best_metric, None = not known.
    """

    path: Path
    step: int
    serial: int
    value: float | None


def checkpoints(folder: Path) -> list[Kept]:
    """The checkpoints of `folder` in the order of saving; those without a manifest that can be read, by step, come first."""
    found = []
    for path in folder.glob("step_*"):
        match = NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            facts = read_manifest(path).facts
        except ManifestError:
            facts = {}
        found.append(Kept(path, int(match[1]), facts.get("serial", -1), facts.get("value")))
    return sorted(found, key=lambda kept: (kept.serial, kept.step, kept.path.name))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; without that file (the first commit was cut short) the one saved last; or None.

    Raises ValueError when `latest` is damaged or names one that is not there or is another one now, naming what is there.
    """
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
        have = read_manifest(path).digest
    except ManifestError:
        return path  # whoever loads it says what is wrong with it
    if have != digest:
        raise ValueError(f"{pointer}: {path.name} is not the checkpoint it was written for (another manifest); {fix}")
    return path


def choose(folder: Path, cfg: CheckpointConfig) -> str | None:
    """The checkpoint to continue from.  On rank 0.

    A run that was started with checkpoint.load and goes on with the same command continues from its own newest checkpoint.
    """
    if not cfg.resume:
        return None
    latest = None
    if cfg.load is None or (folder.exists() and origin_of(folder) == origin(cfg)):
        latest = latest_checkpoint(folder)
    if latest is not None:
        return str(latest)
    if cfg.load is not None:
        if not cfg.load.is_dir():
            raise ValueError(
                f"checkpoint.load = {cfg.load}: no such directory; name a checkpoint, like {folder}/step_000010"
            )
        return str(cfg.load)
    if cfg.require:
        raise ValueError(
            f"checkpoint.require = true (--resume), but {folder} holds no checkpoint; leave it out to start over"
        )
    return None


def origin(cfg: CheckpointConfig) -> str | None:
    """checkpoint.load as it is noted in the checkpoints of the run that was started with it."""
    return None if cfg.load is None else str(cfg.load.resolve())


def origin_of(folder: Path) -> str | None:
    """The same of the newest checkpoint in `folder`; None where there is none that says so."""
    try:
        path = latest_checkpoint(folder)
        return None if path is None else json.loads((path / STATE).read_text())["progress"].get("origin")
    except (OSError, ValueError, KeyError):  # damaged: whoever loads it says so
        return None


def temporary_folder(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into.  Raises OSError where that cannot be made."""
    temporary = folder / f".step_{step:06d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, step: int) -> Path:
    """Give a written and synced `temporary` its name, and `latest` that name.  Returns the checkpoint."""
    folder = temporary.parent
    for path in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
        sync(path)
    names = itertools.chain([f"step_{step:06d}"], (f"step_{step:06d}.{again}" for again in itertools.count(2)))
    final = next(folder / name for name in names if not (folder / name).exists())
    os.rename(temporary, final)
    sync(folder)
    write_text(folder / LATEST, json.dumps({"name": final.name, "manifest": read_manifest(final).digest}) + "\n")
    return final


def retire(folder: Path, *, keep_last: int, keep_every: int, best: str | None) -> list[Path]:
    """Remove the checkpoints that no rule keeps, once a new one is complete; returns them.  keep_last 0 keeps all.

    Kept are the `keep_last` saved last, every one whose step is a multiple of `keep_every` (0: none), the best by value (best
    "max" or "min"; of equals the last), and all whose manifest cannot be read: that is for a person to decide.
    """
    kept = [item for item in checkpoints(folder) if item.serial >= 0]
    if not keep_last:
        return []
    spared = {item.path for item in kept[-keep_last:]}
    spared |= {item.path for item in kept if keep_every and item.step % keep_every == 0}
    if top := best_of(kept, best):
        spared.add(top.path)
    gone = [item.path for item in kept if item.path not in spared]
    for path in gone:
        hidden = path.with_name(f".{path.name}.old")  # first out of sight: half of it must never look like a checkpoint
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    return gone


def best_of(kept: Sequence[Kept], best: str | None) -> Kept | None:
    known = [item for item in kept if item.value is not None]
    if best is None or not known:
        return None
    sign = 1 if best == "max" else -1
    return max(reversed(known), key=lambda item: sign * (item.value or 0.0))


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed save or retirement left behind, and the note of the last signal."""
    if not folder.is_dir():
        return
    for path in [*folder.glob(".step_*.tmp"), *folder.glob(".step_*.old")]:
        shutil.rmtree(path)
    for name in (f".{LATEST}.tmp", f".{STOPPED}.tmp", STOPPED):
        (folder / name).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file so that after a crash it is as before or holds all of `text`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
