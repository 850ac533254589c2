"""The same loss on any ranks: every preset on tokens spread over two ranks, one preset of each
denominator through the real engine in three layouts, whitened advantages over two replicas, and the
reference policy of the KL term.  One launch."""

import tempfile
from pathlib import Path

import pytest

from megatron_rl.config.loss_presets import PRESETS
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

# tp2: every token on each (data, context) rank
LAYOUTS = {"tp2": {"tp": 2}, "cp2": {"cp": 2}, "dp2": {}}
STAGES = {"pp2": {"pp": 2}}  # for what the last stage alone has: a selection, log pi_ref


POSITIONS = {  # of switches that no preset has, each with sums over responses
    "veto": {"veto": "train_infer", "veto_low": 0.3, "veto_high": 3.0},
    "mask and rejection": {
        "mask": "train_infer", "mask_low": 0.5, "mask_high": 1.5,
        "reject": "train_infer", "reject_level": "mean_kl", "reject_high": 0.1,
        "aggregation": "kept_mean",
    },
    "geometric form of pi/mu": {"form": "ratio", "form_level": "geometric",
    "clip_anchor": "rollout"},
    "largest covariances": {"select": "cov_top", "select_share": 0.3, "penalty": "square",
    "penalty_coef": 0.5},
    "band of covariances": {"select": "cov_band", "select_share": 0.2, "cov_low": -0.5,
    "cov_high": 5.0},
    "penalty": {"penalty": "abs", "penalty_coef": 0.5, "aggregation": "sequence_mean"},
}  # fmt: skip


def spread_tokens():
    """Every preset and POSITIONS, float64: rows dealt to two ranks in turn; sums over ranks against
    one rank with all rows.
    """
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from megatron_rl.loss import count_kept, kept_tokens, select_tokens
    from tests.unit.loss.cases import (
        EPISODES,
        Packed,
        counts,
        keys_of,
        loss_of,
        numbers,
        pack,
        prepare,
        responses,
        run,
    )  # fmt: skip

    batch = responses(3, lengths=(4, 7, 1, 0, 5, 6), episodes=EPISODES)
    whole = pack(batch)
    mine = torch.arange(dist.get_rank(), len(whole.mask), 2)
    columns = [
        getattr(whole, name)[mine] for name in ("logprobs", "old", "mu", "advantages", "mask")
    ]
    s = whole.sequences
    sequences = type(s)(s.ids[mine], s.count, s.lengths[mine], dist.group.WORLD)

    def chosen(config):
        """The rows that loss.select chooses, from this rank's rows alone and sums over ranks."""
        if config.switches.select == "none":
            return None
        _, old, mu, advantages, mask = columns
        found = select_tokens(old, advantages, mask, keys_of(mu), config.switches, dist.group.WORLD)
        assert torch.equal(found, pack(prepare(batch, config)).selected[mine]), (
            config.switches.select
        )
        return found

    def with_kept(sequences, config):
        """n_i of kept_mean, from this rank's rows alone and sums over ranks."""
        if config.switches.aggregation != "kept_mean":
            return sequences
        kept = kept_tokens(columns[1], columns[2], columns[4], sequences, config)
        ids = torch.tensor([*numbers(batch), -1])[sequences.ids]
        return replace(sequences, kept_lengths=count_kept(kept, ids, len(batch), dist.group.WORLD))

    worst = {}
    configs = {name: loss_of(name) for name in PRESETS}
    configs |= {name: loss_of("reinforce", **settings) for name, settings in POSITIONS.items()}
    for name, config in configs.items():
        whole = pack(prepare(batch, config))
        own = with_kept(replace(sequences, lengths=whole.sequences.lengths[mine]), config)
        total, gradient, _ = run(Packed(*columns, own, [], chosen(config)), config, **counts(batch))
        expected, expected_gradient, _ = run(whole, config, **counts(batch))
        dist.all_reduce(total)
        worst[name] = max(
            float((total - expected).abs()), float((gradient - expected_gradient[mine]).abs().max())
        )
        assert expected_gradient.abs().max() > 0 or name == "geo_rs"
    return worst


def whiten_over_replicas():
    """Two groups, one per rank, one of them with equal rewards, against both on one rank; the kinds
    that are collective.
    """
    from dataclasses import replace

    import numpy as np
    import torch.distributed as dist

    from megatron_rl.batch.advantage import with_advantages
    from tests.unit.batch.rollouts import make_groups

    groups, rank, worst = (
        [with_two_rewards(group) for group in make_groups(2, 4)],
        dist.get_rank(),
        0.0,
    )
    for kind in ("batch_whitened", "centred_batch_whitened", "per_reward", "rescaled_mean"):
        if kind == "rescaled_mean":
            groups[1] = replace(groups[1], rewards=np.ones(4, np.float32))
        weights = {"first": 1.0, "second": 0.5} if kind == "per_reward" else None
        expected = with_advantages(groups, kind, reward_weights=weights)
        (got,) = with_advantages([groups[rank]], kind, dist.group.WORLD, reward_weights=weights)
        alone = with_advantages([groups[rank]], kind, reward_weights=weights)[0]
        if expected[rank].advantages.any():  # not those of equal rewards
            assert not np.allclose(alone.advantages, expected[rank].advantages), (
                f"{kind} needs the other replica"
            )
        worst = max(worst, float(np.abs(got.advantages - expected[rank].advantages).max()))
    return worst


def with_two_rewards(group):
    """For GDPO: two rewards by name, of which the second is another number in every group."""
    from dataclasses import replace

    rollouts = [
        replace(
            rollout,
            reward_metrics={"first": float(i % 2), "second": float(len(rollout.tokens) * i)},
        )
        for i, rollout in enumerate(group.rollouts)
    ]
    return replace(group, rollouts=tuple(rollouts))


def train_twice(checkpoint, loss, layout, lr):
    """[(loss, gradient norm) of two updates on one mini-batch, the second one off policy]."""
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    engine = make_engine(checkpoint, parallel=layout, loss=loss, optim={"lr": lr})
    batch = random_batch(engine)
    mine = sum(int(part.loss_mask.sum()) for part in batch.micro_batches)
    if engine.parallel.dp_size == 2:
        total = batch.num_response_tokens
        assert mine not in (0, total) and 2 * mine != total, "replicas have unequal tokens"
    old = engine.old_logprobs(batch, MetricSums(), replay="R3")
    results = []
    for _ in range(2):
        sums = MetricSums()
        engine.update(batch, old, sums, replay="R3")
        metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
        results.append(
            (metrics["train/loss"], metrics["optim/grad_norm"], metrics["train/clip_high_frac"])
        )
    engine.parallel.destroy()
    return results


def check_reference(checkpoint, mode, settings, folder=None):
    """loss.kl_coef: log pi_ref is that of the weights as loaded, under the update's routing; the
    pass changes nothing else.

    folder: a run that is resumed from a checkpoint saved there has the reference of the HF
    checkpoint still.
    """
    import torch
    import torch.distributed as dist

    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.engine.forward import to_device
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.replay.manager import Routes
    from tests.dist.engines import make_engine, random_batch

    make = {"parallel": {"ep": 2}, "loss": {"kl_coef": 0.5}, "replay": mode} | settings
    engine = make_engine(checkpoint, **make)
    batch = random_batch(engine)

    def update(old):
        sums = MetricSums()
        engine.update(batch, old, sums, replay=mode)
        return sums.reduce(dist.group.WORLD, engine.parallel.device)

    def old_pass():
        before = [p.detach().clone() for chunk in engine.chunks for p in chunk.parameters()]
        old = engine.old_logprobs(batch, MetricSums(), replay=mode)
        after = [p for chunk in engine.chunks for p in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            "the reference pass changed weights"
        )
        return old

    first = old_pass()
    assert all(torch.equal(a, b) for a, b in zip(first.reference, first.logprobs, strict=True)), (
        mode
    )
    at_start, later = update(first), update(first)
    assert at_start["train/kl_reference"] == 0.0 < later["train/kl_reference"], (
        mode,
        at_start,
        later,
    )
    second = old_pass()
    assert not torch.equal(torch.cat(second.logprobs), torch.cat(first.logprobs))
    if mode != "R2":  # R2 recorded other experts since
        assert all(
            torch.equal(a, b) for a, b in zip(second.reference, first.logprobs, strict=True)
        ), mode
    if mode == "R2":
        assert any(
            not torch.equal(a, b) for a, b in zip(second.recorded, first.recorded, strict=True)
        ), "no route moved"
        micro_batches = to_device(batch.micro_batches, engine.layout, engine.parallel.device)
        with engine._with_reference():
            expected, _ = engine._forward(
                micro_batches, [Routes(replay=ids) for ids in second.recorded]
            )
        assert all(torch.equal(a, b) for a, b in zip(second.reference, expected, strict=True)), (
            "not under the record"
        )
    if folder is not None:
        Checkpointer(engine, folder).save(Snapshot(1, {}))
        engine.parallel.destroy()
        engine = make_engine(checkpoint, **make)
        Checkpointer(engine, folder).load(folder / "step_000001")
        resumed = engine.old_logprobs(batch, MetricSums(), replay=mode)
        assert torch.equal(torch.cat(resumed.logprobs), torch.cat(second.logprobs)), (
            "the resumed weights"
        )
        assert all(
            torch.equal(a, b) for a, b in zip(resumed.reference, first.reference, strict=True)
        ), "not the first weights"
    engine.parallel.destroy()


def layouts_of(loss):
    return LAYOUTS | STAGES if loss["name"] == "kl_cov" else LAYOUTS


def on_two_ranks(checkpoint, losses):
    import torch.distributed as dist

    import megatron_rl.distributed  # noqa: F401  (CPU support first)

    dist.init_process_group("gloo")
    results = {"tokens": spread_tokens(), "whitened": whiten_over_replicas()}
    for loss, lr in losses:
        for layout, parallel in layouts_of(loss).items():
            results[loss["name"], layout] = train_twice(checkpoint, loss, parallel, lr)
    for mode in ("none", "R2", "R3"):
        settings = {"optim": {"lr": 1e-2}} if mode == "R2" else {}  # the routes move
        check_reference(
            checkpoint, mode, settings, checkpoint.parent / "checkpoints" if mode == "R3" else None
        )
    check_reference(
        checkpoint,
        "R3",
        {"model": {"dtype": "bfloat16"}, "optim": {"distributed": True, "lr": 1e-2}},
    )
    dist.destroy_process_group()
    return results


def test_the_loss_does_not_depend_on_the_ranks():
    clips = {"clip_low": 0.05, "clip_high": 0.05}
    losses = [
        ({"name": "minirl"}, 2e-4),
        ({"name": "gspo", **clips}, 5e-5),
        ({"name": "dapo", **clips}, 2e-4),
        ({"name": "cispo"}, 2e-4),
        ({"name": "kl_cov", "select_share": 0.2, "kl_coef": 0.5, "kl_weight": "total"}, 2e-4),
    ]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "moe")
        for results in run_ranks(on_two_ranks, 2, checkpoint, losses):
            assert set(results["tokens"]) == {*PRESETS, *POSITIONS}
            assert max(results["tokens"].values()) < 1e-12, results["tokens"]
            assert results["whitened"] < 1e-6
            for loss, _ in losses:
                name = loss["name"]
                expected = results[name, "tp2"]
                assert expected[1][1] > 0, "the second update should learn from some tokens"
                assert name in ("cispo", "kl_cov") or expected[1][2] > 0, "and clip others"
                assert abs(expected[1][0] - expected[0][0]) > 1e-3 * abs(expected[0][0]), (
                    "the first update changed nothing"
                )
                for layout in layouts_of(loss):
                    for got, value in zip(results[name, layout], expected, strict=True):
                        assert got == pytest.approx(value, rel=2e-4, abs=1e-6), (name, layout)
