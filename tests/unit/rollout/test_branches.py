"""Episodes of several sequences: each token that was sampled is learned from once, with what it was sampled with."""

import asyncio

import numpy as np
import pytest

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.words import word_tokenizer

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(2)]
TURN = 5  # tokens that the fake server samples


async def tree(session, prompt):
    """Two turns; from the middle of the second two branches side by side, one of them with another turn."""
    await session.generate()
    session.observe([40, 41])
    await session.generate()
    middle = session.token_ids[:-2]
    left, right = session.branch(middle), session.branch([*middle, 50])
    session.branch([9])  # without a turn: left out
    await asyncio.gather(left.generate(), right.generate(max_tokens=TURN, stop_token_ids=[9]))
    left.observe("w42")
    await left.generate()
    return session.finish(0.5, {"branches": 2})


def client_of(server, function, **settings):
    cfg = RolloutConfig(max_retries=0, idle_timeout_seconds=5.0)
    limit = settings.pop("sequence_limit", None)
    agent = AgentConfig(function=f"{__name__}:{function}", **settings)
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, cfg.max_retries, limit)
    return RolloutClient([server.url], cfg, spec=SPEC, want_routes=True, episodes=runner)


def sample(client, *, group_size=1, max_tokens=64):
    settings = {"policy_version": VERSION, "temperature": 1.0, "max_tokens": max_tokens, "stop_token_ids": (1,)}
    return client.generate(PROMPTS, group_size, **settings)


def test_a_tree_is_one_rollout_of_its_sequences():
    with FakeServer("ok") as server:
        groups = sample(client_of(server, "tree"), group_size=2)
        stops = {tuple(body["sampling_params"]["stop_token_ids"]) for body in server.requests}
    assert stops == {(1,), (1, 9)}
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.reward == 0.5 and rollout.metrics == {"branches": 2} and rollout.finish_reason == "stop"
            first, right, left = rollout.sequences  # in the order of their last turns
            assert [each.id for each in rollout.sequences] == [f"{rollout.id}/0", f"{rollout.id}/1", rollout.id]
            middle = 3 + TURN + 2 + TURN - 2
            assert [each.prompt_length for each in (first, right, left)] == [3, middle + 1, middle]
            assert [each.num_turns for each in (first, right, left)] == [2, 1, 2]
            assert np.array_equal(left.tokens[:middle], first.tokens[:middle])
            assert right.tokens[middle] == 50 and left.tokens[slice(*left.environment[0])] == [42]
            assert rollout.episode_length == 5 * TURN and rollout.response_length == 2 * TURN


async def busy_twice(session, prompt):
    branch = session.branch([3])
    await asyncio.gather(branch.generate(), branch.generate())


async def nowhere(session, prompt):
    session.branch([])


async def outside(session, prompt):
    session.branch([3, SPEC.vocab_size])


async def too_long(session, prompt):
    session.branch(range(10, 30))


async def after_the_end(session, prompt):
    await session.generate()
    session.finish()
    await session.branch([3]).generate()


@pytest.mark.parametrize(
    "function, why",
    [
        ("busy_twice", "a turn is being sampled; a sequence grows turn by turn.*session.branch"),
        ("nowhere", "a branch must start with at least one token"),
        ("outside", "branched from token id 64, the model's vocabulary has 64"),
        ("too_long", "starts with 20 tokens: must be fewer than 20, the longest sequence that CACHE allows"),
        ("after_the_end", "the episode is finished"),
    ],
)
def test_a_branch_that_cannot_be_is_named(function, why):
    with FakeServer("ok") as server, pytest.raises(RolloutError, match=why):
        sample(client_of(server, function, sequence_limit=(20, "CACHE")))


async def until_full(session, prompt):
    """As a harness that starts again with less history where the context is full."""
    await session.generate(max_tokens=TURN)
    branch = session.branch(session.token_ids[-2:])
    while True:
        await branch.generate(max_tokens=TURN)
        branch.observe([40, 41])


@pytest.mark.parametrize(
    "settings, max_tokens, turns",
    [
        ({"max_episode_tokens": 3 * TURN + 2}, 64, 2),
        ({"max_episode_tokens": 3 * TURN + 4}, 64, 2),
        ({}, 2 * TURN + 2, 2),
        ({"sequence_limit": (2 + 2 * TURN + 2, "CACHE")}, 64, 2),
    ],
)
def test_every_limit_ends_the_episode_as_truncated(settings, max_tokens, turns):
    with FakeServer("ok") as server:
        rollout = sample(client_of(server, "until_full", **settings), max_tokens=max_tokens)[0].rollouts[0]
    assert [each.num_turns for each in rollout.sequences] == [1, turns]
    assert rollout.finish_reason == "length" and rollout.episode_length == (1 + turns) * TURN
