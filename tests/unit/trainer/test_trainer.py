"""What the trainer asks of the parts of a run, in which order and with what; they are stand-ins
that record their calls.

With real parts: test_one_run.py.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.launch.trace import Trace
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.records.packed import StepResult
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.trainer import trainer as module
from megatron_rl.trainer.rollout_metrics import count_groups
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from tests.unit.batch.rollouts import make_rollout
from tests.unit.trainer.recorded import Calls, Recorded

STEPS, VERSION = 6, 3
PLAIN, OBSERVE = object(), object()
BATCH = SimpleNamespace(index=1, plain=PLAIN)
OLD = SimpleNamespace(mismatch="mismatch")
PROGRESS = {"policy_version": VERSION, "trackers": {"wandb": "id"}, "evaluated": 2}


@pytest.fixture
def made(tmp_path):
    """made(**sections): (a trainer that continues after step 2, its calls); settings of a section
    are keywords.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(**sections):
        calls = Calls()
        base = {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "run": {"num_steps": STEPS, "dir": str(tmp_path)},
        }
        cfg = load_config(
            None, [], base | {name: base.get(name, {}) | keys for name, keys in sections.items()}
        )
        engine = Recorded(calls, "engine", old_logprobs=OLD, compute_gradient=2.5)
        engine.pack_rule, engine.apply_gradient = (
            "rule",
            lambda *args: SimpleNamespace(skipped=False),
        )
        rollouts = Recorded(
            calls, "rollouts", state_dict={"policy_version": VERSION}, files={"name": "writer"}
        )
        rollouts.policy_version, rollouts.stop = VERSION, "stop"
        tokens = Recorded(calls, "tokens", old_pass=nullcontext(), observer=OBSERVE)
        tokens.choice = SimpleNamespace(of=lambda step, count: f"those of {count} in step {step}")
        files = Recorded(calls, "files")
        files.failed = 0
        saver = Recorded(calls, "saver")
        saver.unsaved = 0
        reporter = Recorded(calls, "reporter", state_dict={"trackers": {"wandb": "id"}})
        reporter.console = SimpleNamespace(
            progress=lambda *args: nullcontext(calls.append(("progress", args, {})))
        )
        step_trace = Recorded(calls, "step_trace")
        step_trace.trace = Trace(is_on=True)
        watchdog = SimpleNamespace(
            enter=lambda stage, step: calls.append(("enter", (stage, step), {}))
        )
        trainer = Trainer(
            cfg=cfg,
            parallel=SimpleNamespace(
                node="node", rank=0, world_size=1, dp_group="dp", device=torch.device("cpu")
            ),
            engine=engine,
            rollouts=rollouts,
            checkpoint_policy=Recorded(calls, "policy", add_previous_totals={"a_total": 1.0}),
            meter=StepMeter(watchdog, step_trace.trace),
            reporter=reporter,
            saved_batches=saver,
            tokens=tokens,
            recording=SimpleNamespace(files=files, events=Recorded(calls, "events")),
            step_trace=step_trace,
            first_step=2,
            evaluated=2,
        )
        return trainer, calls

    yield make
    dist.destroy_process_group()


def reduced(sums):
    return sums.reduce(dist.group.WORLD, torch.device("cpu"))


def spans(trainer):
    return [(span.name, span.kind) for span in trainer.step_trace.trace.take()]


def test_before_each_step_the_state_is_noted_that_a_signal_saves(made):
    trainer, calls = made()
    assert list(trainer.steps()) == [2, 3, 4, 5] and trainer.meter.step == 5
    before_steps = [
        call
        for call in calls
        if call[0] not in ("rollouts.state_dict", "reporter.state_dict", "rollouts.is_used_up")
    ]
    assert before_steps[:3] == [
        ("enter", ("trace", 2), {}), ("step_trace.begin", (2,), {}), ("policy.begin", (2, PROGRESS),
        {}),
    ]  # fmt: skip
    assert calls.named("policy.begin")[-1] == ((5, PROGRESS), {})
    assert spans(trainer) == [("trace", "stage")] * 4
    trainer, calls = made()
    trainer.step_trace.trace.is_on = False
    with trainer.meter.time("weight_sync"):  # at the start of the run, which is of no step
        pass
    calls.clear()
    list(trainer.steps())
    assert trainer.meter.take_times()["time/weight_sync"] == 0
    assert not calls.named("step_trace.begin") and not calls.named("enter")


def test_a_signal_ends_sampling_and_saves_what_was_sampled(made):
    trainer, calls = made()
    stop = object()
    trainer.listen(stop)
    assert calls == [("policy.listen", (stop, "stop"), {})]
    for error in (None, SamplingStopped()):
        calls.clear()
        trainer.rollouts.sample = calls.note("sample", error or ["groups"])
        if error is None:
            assert trainer.sample(2) == ["groups"]
        else:
            with pytest.raises(SamplingStopped):
                trainer.sample(2)
        assert calls.names == ["sample", "policy.stop_if_signalled"]
        ((files,), _) = calls.named("policy.stop_if_signalled")[0]
        assert files() == {"name": "writer"} and calls[-1] == (
            "rollouts.files",
            (),
            {"is_step_done": False},
        )


def test_groups_get_penalties_then_advantages_then_weights_of_teachers(made, monkeypatch):
    trainer, calls = made()
    cfg = trainer.cfg

    def advantages(groups, kind, group, *, reward_weights, weight):
        assert (kind, group, reward_weights) == (cfg.advantage_kind, "dp", cfg.advantage.rewards)
        assert weight == cfg.advantage.weight
        return [*groups, "advantages"]

    monkeypatch.setattr(module, "with_penalties", lambda groups, cfg: [*groups, "penalties"])
    monkeypatch.setattr(module, "with_advantages", advantages)
    monkeypatch.setattr(module, "without_routes", lambda groups: [*groups, "without"])
    monkeypatch.setattr(module, "with_routes", lambda plain, groups: [*plain, *groups, "with"])
    monkeypatch.setattr(
        module, "with_teacher_weights", lambda groups, cfg, step: [*groups, f"beta of step {step}"]
    )
    groups = ["group", "without", "penalties", "advantages", "beta of step 4", "group", "with"]
    assert trainer.add_advantages(["group"], 4) == groups
    assert calls == [("enter", ("split", -1), {})] and spans(trainer) == [("split", "stage")]


NO_BASELINE = {"advantage": {"kind": "reward"}}
SHAPED = {"batch": {"length_penalty": 0.5}}
PER_REWARD = {
    "advantage": {"kind": "per_reward", "rewards": {"a": 1.0, "b": 1.0}},
    "reward": {"function": "rewards:score", "on_error": "drop"},
}
TEACHER = {"teachers": {"t": {"urls": ["http://t:1"]}}, "advantage": {"weight": 0.0}}
FAILURES = {"teachers": {"t": {"urls": ["http://t:1"], "teach": "failures"}}}
FREE = {"rollout": {"temperature": 1.0}}


@pytest.mark.parametrize(
    ("rewards", "sections", "cause"),
    [
        ((0.0, 0.0, 0.0, 0.0), {}, "every response of this step has reward 0,"),
        ((1.0, 1.0, 1.0, 1.0), {}, "has reward 1, which teaches nothing: the reward function may"),
        ((0.25, 0.25, np.nan, 0.25), {}, "has reward 0.25, which"),
        ((0.0, 0.0, 0.0, 1.0), {}, ""), ((np.nan,) * 4, {}, ""),
        ((0.0,) * 4, NO_BASELINE, "has reward 0,"), ((1.0,) * 4, NO_BASELINE, ""),
        ((1.0,) * 4, SHAPED, ""), ((0.0,) * 4, SHAPED, ""), ((1.0,) * 4, PER_REWARD, ""),
        ((0.0,) * 4, TEACHER | FREE, ""), ((1.0,) * 4, TEACHER | FREE, ""),
        ((0.0,) * 4, FAILURES | FREE, ""), ((1.0,) * 4, FAILURES | FREE, "has reward 1,"),
    ],
)  # fmt: skip
def test_equal_rewards_of_the_first_step_are_named_before_its_update_where_they_teach_nothing(
    made, rewards, sections, cause
):
    """Only the first step of this start is named: later ones count in rollout/zero_advantages, and
    in rollout/zero_rewards where all of them are 0.
    """
    trainer, calls = made(**sections)
    trainer.parallel = SimpleNamespace(dp_group=None, host_group=None)
    groups = [scored_group(name, pair) for name, pair in (("a", rewards[:2]), ("b", rewards[2:]))]
    for step in (trainer.first_step, trainer.first_step + 1):
        taught = trainer.add_advantages(groups, step)
    lines = [line for ((line,), _) in calls.named("reporter.log")]
    assert len(lines) == bool(cause) and cause in "".join(lines)
    assert all(line.startswith("WARNING before the first update: ") for line in lines)
    if not np.isnan(rewards).any():
        sums = MetricSums()
        count_groups(sums, taught, version=VERSION)
        metrics = module.derived(reduced(sums))
        assert metrics["rollout/zero_advantages"] == bool(cause)
        assert metrics["rollout/zero_rewards"] == (bool(cause) and not any(rewards))


def scored_group(name, rewards):
    """Return a group whose responses have different lengths, metrics and log-probs of a teacher."""
    rollouts = [make_rollout(f"{name}/{k}", 2, 3 + k) for k in range(len(rewards))]
    rollouts = tuple(
        replace(
            rollout, reward_metrics={"a": k, "b": 2 * k}, teacher_logprobs=rollout.rollout_logprobs
        )
        for k, rollout in enumerate(rollouts)
    )
    return RolloutGroup(Prompt(name, "", (1, 2), "7"), rollouts, np.array(rewards, np.float32))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_are_recorded_and_split_into_mini_batches(made, monkeypatch, max_staleness):
    trainer, calls = made(rollout={"max_staleness": max_staleness})
    monkeypatch.setattr(module, "split", calls.note("split", [BATCH]))
    groups = ["group"] * 7
    trainer.record(groups, 4)
    assert trainer.make_batches(groups, 4) == [BATCH]
    settings = dict(
        seed=4, rule="rule", dp_group="dp", save_tokens="those of 7 in step 5",
        policy_version=VERSION if max_staleness else None, node="node",
    )  # fmt: skip
    entered = ("enter", ("split", -1), {})
    assert calls == [
        entered, ("rollouts.record", (groups, 4), {}),
        entered, ("split", (groups, trainer.cfg), settings),
    ]  # fmt: skip
    assert trainer.meter.take_times()["time/split"] > 0


def test_rollouts_that_could_not_be_saved_end_a_run_that_does_nothing_else(made):
    trainer, calls = made()
    trainer.check_recorded()
    assert calls == [("files.wait", (), {})]
    trainer.recording.files.failed = 2
    with pytest.raises(
        OSError, match=rf"^2 files of rollouts in {trainer.cfg.run_dir} could not be written$"
    ):
        trainer.check_recorded()


def test_pi_old_of_every_mini_batch_is_known_before_a_signal_may_end_the_step(made, monkeypatch):
    trainer, calls = made()
    monkeypatch.setattr(module, "batch_without_routes", lambda batch: batch.plain)
    trainer.tokens.old_pass = lambda batch: nullcontext(calls.append(("old_pass", (batch,), {})))
    trainer.engine.old_logprobs = lambda batch, sums, replay: (
        sums.add_total("train/counted", 2) or (batch, replay)
    )
    trainer.saved_batches.note_old_pass = lambda index, sums: calls.append(
        ("noted", (index, reduced(sums)), {})
    )
    batches = [BATCH, SimpleNamespace(index=2, plain="plain")]
    assert trainer.old_logprobs(batches) == [(batch, trainer.cfg.replay.mode) for batch in batches]
    assert calls.names == [
        "rollouts.give_memory_to_trainer",
        "enter",
        "old_pass",
        "noted",
        "old_pass",
        "noted",
        "policy.stop_if_signalled",
    ]
    assert calls[1][1] == ("old_logprob", -1)
    assert [args for args, _ in calls.named("old_pass")] == [(PLAIN,), ("plain",)]
    assert [args for args, _ in calls.named("noted")] == [
        (batch.index, {"train/counted": 2}) for batch in batches
    ]
    assert reduced(trainer.meter.take_sums()) == {"train/counted": 4}
    assert spans(trainer) == [("old_logprob", "stage")]


@pytest.mark.parametrize("due", [None, SimpleNamespace(folder="folder", note="note")])
def test_a_mini_batch_is_saved_before_its_update_where_it_is_due(made, monkeypatch, due):
    trainer, calls = made()
    seen = []
    bundle = ("folder", BATCH, OLD, ({"train/counted": 2}, 2.5), "note")
    saved = [("reported", (due,), {}), ("write_bundle", bundle, {})]

    def compute_gradient(batch, old, sums, *, replay, observe):
        sums.add_total("train/counted", 2)
        seen.append((batch, old, replay, observe))
        return 2.5

    def write_bundle(folder, engine, batch, old, results, note):
        calls.append(("write_bundle", (folder, batch, old, results, note), {}))

    def apply_gradient(norm, batch, sums):
        calls.append(("apply", (norm, batch), {}))
        sums.add_total("optim/counted", 1)
        return SimpleNamespace(skipped=False)

    trainer.engine.compute_gradient, trainer.engine.apply_gradient = (
        compute_gradient,
        apply_gradient,
    )
    trainer.saved_batches.due = calls.note("due", due)
    trainer.saved_batches.reported = lambda due: nullcontext(calls.append(("reported", (due,), {})))
    monkeypatch.setattr(module, "results_of", lambda engine, metrics, norm: (metrics, norm))
    monkeypatch.setattr(module, "write_bundle", write_bundle)
    trainer.meter.step = 4
    trainer.update(BATCH, OLD)
    assert seen == [(BATCH, OLD, trainer.cfg.replay.mode, OBSERVE)]
    assert calls == [
        ("enter", ("update", 4), {}), ("tokens.observer", (1, "mismatch"), {}),
        ("due", (4, 1, 2.5), {}), *([] if due is None else saved), ("apply", (2.5, BATCH), {}),
    ]  # fmt: skip
    assert reduced(trainer.meter.take_sums()) == {"train/counted": 2, "optim/counted": 1}
    assert spans(trainer) == [("gradient", "part"), ("optimizer", "part"), ("update", "stage")]
    trainer.sync_weights(5)
    assert calls[-1] == ("rollouts.sync_weights", (5,), {})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_reports_what_was_counted_timed_and_compared(made, monkeypatch, rank):
    trainer, calls = made()
    monkeypatch.setattr(module.gc, "collect", calls.note("collect"))
    monkeypatch.setattr(module, "peak_memory_gib", lambda device: 1.5)
    trainer.parallel.rank, trainer.saved_batches.unsaved, trainer.recording.files.failed = (
        rank,
        2,
        3,
    )
    trainer.engine.mismatch = calls.note(
        "mismatch", SimpleNamespace(router_mismatch=0.25, flip_rate=[0.5, 0.0])
    )
    trainer.meter.sums.add_total("train/counted", 2)
    result = trainer.report(4, [OLD])
    found = result.metrics
    assert {name: found[name] for name in found if not name.startswith("time/")} == {
        "train/counted": 2, "run/unwritten_files_total": 3, "perf/peak_memory_gib": 1.5,
        "routing/router_mismatch": 0.25,
    } | ({} if rank else {"run/unsaved_batches_total": 2})  # fmt: skip
    assert found["time/step"] > 0
    assert result == StepResult(4, VERSION, found, {"routing/flip_rate": [0.5, 0.0]})
    assert calls.names == [
        "rollouts.finish_step", "collect", "tokens.finish", "mismatch", "reporter.count",
        "policy.add_previous_totals",
        "policy.note", "reporter.step",
    ]  # fmt: skip
    assert calls.named("tokens.finish") == [((5,), {})] and calls.named("mismatch") == [
        (([OLD],), {})
    ]
    assert calls.named("policy.note") == [((5, found), {})]
    assert calls.named("reporter.step") == [((result, {"a_total": 1.0}), {})]
    parts = [span for span in spans(trainer) if span[1] == "part"]
    assert parts == [("garbage collection", "part"), ("report", "part")]


def test_the_mean_length_of_discarded_responses_includes_those_before_a_resume(made, monkeypatch):
    monkeypatch.setattr(module.gc, "collect", lambda: None)  # slow
    trainer, _ = made()
    earlier = {"rollout/stale_tokens_total": 700.0, "rollout/stale_samples_total": 7.0}

    def add_previous_totals(metrics):
        metrics |= {name: value + metrics[name] for name, value in earlier.items()}
        return earlier

    trainer.checkpoint_policy.add_previous_totals = add_previous_totals
    for name, value in zip(earlier, (200, 1), strict=True):
        trainer.meter.sums.add_total(name, value)
    assert trainer.report(4, []).metrics["rollout/discarded_length_mean"] == 900 / 8


def test_without_a_comparison_of_routes_and_without_failures_the_metrics_are_not_there(
    made, monkeypatch
):
    monkeypatch.setattr(module.gc, "collect", lambda: None)  # slow
    trainer, _ = made()
    result = trainer.report(4, [])
    assert [name for name in result.metrics if not name.startswith("time/")] == [
        "perf/peak_memory_gib"
    ]
    assert result.per_layer == {}


def test_an_evaluation_is_of_no_step_and_has_its_seconds(made, monkeypatch):
    trainer, calls = made(eval={"every": 3, "sets": {"a": "x"}})
    now = iter([10.0, 14.5])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    metrics = {"eval/a/avg@1": 0.5}
    trainer.rollouts.evaluate = calls.note("evaluate", metrics)
    trainer.meter.step = 2
    trainer.evaluate(3)
    assert calls == [
        ("enter", ("evaluate", 2), {}), ("evaluate", (), {}),
        ("events.add", ("evaluation", 3, module.evaluation_text(metrics), 4.5), {}), ("policy.note",
        (3, metrics), {}),
        ("reporter.evaluation", (3, VERSION, metrics), {}),
    ]  # fmt: skip
    assert trainer.evaluated == 3 and spans(trainer) == [("evaluate", "stage")]


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (6, []), (7, [])]
)
def test_what_is_done_every_n_steps_is_due_neither_at_the_start_nor_at_the_end(made, every, due):
    trainer, calls = made(checkpoint={"every": every})
    for step in range(STEPS + 2):
        trainer.save(step)
    saved = calls.named("policy.end")
    assert [args[0] for args, settings in saved if settings == {"is_due": True}] == due
    step, progress, files = saved[0][0]
    assert (step, progress, files()) == (0, PROGRESS, {"name": "writer"}) and len(
        saved
    ) == STEPS + 2
    assert calls[-1] == ("rollouts.files", (), {"is_step_done": True})
    assert ("enter", ("checkpoint", -1), {}) in calls


@pytest.mark.parametrize("export", [False, True])
def test_the_end_of_a_run_evaluates_saves_and_exports(made, monkeypatch, export):
    trainer, calls = made(
        checkpoint={"export_hf": export, "every": 4}, eval={"every": 4, "sets": {"a": "x"}}
    )
    trainer.rollouts.evaluate = calls.note("evaluate", {})
    trainer.engine.export_parts = lambda world_size: (
        calls.append(("export_parts", (world_size,), {})) or [1, 2]
    )
    monkeypatch.setattr(module, "num_tensors", lambda path: 7)
    monkeypatch.setattr(module, "counted", lambda stream, advance: (stream, advance))
    monkeypatch.setattr(module, "write_hf_checkpoint", calls.note("write"))
    monkeypatch.setattr(module.Ranks, "of", lambda parallel: "ranks")
    monkeypatch.setattr(dist, "barrier", calls.note("barrier"))
    trainer.finish()
    calls[:] = [call for call in calls if not call[0].endswith(".state_dict")]
    path = trainer.cfg.run_dir / "hf"
    exported = [
        ("rollouts.give_memory_to_trainer", (), {}), ("progress", ("HF export", 7, "tensors"), {}),
        ("export_parts", (1,), {}),
        ("write", (([1, 2], None), trainer.cfg.model.path, path, "ranks"), {}),
        ("reporter.log", (f"HF checkpoint {path}",), {}),
    ]  # fmt: skip
    (args, settings), *_ = calls.named("policy.end")
    assert args[:2] == (STEPS, PROGRESS) and settings == {"is_due": True}
    assert [call for call in calls if call[0] != "policy.end"] == [
        ("enter", ("evaluate", -1), {}), ("evaluate", (), {}), ("enter", ("checkpoint", -1), {}),
        ("policy.wait", (), {}),
        ("enter", ("export", -1), {}), *(exported if export else []),
        ("reporter.finish", (STEPS,), {}),
        ("barrier", (), {}),
    ]  # fmt: skip
    assert trainer.evaluated == 2, "there was nothing to evaluate"
