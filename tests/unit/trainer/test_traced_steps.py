"""The GPU's profile in a step's trace, with torch's profiler of the CPU in its place: when it is
asked for and what stays.
"""

import gzip
import json
import shutil
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config import load_config
from megatron_rl.launch.trace import Span
from megatron_rl.launch.trace_file import gpu_path, rank_path, read_rank
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.trainer import step_trace
from megatron_rl.trainer.step_trace import StepTrace
from tests.unit.trainer.recorded import Calls

EARLIER = b"the profile of an earlier run"


class Profile(profile):
    """Of the CPU."""

    def __init__(self, activities):
        assert activities == [ProfilerActivity.CUDA]
        super().__init__(activities=[ProfilerActivity.CPU])

    def stop(self):
        ASKED.append("stop")
        super().stop()


class FullDisk(Profile):
    def export_chrome_trace(self, path):
        with open(path, "wb") as file:
            file.write(b"a part")
        raise OSError(28, "No space left on device")


ASKED: list[str] = []


@pytest.fixture
def made(tmp_path):
    """made(**settings of run): a StepTrace on the CPU, of rank 1 of 3."""
    calls, files = Calls(), FileWriter()

    def make(**run):
        keys = {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "rollout": {"api_key_env": "KEY_OF_THE_SERVERS"},
        }
        cfg = load_config(None, [], keys | {"run": {"dir": str(tmp_path), "name": "run"} | run})
        parallel = SimpleNamespace(
            rank=1, world_size=3, host_group="host", device=torch.device("cpu")
        )
        return StepTrace(cfg, parallel, files), calls

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", calls.note("barrier"))
        patch.setattr(step_trace, "profile", None)
        patch.setenv("KEY_OF_THE_SERVERS", "s3cr3t-Va1ue.9")
        yield make
    files.close()


def test_a_traced_step_begins_together_and_its_file_has_no_span_of_others_and_no_secret(
    made, tmp_path
):
    trace, calls = made(trace="every 2")
    with trace:
        for step in range(4):
            trace.begin(step)
            trace.trace.add(Span(f"s3cr3t-Va1ue.9 {step}", "stage", 1, 2))
    trace.files.wait()
    assert calls == [("barrier", ("host",), {})] * 4, "late ranks, then all, in each traced step"
    folders = sorted(path.name for path in (tmp_path / "run/trace").iterdir())
    assert folders == ["step_000002", "step_000004"]
    for step, folder in zip((1, 3), folders, strict=True):
        found = read_rank(rank_path(tmp_path / "run/trace" / folder, 1))
        assert (found.rank, found.world_size, found.step) == (1, 3, step)
        names = [event["name"] for event in found.events if event.get("ph") == "X"]
        assert names == [f"*** {step}"]
        clock = found.clock
        assert clock.host and abs(clock.unix / 1e9 - time.time()) < 600
        assert abs(clock.synchronized - time.monotonic_ns()) < 600 * 10**9


def test_an_untraced_run_writes_nothing(made, tmp_path):
    trace, calls = made(trace="off")
    with trace:
        trace.begin(0)
        trace.trace.add(Span("a", "stage", 1, 2))
    trace.files.wait()
    assert not calls and not (tmp_path / "run").exists() and not trace.trace.take()


def test_collectives_are_traced_in_traced_steps_alone(made):
    trace, _ = made(trace="every 2")
    all_reduce, seen = dist.all_reduce, []
    with trace:
        for step in range(3):
            trace.begin(step)
            seen.append(dist.all_reduce is all_reduce)
    assert seen == [True, False, True] and dist.all_reduce is all_reduce


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """-> a run's StepTrace on a machine with a GPU, and the folder of its step 1, with an EARLIER
    profile.
    """
    ASKED.clear()
    monkeypatch.setattr(step_trace, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ASKED.append("synchronize"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = {"trace": "last", "dir": str(tmp_path), "name": "run"}
    cfg = load_config(None, [], {"model": {"path": "m"}, "data": {"train": "d"}, "run": run})
    folder = tmp_path / "run/trace/last"
    folder.mkdir(parents=True)
    gpu_path(folder, 0).write_bytes(EARLIER)
    files = FileWriter()
    parallel = SimpleNamespace(
        rank=0, world_size=1, host_group=None, device=torch.device("cuda", 0)
    )
    yield StepTrace(cfg, parallel, files), folder
    files.close()
    dist.destroy_process_group()


def test_the_profile_replaces_the_file(traced):
    trace, folder = traced
    with trace:
        trace.begin(0)
        torch.ones(8) + 1
        trace.begin(1)
        assert ASKED == ["synchronize", "stop"] and gpu_path(folder, 0).read_bytes() != EARLIER
        torch.ones(8) + 1
    trace.files.wait()
    assert ASKED == ["synchronize", "stop"] * 2
    content = json.loads(gzip.decompress(gpu_path(folder, 0).read_bytes()))
    assert "aten::add" in {event.get("name") for event in content["traceEvents"]}
    assert sorted(path.name for path in folder.iterdir()) == [
        "gpu_00000.json.gz",
        "rank_00000.json.gz",
    ]


def test_the_first_profile_of_a_run_needs_no_folder_and_an_error_no_earlier_profile(traced):
    trace, folder = traced
    for error in (None, ValueError("a bad step")):
        shutil.rmtree(folder.parent)
        with pytest.raises(ValueError) if error else nullcontext(), trace:
            trace.begin(0)
            if error:
                raise error
        trace.files.wait()
        assert gpu_path(folder, 0).exists() == (error is None) and trace.files.failed == 0
    profile.stop(trace._profile)


def test_a_part_of_a_profile_is_not_left_under_its_name(traced, monkeypatch):
    monkeypatch.setattr(step_trace, "profile", FullDisk)
    trace, folder = traced
    with trace:
        trace.begin(0)
    assert gpu_path(folder, 0).read_bytes() == EARLIER and trace.files.failed == 1


def test_after_an_error_the_gpu_is_not_asked(traced):
    """It may never answer.

    The rank's spans are written, without the profile of an earlier run beside them.
    """
    trace, folder = traced
    all_reduce = dist.all_reduce
    with pytest.raises(ValueError, match="a bad step"), trace:
        trace.begin(0)
        assert dist.all_reduce is not all_reduce
        with trace.trace.span("update", "stage"):
            raise ValueError("a bad step")
    trace.files.wait()
    assert ASKED == [] and dist.all_reduce is all_reduce
    assert [path.name for path in folder.iterdir()] == ["rank_00000.json.gz"]
    (update,) = [
        event for event in read_rank(rank_path(folder, 0)).events if event["name"] == "update"
    ]
    assert update["args"] == {"error": "ValueError"}
    profile.stop(trace._profile)  # for the tests that follow in this process
