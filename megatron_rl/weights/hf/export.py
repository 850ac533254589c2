"""megatron-core shards -> a stream of full HF tensors on global rank 0, and an HF checkpoint on disk.

The stream is collective: every rank must drive it to its end.  No rank holds more than one parameter beyond its own
(for experts: one per expert-parallel rank).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rl.weights.hf.files import CheckpointError, is_left_out, outline, tensor_files
from megatron_rl.weights.hf.load import Groups
from megatron_rl.weights.hf.mapping import Entry, Geometry, entries, local_parameters, shard_shape, to_hf

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@torch.no_grad()
def export_hf(chunks: Iterable[Any], spec: Geometry, groups: Groups) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (HF name, full contiguous tensor, on the device and in the dtype of the model) for the whole checkpoint.

    Every rank yields the same names in the same order; only global rank 0 gets tensors, the others None.  A tensor may
    be a view of the live parameter: copy what outlives the next update.  Tensors come layer by layer, the experts of a
    layer in strides (first expert of each expert-parallel rank, then the second...).  With `overlap_param_gather`,
    parameters are stale after a step: call start_param_sync(force_sync=True) on the chunks first.
    """
    parameters = local_parameters(chunks, spec, groups.ep_group.rank(), groups.ep_group.size())
    like = next(
        iter(parameters.values())
    )  # every parameter has the model's device, and its dtype but for float32 rules
    stages = _stage_of_each(parameters, groups)
    for wave in _waves(spec, groups.ep_group.size()):
        mine = wave[groups.ep_group.rank() % len(wave)]
        stage = stages[mine.name]
        gathered = _gather_in_stage(mine, parameters, groups) if groups.pp_group.rank() == stage else None
        shards = _send_to_rank0(gathered, wave, stage, groups, like)
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
    """Drain `tensors` (see export_hf) and, where they are not None, write them as an HF checkpoint at `out_dir`.

    config.json, tokenizer and every other file that holds no weights are copied from `source_dir` as they are.  The
    directory appears complete or not at all, replacing one that exists; files are world-readable, since servers may run
    as another user.
    Raises CheckpointError where the names differ from the weights in `source_dir` (if it has any).
    """
    iterator = iter(tensors)
    first = next(iterator)
    if first[1] is None:
        for _ in iterator:
            pass
        return
    source_dir, out_dir = Path(source_dir), Path(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        files = _write_shards(chain([first], iterator), temporary, max_shard_bytes)
        _check_against_source(set(files), source_dir)
        for file in source_dir.iterdir():
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(file, temporary / file.name)
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.chmod(0o755)
        _replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _waves(spec: Geometry, ep_size: int) -> Iterator[tuple[Entry, ...]]:
    """What is gathered at once: one parameter, or the i-th local expert of every expert-parallel rank."""
    for (is_expert, _), group in groupby(entries(spec), key=lambda entry: (entry.rule.is_expert, entry.layer)):
        if not is_expert:
            yield from ((entry,) for entry in group)
            continue
        experts = sorted(
            group, key=lambda entry: (entry.expert, entry.name)
        )  # fc1, fc2 of expert 0, then of expert 1 ...
        stride = len(experts) // ep_size
        yield from (tuple(experts[start::stride]) for start in range(stride))


def _stage_of_each(parameters: dict[str, Any], groups: Groups) -> dict[str, int]:
    """Pipeline stage that holds each parameter (of this expert-parallel rank)."""
    held: list[list[str]] = [[]] * groups.pp_group.size()
    dist.all_gather_object(held, list(parameters), group=groups.pp_group)
    return {name: stage for stage, names in enumerate(held) for name in names}


def _gather_in_stage(entry: Entry, parameters: dict[str, torch.Tensor], groups: Groups) -> torch.Tensor:
    """[entries of the wave, shards, *shard shape], on every rank of the stage that holds them."""
    tensor = parameters[entry.name].detach()
    if entry.rule.is_expert:
        return _all_gather(_all_gather(tensor, groups.etp_group), groups.ep_group)
    return (tensor[None] if entry.rule.kind == "replicated" else _all_gather(tensor, groups.tp_group))[None]


def _send_to_rank0(
    gathered: torch.Tensor | None, wave: tuple[Entry, ...], stage: int, groups: Groups, like: torch.Tensor
) -> torch.Tensor | None:
    """Move the wave from its stage to global rank 0, along rank 0's own pipeline group; None on every other rank."""
    pipeline = groups.pp_group
    if dist.get_global_rank(pipeline, 0) != 0:
        return None
    if stage == 0 or pipeline.size() == 1:
        return gathered if groups.rank == 0 else None
    if gathered is not None:  # this rank is of the stage
        dist.send(gathered.contiguous(), dst=0, group=pipeline)
    if groups.rank != 0:
        return None
    rule = wave[0].rule
    group = groups.etp_group if rule.is_expert else groups.tp_group
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


def _write_shards(tensors: Iterable[tuple[str, torch.Tensor | None]], folder: Path, max_bytes: int) -> dict[str, str]:
    """Write safetensors files of at most `max_bytes` (or one tensor) and the index; return tensor name -> file."""
    files: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = size = number = 0

    def flush() -> None:
        nonlocal number, size
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(pending, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(pending, file))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        assert tensor is not None
        if pending and size + tensor.nbytes > max_bytes:
            flush()
        pending[name] = tensor.cpu()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files


def _check_against_source(names: set[str], source_dir: Path) -> None:
    """A server skips names it does not know without an error, so exactly the original names must be written."""
    if not any(source_dir.glob("*.safetensors")):
        return
    has = outline(source_dir)
    wanted = {name for name in tensor_files(source_dir) if not is_left_out(name, has)}
    if names != wanted:
        first = sorted(names ^ wanted)[0]
        raise CheckpointError(f"{source_dir}: the exported tensor names differ from the weights there, first {first}")


def _replace(temporary: Path, out_dir: Path) -> None:
    if not out_dir.exists():
        os.rename(temporary, out_dir)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old.", dir=out_dir.parent))
    os.rename(out_dir, aside / "old")
    os.rename(temporary, out_dir)
    shutil.rmtree(aside)
