"""What a client keeps between requests: circuits, tokens that end responses, versions that are too
old, servers' caches.
"""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import group_sampler, request
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.load_balancer import COOLDOWN_SECONDS, FAILURES_TO_OPEN
from megatron_rl.rollout.client.request import MAX_RETRY_SECONDS, RETRY_SECONDS
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from tests.fake_model import END, FakeModel, answer, assert_fingerprints
from tests.fake_server import SPEC, FakeServer, send

PROMPTS = [Prompt(f"q{i}", "", (3, 4, 5 + i), "") for i in range(8)]


def client_of(*servers: FakeServer, clock=None, **settings) -> RolloutClient:
    cfg = RolloutConfig(over_sample=0.5, partial="resume", max_staleness=1, **settings)
    client = RolloutClient(
        [server.url for server in servers], cfg, SampleRules(SPEC, want_routes=True)
    )
    client.balancer.clock = clock or client.balancer.clock
    return client


def fill(client, groups, version=3, *, keep=None, stop=(END,)) -> list[Group]:
    return client.fill(groups, Sampling(1.0, 6, stop, version), keep=keep)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_an_answer_that_became_too_old_by_one_version_is_dropped_once_with_its_prefix(has_prefix):
    """While it is in flight the servers get weights 4, and the oldest that may be trained on become
    theirs.
    """
    model = FakeModel(version=3)
    with FakeServer("slow" if has_prefix else "ok", "ok", source=model) as server:
        client = client_of(server, max_retries=0)
        group, other = Group(PROMPTS[0], 2), Group(PROMPTS[1], 2)
        if has_prefix:
            fill(client, [group, other], keep=1)
            assert [[*each.prefixes] for each in (group, other)].count([0, 1]) == 1
            group = other if other.prefixes else group
        asked = len(server.requests)

        def sample(body, given, sample_id):
            sampled = model(body, given, sample_id)
            if sample_id.endswith("_1"):  # the last of the request: both are of weights 3
                model.version = client.newest_version = client.oldest_version = 4
            return sampled

        server.source = sample
        fill(client, [group])
    assert [len(ids) for body in server.requests[asked:] for ids in body["input_ids"]] == [
        5 if has_prefix else 3
    ] * 2 + [3] * 2
    for rollout in group.rollout_group().rollouts:
        assert rollout.policy_versions.tolist() == [4] * 6
        assert_fingerprints(rollout)
    counters = client.counters
    assert (counters.stale_samples, counters.stale_tokens, counters.redrawn_samples) == (
        2,
        12,
        2,
    ), "each counted once"


def test_a_server_that_answers_again_is_tried_by_one_request_and_used_again(clock):
    """Its circuit opens after failures in a row, and is half open after a time: nothing of them is
    outstanding then.
    """
    faults = ["http_503", "reset", "html"]
    assert len(faults) == FAILURES_TO_OPEN
    with FakeServer(*faults, "ok") as one, FakeServer("ok") as other:
        client = client_of(one, other, clock=clock, max_concurrency=1)
        fill(client, [Group(prompt, 2) for prompt in PROMPTS], version=7)
        assert len(one.requests) == 3 and client.counters.circuits_opened == 1
        assert client.balancer.waiting_for() == "" and {
            server.tokens for server in client.balancer.servers
        } == {0}
        clock.advance(COOLDOWN_SECONDS)
        fill(client, [Group(prompt, 2) for prompt in PROMPTS], version=7)
    assert len(one.requests) == 3 + len(PROMPTS), "the first of two that nothing is asked of"
    assert not client.balancer.servers[0].is_open


def test_answers_without_a_usable_sample_open_the_circuit():
    with FakeServer("reordered") as one, FakeServer("ok") as other:
        client = client_of(one, other, clock=lambda: 0.0, max_concurrency=1)
        fill(client, [Group(prompt, 2) for prompt in PROMPTS], version=7)
    assert len(one.requests) == FAILURES_TO_OPEN and client.counters.circuits_opened == 1


def test_a_response_that_is_cut_at_a_token_that_ends_responses_is_complete():
    """The checkpoint's own end tokens are in no setting: the client learns them from responses that
    end.
    """
    own_end = 9

    def source(body, given, sample_id):
        return answer(
            3,
            given,
            np.array([7, own_end, 6, own_end]),
            sample_id,
            {"type": "stop", "matched": own_end},
        )

    with FakeServer("ok", source=source) as server:
        client = client_of(server)
        fill(client, [Group(PROMPTS[0], 1)])
        server.script = ["slow", "ok"]
        groups = [Group(prompt, 1) for prompt in PROMPTS[1:3]]
        fill(client, groups, keep=1)
    rollouts = [rollout for group in groups for rollout in group.rollout_group().rollouts]
    assert sorted(rollout.tokens[3:].tolist() for rollout in rollouts) == [
        [7, own_end],
        [7, own_end, 6, own_end],
    ]
    assert {rollout.finish_reason for rollout in rollouts} == {
        "stop"
    } and client.counters.cut_samples == 0


def test_groups_that_a_later_call_continues_are_spread_over_the_servers():
    """Caches were flushed since: the server that was asked before has nothing of them."""
    with FakeServer("ok") as one, FakeServer("ok") as other:
        client = client_of(one, other)
        fill(client, [Group(prompt, 2, server=other.url) for prompt in PROMPTS], version=7)
    assert len(one.requests) >= 3 and len(other.requests) >= 3


def test_no_variable_of_the_environment_comes_between_client_and_servers(monkeypatch):
    """A proxy would see prompts, weights' names and keys; certificates are those that come with the
    package.
    """
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    with FakeServer("ok") as server:
        client = client_of(server, max_retries=0)
        group = Group(PROMPTS[0], 1)
        assert fill(client, [group], version=7) == [group] and client.counters.failures.total() == 0


def test_pauses_before_a_request_is_repeated_double_up_to_a_limit_and_differ(monkeypatch):
    """Else replicas that a server turned away would all come back together."""
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(request, "RETRY_SECONDS", RETRY_SECONDS)
    monkeypatch.setattr(
        group_sampler, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
    )
    with FakeServer("http_429") as server:
        client = client_of(server, max_retries=9)
        with pytest.raises(RolloutError, match="max_retries = 9"):
            fill(client, [Group(PROMPTS[0], 1)])
    least = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert all(low <= pause <= low + 0.1 for low, pause in zip(least, pauses, strict=True))
    assert len({pause - low for low, pause in zip(least, pauses, strict=True)}) == 9
    assert client.counters.retries == 9 and len(server.requests) == 10
    for retry in (1_025, 100_000):  # of a run that rides out an outage: 2**1024 is no float
        pause = request.retry_pause(retry)
        assert MAX_RETRY_SECONDS <= pause <= MAX_RETRY_SECONDS + RETRY_SECONDS


def test_a_server_that_samples_no_token_before_any_deadline_gets_no_more_requests():
    """Its scheduler is stuck: it answers each abort with empty samples."""
    with FakeServer("growing") as stuck, FakeServer("ok") as good:
        stuck.source, stuck.most_tokens, stuck.step_seconds = FakeModel(version=3), 0, 0.005
        good.source = stuck.source
        client = client_of(
            stuck, good, max_retries=3, request_timeout_seconds=0.5, idle_timeout_seconds=5.0
        )
        for number in range(FAILURES_TO_OPEN + 3):
            fill(client, [Group(PROMPTS[number], 2)])
        assert len(stuck.requests) == FAILURES_TO_OPEN
    assert client.counters.circuits_opened == 1
    assert client.counters.failures == {"timeout": FAILURES_TO_OPEN}


def test_seconds_and_outstanding_tokens_of_a_call_are_those_of_its_requests():
    """Whenever they are taken: here in the middle, and at the end."""
    taken, waits, loads = [], 0.2, []

    def source(body, given, sample_id):
        time.sleep(waits)
        taken.append(client.take_stats())
        loads.append([(server.requests, server.tokens) for server in client.balancer.servers])
        return model(body, given, sample_id)

    model = FakeModel(version=3)
    with FakeServer("ok", source=source) as server:
        client, started = client_of(server), time.monotonic()
        fill(client, [Group(PROMPTS[0], 2), Group(PROMPTS[1], 2)])
        elapsed = time.monotonic() - started
    last = client.take_stats()
    seconds = [stats.seconds for stats in (*taken, last)]
    assert (
        2 * waits <= sum(seconds) <= elapsed
        and min(seconds[:2]) > 0
        and client.take_stats().seconds == 0
    )
    requests = [each for stats in (*taken, last) for each in stats.request_seconds]
    assert len(requests) == 2 and all(2 * waits <= each <= elapsed for each in requests)
    assert sum(stats.tokens for stats in (*taken, last)) == 2 * 2 * 6
    assert (2, 2 * 2 * (3 + 6)) in [load for (load,) in loads]


def test_an_abort_that_a_server_refuses_is_counted():
    class Refusing(FakeServer):
        def route(self, handler, body) -> None:
            if handler.path != "/abort_request":
                super().route(handler, body)
            elif body["rid"].endswith("_1"):
                send(handler, 500, b"")
            else:
                send(handler, 200, b"")

    with Refusing("slow", "ok", source=FakeModel(version=3)) as server:
        server.patience = 0.3
        client = client_of(server)
        fill(client, [Group(prompt, 2) for prompt in PROMPTS[:2]], keep=1)
    assert client.counters.aborts_failed == client.counters.aborts > 0, "of one sample of two"
