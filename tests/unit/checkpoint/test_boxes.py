"""Boxes of a run of a tensor's values, against the run itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_rl.checkpoint.torch_dist.optimizer_parts import boxes, parts_of_tensor


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_run_in_its_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers, found = torch.arange(size).view(shape), []
    for first, offsets, sizes in boxes(shape, start, stop):
        box = numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        assert box.shape == sizes and int(box.flatten()[0]) == first
        found.append(box.flatten())
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).equal(torch.arange(start, stop))
    assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(0, 12, 1), (4, 8, 1), (1, 3, 1), (3, 5, 2), (1, 11, 3)]
)
def test_whole_rows_are_one_box(start: int, stop: int, expected: int) -> None:
    assert len(list(boxes((3, 4), start, stop))) == expected


@pytest.mark.parametrize("start", [0, 3, 11])
def test_each_data_parallel_rank_saves_its_own_part_at_its_place(start: int) -> None:
    """core takes a tensor whose replica_id is not 0 for a copy: the third number is the
    data-parallel rank.
    """
    place = ShardedTensor.from_rank_offsets(
        "weight", torch.zeros(4, 3), (0, 1, 2), replica_id=(0, 5, 7), allow_shape_mismatch=True
    )
    values = torch.arange(start, 12.0)
    whole = torch.full((8, 3), -1.0)
    for part in parts_of_tensor(place, "exp_avg", values, start, instance=0):
        assert (part.key, part.replica_id, part.global_shape) == (
            "optimizer.state.exp_avg.weight",
            (0, 5, 0),
            (8, 3),
        )
        assert part.allow_shape_mismatch, "a padded vocabulary"
        rows = tuple(
            slice(a, a + n) for a, n in zip(part.global_offset, part.local_shape, strict=True)
        )
        whole[rows] = part.data
        assert part.data.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    expected = torch.full((12,), -1.0)
    expected[start:] = values
    assert whole[4:].flatten().equal(expected) and bool((whole[:4] == -1).all())
