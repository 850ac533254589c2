"""A server that is not the one this run needs is refused by name, with both values."""

from dataclasses import replace

import pytest

from megatron_rl.rollout.handshake import ServerError, ServerInfo, check_server, server_info
from megatron_rl.rollout.routed_experts import ModelSpec
from tests.fake_server import FakeServer

SPEC = ModelSpec(num_layers=4, moe_layers=(0, 1, 2, 3), top_k=2, num_experts=8, vocab_size=64)
GOOD = ServerInfo(
    url="http://server:1",
    version="0.5.21",
    model_path="/models/tiny",
    dtype="float32",
    weight_version="0",
    routed_experts=True,
    route_width=8,
    num_layers=4,
    num_experts=8,
    top_k=2,
    vocab_size=64,
)


def test_the_right_server_passes_also_when_its_config_cannot_be_read():
    check_server(GOOD, SPEC, want_routes=True, dtype="float32")
    unread = replace(GOOD, num_layers=None, num_experts=None, top_k=None, vocab_size=None)
    check_server(unread, SPEC, want_routes=True, dtype="float32")
    check_server(replace(GOOD, routed_experts=False, route_width=None), SPEC, want_routes=False)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_layers", 2, "layers = 2, this run needs 4"),
        ("num_experts", 16, "experts = 16, this run needs 8"),
        ("top_k", 4, "experts per token = 4, this run needs 2"),
        ("vocab_size", 128, "vocabulary size = 128, this run needs 64"),
        ("dtype", "float16", "dtype = float16, this run needs float32"),
        ("route_width", 16, "layers x experts per token = 16, this run needs 8"),
        ("routed_experts", False, "--enable-return-routed-experts"),
    ],
)
def test_a_difference_is_named_with_both_values(field, value, words):
    with pytest.raises(ServerError, match="http://server:1") as caught:
        check_server(replace(GOOD, **{field: value}), SPEC, want_routes=True, dtype="float32")
    assert words in str(caught.value)


def test_what_is_not_an_sglang_server_is_named():
    with FakeServer("ok") as server:
        with pytest.raises(ServerError, match="is it an SGLang server") as caught:
            server_info(server.url)
    assert server.url in str(caught.value)
    with pytest.raises(ServerError, match="did not answer"):
        server_info(server.url)
