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
class CopiedTensors:
    """Tensors of an HF directory that do not belong to the model and are copied unchanged."""

    path: Path
    pieces: tuple[Piece, ...] = ()
    trust_pickle: bool = False

    @property
    def names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def copy_to(self, file: Path) -> None:
        if not self.pieces:
            return
        with HFFiles(self.path, trust_pickle=self.trust_pickle) as files:
            writer = ShardWriter(file, self.pieces)
            for name in self.names:
                writer.write(name, [files.read(name)])
            writer.close()


def copied_tensors(path: Path, spec: ModelSpec, *, trust_pickle: bool = False) -> CopiedTensors:
    """Return the tensors of multi-token prediction; the copy of a tied head is left out."""
    if not trust_pickle and not any(path.glob("*.safetensors")):
        return CopiedTensors(path)
    with HFFiles(path, trust_pickle=trust_pickle) as files:
        pieces = tuple(
            Piece(name, header.shape, header.torch_dtype())
            for name, header in files.headers.items()
            if is_left_out(name, spec) and name != "lm_head.weight"
        )
    return CopiedTensors(path, pieces, trust_pickle)


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
        elif is_unfinished(place, job):
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


def is_unfinished(place: Path, job: Job) -> bool:
    """Return True if `place` has files of the same job and the journal of complete ones."""
    manifest = place / MANIFEST
    is_known = manifest.is_file() and (place / "journal").is_dir()
    return is_known and json.loads(manifest.read_text()) == job


def finish_files(place: Path, out: Path, job: Job) -> None:
    """Make `place` the output, complete and flushed to the disk."""
    # on the disk before the rename: after a crash `out` is complete or missing
    for file in place.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
        sync(file)
    place.chmod(0o755)
    sync(place)
    shutil.rmtree(place / "journal")  # last: a conversion that was killed above starts again
    if out.exists():
        out.rmdir()  # open_place made sure that it is empty
    os.rename(place, out)
    sync(out.parent)


def copy_companions(source: Path, target: Path) -> None:
    """Copy config.json, generation config, tokenizer and every other file without weights."""
    target.mkdir(exist_ok=True)
    for file in companions(source):
        if file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)


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
