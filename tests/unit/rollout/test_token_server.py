"""The server of the kill test (tests/token_server.py) says what SGLang says, as far as the client
reads it.
"""

import pytest

from megatron_rl.rollout.client.sample_fields import parse_spans, parse_versions
from tests.token_server import END_OF_PROMPT, Handler, response

PROMPT = [4, 5, END_OF_PROMPT]


@pytest.mark.parametrize("version", ["0", "7"])
def test_its_tokens_are_of_the_version_that_was_set_last(version, monkeypatch):
    monkeypatch.setattr(Handler, "version", "3")
    server = Handler.__new__(Handler)  # without a connection
    monkeypatch.setattr(Handler, "version", version)
    (found,) = server.generate({"rid": "r", "input_ids": [PROMPT]})
    meta, tokens = found["meta_info"], found["output_ids"]
    assert tokens == response(PROMPT, 0) and meta["weight_version"] == version
    spans = parse_spans(meta, int(version), int(version))
    assert parse_versions(spans, len(tokens)).tolist() == [int(version)] * len(tokens)
