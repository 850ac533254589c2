import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.records.packed import RowState
from megatron_rl.replay.layout import (
    RankLayout,
    check_local_routes,
    check_routes,
    pad_routes,
    word_type,
    zigzag_rows,
)


def layout(**changes):
    values = dict(
        layers=(1, 2),
        tp_rank=0,
        tp_size=1,
        sequence_parallel=False,
        num_experts=8,
        top_k=2,
        ep_size=2,
    )
    return RankLayout(**{**values, **changes})


def test_rows_of_every_tp_rank_tile_the_packed_order():
    rows = [
        layout(tp_rank=r, tp_size=4, sequence_parallel=True).router_rows(torch.tensor([0, 9, 24]))
        for r in range(4)
    ]
    assert [i for part in rows for i in range(24)[part]] == list(range(24))
    assert layout(tp_rank=2, tp_size=4, sequence_parallel=False).router_rows(
        torch.tensor([0, 24])
    ) == slice(0, 24)
    with pytest.raises(
        ValueError, match=r"micro-batch of 26 rows.*parallel\.tp = 4: .*pack with pad_multiple = 4"
    ):
        layout(tp_size=4, sequence_parallel=True).router_rows(torch.tensor([0, 26]))


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
)
def test_rows_under_context_and_sequence_parallelism_against_a_loop(cp, tp, sp, sizes):
    """Chunk by chunk: a row of a sequence of n rows is in chunk c = row // (n / 2cp), which rank
    min(c, 2cp-1-c) holds.
    """
    multiple = 2 * cp if cp > 1 else 1
    pads = layout(cp_size=cp, tp_size=tp, sequence_parallel=sp)
    assert pads.sequence_multiple == multiple and pads.pad_multiple % multiple == 0
    lengths = [size * multiple for size in sizes]
    lengths.append(-sum(lengths) % pads.pad_multiple)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    held: dict[int, list[int]] = {rank: [] for rank in range(cp)}
    row = 0
    for length in lengths:
        for position in range(length):
            if cp == 1:
                held[0].append(row)
            else:
                chunk = position // (length // (2 * cp))
                held[min(chunk, 2 * cp - 1 - chunk)].append(row)
            row += 1
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            place = layout(
                cp_rank=cp_rank, cp_size=cp, tp_rank=tp_rank, tp_size=tp, sequence_parallel=sp
            )
            assert torch.arange(row)[place.model_rows(cu_seqlens)].tolist() == held[cp_rank]
            share = len(held[cp_rank]) // tp if sp else len(held[cp_rank])
            first = tp_rank * share if sp else 0
            assert (
                torch.arange(row)[place.router_rows(cu_seqlens)].tolist()
                == held[cp_rank][first : first + share]
            )


def test_a_sequence_that_cp_cannot_cut_is_refused():
    with pytest.raises(
        ValueError, match="sequence of 6 rows is not a multiple of 2 x parallel.cp = 4"
    ):
        zigzag_rows(torch.tensor([0, 8, 14]), 0, 2)


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(
        [(1, 1, False), (1, 2, False), (1, 4, True), (2, 1, False), (2, 2, True), (4, 2, True)]
    ),
    st.lists(st.integers(2, 12), min_size=1, max_size=4),
    st.integers(0, 9),
    st.sampled_from([(0, 1, 2, 3, 4), (2, 3), (0, 3, 4), (0, 2, 4), (1,), ()]),
    st.sampled_from([np.uint8, np.int16]),
    st.booleans(),
    st.booleans(),
)
def test_local_routes_against_a_loop(cut, lengths, more_pads, layers, dtype, layer_major, reuse):
    """Every (row, layer) of every rank holds the ids of its own token and layer; pads are distinct;
    the source is kept.
    """
    cp, tp, sp = cut
    top_k, rng = 2, np.random.default_rng(sum(lengths))
    routes = [rng.integers(0, 8, (size - 1, 5, top_k)).astype(dtype) for size in lengths]
    if layer_major:
        routes = [np.ascontiguousarray(ids.transpose(1, 0, 2)).transpose(1, 0, 2) for ids in routes]
    before = [ids.copy() for ids in routes]
    place = layout(cp_size=cp, tp_size=tp, sequence_parallel=sp)
    starts = [0]
    for size in lengths:
        starts.append(starts[-1] + -(-size // place.sequence_multiple) * place.sequence_multiple)
    end = -(-(starts[-1] + more_pads) // place.pad_multiple) * place.pad_multiple
    bounds = torch.tensor([*starts, end] if end > starts[-1] else starts)
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            rank = layout(
                layers=layers,
                cp_rank=cp_rank,
                cp_size=cp,
                tp_rank=tp_rank,
                tp_size=tp,
                sequence_parallel=sp,
                top_k=top_k,
            )
            rows = torch.arange(end)[rank.router_rows(bounds)].tolist()
            assert rank.num_router_rows(end) == len(rows)
            memory = np.full(end * 10 + 3, 99, dtype) if reuse else None
            local = rank.local_routes(routes, bounds, memory)
            assert local.shape == (len(layers), len(rows), top_k) and local.dtype == dtype
            assert not reuse or not local.size or np.shares_memory(local, memory)
            for index, row in enumerate(rows):
                sequence = max(b for b in range(len(lengths)) if starts[b] <= row)
                position = row - starts[sequence]
                for l, layer in enumerate(layers):  # noqa: E741
                    if position < lengths[sequence] - 1:
                        assert (
                            local[l, index].tolist() == before[sequence][position, layer].tolist()
                        )
                    elif position == lengths[sequence] - 1:
                        assert local[l, index].tolist() == [0, 0]  # the last token: LIVE
                    else:
                        assert (
                            len(set(local[l, index].tolist())) == top_k
                            and local[l, index].max() < 8
                        )
    assert all((a == b).all() for a, b in zip(before, routes, strict=True)), (
        "the given routes must not change"
    )


CUTS = [
    (1, 1, False),
    (1, 2, False),
    (1, 2, True),
    (1, 3, True),
    (2, 1, False),
    (2, 2, True),
    (3, 2, True),
    (2, 4, True),
]


def who_sits_where(cp, tp, sp, width, length):
    """[cp rank][tp rank] -> its router rows, each (sequence, position): position by position, all
    sequences at each.
    """
    places = []
    for cp_rank in range(cp):
        # positions of this context rank: walk over the 2 x cp pieces of a sequence, keep the ones
        # dealt to it
        mine = []
        owners = [*range(cp), *reversed(range(cp))]
        for position in range(length):
            if cp == 1 or owners[position // (length // (2 * cp))] == cp_rank:
                mine.append(position)
        per_tensor_rank = []
        for tp_rank in range(tp):
            rows = []
            for index, position in enumerate(mine):
                for sequence in range(width):
                    if not sp or index // (len(mine) // tp) == tp_rank:
                        rows.append((sequence, position))
            per_tensor_rank.append(rows)
        places.append(per_tensor_rank)
    return places


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(CUTS),
    st.lists(st.integers(2, 14), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([(0, 1, 2, 3), (2, 3), (0, 3), ()]),
    st.booleans(),
)
def test_padded_rows_and_routes_against_a_loop(
    cut, lengths, pad_sequences, more_pads, layers, reuse
):
    """BSHD: every row of every rank is the (sequence, position) that the loop says, once over all
    ranks, and so are its ids.
    """
    cp, tp, sp = cut
    rng = np.random.default_rng(len(lengths))
    routes = [rng.integers(1, 8, (size - 1, 4, 2)).astype(np.uint8) for size in lengths]
    multiple = layout(cp_size=cp, tp_size=tp, sequence_parallel=sp, padded=True).sequence_multiple
    length = (-(-max(lengths) // multiple) + more_pads) * multiple
    width = len(lengths) + pad_sequences
    bounds = torch.arange(width + 1, dtype=torch.int32) * length
    seen = []
    for cp_rank, per_tensor_rank in enumerate(who_sits_where(cp, tp, sp, width, length)):
        for tp_rank, expected in enumerate(per_tensor_rank):
            rank = layout(
                layers=layers,
                padded=True,
                sequence_parallel=sp,
                cp_rank=cp_rank,
                cp_size=cp,
                tp_rank=tp_rank,
                tp_size=tp,
            )
            rows = torch.arange(width * length)[rank.router_rows(bounds)].tolist()
            assert [divmod(row, length) for row in rows] == expected
            assert rank.num_router_rows(width * length) == len(rows)
            model = torch.arange(width * length)[rank.model_rows(bounds)].tolist()
            assert (
                model == sorted(model)
                and set(rows) <= set(model)
                and (set(rows) == set(model) or sp)
            )
            seen += expected if sp or tp_rank == 0 else []
            memory = np.full(width * length * 8 + 3, 99, np.uint8) if reuse else None
            local = rank.local_routes(routes, bounds, memory)
            assert local.shape == (len(layers), len(rows), 2)
            pads = []
            for index, (sequence, position) in enumerate(expected):
                for l, layer in enumerate(layers):  # noqa: E741
                    size = lengths[sequence] if sequence < len(lengths) else 0
                    if position < size - 1:
                        assert (
                            local[l, index].tolist() == routes[sequence][position, layer].tolist()
                        )
                    elif position == size - 1:
                        assert local[l, index].tolist() == [0, 0]
                    elif l == 0:
                        pads.append(local[l, index].tolist())
            assert all(a != b for a, b in pads)
            load = np.bincount(np.array(pads, int).flatten(), minlength=8)
            assert load.max() - load.min() <= 1
    assert sorted(seen) == [
        (sequence, position) for sequence in range(width) for position in range(length)
    ]


def test_padded_micro_batches_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"sequences of \[4, 8\] rows in a padded micro-batch, must have equal"
    ):
        layout(padded=True).router_rows(torch.tensor([0, 4, 12]))
    with pytest.raises(
        ValueError, match=r"sequences of 6 rows .*parallel\.tp = 4.*sequence_multiple = 4"
    ):
        layout(padded=True, tp_size=4, sequence_parallel=True).router_rows(torch.tensor([0, 6, 12]))


@given(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 8), st.integers(1, 50))
def test_pads_are_distinct_and_even_over_ep_ranks(ep, per_rank, top_k, rows):
    experts = ep * per_rank
    top_k = min(top_k, experts)
    routes = pad_routes(rows, experts, top_k, ep)
    assert routes.shape == (rows, top_k) and routes.min() >= 0 and routes.max() < experts
    assert all(len(set(row)) == top_k for row in routes.tolist())
    load = torch.bincount((routes // per_rank).flatten(), minlength=ep)
    assert load.max() - load.min() <= 1


ROWS, LAYERS, EXPERTS, K = 24, 3, 16, 4


def honest(seed=0, dtype=np.uint8):
    scores = np.random.default_rng(seed).random((ROWS, LAYERS, EXPERTS))
    return scores.argsort(-1)[..., :K].astype(dtype)


def refuse(routes, names=("q1/3",)):
    """As RolloutRoutes on a rank that holds layers 4, 5, 6: shapes of all rollouts, then the ids it
    will use.
    """
    check_routes(routes, names, num_layers=LAYERS, num_experts=EXPERTS, top_k=K)
    local = np.concatenate(
        [np.concatenate([ids, np.zeros_like(ids[:1])]) for ids in routes]
    ).transpose(1, 0, 2)
    state = torch.cat(
        [torch.tensor([RowState.REPLAYED] * len(ids) + [RowState.LIVE]) for ids in routes]
    )
    check_local_routes(
        local, state, (4, 5, 6), EXPERTS, lambda row: f"rollout {names[0]}, row {row}"
    )


def put(where, value, dtype=np.uint8):
    routes = honest(dtype=dtype)
    routes[where] = value
    return routes


def test_check_accepts_valid_routes_and_ignores_rows_that_are_not_replayed():
    refuse([honest(), honest(1)], ("q1/3", "q1/4"))
    refuse([honest(dtype=np.int16)])
    everything = np.full((1, ROWS, K), 99, np.uint8)
    check_local_routes(everything, torch.full((ROWS,), RowState.LIVE), (0,), EXPERTS, str)


MALFORMED = {  # what a broken server or transport makes of good routes -> the words of the refusal
    "one duplicate": (
        put((5, 1), (3, 3, 1, 2)),
        r"q1/3, row 5: .* MoE layer 5 are \[3, 3, 1, 2\], must be distinct ids in a row$",
    ),
    "a row of one id": (put(5, 7), r"row 5: .*\[7, 7, 7, 7\], must be distinct"),
    "a zero row": (
        put(5, 0),
        r"row 5: .*zero means expert 0, not missing: the row was never written",
    ),
    "a zero tail": (put(np.s_[20:], 0), "row 20: .*the row was never written"),
    "a zero layer": (put(np.s_[:, 2], 0), "MoE layer 6 .*all rows of this layer here are zero"),
    "all zero": (put(np.s_[:], 0), "MoE layer 4 .*all rows of this layer here are zero"),
    "id = experts": (put((3, 0, 1), EXPERTS), r"row 3: .*must be ids in 0\.\.15"),
    "id 999": (put((3, 0, 1), 999, np.int16), "999.*must be ids"),
    "-1": (put((3, 0, 1), -1, np.int16), "-1.*must be ids"),
    "int64": (honest(dtype=np.int64), "dtype int64, must be uint8 or int16"),
    "int32": (honest(dtype=np.int32), "dtype int32"),
    "float32": (honest(dtype=np.float32), "dtype float32"),
    "big-endian": (honest(dtype=">i2"), "dtype >i2"),
    "half the layers, twice top-k": (np.concatenate([honest(), honest()], -1)[:, :1], "shape"),
    "layers and top-k swapped": (honest().transpose(0, 2, 1), r"shape \(24, 4, 3\)"),
    "flat": (
        honest().reshape(ROWS, -1),
        r"shape \(24, 12\), must be \[tokens - 1, 3 MoE layers, top-4\]",
    ),
    "dense layer kept": (
        honest()[:, [0, 0, 1, 2]],
        "4 layers, the model has 3 MoE layers: .* dense layers were kept",
    ),
    "a layer lost": (honest()[:, :2], "2 layers, the model has 3 MoE layers"),
    "bytes as ids": (honest().astype("<i4").view(np.uint8)[..., :K], "distinct"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_routes_are_refused_with_the_reason(name):
    routes, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        refuse([routes])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(1, 0), (0, 0)], "zero means expert 0, not missing: the row was never written"),
        ([(0, 0), (0, 0)], "all rows of this layer here are zero: the server never wrote it"),
        ([(1, 0), (3, 3)], "distinct ids in a row"),
        ([(1, 0, 2), (0, 3, 3)], "distinct ids in a row"),
    ],
)
def test_two_experts_are_as_many_as_the_reason_needs(rows, reason):
    with pytest.raises(ValueError, match=f"{reason}$"):
        check_local_routes(
            np.array([rows], np.uint8), torch.full((2,), RowState.REPLAYED), (0,), EXPERTS, str
        )


def test_the_most_experts_that_a_type_holds():
    for dtype, most in ((np.uint8, 256), (np.int16, 32_768)):
        sizes = {"num_layers": LAYERS, "top_k": K}
        check_routes([honest(dtype=dtype)], ["q"], num_experts=most, **sizes)
        with pytest.raises(ValueError, match=f"cannot hold ids of {most + 1} experts"):
            check_routes([honest(dtype=dtype)], ["q"], num_experts=most + 1, **sizes)


def test_without_context_parallelism_only_sequence_parallelism_asks_for_pads():
    assert layout().pad_multiple == layout(tp_size=3).pad_multiple == 1
    assert layout(tp_size=3, sequence_parallel=True).pad_multiple == 3
    assert layout(cp_size=2) == layout(cp_size=2, cp_rank=0)


def test_ids_of_a_row_move_as_one_number_where_numpy_has_one_of_the_size():
    assert [word_type(size) for size in (1, 2, 4, 8, 16)] == [
        np.uint8,
        np.uint16,
        np.uint32,
        np.uint64,
        np.complex128,
    ]
    assert word_type(6) == np.dtype("V6")


def test_types_that_cannot_hold_the_ids_and_mixed_types_are_refused():
    with pytest.raises(
        ValueError, match="uint8, which cannot hold ids of 512 experts: they have overflowed"
    ):
        check_routes([honest()], ["q"], num_layers=LAYERS, num_experts=512, top_k=K)
    with pytest.raises(ValueError, match="rollout b: .*dtype int16, .*the same for a micro-batch"):
        refuse([honest(), honest(dtype=np.int16)], ("a", "b"))
