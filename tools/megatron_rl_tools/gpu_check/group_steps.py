"""The step that joins, uses, leaves and aborts the groups of a weight sync, from GPU to GPU.

A source of a job is a rank; here one process has a group with the server for each source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path

import torch

from megatron_rl.config import Config
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.config.rules.server_gpus import visible_gpus
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.engine.engine import Engine
from megatron_rl.launch import nccl
from megatron_rl.rollout.server.process import start_server
from megatron_rl.weights.hf.export import HFTensor
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import Calls, ServerAccess, Servers
from megatron_rl.weights.sync.transports import Distributed, Transport, TransportSettings, Turn
from megatron_rl_tools.gpu_check.material import QWEN3_MOE, check_step_config, engine_of
from megatron_rl_tools.gpu_check.result import Figure, Findings, NotPossible, StepOutcome
from megatron_rl_tools.gpu_check.server_steps import (
    parity,
    passes,
    server_rollout_settings,
    sglang_version,
)
from megatron_rl_tools.gpu_check.steps import StepPlace
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint

SOURCES = (1, 4)
REPEATS = 3
"""Weight syncs over groups that exist already."""
Export = Callable[[], Iterable[HFTensor]]
Check = Callable[[int, str], None]
"""Check the server's weights of this version; the text says after what."""


class SeveralSources(Transport):
    """Sources in one process, which send the buckets in turn, each over its own group."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.sources = [Distributed(device, Ranks()) for _ in range(number)]
        self.refused: int | None = None
        """Number of the bucket that the servers must refuse, once."""

    def send(self, servers: Servers, bucket: Bucket, version: int, turn: Turn) -> Calls:
        if bucket.number == self.refused:
            self.refused = None
            # without a session a server answers 400 and does not join the broadcast
            servers.post("/end_weight_update", {})
        source = self.sources[bucket.number % len(self.sources)]
        return source.send(servers, bucket, version, turn)

    def leave(self, servers: Servers, urls: Sequence[str]) -> None:
        for source in self.sources:
            source.leave(servers, urls)


def weight_sync_group(place: StepPlace) -> StepOutcome:
    """Start a server with other weights than the trainer's for each number of sources."""
    if place.device == "cuda" and torch.cuda.device_count() < 2:
        raise NotPossible(
            "nccl needs two GPUs, one for the trainer and one for the server; torch sees"
            f" {torch.cuda.device_count()}"
        )
    findings = Findings(figures={"sglang": sglang_version(place)})
    nccl.set_defaults(os.environ)  # before this process's first communicator
    served, trained = (place.folder / name for name in ("served", "trained"))
    for seed, path in enumerate((served, trained)):
        path.mkdir()
        write_random_checkpoint(QWEN3_MOE, path, seed=seed, dtype=torch.bfloat16)
    settings = server_rollout_settings(place) | {"weight_sync": "distributed", "server_args": ()}
    cfg = check_step_config(
        trained, place.device, rollout=settings, replay={"mode": "none", "measure": True}
    )
    gpus = visible_gpus(os.environ, 2)[1:2] if place.device == "cuda" else ()
    with engine_of(cfg) as engine:
        for number in SOURCES:
            with start_server(
                served,
                cfg.rollout,
                device=place.device,
                log_path=place.folder / f"server{number}.log",
                seed=0,
                want_routes=True,
                gpus=gpus,
            ) as server:
                server.wait_until_ready()
                sync_from(engine, cfg, server.url, number, findings)
    return findings.outcome


def sync_from(engine: Engine, cfg: Config, url: str, number: int, findings: Findings) -> None:
    def check(version: int, after: str) -> None:
        report = parity(engine, url, cfg, version)
        text = f"{number} sources, after {after}: {report.line(parity_limits(cfg, 'bfloat16'))}"
        findings.check(passes(report, cfg), text)

    findings.check(
        not passes(parity(engine, url, cfg, 0), cfg),
        f"{number} sources: the parity check passed although the server had other weights",
    )
    pusher = WeightPusher(
        ServerAccess([url], 120.0),
        PushedWeights(cfg.model.path, torch.bfloat16),
        TransportSettings(
            "distributed",
            bucket_mb=1,
            device=engine.parallel.device,
            disk_dir=Path(cfg.model.path) / "unused",
        ),
    )
    figures = join_and_leave(pusher, lambda: engine.export_parts(1), number, check, findings)
    findings.figures[f"{number} sources"] = figures


def join_and_leave(
    pusher: WeightPusher, export: Export, number: int, check: Check, findings: Findings
) -> dict[str, Figure]:
    """Push with so many sources: first, repeated, after leaving, aborted, and after that.

    Returns seconds, and on GPUs what the groups take of the server's memory.
    """
    transport = pusher.transport = SeveralSources(pusher.device, number)
    versions, before = count(1), server_memory(pusher.device)
    reports = [pusher.push(export, next(versions)) for _ in range(1 + REPEATS)]
    joined = server_memory(pusher.device)
    check(len(reports), "repeated weight syncs")
    transport.leave(pusher.servers, pusher.servers.urls)
    left = server_memory(pusher.device)
    rejoined = pusher.push(export, version := next(versions))
    check(version, "leaving the groups")
    findings.check(
        rejoined.num_buckets > number,
        f"{rejoined.num_buckets} buckets are too few for {number} sources and an abort",
    )
    transport.refused = number  # the second bucket of source 0: its group exists
    try:
        pusher.push(export, next(versions))
        findings.check(False, f"{number} sources: a refused bucket did not stop the weight sync")
    except WeightPushError as error:
        print(f"aborted, as it must be: {error}")
    repaired = pusher.push(export, version := next(versions))
    check(version, "an aborted one")
    pusher.close()
    figures: dict[str, Figure] = {
        "buckets": reports[0].num_buckets,
        "MiB": reports[0].num_bytes / 2**20,
        "seconds, joining": reports[0].seconds,
        "seconds, repeated": min(report.seconds for report in reports[1:]),
        "seconds, after leaving": rejoined.seconds,
        "seconds, after the abort": repaired.seconds,
    }
    if pusher.device.type == "cuda":
        # buckets that the server's allocator keeps are among them
        figures["GiB of the server's GPU, by joining"] = (joined - before) / 2**30
        figures["GiB of the server's GPU, after leaving"] = (left - before) / 2**30
    return figures


def server_memory(device: torch.device) -> int:
    """Return the bytes in use on the server's GPU, the second that this process sees; 0 on CPUs."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(1)
    return total - free
