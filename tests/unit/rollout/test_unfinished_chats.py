"""Episodes of messages and tools that are cut short while a tool runs: they continue from the turns
that they had.
"""

import asyncio
import json
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from openai import AsyncOpenAI

from megatron_rl.batch.codec import from_bytes, to_bytes
from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.records.token_sets import TokenSets, check_mask
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import copied, find_groups, read_groups, write_groups
from tests.fake_server import VERSION, FakeServer, wait_for
from tests.unit.rollout.test_endpoint import (
    CALL,
    CHAT_SPEC,
    MULTIPLY,
    PROMPT,
    TOKENIZER,
    USER,
    chat_sample,
)

SAMPLING = Sampling(1.0, 600, (), VERSION, truncation=Truncation(0.9, 20, 0.05))
ran, go_on, seen = threading.Event(), threading.Event(), []


def chat_with_sets(body, prompt, sample_id):
    """Kept sets as SGLang returns them: every token with the next ids."""
    found = chat_sample(body, prompt, sample_id)
    tokens = found["output_ids"]
    sets = [
        [(token + place) % CHAT_SPEC.vocab_size for place in range(1 + token % 4)]
        for token in tokens
    ]
    found["meta_info"]["output_token_sampling_mask"] = sets
    found["meta_info"]["output_token_sampling_logprobs"] = [-float(len(own)) for own in sets]
    return found


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: first factor
        b: second factor
    """
    ran.set()
    go_on.wait(60)  # in a thread: it must not hold up the end of the run
    return a * b


async def calls_functions(session, prompt):
    messages = [USER]
    while (turn := await session.generate(messages, tools=[multiply])).reply.tool_calls:
        seen.append(turn.reply.tool_calls[0].id)
        messages += [turn.message, *await session.call_tools(turn)]
    return session.finish(1.0)


async def asks_the_endpoint(session, prompt):
    access = await session.open_endpoint()
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        asked = {"model": "m", "messages": [USER], "tools": [MULTIPLY]}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        seen.append(message.tool_calls[0].id)
        ran.set()
        await asyncio.sleep(0 if go_on.is_set() else 60)
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "6.0"}
        await client.chat.completions.create(**{**asked, "messages": [USER, message, answer]})
    return session.finish(1.0)


PROGRAM = """
import json, os, pathlib, sys, time, urllib.request
def ask(messages):
    body = json.dumps({"messages": messages, "tools": [json.loads(sys.argv[2])]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
user = {"role": "user", "content": json.loads(input())["text"]}
message = ask([user])
call = message["tool_calls"][0]["id"]
with open(sys.argv[1], "a") as file:
    print(call, file=file, flush=True)
if len(open(sys.argv[1]).readlines()) == 1:
    time.sleep(60)
ask([user, message, {"role": "tool", "tool_call_id": call, "content": "6.0"}])
print('{"reward": 1.0}')
"""


def client_of(server, **agent):
    cfg = RolloutConfig(max_retries=1, partial="resume", over_sample=0.5, max_staleness=1)
    cfg_agent = AgentConfig(renderer="qwen3", **agent)
    runner = EpisodeRunner(cfg_agent, TOKENIZER, CHAT_SPEC.vocab_size, 1, (2000, "the test"))
    return RolloutClient(
        [server.url], cfg, SampleRules(CHAT_SPEC, want_routes=True), episodes=runner
    )


@pytest.mark.parametrize("name", ["calls_functions", "asks_the_endpoint", "a program"])
def test_a_chat_that_waits_for_its_tool_continues_with_its_turns_and_kept_sets(tmp_path, name):
    ran.clear()
    go_on.clear()
    seen.clear()
    calls = tmp_path / "calls"
    agent = {"function": f"{__name__}:{name}"}
    if name == "a program":
        agent = {"command": (sys.executable, "-c", PROGRAM, str(calls), json.dumps(MULTIPLY))}
    groups = [Group(PROMPT, 1)]
    with FakeServer("ok", source=chat_with_sets) as server:
        first = client_of(server, **agent)
        stop = threading.Thread(
            target=lambda: (
                wait_for(lambda: ran.is_set() or calls.exists(), 60),
                first.stop(keep_parts=True),
            )
        )
        stop.start()
        with pytest.raises(asyncio.CancelledError):
            first.fill(groups, SAMPLING)
        stop.join()
        write_groups(tmp_path / "rollouts_00000.safetensors", copied(groups), [0])
        groups = read_groups(find_groups(tmp_path), [PROMPT], [0], slice(None))
        go_on.set()
        client = client_of(server, **agent)
        client.fill(groups, SAMPLING)
        assert len(server.requests) == 2, "the recorded turn was sampled again"
        assert (client.counters.resumed_episodes, client.counters.diverged_episodes) == (1, 0)
        (seconds,) = client.take_stats().environment_seconds
        assert 0 <= seconds < 60
    (rollout,) = groups[0].rollout_group().rollouts
    assert (
        len(rollout.episode.turns) == 2
        and len(rollout.sequences) == 1
        and rollout.episode.reward == 1.0
    )
    check_mask("q", rollout.sampling_mask, rollout.tokens[rollout.sampled])
    assert rollout.rollout_logprobs.tolist() == [
        -float(size) for size in rollout.sampling_mask.sizes
    ]
    assert rollout.episode.messages == (
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "6.0"},
        {"role": "assistant", "content": "It is 6.0"},
    )
    one, again = calls.read_text().split() if calls.exists() else seen
    assert one == again, "formats write the ids of calls: other ids are other tokens"


async def fails_in_two_sequences(session, prompt):
    if prompt.id == "q":
        await asyncio.gather(
            *(session.generate([USER, {"role": "user", "content": str(i)}]) for i in range(2))
        )
        raise KeyError("no such tool")
    await session.generate([USER])
    return session.finish(1.0)


def test_a_dropped_episode_keeps_the_sets_of_all_its_sequences():
    groups = [Group(PROMPT, 1), Group(replace(PROMPT, id="other"), 1)]
    with FakeServer("ok", source=chat_with_sets) as server:
        client = client_of(server, function=f"{__name__}:fails_in_two_sequences", on_error="drop")
        client.fill(groups, SAMPLING)
    (rollout,), _ = from_bytes(to_bytes([groups[0].rollout_group().rollouts[0]]))
    assert (
        np.isnan(rollout.episode.reward)
        and len(rollout.sequences) == 2
        and client.counters.dropped_episodes == 1
    )
    for sequence in rollout.sequences:
        check_mask("q", sequence.sampling_mask, sequence.tokens[sequence.sampled])
    assert min(client.take_stats().environment_seconds) >= 0


async def samples_side_by_side(session, prompt):
    await asyncio.gather(
        *(session.generate([USER, {"role": "user", "content": str(i)}]) for i in range(4))
    )
    return session.finish(1.0)


def test_time_in_which_several_turns_are_sampled_counts_once():
    with FakeServer("ok", source=chat_with_sets) as server:
        client = client_of(server, function=f"{__name__}:samples_side_by_side")
        client.fill([Group(PROMPT, 1)], SAMPLING)
    assert client.take_stats().environment_seconds[0] >= 0


def test_a_part_of_kept_sets_is_that_of_its_tokens():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 6, 7)
    ids = np.concatenate([np.sort(rng.choice(40_000, size, replace=False)) for size in sizes])
    mask, ends = TokenSets.of(sizes, ids), np.concatenate([[0], np.cumsum(sizes)])
    for start in range(7):
        for stop in range(start, 8):
            part = mask.part(start, stop)
            assert part.sizes.tolist() == sizes[start:stop].tolist()
            assert part.ids().tolist() == ids[ends[start] : ends[stop]].tolist()
