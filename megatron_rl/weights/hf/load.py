"""HF safetensors checkpoint -> the parameters of this rank's megatron-core chunks, every tensor checked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.weights.hf.files import CheckpointError, HFFiles, is_finite, listed
from megatron_rl.weights.hf.mapping import Geometry, find_entry, local_parameters, to_mcore

__all__ = ["CheckpointError", "Groups", "load_hf"]


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


@torch.no_grad()
def load_hf(chunks: Iterable[Any], path: Path, spec: Geometry, groups: Groups) -> None:
    """Fill every parameter of `chunks` from the safetensors checkpoint at `path`, reading only what this rank needs.

    Raises one CheckpointError that names the tensors that are missing, left over, of another shape, not floating point or
    (those this rank reads) not finite; and for pickle checkpoints, which are refused.  The chunks hold nothing of use then.
    """
    parameters = local_parameters(chunks, spec, groups.ep_group.rank(), groups.ep_group.size())
    not_finite = []
    with HFFiles(path) as files:
        files.check(spec)
        for name, parameter in parameters.items():
            entry = find_entry(name, spec)
            group = groups.etp_group if entry.rule.is_expert else groups.tp_group
            tensors = []
            for hf in entry.hf_names:
                tensors.append(files.read(hf))
                if not is_finite(tensors[-1]):
                    not_finite.append(hf)
            shard = to_mcore(entry, tensors, spec, group.rank(), group.size())
            if shard.shape != parameter.shape:
                raise CheckpointError(
                    f"{name}: the model wants shape {tuple(parameter.shape)}, got {tuple(shard.shape)}"
                )
            parameter.copy_(shard)
    if not_finite:
        raise CheckpointError(f"{path}: {listed('has values that are not finite', not_finite)}; the file is damaged")
