"""What every router really consumed, and that every layout trains alike: real megatron-core on 1, 2 and 4 gloo ranks.

Every (token, layer) of the mini-batch gets its own set of experts, a fingerprint: a route that reaches another token or
layer cannot go unnoticed, whatever the shapes say.  A forward hook on the live TopKRouter reads the routing map that core
dispatches by, in the forward and in the activation recompute.
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.config import ModelConfig, ParallelConfig, load_config
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

NUM_EXPERTS, TOP_K, LAYERS, SEQUENCES = 32, 4, 4, 8
DENSE = {0: [], 1: [0], 2: [0, 1], "mixed": [0, 3]}  # dense layers among the model's four MoE layers
LAYOUTS = {  # number of ranks -> sizes, model settings, and keys of the test (see run_layouts); the rest: test_layout_matrix
    1: [{"recompute": "none"}, {"recompute": "full"}],
    2: [
        {"tp": 2, "recompute": "selective"},
        {"pp": 2, "recompute": "full"},
        {"ep": 2, "recompute": "none"},
        {"ep": 2, "recompute": "full", "token_dispatcher": "allgather"},
        {"cp": 2, "recompute": "full"},
        {"cp": 2, "ep": 2, "recompute": "none"},
        {"pp": 2, "vp": 2, "recompute": "full"},
        {"pp": 2, "layers_per_stage": [2, 4], "dense": 2, "recompute": "full"},  # no expert on the first stage
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
    """Sequences of 5 to 12 tokens; routes[s, l] is the (s, l)-th 4-subset of 32 experts: no two equal in the batch."""
    from megatron_rl.batch.pack import Sample
    from megatron_rl.records import Rollout

    rng = np.random.default_rng(0)
    fingerprints = itertools.combinations(range(NUM_EXPERTS), TOP_K)
    samples = []
    for index in range(SEQUENCES):
        prompt, size = 3, int(rng.integers(5, 13))
        routes = np.array([[next(fingerprints) for _ in range(LAYERS)] for _ in range(size - 1)], np.uint8)
        rollout = Rollout(
            id=f"r{index}",
            tokens=rng.integers(2, 60, size),
            prompt_length=prompt,
            rollout_logprobs=(-4 + 0.3 * rng.standard_normal(size - prompt)).astype(np.float32),
            routed_experts=rng.permuted(routes, axis=-1),
            finish_reason="stop",
            policy_versions=np.zeros(size - prompt, np.int32),
        )
        samples.append(Sample(rollout, float(rng.normal())))
    return samples


def spy_on_routers(engine):
    """Log of (MoE layer, "forward" | "recompute", micro-batch or None, [t, K] sorted ids the routing map holds)."""
    log = []

    def hook(layer):
        def after(router, inputs, outputs):
            _, routing_map = outputs
            ids = routing_map.nonzero()[:, 1].view(len(routing_map), -1)
            state = engine.manager._pass
            log.append(
                (layer, "recompute" if state.micro_batch is None else "forward", state.micro_batch, ids.tolist())
            )

        return after

    from megatron_rl.engine.model import moe_routers

    for layer, router in moe_routers(engine.chunks):
        router.register_forward_hook(hook(engine.spec.moe_layers.index(layer)))
    return log


def recomputed_layers(engine):
    """MoE layers on this rank whose activations are recomputed."""
    model = engine.cfg.model
    held = [
        engine.spec.moe_layers.index(layer.layer_number - 1)
        for chunk in engine.chunks
        for index, layer in enumerate(chunk.decoder.layers)
        if layer.layer_number - 1 in engine.spec.moe_layers
        and (model.recompute != "block" or index < model.recompute_layers)
    ]
    return [] if model.recompute == "none" else held


def rows_on_rank(cu_seqlens, cp_rank, cp_size, tp_rank=0, tp_size=1, padded=False):
    """Packed rows on this rank, in order: zigzag chunks of each sequence, then the sequence-parallel slice; row by row.

    padded: the slice is one of positions, and all sequences come at each position.
    """
    rows = []
    for start, end in itertools.pairwise(cu_seqlens):
        for row in range(start, end):
            chunk = (row - start) * 2 * cp_size // (end - start)  # which of the 2 x cp chunks the row lies in
            if cp_size == 1 or chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
                rows.append(row)
    if padded:
        length = cu_seqlens[1]
        rows.sort(key=lambda row: (row % length, row))
    return [row for index, row in enumerate(rows) if index * tp_size // len(rows) == tp_rank]


def run_layouts(checkpoints, layouts, mode):
    """On a rank: two rounds of old-logprob pass and update (but for R3 two) in each layout; plain values back.

    Keys of a layout that are not ours: dense (see DENSE), micro_batches (exactly so many), core (how core itself is told
    the stages of layers_per_stage, in place of our pipeline_model_parallel_layout).
    """
    import dataclasses
    from unittest.mock import patch

    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine import model as engine_model
    from megatron_rl.engine.engine import Engine
    from megatron_rl.metrics.reduce import MetricSums

    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        parallel = {key: value for key, value in layout.items() if key in ParallelConfig.model_fields}
        model = {key: value for key, value in layout.items() if key in ModelConfig.model_fields}
        sections = {
            "model": {"path": str(checkpoints / f"dense{layout.get('dense', 0)}"), "dtype": "float32", **model},
            "data": {"train": "unused"},
            "optim": {"lr": 1e-3 if mode == "R3" else 1e-2, "distributed": layout.get("ep", 1) > 1, "clip_grad": 0.5},
            "parallel": parallel,
        }
        cfg = load_config(None, [], sections)
        groups = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
        settings = engine_model.pipeline_settings(cfg.parallel, groups.device)
        if "core" in layout:
            settings = {**settings, "pipeline_model_parallel_layout": None, **layout["core"]}
        with patch.object(engine_model, "pipeline_settings", lambda *_, settings=settings: settings):
            engine = Engine(cfg, groups, total_updates=4)
        log = spy_on_routers(engine)
        samples = make_samples()
        share = len(samples) // groups.dp_size
        mine = samples[groups.dp_rank * share : (groups.dp_rank + 1) * share]
        rule, max_tokens = engine.pack_rule, 25
        if "micro_batches" in layout:
            rule, max_tokens = dataclasses.replace(rule, count_multiple=layout["micro_batches"]), 1000
        batch = make_mini_batch(mine, max_tokens=max_tokens, rule=rule, dp_group=groups.dp_group)
        norms, logprobs, mismatches = [], {}, []
        for _ in range(2):
            sums = MetricSums()
            old = engine.old_logprobs(batch, sums, replay=mode)
            for index, values in enumerate(old.logprobs):
                micro = batch.micro_batches[index]
                rows = rows_on_rank(micro.cu_seqlens.tolist(), groups.cp_rank, groups.cp_size)
                for value, row in zip(values.tolist(), rows, strict=True):
                    if micro.loss_mask[row]:
                        key = (micro.rollout_ids[micro.sequence_ids[row]], int(micro.positions[row]))
                        logprobs.setdefault(key, []).append(value)
            report = engine.mismatch([old])
            mismatches.append((report.replayed_mismatch, report.flip_rate))
            engine.update(batch, old, sums, replay=mode)
            metrics = sums.reduce(dist.group.WORLD, groups.device)
            norms.append((metrics["train/loss"], metrics["optim/grad_norm"]))
            if mode != "R3":  # as with N = 2: the weights are no more those of the old-logprob pass
                engine.update(batch, old, MetricSums(), replay=mode)
        micro_rows = [
            (list(m.rollout_ids), m.sequence_ids.tolist(), m.positions.tolist(), m.cu_seqlens.tolist())
            for m in batch.micro_batches
        ]
        results.append(
            {
                "norms": norms,
                "logprobs": logprobs,
                "mismatches": mismatches,
                "log": log,
                "place": (
                    groups.cp_rank,
                    groups.cp_size,
                    groups.tp_rank,
                    groups.tp_size,
                    layout.get("batch_format") == "bshd",
                ),
                "micro": micro_rows,
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
    return {world: run_ranks(run_layouts, world, checkpoints, layouts, "R3") for world, layouts in LAYOUTS.items()}


@pytest.fixture(scope="module")
def references(checkpoints):
    """The same on one rank without recompute, by case of DENSE."""
    results = run_ranks(run_layouts, 1, checkpoints, [{"dense": name} for name in DENSE], "R3")[0]
    return dict(zip(DENSE, results, strict=True))


def all_cases(layouts):
    return [(world, index, layout) for world, cases in layouts.items() for index, layout in enumerate(cases)]


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
    bounds = [micro[3] for micro in r3_runs[2][0][LAYOUTS[2].index(layout)]["micro"]]
    assert all(len({end - start for start, end in itertools.pairwise(cu_seqlens)}) == 1 for cu_seqlens in bounds)
    assert len({len(cu_seqlens) for cu_seqlens in bounds}) > 1 and len({cu_seqlens[1] for cu_seqlens in bounds}) > 1


def test_r3_uses_the_rollouts_experts_though_the_live_router_disagrees(r3_runs):
    for ranks in r3_runs.values():
        for rank in ranks:
            for result in rank:
                check_live_router_disagrees(result)


@pytest.mark.parametrize("mode", ["R2", "none"])
def test_r2_replays_the_record_and_none_follows_the_router(checkpoints, mode):
    """In the update, R2 uses what the old-logprob pass recorded, also in the second one, when live routing has moved."""
    (result,) = run_ranks(run_layouts, 1, checkpoints, [{"recompute": "full"}], mode)[0]
    assert check_updates(result, mode), "an update at lr 1e-2 must move some route"


def check_consumed(ranks):
    """R3, one result per rank: each router call used the route given for its token and layer, as often as there are passes.

    Pads are dealt out to the experts in turn, expert-parallel rank by rank, and never follow the router.
    """
    given = {
        (sample.rollout.id, position, layer): sorted(sample.rollout.routed_experts[position, layer].tolist())
        for sample in make_samples()
        for position in range(len(sample.rollout.tokens) - 1)
        for layer in range(LAYERS)
    }
    assert len({tuple(route) for route in given.values()}) == len(given), "fingerprints must be unique"
    seen: dict[tuple, int] = {}
    num_pads = 0
    for result in ranks:
        recomputed: dict[int, int] = {}
        for layer, kind, micro_batch, ids in result["log"]:
            if kind == "recompute":
                micro_batch = recomputed.get(layer, 0) % len(result["micro"])
                recomputed[layer] = recomputed.get(layer, 0) + 1
            names, sequences, positions, cu_seqlens = result["micro"][micro_batch]
            pads = iter(dealt_to_pads(len(ids), result["ep_size"]))
            rows = rows_on_rank(cu_seqlens, *result["place"])
            for row, route in sorted(zip(rows, ids, strict=True)):
                assert len(route) == TOP_K
                if sequences[row] < 0:
                    assert route == next(pads), f"{kind} of a pad of layer {layer} used {route}"
                    num_pads += 1
                sequence, position = sequences[row], positions[row]
                key = (names[sequence], position, layer) if sequence >= 0 else None
                if key in given:
                    assert route == given[key], f"{kind} of {key} used {route}, given {given[key]}"
                    seen[(kind, *key)] = seen.get((kind, *key), 0) + 1
        assert recomputed == dict.fromkeys(result["recomputed"], 2 * len(result["micro"]))
    # two rounds of (old-logprob pass + update) = 4 forwards and, where on, 2 recomputes of every (token, layer)
    again = {layer for result in ranks for layer in result["recomputed"]}
    assert all(seen.get(("forward", *key)) == 4 for key in given)
    assert all(seen.get(("recompute", *key), 0) == 2 * (key[2] in again) for key in given)
    assert sorted({layer for result in ranks for layer in result["layers"]}) == list(range(LAYERS))
    return num_pads


def dealt_to_pads(count, ep_size):
    """Sorted experts of the first `count` pads of a rank: one expert of every expert-parallel rank after the other."""
    share = NUM_EXPERTS // ep_size
    turns = itertools.cycle(rank * share + index for index in range(share) for rank in range(ep_size))
    return [sorted(itertools.islice(turns, TOP_K)) for _ in range(count)]


def check_trains_alike(ranks, reference):
    """Equal loss, gradient norm and log-probs over two updates (fp32): the same routes, sums and denominators.

    The reference is packed, so a padded layout that passes trains as a packed one does.

    Log-probs after an update may differ more: Adam turns the rounding of a gradient near 0 into a whole step.
    """
    for result in ranks:
        np.testing.assert_allclose(result["norms"], reference["norms"], rtol=1e-5)
    merged = {key: values for result in ranks for key, values in result["logprobs"].items()}
    assert merged.keys() == reference["logprobs"].keys()
    for key, values in merged.items():
        before, after = reference["logprobs"][key]
        assert abs(values[0] - before) < 2e-5 and abs(values[1] - after) < 1e-4, (key, values, before, after)


def check_live_router_disagrees(result):
    for replayed, flip_rate in result["mismatches"]:
        assert replayed == 0.0
        assert len(flip_rate) == LAYERS
        assert min(flip_rate) > 0.9  # random routes: the live top-k is another one almost everywhere


def check_updates(result, mode):
    """The first update uses what the old-logprob pass did, of the same weights; the second one under R2 still, under none what
    its own router says; recompute what its forward did.  Whether an update moved live routing.
    """
    passes: dict[tuple[str, int], list] = {}
    forwards: dict[int, list] = {}
    recomputes: dict[int, list] = {}
    for layer, kind, micro_batch, ids in result["log"]:
        if kind == "forward":
            passes.setdefault((layer, micro_batch), []).append(ids)
            forwards.setdefault(layer, []).append(ids)
        else:
            recomputes.setdefault(layer, []).append(ids)
    assert all(len(calls) == 6 for calls in passes.values())
    rounds = [calls[first : first + 3] for calls in passes.values() for first in (0, 3)]
    assert all(first == old for old, first, _ in rounds)
    if mode == "R2":
        assert all(second == old for old, _, second in rounds)
    count = len(result["micro"])
    for layer in result["recomputed"]:
        of_updates = [ids for call, ids in enumerate(forwards[layer]) if call // count not in (0, 3)]
        assert recomputes[layer] == of_updates
    assert torch.tensor(result["norms"]).isfinite().all()
    if mode == "none":
        return any(second != old for old, _, second in rounds)
    return any(calls[0] != calls[3] for calls in passes.values())
