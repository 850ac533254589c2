"""HF safetensors checkpoint -> the parameters of this rank's megatron-core chunks.

Every tensor is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import find_entry
from megatron_rl.weights.hf.files import CheckpointError, HFFiles, is_finite, listed
from megatron_rl.weights.hf.mapping import local_parameters, to_mcore

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.distributed import Parallel


@torch.no_grad()  # parameters are written in place
def load_hf(chunks: Iterable[GPTModel], path: Path, spec: ModelSpec, parallel: Parallel) -> None:
    """Fill every parameter of `chunks` from the safetensors checkpoint at `path`.

    Only what this rank needs is read.  Raises one CheckpointError that names the tensors that are
    missing, left over, of another shape, not floating point or (of those this rank reads) not
    finite; and for pickle checkpoints, which are refused.  The chunks are then partly filled.
    """
    chunks = list(chunks)
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    not_finite = []
    with HFFiles(path) as files:
        files.check(spec)
        for name, parameter in parameters.items():
            entry = find_entry(name, spec).held_by(chunks)
            group = parallel.etp_group if entry.rule.is_expert else parallel.tp_group
            # whole tensors: `to_mcore` cuts this rank's part from them
            tensors = [files.read(hf) for hf in entry.hf_names]
            not_finite += [
                hf
                for hf, tensor in zip(entry.hf_names, tensors, strict=True)
                if not is_finite(tensor)
            ]
            shard = to_mcore(entry, tensors, spec, group.rank(), group.size())
            if shard.shape != parameter.shape:
                raise CheckpointError(
                    f"{name}: the model needs shape {tuple(parameter.shape)}, got"
                    f" {tuple(shard.shape)}"
                )
            parameter.copy_(shard)
    if not_finite:
        raise CheckpointError(
            f"{path}: {listed('has values that are not finite', not_finite)}; the file is damaged"
        )
