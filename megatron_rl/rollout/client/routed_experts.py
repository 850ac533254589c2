"""Expert ids of a response: decode and validate what SGLang sends, keep them compact, save and load them.

SGLang sends base64 of little-endian int32 in C order, shape [num_rows, num_layers, K]: row j holds the experts of the
forward of token j, layer l is decoder layer l (dense layers included, meaningless), ids are logical expert ids.
Shapes: N rows, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

import binascii
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pybase64
from safetensors.numpy import load_file, save_file

logger = logging.getLogger(__name__)

CleanDecoder = Callable[[str | bytes | memoryview, np.ndarray, int, int, int, slice, int], int]
BLOCK_BYTES = (
    288 * 1024
)  # int32 bytes decoded at a time by NumPy: all of a block's arrays stay in the cache and under 1 MiB
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes: faster to move than an opaque type
BLOCK_ROWS = (
    24  # a block is a multiple of so many rows: it begins at a group of 4 base64 characters, and suits route_kernel
)
CHUNK_BLOCKS = 4  # for one call of the compiled decoder


@dataclass(frozen=True)
class ServedModel:
    """What the client must know about the served model to judge an answer.

    num_layers   decoder layers, dense ones included
    moe_layers   indices of the MoE layers among them, ascending
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    num_experts: int
    vocab_size: int


class RoutedExpertsError(ValueError):
    """A routed_experts payload that must not be used.

    `reason` is a short code for counting; `layer` (decoder layer), `row` and `value` locate the first offence, None
    where it has no place.
    """

    def __init__(
        self, reason: str, rule: str, *, layer: int | None = None, row: int | None = None, value: int | None = None
    ) -> None:
        place = "" if layer is None else f" at layer {layer}, row {row}: {value}"
        super().__init__(f"routed_experts: {reason}{place}; rule: {rule}")
        self.reason = reason
        self.rule = rule
        self.layer = layer
        self.row = row
        self.value = value


def decode_routed_experts(
    payload: str | bytes | memoryview,
    *,
    num_rows: int,
    num_layers: int,
    moe_layers: Sequence[int],
    top_k: int,
    num_experts: int,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (ids, missing): ids uint8 (int16 above 256 experts) [N, L, K], the MoE layers of a base64 int32
    [num_rows, num_layers, K]; missing bool [N], the rows that hold no route (their ids are 0), or None: there is none.

    In memory ids are layer-major, [L, N, K]: training ranks copy whole layers of them.

    A row holds no route where all MoE layers of it are -1 (how engines mark one), or all are 0 and K > 1: ids of a row are
    distinct, so zeros were never written; with K = 1 zero is expert 0.  What to do about it is the user's choice
    (replay.on_missing_route).  A row that lacks some layers only is damage, not a gap.  So is a payload that is too short: which of its
    rows are missing is not known, and the rest would be aligned by a guess.

    Refuses, with RoutedExpertsError: a payload that is not strict base64 (not_base64) or not exactly as long as the
    shape says (wrong_size), an id outside 0..E-1 (out_of_range), an id twice in one row of one layer (duplicate), no route in
    any row (never_written).  What structure cannot show - a shift by one token, swapped layers, another request's routes -
    must be caught by comparing with the model's own routing.
    """
    row_bytes = num_layers * top_k * 4
    check_length(payload, num_rows * row_bytes)
    out = np.empty((len(moe_layers), num_rows, top_k), dtype=np.uint8 if num_experts <= 256 else np.int16)
    layers = as_slice(moe_layers)
    decode_clean = clean_decoder() if out.dtype == np.uint8 and out.size else None
    slowly: BlockDecoder | None = None
    gaps = np.zeros(num_rows, bool)
    block_rows = BLOCK_ROWS * max(1, BLOCK_BYTES // (BLOCK_ROWS * row_bytes))
    chunk_rows = CHUNK_BLOCKS * block_rows
    for start in range(0, num_rows, chunk_rows):
        stop, done = min(start + chunk_rows, num_rows), 0
        if decode_clean is not None and isinstance(layers, slice):
            text = payload[start * row_bytes // 3 * 4 : (stop * row_bytes + 2) // 3 * 4]
            done = decode_clean(text, out, start, stop - start, num_layers, layers, num_experts - 1)
        if start + done < stop:  # a rest, or something is wrong: what, or that it is a gap, is found out here
            slowly = slowly or BlockDecoder(num_layers, moe_layers, top_k, num_experts, min(block_rows, num_rows))
            slowly.decode(payload, out, gaps, start + done // block_rows * block_rows, stop)
    return out.transpose(1, 0, 2), missing_rows_or_none(gaps)


def warm_up(spec: ServedModel) -> None:
    """Compile what decodes this model's ids, or load it from disk: the first time on a machine that takes seconds."""
    ids = np.empty((BLOCK_ROWS, spec.num_layers, spec.top_k), "<i4")
    ids[:] = np.arange(spec.top_k)
    decode_routed_experts(
        pybase64.b64encode(ids.tobytes()),
        num_rows=BLOCK_ROWS,
        num_layers=spec.num_layers,
        moe_layers=spec.moe_layers,
        top_k=spec.top_k,
        num_experts=spec.num_experts,
    )


def save_routed_experts(path: Path, routes: Mapping[str, np.ndarray]) -> None:
    """Write rollout id -> [N, L, K] as a safetensors file."""
    save_file({name: np.ascontiguousarray(ids) for name, ids in routes.items()}, path)


def load_routed_experts(path: Path) -> dict[str, np.ndarray]:
    """Read what save_routed_experts wrote: same ids, shapes and dtypes."""
    return load_file(path)


class BlockDecoder:
    """Decodes any rows in NumPy, or says why they must not be used.  Takes arrays for one block, and uses them again."""

    def __init__(
        self, num_layers: int, moe_layers: Sequence[int], top_k: int, num_experts: int, block_rows: int
    ) -> None:
        self.num_layers = num_layers
        self.moe_layers = moe_layers
        self.layers = as_slice(moe_layers)
        self.top_k = top_k
        self.num_experts = num_experts
        self.row_bytes = num_layers * top_k * 4
        self.block_rows = block_rows
        self.distinct = DistinctCheck(block_rows * len(moe_layers), top_k, num_experts)

    def decode(
        self, payload: str | bytes | memoryview, out: np.ndarray, gaps: np.ndarray, first: int, last: int
    ) -> None:
        """Rows first..last-1 of `payload` into out [L, N, K]; note in `gaps` [N] those that hold no route.

        `first` is a multiple of BLOCK_ROWS, and so is `last` unless it is N.  Raises RoutedExpertsError.
        """
        row_type = WORDS.get(
            self.top_k * out.itemsize, f"V{self.top_k * out.itemsize}"
        )  # the K ids of a row move together
        row_words = out.view(row_type)[..., 0]
        for start in range(first, last, self.block_rows):
            stop = min(start + self.block_rows, last)
            text = payload[start * self.row_bytes // 3 * 4 : (stop * self.row_bytes + 2) // 3 * 4]
            ids = decode_block(text, (stop - start) * self.row_bytes)
            ids = ids.reshape(stop - start, self.num_layers, self.top_k)[:, self.layers]
            block = self._checked(ids, gaps, start).astype(out.dtype, copy=False)
            row_words[:, start:stop] = block.view(row_type)[..., 0].T

    def _checked(self, ids: np.ndarray, gaps: np.ndarray, start: int) -> np.ndarray:
        """The ids [n, L, K] of the rows from `start` on, with 0 in gaps.  Raises RoutedExpertsError."""
        if ids.size and ids.view(np.uint32).max() >= self.num_experts:  # a negative id is a huge unsigned one
            ids = without_gaps(ids, gaps, start, -1)
            if ids.view(np.uint32).max() >= self.num_experts:
                raise_out_of_range(ids, start, self.moe_layers, self.num_experts)
        block = self.distinct.narrowed(ids)
        if self.distinct.holds(block.size):
            return block
        block = without_gaps(ids, gaps, start, 0)  # gaps are looked for only where something is wrong
        if (offence := find_duplicate(block, ~gaps[start : start + len(ids)])) is not None:
            raise_duplicate(block, offence, start, self.moe_layers)
        return block


class DistinctCheck:
    """Whether the K ids of every row are distinct, without gathering columns: memory for one block, used again.

    An id equals another of its row if and only if, with the rows end to end, it equals the one `shift` places on, for a
    shift of 1..K-1.  So that ids of neighbouring rows never do, every other row has the free top bit set meanwhile.
    """

    def __init__(self, max_rows: int, top_k: int, num_experts: int) -> None:
        self.top_k = top_k
        self.lanes = np.empty(max_rows * top_k, np.uint8 if num_experts <= 128 else np.uint16)
        top_bit = 1 << (8 * self.lanes.itemsize - 1)
        self.marks = np.repeat(np.arange(max_rows, dtype=self.lanes.dtype) % 2 * self.lanes.dtype.type(top_bit), top_k)
        self.flags = bytearray(self.lanes.size)
        self.equal = np.frombuffer(self.flags, bool)

    def narrowed(self, ids: np.ndarray) -> np.ndarray:
        """The ids, in range, in the memory and type that `holds` looks at."""
        lanes = self.lanes[: ids.size].reshape(ids.shape)
        np.copyto(lanes, ids, casting="unsafe")
        return lanes

    def holds(self, size: int) -> bool:
        """For the first `size` of the ids that `narrowed` took."""
        lanes, marks = self.lanes[:size], self.marks[:size]
        np.bitwise_xor(lanes, marks, out=lanes)
        found = any(self._meets(lanes, shift) for shift in range(1, self.top_k))
        np.bitwise_xor(lanes, marks, out=lanes)
        return not found

    def _meets(self, lanes: np.ndarray, shift: int) -> bool:
        count = max(0, len(lanes) - shift)
        np.equal(lanes[shift:], lanes[:count], out=self.equal[:count])
        return self.flags.find(1, 0, count) >= 0  # several times faster than any()


@functools.cache
def clean_decoder() -> CleanDecoder | None:
    """route_kernel.decode_clean_rows, or None where numba cannot be used: that is logged, once, and NumPy decodes everything."""
    try:
        from megatron_rl.rollout.client.route_kernel import decode_clean_rows
    except (ImportError, RuntimeError) as error:  # RuntimeError: no folder in which compiled code could be kept
        logger.warning(
            "expert ids are decoded by NumPy, several times slower than by numba, which cannot be used: %r", error
        )
        return None
    return decode_clean_rows


def as_slice(indices: Sequence[int]) -> slice | list[int]:
    """A slice where the indices are consecutive, which selects without a copy."""
    run = range(indices[0], indices[0] + len(indices)) if len(indices) else range(0)
    return slice(run.start, run.stop) if list(indices) == list(run) else list(indices)


def check_length(payload: str | bytes | memoryview, num_bytes: int) -> None:
    expected = (num_bytes + 2) // 3 * 4
    if len(payload) != expected:
        raise RoutedExpertsError(
            "wrong_size", f"{num_bytes} bytes are {expected} base64 characters, the payload has {len(payload)}"
        )


def decode_block(text: str | bytes | memoryview, num_bytes: int) -> np.ndarray:
    """int32 ids of one block of base64 text; `num_bytes` decides whether padding may stand at its end."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutedExpertsError("not_base64", f"standard base64 without other characters ({error})") from error
    if len(data) != num_bytes:
        raise RoutedExpertsError("wrong_size", f"a block of {num_bytes} bytes decoded to {len(data)}")
    return np.frombuffer(data, dtype="<i4")


def without_gaps(ids: np.ndarray, gaps: np.ndarray, first_row: int, sign: int) -> np.ndarray:
    """Note in `gaps` [num_rows] the rows of this block [n, L, K] whose every id is `sign`; return ids with 0 in them."""
    found = (ids == sign).all((1, 2)) if ids.shape[2] > 1 or sign < 0 else np.zeros(len(ids), bool)
    gaps[first_row : first_row + len(ids)] |= found
    return np.where(found[:, None, None], ids.dtype.type(0), ids)


def missing_rows_or_none(gaps: np.ndarray) -> np.ndarray | None:
    if not gaps.any():
        return None
    if gaps.all():
        raise RoutedExpertsError(
            "never_written", "some row holds a route; all of them are -1 or zero in every MoE layer"
        )
    return gaps


def find_duplicate(ids: np.ndarray, rows: np.ndarray) -> tuple[int, int, int] | None:
    """(row, layer, id) of the first id that stands twice in one row of one layer of ids [n, L, K], among `rows` bool [n].

    Compares every pair of the K columns, for an error message or next to gaps; DistinctCheck is quicker.
    """
    columns = np.ascontiguousarray(ids.reshape(-1, ids.shape[-1]).T)
    considered = np.repeat(rows, ids.shape[1])
    for a, b in itertools.combinations(columns, 2):
        equal = (a == b) & considered
        if equal.any():
            row, layer = np.unravel_index(equal.argmax(), ids.shape[:2])
            return int(row), int(layer), int(a[equal.argmax()])
    return None


def raise_duplicate(
    ids: np.ndarray, offence: tuple[int, int, int], first_row: int, moe_layers: Sequence[int]
) -> NoReturn:
    row, layer, value = offence
    rule = "the K experts of a token are distinct"
    if not ids[row, layer].any():
        rule += "; all zero here but not in the row's other layers: the server never wrote this one (zero is expert 0)"
    raise RoutedExpertsError("duplicate", rule, layer=moe_layers[layer], row=first_row + row, value=value)


def raise_out_of_range(ids: np.ndarray, first_row: int, moe_layers: Sequence[int], num_experts: int) -> NoReturn:
    row, layer, column = np.unravel_index((ids.view(np.uint32) >= num_experts).argmax(), ids.shape)
    raise RoutedExpertsError(
        "out_of_range",
        f"0 <= id < {num_experts}",
        layer=moe_layers[int(layer)],
        row=first_row + int(row),
        value=int(ids[row, layer, column]),
    )
