"""run.trace in a run of two ranks with saved rollouts: real stages and collectives, their metrics, and `megatron-rl trace`."""

import json
from pathlib import Path

import pytest

from megatron_rl.launch.trace_file import merge, read_rank
from megatron_rl.tools.trace import trace as command
from megatron_rl.tools.trace.summary import summarize
from megatron_rl.trainer.step_meter import TIMED
from tests.dist.launch import run_ranks
from tests.saved_run import make_material, sections
from tests.unit.launch.test_trace import check_names, check_nesting

STEPS = 4


def train_traced(material: Path, work: Path) -> list[bool]:
    """Whether torch.distributed is itself after the run, and was replaced in a traced step."""
    import torch.distributed as dist

    from megatron_rl.config import load_config
    from megatron_rl.train import train
    from megatron_rl.trainer.step_trace import StepTrace

    original, seen = dist.all_reduce, []
    begin = StepTrace.begin

    def watch(self, step):
        begin(self, step)
        seen.append(dist.all_reduce is not original)

    StepTrace.begin = watch
    run = {"trace": "every 2", "name": "run", "num_mini_batches": 2, "save_batches": "off"}
    cfg = load_config(
        None, [], sections(material, work, steps=STEPS, run=run, parallel={"ep": 2}, replay={"mode": "R3"})
    )
    train(cfg, material / "live")
    return [*seen, dist.all_reduce is original]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    found = run_ranks(train_traced, 2, make_material(folder, steps=STEPS), folder / "work")
    assert found == [[False, True, False, True, True]] * 2, "replaced in the traced steps alone"
    return folder / "work/run"


def read_step(run, step):
    return [read_rank(path) for path in sorted((run / f"trace/step_{step:06d}").glob("rank_*"))]


def test_each_rank_writes_the_steps_that_are_due(run):
    assert sorted(path.name for path in (run / "trace").iterdir() if path.is_dir()) == ["step_000002", "step_000004"]
    for step in (2, 4):
        ranks = read_step(run, step)
        assert [(each.rank, each.step) for each in ranks] == [(0, step - 1), (1, step - 1)]
        assert len({each.clock.host for each in ranks}) == 1
        events = merge(ranks)
        check_nesting(events)
        check_names(events)
        assert {event["pid"] for event in events} == {0, 1}, "without servers"


def test_the_stages_are_those_of_the_metrics_and_their_seconds_agree(run):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in (2, 4):
        summary = summarize(merge(read_step(run, step)))
        measured = next(row for row in metrics if row["step"] == step)
        of_rank_0 = summary.ranks[0]
        assert of_rank_0.step == pytest.approx(measured["time/step"], abs=1e-5)
        assert of_rank_0.stages.keys() == {"rollout", "split", "old_logprob", "update", "other"}
        for stage in (*TIMED, "other"):
            assert of_rank_0.stages.get(stage, 0.0) == pytest.approx(measured[f"time/{stage}"], abs=1e-5), stage
        assert all(0 < each.waits["update"] <= each.stages["update"] + 1e-6 for each in summary.ranks)


def test_collectives_and_parts_are_inside_their_stage(run):
    for each in read_step(run, 2):
        spans = [event for event in each.events if event["ph"] == "X"]
        update = [event for event in spans if event["name"] == "update"]
        assert len(update) == 2, "one per mini-batch"
        for stage in update:
            inside = [
                e for e in spans if stage["ts"] <= e["ts"] and e["ts"] + e["dur"] <= stage["ts"] + stage["dur"] + 1e-3
            ]
            names = [event["name"] for event in inside]
            assert names.count("gradient") == names.count("optimizer") == 1
            exchanged = [e for e in inside if e["name"] == "all_to_all_single" and e["cat"] == "collective"]
            assert exchanged and {event["args"]["ranks"] for event in exchanged} == {2}, "tokens to experts, ep = 2"
    ends = [event["name"] for event in read_step(run, 4)[0].events if event["name"] in ("checkpoint", "evaluate")]
    assert ends == ["checkpoint", "evaluate", "checkpoint"], "after the step, and at the end of the run"


def test_the_command(run, tmp_path, capsys):
    assert command.main([str(run), "--picture", str(tmp_path / "step.png")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 4: ") and "on 2 rank(s)" in text and str(run / "trace/step_000004.json.gz") in text
    assert [line.split()[0] for line in text.splitlines()[2:7]] == [
        "rollout",
        "split",
        "old_logprob",
        "update",
        "other",
    ]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert command.main([str(run), "--step", "2", "--out", str(tmp_path / "two.json.gz")]) == 0
    assert capsys.readouterr().out.startswith("step 2: ") and (tmp_path / "two.json.gz").exists()
    assert command.main([str(run), "--step", "3"]) == 2
    assert "step 3 was not traced; there are step_000002, step_000004" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2 and "no traces in trace/" in capsys.readouterr().err
