"""A pass: which routes are used, recorded, recomputed or refused.

Routers here are fakes; tests/dist uses real ones.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_rl.replay.manager import ReplayManager, Routes
from megatron_rl.replay.router import GroupLimit

E, K, ROWS = 8, 2, 5


def make_router(**settings):
    values = dict(moe_router_fusion=False, moe_expert_capacity_factor=None)
    return SimpleNamespace(
        config=SimpleNamespace(**{**values, **settings}), routing_type="none", router_replay=None
    )


def make(layers=(0, 1)):
    routers = [(layer, make_router()) for layer in layers]
    return ReplayManager(routers, num_experts=E), [router for _, router in routers]


def ask(router, scores):
    def topk(rows, k, num_groups=None, group_topk=None):
        return rows.topk(k, dim=1)

    return router.router_replay.get_replay_topk(scores, K, None, None, topk)


def routes(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(2, ROWS, E, generator=g).argsort(-1)[..., :K].to(torch.uint8)


def scores(seed=0):
    return torch.randn(ROWS, E, generator=torch.Generator().manual_seed(seed))


def test_outside_a_pass_routing_is_live():
    _, (first, _) = make()
    values, ids = ask(first, scores())
    assert torch.equal(ids, scores().topk(K).indices) and torch.equal(
        values, scores().gather(1, ids)
    )


def test_replay_uses_the_given_ids_live_scores_and_leaves_live_rows_to_the_router():
    manager, routers = make()
    given = routes()
    with (
        manager.run_pass(
            [Routes(replay=given, live_rows=torch.tensor([4]))], training=True
        ) as replay_pass,
        manager.forward(0),
    ):
        for layer, router in enumerate(routers):
            s = scores(layer).requires_grad_()
            values, ids = ask(router, s)
            assert torch.equal(ids[:4], given[layer, :4].long())
            assert torch.equal(ids[4], s[4].topk(K).indices)
            values.sum().backward()
            assert (s.grad.sum(1) == K).all(), "gate weights must carry gradient"
    assert replay_pass.recorded is None


@pytest.mark.parametrize("measured", [False, True])
def test_group_limited_routers_leave_live_rows_to_core_with_all_rows(measured):
    """core's own group-limited top-k, which is bound to the number of rows of the call, on two of
    five rows.
    """
    manager, (router,) = make(layers=(0,))
    logits, given, live = scores(), routes()[:1], torch.tensor([1, 4])
    settings = dict(num_groups=4, group_topk=1, use_pre_softmax=True)
    _, live_map = topk_routing_with_score_function(logits, K, **settings)
    reference = (
        dict(reference=given, compared=torch.ones(ROWS, dtype=torch.bool)) if measured else {}
    )
    with (
        manager.run_pass([Routes(replay=given, live_rows=live, **reference)], training=False),
        manager.forward(0),
    ):
        _, used = topk_routing_with_score_function(
            logits, K, router_replay=router.router_replay, **settings
        )
    for row in range(ROWS):
        expected = (
            live_map[row].nonzero().flatten() if row in live else given[0, row].long().sort().values
        )
        assert torch.equal(used[row].nonzero().flatten(), expected)


def test_a_models_own_group_limit_decides_live_rows_under_any_later_override():
    router = make_router()
    router.router_replay = GroupLimit(num_groups=2, group_topk=1, best=1)
    for _ in range(2):  # the second manager takes the place of the first, not of the limit
        manager = ReplayManager([(0, router)], num_experts=E)
    logits, given, live = scores(), routes()[:1], torch.tensor([0, 3])
    best = logits.argmax(1) // 4  # the group with the best expert
    firsts = (4 * best).tolist()
    expected = torch.stack(
        [i + row[i : i + 4].topk(K).indices for i, row in zip(firsts, logits, strict=True)]
    )
    assert not torch.equal(expected, logits.topk(K).indices)
    with (
        manager.run_pass([Routes(replay=given, live_rows=live)], training=False),
        manager.forward(0),
    ):
        ids = ask(router, logits)[1]
    assert torch.equal(ids[live], expected[live]) and torch.equal(
        ids[[1, 2, 4]], given[0, [1, 2, 4]].long()
    )
    with (
        manager.run_pass([Routes()], training=False, record=True) as replay_pass,
        manager.forward(0),
    ):
        ask(router, logits)
    assert torch.equal(replay_pass.recorded[0][0].long(), expected)


def test_record_then_replay():
    manager, routers = make()
    with manager.run_pass([Routes(), Routes()], training=False, record=True) as replay_pass:
        for index in (0, 1):
            with manager.forward(index):
                for layer, router in enumerate(routers):
                    ask(router, scores(10 * index + layer))
    recorded = replay_pass.recorded
    assert recorded[1].dtype == torch.uint8
    for index in (0, 1):
        for layer in (0, 1):
            assert torch.equal(
                recorded[index][layer].long(), scores(10 * index + layer).topk(K).indices
            )


def test_recompute_replays_what_the_forward_used_even_when_routing_is_live():
    manager, (router, _) = make()
    with manager.run_pass([Routes(), Routes()], training=True):
        used = []
        for index in (0, 1):
            with manager.forward(index), torch.no_grad():  # a checkpointed forward
                used.append(ask(router, scores(index))[1])
                ask(manager_router(manager, 1), scores(index))
        for index in (0, 1):
            flipped = -scores(index)  # a live recompute would choose others
            assert torch.equal(ask(router, flipped)[1], used[index])
            ask(manager_router(manager, 1), flipped)


def manager_router(manager, layer):
    from megatron_rl.replay.router import RouteOverride

    return SimpleNamespace(router_replay=RouteOverride(manager.decide, layer))


def test_watchers_and_observers_get_every_call_with_what_was_used_and_what_is_live():
    manager, routers = make(layers=(3, 7))
    watched, observed = [], []

    def watch(local, micro_batch, rows, used):
        watched.append((local, micro_batch, rows, used))

    def observe(local, micro_batch, live, margins, flipped):
        observed.append((local, micro_batch, live, margins, flipped))

    reference = routes(seed=9)
    compared = torch.ones(ROWS, dtype=torch.bool)
    batches = [
        Routes(replay=routes(seed), reference=reference, compared=compared) for seed in (0, 1)
    ]
    with (
        manager.with_mismatch_hook(observe),
        manager.run_pass(batches, training=False, router_hook=watch),
    ):
        for micro_batch in (1, 0):
            with manager.forward(micro_batch):
                for local, router in enumerate(routers):
                    ask(router, scores(local))
    calls = [(local, micro_batch) for micro_batch in (1, 0) for local in (0, 1)]
    assert [row[:2] for row in watched] == [row[:2] for row in observed] == calls
    for local, micro_batch, rows, used in watched:
        assert torch.equal(rows, scores(local))
        assert torch.equal(used, routes(micro_batch)[local].long())
    for local, _, live, margins, flipped in observed:
        best = scores(local).topk(K)
        assert torch.equal(live, best.indices) and len(margins) == ROWS
        rows = zip(live.tolist(), reference[local].tolist(), strict=True)
        assert flipped.tolist() == [set(row) != set(other) for row, other in rows]
    assert any(row[4].any() for row in observed)
    with manager.run_pass(batches[:1], training=False), manager.forward(0):
        for router in routers:
            ask(router, scores())
    assert len(watched) == len(observed) == 4, "those of another pass are not called"


def test_a_router_that_was_not_called_is_an_error():
    manager, (first, _) = make()
    with pytest.raises(RuntimeError, match=r"not consumed.*\[\(0, 1\)\]"):
        with manager.run_pass([Routes()], training=False), manager.forward(0):
            ask(first, scores())


def test_four_of_many_missing_calls_are_named():
    manager, _ = make()
    with pytest.raises(
        RuntimeError, match=r"\[\(0, 0\), \(0, 1\), \(1, 0\), \(1, 1\)\] and perhaps more"
    ):
        with manager.run_pass([Routes()] * 3, training=False):
            pass


def test_a_forward_may_end_after_its_pass():
    manager, _ = make(layers=())
    forward = manager.forward(0)
    with manager.run_pass([Routes()], training=False):
        forward.__enter__()
    forward.__exit__(None, None, None)


def test_a_router_called_twice_is_an_error_and_state_is_cleared():
    manager, (first, second) = make()
    with pytest.raises(RuntimeError, match="micro-batch 0, MoE layer 0 were requested twice"):
        with manager.run_pass([Routes()], training=False), manager.forward(0):
            ask(first, scores())
            ask(first, scores())
    with manager.run_pass([Routes()], training=False), manager.forward(0):
        ask(first, scores())
        ask(second, scores())


def test_missing_and_surplus_recomputes_are_errors():
    manager, routers = make()
    with pytest.raises(RuntimeError, match=r"recompute never requested.*\{0: 1, 1: 1\}"):
        with manager.run_pass([Routes()], training=True), manager.forward(0), torch.no_grad():
            for router in routers:
                ask(router, scores())
    with pytest.raises(RuntimeError, match="MoE layer 0: router called outside a forward"):
        with manager.run_pass([Routes()], training=True):
            ask(routers[0], scores())


def test_wrong_row_count_is_an_error():
    manager, (first, _) = make()
    with pytest.raises(RuntimeError, match="4 rows of routes for 5 router rows"):
        with manager.run_pass([Routes(replay=routes()[:, :4])], training=False), manager.forward(0):
            ask(first, scores())


def test_an_exception_clears_the_pass():
    manager, routers = make()
    with pytest.raises(ZeroDivisionError):
        with manager.run_pass([Routes(replay=routes())], training=True), manager.forward(0):
            ask(routers[0], scores())
            raise ZeroDivisionError
    ids = ask(routers[0], scores())[1]
    assert torch.equal(ids, scores().topk(K).indices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"moe_router_fusion": True}, "fusion"), ({"moe_expert_capacity_factor": 1.0}, "capacity")],
)
def test_routers_that_would_bypass_replay_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ReplayManager([(0, make_router(**settings))], num_experts=E)
