"""When the loop saves, what is saved of an aborted step, what is carried over, and which checkpoint
is chosen.
"""

import json
import math
import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import megatron_rl.distributed  # noqa: F401  (CPU support first)
from megatron_rl.checkpoint.checkpoint_loader import Restored
from megatron_rl.checkpoint.folder import STATE, STOPPED, choose_checkpoint
from megatron_rl.checkpoint.manifest import MANIFEST
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import CheckpointConfig
from megatron_rl.launch.signals import StoppedBySignal, StopSignal
from megatron_rl.metrics.events import Events
from tests.unit.checkpoint.test_manifest import make_checkpoint

TOTALS = {"rollout/retries_total": 5.0, "rollout/unwanted_groups_total": 1.0}
"""Of a checkpoint of version 0.1.0."""


NEW_TOTALS = {"rollout/retries_total": 5.0, "rollout/cancelled_groups_total": 1.0}


class Saves(SimpleNamespace):
    """A fake Checkpointer that records what it was given."""

    def save(self, snapshot):
        self.saved.append(snapshot)

    def load(self, path):
        return Restored(
            path, 3, {"policy_version": 3, "prompts": {}, "totals": TOTALS}, ["  files"], []
        )

    def poll(self):
        pass

    def wait(self):
        pass


@pytest.fixture
def checkpoint_policy(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield CheckpointPolicy(
        Saves(
            saved=[], folder=tmp_path, cfg=CheckpointConfig(keep_last=1, best_metric="eval/a/avg@1")
        )
    )
    dist.destroy_process_group()


def test_the_value_of_a_checkpoint_is_measured_on_its_own_weights(checkpoint_policy):
    checkpoint_policy.note(4, {"eval/a/avg@1": 0.5})
    checkpoint_policy.note(4, {"train/loss": 1.0})
    checkpoint_policy.save(4, {})
    checkpoint_policy.note(5, {"train/loss": 2.0})
    checkpoint_policy.save(5, {})
    checkpoint_policy.save(5, {})
    checkpoint_policy.note(6, {"eval/a/avg@1": 0.7})
    checkpoint_policy.save(7, {})
    assert [
        (snapshot.step, snapshot.value) for snapshot in checkpoint_policy.checkpointer.saved
    ] == [
        (4, 0.5),
        (5, None),
        (7, None),
    ], "7 has other weights than the 0.7 of step 6"


def test_a_metric_that_no_step_has_is_named(checkpoint_policy, caplog):
    """A wrong name: no checkpoint would be kept as the best, for the whole run."""
    policy = checkpoint_policy
    policy.note(4, {"rollout/reward_mean": 1.0})
    policy.save(4, {})
    assert not caplog.records, "no evaluation was due"
    policy.note(5, {"eval/a/avg@4": 1.0})
    policy.save(5, {})
    assert "best_metric = eval/a/avg@1 is no metric of step 5" in caplog.text
    assert "did you mean eval/a/avg@4?" in caplog.text
    policy.checkpointer.cfg = CheckpointConfig(keep_last=1, best_metric="rollout/rewrad_mean")
    policy.note(6, {"rollout/reward_mean": 1.0})
    policy.save(6, {})
    assert "did you mean rollout/reward_mean?" in caplog.text
    policy.checkpointer.cfg = CheckpointConfig(keep_last=1, best_metric="rollout/reward_mean")
    caplog.clear()
    policy.note(7, {"rollout/reward_mean": 1.0})
    policy.save(7, {})
    assert not caplog.records


def test_weights_are_saved_again_when_their_metric_is_known_later(checkpoint_policy):
    """A signal ended the evaluation, and the resumed run has repeated it."""
    policy, name = checkpoint_policy, "eval/a/avg@1"
    policy.save(4, {})
    assert not policy.note(4, {"train/loss": 1.0}) and not policy.note(4, {name: math.nan})
    policy.save(4, {})
    assert policy.note(4, {name: 0.5})
    policy.save(4, {})
    assert not policy.note(4, {name: 0.5}), "saved with it"
    policy.save(4, {})
    assert [(saved.step, saved.value) for saved in policy.checkpointer.saved] == [
        (4, None),
        (4, 0.5),
    ]


@pytest.mark.parametrize(
    ("facts", "lacks"),
    [
        ({}, True),
        ({"value": 0.5}, False),
        ({"value": 0.5, "metric": "eval/a/avg@1"}, False),
        ({"value": 0.5, "metric": "eval/b/avg@1"}, True),
    ],
)
def test_a_resumed_checkpoint_is_saved_again_where_it_lacks_the_metric(
    checkpoint_policy, facts, lacks
):
    make_checkpoint(checkpoint_policy.checkpointer.folder, 3, **facts)
    assert checkpoint_policy.resume() is not None
    assert checkpoint_policy.note(3, {"eval/a/avg@1": 0.5}) == lacks


def test_totals_continue_from_the_checkpoint(checkpoint_policy):
    assert checkpoint_policy.resume() is None, "there is none"
    make_checkpoint(checkpoint_policy.checkpointer.folder, 3)
    assert checkpoint_policy.resume().lines[0].endswith("step_000003: step 3")
    metrics = {
        "rollout/retries_total": 2.0,
        "rollout/cancelled_groups_total": 2.0,
        "replay/missing_rows_total": 2.0,
    }
    assert checkpoint_policy.add_previous_totals(metrics) == NEW_TOTALS
    totals = {"rollout/retries_total": 7.0, "rollout/cancelled_groups_total": 3.0}
    assert metrics == totals | {"replay/missing_rows_total": 2.0}, (
        "former names are continued under the present ones"
    )
    more = {
        "rollout/retries_total": 4.0,
        "rollout/cancelled_groups_total": 2.0,
        "reward/errors_total": 3.0,
    }
    assert (
        checkpoint_policy.add_previous_totals(more) == totals
        and more["rollout/retries_total"] == 9.0
    )
    assert more["reward/errors_total"] == 3.0, "not counted before"
    checkpoint_policy.save(3, {})
    assert not checkpoint_policy.checkpointer.saved, "the checkpoint it came from is there already"
    checkpoint_policy.save(4, {"x": 1})
    (snapshot,) = checkpoint_policy.checkpointer.saved
    assert snapshot.progress == {"x": 1, "totals": more, "origin": None}


def test_a_save_is_an_event_and_begins_when_the_trainer_has_its_memory(tmp_path):
    order = []
    saver = SimpleNamespace(
        folder=tmp_path,
        cfg=CheckpointConfig(),
        save=lambda snapshot: order.append(("save", snapshot.step, snapshot.files)),
        poll=lambda: order.append("poll"),
        wait=lambda: order.append("wait"),
    )
    events = Events(tmp_path / "events.jsonl")
    policy = CheckpointPolicy(saver, lambda: order.append("memory"), events)
    policy.stop_if_signalled()
    policy.begin(3, {})
    policy.end(4, {}, lambda: {"file": None}, is_due=False)
    policy.end(5, {}, lambda: {"file": None}, is_due=True)
    policy.wait()
    assert order == ["poll", "memory", ("save", 5, {"file": None}), "wait"]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"], event["text"]) == ("checkpoint", 5, "after step 5")
    assert event["seconds"] >= 0


def test_a_checkpoint_of_another_run_is_saved_again_in_this_one(
    checkpoint_policy, tmp_path, monkeypatch
):
    saver = checkpoint_policy.checkpointer
    saver.cfg = CheckpointConfig(load=make_checkpoint(tmp_path / "other", 3))
    assert checkpoint_policy.resume().lines == [f"resumed from {saver.cfg.load}: step 3", "  files"]
    checkpoint_policy.save(3, {})
    (snapshot,) = saver.saved
    assert snapshot.progress == {"totals": NEW_TOTALS, "origin": str(saver.cfg.load.resolve())}
    monkeypatch.setattr(
        Saves, "load", lambda self, path: Restored(path, 3, {"policy_version": 3}, [], [])
    )
    with pytest.raises(
        ValueError,
        match=r"state\.json: progress without prompts, totals; resume from another checkpoint",
    ):
        checkpoint_policy.resume()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_signal_saves_the_last_complete_state(checkpoint_policy, is_trained):
    with StopSignal(60.0) as stop:
        checkpoint_policy.listen(stop)
        checkpoint_policy.begin(2, {"at": "begin"})
        checkpoint_policy.stop_if_signalled()
        os.kill(os.getpid(), signal.SIGUSR1)
        while stop.name is None:
            time.sleep(0.01)
        with pytest.raises(
            StoppedBySignal, match=f"SIGUSR1: stopped after step {2 + is_trained}, which is saved"
        ):
            if is_trained:
                checkpoint_policy.end(3, {"at": "end"}, is_due=True)
            checkpoint_policy.stop_if_signalled()
    (snapshot,) = checkpoint_policy.checkpointer.saved
    assert (snapshot.step, snapshot.progress["at"]) == ((3, "end") if is_trained else (2, "begin"))
    assert "SIGUSR1" in (checkpoint_policy.checkpointer.folder / STOPPED).read_text()


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_stop_is_announced_when_the_save_with_the_files_of_this_rank_is_complete(
    checkpoint_policy, is_trained
):
    saver, announced, actions = checkpoint_policy.checkpointer, [], []
    saver.wait = lambda: announced.append((saver.folder / STOPPED).exists())
    stop = SimpleNamespace(name=None, hold=actions.append)
    checkpoint_policy.listen(stop, "cancel")
    assert actions == ["cancel"]
    checkpoint_policy.begin(1, {})
    stop.name = "SIGTERM"
    with pytest.raises(StoppedBySignal):
        if is_trained:
            checkpoint_policy.end(1, {}, lambda: {"file": None}, is_due=False)
        checkpoint_policy.stop_if_signalled(lambda: {"file": None})
    assert [(snapshot.step, snapshot.files) for snapshot in saver.saved] == [(1, {"file": None})]
    assert announced == [False]
    text = "SIGTERM: stopped after step 1, which is saved; the same command continues from there\n"
    assert (saver.folder / STOPPED).read_text() == text


@pytest.mark.parametrize("has_files", [False, True])
def test_a_saved_step_is_saved_again_if_rollouts_were_sampled_since(checkpoint_policy, has_files):
    files = {"rollouts_00000.safetensors": lambda path: None} if has_files else {}
    with StopSignal(60.0) as stop:
        checkpoint_policy.listen(stop)
        checkpoint_policy.save(2, {"at": "due"})
        checkpoint_policy.begin(2, {"at": "begin"})
        os.kill(os.getpid(), signal.SIGUSR1)
        while stop.name is None:
            time.sleep(0.01)
        with pytest.raises(StoppedBySignal, match="stopped after step 2, which is saved"):
            checkpoint_policy.stop_if_signalled(lambda: files)
    assert [list(snapshot.files) for snapshot in checkpoint_policy.checkpointer.saved] == [
        [],
        *([list(files)] if has_files else []),
    ]


def test_which_checkpoint_is_chosen(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    assert choose_checkpoint(mine, CheckpointConfig()) is None
    with pytest.raises(ValueError, match=r"--resume.*holds no checkpoint"):
        choose_checkpoint(mine, CheckpointConfig(require=True))
    theirs = make_checkpoint(other, 8)
    latest = make_checkpoint(mine, 2)
    assert choose_checkpoint(mine, CheckpointConfig()) == str(latest)
    assert choose_checkpoint(mine, CheckpointConfig(resume=False)) is None
    assert choose_checkpoint(mine, CheckpointConfig(load=theirs)) == str(theirs)
    with pytest.raises(ValueError, match="no such directory"):
        choose_checkpoint(mine, CheckpointConfig(load=tmp_path / "none"))
    (latest / STATE).write_text(f'{{"progress": {{"origin": "{theirs.resolve()}"}}}}')
    assert choose_checkpoint(mine, CheckpointConfig(load=theirs)) == str(latest), (
        "started with load, it continues from its own"
    )
    another = make_checkpoint(tmp_path / "another", 4)
    assert choose_checkpoint(mine, CheckpointConfig(load=another)) == str(another), (
        "started with another, it is another run"
    )
    (latest / MANIFEST).unlink()
    assert choose_checkpoint(mine, CheckpointConfig()) == str(latest), (
        "damaged: loading it reports that, rather than starting over"
    )
    shutil.rmtree(latest)
    with pytest.raises(ValueError, match=r"names step_000002, which is not there; .*there: none"):
        choose_checkpoint(mine, CheckpointConfig())
