"""HF safetensors checkpoint -> the parameters of this rank's megatron-core chunks, every tensor checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_rl.weights.mapping import Geometry, entries, find_entry, local_parameters, to_mcore


class Groups(Protocol):
    """This rank's process groups; engine.parallel.Parallel has them."""

    @property
    def rank(self) -> int: ...
    @property
    def tp_group(self) -> dist.ProcessGroup: ...
    @property
    def etp_group(self) -> dist.ProcessGroup: ...
    @property
    def ep_group(self) -> dist.ProcessGroup: ...
    @property
    def pp_group(self) -> dist.ProcessGroup: ...


class CheckpointError(ValueError):
    """An HF checkpoint that cannot be used; the message names the tensor or file and the rule."""


@torch.no_grad()
def load_hf(chunks: Iterable[Any], path: Path, spec: Geometry, groups: Groups) -> None:
    """Fill every parameter of `chunks` from the safetensors checkpoint at `path`, reading only what this rank needs.

    Raises CheckpointError, naming the tensor, where one is missing, left over, of another shape, not floating point or
    not finite, and for pickle checkpoints, which are refused.
    """
    parameters = local_parameters(chunks, spec, groups.ep_group.rank(), groups.ep_group.size())
    files = tensor_files(path)
    check_names(files, spec, path)
    with ExitStack() as stack:
        readers = {file: stack.enter_context(safe_open(file, framework="pt")) for file in set(files.values())}
        for name, parameter in parameters.items():
            entry = find_entry(name, spec)
            group = groups.etp_group if entry.rule.is_expert else groups.tp_group
            tensors = [_read(readers[files[hf]], hf, shape, path) for hf, shape in entry.hf]
            shard = to_mcore(entry, tensors, spec, group.rank(), group.size())
            if shard.shape != parameter.shape:
                raise CheckpointError(
                    f"{name}: the model wants shape {tuple(parameter.shape)}, got {tuple(shard.shape)}"
                )
            parameter.copy_(shard)


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
        with safe_open(file, framework="pt") as reader:
            files.update(dict.fromkeys(reader.keys(), file))
    if not files:
        pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
        reason = f"only pickle weights ({pickles[0].name}), which can run code; convert them to" if pickles else "no"
        raise CheckpointError(f"{path}: {reason} safetensors files" + (" first" if pickles else " there"))
    return files


def check_names(files: Iterable[str], spec: Geometry, path: Path) -> None:
    """Raise CheckpointError unless the checkpoint's tensor names are exactly the model's."""
    have, want = set(files), {name for entry in entries(spec) for name in entry.hf_names}
    if spec.tie_embeddings:
        have.discard("lm_head.weight")  # some checkpoints store the tied copy too
    for what, names in (("is missing", want - have), ("is not part of the model", have - want)):
        if names:
            first = sorted(names)[0]
            raise CheckpointError(
                f"{path}: tensor {first} {what} ({len(names)} such); is config.json of this checkpoint?"
            )


def _read(reader: Any, name: str, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    try:
        tensor = reader.get_tensor(name)
    except Exception as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, config.json means {shape}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}; supported: float32, bfloat16, float16")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: tensor {name} has values that are not finite; the file is damaged")
    return tensor
