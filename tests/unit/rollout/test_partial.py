"""Partial rollouts: however a response is cut short and continued, every token keeps what it was
sampled with.
"""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client import client as client_module
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.counters import drop_older
from megatron_rl.rollout.client.response import ended, join_parts
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from tests.fake_model import END, FakeModel, assert_fingerprints, logprob, route
from tests.fake_server import SPEC, FakeServer, wait_for
from tests.unit.rollout.parts import join_turns, part_of

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(4)]
P, N, M = 3, 4, 5


def forward(tokens: np.ndarray, given: int, version: int, reason="length") -> Rollout:
    """What a request with the first `given` tokens as input says of the others."""
    size = len(tokens)
    rows = np.stack([route(version, tokens[: j + 1]) for j in range(size - 1)]).astype(np.uint8)
    return Rollout(
        id="q/0",
        tokens=tokens,
        prompt_length=given,
        rollout_logprobs=np.array(
            [logprob(version, tokens[: i + 1]) for i in range(given, size)], np.float32
        ),
        routed_experts=rows,
        finish_reason=reason,
        policy_versions=np.full(size - given, version, np.int32),
    )


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(2, 60, P + N + M)


def test_every_token_keeps_what_it_was_sampled_with(tokens):
    prefix, more = forward(tokens[: P + N], P, 4, "abort"), forward(tokens, P + N, 7)
    joined = join_turns(prefix, more)
    assert (
        joined.policy_versions.tolist() == [4] * N + [7] * M
        and joined.policy_versions.dtype == np.int32
    )
    assert (joined.prompt_length, joined.response_length, joined.finish_reason) == (
        P,
        N + M,
        "length",
    )
    assert_fingerprints(joined)
    # the prefix's last token: never an input before the continuation, which sampled its successor
    seam = P + N - 1
    assert np.array_equal(joined.routed_experts[:seam], prefix.routed_experts)
    assert np.array_equal(joined.routed_experts[seam:], more.routed_experts[seam:])
    assert not np.array_equal(more.routed_experts[:seam], prefix.routed_experts), (
        "the test cannot tell them apart"
    )
    assert joined.routed_experts.transpose(1, 0, 2).flags.c_contiguous, "layer-major"
    third = join_turns(
        replace(joined, finish_reason="abort"), forward(np.append(tokens, 9), P + N + M, 8)
    )
    assert third.policy_versions.tolist() == [4] * N + [7] * M + [8]
    assert_fingerprints(third)


def test_missing_routes_stay_with_their_request(tokens):
    prefix, more = forward(tokens[: P + N], P, 4, "abort"), forward(tokens, P + N, 7)
    gaps = np.arange(P + N + M - 1) % 2 == 0
    joined = join_turns(prefix, replace(more, missing_routes=gaps))
    assert joined.missing_routes.tolist() == [False] * (P + N - 1) + gaps[P + N - 1 :].tolist()
    joined = join_turns(replace(prefix, missing_routes=gaps[: P + N - 1]), more)
    assert joined.missing_routes.tolist() == gaps[: P + N - 1].tolist() + [False] * M
    assert join_turns(prefix, more).missing_routes is None


def test_parts_of_different_responses_are_refused(tokens):
    prefix, more = forward(tokens[: P + N], P, 4, "abort"), forward(tokens, P + N, 7)
    other = tokens.copy()
    other[P + N - 1] += 1
    with pytest.raises(ValueError, match="rollout q/0: its continuation begins with another token"):
        join_turns(prefix, forward(other, P + N, 7))
    with pytest.raises(ValueError, match="begins with another token"):
        join_turns(prefix, forward(tokens, P + N - 1, 7))
    with pytest.raises(ValueError, match="continuation is of older weights"):
        join_turns(prefix, forward(tokens, P + N, 3))
    parts = prefix, part_of(more, P + N - 1)
    for damaged in range(2):
        mixed = list(parts)
        routes = np.roll(parts[damaged].routed_experts, 1, axis=0)
        mixed[damaged] = replace(parts[damaged], routed_experts=routes)
        with pytest.raises(ValueError, match="rollout q/0: digest of tokens and routed experts"):
            join_parts(*mixed)


def test_an_abort_that_comes_with_the_last_token_does_not_hide_the_end(tokens):
    cut = forward(tokens[: P + N], P, 4, "abort")
    assert ended(cut, (END,), N + 1).finish_reason == "abort"
    assert ended(cut, (END,), N).finish_reason == "length"
    assert ended(cut, (int(tokens[P + N - 1]),), N + 1).finish_reason == "stop"
    assert ended(replace(cut, finish_reason="stop"), (), 1).finish_reason == "stop"


# Through the client -------------------------------------------------------------------------------


def make_client(server: FakeServer, **settings) -> RolloutClient:
    cfg = RolloutConfig(over_sample=0.5, partial="resume", max_staleness=1, **settings)
    return RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True))


def fill(client, groups, version, keep=None, stop=(END,)) -> list[Group]:
    return client.fill(groups, Sampling(1.0, 6, stop, version, ""), keep=keep)


def test_a_response_cut_short_by_an_abort_continues_under_the_next_weights():
    model = FakeModel(version=3)
    groups = [Group(prompt, 2) for prompt in PROMPTS]
    with FakeServer("slow", "ok", "slow", "ok", source=model) as server:
        client = make_client(server)
        first = fill(client, groups, 3, keep=2)
        left = [group for group in groups if group not in first]
        assert len(first) == 2 and all(group.is_complete for group in first)
        assert [sorted(group.prefixes) for group in left] == [[0, 1]] * 2 and not any(
            group.rollouts for group in left
        )
        model.version = 5
        new = [Group(replace(prompt, id=f"{prompt.id}b"), 2) for prompt in PROMPTS[:1]]
        assert fill(client, left + new, 5) == left + new
    assert client.counters.cut_samples == client.counters.resumed_samples == 4
    assert (
        client.counters.cancelled_groups
        == client.counters.lost_samples
        == client.counters.dropped.total()
        == 0
    )
    for group in first + left + new:
        for rollout in group.rollout_group().rollouts:
            spans = [[3, 2], [5, 4]] if group in left else [[3 if group in first else 5, 6]]
            assert rollout.policy_versions.tolist() == [
                version for version, n in spans for _ in range(n)
            ]
            assert rollout.is_mixed == (group in left) and rollout.oldest_version == spans[0][0]
            assert (
                tuple(rollout.tokens[:3]) == group.prompt.token_ids
                and rollout.finish_reason == "length"
            )
            assert_fingerprints(rollout)
    resumed = [
        request for request in server.requests[4:] if isinstance(request["sampling_params"], list)
    ]
    assert len(resumed) == 2
    for request in resumed:
        assert [len(ids) for ids in request["input_ids"]] == [5, 5]
        assert [params["max_new_tokens"] for params in request["sampling_params"]] == [4, 4]


def test_a_group_continues_sample_by_sample():
    """One complete, one cut, one not started."""
    model = FakeModel(version=3)
    prompt = PROMPTS[0]
    with FakeServer("slow", "ok", source=model) as server:
        client = make_client(server)
        groups = [Group(prompt, 1), Group(PROMPTS[1], 1)]
        (complete,) = fill(client, groups, 3, keep=1)
        (cut,) = [group for group in groups if group is not complete]
        group = Group(cut.prompt, 3, prefixes={1: cut.prefixes[0]})
        fill(client, [group], 3)
        (request,) = server.requests[2:]
        assert [len(ids) for ids in request["input_ids"]] == [3, 5, 3]
        assert [params["max_new_tokens"] for params in request["sampling_params"]] == [6, 4, 6]
    assert len({rollout.tokens.tobytes() for rollout in group.rollout_group().rollouts}) == 3
    for rollout in group.rollout_group().rollouts:
        assert_fingerprints(rollout)


def test_a_group_that_is_due_is_waited_for_and_what_is_too_old_is_dropped_and_sampled_again():
    model = FakeModel(version=3)
    groups = [Group(prompt, 2) for prompt in PROMPTS[:2]]
    with FakeServer("slow", "ok", "ok", source=model) as server:
        client = make_client(server)
        (complete,) = fill(client, groups, 3, keep=1)
        (left,) = [group for group in groups if group is not complete]
        drop_older([left], 3, client.counters)
        assert (
            client.counters.stale_samples == 0
            and left.has_oldest_version(3)
            and not left.has_oldest_version(2)
        )
        drop_older([left], 4, client.counters)
        assert (client.counters.stale_samples, client.counters.stale_tokens) == (
            2,
            4,
        ) and not left.has_oldest_version(3)
        left.is_due = True
        model.version = 4
        server.script = ["ok"]
        others = [Group(prompt, 2) for prompt in PROMPTS[2:]]
        kept = fill(client, [*others, left], 4, keep=1)
    assert kept == [left]
    for rollout in left.rollout_group().rollouts:
        assert rollout.oldest_version == 4
        assert_fingerprints(rollout)


def test_a_prefix_that_is_too_old_is_not_continued():
    """As after a failed call of servers that kept their requests: the restart has to drop it."""
    model = FakeModel(version=3)
    groups = [Group(prompt, 2) for prompt in PROMPTS[:2]]
    with FakeServer("slow", "ok", "ok", source=model) as server:
        client = make_client(server)
        (complete,) = fill(client, groups, 3, keep=1)
        (left,) = [group for group in groups if group is not complete]
        assert len(left.prefixes) == 2
        model.version, client.oldest_version, server.script, before = (
            4,
            4,
            ["ok"],
            len(server.requests),
        )
        fill(client, [left], 4)
        assert {int(version) for r in left.rollouts.values() for version in r.policy_versions} == {
            4
        }
        assert client.counters.stale_samples == 2
        (request,) = server.requests[before:]
        assert request["input_ids"] == [list(left.prompt.token_ids)] * 2, (
            "it was continued, to be thrown away"
        )


def test_a_damaged_continuation_is_dropped_and_its_prefix_is_kept():
    model = FakeModel(version=3)
    with FakeServer("slow", "ok", source=model) as server:
        client = make_client(server)
        groups = [Group(prompt, 1) for prompt in PROMPTS[:2]]
        (complete,) = fill(client, groups, 3, keep=1)
        (left,) = [group for group in groups if group is not complete]
        before = left.prefixes[0]
        model.version, server.script = 4, ["nan_logprob", "short_routes", "ok"]
        fill(client, [left], 4)
    assert client.counters.dropped == {"bad_logprobs": 1, "routes_wrong_size": 1}
    (rollout,) = left.rollout_group().rollouts
    assert rollout.tokens[:5].tolist() == before.tokens.tolist() and not left.prefixes
    assert_fingerprints(rollout)


def test_samples_aborted_in_the_queue_leave_no_trace():
    class Queued(FakeServer):
        def until_aborted(self, samples):
            empty = {"output_ids": [], "text": ""}
            finish = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
            return [
                empty | {"meta_info": {"id": s["meta_info"]["id"]} | finish}
                for s in super().until_aborted(samples)
            ]

    with Queued("slow", "ok", source=FakeModel(version=3)) as server:
        client = make_client(server)
        groups = [Group(prompt, 2) for prompt in PROMPTS[:2]]
        (complete,) = fill(client, groups, 3, keep=1)
    (left,) = [group for group in groups if group is not complete]
    assert not left.rollouts and not left.prefixes
    assert client.counters.dropped.total() == client.counters.cut_samples == 0


def test_a_response_that_ended_as_it_was_aborted_is_complete_and_not_requested_again():
    with FakeServer("slow", "ok", source=FakeModel(version=3)) as server:
        client = make_client(server)
        groups = [Group(prompt, 1) for prompt in PROMPTS[:2]]
        (complete,) = fill(client, groups, 3, keep=1, stop=tuple(range(SPEC.vocab_size)))
        (left,) = [group for group in groups if group is not complete]
        (rollout,) = left.rollout_group().rollouts
        assert (
            rollout.finish_reason == "stop" and rollout.response_length == 2 and not left.prefixes
        )
        assert (
            fill(client, [Group(PROMPTS[2], 1), left], 4, keep=1) == [left]
            and len(server.requests) <= 3
        )
    assert_fingerprints(rollout)


def test_an_abort_that_overtakes_its_request_is_sent_again():
    class Forgetful(FakeServer):
        def route(self, handler, body) -> None:
            super().route(handler, body)
            if handler.path == "/abort_request" and body["rid"] not in heard:
                heard.add(body["rid"])
                self.aborted.remove(body["rid"])

    heard: set[str] = set()
    with Forgetful("slow", "ok", source=FakeModel(version=3)) as server:
        client = make_client(server)
        groups = [Group(prompt, 1) for prompt in PROMPTS[:2]]
        (complete,) = fill(client, groups, 3, keep=1)
    (left,) = [group for group in groups if group is not complete]
    assert heard and list(left.prefixes) == [0] and client.counters.lost_samples == 0


def test_a_continuation_that_a_server_does_not_return_is_counted_as_lost_and_its_prefix_is_kept(
    monkeypatch,
):
    monkeypatch.setattr(client_module, "RETURN_SECONDS", 0.5)
    model = FakeModel(version=3)
    with FakeServer("slow", "ok", source=model) as server:
        client = make_client(server)
        groups = [Group(prompt, 1) for prompt in PROMPTS[:2]]
        (complete,) = fill(client, groups, 3, keep=1)
        (left,) = [group for group in groups if group is not complete]
        before = left.prefixes[0]
        server.behave = lambda handler, behaviour, body: FakeServer.behave(
            server, handler, "hang" if len(body["input_ids"][0]) > 3 else "ok", body
        )
        new = Group(PROMPTS[2], 1)
        assert fill(client, [left, new], 3, keep=1) == [new]
    assert left.prefixes == {0: before} and not left.rollouts
    assert client.counters.lost_samples == 1 and client.counters.dropped.total() == 0


def test_a_response_cut_short_by_its_deadline_is_continued_and_not_sampled_again(clock):
    """Sampled again it would be shorter: what takes longest is what the deadline meets."""
    with FakeServer("slow", "ok", source=FakeModel(version=3)) as server:
        client = RolloutClient(
            [server.url],
            RolloutConfig(request_timeout_seconds=5.0),
            SampleRules(SPEC, want_routes=True),
        )
        client.clock, server.late = clock, lambda: clock.advance(5.0)
        (group,) = client.generate(
            [PROMPTS[0]], 2, temperature=1.0, max_tokens=6, stop_token_ids=(), policy_version=3
        )
    _, second = server.requests
    given = second["input_ids"]
    assert [len(ids) for ids in given] == [5, 5] and [
        p["max_new_tokens"] for p in second["sampling_params"]
    ] == [4, 4]
    assert second["routed_experts_start_len"] == 4, "the last known token was never an input"
    assert [rollout.tokens[:5].tolist() for rollout in group.rollouts] == given
    for rollout in group.rollouts:
        assert rollout.policy_versions.tolist() == [3] * 6
        assert_fingerprints(rollout)
    counters = client.counters
    assert (counters.failures, counters.dropped.total(), counters.redrawn_samples) == (
        {"timeout": 1},
        0,
        0,
    )
    assert counters.cut_samples == counters.resumed_samples == 2 and counters.circuits_opened == 0


def test_a_signal_keeps_the_prefix_of_every_response():
    """A run that is resumed continues it: complete responses beside others sampled again would
    favour short ones.
    """
    with FakeServer("slow", "ok", source=FakeModel(version=3)) as server:
        client = RolloutClient([server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True))
        groups = [Group(prompt, 2) for prompt in PROMPTS[:2]]

        def sample() -> None:
            with pytest.raises(asyncio.CancelledError):
                fill(client, groups, 3)

        waiting = threading.Thread(target=sample)
        waiting.start()
        assert wait_for(lambda: any(group.is_complete for group in groups), 10)
        client.stop(keep_parts=True)
        waiting.join()
        (cut,) = [group for group in groups if not group.is_complete]
        assert sorted(cut.prefixes) == [0, 1] and client.counters.redrawn_samples == 0
        again = RolloutClient([server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True))
        fill(again, groups, 3)
    for rollout in (rollout for group in groups for rollout in group.rollout_group().rollouts):
        assert rollout.response_length == 6
        assert_fingerprints(rollout)
    assert [len(ids) for ids in server.requests[-1]["input_ids"]] == [5, 5]


def test_when_one_group_fails_permanently_the_others_keep_their_prefixes():
    """As when a server dies: what is missing is sampled from the others, and continues."""
    with FakeServer("slow", "http_400", source=FakeModel(version=3)) as server:
        client = RolloutClient([server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True))
        groups = [Group(prompt, 2) for prompt in PROMPTS[:2]]
        with pytest.raises(RolloutError, match="input too long"):
            fill(client, groups, 3)
        server.script = ["ok"]
        fill(client, groups, 3)
    assert client.counters.resumed_samples == 2
    for rollout in (rollout for group in groups for rollout in group.rollout_group().rollouts):
        assert_fingerprints(rollout)
