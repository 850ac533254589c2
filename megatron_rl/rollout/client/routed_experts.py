"""Expert ids of a response: decode and validate what SGLang sends, and keep them compact.

SGLang sends base64 of little-endian int32 in C order, shape [num_rows, num_layers, K].  Row j holds
the experts of the forward of token j, layer l is decoder layer l (dense layers are included and
meaningless), ids are logical expert ids.  Plain NumPy and pybase64 take less than 4 times the
memcpy of the payload (benchmarks/decode.py).
Shapes: N rows, L MoE layers, K top-k, E experts; n rows of one block.
"""

from __future__ import annotations

import binascii
import itertools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pybase64

from megatron_rl.rollout.client.pages import empty

BLOCK_BYTES = 288 * 1024  # int32 bytes decoded at a time: all arrays of a block stay in the cache
ROW_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of a row's K ids -> an integer type of that size, which is faster to move than an opaque
type."""


class RoutedExpertsError(ValueError):
    """A routed_experts payload that must not be used.

    `reason` is a short code for counting; `layer` (decoder layer), `row` and `value` locate the
    first error and are None where it has no place.
    """

    def __init__(
        self,
        reason: str,
        rule: str,
        *,
        layer: int | None = None,
        row: int | None = None,
        value: int | None = None,
    ) -> None:
        place = "" if layer is None else f" at layer {layer}, row {row}: {value}"
        super().__init__(f"routed_experts: {reason}{place}; rule: {rule}")
        self.reason, self.layer, self.row, self.value = reason, layer, row, value


def decode_routed_experts(
    payload: str | bytes | memoryview,
    *,
    num_rows: int,
    num_layers: int,
    moe_layers: Sequence[int],
    top_k: int,
    num_experts: int,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (ids, missing) of a base64 int32 [num_rows, num_layers, K].

    ids: uint8 (int16 above 256 experts) [N, L, K], the MoE layers.  In memory they are layer-major,
    [L, N, K]: training ranks copy complete layers of them.
    missing: bool [N], the rows that hold no route (their ids are 0); None where all hold one.

    A row holds no route where all its MoE layers are -1 (how engines mark one), or all are 0 and K
    > 1: ids of a row are distinct, so zeros were never written; with K = 1 zero is expert 0.
    replay.on_missing_route handles such rows.  A row that lacks only some layers is damaged.  So is
    a payload that is too short: which rows are missing is unknown.

    Raises RoutedExpertsError for a payload that is not strict base64 (not_base64) or not exactly as
    long as the shape requires (wrong_size), an id outside 0..E-1 (out_of_range), an id twice in one
    row of one layer (duplicate), no route in any row (never_written).  Errors that keep this
    structure - a shift by one token, swapped layers, another request's routes - are detected by
    comparison with the model's own routing.
    """
    row_bytes = num_layers * top_k * 4
    check_length(payload, num_rows * row_bytes)
    # int16, not uint16: torch supports few operations on it
    out = empty((len(moe_layers), num_rows, top_k), np.uint8 if num_experts <= 256 else np.int16)
    # the K ids of a row move together
    row_type = ROW_TYPES.get(top_k * out.itemsize, f"V{top_k * out.itemsize}")
    out_rows = out.view(row_type)[..., 0]
    missing = np.zeros(num_rows, bool)
    layers = as_slice(moe_layers)
    # 3 bytes are 4 characters: a block begins with a character
    block_rows = 3 * max(1, BLOCK_BYTES // (3 * row_bytes))
    distinct = DistinctCheck(min(block_rows, num_rows) * len(moe_layers), top_k, num_experts)
    for start in range(0, num_rows, block_rows):
        stop = min(start + block_rows, num_rows)
        text = payload[start * row_bytes // 3 * 4 : (stop * row_bytes + 2) // 3 * 4]
        ids = decode_block(text, (stop - start) * row_bytes).reshape(
            stop - start, num_layers, top_k
        )[:, layers]
        block = checked_block(ids, missing, start, distinct, moe_layers, num_experts)
        out_rows[:, start:stop] = block.astype(out.dtype, copy=False).view(row_type)[..., 0].T
    if missing.size and missing.all():
        raise RoutedExpertsError(
            "never_written",
            "at least one row must hold a route; all rows are -1 or zero in every MoE layer",
        )
    return out.transpose(1, 0, 2), missing if missing.any() else None


def checked_block(
    ids: np.ndarray,
    missing: np.ndarray,
    start: int,
    distinct: DistinctCheck,
    moe_layers: Sequence[int],
    num_experts: int,
) -> np.ndarray:
    """Check the rows from `start` and return their ids [n, L, K], with 0 in the rows that hold no
    route, which are noted in `missing`.

    Raises RoutedExpertsError.
    """
    if ids.view(np.uint32).max() >= num_experts:  # a negative id is a huge unsigned one
        ids = note_missing(ids, missing, start, -1)
        if ids.view(np.uint32).max() >= num_experts:
            raise_out_of_range(ids, start, moe_layers, num_experts)
    block = distinct.narrowed(ids)
    if distinct.holds(block.size):
        return block
    # zero rows are searched for only where something is wrong
    block = note_missing(ids, missing, start, 0)
    check_distinct(block, ~missing[start : start + len(ids)], start, moe_layers)
    return block


class DistinctCheck:
    """The check that the K ids of every row are distinct, without gathering columns.  Its memory is
    for one block and is used again.

    With the rows end to end, an id equals another of its row if and only if it equals the one
    `shift` places later, for a shift of 1..K-1.  Every second row has its free top bit set during
    the comparison, so that ids of neighbouring rows never match.
    """

    def __init__(self, max_rows: int, top_k: int, num_experts: int) -> None:
        self.top_k = top_k
        # a type with one bit more than the ids need
        self.lanes = np.empty(max_rows * top_k, np.uint8 if num_experts <= 128 else np.uint16)
        top_bit = 1 << (8 * self.lanes.itemsize - 1)
        self.marks = np.repeat(
            np.arange(max_rows, dtype=self.lanes.dtype) % 2 * self.lanes.dtype.type(top_bit), top_k
        )
        self.flags = bytearray(self.lanes.size)
        self.equal = np.frombuffer(self.flags, bool)

    def narrowed(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids, which are in range, in the memory and type that `holds` reads."""
        lanes = self.lanes[: ids.size].reshape(ids.shape)
        np.copyto(lanes, ids, casting="unsafe")
        return lanes

    def holds(self, size: int) -> bool:
        """Return True if the first `size` ids that `narrowed` copied are distinct in every row."""
        lanes, marks = self.lanes[:size], self.marks[:size]
        np.bitwise_xor(lanes, marks, out=lanes)
        is_repeated = any(self._matches(lanes, shift) for shift in range(1, self.top_k))
        np.bitwise_xor(lanes, marks, out=lanes)  # restores the ids, which the caller copies
        return not is_repeated

    def _matches(self, lanes: np.ndarray, shift: int) -> bool:
        count = len(lanes) - shift
        np.equal(lanes[shift:], lanes[:count], out=self.equal[:count])
        return self.flags.find(1, 0, count) >= 0  # several times faster than any()


def as_slice(indices: Sequence[int]) -> slice | list[int]:
    """Return a slice, which selects without a copy, where the indices are consecutive."""
    run = range(indices[0], indices[0] + len(indices))
    return slice(run.start, run.stop) if list(indices) == list(run) else list(indices)


def encoded_length(num_bytes: int) -> int:
    """Return the number of base64 characters of so many bytes."""
    return (num_bytes + 2) // 3 * 4


def check_length(payload: str | bytes | memoryview, num_bytes: int) -> None:
    expected = encoded_length(num_bytes)
    if len(payload) != expected:
        raise RoutedExpertsError(
            "wrong_size",
            f"{num_bytes} bytes are {expected} base64 characters, the payload has {len(payload)}",
        )


def decode_block(text: str | bytes | memoryview, num_bytes: int) -> np.ndarray:
    """Return the int32 ids of one block of base64 text; `num_bytes` decides whether it may end in
    padding.
    """
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutedExpertsError(
            "not_base64", f"standard base64 without other characters ({error})"
        ) from error
    if len(data) != num_bytes:
        raise RoutedExpertsError(
            "wrong_size", f"a block of {num_bytes} bytes decoded to {len(data)}"
        )
    return np.frombuffer(data, dtype="<i4")


def note_missing(ids: np.ndarray, missing: np.ndarray, start: int, mark: int) -> np.ndarray:
    """Set in `missing` [N] the rows of this block [n, L, K] in which all ids are `mark`; return ids
    with 0 in them.
    """
    # with K = 1 a row of zeros is a valid route to expert 0
    may_be_marked = ids.shape[2] > 1 or mark < 0
    marked = (ids == mark).all((1, 2)) if may_be_marked else np.zeros(len(ids), bool)
    missing[start : start + len(ids)] |= marked
    return np.where(marked[:, None, None], ids.dtype.type(0), ids)


def check_distinct(
    ids: np.ndarray, rows: np.ndarray, first_row: int, moe_layers: Sequence[int]
) -> None:
    """Raise RoutedExpertsError for an id that occurs twice in one row of one layer of ids [n, L,
    K], among `rows` bool [n].

    It compares every pair of the K columns.  DistinctCheck is faster; this function names the error
    and handles blocks with missing rows.
    """
    columns = np.ascontiguousarray(ids.reshape(-1, ids.shape[-1]).T)
    considered = np.repeat(rows, ids.shape[1])
    for a, b in itertools.combinations(columns, 2):
        equal = (a == b) & considered
        if equal.any():
            row, layer = map(int, np.unravel_index(equal.argmax(), ids.shape[:2]))
            rule = "the K experts of a token are distinct"
            if not ids[row, layer].any():
                rule += (
                    "; all zero here but not in the row's other layers: the server never wrote this"
                    " one (zero is expert 0)"
                )
            value = int(a[equal.argmax()])
            raise RoutedExpertsError(
                "duplicate", rule, layer=moe_layers[layer], row=first_row + row, value=value
            )


def raise_out_of_range(
    ids: np.ndarray, first_row: int, moe_layers: Sequence[int], num_experts: int
) -> NoReturn:
    row, layer, column = np.unravel_index((ids.view(np.uint32) >= num_experts).argmax(), ids.shape)
    raise RoutedExpertsError(
        "out_of_range",
        f"0 <= id < {num_experts}",
        layer=moe_layers[int(layer)],
        row=first_row + int(row),
        value=int(ids[row, layer, column]),
    )
