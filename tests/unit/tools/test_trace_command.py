"""megatron-rl trace: the numbers of a known step, its picture, and what the GPUs did on the same
clock.
"""

import gzip
import json

import pytest

from megatron_rl.launch.trace import Span
from megatron_rl.launch.trace_file import (
    SharedClock,
    gpu_path,
    merge,
    rank_path,
    read_rank,
    write_trace,
)
from megatron_rl_tools.trace import merge_trace as command
from megatron_rl_tools.trace.gpu import FIRST_GPU, gpu_events
from megatron_rl_tools.trace.picture import draw
from megatron_rl_tools.trace.trace_summary import covered, summarize_trace

S = 10**9
URL = "http://10.0.0.1:30000"


def stage(name, start, end):
    return Span(name, "stage", int(start * S), int(end * S))


def step(start, end):
    return Span("step 3", "step", int(start * S), int(end * S), thread="step")


def write(folder, rank, spans):
    write_trace(
        rank_path(folder, rank),
        spans,
        rank=rank,
        world_size=2,
        step=2,
        clock=SharedClock("h", 0, 50 * S),
    )
    return read_rank(rank_path(folder, rank))


@pytest.fixture
def ranks(tmp_path):
    """Rank 1 is late in the update: rank 0 waits 2 s for it.

    Sampling for the next step runs meanwhile, its call longer.
    """
    shared = [step(10, 20), stage("rollout", 10, 12), stage("checkpoint", 20, 23)]
    sampling = Span("sampling", "sampling", 12 * S, 20 * S, thread="sampling")
    before = Span("request", "request", 8 * S, 11 * S, URL, "request", "b")
    request = Span("request", "request", 13 * S, 18 * S, URL, "request", "a")
    episode = Span("episode", "episode", 17 * S, 19 * S, thread="episode", key="c")
    first = [
        stage("update", 12, 19),
        Span("all_reduce", "collective", int(16.5 * S), int(18.5 * S)),
        sampling,
        before,
        request,
        episode,
    ]
    second = [
        stage("update", 12, 19.5),
        Span("all_reduce", "collective", int(18.25 * S), int(18.5 * S)),
    ]
    outside = Span("barrier", "collective", 21 * S, 22 * S)
    return [write(tmp_path, 0, [*shared, *first, outside]), write(tmp_path, 1, [*shared, *second])]


def test_the_numbers_of_a_step(ranks):
    found = summarize_trace(merge(ranks))
    first, second = found.ranks
    assert found.step == 3 and found.seconds == pytest.approx(10)
    assert first.stages == pytest.approx({"rollout": 2, "update": 7, "other": 1})
    assert second.stages == pytest.approx({"rollout": 2, "update": 7.5, "other": 0.5})
    assert first.waits == pytest.approx({"rollout": 0, "update": 2, "other": 0})
    assert second.waits == pytest.approx({"rollout": 0, "update": 0.25, "other": 0})
    assert first.sampling == pytest.approx(7) and second.sampling == 0, "clipped to the step"
    assert (
        found.training == pytest.approx(7.5)
        and found.of_ideal == pytest.approx(0.75)
        and found.other == pytest.approx(0.1)
    )
    lines = list(found.lines())
    assert lines[0] == "step 3: 10.00 s on 2 rank(s)"
    assert (
        " ".join(lines[3].split())
        == "update 7.250 72.5% 7.500 (rank 1) 2.000 (rank 0) 0.250 (rank 1)"
    )


def test_overlapping_samplings_count_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4 and covered([]) == 0


def test_a_run_that_stopped_in_the_step_says_so(tmp_path):
    with pytest.raises(ValueError, match="the run stopped in it"):
        summarize_trace(merge([write(tmp_path, 0, [stage("update", 0, 1)])]))


def test_kernels_are_on_the_clock_of_their_rank(ranks, tmp_path):
    """The profiler counts from baseTimeNanoseconds in Unix time; the rank's clock was 0 at 50 s."""
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "pid": 0,
        "tid": 7,
        "ts": 2e6,
        "dur": 5e5,
        "args": {},
    }
    ignored = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 99,
        "tid": 99,
        "ts": 2e6,
        "dur": 5.0,
    }
    content = {"baseTimeNanoseconds": 60 * S, "traceEvents": [kernel, ignored]}
    gpu_path(tmp_path, 1).write_bytes(gzip.compress(json.dumps(content).encode()))
    first, second = (gpu_events(each, tmp_path) for each in ranks)
    assert first is ranks[0]
    (found,) = [event for event in second.events if event.get("cat") == "kernel"]
    assert (found["pid"], found["tid"], found["ts"]) == (FIRST_GPU + 1, 7, 12e6), "60 + 2 - 50 s"
    names = {
        (e["name"], e["pid"]): e["args"]["name"]
        for e in second.events
        if e["ph"] == "M" and e["pid"] == FIRST_GPU + 1
    }
    assert names == {
        ("process_name", FIRST_GPU + 1): "rank 1 (h): GPU",
        ("thread_name", FIRST_GPU + 1): "stream 7",
    }
    events = merge([first, second])
    assert [row.get_text() for row in draw(events, summarize_trace(events)).axes[0].texts] == [
        "rank 0", "collectives", "sampling thread", "rank 1", "collectives", "rank 1 (h): GPU",
        "10.0.0.1:30000: 1",
    ]  # fmt: skip


def test_a_profile_without_its_time_is_refused(ranks, tmp_path):
    gpu_path(tmp_path, 0).write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(ValueError, match="no baseTimeNanoseconds"):
        gpu_events(ranks[0], tmp_path)


PROFILE = gzip.compress(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": []}).encode())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(PROFILE[:-12], id="the end is missing"),
        pytest.param(PROFILE[:10] + b"\xff" * 20 + PROFILE[30:], id="zlib"),
        pytest.param(b"{}", id="not compressed"),
        pytest.param(gzip.compress(b'{"traceEvents": ['), id="JSON"),
        pytest.param(gzip.compress(b"[]"), id="a list"),
    ],
)
def test_a_damaged_profile_is_named(run, content, capsys):
    path = gpu_path(run / "trace/step_000003", 1)
    path.write_bytes(content)
    assert command.main([str(run)]) == 2
    assert f"{path}: not a profile of torch" in capsys.readouterr().err


def test_ranks_that_the_run_no_longer_has_are_not_read(run, capsys):
    """They are of another step, and the GPU's file of one is damaged."""
    folder = run / "trace/step_000003"
    write_trace(
        rank_path(folder, 2), [], rank=2, world_size=4, step=1, clock=SharedClock("h", 0, 50 * S)
    )
    gpu_path(folder, 2).write_bytes(b"{}")
    assert command.main([str(run)]) == 0
    assert capsys.readouterr().out.startswith("step 3: 10.00 s on 2 rank(s)")


@pytest.fixture
def run(ranks, tmp_path):
    """A run's folder with the trace of `ranks`."""
    folder = tmp_path / "run/trace/step_000003"
    folder.mkdir(parents=True)
    for each in ranks:
        rank_path(tmp_path, each.rank).rename(rank_path(folder, each.rank))
    return tmp_path / "run"


def test_the_profiler_writes_the_time_that_is_read(tmp_path):
    """Of the CPU: the file is the same but for its events."""
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile

    path = tmp_path / "gpu.json.gz"
    before = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(8) + 1
    found.export_chrome_trace(str(path))
    content = json.loads(gzip.decompress(path.read_bytes()))
    (event, *_) = [each for each in content["traceEvents"] if each.get("name") == "aten::add"]
    assert before <= content["baseTimeNanoseconds"] + 1e3 * event["ts"] <= time.time_ns()
