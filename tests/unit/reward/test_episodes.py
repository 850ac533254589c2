"""Reward functions that see the whole episode, or a group; async ones; and the metrics that they
return.
"""

import math

import pytest

from examples.rewards.shortest_correct import shortest_correct
from megatron_rl.config import ConfigError, RewardConfig
from megatron_rl.reward import Episode, EpisodeTurn
from megatron_rl.reward.pool import RewardError, RewardNotLoaded, RewardPool

MODULE = "tests.unit.reward.episodes"


def pool_of(name, **settings):
    return RewardPool(
        RewardConfig(function=f"{MODULE}:{name}", **{"timeout_seconds": 5.0, **settings})
    )


def answer(response, label="1", **settings):
    return Episode("p", response, label, **settings)


def test_an_episode_arrives_as_it_was_sent():
    turns = (EpisodeTurn("6*7", "42\n", "stop", 3, 0.5), EpisodeTurn("42", "", "length", 2))
    episode = answer(
        "6*7\u2028 \ud800", turns=turns, num_tokens=5, metadata={"weight": 2.5, "list": [1, None]}
    )
    assert Episode.from_json(episode.to_json()) == episode
    with pool_of("turns") as pool:
        ((first,), rest) = pool.score_episodes(
            [[episode], [answer("a"), answer("a", turns=turns[:1])]]
        )
        assert (first.reward, first.metrics) == (2.0, {"metadata": 2.5, "tokens": 5})
        assert [each.reward for each in rest] == [0.0, 1.0], "episodes of one text are not one call"
        assert pool.score([("p", "a", "1")]).tolist() == [0.0]


def test_results_that_cannot_be_used_are_invalid():
    names = ["nan metric", "bad name", "total", "many", "keys", "huge", "text", "unknown", "ok"]
    with pool_of("by_response", on_error="drop") as pool:
        (found,) = pool.score_episodes([[answer(name) for name in names]])
        assert [math.isnan(each.reward) for each in found] == [True] * 8 + [False]
        assert (found[-1].reward, found[-1].metrics, found[0].metrics) == (0.5, {"a": 2.0}, {})
        found = {kind: count for kind, count in pool.counters.items() if count}
        assert found == {"invalid": 6, "errors": 2, "scored": 1}


def test_calls_of_an_async_function_run_side_by_side():
    with pool_of("side_by_side", concurrency=8) as pool:
        (found,) = pool.score_episodes([[answer(str(number)) for number in range(16)]])
        assert [each.reward for each in found] == [1.0] * 16
        assert max(each.metrics["most"] for each in found) == 8.0
    with pool_of("texts", num_workers=2) as pool:
        assert pool.score([("p", "1", "1"), ("p", "2", "1")]).tolist() == [1.0, 0.0]


def test_only_the_call_that_hangs_or_dies_fails():
    """One is cancelled, three take their worker with them: what ran beside them is called again."""
    names = ["hang", "a", "hang on", "b", "block", "c", "die", "d", "cancel", "e", "raise"]
    with pool_of("wait", concurrency=16, num_workers=2, timeout_seconds=3.0, on_error=-1.0) as pool:
        (found,) = pool.score_episodes([[answer(name) for name in names]])
        assert {name: each.reward for name, each in zip(names, found, strict=True)} == {
            name: 1.0 if len(name) == 1 else -1.0 for name in names
        }
        assert {kind: pool.counters[kind] for kind in ("timeouts", "crashes", "errors",
        "scored")} == {
            "timeouts": 3, "crashes": 1, "errors": 2, "scored": 5,
        }  # fmt: skip


def test_a_group_is_scored_together():
    with pool_of("group", on_error=-1.0) as pool:
        assert pool.score_episodes([[]]) == [[]]
        found = pool.score_episodes(
            [
                [answer("a"), answer("a"), answer("c")],
                [answer("short"), answer("b")],
                [answer("raise")],
            ]
        )
        assert [[each.reward for each in group] for group in found] == [
            [3.0, 3.0, -1.0],
            [-1.0, -1.0],
            [-1.0],
        ]
        assert [each.metrics for each in found[0]] == [{"place": 0.0}, {"place": 1.0}, {}]
        assert pool.counters["invalid"] == 3 and pool.counters["errors"] == 1
    with pool_of("group") as pool, pytest.raises(RewardError, match="failed on all 2 responses"):
        pool.score_episodes([[answer("raise"), answer("b")]])  # one call, and all that there is


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", r"takes \(episode\): must take .*; annotate its parameter"),
        (
            "two",
            r"takes \(prompt, response\): must take \(prompt, response, label\), "
            r"\(episode: Episode\) or",
        ),
        ("unknown", r"an annotation that cannot be read .*'Nothing' is not defined"),
        ("other", r"takes \(episode: dict\): must take"),
    ],
)
def test_a_function_of_other_arguments_is_refused_at_start(name, message):
    with pytest.raises(
        RewardNotLoaded, match=rf"reward.function = '{MODULE}:{name}' cannot be loaded: .*{message}"
    ) as refusal:
        with pool_of(name):
            pass
    assert isinstance(refusal.value, ConfigError), "no restart of the run helps"


def test_the_shortest_right_answer_gets_a_bonus():
    right = [answer("1", num_tokens=tokens) for tokens in (5, 3, 3)]
    found = shortest_correct([answer("2", num_tokens=1), *right])
    assert [each.value for each in found] == [0.0, 1.0, 1.2, 1.2]
    assert [each.value for each in shortest_correct([answer("2"), answer("3")])] == [0.0, 0.0]
