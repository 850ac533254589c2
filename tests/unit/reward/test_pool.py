import os
import resource
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.reward.pool import RewardError, RewardPool, memory_bytes
from megatron_rl.reward.scored_response import Episode
from tests.fake_server import wait_for
from tests.unit.reward.functions import LEFT_RUNNING

HOSTILE = "tests.unit.reward.functions:by_response"
PATIENCE = 60.0  # seconds for what another process does


@pytest.fixture
def children(monkeypatch):
    """What lists the processes that functions of this test started, and that still run."""
    seconds = f"86397.{os.getpid()}{time.monotonic_ns() % 10**9:09}"
    monkeypatch.setenv(LEFT_RUNNING, seconds)
    return lambda: [
        p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or [])
    ]


def test_math_answers_in_order():
    items = [
        ("1+1=", "2", "2"), ("1+1=", "3", "2"), ("q", r"so \boxed{\frac{1}{2}}", "0.5"), ("q",
        "it is $x^2+1$", "$1+x^2$"),
        ("q", "", "46"), ("q", "46 ", "46"), ("q", "046", "46"), ("q", "no idea", "46"),
    ]  # fmt: skip
    with RewardPool(RewardConfig(num_workers=2)) as pool:
        assert pool.score(items).tolist() == [1, 0, 1, 1, 0, 1, 1, 0]
        many = [("q", str(n % 50), "7") for n in range(2000)]
        start = time.monotonic()
        scores = pool.score(many)
        assert scores.sum() == 40 and time.monotonic() - start < PATIENCE
        assert pool.counters["timeouts"] == pool.counters["errors"] == 0


def test_the_integer_shortcut_agrees_with_math_verify():
    from math_verify import parse, verify

    from megatron_rl.reward.math_answer import score

    for response in ("46", "-46", "0", "5", "460", "123456789012345"):
        for label in ("46", "0", "-46", "123456789012345"):
            expected = float(
                verify(
                    parse(label, parsing_timeout=None),
                    parse(response, parsing_timeout=None),
                    timeout_seconds=None,
                )
            )
            assert score("", response, label) == expected, (response, label)


def test_hostile_functions_are_counted_by_kind_and_do_no_harm(children, capfd):
    answers = [
        "ok", "hang", "raise", "exit", "spin", "die", "nan", "none", "label", "memory", "stop",
        "spawn", "print", "flood",
        "spawn and die",
    ]  # fmt: skip
    with RewardPool(
        RewardConfig(function=HOSTILE, timeout_seconds=3.0, num_workers=2, on_error=-3.0)
    ) as pool:
        start = time.monotonic()
        scores = pool.score([("p", response, "ok") for response in [*answers, "raise", "ok"]])
        assert time.monotonic() - start < 100
        expected = {"ok": 1.0, "print": 0.0, "flood": 0.0}
        np.testing.assert_array_equal(
            scores, [expected.get(answer, -3.0) for answer in [*answers, "raise", "ok"]]
        )
        found = {kind: count for kind, count in pool.counters.items() if count}
        assert found == {
            "scored": 4, "timeouts": 4, "errors": 4, "crashes": 2, "invalid": 1, "bad_labels": 1,
            "memory": 1,
        }  # fmt: skip
        time.sleep(0.2)  # the new workers must stay alive
        assert pool.score([("p", "ok", "ok")]).tolist() == [1]
    assert wait_for(lambda: not children(), PATIENCE)
    assert len(capfd.readouterr().err) < 20_000, (
        "what functions print must not bury the run's own output"
    )


def test_a_stopped_worker_that_does_not_read_does_not_stop_the_run():
    """The next item is longer than a pipe holds."""
    with RewardPool(RewardConfig(function=HOSTILE, timeout_seconds=3.0)) as pool:
        assert pool.score([("p", "stop later", "ok")]).tolist() == [0]
        worker = psutil.Process(pool._workers[0].process.pid)
        assert wait_for(lambda: worker.status() == psutil.STATUS_STOPPED, PATIENCE)
        assert pool.score([("p", "ok" + " " * 1_000_000, "ok"), ("p", "ok", "ok")]).tolist() == [
            0,
            1,
        ]
        assert pool.counters["timeouts"] == 1


def test_a_worker_is_replaced_where_more_than_1024_files_are_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: list[int] = []
    try:
        with RewardPool(RewardConfig(function=HOSTILE, timeout_seconds=3.0, num_workers=2)) as pool:
            while not opened or opened[-1] < 1100:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            assert pool.score([("p", "hang", "ok"), ("p", "ok", "ok")]).tolist() == [0, 1]
            assert pool.score([("p", "ok", "ok"), ("p", "no", "ok")]).tolist() == [1, 0]
            assert pool.counters["timeouts"] == 1
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_replacement_that_is_killed_while_it_starts_is_replaced_again(caplog, monkeypatch):
    """By the kernel, where memory is short, say: the function is not at fault."""
    with RewardPool(RewardConfig(function=HOSTILE, timeout_seconds=3.0)) as pool:
        assert pool.score([("p", "die", "ok")]).tolist() == [0]
        pool._workers[0].process.kill()
        assert pool.score([("p", "ok", "ok")]).tolist() == [1]
        assert pool.totals()["reward/lost_starts_total"] == 1
        assert "a worker was lost while it started" in caplog.text
        assert pool.score([("p", "die", "ok")]).tolist() == [0]
        monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no Python starts
        pool._workers[0].process.kill()
        with pytest.raises(RewardError, match=r"3 workers in a row were lost.*others have loaded"):
            pool.score([("p", "ok", "ok")])


def test_workers_do_not_get_the_api_key(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame")
    monkeypatch.setenv("KEY_OF_A_JUDGE", "other")
    with RewardPool(
        RewardConfig(function=HOSTILE, timeout_seconds=3.0), hidden_env=["KEY_OF_THE_SERVERS"]
    ) as pool:
        items = [
            ("p", "env KEY_OF_THE_SERVERS", "ok"),
            ("p", "env KEY_OF_A_JUDGE", "ok"),
            ("p", "hang", "ok"),
        ]
        assert pool.score(items).tolist() == [0, 1, 0]
        assert pool.score(items[:1]).tolist() == [0], "nor does a replacement worker"


def test_memory_of_a_workers_is_limited_where_it_is_set():
    """A response such as 10**10**8 must not fill the host, in a function of the user's either."""
    config = RewardConfig(function="tests.unit.reward.functions:allocating", memory_gib=1.0)
    items = [("q", str(size), "") for size in (2**20, 2**31, 2**10)]
    with RewardPool(config) as pool:
        assert pool.score(items).tolist() == [1, 0, 1] and pool.counters["memory"] == 1
    for function, limit in (("math", 4 * 2**30), ("a:b", 0)):
        assert memory_bytes(RewardConfig(function=function)) == limit
        assert memory_bytes(RewardConfig(function=function, memory_gib=0)) == 0


def test_on_error_is_the_reward_of_a_failed_response():
    items = [("p", "ok", "ok"), ("p", "raise", "ok"), ("p", "no", "ok")]
    with RewardPool(RewardConfig(function=HOSTILE, on_error="drop")) as pool:
        np.testing.assert_array_equal(pool.score(items), [1, np.nan, 0])
    with RewardPool(RewardConfig(function=HOSTILE, on_error="raise")) as pool:
        with pytest.raises(
            RewardError, match=r"response 'raise', label 'ok': errors .*on purpose; reward.on_error"
        ):
            pool.score(items)


def test_the_format_penalty():
    config = RewardConfig(
        function=HOSTILE, format_pattern=r"(?s)^<think>.*</think>", format_penalty=0.25
    )
    items = [("p", "ok", "ok"), ("p", "<think>\n</think>", "ok"), ("p", "raise", "ok")]
    with RewardPool(config) as pool:
        assert pool.score(items).tolist() == [0.75, 0, 0]
        assert pool.score(items, shaped=False).tolist() == [1, 0, 0], (
            "evaluation scores the task alone"
        )
        assert pool.counters["unformatted"] == 2
    with RewardPool(
        RewardConfig(function=HOSTILE, timeout_seconds=3, format_pattern="(a+)+$", format_penalty=1)
    ) as pool:
        assert pool.score([("p", "a" * 40 + "!", "ok"), ("p", "a", "ok")]).tolist() == [0, 0]
        assert pool.counters["timeouts"] == 1, (
            "a catastrophic pattern counts towards the timeout of its response"
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format_penalty": 1.0}, "no effect without one another"),
        ({"format_pattern": "x"}, "no effect without one another"),
        ({"format_pattern": "(", "format_penalty": 1.0}, "is not a regular expression"),
        ({"function": "maths"}, "must be math or package.module:function"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_error": float("nan")}, "on_error"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


@pytest.mark.parametrize(
    ("name", "message"), [("no.such:thing", "No module"), ("json:nothing", "nothing")]
)
def test_a_bad_function_is_refused_at_start(name, message):
    with pytest.raises(RewardError, match=message):
        with RewardPool(RewardConfig(function=name)):
            pass


def test_no_process_is_left_running():
    pool = RewardPool(RewardConfig(function=HOSTILE))
    with pool:
        processes = [worker.process for worker in pool._workers]
    assert all(process.poll() is not None for process in processes)


def test_an_interrupted_pool_leaves_no_process_running(children):
    """As at start-up, where a handler of launch/signals.py raises in the main thread."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def interrupt_when_it_runs():
        wait_for(children, PATIENCE)
        os.kill(os.getpid(), signal.SIGUSR1)

    config = RewardConfig(function=HOSTILE, num_workers=2, timeout_seconds=2 * PATIENCE)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), RewardPool(config) as pool:
            processes = [worker.process for worker in pool._workers]
            threading.Thread(target=interrupt_when_it_runs).start()
            pool.score([("p", "hang", "ok"), ("p", "spawn", "ok")])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all(process.poll() is not None for process in processes)
    assert wait_for(lambda: not children(), PATIENCE)


def test_a_function_that_fails_on_everything_stops_the_run():
    with RewardPool(RewardConfig(function=HOSTILE)) as pool:
        assert pool.score([("p", "raise", "ok"), ("p", "ok", "ok")]).tolist() == [0, 1]
        with pytest.raises(RewardError, match="failed on all 2 responses"):
            pool.score([("p", "raise", "ok"), ("q", "raise", "ok")])


def test_one_prompt_on_which_a_working_function_fails_does_not_stop_the_run():
    """Dynamic sampling may draw a single prompt, whose data the function cannot read."""
    bad, good = (
        [[Episode("p", "raise", "ok"), Episode("p", "raise ", "ok")]],
        [[Episode("q", "ok", "ok")]],
    )
    with RewardPool(RewardConfig(function=HOSTILE)) as pool:
        for _ in range(2):
            pool.score_episodes(good)
            assert [rewarded.reward for rewarded in pool.score_episodes(bad)[0]] == [0, 0]
        with pytest.raises(RewardError, match="failed on all 2 responses"):
            pool.score_episodes(bad)  # twice in a row


def test_groups_that_are_scored_one_after_the_other_are_checked_together():
    """A function that fails on one group is not broken: the others of the step show it."""
    bad, good = (
        [[Episode("p", "raise", "ok")], [Episode("q", "raise", "ok")]],
        [[Episode("p", "ok", "ok")]],
    )
    with RewardPool(RewardConfig(function=HOSTILE)) as pool:
        assert [group[0].reward for group in pool.score_episodes(bad, is_last=False)] == [0, 0]
        pool.score_episodes(good)
        pool.score_episodes(bad[:1], is_last=False)
        with pytest.raises(RewardError, match="failed on all 2 responses"):
            pool.score_episodes(bad[1:])
        pool.score_episodes(bad[:1]), pool.score_episodes([])  # each step by itself
    with RewardPool(RewardConfig(function=HOSTILE, on_error="raise")) as pool:
        with pytest.raises(RewardError, match="response 'raise'"):
            pool.score_episodes(bad, is_last=False)
