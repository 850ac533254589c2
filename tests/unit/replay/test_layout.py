import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.records import RowState
from megatron_rl.replay.layout import RankLayout, check_routes, pad_routes, zigzag_rows


def layout(**changes):
    values = dict(layers=(1, 2), tp_rank=0, tp_size=1, sequence_parallel=False, num_experts=8, top_k=2, ep_size=2)
    return RankLayout(**{**values, **changes})


def test_rows_of_every_tp_rank_tile_the_packed_order():
    rows = [layout(tp_rank=r, tp_size=4, sequence_parallel=True).rows(torch.tensor([0, 9, 24])) for r in range(4)]
    assert [i for part in rows for i in range(24)[part]] == list(range(24))
    assert layout(tp_rank=2, tp_size=4, sequence_parallel=False).rows(torch.tensor([0, 24])) == slice(0, 24)
    with pytest.raises(ValueError, match="26 rows.*parallel.tp = 4"):
        layout(tp_size=4, sequence_parallel=True).rows(torch.tensor([0, 26]))


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans(), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_rows_under_context_and_sequence_parallelism_against_a_loop(cp, tp, sp, sizes):
    """Chunk by chunk: a row of a sequence of n rows lies in chunk (row // (n / 2cp)), which rank min(c, 2cp-1-c) holds."""
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
            place = layout(cp_rank=cp_rank, cp_size=cp, tp_rank=tp_rank, tp_size=tp, sequence_parallel=sp)
            assert torch.arange(row)[place.model_rows(cu_seqlens)].tolist() == held[cp_rank]
            share = len(held[cp_rank]) // tp if sp else len(held[cp_rank])
            first = tp_rank * share if sp else 0
            assert torch.arange(row)[place.rows(cu_seqlens)].tolist() == held[cp_rank][first : first + share]


def test_a_sequence_that_cp_cannot_cut_is_refused():
    with pytest.raises(ValueError, match="sequence of 6 rows is not a multiple of 2 x parallel.cp = 4"):
        zigzag_rows(torch.tensor([0, 8, 14]), 0, 2)


def test_local_routes_are_this_ranks_layers_and_rows():
    routes = torch.arange(3 * 8 * 2, dtype=torch.uint8).view(3, 8, 2)  # every id names its (layer, row, k)
    state = torch.zeros(8, dtype=torch.uint8)
    state[6:] = RowState.PAD
    before = routes.clone()
    local = layout(tp_rank=1, tp_size=2, sequence_parallel=True).local_routes(routes, state, torch.tensor([0, 8]))
    assert torch.equal(local[:, :2], before[1:, 4:6])
    assert torch.equal(routes, before), "the given routes must not change"
    assert local[:, 2:].tolist() == [pad_routes(2, 8, 2, 2).tolist()] * 2
    local = layout(cp_rank=1, cp_size=2).local_routes(routes, state, torch.tensor([0, 4, 8]))
    assert torch.equal(local[:, :3], before[1:][:, [1, 2, 5]])  # chunks 1 and 2 of each sequence; row 6 is a pad
    assert local[:, 3:].tolist() == [pad_routes(1, 8, 2, 2).tolist()] * 2


@given(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 8), st.integers(1, 50))
def test_pads_are_distinct_and_even_over_ep_ranks(ep, per_rank, top_k, rows):
    experts = ep * per_rank
    top_k = min(top_k, experts)
    routes = pad_routes(rows, experts, top_k, ep)
    assert routes.shape == (rows, top_k) and routes.min() >= 0 and routes.max() < experts
    assert all(len(set(row)) == top_k for row in routes.tolist())
    load = torch.bincount((routes // per_rank).flatten(), minlength=ep)
    assert load.max() - load.min() <= 1


def good():
    routes = torch.tensor([[[0, 1], [2, 3], [4, 5]], [[7, 6], [1, 0], [3, 2]]], dtype=torch.uint8)
    state = torch.tensor([RowState.REPLAYED, RowState.REPLAYED, RowState.LIVE], dtype=torch.uint8)
    return routes, state


def check(routes, state, **changes):
    settings = dict(num_layers=2, num_experts=8, top_k=2)
    check_routes(
        routes,
        state,
        sequence_ids=torch.zeros(len(state), dtype=torch.long),
        rollout_ids=["q1/3"],
        **{**settings, **changes},
    )


def test_check_accepts_valid_routes_and_ignores_rows_that_are_not_replayed():
    routes, state = good()
    check(routes, state)
    routes[:, 2] = 99  # LIVE: never read
    check(routes, state)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ((1, 0), [7, 7], r"q1/3: routed experts of MoE layer 1, packed row 0 are \[7, 7\], rule is distinct"),
        ((0, 1), [2, 8], r"MoE layer 0, packed row 1 are \[2, 8\], rule is every id in 0\.\.7"),
        ((0, 1), [0, 0], "distinct"),
    ],
)
def test_check_names_rollout_layer_row_value_and_rule(where, value, message):
    routes, state = good()
    routes[where] = torch.tensor(value, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        check(routes, state)


def test_check_refuses_negative_ids_shape_and_dtype():
    routes, state = good()
    negative = routes.to(torch.int16)
    negative[0, 0, 0] = -1
    with pytest.raises(ValueError, match="rule is every id"):
        check(negative, state)
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\), rule is .*\(2, 3, 2\)"):
        check(routes[:, :2], state)
    with pytest.raises(ValueError, match="dtype torch.float32"):
        check(routes.float(), state)
