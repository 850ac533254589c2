"""run.trace: what is recorded, and that the files are one valid trace for Perfetto."""

import gzip
import json
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.redact import Redactor
from megatron_rl.launch.trace import Span, Trace
from megatron_rl.launch.trace_file import (
    RANKS,
    SharedClock,
    merge,
    rank_path,
    read_rank,
    read_ranks,
    server_pid,
    write_trace,
)

SERVERS = ("http://10.0.0.1:30000", "http://10.0.0.2:30000")


def check_nesting(events) -> None:
    """Of two spans of one thread, one is in the other or they do not overlap: Perfetto draws
    nothing else.
    """
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["name"], str)
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for spans in threads.values():
        ends = [float("inf")]
        for start, length in sorted(spans):
            while ends[-1] <= start:
                ends.pop()
            assert start - length <= ends[-1] + 1e-3, "1 ns: times are floating-point microseconds"
            ends.append(start - length)


def check_names(events) -> None:
    """Every process and thread has exactly one name."""
    for kind, place in (("process_name", ("pid",)), ("thread_name", ("pid", "tid"))):
        named = [tuple(event[key] for key in place) for event in events if event["name"] == kind]
        used = {tuple(event[key] for key in place) for event in events if event["ph"] == "X"}
        assert len(named) == len(set(named)) and used <= set(named)


def write(folder, rank, spans, *, step=4, world_size=4, host="node0", synchronized=0):
    path = rank_path(folder, rank)
    write_trace(
        path,
        spans,
        rank=rank,
        world_size=world_size,
        step=step,
        clock=SharedClock(host, synchronized, 10**18),
    )
    return read_rank(path)


def request(key, start, end, server=SERVERS[0], name="request"):
    return Span(name, "request", start, end, server, "request", key)


def test_off_records_nothing():
    trace = Trace()
    with trace.span("a", "part", size=1) as values:
        values["more"] = 2
    trace.add(Span("b", "part", 0, 1))
    assert trace.take() == []


def test_spans_of_threads_and_what_happened_inside():
    trace = Trace(is_on=True)

    def sample():
        with pytest.raises(KeyError), trace.span("sampling", "sampling", groups=3):
            raise KeyError

    with trace.span("outer", "stage"), trace.span("inner", "part", size=1) as values:
        values["tokens"] = 7
        other = threading.Thread(target=sample, name="sampling")
        other.start()
        other.join()
    sampling, inner, outer = trace.take()
    assert (inner.name, inner.thread, inner.values) == ("inner", "main", {"size": 1, "tokens": 7})
    assert (sampling.thread, sampling.values) == ("sampling", {"groups": 3, "error": "KeyError"})
    assert outer.start <= inner.start <= sampling.start <= sampling.end <= inner.end <= outer.end
    assert trace.take() == []


def test_what_has_not_ended_is_in_both_traces():
    trace = Trace(is_on=True)
    with trace.span("request", "request", key="a"):
        (first,) = trace.take()
    (second,) = trace.take()
    assert first.values == {"unfinished": True} and second.values == {}
    assert first.start == second.start and first.end <= second.end


def test_requests_at_the_same_time_are_on_different_lanes(tmp_path):
    spans = [Span("update", "stage", 0, 10_000), Span("all_reduce", "collective", 2000, 3000)]
    spans += [
        request("a", 0, 4000),
        request("b", 1000, 9000),
        request("c", 4000, 6000),
        request("d", 0, 9, SERVERS[1]),
    ]
    spans += [
        request("a", 0, 3000, name="until first byte"),
        request("a", 3000, 4000, name="answer"),
    ]
    spans += [
        Span("step", "environment", 0, 5000, "", "episode", "e"),
        Span("turn", "turn", 4000, 6000, "", "episode", "e"),
    ]
    events = write(tmp_path, 3, spans).events
    check_nesting(events)
    check_names(events)
    lane = {
        (e["name"], e["args"].get("key", "")): (e["pid"], e["tid"])
        for e in events
        if e["ph"] == "X"
    }
    assert (
        lane["request", "a"]
        == lane["until first byte", "a"]
        == lane["answer", "a"]
        == lane["request", "c"]
    )
    assert lane["request", "b"] == (server_pid(SERVERS[0]), lane["request", "a"][1] + 1)
    assert lane["request", "d"][0] == server_pid(SERVERS[1]) != server_pid(SERVERS[0])
    assert lane["update", ""] == lane["all_reduce", ""] and lane["step", "e"] != lane["turn", "e"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert (
        names[lane["request", "b"]] == "rank 3: request 2" and names[lane["update", ""]] == "main"
    )
    assert names[lane["step", "e"]] == "episode 1" and names[lane["turn", "e"]] == "episode 2"


def test_many_lanes_take_no_more_than_are_open_together(tmp_path):
    spans = [request(str(n), 1000 * n, 1000 * n + 2500) for n in range(400)]
    events = write(tmp_path, 0, spans).events
    check_nesting(events)
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 3


def test_hosts_are_aligned_by_the_barrier(tmp_path):
    """The clocks of two hosts differ by an hour; the ranks of one host by what they need to leave
    the barrier.
    """
    hour = 3_600 * 10**9
    ranks = [
        write(tmp_path, 0, [Span("a", "stage", 1000, 2000), request("r0", 1000, 2000)], host="a",
        synchronized=500),
        write(tmp_path, 1, [Span("b", "stage", 1300, 2000)], host="a", synchronized=700),
        write(tmp_path, 2, [Span("c", "stage", hour + 1100, hour + 1900), request("r2", hour,
        hour + 1)], host="b",
              synchronized=hour + 600),
    ]  # fmt: skip
    events = merge(ranks)
    check_nesting(events)
    check_names(events)
    starts = {e["name"]: e["ts"] for e in events if e.get("cat") == "stage"}
    assert (
        starts == pytest.approx({"a": 1.0, "b": 1.3, "c": 1.1})
        and min(e["ts"] for e in events if "ts" in e) == 0
    )
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1, 2, server_pid(SERVERS[0])}


def test_ranks_of_different_steps_are_not_merged(tmp_path):
    with pytest.raises(ValueError, match=r"of steps \[5, 6\], must be of one"):
        merge([write(tmp_path, 0, []), write(tmp_path, 1, [], step=5)])


def test_files_of_ranks_that_the_run_no_longer_has_are_not_read(tmp_path):
    """Four ranks were stopped after step 5; two continue from the checkpoint before it, up to step
    6.
    """
    for rank in range(4):
        write(tmp_path, rank, [])
    assert [(each.rank, each.step) for each in read_ranks(tmp_path)] == [
        (rank, 4) for rank in range(4)
    ]
    for rank in range(2):
        write(tmp_path, rank, [], step=5, world_size=2)
    assert [(each.rank, each.step) for each in read_ranks(tmp_path)] == [(0, 5), (1, 5)]


def test_a_file_is_what_perfetto_reads(tmp_path):
    write(tmp_path, 2, [request("a", 1_000, 2_500), Span("update", "stage", 0, 4_000)])
    content = json.loads(gzip.decompress(rank_path(tmp_path, 2).read_bytes()))
    assert content["otherData"]["rank"] == 2 and content["otherData"]["step"] == 4
    first = next(event for event in content["traceEvents"] if event.get("cat") == "request")
    assert first == {
        "ph": "X", "name": "request", "cat": "request", "pid": server_pid(SERVERS[0]),
        "tid": 20_001, "ts": 1.0, "dur": 1.5,
        "args": {"key": "a"},
    }  # fmt: skip
    assert server_pid(SERVERS[0]) >= RANKS and [path.name for path in tmp_path.iterdir()] == [
        "rank_00002.json.gz"
    ]
    rank_path(tmp_path, 2).write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="not the trace of a rank"):
        read_rank(rank_path(tmp_path, 2))


def test_secrets_are_not_written(tmp_path):
    path, url = rank_path(tmp_path, 0), "http://user:sesame@10.0.0.1:1"
    spans = [Span("request", "request", 0, 1, url, "request", "a", {"prompt": "p"})]
    write_trace(
        path,
        spans,
        rank=0,
        world_size=1,
        step=0,
        clock=SharedClock("h", 0, 0),
        redact=Redactor().tree,
    )
    text = gzip.decompress(path.read_bytes()).decode()
    assert "sesame" not in text and "http://***@10.0.0.1:1" in text


@pytest.mark.parametrize(
    "value, traced", [("off", []), ("last", [0, 1, 2, 3]), ("every 2", [1, 3])]
)
def test_which_steps_are_traced(value, traced):
    cfg = load_config(
        None, [], {"model": {"path": "m"}, "data": {"train": "d"}, "run": {"trace": value}}
    )
    assert [step for step in range(4) if cfg.run.traces(step)] == traced


def test_a_wrong_setting_names_what_is_allowed():
    with pytest.raises(ValueError, match=r'run\.trace.*must be off, last or "every N"'):
        load_config(
            None, [], {"model": {"path": "m"}, "data": {"train": "d"}, "run": {"trace": "every 0"}}
        )


def test_a_stage_is_counted_as_it_is_traced():
    from megatron_rl.trainer.step_meter import StepMeter

    trace = Trace(is_on=True)
    meter = StepMeter(trace=trace)
    meter.step = 6
    for _ in range(2):
        with meter.time("update"), meter.part("gradient"):
            time.sleep(0.001)
    with pytest.raises(KeyError), meter.time("split"):
        raise KeyError
    times = meter.take_times()
    with meter.between_steps("checkpoint"):
        pass
    spans = trace.take()
    stages = [span for span in spans if span.kind == "stage"]
    assert [span.name for span in stages] == ["update", "update", "split", "checkpoint"]
    assert (
        times["time/update"] == stages[0].seconds + stages[1].seconds
        and times["time/split"] == stages[2].seconds
    )
    (step,) = [span for span in spans if span.kind == "step"]
    assert step.name == "step 7" and step.seconds == times["time/step"]
    assert meter.take_times()["time/step"] < 60 and trace.take()[-1].start == stages[3].end


def test_what_is_timed_before_a_step_is_not_of_the_step(monkeypatch):
    """The weights that servers get at the start, also of a resumed run, which evaluates nothing
    then, and for an evaluation.
    """
    from megatron_rl.trainer import step_meter
    from megatron_rl.trainer.trainer import Trainer

    clock = [0]
    monkeypatch.setattr(step_meter, "time", SimpleNamespace(monotonic_ns=lambda: clock[0]))
    meter = step_meter.StepMeter()

    def send_weights():
        with meter.time("weight_sync"):
            clock[0] += 10**9

    send_weights()
    cfg, policy = (
        SimpleNamespace(run=SimpleNamespace(num_steps=5)),
        SimpleNamespace(begin=lambda step, progress: None),
    )
    trace = SimpleNamespace(trace=Trace(is_on=False))
    trainer = SimpleNamespace(
        meter=meter,
        first_step=3,
        cfg=cfg,
        checkpoint_policy=policy,
        step_trace=trace,
        _state_dict=dict,
        rollouts=SimpleNamespace(is_used_up=lambda: False),
    )
    assert next(Trainer.steps(trainer)) == 3
    assert not any(meter.take_times().values())
    with meter.between_steps("evaluate"):
        send_weights()
    assert not any(meter.take_times().values())
