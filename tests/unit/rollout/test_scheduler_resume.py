"""What a checkpoint holds of the scheduler, and what a resumed run makes of it; over a fake server,
as test_scheduler.py.
"""

from contextlib import contextmanager

import pytest

from tests.fake_model import assert_fingerprints
from tests.fake_server import wait_for
from tests.sampling_loop import GROUP, MODES, PER_STEP, ages, contents, is_slow, training

pytestmark = pytest.mark.usefixtures("one_rank")


def saved_at(trainer, folder, *, is_step_done: bool):
    """(state of the prompts, folder) as a checkpoint keeps them."""
    folder.mkdir()
    for name, write in trainer.scheduler.files(is_step_done=is_step_done).items():
        write(folder / name)
    return trainer.scheduler.prompts_state(), folder


@contextmanager
def resumed(saved, version: int, **settings):
    state, folder = saved
    with training("ok", **settings) as (trainer, server):
        trainer.source.load_state_dict(state)
        trainer.push(version)
        trainer.said = trainer.scheduler.restore(folder, [])
        yield trainer, server


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_trains_on_what_was_in_flight(mode, tmp_path):
    """After each step: what was complete is bitwise the same, what was cut short continues, no
    prompt is lost or comes twice.
    """
    settings, expected = MODES[mode]
    with training("ok", **settings) as (trainer, server):
        server.is_slow, server.patience = is_slow(mode), 0.3
        before = [trainer.step(step) for step in range(3)]
        saved = saved_at(trainer, tmp_path / "saved", is_step_done=True)
        queue = trainer.scheduler.groups
        ready = {group.prompt.id: group.rollout_group() for group in queue if group.is_complete}
        cut = {
            rollout.id: rollout.tokens.tolist()
            for group in queue
            for rollout in group.prefixes.values()
        }
    with resumed(saved, 3, **settings) as (again, server):
        sampled = [again.step(step) for step in (3, 4, 5)]
        following = {group.prompt.id for group in again.scheduler.groups}
        dropped = again.inference.client.counters.stale_samples
    ids = [prompt.id for step in (*before, *sampled) for prompt in step.prompts]
    assert len(ids) == len(set(ids)) and {group.prompt.id for group in queue} <= {*ids} | following
    assert ages(sampled[0], 3) <= expected | {0} and (again.said is None) == (not queue)
    assert bool(queue) == (mode not in ("synchronous", "drop"))
    found = {group.prompt.id: group for step in sampled for group in step.groups}
    same = [
        contents([found[name]]) == contents([group])
        for name, group in ready.items()
        if name in found
    ]
    assert sum(same) >= len(same) - dropped and (same or dropped or not ready), (
        "complete groups are trained on as they are"
    )
    for rollout in (rollout for group in found.values() for rollout in group.rollouts):
        assert_fingerprints(rollout)
        start = cut.get(rollout.id, [])
        assert rollout.tokens.tolist()[: len(start)] == start or dropped, "cut responses continue"


@pytest.mark.parametrize("mode", ["synchronous", "ahead", "ahead, resume", "three ahead, abort"])
def test_a_step_stopped_before_it_trained_is_not_sampled_again(mode, tmp_path):
    """A signal between sampling and the first update: the step's own groups, and those of the next
    steps, are kept.
    """
    settings, _ = MODES[mode]
    with training("ok", **settings) as (trainer, _):
        trainer.step(0)
        state = trainer.scheduler.prompts_state()  # as Trainer.steps notes it
        taken = trainer.scheduler.take(1, 1)
        following = trainer.scheduler.groups
        assert wait_for(lambda: all(group.is_complete for group in following), 10)
        _, folder = saved_at(trainer, tmp_path / "saved", is_step_done=False)
        following = [group.rollout_group() for group in following]
    with resumed((state, folder), 1, **settings) as (again, server):
        assert contents(again.scheduler.take(1, 1).groups) == contents(taken.groups)
        assert contents(group.rollout_group() for group in again.scheduler.groups) == contents(
            following
        )
        assert not server.requests, "everything was there"
        assert len(following) == PER_STEP * (trainer.cfg.rollout.steps_ahead + ("resume" in mode))


def test_a_signal_keeps_what_is_sampled_ahead_as_far_as_it_is(tmp_path):
    """In the middle of a step: complete groups, and the beginnings of the others."""
    settings, _ = MODES["three ahead, abort"]
    with training("ok", **settings) as (trainer, server):
        server.is_slow = lambda number: number in (3, 5)
        state = trainer.scheduler.prompts_state()
        taken = trainer.scheduler.take(0, 0)
        assert wait_for(
            lambda: sum(group.is_complete for group in trainer.scheduler.groups) == 4, 10
        )
        _, folder = saved_at(trainer, tmp_path / "saved", is_step_done=False)
        complete = {group.prompt.id: group for group in taken.groups}
        complete |= {
            group.prompt.id: group.rollout_group()
            for group in trainer.scheduler.groups
            if group.is_complete
        }
        cut = {
            r.id: r.tokens.tolist()
            for group in trainer.scheduler.groups
            for r in group.prefixes.values()
        }
    assert sorted(cut) == ["3/0", "3/1", "5/0", "5/1"]
    with resumed((state, folder), 0, **settings) as (again, server):
        sampled = [again.step(step) for step in range(4)]
        found = {r.id: r for step in sampled for group in step.groups for r in group.rollouts}
        assert sorted(found) == [
            f"{number}/{index}" for number in range(8) for index in range(GROUP)
        ]
        trained = {group.prompt.id: group for step in sampled for group in step.groups}
        assert (
            contents(trained[name] for name in complete) == contents(complete.values())
            and len(complete) == 6
        )
        for name, tokens in cut.items():
            assert found[name].tokens.tolist()[: len(tokens)] == tokens and not found[name].is_mixed


def test_groups_that_no_longer_fit_the_settings_are_sampled_again(tmp_path):
    with training("ok", max_staleness=1) as (trainer, _):
        trainer.step(0)
        saved = saved_at(trainer, tmp_path / "saved", is_step_done=True)
    with resumed(saved, 1, max_staleness=1) as (again, server):
        assert (
            "4 responses of 2 groups in flight: sampled again, as loss.name changed"
            in again.scheduler.restore(saved[1], ["loss.name"])
        )
        again.scheduler.restored = []
        cfg = again.scheduler.cfg
        again.scheduler.cfg = cfg.model_copy(
            update={"replay": cfg.replay.model_copy(update={"mode": "none", "measure": False})}
        )
        assert (
            "2 of this replica's 2 do not fit the settings: sampled again"
            in again.scheduler.restore(saved[1], [])
        )
        assert not again.scheduler.restored
        again.scheduler.cfg = cfg
        assert not server.requests and again.scheduler.take(1, 1) and again.scheduler.queue
        again_from = {number + 4 for number in saved[0]["returned"]}
        assert wait_for(
            lambda: {request["input_ids"][0][1] for request in server.requests} >= again_from, 10
        )
