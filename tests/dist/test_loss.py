"""One loss, whatever the ranks: every preset on tokens spread over two ranks, two presets through the real engine in three
layouts, whitened advantages over two replicas.  One launch."""

import tempfile
from pathlib import Path

import pytest

from megatron_rl.presets import PRESETS
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

LAYOUTS = {"tp2": {"tp": 2}, "cp2": {"cp": 2}, "dp2": {}}  # tp2: every token on each (data, context) rank


def spread_tokens():
    """Every preset, float64: rows dealt to two ranks in turn; sums over ranks against one rank with all rows."""
    import torch
    import torch.distributed as dist

    from tests.unit.loss.cases import Packed, counts, loss_of, pack, responses, run

    batch = responses(3, lengths=(4, 7, 1, 0, 5, 6))
    whole = pack(batch)
    mine = torch.arange(dist.get_rank(), len(whole.mask), 2)
    columns = [getattr(whole, name)[mine] for name in ("logprobs", "old", "mu", "advantages", "mask")]
    s = whole.sequences
    sequences = type(s)(s.ids[mine], s.count, s.lengths[mine], dist.group.WORLD)
    worst = {}
    for name in PRESETS:
        total, gradient, _ = run(Packed(*columns, sequences, []), loss_of(name), **counts(batch))
        want, want_gradient, _ = run(whole, loss_of(name), **counts(batch))
        dist.all_reduce(total)
        worst[name] = max(float((total - want).abs()), float((gradient - want_gradient[mine]).abs().max()))
        assert want_gradient.abs().max() > 0 or name == "geo_rs"
    return worst


def whiten_over_replicas():
    """Two groups, one per rank, against both on one rank."""
    import numpy as np
    import torch.distributed as dist

    from megatron_rl.batch.advantage import with_advantages
    from tests.unit.batch.rollouts import make_groups

    groups = make_groups(2, 4)
    want = with_advantages(groups, "centred_batch_whitened")
    rank = dist.get_rank()
    (got,) = with_advantages([groups[rank]], "centred_batch_whitened", dist.group.WORLD)
    return float(np.abs(got.advantages - want[rank].advantages).max())


def train_twice(checkpoint, loss, layout):
    """[(loss, gradient norm) of two updates on one mini-batch, the second one off policy]."""
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    engine = make_engine(checkpoint, parallel=layout, loss=loss)
    batch = random_batch(engine)
    old = engine.old_logprobs(batch, MetricSums(), replay="R3")
    results = []
    for _ in range(2):
        sums = MetricSums()
        engine.update(batch, old, sums, replay="R3")
        metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
        results.append((metrics["train/loss"], metrics["optim/grad_norm"], metrics["train/clip_high_frac"]))
    engine.parallel.destroy()
    return results


def on_two_ranks(checkpoint, losses):
    import torch.distributed as dist

    import megatron_rl.engine  # noqa: F401  (CPU support first)

    dist.init_process_group("gloo")
    results = {"tokens": spread_tokens(), "whitened": whiten_over_replicas()}
    for name in losses:
        for layout, parallel in LAYOUTS.items():
            results[name, layout] = train_twice(checkpoint, {"name": name}, parallel)
    dist.destroy_process_group()
    return results


def test_the_loss_does_not_depend_on_the_ranks():
    losses = ("minirl", "gspo")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "moe")
        for results in run_ranks(on_two_ranks, 2, checkpoint, losses):
            assert set(results["tokens"]) == set(PRESETS)
            assert max(results["tokens"].values()) < 1e-12, results["tokens"]
            assert results["whitened"] < 1e-6
            for name in losses:
                want = results[name, "tp2"]
                print(name, [results[name, layout] for layout in LAYOUTS])
                assert abs(want[1][0] - want[0][0]) > 1e-3 * abs(want[0][0]), "the first update changed nothing"
                for layout in ("cp2", "dp2"):
                    for got, expected in zip(results[name, layout], want, strict=True):
                        assert got == pytest.approx(expected, rel=2e-4, abs=1e-6), (name, layout)
