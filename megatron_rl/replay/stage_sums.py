"""Sums over the layers of all pipeline stages, for the router rows of all tensor ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.replay.layout import RankLayout


def sum_over_stages(
    parts: Sequence[Tensor], layout: RankLayout, model_group: dist.ProcessGroup
) -> list[Tensor]:
    """Add values of this stage's layers over all stages, for the rows of all tensor ranks.

    parts: values [t] of every micro-batch.  The result is, for every micro-batch, the sums for the
    rows of all tensor ranks, end to end.  A tensor rank has its slice of the rows under sequence
    parallelism, else all of them: every rank fills its part of a table of zeros, and one all-reduce
    adds the tables.  Collective over `model_group` (tp x pp).
    """
    num_slices, index = (layout.tp_size, layout.tp_rank) if layout.sequence_parallel else (1, 0)
    tables = []
    for values in parts:
        table = values.new_zeros(num_slices, len(values))
        # without sequence parallelism tensor ranks have the same rows, which must count once
        if layout.sequence_parallel or layout.tp_rank == 0:
            table[index] = values
        tables.append(table.flatten())
    # one all-reduce for all micro-batches
    all_tables = torch.cat(tables)
    if model_group.size() > 1:
        dist.all_reduce(all_tables, group=model_group)
    return list(all_tables.split([len(table) for table in tables]))
