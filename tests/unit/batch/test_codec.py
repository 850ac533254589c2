"""A rollout as header and arrays: what is written, what is refused on reading, and the layout of
the bytes.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batch.codec import (
    ALIGNMENT,
    aligned,
    check_origin,
    encode,
    from_arrays,
    from_bytes,
    header_of,
    layer_major,
    to_arrays,
    to_bytes,
)
from tests.unit.batch.rollouts import make_rollout


def written(*, missing=True, routes=True):
    """(a rollout, its header, its arrays)."""
    rollout = make_rollout("r", 3, 4, routes=routes)
    if missing:
        rollout = replace(rollout, missing_routes=np.arange(6) == 1)
    return rollout, header_of(rollout), to_arrays(rollout)


def test_the_header_and_the_arrays_by_name():
    rollout, header, arrays = written()
    spans = [
        [int(v), int((rollout.policy_versions == v).sum())]
        for v in np.unique(rollout.policy_versions)
    ]
    assert header == {"id": "r", "prompt_length": 3, "finish_reason": "stop", "versions": spans}
    assert list(arrays) == [
        "tokens",
        "logprobs",
        "routed_experts",
        "routes_digest",
        "missing_routes",
    ]
    assert (
        arrays["routes_digest"].tobytes() == rollout.routes_digest
        and arrays["routes_digest"].dtype == np.uint8
    )
    assert list(written(missing=False, routes=False)[2]) == ["tokens", "logprobs"]
    assert to_arrays(replace(rollout, routed_experts=None)).keys() == {
        "tokens",
        "logprobs",
        "missing_routes",
    }


@pytest.mark.parametrize("name", ["tokens", "logprobs"])
def test_tokens_and_logprobs_are_required(name):
    _, header, arrays = written()
    del arrays[name]
    with pytest.raises(
        ValueError, match="rollout r: tokens or log-probs are missing; record it again"
    ):
        from_arrays(header, arrays.get)


@pytest.mark.parametrize("name", ["tokens", "logprobs", "prompt_length", "versions"])
def test_lengths_that_do_not_describe_one_response_are_refused(name):
    _, header, arrays = written()
    if name in arrays:
        arrays[name] = arrays[name][:-1]
    else:
        header[name] = {"prompt_length": 2, "versions": [[0, 5]]}[name]
    with pytest.raises(
        ValueError,
        match=r"rollout r: \d tokens with a prompt of \d, \d log-probs and \d weight versions",
    ):
        from_arrays(header, arrays.get)


def test_routes_need_their_digest_and_missing_routes_need_routes():
    rollout, header, arrays = written()
    with pytest.raises(ValueError, match="rollout r: expert ids without their digest"):
        from_arrays(header, {**arrays, "routes_digest": None}.get)
    bare = from_arrays(header, {**arrays, "routed_experts": None}.get)
    assert (bare.routed_experts, bare.routes_digest, bare.missing_routes) == (None, None, None)
    complete = from_arrays(header, arrays.get)
    assert complete.routes_digest == rollout.routes_digest
    sent = from_arrays(header, {**arrays, "routes_digest": np.arange(16, dtype=np.uint8)}.get)
    assert sent.routes_digest == bytes(range(16)), "what was sent, not what would fit these routes"
    np.testing.assert_array_equal(complete.missing_routes, rollout.missing_routes)
    np.testing.assert_array_equal(complete.routed_experts, rollout.routed_experts)


def test_the_digest_is_that_of_these_tokens_and_routes():
    rollout, _, _ = written()
    assert check_origin(rollout) is rollout
    other = replace(rollout, tokens=rollout.tokens + 1)
    with pytest.raises(ValueError, match="rollout r: digest"):
        check_origin(other)
    without = replace(other, routed_experts=None)
    assert check_origin(without) is without


def test_ids_are_layer_major_in_memory():
    rollout, header, arrays = written()
    assert rollout.routed_experts.flags.c_contiguous
    for ids in (
        layer_major(rollout.routed_experts),
        from_arrays(header, arrays.get).routed_experts,
        from_bytes(to_bytes([rollout]))[0][0].routed_experts,
    ):
        assert ids.transpose(1, 0, 2).flags.c_contiguous
        np.testing.assert_array_equal(ids, rollout.routed_experts)


def test_bytes_are_a_size_a_header_and_aligned_arrays():
    """Padded with zeros, so that equal rollouts have equal bytes; reading returns views."""
    rollout = written()[0]
    data = to_bytes(
        [rollout, rollout], weights=np.array([[1.5], [2.5]]), marks=np.array([True, False])
    )
    assert ALIGNMENT == 16 and [aligned(size) for size in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert len(data) % ALIGNMENT == 0 and not data[8:16].any()
    length = int(data[:8].view(np.int64)[0])
    assert (
        data[16 : 16 + length].tobytes().endswith(b"}")
        and not data[16 + length : 16 + aligned(length)].any()
    )
    rollouts, columns = from_bytes(data)
    assert columns["weights"].tolist() == [[1.5], [2.5]] and columns["marks"].tolist() == [
        True,
        False,
    ]
    first = 16 + aligned(length)
    assert np.shares_memory(columns["weights"], data[first : first + 16])
    for part in (columns["marks"], rollouts[0].tokens, rollouts[1].rollout_logprobs):
        assert (
            np.shares_memory(part, data) and (part.ctypes.data - data.ctypes.data) % ALIGNMENT == 0
        )
    end = first + 16 + 2  # two marks, then zeros
    assert not data[end : first + 32].any()


def test_any_part_of_the_bytes_can_be_copied():
    """Also across the borders of arrays, and of the zeros between them."""
    rollouts = [written()[0], written(missing=False, routes=False)[0]]
    encoded, data = (
        encode(rollouts, marks=np.array([True])),
        to_bytes(rollouts, marks=np.array([True])),
    )
    assert len(encoded) == len(data)
    for size in (1, 7, 16, 50, len(data)):
        for start in range(len(data) - size + 1):
            part = np.full(size, 255, np.uint8)
            encoded.copy_to(part, start)
            np.testing.assert_array_equal(part, data[start : start + size])
    assert any(np.shares_memory(block, rollouts[0].tokens) for block in encoded.blocks), (
        "views, not copies"
    )
