"""Equal routes of other tokens: chance in a small model, else the routes of another request."""

import numpy as np
import pytest

from megatron_rl_tools.check_rollouts.rollout_copies import Copies, differing_rows

HIDDEN, GROUP, PROMPT = 16, 16, 6


class Model:
    """Routers of a synthetic model; input: the token's embedding and a decaying sum of previous
    ones.  Digits are similar.
    """

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.rng = np.random.default_rng(0)
        self.top_k = top_k
        self.embedding = self.rng.normal(size=HIDDEN) + 0.4 * self.rng.normal(size=(12, HIDDEN))
        self.embedding[10:] = self.rng.normal(size=(2, HIDDEN))  # + and =
        self.routers = self.rng.normal(size=(layers, HIDDEN, experts))

    def routes(self, tokens: np.ndarray) -> np.ndarray:
        """[S - 1, L, K]"""
        state, rows = np.zeros(HIDDEN), []
        for token in tokens[:-1]:
            state = 0.3 * state + self.embedding[token]
            rows.append(np.argsort(-(state @ self.routers), -1)[:, : self.top_k])
        return np.array(rows, np.uint8)

    def dump(self, groups: int, answer: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, routes) of `groups` sums with GROUP answers of up to `answer` digits each."""
        rollouts = []
        for _ in range(groups):
            a, b, c, d = self.rng.integers(0, 10, 4)
            for _ in range(GROUP):
                digits = self.rng.integers(0, 10, self.rng.integers(answer - 1, answer + 1))
                tokens = np.array([a, b, 10, c, d, 11, *digits, 1])
                rollouts.append((tokens, self.routes(tokens)))
        return rollouts


def found(rollouts):
    copies = Copies(rollouts[0][1].shape[1])
    for name, (tokens, routes) in enumerate(rollouts):
        copies.add(str(name), tokens, routes, np.ones(len(routes), bool))
    return list(copies.found()), copies


def copy(rollouts, to, same_group):
    """Give rollout `to` the routes of the first one of its length and other tokens, in its group or
    another.
    """
    tokens = rollouts[to][0]
    for number, (other, its_routes) in enumerate(rollouts):
        is_mate = number // GROUP == to // GROUP
        if is_mate == same_group and len(other) == len(tokens) and other[PROMPT] != tokens[PROMPT]:
            rollouts[to] = tokens, its_routes
            return number
    raise AssertionError("no such rollout")


def test_answers_that_a_small_model_routes_equally_are_no_copies():
    nothing, copies = found(Model(layers=2, experts=8, top_k=2).dump(groups=20, answer=3))
    assert nothing == [] and len(copies.equal) > 20


@pytest.mark.parametrize("experts", [8, 16])
def test_a_copy_from_another_prompt_is_found_in_a_small_model(experts):
    rollouts = Model(layers=4, experts=experts, top_k=2).dump(groups=20, answer=8)
    to = len(rollouts) - 3
    other = copy(rollouts, to, same_group=False)
    assert found(rollouts)[0] == [(str(to), str(other))]


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(26, 64, 6), (48, 128, 8)])
def test_a_short_copy_from_the_same_prompt_is_found_in_a_model_of_realistic_size(
    layers, experts, top_k
):
    rollouts = Model(layers, experts, top_k).dump(groups=4, answer=4)
    assert found(rollouts)[0] == []
    other = copy(rollouts, 60, same_group=True)
    assert found(rollouts)[0] == [("60", str(other))]


def test_many_copies_are_not_taken_for_chance():
    rollouts = Model(layers=24, experts=64, top_k=6).dump(groups=4, answer=8)
    for to in range(40, 60):
        copy(rollouts, to, same_group=False)
    assert {int(name) for name, _ in found(rollouts)[0]} == set(range(40, 60))


def test_rows_without_a_route_are_not_compared():
    routes, rng = np.zeros((200, 24, 4), np.uint8), np.random.default_rng(0)
    copies = Copies(24)
    for name in "ab":
        copies.add(name, rng.integers(0, 50, 201), routes, np.zeros(200, bool))
    assert len(copies.equal) == 1 and list(copies.found()) == []


def test_tokens_that_first_differ_long_before_the_rows_that_are_kept():
    same, present = np.arange(256), np.ones(256, bool)
    assert differing_rows(same, same, present).tolist() == [2] * 256
    other = np.where(same == 200, 0, same)
    assert differing_rows(same, other, present).tolist() == [3, *[2] * 55]
