"""What a rollout function raises or returns ends its own episode, not the run, and is never learned
from twice.
"""

import asyncio
import gc
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import EpisodeError
from megatron_rl.rollout.agents.runner import EpisodeCall, EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.generation_task import GenerationTask
from megatron_rl.rollout.group import Group
from tests.fake_model import TurnModel
from tests.fake_server import SPEC, FakeServer
from tests.unit.rollout.test_unfinished_episodes import interrupted
from tests.words import word_tokenizer

TURN = 5
PROMPT = Prompt(id="q", text="", token_ids=(3, 4, 5), label="")
calls, kept = [], []


def client_of(server, function, **settings):
    cfg = RolloutConfig(max_retries=1, partial="resume", over_sample=0.5, max_staleness=1)
    agent = AgentConfig(function=f"{__name__}:{function.__name__}", **settings)
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, 1)
    client = RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner)
    calls.clear()
    make_call, runner.call = (
        runner.call,
        lambda *given: calls.append(make_call(*given)) or calls[-1],
    )
    return client


def sample(function, *, size=1, max_tokens=64, **settings):
    """(rollouts, counters)"""
    groups = [Group(PROMPT, size)]
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        client = client_of(server, function, **settings)
        client.fill(groups, Sampling(1.0, max_tokens, (1,), 3))
    return groups[0].rollout_group().rollouts, client.counters


async def started(session):
    first = await session.generate(max_tokens=TURN)
    session.observe([8])
    return session.branch([9, *first.token_ids])


async def gathers(session, prompt):
    branch = await started(session)
    await asyncio.gather(branch.generate(max_tokens=TURN), session.generate(max_tokens=TURN))
    return session.finish(1.0)


async def groups_tasks(session, prompt):
    branch = await started(session)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(branch.generate(max_tokens=TURN))
        tasks.create_task(session.generate(max_tokens=TURN))
    return session.finish(1.0)


async def leaves_a_task(session, prompt):
    branch = await started(session)
    other = asyncio.create_task(branch.generate(max_tokens=TURN))
    await session.generate(max_tokens=TURN)
    await other
    return session.finish(1.0)


@pytest.mark.parametrize("function", [gathers, groups_tasks, leaves_a_task])
def test_turns_that_are_cut_at_the_same_time_are_all_kept(function):
    for _ in range(4):  # the answers come in either order
        groups = [Group(PROMPT, 1)]
        with FakeServer("ok", "slow", source=TurnModel(version=3)) as server:
            client = client_of(server, function)
            interrupted(server, client, groups, 3, lambda server=server: len(server.requests) == 3)
        assert (
            groups[0].prefixes[0].episode_length == TURN + 2 * 2
            and client.counters.failed_episodes == 0
        )


async def fills_its_context(session, prompt):
    while True:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.generate(max_tokens=TURN))
        session.observe([8, 8, 8])


def test_a_full_context_in_a_task_of_a_group_truncates():
    (rollout,), counters = sample(fills_its_context, max_tokens=2 * TURN + 4)
    assert rollout.finish_reason == "length" and counters.failed_episodes == 0


async def handles_a_failed_task(session, prompt):
    async def tool():
        raise KeyError("tool")

    await session.generate(max_tokens=TURN)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tool())
    except* KeyError:
        session.observe([8])
    await session.generate(max_tokens=TURN)
    return session.finish(1.0)


def test_a_failed_task_that_the_function_handles_is_no_end():
    """Python 3.11 leaves the parent's cancelling() at 1: that is no cancellation of the episode."""
    rollouts, _ = sample(handles_a_failed_task, size=2)
    assert [rollout.num_spans for rollout in rollouts] == [2, 2]
    assert not calls[0].call.episodes, "an open call would hold every episode that it ever had"


async def gives_up_a_turn(session, prompt):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.generate(max_tokens=TURN), 0.5)
    await session.generate(max_tokens=TURN)
    return session.finish(1.0)


def test_a_turn_that_the_function_gave_up_can_be_asked_for_again():
    groups = [Group(PROMPT, 1)]
    with FakeServer("hang", "ok", source=TurnModel(version=3)) as server:
        client_of(server, gives_up_a_turn).fill(groups, Sampling(1.0, 64, (1,), 3))
    assert groups[0].rollouts[0].num_spans == 1 and groups[0].rollouts[0].response_length == TURN


async def finishes_while_it_samples(session, prompt):
    await session.generate(max_tokens=TURN)
    late = asyncio.create_task(session.branch([3, 4]).generate(max_tokens=TURN))
    await asyncio.sleep(0)
    episode = session.finish(1.0)
    await asyncio.wait([late])
    with pytest.raises(EpisodeError, match="the episode is finished"):
        late.result()
    return episode


def test_a_turn_that_ends_after_the_episode_is_none_of_it():
    (rollout,), counters = sample(finishes_while_it_samples)
    assert rollout.episode_length == TURN and counters.samples == 2


async def measures_itself(session, prompt):
    started = time.monotonic()
    branches = [session.branch([3, 4]), session.branch([5, 6])]
    await asyncio.gather(*(branch.generate(max_tokens=TURN) for branch in branches))
    await session.generate(max_tokens=TURN)
    return session.finish(1.0, {"seconds": time.monotonic() - started})


def test_the_time_outside_of_sampling_is_that_of_the_environment():
    model = TurnModel(version=3)

    def slow(*given):
        time.sleep(0.5)
        return model(*given)

    groups = [Group(PROMPT, 1)]
    with FakeServer("ok", source=slow) as server:
        client = client_of(server, measures_itself)
        client.fill(groups, Sampling(1.0, 64, (1,), 3))
    (outside,) = client.take_stats().environment_seconds
    assert 0 <= outside < groups[0].rollouts[0].episode.metrics["seconds"] - 0.5, (
        "it sampled for a second"
    )


async def observes_a_file_name(session, prompt):
    await session.generate(max_tokens=TURN)
    session.observe("w40 \udcff w41")
    await session.generate(max_tokens=TURN)
    return session.finish(1.0)


def test_a_text_that_no_tokenizer_takes_is_observed():
    """os.listdir returns such a name for bytes that are no UTF-8."""
    (rollout,), _ = sample(observes_a_file_name)
    ((start, end),) = rollout.environment
    assert rollout.tokens[start:end].tolist() == [40, 0, 41], "w0: unknown"


async def awaits_what_it_cancelled(session, prompt):
    await session.generate(max_tokens=TURN)
    tool = asyncio.create_task(asyncio.sleep(60))
    tool.cancel()
    await tool


async def exits(session, prompt):
    await session.generate(max_tokens=TURN)
    sys.exit(0)


async def starts_a_task_that_exits(session, prompt):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(exits(session, prompt))


def test_a_task_that_exits_ends_the_run_with_an_error_not_with_its_status():
    """asyncio raises SystemExit through its loop, whoever awaits the task."""
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        client = client_of(server, starts_a_task_that_exits, on_error="drop")
        task = GenerationTask([Group(PROMPT, 2)], Sampling(1.0, 64, (1,), 3))
        task.start(client)
        with pytest.raises(
            RuntimeError, match=r"a task that agent.function started called sys.exit\(0\)"
        ):
            task.wait()


async def returns_another_ones(session, prompt):
    await session.generate(max_tokens=TURN)
    kept.append(session.finish(1.0))
    return kept[0]


async def edits_its_reward(session, prompt):
    await session.generate(max_tokens=TURN)
    return replace(session.finish(), reward=float("nan"))


async def gives_text(session, prompt):
    await session.generate("12")
    return session.finish()


async def observes_bytes(session, prompt):
    await session.generate(max_tokens=TURN)
    session.observe(b"12")


async def observes_a_view(session, prompt):
    await session.generate(max_tokens=TURN)
    session.observe(memoryview(b"12"))


async def gives_bytes(session, prompt):
    await session.generate(bytearray(b"12"))


async def branches_from_bytes(session, prompt):
    session.branch(b"12")


async def gives_fractions(session, prompt):
    await session.branch([9.7]).generate()
    return session.finish()


@pytest.mark.parametrize(
    "function, why",
    [
        (awaits_what_it_cancelled, "CancelledError"),
        (exits, "SystemExit: 0"),
        (
            returns_another_ones,
            "returned Episode, must be session.finish.. of this session, unchanged",
        ),
        (edits_its_reward, "returned Episode, must be session.finish.. of this session, unchanged"),
        (gives_text, "given: must be integers, got .'1', '2'."),
        (observes_bytes, "observed: bytes are no token ids, got b'12'; decode them"),
        (observes_a_view, "observed: bytes are no token ids, got b'12'; decode them"),
        (gives_bytes, "given: bytes are no token ids, got b'12'; decode them"),
        (branches_from_bytes, "branched from: bytes are no token ids, got b'12'; decode them"),
        (gives_fractions, "branched from: must be integers, got .9.7."),
    ],
)
def test_what_ends_one_episode_is_counted_and_named(function, why, caplog):
    kept.clear()
    one_is_right = function is returns_another_ones
    # of two episodes, not one: all of several that fail end the run
    failing = (
        nullcontext()
        if one_is_right
        else pytest.raises(RolloutError, match=f"all 2 episodes failed.*{why}")
    )
    with failing:
        rollouts, counters = sample(function, size=2, on_error="drop")
        assert (
            counters.dropped_episodes == 1
            and len({tuple(rollout.tokens) for rollout in rollouts}) == 2
        )
    assert why.split(",")[0].replace(".", "") in caplog.text.replace(".", "")


first_of_two = []


async def fails_beside_one_that_waits(session, prompt):
    await session.generate(max_tokens=TURN)
    if not first_of_two:
        first_of_two.append(session.name)
        raise KeyError("tool")
    await asyncio.sleep(60)


def test_a_failure_ends_the_run_while_other_episodes_of_its_group_wait():
    first_of_two.clear()
    started = time.monotonic()
    with pytest.raises(RolloutError, match="KeyError: 'tool'"):
        sample(fails_beside_one_that_waits, size=2)
    assert time.monotonic() - started < 45


async def always_fails(session, prompt):
    await session.generate(max_tokens=TURN)
    raise KeyError("tool")


def test_a_last_try_is_not_counted_as_sampled_again():
    groups = [Group(PROMPT, 1)]
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        client = client_of(server, always_fails, on_error="retry")
        with pytest.raises(RolloutError, match="attempt 2 of 2"):
            client.fill(groups, Sampling(1.0, 64, (1,), 3))
    assert (client.counters.failed_episodes, client.counters.redrawn_samples) == (2, 1)


async def fails_with_a_full_context(session, prompt):
    await session.generate(max_tokens=TURN)
    if session.name.endswith("/0"):
        raise KeyError("tool")
    return session.finish(1.0)


def test_a_dropped_episode_is_not_counted_as_truncated():
    rollouts, _ = sample(fails_with_a_full_context, size=2, max_tokens=TURN, on_error="drop")
    assert [rollout.finish_reason for rollout in rollouts] == ["stop", "length"]


def test_errors_of_episodes_that_nothing_waits_for_are_not_reported_by_asyncio():
    """A group raises the error of one of its tasks; others may fail or be cancelled."""
    reported = []
    call = SimpleNamespace(call=SimpleNamespace(episodes=set()))

    async def fails():
        raise KeyError("tool")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        tasks = [asyncio.create_task(fails()), asyncio.create_task(asyncio.sleep(600))]
        for task in tasks:
            task.add_done_callback(partial(EpisodeCall._ended, call))
        tasks[1].cancel()
        await asyncio.wait(tasks)

    asyncio.run(main())
    gc.collect()
    assert not reported
