"""Process groups of pretended GPUs: a collective sends its description to the switchboard.

Real CPU tensors, and pretended ones whose values are known (values.py), carry their values: shapes
that pipeline stages exchange, objects, counts of tokens.  The members of a group that are not
rehearsed send what this rank sends, or what `represent` makes of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl_tools.rehearse.calls import POINT_TO_POINT, Call
from megatron_rl_tools.rehearse.device import PretendedGpu
from megatron_rl_tools.rehearse.recorder import place
from megatron_rl_tools.rehearse.values import MOST
from megatron_rl_tools.rehearse.work import Work

BACKEND = "rehearsed"
NOT_ON_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64)
REDUCE: dict[str, np.ufunc] = {
    "SUM": np.add, "MAX": np.maximum, "MIN": np.minimum, "PRODUCT": np.multiply, "AVG": np.add,
}  # fmt: skip

Arrays = tuple[np.ndarray, ...] | None
"""Values of several tensors; None where they are not known."""
Values = dict[int, Arrays]
"""Global rank -> what it sent."""


class World:
    """What all groups of this rank share."""

    def __init__(
        self, rank: int, size: int, rehearsed: Collection[int], gpu: PretendedGpu, pipe: Connection
    ) -> None:
        self.rank, self.size, self.gpu, self.pipe = rank, size, gpu, pipe
        self.rehearsed = frozenset(rehearsed)
        self.requested = "nccl"
        """The backend that the program named for the group that is being made."""
        self.represent: Callable[[dict[int, Any], int], Any] = lambda objects, rank: objects[rank]
        """(objects of all ranks, a rank that is not rehearsed) -> what that rank would send.  Its
        own entry is this rank's."""
        self.made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.numbers: Counter[Any] = Counter()
        self.num_calls = 0
        self._arrived: dict[int, Values] = {}

    def start(self) -> None:
        """Make the default group, and let every further group be a rehearsed one."""
        dist.Backend.register_backend(
            BACKEND, self._create, extended_api=True, devices=["cpu", "cuda"]
        )
        dist.init_process_group(BACKEND, store=FakeStore(), rank=self.rank, world_size=self.size)
        module, new_group = dist.distributed_c10d, dist.new_group

        def make_group(
            ranks: Sequence[int] | None = None,
            timeout: object = None,
            backend: str | None = None,
            pg_options: object = None,
            **kwargs: Any,
        ) -> Any:
            self.requested = backend or "nccl"
            return new_group(ranks, backend=BACKEND, **kwargs)

        def get_backend(group: dist.ProcessGroup | None = None) -> str:
            chosen = group or dist.group.WORLD
            return chosen.backend if isinstance(chosen, Group) else "nccl"

        all_gather_object = dist.all_gather_object

        def gather_objects(
            objects: list[Any], value: object, group: dist.ProcessGroup | None = None
        ) -> None:
            all_gather_object(objects, value, group)
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            for index, rank in enumerate(ranks):
                if rank not in self.rehearsed:
                    objects[index] = self.represent(dict(zip(ranks, objects, strict=True)), rank)

        for owner in (dist, module):
            owner.new_group, owner.get_backend = make_group, get_backend  # type: ignore[attr-defined]
            owner.all_gather_object = gather_objects  # type: ignore[attr-defined]

    def answer(self, index: int) -> Values:
        """Wait for the values of the call with this index."""
        while index not in self._arrived:
            number, values = self.pipe.recv()
            self._arrived[number] = values
        return self._arrived.pop(index)

    def _create(self, options: Any, _: object) -> Group:
        ranks = list(options.global_ranks_in_group) or list(range(self.size))
        return Group(self, options.group_rank, ranks, self.requested)


class Group(dist.ProcessGroup):
    """A group with the backend that the program named, under torch's names for its collectives.

    torch calls these methods from Python only, with the arguments below; its stubs list others.
    """

    def __init__(self, world: World, rank: int, ranks: Sequence[int], backend: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # torch's stub wants a store
        self.world, self.my_rank, self.ranks, self.backend = world, rank, tuple(ranks), backend
        made = (backend, self.ranks)
        self.key = (*made, world.made[made])
        world.made[made] += 1

    @property
    def _device_types(self) -> list[torch.device]:
        """Where torch puts objects to send them."""
        return [torch.device("cpu" if self.backend == "gloo" else "cuda")]

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.my_rank

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Work:
        return self._call("all_reduce", tensors, tensors, opts, fill=self._reduce)

    allreduce_coalesced = allreduce

    def reduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Work:
        return self._call("reduce", tensors, tensors, opts, fill=self._reduce)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Work:
        def fill(call: Call, values: Values) -> Arrays:
            return self._sent(values, call.root)

        return self._call("broadcast", tensors, tensors, opts, fill=fill)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._call("all_gather", inputs, outputs[0], opts, fill=self._gather)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        sizes = [output.numel() // self.size()] * self.size()
        return self._call(
            "all_gather", [tensor], [output], opts, fill=self._gather, output_sizes=sizes
        )

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return [self.all_gather_single(*pair, opts) for pair in pairs][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        return self._call("reduce_scatter", inputs[0], outputs, opts, fill=self._reduce)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        sizes = [tensor.numel() // self.size()] * self.size()
        return self._call(
            "reduce_scatter", [tensor], [output], opts, fill=self._reduce, input_sizes=sizes
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(*pair, opts) for pair in pairs][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Work:
        sent = split_sizes(tensor, input_sizes, self.size())
        received = split_sizes(output, output_sizes, self.size())

        def fill(call: Call, values: Values) -> Arrays:
            parts = []
            for index in range(self.size()):
                arrays = self._sent(values, index)
                if arrays is None:
                    return None
                start = sum(sent[: self.my_rank])
                parts.append(arrays[0].reshape(-1)[start : start + sent[self.my_rank]])
            return (np.concatenate(parts),)

        return self._call(
            "all_to_all", [tensor], [output], opts, fill=fill, input_sizes=sent,
            output_sizes=received,
        )  # fmt: skip

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._call("all_to_all", inputs, outputs, opts, fill=lambda call, values: None)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        received = outputs[0] if outputs else []
        return self._call("gather", inputs, received, opts, fill=self._gather)

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        def fill(call: Call, values: Values) -> Arrays:
            arrays = self._sent(values, call.root)
            return None if arrays is None else (arrays[self.my_rank],)

        return self._call("scatter", inputs[0] if inputs else [], outputs, opts, fill=fill)

    def barrier(self, opts: Any = None) -> Work:
        return self._call("barrier", [], [], opts, fill=lambda call, values: ())

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self._call("send", tensors, [], None, root=dst)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        def fill(call: Call, values: Values) -> Arrays:
            return values.get(self.ranks[src])

        return self._call("recv", [], tensors, None, fill=fill, root=src)

    def _call(
        self,
        operation: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        *,
        fill: Callable[[Call, Values], Arrays] | None = None,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        root: int | None = None,
    ) -> Work:
        """Describe a call to the switchboard, and write the values that it brings, if any.

        fill: (call, values of all ranks) -> the arrays for `outputs`, None where not known.
        """
        world, tensors = self.world, (*inputs, *outputs)
        self._check(operation, tensors)
        root = getattr(opts, "rootRank", -1) if root is None else root
        counter = (self.key, operation, root) if operation in POINT_TO_POINT else self.key
        sizes = [sum(t.numel() * t.element_size() for t in side) for side in (inputs, outputs)]
        is_small = max(sizes) <= 8 * MOST
        is_real = any(not isinstance(tensor, FakeTensor) for tensor in tensors)
        has_values = is_small or is_real
        call = Call(
            rank=world.rank,
            index=world.num_calls,
            group=self.key,
            number=world.numbers[counter],
            operation=operation,
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors[:1]),
            inputs=tuple(input_sizes or (t.numel() for t in inputs)),
            outputs=tuple(output_sizes or (t.numel() for t in outputs)),
            num_bytes=max(sizes),
            place=place(),
            reduction=reduction_of(opts),
            root=root,
            wants_values=has_values and fill is not None,
            values=self._known(inputs) if has_values else None,
        )
        world.numbers[counter] += 1
        world.num_calls += 1
        recorder = world.gpu.recorder
        recorder.events.append(("post", recorder.phase, call.index, call.data()))
        world.pipe.send(call)
        if not call.wants_values:
            self._write(outputs, None)
            return Work(recorder, world.pipe, call.index)

        def finish() -> None:
            assert fill is not None
            self._write(outputs, fill(call, world.answer(call.index)))

        if operation == "recv":  # what it waits for may be sent after this rank's next call
            return Work(recorder, world.pipe, call.index, finish)
        finish()
        return Work(recorder, world.pipe, call.index)

    def _known(self, tensors: Sequence[Tensor]) -> Arrays:
        arrays = []
        for tensor in tensors:
            value = self.world.gpu.values.of(tensor) if isinstance(tensor, FakeTensor) else tensor
            if value is None:
                return None
            is_bfloat16 = value.dtype is torch.bfloat16  # which numpy lacks
            arrays.append((value.float() if is_bfloat16 else value).detach().numpy().copy())
        return tuple(arrays)

    def _sent(self, values: Values, index: int) -> Arrays:
        """Return what the member `index` sent, or this rank where that one is not rehearsed."""
        rank = self.ranks[index]
        return values[rank if rank in values else self.world.rank]

    def _gather(self, call: Call, values: Values) -> Arrays:
        parts = [self._sent(values, index) for index in range(self.size())]
        if any(part is None for part in parts):
            return None
        arrays = tuple(part[0] for part in parts if part is not None)
        # one output for all of them, or one for each
        is_single = call.operation == "all_gather" and len(set(call.outputs)) == 1
        return (np.concatenate([a.reshape(-1) for a in arrays]),) if is_single else arrays

    def _reduce(self, call: Call, values: Values) -> Arrays:
        parts = [self._sent(values, index) for index in range(self.size())]
        if any(part is None for part in parts) or call.operation == "reduce_scatter":
            return None
        totals = []
        for arrays in zip(*(part for part in parts if part is not None), strict=True):
            total = REDUCE[call.reduction].reduce(np.stack(arrays))
            totals.append(total / self.size() if call.reduction == "AVG" else total)
        return tuple(totals)

    def _write(self, tensors: Sequence[Tensor], arrays: Arrays) -> None:
        """Give tensors the values that arrived; pretended ones are not known without them."""
        known = self.world.gpu.values
        if arrays is not None and len(arrays) == 1 and len(tensors) > 1:
            arrays = tuple(np.split(arrays[0].reshape(-1), len(tensors)))
        for index, tensor in enumerate(tensors):
            is_fake = isinstance(tensor, FakeTensor)
            if arrays is None:
                if is_fake:
                    known.forget(tensor)
                continue
            value = torch.from_numpy(np.ascontiguousarray(arrays[index])).to(tensor.dtype)
            if is_fake:
                known.set(tensor, value.reshape(tensor.shape))
            else:
                tensor.copy_(value.reshape(tensor.shape))

    def _check(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Record what the backend cannot do."""
        problem = self.world.gpu.recorder.problem
        for tensor in tensors:
            if self.backend == "gloo" and tensor.is_cuda:
                problem(f"{operation}: a CUDA tensor over gloo")
            if self.backend != "nccl":
                continue
            if not tensor.is_cuda:
                problem(f"{operation}: a CPU tensor over NCCL")
            if tensor.dtype in NOT_ON_NCCL:
                problem(f"{operation}: NCCL has no {tensor.dtype}")
            if not tensor.is_contiguous():
                problem(f"{operation}: NCCL needs contiguous tensors")


def split_sizes(tensor: Tensor, rows: Sequence[int] | None, size: int) -> list[int]:
    """Return the elements for each rank of an all-to-all; rows: None for equal parts."""
    if rows is None or len(rows) == 0:
        return [tensor.numel() // size] * size
    return [int(count) * (tensor.numel() // max(len(tensor), 1)) for count in rows]


def reduction_of(opts: Any) -> str:
    """Return SUM, MAX, ... of torch's options; "" for a call without a reduction."""
    reduction = getattr(opts, "reduceOp", None)
    names = [name for name in REDUCE if reduction == getattr(dist.ReduceOp, name)]
    return names[0] if names else ""
