"""Every hostile answer against the real pool: nothing hangs, nothing scores, every failure is
counted by its kind.
"""

import time

import numpy as np
import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.reward.failures import KINDS
from megatron_rl.reward.pool import RewardPool
from tests.unit.reward import hostile

START_SECONDS = 15.0  # of a replacement worker, on a busy machine; 1 s on an idle one


def with_labels(answers):
    return [answer if isinstance(answer, tuple) else (answer, "46") for answer in answers]


def score_hostile(answers, *, timeout, workers, tmp_path):
    """Score hostile answers among correct ones; returns the pool's counters and the seconds it
    took.
    """
    marker = tmp_path / "ran"
    answers = [(response.replace("{file}", str(marker)), label) for response, label in answers]
    items = [("q", *pair) for pair in answers]
    right = [(f"q{n}", *pair) for n, pair in enumerate(hostile.RIGHT * 2)]
    mixed = right[:5] + items + right[5:]
    with RewardPool(
        RewardConfig(timeout_seconds=timeout, num_workers=workers, on_error="drop")
    ) as pool:
        start = time.monotonic()
        scores = pool.score(mixed)
        seconds = time.monotonic() - start
        assert scores[:5].tolist() == scores[-5:].tolist() == [1.0] * 5, (
            "correct answers keep their score among hostile ones"
        )
        found = scores[5:-5]
        assert np.isin(found, [0.0]).sum() + np.isnan(found).sum() == len(items), (
            "a hostile answer was rewarded"
        )
        counters = dict(pool.counters)
        failures = sum(counters.get(kind, 0) for kind in KINDS)
        assert np.isnan(found).sum() == failures
        assert counters["scored"] + failures == len(mixed), "a response in no counter"
        assert pool.score([("q", "46", "46")]).tolist() == [1.0], "the pool still works"
    assert not marker.exists(), "a response was run as code"
    return counters, seconds


def test_the_quick_hostile_answers(tmp_path):
    """Those that a verifier answers, or fails on, quickly; only two of the bombs."""
    answers = with_labels(
        hostile.TEXT + hostile.INJECTIONS + hostile.BOMBS[:2] + hostile.NESTED[:1]
    )
    assert len(set(answers)) >= 45
    counters, seconds = score_hostile(answers, timeout=3.0, workers=1, tmp_path=tmp_path)
    assert counters["timeouts"] >= 2 and counters["errors"] >= 3, (
        "failures must not pass for wrong answers"
    )
    assert seconds < (counters["timeouts"] + counters["errors"]) * (3.0 + START_SECONDS)


@pytest.mark.slow
def test_all_hostile_answers_end_within_their_timeout(tmp_path):
    answers = with_labels(
        hostile.BOMBS + hostile.ALGEBRA + hostile.NESTED + hostile.TEXT + hostile.INJECTIONS
    )
    assert len(set(answers)) >= 80
    counters, seconds = score_hostile(answers, timeout=1.0, workers=2, tmp_path=tmp_path)
    assert counters["timeouts"] >= 15
    assert seconds <= -(-len(answers) // 2) * (1.0 + START_SECONDS)
    print(f"{len(answers)} hostile answers in {seconds:.0f} s: {counters}")
