"""The reference itself: a near tie of two experts is rounding, anything else is wrong."""

import numpy as np
import pytest
import torch

from megatron_rl.records import Rollout
from tests.e2e.reference import hf_logprobs_and_routes, hf_model, wrong_tokens
from tests.referee import forced, rollout_routes
from tests.tiny import random_checkpoint

LAYER, TIED = 2, (3, 5)


def make(checkpoint, routes=None) -> Rollout:
    """What a server returns that uses these routes, by default transformers' own."""
    tokens, nothing = np.random.default_rng(0).integers(2, 60, 200), np.zeros(190, np.float32)
    rollout = Rollout("q/0", tokens, 10, nothing, routes, "stop", nothing.astype(np.int32))
    with forced(hf_model(checkpoint), None if routes is None else rollout_routes(rollout)):
        logprobs, own = hf_logprobs_and_routes(checkpoint, rollout, 1.0)
    routes = own.astype(np.uint8) if routes is None else routes
    return Rollout("q/0", tokens, 10, logprobs, routes, "stop", nothing.astype(np.int32))


@pytest.fixture
def checkpoint(tmp_path):
    """Two experts whose scores are equal for every token."""
    path = random_checkpoint(tmp_path / "moe")
    gate = hf_model(path).model.layers[LAYER].mlp.gate.weight
    with torch.no_grad():
        gate[TIED[1]] = gate[TIED[0]]
    return path


def test_the_other_of_two_equal_experts_is_not_wrong(checkpoint):
    own = make(checkpoint)
    assert wrong_tokens(checkpoint, own) == (0, 0)
    routes = own.routed_experts.copy()
    has_one = np.isin(routes[:, LAYER], TIED).sum(-1) == 1
    row = int(np.flatnonzero(has_one)[0])
    routes[row, LAYER] = [
        sum(TIED) - expert if expert in TIED else expert for expert in routes[row, LAYER]
    ]
    other = make(checkpoint, routes)
    assert np.abs(other.rollout_logprobs - own.rollout_logprobs).max() > 1e-3, (
        "later tokens follow from the choice"
    )
    assert wrong_tokens(checkpoint, other) == (0, 0)


def test_a_worse_expert_and_a_wrong_logprob_are(checkpoint):
    own = make(checkpoint)
    routes = own.routed_experts.copy()
    routes[50:53, 0] = [[(expert + 1) % 8 for expert in pair] for pair in routes[50:53, 0]]
    assert wrong_tokens(checkpoint, make(checkpoint, routes))[1] >= 2
    own.rollout_logprobs[7] += 2e-4
    assert wrong_tokens(checkpoint, own) == (1, 0)
