"""gpu-check's step full-layout: what is compared, limits, the page, and what is not possible."""

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.config.loader import plain_values
from megatron_rl_tools.gpu_check import gpu_check, layout_rank, layout_steps
from megatron_rl_tools.gpu_check.result import Findings, NotPossible
from megatron_rl_tools.gpu_check.steps import STEPS, StepPlace, job

GIB = 1 << 30


def rehearsed(peak: float) -> dict:
    memory = {"gradient, second": {"start": 0, "peak": int(peak * GIB), "end": 0}}
    return {"rows": [64], "parameters": 7, "lengths": [60, 4], "memory": memory}


def rehearsal(**changes) -> dict:
    return {
        "title": "F.toml: 2 layers on 2 x H100",
        "rehearsed": {"world_size": 2, "config": {}, "model": {"num_hidden_layers": 2}},
        "by_rank": {"1": rehearsed(10.0)},
        "phases": {"gradient, second": 2.0},
        "errors": [],
        **changes,
    }


def measured(peak: float | None, seconds: float, **changes) -> dict:
    memory = {} if peak is None else {"gradient, second": {"peak": int(peak * GIB)}}
    item = {"rows": [64], "parameters": 7, "memory": memory}
    return {**item, "seconds": {"gradient, second": seconds}, **changes}


def test_the_highest_peak_of_the_rehearsed_ranks_and_the_slowest_rank():
    findings = Findings()
    ranks = {0: measured(50.0, 3.0), 1: measured(10.5, 2.5)}  # rank 0 was not rehearsed
    (line,) = layout_steps.compare(rehearsal(), ranks, findings)
    assert line == ("gradient, second", 3.0, 2.0, int(10.5 * GIB), 10 * GIB)
    assert findings.problems == []
    assert findings.figures["gradient, second"] == {
        "seconds": 3.0, "rehearsed seconds": 2.0, "GiB": 10.5, "rehearsed GiB": 10.0,
    }  # fmt: skip
    row = "| gradient, second | 10.500 | 10.000 | +5.0 % | 3.000 | 2.000 | +50.0 % |"
    text = layout_steps.page("cuda", "F.toml", [line])
    assert row in text and text.startswith("# Measured on cuda, beside the rehearsal: F.toml\n")


def test_more_memory_than_rehearsed_is_a_problem():
    findings = Findings()
    layout_steps.compare(rehearsal(), {0: measured(1.0, 1.0), 1: measured(11.5, 1.0)}, findings)
    assert findings.problems == ["gradient, second: 1.15 of the rehearsed peak (limit 1.1)"]


def test_on_a_cpu_only_seconds_are_compared():
    findings = Findings()
    ranks = {rank: measured(None, 1.0) for rank in range(2)}
    (line,) = layout_steps.compare(rehearsal(phases={}), ranks, findings)
    assert line.peak is None and line.rehearsed_seconds is None and findings.problems == []
    row = "| gradient, second |  | 10.000 |  | 1.000 |  |  |"
    assert row in layout_steps.page("cpu", "F.toml", [line])


@pytest.mark.parametrize("change", [{"rows": [65]}, {"parameters": 8}])
def test_another_step_than_the_rehearsed_is_refused(change):
    ranks = {0: measured(1.0, 1.0), 1: measured(1.0, 1.0, **change)}
    with pytest.raises(ValueError, match=f"rank 1 has {next(iter(change))} = .*rehearse again"):
        layout_steps.compare(rehearsal(), ranks, Findings())


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    place = StepPlace("cuda", tmp_path, True, Path(sys.executable))
    with pytest.raises(NotPossible, match="needs --rehearsal DIR"):
        layout_steps.full_layout(place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "rehearsal.json").write_text(json.dumps(rehearsal()))
    place = StepPlace("cuda", tmp_path, True, Path(sys.executable), tmp_path)
    with pytest.raises(NotPossible, match="has 2 ranks; torch sees 1 GPUs"):
        layout_steps.full_layout(place)
    failed = rehearsal(by_rank={}, errors=["rank 0: no", "more"])
    (tmp_path / "rehearsal.json").write_text(json.dumps(failed))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(NotPossible, match="no rank that ended.*rank 0: no"):
        layout_steps.full_layout(place)


def test_the_option_reaches_the_step(tmp_path, capsys):
    (step,) = [each for each in STEPS if each.name == "full-layout"]
    place = StepPlace("cpu", tmp_path, False, Path(sys.executable), tmp_path / "r")
    command = job(step, place).command
    assert command[command.index("--rehearsal") + 1] == str(tmp_path / "r")
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu", "--rehearsal", str(tmp_path)])
    assert "no rehearsal.json there" in capsys.readouterr().err


def test_the_configuration_is_the_rehearsed_one_on_this_device(tmp_path):
    sections = {
        "model": {"path": "elsewhere", "recompute": "full"},
        "data": {"train": "unused"},
        "parallel": {"ep": 2},
        "run": {"device": "cuda"},
    }
    cfg = load_config(None, [], sections)
    text = json.dumps({"rehearsed": {"config": plain_values(cfg, exclude_none=True)}})
    again = layout_rank.rehearsed_config(json.loads(text), "cpu", tmp_path)
    assert again.run.device == "cpu" and again.model.path == tmp_path
    assert (again.parallel, again.optim) == (cfg.parallel, cfg.optim)
    assert again.model.recompute == "full"


def test_every_rank_has_the_same_random_weights():
    chunks = [[torch.nn.Linear(3, 3)] for _ in range(2)]
    for chunk in chunks:
        layout_rank.fill(None, chunk)
    assert torch.equal(chunks[0][0].weight, chunks[1][0].weight)
    assert 0 < chunks[0][0].weight.abs().max() < 0.2


def test_a_phase_is_timed_from_its_begin_to_its_end(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(layout_rank.time, "perf_counter", lambda: next(times))
    meter = layout_rank.Meter("cpu")
    meter.end()  # nothing runs yet
    for phase in ("one", "two"):
        meter.begin(phase)
        meter.end()
    assert meter.data() == {"memory": {}, "seconds": {"one": 2.0, "two": 4.0}}
