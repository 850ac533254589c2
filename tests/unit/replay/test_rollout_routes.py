"""Memory in which routes are cut: used again, and for a GPU not before its last copy has ended."""

import numpy as np
import torch

from megatron_rl.records.on_device import on_device
from megatron_rl.replay.rollout_routes import PinnedMemory, RolloutRoutes, RouteMemory

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
