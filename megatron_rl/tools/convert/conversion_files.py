"""The files around a conversion: the hidden directory where the output takes shape, companions, index, what is on the disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.export import WEIGHT_SUFFIXES
from megatron_rl.weights.hf.files import DTYPES, CheckpointError, HFFiles, Piece, ShardWriter, is_left_out
from megatron_rl.weights.hf.mapping import Entry

MANIFEST = "conversion.json"


@dataclass(frozen=True)
class Work:
    """Which part of the units is this process's, and how it talks: say() speaks on rank 0 alone."""

    rank: int
    world: int
    log: Callable[[str], None]


@dataclass(frozen=True)
class Rest:
    """Tensors of an HF directory that the model has not, to be passed on."""

    path: Path
    names: tuple[str, ...]

    def copy_to(self, file: Path) -> None:
        if not self.names:
            return
        with HFFiles(self.path) as files:
            headers = [(name, files.headers[name]) for name in self.names]
            writer = ShardWriter(file, [Piece(name, header.shape, DTYPES[header.dtype]) for name, header in headers])
            for name in self.names:
                writer.write(name, [files.read(name)])
            writer.close()


def files_of_rest(config: Path, spec: ModelSpec) -> Rest:
    if not any(config.glob("*.safetensors")):
        return Rest(config, ())
    with HFFiles(config) as files:
        names = tuple(name for name in files.headers if is_left_out(name, spec) and name != "lm_head.weight")
    return Rest(config, names)


def open_place(out: Path, job: dict[str, Any], work: Work) -> Path | None:
    """The hidden directory where `out` takes shape, with what an earlier try of the same job left; None if `out` is complete.

    Raises CheckpointError where `out` is there and of another job.
    """
    place = out.parent / f".{out.name}.partial"
    found = "new"
    if work.rank == 0:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            manifest = out / MANIFEST
            found = "done" if manifest.is_file() and json.loads(manifest.read_text()) == job else "other"
        elif (place / MANIFEST).is_file() and json.loads((place / MANIFEST).read_text()) == job:
            work.log(f"going on with {place}: {len(list((place / 'journal').iterdir()))} files are there")
        else:
            shutil.rmtree(place, ignore_errors=True)
            (place / "journal").mkdir(parents=True)
            write_text(place / MANIFEST, json.dumps(job))
    found = gather(found)[0]
    if found == "other":
        raise CheckpointError(f"--out {out}: holds something else; give a new directory, or remove it")
    return None if found == "done" else place


def finish(place: Path, out: Path, job: dict[str, Any]) -> None:
    """Make `place` the output, whole and on the disk."""
    shutil.rmtree(place / "journal")
    for file in place.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
        with_fd(file)
    place.chmod(0o755)
    with_fd(place)
    if out.exists():
        out.rmdir()  # empty: open_place has seen to that
    os.rename(place, out)
    with_fd(out.parent)


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """config.json, generation config, tokenizer and every other small file without weights, as they are.

    With a dtype, config.json says so: loaders go by it.
    """
    target.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        if (
            file.is_file()
            and not file.name.startswith(".")
            and not file.name.endswith(WEIGHT_SUFFIXES)
            and file.name != MANIFEST
        ):
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    keys = {"torch_dtype", "dtype"} & config.keys()
    if dtype is not None and keys:
        text = json.dumps({**config, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}, indent=2)
        (target / "config.json").write_text(text + "\n")


def write_index(
    place: Path, units: Sequence[Sequence[Entry]], pieces: Callable[[Entry], list[Piece]], rest: Rest, total: int
) -> None:
    files, size = {}, 0
    for index, unit in enumerate(units):
        for piece in (piece for entry in unit for piece in pieces(entry)):
            files[piece.name] = shard_name(index, total)
            size += piece.nbytes
    files |= dict.fromkeys(rest.names, shard_name(total - 1, total))
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}, indent=2)
    (place / "model.safetensors.index.json").write_text(text + "\n")


def shard_name(index: int, total: int) -> str:
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def fingerprint(folder: Path) -> list[list[Any]]:
    """Name, size and time of every file: a changed source is another job."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def write_text(file: Path, text: str) -> None:
    """Whole or not at all."""
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
        sync(stream)
    os.replace(name, file)


def sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def with_fd(path: Path) -> None:
    """Bring a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    gather(None)
