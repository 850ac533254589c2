"""megatron-core shards -> a stream of full HF tensors on global rank 0, and an HF checkpoint on disk.

The stream is collective: every rank must exhaust it.  No rank holds more than one parameter beyond its own (for experts: one
per expert-parallel rank).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.files import CheckpointError, companions, is_left_out, outline, read_headers, write_index
from megatron_rl.weights.hf.mapping import Entry, entries, local_parameters, shard_shape, to_hf

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.distributed import Parallel

HFStream = Iterator[tuple[str, torch.Tensor | None]]
"""(HF name, full tensor) on global rank 0, (HF name, None) on the other ranks."""


@torch.no_grad()
def export_hf(chunks: Iterable[GPTModel], spec: ModelSpec, parallel: Parallel) -> HFStream:
    """Yield every tensor of the HF checkpoint: contiguous, on the device and in the dtype of the model.  Collective.

    All ranks yield the same names in the same order.  A tensor may be a view of the live parameter: copy it to keep it beyond
    the next update.  Tensors come layer by layer, the experts of a layer in strides (first expert of each expert-parallel rank,
    then the second...).  With `overlap_param_gather`, parameters are stale after a step: call
    start_param_sync(force_sync=True) on the chunks first.
    """
    chunks = list(chunks)
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    like = next(iter(parameters.values()))  # the device of all parameters, and their dtype except for float32 rules
    stages = _stage_of_each(parameters, parallel)
    for named in _waves(spec, parallel.ep_size):
        wave = tuple(entry.held_by(chunks) for entry in named)
        mine = wave[parallel.ep_rank % len(wave)]  # all ranks share a wave of one
        stage = stages[mine.name]
        # only the ranks of one stage gather: the others have not got the parameter
        gathered = _gather_in_stage(mine, parameters, parallel) if parallel.pp_rank == stage else None
        shards = _send_to_rank0(gathered, wave, stage, parallel, like)
        for index, entry in enumerate(wave):
            if shards is None:
                yield from ((name, None) for name in entry.hf_names)
            else:
                yield from to_hf(entry, shards[index].unbind(), spec)


def write_hf_checkpoint(
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    source_dir: Path,
    out_dir: Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Exhaust `tensors` (see export_hf) and, where they are not None, write them as an HF checkpoint at `out_dir`.

    config.json, tokenizer and every other file that holds no weights are copied from `source_dir` unchanged.  The directory
    appears complete or not at all, replacing one that exists; files are world-readable, since servers may run as another user.
    Raises CheckpointError where the names differ from the weights in `source_dir` (if it has any).
    """
    present = ((name, tensor) for name, tensor in tensors if tensor is not None)
    first = next(present, None)  # on ranks that get no tensors this exhausts the stream
    if first is None:
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        files = _write_shards(chain([first], present), temporary, max_shard_bytes)
        _check_against_source(set(files), source_dir)  # before anything is replaced
        for file in companions(source_dir):
            shutil.copyfile(file, temporary / file.name)
        for file in temporary.iterdir():  # mkdtemp and safetensors create them for the owner only
            file.chmod(0o644)
        temporary.chmod(0o755)
        _replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _waves(spec: ModelSpec, ep_size: int) -> Iterator[tuple[Entry, ...]]:
    """What is gathered in one collective: one parameter, or the i-th local expert of every expert-parallel rank."""
    for (is_expert, _), group in groupby(entries(spec), key=lambda entry: (entry.rule.is_expert, entry.layer)):
        if not is_expert:
            yield from ((entry,) for entry in group)
            continue
        # fc1, fc2 of expert 0, then of expert 1 ...
        experts = sorted(group, key=lambda entry: (entry.expert, entry.name))
        stride = len(experts) // ep_size
        yield from (tuple(experts[start::stride]) for start in range(stride))


def _stage_of_each(parameters: dict[str, torch.Tensor], parallel: Parallel) -> dict[str, int]:
    """Pipeline stage that holds each parameter (of this expert-parallel rank)."""
    held: list[list[str]] = [[]] * parallel.pp_size
    dist.all_gather_object(held, list(parameters), group=parallel.pp_group)
    return {name: stage for stage, names in enumerate(held) for name in names}


def _gather_in_stage(entry: Entry, parameters: dict[str, torch.Tensor], parallel: Parallel) -> torch.Tensor:
    """[entries of the wave, shards, *shard shape], on every rank of the stage that holds them."""
    tensor = parameters[entry.name].detach()
    if entry.rule.is_expert:
        return _all_gather(_all_gather(tensor, parallel.etp_group), parallel.ep_group)
    return (tensor[None] if entry.rule.kind == "replicated" else _all_gather(tensor, parallel.tp_group))[None]


def _send_to_rank0(
    gathered: torch.Tensor | None, wave: tuple[Entry, ...], stage: int, parallel: Parallel, like: torch.Tensor
) -> torch.Tensor | None:
    """Move the wave from its stage to global rank 0, along rank 0's own pipeline group; None on every other rank."""
    pipeline = parallel.pp_group
    if dist.get_global_rank(pipeline, 0) != 0:
        return None  # a replica, or another tensor rank: its copy is not needed
    if stage == 0:
        return gathered if parallel.rank == 0 else None
    if gathered is not None:  # this rank is in the stage
        dist.send(gathered.contiguous(), dst=0, group=pipeline)
    if parallel.rank != 0:
        return None
    rule = wave[0].rule
    group = parallel.etp_group if rule.is_expert else parallel.tp_group
    shards = 1 if rule.kind == "replicated" else group.size()
    dtype = torch.float32 if rule.float32 else like.dtype
    received = like.new_empty(len(wave), shards, *shard_shape(wave[0], group.size()), dtype=dtype)
    dist.recv(received, src=dist.get_global_rank(pipeline, stage), group=pipeline)
    return received


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[group size, *shape].  gloo silently delivers wrong data for tensors that are not contiguous."""
    if group.size() == 1:
        return tensor[None]
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=group)
    return gathered


def _write_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_bytes: int) -> dict[str, str]:
    """Write safetensors files of at most `max_bytes` (or one tensor) and the index; return tensor name -> file."""
    files: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(pending, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(pending, file))
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        pending[name] = tensor.cpu()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    write_index(folder, files, total)
    return files


def _check_against_source(names: set[str], source_dir: Path) -> None:
    """Exactly the original names must be written: a server skips a name that it does not know without an error."""
    if not any(source_dir.glob("*.safetensors")):
        return
    has = outline(source_dir)
    expected = {name for name in read_headers(source_dir) if not is_left_out(name, has)}
    if names != expected:
        first = min(names ^ expected)
        raise CheckpointError(f"{source_dir}: the exported tensor names differ from the weights there, first {first}")


def _replace(temporary: Path, out_dir: Path) -> None:
    if not out_dir.exists():
        os.rename(temporary, out_dir)
        return
    # a directory cannot be renamed over another one that has files
    aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old.", dir=out_dir.parent))
    os.rename(out_dir, aside / "old")
    os.rename(temporary, out_dir)
    shutil.rmtree(aside)
