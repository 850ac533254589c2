"""The mismatch report against loops over tokens and layers, on two real gloo ranks: pipeline
stages, then row splits.
"""

import math
from statistics import fmean

import pytest
import torch

from megatron_rl.replay.mismatch import Mismatch
from tests.dist.launch import run_ranks

LAYERS, EXPERTS, TOP_K = 5, 16, 4
MICRO_BATCHES = ((0, 14), (14, 30))  # row ranges of two micro-batches


def make_tokens(rows=30, seed=0, change=0.3):
    """scores [L, T, E], live and rollout ids [L, T, K] and compared [T]; the rollout changes some
    experts of some tokens.
    """
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(LAYERS, rows, EXPERTS, generator=g)
    live = scores.topk(TOP_K, dim=-1).indices
    rollout = live.flip(-1).clone()  # another order is no mismatch
    for layer in range(LAYERS):
        for row in range(rows):
            if torch.rand((), generator=g) < change:
                others = [e for e in range(EXPERTS) if e not in live[layer, row]]
                rollout[layer, row, : 1 + row % 3] = torch.tensor(others[: 1 + row % 3])
    compared = torch.rand(rows, generator=g) < 0.8
    rollout[:, ~compared] = 0  # such rows hold anything
    return scores, live, rollout.to(torch.uint8), compared


def report_by_loops(scores, live, rollout, compared, used):
    """The fields of MismatchReport, one (token, layer) at a time."""
    pairs, first = [], []
    for row in range(len(compared)):
        if not compared[row]:
            continue
        flipped_layers = []
        for layer in range(LAYERS):
            s = scores[layer, row].tolist()
            mine, theirs = set(live[layer, row].tolist()), set(rollout[layer, row].tolist())
            weights = {e: math.exp(s[e]) / sum(math.exp(s[x]) for x in mine) for e in mine}
            chosen = sorted((s[e] for e in mine), reverse=True)
            rest = sorted((s[e] for e in range(EXPERTS) if e not in mine), reverse=True)
            missing = len(mine - theirs)
            pairs.append(
                {
                    "layer": layer,
                    "missing": missing,
                    "used": set(used[layer, row].tolist()) != theirs,
                    "margin": chosen[-1] - rest[0],
                    "gap": chosen[-1] - min(s[e] for e in theirs),
                    "mass": sum(weights[e] for e in mine - theirs),
                }
            )
            if missing:
                flipped_layers.append(layer)
        first.append((min(flipped_layers) if flipped_layers else None, len(flipped_layers)))
    flips = [pair for pair in pairs if pair["missing"]]
    starts = [layer for layer, _ in first if layer is not None]
    return {
        "router_mismatch": len(flips) / len(pairs),
        "replayed_mismatch": sum(pair["used"] for pair in pairs) / len(pairs),
        "token_mismatch": len(starts) / len(first),
        "layers_per_token": fmean(count for _, count in first),
        "expert_overlap": 1 - fmean(pair["missing"] for pair in pairs) / TOP_K,
        "first_flip_layer": fmean(starts) if starts else math.nan,
        "flip_margin_max": max((pair["gap"] for pair in flips), default=0.0),
        "flipped_margin": fmean(pair["margin"] for pair in flips) if flips else math.nan,
        "kept_margin": fmean(pair["margin"] for pair in pairs if not pair["missing"]),
        "replaced_gate_mass": fmean(pair["mass"] for pair in pairs),
        "flip_rate": [
            sum(p["layer"] == layer for p in flips) / len(first) for layer in range(LAYERS)
        ],
        "first_flip": [starts.count(layer) / len(first) for layer in range(LAYERS)],
    }


def measure(tokens, layers, rows_of, used):
    """One Mismatch per "mini-batch"; rows_of cuts a micro-batch's row range to this rank's."""
    scores, live, rollout, compared = tokens
    result = []
    # each micro-batch as a pass of its own, the second in two calls of rows
    for span in MICRO_BATCHES:
        parts = (
            [rows_of(*span)]
            if span == MICRO_BATCHES[0]
            else [rows_of(span[0], 20), rows_of(20, span[1])]
        )
        mismatch = Mismatch(layers, [compared[part] for part in parts])
        for index, part in enumerate(parts):
            for local, layer in enumerate(layers):
                mismatch.add(
                    local,
                    index,
                    scores[layer, part],
                    live[layer, part],
                    used[layer, part],
                    rollout[layer, part],
                )
        result.append(mismatch)
    return result


def on_two_ranks():
    """On a rank: the report of every split."""
    import torch.distributed as dist

    from megatron_rl.replay.mismatch import reduce_mismatch

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    everyone = tuple(range(LAYERS))
    both, half = (
        lambda a, b: slice(a, b),
        lambda a, b: slice(a, a + 5) if rank == 0 else slice(a + 5, b),
    )
    splits = {
        "pipeline": ([(0, 1), (2, 3, 4)][rank], both, dist.group.WORLD),
        "interleaved pipeline": ([(0, 2, 3), (1, 4)][rank], both, dist.group.WORLD),
        "a stage without MoE layers": ([(), everyone][rank], both, dist.group.WORLD),
        "rows, unequal": (everyone, half, alone),
        "the same rows on both": (everyone, both, alone),
    }
    reports = {}
    for change in (0.3, 0.0):
        tokens = make_tokens(change=change)
        for name, (layers, rows, pp_group) in splits.items():
            for used in (tokens[1], tokens[2].long()):
                mismatches = measure(tokens, layers, rows, used)
                where = dict(num_layers=LAYERS, top_k=TOP_K, device=torch.device("cpu"))
                report = reduce_mismatch(mismatches, layers=layers, pp_group=pp_group, **where)
                reports[name, change, used is tokens[1]] = vars(report)
    nothing = reduce_mismatch([], layers=everyone, pp_group=alone, **where)
    dist.destroy_process_group()
    return reports, nothing


def test_every_split_of_layers_and_rows_reports_what_loops_over_tokens_find():
    (first, nothing), (second, _) = run_ranks(on_two_ranks, 2)
    assert nothing is None
    assert len(first) == 20
    for (name, change, routed_live), report in first.items():
        tokens = make_tokens(change=change)
        expected = report_by_loops(*tokens, tokens[1] if routed_live else tokens[2])
        assert report.keys() == expected.keys()
        for key, value in expected.items():
            assert report[key] == pytest.approx(value, rel=1e-5, abs=1e-12, nan_ok=True), (
                name,
                key,
            )
            assert second[name, change, routed_live][key] == pytest.approx(report[key], nan_ok=True)
        assert (report["replayed_mismatch"] == 0) == (not routed_live or change == 0)
