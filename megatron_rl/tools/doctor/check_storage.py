"""The disk that a run writes to: space against what checkpoints take, and speed, by writing and reading a file there."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.memory import whole_model
from megatron_rl.tools.doctor.check import GIB, Check

CHUNK = bytes(16 << 20)
MOST_CHUNKS = 32  # half a GiB
MOST_SECONDS = 2.0
SLOW_MB = 100.0  # a second: a checkpoint of a 30B model (420 GB) would take more than an hour


def check_disk(folder: Path, needed: int = 0, why: str = "", *, measure: bool) -> list[Check]:
    """Whether `folder` can be written, has `needed` bytes (for `why`), and, where `measure` says so, how fast it is."""
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            Check("FAIL", "run directory", f"{existing} is no folder that can be written", "choose another run.dir")
        ]
    return [check_space(folder, existing, needed, why), *([check_speed(existing)] if measure else [])]


def check_space(folder: Path, existing: Path, needed: int, why: str) -> Check:
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {filesystem(existing)}, {free / GIB:.1f} GiB free"
    if free < needed:
        remedy = f"{why} take about {needed / GIB:.1f} GiB: choose another run.dir, or set checkpoint.keep_last"
        return Check("FAIL" if free < needed / 2 else "WARN", "run directory", found, remedy)
    return Check("OK", "run directory", found)


def check_speed(folder: Path) -> Check:
    """Sequential writes that reach the disk (fsync), for at most MOST_SECONDS, and reading them back from it."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor_") as file:
            start, chunks = time.monotonic(), 0
            while chunks < MOST_CHUNKS and time.monotonic() - start < MOST_SECONDS:
                file.write(CHUNK)
                chunks += 1
            file.flush()
            os.fsync(file.fileno())
            written = chunks * len(CHUNK) / 1e6 / (time.monotonic() - start)
            os.posix_fadvise(
                file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
            )  # read from the disk, where the system allows it
            start = time.monotonic()
            file.seek(0)
            while file.read(len(CHUNK)):
                pass
            read = chunks * len(CHUNK) / 1e6 / (time.monotonic() - start)
    except OSError as error:
        return Check("FAIL", "disk speed", f"{folder}: {error.strerror}", "make room, or choose another run.dir")
    found = f"{written:,.0f} MB/s written, {read:,.0f} MB/s read, {chunks * len(CHUNK) >> 20} MiB by one process"
    if written < SLOW_MB:
        return Check(
            "WARN", "disk speed", found, "slow for checkpoints: choose another run.dir, or set checkpoint.async_save"
        )
    return Check("OK", "disk speed", found)


def filesystem(folder: Path) -> str:
    """Type of the file system that holds `folder`, e.g. ext4 or nfs4."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    here = folder.resolve()
    return next((mounts[parent] for parent in (here, *here.parents) if parent in mounts), "unknown file system")


def checkpoint_bytes(cfg: Config, spec: ModelSpec) -> tuple[int, str]:
    """(bytes of all that the run will keep, in words): weights, Adam's two moments and, of 16-bit weights, their float32 copy."""
    whole = whole_model(spec)
    elements, size = whole.dense + whole.experts, 2 if cfg.model.dtype == "bfloat16" else 4
    one = elements * (size + 8 + (4 if size == 2 else 0))
    saves = 1 + (cfg.run.num_steps - 1) // cfg.checkpoint.every if cfg.checkpoint.every else 1
    kept = min(saves, cfg.checkpoint.keep_last + 1) if cfg.checkpoint.keep_last else saves
    exported = elements * size if cfg.checkpoint.export_hf else 0
    return (
        one * kept + exported,
        f"{kept} checkpoint(s) of {one / GIB:.1f} GiB{' and the exported model' if exported else ''}",
    )
