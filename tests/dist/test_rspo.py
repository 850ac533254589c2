"""RSPO through the real engine: gamma from the routers' own inputs and weights, and the same loss
in every layout.
"""

import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

LAYOUTS = {"tp2": {"tp": 2}, "cp2": {"cp": 2}, "dp2": {}, "pp2": {"pp": 2}}
FLOOR = 0.2
RSPO = {"name": "rspo", "shift_floor": FLOOR}


def router_logs(engine, batch, ids=None):
    """(log softmax of every router per micro-batch [L, t, E], from hooks on their inputs; ids that
    they choose live).
    """
    import torch

    from megatron_rl.engine.forward import to_device
    from megatron_rl.engine.model import moe_routers

    seen = {}
    handles = [
        router.register_forward_pre_hook(
            lambda module, args, layer=layer: seen.setdefault(layer, []).append(args[0])
        )
        for layer, router in moe_routers(engine.chunks)
    ]
    micro_batches = to_device(batch.micro_batches, engine.layout, engine.parallel.device)
    engine._forward(micro_batches, engine._update_routes(batch, None, "R3"))
    for handle in handles:
        handle.remove()
    weights = {
        layer: router.weight.detach().double() for layer, router in moe_routers(engine.chunks)
    }
    return [
        torch.stack(
            [
                (seen[layer][i].flatten(0, -2).double() @ weights[layer].T).log_softmax(-1)
                for layer in sorted(seen)
            ]
        )
        for i in range(len(micro_batches))
    ]


def check_against_hooks(checkpoint):
    """One rank: shift_t of the second update from inputs and weights of the routers before and
    after the first.
    """
    import torch
    import torch.distributed as dist

    import megatron_rl.distributed  # noqa: F401  (CPU support first)

    dist.init_process_group("gloo")

    from megatron_rl.engine.forward import to_device
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    engine = make_engine(checkpoint, loss=RSPO, optim={"lr": 3e-3})
    batch = random_batch(engine)
    old = engine.old_logprobs(batch, MetricSums(), replay="R3")
    before = router_logs(engine, batch)
    seen = []

    def update():
        sums = MetricSums()
        norm = engine.compute_gradient(
            batch, old, sums, replay="R3", observe=lambda tokens: seen.append(tokens.loss.trust)
        )
        engine.apply_gradient(norm, batch, sums)
        metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
        return metrics["train/router_trust_mean"], metrics["train/router_floor_frac"]

    assert update() == (1.0, 0.0), "the weights of the old pass"
    after, first = router_logs(engine, batch), len(seen)
    mean, floor_frac = update()
    assert FLOOR < mean < 0.999, mean
    routes = engine._update_routes(batch, None, "R3")
    worst, floors = 0.0, list[bool]()
    for micro_batch, route, a, b, trust in zip(
        to_device(batch.micro_batches, engine.layout, engine.parallel.device),
        routes,
        before,
        after,
        seen[first:],
        strict=True,
    ):
        change = (b - a).abs()
        for t in micro_batch.loss_mask.nonzero().flatten().tolist():
            picked = [
                change[layer, t, route.replay[layer, t].long()].mean()
                for layer in range(len(change))
            ]
            expected = torch.stack(picked).mean().neg().exp()
            floors.append(bool(expected < FLOOR))
            worst = max(worst, float((expected.clamp(min=FLOOR) - trust[t]).abs()))
    assert 0 < sum(floors) < len(floors) and floor_frac == pytest.approx(
        sum(floors) / len(floors)
    ), floor_frac
    engine.parallel.destroy()
    dist.destroy_process_group()
    return worst


def train(checkpoint):
    """[(loss, gradient norm, mean gamma) of two updates on one mini-batch] per layout."""
    import torch.distributed as dist

    import megatron_rl.distributed  # noqa: F401  (CPU support first)
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    dist.init_process_group("gloo")
    results = {}
    for layout, parallel in LAYOUTS.items():
        engine = make_engine(checkpoint, parallel=parallel, loss=RSPO, optim={"lr": 1e-3})
        batch = random_batch(engine)
        old, found = engine.old_logprobs(batch, MetricSums(), replay="R3"), []
        for _ in range(2):
            sums = MetricSums()
            engine.update(batch, old, sums, replay="R3")
            metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
            found.append(
                (
                    metrics["train/loss"],
                    metrics["optim/grad_norm"],
                    metrics["train/router_trust_mean"],
                )
            )
        results[layout] = found
        engine.parallel.destroy()
    dist.destroy_process_group()
    return results


def test_the_shift_is_that_of_the_routers_inputs_and_weights():
    with tempfile.TemporaryDirectory() as folder:
        (worst,) = run_ranks(check_against_hooks, 1, random_checkpoint(Path(folder) / "moe"))
        assert worst < 1e-4


def test_the_loss_does_not_depend_on_the_ranks():
    with tempfile.TemporaryDirectory() as folder:
        for results in run_ranks(train, 2, random_checkpoint(Path(folder) / "moe")):
            expected = results["tp2"]
            assert expected[0][2] == 1.0 and expected[1][2] < 0.9999
            for layout, found in results.items():
                for got, value in zip(found, expected, strict=True):
                    assert got == pytest.approx(value, rel=5e-4, abs=1e-6), layout
