"""The seconds of a step by its stages; spans of the trace: tests/unit/launch/test_trace.py."""

from types import SimpleNamespace

import pytest

from megatron_rl.launch.trace import Trace
from megatron_rl.trainer import step_meter
from megatron_rl.trainer.step_meter import StepMeter

STAGES = ("rollout", "reward", "split", "old_logprob", "update", "weight_sync")


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds) passes them."""
    now = [50 * 10**9]

    def passes(seconds):
        now[0] += round(seconds * 10**9)

    monkeypatch.setattr(step_meter, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    return passes


def test_stages_add_up_to_the_step_with_what_is_outside(clock):
    entered = []
    meter = StepMeter(SimpleNamespace(enter=lambda stage, step: entered.append((stage, step))))
    for step, update in ((3, 4.0), (4, 0.5)):
        meter.step = step
        clock(0.25)
        for seconds in (1.0, 2.0):
            with meter.time("rollout"):
                clock(seconds)
        with meter.time("update"), meter.part("gradient"):
            clock(update)
        clock(0.75)
        expected = dict.fromkeys(STAGES, 0.0) | {
            "rollout": 3.0,
            "update": update,
            "other": 1.0,
            "step": 4.0 + update,
        }
        assert meter.take_times() == {f"time/{name}": seconds for name, seconds in expected.items()}
        with meter.between_steps("evaluate"):
            clock(100)
            with meter.time("weight_sync"):
                clock(7)
    assert entered == [
        (stage, step)
        for step in (3, 4)
        for stage in ("rollout", "rollout", "update", "evaluate", "weight_sync")
    ]


def test_a_stage_that_raises_is_counted(clock):
    meter = StepMeter()
    with pytest.raises(KeyError), meter.time("reward"):
        clock(2)
        raise KeyError
    assert meter.take_times()["time/reward"] == 2
    with pytest.raises(KeyError), meter.between_steps("checkpoint"):
        clock(2)
        raise KeyError
    assert meter.take_times()["time/step"] == 0


def test_sums_are_taken_once():
    meter = StepMeter()
    sums = meter.sums
    sums.add_total("rollout/retries_total", 2)
    assert meter.step == -1, "what happens before the first step is of step 0, counted from 1"
    assert meter.take_sums() is sums and meter.sums is not sums and meter.take_sums() is not sums


def test_a_step_begins_at_the_time_that_is_named(clock):
    meter = StepMeter()
    start = step_meter.time.monotonic_ns()
    clock(3)
    meter.begin(start + 10**9)
    assert meter.take_times()["time/step"] == 2


def test_spans_of_a_step_are_nested_and_the_step_is_on_a_thread_of_its_own(clock):
    meter = StepMeter(trace=Trace(is_on=True))
    meter.step = 6
    with meter.time("update"), meter.part("gradient"):
        clock(1)
    meter.take_times()
    spans = [(span.name, span.kind, span.thread) for span in meter.trace.take()]
    assert spans == [
        ("gradient", "part", "main"),
        ("update", "stage", "main"),
        ("step 7", "step", "step"),
    ]
