"""Metrics on real ranks: flips are counted on the right token in every layout, and every metric
equals that of one rank.

Fingerprint: the routes given are the model's own, with another expert in a known number of layers
of each token.
"""

import itertools
import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

LAYERS, EXPERTS, TOP_K, SEQUENCES = 10, 8, 2, 8
LAYOUTS = (
    {"pp": 2},
    {"pp": 2, "vp": 5},
    {"pp": 2, "layers_per_stage": [3, 7]},
    {"tp": 2},
    {"cp": 2},
    {"ep": 2},
    {"tp": 2, "batch_format": "bshd"},
)


@pytest.fixture(scope="module")
def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        yield random_checkpoint(Path(folder) / "moe", num_hidden_layers=LAYERS)


def make_rollouts(seed=0):
    """Random sequences with routes that no router chose."""
    import numpy as np

    from megatron_rl.records import Rollout

    rng = np.random.default_rng(seed)
    rollouts = []
    for index in range(SEQUENCES):
        prompt, size = 3, int(rng.integers(6, 14))
        tokens = rng.integers(2, 60, size)
        logprobs = (-4 + 0.3 * rng.standard_normal(size - prompt)).astype(np.float32)
        routes = np.zeros((size - 1, LAYERS, TOP_K), np.uint8) + np.arange(TOP_K, dtype=np.uint8)
        rollouts.append(
            Rollout(
                f"r{index}",
                tokens,
                prompt,
                logprobs,
                routes,
                "stop",
                np.zeros(size - prompt, np.int32),
            )
        )
    return rollouts


def num_flips(index, position):
    """The fingerprint: every count from 0 to all layers, different in neighbours."""
    return (7 * index + 3 * position) % (LAYERS + 1)


def with_flips(rollout, index, live):
    """`live` [S - 1, L, K] with an expert exchanged in num_flips layers of each token, spread over
    the depth.
    """
    import dataclasses

    import numpy as np

    rng, routes = np.random.default_rng(index), live.copy()
    for position in range(len(live)):
        for layer in rng.permutation(LAYERS)[: num_flips(index, position)]:
            mine = routes[position, layer]
            mine[rng.integers(TOP_K)] = rng.choice([e for e in range(EXPERTS) if e not in mine])
            rng.shuffle(mine)  # order is no flip
    # a digest of their own
    return dataclasses.replace(rollout, routed_experts=routes, routes_digest=None)


def make_batches(engine, rollouts):
    """Two mini-batches of this replica's share."""
    from dataclasses import replace

    from megatron_rl.batch.pack import Sample
    from megatron_rl.batch.split import make_mini_batch

    parallel, batches = engine.parallel, []
    for number in range(2):
        samples = [
            Sample(r, 1.0 - 0.3 * i) for i, r in enumerate(rollouts[4 * number : 4 * number + 4])
        ]
        mine = samples[parallel.dp_rank :: parallel.dp_size]
        batch = make_mini_batch(
            mine, max_tokens=30, rule=engine.pack_rule, dp_group=parallel.dp_group
        )
        batches.append(replace(batch, index=number))
    return batches


def step(engine, batches, mode):
    """What a step of N = 2 reports, and its old-logprob passes."""
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums

    sums = MetricSums()
    passes = [engine.old_logprobs(batch, sums, replay=mode) for batch in batches]
    for batch, old in zip(batches, passes, strict=True):
        engine.update(batch, old, sums, replay=mode)
    return sums.reduce(dist.group.WORLD, engine.parallel.device), passes


def fingerprint_routes(checkpoint):
    """On one rank: rollouts whose routes differ from the live ones by the fingerprint."""
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine

    engine, rollouts = make_engine(checkpoint, replay="none"), make_rollouts()
    live = {}
    for batch in make_batches(engine, rollouts):
        recorded = engine.old_logprobs(batch, MetricSums(), replay="R2").recorded
        for micro_batch, ids in zip(batch.micro_batches, recorded, strict=True):
            bounds = itertools.pairwise(micro_batch.cu_seqlens)
            # pads may follow
            for name, (start, stop) in zip(micro_batch.rollout_ids, bounds, strict=False):
                live[name] = ids[:, start : stop - 1].transpose(0, 1).contiguous().numpy()
    engine.parallel.destroy()
    return [with_flips(rollout, index, live[rollout.id]) for index, rollout in enumerate(rollouts)]


def run_layouts(checkpoint, rollouts, layouts):
    """On a rank: per layout (metrics, [(rollout, position, counted flips, is a token with routes)]
    of its rows).
    """
    import torch.distributed as dist

    from megatron_rl.engine.forward import to_device
    from megatron_rl.records.packed import RowState
    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        sizes, model = dict(layout), {"batch_format": layout.get("batch_format", "thd")}
        sizes.pop("batch_format", None)
        engine = make_engine(
            checkpoint, parallel=sizes, model=model, replay="none", optim={"lr": 1e-3}
        )
        batches = make_batches(engine, rollouts)
        metrics, passes = step(engine, batches, "none")
        rows = []
        for batch, old in zip(batches, passes, strict=True):
            for micro_batch, flips in zip(
                to_device(batch.micro_batches, engine.layout, engine.parallel.device),
                old.flips,
                strict=True,
            ):
                assert flips.shape == micro_batch.tokens.shape
                for row, count in enumerate(flips.tolist()):
                    sequence, position = (
                        int(micro_batch.sequence_ids[row]),
                        int(micro_batch.positions[row]),
                    )
                    name = micro_batch.rollout_ids[sequence] if sequence >= 0 else ""
                    known = int(micro_batch.row_state[row]) == RowState.REPLAYED
                    rows.append((name, position, count, known))
        results.append((metrics, rows))
        engine.parallel.destroy()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def found(checkpoint):
    """(one rank's result, per layout both ranks' results)."""
    rollouts = run_ranks(fingerprint_routes, 1, checkpoint)[0]
    alone = run_ranks(run_layouts, 1, checkpoint, rollouts, [{}])[0][0]
    first, second = run_ranks(run_layouts, 2, checkpoint, rollouts, LAYOUTS)
    return alone, dict(zip(map(str, LAYOUTS), zip(first, second, strict=True), strict=True))


def test_flips_are_counted_on_their_token(found):
    alone, layouts = found
    for name, ranks in {"one rank": (alone,), **layouts}.items():
        seen = set()
        for _, rows in ranks:
            for rollout, position, count, known in rows:
                index = int(rollout[1:]) if known else 0
                assert count == (min(num_flips(index, position), 8) if known else 0), (
                    name,
                    rollout,
                    position,
                )
                if known:
                    seen.add((rollout, position))
        # every token, on some rank
        assert len(seen) == sum(len(r.tokens) - 1 for r in make_rollouts()), name


def test_every_metric_equals_that_of_one_rank(found):
    (expected, _), layouts = found
    assert sum(name.startswith("logratio/") for name in expected) == 2 * 4 * (1 + 2 + 5) + 2 + 5
    assert sum(name.startswith("first_order/") for name in expected) == 3 * 3 * (1 + 2)
    assert (
        expected["logratio/staleness_std/mini_batch_1"]
        > 1e-3
        > expected["logratio/staleness_std/mini_batch_0"]
    )
    assert all(
        expected[f"logratio/share/{group}"] > 0
        for group in ("flips_0", "flips_1", "flips_2_3", "flips_4_7", "flips_8_up")
    )
    for layout, ranks in layouts.items():
        for metrics, _ in ranks:
            assert metrics.keys() == expected.keys()
            for name, value in expected.items():
                if name.startswith(("logratio/", "first_order/", "train/")):
                    # may cross into the next bin
                    is_quantile = "_p99" in name or "_p95" in name or "_median" in name
                    close = pytest.approx(value, rel=0.04 if is_quantile else 5e-3, abs=2e-5)
                    assert metrics[name] == close, (layout, name)
