"""Over-sampling, aborts and identity of samples: what is not needed is aborted and counted, and
nothing is used twice.
"""

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.counters import RolloutCounters, class_of
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from tests.fake_server import SPEC, VERSION, FakeServer, wait_for
from tests.faults.samples import recorded_samples

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(6)]


def make_client(*urls: str, **settings) -> RolloutClient:
    return RolloutClient(urls, RolloutConfig(**settings), SampleRules(SPEC, want_routes=True))


def generate(client: RolloutClient, prompts=tuple(PROMPTS), group_size: int = 2, **overrides):
    settings = {
        "temperature": 1.0,
        "max_tokens": 8,
        "stop_token_ids": (1,),
        "policy_version": VERSION,
    }
    return client.generate(prompts, group_size, **(settings | overrides))


def test_the_groups_complete_first_are_kept_and_the_others_aborted_and_counted():
    with FakeServer("slow", "ok", "slow", "ok") as server:
        client = make_client(server.url)
        groups = generate(client, keep=4)
        asked = [f"{request['rid']}_{k}" for request in server.requests for k in range(2)]
        slow = [name for name in asked if name not in server.served]
        assert wait_for(lambda: sorted(server.aborted) == sorted(slow), 5)
    assert len(groups) == 4 and len(slow) == 4
    ids = [group.prompt.id for group in groups]
    assert ids == sorted(ids), "in the order of the prompts"
    counters = client.counters
    assert (counters.cancelled_groups, counters.cancelled_samples, counters.cancelled_tokens) == (
        2,
        4,
        8,
    )
    assert (
        counters.dropped.total() == counters.retries == counters.aborts_failed == 0
        and counters.aborts == 2
    )
    stats = client.take_stats()
    assert stats.tokens == 4 * 2 * 5 and stats.seconds > 0 and len(stats.request_seconds) == 6
    assert stats.prompt_tokens == 12 * 3 and stats.cached_tokens == 12 * 2, (
        "the fake server finds all but the last"
    )
    assert generate(client, keep=0) == [] and client.take_stats().tokens == 0
    assert counters.cancelled_groups == 2, "nothing was to be sampled"


def test_groups_that_wait_for_a_slot_are_never_requested():
    with FakeServer("ok") as server:
        client = make_client(server.url, max_concurrency=1)
        for call in (1, 2):
            assert [group.prompt.id for group in generate(client, keep=2)] == ["q0", "q1"]
            assert len(server.requests) <= 3 * call and client.counters.cancelled_groups == 4 * call


def test_an_impossible_keep_is_refused():
    with pytest.raises(ValueError, match="keep = 7 of 6 groups"):
        generate(make_client("http://127.0.0.1:1"), keep=7)


def test_a_request_past_its_deadline_is_aborted_on_its_server(clock):
    with FakeServer("hang", "ok") as server:
        client = make_client(server.url, request_timeout_seconds=5.0)
        client.clock, server.late = clock, lambda: clock.advance(5.0 + 0.5)
        generate(client, PROMPTS[:1])
        first = server.requests[0]["rid"]
        assert wait_for(lambda: sorted(server.aborted) == [f"{first}_0", f"{first}_1"], 60)
    assert client.counters.aborts == 1 and client.counters.failures["timeout"] == 1


def test_an_answer_that_pauses_is_dropped_long_before_its_total_deadline():
    with FakeServer("hang@mid_body", "ok") as server:
        client = make_client(server.url, idle_timeout_seconds=2.0, request_timeout_seconds=300.0)
        generate(client, PROMPTS[:1])
        first = server.requests[0]["rid"]
        assert wait_for(lambda: sorted(server.aborted) == [f"{first}_0", f"{first}_1"], 60), (
            "it may still compute it"
        )
    assert dict(client.counters.failures) == {"timeout": 1} and client.counters.aborts == 1


@pytest.mark.parametrize(("answer", "usable"), [("reordered", 0), ("twice_the_first", 1)])
def test_a_sample_is_used_once_and_only_for_its_own_request(answer, usable):
    with FakeServer(answer, "ok") as server:
        client = make_client(server.url)
        (group,) = generate(client, PROMPTS[:1], group_size=3)
    assert dict(client.counters.dropped) == {"wrong_id": 3 - usable}
    assert len(server.requests[1]["input_ids"]) == 3 - usable
    assert len({tuple(rollout.tokens) for rollout in group.rollouts}) == 3


def test_no_two_requests_have_the_same_id():
    with FakeServer("stale", "ok") as server:
        for client in (make_client(server.url), make_client(server.url)):
            generate(client)
            generate(client)
        ids = [request["rid"] for request in server.requests]
    assert len(ids) == len(set(ids)) == 25


def test_a_server_that_keeps_failing_gets_no_requests():
    with FakeServer("http_500") as bad, FakeServer("ok") as good:
        client = make_client(bad.url, good.url, max_concurrency=1)
        # on a busy machine the others take longer than the circuit is open
        client.balancer.clock = lambda: 0.0
        generate(client, PROMPTS * 5)
    assert len(bad.requests) == 3 and client.counters.circuits_opened == 1
    assert client.counters.totals()["rollout/faults_http_total"] == 3


def test_one_bad_sample_of_many_is_not_a_failure_of_the_server():
    with FakeServer(*["other_id", "ok"] * 8) as server:
        client = make_client(server.url, max_concurrency=1)
        generate(client)
    assert client.counters.dropped["wrong_id"] == 6 and client.counters.circuits_opened == 0
    assert client.balancer.servers[0].failures == 0 and client.balancer.servers[0].tokens == 0


def test_spent_retries_name_every_server_that_was_tried():
    with FakeServer("stale") as one, FakeServer("html") as two:
        with pytest.raises(RolloutError) as caught:
            generate(make_client(one.url, two.url, max_retries=1), PROMPTS[:1], group_size=1)
    assert one.url in str(caught.value) and two.url in str(caught.value)


def test_a_server_can_serve_what_a_run_recorded(tmp_path):
    with FakeServer("ok") as server:
        groups = generate(make_client(server.url))
    Recorder(tmp_path, save_tensors=True).record(3, groups)
    with FakeServer("ok", source=recorded_samples(tmp_path, step=3)) as server:
        again = generate(make_client(server.url, max_concurrency=1))
    for before, after in zip(groups, again, strict=True):
        for old, new in zip(before.rollouts, after.rollouts, strict=True):
            assert (old.tokens == new.tokens).all() and old.routes_digest == new.routes_digest
            assert (old.rollout_logprobs == new.rollout_logprobs).all()


def test_every_reason_counts_in_one_class():
    counters = RolloutCounters()
    counters.failures.update(timeout=1, connection=2, http_503=3, bad_body=4)
    counters.dropped.update(
        stale_version=6, routes_wrong_size=7, aborted=8, wrong_id=9, bad_tokens=10
    )
    totals = counters.totals()
    classes = {name: n for name, n in totals.items() if "/faults_" in name}
    assert classes == {
        f"rollout/faults_{name}_total": count
        for name, count in dict(
            timeout=1, connection=2, http=3, body=4, stale=6, routes=7, aborted=8, sample=19
        ).items()
    }
    assert class_of("routes_gap") == "routes"
