"""The ids that replay uses: groups against a loop, id types, measuring with an expert bias, passes
without a backward.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.replay.manager import ReplayManager, Routes
from megatron_rl.replay.mismatch import Mismatch
from megatron_rl.replay.router import GroupLimit, RouteOverride

ROWS, K = 6, 2


def make_manager(num_experts=8, layers=(1, 3), *, bias=None, **options):
    config = SimpleNamespace(moe_router_fusion=False, moe_expert_capacity_factor=None)
    routers = [
        (
            layer,
            SimpleNamespace(
                config=config, routing_type="none", router_replay=None, expert_bias=bias
            ),
        )
        for layer in layers
    ]
    return ReplayManager(routers, num_experts=num_experts, **options), [
        router for _, router in routers
    ]


def ask(router, scores):
    return router.router_replay.get_replay_topk(
        scores, K, None, None, lambda rows, k, **_: rows.topk(k, dim=1)
    )


def scores(seed, num_experts=8):
    return torch.randn(ROWS, num_experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_groups", "group_topk", "best"), [(4, 2, 2), (4, 1, 2), (2, 1, 3), (4, 3, 1)]
)
def test_the_best_groups_by_the_sum_of_their_best(num_groups, group_topk, best):
    table = torch.rand(40, 12, generator=torch.Generator().manual_seed(0))
    values, ids = GroupLimit(num_groups, group_topk, best).get_replay_topk(table, 3)
    size = 12 // num_groups
    for row, got, chosen in zip(table.tolist(), values.tolist(), ids.tolist(), strict=True):
        ranking = [sum(sorted(row[g * size : (g + 1) * size])[-best:]) for g in range(num_groups)]
        kept = sorted(range(num_groups), key=lambda g: -ranking[g])[:group_topk]
        allowed = sorted((e for e in range(12) if e // size in kept), key=lambda e: -row[e])
        assert chosen == allowed[:3] and got == [row[e] for e in chosen]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_recorded_ids_fit_their_type(num_experts, dtype):
    manager, routers = make_manager(num_experts)
    high = torch.arange(num_experts).float().expand(ROWS, -1)
    with (
        manager.run_pass([Routes()], training=False, record=True) as replay_pass,
        manager.forward(0),
    ):
        for router in routers:
            ask(router, high)
    (recorded,) = replay_pass.recorded
    assert recorded.dtype == dtype and recorded.shape == (2, ROWS, K)
    assert set(recorded.flatten().tolist()) == {num_experts - 1, num_experts - 2}


def test_a_forward_outside_a_pass_is_live_and_without_a_backward_nothing_is_kept():
    manager, routers = make_manager()
    with manager.forward(0):
        assert torch.equal(ask(routers[0], scores(0))[1], scores(0).topk(K).indices)
    with manager.run_pass([Routes()], training=False), manager.forward(0), torch.no_grad():
        for router in routers:
            ask(router, scores(0))
    with pytest.raises(AssertionError, match="do not nest"):
        with manager.run_pass([Routes()], training=False), manager.forward(0), manager.forward(0):
            pass
    with pytest.raises(AssertionError, match="already running"):
        with (
            manager.run_pass([Routes()], training=False),
            manager.run_pass([Routes()], training=False),
        ):
            pass


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_measured_pass_compares_live_and_used_with_the_reference(logits, replayed, biased):
    """The same sums as Mismatch.add makes of each call, layer by layer; two micro-batches, some
    rows live.
    """
    bias = torch.linspace(0, 0.5, 8) if biased else None
    manager, routers = make_manager(bias=bias, scores_are_logits=logits)
    compared = [torch.arange(ROWS) % 3 != i for i in range(2)]
    reference = [
        torch.stack([scores(10 + i + layer).topk(K).indices for layer in range(2)]).to(torch.uint8)
        for i in range(2)
    ]
    live_rows = torch.tensor([2, 5])
    routes = [
        Routes(
            ids if replayed else None, live_rows if replayed else None, reference=ids, compared=rows
        )
        for ids, rows in zip(reference, compared, strict=True)
    ]
    expected = Mismatch((1, 3), compared, scores_are_logits=logits)
    with manager.run_pass(routes, training=False) as replay_pass:
        for index in range(2):
            with manager.forward(index):
                for local, router in enumerate(routers):
                    given = scores(7 * index + local).sigmoid()
                    live, used = given.topk(K).indices, ask(router, given)[1]
                    expected_ids = (
                        reference[index][local].long().index_copy(0, live_rows, live[live_rows])
                        if replayed
                        else live
                    )
                    assert torch.equal(used, expected_ids)
                    expected.add(
                        local, index, given, live, used, reference[index][local], bias=bias
                    )
    got = replay_pass.mismatch
    assert (
        got.layers == (1, 3)
        and torch.equal(got.sums, expected.sums)
        and got.largest_gap == expected.largest_gap > 0
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            (*got.flips, *got.first_flip), (*expected.flips, *expected.first_flip), strict=True
        )
    )


def test_a_pass_without_a_reference_measures_nothing_and_half_a_reference_is_an_error():
    manager, routers = make_manager()
    with manager.run_pass([Routes()], training=False) as replay_pass, manager.forward(0):
        for router in routers:
            ask(router, scores(0))
    assert replay_pass.mismatch is None and replay_pass.recorded is None
    one = Routes(reference=torch.zeros(2, ROWS, K), compared=torch.ones(ROWS, dtype=torch.bool))
    with pytest.raises(AssertionError, match="all micro-batches of a pass or none"):
        with manager.run_pass([one, Routes()], training=False):
            pass


def test_recomputes_come_back_first_in_first_out_in_the_type_of_the_gate():
    manager, routers = make_manager()
    with manager.run_pass([Routes(), Routes()], training=True):
        for index in range(2):
            with manager.forward(index), torch.no_grad():
                for router in routers:
                    ask(router, scores(index))
        for index in range(2):
            for router in routers:
                values, ids = ask(router, -scores(index))
                assert ids.dtype == torch.int64 and torch.equal(ids, scores(index).topk(K).indices)
                assert torch.equal(values, (-scores(index)).gather(1, ids))
    with pytest.raises(RuntimeError, match=r"recompute of 5 rows, but micro-batch 0 has 6"):
        with manager.run_pass([Routes()], training=True):
            with manager.forward(0), torch.no_grad():
                ask(routers[0], scores(0))
            ask(routers[0], scores(0)[:5])


def test_live_choices_are_sorted_whether_or_not_gradients_are_on():
    """core 0.19 sorts only where gradients are on; groups bind its top-k to all rows."""
    seen = []

    def topk(rows, k, **groups):
        seen.append((torch.is_grad_enabled(), len(rows), groups))
        return rows.topk(k, dim=1)

    override = RouteOverride(lambda layer, given, live_topk: live_topk(torch.tensor([1, 4])), 0)
    with torch.no_grad():
        plain = override.get_replay_topk(scores(0), K, None, None, topk)
        grouped = override.get_replay_topk(scores(0), K, 4, 2, topk)
    assert seen == [(True, 2, {}), (True, ROWS, {"num_groups": 4, "group_topk": 2})]
    for values, ids in (plain, grouped):
        assert torch.equal(ids, scores(0)[[1, 4]].topk(K).indices) and torch.equal(
            values, scores(0)[[1, 4]].gather(1, ids)
        )


LIVE = torch.tensor([2, 5])


@pytest.mark.parametrize(
    ("replays", "live_rows", "measures", "calls"),
    [
        (True, None, False, []),
        (True, LIVE, False, [2]),
        (True, LIVE, True, [ROWS]),
        (False, None, True, [ROWS]),
        (False, None, False, [ROWS]),
    ],
)
def test_the_router_itself_chooses_for_no_more_rows_than_needed_and_once(
    replays, live_rows, measures, calls
):
    manager, (router,) = make_manager(layers=(0,))
    seen = []

    def topk(rows, k, **_):
        seen.append(len(rows))
        return rows.topk(k, dim=1)

    ids = scores(1).topk(K).indices[None].to(torch.uint8)
    reference = dict(reference=ids, compared=torch.ones(ROWS, dtype=torch.bool)) if measures else {}
    routes = Routes(ids if replays else None, live_rows, **reference)
    with manager.run_pass([routes], training=False), manager.forward(0):
        router.router_replay.get_replay_topk(scores(0), K, None, None, topk)
        assert not manager._pass.used and not manager._pass.to_recompute
    assert seen == calls


def test_scores_are_logits_unless_said_otherwise():
    manager, _ = make_manager()
    routes = Routes(reference=torch.zeros(2, ROWS, K), compared=torch.ones(ROWS, dtype=torch.bool))
    assert manager._make_mismatch([routes]).scores_are_logits


def test_a_stage_without_moe_layers_records_nothing_for_each_micro_batch():
    manager, _ = make_manager(layers=())
    with manager.run_pass([Routes(), Routes()], training=False, record=True) as replay_pass:
        pass
    assert [ids.numel() for ids in replay_pass.recorded] == [0, 0]
