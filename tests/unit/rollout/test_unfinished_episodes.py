"""Episodes that are cut short continue: each turn is sampled once, and every token keeps what it
was sampled with.
"""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.batch.codec import from_bytes, to_bytes
from megatron_rl.config import AgentConfig, Config, DataConfig, ModelConfig, RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Step
from megatron_rl.rollout.agents.recorded import RecordedTurns, turns_of
from megatron_rl.rollout.agents.runner import EpisodeCall, EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import copied, find_groups, read_groups, write_groups
from tests.fake_model import TurnModel, assert_turn_fingerprints
from tests.fake_server import SPEC, FakeServer, wait_for
from tests.unit.rollout.parts import join_turns
from tests.words import word_tokenizer

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(3)]
GROUP, TURN = 2, 5
observed, waiting, resting = [], [], threading.Event()


async def repeatable(session, prompt):
    """Its observations follow from the turns."""
    for _ in range(3):
        turn = await session.generate(max_tokens=TURN)
        session.observe([2 + (sum(turn.token_ids) + place) % 60 for place in range(3)])
    await session.generate(max_tokens=TURN)
    await session.generate(max_tokens=TURN)  # continues without an observation
    return session.finish(reward=0.5)


async def drifting(session, prompt):
    """Observes what it never observed before, after its second turn."""
    await session.generate(max_tokens=TURN)
    session.observe([9])
    await session.generate(max_tokens=TURN)
    observed.append(2 + len(observed) % 60)
    session.observe([observed[-1]])
    await session.generate(max_tokens=TURN)
    return session.finish()


async def rests(session, prompt):
    """Waits for a tool after its first turn, the first time."""
    await session.generate(max_tokens=TURN)
    waiting.append(prompt.id)
    if not resting.is_set():
        await asyncio.sleep(600)
    session.observe([9])
    await session.generate(max_tokens=TURN)
    return session.finish()


async def greedy(session, prompt):
    """Asks for longer turns the second time."""
    for _ in range(2):
        await session.generate(max_tokens=TURN + bool(observed))
        session.observe([9])
    observed.append(1)
    return session.finish()


async def notes_its_start(session, prompt):
    waiting.append(prompt.id)
    await session.generate(max_tokens=TURN)
    return session.finish()


async def stubborn(session, prompt):
    """Handles what ends it."""
    await session.generate(max_tokens=TURN)
    waiting.append(prompt.id)
    with contextlib.suppress(BaseException):
        await asyncio.sleep(0 if resting.is_set() else 600)
    return session.finish()


class Counts:
    """Two steps, the reward of each follows from its turn."""

    def __init__(self):
        self.steps = 0

    def reset(self, prompt):
        return [7]

    def step(self, turn):
        self.steps += 1
        return Step(
            [8, 2 + turn.token_ids[-1] % 60], reward=sum(turn.token_ids), done=self.steps == 3
        )


def client_of(server, name, **settings):
    cfg = RolloutConfig(max_retries=1, partial="resume", over_sample=0.5, max_staleness=1)
    kind = "environment" if name == "Counts" else "function"
    runner = EpisodeRunner(
        AgentConfig(**{kind: f"{__name__}:{name}"}, **settings), word_tokenizer(), 64, 1
    )
    return RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner)


def fill(client, groups, version, **settings):
    return client.fill(groups, Sampling(1.0, 64, (1,), version), **settings)


def interrupted(server, client, groups, version, when):
    """Fill until `when`, then stop as a signal does."""

    def stop():
        assert wait_for(when, 60)
        client.stop(keep_parts=True)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises((RolloutError, asyncio.CancelledError)):
        fill(client, groups, version)
    thread.join()


def through_a_checkpoint(groups, folder):
    write_groups(folder / "rollouts_00000.safetensors", copied(groups), range(len(groups)))
    return read_groups(find_groups(folder), PROMPTS, range(len(groups)), slice(None))


def check(groups, num_turns):
    rollouts = [rollout for group in groups for rollout in group.rollout_group().rollouts]
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == len(groups) * GROUP
    for rollout in rollouts:
        assert_turn_fingerprints(rollout)
        assert len(rollout.episode.turns) == num_turns and rollout.finish_reason == "stop"
    return rollouts


@pytest.mark.parametrize("name, num_turns", [("repeatable", 5), ("Counts", 3)])
@pytest.mark.parametrize("answers", [0, 4, 11, 16])
def test_an_interrupted_episode_loses_and_repeats_nothing(tmp_path, name, num_turns, answers):
    """Stopped after so many answers: in different turns of 6 episodes, some in the middle of
    one.
    """
    model = TurnModel(version=3)
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    with FakeServer(*["ok"] * answers, "slow", source=model) as server:
        client = client_of(server, name)

        def num_open():
            return 6 - sum(len(group.rollouts) for group in groups)

        interrupted(server, client, groups, 3, lambda: len(server.requests) == answers + num_open())
        cut = num_open()
        assert client.counters.cut_samples == cut > 0 and client.counters.lost_samples == 0
        kept = sum(
            r.response_length
            for group in groups
            for r in [*group.prefixes.values(), *group.rollouts.values()]
        )
        assert kept == answers * TURN + cut * 2  # a slow answer that is aborted has two tokens
        groups = through_a_checkpoint(groups, tmp_path)
        model.version, server.script, before = 4, ["ok"], len(server.requests)
        again = client_of(server, name)
        fill(again, groups, 4)
        rollouts = check(groups, num_turns)
        assert len(server.requests) - before == 6 * num_turns - answers, (
            "a recorded turn was sampled again"
        )
        assert again.counters.resumed_episodes == again.counters.resumed_samples == cut
        assert again.counters.diverged_episodes == 0
        assert sum(rollout.is_mixed for rollout in rollouts) == cut
    for rollout in rollouts:
        assert set(rollout.policy_versions) <= {3, 4}
        assert rollout.response_length == num_turns * TURN + (
            2 if name == "Counts" and rollout.is_mixed else 0
        )
        assert rollout.episode.reward == (
            rollout.tokens[rollout.sampled].sum() if name == "Counts" else 0.5
        )
    (copy,), _ = from_bytes(to_bytes(rollouts[:1]))
    assert copy.episode.turns == rollouts[0].episode.turns


def test_an_episode_that_waits_for_a_tool_keeps_its_turns(tmp_path):
    resting.clear()
    waiting.clear()
    model = TurnModel(version=3)
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    with FakeServer("ok", source=model) as server:
        client = client_of(server, "rests")
        started = time.monotonic()
        interrupted(server, client, groups, 3, lambda: len(waiting) == 6)
        assert time.monotonic() - started < 300 and not any(group.rollouts for group in groups)
        groups = through_a_checkpoint(groups, tmp_path)
        # nothing new: kept
        interrupted(server, client_of(server, "rests"), groups, 3, lambda: len(waiting) == 12)
        resting.set()
        fill(client_of(server, "rests"), groups, 3)
        check(groups, 2)
        assert len(server.requests) == 12


@pytest.mark.parametrize("slots", ["rollout.max_concurrency", "agent.concurrency"])
def test_an_episode_that_waits_for_its_slot_does_not_start_after_the_end(slots, monkeypatch):
    """One request hangs, so that the slots of the others are free for a while before the end."""
    monkeypatch.setattr("megatron_rl.rollout.client.client.STOP_SECONDS", 1.0)
    waiting.clear()
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    with FakeServer("hang", "slow", source=TurnModel(version=3)) as server:
        if slots == "agent.concurrency":
            client = client_of(server, "notes_its_start", concurrency=4)
        else:  # a group's two episodes share a slot
            client = client_of(server, "notes_its_start")
            client.cfg = client.cfg.model_copy(update={"max_concurrency": 2})
        interrupted(server, client, groups, 3, lambda: len(server.requests) == 4)
    assert waiting == ["q0", "q0", "q1", "q1"] and client.counters.cut_samples == 3


def test_an_episode_that_handles_its_end_is_cut_all_the_same():
    resting.clear()
    waiting.clear()
    groups = [Group(PROMPTS[0], GROUP)]
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        interrupted(server, client_of(server, "stubborn"), groups, 3, lambda: len(waiting) == 2)
        assert not groups[0].rollouts and len(groups[0].prefixes) == 2


@pytest.mark.parametrize("name, dropped, turns", [("drifting", 2, 3), ("greedy", TURN + 2, 2)])
def test_what_an_environment_that_cannot_be_repeated_drops_is_counted(name, dropped, turns, caplog):
    """`drifting` observes something else after its second turn; `greedy` asks for longer turns."""
    observed.clear()
    model = TurnModel(version=3)
    groups = [Group(PROMPTS[0], 1)]
    with FakeServer(*["ok"] * (turns - 1), "slow", source=model) as server:
        interrupted(
            server, client_of(server, name), groups, 3, lambda: len(server.requests) == turns
        )
        observed.append(1)
        server.script = ["ok"]
        client = client_of(server, name)
        fill(client, groups, 3)
        (rollout,) = groups[0].rollout_group().rollouts
        assert_turn_fingerprints(rollout)
        assert len(rollout.episode.turns) == turns
    assert (client.counters.diverged_episodes, client.counters.diverged_tokens) == (1, dropped)
    assert f"{dropped} recorded tokens dropped" in caplog.text
    left = SimpleNamespace(name="q", recorded=SimpleNamespace(tokens_left=3))
    EpisodeCall._count_unused(SimpleNamespace(counters=client.counters), left)
    assert (client.counters.diverged_episodes, client.counters.diverged_tokens) == (2, dropped + 3)


def test_restart_begins_again_and_counts_it():
    model = TurnModel(version=3)
    groups = [Group(PROMPTS[0], GROUP)]
    with FakeServer("ok", "ok", "slow", source=model) as server:
        client = client_of(server, "repeatable", resume="restart")
        interrupted(server, client, groups, 3, lambda: len(server.requests) == 4)
        assert not groups[0].prefixes and client.counters.redrawn_samples == 2
    with pytest.raises(
        ValueError,
        match="rollout.partial = resume with agent.resume = restart.*set agent.resume = continue",
    ):
        Config(
            model=ModelConfig(path="."),
            data=DataConfig(train="x"),
            agent=AgentConfig(function="a:b", resume="restart"),
            rollout=RolloutConfig(partial="resume", over_sample=0.5, max_staleness=1),
        )


def test_restart_begins_again_also_what_a_checkpoint_has():
    """The setting may be changed at a resume, as the warning of a diverged episode recommends."""
    groups = [Group(PROMPTS[0], GROUP)]
    with FakeServer("ok", "ok", "slow", source=TurnModel(version=3)) as server:
        client = client_of(server, "repeatable")
        interrupted(server, client, groups, 3, lambda: len(server.requests) == 4)
        assert len(groups[0].prefixes) == GROUP
        server.script, before = ["ok"], len(server.requests)
        again = client_of(server, "repeatable", resume="restart")
        fill(again, groups, 3)
        assert len(server.requests) - before == 5 * GROUP
    check(groups, 5)
    assert again.counters.resumed_episodes == 0 and again.counters.redrawn_samples == GROUP


def test_groups_that_were_not_needed_continue_under_the_next_weights():
    """rollout.partial = resume with over-sampling: versions per token, nothing repeated."""
    model = TurnModel(version=3)
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]

    class SlowServer(FakeServer):
        """Slow in the second turns of the last two prompts."""

        def behave(self, handler, behaviour, body):
            (tokens,) = body["input_ids"]
            is_slow = model.version == 3 and len(tokens) > 3 and tokens[2] != 5
            super().behave(handler, "slow" if is_slow else behaviour, body)

    with SlowServer("ok", source=model) as server:
        client = client_of(server, "repeatable")
        assert fill(client, groups, 3, keep=1) == groups[:1]
        assert [len(group.prefixes) for group in groups] == [0, GROUP, GROUP]
        model.version = 4
        assert fill(client, groups[1:], 4) == groups[1:]
    check(groups, 5)
    assert client.counters.cancelled_groups == client.counters.redrawn_samples == 0
    for group in groups[1:]:
        assert all(
            set(rollout.policy_versions) == {3, 4} for rollout in group.rollout_group().rollouts
        )


def test_turns_of_a_rollout_join_to_it_again():
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        (group,) = fill(client_of(server, "repeatable"), [Group(PROMPTS[0], 1)], 3)
    rollout = group.rollouts[0]
    joined = reduce(join_turns, turns_of(rollout))
    assert [len(turn.routed_experts) - len(turn.tokens) for turn in turns_of(rollout)] == [-1] * 5
    assert joined.environment == rollout.environment
    assert joined.routes_digest == rollout.routes_digest and joined.missing_routes is None
    for row in range(len(rollout.tokens) - 1):
        lost = np.arange(len(rollout.tokens) - 1) == row
        again = reduce(join_turns, turns_of(replace(rollout, missing_routes=lost)))
        assert np.array_equal(again.missing_routes, lost), row
    for name in ("tokens", "rollout_logprobs", "policy_versions", "routed_experts"):
        assert np.array_equal(getattr(joined, name), getattr(rollout, name)), name


def test_a_recorded_turn_is_given_once_and_only_where_it_fits():
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        (group,) = fill(client_of(server, "repeatable"), [Group(PROMPTS[0], 1)], 3)
    rollout = replace(group.rollouts[0], finish_reason="abort")
    first = next(turns_of(rollout))
    for tokens, limit in (
        ([3, 4], TURN),
        ([3, 4, 6], TURN),
        ([3, 4, 5], TURN - 1),
        ([3, 4, 5], TURN + 1),
    ):
        assert RecordedTurns(rollout).take(tokens, limit) is None
    recorded = RecordedTurns(rollout)
    assert (
        np.array_equal(recorded.take([3, 4, 5], TURN).tokens, first.tokens)
        and recorded.tokens_left == 4 * TURN
    )
    assert recorded.take([3, 4, 5], TURN) is None
    assert recorded.with_left([first]) == [rollout] and RecordedTurns(None).with_left([first]) == [
        first
    ]
    stopped = replace(
        rollout.with_episode(turns=((first.tokens.size, "stop"),)),
        tokens=rollout.tokens[: first.tokens.size + 5],
        environment=(),
    )
    assert (
        next(turns_of(stopped)).finish_reason == "stop"
        and list(turns_of(stopped))[1].finish_reason == "abort"
    )
    assert RecordedTurns(stopped).take([3, 4, 5], TURN + 1).finish_reason == "stop"
    cut = RecordedTurns(stopped)
    cut.take([3, 4, 5], TURN)
    assert cut.take(first.tokens, TURN).finish_reason == "length", "cut at its last token"


async def twins(session, prompt):
    """Two attempts at the same prompt, of which the second one continues first."""
    one, two = session.branch(prompt.token_ids), session.branch(prompt.token_ids)
    for branch in (one, two):
        await branch.generate(max_tokens=TURN)
    for branch in (two, one):
        branch.observe([9])
        await branch.generate(max_tokens=TURN)
    return session.finish(1.0)


def test_a_recorded_turn_continues_no_newer_sequence_of_equal_tokens():
    """A policy that is nearly certain writes equal turns; here those of the second attempt are of
    the next weights.
    """
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        (group,) = fill(client_of(server, "drifting"), [Group(PROMPTS[0], 1)], 3)
    first, second = (
        turn.with_episode(turns=((len(turn.tokens), turn.finish_reason),))
        for turn in [*turns_of(group.rollouts[0])][:2]
    )
    newer = replace(
        first,
        policy_versions=first.policy_versions + 1,
        rollout_logprobs=first.rollout_logprobs - 0.1,
    )
    record = replace(newer, finish_reason="abort").after([join_turns(first, second)])
    groups = [Group(PROMPTS[0], 1, prefixes={0: record.named("q0/0")})]
    model = TurnModel(version=4)
    with FakeServer("ok", source=model) as server:
        (group,) = fill(client_of(server, "twins"), groups, 4)
    found = [sequence.policy_versions.tolist() for sequence in group.rollouts[0].sequences]
    assert sorted(found) == [[3] * 2 * TURN, [4] * 2 * TURN] and len(server.requests) == 1


async def attempts(session, prompt):
    """Two attempts at the same prompt, the first one in the branch that was opened last; the label
    says which one continues.
    """
    second, first = session.branch(prompt.token_ids), session.branch(prompt.token_ids)
    await first.generate(max_tokens=TURN)
    waiting.append(prompt.id)
    await asyncio.sleep(0 if resting.is_set() else 600)
    await second.generate(max_tokens=TURN)
    branch = {"first": first, "second": second}[prompt.label]
    for _ in range(2):
        branch.observe([9])
        await branch.generate(max_tokens=TURN)
    return session.finish(1.0)


@pytest.mark.parametrize("label", ["first", "second"])
def test_attempts_at_one_prompt_get_their_own_turns_after_two_interruptions(label):
    """The second interruption comes between the first turns of both: one of them was taken from the
    record, and the other one was not asked for yet.
    """
    waiting.clear()
    resting.set()
    groups = [Group(replace(PROMPTS[0], label=label), 1)]
    with FakeServer("ok", "ok", "ok", "slow", "ok", source=TurnModel(version=3)) as server:
        client = client_of(server, "attempts")
        interrupted(server, client, groups, 3, lambda: len(server.requests) == 4)
        resting.clear()
        interrupted(server, client_of(server, "attempts"), groups, 3, lambda: len(waiting) == 2)
        resting.set()
        client = client_of(server, "attempts")
        fill(client, groups, 3)
        assert len(server.requests) == 5, "a recorded turn was sampled again"
    assert (client.counters.resumed_episodes, client.counters.diverged_episodes) == (1, 0)
    (rollout,) = groups[0].rollouts.values()
    assert sorted(len(sequence.episode.turns) for sequence in rollout.sequences) == [1, 3]


async def branching(session, prompt):
    """Two sequences at the same time, and a turn after both."""
    first = await session.generate(max_tokens=TURN)
    branch = session.branch([9, *first.token_ids])
    session.observe([8])
    await asyncio.gather(branch.generate(max_tokens=TURN), session.generate(max_tokens=TURN))
    branch.observe([7])
    await branch.generate(max_tokens=TURN)
    return session.finish(1.0)


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_an_episode_of_several_sequences_continues(tmp_path, answers):
    model = TurnModel(version=3)
    groups = [Group(PROMPTS[0], 1)]
    with FakeServer(*["ok"] * answers, "slow", source=model) as server:
        is_waiting = {1: 3, 2: 3, 3: 4}[answers]  # the second and third turn are asked for together
        interrupted(
            server,
            client_of(server, "branching"),
            groups,
            3,
            lambda: len(server.requests) == is_waiting,
        )
        groups = through_a_checkpoint(groups, tmp_path)
        model.version, server.script, before = 4, ["ok"], len(server.requests)
        client = client_of(server, "branching")
        fill(client, groups, 4)
        assert (
            len(server.requests) - before == 4 - answers and client.counters.diverged_episodes == 0
        )
    (rollout,) = groups[0].rollout_group().rollouts
    assert [len(sequence.episode.turns) for sequence in rollout.sequences] == [
        2,
        2,
    ] and rollout.episode_length == 4 * TURN
    for sequence in rollout.sequences:
        assert_turn_fingerprints(sequence)
