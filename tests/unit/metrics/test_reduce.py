"""MetricSums, alone and over two real gloo processes."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl.metrics.histogram import tabulate
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.rollout.server.ports import free_port


def test_means_are_sums_over_counts_and_maxima_keep_nan():
    sums = MetricSums()
    sums.add("mean", 3.0, 2)
    sums.add("mean", torch.tensor(5.0), torch.tensor(6))
    sums.add("count", torch.tensor(True), torch.tensor(4))
    sums.add("nothing", 0.0, 0)
    sums.add_max("max", 1.0)
    sums.add_max("max", torch.tensor(-3.0))
    sums.add_max("broken", math.nan)
    sums.add_max("broken", torch.tensor(1.0))
    got = sums.reduce(None, "cpu")
    assert got["mean"] == 1.0 and got["count"] == 0.25 and got["max"] == 1.0
    assert math.isnan(got["nothing"]) and math.isnan(got["broken"])
    assert MetricSums().reduce(None, "cpu") == {}


def test_counts_are_added_exactly():
    sums = MetricSums()
    for _ in range(3):
        sums.add("x", torch.tensor(2.0**24), torch.tensor(2.0**24 + 2))
        sums.add("x", torch.tensor(1.0), torch.tensor(1.0))
    assert sums.reduce(None, "cpu")["x"] == (3 * 2**24 + 3) / (3 * (2**24 + 2) + 3)


def rank_main(rank, port, queue):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sums = MetricSums()
    sums.add("both", [1.0, 8.0][rank], [1, 2][rank])  # 9 / 3, not the mean of 1 and 4
    sums.add_max("largest", [-2.0, -1.0][rank])
    sums.add_max("infinite", [math.inf, 0.0][rank])
    sums.add_max("broken", [math.nan, 7.0][rank])
    for name, there in (
        ("logratio/staleness", True),
        ("logratio/train_infer", rank == 1),
    ):  # the last stage alone knows ratios
        values = torch.tensor([[1.0, 3.0], [-4.0]][rank])
        spread = tabulate(
            values, torch.ones_like(values).bool(), torch.zeros_like(values, dtype=torch.long), 1
        )
        if there:
            sums.add_histogram(name, spread)
    if rank == 1:
        sums.add("a_leader_only", 6.0, 4)
        sums.add_max("z_leader_only", 5.0)
    queue.put(
        (rank, sums.reduce(dist.group.WORLD, "cpu"), MetricSums().reduce(dist.group.WORLD, "cpu"))
    )
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_may_count_different_things():
    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    ranks = [context.Process(target=rank_main, args=(rank, port, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    got = [queue.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    for _, metrics, nothing in got:
        assert math.isnan(metrics.pop("broken")) and nothing == {}
        spread = {name: metrics.pop(name) for name in list(metrics) if name.startswith("logratio/")}
        assert (spread["logratio/staleness_mean"], spread["logratio/staleness_max"]) == (0.0, 4.0)
        assert (spread["logratio/train_infer_mean"], spread["logratio/train_infer_max"]) == (
            -4.0,
            4.0,
        )
        assert spread["logratio/staleness_p99"] == pytest.approx(4.0, rel=0.02)
        assert metrics == {
            "both": 3.0, "largest": -1.0, "infinite": math.inf, "a_leader_only": 1.5,
            "z_leader_only": 5.0,
        }  # fmt: skip
