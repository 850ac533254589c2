"""The files around a conversion: the hidden directory in which the output is written, companions,
and tensors that are copied unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.folder import sync, write_text
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.files import CheckpointError, HFFiles, companions, is_left_out
from megatron_rl_tools.convert.shard_writer import Piece, ShardWriter

MANIFEST = "conversion.json"
Job = Mapping[str, object]
"""A description of a conversion in plain values: equal jobs have equal outputs."""

T = TypeVar("T")


@dataclass(frozen=True)
class FileWork:
    """This process's share of the work."""

    rank: int
    world: int
    log: Callable[[str], None]
    """Prints a line, on rank 0 only."""


@dataclass(frozen=True)
class Rest:
    """Tensors of an HF directory that do not belong to the model and are copied unchanged."""

    path: Path
    names: tuple[str, ...]

    def copy_to(self, file: Path) -> None:
        if not self.names:
            return
        with HFFiles(self.path) as files:
            headers = [files.headers[name] for name in self.names]
            pieces = [Piece(header.name, header.shape, header.torch_dtype()) for header in headers]
            writer = ShardWriter(file, pieces)
            for name in self.names:
                writer.write(name, [files.read(name)])
            writer.close()


def files_of_rest(config: Path, spec: ModelSpec) -> Rest:
    """Return the tensors of multi-token prediction; the copy of a tied head is left out."""
    if not any(config.glob("*.safetensors")):
        return Rest(config, ())
    with HFFiles(config) as files:
        names = tuple(
            name for name in files.headers if is_left_out(name, spec) and name != "lm_head.weight"
        )
    return Rest(config, names)


def open_place(out: Path, job: Job, work: FileWork) -> Path | None:
    """Open the hidden directory for the output, with the files of an earlier attempt of the same
    job; returns None if `out` is complete.

    Raises CheckpointError if `out` exists and belongs to another job.
    """
    place = out.parent / f".{out.name}.partial"
    state = "new"
    if work.rank == 0:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            manifest = out / MANIFEST
            is_same = manifest.is_file() and json.loads(manifest.read_text()) == job
            state = "done" if is_same else "other"
        elif (place / MANIFEST).is_file() and json.loads((place / MANIFEST).read_text()) == job:
            complete = len(list((place / "journal").iterdir()))
            work.log(f"continuing {place}: {complete} files are complete")
        else:
            shutil.rmtree(place, ignore_errors=True)
            (place / "journal").mkdir(parents=True)
            write_text(place / MANIFEST, json.dumps(job))
    state = gather_digests(state)[0]
    if state == "other":
        raise CheckpointError(
            f"--out {out}: has other content; choose a new directory, or remove it"
        )
    return None if state == "done" else place


def finish_files(place: Path, out: Path, job: Job) -> None:
    """Make `place` the output, complete and flushed to the disk."""
    shutil.rmtree(place / "journal")
    # on the disk before the rename: after a crash `out` is complete or missing
    for file in place.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
        sync(file)
    place.chmod(0o755)
    sync(place)
    if out.exists():
        out.rmdir()  # open_place made sure that it is empty
    os.rename(place, out)
    sync(out.parent)


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config.json, generation config, tokenizer and every other file without weights.

    With a dtype, config.json gets it: loaders read it from there.
    """
    target.mkdir(exist_ok=True)
    for file in companions(source):
        if file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    keys = {"torch_dtype", "dtype"} & config.keys()
    if dtype is not None and keys:
        config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def shard_name(index: int, total: int) -> str:
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def fingerprint(folder: Path) -> list[list[str | int]]:
    """Return name, size and time of every file: a changed source makes another job."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        [str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]


def gather_digests(value: T) -> list[T]:
    """Return the values of all ranks.  Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def barrier() -> None:
    gather_digests(None)
