"""The GPU's profile in a step's trace, with torch's profiler of the CPU in its place: when it is asked for and what stays."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config import load_config
from megatron_rl.launch.trace_file import gpu_path, rank_path, read_rank
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.trainer import step_trace
from megatron_rl.trainer.step_trace import StepTrace

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
def traced(tmp_path, monkeypatch):
    """-> a run's StepTrace on a machine with a GPU, and the folder of its step 1, with an EARLIER profile."""
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
    parallel = SimpleNamespace(rank=0, world_size=1, host_group=None, device=torch.device("cuda", 0))
    yield StepTrace(cfg, parallel, files), folder
    files.close()
    dist.destroy_process_group()


def test_the_profile_replaces_the_file(traced):
    trace, folder = traced
    with trace:
        trace.begin(0)
        torch.ones(8) + 1
    trace.files.wait()
    assert ASKED == ["synchronize", "stop"]
    content = json.loads(gzip.decompress(gpu_path(folder, 0).read_bytes()))
    assert "aten::add" in {event.get("name") for event in content["traceEvents"]}
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_00000.json.gz", "rank_00000.json.gz"]


def test_a_part_of_a_profile_is_not_left_under_its_name(traced, monkeypatch):
    monkeypatch.setattr(step_trace, "profile", FullDisk)
    trace, folder = traced
    with trace:
        trace.begin(0)
    assert gpu_path(folder, 0).read_bytes() == EARLIER and trace.files.failed == 1


def test_after_an_error_the_gpu_is_not_asked(traced):
    """It may never answer.  The rank's spans are written, without the profile of an earlier run beside them."""
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
    (update,) = [event for event in read_rank(rank_path(folder, 0)).events if event["name"] == "update"]
    assert update["args"] == {"error": "ValueError"}
    profile.stop(trace._profile)  # for the tests that follow in this process
