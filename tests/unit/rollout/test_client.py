"""Every fault of a server ends in a counted recovery or a RolloutError that names it, and never in
a hang.
"""

import base64
import random

import numpy as np
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.request import RETURN_SECONDS
from megatron_rl.rollout.client.sampling import SampleRules
from tests.fake_server import GAPS, SAMPLE_FAULTS, SPEC, VERSION, FakeServer
from tests.faults.samples import honest_sample

PROMPT = Prompt(id="q1", text="", token_ids=(3, 4, 5), label="")


def make_client(*urls: str, max_retries: int = 2, want_routes: bool = True) -> RolloutClient:
    return RolloutClient(
        urls, RolloutConfig(max_retries=max_retries), SampleRules(SPEC, want_routes)
    )


def generate(client: RolloutClient, prompts=(PROMPT,), group_size: int = 4, **overrides):
    settings = {
        "temperature": 1.0,
        "max_tokens": 8,
        "stop_token_ids": (1,),
        "policy_version": VERSION,
    }
    return client.generate(prompts, group_size, **(settings | overrides))


def test_groups_come_in_prompt_order_with_all_fields_of_the_answer():
    prompts = [Prompt(id=f"q{i}", text="", token_ids=(3,) * (i + 1), label="") for i in range(5)]
    seen = []
    with FakeServer("ok") as server:
        client = make_client(server.url)
        groups = generate(
            client,
            prompts,
            id_prefix="step3/",
            on_progress=lambda: seen.append(1),
        )
    assert [group.prompt for group in groups] == prompts
    assert len(seen) == len(prompts)
    rollout = groups[2].rollouts[3]
    assert rollout.id == "step3/q2/3"
    assert rollout.tokens.dtype == np.int64 and rollout.tokens[:3].tolist() == [3, 3, 3]
    assert (rollout.prompt_length, rollout.response_length) == (3, 5)
    assert rollout.rollout_logprobs.dtype == np.float32 and len(rollout.rollout_logprobs) == 5
    assert rollout.routed_experts.shape == (7, 3, 2) and rollout.routed_experts.dtype == np.uint8
    assert (rollout.finish_reason, rollout.response_text) == ("length", "")
    assert rollout.policy_versions.tolist() == [VERSION] * rollout.response_length
    assert (client.counters.requests, client.counters.samples, client.counters.retries) == (
        5,
        20,
        0,
    )


def test_a_request_sets_every_sampling_parameter():
    with FakeServer("ok") as server:
        generate(make_client(server.url, want_routes=False), temperature=0.7, stop_token_ids=(1, 2))
    (request,) = server.requests
    assert request["input_ids"] == [[3, 4, 5]] * 4 and request["return_logprob"] is True
    assert request["return_routed_experts"] is False
    params = request["sampling_params"]
    assert (params["n"], params["temperature"], params["max_new_tokens"]) == (1, 0.7, 8)
    assert params["stop_token_ids"] == [1, 2]
    assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (
        1.0,
        -1,
        0.0,
        1.0,
    )


@pytest.mark.parametrize(
    "fault",
    ["reset", "close", "html", "cut_json", "empty", "object", "too_few", "huge", "http_503"],
)
def test_a_request_that_fails_once_is_repeated(fault):
    before = random.getstate()
    with FakeServer(fault, "ok") as server:
        client = make_client(server.url)
        (group,) = generate(client)
    assert len(group.rollouts) == 4
    assert random.getstate() == before, "a checkpoint of a run whose servers fail would differ"
    assert client.counters.retries == 1 and client.counters.failures.total() == 1
    assert client.counters.dropped.total() == 0


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_a_server_that_never_finishes_is_left_at_the_deadline(fault, clock):
    with FakeServer(fault) as bad, FakeServer("ok") as good:
        client = make_client(bad.url, good.url)
        client.clock, bad.late = (
            clock,
            lambda: clock.advance(client.cfg.request_timeout_seconds + RETURN_SECONDS),
        )
        (group,) = generate(client)
    assert len(group.rollouts) == 4 and (len(bad.requests), len(good.requests)) == (1, 1)
    assert client.counters.failures == {"timeout": 1}


@pytest.mark.parametrize(
    "fault", ["hang", "drip", "reset", "http_500", "html", "cut_json", "stale", "big_route"]
)
def test_a_fault_that_stays_ends_in_an_error_that_names_server_prompt_and_reason(fault, clock):
    with FakeServer(fault) as server:
        client = make_client(server.url, max_retries=1)
        client.clock, server.late = (
            clock,
            lambda: clock.advance(client.cfg.request_timeout_seconds + RETURN_SECONDS),
        )
        with pytest.raises(RolloutError) as caught:
            generate(client)
    assert (
        server.url in str(caught.value)
        and "'q1'" in str(caught.value)
        and "max_retries = 1" in str(caught.value)
    )
    assert len(server.requests) == 2
    assert client.counters.failures.total() + client.counters.dropped.total() == 2


@pytest.mark.parametrize(
    ("fault", "message"), [("http_400", "input too long"), ("http_401", "rollout.api_key_env")]
)
def test_a_refused_request_stops_immediately_with_the_servers_message(fault, message):
    with FakeServer(fault) as server:
        with pytest.raises(RolloutError, match=message) as caught:
            generate(make_client(server.url))
    assert len(server.requests) == 1 and server.url in str(caught.value)
    assert str(caught.value).endswith("}" if fault == "http_400" else "rollout.api_key_env")


REASONS = {
    "stale": "stale_version",
    "mixed": "stale_version",
    "no_version": "stale_version",
    "odd_versions": "malformed",
    "other_id": "wrong_id",
    "no_id": "wrong_id",
    "no_meta": "malformed",
    "aborted": "aborted",
    "no_finish": "malformed",
    "not_object": "malformed",
    "nan_logprob": "bad_logprobs",
    "null_logprob": "bad_logprobs",
    "positive_logprob": "bad_logprobs",
    "few_logprobs": "bad_logprobs",
    "other_logprobs": "bad_logprobs",
    "no_logprobs": "bad_logprobs",
    "false_logprob": "bad_logprobs",
    "true_id": "bad_tokens",
    "other_prompt": "bad_tokens",
    "big_id": "bad_tokens",
    "huge_id": "bad_tokens",
    "float_ids": "bad_tokens",
    "ragged_ids": "bad_tokens",
    "no_tokens": "bad_tokens",
    "too_long": "bad_tokens",
    "no_routes": "routes_missing",
    "null_routes": "routes_missing",
    "list_routes": "routes_missing",
    "empty_routes": "routes_wrong_size",
    "star_in_routes": "routes_not_base64",
    "newline_in_routes": "routes_not_base64",
    "accent_in_routes": "routes_not_base64",
    "half_routes": "routes_wrong_size",
    "thin_routes": "routes_wrong_size",
    "narrow_routes": "routes_wrong_size",
    "minus_routes": "routes_never_written",
    "zero_layer": "routes_duplicate",
    "zero_row_of_a_layer": "routes_duplicate",
    "minus_row_of_a_layer": "routes_out_of_range",
    "duplicate_route": "routes_duplicate",
    "wrapping_route": "routes_out_of_range",
    "short_routes": "routes_wrong_size",
    "long_routes": "routes_wrong_size",
    "wide_routes": "routes_wrong_size",
    "text_routes": "routes_wrong_size",
    "big_endian_routes": "routes_out_of_range",
    "float_routes": "routes_out_of_range",
    "big_route": "routes_out_of_range",
    "negative_route": "routes_out_of_range",
    "zero_routes": "routes_never_written",
}


@pytest.mark.parametrize("fault", SAMPLE_FAULTS)
def test_only_the_unusable_sample_of_a_group_is_requested_again(fault):
    with FakeServer(fault, "ok") as server:
        client = make_client(server.url)
        (group,) = generate(client)
    assert [len(request["input_ids"]) for request in server.requests] == [4, 1]
    assert dict(client.counters.dropped) == {REASONS[fault]: 1}
    assert client.counters.samples == 4
    assert [rollout.id for rollout in group.rollouts] == [f"q1/{k}" for k in range(4)]
    assert all((rollout.policy_versions == VERSION).all() for rollout in group.rollouts)


@pytest.mark.parametrize("fault", GAPS)
def test_a_missing_route_is_kept_or_drops_the_sample(fault):
    with FakeServer(fault, "ok") as server:
        (group,) = generate(make_client(server.url))
    assert (
        np.flatnonzero(group.rollouts[0].missing_routes).tolist() == [4]
        and len(server.requests) == 1
    )
    assert all(rollout.missing_routes is None for rollout in group.rollouts[1:])
    with FakeServer(fault, "ok") as server:
        client = RolloutClient(
            [server.url],
            RolloutConfig(),
            SampleRules(SPEC, want_routes=True, drop_missing_routes=True),
        )
        (group,) = generate(client)
    assert dict(client.counters.dropped) == {"routes_gap": 1} and len(server.requests) == 2
    assert all(rollout.missing_routes is None for rollout in group.rollouts)


def test_missing_routes_in_every_answer_spend_the_retries_and_are_named():
    with FakeServer("gap_of_zeros") as server:
        cfg = RolloutConfig(max_retries=1)
        with pytest.raises(
            RolloutError, match=r"max_retries = 1.*rollout q1/0: 1 of 7 rows hold no route"
        ):
            generate(
                RolloutClient(
                    [server.url], cfg, SampleRules(SPEC, want_routes=True, drop_missing_routes=True)
                )
            )


def test_a_malformed_route_names_rollout_layer_row_value_and_rule():
    with FakeServer("big_route") as server:
        with pytest.raises(
            RolloutError,
            match=r"rollout q1/0: .*out_of_range at layer 2, row 1: 8; rule: 0 <= id < 8",
        ):
            generate(make_client(server.url, max_retries=0))


@pytest.mark.parametrize("want_routes", [False, True])
def test_a_retracted_response_is_kept_as_it_is_and_counted(want_routes):
    with FakeServer("retracted") as server:
        client = make_client(server.url, want_routes=want_routes)
        (group,) = generate(client)
    assert (
        len(server.requests) == 1
        and client.counters.dropped.total() == client.counters.redrawn_samples == 0
    )
    totals = client.counters.totals()
    assert (
        totals["rollout/retracted_samples_total"],
        totals["rollout/retracted_tokens_total"],
    ) == (1, 5)
    rollout = group.rollouts[0]
    honest = honest_sample(server.requests[0], [3, 4, 5], f"{server.requests[0]['rid']}_0")
    assert rollout.tokens[3:].tolist() == honest["output_ids"] and rollout.missing_routes is None
    assert rollout.rollout_logprobs.tolist() == [
        np.float32(p) for p, _, _ in honest["meta_info"]["output_token_logprobs"]
    ]
    assert (rollout.routed_experts is not None) == want_routes
    if want_routes:
        rows = np.frombuffer(
            base64.b64decode(honest["meta_info"]["routed_experts"]), "<i4"
        ).reshape(-1, 3, 2)
        assert np.array_equal(rollout.routed_experts, rows)


def test_a_dead_server_is_replaced_by_another_and_named_when_there_is_none():
    with FakeServer("ok") as dead:
        pass
    with FakeServer("ok") as server:
        client = make_client(dead.url, server.url)
        groups = generate(client, [PROMPT] * 6)
    assert len(groups) == 6 and client.counters.failures["connection"] >= 1
    with pytest.raises(RolloutError, match="connection") as caught:
        generate(make_client(dead.url))
    assert dead.url in str(caught.value)


def test_load_is_spread_over_the_servers():
    with FakeServer("ok") as one, FakeServer("ok") as two:
        generate(make_client(one.url, two.url), [PROMPT] * 10)
    assert len(one.requests) >= 3 and len(two.requests) >= 3


@pytest.mark.parametrize("token_ids", [(3, 64), (-1, 3), ()])
def test_a_prompt_outside_the_vocabulary_is_never_sent(token_ids):
    with FakeServer("ok") as server:
        with pytest.raises(ValueError, match="prompt 'bad'"):
            generate(
                make_client(server.url),
                [PROMPT, Prompt(id="bad", text="", token_ids=token_ids, label="")],
            )
    assert server.requests == []


def test_the_api_key_is_sent(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sesame")
    with FakeServer("ok") as server:
        cfg = RolloutConfig(api_key_env="SERVER_KEY")
        generate(RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True)))
    assert server.requests[0]["headers"]["Authorization"] == "Bearer sesame"
