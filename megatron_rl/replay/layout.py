"""The rows of the packed order, and the MoE layers of the model, that this rank's routers have.

megatron-core's router flattens its input [S, B] sequence-major.  A packed (THD) micro-batch is one
sequence, so the order of its rows is the packed order; in a padded one (BSHD) position s of every
sequence comes before position s + 1 of any.  With context parallelism a rank has two chunks of
every sequence (zigzag).  With sequence parallelism each tensor-parallel rank has one contiguous
slice of these: of all rows where packed, of the positions where padded.

Shapes: T packed rows, t this rank's rows, B sequences, L MoE layers of the model, l this stage's,
E experts, K top-k.  In [S, B], S is the rows of a padded sequence; in routes [S - 1, L, K] it is
the tokens of one rollout, without pads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int, Integer, Shaped
from torch import Tensor

from megatron_rl.records.packed import RowState

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16))

WORDS = {
    np.dtype(kind).itemsize: np.dtype(kind)
    for kind in (np.uint8, np.uint16, np.uint32, np.uint64, np.complex128)
}
"""Size in bytes -> a type of that size, which NumPy copies two to three times faster than an opaque
type of the same size.
"""

Rows = slice | Tensor
"""An index into the packed order: a slice where the rows are contiguous, else int64 [t]."""


@dataclass(frozen=True)
class RankLayout:
    """The places of this rank's router rows in the packed order."""

    layers: tuple[int, ...]
    """The index of every MoE layer of this stage on the model's MoE-layer axis L, ascending."""
    tp_rank: int
    tp_size: int
    sequence_parallel: bool
    num_experts: int
    top_k: int
    ep_size: int
    cp_rank: int = 0
    cp_size: int = 1
    padded: bool = False
    """Sequences have equal numbers of rows and are a batch [S, B] in the model, not end to end."""

    def model_rows(self, cu_seqlens: Int[Tensor, " B_plus_1"]) -> Rows:
        """Return the packed rows of this rank's model, sequence by sequence: the index for tokens,
        labels and masks.

        Raises ValueError for a sequence that context parallelism cannot cut, and for sequences of
        different lengths where padded.
        """
        if self.padded and len(lengths := cu_seqlens.diff().unique()) != 1:
            raise ValueError(
                f"sequences of {lengths.tolist()} rows in a padded micro-batch, must have equal"
                " numbers of rows"
            )
        if self.cp_size == 1:
            return slice(0, int(cu_seqlens[-1]))  # a slice copies nothing, in the common case
        return zigzag_rows(cu_seqlens, self.cp_rank, self.cp_size)

    def router_rows(self, cu_seqlens: Int[Tensor, " B_plus_1"]) -> Rows:
        """Return the packed rows of this rank's routers, in their order.  With sequence parallelism
        they are a slice of the model's rows.

        Raises ValueError where the slices of the tensor ranks would not be equal.
        """
        rows, stride = self.model_rows(cu_seqlens), self.row_stride(cu_seqlens)
        # rows on this context-parallel rank: of the micro-batch, or of each sequence where padded
        num_positions = int(cu_seqlens[-1]) // self.cp_size // stride
        parts = self.tp_size if self.sequence_parallel else 1
        if num_positions % parts:
            what = "sequences" if self.padded else "micro-batch"
            key = "sequence_multiple" if self.padded else "pad_multiple"
            raise ValueError(
                f"{what} of {num_positions} rows on a rank, not a multiple of parallel.tp ="
                f" {self.tp_size}: sequence parallelism needs it; pack with {key} ="
                f" {self.pad_multiple}"
            )
        size = num_positions // parts
        first = self.tp_rank * size if parts > 1 else 0
        part = slice(first, first + size)
        if self.padded:  # the model is [S, B]: transpose, then cut positions, not rows
            return (
                torch.arange(int(cu_seqlens[-1]))[rows]
                .view(stride, num_positions)
                .T[part]
                .flatten()
            )
        return part if isinstance(rows, slice) else rows[part]

    def row_stride(self, cu_seqlens: Sequence[int] | Tensor) -> int:
        """Return the distance in the model of successive rows of a sequence: B where padded, else
        1.
        """
        return len(cu_seqlens) - 1 if self.padded else 1

    def by_sequence(
        self, values: Shaped[Tensor, " T"], cu_seqlens: Int[Tensor, " B_plus_1"]
    ) -> Shaped[Tensor, " T"]:
        """Return `values` in the order of `model_rows`, sequence by sequence.

        values: those of the router rows of all tensor ranks, one rank after the other, as
        sum_over_stages returns them.  T: rows of this context-parallel rank.
        """
        return values.view(-1, self.row_stride(cu_seqlens)).T.flatten()

    def local_routes(
        self,
        routes: Sequence[np.ndarray],
        cu_seqlens: Int[Tensor, " B_plus_1"],
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return this rank's ids [l, t, K]; only this rank's part of the routes is read.

        routes: [S - 1, L, K] of every sequence.
        out: flat memory with room for the ids, which is written; without it new memory is
        allocated, whose page faults cost ten times the copy.
        Rows of last tokens are 0 (they route live); pads get distinct experts, spread over all.
        """
        bounds = cu_seqlens.tolist()
        shape = (len(self.layers), self.num_router_rows(bounds[-1]), self.top_k)
        dtype, stride, layer_runs = routes[0].dtype, self.row_stride(bounds), self._layer_runs
        word = word_type(dtype.itemsize * self.top_k)
        memory = np.empty(math.prod(shape), dtype) if out is None else out
        # two views of one memory: `words` has all K ids of a row as one element, which is copied
        # several times faster
        ids, words = np.ndarray(shape, dtype, memory), np.ndarray(shape[:2], word, memory)
        pads: list[np.ndarray] = []
        for sequence, start, stop, to in self.runs(bounds):
            # rows of positions start .. known - 1 are written
            known, end_row = start, to + (stop - start) * stride
            if sequence < len(routes):  # else it is a pad sequence, at the end of the micro-batch
                length = len(routes[sequence])
                if length > start:
                    known = stop if length >= stop else length
                    source = routes[sequence].view(word)
                    rows = slice(to, to + (known - start) * stride, stride)
                    for stage_layers, layers in layer_runs:
                        words[stage_layers, rows] = source[start:known, layers, 0].T
                if known == length < stop:  # the last token: the server has no route for it
                    ids[:, to + (known - start) * stride] = 0
                    known += 1
            if known < stop:
                pads.append(ids[:, to + (known - start) * stride : end_row : stride])
        # experts are spread over all pads of the micro-batch together: spread over every short run,
        # they would begin with the same experts
        if pads:
            ends = np.cumsum([ids.shape[1] for ids in pads])
            spread = pad_routes(int(ends[-1]), self.num_experts, self.top_k, self.ep_size).numpy()
            for pad, end in zip(pads, ends, strict=True):
                pad[:] = spread[end - pad.shape[1] : end]
        return ids

    def num_router_rows(self, num_packed: int) -> int:
        """Return t, the number of this rank's router rows, for `num_packed` packed rows."""
        return num_packed // self._num_shares

    def runs(self, bounds: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Return `router_rows` as runs (sequence, first position in it, end position, this rank's
        row of the first position).  The rows of a run are `row_stride` apart.
        """
        stride = self.row_stride(bounds)
        size = self.num_router_rows(bounds[-1]) // stride
        low = self.tp_rank * size if self.sequence_parallel else 0
        num_chunks, chunks = self._chunks
        runs = []
        # the row of this rank at which the next chunk starts: below 0 the chunk starts on an
        # earlier tensor rank, from `size` on it is on a later one
        ahead, column = -low, 0
        for sequence, (begin, end) in enumerate(pairwise(bounds)):
            chunk = (end - begin) // num_chunks
            if self.padded:  # every sequence starts at position 0 of the batch, in its own column
                ahead, column = -low, sequence
            for index in chunks:
                after = ahead + chunk
                if chunk and after > 0 and ahead < size:
                    first = ahead if ahead > 0 else 0
                    # the difference between a position in the sequence and this rank's row
                    offset = index * chunk - ahead
                    start, stop = first + offset, min(after, size) + offset
                    runs.append((sequence, start, stop, first * stride + column))
                ahead = after
        return runs

    @cached_property
    def _chunks(self) -> tuple[int, tuple[int, ...]]:
        """(The number of chunks of a sequence, the indices of this rank's chunks in its order)."""
        if self.cp_size == 1:
            return 1, (0,)
        return 2 * self.cp_size, (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank)

    @cached_property
    def _num_shares(self) -> int:
        """The number of ranks over which the router rows of a micro-batch are spread."""
        return self.cp_size * (self.tp_size if self.sequence_parallel else 1)

    @cached_property
    def _layer_runs(self) -> list[tuple[slice, slice]]:
        """Runs of consecutive `layers`, as (slice of this stage's layers, slice of the model's):
        slices are copied faster than indices.
        """
        starts = [
            i for i, layer in enumerate(self.layers) if i == 0 or layer != self.layers[i - 1] + 1
        ]
        ends = [*starts[1:], len(self.layers)]
        return [
            (slice(a, b), slice(self.layers[a], self.layers[b - 1] + 1))
            for a, b in zip(starts, ends, strict=False)
            if a < b
        ]

    @property
    def pad_multiple(self) -> int:
        """T must be a multiple of this number: complete chunks for every context-parallel rank, and
        equal slices for every tensor rank.
        """
        per_cp_rank = self.tp_size if self.sequence_parallel else 1
        return self.cp_size * math.lcm(per_cp_rank, 2) if self.cp_size > 1 else per_cp_rank

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of this number: complete chunks, and where
        `padded` also equal slices for every tensor rank.
        """
        if self.padded:
            return self.pad_multiple
        return 2 * self.cp_size if self.cp_size > 1 else 1


def indices(rows: Rows) -> Int[Tensor, " t"]:
    """Return the packed rows as numbers, also where `rows` is a slice."""
    return torch.arange(rows.stop)[rows] if isinstance(rows, slice) else rows


def word_type(size: int) -> np.dtype:
    """Return a type of `size` bytes, which makes one element of all K ids of a row."""
    return WORDS[size] if size in WORDS else np.dtype(f"V{size}")


def zigzag_rows(
    cu_seqlens: Int[Tensor, " B_plus_1"], cp_rank: int, cp_size: int
) -> Int[Tensor, " t"]:
    """Return the packed rows of a context-parallel rank, in the layout of megatron-core and
    TransformerEngine.

    Every sequence is cut into 2 x cp equal chunks; rank r has chunks r and 2 cp - 1 - r, so that
    the work of causal attention is equal on all ranks.  Raises ValueError for a sequence whose
    length is not a multiple of 2 x cp.
    """
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - starts
    if bool((lengths % (2 * cp_size)).any()):
        raise ValueError(
            f"a sequence of {int(lengths[lengths % (2 * cp_size) != 0][0])} rows is not a multiple"
            f" of 2 x parallel.cp = {2 * cp_size}; pack with sequence_multiple = {2 * cp_size}"
        )
    chunks = lengths // (2 * cp_size)
    first = torch.stack(
        [starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], dim=1
    ).flatten()
    sizes = chunks.repeat_interleave(2)
    before = sizes.cumsum(0) - sizes  # the number of this rank's rows before each chunk
    rows = torch.arange(int(sizes.sum()), device=starts.device)
    return rows + (first - before).repeat_interleave(sizes)


def pad_routes(num_rows: int, num_experts: int, top_k: int, ep_size: int) -> Int[Tensor, "R K"]:
    """Return expert ids for pad rows, distinct in a row and spread evenly over the expert-parallel
    ranks.

    Slot n = row * K + k goes to rank n % ep and its expert (n // ep) % (E / ep).  E consecutive
    slots are all different, so the K ids of a row are too.
    """
    slot = torch.arange(num_rows * top_k) % num_experts
    per_rank = num_experts // ep_size
    return ((slot % ep_size) * per_rank + slot // ep_size).view(num_rows, top_k)


def check_routes(
    routes: Sequence[np.ndarray],
    rollout_ids: Sequence[str],
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
) -> None:
    """Raise ValueError unless the routes [S - 1, L, K] of every rollout have the model's shape and
    a dtype for its ids.
    """
    for ids, name in zip(routes, rollout_ids, strict=True):
        where = f"rollout {name}: routed experts"
        if ids.ndim != 3 or ids.shape[2] != top_k:
            raise ValueError(
                f"{where} have shape {ids.shape}, must be [tokens - 1, {num_layers} MoE layers,"
                f" top-{top_k}]"
            )
        if ids.shape[1] != num_layers:
            raise ValueError(
                f"{where} have {ids.shape[1]} layers, the model has {num_layers} MoE layers: the"
                " server runs another model, or its dense layers were kept"
            )
        if ids.dtype not in ROUTE_DTYPES or ids.dtype != routes[0].dtype:
            raise ValueError(
                f"{where} have dtype {ids.dtype}, must be uint8 or int16, the same for a"
                " micro-batch"
            )
        if num_experts > np.iinfo(ids.dtype).max + 1:
            raise ValueError(
                f"{where} have dtype {ids.dtype}, which cannot hold ids of {num_experts} experts:"
                " they have overflowed"
            )


def check_local_routes(
    local: np.ndarray,
    row_state: Integer[Tensor, " t"],
    layers: Sequence[int],
    num_experts: int,
    name_row: Callable[[int], str],
) -> None:
    """Raise ValueError unless the ids [l, t, K] of every REPLAYED row are in range and distinct.

    name_row: row -> its name in the message.
    megatron-core does not check them: with 0.16.1 a duplicate gives wrong output without an error.
    The check runs on the host, before anything is sent; every row is checked by the ranks that use
    it.
    """
    replayed = (row_state == RowState.REPLAYED).numpy()
    if not replayed.any():
        return
    for layer, ids in zip(layers, local, strict=True):
        # [K, t], because comparisons of contiguous columns are vectorised
        columns = np.ascontiguousarray(ids.T)
        outside = (columns >= num_experts).any(0)
        if columns.dtype.kind == "i":
            outside |= (columns < 0).any(0)
        repeated = np.zeros(len(ids), bool)
        # K is small: comparing all pairs is cheaper than sorting every row
        for a, b in itertools.combinations(columns, 2):
            repeated |= a == b
        for broken, rule in (
            (outside, f"ids in 0..{num_experts - 1}"),
            (repeated, "distinct ids in a row"),
        ):
            broken &= replayed
            if broken.any():
                row = int(broken.argmax())
                if len(columns) > 1 and not columns[:, replayed].any():
                    rule = (
                        f"{rule}; all rows of this layer here are zero: the server never wrote it"
                    )
                elif len(columns) > 1 and not ids[row].any():
                    rule = f"{rule}; zero means expert 0, not missing: the row was never written"
                raise ValueError(
                    f"{name_row(row)}: routed experts of MoE layer {layer} are {ids[row].tolist()},"
                    f" must be {rule}"
                )
