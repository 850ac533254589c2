"""Replay under every kind of router on real megatron-core: what is consumed, weighed, counted,
measured and learned.
"""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl_tools.verify_replay.options import KINDS
from megatron_rl_tools.verify_replay.router_kinds import (
    gate_weights,
    live_choice,
    router_kind,
    selection_scores,
)
from tests.dist.launch import run_ranks
from tests.dist.test_verify_replay import failed, run_tool
from tests.tiny import random_checkpoint

EXPERTS, TOP_K, LAYERS = 16, 4, 4

COMMANDS = {
    1: [
        *(["--router", kind, "--num-layers", "2", "--recompute", "full"] for kind in KINDS),
        *(["--router", kind, "--num-layers", "2", "--dispatcher", "allgather"] for kind in KINDS),
        *(["--router", kind, "--num-layers", "2", "--mode", "R2"] for kind in KINDS),
    ],
    2: [
        ["--router", "sigmoid-groups", "--ep", "2", "--recompute", "selective"],
        ["--router", "sigmoid-groups", "--ep", "2", "--dispatcher", "allgather", "--mode", "R2"],
        ["--router", "sigmoid", "--tp", "2", "--micro-batches", "1"],
        ["--router", "softmax-groups", "--cp", "2", "--micro-batches", "4"],
        [
            "--router",
            "pre-softmax",
            "--pp",
            "2",
            "--layers-per-stage",
            "1,3",
            "--recompute",
            "block",
        ],
    ],
}


@pytest.mark.parametrize("world", COMMANDS)
def test_every_kind_of_router_is_replayed_exactly(world):
    """Fingerprints, gate weights against the kind's own formula, last tokens, and a record that
    replays bit by bit.
    """
    ranks = run_ranks(run_tool, world, COMMANDS[world], timeout=500)
    for command, (code, report, stderr) in zip(COMMANDS[world], ranks[0], strict=True):
        assert (code, report and failed(report)) == (0, []), (command, stderr, report)
        names = {check["name"] for check in report["checks"]}
        assert {"(a) update forward", "(a) gate weights", "(b) replay of a live pass"} <= names
        assert ("(a) last tokens" in names) == ("R2" not in command)


def spec_of(path, kind):
    from megatron_rl.models.families import make_spec
    from megatron_rl.models.spec import load_hf_config
    from megatron_rl_tools.verify_replay.router_kinds import router_kind

    spec = make_spec(load_hf_config(path))
    return dataclasses.replace(spec, router=router_kind(kind, num_experts=EXPERTS, top_k=TOP_K))


def run_kinds(path, kinds):
    """On one rank: for each (kind, recompute) an old-logprob pass and an update under R3; returns
    plain values.
    """
    import torch.distributed as dist

    from megatron_rl.engine.model import moe_routers
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl_tools.verify_replay.router_kinds import set_expert_bias
    from tests.dist.engines import make_engine, random_batch

    dist.init_process_group("gloo")
    results = []
    for kind, recompute in kinds:
        engine = make_engine(
            path,
            model={"recompute": recompute},
            optim={"lr": 0.0, "clip_grad": 0.0},
            spec=spec_of(path, kind),
        )
        routers = moe_routers(engine.chunks)
        set_expert_bias(routers)
        batch = random_batch(engine, num_experts=EXPERTS, top_k=TOP_K, layers=LAYERS)
        # (pass, layer, logits, routing map, core's count of tokens per expert after the call)
        calls = []

        def hook(layer, log):
            def after(module, inputs, outputs):
                count = module.local_tokens_per_expert
                with torch.no_grad():
                    logits = module.gating(inputs[0].detach()).flatten(0, -2)
                log.append((layer, logits, outputs[1], None if count is None else count.clone()))

            return after

        for layer, router in routers:
            router.register_forward_hook(hook(layer, calls))
        biases = [
            None if router.expert_bias is None else router.expert_bias.clone()
            for _, router in routers
        ]
        old = engine.old_logprobs(batch, MetricSums(), replay="R3")
        forward, calls[:] = list(calls), []
        engine.update(batch, old, MetricSums(), replay="R3")
        report = engine.mismatch([old])
        results.append(
            {
                "forward": [
                    (layer, logits.numpy(), used.numpy()) for layer, logits, used, _ in forward
                ],
                "compared": [micro.row_state.numpy() == 0 for micro in batch.micro_batches],
                "update": [
                    (layer, used.numpy(), None if n is None else n.numpy())
                    for layer, _, used, n in calls
                ],
                "bias_before": [None if bias is None else bias.numpy() for bias in biases],
                "bias_after": [
                    None if r.expert_bias is None else r.expert_bias.numpy() for _, r in routers
                ],
                "left": [
                    r.local_tokens_per_expert.sum().item()
                    for _, r in routers
                    if r.enable_expert_bias
                ],
                "gradients": [float(router.weight.main_grad.abs().max()) for _, router in routers],
                "report": vars(report),
                "old_counts": [None if n is None else float(n.sum()) for *_, n in forward],
            }
        )
        engine.parallel.destroy()
    dist.destroy_process_group()
    return results


CASES = [(kind, recompute) for kind in KINDS for recompute in ("none", "full")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = random_checkpoint(
        tmp_path_factory.mktemp("tiny"), num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    return dict(zip(CASES, run_ranks(run_kinds, 1, path, CASES)[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_router_gets_gradient_through_its_gate_weights(runs, case):
    assert min(runs[case]["gradients"]) > 1e-4


@pytest.mark.parametrize("case", [case for case in CASES if "sigmoid" in case[0]], ids=str)
def test_core_counts_replayed_tokens_once_and_the_bias_stays(runs, case):
    """For its own bias update core counts what was replayed, pads included, in the pass that has
    gradient: once.
    """
    run = runs[case]
    assert all(count == 0 for count in run["old_counts"])
    total = {}
    for layer, used, count in run["update"]:
        before = total.get(layer, np.zeros(EXPERTS))
        # a forward whose recompute will come
        is_checkpointed = case[1] == "full" and np.array_equal(count, before)
        total[layer] = before if is_checkpointed else before + used.sum(0)
        np.testing.assert_array_equal(count, total[layer])
    rows = sum(len(rows) for rows in run["compared"])
    assert {layer: counts.sum() for layer, counts in total.items()} == dict.fromkeys(
        range(LAYERS), rows * TOP_K
    )
    assert run["left"] == [0.0] * LAYERS
    for before, after in zip(run["bias_before"], run["bias_after"], strict=True):
        np.testing.assert_array_equal(before, after)
        assert np.abs(before).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_mismatch_margins_and_gate_mass_follow_the_kind_of_router(runs, kind):
    """By a loop over tokens: margins in what the router selects by, gate mass in what it weighs
    by.
    """
    run, router = runs[kind, "none"], router_kind(kind, num_experts=EXPERTS, top_k=TOP_K)
    kept, flipped, mass, largest = [], [], [], 0.0
    for index, (layer, logits, used) in enumerate(run["forward"]):
        compared = np.flatnonzero(run["compared"][index // LAYERS])
        bias = run["bias_before"][layer]
        values = (
            torch.tensor(logits[compared], dtype=torch.float64),
            router,
            None if bias is None else torch.tensor(bias),
        )
        chosen = live_choice(*values, TOP_K)
        weights = gate_weights(
            values[0], torch.zeros(logits[compared].shape).scatter(1, chosen, 1.0).bool(), router
        )
        for row, weigh, select, ids in zip(
            compared, weights, selection_scores(*values), chosen.tolist(), strict=True
        ):
            live, rollout = set(ids), set(np.flatnonzero(used[row]).tolist())
            lowest = float(select[ids].min())
            margin = lowest - max(
                float(select[expert]) for expert in range(EXPERTS) if expert not in live
            )
            (flipped if live != rollout else kept).append(margin)
            mass.append(sum(float(weigh[expert]) for expert in live - rollout) / float(weigh.sum()))
            if live != rollout:
                largest = max(largest, lowest - float(select[list(rollout)].min()))
    report = run["report"]
    assert report["router_mismatch"] == pytest.approx(len(flipped) / len(mass))
    assert report["replayed_mismatch"] == 0.0
    assert report["flipped_margin"] == pytest.approx(np.mean(flipped), rel=1e-4, abs=1e-6)
    assert report["replaced_gate_mass"] == pytest.approx(np.mean(mass), rel=1e-4)
    assert report["flip_margin_max"] == pytest.approx(largest, rel=1e-4)


def run_mtp(path):
    """On one rank: a real GPTModel with two MTP layers; (decoder's maps are the given routes, MTP's
    maps are live).
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_rl.engine import model as engine_model
    from megatron_rl.engine.routers import problems_of
    from megatron_rl.replay.manager import ReplayManager, Routes
    from tests.dist.launch import build

    _, spec, config, parallel = build(path, load=False)
    config.mtp_num_layers = 2
    layers = engine_model._layer_spec(config, False, None)
    mtp = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    sizes = dict(vocab_size=spec.vocab_size, max_sequence_length=spec.max_positions)
    chunk = GPTModel(config, layers, mtp_block_spec=mtp, position_embedding_type="rope", **sizes)
    decoder = engine_model.moe_routers([chunk])
    every = {
        name: module for name, module in chunk.named_modules() if isinstance(module, TopKRouter)
    }
    named = list(problems_of([chunk], spec.moe_layers))
    assert [line.split(" is ")[0] for line in named] == [
        name for name in every if name.startswith("mtp.")
    ], named
    manager = ReplayManager(decoder, num_experts=EXPERTS)
    maps = {}

    def after(router, inputs, outputs):
        live = router.gating(inputs[0].detach()).flatten(0, -2).topk(TOP_K).indices
        maps[router] = outputs[1], torch.zeros_like(outputs[1]).scatter(1, live, True)

    for router in every.values():
        router.register_forward_hook(after)
    tokens = torch.arange(2, 10)[None]
    given = torch.rand(LAYERS, 8, EXPERTS).argsort(-1)[..., :TOP_K].to(torch.uint8)
    with manager.run_pass([Routes(replay=given)], training=False), manager.forward(0):
        chunk(tokens, torch.arange(8)[None], None, labels=tokens)
    replayed = []
    for layer, router in decoder:
        used = maps[router][0]
        replayed.append(used.equal(torch.zeros_like(used).scatter(1, given[layer].long(), True)))
    live = [
        maps[router][0].equal(maps[router][1])
        for name, router in every.items()
        if name.startswith("mtp.")
    ]
    parallel.destroy()
    return replayed, live, [layer for layer, _ in decoder]


def test_mtp_layers_route_live_while_the_decoder_replays(tmp_path):
    path = random_checkpoint(tmp_path, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    replayed, live, layers = run_ranks(run_mtp, 1, path)[0]
    assert (replayed, live, layers) == ([True] * LAYERS, [True] * 2, list(range(LAYERS)))
