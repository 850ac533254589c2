"""What the reporter writes of a step, an evaluation and a finished run, where, and that other ranks
write nothing.
"""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from megatron_rl.config import dump_config, load_config, plain_values
from megatron_rl.launch.status import SHOWN
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.metrics.trackers import TrackedRun, Tracker
from megatron_rl.metrics.trackers.run_versions import versions
from megatron_rl.records.packed import StepResult
from megatron_rl.trainer import reporter as module
from megatron_rl.trainer.reporter import Reporter, make_sinks
from tests.unit.trainer.recorded import Calls, Recorded

STEPS = 5
MADE = []
SECRET = "s3cr3t-Va1ue.9"


class Kept(Tracker):
    """Keeps what it gets; its run in the tracker has the name of ours."""

    def __init__(self, run):
        self.run, self.id, self.calls = run, run.id or f"id of {run.name}", []
        MADE.append(self)

    def log(self, step, metrics, per_layer):
        self.calls.append(("log", step))

    def samples(self, step, tables):
        self.calls.append(("samples", step, tables))

    def report(self, page):
        self.calls.append(("report", page))


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The names of the installed commands and the writers of report pages, of which the first is
    used.
    """
    names = ["train", "view", "top"]
    pages = [lambda folder: folder / "report.html", lambda folder: folder / "another.html"]
    writers = [SimpleNamespace(load=lambda page=page: page) for page in pages]
    monkeypatch.setattr(module.commands, "installed", lambda: dict.fromkeys(names))
    monkeypatch.setattr(
        module, "entry_points", lambda group: writers if group == "megatron_rl.report" else []
    )
    return names, writers


def config(folder, **track):
    run = {
        "dir": str(folder),
        "name": "demo",
        "num_steps": STEPS,
        "prompts_per_step": 2,
        "num_mini_batches": 1,
    }
    keys = {"model": {"path": "m"}, "data": {"train": "t"}, "run": run, "track": track}
    cfg = load_config(None, [], keys | {"rollout": {"api_key_env": "KEY_OF_THE_SERVERS"}})
    cfg.run_dir.mkdir()
    return cfg


def tracked(cfg, ids=None, first_step=0):
    """(what closes its files, a reporter, the calls of its console, those of its status)."""
    MADE.clear()
    stack, console, status = ExitStack(), Calls(), Calls()
    sinks = make_sinks(cfg, stack, print, ids or {}, first_step, is_new=first_step == 0)
    return (
        stack,
        Reporter(cfg, Recorded(console, "console"), sinks, Recorded(status, "status")),
        console,
        status,
    )


@pytest.fixture
def rollouts(monkeypatch):
    """rollouts(cfg): a line of rollouts.jsonl whose response holds the key of the servers."""
    monkeypatch.setenv("KEY_OF_THE_SERVERS", SECRET)

    def write(cfg):
        row = {
            "prompt": "1+1=",
            "response": f"2 {SECRET}",
            "label": "2",
            "reward": 1.0,
            "response_length": 2,
            "step": 1,
        }
        (cfg.run_dir / "rollouts.jsonl").write_text(json.dumps(row) + "\n")

    return write


def result(step, **more):
    metrics = dict.fromkeys(SHOWN[:2], 0.5) | {"train/loss": 1.0} | more
    return StepResult(step, step + 10, metrics, {})


def test_a_step_is_in_the_file_on_the_console_in_the_status_and_in_the_trackers(tmp_path, rollouts):
    cfg = config(tmp_path, to=[f"{__name__}:Kept"], samples_every=2)
    rollouts(cfg)
    stack, reporter, console, status = tracked(cfg)
    totals = {"rollout/retries_total": 3.0}
    results = [result(0, **{"time/step": 7.5}), *map(result, range(1, 4))]
    with stack:
        for each in results:
            reporter.step(each, totals)
    assert [
        (each.step, each.policy_version) for each in read_metrics(cfg.run_dir / "metrics.jsonl")
    ] == [(step, step + 10) for step in range(4)]
    assert console == [("console.step", (each, STEPS, totals), {}) for each in results]
    shown = dict.fromkeys(SHOWN[:2], 0.5)
    expected = [
        dict(step=n, step_seconds=0.0, policy_version=n + 9, metrics=shown) for n in range(1, 5)
    ]
    expected[0]["step_seconds"] = 7.5
    assert status == [("status.note", (), values) for values in expected]
    (tracker,) = MADE
    assert [call[:2] for call in tracker.calls] == [
        ("log", 1), ("log", 2), ("samples", 2), ("log", 3), ("log", 4), ("samples", 4),
    ]  # fmt: skip
    (table, *_), *_ = (call[2].values() for call in tracker.calls if call[0] == "samples")
    assert [row["response"] for row in table] == ["2 ***"], "an environment may print the key"


def test_by_default_trackers_get_samples_at_the_end_alone(tmp_path, rollouts):
    cfg = config(tmp_path, to=[f"{__name__}:Kept"])
    rollouts(cfg)
    stack, reporter, *_ = tracked(cfg)
    reporter.status = None
    with stack:
        reporter.step(result(0), {})
        reporter.finish()
    (tracker,) = MADE
    expected = [("log", 1), ("samples", STEPS), ("report", cfg.run_dir / "report.html")]
    assert [call[:2] for call in tracker.calls] == expected


def test_an_evaluation_is_of_the_finished_steps(tmp_path):
    cfg = config(tmp_path, to=[])
    stack, reporter, console, status = tracked(cfg)
    with stack:
        reporter.evaluation(3, 13, {"eval/a/avg@1": 0.5})
    assert read_metrics(cfg.run_dir / "metrics.jsonl") == [
        StepResult(2, 13, {"eval/a/avg@1": 0.5}, {})
    ]
    assert console == [("console.evaluation", (3, {"eval/a/avg@1": 0.5}), {})] and status == []


def test_the_end_of_a_run_names_its_report_and_the_commands_that_show_it(tmp_path):
    cfg = config(tmp_path, to=[])
    stack, reporter, console, _ = tracked(cfg)
    with stack:
        reporter.step(result(0, **{"time/step": 7.5}), {})
        reporter.finish()
    page = cfg.run_dir / "report.html"
    assert console.names == ["console.step", "console.log", "console.summary"]
    assert console[1][1] == (f"report {page}",)
    text, values = console[2][1]
    assert text.startswith("1 steps in 0:08") and values["steps"] == 1
    assert text.endswith(
        f"look at\n  megatron-rl view {cfg.run_dir}\n  megatron-rl top {cfg.run_dir}\n  {page}"
    )


def test_a_page_that_fails_does_not_fail_the_run(tmp_path, monkeypatch):
    def broken(folder):
        raise IndexError("list index out of range")

    writer = SimpleNamespace(load=lambda: broken)
    monkeypatch.setattr("megatron_rl.trainer.reporter.entry_points", lambda group: [writer])
    said = []
    reporter = Reporter(config(tmp_path), SimpleNamespace(log=said.append), None)
    assert reporter._write_page() is None
    assert "no report page: IndexError" in said[0] and "megatron-rl report" in said[0]


def test_without_the_viewer_the_end_of_a_run_says_how_to_install_it(tmp_path, installed):
    for part in installed:
        part.clear()
    cfg = config(tmp_path, to=[f"{__name__}:Kept"])
    stack, reporter, console, _ = tracked(cfg)
    with stack:
        reporter.finish()
    assert console[0][1] == (
        "no report page: megatron_rl_viewer is not installed; in a checkout: pip install ./viewer",
    )
    text, _ = console[1][1]
    assert text.rstrip().endswith("look at")
    assert MADE[0].calls == []


def test_a_tracker_has_the_run_that_it_continues(tmp_path, monkeypatch):
    cfg = config(tmp_path, to=["wandb"], project="tests", entity="us", mode="offline")
    made, ids = [], {"wandb": "of the checkpoint"}
    trackers = SimpleNamespace(failures={"wandb": 2}, ids=ids, close=lambda *, failed: None)
    monkeypatch.setattr(module, "Trackers", lambda *arguments: made.append(arguments) or trackers)
    stack, reporter, *_ = tracked(cfg, ids, 4)
    sums = MetricSums()
    with stack:
        reporter.count(sums)
    assert reporter.state_dict() == {"trackers": ids} and sums.reduce(None, "cpu") == {
        "track/wandb_failures_total": 2.0
    }
    run = TrackedRun(
        "demo",
        cfg.run_dir,
        "tests",
        "us",
        "offline",
        first_step=4,
        config=plain_values(cfg),
        versions=versions(),
    )
    assert made == [(cfg.track, run, print, ids)]
    assert (cfg.run_dir / "config.toml").read_text() == dump_config(cfg)


def test_a_resumed_run_begins_its_metrics_after_its_checkpoint(tmp_path):
    cfg = config(tmp_path)
    stack, reporter, *_ = tracked(cfg)
    with stack:
        for step in range(3):
            reporter.sinks.write(StepResult(step, step, {}))
    stack, *_ = tracked(cfg, first_step=2)
    with stack:
        assert [r.step for r in read_metrics(cfg.run_dir / "metrics.jsonl")] == [0, 1]


def test_a_new_run_starts_at_step_0_in_its_tracker(tmp_path):
    stack, reporter, *_ = tracked(config(tmp_path, to=[f"{__name__}:Kept"]))
    with stack:
        pass
    assert (MADE[0].run.id, MADE[0].run.first_step) == ("", 0)
    assert reporter.state_dict() == {"trackers": {f"{__name__}:Kept": "id of demo"}}


@pytest.mark.parametrize(("is_new", "steps"), [(True, []), (False, [0])])
def test_a_run_resumed_at_step_0_keeps_the_evaluation_before_its_first_step(
    tmp_path, is_new, steps
):
    cfg = config(tmp_path, to=[])
    (cfg.run_dir / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "policy_version": 0}}\n' for step in (0, 1))
    )
    with ExitStack() as stack:
        make_sinks(cfg, stack, print, {}, 0, is_new=is_new)
    lines = (cfg.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps


@pytest.mark.parametrize("is_rank_0", [True, False])
def test_without_trackers_and_on_other_ranks_nothing_is_sent(tmp_path, is_rank_0):
    cfg = config(tmp_path, to=[])
    with ExitStack() as stack:
        sinks = make_sinks(cfg, stack, print, {}, 0, is_new=True) if is_rank_0 else None
        assert sinks is None or sinks.trackers is None
        calls, sums = Calls(), MetricSums()
        reporter = Reporter(cfg, Recorded(calls, "console"), sinks, Recorded(calls, "status"))
        reporter.count(sums)
        assert reporter.state_dict() == {"trackers": {}} and sums.reduce(None, "cpu") == {}
        if not is_rank_0:
            reporter.step(result(0), {})
            reporter.evaluation(1, 1, {})
            reporter.finish()
            assert calls == []
