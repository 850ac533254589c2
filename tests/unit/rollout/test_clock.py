"""Deadlines of requests: seconds without the pauses of the servers."""

import asyncio
import time

import pytest

from megatron_rl.rollout.client.clock import Clock

LOOK = 0.05  # seconds in which an alarm of the fake clock has looked several times


def test_a_paused_clock_stands_still_and_then_continues(clock):
    clock.advance(5)
    assert clock() == 5
    for pause in (7, 2):
        before = clock()
        with pytest.raises(KeyError), clock.paused():
            assert clock.is_paused
            clock.advance(pause)
            assert clock() == before
            raise KeyError("a failed weight sync ends the pause, too")
        assert clock() == before and not clock.is_paused
        clock.advance(1)
        assert clock() == before + 1
    assert Clock()() == pytest.approx(time.monotonic(), abs=60), (
        "seconds of the machine, where nothing else is named"
    )


def test_an_alarm_goes_off_once_after_its_seconds_outside_pauses(clock):
    called = []

    async def alarms():
        for seconds in (3, 4, 5):
            alarm = clock.alarm(seconds, lambda seconds=seconds: called.append(seconds))
            if seconds == 4:
                alarm.cancel()
        with clock.paused():
            clock.advance(10)
            await asyncio.sleep(LOOK)
        clock.advance(2.9)
        await asyncio.sleep(LOOK)
        assert called == []
        clock.advance(0.1)
        await asyncio.sleep(LOOK)
        assert called == [3]
        clock.advance(10)
        await asyncio.sleep(LOOK)

    asyncio.run(alarms())
    assert called == [3, 5]


def test_an_alarm_of_the_machines_clock_waits_for_the_end_of_a_pause():
    called, clock = [], Clock()

    async def wait():
        started = clock()
        clock.alarm(0.05, lambda: called.append(clock() - started))
        with clock.paused():
            await asyncio.sleep(0.2)
            assert not called
        async with asyncio.timeout(30):
            while not called:
                await asyncio.sleep(0.01)

    asyncio.run(wait())
    assert called[0] >= 0.05


def test_a_timeout_of_the_clock_ends_what_takes_longer_and_nothing_else(clock, caplog):
    async def waits(seconds: float, machine_seconds: float) -> None:
        async with clock.timeout(5):
            clock.advance(seconds)
            await asyncio.sleep(machine_seconds)
        clock.advance(5)
        await asyncio.sleep(LOOK)  # outside

    asyncio.run(waits(4.9, LOOK))
    with pytest.raises(TimeoutError):
        asyncio.run(waits(5, 60))
    assert not caplog.messages, "its alarm went off after its end"
