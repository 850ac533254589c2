"""Packed order -> the rows of this rank's routers, and global MoE layers -> this stage's layers.

megatron-core's router flattens its input sequence-major; a packed (THD) micro-batch is one sequence, so the order of its
rows is the packed order.  With sequence parallelism each tensor-parallel rank holds one contiguous slice of them.
Shapes: T packed rows, t this rank's rows, L MoE layers of the model, l this stage's, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from megatron_rl.records import RowState


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

    def rows(self, num_tokens: int) -> slice:
        """This rank's rows of a micro-batch of T = num_tokens packed rows.  Raises ValueError if T does not divide."""
        if not self.sequence_parallel or self.tp_size == 1:
            return slice(0, num_tokens)
        if num_tokens % self.tp_size:
            raise ValueError(
                f"micro-batch of {num_tokens} rows is not a multiple of parallel.tp = {self.tp_size}: "
                "sequence parallelism needs it; pack with pad_multiple = tp"
            )
        size = num_tokens // self.tp_size
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    def local_routes(self, routes: Tensor, row_state: Tensor) -> Tensor:
        """Cut routes [L, T, K] to this rank's [l, t, K] and fill pad rows with spread distinct experts.

        The result owns its memory: the given routes stay untouched.
        """
        rows = self.rows(row_state.numel())
        local = routes[list(self.layers), rows].clone()
        pads = (row_state[rows] == RowState.PAD).nonzero().squeeze(1)
        if len(pads):
            local[:, pads] = pad_routes(len(pads), self.num_experts, self.top_k, self.ep_size).to(local.dtype)
        return local

    @property
    def pad_multiple(self) -> int:
        return self.tp_size if self.sequence_parallel else 1


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
