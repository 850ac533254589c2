"""agent.isolation = process: what an environment's process gets and is denied; agent.on_error =
drop and agent.concurrency.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from megatron_rl.config import AgentConfig, Config, DataConfig, ModelConfig, RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import EpisodeError, Turn
from megatron_rl.rollout.agents.environment import EnvironmentRollout
from megatron_rl.rollout.agents.environment_process import EnvironmentProcesses
from megatron_rl.rollout.agents.reply import Reply, ToolCall
from megatron_rl.rollout.agents.runner import EpisodeRunner, check_agent, make_runner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.workers import forks
from tests.fake_server import SPEC, VERSION, FakeServer, wait_for
from tests.faults.sessions import measure
from tests.words import word_tokenizer

PROMPTS = [Prompt(f"q{i}", "", (3, 4, 5 + i), "") for i in range(4)]


def ask(processes, text):
    async def call():
        async with processes.episode() as environment:
            await environment.constructor()
            observed = await environment.reset(Prompt("q", text, (3,), ""))
            reply = Reply("w1", "hm", (ToolCall("id", "add", {"a": 1}, "{}"),))
            turn = Turn(
                "w1", (1,), "stop", num_prompt_tokens=3, read=lambda: reply, logprobs=(-0.5,)
            )
            return observed, await environment.step(turn)

    return asyncio.run(call())


def test_a_process_has_no_key_no_memory_without_limit_and_an_end(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "secret")
    monkeypatch.setenv("OTHER", "value")
    processes = EnvironmentProcesses(
        "tests.faults.environments:Asked", memory_bytes=2**32, hidden_env=["SECRET_KEY"]
    )
    try:
        assert ask(processes, "SECRET_KEY")[0] == "none"
        observed, step = ask(processes, "OTHER")
        assert (
            observed == "value"
            and step.reward == 1.0 - 0.5 + 3
            and int(step.observation) != os.getpid()
        )
        with pytest.raises(EpisodeError, match="reset failed: MemoryError"):
            ask(processes, "memory")
        assert not os.path.exists(f"/proc/{step.observation}")
        pid = processes._process.pid
    finally:
        processes.close()
    assert not os.path.exists(f"/proc/{pid}") and processes._process is None


def test_the_process_of_an_environment_imports_neither_torch_nor_transformers():
    """They would take 3 s of CPU time and most of its memory."""
    code = (
        "import sys, megatron_rl.rollout.agents.environment_worker;"
        " print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("when", ["it starts", "it is connected"])
def test_an_episode_that_is_cancelled_while_its_process_starts_leaves_none(when, monkeypatch):
    """The event loop ends at once."""
    processes = EnvironmentProcesses("tests.faults.environments:Asked")
    cancelled, reached, started = threading.Event(), threading.Event(), []
    processes.start()
    fork = processes._fork

    def slow_fork(theirs):
        if when == "it starts":
            reached.set()
            cancelled.wait(60)
        started.append(fork(theirs))
        return started[0]

    async def connect(**settings):
        reached.set()
        await asyncio.sleep(600)

    async def enter():
        async with processes.episode() as environment:
            await environment.constructor()

    async def cancel():
        task = asyncio.create_task(enter())
        await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        cancelled.set()

    monkeypatch.setattr(processes, "_fork", slow_fork)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "open_connection", connect)
            asyncio.run(cancel())
        assert started, "a process was started"
        assert wait_for(lambda: not psutil.Process(processes._process.pid).children(), 60)
        assert ask(processes, "NONE")[0] == "none"
    finally:
        processes.close()


def test_a_process_that_died_is_started_again_and_ends_with_all_that_episodes_started(tmp_path):
    processes = EnvironmentProcesses("tests.faults.environments:Faulty")

    async def reset(text=""):
        async with processes.episode() as environment:
            await environment.constructor()
            return await environment.reset(Prompt("q", text, (3,), ""))

    async def hang():
        """With a child of the environment; close meanwhile."""
        hanging = asyncio.create_task(reset(f"hangs@reset {tmp_path / 'once'}"))
        main = psutil.Process(processes._process.pid)
        assert await asyncio.to_thread(
            wait_for, lambda: len(main.children(recursive=True)) == 2, 60
        )
        started = main.children(recursive=True)
        await asyncio.to_thread(processes.close)
        with pytest.raises(EpisodeError, match="its process ended in reset|broke the connection"):
            await hanging
        return started

    try:
        assert asyncio.run(reset()) == [7]
        dead = processes._process.pid
        os.kill(dead, signal.SIGKILL)
        assert wait_for(lambda: processes._process.poll() is not None, 60)
        assert asyncio.run(reset()) == [7] and processes._process.pid not in (0, dead)
        alive = processes._process.pid
        assert asyncio.run(reset()) == [7] and processes._process.pid == alive, "it is started once"
        children = asyncio.run(hang())
    finally:
        processes.close()
    for process in children:
        assert wait_for(lambda process=process: not process.is_running(), 20)


def test_the_end_of_an_episode_does_not_wait_for_an_import():
    """Another thread holds the lock meanwhile, for seconds: the event loop, and all other episodes,
    would wait.
    """
    processes = EnvironmentProcesses("tests.faults.environments:Asked")
    processes.start()

    async def end():
        async with processes.episode() as environment:
            await environment.constructor()
            held = threading.Thread(target=hold)
            held.start()
            await asyncio.to_thread(started.wait, 60)
        was_held = held.is_alive()
        ended.set()
        return was_held

    def hold():
        with processes._lock:
            started.set()
            ended.wait(60)

    started, ended = threading.Event(), threading.Event()
    try:
        assert asyncio.run(end()), "it waited for the lock"
        assert wait_for(lambda: not psutil.Process(processes._process.pid).children(), 60)
    finally:
        processes.close()


def test_a_fork_that_fails_is_an_error_of_its_episode_alone():
    processes = EnvironmentProcesses("tests.faults.limited_forks:Asked")

    async def beside():
        async with processes.episode() as environment:
            await environment.constructor()
            with pytest.raises(EpisodeError, match="Resource temporarily unavailable"):
                async with processes.episode() as other:
                    await other.constructor()
            async with processes.episode() as third:
                await third.constructor()
            return await environment.reset(Prompt("q", "OTHER", (3,), ""))

    try:
        assert asyncio.run(beside()) == os.environ.get("OTHER", "none")
    finally:
        processes.close()


def test_a_process_that_takes_too_long_to_start_is_ended(monkeypatch):
    workers, launch = [], forks.launch_worker
    monkeypatch.setattr(
        forks, "launch_worker", lambda *args: workers.append(launch(*args)) or workers[-1]
    )
    monkeypatch.setattr(forks, "START_SECONDS", 0.01)
    processes = EnvironmentProcesses("tests.faults.environments:Asked")
    with pytest.raises(EpisodeError, match=r"agent\.environment .* not imported within 0\.01 s"):
        processes.start()
    assert workers[0][0].returncode is not None and processes._process is None


def test_of_a_start_that_failed_or_was_cancelled_nothing_is_ended():
    async def call():
        ended = []
        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
        futures[0].set_exception(EpisodeError("it cannot be imported"))
        futures[1].cancel()
        futures[2].set_result(lambda: ended.append(7))
        for future in futures:
            forks.end_unused(future)
        return ended

    assert asyncio.run(call()) == [7]


class Slow:
    """Of EnvironmentProcesses and its environment, what a constructor that hangs needs."""

    @asynccontextmanager
    async def episode(self):
        yield self

    async def constructor(self):
        await asyncio.sleep(60)


def test_a_constructor_that_hangs_is_named():
    cfg = AgentConfig(environment="tests.faults.environments:Asked", step_timeout_seconds=0.05)
    rollout = EnvironmentRollout(None, cfg, Slow())
    session = SimpleNamespace(span=lambda *_: nullcontext())
    with pytest.raises(
        EpisodeError, match="^constructor took longer than agent.step_timeout_seconds = 0.05$"
    ):
        asyncio.run(rollout(session, PROMPTS[0]))


def test_a_runs_processes_get_its_limit_and_not_its_key(monkeypatch):
    def run(**agent):
        cfg = {
            "model": ModelConfig(path="."),
            "data": DataConfig(train="x"),
            "agent": AgentConfig(**agent),
        }
        return make_runner(
            Config(rollout=RolloutConfig(api_key_env="SECRET_KEY"), **cfg), word_tokenizer(), 64
        )

    monkeypatch.setattr(EnvironmentProcesses, "start", lambda self: None)
    environment = {"environment": "tests.faults.environments:Asked"}
    assert run() is None and run(**environment).processes is None
    processes = run(**environment, isolation="process", process_memory_gib=1.5).processes
    spec = processes.spec
    assert (spec.arguments, spec.memory_bytes) == ((environment["environment"],), 3 * 2**29)
    assert spec.hidden_env == ("SECRET_KEY",)


def test_a_function_without_messages_needs_no_format():
    check_agent(AgentConfig(function=f"{__name__}:counts"), word_tokenizer())
    with pytest.raises(ValueError, match="agent.renderer = 'qwen3'"):
        check_agent(AgentConfig(function=f"{__name__}:counts", renderer="qwen3"), word_tokenizer())


def test_a_class_that_cannot_be_imported_is_named():
    with pytest.raises(
        EpisodeError, match="agent.environment cannot be imported.*AttributeError.*Nothing"
    ):
        EnvironmentProcesses("tests.faults.environments:Nothing").start()


@pytest.mark.parametrize(
    "settings, why",
    [
        (
            {"function": "a:b", "isolation": "process"},
            "agent.isolation = process has no effect with no agent.environment",
        ),
        (
            {"environment": "a:B", "process_memory_gib": 1.0},
            "has no effect with agent.isolation = thread",
        ),
        ({"concurrency": 3}, "agent.concurrency = 3 has no effect"),
    ],
)
def test_a_setting_without_effect_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        Config(
            model=ModelConfig(path="."), data=DataConfig(train="x"), agent=AgentConfig(**settings)
        )


running = [0, 0]


async def counts(session, prompt):
    running[0] += 1
    running[1] = max(running)
    await session.generate()
    await asyncio.sleep(0.01)
    running[0] -= 1
    return session.finish(1.0)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_numbers_and_truth_values_of_numpy_are_those_of_python(isolation):
    name, processes = "tests.faults.environments:OfNumpy", None
    agent = AgentConfig(environment=name, isolation=isolation)
    if isolation == "process":
        processes = EnvironmentProcesses(name)
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, 0, None, processes)
    try:
        with FakeServer("ok") as server:
            rules = SampleRules(SPEC, want_routes=True)
            client = RolloutClient([server.url], RolloutConfig(), rules, episodes=runner)
            rollout = responses(client, PROMPTS[:1])[0]
    finally:
        if processes is not None:
            processes.close()
    assert rollout.episode.reward == 0.5 and len(rollout.episode.turns) == 2
    assert rollout.episode.metrics == {"is_last": 1.0, "is_done": 1.0}


async def fails_early(session, prompt):
    if prompt.id != "q0":
        raise KeyError("no such tool")
    await session.generate()
    return session.finish(1.0)


async def always_fails(session, prompt):
    raise KeyError("no such tool")


def sample(server, function, **settings):
    client = client_of(server, function, **settings)
    return client, responses(client, PROMPTS)


def client_of(server, function, **settings):
    agent = AgentConfig(function=f"{__name__}:{function}", **settings)
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, 1)
    return RolloutClient(
        [server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True), episodes=runner
    )


def responses(client, prompts):
    found = client.generate(
        prompts, 2, policy_version=VERSION, temperature=1.0, max_tokens=64, stop_token_ids=(1,)
    )
    return [rollout for group in found for rollout in group.rollouts]


def test_episodes_at_the_same_time_are_bounded():
    running[:] = 0, 0
    with FakeServer("ok") as server:
        assert len(sample(server, "counts", concurrency=3)[1]) == 8 and running == [0, 3]


def test_a_dropped_episode_has_no_reward_and_all_of_them_stop_the_run():
    with FakeServer(
        "ok", source=lambda body, prompt, name: one_token(body, prompt, name)
    ) as server:
        client, rollouts = sample(server, "fails_early", on_error="drop")
        assert [bool(np.isnan(rollout.episode.reward)) for rollout in rollouts] == [False] * 2 + [
            True
        ] * 6
        assert client.counters.dropped_episodes == client.counters.failed_episodes == 6
        assert {rollout.response_length for rollout in rollouts[2:]} == {1}, (
            "failed before its first turn"
        )
        with pytest.raises(
            RolloutError, match="all 8 episodes failed, the last one: .*no such tool"
        ):
            sample(server, "always_fails", on_error="drop")


def test_one_prompt_on_which_a_working_function_fails_does_not_stop_the_run():
    """Dynamic sampling may draw a single prompt, of which no episode can be played."""
    with FakeServer(
        "ok", source=lambda body, prompt, name: one_token(body, prompt, name)
    ) as server:
        client = client_of(server, "fails_early", on_error="drop")
        for _ in range(2):
            responses(client, PROMPTS[:2])
            assert np.isnan(
                [rollout.episode.reward for rollout in responses(client, PROMPTS[1:2])]
            ).all()
        with pytest.raises(RolloutError, match="all 2 episodes failed"):
            responses(client, PROMPTS[1:2])  # twice in a row


def one_token(body, prompt, name):
    from tests.faults.samples import honest_sample

    return honest_sample(body, prompt, name, min(5, body["sampling_params"]["max_new_tokens"]))


@pytest.mark.slow
def test_a_thousand_open_sessions_lose_nothing():
    found = measure(1000)
    print(found)
    assert (found.lost, found.duplicated, found.wrong) == (0, 0, 0)
    assert sorted(found.blocks)[-3] < 0.05, "the event loop was blocked"
