"""The whole matrix of layouts: fingerprint routes on 1, 2, 3, 4 and 8 gloo ranks.  `make
test-layouts`; quick: test_replay.

Every axis alone and in pairs.  R3: each router consumed the route given for its (token, layer) in
forward and recompute, and the layout trains as one rank does.  R2 and none: update and recompute
use what the old-logprob pass did.
"""

import pytest

from tests.dist.launch import run_ranks
from tests.dist.test_replay import (
    all_cases,
    check_consumed,
    check_live_router_disagrees,
    check_trains_alike,
    check_updates,
    checkpoints,  # noqa: F401  (fixture)
    references,  # noqa: F401  (fixture)
    run_layouts,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS = {
    1: [
        {"recompute": "selective", "micro_batches": 1},
        {"recompute": "block", "recompute_layers": 2, "micro_batches": 4},
        {"recompute": "full", "recompute_layers": 2, "dense": 2},
        {"token_dispatcher": "allgather", "recompute": "full", "micro_batches": 1},
        {"recompute": "none", "micro_batches": 1, "batch_format": "bshd"},
        {
            "recompute": "block",
            "recompute_layers": 2,
            "dense": 1,
            "micro_batches": 4,
            "batch_format": "bshd",
        },
    ],
    2: [
        {"recompute": "block", "recompute_layers": 3},  # two replicas
        {"tp": 2, "recompute": "none", "micro_batches": 1},
        {"tp": 2, "recompute": "full", "micro_batches": 4},
        {"tp": 2, "token_dispatcher": "allgather", "recompute": "selective"},
        {"cp": 2, "recompute": "none", "micro_batches": 1},
        {"cp": 2, "recompute": "block", "micro_batches": 4},
        {"cp": 2, "token_dispatcher": "allgather", "recompute": "selective"},
        {"pp": 2, "recompute": "none", "micro_batches": 1},
        {"pp": 2, "recompute": "selective", "micro_batches": 4},
        {"pp": 2, "layers_per_stage": [1, 3], "recompute": "full", "micro_batches": 4},
        {"pp": 2, "layers_per_stage": [3, 1], "recompute": "block", "recompute_layers": 2},
        {"pp": 2, "vp": 2, "recompute": "none", "micro_batches": 4},
        {"pp": 2, "vp": 2, "recompute": "full", "micro_batches": 2},
        {
            "pp": 2,
            "vp": 2,
            "layers_per_stage": [1, 2, 2, 1],
            "dense": 2,
            "recompute": "selective",
            "micro_batches": 4,
        },
        {
            "pp": 2,
            "layers_per_stage": [2, 3],
            "dense": 1,
            "recompute": "selective",
            "micro_batches": 4,
        },
        {"pp": 2, "layers_per_stage": [1, 5], "dense": 2, "recompute": "none"},
        {"pp": 2, "dense": "mixed", "recompute": "full", "recompute_layers": 3, "micro_batches": 4},
        {
            "pp": 2,
            "vp": 2,
            "layers_per_stage": [2, 1, 1, 2],
            "dense": "mixed",
            "recompute": "selective",
            "micro_batches": 2,
        },
        {
            "pp": 2,
            "layers_per_stage": [3, 1],
            "core": {"num_layers_in_last_pipeline_stage": 1},
            "recompute": "full",
        },
        {
            "pp": 2,
            "layers_per_stage": [3, 1],
            "core": {"pipeline_model_parallel_layout": "Ettt|tL"},
        },
        {
            "pp": 2,
            "vp": 2,
            "layers_per_stage": [1, 2, 1, 2],
            "dense": "mixed",
            # with both set and none in between core divides by zero
            "core": {"num_layers_in_first_pipeline_stage": 2},
            "recompute": "full",
            "micro_batches": 4,
        },
        {"ep": 2, "recompute": "selective", "micro_batches": 1},
        {"ep": 2, "recompute": "full", "micro_batches": 4},
        {"ep": 2, "token_dispatcher": "allgather", "recompute": "selective", "micro_batches": 4},
        {"tp": 2, "recompute": "full", "micro_batches": 1, "batch_format": "bshd"},
        {
            "tp": 2,
            "token_dispatcher": "allgather",
            "recompute": "none",
            "micro_batches": 4,
            "batch_format": "bshd",
        },
        {"cp": 2, "recompute": "full", "micro_batches": 1, "batch_format": "bshd"},
        {"cp": 2, "recompute": "selective", "micro_batches": 4, "batch_format": "bshd"},
        {"pp": 2, "recompute": "selective", "micro_batches": 4, "batch_format": "bshd"},
        {"pp": 2, "vp": 2, "recompute": "full", "micro_batches": 4, "batch_format": "bshd"},
        {
            "pp": 2,
            "layers_per_stage": [2, 3],
            "dense": 1,
            "recompute": "block",
            "batch_format": "bshd",
        },
        {"ep": 2, "recompute": "selective", "micro_batches": 4, "batch_format": "bshd"},
        {
            "ep": 2,
            "token_dispatcher": "allgather",
            "recompute": "full",
            "micro_batches": 1,
            "batch_format": "bshd",
        },
    ],
    3: [
        {"pp": 3, "layers_per_stage": [1, 2, 1], "recompute": "full", "micro_batches": 4},
        {"pp": 3, "layers_per_stage": [2, 3, 1], "dense": 2, "recompute": "block"},
        {"pp": 3, "vp": 2, "dense": 2, "recompute": "full", "micro_batches": 6},
        {
            "pp": 3,
            "layers_per_stage": [2, 3, 1],
            "dense": "mixed",
            "core": {
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 1,
            },
            "recompute": "block",
            "recompute_layers": 2,
            "micro_batches": 4,
        },
    ],
    4: [
        {"pp": 4, "recompute": "full", "micro_batches": 4},
        {"ep": 4, "recompute": "full"},
        {"ep": 4, "token_dispatcher": "allgather", "recompute": "none", "micro_batches": 1},
        {"ep": 2, "etp": 2, "recompute": "selective"},
        {"tp": 2, "recompute": "full"},  # two replicas
        {"tp": 2, "ep": 2, "etp": 1, "recompute": "full"},
        {"tp": 2, "ep": 2, "recompute": "none", "micro_batches": 4},
        {"tp": 2, "ep": 4, "etp": 1, "token_dispatcher": "allgather", "recompute": "selective"},
        {"cp": 4, "recompute": "full"},
        {"cp": 2, "tp": 2, "recompute": "full", "micro_batches": 4},
        {"cp": 2, "ep": 2, "recompute": "selective", "micro_batches": 4},
        {"cp": 2, "pp": 2, "vp": 2, "recompute": "selective", "micro_batches": 4},
        {"cp": 2, "pp": 2, "layers_per_stage": [2, 3], "dense": 1, "recompute": "full"},
        {"tp": 2, "pp": 2, "recompute": "full", "micro_batches": 4},
        {"tp": 2, "pp": 2, "layers_per_stage": [1, 3], "recompute": "selective"},
        {"tp": 2, "pp": 2, "vp": 2, "recompute": "selective", "micro_batches": 4},
        {"pp": 2, "ep": 2, "recompute": "none", "micro_batches": 4},
        {"pp": 2, "vp": 2, "ep": 2, "recompute": "full", "micro_batches": 4},
        {"pp": 2, "layers_per_stage": [2, 4], "dense": 2, "ep": 2, "recompute": "full"},
        {
            "tp": 2,
            "pp": 2,
            "ep": 2,
            "etp": 1,
            "layers_per_stage": [2, 3],
            "dense": 1,
            "recompute": "block",
        },
        {"cp": 2, "tp": 2, "recompute": "selective", "micro_batches": 4, "batch_format": "bshd"},
        {
            "cp": 2,
            "pp": 2,
            "vp": 2,
            "recompute": "full",
            "micro_batches": 4,
            "batch_format": "bshd",
        },
        {
            "cp": 2,
            "ep": 4,
            "etp": 1,
            "token_dispatcher": "allgather",
            "recompute": "none",
            "batch_format": "bshd",
        },
        {
            "tp": 2,
            "pp": 2,
            "ep": 2,
            "etp": 1,
            "recompute": "full",
            "micro_batches": 4,
            "batch_format": "bshd",
        },
        {
            "tp": 2,
            "pp": 2,
            "ep": 2,
            "etp": 1,
            "dense": "mixed",
            "recompute": "full",
            "micro_batches": 1,
        },
        {
            "cp": 2,
            "pp": 2,
            "vp": 2,
            "layers_per_stage": [1, 1, 1, 3],
            "dense": "mixed",
            "recompute": "block",
        },
    ],
    8: [
        {"tp": 2, "pp": 2, "ep": 2, "recompute": "selective"},
        {"cp": 2, "tp": 2, "pp": 2, "ep": 4, "etp": 1, "recompute": "full"},
        {"tp": 2, "pp": 2, "vp": 2, "ep": 4, "etp": 1, "recompute": "none", "micro_batches": 2},
    ],
}
LIVE = {
    2: [
        {"pp": 2, "vp": 2, "recompute": "full", "micro_batches": 4},
        {"tp": 2, "recompute": "selective"},
        {"cp": 2, "recompute": "block"},
        {"pp": 2, "layers_per_stage": [2, 4], "dense": 2, "recompute": "full"},
        {"ep": 2, "token_dispatcher": "allgather", "recompute": "full"},
        {"tp": 2, "recompute": "full", "batch_format": "bshd"},
    ],
    4: [{"tp": 2, "pp": 2, "ep": 2, "etp": 1, "recompute": "full"}],
}


@pytest.fixture(scope="module")
def runs(checkpoints):  # noqa: F811
    """A function that runs all layouts of a number of ranks in a mode, once."""
    done: dict[tuple[int, str], list | Exception] = {}

    def run(world, mode):
        layouts = LAYOUTS if mode == "R3" else LIVE
        if (world, mode) not in done:
            try:
                done[world, mode] = run_ranks(
                    run_layouts, world, checkpoints, layouts[world], mode, timeout=1500
                )
            except (RuntimeError, TimeoutError) as error:
                # the other layouts of these ranks fail with it, without another run
                done[world, mode] = error
        result = done[world, mode]
        if isinstance(result, Exception):
            raise result
        return result

    return run


@pytest.mark.parametrize(("world", "index", "layout"), all_cases(LAYOUTS), ids=str)
def test_routes_reach_their_token_and_layer(runs, references, world, index, layout):  # noqa: F811
    ranks = [rank[index] for rank in runs(world, "R3")]
    check_consumed(ranks)
    check_trains_alike(ranks, references[layout.get("dense", 0)])
    for result in ranks:
        check_live_router_disagrees(result)
        assert len(result["micro"]) == layout.get("micro_batches", len(result["micro"]))


@pytest.mark.parametrize("mode", ["R2", "none"])
@pytest.mark.parametrize(("world", "index", "layout"), all_cases(LIVE), ids=str)
def test_the_update_uses_the_record(runs, world, index, layout, mode):
    moved = [check_updates(rank[index], mode) for rank in runs(world, mode)]
    assert any(moved), "an update at lr 1e-2 must move some route"
