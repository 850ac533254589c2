"""A stream of HF tensors -> an HF checkpoint on disk; every source writes its own files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import HFTensor, batches
from megatron_rl.weights.hf.files import (
    CheckpointError,
    companions,
    is_left_out,
    outline,
    read_headers,
    write_dtype,
    write_index,
)


def write_hf_checkpoint(
    tensors: Iterable[HFTensor],
    source_dir: Path,
    out_dir: Path,
    ranks: Ranks,
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Exhaust `tensors` and write them as an HF checkpoint at `out_dir`.  Collective.

    All ranks must reach `out_dir`.  config.json, tokenizer and every other file that has no weights
    are copied from `source_dir`; config.json gets the dtype of the tensors.  The directory appears
    complete or not at all, replacing one that exists.  Files are world-readable, since servers may
    run as another user.  The ranks of a machine share `max_shard_bytes`, as each may have one file
    in host memory.  Raises CheckpointError where the names differ from the weights in `source_dir`
    (if it has any).
    """
    # decided on rank 0, so that every rank numbers the files in the same way
    most_bytes = ranks.on_rank_0(
        lambda: max_shard_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), CheckpointError
    )
    temporary = ranks.on_rank_0(lambda: make_temporary(out_dir), CheckpointError)
    stream = iter(tensors)
    try:
        ranks.together(
            lambda: write_files(stream, temporary, most_bytes, ranks.rank), CheckpointError
        )
        ranks.on_rank_0(
            lambda: complete_checkpoint(temporary, source_dir, out_dir), CheckpointError
        )
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def make_temporary(out_dir: Path) -> Path:
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # beside it: a folder can be renamed within one file system only
    return Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))


def write_files(stream: Iterator[HFTensor], folder: Path, most_bytes: int, rank: int) -> None:
    """Write this rank's safetensors files, each of at most `most_bytes` or one tensor.

    Rank 0 also writes the index of all files.
    """
    files: dict[str, str] = {}
    total = 0
    try:
        # tensors leave the GPU at once: a file is larger than what it has left
        on_host = (
            tensor._replace(tensor=None if tensor.tensor is None else tensor.tensor.cpu())
            for tensor in stream
        )
        for number, batch in enumerate(batches(on_host, most_bytes), 1):
            file = f"model-{number:05d}.safetensors"
            values = {item.name: item.tensor for item in batch.tensors if item.tensor is not None}
            if values:
                save_file(values, folder / file, metadata={"format": "pt"})
            files.update((item.name, file) for item in batch.tensors)
            total += batch.num_bytes
    finally:
        drain(stream)  # the export is collective: a full disk of this rank must not stop the others
    if rank == 0:
        write_index(folder, files, total)


def drain(stream: Iterator[object]) -> None:
    for _ in stream:
        pass


def complete_checkpoint(temporary: Path, source_dir: Path, out_dir: Path) -> None:
    """Check the files, add those without weights, and replace `out_dir`."""
    _check_against_source(temporary, source_dir)  # before anything is replaced
    for file in companions(source_dir):
        shutil.copyfile(file, temporary / file.name)
    dtypes = {
        header.torch_dtype()
        for name, header in read_headers(temporary).items()
        if not name.endswith("e_score_correction_bias")  # always float32
    }
    if len(dtypes) == 1 and (temporary / "config.json").is_file():
        write_dtype(temporary, dtypes.pop())
    for file in temporary.iterdir():  # mkdtemp and safetensors create them for the owner only
        file.chmod(0o644)
    temporary.chmod(0o755)
    _replace(temporary, out_dir)


def _check_against_source(folder: Path, source_dir: Path) -> None:
    """Raise CheckpointError unless exactly the original names were written.

    A server skips a name that it does not know without an error.
    """
    names = set(read_headers(folder))
    if not any(source_dir.glob("*.safetensors")):
        return
    model = outline(source_dir)
    expected = {name for name in read_headers(source_dir) if not is_left_out(name, model)}
    if names != expected:
        first = min(names ^ expected)
        raise CheckpointError(
            f"{source_dir}: the exported tensor names differ from the weights there, first {first}"
        )


def _replace(temporary: Path, out_dir: Path) -> None:
    if not out_dir.exists():
        os.rename(temporary, out_dir)
        return
    # a directory cannot be renamed over another one that has files
    # two renames: for a moment there is no directory, but never half a one
    aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old.", dir=out_dir.parent))
    os.rename(out_dir, aside / "old")
    os.rename(temporary, out_dir)
    shutil.rmtree(aside)
