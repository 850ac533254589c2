"""The scheduler where the data of a run ends: [[data.train]] with when_used_up = stop or drop."""

import numpy as np
import pytest
import torch

from megatron_rl.data.mixture import MixedPrompts, Part
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.selection import Replica, refill
from tests.sampling_loop import GROUP, PER_STEP, training
from tests.unit.batch.rollouts import make_rollout

pytestmark = pytest.mark.usefixtures("one_rank")


def mixture(count, policy="stop"):
    """Two sources of `count` prompts."""
    parts = [
        Part(
            name,
            [
                Prompt(f"{name}{i}", "", (3, 4 + i, 4 + place), "", source=name)
                for i in range(count)
            ],
            1.0,
            policy,
        )
        for place, name in enumerate("ab")
    ]
    return MixedPrompts(parts, seed=0, shuffle=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"over_sample": 0.5},
        {"over_sample": 0.5, "partial": "resume", "max_staleness": 1},
        {"max_staleness": 2},
        {"max_staleness": 1, "weight_update": "in_place"},
    ],
)
def test_a_run_trains_on_every_prompt_until_fewer_than_a_step_are_left(settings):
    """Seven prompts for steps of two: three steps, whatever is sampled ahead or beside them."""
    with training("ok", **settings) as (trainer, _):
        stream = mixture(4)
        stream.take(1)
        trainer.scheduler.prompts = stream
        trained, step = [], 0
        while not used_up(trainer):
            sampled_step = trainer.step(step)
            assert len(sampled_step.groups) == PER_STEP
            assert all(len(group.rollouts) == GROUP for group in sampled_step.groups)
            trained += [prompt.id for prompt in sampled_step.prompts]
            step += 1
        over = settings.get("over_sample", 0) and "partial" not in settings
        # over_sample without partial drops prompts, so that steps need more of them
        assert step == (2 if over else 3) and len(set(trained)) == len(trained)
        trainer.scheduler.end_sampling()


@pytest.mark.parametrize("is_step_done", [True, False])
def test_a_resumed_run_has_the_groups_in_flight_where_the_data_ends(tmp_path, is_step_done):
    """Eight prompts are four steps; those of steps 2 to 4 are in flight at the checkpoint."""
    settings = {"max_staleness": 4}
    with training("ok", **settings) as (trainer, _):
        trainer.scheduler.prompts = mixture(4)
        before = trainer.step(0)
        state = trainer.scheduler.prompts_state()
        if not is_step_done:  # a signal in step 2
            trainer.scheduler.take(1, 1)
        for name, write in trainer.scheduler.files(is_step_done=is_step_done).items():
            write(tmp_path / name)
    with training("ok", **settings) as (again, _):
        again.scheduler.prompts = mixture(4)
        again.scheduler.prompts.load_state_dict(state)
        again.push(1)
        assert "of 6 groups in flight" in again.scheduler.restore(tmp_path, [])
        assert len(again.scheduler.restored) == 6
        sampled = [again.step(step) for step in (1, 2, 3)]
        assert used_up(again)
    trained = [prompt.id for step in (before, *sampled) for prompt in step.prompts]
    assert len(trained) == len(set(trained)) == 8


def used_up(trainer):
    trainer.rollouts.prompts = trainer.scheduler.prompts
    return trainer.rollouts.is_used_up()


def test_groups_are_not_replaced_where_no_prompts_are_left():
    draws = []
    equal = [
        RolloutGroup(
            Prompt(name, "", (1,), ""),
            tuple(make_rollout(f"{name}/{k}", 1, 2) for k in range(2)),
            np.ones(2, np.float32),
        )
        for name in ("p0", "p1")
    ]
    refilled = refill(
        [group.prompt for group in equal],
        equal,
        draws.append,
        Replica(0, 1, torch.device("cpu")),
        is_leader=True,
        max_rounds=5,
        can_draw=lambda count: count < 2,
    )
    assert draws == [] and refilled.groups == equal and refilled.rounds == 0
