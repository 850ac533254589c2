"""A resumed run evaluates what a signal cut short, and nothing twice."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.metrics.events import Events
from megatron_rl.trainer.build import resume
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from tests.unit.trainer.recorded import Calls, Recorded

EVERY, STEPS = 2, 5


def trainer_of(first_step, evaluated, *, is_cut=False):
    """(trainer, the steps that it evaluates)."""
    done = []
    cfg = SimpleNamespace(eval=SimpleNamespace(every=EVERY), run=SimpleNamespace(num_steps=STEPS))
    found = {} if is_cut else {"eval/a/avg@1": 1.0}
    rollouts = SimpleNamespace(evaluate=lambda: found, state_dict=dict, policy_version=0)
    policy = SimpleNamespace(note=lambda step, metrics: False)
    reporter = SimpleNamespace(
        evaluation=lambda step, version, metrics: done.append(step), state_dict=dict
    )
    recording = SimpleNamespace(events=Events())
    unused = dict.fromkeys(("parallel", "engine", "saved_batches", "tokens", "step_trace"))
    trainer = Trainer(
        cfg=cfg,
        rollouts=rollouts,
        checkpoint_policy=policy,
        meter=StepMeter(),
        reporter=reporter,
        recording=recording,
        first_step=first_step,
        evaluated=evaluated,
        **unused,
    )
    return trainer, done


def config(num_steps=STEPS):
    return SimpleNamespace(run=SimpleNamespace(num_steps=num_steps))


def restored(progress, step):
    found = SimpleNamespace(
        progress=progress, step=step, path=Path("a/step"), accepted=[], lines=[]
    )
    policy = SimpleNamespace(resume=lambda: found, checkpointer=SimpleNamespace(folder=Path("a")))
    source = SimpleNamespace(restore=lambda *arguments: [])
    return resume(config(), policy, source, None)[:2]


def test_an_evaluation_that_a_signal_cut_short_is_repeated_by_the_resumed_run():
    trainer, done = trainer_of(0, -1)
    for step in (0, 1, 2, 3):
        trainer.evaluate(step)
    assert done == [0, 2]
    for is_cut, expected in (
        (True, []),
        (True, []),
        (False, [4]),
        (False, []),
    ):  # stopped after step 4, again and again
        trainer, done = trainer_of(*restored(trainer._state_dict(), 4), is_cut=is_cut)
        trainer.evaluate(trainer.first_step)
        assert done == expected
    trainer.evaluate(STEPS, is_last=True)
    assert done == [STEPS]


def test_a_resumed_run_repeats_no_evaluation():
    for step, progress in (
        (0, {"evaluated": 0}),
        (4, {"evaluated": 4}),
        (4, {}),
        (3, {"evaluated": 2}),
    ):
        trainer, done = trainer_of(*restored(progress, step))
        trainer.evaluate(trainer.first_step)
        assert not done
    assert resume(config(), SimpleNamespace(resume=lambda: None), None, None) == (0, -1, {}, True)


@pytest.mark.parametrize("is_ours", [True, False])
def test_trackers_continue_their_runs_from_a_checkpoint_of_the_same_run_alone(tmp_path, is_ours):
    progress = {"trackers": {"wandb": "id"}, "evaluated": 2}
    checkpoint = SimpleNamespace(
        progress=progress, step=4, path=tmp_path / "step", accepted=["a"], lines=["a line"]
    )
    checkpointer = SimpleNamespace(folder=tmp_path if is_ours else tmp_path / "another")
    policy, calls = SimpleNamespace(resume=lambda: checkpoint, checkpointer=checkpointer), Calls()
    source, console = (
        Recorded(calls, "source", restore=["another line"]),
        Recorded(calls, "console"),
    )
    expected = (4, 2, {"wandb": "id"}, False) if is_ours else (4, -1, {}, False)
    assert resume(config(), policy, source, console) == expected
    assert calls == [
        ("source.restore", (progress, tmp_path / "step", ["a"]), {}), ("console.log", ("a line",),
        {}),
        ("console.log", ("another line",), {}),
    ]  # fmt: skip
    checkpoint.progress = {}
    # older checkpoints hold neither
    assert resume(config(), policy, source, console) == (4, 4 if is_ours else -1, {}, False)
    # the steps are not trained again under other numbers
    assert resume(config(4), policy, source, console).first_step == 4
    with pytest.raises(ValueError, match=r"run\.num_steps = 3: .*step has 4 finished steps; raise"):
        resume(config(3), policy, source, console)


def test_a_run_from_the_checkpoint_of_another_evaluates_its_own_sets_before_its_first_step():
    trainer, done = trainer_of(3, -1)
    for step in (3, 4, 5):
        trainer.evaluate(step)
    assert done == [3, 4]


@pytest.mark.parametrize("lacks_value", [False, True])
def test_a_checkpoint_without_the_metric_of_the_repeated_evaluation_is_written_again(lacks_value):
    trainer, _ = trainer_of(4, 2)
    trainer.checkpoint_policy = SimpleNamespace(note=lambda step, metrics: lacks_value)
    calls = []
    trainer.save = lambda step, *, is_last: calls.append((step, is_last))
    trainer.evaluate(4)
    assert calls == [(4, True)] * lacks_value
