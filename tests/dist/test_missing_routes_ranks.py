"""Rows without a route on real megatron-core ranks: they follow the router, all others the given
routes, pads are masked.

The ids that a gap row carries are left in place as a decoy: using them would be seen.  Every router
call's routing map is compared with the given routes, and with what that router would choose alone
on the same scores.
"""

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config import load_config
from tests.dist.launch import run_ranks
from tests.dist.test_replay import LAYERS, NUM_EXPERTS, TOP_K, make_samples, owners_of_rows
from tests.tiny import random_checkpoint

LAYOUTS = {
    1: [{"recompute": "none"}],
    4: [
        {"tp": 2, "pp": 2, "recompute": "selective"},  # the second stage gets no mask cut by core
        {"cp": 2, "tp": 2, "recompute": "full"},
        {"tp": 2, "pp": 2, "recompute": "none", "batch_format": "bshd"},
    ],
}


def samples_with_gaps():
    """Every third row, counted over the batch, has no route."""
    samples, count = [], itertools.count()
    for sample in make_samples():
        missing = np.array([next(count) % 3 == 0 for _ in range(len(sample.rollout.tokens) - 1)])
        samples.append(replace(sample, rollout=replace(sample.rollout, missing_routes=missing)))
    return samples


def log_padding_masks(routers):
    """One [t] of bools for each router call, in the order of calls."""
    masks = []
    for _, router in routers:
        router.register_forward_hook(
            lambda router, inputs, outputs: masks.append(inputs[1].reshape(-1).tolist())
        )
    return masks


def run_layouts(checkpoint, layouts):
    """On a rank: one old-logprob pass and update in each layout under mask_token; plain values
    back.
    """
    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine.engine import Engine
    from megatron_rl.engine.model import moe_routers
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl_tools.verify_replay.router_hooks import Watch

    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        layout = dict(layout)
        form, recompute = layout.pop("batch_format", "thd"), layout.pop("recompute")
        sections = {
            "model": {
                "path": str(checkpoint),
                "dtype": "float32",
                "recompute": recompute,
                "batch_format": form,
            },
            "data": {"train": "unused"},
            "optim": {"lr": 1e-3, "distributed": False, "clip_grad": 0.5},
            "replay": {"on_missing_route": "mask_token"},
            "parallel": layout,
        }
        cfg = load_config(None, [], sections)
        groups = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
        engine = Engine(cfg, groups, total_updates=4)
        routers = [
            (engine.spec.moe_layers.index(layer), router)
            for layer, router in moe_routers(engine.chunks)
        ]
        watch, masks = Watch(routers, TOP_K, engine.spec.router), log_padding_masks(routers)
        batch = make_mini_batch(
            samples_with_gaps(), max_tokens=25, rule=engine.pack_rule, dp_group=groups.dp_group
        )
        sums = MetricSums()
        old = engine.old_logprobs(batch, sums, replay="R3")
        passes = [(watch.take(), list(masks))]
        masks.clear()
        report = engine.mismatch([old])
        engine.update(batch, old, sums, replay="R3")
        passes.append((watch.take(), list(masks)))
        metrics = sums.reduce(dist.group.WORLD, groups.device)
        results.append(
            {
                "norms": (
                    metrics["train/loss"],
                    metrics["optim/grad_norm"],
                    metrics["train/kl_mu_pi"],
                ),
                "replayed_mismatch": report.replayed_mismatch,
                "counts": (batch.num_responses, batch.num_response_tokens),
                "learned": sum(int(micro.loss_mask.sum()) for micro in batch.micro_batches),
                "passes": passes,
                "place": (
                    groups.cp_rank,
                    groups.cp_size,
                    groups.tp_rank,
                    groups.tp_size,
                    form == "bshd",
                ),
                "micro": [
                    (list(m.rollout_ids), m.cu_seqlens.tolist()) for m in batch.micro_batches
                ],
            }
        )
        groups.destroy()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def runs():
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(
            Path(folder) / "moe",
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            num_hidden_layers=LAYERS,
            moe_intermediate_size=16,
        )
        return {
            world: run_ranks(run_layouts, world, checkpoint, layouts)
            for world, layouts in LAYOUTS.items()
        }


CASES = [
    (world, index, layout)
    for world, layouts in LAYOUTS.items()
    for index, layout in enumerate(layouts)
]


@pytest.mark.parametrize(("world", "index", "layout"), CASES, ids=str)
def test_gap_rows_follow_the_router_and_all_others_their_routes(runs, world, index, layout):
    rollouts = {sample.rollout.id: sample.rollout for sample in samples_with_gaps()}
    seen = {"gap": 0, "given": 0, "recompute": 0}
    decoys_avoided = 0
    for rank in runs[world]:
        for key, consumed, live, _ in every_row(rank[index], seen):
            if key is None:
                continue
            layer, name, position = key
            rollout = rollouts[name]
            last = position == len(rollout.tokens) - 1
            given = (
                None if last else tuple(sorted(rollout.routed_experts[position, layer].tolist()))
            )
            if last or rollout.missing_routes[position]:
                assert consumed == live, key
                decoys_avoided += not last and live != given
                seen["gap"] += not last
            else:
                assert consumed == given, key
                seen["given"] += 1
        # gaps are not compared, or decoys would count
        assert rank[index]["replayed_mismatch"] == 0.0
    passes = 2 if layout["recompute"] == "none" else 3
    gaps = sum(int(rollout.missing_routes.sum()) for rollout in rollouts.values())
    rows = sum(len(rollout.tokens) - 1 for rollout in rollouts.values())
    assert (seen["gap"], seen["given"]) == (passes * LAYERS * gaps, passes * LAYERS * (rows - gaps))
    assert (seen["recompute"] > 0) == (layout["recompute"] != "none")
    assert decoys_avoided > 0.9 * seen["gap"]


@pytest.mark.parametrize(("world", "index", "layout"), CASES, ids=str)
def test_pads_and_nothing_else_reach_every_router_as_its_padding_mask(runs, world, index, layout):
    pads = 0
    for rank in runs[world]:
        for key, _, _, masked in every_row(rank[index], {}):
            assert masked == (key is None)
            pads += masked
    assert (pads > 0) == (world > 1)


@pytest.mark.parametrize(("world", "index", "layout"), CASES, ids=str)
def test_masked_tokens_leave_the_loss_and_not_its_denominators(runs, world, index, layout):
    rollouts = [sample.rollout for sample in samples_with_gaps()]
    masked = sum(
        int(rollout.missing_routes[rollout.prompt_length - 1 :].sum()) for rollout in rollouts
    )
    tokens = sum(rollout.response_length for rollout in rollouts)
    reference = runs[1][0][0]["norms"]
    for rank in runs[world]:
        assert rank[index]["counts"] == (len(rollouts), tokens)
        assert rank[index]["learned"] == tokens - masked
        np.testing.assert_allclose(rank[index]["norms"], reference, rtol=1e-5)


def every_row(result, seen):
    """((MoE layer, rollout, position) or None for a pad, consumed, live, masked) of every row of
    every router call.
    """
    from megatron_rl_tools.verify_replay.router_hooks import name_wrong_rows

    owners = owners_of_rows(result, [sample.rollout for sample in samples_with_gaps()])
    for calls, masks in result["passes"]:
        seen["recompute"] = seen.get("recompute", 0) + sum(
            call.kind == "recompute" for call in calls
        )
        rows = name_wrong_rows(calls, owners, rank=0)
        for row, masked in zip(rows, itertools.chain(*masks), strict=True):
            yield (
                (None if row.who is None else (row.layer, *row.who)),
                row.consumed,
                row.live,
                masked,
            )


# A step's sampling --------------------------------------------------------------------------------


def sample_steps(cases, folder):
    """On a rank, a replica of its own: what Run.take_samples gives or raises, the first rank's
    server as each case says.
    """
    import torch.distributed as dist

    from megatron_rl.data.prompts import PromptSource
    from megatron_rl.distributed import make_parallel
    from megatron_rl.metrics.console import Console
    from megatron_rl.records import Prompt
    from megatron_rl.reward.pool import Rewarded
    from megatron_rl.rollout.client.client import RolloutClient
    from megatron_rl.rollout.client.sampling import SampleRules
    from megatron_rl.rollout.inference import Inference
    from megatron_rl.rollout.saved.rollout_recorder import Recorder
    from megatron_rl.trainer.live_rollouts import Leader, LiveRollouts
    from megatron_rl.trainer.step_meter import StepMeter
    from tests.fake_server import SPEC, VERSION, FakeServer

    def scores(groups, **_):
        return [[Rewarded(float(number)) for number in range(len(episodes))] for episodes in groups]

    dist.init_process_group("gloo")
    results = []
    for settings, script, *dynamic in cases:
        sections = {
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "run": {"prompts_per_step": 2},
        }
        cfg = load_config(
            None, [], sections | {"replay": settings, "batch": {"dynamic_sampling": bool(dynamic)}}
        )
        parallel = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
        tokenizer = SimpleNamespace(eos_token_id=1, batch_decode=lambda rows, **_: [""] * len(rows))
        prompts = PromptSource(
            [Prompt(str(i), "", (3, 4, 5), "") for i in range(2)], seed=0, shuffle=False
        )
        with FakeServer(*(script if dist.get_rank() == 0 else ["ok"])) as server:
            client = RolloutClient(
                [server.url],
                cfg.rollout,
                SampleRules(
                    SPEC, True, drop_missing_routes=cfg.replay.on_missing_route == "drop_sample"
                ),
            )
            rewards = SimpleNamespace(totals=dict, score_episodes=scores)
            leader = Leader(client, rewards, Recorder(folder, dp_rank=dist.get_rank()))
            inference = Inference(
                iter,
                client,
                pusher=None,
                server_pool=None,
                urls=[server.url],
                log=print,
                version=VERSION,
            )
            rollouts = LiveRollouts(
                cfg,
                parallel,
                None,
                tokenizer,
                prompts,
                {},
                inference,
                leader,
                StepMeter(),
                Console(enabled=False),
                VERSION,
            )
            try:
                taken, groups = rollouts.draw(rollouts.scheduler.take, 0)
                error = ""
                if dynamic:  # none of the first draw teaches: another follows
                    groups = [
                        replace(group, rewards=np.zeros(cfg.run.group_size)) for group in groups
                    ]
                    _, groups = rollouts.refill(taken, groups)
                assert len(groups) == 1 and len(groups[0].rollouts) == cfg.run.group_size
                rollouts.record(
                    [replace(group, rewards=np.zeros(cfg.run.group_size)) for group in groups], 0
                )
            except ValueError as stopped:
                error = str(stopped)
        metrics = rollouts.meter.sums.reduce(dist.group.WORLD, "cpu")
        results.append(
            (error, {name: value for name, value in metrics.items() if name.startswith("replay/")})
        )
        parallel.destroy()
    dist.destroy_process_group()
    return results


def test_the_policy_stops_every_replica_or_counts(tmp_path):
    """8 responses of 5 tokens on each of two replicas; one response of the first lacks row 4 of its
    7, a response row.

    The last three draw twice, and the step is checked, not the draw: 1 of 160 rows.
    """
    steps = [
        ({}, ["gap_of_zeros"]),
        ({"on_missing_route": "live", "missing_route_budget": 0.02}, ["gap_of_minus_one"]),
        ({"on_missing_route": "live", "missing_route_budget": 0.01}, ["gap_of_zeros"]),
        ({"on_missing_route": "mask_token", "missing_route_budget": 0.02}, ["gap_of_zeros"]),
        ({"on_missing_route": "drop_sample", "missing_route_budget": 0.1}, ["gap_of_zeros", "ok"]),
        ({"on_missing_route": "drop_sample", "missing_route_budget": 0.01}, ["gap_of_zeros", "ok"]),
        (
            {"on_missing_route": "live", "missing_route_budget": 0.01},
            ["gap_of_zeros", "ok"],
            "dynamic",
        ),
        (
            {"on_missing_route": "live", "missing_route_budget": 0.005},
            ["gap_of_zeros", "ok"],
            "dynamic",
        ),
        (
            {"on_missing_route": "live", "missing_route_budget": 0.011},
            ["ok", "gap_of_zeros"],
            "dynamic",
        ),
    ]
    first, second = run_ranks(sample_steps, 2, steps, tmp_path)
    assert [bool(error) for error, _ in first] == [bool(error) for error, _ in second] == [
        True, False, True, False, False, True, False, True, False
    ]  # fmt: skip
    assert "rollout 0/0: row 4 of 7 in all MoE layers: the server sent no route" in first[0][0]
    assert "rollouts of another replica: the server sent no route" in second[0][0]
    assert "1 of the step's 80 response tokens have no route" in first[2][0] and first[2][
        0
    ].endswith("replay.missing_route_budget")
    assert "1 of the step's 17 samples were dropped" in second[5][0]
    assert "1 of the step's 160 response tokens have no route" in first[7][0]
    assert [metrics for _, metrics in first] == [metrics for _, metrics in second]
    none = dict.fromkeys(
        (
            "missing_rows_total",
            "dropped_samples_total",
            "missing_route_frac",
            "prompt_missing_route_frac",
        ),
        0,
    )
    for index, counted in {
        1: {"missing_rows_total": 1, "missing_route_frac": 1 / 80},
        3: {"missing_rows_total": 1, "missing_route_frac": 1 / 80, "masked_tokens_total": 1},
        4: {"dropped_samples_total": 1},
    }.items():
        assert first[index][1] == {
            f"replay/{name}": value for name, value in (none | counted).items()
        }
