"""Three turns on real SGLang servers, with the prefix cache, evicted, and on another server each
turn, and branches of an
episode: log-probs, and every token's experts in every layer, are those of transformers on the whole
sequence."""

import asyncio
import itertools
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from megatron_rl.config import AgentConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.rollout.server.server_info import server_info
from tests.e2e.reference import TINY_SPEC, assert_is_from
from tests.words import small_qwen_tokenizer, word_tokenizer

PROMPTS = [
    Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i), label="")
    for i in range(4)
]
TEMPERATURE = 0.7
between_turns = []  # called with the session after every turn


async def three_turns(session, prompt):
    for turn in range(3):
        await session.generate(max_tokens=12)
        for call in between_turns:
            await call(session)
        session.observe([7 + turn, 50 - turn, 20])
    return session.finish()


async def tree(session, prompt):
    """After the first turn two branches side by side: one continues what was sampled, one drops
    half of it.
    """
    turn = await session.generate(max_tokens=12)
    half = len(prompt.token_ids) + len(turn.token_ids) // 2
    branches = [
        session.branch([*session.token_ids, 33]),
        session.branch([*session.token_ids[:half], 21, 22]),
    ]

    async def two_turns(branch):
        await branch.generate(max_tokens=12)
        branch.observe([41, 20])
        await branch.generate(max_tokens=12)

    await asyncio.gather(*map(two_turns, branches))
    return session.finish()


async def flush(session, url):
    """Nothing else is running: SGLang would refuse."""
    async with httpx.AsyncClient() as http:
        assert (await http.post(f"{url}/flush_cache")).status_code == 200


async def openai_agent(session, prompt):
    """Several turns, side by side ones, and a history that is shortened, through the endpoint."""
    endpoint = await session.open_endpoint()
    question = {"role": "user", "content": f"what is {prompt.id}?"}
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

        async def ask(*messages, **settings):
            found = await client.chat.completions.create(
                model="m", messages=messages, max_tokens=12, **settings
            )
            return [choice.message for choice in found.choices]

        one, two = await ask(question, n=2)
        more = {"role": "user", "content": "continue"}
        results = await asyncio.gather(
            ask(question, one, more), ask(question, two, more), ask(question, one, more)
        )
        await ask(question, one, more, results[0][0], more)
        await ask({"role": "user", "content": "in short: continue"})
    return session.finish()


def make_client(urls, cfg, function="three_turns", **settings):
    agent = AgentConfig(function=f"{__name__}:{function}", **settings)
    tokenizer = small_qwen_tokenizer() if agent.renderer else word_tokenizer()
    runner = EpisodeRunner(agent, tokenizer, TINY_SPEC.vocab_size, cfg.max_retries)
    return RolloutClient(urls, cfg, SampleRules(TINY_SPEC, want_routes=True), episodes=runner)


def sample(client, version, group_size=3, max_tokens=64):
    settings = {"temperature": TEMPERATURE, "max_tokens": max_tokens, "stop_token_ids": (1, 2)}
    groups = client.generate(PROMPTS, group_size, policy_version=version, **settings)
    return [rollout for group in groups for rollout in group.rollouts]


def check(checkpoint, rollouts):
    """Against one forward pass of transformers over all turns."""
    for rollout in rollouts:
        assert_is_from(checkpoint, rollout, TEMPERATURE)
        assert rollout.missing_routes is None
    return sum(len(rollout.routed_experts) for rollout in rollouts)


@pytest.mark.parametrize("evicted", [False, True])
def test_three_turns_are_those_of_one_forward_pass(
    evicted, sglang_server, tiny_checkpoint, rollout_config
):
    version = int(server_info(sglang_server.url).weight_version)
    httpx.post(f"{sglang_server.url}/flush_cache").raise_for_status()
    between_turns[:] = [lambda session: flush(session, sglang_server.url)] if evicted else []
    one_at_a_time = {"max_concurrency": 1} if evicted else {}
    client = make_client([sglang_server.url], rollout_config.model_copy(update=one_at_a_time))
    rollouts = sample(client, version, group_size=1 if evicted else 3)
    assert {rollout.num_spans for rollout in rollouts} == {3}
    assert check(tiny_checkpoint, rollouts) > 150
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == len(rollouts)
    assert (client.take_stats().cached_tokens == 0) == evicted
    if not evicted:
        check_branches(sglang_server.url, version, tiny_checkpoint, rollout_config)
        check_bytes_of_routes(sglang_server.url, version, rollout_config)


def check_branches(url, version, checkpoint, cfg):
    client = make_client([url], cfg, "tree")
    rollouts = sample(client, version)
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    assert [len(rollout.sequences) for rollout in rollouts] == [3] * len(rollouts)
    assert sorted({sequence.num_spans for sequence in sequences}) == [1, 2]
    assert check(checkpoint, sequences) > 500
    assert client.counters.resent_routes == 0 < client.take_stats().cached_tokens


def check_bytes_of_routes(url, version, cfg):
    """What three turns of one episode take, with and without the rows that are known."""
    taken = []
    for knows_rows in (True, False):
        client = make_client([url], cfg.model_copy(update={"max_concurrency": 1}))
        sizes, parse = [], client._parse

        def measured(sample, *rest, sizes=sizes, parse=parse):
            sizes.append(len(sample["meta_info"]["routed_experts"]))
            return parse(sample, *rest)

        client._parse = measured
        with pytest.MonkeyPatch.context() as patch:
            if not knows_rows:
                patch.setattr(Group, "first_row", 0)
            sample(client, version, group_size=1)
        taken.append(np.array(sizes).reshape(-1, 3).mean(0))
        assert client.counters.resent_routes == 0
    few, all_rows = taken
    print(
        f"bytes of routes per turn: {few.round()}, {all_rows.round()} without"
        " routed_experts_start_len"
    )
    assert few[0] > 0 and (few[1:] < 0.7 * all_rows[1:]).all() and few[2] < 0.5 * all_rows[2]


@pytest.mark.slow
def test_turns_on_two_servers(tiny_checkpoint, rollout_config, tmp_path):
    """Every turn on the other server than the one before, which has nothing of the episode in its
    cache.
    """
    between_turns.clear()
    # not the shared server, to which other tests have pushed
    logs = [tmp_path / f"log_{seed}" for seed in range(2)]
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                launch_server(
                    tiny_checkpoint, rollout_config, device="cpu", log_path=log, seed=seed
                )
            ).url
            for seed, log in enumerate(logs)
        ]
        client = make_client(urls, rollout_config.model_copy(update={"max_concurrency": 1}))
        numbers = itertools.count()
        client.balancer.pick = lambda avoid, prefer: client.balancer.servers[next(numbers) % 2]
        rollouts = sample(client, 0, group_size=1)
    assert {rollout.num_spans for rollout in rollouts} == {3}
    assert check(tiny_checkpoint, rollouts) > 100


def test_an_openai_client_is_recorded_exactly(sglang_server, tiny_checkpoint, rollout_config):
    """Every sequence of its episodes, with its log-probs and experts."""
    client = make_client([sglang_server.url], rollout_config, "openai_agent", renderer="qwen3")
    episodes = sample(
        client, int(server_info(sglang_server.url).weight_version), group_size=1, max_tokens=160
    )
    sequences = [sequence for episode in episodes for sequence in episode.sequences]
    assert check(tiny_checkpoint, sequences) > 500
    assert all(len(episode.sequences) >= 4 for episode in episodes)
    assert max(sequence.num_spans for sequence in sequences) == 3
    turns = sum(sequence.num_spans for sequence in sequences)
    # each is learned from once
    assert turns == 7 * len(episodes) and client.counters.samples == turns
