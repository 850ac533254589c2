"""status.json of a real watchdog: while it runs, at its end, after a kill; and where it cannot be
written.
"""

import json
import math
import threading
import time
from contextlib import suppress

import pytest

from megatron_rl.launch import status as module
from megatron_rl.launch import watchdog
from megatron_rl.launch.status import StatusWriter, read_status
from megatron_rl.launch.watchdog import Watchdog, WatchSettings


def until(condition, seconds=60.0):
    def holds() -> bool:
        with suppress(ValueError):  # before the first file
            return condition()
        return False

    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr("megatron_rl.launch.watchdog.HEARTBEAT_SECONDS", 0.05)


def watched(tmp_path, writer):
    settings = WatchSettings(600, 30, tmp_path)
    dog = Watchdog(None, 0, 1, settings, stop=lambda verdict: None)
    dog.on_heartbeats, dog.waiting_for = writer.beats, lambda: "http://me:passw0rd@10.0.0.2:30000"
    return dog


def test_a_run_while_it_runs_and_at_its_end(tmp_path):
    with (
        StatusWriter(tmp_path, 60, hidden=["SERVER_KEY"]) as writer,
        watched(tmp_path, writer) as dog,
    ):
        writer.urls = lambda: ("http://me:passw0rd@10.0.0.2:30000",)
        dog.enter("update", 11)
        writer.note(step=11, metrics={"rollout/reward_mean": 0.5})
        until(
            lambda: any(rank.where == "update of step 12" for rank in read_status(tmp_path).ranks)
        )
        found = read_status(tmp_path)
        (rank,) = found.ranks
        assert (found.state, found.step, found.num_steps, found.metrics) == (
            "running", 11, 60, {"rollout/reward_mean": 0.5},
        )  # fmt: skip
        assert rank.memory > 10 * 2**20 and rank.seconds < 60 and rank.silent < 60
        assert rank.waits_for == found.servers[0] == "http://***@10.0.0.2:30000"
        assert abs(found.time - time.time()) < 60
    found = read_status(tmp_path)
    assert found.state == "finished" and not list(tmp_path.glob(".*"))
    assert "SERVER_KEY" not in (tmp_path / "status.json").read_text(), (
        "`top` takes no secret's name from a file"
    )


def test_memory_is_read_by_the_thread_that_trains(tmp_path, monkeypatch):
    """In the watchdog's, CUDA is that of GPU 0, and may raise or wait."""
    threads = set()
    monkeypatch.setattr(
        watchdog, "memory_in_use", lambda: threads.add(threading.current_thread()) or 1
    )
    with StatusWriter(tmp_path, 60) as writer, watched(tmp_path, writer) as dog:
        dog.enter("update", 11)
        until(lambda: any(rank.memory == 1 for rank in read_status(tmp_path).ranks))
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (RuntimeError("no disk"), "failed", "RuntimeError: no disk"),
        (KeyboardInterrupt(), "stopped", ""),
        (TimeoutError("SIGTERM: stopped after step 3"), "stopped", "SIGTERM: stopped after step 3"),
    ],
)
def test_how_it_ended(tmp_path, error, state, text):
    with pytest.raises(type(error)):
        with StatusWriter(tmp_path, 60, stopped=(TimeoutError,)):
            raise error
    assert (read_status(tmp_path).state, read_status(tmp_path).text) == (state, text)


def test_a_verdict_of_the_watchdog_is_the_last_state(tmp_path):
    with StatusWriter(tmp_path, 60) as writer, watched(tmp_path, writer) as dog:
        dog.on_verdict = lambda verdict: writer.close("failed", verdict)
        dog._stage_seconds = 0.2
        dog.enter("update", 0)
        until(lambda: read_status(tmp_path).state == "failed")
        assert "update of step 1 for more than" in read_status(tmp_path).text


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path, capsys, caplog):
    with StatusWriter(tmp_path / "missing", 60) as writer:
        until(lambda: writer.failures > 2)
    assert caplog.text.count("cannot be written") == 1


def test_a_number_that_is_not_finite_is_null_in_the_file_and_nan_where_it_is_read(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    with StatusWriter(tmp_path, 60) as writer:
        writer.note(
            metrics={
                "optim/grad_norm": float("nan"),
                "train/kl_mu_pi": float("inf"),
                "rollout/reward_mean": 0.5,
            }
        )
    content = json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert content["metrics"] == {
        "optim/grad_norm": None,
        "train/kl_mu_pi": None,
        "rollout/reward_mean": 0.5,
    }
    found = read_status(tmp_path).metrics
    assert math.isnan(found["optim/grad_norm"]) and found["rollout/reward_mean"] == 0.5


def test_what_is_no_status_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere/status.json: not found: no such folder"):
        read_status(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not found: is it a run's folder"):
        read_status(tmp_path)
    path = tmp_path / "status.json"
    for content, problem in {
        '{"sch': "cannot be read", '{"schema": 9}': "schema 9, must be 1", "[]": "schema None",
        json.dumps({"schema": 1, "ranks": [], "time": 1.0, "other": 2}): "not a status",
    }.items():  # fmt: skip
        path.write_text(content)
        with pytest.raises(ValueError, match=problem):
            read_status(tmp_path)
