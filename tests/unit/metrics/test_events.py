"""Events and other lines of a run: one write each, and an error of the disk never stops
training.
"""

import json
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import orjson
import pytest

from megatron_rl.metrics.events import Events
from megatron_rl.metrics.file_writer import MOST_WAITING, FileWriter
from megatron_rl.metrics.lines import append_lines, replace_lines
from megatron_rl.rollout.saved.rollout_tensors import write_tensors


def test_events_are_appended_with_time_and_seconds(tmp_path):
    path = tmp_path / "events.jsonl"
    events = Events(path, FileWriter())
    events.add("start", 0, "")
    with events.timed("weight_sync", 3, "version 3"):
        pass
    Events(path).add("resume", 3, "after step 3")  # another process
    first, sync, resumed = map(json.loads, path.read_text().splitlines())
    assert (first["kind"], first["step"], "seconds" in first) == ("start", 0, False)
    assert (sync["kind"], sync["text"]) == ("weight_sync", "version 3") and 0 <= sync[
        "seconds"
    ] < 10
    assert first["time"] <= sync["time"] <= resumed["time"] and resumed["kind"] == "resume"
    Events().add("stop", 1, "not written on other ranks")


def test_events_hold_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("NAMED_BY_THE_RUN", "open sesame")
    path = tmp_path / "events.jsonl"
    Events(path, hidden=["NAMED_BY_THE_RUN"]).add(
        "stop", 1, "http://me:passw0rd@a:1 refused open sesame"
    )
    assert json.loads(path.read_text())["text"] == "http://***@a:1 refused ***"


def test_work_that_fails_is_no_event(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    with pytest.raises(RuntimeError), events.timed("checkpoint", 1, ""):
        raise RuntimeError
    assert not (tmp_path / "events.jsonl").exists()


def test_a_cut_line_is_removed_before_the_next_is_appended(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    append_lines(path, [{"a": 2}, {"a": "é\n"}])
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, "é\n"]


def test_lines_with_half_a_surrogate_pair_are_written(tmp_path):
    """It has no UTF-8, and readers other than Python refuse its escape."""
    rows = [{"text": "caf\udce9 \\", "of": {"\ud83d": ["\udc00"]}, "whole": "\U0001f600"}]
    append_lines(tmp_path / "a.jsonl", rows)
    replace_lines(tmp_path / "b.jsonl", rows)
    expected = {"text": "caf? \\", "of": {"?": ["?"]}, "whole": "\U0001f600"}
    for name in ("a.jsonl", "b.jsonl"):
        assert orjson.loads((tmp_path / name).read_bytes()) == expected


@pytest.fixture
def small_disk():
    """Files of this process may have 100 bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    "name", ["lines.jsonl", "missing/lines.jsonl", "rollouts_000001.safetensors"]
)
def test_errors_are_counted_and_said_once_with_the_file(tmp_path, small_disk, name):
    path = tmp_path / name
    said: list[str] = []
    files = FileWriter(said.append)

    def write() -> None:
        if path.suffix == ".jsonl":
            append_lines(path, [{"a": "x" * 100}])
        else:
            write_tensors(path, {"a:tokens": np.zeros(100)})

    files.now(path, write)
    files.later(path, write)
    files.close()
    assert not list(tmp_path.glob("*.part")) and not path.with_suffix(".safetensors").exists()
    assert files.failed == 2 and len(said) == 1
    assert str(path) in said[0] and "training continues" in said[0]


def test_a_bug_in_the_thread_is_raised():
    files = FileWriter()
    files.later(Path("x"), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.wait()


def test_training_waits_for_a_slow_disk_and_not_for_a_fast_one():
    files, gate, done = FileWriter(), threading.Event(), []
    for index in range(MOST_WAITING):
        files.later(Path("x"), lambda index=index: (gate.wait(10), done.append(index)))
    assert done == [], "nothing waited"
    threading.Timer(0.05, gate.set).start()
    files.later(Path("x"), lambda: done.append(-1))
    assert done[:1] == [0], "the oldest job is waited for"
    files.close()
    assert done == [*range(MOST_WAITING), -1], "in order"
