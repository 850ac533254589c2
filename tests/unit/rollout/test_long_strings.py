"""Routes of a long response are a string of more bytes than are searched at a time."""

import pytest

from megatron_rl.rollout.client import response_json
from megatron_rl.rollout.client.response_json import end_of_text


@pytest.mark.parametrize("length", range(13))
def test_a_string_ends_at_its_quote_however_many_pieces_are_before_it(length, monkeypatch):
    monkeypatch.setattr(response_json, "SCAN_BYTES", 4)
    text = b"a" * length
    assert end_of_text(b'["' + text + b'", "b"]', 2) == 2 + length + 1
    with pytest.raises(ValueError, match="without an end"):
        end_of_text(text, 0)
    with pytest.raises(ValueError, match="an escape"):
        end_of_text(text + b'\\""', 0)
