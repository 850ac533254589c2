"""The engine's promises on real ranks: a bad gradient never reaches the weights."""

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
    return [parameter.detach().clone() for chunk in engine.chunks for parameter in chunk.parameters()]


def poison_and_recover(checkpoint):
    """A NaN advantage on one rank of two: both skip, nothing moves, the next good update equals an undisturbed one."""
    import dataclasses

    import torch
    import torch.distributed as dist

    from megatron_rl.engine.optim import TrainingDiverged
    from tests.dist.engines import make_engine, random_batch

    dist.init_process_group("gloo")
    undisturbed = make_engine(checkpoint, parallel={"ep": 2})
    one_update(undisturbed, random_batch(undisturbed))
    want = weights_of(undisturbed)
    undisturbed.parallel.destroy()

    engine = make_engine(checkpoint, parallel={"ep": 2}, optim={"max_skipped_updates": 2})
    batch = random_batch(engine)
    before = weights_of(engine)
    bad = batch
    if engine.parallel.rank == 1:
        first = batch.micro_batches[0]
        broken = dataclasses.replace(first, advantages=torch.full_like(first.advantages, float("nan")))
        bad = dataclasses.replace(batch, micro_batches=(broken, *batch.micro_batches[1:]))
    metrics = one_update(engine, bad)
    assert metrics["optim/skipped_updates"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))
    metrics = one_update(engine, batch)
    assert metrics["optim/skipped_updates"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(want, weights_of(engine), strict=True))
    nothing_to_learn_from(engine, batch)
    one_update(engine, bad)
    before = weights_of(engine)
    with pytest.raises(TrainingDiverged, match="2 updates in a row"):
        one_update(engine, bad)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))
    engine.parallel.destroy()
    mask_and_count(checkpoint)
    dist.destroy_process_group()


def nothing_to_learn_from(engine, batch):
    """All responses filtered, or without advantage: Adam has a momentum by now and must not go on along it; and counted."""
    import dataclasses

    import torch

    for name, zero in (("loss_mask", False), ("advantages", 0.0)):
        before = weights_of(engine)
        emptied = [
            dataclasses.replace(part, **{name: torch.full_like(getattr(part, name), zero)})
            for part in batch.micro_batches
        ]
        metrics = one_update(engine, dataclasses.replace(batch, micro_batches=tuple(emptied)))
        assert (metrics["optim/empty_updates"], metrics["optim/skipped_updates"], metrics["optim/grad_norm"]) == (
            1,
            0,
            0,
        )
        assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True)), name
    assert one_update(engine, batch)["optim/empty_updates"] == 0.0
    assert not all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))


def mask_and_count(checkpoint):
    """A NaN and an infinite rollout log-prob on one rank: as if those two tokens were no response tokens, and counted."""
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
                changed = dataclasses.replace(first, loss_mask=first.loss_mask.index_fill(0, rows, False))
            else:
                values = first.rollout_logprobs.index_copy(0, rows, torch.tensor([float("nan"), -float("inf")]))
                changed = dataclasses.replace(first, rollout_logprobs=values)
            batch = dataclasses.replace(batch, micro_batches=(changed, *batch.micro_batches[1:]))
        metrics[name] = one_update(engine, batch)
        weights[name] = weights_of(engine)
        engine.parallel.destroy()
    share = metrics["non-finite"].pop("train/nonfinite_frac")
    assert share == 2 / batch.num_response_tokens and metrics["masked"].pop("train/nonfinite_frac") == 0.0
    assert metrics["non-finite"]["optim/skipped_updates"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(weights["masked"], weights["non-finite"], strict=True))
    assert metrics["non-finite"] == pytest.approx(metrics["masked"], nan_ok=True)


def test_a_bad_gradient_never_reaches_the_weights(checkpoint):
    run_ranks(poison_and_recover, 2, checkpoint)
