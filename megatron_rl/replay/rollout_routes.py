"""The routes of a mini-batch on one rank: cut from those of the rollouts, checked, and copied to
the device.

Shapes: S tokens of a sequence, t this rank's router rows, L MoE layers, l this stage's, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_rl.records import Rollout
from megatron_rl.records.on_device import on_device
from megatron_rl.records.packed import MiniBatch, PackedBatch, RowState
from megatron_rl.replay.layout import RankLayout, Rows, check_local_routes, check_routes
from megatron_rl.replay.manager import Routes


class RolloutRoutes:
    """Cuts the routes of rollouts to the rows and layers of this rank.

    num_layers: MoE layers of the whole model.  Passes share host memory: see RouteMemory, and
    PinnedMemory for a GPU.
    """

    def __init__(self, layout: RankLayout, num_layers: int, device: torch.device) -> None:
        self.layout, self.num_layers, self.device = layout, num_layers, device
        self._memory = PinnedMemory() if device.type == "cuda" else RouteMemory()

    def of(
        self, batch: MiniBatch, *, replay: bool, compare: bool, check: bool = True
    ) -> list[Routes]:
        """Return the routes of each micro-batch, to replay and to compare with.

        On a CPU they are valid until the next call.  Raises ValueError where the batch has no
        routes or, with `check`, where they break a rule.
        """
        if not (replay or compare):
            return [Routes() for _ in batch.micro_batches]
        parts = zip(batch.micro_batches, batch.samples, strict=True)
        return [
            self._routes(
                index, part, [sample.rollout for sample in samples], replay, compare, check
            )
            for index, (part, samples) in enumerate(parts)
        ]

    def _routes(
        self,
        index: int,
        batch: PackedBatch,
        rollouts: Sequence[Rollout],
        replay: bool,
        compare: bool,
        check: bool,
    ) -> Routes:
        layout = self.layout
        # all rollouts of a micro-batch have routes, or none (batch/pack.py)
        experts = [one.routed_experts for one in rollouts if one.routed_experts is not None]
        if not experts:
            raise ValueError(
                "replay.mode = R3 or replay.measure needs routed experts, but rollout"
                f" {batch.rollout_ids[0]} has none; start the server with"
                " --enable-return-routed-experts"
            )
        rows = layout.router_rows(batch.cu_seqlens)
        state = batch.row_state[rows]
        if check:  # before cutting, which assumes the shape
            check_routes(
                experts,
                batch.rollout_ids,
                num_layers=self.num_layers,
                num_experts=layout.num_experts,
                top_k=layout.top_k,
            )
        size = len(layout.layers) * layout.num_router_rows(batch.num_tokens) * layout.top_k
        ids = layout.local_routes(
            experts, batch.cu_seqlens, self._memory.take(index, size, experts[0].dtype)
        )
        # after cutting: every rank checks the values that it uses, so no value is checked twice
        if check:
            check_local_routes(
                ids, state, layout.layers, layout.num_experts, partial(name_row, batch, rows)
            )
        local = self._memory.send(index, ids, self.device)
        live_rows = (state == RowState.LIVE).nonzero().squeeze(1)
        return Routes(
            replay=local if replay else None,
            live_rows=on_device(live_rows, self.device) if replay else None,
            reference=local if compare else None,
            compared=on_device(state == RowState.REPLAYED, self.device) if compare else None,
        )


def name_row(batch: PackedBatch, rows: Rows, row: int) -> str:
    """Return rollout and position of this rank's router row `row`, for messages."""
    packed = int(torch.arange(batch.num_tokens)[rows][row])
    return (
        f"rollout {batch.rollout_ids[int(batch.sequence_ids[packed])]}, row"
        f" {int(batch.positions[packed])}"
    )


class RouteMemory:
    """Host memory that every pass uses again, one piece per micro-batch, because page faults of new
    memory cost ten times the copy.  On a CPU routes stay in it.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, np.ndarray] = {}

    def take(self, index: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory of at least `size` elements for micro-batch `index`, the same that was
        taken for it before.
        """
        piece = self._pieces.get(index)
        if piece is None or piece.size < size or piece.dtype != dtype:
            piece = self._pieces[index] = self._new(size, dtype)
        return piece

    def send(self, index: int, ids: np.ndarray, device: torch.device) -> Tensor:
        """Return `ids`, which are in the memory of micro-batch `index`, on the device."""
        return torch.from_numpy(ids).to(device)

    def _new(self, size: int, dtype: np.dtype) -> np.ndarray:
        return np.empty(size, dtype)


class PinnedMemory(RouteMemory):
    """Page-locked memory for a GPU: two pieces, so that a micro-batch is cut while the one before
    is copied.

    Copies are asynchronous; a piece is taken again when its last copy has ended.
    """

    NUM_PIECES = 2

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, torch.cuda.Event] = {}

    def take(self, index: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory of at least `size` elements, of which the last copy has ended."""
        index %= self.NUM_PIECES
        # also where the piece is too small now: torch may hand out its memory again
        if copy := self._copies.pop(index, None):
            copy.synchronize()
        return super().take(index, size, dtype)

    def send(self, index: int, ids: np.ndarray, device: torch.device) -> Tensor:
        """Copy `ids` to the device on its current stream; return without waiting."""
        sent = torch.from_numpy(ids).to(device, non_blocking=True)
        copy = self._copies[index % self.NUM_PIECES] = torch.cuda.Event()
        copy.record()
        return sent

    def _new(self, size: int, dtype: np.dtype) -> np.ndarray:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(size, dtype=kind, pin_memory=True).numpy()
