"""The tensors of a model under their HF names, on rank 0."""

from collections.abc import Iterator

import torch

from megatron_rl.distributed import Parallel
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.export import export_planned, on_rank_0, plan_export


def export_hf(
    chunks: list[torch.nn.Module], spec: ModelSpec, parallel: Parallel
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (HF name, tensor) of every tensor of the checkpoint, moved to rank 0; None elsewhere.

    Collective.
    """
    stream = export_planned(plan_export(chunks, spec, parallel), chunks, spec, parallel)
    return on_rank_0(stream, parallel.rank, parallel.device)
