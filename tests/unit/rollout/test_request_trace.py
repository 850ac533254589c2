"""Spans of requests, turns, environments and rewards: the ones that happened, on the lanes of their
server and episode.
"""

import asyncio
import json

from megatron_rl.config import AgentConfig, RewardConfig, RolloutConfig
from megatron_rl.launch.trace import Trace
from megatron_rl.launch.trace_file import SharedClock, rank_path, read_rank, write_trace
from megatron_rl.records import Prompt
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.agents import Step
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.counters import num_tokens
from megatron_rl.rollout.client.sampling import SampleRules
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.faults.samples import honest_sample, with_meta
from tests.unit.launch.test_trace import check_names, check_nesting
from tests.words import word_tokenizer

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(3)]
SETTINGS = dict(temperature=1.0, max_tokens=64, stop_token_ids=[1], policy_version=VERSION)


class Walk:
    """Two steps."""

    def __init__(self):
        self.steps = 0

    async def step(self, turn):
        self.steps += 1
        await asyncio.sleep(0)
        return Step((40, 41, 42), reward=1.0, done=self.steps == 2)

    def reset(self, prompt):
        return None


def sample(servers, runner=None, group_size=2):
    client = RolloutClient(
        [each.url for each in servers],
        RolloutConfig(),
        SampleRules(SPEC, want_routes=True),
        episodes=runner,
    )
    client.trace = Trace(is_on=True)
    groups = client.generate(PROMPTS, group_size, **SETTINGS)
    return groups, client.trace.take(), client


def test_every_request_is_a_span_of_its_server():
    with FakeServer("http_500", "ok") as one, FakeServer("ok") as two:
        _, spans, client = sample([one, two])
        bodies = {
            body["rid"]: (server.url, body) for server in (one, two) for body in server.requests
        }
        served = one.served | two.served
    requests = {span.key: span for span in spans if span.name == "request"}
    assert len(bodies) == client.counters.requests == 4 and requests.keys() == bodies.keys()
    prompts = {tuple(prompt.token_ids): prompt.id for prompt in PROMPTS}
    failed = [span for span in requests.values() if "error" in span.values]
    assert [span.values["error"] for span in failed] == ["RetryableError"] and failed[
        0
    ].process == one.url
    for rid, (url, body) in bodies.items():
        span = requests[rid]
        assert (span.process, span.thread, span.kind) == (url, "request", "request")
        assert span.values["prompt"] == prompts[tuple(body["input_ids"][0])]
        assert (span.values["samples"], span.values["turn"], span.values["prompt_tokens"]) == (
            2,
            1,
            3,
        )
        parts = [each for each in spans if each.key == rid and each is not span]
        wanted = ["until first byte", "answer"] + ["parse"] * (span not in failed)
        assert [each.name for each in parts] == wanted and {each.process for each in parts} == {url}
        assert (
            span.start <= parts[0].start
            and parts[0].end <= parts[1].start
            and parts[-1].end <= span.end
        )
        if span not in failed:
            sent = [served[f"{rid}_{i}"] for i in range(2)]
            assert parts[2].values["bytes"] == len(json.dumps(sent))
            assert (
                span.values["tokens"] == sum(num_tokens(served[f"{rid}_{i}"]) for i in range(2)) > 0
            )


def test_turns_and_environment_steps_are_on_the_lanes_of_their_episode(tmp_path):
    cfg = AgentConfig(environment=f"{__name__}:Walk")
    runner = EpisodeRunner(cfg, word_tokenizer(), SPEC.vocab_size, max_retries=0)
    with FakeServer("ok") as server:
        groups, spans, _ = sample([server], runner)
    names = {rollout.id for group in groups for rollout in group.rollouts}
    assert len(names) == 6
    for name in names:
        own = sorted((span for span in spans if span.key == name), key=lambda span: span.start)
        assert [span.name for span in own] == [
            "episode",
            "constructor",
            "reset",
            "turn 1",
            "step",
            "turn 2",
            "step",
        ]
        assert [span.kind for span in own[:4]] == ["episode", "environment", "environment", "turn"]
        assert all(own[0].start <= span.start and span.end <= own[0].end for span in own)
        turns = [
            span.values["turn"]
            for span in spans
            if span.name == "request" and span.values["prompt"] == name
        ]
        assert sorted(turns) == [1, 2]
    write_trace(
        rank_path(tmp_path, 0), spans, rank=0, world_size=1, step=0, clock=SharedClock("h", 0, 0)
    )
    events = read_rank(rank_path(tmp_path, 0)).events
    check_nesting(events)
    check_names(events)
    assert sum(event["ph"] == "X" for event in events) == len(spans)


def test_every_call_of_the_reward_function_is_a_span():
    with RewardPool(
        RewardConfig(function="tests.unit.reward.functions:by_response", num_workers=2)
    ) as pool:
        pool.trace = Trace(is_on=True)
        pool.score([("p", text, "") for text in ("1", "2", "3", "3")])
        spans = pool.trace.take()
    assert [span.kind for span in spans] == ["reward"] * 3, "equal calls are made once"
    assert len({span.key for span in spans}) == 3 and {span.values["worker"] for span in spans} <= {
        0,
        1,
    }


def test_what_a_server_says_about_its_time_is_that_of_the_slowest_sample():
    def source(body, prompt, name):
        sample, number = honest_sample(body, prompt, name), int(name[-1])
        return with_meta(queue_time=0.5 + number, e2e_latency=None if number else 2)(sample)

    with FakeServer("ok", source=source) as server:
        _, spans, _ = sample([server], group_size=3)
    values = [span.values for span in spans if span.name == "request"]
    assert [(each["server_queue_time"], each["server_e2e_latency"]) for each in values] == [
        (2.5, 2)
    ] * 3


def test_off_a_request_records_nothing():
    with FakeServer("ok") as server:
        client = RolloutClient([server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True))
        client.generate(PROMPTS[:1], 1, **SETTINGS)
    assert client.trace.take() == []
