"""run.trace in a run of two ranks with saved rollouts: real stages and collectives, their metrics,
and `megatron-rl trace`.
"""

import json
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.launch.trace_file import merge, read_rank
from megatron_rl.trainer.step_meter import TIMED
from megatron_rl_tools.trace import merge_trace as command
from megatron_rl_tools.trace.trace_summary import summarize_trace
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
        None,
        [],
        sections(material, work, steps=STEPS, run=run, parallel={"ep": 2}, replay={"mode": "R3"}),
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
    assert sorted(path.name for path in (run / "trace").iterdir() if path.is_dir()) == [
        "step_000002",
        "step_000004",
    ]
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
        summary = summarize_trace(merge(read_step(run, step)))
        measured = next(row for row in metrics if row["step"] == step)
        of_rank_0 = summary.ranks[0]
        assert of_rank_0.step == pytest.approx(measured["time/step"], abs=1e-5)
        assert of_rank_0.stages.keys() == {"rollout", "split", "old_logprob", "update", "other"}
        for stage in (*TIMED, "other"):
            assert of_rank_0.stages.get(stage, 0.0) == pytest.approx(
                measured[f"time/{stage}"], abs=1e-5
            ), stage
        assert all(
            0 < each.waits["update"] <= each.stages["update"] + 1e-6 for each in summary.ranks
        )


def test_collectives_and_parts_are_inside_their_stage(run):
    for each in read_step(run, 2):
        spans = [event for event in each.events if event["ph"] == "X"]
        update = [event for event in spans if event["name"] == "update"]
        assert len(update) == 2, "one per mini-batch"
        for stage in update:
            inside = [
                e
                for e in spans
                if stage["ts"] <= e["ts"]
                and e["ts"] + e["dur"] <= stage["ts"] + stage["dur"] + 1e-3
            ]
            names = [event["name"] for event in inside]
            assert names.count("gradient") == names.count("optimizer") == 1
            exchanged = [
                e for e in inside if e["name"] == "all_to_all_single" and e["cat"] == "collective"
            ]
            assert exchanged and {event["args"]["ranks"] for event in exchanged} == {2}, (
                "tokens to experts, ep = 2"
            )
    ends = [
        event["name"]
        for event in read_step(run, 4)[0].events
        if event["name"] in ("checkpoint", "evaluate")
    ]
    assert ends == ["checkpoint", "evaluate", "checkpoint"], (
        "after the step, and at the end of the run"
    )


def test_the_command(run, tmp_path, capsys):
    assert command.main([str(run), "--picture", str(tmp_path / "step.png")]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("step 4: ")
        and "on 2 rank(s)" in text
        and str(run / "trace/step_000004.json.gz") in text
    )
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


def call_all_ways():
    """-> name and number of ranks of each span; every rank checks what it received."""
    import torch
    import torch.distributed as dist

    from megatron_rl.distributed.trace_collectives import trace_collectives
    from megatron_rl.launch.trace import Trace

    dist.init_process_group("gloo")
    rank, trace = dist.get_rank(), Trace(is_on=True)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    original = dist.P2POp, dist.isend
    with trace_collectives(trace):
        assert dist.isend is not original[1]
        received = torch.zeros(3)
        ops = [
            dist.P2POp(dist.isend, torch.full((3,), 7.0 + rank), 1 - rank),
            dist.P2POp(op=original[1], tensor=torch.full((3,), 5.0 + rank), peer=1 - rank, tag=1),
            dist.P2POp(dist.irecv, received, 1 - rank),
            dist.P2POp(dist.irecv, late := torch.zeros(3), 1 - rank, tag=1),
        ]
        assert all(type(op) is original[0] for op in ops)
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert received.tolist() == [8.0 - rank] * 3 and late.tolist() == [6.0 - rank] * 3
        with pytest.raises(ValueError, match="Invalid ``op``"):
            dist.P2POp(dist.all_reduce, received, 1 - rank)
        dist.barrier(alone)
        dist.all_reduce(received, dist.ReduceOp.SUM, alone)
        dist.all_reduce(received, group=alone)
        dist.all_reduce(received, async_op=True).wait(timeout=timedelta(seconds=60))
    assert received.tolist() == [15.0] * 3 and (dist.P2POp, dist.isend) == original
    dist.destroy_process_group()
    return [(span.name, span.values.get("ranks")) for span in trace.take()]


def test_every_way_to_call():
    """Batches as megatron-core's pipeline sends them; groups by position and by name."""
    waits = [("wait for batch_isend_irecv", None)] * 4
    alone = [("barrier", 1), ("all_reduce", 1), ("all_reduce", 1)]
    expected = [
        ("batch_isend_irecv", 2),
        *waits,
        *alone,
        ("all_reduce", 2),
        ("wait for all_reduce", None),
    ]
    assert run_ranks(call_all_ways, 2) == [expected] * 2


def collect_traced(material: Path, work: Path) -> None:
    """As `--only rollout`, with saved rollouts in place of servers."""
    from megatron_rl.config import load_config
    from megatron_rl.train import collect
    from megatron_rl.trainer import build

    build.start_trainer = partial(build.start_trainer, saved_run=material / "live")
    run = {"trace": "every 2", "name": "run", "save_batches": "off"}
    collect(load_config(None, [], sections(material, work, steps=STEPS, run=run)))


def test_sampling_alone_is_traced(tmp_path, capsys):
    run_ranks(collect_traced, 1, make_material(tmp_path, steps=STEPS), tmp_path / "work")
    run = tmp_path / "work/run"
    for step in (2, 4):
        assert command.main([str(run), "--step", str(step)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"step {step}: ")
        stages = [line.split()[0] for line in lines[2:5]]
        assert stages[0] == "rollout" and set(stages) == {"rollout", "split", "other"}
    assert sorted(path.name for path in (run / "trace").iterdir() if path.is_dir()) == [
        "step_000002",
        "step_000004",
    ]
