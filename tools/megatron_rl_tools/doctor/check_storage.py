"""Checks of the disk that a run writes to: space against the size of checkpoints, and speed of
writing and reading a file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.host import checkpoint_bytes
from megatron_rl.plan.memory import full_model
from megatron_rl_tools.doctor.check import GIB, Check, warn_if

CHUNK = bytes(16 << 20)
MOST_CHUNKS = 32
"""Chunks of half a GiB."""
MOST_SECONDS = 2.0
SLOW_MB = 100.0
"""MB per second: below it, a checkpoint of a 30B model (420 GB) takes more than an hour."""


def check_disk(folder: Path, needed: int = 0, why: str = "", *, measure: bool) -> list[Check]:
    """Check that `folder` is writable and has `needed` bytes free (for `why`); with `measure`, also
    its speed.
    """
    parents = [folder.absolute(), *folder.absolute().parents]
    existing = next(parent for parent in parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        result = f"{existing} is not a writable folder"
        return [Check("FAIL", "run directory", result, "choose another run.dir")]
    free = shutil.disk_usage(existing).free
    result = f"{folder}, {filesystem(existing)}, {free / GIB:.1f} GiB free"
    remedy = (
        f"{why} take about {needed / GIB:.1f} GiB: choose another run.dir, or set"
        " checkpoint.keep_last"
    )
    space = warn_if(free < needed, "run directory", result, remedy)
    if free < needed / 2:
        space = Check("FAIL", "run directory", result, remedy)
    return [space, *([check_speed(existing)] if measure else [])]


def check_speed(folder: Path) -> Check:
    """Measure sequential writes that reach the disk (fsync), for at most MOST_SECONDS, and reading
    them again.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor_") as file:
            start, chunks = time.monotonic(), 0
            while chunks < MOST_CHUNKS and time.monotonic() - start < MOST_SECONDS:
                file.write(CHUNK)
                chunks += 1
            file.flush()
            os.fsync(file.fileno())
            megabytes = chunks * len(CHUNK) / 1e6
            written = megabytes / (time.monotonic() - start)
            # drop it from the page cache, so that it is read from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.monotonic()
            file.seek(0)
            while file.read(len(CHUNK)):
                pass
            read = megabytes / (time.monotonic() - start)
    except OSError as error:
        remedy = "make room, or choose another run.dir"
        return Check("FAIL", "disk speed", f"{folder}: {error.strerror}", remedy)
    speeds = f"{written:,.0f} MB/s written, {read:,.0f} MB/s read"
    result = f"{speeds}, {megabytes:,.0f} MB by one process"
    remedy = "slow for checkpoints: choose another run.dir, or set checkpoint.async_save"
    return warn_if(written < SLOW_MB, "disk speed", result, remedy)


def filesystem(folder: Path) -> str:
    """Return the type of the file system of `folder`, e.g. ext4 or nfs4."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    here = folder.resolve()
    types = (mounts[parent] for parent in (here, *here.parents) if parent in mounts)
    return next(types, "unknown file system")


def kept_bytes(cfg: Config, spec: ModelSpec) -> tuple[int, str]:
    """Return (bytes of all checkpoints that the run will keep, the same in words)."""
    one = checkpoint_bytes(cfg, spec)
    checkpoint, steps = cfg.checkpoint, cfg.run.num_steps
    every = checkpoint.every or steps
    saved = {*range(every, steps, every), steps}
    kept = len(saved)
    if checkpoint.keep_last:
        period = checkpoint.keep_every
        by_period = sum(step % period == 0 for step in saved) if period else 0
        # one more while the next is being written
        more = checkpoint.keep_last + 1 + (checkpoint.best_metric is not None)
        kept = min(kept, by_period + more)
    size = 2 if cfg.model.dtype == "bfloat16" else 4
    exported = full_model(spec).total * size if cfg.checkpoint.export_hf else 0
    model = " and the exported model" if exported else ""
    return one * kept + exported, f"{kept} checkpoint(s) of {one / GIB:.1f} GiB{model}"
