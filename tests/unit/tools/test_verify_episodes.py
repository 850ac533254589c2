"""Inputs of verify_replay --turns: what joining the turns gives is what the definition says, and
each fault is named.
"""

import numpy as np
import pytest

from megatron_rl.batch.pack import pack
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.verify_replay.episodes import (
    break_episode,
    forward_of,
    sampled_by,
    wrong_batch,
)
from megatron_rl_tools.verify_replay.fingerprints import Shape, fingerprint_routes, make_given
from megatron_rl_tools.verify_replay.options import EPISODE_FAULTS

SHAPE = Shape(
    num_layers=2,
    num_experts=32,
    top_k=4,
    vocab_size=96,
    dp_size=2,
    cp_size=1,
    micro_batches=2,
    turns=3,
)


@pytest.fixture(scope="module")
def given():
    return make_given(SHAPE)


def mini_batch(given, index):
    parts = tuple(map(tuple, given.samples[index][0]))
    return MiniBatch(tuple(map(pack, parts)), 4, 100, parts)


def test_joined_turns_are_those_of_the_definition(given):
    """Also where a server computed a turn's input again: those routes are all others."""
    assert given.is_unique and len(given.requests) == 2 * 2 * 2 * 2
    for index in (0, 1):
        assert given.routes(index) == fingerprint_routes(given.rollouts(index))
        assert wrong_batch(given.requests, mini_batch(given, index), 0) is None
    cached, computed = (given.requests[f"0.0.0.{i}"] for i in (0, 1))
    assert np.array_equal(cached[2].routes[: len(cached[1].routes)], cached[1].routes)
    assert not (np.sort(computed[2].routes[:9]) == np.sort(computed[1].routes[:9])).all(-1).any()
    assert set(given.forwards(0)).isdisjoint(given.routes(0).values())


def test_the_definition_by_hand(given):
    requests = given.requests["0.0.0.1"]
    bounds = [(request.first, len(request.tokens)) for request in requests]
    assert [sampled_by(requests, bounds[0][0] + n) for n in (-1, 0)] == [None, 0]
    assert sampled_by(requests, bounds[0][1]) is None  # the environment
    assert forward_of(requests, 0) == 0  # of the prompt
    assert forward_of(requests, bounds[0][1] - 2) == 0  # predicts the turn's last token
    # that token: first an input of the second request
    assert forward_of(requests, bounds[0][1] - 1) == 1
    assert forward_of(requests, bounds[1][0] - 1) == 1  # predicts the second turn


@pytest.mark.parametrize("fault", EPISODE_FAULTS)
def test_every_fault_changes_what_is_checked(given, fault):
    wrong = given.broken(fault)
    names = {
        rollout.id
        for index in (0, 1)
        for rollout in wrong.rollouts(index)
        if changed(given, rollout, index)
    }
    assert names == {"0.0.0.1", "1.0.0.1"}
    found = wrong_batch(wrong.requests, mini_batch(wrong, 0), 0)
    if fault == "forward":  # its tokens are right: the routers show it
        assert found is None
        right, routes = wrong.routes(0), fingerprint_routes(wrong.rollouts(0))
        others = [key for key in right if right[key] != routes[key]]
        assert others and all(routes[key] in wrong.forwards(0) for key in others)
    else:
        assert found[0].startswith(f"{fault}: ") and found[1].startswith(
            "rollout 0.0.0.1, position "
        ), found


def changed(given, rollout, index):
    sound = next(each for each in given.rollouts(index) if each.id == rollout.id)
    same = np.array_equal(sound.tokens, rollout.tokens) and sound.environment == rollout.environment
    return not (same and np.array_equal(sound.routed_experts, rollout.routed_experts))


def test_a_log_prob_of_another_token_is_named(given):
    rollout = next(given.rollouts(0))
    requests = given.requests[rollout.id]
    assert break_episode("mask", rollout, requests).routes_digest != rollout.routes_digest
    rollout.rollout_logprobs[0] += 1
    hint, found = wrong_batch(given.requests, mini_batch(given, 0), 0)
    assert hint == "" and "log-prob" in found and "request 1 sampled it with" in found
    rollout.rollout_logprobs[0] -= 1
