"""Tensors of a run: safetensors files with tensors "ID:KIND", named by config/run_paths.py.

They are read with plain reads: safetensors maps a file into memory, and a run that writes the step
again while it is mapped would kill the viewer (SIGBUS).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatron_rl.config.run_paths import RunFolder, StepFile, replica_of
from megatron_rl.metrics.lines import MALFORMED

SCHEMA = "1"
MAX_HEADER = 256 * 2**20
"""The most bytes of a file's header."""
DTYPES = {
    "BOOL": "?",
    "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
"""Name in a safetensors header -> NumPy's name."""


class ShardError(ValueError):
    """A file of tensors that cannot be read; the message begins with its name."""


def tensor_file_name(folder: Path, writer: str, step: int) -> str:
    """Return the name of a replica's file, whether it exists or not; writer: "rollouts.dp1"."""
    run = RunFolder(folder)
    return run.name_of(run.tensors_of("rollouts", step, replica_of(writer)))


def own_files(folder: Path, files: Iterable[StepFile]) -> Iterator[StepFile]:
    """Yield the files that are the run's own, not links to elsewhere."""
    linked = [half for half in ("rollouts", "trained") if (folder / half).is_symlink()]
    for file in files:
        if file.path.parent.name not in linked and not file.path.is_symlink():
            yield file


def shard_files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes, time of the last change in ns) of the run's files of tensors."""
    run = RunFolder(folder)
    files = [*run.tensor_files("rollouts"), *run.tensor_files("trained")]
    for file in own_files(folder, files):
        with suppress(FileNotFoundError):  # a resumed run removes files
            stat = file.path.stat()
            yield file.name, stat.st_size, stat.st_mtime_ns


class TensorFile:
    """A file of tensors.

    Raises ShardError, which names the file, if it is missing, damaged, or of another schema.  The
    name must be one of the run's own files, not a path or a link to elsewhere.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, folder / name
        file = RunFolder(folder).file_named(name)
        if not file or file.kind != "safetensors" or not [*own_files(folder, [file])]:
            raise ShardError(f"{name}: not a file of the run")
        try:
            self._read_header()
        except FileNotFoundError:
            raise ShardError(f"{name}: not found") from None
        except (OSError, *MALFORMED) as error:
            raise ShardError(f"{name}: damaged or still being written: {error!r}") from error
        if self.schema != SCHEMA:
            raise ShardError(
                f"{name}: schema {self.schema}, must be {SCHEMA}: written by another version of"
                " megatron_rl"
            )

    def _read_header(self) -> None:
        """Read the header: its length in 8 bytes, then JSON, name -> dtype, shape and place."""
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in {size}")
            header = json.loads(file.read(length))
        self.schema = header.pop("__metadata__", {}).get("schema", SCHEMA)
        self._start = 8 + length
        self._entries: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
            start, end = entry["data_offsets"]
            is_inside = 0 <= start <= end <= size - self._start
            if end - start != math.prod(shape) * dtype.itemsize or not is_inside:
                raise ValueError(
                    f"{name}: bytes {start} to {end} do not hold {dtype} {list(shape)}"
                )
            self._entries[name] = dtype, shape, start

    @property
    def ids(self) -> list[str]:
        """Return the ids of the sequences in the file, sorted."""
        return sorted({name.rpartition(":")[0] for name in self._entries})

    def get(self, name: str, kind: str) -> np.ndarray | None:
        """Return the tensor "NAME:KIND", or None."""
        if f"{name}:{kind}" not in self._entries:
            return None
        dtype, shape, start = self._entries[f"{name}:{kind}"]
        place = self._start + start
        try:
            return np.fromfile(self.path, dtype, math.prod(shape), offset=place).reshape(shape)
        # the file may have been replaced by a shorter one since the header was read
        except (OSError, ValueError) as error:
            raise ShardError(f"{self.name}: {name}:{kind}: {error}") from error
