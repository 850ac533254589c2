import time

import numpy as np
import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.reward.pool import RewardError, RewardPool

HOSTILE = "tests.unit.reward.functions:by_response"


def test_math_answers_in_order():
    items = [
        ("1+1=", "2", "2"), ("1+1=", "3", "2"), ("q", r"so \boxed{\frac{1}{2}}", "0.5"), ("q", "it is $x^2+1$", "$1+x^2$"),
        ("q", "", "46"), ("q", "46 ", "46"), ("q", "046", "46"), ("q", "no idea", "46"),
    ]  # fmt: skip
    with RewardPool(RewardConfig(num_workers=2)) as pool:
        assert pool.score(items).tolist() == [1, 0, 1, 1, 0, 1, 1, 0]
        many = [("q", str(n % 50), "7") for n in range(2000)]
        start = time.monotonic()
        scores = pool.score(many)
        assert scores.sum() == 40 and time.monotonic() - start < 10
        assert pool.counters["timeouts"] == pool.counters["errors"] == 0


def test_the_integer_shortcut_says_what_math_verify_says():
    from math_verify import parse, verify

    for response in ("46", "-46", "0", "5", "460", "123456789012345"):
        for label in ("46", "0", "-46", "123456789012345"):
            expected = float(
                verify(parse(label, parsing_timeout=None), parse(response, parsing_timeout=None), timeout_seconds=None)
            )
            from megatron_rl.reward.math_answer import score

            assert score("", response, label) == expected, (response, label)


def test_hostile_responses_score_zero_are_counted_and_harm_nobody():
    responses = ["ok", "hang", "ok", "raise", "exit", "spin", "die", "nan", "print", "ok"]
    with RewardPool(RewardConfig(function=HOSTILE, timeout_seconds=0.5)) as pool:
        start = time.monotonic()
        scores = pool.score([("p", response, "ok") for response in responses])
        assert time.monotonic() - start < 60
        np.testing.assert_array_equal(scores, [r == "ok" for r in responses])
        assert pool.counters == {"scored": 10, "timeouts": 2, "errors": 3, "crashes": 1}
        time.sleep(0.2)  # replaced workers live on
        assert pool.score([("p", "ok", "ok")]).tolist() == [1]


@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "\\boxed{99999999!}", "(" * 5000 + "1", "x" * 1_000_000, "10^{10^{10}}"]
)
def test_hostile_mathematics_ends_in_time(answer):
    with RewardPool(RewardConfig(timeout_seconds=2)) as pool:
        start = time.monotonic()
        assert pool.score([("q", answer, "46"), ("q", "46", "46")]).tolist() == [0, 1]
        assert time.monotonic() - start < 40


@pytest.mark.parametrize(
    ("name", "message"), [("maths", "use math or"), ("no.such:thing", "No module"), ("json:nothing", "nothing")]
)
def test_a_bad_function_is_refused_at_start(name, message):
    with pytest.raises(RewardError, match=message):
        with RewardPool(RewardConfig(function=name)):
            pass


def test_no_process_is_left_behind():
    pool = RewardPool(RewardConfig(function=HOSTILE))
    with pool:
        processes = [worker.process for worker in pool._workers]
    assert all(process.poll() is not None for process in processes)


def test_a_function_that_fails_on_everything_stops_the_run():
    with RewardPool(RewardConfig(function=HOSTILE)) as pool:
        assert pool.score([("p", "raise", "ok"), ("p", "ok", "ok")]).tolist() == [0, 1]
        with pytest.raises(RewardError, match="failed on all 2 responses"):
            pool.score([("p", "raise", "ok"), ("q", "raise", "ok")])
