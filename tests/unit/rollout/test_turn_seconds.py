"""The seconds of every turn, in the environment and with the model: measured, kept across an
interruption, sent, saved, and in no comparison.
"""

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.batch.codec import from_bytes, to_arrays, to_bytes
from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.agents.recorded import turns_of
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import copied, find_groups, read_groups, write_groups
from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts, to_rollout
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl_tools.check_rollouts.length_checks import check_turns
from tests.fake_model import TurnModel
from tests.fake_server import SPEC, FakeServer, wait_for
from tests.unit.batch.rollouts import make_rollout
from tests.unit.rollout.parts import join_turns
from tests.words import word_tokenizer

PROMPT = Prompt(id="q", text="", token_ids=(3, 4, 5), label="")
TURN, PAUSE = 5, 0.3


async def pausing(session, prompt):
    """Works for so long before its second turn and before that of a branch."""
    await session.generate(max_tokens=TURN)
    await asyncio.sleep(PAUSE)
    session.observe([40, 41])
    await session.generate(max_tokens=TURN)
    await session.generate(max_tokens=TURN)  # nothing observed: in the same span
    await asyncio.sleep(PAUSE)
    await session.branch([7, 8]).generate(max_tokens=TURN)
    return session.finish(reward=0.5)


def client_of(server):
    cfg = RolloutConfig(max_retries=1, partial="resume", over_sample=0.5, max_staleness=1)
    agent = AgentConfig(function=f"{__name__}:pausing")
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, 1)
    return RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner)


def fill(client, group):
    client.fill([group], Sampling(1.0, 64, (1,), 3))
    return group.rollout_group().rollouts[0]


def sampled():
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        return fill(client_of(server), Group(PROMPT, 1))


def timed(*seconds, turns=3):
    """A response of three spans, whose last one has two turns where `turns` is 4."""
    rollout = replace(
        make_rollout("q/0", 3, 12, routes=False),
        environment=((5, 7), (9, 10)),
        rollout_logprobs=np.full(9, -0.5, np.float32),
        policy_versions=np.zeros(9, np.int32),
    )
    ends = [5, 9, 12, 15] if turns == 4 else [5, 9, 15]
    return rollout.with_episode(turns=tuple((end, "stop") for end in ends), turn_seconds=seconds)


def test_a_turn_has_the_seconds_before_it_and_those_of_its_request():
    rollout = sampled()
    main, branch = rollout.sequences
    assert len(main.episode.turn_seconds) == 3 and len(branch.episode.turn_seconds) == 1
    before = [environment for environment, _ in main.episode.turn_seconds]
    assert before[1] >= PAUSE > max(before[0], before[2]) >= 0
    # the branch is opened PAUSE after the last turn of the episode, which is another sequence's
    assert PAUSE <= branch.episode.turn_seconds[0][0] < 2 * PAUSE
    model = [m for s in rollout.sequences for _, m in s.episode.turn_seconds]
    assert min(model) > 0 and max(model) < 60


def test_turns_of_one_span_are_added():
    rollout = timed((0.5, 1.0), (2.0, 3.00004), (0.25, 0.5), (0.125, 4.0), turns=4)
    assert rollout.span_seconds == [[0.5, 1.0], [2.0, 3.0], [0.375, 4.5]]
    assert timed((0.5, 1.0), turns=3).span_seconds == timed().span_seconds == []


def test_seconds_are_sent_and_saved(tmp_path):
    rollout = sampled()
    (again,), _ = from_bytes(to_bytes([rollout]))
    assert [s.episode.turn_seconds for s in again.sequences] == [
        s.episode.turn_seconds for s in rollout.sequences
    ]
    Recorder(tmp_path).record(1, [RolloutGroup(PROMPT, (rollout,))])
    path = tmp_path / "rollouts/step_000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["turn_seconds"] for line in lines] == [s.span_seconds for s in rollout.sequences]
    assert [len(line["turn_seconds"]) for line in lines] == [2, 1]
    record, sequence = next(read_rollouts(path)), rollout.sequences[0]
    assert to_rollout(record, to_arrays(sequence).get).span_seconds == sequence.span_seconds
    # lines of older versions have none
    path.write_text("".join(json.dumps(line | {"turn_seconds": []}) + "\n" for line in lines[:1]))
    path.write_text(path.read_text().replace(', "turn_seconds": []', ""))
    (older,) = read_rollouts(path)
    assert older.turn_seconds == [] and older == record, "seconds are not compared"
    assert to_rollout(older, to_arrays(sequence).get).span_seconds == []


def test_seconds_are_in_no_digest_and_no_comparison():
    one, other = timed((0.5, 1.0), (2.0, 3.0), (0.25, 0.5)), timed()
    assert one.episode == other.episode
    pairs = [rollout.after([make_rollout("q/0/0", 3, 4)]) for rollout in (one, other)]
    assert pairs[0].episode.digest == pairs[1].episode.digest


def test_an_interrupted_episode_keeps_the_seconds_of_its_turns(tmp_path):
    group, answers = Group(PROMPT, 1), 2
    with FakeServer(*["ok"] * answers, "slow", source=TurnModel(version=3)) as server:
        client = client_of(server)

        def stop():
            assert wait_for(lambda: len(server.requests) == answers + 1, 60)
            client.stop(keep_parts=True)

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises((RolloutError, asyncio.CancelledError)):
            fill(client, group)
        thread.join()
        kept = group.prefixes[0].episode.turn_seconds
        assert len(kept) == answers == len(group.prefixes[0].episode.turns)
        write_groups(tmp_path / "rollouts_00000.safetensors", copied([group]), [0])
        (group,) = read_groups(find_groups(tmp_path), [PROMPT], [0], slice(None))
        server.script = ["ok"]
        first = fill(client_of(server), group).sequences[0]
    assert first.episode.turn_seconds[:answers] == kept and len(first.span_seconds) == 2


def test_turns_of_an_older_checkpoint_have_no_seconds():
    rollout = timed((0.5, 1.0), (2.0, 3.0), (0.25, 0.5))
    turns = list(turns_of(rollout))
    assert [turn.episode.turn_seconds for turn in turns] == [
        ((0.5, 1.0),),
        ((2.0, 3.0),),
        ((0.25, 0.5),),
    ]
    ended = [t.with_episode(turns=((len(t.tokens), "stop"),)) for t in turns]
    assert join_turns(*ended[:2]).episode.turn_seconds == ((0.5, 1.0), (2.0, 3.0))
    assert join_turns(ended[0].with_episode(turn_seconds=()), ended[1]).span_seconds == []


def test_check_rollouts_wants_the_seconds_of_every_turn_or_of_none():
    record = SimpleNamespace(prompt_length=3, turn_rewards=[], turn_ends=[], turn_seconds=[])
    dumped = SimpleNamespace(record=record, environment=((5, 7),), tokens=range(9))
    assert not list(check_turns(dumped))
    record.turn_seconds = [[0.5, 1.0]]
    assert [text for _, text, _ in check_turns(dumped)] == ["1 turn_seconds for 2 turns"]
