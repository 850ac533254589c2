"""Kept sets: the encoding gives them back, its bytes are those the guide states, a set of another
token is refused.
"""

import numpy as np
import pytest

from megatron_rl.records.row_sets import sets_of_tokens
from megatron_rl.records.token_sets import (
    TokenSets,
    check_mask,
    from_varints,
    join_masks,
    to_varints,
)

ROUTES_BYTES = 48 * 8  # of a token: 48 layers, top-8, uint8


def make_mask(rng, sampled, most=5, vocab=64):
    """Sets of 1 to `most` ids with the sampled token among them, shuffled."""
    sets = []
    for token in sampled.tolist():
        others = rng.permutation(np.delete(np.arange(vocab), token))[: rng.integers(0, most)]
        sets.append(rng.permutation(np.append(others, token)))
    return TokenSets.of(np.array([len(own) for own in sets]), np.concatenate(sets)), sets


def test_varints_of_every_length_come_back():
    values = np.array([0, 1, 127, 128, 300, 16383, 16384, 2**21 - 1, 2**21, 2**31 - 1, 0, 5])
    codes = to_varints(values)
    assert codes.dtype == np.uint8 and len(codes) == 1 + 1 + 1 + 2 + 2 + 2 + 3 + 3 + 4 + 5 + 1 + 1
    assert from_varints(codes).tolist() == values.tolist()
    assert len(from_varints(to_varints(np.zeros(0, np.int64)))) == 0
    for damaged in (
        codes[:4],
        codes[:-3],
        np.full(6, 128, np.uint8),
        np.array([128] * 5 + [1], np.uint8),
    ):
        with pytest.raises(ValueError, match="cut or damaged"):
            from_varints(damaged)


@pytest.mark.parametrize("seed", range(5))
def test_sets_come_back_sorted_and_joined(seed):
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 64, rng.integers(1, 9)) for _ in range(3)]
    masks, sets = zip(*(make_mask(rng, part) for part in parts), strict=True)
    joined = join_masks(masks)
    expected = [sorted(own) for each in sets for own in each]
    cuts = np.cumsum(joined.sizes)[:-1]
    assert [own.tolist() for own in np.split(joined.ids(), cuts)] == expected
    check_mask("r", joined, np.concatenate(parts))


@pytest.mark.parametrize(
    ("sizes", "ids", "found"),
    [
        ([2, 1], [3, 3, 5], "set 0 has id 3"),
        ([1, 2], [3, -1, 5], "set 1 has id -1"),
        ([2, 0], [3, 5], "sets of 0 to 2 ids"),
        ([70_000], range(70_000), "must be 1 to 65535"),
        ([2], [3], "1 ids for sets of 2"),
    ],
)
def test_impossible_sets_are_refused(sizes, ids, found):
    with pytest.raises(ValueError, match=found):
        TokenSets.of(np.array(sizes), np.array(list(ids)))


def test_a_set_of_another_token_is_named_with_rollout_token_and_position():
    mask = TokenSets.of(np.array([2, 3, 1]), np.array([7, 9, 1, 2, 3, 40]))
    sampled = np.array([9, 2, 40])
    assert check_mask("q/0", mask, sampled).tolist() == [7, 9, 1, 2, 3, 40]
    with pytest.raises(
        ValueError,
        match=r"rollout q/0: sampled token 1 of 3 is 9, not in its kept set of 3 ids \[1, 2, 3\]",
    ):
        check_mask("q/0", mask, np.array([9, 9, 40]))
    with pytest.raises(ValueError, match="rollout q/0: 3 kept sets for 2 sampled tokens"):
        check_mask("q/0", mask, sampled[:2])
    cut = TokenSets(mask.sizes, mask.codes[:-1])
    with pytest.raises(
        ValueError, match="rollout q/0: kept sets: 5 ids are encoded for 3 sets of 6"
    ):
        check_mask("q/0", cut, sampled)
    for shift in (1, -1):
        with pytest.raises(ValueError, match="another token's"):
            check_mask(
                "q/0",
                TokenSets.of(np.array([2, 3, 1]), np.roll([7, 9, 1, 2, 3, 40], shift)),
                sampled,
            )


def test_rows_find_their_sets_in_any_cut_of_a_batch():
    rng = np.random.default_rng(0)
    sampled = [rng.integers(0, 64, n) for n in (4, 1, 6)]
    masks, sets = zip(*(make_mask(rng, part) for part in sampled), strict=True)
    flat = [own for each in sets for own in each]
    # as rows of a context rank: any order, with holes
    tokens = np.array([-1, 3, 0, -1, 10, 5, 4, -1])
    kept = sets_of_tokens(masks, tokens)
    assert kept.is_empty.tolist() == [token < 0 for token in tokens]
    for row, token in enumerate(tokens.tolist()):
        own = slice(int(kept.offsets[row]), int(kept.offsets[row + 1]))
        assert kept.ids[own].tolist() == ([] if token < 0 else sorted(flat[token]))
        assert (kept.rows[own] == row).all()


def test_blocks_cover_all_rows_and_bound_the_ids(monkeypatch):
    monkeypatch.setattr("megatron_rl.records.row_sets.BLOCK_IDS", 6)
    sampled = np.arange(9)
    sizes = np.array([1, 5, 3, 3, 8, 1, 1, 1, 1])
    mask = TokenSets.of(
        sizes, np.concatenate([np.arange(n) + i for i, n in enumerate(sizes.tolist())])
    )
    kept = sets_of_tokens([mask], sampled)
    blocks = list(kept.blocks(0, 9))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(9))
    sizes = [int(kept.offsets[block.stop] - kept.offsets[block.start]) for block in blocks]
    assert all(
        size <= 6 or block.stop - block.start == 1
        for size, block in zip(sizes, blocks, strict=True)
    )
    assert len(blocks) == 4 and list(kept.blocks(2, 2)) == []


@pytest.mark.parametrize(
    ("kept", "low", "high"), [(1, 4.7, 5.1), (4, 12.5, 14), (17, 36, 38.4), (50, 95, 102)]
)
def test_bytes_of_a_token_are_those_of_the_guide(kept, low, high):
    """Sets of uniformly random ids of a vocabulary of 151,936, the worst case:
    results/sampling.md.
    """
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.choice(151_936, kept, replace=False) for _ in range(500)])
    mask = TokenSets.of(np.full(500, kept), ids)
    assert low <= mask.nbytes / 500 <= high
    assert (mask.nbytes / 500 <= 0.1 * ROUTES_BYTES) == (kept <= 17)
