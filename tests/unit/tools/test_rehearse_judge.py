"""A rehearsal reports the memory of all phases and the waits of all ranks."""

import pytest

from megatron_rl.config import load_config
from megatron_rl.plan.hardware import GIB, HARDWARE
from megatron_rl_tools.rehearse.judge import Findings, add_memory, add_waits
from megatron_rl_tools.rehearse.program import RankReport

GRADIENT = "gradient, second"


def report(rank=0, ids=0, syncs=(), copies=(), **peaks):
    phases = {GRADIENT: 10} | peaks
    memory = {
        phase: {"peak": peak * GIB, "by_place": {f"line of {phase}": peak * GIB}}
        for phase, peak in phases.items()
    }
    record = {"memory": memory, "syncs": syncs, "copies": copies}
    planned = {
        "total": 16 * GIB, "in Adam": 9 * GIB,
        "ids not rehearsed": ids * GIB, "recorded, not rehearsed": ids // 2 * GIB,
    }  # fmt: skip
    return RankReport(rank, planned=planned, record=record)


def judged(*reports, **rollout):
    sections = {"data": {"train": "x"}, "model": {"path": "x"}, "rollout": rollout}
    findings = Findings()
    by_rank = {item.rank: item for item in reports}
    add_memory(findings, by_rank, load_config(None, [], sections), HARDWARE["h100"])
    return findings


@pytest.mark.parametrize("phase", ["build", "metrics", "export", "checkpoint"])
def test_a_phase_beside_the_update_can_be_too_large(phase):
    findings = judged(report(0), report(1, **{phase: 90}))
    (error,) = findings.errors
    assert f"90.00 GiB at the peak, on rank 1 in {phase}," in error
    assert findings.highest == [1, phase, 90 * GIB]
    assert findings.lines[0][0] == f"line of {phase}"
    # the plan is one of an update
    assert [row[1:4] for row in findings.memory] == [[GRADIENT, 10 * GIB, 16 * GIB]] * 2


def test_an_export_after_the_state_is_freed_is_not_that_of_a_run():
    alternating = {
        "release_memory": True, "weight_sync": "colocated", "max_server_restarts": 0, "gpus": [0],
    }  # fmt: skip
    assert judged(report(export=90), **alternating).errors == []


def test_expert_ids_of_the_other_micro_batches_count():
    findings = judged(report(ids=6))
    assert findings.memory == [[0, GRADIENT, 16 * GIB, 16 * GIB, 0.0]]
    assert [size for _, size in findings.lines] == [10 * GIB, 6 * GIB]
    assert "79" in judged(report(ids=71)).errors[0]


def test_what_the_old_logprob_pass_recorded_counts_in_the_update_of_adam():
    findings = judged(report(ids=4, **{"optimizer, second": 20}))
    assert findings.memory[0][1:4] == ["optimizer, second", 22 * GIB, 9 * GIB]


def test_waits_and_copies_are_those_of_the_rank_with_most():
    """The loss waits on the last stage only, which is not the first rank's."""
    first = report(
        0,
        syncs=[[GRADIENT, "item", "stage.py:1", 3], ["build", "item", "build.py:1", 1]],
        copies=[[GRADIENT, "pageable", "batch.py:1", 2, 64]],
    )
    last = report(
        1,
        syncs=[[GRADIENT, "item", "stage.py:1", 5], [GRADIENT, "item", "loss.py:1", 4]],
        copies=[[GRADIENT, "pageable", "batch.py:1", 2, 96]],
    )
    findings = Findings()
    add_waits(findings, {0: first, 1: last})
    assert findings.waits == [
        ["megatron_rl", GRADIENT, "item", "stage.py:1", 5],
        ["megatron_rl", GRADIENT, "item", "loss.py:1", 4],
    ]
    assert findings.copies == [[GRADIENT, "pageable", "batch.py:1", 2, 96]]
