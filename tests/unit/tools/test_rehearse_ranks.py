"""Virtual ranks on pretended GPUs: what their groups compare, and what a rank records."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.plan.hardware import HARDWARE, Assumptions
from megatron_rl_tools.rehearse.timeline import Deadlock, Timeline
from tests.rehearsed_ranks import FAULTS, MILLION, WORLD_SIZE

ROOT = Path(__file__).resolve().parents[3]


def rehearsed(name, *ranks):
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsed_ranks", name, *map(str, ranks)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_healthy_ranks_agree_and_get_each_others_values():
    results = rehearsed("healthy")
    for rank in range(WORLD_SIZE):
        objects, hosts, total, received, problems = results[str(rank)]
        assert objects == [{"rank": other} for other in range(WORLD_SIZE)]
        assert hosts == list(range(WORLD_SIZE))
        assert total == [3 if rank < 2 else 7]
        assert received == [(rank - 1) % WORLD_SIZE, 7]
        assert problems == []


def test_some_ranks_of_a_world_are_enough():
    results = rehearsed("healthy", 0, 3)
    assert results.keys() == {"0", "3"}
    assert results["0"][3] == [3, 7]  # from rank 3
    assert results["3"][0][3] == {"rank": 3}


QUICK = ("skips", "size", "reduction", "ends early")
"""The others are slow: each starts four processes."""


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in FAULTS]
)
def test_a_fault_is_named_with_both_ranks_and_lines(kind):
    text = rehearsed(kind)
    assert isinstance(text, str), f"{kind}: no disagreement"
    assert "rank 1" in text
    others = [f"rank {rank}" for rank in (0, 2, 3)]
    assert any(name in text for name in others)
    assert text.count("rehearsed_ranks.py:") >= 2 or "has ended" in text, text


def test_an_error_of_one_rank_is_reported_not_that_others_wait_for_it():
    error = "ValueError: loss.name: no such term"
    # 2 waits for rank 1, and has no result; with 0 and 1 alone no rank waits, but a call is open
    assert rehearsed("raises", 0, 1, 2) == {"0": None, "1": error}
    assert rehearsed("raises", 0, 1) == {"0": None, "1": error}


def test_a_rank_that_dies_is_reported_not_that_it_or_others_wait():
    assert rehearsed("dies", 0, 1) == {"1": None}


def test_collectives_in_another_order_are_a_deadlock():
    results = rehearsed("crossed")
    events = {int(rank): result for rank, result in results.items()}
    timeline = Timeline(events, HARDWARE["h100"], Assumptions())
    with pytest.raises(Deadlock, match=r"rank 0 waits in all_reduce at .*\n.*rank 1 waits in"):
        timeline.run()


def test_memory_flops_and_waits_are_those_of_a_gpu():
    result = rehearsed("memory", 0)["0"]
    weight, rows, output = 1024 * 2048 * 2, 512 * 1024 * 2, 512 * 2048 * 2
    assert result["weights"] == weight
    assert result["forward"] == weight + rows + output
    assert result["flops"] == [2 * 512 * 1024 * 2048] * 3  # forward, and two of backward
    assert {"nonzero", "copy to the host"} <= set(result["syncs"])
    assert result["guessed"] == ["nonzero"]
    assert ["pageable, blocking", 1, 4 << 20] in result["copies"]


def test_small_values_are_known_until_something_unknown_is_written():
    ends, view, shape, invented = rehearsed("values", 0)["0"]
    assert ends == [3, 3, 8]
    assert view != [1, 6]  # its storage was overwritten
    assert shape == [6]
    assert invented > 0


def test_pretended_time_of_a_collective_waits_for_the_last_rank():
    call = SimpleNamespace(operation="all_reduce", root=-1, number=0, num_bytes=4 * MILLION)
    events = {}
    for rank, flops in ((0, 0), (1, 10**13)):
        post = vars(call) | {"rank": rank, "group": ("nccl", (0, 1), 0), "place": "x"}
        events[rank] = [
            ("op", "p", "mm", "x", "gemm", flops, 0, "bfloat16"), ("post", "p", 0, post),
            ("wait", "p", 0),
        ]  # fmt: skip
    assumed, hardware = Assumptions(), HARDWARE["h100"]
    spans = Timeline(events, hardware, assumed).run()
    compute = 10**13 / (hardware.flops * assumed.matrices)
    link = hardware.nvlink * assumed.nvlink
    reduce = assumed.collective_seconds + 2 * 1 / 2 * 4 * MILLION / link
    assert [span.kind for span in spans[0]] == ["gemm", "wait", "all_reduce"]
    assert [span.kind for span in spans[1]] == ["gemm", "all_reduce"]
    for rank in (0, 1):
        assert spans[rank][-1].end == pytest.approx(compute + reduce)
