"""An open call of the client: a signal keeps what it has sampled, and a server's death does not end
it for good.
"""

import asyncio
import threading
from queue import SimpleQueue

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.trace import OFF
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.call import Call
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.generation_task import GenerationTask
from megatron_rl.rollout.group import Group
from tests.fake_model import FakeModel, assert_fingerprints
from tests.fake_server import SPEC, FakeServer, wait_for

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(4)]
SAMPLING = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=(1,), policy_version=3)


def test_a_signal_while_a_weight_sync_waits_keeps_every_token(monkeypatch):
    """The call drains, and would wait for the longest responses: the signal cuts them short."""
    draining, commands, real = threading.Event(), SimpleQueue(), Call.drain
    groups = [Group(prompt, 2) for prompt in PROMPTS]

    async def drain(call):
        draining.set()
        await real(call)

    monkeypatch.setattr(Call, "drain", drain)
    with FakeServer("slow", source=FakeModel(version=3)) as server:
        client = RolloutClient(
            [server.url], RolloutConfig(max_retries=0), SampleRules(SPEC, want_routes=True)
        )

        def stop():
            assert wait_for(lambda: len(server.requests) == len(PROMPTS), 30)
            commands.put("drain")
            assert draining.wait(30)
            client.stop(keep_parts=True)

        signal = threading.Thread(target=stop)
        signal.start()
        with pytest.raises((RolloutError, asyncio.CancelledError)):
            client.fill(groups, SAMPLING, commands=commands)
        signal.join()
    parts = [part for group in groups for part in group.prefixes.values()]
    assert len(parts) == 2 * len(PROMPTS) and client.counters.lost_samples == 0
    for part in parts:
        assert part.response_length == 2 and part.finish_reason == "abort"
        assert_fingerprints(part)


def test_a_signal_that_comes_as_a_call_ends_is_no_error(monkeypatch):
    """Its event loop is closed, and the client does not know that yet."""
    run = asyncio.run

    def run_and_stop(call):
        try:
            return run(call)
        finally:
            client.stop(keep_parts=True)

    monkeypatch.setattr(asyncio, "run", run_and_stop)
    with FakeServer("ok", source=FakeModel(version=3)) as server:
        client = RolloutClient(
            [server.url], RolloutConfig(max_retries=0), SampleRules(SPEC, want_routes=True)
        )
        (group,) = client.fill([Group(PROMPTS[0], 2)], SAMPLING)
        assert group.is_complete
        with pytest.raises(RolloutError, match="was stopped"):
            client.fill([Group(PROMPTS[0], 2)], SAMPLING)


def test_an_open_task_starts_again_with_fewer_groups_than_a_step_takes():
    """After a refill its complete groups are gone: `keep`, a step's share, would be refused."""

    class Client:
        trace, calls = OFF, []

        def fill(self, groups, sampling, *, keep, on_progress, commands):
            self.calls.append((len(groups), keep, commands is not None))

    client, groups = Client(), [Group(prompt, 1) for prompt in PROMPTS]
    task = GenerationTask(groups[:2], SAMPLING, keep=4, is_open=True)
    task.start(client)
    assert task.wait() is None
    closed = GenerationTask(groups, SAMPLING, keep=3)
    closed.start(client)
    assert closed.wait() is None
    assert client.calls == [(2, None, True), (4, 3, False)]
