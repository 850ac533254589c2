"""Routes of a mini-batch on one rank, and the memory in which they are cut: used again, and for a
GPU not before its last copy has ended.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.batch.pack import PackRule
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.records.on_device import on_device
from megatron_rl.records.packed import Sample
from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.rollout_routes import PinnedMemory, RolloutRoutes, RouteMemory
from tests.unit.batch.rollouts import make_rollout

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BYTES = np.dtype(np.uint8)


def test_memory_is_used_again_until_it_is_too_small():
    memory = RouteMemory()
    first = memory.take(0, 10, np.dtype(np.uint8))
    assert memory.take(0, 7, np.dtype(np.uint8)) is memory.take(0, 10, np.dtype(np.uint8)) is first
    assert memory.take(1, 7, np.dtype(np.uint8)) is not first
    assert memory.take(0, 11, np.dtype(np.uint8)).size == 11
    assert memory.take(0, 5, np.dtype(np.int16)).dtype == np.int16


class LateCopies:
    """Copies of a GPU as late as their events allow: each reads what the memory has when the host
    has waited for it.
    """

    def __init__(self, monkeypatch):
        self.arrived, self.waiting, last = [], [], []
        copies = self

        class Event:
            def record(self):
                self.number, self.memory = len(copies.arrived), last.pop()
                copies.arrived.append(None)
                copies.waiting.append(self)

            def synchronize(self):
                copies.arrived[self.number] = self.memory.tolist()
                copies.waiting.remove(self)

        send = torch.Tensor.to

        def to(tensor, device, *, non_blocking):
            assert non_blocking
            last.append(tensor)
            return send(tensor, "cpu")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(PinnedMemory, "_new", RouteMemory._new)

    def finish(self):
        for event in list(self.waiting):
            event.synchronize()
        return self.arrived


def test_pinned_memory_is_not_written_before_its_copy_has_ended(monkeypatch):
    copies, memory = LateCopies(monkeypatch), PinnedMemory()
    sizes = [4, 4, 4, 3, 9, 4, 4]  # a larger piece replaces one that is still copied
    passes = [0, 1, 2, 3, 4, 0, 1]
    for number, (index, size) in enumerate(zip(passes, sizes, strict=True)):
        ids = memory.take(index, size, BYTES)[:size]
        assert len(copies.waiting) <= PinnedMemory.NUM_PIECES - 1
        ids[:] = number
        memory.send(index, ids, GPU)
    assert copies.finish() == [[number] * size for number, size in enumerate(sizes)]


def test_a_micro_batch_is_cut_while_the_one_before_is_copied(monkeypatch):
    copies, memory = LateCopies(monkeypatch), PinnedMemory()
    first = memory.take(0, 4, BYTES)
    memory.send(0, first, GPU)
    second = memory.take(1, 4, BYTES)
    assert len(copies.waiting) == 1 and not np.shares_memory(first, second)
    assert np.shares_memory(memory.take(2, 4, BYTES), first), "two pieces of pinned memory"


def test_routes_stay_in_their_memory_on_a_cpu():
    memory = RouteMemory()
    ids = memory.take(0, 4, BYTES)
    assert memory.send(0, ids, CPU).data_ptr() == ids.ctypes.data
    chosen = {device: type(RolloutRoutes(None, 1, device)._memory) for device in (CPU, GPU)}
    assert chosen == {CPU: RouteMemory, GPU: PinnedMemory}


def test_memory_of_a_gpu_is_pinned_and_of_the_ids_type(monkeypatch):
    made, empty = [], torch.empty

    def noted(size, *, dtype, pin_memory):
        made.append((size, dtype, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", noted)
    assert PinnedMemory()._new(5, np.dtype(np.int16)).dtype == np.int16
    assert made == [(5, torch.int16, True)]


def test_small_tensors_are_copied_from_pinned_memory_without_waiting():
    calls = []

    class Recorded:
        def pin_memory(self):
            calls.append("pin")
            return self

        def to(self, device, **how):
            calls.append((device, how))
            return self

    on_device(Recorded(), GPU)
    assert calls == ["pin", (GPU, {"non_blocking": True})]
    tensor = torch.arange(3)
    assert on_device(tensor, CPU) is tensor and on_device(tensor, "cpu") is tensor


LAYOUT = RankLayout(
    layers=(0, 1, 2), tp_rank=0, tp_size=1, sequence_parallel=False, num_experts=8, top_k=2,
    ep_size=1,
)  # fmt: skip


def mini_batch(rollouts, max_tokens=12, pad_multiple=4):
    samples = [Sample(rollout, 1.0) for rollout in rollouts]
    rule = PackRule(pad_multiple)
    return make_mini_batch(samples, max_tokens=max_tokens, rule=rule, dp_group=None)


def test_every_micro_batch_has_the_ids_of_its_samples():
    rollouts = [make_rollout("a", 2, 3), make_rollout("b", 3, 3), make_rollout("c", 4, 4)]
    missing = np.zeros(5, bool)
    missing[1] = True
    rollouts[1] = replace(rollouts[1], missing_routes=missing)
    batch = mini_batch(rollouts)
    assert len(batch.micro_batches) > 1
    routes = RolloutRoutes(LAYOUT, 3, CPU).of(batch, replay=True, compare=True)
    for part, samples, got in zip(batch.micro_batches, batch.samples, routes, strict=True):
        assert got.replay is got.reference and got.replay.shape == (3, part.num_tokens, 2)
        live, compared = [], []
        for sample, start in zip(samples, part.cu_seqlens.tolist(), strict=False):
            ids = sample.rollout.routed_experts
            stop = start + len(ids)
            assert (got.replay[:, start:stop].numpy() == ids.transpose(1, 0, 2)).all()
            gaps = [start + 1] if sample.rollout.missing_routes is not None else []
            live += [*gaps, stop]
            compared += [row for row in range(start, stop) if row not in gaps]
        assert got.live_rows.tolist() == live
        assert got.compared.nonzero().flatten().tolist() == compared


def test_only_what_is_asked_for_is_returned():
    batch, cut = mini_batch([make_rollout("a", 2, 3)]), RolloutRoutes(LAYOUT, 3, CPU)
    (nothing,) = cut.of(batch, replay=False, compare=False)
    (replayed,) = cut.of(batch, replay=True, compare=False)
    (compared,) = cut.of(batch, replay=False, compare=True)
    assert vars(nothing) == dict.fromkeys(vars(nothing))
    assert replayed.reference is replayed.compared is None and replayed.live_rows is not None
    assert compared.replay is compared.live_rows is None and compared.reference is not None
    bare = mini_batch([make_rollout("a", 2, 3, routes=False)])
    assert len(cut.of(bare, replay=False, compare=False)) == 1, "it needs no routes"


def test_what_breaks_a_rule_is_refused_by_rollout_and_row_unless_it_was_checked():
    bare = mini_batch([make_rollout("a", 2, 3, routes=False)])
    cut = RolloutRoutes(LAYOUT, 3, CPU)
    with pytest.raises(ValueError, match="rollout a has none; start the server"):
        cut.of(bare, replay=True, compare=False)
    with pytest.raises(ValueError, match="rollout a: .* 3 layers, the model has 4"):
        RolloutRoutes(LAYOUT, 4, CPU).of(
            mini_batch([make_rollout("a", 2, 3)]), replay=True, compare=False
        )
    twice = make_rollout("b", 2, 3)
    ids = twice.routed_experts.copy()
    ids[2, 1] = 5
    twice = replace(twice, routed_experts=ids, routes_digest=None)
    batch = mini_batch([make_rollout("a", 2, 3), twice])
    with pytest.raises(ValueError, match=r"rollout b, row 2: .*layer 1 are \[5, 5\]"):
        cut.of(batch, replay=False, compare=True)
    assert len(cut.of(batch, replay=True, compare=False, check=False)) == 1
    other = RolloutRoutes(LAYOUT, 4, CPU)
    assert len(other.of(batch, replay=True, compare=False, check=False)) == 1
