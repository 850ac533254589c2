"""The mismatch report and flips per token against loops over (token, layer), on one rank and over
pipeline and tensor ranks.
"""

import math
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.mismatch import (
    MANY_FLIPS,
    Mismatch,
    count_tokens,
    flips_per_token,
    reduce_mismatch,
)
from tests.thread_ranks import run_thread_ranks

EXPERTS, K, NUM_LAYERS = 8, 3, 6


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make_call(rows, generator, same=0.6):
    """(scores, live ids, used ids, the rollout's ids) of a router call; a share of rows has the
    live ids in another order.
    """
    scores = torch.randn(rows, EXPERTS, generator=generator)
    live = scores.topk(K).indices
    others = torch.rand(rows, EXPERTS, generator=generator).argsort(1)[:, :K]
    agrees = torch.rand(rows, generator=generator) < same
    rollout = torch.where(agrees[:, None], live.flip(1), others)
    used = torch.where(torch.rand(rows, generator=generator)[:, None] < 0.5, rollout, live)
    return scores, live, used, rollout.to(torch.uint8)


def make_pass(layers, sizes, seed, *, same=0.6):
    """(Mismatch, its calls {(micro-batch, layer): call}, compared rows) of a pass on one stage."""
    generator = torch.Generator().manual_seed(seed)
    compared = [torch.rand(size, generator=generator) < 0.8 for size in sizes]
    mismatch, calls = Mismatch(layers, compared), {}
    for index, size in enumerate(sizes):
        for local, layer in enumerate(layers):
            calls[index, layer] = call = make_call(size, generator, same)
            mismatch.add(local, index, *call)
    return mismatch, calls, compared


def report_by_loop(passes, layers):
    """Every field of MismatchReport from sets of ids, token by token."""
    pairs = flips = used_flips = missing = 0
    flipped_margins, kept_margins, gaps, mass = [], [], [0.0], 0.0
    tokens, flips_of_tokens, firsts = 0, [], [0] * NUM_LAYERS
    per_layer = {layer: [0, 0] for layer in range(NUM_LAYERS)}
    for _, calls, compared in passes:
        for index, rows in enumerate(compared):
            for row in rows.nonzero().flatten().tolist():
                tokens += 1
                flipped_layers = []
                for layer in layers:
                    scores, live, used, rollout = (
                        part[row].tolist() for part in calls[index, layer]
                    )
                    lost = set(live) - set(rollout)
                    pairs, missing = pairs + 1, missing + len(lost)
                    used_flips += set(used) != set(rollout)
                    per_layer[layer][0] += 1
                    ranked = sorted(scores, reverse=True)
                    (flipped_margins if lost else kept_margins).append(ranked[K - 1] - ranked[K])
                    total = sum(math.exp(scores[i]) for i in live)
                    mass += sum(math.exp(scores[i]) for i in lost) / total
                    if lost:
                        flips += 1
                        per_layer[layer][1] += 1
                        flipped_layers.append(layer)
                        gaps.append(ranked[K - 1] - min(scores[i] for i in rollout))
                flips_of_tokens.append(len(flipped_layers))
                if flipped_layers:
                    firsts[min(flipped_layers)] += 1
    token_flips = sum(firsts)
    return {
        "router_mismatch": flips / pairs,
        "replayed_mismatch": used_flips / pairs,
        "token_mismatch": token_flips / tokens,
        "layers_per_token": sum(flips_of_tokens) / tokens,
        "expert_overlap": 1 - missing / (pairs * K),
        "first_flip_layer": sum(i * n for i, n in enumerate(firsts)) / token_flips
        if token_flips
        else math.nan,
        "flip_margin_max": max(gaps),
        "flipped_margin": sum(flipped_margins) / len(flipped_margins)
        if flipped_margins
        else math.nan,
        "kept_margin": sum(kept_margins) / len(kept_margins) if kept_margins else math.nan,
        "replaced_gate_mass": mass / pairs,
        "flip_rate": [n / max(of, 1) for of, n in per_layer.values()],
        "first_flip": [n / tokens for n in firsts],
    }


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4, 5), (1, 2, 5)])
@pytest.mark.parametrize("same", [0.6, 1.0, 0.0])
def test_every_field_against_a_loop(world, layers, same):
    passes = [
        make_pass(layers, sizes, seed, same=same)
        for seed, sizes in enumerate([(7, 3), (5, 0), (11,)])
    ]
    report = reduce_mismatch(
        [one for one, _, _ in passes], layers=layers, num_layers=NUM_LAYERS, top_k=K,
        pp_group=world,
        device=torch.device("cpu"),
    )  # fmt: skip
    expected = report_by_loop(passes, layers)
    assert set(expected) == {field.name for field in fields(report)}
    for name, value in expected.items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), name


def test_nothing_compared_has_no_report(world):
    nothing = Mismatch((0,), [torch.zeros(4, dtype=torch.bool)])
    nothing.add(0, 0, *make_call(4, torch.Generator().manual_seed(0), same=0.0))
    for mismatches in ([], [nothing]):
        report = reduce_mismatch(
            mismatches, layers=(0,), num_layers=2, top_k=K, pp_group=world,
            device=torch.device("cpu")
        )  # fmt: skip
        assert report is None


def test_stages_of_a_pipeline_count_a_token_once():
    """Two stages of three layers give every rank the counts of one stage with all six."""
    layers = ((0, 2, 3), (1, 4, 5))
    whole = Mismatch(range(NUM_LAYERS), [torch.ones(9, dtype=torch.bool)])
    stages = [Mismatch(those, whole.compared) for those in layers]
    generator = torch.Generator().manual_seed(3)
    for layer in range(NUM_LAYERS):
        call = make_call(9, generator)
        whole.add(layer, 0, *call)
        for stage in stages:
            if layer in stage.layers:
                stage.add(stage.layers.index(layer), 0, *call)

    def count(group, rank):
        return count_tokens([stages[rank]], NUM_LAYERS, group, torch.device("cpu"))

    got = run_thread_ranks(count, 2)
    (expected,) = run_thread_ranks(
        lambda group, _: count_tokens([whole], NUM_LAYERS, group, torch.device("cpu")), 1
    )
    assert expected[0] == 9 and 0 < expected[2:].sum() < 9 and expected.dtype == torch.float64
    assert torch.equal(got[0], expected) and torch.equal(got[1], expected)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (2, False)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("pp", "per_stage"), [(1, 12), (2, 7), (32, 9)])
def test_flips_per_token_against_a_loop(tp, sequence_parallel, padded, pp, per_stage):
    """Every rank of tp x pp gets the flips of all its rows in all stages, at most MANY_FLIPS; 32 x
    8 does not fit a byte.
    """
    if pp * tp > 32:
        pytest.skip("32 ranks are enough")
    bounds = [torch.tensor([0, 4, 8]), torch.tensor([0, 4])]
    generator = torch.Generator().manual_seed(pp + tp)
    flips = [
        torch.rand(pp, int(b[-1]), generator=generator).mul(per_stage + 1).long() for b in bounds
    ]
    flips[0][:, 0], flips[0][:, 1], flips[1][:, 0] = MANY_FLIPS + 1, 0, per_stage  # in packed order

    def place(rank):
        return RankLayout((0,), rank % tp, tp, sequence_parallel, EXPERTS, K, 1, padded=padded)

    def count(group, rank):
        own = place(rank)
        stage = rank // tp
        compared = [torch.ones(own.num_router_rows(int(b[-1])), dtype=torch.bool) for b in bounds]
        mismatch = Mismatch((0,), compared)
        for table, mine, cu_seqlens in zip(flips, mismatch.flips, bounds, strict=True):
            mine.copy_(table[stage][own.router_rows(cu_seqlens)].to(torch.int16))
        return flips_per_token(mismatch, own, bounds, group)

    for rank, counted in enumerate(run_thread_ranks(count, tp * pp)):
        for got, table in zip(counted, flips, strict=True):
            assert got.dtype == torch.uint8
            assert (
                got.tolist() == table.clamp(max=MANY_FLIPS).sum(0).clamp(max=MANY_FLIPS).tolist()
            ), rank


@pytest.mark.parametrize(
    ("stages", "sent"), [(1, []), (2, [torch.uint8]), (31, [torch.uint8]), (32, [torch.int32])]
)
def test_flips_are_sent_as_bytes_while_a_byte_holds_their_sum(stages, sent, monkeypatch):
    """31 stages x 8 flips = 248; over the model's ranks, and not at all where it has one."""
    seen, group = [], SimpleNamespace(size=lambda: stages)
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, group=None: seen.append((tensor.dtype, group))
    )
    mismatch = Mismatch((0,), [torch.ones(4, dtype=torch.bool)])
    mismatch.flips[0].copy_(torch.tensor([0, 1, 8, 256]))  # a byte of its own would wrap to 0
    (flips,) = flips_per_token(
        mismatch, RankLayout((0,), 0, 1, False, EXPERTS, K, 1), [torch.tensor([0, 4])], group
    )  # fmt: skip
    assert seen == [(dtype, group) for dtype in sent] and flips.tolist() == [0, 1, 8, 8]


def test_a_rank_without_micro_batches_counts_nothing():
    counts = count_tokens([], 3, SimpleNamespace(size=lambda: 1), torch.device("cpu"))
    assert counts.tolist() == [0] * 5 and counts.dtype == torch.float64


def test_counts_and_gaps_of_the_whole_job_are_summed_in_64_bits(world):
    mismatch = Mismatch((0,), [torch.ones(4, dtype=torch.bool)])
    mismatch.sums[0, 0], mismatch.sums[0, 1] = 2**24 + 1, 1
    mismatch.largest_gap.fill_(0.1)
    report = reduce_mismatch(
        [mismatch], layers=(0,), num_layers=1, top_k=K, pp_group=world, device=torch.device("cpu")
    )  # fmt: skip
    assert (report.router_mismatch, report.flip_margin_max) == (1 / (2**24 + 1), 0.1)


def test_a_layer_with_a_single_token_that_flips_has_rate_one(world):
    mismatch = Mismatch((0,), [torch.ones(1, dtype=torch.bool)])
    mismatch.sums[0, :2] = 1
    report = reduce_mismatch(
        [mismatch], layers=(0,), num_layers=2, top_k=K, pp_group=world, device=torch.device("cpu")
    )  # fmt: skip
    assert report.flip_rate == [1.0, 0.0]


def test_the_largest_gap_is_that_of_any_rank(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)

    def report(_, rank):
        mismatch = Mismatch((0,), [torch.ones(4, dtype=torch.bool)])
        mismatch.sums[0, 0] = 4
        mismatch.largest_gap.fill_([0.25, 0.75, 0.5][rank])
        return reduce_mismatch(
            [mismatch], layers=(0,), num_layers=1, top_k=K,
            pp_group=SimpleNamespace(size=lambda: 1),
            device=torch.device("cpu"),
        )  # fmt: skip

    assert [one.flip_margin_max for one in run_thread_ranks(report, 3)] == [0.75] * 3
