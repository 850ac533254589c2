"""HF checkpoint directories as files: their tensors, and what is known without reading those.

Tensors are read into newly allocated memory: pages of a mapped file would count as this process's,
too.  Pickle weights (.bin) are refused unless the caller trusts them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import safe_open

from megatron_rl.config import ConfigError
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import entries

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the dtypes that a model's weights may have."""
STORED = DTYPES | {"F8_E4M3": torch.float8_e4m3fn}
"""The dtypes that can be read and written."""
NAMES = {dtype: name for name, dtype in STORED.items()}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
SHOWN = 5


class CheckpointError(ConfigError):
    """An HF checkpoint that cannot be used.

    The message names the tensors or the file, and the rule.
    """


class TensorHeader(NamedTuple):
    """A tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the dtype (F32, BF16, ...)."""
    start: int = 0
    """Offset of its first byte in the file."""

    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype.  Raises CheckpointError for a dtype that weights never have."""
        if self.dtype not in STORED:
            raise CheckpointError(
                f"{self.file}: tensor {self.name} is {self.dtype}; supported: {', '.join(STORED)}"
            )
        return STORED[self.dtype]


class HFFiles:
    """The tensors of an HF checkpoint directory.  Close it, or use it as a context manager.

    Raises CheckpointError where there are no weights, where files of the index are missing, or
    where all weights are pickles and `trust_pickle` is not set.
    """

    def __init__(self, path: Path, *, trust_pickle: bool = False) -> None:
        self.path = Path(path)
        self._open: tuple[Path, BinaryIO] | None = None
        if trust_pickle and not any(self.path.glob("*.safetensors")):
            self.pickles, self.headers = read_pickles(self.path)
        else:
            self.pickles, self.headers = {}, read_headers(self.path)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, as stored."""
        shape = self.headers[name].shape
        return self.read_rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of a tensor, as stored; a scalar is one row."""
        header = self.headers[name]
        if name in self.pickles:
            return self.pickles[name].reshape(header.shape or (1,))[start:stop]
        tensor = torch.empty((stop - start, *header.shape[1:]), dtype=header.torch_dtype())
        # one open file: a checkpoint may have hundreds
        if self._open is None or self._open[0] != header.file:
            self.close()
            self._open = (header.file, header.file.open("rb"))
        row_bytes = tensor.nbytes // max(stop - start, 1)
        if not read_into(tensor, self._open[1], header.start + start * row_bytes):
            raise CheckpointError(
                f"{self.path}: tensor {name} cannot be read: {header.file.name} ends before its"
                " values do"
            )
        return tensor

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def __enter__(self) -> HFFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self, spec: ModelSpec) -> None:
        """Raise one CheckpointError that names every tensor that does not fit the model.

        It is missing, left over, of another shape or not floating point.
        """
        expected = {name: shape for entry in entries(spec) for name, shape in entry.hf}
        stored = {
            name: header for name, header in self.headers.items() if not is_left_out(name, spec)
        }
        both = {name: (shape, stored[name]) for name, shape in expected.items() if name in stored}
        reshaped = (
            f"{name} {list(header.shape)}, not {list(shape)}"
            for name, (shape, header) in both.items()
            if header.shape != shape
        )
        dtypes = ", ".join(NAMES[dtype].lower() for dtype in DTYPES.values())
        not_floating = (
            f"{name} {header.dtype}"
            for name, (_, header) in both.items()
            if header.dtype not in DTYPES
        )
        problems = [
            listed("is missing", expected.keys() - stored.keys()),
            listed("is not part of the model", stored.keys() - expected.keys()),
            listed("has another shape than config.json means", reshaped),
            listed(f"is not {dtypes}", not_floating),
        ]
        if problem := "; ".join(filter(None, problems)):
            raise CheckpointError(
                f"{self.path}: {problem}; does config.json belong to this checkpoint?"
            )


class Outline(NamedTuple):
    """The parts of config.json that tell which tensors of a checkpoint the model does not have.

    A ModelSpec has the same fields.
    """

    tie_embeddings: bool
    num_layers: int
    mtp_layers: int


def outline(path: Path) -> Outline:
    """Read the outline of the config.json in this directory; without one no tensor is left out."""
    file = Path(path) / "config.json"
    hf = json.loads(file.read_text()) if file.is_file() else {}
    # some configs have null
    mtp = hf.get("num_nextn_predict_layers") or 0
    return Outline(bool(hf.get("tie_word_embeddings")), hf.get("num_hidden_layers", 0), mtp)


def is_left_out(name: str, spec: ModelSpec | Outline) -> bool:
    """Return True where the model lacks this tensor of a checkpoint.

    That is a tied head's copy, or a layer of multi-token prediction.  These layers come after the
    decoder's (DeepSeek, GLM), or under a name of their own (Qwen3-Next, EXAONE), which config.json
    may not count.
    """
    if spec.tie_embeddings and name == "lm_head.weight":
        return True
    parts = name.split(".")
    if "mtp" in parts:
        return True
    layer = parts[2] if parts[:2] == ["model", "layers"] and len(parts) > 2 else ""
    return layer.isdecimal() and spec.num_layers <= int(layer) < spec.num_layers + spec.mtp_layers


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True where no value is NaN or infinite.

    No mask of the tensor's size is made: both extremes are NaN where one value is.
    """
    if not tensor.numel():
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def listed(rule: str, names: Iterable[str]) -> str:
    """Return the text "tensor a, b, ... (7 in all) RULE", or "" for no names."""
    ordered = sorted(names)
    if not ordered:
        return ""
    more = f", ... ({len(ordered)} in all)" if len(ordered) > SHOWN else ""
    return f"tensor {', '.join(ordered[:SHOWN])}{more} {rule}"


def num_tensors(path: Path) -> int:
    """Return the number of tensors in the safetensors files; 0 without any file."""
    return len(read_headers(path)) if any(path.glob("*.safetensors")) else 0


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Return name -> header of every tensor of the safetensors files.

    A tensor in several files is the one in the file that the index names.  Raises CheckpointError
    for a file that is damaged, where the files, or tensors of them that the index names, are
    missing, and where two files have one tensor and no index says which one counts.
    """
    index = path / "model.safetensors.index.json"
    try:
        named = dict(json.loads(index.read_text())["weight_map"]) if index.is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: no index of tensors ({error!r}); copy it again") from error
    files = sorted({path / file for file in named.values()} or path.glob("*.safetensors"))
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{index}: names files that do not exist: {', '.join(absent)}; copy it again"
        )
    if not files:
        pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
        raise CheckpointError(
            f"{path}: only pickle weights ({pickles[0].name}), which can run code; convert them to"
            " safetensors files first"
            if pickles
            else f"{path}: no safetensors files there"
        )
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            # checks sizes and offsets against the size of the file
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:
            raise CheckpointError(
                f"{file}: not a complete safetensors file: {error}; copy it again"
            ) from error
        with file.open("rb") as stream:
            # the format: 8 bytes with the length of a JSON header, the header, the values
            length = int.from_bytes(stream.read(8), "little")
            content = json.loads(stream.read(length))
        content.pop("__metadata__", None)
        for name, about in content.items():
            if named.get(name, file.name) != file.name:
                continue
            if name in headers:
                raise CheckpointError(
                    f"{path}: tensor {name} is in two files, {headers[name].file.name} and"
                    f" {file.name}; remove the one that is not of this checkpoint"
                )
            start = 8 + length + about["data_offsets"][0]
            headers[name] = TensorHeader(name, file, tuple(about["shape"]), about["dtype"], start)
    if absent := sorted(named.keys() - headers.keys()):
        raise CheckpointError(
            f"{path}: the index names tensors that its files do not have, first {absent[0]};"
            " they are not of one checkpoint"
        )
    return headers


def read_pickles(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, TensorHeader]]:
    """Return the tensors of pytorch_model*.bin, mapped, and their headers.

    They are read by torch's restricted unpickler: tensors only, no code.
    """
    tensors: dict[str, torch.Tensor] = {}
    headers = {}
    for file in sorted(path.glob("pytorch_model*.bin")):
        for name, tensor in load_plain(file, mmap=True).items():
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"{file}: {name} is not a tensor; the file must hold only tensors"
                )
            tensors[name] = tensor
            headers[name] = TensorHeader(
                name, file, tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype))
            )
    if not tensors:
        raise CheckpointError(f"{path}: no safetensors and no pytorch_model*.bin files there")
    return tensors, headers


def load_plain(file: Path, *, mmap: bool = False) -> dict[str, object]:
    """Read a dict that torch.save wrote, by torch's restricted unpickler.

    Raises CheckpointError, without running code of it, for a file that has more than tensors and
    plain values.
    """
    try:
        content = torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"{file}: not a file of tensors and plain values alone: {refusal(error)}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, must hold a dict")
    return content


def refusal(error: BaseException) -> str:
    """Return the objection of torch's restricted unpickler.

    Its advice to unpickle everything is left out.
    """
    text = str(error).split("WeightsUnpickler error: ")[-1].split(". Please use")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def read_into(tensor: torch.Tensor, stream: BinaryIO, start: int) -> bool:
    """Fill a contiguous tensor with the bytes at `start` of a file.

    Returns False where the file ends before the tensor does.
    """
    stream.seek(start)
    count: int = stream.readinto(tensor_bytes(tensor))  # type: ignore[attr-defined]
    return count == tensor.nbytes


def companions(source: Path) -> list[Path]:
    """Return config.json, tokenizer and every other file of an HF directory that has no weights."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(WEIGHT_SUFFIXES)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in config.json."""
    return str(dtype).removeprefix("torch.")


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Write the dtype of a checkpoint's tensors into its config.json, from which loaders read it.

    A config.json that names no dtype stays as it is.
    """
    config = json.loads((folder / "config.json").read_text())
    name = dtype_name(dtype)
    if keys := [key for key in ("dtype", "torch_dtype") if config.get(key, name) != name]:
        config |= dict.fromkeys(keys, name)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_index(folder: Path, files: Mapping[str, str], total_size: int) -> None:
    """Write the index of a checkpoint of several files.

    `files` maps a tensor's name to its file's; `total_size` is the bytes of all tensors.
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
