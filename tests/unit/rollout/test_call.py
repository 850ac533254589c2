"""One call of the client: which requests it aborts, how long it waits, and what it keeps of the
answers.
"""

import asyncio
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import call as call_module
from megatron_rl.rollout.client import client as client_module
from megatron_rl.rollout.client import group_sampler
from megatron_rl.rollout.client.call import Call, Request
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.counters import RolloutCounters
from megatron_rl.rollout.client.load_balancer import ServerState
from megatron_rl.rollout.client.request import ABORT_SECONDS, RETURN_SECONDS, STOP_SECONDS
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from tests.fake_model import FakeModel, assert_fingerprints
from tests.fake_server import SPEC, FakeServer, wait_for
from tests.faults.samples import with_meta

PROMPTS = [Prompt(f"q{i}", "", (3, 4, 5 + i), "") for i in range(4)]
SAMPLING = Sampling(1.0, 6, (1,), 3)
RESUME = {"over_sample": 0.5, "partial": "resume", "max_staleness": 1}
LOOK = 0.05  # seconds in which an alarm of the fake clock has looked several times


def client_of(server: FakeServer, **settings) -> RolloutClient:
    return RolloutClient(
        [server.url], RolloutConfig(**settings), SampleRules(SPEC, want_routes=True)
    )


def new(*numbers: int, size: int = 2) -> list[Group]:
    return [Group(PROMPTS[number], size) for number in numbers]


def request_of(call: Call, group: Group) -> Request:
    return Request("r", ServerState("http://127.0.0.1:1"), group, call.sampling, [0, 1])


def test_a_request_that_is_cut_is_aborted_again_until_its_answer_and_not_for_its_deadline(clock):
    """An alarm that is left would send aborts of an answered request as long as the call lasts."""
    call, aborted = Call(None, SAMPLING, None, RolloutCounters(), True, clock=clock), []
    call.abort = aborted.append

    async def run() -> None:
        request = request_of(call, new(0)[0])
        with call.sending(request, 5.0):
            assert call.in_flight == {"r": request} and request.group.request_version == 3
            call.cut(request, "age")
            clock.advance(5.0)
            await asyncio.sleep(LOOK)
            assert aborted == [request] * 2 and request.cut_by == "age"
        clock.advance(100.0)
        await asyncio.sleep(LOOK)
        assert aborted == [request] * 2 and not call.in_flight

    asyncio.run(run())


def test_an_abort_that_the_end_of_the_call_cancels_was_not_confirmed(monkeypatch):
    async def never(*_) -> bool:
        await asyncio.sleep(60)
        return True

    async def run() -> None:
        call.abort(request_of(call, new(0)[0]))
        await asyncio.sleep(0)
        await call.end()
        assert call.is_over and not call.aborts

    monkeypatch.setattr(call_module, "abort", never)
    call = Call(None, SAMPLING, None, RolloutCounters(), True)
    asyncio.run(run())
    assert (call.counters.aborts, call.counters.aborts_failed) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "seconds"), [({"over_sample": 0.5}, ABORT_SECONDS), (RESUME, RETURN_SECONDS)]
)
def test_servers_get_time_to_return_what_is_kept_and_little_where_it_is_only_counted(
    settings, seconds, monkeypatch
):
    waited = collected(monkeypatch)
    with FakeServer("slow", "ok", source=FakeModel(version=3)) as server:
        client_of(server, **settings).fill(new(0, 1), SAMPLING, keep=1)
    assert waited == [seconds]


@pytest.mark.parametrize("keep_parts", [True, False])
def test_a_stop_waits_for_parts_only_where_they_are_kept(keep_parts, monkeypatch):
    waited, groups = collected(monkeypatch), new(0)
    with FakeServer("slow", source=FakeModel(version=3)) as server:
        client = client_of(server)

        def stop() -> None:
            wait_for(lambda: server.requests, 30)
            client.stop(**{"keep_parts": True} if keep_parts else {})

        signal = threading.Thread(target=stop)
        signal.start()
        with pytest.raises(asyncio.CancelledError):
            client.fill(groups, SAMPLING)
        signal.join()
    assert waited == [STOP_SECONDS] * keep_parts and [*groups[0].prefixes] == [0, 1] * keep_parts


def collected(monkeypatch) -> list[float]:
    """The seconds of each Call.collect from now on."""
    seconds, collect = [], Call.collect

    async def recorded(call: Call, limit: float) -> None:
        seconds.append(limit)
        await collect(call, limit)

    monkeypatch.setattr(Call, "collect", recorded)
    return seconds


def test_a_client_that_is_stopped_before_its_first_call_refuses_it():
    client = RolloutClient(
        ["http://127.0.0.1:1"], RolloutConfig(), SampleRules(SPEC, want_routes=True)
    )
    client.stop()
    with pytest.raises(RolloutError, match="was stopped"):
        client.fill(new(0), SAMPLING)


def test_what_is_not_returned_is_not_lost_where_it_would_be_dropped(monkeypatch):
    monkeypatch.setattr(client_module, "ABORT_SECONDS", 0.1)
    with FakeServer("hang", "ok") as server:
        client = client_of(server, over_sample=0.5)
        client.fill(new(0, 1), replace(SAMPLING, policy_version=7, max_tokens=8), keep=1)
    counters = client.counters
    assert (counters.cancelled_groups, counters.lost_samples, counters.redrawn_samples) == (1, 0, 0)


def test_an_answer_that_has_arrived_is_kept_however_long_it_takes_to_read(monkeypatch):
    monkeypatch.setattr(client_module, "RETURN_SECONDS", 0.05)
    monkeypatch.setattr(group_sampler, "is_small", lambda *_: False)
    parse = RolloutClient._parse

    def slowly(*args):
        time.sleep(0.15)
        return parse(*args)

    with FakeServer("slow", "ok", source=FakeModel(version=3)) as server:
        client, groups = client_of(server, **RESUME), new(0, 1, size=1)
        monkeypatch.setattr(RolloutClient, "_parse", slowly)
        (complete,) = client.fill(groups, SAMPLING, keep=1)
    (left,) = [group for group in groups if group is not complete]
    assert [*left.prefixes] == [0] and client.counters.lost_samples == 0
    assert_fingerprints(left.prefixes[0])


def test_a_damaged_part_of_an_aborted_request_is_dropped_without_blame():
    """It is the end of the request in any case: no pause, no retry, and not a failure of the
    server.
    """

    class Damaged(FakeServer):
        def until_aborted(self, samples):
            return [with_meta(id="another's")(sample) for sample in super().until_aborted(samples)]

    with Damaged("slow", "ok", source=FakeModel(version=3)) as server:
        client, groups = client_of(server, **RESUME), new(0, 1)
        client.fill(groups, SAMPLING, keep=1)
    assert client.counters.dropped == {"wrong_id": 2} and client.counters.retries == 0
    assert client.balancer.servers[0].failures == 0 and not any(group.prefixes for group in groups)


def test_a_sample_that_waited_in_the_queue_does_not_hide_those_after_it():
    class HalfQueued(FakeServer):
        def until_aborted(self, samples):
            first, *others = super().until_aborted(samples)
            return [{"output_ids": [], "meta_info": first["meta_info"]}, *others]

    with HalfQueued("slow", "ok", source=FakeModel(version=3)) as server:
        client, groups = client_of(server, **RESUME), new(0, 1, size=3)
        (complete,) = client.fill(groups, SAMPLING, keep=1)
    (left,) = [group for group in groups if group is not complete]
    assert [*left.prefixes] == [1, 2] and client.counters.dropped.total() == 0


def test_a_deadline_that_stays_is_named(clock):
    with FakeServer("slow", source=FakeModel(version=3)) as server:
        client = client_of(server, request_timeout_seconds=5.0, max_retries=1)
        client.clock, server.late = clock, lambda: clock.advance(5.0)
        with pytest.raises(RolloutError) as caught:
            client.fill(new(0, size=1), SAMPLING)
    assert str(caught.value).endswith(
        "; ".join([f"{server.url}: timeout: not complete after 5 s"] * 2)
    )


# Open calls ---------------------------------------------------------------------------------------


def test_an_open_call_may_begin_without_groups_and_ends_with_those_that_it_began():
    commands, complete = SimpleQueue(), []
    groups = new(0, 1)
    with FakeServer("ok", source=FakeModel(version=3)) as server:
        client = client_of(server)

        def progress() -> None:
            complete.append([group.is_complete for group in groups])
            commands.put(groups[1:] if len(complete) == 1 else "drain")

        commands.put(groups[:1])
        assert client.fill([], SAMPLING, on_progress=progress, commands=commands) == []
    assert complete == [[True, False], [True, True]] and client.counters.cancelled_groups == 0


def test_a_call_that_drains_begins_no_other_group():
    commands = SimpleQueue()
    with FakeServer("ok", source=FakeModel(version=3)) as server:
        client, groups = client_of(server, max_concurrency=1), new(0, 1, 2, 3)
        commands.put("drain")
        server.source = lambda *asked: (
            wait_for(lambda: draining, 30) and FakeModel(version=3)(*asked)
        )
        draining, drain = [], Call.drain

        async def noted(call: Call) -> None:
            waiting = asyncio.create_task(drain(call))
            await asyncio.sleep(0)
            draining.append(call.drains)
            await waiting

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "drain", noted)
            assert client.fill(groups, SAMPLING, commands=commands) == []
    assert [group.is_complete for group in groups] == [True, False, False, False] and len(
        server.requests
    ) == 1


@pytest.mark.parametrize("command", ["", "drain"])
def test_an_open_call_raises_what_one_of_its_groups_failed_with(command):
    commands = SimpleQueue()
    if command:
        commands.put(command)
    with FakeServer("http_400") as server:
        with pytest.raises(RolloutError, match="input too long"):
            client_of(server).fill(new(0), SAMPLING, commands=commands)
