"""The end of a call: what becomes of its requests in flight, and of responses that are too old."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.records import Prompt
from megatron_rl.rollout.client import call as call_module
from megatron_rl.rollout.client.call import Call, NewWeights, Request
from megatron_rl.rollout.client.counters import RolloutCounters
from megatron_rl.rollout.client.load_balancer import ServerState
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.group import Group
from tests.unit.batch.rollouts import make_rollout

SAMPLING = Sampling(1.0, 6, (1,), 3)


def call_of(clock, group: Group, *, keeps_parts: bool = True) -> tuple[Call, Request]:
    """A call with one request in flight."""
    call = Call(None, SAMPLING, None, RolloutCounters(), keeps_parts, clock=clock)
    request = Request("r", ServerState("http://127.0.0.1:1"), group, SAMPLING, [0, 1])
    call.in_flight["r"] = request
    return call, request


def new_group() -> Group:
    return Group(Prompt("q", "", (3, 4, 5), ""), 2)


@pytest.mark.parametrize(("keeps_parts", "lost"), [(True, 2), (False, 0)])
def test_what_no_server_returned_is_lost_only_where_it_would_have_been_kept(
    clock, keeps_parts, lost
):
    call, _ = call_of(clock, new_group(), keeps_parts=keeps_parts)
    asyncio.run(call.collect(0.0))
    assert (call.counters.lost_samples, call.counters.redrawn_samples) == (lost, lost)


@pytest.mark.parametrize("is_paused", [True, False])
def test_aborts_are_repeated_until_the_answer_but_not_sent_in_a_pause(
    clock, is_paused, monkeypatch
):
    monkeypatch.setattr(call_module, "ABORT_SECONDS", 0.001)
    call, request = call_of(clock, new_group())
    aborted = []
    call.abort = aborted.append

    async def run() -> None:
        async def answer() -> None:
            while len(aborted) < 3 and not is_paused:
                await asyncio.sleep(0.001)

        call.busy.add(task := asyncio.create_task(answer()))
        task.add_done_callback(call.busy.discard)
        with clock.paused() if is_paused else nullcontext():
            await asyncio.wait_for(call.collect(60.0), 10)

    asyncio.run(run())
    assert aborted == [] if is_paused else aborted[:3] == [request] * 3


def test_a_call_waits_for_the_confirmation_of_its_aborts(clock, monkeypatch):
    async def confirmed_soon(*_) -> bool:
        await asyncio.sleep(0.01)
        return True

    async def run() -> None:
        call.abort(request)
        await call.collect(60.0)
        await call.end()

    monkeypatch.setattr(call_module, "abort", confirmed_soon)
    call, request = call_of(clock, new_group())
    asyncio.run(run())
    assert call.counters.aborts >= 1 and call.counters.aborts_failed == 0


def test_new_weights_leave_the_prefix_that_a_request_continues(clock):
    """Its answer is read with it; a complete response that is too old, and the prefix of a group
    that waits, are dropped at once.
    """
    old = make_rollout("q/0", 3, 2)
    old = replace(old, policy_versions=np.full(2, 3, np.int32))
    running, waiting = new_group(), new_group()
    for group in (running, waiting):
        group.prefixes[0] = old
    running.rollouts[1] = old
    call, _ = call_of(clock, running)
    cut = []
    call.cut = lambda request, why: cut.append((request.rid, why))
    call.tasks["task"] = running
    idle = call.renew(NewWeights(5, 4, [running, waiting], lambda: None))
    assert idle == [waiting] and not waiting.prefixes and running.prefixes == {0: old}
    assert not running.rollouts and call.counters.stale_samples == 2 and cut == [("r", "age")]
