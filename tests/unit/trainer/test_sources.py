"""The source of a prompt in metrics, recorded rollouts and reward functions; runs whose data is
used up.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config import load_config
from megatron_rl.data.training_order import used_up_line
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.rollout.scoring import make_episode
from megatron_rl.trainer.rollout_metrics import count_sources, pass_counts
from megatron_rl_tools.check_rollouts.run_files import read_lines
from tests.unit.batch.rollouts import make_rollout
from tests.unit.data.test_mixture import stream_of
from tests.unit.trainer.test_live_rollouts import live, make_group, sampled  # noqa: F401
from tests.unit.trainer.test_trainer import made  # noqa: F401

NAN = float("nan")


def group_of(source, rewards, name="p"):
    rollouts = tuple(make_rollout(f"{name}/{k}", 1, 2 + k) for k in range(len(rewards)))
    prompt = Prompt(name, "text", (1,), "7", source=source)
    return RolloutGroup(prompt, rollouts, np.array(rewards, np.float32))


def test_rewards_and_pass_rates_are_counted_by_source():
    groups = [
        group_of("math", [1, 0, 0.5, NAN]),
        group_of("math", [0, 0, 0, 0]),
        group_of("code", [-1.0, 2.0]),
        group_of("gone", [1, 1]),
    ]
    sums = MetricSums()
    count_sources(sums, groups, ["math", "code", "chat"], 0.5)
    assert sums.reduce(None, "cpu") == pytest.approx(
        {
            "source/math/groups_frac": 0.5,
            "source/code/groups_frac": 0.25,
            "source/chat/groups_frac": 0.0,
            "source/math/reward_mean": 1.5 / 7,
            "source/math/pass_rate": 2 / 7,
            "source/math/zero_advantage_groups_frac": 0.5,
            "source/math/response_length_mean": (2 + 3 + 4 + 5) / 4,
            "source/code/reward_mean": 0.5,
            "source/code/pass_rate": 0.5,
            "source/code/zero_advantage_groups_frac": 0.0,
            "source/code/response_length_mean": 2.5,
        }
    )
    assert pass_counts(groups, 0.5).tolist() == [[2, 3], [0, 4], [1, 2], [2, 2]]
    assert pass_counts([], 0.5).shape == (0, 2)
    # one file: nothing new is counted
    plain = MetricSums()
    count_sources(plain, [group_of("", [1, 0])], [], 0.5)
    assert plain.reduce(None, "cpu") == {}


FIRST = "rollouts/step_000001.jsonl"


def test_recorded_rollouts_and_reward_functions_get_the_source(tmp_path):
    Recorder(tmp_path).record(1, [group_of("math", [1, 0]), group_of("", [1, 0], "q")])
    lines = [json.loads(line) for line in (tmp_path / FIRST).read_text().splitlines()]
    assert [line.get("source") for line in lines] == ["math", "math", None, None]
    assert "source" not in lines[2], "the line of a run with one file is as before"
    records = list(read_rollouts(tmp_path / FIRST))
    assert [record.source for record in records] == ["math", "math", "", ""]
    # check-rollouts reads them with code of its own
    lines_of_tool = read_lines(tmp_path / FIRST)
    assert [record.source for record in lines_of_tool] == ["math", "math", "", ""]
    tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: [""] * len(rows))
    group = group_of("math", [1, 0])
    assert make_episode(group.prompt, group.rollouts[0], tokenizer).source == "math"


def test_pass_rates_of_every_draw_are_noted(live):  # noqa: F811
    """Also of groups that dynamic sampling discards, whose pass rates are 0 and 1."""
    sections = {"data": {"sampling": "pass_rate"}, "batch": {"dynamic_sampling": True}}
    source, _ = live(rewards=[1, 1, 0, 1, 0, 0, 0, 1], **sections)
    noted = []
    source.prompts.note = lambda prompts, passed, scored: noted.append(
        ([prompt.id for prompt in prompts], passed.tolist(), scored.tolist())
    )
    source.scheduler.take = lambda *args: sampled(make_group("a"), make_group("b"))
    more = iter("cd")
    source.scheduler.take_more = lambda *args: sampled(make_group(next(more)))
    source.sample(0)
    assert noted == [(["a", "b"], [2, 1], [2, 2]), (["c"], [0], [2]), (["d"], [1], [2])]
    uniform, _ = live(rewards=[1, 1, 0, 1])
    uniform.prompts.note = noted.append
    uniform.scheduler.take = lambda *args: sampled(make_group("a"), make_group("b"))
    uniform.sample(0)
    assert len(noted) == 3


def test_a_run_ends_where_its_prompts_are_used_up(made):  # noqa: F811
    trainer, calls = made()
    left = iter([False, False, True])
    trainer.rollouts.is_used_up = lambda: next(left)
    assert list(trainer.steps()) == [2, 3] and trainer.num_steps == 4
    text = "data.train is used up after 4 steps of run.num_steps = 6: the run ends"
    assert trainer.recording.reason == text and trainer.meter.step == 3
    assert ("reporter.log", (text,), {}) in calls
    calls.clear()
    trainer.evaluated = 4  # it was due after that step
    trainer.evaluate = lambda step, **_: calls.append(("evaluate", (step,), {}))
    trainer.engine.export_parts = lambda world_size: []
    trainer.cfg = trainer.cfg.model_copy(
        update={"checkpoint": trainer.cfg.checkpoint.model_copy(update={"export_hf": False})}
    )
    trainer.finish()
    assert "evaluate" not in calls.names
    (args, settings), *_ = calls.named("policy.end")
    assert args[0] == 4 and settings == {"is_due": True}
    assert ("reporter.finish", (4,), {}) in calls
    trainer.evaluated = 2
    trainer.finish()
    assert calls.named("evaluate") == [((4,), {})]


def test_a_start_says_when_the_data_will_be_used_up():
    base = {"model": {"path": "m"}, "data": {"train": "d"}}
    run = load_config(None, [], base | {"run": {"num_steps": 5, "prompts_per_step": 2}}).run
    (line,) = used_up_line(stream_of([(4, 1.0, "stop")] * 2, shuffle=False), run)
    assert "WARNING data.train is used up after 4 steps at most" in line
    assert "before run.num_steps = 5" in line
    assert not list(used_up_line(stream_of([(5, 1.0, "stop")] * 2), run)) and not list(
        used_up_line(stream_of([(1, 1.0, "repeat")]), run)
    )
