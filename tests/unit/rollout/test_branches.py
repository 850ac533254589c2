"""Episodes of several sequences: each token that was sampled is learned from once, with what it was
sampled with.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.batch.pack import PackRule, Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import AgentConfig, RolloutConfig, load_config
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.episode import EpisodeError
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.agents.sequence_limit import sequence_limit
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.response import ExpectedSample, parse_sample
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from tests.fake_model import TurnModel
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.faults.samples import honest_sample
from tests.unit.rollout.test_endpoint import CHAT_SPEC, PROMPT, TOKENIZER, USER, chat_sample
from tests.words import word_tokenizer

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(2)]
TURN = 5  # tokens that the fake server samples


async def tree(session, prompt):
    """Two turns; from the middle of the second two branches side by side, one of them with another
    turn.
    """
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
    return RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner)


def sample(client, *, group_size=1, max_tokens=64):
    settings = {
        "policy_version": VERSION,
        "temperature": 1.0,
        "max_tokens": max_tokens,
        "stop_token_ids": (1,),
    }
    return client.generate(PROMPTS, group_size, **settings)


def test_a_tree_is_one_rollout_of_its_sequences():
    with FakeServer("ok") as server:
        groups = sample(client_of(server, "tree"), group_size=2)
        stops = {tuple(body["sampling_params"]["stop_token_ids"]) for body in server.requests}
    assert stops == {(1,), (1, 9)}
    for group in groups:
        for rollout in group.rollouts:
            assert (
                rollout.episode.reward == 0.5
                and rollout.episode.metrics == {"branches": 2}
                and rollout.finish_reason == "stop"
            )
            first, right, left = rollout.sequences  # in the order of their last turns
            assert [each.id for each in rollout.sequences] == [
                f"{rollout.id}/0",
                f"{rollout.id}/1",
                rollout.id,
            ]
            middle = 3 + TURN + 2 + TURN - 2
            assert [each.prompt_length for each in (first, right, left)] == [3, middle + 1, middle]
            assert [each.num_spans for each in (first, right, left)] == [2, 1, 2]
            assert np.array_equal(left.tokens[:middle], first.tokens[:middle])
            assert right.tokens[middle] == 50 and left.tokens[slice(*left.environment[0])] == [42]
            assert rollout.episode_length == 5 * TURN and rollout.response_length == 2 * TURN


def answers(server):
    """What the server answered to each request, in their order: (input, the answer alone as a
    rollout).
    """
    for body in server.requests:
        (ids,) = body["input_ids"]
        yield parse_sample(
            server.served[f"{body['rid']}_0"],
            ExpectedSample(Prompt("", "", tuple(ids), ""), ""),
            Sampling(1.0, TURN, (), VERSION),
            SampleRules(SPEC, want_routes=True),
        )


def test_each_sampled_token_is_learned_from_once_with_what_it_was_sampled_with():
    with FakeServer("ok") as server:
        rollouts = [
            r for group in sample(client_of(server, "tree"), group_size=2) for r in group.rollouts
        ]
        sampled = []  # log-prob, which identifies the token; token; its row of expert ids
        for answer in answers(server):
            rows = zip(answer.sampled - 1, answer.rollout_logprobs.tolist(), strict=True)
            sampled += [
                (p, int(answer.tokens[t + 1]), answer.routed_experts[t].tobytes()) for t, p in rows
            ]
    assert len({p for p, *_ in sampled}) == len(sampled) == len(rollouts) * 5 * TURN
    batch = make_mini_batch(
        [Sample(r, 1.0) for r in rollouts], max_tokens=60, rule=PackRule(), dp_group=None
    )
    learned = []
    for micro, samples in zip(batch.micro_batches, batch.samples, strict=True):
        for row in micro.loss_mask.nonzero().flatten().tolist():
            number = int(micro.sequence_ids[row])
            routes = samples[number].rollout.routed_experts
            ids = routes[row - int(micro.cu_seqlens[number])]
            learned.append(
                (
                    float(micro.rollout_logprobs[row]),
                    int(micro.labels[row]),
                    ids.astype(np.uint8).tobytes(),
                )
            )
    assert sorted(learned) == sorted(sampled)
    assert (batch.num_responses, batch.num_response_tokens) == (len(rollouts), len(sampled))
    for sequence in (sequence for rollout in rollouts for sequence in rollout.sequences):
        assert sequence.policy_versions.tolist() == [VERSION] * sequence.response_length


async def three_turns(session, prompt):
    for observed in ([40], [41, 42], []):
        await session.generate()
        session.observe(observed)
    return session.finish()


def one_by_one(server, function):
    """With the same names of requests each time, so that a server answers the same."""
    client = client_of(server, function)
    client.cfg = client.cfg.model_copy(update={"max_concurrency": 1, "max_retries": 3})
    client._name = "same"
    return client, [group.rollouts[0] for group in sample(client)]


def test_known_routes_are_not_requested_again(caplog):
    with FakeServer("ok") as new, FakeServer("all_rows") as old:
        client, rollouts = one_by_one(new, "three_turns")
        before, others = one_by_one(old, "three_turns")
        starts = [body.get("routed_experts_start_len", 0) for body in new.requests]
        assert starts == [0, 2 + TURN, 2 + TURN + 1 + TURN] * 2
        assert [body.get("routed_experts_start_len", 0) for body in old.requests] == starts
    for one, other in zip(rollouts, others, strict=True):
        for name in (
            "tokens",
            "rollout_logprobs",
            "routed_experts",
            "routes_digest",
            "policy_versions",
        ):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert one.routed_experts.dtype == other.routed_experts.dtype == np.uint8
        assert one.routed_experts.transpose(1, 0, 2).flags.c_contiguous
    assert (client.counters.resent_routes, before.counters.resent_routes) == (0, 4)
    assert before.counters.totals()["rollout/resent_routes_total"] == 4
    assert sum("routed_experts_start_len" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("fault", ["short_routes", "long_routes", "empty_routes", "no_routes"])
def test_other_numbers_of_rows_are_refused(fault):
    with FakeServer("ok", fault, "ok") as server, FakeServer("ok") as good:
        client, rollouts = one_by_one(server, "three_turns")
        _, others = one_by_one(good, "three_turns")
    assert client.counters.dropped.total() == 1 and client.counters.resent_routes == 0
    assert rollouts[0].response_length == others[0].response_length == 3 * TURN


@pytest.mark.parametrize("mark", ["gap_of_zeros", "gap_of_minus_one"])
def test_rows_without_a_route_stay_where_they_are(mark):
    """Row 4 of each answer: of the first turn a prompt's or a sampled token's, of the second one
    four later.
    """
    with FakeServer(mark, mark, "ok") as server:
        _, (rollout, _) = one_by_one(server, "three_turns")
    assert np.flatnonzero(rollout.missing_routes).tolist() == [4, 2 + TURN + 4]


def stopped(body, prompt, sample_id):
    honest = honest_sample(body, prompt, sample_id)
    return honest | {
        "meta_info": honest["meta_info"] | {"finish_reason": {"type": "stop", "matched": 1}}
    }


async def stops_itself(session, prompt):
    await session.generate(stop_token_ids=range(SPEC.vocab_size))
    return session.finish()


async def stops(session, prompt):
    await session.generate()
    return session.finish()


def test_what_ends_one_turn_is_no_end_of_others():
    """An aborted response that happens to end in such a token is not complete."""
    for function, is_known in (("stops_itself", False), ("stops", True)):
        with FakeServer("ok", source=stopped) as server:
            client = client_of(server, function)
            assert {group.rollouts[0].finish_reason for group in sample(client)} == {"stop"}
        assert bool(client._ends) == is_known


@pytest.mark.parametrize(
    "sections, server_tokens, limit",
    [
        (
            {"run": {"max_tokens_per_micro_batch": 500}},
            4096,
            (500, "run.max_tokens_per_micro_batch = 500"),
        ),
        ({}, 4096, (1124, "run.max_tokens_per_micro_batch = 50")),
        ({}, 994, (994, "the servers' max_req_input_len = 994")),
        ({"rollout": {"max_total_tokens": 700}}, 694, (694, "rollout.max_total_tokens = 700")),
        (
            {"rollout": {"urls": ["http://a:1"], "max_total_tokens": 700}},
            994,
            (994, "the servers' max_req_input_len = 994"),
        ),
        (
            {"eval": {"max_response_tokens": 2048}, "agent": {"function": "a:b"}},
            4096,
            (2148, "run.max_tokens_per_micro_batch = 50"),
        ),
        ({}, None, (1124, "run.max_tokens_per_micro_batch = 50")),
    ],
)
def test_a_sequence_fits_servers_and_trainer(sections, server_tokens, limit, tmp_path):
    base = {
        "model": {"path": str(tmp_path)},
        "data": {"train": "x.jsonl", "max_prompt_tokens": 100},
    }
    base |= {"run": {"max_tokens_per_micro_batch": 50}, "rollout": {"max_response_tokens": 1024}}
    if "run" in sections:
        base["rollout"]["max_response_tokens"] = 64
    for section, values in sections.items():
        base[section] = base.get(section, {}) | values
    assert sequence_limit(load_config(None, [], base), server_tokens) == limit


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


async def observes_after_the_end(session, prompt):
    await session.generate()
    session.finish()
    session.observe([40])


@pytest.mark.parametrize(
    "function, why",
    [
        ("busy_twice", "a turn is being sampled; a sequence grows turn by turn.*session.branch"),
        ("nowhere", "a branch must start with at least one token"),
        ("outside", "branched from token id 64, the model's vocabulary has 64"),
        (
            "too_long",
            "starts with 20 tokens: must be fewer than 20, the longest sequence that CACHE allows",
        ),
        ("after_the_end", "the episode is finished"),
        ("observes_after_the_end", "the episode is finished"),
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
        ({"max_episode_tokens": 500}, 2 * TURN + 2, 2),
        ({"sequence_limit": (2 + 2 * TURN + 2, "CACHE")}, 64, 2),
    ],
)
def test_every_limit_ends_the_episode_as_truncated(settings, max_tokens, turns):
    with FakeServer("ok") as server:
        rollout = sample(client_of(server, "until_full", **settings), max_tokens=max_tokens)[
            0
        ].rollouts[0]
    assert [each.num_spans for each in rollout.sequences] == [1, turns]
    assert rollout.finish_reason == "length" and rollout.episode_length == (1 + turns) * TURN


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: first factor
        b: second factor
    """
    return a * b


async def rewards_turns(session, prompt):
    """Of two conversations, the first of two turns."""
    call = await session.generate([USER], tools=[multiply])
    session.reward_turn(0.25)
    messages = [USER, call.message, *await session.call_tools(call)]
    answer = await session.generate(messages, tools=[multiply])
    session.reward_turn(1.0)
    other = await session.generate([USER])
    session.reward_turn(4.0)
    for turn, reward in ((call, 0.5), (other, -2.0), (answer, 8.0)):
        session.reward_turn(reward, turn)
    with pytest.raises(EpisodeError, match="none of this episode's"):
        session.reward_turn(1.0, replace(call))
    return session.finish()


def test_turns_of_conversations_get_their_rewards():
    agent = AgentConfig(function=f"{__name__}:rewards_turns", renderer="qwen3")
    runner = EpisodeRunner(agent, TOKENIZER, CHAT_SPEC.vocab_size, 0, (2000, "the test"))
    with FakeServer("ok", source=chat_sample) as server:
        client = RolloutClient(
            [server.url], RolloutConfig(), SampleRules(CHAT_SPEC, want_routes=True), episodes=runner
        )
        settings = {
            "policy_version": VERSION,
            "temperature": 1.0,
            "max_tokens": 600,
            "stop_token_ids": (),
        }
        ((rollout,),) = [group.rollouts for group in client.generate([PROMPT], 1, **settings)]
    assert [sequence.episode.turn_rewards for sequence in rollout.sequences] == [
        (0.75, 9.0),
        (2.0,),
    ]
    assert rollout.episode.reward == 11.75


async def observes_messages(session, prompt):
    for max_tokens in (TURN, TURN - 2, TURN - 1):
        await session.generate(max_tokens=max_tokens)
    session.observe([{"role": "tool", "content": "4"}])
    await session.generate(max_tokens=1)
    return session.finish()


def test_messages_follow_the_last_turn_of_its_sequence(monkeypatch):
    runner = EpisodeRunner(
        AgentConfig(function=f"{__name__}:observes_messages"), word_tokenizer(), SPEC.vocab_size, 0
    )
    extended = []
    runner.chat = SimpleNamespace(
        stop_token_ids=[], extend=lambda *given: extended.append(given) or [40, 41]
    )
    with FakeServer("ok", source=TurnModel(version=VERSION)) as server:
        cfg = RolloutConfig(max_retries=0)
        client = RolloutClient(
            [server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner
        )
        rollouts = [rollout for group in sample(client) for rollout in group.rollouts]
    assert len(extended) == len(rollouts) > 0  # in the order in which the episodes came to it
    messages_of = {
        (*prompt, None, *completion): messages for prompt, completion, messages in extended
    }
    for rollout in rollouts:
        end = rollout.prompt_length + 3 * TURN - 3
        start = end - (TURN - 1)
        key = (*rollout.tokens[:start].tolist(), None, *rollout.tokens[start:end].tolist())
        assert messages_of[key] == [{"role": "tool", "content": "4"}]
        assert rollout.tokens[end : end + 2].tolist() == [40, 41]


INPUTS = {"messages": [{"role": "user", "content": "go"}], "tokens": [42], "text": "w43"}


async def reads_turns(session, prompt):
    await session.generate(max_tokens=1)
    for kind in ("messages", "tokens", "messages", "text"):
        session.observe(INPUTS[kind])
        assert (await session.generate(max_tokens=1)).reply
    return session.finish()


def test_a_turn_after_raw_text_is_read_from_all_tokens_before_it():
    """A format reads a turn from the tokens that it wrote itself; it did not write these."""
    runner = EpisodeRunner(
        AgentConfig(function=f"{__name__}:reads_turns"), word_tokenizer(), SPEC.vocab_size, 0
    )
    read = []
    runner.chat = SimpleNamespace(
        stop_token_ids=[],
        extend=lambda *_: [40, 41],
        parse=lambda prompt, *_: read.append(len(prompt)) or Reply("", None, ()),
    )
    with FakeServer("ok", source=TurnModel(version=VERSION)) as server:
        cfg = RolloutConfig(max_retries=0)
        client = RolloutClient(
            [server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner
        )
        groups = sample(client)
    start = len(PROMPTS[0].token_ids)
    # after messages: the turn before, of one token, and the two that the format wrote
    numbers = [3, start + 5, 3, start + 10]
    assert sorted(read) == sorted(numbers * sum(len(group.rollouts) for group in groups))
