"""The check of saved kept sets (rollout.top_p, top_k, min_p; check_rollouts.py).

sizes  uint16 [R], ids of each set
codes  uint8 [bytes], the ids of set after set, ascending: the first as it is, every other as its
       distance from the one before, as LEB128 numbers (groups of 7 bits, the lowest first; all
       bytes of a number but its last have the top bit set)
"""

from __future__ import annotations

import numpy as np

from megatron_rl_tools.check_rollouts.dumped import Dumped, Problems


def check_kept_sets(dumped: Dumped, vocab_size: int | None) -> Problems:
    """Check that every sampled token is in its kept set, whose ids are in the vocabulary."""
    sizes, codes = dumped.mask
    if sizes is None and codes is None:
        return
    if sizes is None or codes is None:
        kind = "sizes" if sizes is None else "codes"
        yield "mask", f"{kind} are missing", "files of two runs mixed"
        return
    is_sampled = np.arange(len(dumped.tokens)) >= dumped.record.prompt_length
    for start, end in dumped.environment:
        is_sampled[start:end] = False
    try:
        ids = checked_ids(sizes, codes, dumped.tokens[is_sampled])
    except ValueError as error:
        cause = "sets of another rollout or shifted by a token, or tokens edited after sampling"
        yield "mask", f"rollout {dumped.record.id}: {error}", cause
        return
    if vocab_size is not None and len(ids) and ids.max() >= vocab_size:
        text = f"kept id {ids.max()}, must be below the vocabulary {vocab_size}"
        yield "mask", text, "another model"


def checked_ids(sizes: np.ndarray, codes: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Return the ids int64 [N] of all sets.  Raises ValueError for a token outside its set."""
    if len(sizes) != len(sampled):
        raise ValueError(f"{len(sizes)} kept sets for {len(sampled)} sampled tokens")
    ids, starts = decode_sets(sizes, codes)
    if not len(sampled):
        return ids
    is_inside = np.logical_or.reduceat(ids == np.repeat(sampled, sizes), starts)
    if not is_inside.all():
        at = int(is_inside.argmin())
        kept = ids[starts[at] :][: sizes[at]]
        shown = f"{kept[:8].tolist()}{' ...' if len(kept) > 8 else ''}"
        raise ValueError(
            f"sampled token {at} of {len(sampled)} is {int(sampled[at])}, not in its kept set of"
            f" {len(kept)} ids {shown}: the set is another token's, or tokens were edited after"
            " sampling"
        )
    return ids


def decode_sets(sizes: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids int64 [N] of all sets, and the place int64 [R] of the first one of every set.

    Raises ValueError if codes and sizes do not belong together.
    """
    is_last = codes < 128
    starts = np.flatnonzero(np.append(True, is_last[:-1]))[: len(codes)]  # of numbers
    lengths = np.diff(starts, append=len(codes))
    if len(codes) and (not is_last[-1] or lengths.max() > 5):
        raise ValueError("kept sets: the encoded ids are cut or damaged")
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    groups = (codes & np.uint8(127)).astype(np.int64) << (7 * place)
    steps = np.add.reduceat(groups, starts) if len(codes) else groups
    if len(steps) != int(sizes.sum()) or not sizes.all():
        total = int(sizes.sum())
        raise ValueError(
            f"kept sets: {len(steps)} ids are encoded for {len(sizes)} sets of {total} in all"
        )
    first = np.cumsum(sizes, dtype=np.int64) - sizes
    totals = np.cumsum(steps)
    return totals - np.repeat(totals[first] - steps[first], sizes), first
