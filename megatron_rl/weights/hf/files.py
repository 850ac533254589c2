"""HF checkpoint directories as files: what is in them without reading it, tensors or rows of them, shards written in a stream.

They are read into memory of their own: pages of a mapped file would count as this process's, too.  Pickle weights (.bin) are
refused unless the caller trusts them.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.weights.hf.mapping import Geometry, entries

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STORED = DTYPES | {"F8_E4M3": torch.float8_e4m3fn}  # what can be read and written; a model's own weights are of DTYPES
NAMES = {dtype: name for name, dtype in STORED.items()}
SHOWN = 5
BLOCK_BYTES = 4 * 2**20
"""What a conversion holds of a tensor at a time; a processor's cache holds it, too."""


class CheckpointError(ValueError):
    """An HF checkpoint that cannot be used; the message names the tensors or the file, and the rule."""


class Header(NamedTuple):
    """dtype: safetensors' name of it (F32, BF16, ...); start: of its bytes in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0

    def torch_dtype(self) -> torch.dtype:
        """Raises CheckpointError for a kind that is never a weight's."""
        if self.dtype not in STORED:
            raise CheckpointError(f"{self.file}: a tensor is {self.dtype}; supported: {', '.join(STORED)}")
        return STORED[self.dtype]


class HFFiles:
    """The tensors of an HF checkpoint directory.  Close it, or use it as a context manager.

    Raises CheckpointError where there are no weights, files of the index are missing, or all weights are pickles and
    `trust_pickle` is not set.
    """

    def __init__(self, path: Path, *, trust_pickle: bool = False) -> None:
        self.path = Path(path)
        self._open: tuple[Path, BinaryIO] | None = None
        if trust_pickle and not any(self.path.glob("*.safetensors")):
            self.pickles, self.headers = read_pickles(self.path)
        else:
            self.pickles, self.headers = {}, read_headers(self.path)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as stored."""
        shape = self.headers[name].shape
        return self.read_rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor, as stored; a scalar is one row."""
        if name in self.pickles:
            return self.pickles[name].reshape(self.headers[name].shape or (1,))[start:stop]
        header = self.headers[name]
        if header.dtype not in STORED:
            raise CheckpointError(f"{self.path}: tensor {name} is {header.dtype}; supported: {', '.join(STORED)}")
        if self._open is None or self._open[0] != header.file:
            self.close()
            self._open = (header.file, header.file.open("rb"))
        tensor = torch.empty((stop - start, *header.shape[1:]), dtype=STORED[header.dtype])
        row_bytes = tensor.nbytes // max(stop - start, 1)
        if not read_into(tensor, self._open[1], header.start + start * row_bytes):
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {header.file.name} ends before it does")
        return tensor

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def __enter__(self) -> HFFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def check(self, spec: Geometry) -> None:
        """Raise one CheckpointError that names every tensor missing, left over, of another shape or not floating point."""
        want = {name: shape for entry in entries(spec) for name, shape in entry.hf}
        have = {name: header for name, header in self.headers.items() if not is_left_out(name, spec)}
        problems = [
            listed("is missing", want.keys() - have.keys()),
            listed("is not part of the model", have.keys() - want.keys()),
            listed(
                "has another shape than config.json means",
                (
                    f"{n} {list(have[n].shape)}, not {list(s)}"
                    for n, s in want.items()
                    if n in have and have[n].shape != s
                ),
            ),
            listed(
                f"is not {', '.join(NAMES[each].lower() for each in DTYPES.values())}",
                (f"{n} {have[n].dtype}" for n in want.keys() & have.keys() if have[n].dtype not in DTYPES),
            ),
        ]
        said = "; ".join(problem for problem in problems if problem)
        if said:
            raise CheckpointError(f"{self.path}: {said}; is config.json of this checkpoint?")


class Outline(NamedTuple):
    """What config.json says about tensors that a checkpoint may hold and the model has not; a Geometry says it, too."""

    tie_embeddings: bool
    num_layers: int
    mtp_layers: int


def outline(path: Path) -> Outline:
    """Of the config.json in this directory; without one nothing is left out."""
    file = Path(path) / "config.json"
    hf = json.loads(file.read_text()) if file.is_file() else {}
    mtp = hf.get("num_nextn_predict_layers") or 0
    return Outline(bool(hf.get("tie_word_embeddings")), hf.get("num_hidden_layers", 0), mtp)


def is_left_out(name: str, spec: Geometry | Outline) -> bool:
    """Tensors that a checkpoint may hold and the model has not: the tied head's copy, multi-token prediction's layers."""
    if spec.tie_embeddings and name == "lm_head.weight":
        return True
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and spec.num_layers <= int(parts[2]) < spec.num_layers + spec.mtp_layers


def is_finite(tensor: torch.Tensor) -> bool:
    """In one pass without intermediate results: both extremes are NaN where one value is."""
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax()) if tensor.numel() else True


def listed(rule: str, names: Iterable[str]) -> str:
    """ "tensor a, b, ... (7 in all) RULE", or "" for none."""
    found = sorted(names)
    if not found:
        return ""
    more = f", ... ({len(found)} in all)" if len(found) > SHOWN else ""
    return f"tensor {', '.join(found[:SHOWN])}{more} {rule}"


def tensor_files(path: Path) -> dict[str, Path]:
    """HF tensor name -> safetensors file that holds it, from the index where there is one."""
    path = Path(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise CheckpointError(f"{index}: names files that are not there: {', '.join(absent)}")
        return files
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as reader:
                files.update(dict.fromkeys(reader.keys(), file))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error
    if not files:
        pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
        reason = f"only pickle weights ({pickles[0].name}), which can run code; convert them to" if pickles else "no"
        raise CheckpointError(f"{path}: {reason} safetensors files" + (" first" if pickles else " there"))
    return files


def read_headers(path: Path) -> dict[str, Header]:
    """Name -> header of every tensor of the safetensors files."""
    named = tensor_files(path)
    headers = {}
    for file in sorted(set(named.values())):
        try:
            with safe_open(file, framework="pt"):  # checks sizes and offsets against the file's
                pass
        except Exception as error:
            raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            content = json.loads(stream.read(length))
        for name, about in content.items():
            if name != "__metadata__":
                start = 8 + length + about["data_offsets"][0]
                headers[name] = Header(file, tuple(about["shape"]), about["dtype"], start)
    absent = sorted(named.keys() - headers.keys())
    if absent:
        raise CheckpointError(f"{path}: the index names tensors that its files have not, first {absent[0]}")
    return headers


def read_pickles(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Header]]:
    """Tensors of pytorch_model*.bin, mapped, by torch's restricted unpickler (tensors only, no code)."""
    tensors: dict[str, torch.Tensor] = {}
    headers = {}
    for file in sorted(path.glob("pytorch_model*.bin")):
        content = load_plain(file, mmap=True)
        if others := [name for name, value in content.items() if not isinstance(value, torch.Tensor)]:
            raise CheckpointError(f"{file}: {others[0]} is not a tensor, rule: a file of tensors alone")
        for name, tensor in content.items():
            tensors[name] = tensor
            headers[name] = Header(file, tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype)))
    if not tensors:
        raise CheckpointError(f"{path}: no safetensors and no pytorch_model*.bin files there")
    return tensors, headers


def load_plain(file: Path, *, mmap: bool = False) -> dict[str, Any]:
    """A dict that torch.save wrote, by torch's restricted unpickler.  Raises CheckpointError, running nothing, for one that holds
    more than tensors and plain values."""
    try:
        content = torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{file}: not a file of tensors and plain values alone: {refusal(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, rule: a dict")
    return content


def refusal(error: BaseException) -> str:
    """What torch's restricted unpickler objects to, without its advice to unpickle everything."""
    text = str(error).split("WeightsUnpickler error: ")[-1].split(". Please use")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


def row_blocks(start: int, count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """[first, stop) of successive blocks of these rows, each of at most BLOCK_BYTES or one row."""
    step = max(BLOCK_BYTES // max(row_bytes, 1), 1)
    for first in range(start, start + count, step):
        yield first, min(first + step, start + count)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def read_into(tensor: torch.Tensor, stream: BinaryIO, start: int) -> bool:
    """Fill a contiguous tensor with the bytes at `start`; False where the file ends before."""
    stream.seek(start)
    return bool(stream.readinto(as_bytes(tensor)) == tensor.nbytes)  # type: ignore[attr-defined]


class Piece(NamedTuple):
    """A tensor that a shard will hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ShardWriter:
    """A safetensors file written piece by piece in their order, each in one or more blocks of rows."""

    def __init__(self, file: Path, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for piece in self.pieces:
            offsets = [start, start + piece.nbytes]
            header[piece.name] = {"dtype": NAMES[piece.dtype], "shape": list(piece.shape), "data_offsets": offsets}
            start = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.stream = file.open("wb")
        self.stream.write(len(text).to_bytes(8, "little") + text)
        self._next = 0

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        piece = self.pieces[self._next]
        left = piece.nbytes
        for block in blocks:
            assert (name, block.dtype) == (piece.name, piece.dtype), f"{name} {block.dtype}, due: {piece}"
            left -= self.stream.write(as_bytes(block.contiguous()))
        assert not left, f"{name}: {left} bytes are missing of {piece}"
        self._next += 1

    def close(self) -> None:
        """Raise unless every tensor was written; the file is on the disk then."""
        assert self._next == len(self.pieces), f"{len(self.pieces) - self._next} tensors were not written"
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
