"""Faults of saved episodes: those after sampling break the digest; those before it can be seen by
verify_replay, not here.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl_tools.check_rollouts.check_rollouts import check_run
from megatron_rl_tools.verify_replay.episodes import break_episode
from megatron_rl_tools.verify_replay.fingerprints import Shape, make_given
from megatron_rl_tools.verify_replay.options import EPISODE_FAULTS

NAME = "0.0.0.1"


def findings(folder, *, fault=None, sealed=False, turn_ends=(), turn_rewards=(), **changes):
    """Of a folder with four episodes of three turns, one of them broken."""
    given = make_given(Shape(2, 32, 4, 96, dp_size=1, cp_size=1, micro_batches=2, turns=3))
    groups = []
    for rollout in given.rollouts(0):
        if rollout.id == NAME:
            sound = rollout
            rollout = (
                rollout if fault is None else break_episode(fault, rollout, given.requests[NAME])
            )
            rollout = rollout if sealed else replace(rollout, routes_digest=sound.routes_digest)
            ends = [end for _, end in rollout.turn_spans]
            rollout = replace(rollout, **changes).with_episode(
                turns=tuple(zip(ends, turn_ends, strict=False)), turn_rewards=turn_rewards
            )
        prompt = Prompt(rollout.id, "", tuple(rollout.tokens[:3].tolist()), "")
        groups.append(
            RolloutGroup(prompt, (replace(rollout, id=f"{rollout.id}/0"),), np.zeros(1, np.float32))
        )
    Recorder(folder, save_tensors=True).record(1, groups)
    return [(found.check, found.where) for found in check_run(folder, None).findings]


def test_sound_episodes_have_no_findings(tmp_path):
    assert (
        findings(tmp_path, turn_rewards=(0.0, 0.5, 1.0), turn_ends=("stop", "length", "stop")) == []
    )


@pytest.mark.parametrize("fault", EPISODE_FAULTS)
def test_an_episode_changed_after_sampling_breaks_its_digest(tmp_path, fault):
    assert ("digest", f"step 1 {NAME}/0") in findings(tmp_path, fault=fault)


@pytest.mark.parametrize("fault", EPISODE_FAULTS)
def test_an_episode_joined_wrongly_is_not_seen_without_a_server(tmp_path, fault):
    """The limit that docs/guides/mismatch.md states: the digest is made after the fault."""
    assert "digest" not in {check for check, _ in findings(tmp_path, fault=fault, sealed=True)}


def test_spans_and_turns_that_do_not_fit_are_named(tmp_path):
    assert ("turns", f"step 1 {NAME}/0") in findings(tmp_path / "a", turn_rewards=(0.0, 0.5))
    given = make_given(Shape(2, 32, 4, 96, dp_size=1, cp_size=1, micro_batches=2, turns=3))
    first, second = next(rollout for rollout in given.rollouts(0) if rollout.id == NAME).environment
    found = findings(tmp_path / "b", environment=(second, first))
    assert {("turns", f"step 1 {NAME}/0"), ("digest", f"step 1 {NAME}/0")} <= set(found)
