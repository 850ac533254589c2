"""The files around a conversion: the hidden directory where the output is written, companions,
tensors that are only copied.
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
"""What a conversion does, as plain values: equal jobs have equal outputs."""

T = TypeVar("T")


@dataclass(frozen=True)
class FileWork:
    """This process's share of the work.  log: prints a line, on rank 0 only."""

    rank: int
    world: int
    log: Callable[[str], None]


@dataclass(frozen=True)
class Rest:
    """Tensors of an HF directory that are no part of the model, to be copied."""

    path: Path
    names: tuple[str, ...]

    def copy_to(self, file: Path) -> None:
        if not self.names:
            return
        with HFFiles(self.path) as files:
            headers = [files.headers[name] for name in self.names]
            writer = ShardWriter(
                file, [Piece(each.name, each.shape, each.torch_dtype()) for each in headers]
            )
            for name in self.names:
                writer.write(name, [files.read(name)])
            writer.close()


def files_of_rest(config: Path, spec: ModelSpec) -> Rest:
    """Of multi-token prediction; the copy that a tied head may have is left out."""
    if not any(config.glob("*.safetensors")):
        return Rest(config, ())
    with HFFiles(config) as files:
        names = tuple(
            name for name in files.headers if is_left_out(name, spec) and name != "lm_head.weight"
        )
    return Rest(config, names)


def open_place(out: Path, job: Job, work: FileWork) -> Path | None:
    """The hidden directory for the output, with what an earlier try of the same job left in it;
    None if `out` is complete.

    Raises CheckpointError where `out` exists and is of another job.
    """
    place = out.parent / f".{out.name}.partial"
    found = "new"
    if work.rank == 0:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            manifest = out / MANIFEST
            found = (
                "done"
                if manifest.is_file() and json.loads(manifest.read_text()) == job
                else "other"
            )
        elif (place / MANIFEST).is_file() and json.loads((place / MANIFEST).read_text()) == job:
            work.log(
                f"continuing {place}: {len(list((place / 'journal').iterdir()))} files are complete"
            )
        else:
            shutil.rmtree(place, ignore_errors=True)
            (place / "journal").mkdir(parents=True)
            write_text(place / MANIFEST, json.dumps(job))
    found = gather_digests(found)[0]
    if found == "other":
        raise CheckpointError(
            f"--out {out}: has other content; choose a new directory, or remove it"
        )
    return None if found == "done" else place


def finish_files(place: Path, out: Path, job: Job) -> None:
    """Make `place` the output, complete and flushed to the disk."""
    shutil.rmtree(place / "journal")
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
    """Name, size and time of every file: a changed source is another job."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        [str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]


def gather_digests(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def barrier() -> None:
    gather_digests(None)
