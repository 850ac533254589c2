"""rollout.weight_update = in_place over a fake server: requests live through weight syncs, and each
token names its version.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config import ConfigError, RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import call
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.load_balancer import FAILURES_TO_OPEN
from megatron_rl.rollout.client.request import STOP_SECONDS
from megatron_rl.rollout.client.response import ExpectedSample, parse_sample
from megatron_rl.rollout.client.sample_fields import SampleDropped, parse_versions
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.server.process import server_command
from megatron_rl.rollout.server.server_info import ServerError, check_in_place
from megatron_rl.weights.sync.push import WeightPushError
from tests.fake_model import FakeModel, assert_fingerprints, mixed_answer
from tests.fake_server import SPEC, FakeServer, wait_for
from tests.sampling_loop import GROUP, PER_STEP, ages, config, training
from tests.unit.rollout.test_server_info import GOOD

IN_PLACE = {"max_staleness": 3, "weight_update": "in_place"}


pytestmark = pytest.mark.usefixtures("one_rank")


def growing(server, first: int, most: int) -> None:
    """Prompts from number `first` on are sampled token by token, at first `most` tokens."""
    server.is_slow, server.slowness, server.most_tokens = (
        (lambda number: number >= first),
        "growing",
        most,
    )


def wait_for_tokens(server, requests: int) -> None:
    """Until so many requests have as many tokens as they may."""
    assert wait_for(lambda: [*server.progress.values()].count(server.most_tokens) == requests, 30)


def wait_for_requests(server, number: int) -> None:
    assert wait_for(lambda: len(server.requests) == number, 30)


def test_a_weight_sync_interrupts_no_request():
    with training("ok", **IN_PLACE) as (trainer, server):
        growing(server, PER_STEP, most=3)
        trainer.scheduler.take(0, 0)
        wait_for_tokens(server, 3 * PER_STEP)
        trainer.push(1)
        assert server.pauses == ["in_place"] and trainer.inference.pending is not None
        trainer.scheduler.step_done()
        # what is requested from now on is never complete
        server.most_tokens, trainer.model.length = 6, 7
        sampled = trainer.scheduler.take(1, 1)
        assert server.aborted == []
        rollouts = [rollout for group in sampled.groups for rollout in group.rollouts]
        assert all(rollout.policy_versions.tolist() == [0] * 3 + [1] * 3 for rollout in rollouts)
        for rollout in rollouts:
            assert_fingerprints(rollout)
        counters = trainer.inference.client.counters
        assert counters.cut_samples == counters.stale_samples == counters.redrawn_samples == 0


def test_requests_find_entries_of_the_prefix_cache_of_their_own_version_only():
    with training("ok", **IN_PLACE) as (trainer, server):
        for step in range(3):
            trainer.scheduler.take(step, step)
            wait_for_requests(server, (4 + step) * PER_STEP)  # those of the next version come later
            trainer.push(step + 1)
            trainer.scheduler.step_done()
        keys = [request["extra_key"] for request in server.requests]
        assert sorted(set(keys)) == ["0", "1", "2"] and keys == sorted(keys)
        assert keys.count("0") == 4 * PER_STEP, "the first queue"
    with training("ok", max_staleness=3, weight_update="abort") as (trainer, server):
        trainer.step(0)
        assert not any("extra_key" in request for request in server.requests), (
            "its caches are flushed"
        )


def test_a_response_that_would_be_too_old_is_aborted_and_sampled_again():
    """k = 1: what the weights 0 began must be trained on by step 1.

    Step 2 does not wait for it: it begins again.
    """
    with training("ok", max_staleness=1, weight_update="in_place") as (trainer, server):
        growing(server, 0, most=1)
        server.is_slow = lambda number: number in (2, 3)  # they do not end by themselves
        trainer.scheduler.take(0, 0)
        wait_for_tokens(server, PER_STEP)  # before the push: of weights 0
        trainer.push(1)
        trainer.scheduler.step_done()
        first = {f"{rid}_{index}" for rid in server.progress for index in range(GROUP)}
        assert server.aborted == [], "weights 0 may still be trained on in step 1"
        trainer.push(2)  # as if step 1 had taken others
        server.is_slow = lambda number: False
        sampled = [trainer.scheduler.take(2, 2)]
        assert wait_for(lambda: all(group.is_complete for group in trainer.scheduler.groups), 30), (
            "due in the next step"
        )
        trainer.push(3)
        trainer.scheduler.step_done()
        sampled.append(trainer.step(3))
        assert first <= set(server.aborted)
        assert ages(sampled[0], 2) == {0} and ages(sampled[1], 3) <= {0, 1}
        trained = {group.prompt.id for each in sampled for group in each.groups}
        assert trained == {"2", "3", "4", "5"}
        for group in (group for each in sampled for group in each.groups):
            for rollout in group.rollouts:
                assert_fingerprints(rollout)
        counters = trainer.inference.client.counters
        assert counters.failures.total() == counters.dropped.total() == counters.lost_samples == 0


def test_complete_responses_that_are_too_old_are_sampled_again():
    """Those that no step took in time: here all that was sampled ahead is complete when the weights
    change.
    """
    with training("ok", max_staleness=1, weight_update="in_place") as (trainer, _):
        scheduler, counters = trainer.scheduler, trainer.inference.client.counters
        scheduler.take(0, 0)
        assert wait_for(lambda: all(group.is_complete for group in scheduler.groups), 10)
        waiting = [group.prompt for group in scheduler.groups]
        trainer.push(1)
        trainer.push(2)  # as if step 1 had taken others
        sampled = scheduler.take(2, 2)
        assert counters.stale_samples == GROUP * PER_STEP
        assert ages(sampled, 2) == {0}, "whichever of the queue were complete first"
        trainer.push(3)
        following = scheduler.take(3, 3)
        trained = [group.prompt for each in (sampled, following) for group in each.groups]
        assert all(prompt in trained for prompt in waiting) and ages(following, 3) <= {0, 1}


def test_an_evaluation_or_a_checkpoint_cuts_requests_short_and_they_continue():
    with training("ok", **IN_PLACE) as (trainer, server):
        growing(server, PER_STEP, most=3)
        trainer.step(0)
        wait_for_tokens(server, 3 * PER_STEP)
        trainer.scheduler.files(is_step_done=True)
        assert (
            trainer.inference.pending is None and trainer.inference.client.counters.cut_samples > 0
        )
        server.most_tokens = 6
        sampled = [trainer.step(step) for step in (1, 2, 3)]
        trained = [prompt.id for each in sampled for prompt in each.prompts]
        assert (
            len({*trained, *(group.prompt.id for group in trainer.scheduler.groups)} - {"0", "1"})
            == 6 * PER_STEP
        )
        for rollout in (r for each in sampled for group in each.groups for r in group.rollouts):
            assert_fingerprints(rollout)
        assert trainer.inference.client.counters.lost_samples == 0


def test_a_pause_does_not_count_towards_the_deadline_of_a_request(clock):
    with training("ok", request_timeout_seconds=4.0, max_retries=0, **IN_PLACE) as (
        trainer,
        server,
    ):
        trainer.inference.client.clock, trainer.while_paused = clock, lambda: clock.advance(4.5)
        growing(server, PER_STEP, most=3)
        trainer.scheduler.take(0, 0)
        wait_for_tokens(server, 3 * PER_STEP)
        trainer.push(1)
        server.most_tokens = 6
        trainer.scheduler.take(1, 1)
        counters = trainer.inference.client.counters
        assert server.aborted == [] and counters.requests == 5 * PER_STEP
        assert counters.failures.total() == counters.cut_samples == counters.redrawn_samples == 0


def test_a_signal_during_a_weight_sync_loses_nothing_of_what_the_servers_hold(monkeypatch, clock):
    monkeypatch.setattr(call, "ABORT_SECONDS", 0.05)
    with training("ok", **IN_PLACE) as (trainer, server):
        growing(server, PER_STEP, most=3)

        def signal() -> None:
            trainer.inference.client.stop(keep_parts=True)
            clock.advance(STOP_SECONDS + 1)
            time.sleep(0.3)  # several times as long as it waits before it sends aborts again
            assert server.aborted == [], (
                "SGLang would forget the abort of a request that came during the pause"
            )

        trainer.inference.client.clock, trainer.while_paused = clock, signal
        trainer.scheduler.take(0, 0)
        wait_for_tokens(server, 3 * PER_STEP)
        trainer.push(1)
        trainer.scheduler.files(is_step_done=True)
        parts = [part for group in trainer.scheduler.groups for part in group.prefixes.values()]
        counters = trainer.inference.client.counters
        assert (
            len(parts) == counters.cut_samples == 3 * PER_STEP * GROUP
            and counters.lost_samples == 0
        )
        for part in parts:
            assert part.policy_versions.tolist()[:3] == [0] * 3
            assert_fingerprints(part)


def test_the_last_weight_sync_leaves_nothing_in_flight():
    with training("ok", **IN_PLACE) as (trainer, server):
        run = trainer.cfg.run.model_copy(update={"num_steps": 4})
        trainer.scheduler.cfg = trainer.cfg.model_copy(update={"run": run})
        for step in range(4):
            trainer.step(step)
        assert trainer.inference.pending is None and not trainer.scheduler.queue
        assert server.pauses == ["in_place"] * 3


# Faults -------------------------------------------------------------------------------------------


class Pool:
    """Two servers, of which one dies: what ServerPool tells of it."""

    def __init__(self, *servers: FakeServer) -> None:
        self.servers, self.restarts = servers, 0

    def take(self) -> list[str]:
        return [server.url for server in self.servers if not server.is_dead]

    def lost(self) -> list[str]:
        return [server.url for server in self.servers if server.is_dead]


@pytest.mark.parametrize("max_retries", [0, 3])
def test_a_server_that_dies_while_it_is_paused_loses_its_own_responses_only(max_retries):
    """With max_retries = 0 the sampling of the replica has failed by then."""
    with (
        training("ok", max_retries=max_retries, **IN_PLACE) as (trainer, one),
        FakeServer("growing") as two,
    ):
        two.source = trainer.model
        growing(one, PER_STEP, most=6)
        urls, inference = [one.url, two.url], trainer.inference
        inference.urls, inference.server_pool = urls, Pool(one, two)
        inference.client.set_urls(urls)

        def push(tensors, version: int, *, serve: bool, keep_requests: bool) -> None:
            both = [server for server in (one, two) if server.url in inference.urls]
            for server in both if keep_requests else ():
                server.is_paused = True
            if version == 2 and not two.is_dead:
                two.is_dead = True
                raise WeightPushError("it is gone")
            trainer.model.version = version
            for server in both:
                server.is_paused = False

        inference.pusher = SimpleNamespace(push=push, set_urls=lambda urls: None)
        trainer.step(0)
        assert (
            wait_for(lambda: len(one.requests) + len(two.requests) == 4 * PER_STEP, 10)
            and two.requests
        )
        trainer.step(1)
        assert inference.urls == [one.url] and inference.pending is None, (
            "its servers are others: sampling starts again"
        )
        sampled = [trainer.step(step) for step in (2, 3, 4)]
        trained = [prompt.id for each in sampled for prompt in each.prompts]
        assert len(set(trained)) == 3 * PER_STEP
        for step, each in enumerate(sampled, 2):
            assert ages(each, step) <= {0, 1, 2, 3}
            for rollout in (r for group in each.groups for r in group.rollouts):
                assert_fingerprints(rollout)


def test_a_server_that_is_replaced_at_its_url_gets_requests_at_once():
    """With rollout.port; until then the client leaves the one that died alone."""
    with training("ok") as (trainer, server):
        inference = trainer.inference
        inference.server_pool = pool = Pool(server)
        trainer.push(1)
        balancer = inference.client.balancer
        for _ in range(FAILURES_TO_OPEN):
            balancer.failed(balancer.servers[0], "reset")
        trainer.push(2)
        assert balancer.servers[0].is_open, "the same server"
        pool.restarts = 1
        trainer.push(3)
        assert not balancer.servers[0].is_open and balancer.servers[0].url == server.url


def test_a_server_that_does_not_continue_stops_the_run_with_its_name(new_threads):
    with training("ok", **IN_PLACE) as (trainer, server):
        server.control_faults["/continue_generation"] = "http_500"
        growing(server, PER_STEP, most=3)
        trainer.scheduler.take(0, 0)
        with pytest.raises(WeightPushError, match="/continue_generation answered 500"):
            trainer.push(1)
        trainer.inference.stop()
        assert not any(thread.name == "sampling" for thread in new_threads())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token_versions": False, "version": "0.5.17"},
            r"is version 0.5.17.*no weight_versions.*0.5.19 or newer",
        ),
        (
            {"settings": {"disable_overlap_schedule": False}},
            r"disable_overlap_schedule = false.*must be true.*start it with",
        ),
        ({"settings": {}}, "disable_overlap_schedule = null"),
    ],
)
def test_a_server_that_cannot_name_the_weights_of_every_token_is_refused(changes, message):
    good = vars(GOOD) | {"token_versions": True, "settings": {"disable_overlap_schedule": True}}
    cfg = config(**IN_PLACE).rollout
    check_in_place(type(GOOD)(**good), cfg)
    with pytest.raises(ServerError, match=message):
        check_in_place(type(GOOD)(**good | changes), cfg)
    check_in_place(type(GOOD)(**good | changes), config(max_staleness=3).rollout)


def test_servers_of_the_run_are_started_as_in_place_needs_them(tmp_path):
    def options(cfg) -> list[str]:
        return server_command(tmp_path, cfg.rollout, port=1, device="cpu", seed=0)

    assert "--disable-overlap-schedule" in options(config(dtype="float32", **IN_PLACE))
    assert "--disable-overlap-schedule" not in options(config(dtype="float32", max_staleness=3))


def test_agents_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"in_place with agent.function = 'a:b'.*set rollout.weight_update = abort",
    ):
        config(agent={"function": "a:b"}, **IN_PLACE)


# One answer ---------------------------------------------------------------------------------------

PROMPT = SimpleNamespace(token_ids=(3, 4, 5))


def parsed(sample, *, oldest: int = 4, newest: int = 7, by_adapter: bool = False):
    return parse_sample(
        sample,
        ExpectedSample(PROMPT, "q/0"),
        Sampling(1.0, 9, (), policy_version=oldest),
        SampleRules(SPEC, want_routes=True, by_adapter=by_adapter),
        newest_version=newest,
    )


def sample_of(*versions: int, **meta):
    new = np.arange(10, 10 + len(versions))
    sample = mixed_answer(
        list(versions), [3, 4, 5], new, "q", {"type": "length", "length": len(new)}
    )
    return sample | {"meta_info": sample["meta_info"] | meta}


def test_tokens_have_the_versions_of_their_spans():
    rollout = parsed(sample_of(4, 4, 5, 7, 7))
    assert (
        rollout.policy_versions.tolist() == [4, 4, 5, 7, 7]
        and rollout.policy_versions.dtype == np.int32
    )
    assert_fingerprints(rollout)
    assert parsed(sample_of(6, 6)).policy_versions.tolist() == [6, 6], (
        "it waited in the server's queue"
    )


def test_an_adapter_samples_all_tokens_of_its_request():
    """Also those of requests that servers kept while they got the adapters of later versions."""
    for sample in (sample_of(4, 4, 5, 7, 7), sample_of(4, 6, num_retractions=1)):
        rollout = parsed(sample, by_adapter=True)
        assert set(rollout.policy_versions.tolist()) == {4} and rollout.missing_routes is None
    with pytest.raises(SampleDropped, match="stale_version"):  # of another run
        parsed(sample_of(4, 8), by_adapter=True)


def span(version: object, start: int, end: object) -> dict:
    return {"version": str(version), "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([span(3, 0, 2), span(4, 2, 4)], "stale_version"),
        ([span(4, 0, 2), span(8, 2, 4)], "stale_version"),
        ([span(4, 0, 2), span("updating to 5", 2, 4)], "stale_version"),
        ([span(4, 0, 2), span(5, 2, 3)], "malformed"),
        ([span(4, 0, 2), span(5, 2, 5)], "malformed"),
        ([span(4, 0, 0), span(5, 0, 4)], "malformed"),
        ([span(4, 0, 2), span(5, 2, True)], "malformed"),
        ([span(5, 0, 2), span(4, 2, 4)], "malformed"),
        ([span(4, 0, 2), span(4, 2, 4)], "malformed"),
        ([{"version": "4"}, {"version": "5"}], "malformed"),
        (None, "malformed"),
        ([], "malformed"),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans, reason):
    with pytest.raises(SampleDropped) as caught:
        parsed(sample_of(4, 4, 5, 5, weight_versions=spans))
    assert caught.value.reason == reason


def test_one_version_is_enough_where_no_other_is_possible():
    sample = sample_of(4, 4)
    del sample["meta_info"]["weight_versions"]
    assert parsed(sample, newest=4).policy_versions.tolist() == [4, 4]
    with pytest.raises(SampleDropped, match="stale_version"):
        parsed(sample_of(4, 5), newest=4)
    assert parse_versions([(4, None)], 2).tolist() == [4, 4]


def test_rows_that_a_retraction_computed_with_other_weights_hold_no_route():
    """SGLang computes all rows again, and does not say where the retraction was."""
    for sample in (sample_of(4, 4, 5, num_retractions=1), sample_of(5, 5, 5, num_retractions=2)):
        rollout = parsed(sample)
        assert rollout.missing_routes.all() and not rollout.routed_experts.any()
        assert (
            rollout.rollout_logprobs.tolist()
            == parsed(sample_of(*rollout.policy_versions)).rollout_logprobs.tolist()
        )
    for sample in (sample_of(4, 4, 4, num_retractions=1), sample_of(4, 4, 5, num_retractions=0)):
        assert_fingerprints(parsed(sample))


def test_a_client_of_another_mode_takes_one_version_only():
    """Weights 8 are sent when nothing is sampled: an answer that names them is another run's."""
    model = FakeModel(version=8)
    with FakeServer("ok", source=model) as server:
        client = RolloutClient(
            [server.url], RolloutConfig(max_retries=0), SampleRules(SPEC, want_routes=True)
        )
        prompt, settings = (
            Prompt("q", "", (3, 4, 5), ""),
            {"temperature": 1.0, "max_tokens": 9, "stop_token_ids": ()},
        )
        with pytest.raises(RolloutError, match="stale_version.*8.*expected 7"):
            client.generate([prompt], 1, policy_version=7, **settings)
