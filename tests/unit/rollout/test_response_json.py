"""A body parsed in pieces says what json.loads says, of any JSON."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.client import response_json as body
from megatron_rl.rollout.client.response_json import parse_body
from tests.faults.samples import honest_sample

KEYS = st.sampled_from(
    ["routed_experts", "output_token_logprobs", "output_ids", "text", 'a"routed_experts": "', "\\"]
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        KEYS,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=30,
)


def plain(value):
    if isinstance(value, memoryview):
        assert value.readonly
        return bytes(value).decode()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.sampled_from([1, 7, 10**6]))
def test_any_json_is_read_as_json_reads_it(value, indent, piece_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "PIECE_BYTES", piece_bytes)
        patch.setattr(body, "SCAN_BYTES", piece_bytes)
        assert plain(parse_body(json.dumps(value, indent=indent).encode())) == value


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_correct_answer_is_parsed_once_and_routes_are_not_copied(separators, monkeypatch):
    monkeypatch.setattr(body, "PIECE_BYTES", 10)
    sent = [
        honest_sample({"return_routed_experts": True}, [1, 2], f"r_{i}", num_tokens=9)
        for i in range(3)
    ]
    for sample in sent:
        sets = {
            "output_token_sampling_mask": [[7, 8]] * 9,
            "output_token_sampling_logprobs": [-0.5] * 9,
        }
        sample["meta_info"] |= sets
        sample["text"] = 'what follows routes may have a \\ and a "'
    content = bytearray(json.dumps(sent, separators=separators).encode())
    found = body.parse_in_pieces(content)
    assert plain(found) == sent
    assert all(sample["meta_info"]["routed_experts"].obj is content for sample in found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        '{"output_ids": [1, 2,]}',
        '{"output_ids": [1 2]}',
        '{"output_ids": [,]}',
        '{"output_ids": [1',
        '[{"output_ids": [1, 2',
        '{"output_token_logprobs": [[1, 2],]}',
        '{"output_token_logprobs": [[1, 2]',
        '{"routed_experts": "abc',
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 10**6])
def test_what_is_not_json_is_refused(text, piece_bytes, monkeypatch):
    monkeypatch.setattr(body, "PIECE_BYTES", piece_bytes)
    with pytest.raises(ValueError):
        json.loads(text)
    with pytest.raises(ValueError):
        parse_body(text.encode())


def test_a_long_answer_is_parsed_in_short_pieces(monkeypatch):
    """One call of orjson.loads holds the interpreter lock from its first byte to its last."""
    sample = {
        "output_ids": list(range(32000)),
        "meta_info": {"output_token_logprobs": [[-0.123456789, 1234, None]] * 32000},
    }
    sample["meta_info"]["routed_experts"] = "AAAA" * 10**6
    content, sizes = json.dumps([sample] * 4).encode(), []

    def loads(text):
        sizes.append(len(text))
        return json.loads(text)

    monkeypatch.setattr(body, "orjson", SimpleNamespace(loads=loads))
    assert plain(parse_body(content)) == [sample] * 4
    assert max(sizes) < 1.1 * body.PIECE_BYTES and len(content) > 16 * 10**6


def test_a_body_of_the_length_that_was_announced_is_not_moved():
    received = body.Received("70000", 10**6)
    begin = received.memory
    received += bytes(70000)
    assert received.memory is begin and len(received) == 70000


@pytest.mark.parametrize("expected", [None, "0", "nonsense", "70000", "200000", "99999999999999"])
def test_a_body_is_what_was_received_whatever_content_length_was_sent(expected):
    chunks = [bytes([i % 251]) * (1 + 977 * i) for i in range(20)]
    received = body.Received(expected, 10**6)
    assert len(received.memory) <= 10**6
    begin = received.memory
    for chunk in chunks:
        received += chunk
    whole = b"".join(chunks)
    assert (
        len(received) == len(whole) and received.content() == whole and received.content().readonly
    )
    # nothing was moved
    assert (received.memory is begin) == (expected in ("200000", "99999999999999"))
