"""What every router consumed, and that every layout trains as one rank does: real megatron-core on
1, 2 and 4 gloo ranks.

Fingerprints, hooks and checks are those of `megatron-rl verify-replay`.  Here they run on
mini-batches as training packs them, over updates that change the weights, in more layouts, and each
layout is compared with one rank.
"""

import itertools
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.config import ModelConfig, ParallelConfig, load_config
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

NUM_EXPERTS, TOP_K, LAYERS = 16, 4, 4
LENGTHS = (11, 8, 10, 12, 5, 7, 8, 7)
# dense layers among the model's four MoE layers
DENSE = {0: [], 1: [0], 2: [0, 1], "mixed": [0, 3]}
# number of ranks -> sizes, model settings, and keys of the test (see run_layouts); the rest:
# test_layout_matrix
LAYOUTS = {
    1: [{"recompute": "none"}, {"recompute": "full"}],
    2: [
        {"tp": 2, "recompute": "selective"},
        {"pp": 2, "recompute": "full"},
        {"ep": 2, "recompute": "none"},
        {"ep": 2, "recompute": "full", "token_dispatcher": "allgather"},
        {"cp": 2, "recompute": "full"},
        {"cp": 2, "ep": 2, "recompute": "none"},
        {"pp": 2, "vp": 2, "recompute": "full"},
        # no expert on the first stage
        {"pp": 2, "layers_per_stage": [2, 4], "dense": 2, "recompute": "full"},
        {"pp": 2, "vp": 2, "layers_per_stage": [1, 1, 2, 1], "dense": 1, "recompute": "block"},
        {"tp": 2, "recompute": "selective", "batch_format": "bshd", "fused_lm_head": True},
        {"cp": 2, "recompute": "none", "batch_format": "bshd"},
        {"pp": 2, "recompute": "full", "batch_format": "bshd"},
        {"ep": 2, "recompute": "none", "token_dispatcher": "allgather", "batch_format": "bshd"},
        {
            "pp": 2,
            "layers_per_stage": [2, 4],
            "dense": "mixed",
            "core": {"num_layers_in_first_pipeline_stage": 2},
            "recompute": "selective",
            "micro_batches": 1,
        },
    ],
    4: [
        {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "recompute": "selective"},
        {"cp": 2, "tp": 2, "recompute": "selective"},
        {"cp": 2, "pp": 2, "recompute": "full"},
        {"cp": 2, "tp": 2, "recompute": "full", "batch_format": "bshd"},
    ],
}


HAS_PADS = {"cp", "batch_format"}  # these layouts pad sequences here, whatever their lengths


def make_samples():
    """Sequences of 5 to 12 tokens; every (token, layer) of the batch has its own set of experts."""
    from megatron_rl_tools.verify_replay.fingerprints import make_sample, random_routes

    rng, used = np.random.default_rng(0), set()
    return [
        make_sample(
            rng,
            f"r{index}",
            random_routes(rng, length - 1, LAYERS, NUM_EXPERTS, TOP_K, used),
            vocab_size=60,
        )
        for index, length in enumerate(LENGTHS)
    ]


def run_layouts(checkpoints, layouts, mode):
    """On a rank: two rounds of old-logprob pass and update (two updates but for R3) in each layout;
    returns plain values.

    Keys of a layout for this test only: dense (see DENSE), micro_batches (exactly so many), core
    (other settings of core for the stages of layers_per_stage, in place of our
    pipeline_model_parallel_layout).
    """
    import dataclasses
    from unittest.mock import patch

    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine import model as engine_model
    from megatron_rl.engine.engine import Engine
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl_tools.verify_replay.fingerprints import rows_on_rank
    from megatron_rl_tools.verify_replay.passes import recomputed_layers
    from megatron_rl_tools.verify_replay.router_hooks import Watch

    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        parallel = {
            key: value for key, value in layout.items() if key in ParallelConfig.model_fields
        }
        model = {key: value for key, value in layout.items() if key in ModelConfig.model_fields}
        sections = {
            "model": {
                "path": str(checkpoints / f"dense{layout.get('dense', 0)}"),
                "dtype": "float32",
                **model,
            },
            "data": {"train": "unused"},
            "optim": {
                "lr": 1e-3 if mode == "R3" else 1e-2,
                "distributed": layout.get("ep", 1) > 1,
                "clip_grad": 0.5,
            },
            "parallel": parallel,
        }
        cfg = load_config(None, [], sections)
        groups = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
        settings = engine_model.pipeline_settings(cfg.parallel, groups.device)
        if "core" in layout:
            settings = {**settings, "pipeline_model_parallel_layout": None, **layout["core"]}
        with patch.object(
            engine_model, "pipeline_settings", lambda *_, settings=settings: settings
        ):
            engine = Engine(cfg, groups, total_updates=4)
        routers = [
            (engine.spec.moe_layers.index(layer), router)
            for layer, router in engine_model.moe_routers(engine.chunks)
        ]
        watch, passes = Watch(routers, TOP_K, engine.spec.router), []
        samples = make_samples()
        share = len(samples) // groups.dp_size
        mine = samples[groups.dp_rank * share : (groups.dp_rank + 1) * share]
        rule, max_tokens = engine.pack_rule, 25
        if "micro_batches" in layout:
            rule, max_tokens = (
                dataclasses.replace(rule, count_multiple=layout["micro_batches"]),
                1000,
            )
        batch = make_mini_batch(mine, max_tokens=max_tokens, rule=rule, dp_group=groups.dp_group)
        norms, logprobs, mismatches = [], {}, []
        for _ in range(2):
            sums = MetricSums()
            old = engine.old_logprobs(batch, sums, replay=mode)
            passes.append(watch.take())
            for index, values in enumerate(old.logprobs):
                micro = batch.micro_batches[index]
                rows = rows_on_rank(micro.cu_seqlens.tolist(), groups.cp_rank, groups.cp_size)
                for value, row in zip(values.tolist(), rows, strict=True):
                    if micro.loss_mask[row]:
                        key = (
                            micro.rollout_ids[micro.sequence_ids[row]],
                            int(micro.positions[row]),
                        )
                        logprobs.setdefault(key, []).append(value)
            report = engine.mismatch([old])
            mismatches.append((report.replayed_mismatch, report.flip_rate))
            engine.update(batch, old, sums, replay=mode)
            passes.append(watch.take())
            metrics = sums.reduce(dist.group.WORLD, groups.device)
            norms.append((metrics["train/loss"], metrics["optim/grad_norm"]))
            # as with N = 2: the weights are no longer those of the old-logprob pass
            if mode != "R3":
                engine.update(batch, old, MetricSums(), replay=mode)
                passes.append(watch.take())
        results.append(
            {
                "norms": norms,
                "logprobs": logprobs,
                "mismatches": mismatches,
                "passes": passes,
                "gate_error": watch.gate_error,
                "dp_rank": groups.dp_rank,
                "place": (
                    groups.cp_rank,
                    groups.cp_size,
                    groups.tp_rank,
                    groups.tp_size,
                    layout.get("batch_format") == "bshd",
                ),
                "micro": [
                    (list(m.rollout_ids), m.cu_seqlens.tolist()) for m in batch.micro_batches
                ],
                "layers": list(engine.manager.layers),
                "ep_size": groups.ep_size,
                "recomputed": recomputed_layers(engine),
            }
        )
        groups.destroy()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def checkpoints():
    """A folder with a checkpoint of four MoE layers and the dense ones of each case of DENSE."""
    with tempfile.TemporaryDirectory() as folder:
        for name, dense in DENSE.items():
            random_checkpoint(
                Path(folder) / f"dense{name}",
                num_experts=NUM_EXPERTS,
                num_experts_per_tok=TOP_K,
                num_hidden_layers=LAYERS + len(dense),
                mlp_only_layers=dense,
                moe_intermediate_size=16,
            )
        yield Path(folder)


@pytest.fixture(scope="module")
def r3_runs(checkpoints):
    return {
        world: run_ranks(run_layouts, world, checkpoints, layouts, "R3")
        for world, layouts in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def references(checkpoints):
    """The same on one rank without recompute, by case of DENSE."""
    results = run_ranks(run_layouts, 1, checkpoints, [{"dense": name} for name in DENSE], "R3")[0]
    return dict(zip(DENSE, results, strict=True))


def all_cases(layouts):
    return [
        (world, index, layout)
        for world, cases in layouts.items()
        for index, layout in enumerate(cases)
    ]


@pytest.mark.parametrize(("world", "index", "layout"), all_cases(LAYOUTS), ids=str)
def test_every_router_consumed_the_given_route_once(r3_runs, world, index, layout):
    num_pads = check_consumed([rank[index] for rank in r3_runs[world]])
    assert num_pads > 0 or not HAS_PADS & layout.keys()


@pytest.mark.parametrize(("world", "index", "layout"), all_cases(LAYOUTS), ids=str)
def test_every_layout_trains_as_one_rank_does(r3_runs, references, world, index, layout):
    check_trains_alike([rank[index] for rank in r3_runs[world]], references[layout.get("dense", 0)])


def test_padded_micro_batches_differ_in_sequences_and_lengths(r3_runs):
    """So pipeline stages cannot rely on one shape."""
    layout = {"pp": 2, "recompute": "full", "batch_format": "bshd"}
    bounds = [cu_seqlens for _, cu_seqlens in r3_runs[2][0][LAYOUTS[2].index(layout)]["micro"]]
    assert all(
        len({end - start for start, end in itertools.pairwise(cu_seqlens)}) == 1
        for cu_seqlens in bounds
    )
    assert (
        len({len(cu_seqlens) for cu_seqlens in bounds}) > 1
        and len({cu_seqlens[1] for cu_seqlens in bounds}) > 1
    )


def test_r3_uses_the_rollouts_experts_though_the_live_router_disagrees(r3_runs):
    for ranks in r3_runs.values():
        for rank in ranks:
            for result in rank:
                check_live_router_disagrees(result)


@pytest.mark.parametrize("mode", ["R2", "none"])
def test_r2_replays_the_record_and_none_follows_the_router(checkpoints, mode):
    """In the update, R2 uses what the old-logprob pass recorded, also in the second one, when live
    routing has moved.
    """
    (result,) = run_ranks(run_layouts, 1, checkpoints, [{"recompute": "full"}], mode)[0]
    assert check_updates(result, mode), "an update at lr 1e-2 must move some route"


def check_consumed(ranks):
    """R3, one result per rank: in each pass the routers used every given route once, at its token
    and layer.

    Pads are dealt out to the experts in turn, expert-parallel rank by rank, and never follow the
    router.
    """
    from megatron_rl_tools.verify_replay import router_hooks
    from megatron_rl_tools.verify_replay.fingerprints import fingerprint_routes

    rollouts = [sample.rollout for sample in make_samples()]
    given = fingerprint_routes(rollouts)
    assert len(set(given.values())) == len(given) == LAYERS * sum(length - 1 for length in LENGTHS)
    assert sorted({layer for result in ranks for layer in result["layers"]}) == list(range(LAYERS))
    again = {layer for result in ranks for layer in result["recomputed"]}
    places = {
        name: (result["dp_rank"], index)
        for result in ranks
        for index, (names, _) in enumerate(result["micro"])
        for name in names
    }
    expected = router_hooks.Expected(given, {}, places)
    for index in range(4):  # two rounds of (old-logprob pass, update); only the update recomputes
        is_update = index % 2 == 1
        seen = [
            row
            for rank, result in enumerate(ranks)
            for row in router_hooks.name_wrong_rows(
                result["passes"][index], owners_of_rows(result, rollouts), rank
            )
        ]
        for kind, layers in (("forward", range(LAYERS)), ("recompute", again if is_update else ())):
            rows = [row for row in seen if row.kind == kind]
            assert {row.layer for row in rows} == set(layers)
            check = router_hooks.check_consumed(
                f"pass {index} {kind}", rows, expected, TOP_K, layers
            )
            assert check.passed, check
        check = router_hooks.check_live_rows(f"pass {index} last tokens", seen, expected)
        assert check.passed, check
        for result in ranks:
            calls = Counter(
                call.layer for call in result["passes"][index] if call.kind == "recompute"
            )
            assert calls == dict.fromkeys(
                result["recomputed"] if is_update else (), len(result["micro"])
            )
    assert max(result["gate_error"] for result in ranks) <= router_hooks.GATE_TOLERANCE
    return sum(check_pads(result, rollouts) for result in ranks)


def owners_of_rows(result, rollouts):
    """Who must be in each row of a rank's routers, by micro-batch."""
    from megatron_rl_tools.verify_replay.fingerprints import owners_on_rank

    by_id = {rollout.id: rollout for rollout in rollouts}
    return [
        owners_on_rank([by_id[name] for name in names], bounds, *result["place"])
        for names, bounds in result["micro"]
    ]


def check_pads(result, rollouts):
    """In packed order, pads use the experts in turn; how many pads all calls had."""
    from megatron_rl_tools.verify_replay.fingerprints import rows_on_rank

    owners, num_pads = owners_of_rows(result, rollouts), 0
    for call in itertools.chain(*result["passes"]):
        rows = rows_on_rank(result["micro"][call.number][1], *result["place"])
        pads = [
            (row, route)
            for row, owner, route in zip(rows, owners[call.number], call.consumed, strict=True)
            if owner is None
        ]
        assert [route for _, route in sorted(pads)] == dealt_to_pads(
            len(pads), result["ep_size"]
        ), call
        num_pads += len(pads)
    return num_pads


def dealt_to_pads(count, ep_size):
    """Sorted experts of the first `count` pads of a rank: one expert of every expert-parallel rank
    after the other.
    """
    share = NUM_EXPERTS // ep_size
    turns = itertools.cycle(
        rank * share + index for index in range(share) for rank in range(ep_size)
    )
    return [tuple(sorted(itertools.islice(turns, TOP_K))) for _ in range(count)]


def check_trains_alike(ranks, reference):
    """Equal loss, gradient norm and log-probs over two updates (fp32): the same routes, sums and
    denominators.

    The reference is packed, so a padded layout that passes trains as a packed one does.

    Log-probs after an update may differ more: Adam turns the rounding of a gradient near 0 into a
    whole step.
    """
    for result in ranks:
        np.testing.assert_allclose(result["norms"], reference["norms"], rtol=1e-5)
    merged = {key: values for result in ranks for key, values in result["logprobs"].items()}
    assert merged.keys() == reference["logprobs"].keys()
    for key, values in merged.items():
        before, after = reference["logprobs"][key]
        assert abs(values[0] - before) < 2e-5 and abs(values[1] - after) < 1e-4, (
            key,
            values,
            before,
            after,
        )


def check_live_router_disagrees(result):
    for replayed, flip_rate in result["mismatches"]:
        assert replayed == 0.0
        assert len(flip_rate) == LAYERS
        # random routes: the live top-k is another one almost everywhere
        assert min(flip_rate) > 0.9


def check_updates(result, mode):
    """The first update uses what the old-logprob pass did, of the same weights; the second one
    under R2 still, under none what its own router chooses; recompute what its forward did.  Whether
    an update moved live routing.
    """
    forwards, recomputes = (
        [
            {(call.layer, call.number): call.consumed for call in calls if call.kind == kind}
            for calls in result["passes"]
        ]
        for kind in ("forward", "recompute")
    )
    keys = {
        (layer, micro_batch)
        for layer in result["layers"]
        for micro_batch in range(len(result["micro"]))
    }
    assert len(forwards) == 6 and all(forward.keys() == keys for forward in forwards)
    rounds = [forwards[:3], forwards[3:]]
    assert all(first == old for old, first, _ in rounds)
    if mode == "R2":
        assert all(second == old for old, _, second in rounds)
    for index, (forward, recompute) in enumerate(zip(forwards, recomputes, strict=True)):
        # the old-logprob passes have no backward
        layers = result["recomputed"] if index not in (0, 3) else ()
        assert recompute == {key: routes for key, routes in forward.items() if key[0] in layers}
    assert torch.tensor(result["norms"]).isfinite().all()
    if mode == "none":
        return any(second != old for old, _, second in rounds)
    return forwards[0] != forwards[3]
