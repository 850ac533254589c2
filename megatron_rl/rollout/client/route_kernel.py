"""The quick path of the decoder of expert ids: base64 text -> checked uint8 ids in layer-major memory, compiled by numba.

Ids below 256 in int32 leave 10 of every 16 base64 characters 'A' (their three upper bytes are zero); the other six hold the
16 characters' three ids, two characters each:

    16 characters   0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    of id           0  0  A  A  A  1  1  A  A  A  2  2  A  A  A  A
    as 6-bit values id0 = v0 << 2 | v1 >> 4,  id1 = v5 << 4 | v6 >> 2,  id2 = v10 << 6 | v11

So one pass over the text checks the ten, decodes the six and checks the bits they may not have: what passes is exactly what a
strict decoder reads as ids in range.  Only clean text is accepted here; what is wrong with other text is not this module's
business (routed_experts.py decodes it again, slowly, and says it).

`step` is written in LLVM's own vectors, which numba's loops do not reach (they decode byte by byte); LLVM lowers them to
what the processor has.  The rest is plain numba.  The compiled code is kept on disk (__pycache__, or NUMBA_CACHE_DIR).
Shapes: N rows, D decoder layers, L MoE layers (consecutive ones), K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

STEP_CHARS, STEP_IDS = 128, 24  # what `step` takes and gives
ROWS = 24  # any model's rows come in multiples of steps in multiples of this many rows
PIECE_IDS = 48 * 1024  # ids that are decoded, checked and stored in turn: they stay in the first-level cache
UNITS = {
    8: np.uint64,
    4: np.uint32,
    2: np.uint16,
    1: np.uint8,
}  # by bytes; K ids are moved in the largest that divides K

ID = np.arange(STEP_IDS)
HIGH = ID // 3 * 16 + np.take([0, 5, 10], ID % 3)  # the character with an id's upper bits; the next one has the lower
OTHERS = np.isin(np.arange(64) % 16, [0, 1, 5, 6, 10, 11], invert=True)  # characters that must be 'A'
SHIFT_HIGH, SHIFT_LOW = np.take([2, 4, 6], ID % 3), np.take([4, 2, 0], ID % 3)
FORBIDDEN_HIGH = np.take([0xC0, 0xF0, 0xFC], ID % 3)  # v5 has 4 bits, v10 2: the others would be those of a zero byte
FORBIDDEN_LOW = np.take([0xCF, 0xC3, 0xC0], ID % 3)
ALPHABET = ((ord("A"), 26, 0), (ord("a"), 26, 26), (ord("0"), 10, 52), (ord("+"), 1, 62), (ord("/"), 1, 63))
ONES, TOP_BITS = 0x0101010101010101, 0x8080808080808080


def decode_clean_rows(
    text: str | bytes | memoryview,
    out: np.ndarray,
    first_row: int,
    num_rows: int,
    num_layers: int,
    layers: slice,
    top: int,
) -> int:
    """Decode base64 text of int32 [num_rows, D, K] into out[:, first_row:], uint8 [L, N, K]; return how many rows are done.

    Ends before the first piece (a multiple of ROWS rows) in which something is not as it should be - a character that is not
    base64, an id above `top` in any layer, an id twice in a row of one of `layers` - and before less than ROWS rows.
    The interpreter is not held.
    """
    if isinstance(text, str):
        if not text.isascii():
            return 0
        text = text.encode("ascii")
    top_k = out.shape[2]
    row_ids = num_layers * top_k
    piece_rows = ROWS * max(1, PIECE_IDS // (ROWS * row_ids))
    scratch = np.empty(piece_rows * row_ids + 8, np.uint8)  # `step` writes 8 ids more, the next step's
    unit = UNITS[next(size for size in UNITS if top_k % size == 0)]
    return _decode(
        np.frombuffer(text, np.uint8),
        scratch,
        scratch[:-8].view(unit).reshape(piece_rows, num_layers, -1),
        out.view(unit),
        first_row,
        num_rows,
        top_k,
        np.int64(layers.start),
        np.uint8(top),
    )


@njit(nogil=True, cache=True)
def _decode(text, scratch, pieces, out, first_row, num_rows, top_k, first_layer, top):  # type: ignore[no-untyped-def]
    """pieces: the same memory as scratch, [piece rows, D, units]; out [L, N, units]."""
    num_layers, row_ids = out.shape[0], pieces.shape[1] * top_k
    done = 0
    while num_rows - done >= ROWS:
        rows = min(len(pieces), (num_rows - done) // ROWS * ROWS)
        begin, size = done * row_ids, rows * row_ids
        bad = np.uint64(0)
        for i in range(size // STEP_IDS):
            at = np.uint64(begin // STEP_IDS + i) * np.uint64(STEP_CHARS)
            bad |= step(text, at, scratch, np.uint64(i) * np.uint64(STEP_IDS), top)  # type: ignore[call-arg]
        if bad:
            break
        if top_k > 1 and not _distinct(scratch, rows, row_ids, first_layer * top_k, num_layers * top_k, top_k):
            break
        target = out[:, first_row + done : first_row + done + rows]
        for unit in range(out.shape[2]):
            for layer in range(num_layers):
                for row in range(rows):
                    target[layer, row, unit] = pieces[row, first_layer + layer, unit]
        done += rows
    return done


@njit(nogil=True, cache=True)
def _distinct(ids, rows, row_ids, first, size, top_k):  # type: ignore[no-untyped-def]
    """Whether no id is twice among the K of a row and layer, in ids[row * row_ids + first :][:size] of every row."""
    found = np.uint64(0)
    if size == row_ids:  # one long row is quicker
        rows, row_ids, size = 1, rows * row_ids, rows * row_ids
    if top_k == 8:
        words = ids[: rows * row_ids].view(np.uint64)
        for row in range(rows):
            found |= _equal_in_words(words[(row * row_ids + first) // 8 : (row * row_ids + first + size) // 8])
        return found == 0
    for row in range(rows):
        part = ids[row * row_ids + first : row * row_ids + first + size]
        for start in range(0, size, top_k):
            for a in range(start, start + top_k - 1):
                for b in range(a + 1, start + top_k):
                    found |= np.uint64(part[a] == part[b])
    return found == 0


@njit(nogil=True, cache=True)
def _equal_in_words(words):  # type: ignore[no-untyped-def]
    """Nonzero if a word has two equal bytes: rotated by 1..4 bytes, every byte meets every other, and equal ones xor to 0."""
    found = np.uint64(0)
    for i in range(len(words)):
        word = words[i]
        for shift in (np.uint64(8), np.uint64(16), np.uint64(24), np.uint64(32)):
            other = word ^ ((word << shift) | (word >> (np.uint64(64) - shift)))
            found |= (other - np.uint64(ONES)) & ~other & np.uint64(TOP_BITS)  # a zero byte's top bit, if it has any
    return found


@intrinsic
def step(typing: Any, text: Any, at: Any, out: Any, to: Any, top: Any) -> Any:
    """Decode text[at : at + 128] into out[to : to + 24] (and write 8 more); nonzero unless all are ids of at most `top`."""
    signature = types.uint64(text, types.uint64, out, types.uint64, types.uint8)
    return signature, _step


def _step(context: Any, build: ir.IRBuilder, signature: Any, arguments: Sequence[Any]) -> Any:
    text, at, out, to, top = arguments
    source = context.make_array(signature.args[0])(context, build, text).data
    target = context.make_array(signature.args[2])(context, build, out).data
    first, second = (
        build.load(_pointer(build, source, build.add(at, ir.Constant(at.type, k)), 64), align=1) for k in (0, 64)
    )
    letter, others = _vector([ord("A")] * 64), _vector(OTHERS * 255)
    bad = build.or_(build.and_(build.xor(first, letter), others), build.and_(build.xor(second, letter), others))

    # lanes 0..23 the characters with upper bits, 32..55 those with lower bits, the rest an 'A'
    picked = np.concatenate([HIGH, [2] * 8, HIGH + 1, [2] * 8])
    chars = build.shuffle_vector(first, second, _vector(picked, 32))
    values = _vector([255] * 64)
    for begin, count, value in ALPHABET:
        isin = build.icmp_unsigned("<", build.sub(chars, _vector([begin] * 64)), _vector([count] * 64))
        values = build.select(isin, build.add(chars, _vector([(value - begin) % 256] * 64)), values)
    forbidden = np.concatenate([FORBIDDEN_HIGH, [255] * 8, FORBIDDEN_LOW, [255] * 8])
    bad = build.or_(bad, build.and_(values, _vector(forbidden)))

    halves = [build.shuffle_vector(values, values, _vector(np.arange(k, k + 32), 32)) for k in (0, 32)]
    high, low = (build.zext(half, ir.VectorType(ir.IntType(16), 32)) for half in halves)
    shift_high, shift_low = (_vector(np.concatenate([shift, [0] * 8]), 16) for shift in (SHIFT_HIGH, SHIFT_LOW))
    wide = build.or_(build.shl(high, shift_high), build.lshr(low, shift_low))
    ids = build.trunc(wide, ir.VectorType(ir.IntType(8), 32))
    build.store(ids, _pointer(build, target, to, 32), align=1)

    lane = build.insert_element(_vector([0] * 32), top, ir.Constant(ir.IntType(32), 0))
    above = build.icmp_unsigned(">", ids, build.shuffle_vector(lane, lane, _vector([0] * 32, 32)))
    above = build.zext(build.bitcast(above, ir.IntType(32)), ir.IntType(64))
    return build.or_(above, build.bitcast(build.icmp_unsigned("!=", bad, _vector([0] * 64)), ir.IntType(64)))


def _vector(values: Any, bits: int = 8) -> ir.Constant:
    numbers = [int(value) for value in values]
    return ir.Constant(ir.VectorType(ir.IntType(bits), len(numbers)), numbers)


def _pointer(build: ir.IRBuilder, base: Any, offset: Any, lanes: int) -> Any:
    """base + offset, to a vector of bytes."""
    return build.bitcast(build.gep(base, [offset]), ir.VectorType(ir.IntType(8), lanes).as_pointer())
