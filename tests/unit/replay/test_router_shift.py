"""The router shift: against log_softmax and loops, and its sum over the layers of pipeline stages
and rows of tensor ranks.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.replay.router_shift import (
    RouterRecord,
    RouterShift,
    router_logprobs,
    shift_per_token,
)
from megatron_rl.replay.stage_sums import sum_over_stages
from tests.thread_ranks import run_thread_ranks

E, K, ROWS, LAYERS = 6, 2, 8, 4


def scores_of(seed, layers=LAYERS):
    return torch.randn(layers, ROWS, E, generator=torch.Generator().manual_seed(seed))


def layout_of(tp_rank=0, tp_size=1, *, sequence_parallel=False):
    """Rows in their own order; a tensor rank has an equal part of them under sequence
    parallelism.
    """
    shares = tp_size if sequence_parallel else 1
    return SimpleNamespace(
        tp_rank=tp_rank, tp_size=tp_size, sequence_parallel=sequence_parallel,
        num_router_rows=lambda count: count // shares,
        by_sequence=lambda values, cu_seqlens: values,
    )  # fmt: skip


def by_loops(before, now, ids):
    """float [rows]: 1/(L K) sum over layers and old experts of |log softmax - log softmax_old|."""
    found = []
    for t in range(ROWS):
        total = 0.0
        for layer in range(LAYERS):
            rows = [[float(x) for x in scores[layer, t]] for scores in (before, now)]
            logs = [[x - math.log(sum(map(math.exp, row))) for x in row] for row in rows]
            total += sum(abs(logs[1][e] - logs[0][e]) for e in ids[layer, t].tolist())
        found.append(total / LAYERS / K)
    return found


def watch(watcher, scores, ids, layers, rows=slice(None), micro_batch=0):
    for local, layer in enumerate(layers):
        watcher(local, micro_batch, scores[layer, rows], ids[layer, rows])


def test_a_record_can_be_written_and_read():
    """Two micro-batches, layers in another order than they ran: the same shift from the copy."""
    record, copy = (RouterRecord(scores_are_logits=True, id_dtype=torch.uint8) for _ in range(2))
    ids = scores_of(2).topk(K).indices
    for micro_batch in (1, 0):
        for layer in (2, 0, 1):
            record(layer, micro_batch, scores_of(micro_batch)[layer], ids[layer])
    for micro_batch in (0, 1):
        kept, values = record.stacked(micro_batch)
        assert kept.dtype == torch.uint8 and torch.equal(kept.long(), ids[:3])
        torch.testing.assert_close(
            values, scores_of(micro_batch)[:3].log_softmax(-1).gather(2, ids[:3])
        )
        copy.put(micro_batch, kept, values)
    assert set(copy.kept) == set(record.kept)
    assert record.stacked(2) is None, "a stage without MoE layers keeps nothing"
    shifts = RouterShift(record), RouterShift(copy)
    for shift in shifts:
        watch(shift, scores_of(3), ids, range(3), micro_batch=1)
    assert torch.equal(shifts[0].sums[1], shifts[1].sums[1]) and set(shifts[0].sums) == {1}


@pytest.mark.parametrize("scores_are_logits", [True, False])
def test_log_probs_are_those_of_all_experts(scores_are_logits):
    scores, ids = scores_of(0)[0], scores_of(1)[0].topk(K).indices
    given = scores if scores_are_logits else scores.softmax(-1)
    got = router_logprobs(given.bfloat16().float(), ids, scores_are_logits=scores_are_logits)
    expected = (
        scores.bfloat16().float().log_softmax(-1)
        if scores_are_logits
        else scores.softmax(-1).bfloat16().float().log()
    )
    torch.testing.assert_close(got, expected.gather(1, ids))


def test_log_probs_are_float32_and_carry_no_gradient():
    scores = scores_of(0)[0].bfloat16().requires_grad_()
    ids = scores_of(1)[0].topk(K).indices
    got = router_logprobs(scores, ids, scores_are_logits=True)
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got, scores.float().log_softmax(-1).gather(1, ids))


def test_the_experts_are_those_of_the_old_pass_whatever_is_used_now():
    before, now = scores_of(2), scores_of(3)
    ids, others = before.topk(K).indices, now.topk(K).indices
    assert not torch.equal(ids, others)
    record = RouterRecord(scores_are_logits=True, id_dtype=torch.uint8)
    watch(record, before, ids, range(LAYERS))
    shift = RouterShift(record)
    watch(shift, now, others, range(LAYERS))
    bounds = [torch.tensor([0, ROWS])]
    group = SimpleNamespace(size=lambda: 1)
    (got,) = shift_per_token(
        shift, layout_of(), bounds, group, num_layers=LAYERS, device=torch.device("cpu")
    )
    assert got.tolist() == pytest.approx(by_loops(before, now, ids), rel=1e-5)
    same = RouterShift(record)
    watch(same, before, others, range(LAYERS))
    (zero,) = shift_per_token(
        same, layout_of(), bounds, group, num_layers=LAYERS, device=torch.device("cpu")
    )
    assert (zero == 0).all(), "the same scores: exactly 0"


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_of_stages_and_rows_of_tensor_ranks_are_put_together(sequence_parallel):
    """pp = 2 with 3 layers and 1, tp = 2: every rank gets the shift of all layers; two
    micro-batches.
    """
    before, now = scores_of(4), scores_of(5)
    ids, stages = before.topk(K).indices, ([0, 1, 2], [3])
    expected = by_loops(before, now, ids)

    def rank_of(group, rank):
        layers, tp_rank = stages[rank // 2], rank % 2
        layout = layout_of(tp_rank, 2, sequence_parallel=sequence_parallel)
        rows = slice(4 * tp_rank, 4 * tp_rank + 4) if sequence_parallel else slice(None)
        record = RouterRecord(scores_are_logits=True, id_dtype=torch.int16)
        shift = RouterShift(record)
        for micro_batch in range(2):
            watch(record, before, ids, layers, rows, micro_batch)
            watch(shift, now, ids, layers, rows, micro_batch)
        bounds = [torch.tensor([0, ROWS])] * 2
        return shift_per_token(
            shift, layout, bounds, group, num_layers=LAYERS, device=torch.device("cpu")
        )

    for got in run_thread_ranks(rank_of, 4):
        for part in got:
            assert part.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_stage_without_moe_layers_adds_nothing():
    """pp = 2: the first stage has dense layers only."""
    before, now = scores_of(6), scores_of(7)
    ids = before.topk(K).indices

    def rank_of(group, rank):
        record = RouterRecord(scores_are_logits=True, id_dtype=torch.uint8)
        shift = RouterShift(record)
        layers = range(LAYERS) if rank else []
        watch(record, before, ids, layers)
        watch(shift, now, ids, layers)
        bounds = [torch.tensor([0, 3, 5, ROWS])]  # three sequences
        return shift_per_token(
            shift, layout_of(), bounds, group, num_layers=LAYERS, device=torch.device("cpu")
        )

    for (got,) in run_thread_ranks(rank_of, 2):
        assert got.tolist() == pytest.approx(by_loops(before, now, ids), rel=1e-5)


def test_sums_keep_their_type():
    parts = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)]
    got = sum_over_stages(parts, layout_of(), SimpleNamespace(size=lambda: 1))
    assert [part.tolist() for part in got] == [[1, 2], [3]] and got[0].dtype == torch.uint8
