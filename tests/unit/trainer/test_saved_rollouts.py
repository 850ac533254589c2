"""A run from the rollouts of another: what it reads, counts and records, and where a later run with
servers continues.
"""

from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt
from megatron_rl.rollout.missing_routes import MissingRouteCounts
from megatron_rl.trainer import saved_rollouts as module
from megatron_rl.trainer.saved_rollouts import SavedRollouts
from megatron_rl.trainer.step_meter import StepMeter
from tests.unit.trainer.recorded import Calls, Recorded
from tests.unit.trainer.test_live_rollouts import TOKENIZER, make_group


@pytest.fixture
def made(monkeypatch, tmp_path):
    """made(leader, recorder, rollout): (the source after step 5 of the other run, its calls)."""

    def make(*, is_leader=True, records=True, rollout=None):
        calls = Calls()
        monkeypatch.setattr(
            module,
            "SavedSteps",
            calls.note(
                "open", lambda: Recorded(calls, "steps", groups=[make_group("a", missing=1)])
            ),
        )
        monkeypatch.setattr(
            module, "MissingRoutes", calls.note("missing", lambda: Recorded(calls, "missing"))
        )
        monkeypatch.setattr(module, "count_step", calls.note("count"))
        keys = {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "run": {"prompts_per_step": 4, "num_mini_batches": 2},
            "rollout": rollout or {},
        }
        parallel = SimpleNamespace(dp_rank=1, dp_size=2, is_replica_leader=is_leader)
        prompts = PromptSource(
            [Prompt(f"p{n}", "", (1, 2), "7") for n in range(9)], seed=0, shuffle=False
        )
        source = SavedRollouts(
            load_config(None, [], keys), parallel, "spec", prompts, tmp_path, StepMeter(),
            Recorded(calls, "console"),
            TOKENIZER, Recorded(calls, "recorder") if records else None,
        )  # fmt: skip
        source.start(5)
        assert calls.named("open") == [((tmp_path, source.cfg, "spec"), {"first_step": 5})]
        ((line,), _) = calls.named("console.log")[0]
        assert line == f"training on the rollouts of {tmp_path}: no server, no evaluation"
        calls.clear()
        return source, calls

    return make


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_step_has_the_groups_of_its_replica_and_their_routes_are_counted_once(made, is_leader):
    source, calls = made(is_leader=is_leader)
    (group,) = source.sample(5)
    assert group.prompt.id == "a" and calls.named("steps.groups") == [((5, 1, 2), {})]
    ((_, groups, counts), settings) = calls.named("missing.check")[0]
    assert [named.prompt for named in groups] == [group.prompt] and settings.get("is_last", True)
    assert counts.missing_response_rows == (2 if is_leader else 0)
    assert (counts == MissingRouteCounts()) == (not is_leader)
    assert source.meter.take_times()["time/rollout"] > 0


def test_a_later_run_with_servers_continues_after_these_prompts(made):
    source, _ = made()
    assert source.policy_version == 0
    source.sample(5)
    source.sync_weights(6)
    saved = source.state_dict()
    assert saved["policy_version"] == 6 and saved["prompts"]["position"] == 4
    other, _ = made()
    assert other.restore(saved, None, []) == [
        "  policy version 6; epoch 1 of the data, after 4 of 9 prompts"
    ]
    assert other.state_dict() == saved


@pytest.mark.parametrize(
    ("rollout", "place"),
    [
        ({"max_staleness": 1}, "epoch 1 of the data, after 8 of 9 prompts"),
        ({"over_sample": 0.5}, "epoch 2 of the data, after 3 of 9 prompts"),
        (
            {"over_sample": 0.5, "partial": "resume", "max_staleness": 1},
            "epoch 1 of the data, after 8 of 9 prompts",
        ),
    ],
)
def test_as_many_prompts_are_used_up_as_in_the_run_that_sampled(made, rollout, place):
    """Prompts that over_sample drops are used up; those that the next step continues are not."""
    source, _ = made(rollout=rollout)
    for step in (5, 6):
        source.sample(step)
    assert source.prompts.place() == place


@pytest.mark.parametrize(("is_leader", "records"), [(True, True), (True, False), (False, True)])
def test_what_is_trained_on_is_recorded_with_its_text_by_the_leader(made, is_leader, records):
    source, calls = made(is_leader=is_leader, records=records)
    groups = [make_group("a")]
    source.record(groups, 5)
    ((cfg, parallel, sums, (plain,), version), _) = calls.named("count")[0]
    assert (cfg, parallel, sums, version) == (source.cfg, source.parallel, source.meter.sums, 0)
    assert plain.prompt is groups[0].prompt and not any(r.has_routes for r in plain.rollouts)
    recorded = calls.named("recorder.record")
    assert len(recorded) == (is_leader and records)
    for (step, (group,)), _ in recorded:
        routes = [each.routed_experts for each in groups[0].rollouts]
        assert step == 6 and [each.routed_experts for each in group.rollouts] == routes
        assert [each.response_text for each in group.rollouts] == [
            "text of 3",
            "text of 4",
        ]
    assert isinstance(source.meter.sums, MetricSums)
