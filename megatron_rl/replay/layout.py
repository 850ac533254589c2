"""Packed order -> the rows of this rank's routers, and global MoE layers -> this stage's layers.

megatron-core's router flattens its input sequence-major; a packed (THD) micro-batch is one sequence, so the order of its
rows is the packed order.  With context parallelism a rank holds two chunks of every sequence (zigzag), with sequence
parallelism each tensor-parallel rank one contiguous slice of those.
Shapes: T packed rows, t this rank's rows, B sequences, L MoE layers of the model, l this stage's, E experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from megatron_rl.records import RowState

Rows = slice | Tensor
"""An index into the packed order: a slice where the rows are contiguous, else int64 [t]."""


@dataclass(frozen=True)
class RankLayout:
    """Where this rank's router rows lie in the packed order.

    layers: for each local MoE layer, its index on the model's MoE-layer axis L (ascending).
    """

    layers: tuple[int, ...]
    tp_rank: int
    tp_size: int
    sequence_parallel: bool
    num_experts: int
    top_k: int
    ep_size: int
    cp_rank: int = 0
    cp_size: int = 1

    def model_rows(self, cu_seqlens: Int[Tensor, " B+1"]) -> Rows:
        """The packed rows that go through this rank's model, in its order: what tokens, labels and masks are cut by.

        Raises ValueError for a sequence that context parallelism cannot cut.
        """
        if self.cp_size == 1:
            return slice(0, int(cu_seqlens[-1]))
        return zigzag_rows(cu_seqlens, self.cp_rank, self.cp_size)

    def rows(self, cu_seqlens: Int[Tensor, " B+1"]) -> Rows:
        """The packed rows of this rank's routers, in their order: sequence parallelism cuts the model's rows once more.

        Raises ValueError where they do not divide.
        """
        rows = self.model_rows(cu_seqlens)
        if not self.sequence_parallel or self.tp_size == 1:
            return rows
        num_rows = int(cu_seqlens[-1]) // self.cp_size
        if num_rows % self.tp_size:
            raise ValueError(
                f"micro-batch of {num_rows} rows is not a multiple of parallel.tp = {self.tp_size}: "
                f"sequence parallelism needs it; pack with pad_multiple = {self.pad_multiple}"
            )
        size = num_rows // self.tp_size
        part = slice(self.tp_rank * size, (self.tp_rank + 1) * size)
        return part if isinstance(rows, slice) else rows[part]

    def local_routes(self, routes: Tensor, row_state: Tensor, cu_seqlens: Int[Tensor, " B+1"]) -> Tensor:
        """Cut routes [L, T, K] to this rank's [l, t, K] and fill pad rows with spread distinct experts.

        The result owns its memory, and nothing but this rank's part is copied.
        """
        rows = self.rows(cu_seqlens)
        state = row_state[rows]
        local = torch.empty(len(self.layers), len(state), routes.shape[2], dtype=routes.dtype)
        for index, layer in enumerate(self.layers):
            if isinstance(rows, slice):
                local[index] = routes[layer, rows]
            else:
                torch.index_select(routes[layer], 0, rows, out=local[index])
        pads = (state == RowState.PAD).nonzero().squeeze(1)
        if len(pads):
            local[:, pads] = pad_routes(len(pads), self.num_experts, self.top_k, self.ep_size).to(local.dtype)
        return local

    @property
    def pad_multiple(self) -> int:
        """What T must be a multiple of: whole chunks for every CP rank, equal slices for every tensor rank."""
        per_cp_rank = self.tp_size if self.sequence_parallel else 1
        return self.cp_size * math.lcm(per_cp_rank, 2) if self.cp_size > 1 else per_cp_rank

    @property
    def sequence_multiple(self) -> int:
        """What every sequence must be padded to."""
        return 2 * self.cp_size if self.cp_size > 1 else 1


def zigzag_rows(cu_seqlens: Int[Tensor, " B+1"], cp_rank: int, cp_size: int) -> Int[Tensor, " t"]:
    """The packed rows of a context-parallel rank, as megatron-core and TransformerEngine lay them out.

    Every sequence is cut into 2 x cp equal chunks; rank r holds chunks r and 2 cp - 1 - r, so that each rank gets an
    equal share of causal attention's work.  Raises ValueError for a sequence that is not a multiple of 2 x cp.
    """
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - starts
    if bool((lengths % (2 * cp_size)).any()):
        raise ValueError(
            f"a sequence of {int(lengths[lengths % (2 * cp_size) != 0][0])} rows is not a multiple of 2 x parallel.cp = "
            f"{2 * cp_size}; pack with sequence_multiple = {2 * cp_size}"
        )
    chunks = lengths // (2 * cp_size)
    first = torch.stack([starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], dim=1).flatten()
    sizes = chunks.repeat_interleave(2)
    before = sizes.cumsum(0) - sizes  # this rank's rows ahead of each chunk
    return torch.arange(int(sizes.sum()), device=starts.device) + (first - before).repeat_interleave(sizes)


def pad_routes(num_rows: int, num_experts: int, top_k: int, ep_size: int) -> Int[Tensor, "R K"]:
    """Distinct expert ids for pad rows, dealt rank-first over the EP ranks so that none becomes a hot spot.

    Slot n = row * K + k goes to EP rank n % ep, expert (n // ep) % (E / ep) of it.  E consecutive slots are all
    different, so the K ids of a row are too.
    """
    slot = torch.arange(num_rows * top_k) % num_experts
    per_rank = num_experts // ep_size
    return ((slot % ep_size) * per_rank + slot // ep_size).view(num_rows, top_k)


def check_routes(
    routes: Tensor,
    row_state: Tensor,
    *,
    sequence_ids: Tensor,
    rollout_ids: Sequence[str],
    num_layers: int,
    num_experts: int,
    top_k: int,
) -> None:
    """Raise ValueError unless routes [L, T, K] are valid for every REPLAYED row: shape, integer dtype, range, distinct ids.

    megatron-core would not notice: a short or duplicated table silently gives wrong output on 0.16.1.  Once per batch, CPU.
    """
    expected = (num_layers, row_state.numel(), top_k)
    if tuple(routes.shape) != expected:
        raise ValueError(f"routed experts have shape {tuple(routes.shape)}, rule is [layers, rows, top_k] = {expected}")
    if routes.dtype not in (torch.uint8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"routed experts have dtype {routes.dtype}, rule is an integer type")
    replayed = row_state == RowState.REPLAYED
    wide = routes[:, replayed].long()
    ordered = wide.sort(dim=-1).values
    out_of_range = (ordered[..., :1] < 0).any(-1) | (ordered[..., -1:] >= num_experts).any(-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for broken, rule in ((out_of_range, f"every id in 0..{num_experts - 1}"), (repeated, "distinct ids in a row")):
        if bool(broken.any()):
            layer, row = (int(x) for x in broken.nonzero()[0])
            packed_row = int(replayed.nonzero()[row])
            name = rollout_ids[int(sequence_ids[packed_row])]
            raise ValueError(
                f"rollout {name}: routed experts of MoE layer {layer}, packed row {packed_row} are "
                f"{wide[layer, row].tolist()}, rule is {rule}"
            )
