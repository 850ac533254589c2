"""The reference policy: the model has its weights inside the context, and its own ones afterwards,
bit for bit; the order of copies on a GPU's streams, without a GPU.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import megatron_rl.distributed  # noqa: F401  (CPU support first)
from megatron_rl.engine import reference as module
from megatron_rl.engine.offload import HostMemory
from megatron_rl.engine.reference import Reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Host memory in chunks across which weights lie."""
    monkeypatch.setattr(module, "HostMemory", partial(HostMemory, chunk_bytes=100))


def chunks():
    """Two chunks: float32 and bfloat16 weights, one parameter in two places, and two parameters
    that are views of one storage, as core's buffers have them.
    """
    torch.manual_seed(0)
    first = nn.ModuleDict({"a": nn.Linear(7, 5), "b": nn.Linear(7, 5, dtype=torch.bfloat16)})
    first["tied"] = nn.Linear(7, 5, bias=False)
    first["tied"].weight = first["a"].weight
    buffer = torch.randn(40)
    second = nn.Module()
    second.whole, second.part = nn.Parameter(buffer), nn.Parameter(buffer[10:20])
    return [first, second]


def bits(model):
    return [
        parameter.detach().contiguous().view(torch.uint8).clone()
        for chunk in model
        for parameter in chunk.parameters()
    ]


def same(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def train(model):
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.mul_(3).flatten()[0] = float("nan")


def test_the_weights_are_the_reference_inside_and_themselves_afterwards():
    model = chunks()
    loaded, reference = bits(model), Reference(model, CPU)
    for _ in range(3):
        train(model)
        current = bits(model)
        assert not same(current, loaded)
        with reference.in_place():
            assert same(bits(model), loaded)
        assert same(bits(model), current)


def test_an_error_inside_leaves_the_weights_as_they_were():
    model = chunks()
    loaded, reference = bits(model), Reference(model, CPU)
    train(model)
    current = bits(model)
    with pytest.raises(ZeroDivisionError), reference.in_place():
        raise ZeroDivisionError
    assert same(bits(model), current)
    with reference.in_place():
        assert same(bits(model), loaded)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_memory_is_pinned_for_a_gpu_alone(monkeypatch, device):
    made = []

    def host_memory(*, pinned):
        made.append(pinned)
        return HostMemory(pinned=False)

    monkeypatch.setattr(module, "HostMemory", host_memory)
    Reference(chunks(), torch.device(device))
    assert made == [device == "cuda"] * 2


class Streams(TorchFunctionMode):
    """Streams that note which earlier copies every copy waits for.

    Two operations on the same bytes, one of which writes them, must not run at the same time.
    """

    def __init__(self):
        super().__init__()
        self.current = self.Stream()
        self.inside = self.current
        self.operations = []

    class Stream:
        def __init__(self, *_):
            self.done = set()

        def wait_stream(self, other):
            self.done |= other.done

    @contextmanager
    def stream(self, stream):
        before, self.inside = self.inside, stream
        yield
        self.inside = before

    def run(self, reads, writes):
        """Queue an operation on the stream of the context."""
        for number, (_, other_reads, other_writes) in enumerate(self.operations):
            if writes & (other_reads | other_writes) or reads & other_writes:
                assert number in self.inside.done, f"{number} may still be running"
        self.inside.done.add(len(self.operations))
        self.operations.append((frozenset(self.inside.done), reads, writes))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}, "the host would wait"
            target, source = (tensor.data_ptr() for tensor in args[:2])
            self.run({source}, {target})
        return function(*args, **(kwargs or {}))


def test_copies_on_a_gpu_wait_for_what_they_need_and_for_nothing_else(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", Streams.Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    model = chunks()
    reference = Reference(model, CPU)
    weights = {live.data_ptr() for live, _, _ in reference._parts}
    parts = len(weights)
    assert parts == len(reference._parts) > 5
    with streams:
        for _ in range(2):
            start = len(streams.operations)
            streams.run(set(), weights)  # the update, on the current stream
            with reference.in_place():
                streams.run(weights, set())  # the pass
            streams.run(weights, weights)
            exchange = streams.operations[start + 1 : start + 1 + 2 * parts]
            for index, (before, _, _) in enumerate(exchange[2::2]):
                assert start + 2 + 2 * index not in before, "weights leave while others arrive"
