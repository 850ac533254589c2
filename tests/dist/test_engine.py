"""The engine on real ranks: a bad gradient never reaches the weights, a bad route never a
router.
"""

import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        yield random_checkpoint(Path(folder) / "moe")


def one_update(engine, batch):
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums

    sums = MetricSums()
    mode = engine.cfg.replay.mode
    engine.update(batch, engine.old_logprobs(batch, sums, replay=mode), sums, replay=mode)
    metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
    return metrics


def weights_of(engine):
    return [
        parameter.detach().clone() for chunk in engine.chunks for parameter in chunk.parameters()
    ]


def poison_and_recover(checkpoint):
    """A NaN advantage on one rank of two: both skip, nothing moves, the next good update equals an
    undisturbed one.
    """
    import dataclasses

    import torch
    import torch.distributed as dist

    from megatron_rl.engine.optim import TrainingDiverged
    from tests.dist.engines import make_engine, random_batch

    dist.init_process_group("gloo")
    undisturbed = make_engine(checkpoint, parallel={"ep": 2})
    one_update(undisturbed, random_batch(undisturbed))
    expected = weights_of(undisturbed)
    undisturbed.parallel.destroy()

    engine = make_engine(checkpoint, parallel={"ep": 2}, optim={"max_skipped_updates": 2})
    batch = random_batch(engine)
    before = weights_of(engine)
    bad = batch
    if engine.parallel.rank == 1:
        first = batch.micro_batches[0]
        broken = dataclasses.replace(
            first, advantages=torch.full_like(first.advantages, float("nan"))
        )
        bad = dataclasses.replace(batch, micro_batches=(broken, *batch.micro_batches[1:]))
    metrics = one_update(engine, bad)
    assert metrics["optim/skipped_updates"] == 1.0 and engine.optimizer.scheduler.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))
    metrics = one_update(engine, batch)
    assert metrics["optim/skipped_updates"] == 0.0 and engine.optimizer.scheduler.num_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, weights_of(engine), strict=True))
    nothing_to_learn_from(engine, batch)
    one_update(engine, bad)
    before = weights_of(engine)
    with pytest.raises(TrainingDiverged, match="2 updates in a row"):
        one_update(engine, bad)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))
    bad_routes(engine, batch)
    engine.parallel.destroy()
    mask_and_count(checkpoint)
    first_update(checkpoint)
    dist.destroy_process_group()


def bad_routes(engine, batch):
    """A duplicate expert in a row, and an id out of range, both of which core accepts: refused
    where routes are first used.
    """
    import dataclasses

    from megatron_rl.metrics.reduce import MetricSums

    names, (first, *others) = batch.micro_batches[0].rollout_ids, batch.samples
    for expert, rule in (
        (lambda ids: ids[0], "distinct ids in a row"),
        (lambda ids: 8, r"ids in 0\.\.7"),
    ):
        routes = first[1].rollout.routed_experts.copy()
        routes[2, 3, 1] = expert(routes[2, 3])
        rollout = dataclasses.replace(first[1].rollout, routed_experts=routes)
        broken = (first[0], dataclasses.replace(first[1], rollout=rollout), *first[2:])
        bad = dataclasses.replace(batch, samples=(broken, *others))
        for mode in ("R3", "none"):  # none: as replay.measure compares with them
            with pytest.raises(
                ValueError, match=rf"rollout {names[1]}, row 2: .*MoE layer 3 .*{rule}"
            ):
                engine.old_logprobs(bad, MetricSums(), replay=mode)


def nothing_to_learn_from(engine, batch):
    """All responses filtered, or without advantage: Adam's momentum must not move the weights;
    counted.
    """
    import dataclasses

    import torch

    for name, zero in (("loss_mask", False), ("advantages", 0.0)):
        before = weights_of(engine)
        emptied = [
            dataclasses.replace(part, **{name: torch.full_like(getattr(part, name), zero)})
            for part in batch.micro_batches
        ]
        metrics = one_update(engine, dataclasses.replace(batch, micro_batches=tuple(emptied)))
        assert (
            metrics["optim/empty_updates"],
            metrics["optim/skipped_updates"],
            metrics["optim/grad_norm"],
        ) == (
            1,
            0,
            0,
        )
        assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True)), name
    assert engine.optimizer.scheduler.num_steps == 1, (
        "the schedule counts updates that changed the weights"
    )
    assert one_update(engine, batch)["optim/empty_updates"] == 0.0
    assert not all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))


def first_update(checkpoint):
    """Adam's first update in closed form, of the gradient clipped to optim.clip_grad; weight decay
    on matrices alone.
    """
    import torch

    from megatron_rl.checkpoint.state import inner_optimizers
    from tests.dist.engines import make_engine, random_batch

    lr, clip, decay, beta1, beta2, eps = 1e-2, 0.01, 0.3, 0.8, 0.9, 1e-3
    optim = {
        "lr": lr,
        "clip_grad": clip,
        "weight_decay": decay,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
    }
    engine = make_engine(checkpoint, optim=optim)
    before = weights_of(engine)
    metrics = one_update(engine, random_batch(engine))
    assert metrics["optim/grad_norm"] > 10 * clip, "clipped"
    inner = [core.optimizer for core in inner_optimizers(engine) if core.optimizer is not None]
    states = {parameter: state for adam in inner for parameter, state in adam.state.items()}
    parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    gradients = [states[parameter]["exp_avg"] / (1 - beta1) for parameter in parameters]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert float(norm) == pytest.approx(clip, rel=1e-3)
    for old, new, gradient in zip(before, parameters, gradients, strict=True):
        kept = 1 - lr * decay * (old.dim() > 1)
        torch.testing.assert_close(
            new.detach(), kept * old - lr * gradient / (gradient.abs() + eps), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            states[new]["exp_avg_sq"], (1 - beta2) * gradient**2, rtol=1e-4, atol=0
        )
    engine.parallel.destroy()


def mask_and_count(checkpoint):
    """A NaN and an infinite rollout log-prob on one rank: as if those two were not response tokens,
    and counted.
    """
    import dataclasses

    import torch

    from tests.dist.engines import make_engine, random_batch

    weights, metrics = {}, {}
    for name in ("masked", "non-finite"):
        engine = make_engine(checkpoint, parallel={"ep": 2})
        batch = random_batch(engine)
        if engine.parallel.rank == 1:
            first = batch.micro_batches[0]
            rows = first.loss_mask.nonzero().squeeze(1)[:2]
            if name == "masked":
                changed = dataclasses.replace(
                    first, loss_mask=first.loss_mask.index_fill(0, rows, False)
                )
            else:
                values = first.rollout_logprobs.index_copy(
                    0, rows, torch.tensor([float("nan"), -float("inf")])
                )
                changed = dataclasses.replace(first, rollout_logprobs=values)
            batch = dataclasses.replace(batch, micro_batches=(changed, *batch.micro_batches[1:]))
        metrics[name] = one_update(engine, batch)
        weights[name] = weights_of(engine)
        engine.parallel.destroy()
    share = metrics["non-finite"].pop("train/nonfinite_frac")
    assert (
        share == 2 / batch.num_response_tokens
        and metrics["masked"].pop("train/nonfinite_frac") == 0.0
    )
    assert metrics["non-finite"]["optim/skipped_updates"] == 0.0
    assert all(
        torch.equal(a, b) for a, b in zip(weights["masked"], weights["non-finite"], strict=True)
    )
    assert metrics["non-finite"] == pytest.approx(metrics["masked"], nan_ok=True)


def test_bad_gradients_and_routes_are_refused(checkpoint):
    run_ranks(poison_and_recover, 2, checkpoint)
