"""The state of core's distributed optimizer as parts of parameters.

Every rank saves and loads what it owns, without a gather.  core cuts a buffer of parameters into
equal flat ranges, one for each data-parallel rank, so a rank owns a run of a parameter's values.  A
run of a tensor's values in memory is at most 2 n - 1 boxes of its n axes: the end of a row, whole
rows, the start of one.  Names and shapes are those of core's `fully_reshardable` format, which
gathers all of it on every rank; checkpoints of either load in every layout.

core's formats without the gather do not serve: dp_reshardable loads only in the layout it was saved
in, and fully_sharded_model_space needs flattened ranges, which core 0.16.1 and 0.19.2 refuse.
"""

from __future__ import annotations

# before megatron-core: makes it work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401

# isort: split
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Box(NamedTuple):
    """A box of a tensor whose values follow one another in memory."""

    first: int
    """Number of its first value, counted from the tensor's first."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Owned(NamedTuple):
    """Values [start, stop) of a model's parameter that this rank updates."""

    parameter: Tensor
    start: int
    stop: int
    state: dict[str, Tensor]
    """Flat tensors of these values, by core's names."""


def sharded_parts(optimizer: DistributedOptimizer, models: ShardedStateDict) -> ShardedStateDict:
    """Return this rank's optimizer state as sharded tensors that share its memory.

    `models` is core's sharded state of all chunks.  After a load, call `take_loaded`.
    """
    places = {
        id(place.data): place
        for place in nested_values(extract_sharded_tensors_and_factories(models)[0])
    }
    instance = optimizer.distributed_optimizer_instance_id
    parts: ShardedStateDict = {}
    for index, run in enumerate(owned(optimizer)):
        place = places[id(run.parameter)]
        parts[str(index)] = {
            name: dict(enumerate(parts_of_tensor(place, name, values, run.start, instance)))
            for name, values in run.state.items()
        }
    return {"param_state": parts}


@torch.no_grad()
def take_loaded(optimizer: DistributedOptimizer) -> None:
    """Make the optimizer use its `sharded_parts`, which a load has filled in its memory.

    Only one that offloads to the CPU has a second copy of weights, on the device.
    """
    hybrid = optimizer.optimizer
    if isinstance(hybrid, HybridDeviceOptimizer):
        for weights, updated in hybrid.param_to_inner_param.items():
            weights.data.copy_(updated)


def owned(optimizer: DistributedOptimizer) -> Iterator[Owned]:
    """Yield what this rank updates, in the order of core's buffers."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    state = state_in_place(optimizer, parameter)
                    yield Owned(parameter, ranges["param"].start, ranges["param"].end, state)


def state_in_place(optimizer: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the moments of a model's parameter and its "param": the weights that Adam updates.

    They are flat tensors in the optimizer's memory and dtypes.  core's own function returns copies
    of those in 16 bits.  "param" is the float32 weights, or the int16 bits that bfloat16 weights
    lack of them (TransformerEngine's store_param_remainders).
    """
    group, index = optimizer.model_param_group_index_map[parameter]
    updated = optimizer.optimizer.param_groups[group]["params"][index]
    state = optimizer.optimizer.state[updated]
    # TransformerEngine's Adam and CPU offload keep the weights in their state
    weights = state.get("master_param", updated).detach()
    return {"param": weights} | {name: state[name] for name in MOMENTS}


def parts_of_tensor(
    place: ShardedTensor | ShardedTensorFactory,
    name: str,
    values: Tensor,
    start: int,
    instance: int,
) -> Iterator[ShardedTensor]:
    """Yield sharded tensors of `values`.

    These are the values of the parameter at `place` from number `start` on.
    """
    for part, begin in stored_parts(place):
        shape, axes = tuple(part.local_shape), part.prepend_axis_num
        low, high = max(start, begin), min(start + len(values), begin + math.prod(shape))
        for box in boxes(shape, low - begin, high - begin):
            first = begin + box.first - start
            data = values[first : first + math.prod(box.sizes)].view((1,) * axes + box.sizes)
            offsets = (0,) * axes + box.offsets
            yield ShardedTensor(
                f"optimizer.state.{name}.{part.key}",
                data,
                data.dtype,
                tuple(data.shape),
                part.global_shape,
                tuple(a + b for a, b in zip(part.global_offset, offsets, strict=True)),
                axis_fragmentations=None,  # boxes differ in size
                # the third is the data-parallel rank: each has its own
                replica_id=(*part.replica_id[:2], instance),
                allow_shape_mismatch=part.allow_shape_mismatch,
            )


def stored_parts(
    place: ShardedTensor | ShardedTensorFactory,
) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the tensors that core stores for a parameter, without data.

    Each comes with the number of its first value in the parameter.
    """
    if isinstance(place, ShardedTensor):
        yield place.without_data(), 0
        return
    # a factory cuts a parameter into views of it
    whole = torch.empty(place.data.shape, device="meta")
    for part in nested_values(
        [place.build_fn(place.key, whole, place.replica_id, place.flattened_range)]
    ):
        assert part.data.is_contiguous(), f"{part.key}: parts of a parameter must be rows of it"
        yield replace(part, data=None), part.data.storage_offset()


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover values [start, stop) of a contiguous tensor, in order."""
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        columns = tuple(shape[1:])
        yield Box(first * row, (first, *(0 for _ in columns)), (last - first, *columns))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes of values [start, stop), all in row `index`."""
    before = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box(before + box.first, (index, *box.offsets), (1, *box.sizes))
