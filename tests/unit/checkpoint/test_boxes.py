"""Boxes of a run of a tensor's values, against the run itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.checkpoint.optimizer_parts import boxes


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


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, 12, 1), (4, 8, 1), (1, 3, 1), (3, 5, 2), (1, 11, 3)])
def test_whole_rows_are_one_box(start: int, stop: int, expected: int) -> None:
    assert len(list(boxes((3, 4), start, stop))) == expected
