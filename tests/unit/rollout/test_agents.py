"""Rollouts of several turns: what each row was sampled by, what is learned from, and what a failing
function does.
"""

import asyncio
import contextlib
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batch.codec import from_bytes, to_bytes
from megatron_rl.batch.pack import Sample, pack
from megatron_rl.config import AgentConfig, ConfigError, RolloutConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.records.packed import RowState
from megatron_rl.reward.pool import Rewarded
from megatron_rl.rollout.agents import EpisodeError, Step
from megatron_rl.rollout.agents.environment import checked_step
from megatron_rl.rollout.agents.rollout_function import load_function
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.response import ExpectedSample, parse_sample
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.missing_routes import count_missing_routes
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.rollout.scoring import make_turns, score_groups
from tests.fake_server import SPEC, VERSION, FakeServer, wait_for
from tests.faults.samples import honest_sample
from tests.unit.rollout.parts import join_turns
from tests.words import word_tokenizer

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(3)]
TOOL = (40, 41, 42)
TURN = 5  # tokens that the fake server samples


async def two_turns(session, prompt):
    await session.generate()
    session.observe(TOOL)
    await session.generate()
    return session.finish()


async def three_turns(session, prompt):
    for observed in ("w40 w41 w42", np.array([50])):
        turn = await session.generate()
        assert (
            turn.text.split() == [f"w{token}" for token in turn.token_ids]
            and turn.finish_reason == "length"
        )
        session.observe(observed)
    await session.generate()
    session.observe("w60")  # nothing follows: dropped
    return session.finish(reward=np.float32(0.5), metrics={"calls": np.int64(2)})


async def rewarded_turns(session, prompt):
    for reward in (0.25, None, 1.0):
        await session.generate(max_tokens=TURN)
        if reward is not None:
            session.reward_turn(reward)
            session.reward_turn(reward)
        session.observe(TOOL)
    await session.generate(max_tokens=TURN)
    await session.generate(max_tokens=TURN)  # nothing observed: the same turn
    return session.finish()


def stopped(body, prompt, sample_id):
    honest = honest_sample(body, prompt, sample_id)
    return honest | {
        "meta_info": honest["meta_info"] | {"finish_reason": {"type": "stop", "matched": 1}}
    }


async def endless(session, prompt):
    while True:
        await session.generate(max_tokens=TURN)
        session.observe(TOOL)


def client_of(servers, function, *, idle_timeout_seconds=5.0, **settings):
    cfg = RolloutConfig(max_retries=3, idle_timeout_seconds=idle_timeout_seconds)
    agent = AgentConfig(function=f"{__name__}:{function}", **settings)
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, cfg.max_retries)
    return RolloutClient(
        [server.url for server in servers],
        cfg,
        SampleRules(SPEC, want_routes=True),
        episodes=runner,
    )


def sample(client, *, group_size=2, max_tokens=64, **settings):
    return client.generate(
        PROMPTS,
        group_size,
        policy_version=VERSION,
        temperature=1.0,
        max_tokens=max_tokens,
        stop_token_ids=(1,),
        **settings,
    )


def parts_of(servers, rollout):
    """The requests of a rollout, in order: what each server's correct answer held."""
    parts = []
    for server in servers:
        for body in server.requests:
            for index, ids in enumerate(body["input_ids"]):
                content = server.served.get(f"{body['rid']}_{index}")
                if (
                    content
                    and list(rollout.tokens[: len(ids) + TURN]) == ids + content["output_ids"]
                ):
                    expected = ExpectedSample(Prompt("", "", tuple(ids), ""), "")
                    sampling = Sampling(1.0, TURN, (), VERSION)
                    rules = SampleRules(SPEC, want_routes=True)
                    parts.append(parse_sample(content, expected, sampling, rules))
    return sorted(parts, key=lambda part: len(part.tokens))


def brute_force_routes(rollout, parts):
    """Row j: of the request that sampled token j + 1; where it was not sampled, of the first that
    computed token j.
    """
    rows = []
    sampled = set(rollout.sampled.tolist())
    for j in range(len(rollout.tokens) - 1):
        if j + 1 in sampled:
            (of,) = [p for p in parts if p.prompt_length <= j + 1 < len(p.tokens)]
        else:
            of = next(p for p in parts if j < len(p.tokens) - 1)
        rows.append(of.routed_experts[j])
    return np.array(rows)


@pytest.mark.parametrize("function, spans", [("two_turns", 1), ("three_turns", 2)])
def test_every_row_is_of_the_request_that_sampled_its_token(function, spans):
    with FakeServer("ok") as one, FakeServer("ok") as other:
        groups = sample(client_of([one, other], function))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert len({tuple(rollout.tokens) for rollout in rollouts}) == len(PROMPTS) * 2
        for rollout in rollouts:
            parts = parts_of([one, other], rollout)
            assert len(parts) == rollout.num_spans == spans + 1
            assert rollout.environment[0] == (3 + TURN, 3 + TURN + len(TOOL))
            assert tuple(rollout.tokens[slice(*rollout.environment[0])]) == TOOL
            assert np.array_equal(rollout.routed_experts, brute_force_routes(rollout, parts))
            assert np.array_equal(
                rollout.rollout_logprobs, np.concatenate([part.rollout_logprobs for part in parts])
            )
            assert rollout.response_length == TURN * (spans + 1) == len(rollout.policy_versions)
            assert np.array_equal(rollout.tokens, parts[-1].tokens)  # tokens in, tokens out
    ids = [rollout.id for group in groups for rollout in group.rollouts]
    assert ids == [f"q{i}/{k}" for i in range(3) for k in range(2)]
    if function == "three_turns":
        assert {rollout.episode.reward for rollout in rollouts} == {0.5} and rollouts[
            0
        ].episode.metrics == {"calls": 2}


def test_only_sampled_tokens_are_learned_from():
    with FakeServer("ok") as server:
        rollout = sample(client_of([server], "three_turns"), group_size=1)[0].rollouts[0]
    batch = pack([Sample(rollout, 2.0)])
    mask = np.zeros(len(rollout.tokens), bool)
    for position in rollout.sampled:
        mask[position - 1] = True
    assert np.array_equal(batch.loss_mask.numpy(), mask) and mask.sum() == 3 * TURN
    assert np.array_equal(batch.rollout_logprobs.numpy()[mask], rollout.rollout_logprobs)
    assert (
        not batch.rollout_logprobs.numpy()[~mask].any()
        and not batch.advantages.numpy()[~mask].any()
    )
    assert set(batch.response_lengths.tolist()) == {3 * TURN}
    assert (batch.row_state[:-1] == RowState.REPLAYED).all()


def test_an_episode_travels_unchanged_and_a_moved_span_is_found():
    with FakeServer("ok") as server:
        rollout = sample(client_of([server], "three_turns"), group_size=1)[0].rollouts[0]
    (copy,), _ = from_bytes(to_bytes([rollout]))
    for name in ("tokens", "rollout_logprobs", "policy_versions", "routed_experts"):
        assert np.array_equal(getattr(copy, name), getattr(rollout, name)), name
    record = copy.episode
    assert (copy.environment, record.reward, record.metrics) == (
        rollout.environment,
        0.5,
        {"calls": 2},
    )
    (start, end), second = rollout.environment
    moved = replace(rollout, environment=((start + 1, end + 1), second))
    with pytest.raises(ValueError, match="spans of the environment moved"):
        pack([Sample(moved, 1.0)])
    for wrong in (
        ((start, end), (start, end)),
        ((3, 4),),
        ((len(rollout.tokens) - 1, len(rollout.tokens)),),
    ):
        lengths = len(rollout.tokens) - 3 - sum(b - a for a, b in wrong)
        broken = replace(
            rollout,
            environment=wrong,
            rollout_logprobs=np.zeros(lengths, np.float32),
            policy_versions=np.zeros(lengths, np.int32),
        )
        with pytest.raises(ValueError, match="must be .start, end. in order"):
            pack([Sample(broken, 1.0)])


def test_a_turn_that_begins_after_another_token_does_not_join():
    with FakeServer("ok") as server:
        rollout = sample(client_of([server], "two_turns"), group_size=1)[0].rollouts[0]
        first, second = parts_of([server], rollout)
    assert np.array_equal(join_turns(first, second).routed_experts, rollout.routed_experts)
    tokens = second.tokens.copy()
    tokens[len(first.tokens) - 1] += 1
    with pytest.raises(ValueError, match="begins with another token than the last before"):
        join_turns(first, replace(second, tokens=tokens, routes_digest=None))


def test_rows_of_the_environment_count_as_given_ones():
    with FakeServer("ok") as server:
        group = sample(client_of([server], "two_turns"), group_size=1)[0]
    rollout = group.rollouts[0]
    missing = np.zeros(len(rollout.tokens) - 1, bool)
    missing[[1, 3 + TURN, 3 + TURN + 2]] = (
        True  # a prompt's row, one of the environment, one that predicts a sampled token
    )
    counts = count_missing_routes(
        [replace(group, rollouts=(replace(rollout, missing_routes=missing),))]
    )
    assert (counts.missing_prompt_rows, counts.missing_response_rows) == (2, 1)
    assert (counts.prompt_rows, counts.response_rows) == (2 + len(TOOL), 2 * TURN)


@pytest.mark.parametrize(
    "fault", ["http_503", "reset@mid_body", "duplicate_route", "die@connect", "html"]
)
def test_a_server_that_fails_in_an_episode_costs_no_turn(fault):
    """The turn is sampled again from the tokens so far, elsewhere where a server died."""
    with FakeServer("ok", "ok", fault, "ok") as bad, FakeServer("ok") as good:
        client = client_of([bad, good], "three_turns")
        rollouts = [rollout for group in sample(client) for rollout in group.rollouts]
        assert client.counters.failures.total() + client.counters.dropped.total() > 0
        for rollout in rollouts:
            parts = parts_of([bad, good], rollout)
            assert len(parts) == 3
            assert np.array_equal(rollout.routed_experts, brute_force_routes(rollout, parts))
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == len(rollouts) == 6


def test_an_episode_stays_on_the_server_that_has_its_tokens():
    with FakeServer("ok") as one, FakeServer("ok") as other:
        sample(client_of([one, other], "three_turns"), group_size=4)
        asked = [
            {body["rid"]: tuple(body["input_ids"][0]) for body in server.requests}
            for server in (one, other)
        ]
    assert min(map(len, asked)) > 0  # the load is shared
    for server, elsewhere in (asked, asked[::-1]):
        for later in (ids for ids in server.values() if len(ids) > 4):
            earlier = [
                ids
                for ids in elsewhere.values()
                if 4 < len(ids) < len(later) and later[: len(ids)] == ids
            ]
            assert not earlier


def test_a_full_context_ends_the_episode_as_truncated():
    with FakeServer("ok") as server:
        rollout = sample(
            client_of([server], "endless"), group_size=1, max_tokens=2 * TURN + len(TOOL)
        )[0].rollouts[0]
    assert (
        rollout.finish_reason == "length"
        and rollout.num_spans == 2
        and rollout.response_length == 2 * TURN
    )


def test_only_a_full_context_is_truncated():
    """A turn that reaches its own limit is not: the episode continued, or ended as its function
    chose.
    """
    with FakeServer("ok") as server:
        rollouts = [
            sample(client_of([server], "two_turns"), group_size=1, max_tokens=limit)[0].rollouts[0]
            for limit in (64, 13)
        ]
    assert [rollout.finish_reason for rollout in rollouts] == ["stop", "length"]
    with FakeServer("ok", source=stopped) as server:  # at the last token that fits
        rollout = sample(client_of([server], "two_turns"), group_size=1, max_tokens=13)[0].rollouts[
            0
        ]
    assert (len(rollout.tokens), rollout.finish_reason) == (3 + 13, "stop")


def test_one_turn_where_it_is_asked_for():
    with FakeServer("ok") as server:
        rollout = sample(client_of([server], "two_turns"), single_turn=True)[0].rollouts[0]
    assert rollout.num_spans == 1 and rollout.environment == ()


async def raises(session, prompt):
    await session.generate()
    raise KeyError("calculator")


async def returns_text(session, prompt):
    return (await session.generate()).text


async def samples_nothing(session, prompt):
    return session.finish()


async def hangs(session, prompt):
    await asyncio.sleep(60)


async def outside(session, prompt):
    await session.generate()
    session.observe([SPEC.vocab_size])
    return session.finish()


async def unrendered(session, prompt):
    await session.generate()
    session.observe([{"role": "tool", "content": "4"}])
    return session.finish()


async def mixed(session, prompt):
    await session.generate()
    session.observe([{"role": "tool", "content": "4"}, 5])
    return session.finish()


async def twice_at_a_time(session, prompt):
    await asyncio.gather(session.generate(), session.generate())
    return session.finish()


async def not_finite(session, prompt):
    await session.generate()
    return session.finish(reward=float("nan"))


async def above_float32(session, prompt):
    """Rewards are float32, in which this is infinite."""
    await session.generate()
    return session.finish(reward=1e39)


@pytest.mark.parametrize(
    "function, seconds, why",
    [
        ("raises", 60.0, "KeyError: 'calculator'"),
        ("returns_text", 60.0, "returned str, must be session.finish"),
        ("samples_nothing", 60.0, "nothing was sampled"),
        ("hangs", 0.2, "longer than agent.episode_timeout_seconds = 0.2"),
        ("outside", 60.0, "observed token id 64, the model's vocabulary has 64"),
        ("unrendered", 60.0, "messages need agent.renderer"),
        ("mixed", 60.0, "an observation must be text, token ids or messages"),
        ("twice_at_a_time", 60.0, "a turn is being sampled"),
        ("not_finite", 60.0, "reward = nan: must be a finite number"),
        ("above_float32", 60.0, "reward = 1e[+]39: must be a finite number of float32"),
    ],
)
def test_a_function_that_fails_stops_the_run_or_is_counted(function, seconds, why):
    with FakeServer("ok") as server:
        client = client_of([server], function, episode_timeout_seconds=seconds)
        with pytest.raises(
            RolloutError, match=rf"rollout q\d/\d: agent.function = .*{function}.*{why}"
        ):
            sample(client)
        again = client_of([server], function, episode_timeout_seconds=seconds, on_error="retry")
        with pytest.raises(RolloutError, match="attempt 4 of 4"):
            sample(again, group_size=1)
        assert (
            again.counters.failed_episodes >= 4
            and again.counters.totals()["rollout/failed_episodes_total"] >= 4
        )


async def ignores_its_end(session, prompt):
    """What it returns after its time is a shorter episode than it would have been."""
    await session.generate(max_tokens=TURN)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60.0)
    return session.finish(1.0)


class IgnoresItsEnd:
    def reset(self, prompt):
        return None

    async def step(self, turn):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60.0)
        return Step(done=True, reward=1.0)


def test_an_episode_or_step_that_ignores_its_limit_is_not_trained_on():
    with FakeServer("ok") as server:
        with pytest.raises(
            RolloutError, match=r"agent.episode_timeout_seconds = 2, and ignored its end"
        ):
            sample(
                client_of([server], "ignores_its_end", episode_timeout_seconds=2.0), group_size=1
            )
        with pytest.raises(
            RolloutError, match=r"step took longer than agent.step_timeout_seconds = 0.2"
        ):
            sample(
                environment_client(server, "IgnoresItsEnd", step_timeout_seconds=0.2), group_size=1
            )


left_behind = []


async def leaves_a_task(session, prompt):
    async def more():
        while True:
            await session.branch([3, 4]).generate(max_tokens=TURN)

    await session.generate(max_tokens=TURN)
    if not left_behind:
        left_behind.append(asyncio.create_task(more()))
        raise RuntimeError("not its task")
    await asyncio.wait(left_behind)
    return session.finish()


def test_a_task_that_an_episode_left_behind_samples_no_more():
    left_behind.clear()
    with FakeServer("ok") as server:
        client = client_of([server], "leaves_a_task", on_error="retry")
        sample(client, group_size=1)
    assert client.counters.failed_episodes == 1
    with pytest.raises(EpisodeError, match="the episode is finished"):
        left_behind[0].result()


failures = []


async def fails_once(session, prompt):
    await session.generate()
    if prompt.id not in failures:
        failures.append(prompt.id)
        raise RuntimeError("a tool that is restarting")
    return session.finish()


def test_a_failed_episode_is_sampled_again():
    failures.clear()
    with FakeServer("ok") as server:
        client = client_of([server], "fails_once", on_error="retry")
        groups = sample(client, group_size=1)
    assert [len(group.rollouts) for group in groups] == [1, 1, 1]
    assert (client.counters.failed_episodes, client.counters.redrawn_samples) == (3, 3)


async def swallows(session, prompt):
    await session.generate(max_tokens=TURN)
    while len(session.turns) < 2:  # handles what ends it, and asks again at once
        try:
            await session.generate(max_tokens=TURN)
        except Exception:
            continue
    return session.finish()


def test_an_episode_that_handles_its_cancellation_is_not_trained_on():
    """Enough other groups are complete, or the run stops, while it waits for its second turn."""
    asked = []

    def behave(handler, behaviour, body):
        """Answer all first turns, and when every episode waits for its second one, one of these."""
        if is_second := len(body["input_ids"][0]) > len(PROMPTS[0].token_ids):
            asked.append(body["rid"])
            wait_for(lambda: len(asked) >= len(PROMPTS), 60)
        FakeServer.behave(
            server, handler, "slow" if is_second and body["rid"] != asked[0] else "ok", body
        )

    with FakeServer("ok") as server:
        server.behave = behave
        client = client_of([server], "swallows", idle_timeout_seconds=60.0)
        groups = [Group(prompt, 1) for prompt in PROMPTS]
        sampling = Sampling(
            temperature=1.0, max_tokens=64, stop_token_ids=(1,), policy_version=VERSION
        )
        kept = client.fill(groups, sampling, keep=1)
        assert (
            len(kept) == 1
            and kept[0].rollouts[0].num_spans == 1
            and kept[0].rollouts[0].response_length == 2 * TURN
        )
        assert [len(group.rollouts) for group in groups if group is not kept[0]] == [0, 0]
        assert client.counters.failed_episodes == 0


async def handles_refusal(session, prompt):
    await session.generate(max_tokens=TURN)
    try:
        session.observe(TOOL)
        await session.generate(max_tokens=TURN)
    except Exception:
        pass
    return session.finish()


def test_a_refusal_that_a_function_handles_stops_the_run():
    with (
        FakeServer("ok", "ok", "ok", "http_400") as server,
        pytest.raises(RolloutError, match="refused prompt"),
    ):
        sample(client_of([server], "handles_refusal"), group_size=1)


def not_async(session, prompt):
    return None


async def no_prompt(session):
    return None


@pytest.mark.parametrize(
    "name, why",
    [
        ("nowhere:f", "cannot be loaded"),
        (f"{__name__}:missing", "cannot be loaded"),
        ("f", "must be package.module:NAME"),
        (f"{__name__}:not_async", "must be an async function"),
        (f"{__name__}:no_prompt", "must take .session, prompt."),
    ],
)
def test_a_function_that_cannot_be_one_is_refused_by_name(name, why):
    with pytest.raises(ConfigError, match=f"agent.function = '{name}'.*{why}"):
        load_function(AgentConfig(function=name))


class NoPool:
    def score_episodes(self, groups, **settings):
        ((episode,),) = groups
        assert len(episode.turns) == 3
        return [[Rewarded(0.25)]]


def test_the_functions_own_reward_is_kept():
    with FakeServer("ok") as server:
        group = sample(client_of([server], "three_turns"))[0]
    group = RolloutGroup(
        group.prompt, (group.rollouts[0], group.rollouts[1].with_episode(reward=None))
    )
    (scored,) = score_groups([group], NoPool(), word_tokenizer(), for_training=True)
    assert scored.rewards.tolist() == [0.5, 0.25]


def test_rewards_of_turns_are_recorded_and_their_sum_is_the_episodes(tmp_path):
    with FakeServer("ok") as server:
        groups = sample(client_of([server], "rewarded_turns"))
    rollout = groups[0].rollouts[0]
    assert (rollout.episode.turn_rewards, rollout.episode.reward, rollout.num_spans) == (
        (0.5, 0.0, 2.0, 0.0),
        2.5,
        4,
    )
    assert rollout.span_finish_reasons == ("length",) * 4
    ((again,), _) = from_bytes(to_bytes([rollout]))
    assert (again.episode.turn_rewards, again.span_finish_reasons) == (
        rollout.episode.turn_rewards,
        rollout.span_finish_reasons,
    )
    turns = list(make_turns(rollout, word_tokenizer()))
    assert [turn.reward for turn in turns] == [0.5, 0.0, 2.0, 0.0]
    assert [turn.num_tokens for turn in turns] == [end - start for start, end in rollout.turn_spans]
    assert (
        sum(turn.num_tokens for turn in turns) == rollout.response_length
        and turns[3].observation == ""
    )
    assert "".join(
        (t.text + t.observation).replace(" ", "") for t in turns
    ) == word_tokenizer().decode(
        rollout.tokens[rollout.prompt_length :], skip_special_tokens=True
    ).replace(" ", "")
    Recorder(tmp_path).record(1, groups)
    lines = [
        json.loads(line)
        for line in (tmp_path / "rollouts/step_000001.jsonl").read_text().splitlines()
    ]
    assert lines[0]["turn_rewards"] == [0.5, 0.0, 2.0, 0.0] and lines[0]["num_turns"] == 4


class Echo:
    """Repeats the turn's tokens, and ends after `turns` of them."""

    turns = 3

    def __init__(self):
        self.steps = 0

    def reset(self, prompt):
        return [20] if prompt.id == "q0" else None

    async def step(self, turn):
        self.steps += 1
        return Step(turn.token_ids, 0.25, self.steps == self.turns, {"steps": self.steps})


class Endless(Echo):
    turns = 100

    def step(self, turn):
        return Step("w9", 1.0)


class Silent(Echo):
    def step(self, turn):
        return Step("", 1.0)


class Slow(Echo):
    def reset(self, prompt):
        time.sleep(30.0)


class Fails(Echo):
    def step(self, turn):
        raise TimeoutError("the environment's own")


class WithoutTurn(Echo):
    def step(self):
        return Step(done=True)


class NeedsArguments(Echo):
    def __init__(self, size):
        pass


def environment_client(server, name, **settings):
    cfg, agent = (
        RolloutConfig(max_retries=0),
        AgentConfig(environment=f"{__name__}:{name}", **settings),
    )
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, cfg.max_retries)
    return RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner)


def test_an_environment_answers_every_turn():
    with FakeServer("ok") as server:
        groups = sample(environment_client(server, "Echo"))
    for group in groups:
        for rollout in group.rollouts:
            # what reset observed is part of the prompt of the first turn
            added = 1 if group.prompt.id == "q0" else 0
            assert (
                rollout.prompt_length == 3 + added
                and rollout.num_spans == 3
                and rollout.episode.reward == 0.75
            )
            assert (
                rollout.episode.metrics == {"steps": 3, "is_done": 1.0}
                and rollout.episode.turn_rewards == (0.25,) * 3
            )
            (a, b), (c, d) = rollout.environment
            assert np.array_equal(rollout.tokens[a:b], rollout.tokens[a - TURN : a])
            assert np.array_equal(rollout.tokens[c:d], rollout.tokens[c - TURN : c])


def test_an_environment_is_bounded():
    with FakeServer("ok") as server:
        rollout = sample(environment_client(server, "Endless", max_turns=4), group_size=1)[
            0
        ].rollouts[0]
        assert (rollout.num_spans, rollout.episode.reward, rollout.episode.metrics["is_done"]) == (
            4,
            4.0,
            0.0,
        )
        with pytest.raises(RolloutError, match="step returned no observation"):
            sample(environment_client(server, "Silent"))
        started = time.monotonic()
        with pytest.raises(
            RolloutError, match="agent.environment = .*Slow.*agent.step_timeout_seconds = 0.1"
        ):
            sample(environment_client(server, "Slow", step_timeout_seconds=0.1))
        assert time.monotonic() - started < 25  # its thread sleeps on
        with pytest.raises(RolloutError, match="TimeoutError: the environment's own"):
            sample(environment_client(server, "Fails"))


@pytest.mark.parametrize(
    "value", [1e39, -1e39, pytest.param(10**400, id="long"), float("nan"), "1"]
)
@pytest.mark.parametrize("name", ["reward", "metrics"])
def test_a_step_whose_number_is_not_finite_in_float32_is_refused(name, value):
    """Rewards are float32.  An error of the step's, not of reward.function."""
    step = Step(done=True, **{name: value if name == "reward" else {"speed": value}})
    with pytest.raises(EpisodeError, match=r"agent.environment: .*must be a finite number of fl"):
        checked_step(step)
    assert checked_step(Step(done=True, reward=3e38)).reward == 3e38


def test_rewards_before_a_full_context_count():
    with FakeServer("ok") as server:
        rollout = sample(
            environment_client(server, "Endless"), group_size=1, max_tokens=1 + 3 * TURN + 2
        )[0].rollouts[0]
    assert (
        rollout.num_spans,
        rollout.episode.reward,
        rollout.episode.metrics,
        rollout.finish_reason,
    ) == (
        3,
        3.0,
        {"is_done": 0.0},
        "length",
    )


def test_an_environment_must_have_reset_and_step():
    with pytest.raises(
        ValueError,
        match=r"agent.environment = .* must be a class with .*missing: .'reset', 'step'.",
    ):
        load_function(AgentConfig(environment=f"{__name__}:NoPool"))
    for name in ("NeedsArguments", "WithoutTurn"):
        with pytest.raises(ValueError, match="must be made without arguments, and have reset"):
            load_function(AgentConfig(environment=f"{__name__}:{name}"))
    with pytest.raises(ValueError, match="must be one of them"):
        AgentConfig(function="a:b", environment="a:B")
