"""Events at the start and the end of a run, what is recorded of a replica, and when the files are
complete.
"""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice
from megatron_rl.trainer.recording import events_and_files as module
from megatron_rl.trainer.recording.events_and_files import Recording, start_recording
from tests.unit.trainer.recorded import Calls
from tests.unit.trainer.test_events_of_a_step import events_of


@pytest.mark.parametrize(
    ("first_step", "first_event"),
    [(0, ("start", 0, "")), (4, ("resume", 4, "after step 4"))],
    ids=["start", "resume"],
)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "finished"),
        (ValueError("one line\nand another"), "ValueError: one line"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (RuntimeError("no file caf\udce9.txt"), "RuntimeError: no file caf?.txt"),
    ],
)
def test_a_run_says_where_it_starts_and_why_it_ends(
    tmp_path, first_step, first_event, error, reason
):
    path, meter = tmp_path / "events.jsonl", SimpleNamespace(step=first_step - 1)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(type(error)) if error else ExitStack())
        with Recording(None, Events(path)).run(first_step, meter, is_new=not first_step):
            assert events_of(path) == [first_event]
            meter.step = 6
            if error:
                raise error
    assert events_of(path) == [first_event, ("stop", 7, reason)]


def test_rollouts_of_a_replica_are_recorded_as_configured(tmp_path, monkeypatch):
    calls = Calls()
    monkeypatch.setattr(module, "Recorder", calls.note("recorder", "made"))
    rollout = {"save_tensors": 0.5, "api_key_env": "KEY_OF_THE_SERVERS"}
    keys = {"model": {"path": "m"}, "data": {"train": "d"}, "run": {"seed": 7}, "rollout": rollout}
    cfg, parallel = load_config(None, [], keys), SimpleNamespace(dp_rank=2, dp_size=4)
    assert Recording("files", None).recorder(cfg, parallel) == "made"
    settings = dict(
        dp_rank=2,
        save_tensors=GroupChoice(0.5, 7, 2, 4),
        files="files",
        hidden=("KEY_OF_THE_SERVERS",),
    )
    assert calls == [("recorder", (cfg.run_dir,), settings)]


@pytest.mark.parametrize("rank", [0, 1])
def test_events_are_of_rank_0_and_all_files_are_complete_at_the_end(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "s3cr3t-Va1ue.9")
    keys = {"dir": str(tmp_path), "name": "run"}, {"api_key_env": "KEY_OF_THE_SERVERS"}
    cfg = load_config(
        None,
        [],
        {"model": {"path": "m"}, "data": {"train": "d"}, "run": keys[0], "rollout": keys[1]},
    )
    cfg.run_dir.mkdir()
    closed = []
    monkeypatch.setattr(FileWriter, "close", lambda self: closed.append(self))
    with ExitStack() as stack:
        recording = start_recording(cfg, SimpleNamespace(rank=rank), stack)
        recording.events.add("stop", 3, "the key is s3cr3t-Va1ue.9")
        assert not closed
    assert closed == [recording.files] and recording.events.files is recording.files
    path = cfg.run_dir / "events.jsonl"
    if rank == 0:
        (event,) = map(json.loads, path.read_text().splitlines())
        assert (event["step"], event["text"]) == (3, "the key is ***")
    assert path.exists() == (rank == 0)
