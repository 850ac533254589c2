"""The program of one virtual rank: the parts of a training step, in their order.

The parts are the engine's own; no weights are loaded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# before megatron-core: makes it work without CUDA, and quiet
from megatron_rl.distributed import make_parallel

# isort: split
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from megatron_rl.checkpoint.state import sharded_state
from megatron_rl.config import Config, ParallelConfig
from megatron_rl.engine import provider
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.plan.grid import place
from megatron_rl.plan.memory import (
    WORKSPACE,
    checkpoint_bytes_of_rank,
    device_recorded_bytes,
    device_route_bytes,
    rank_memory,
    recorded_bytes,
    route_bytes,
    route_ids,
    update_bytes,
    wants_te,
)
from megatron_rl.records.packed import MiniBatch, Sample
from megatron_rl.weights.hf.export import RankParameters, batches
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl_tools.rehearse.groups import World
from megatron_rl_tools.rehearse.rollouts import make_batch


@dataclass(frozen=True)
class Rehearsal:
    """What every virtual rank does."""

    cfg: Config
    samples: Sequence[Sample]
    """The sequences of an update, on one replica."""


@dataclass
class RankReport:
    """What one virtual rank found, as plain data."""

    rank: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds of this process, which say nothing about a GPU."""
    planned: dict[str, int] = field(default_factory=dict)
    """Bytes of the plan (plan/memory.py) by kind; "in Adam": at the peak of the optimizer; "ids not
    rehearsed": expert ids of the step's other micro-batches, which are part of "routes"; "recorded,
    not rehearsed": those of them that stay during the update of Adam."""
    num_parameters: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence of an update, on one replica."""
    tokens: list[int] = field(default_factory=list)
    """Rows of each micro-batch on all context ranks."""
    exported: dict[str, int] = field(default_factory=dict)
    checkpoint: dict[str, int] = field(default_factory=dict)
    """Tensors and bytes of model and optimizer in this rank's part of a checkpoint.  Ranks with the
    same weights share the writing of these, which the plan counts."""
    record: dict[str, Any] = field(default_factory=dict)
    """Recorder.data()."""


class PhaseRecorder(Protocol):
    """What notes the phases of a step: the rehearsal's Recorder, or a meter of a real device."""

    phase: str

    def begin(self, phase: str) -> None:
        """Start a phase; the previous one ends."""

    def end(self) -> None:
        """End the phase that runs, if there is one."""

    def data(self) -> dict[str, Any]:
        """Return the record as plain data, for JSON."""


class Program:
    """Runs a rehearsal on one rank; `__call__` is what ranks.run_ranks wants.

    `run` alone runs the same parts on a real device.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal

    def __call__(self, world: World) -> RankReport:
        cfg = self.rehearsal.cfg
        world.represent = lambda objects, rank: represent(objects, rank, cfg.parallel, world.size)
        # the weights have no values, and nothing is read
        provider.NativeProvider.load = lambda self, chunks: None  # type: ignore[method-assign]
        return self.run(world.gpu.recorder, world.rank, world.size)

    def run(self, recorder: PhaseRecorder, rank: int, world_size: int) -> RankReport:
        """Run all parts on cfg.run.device, in the job of torchrun's variables."""
        cfg = self.rehearsal.cfg
        self.report, self.recorder = RankReport(rank), recorder
        self._begin("build")
        parallel = make_parallel(cfg.parallel, device=cfg.run.device)
        engine = Engine(cfg, parallel, total_updates=10)
        batch = make_batch(engine, self.rehearsal.samples)
        self._describe(engine, batch, world_size)
        self._step(engine, batch)
        self._export(engine)
        self._checkpoint(engine)
        if cfg.rollout.release_memory:
            self._offload(engine)
        self._end()
        self.report.record = self.recorder.data()
        return self.report

    def _begin(self, phase: str) -> None:
        self._end()
        self.report.seconds[phase] = -time.monotonic()
        self.recorder.begin(phase)

    def _end(self) -> None:
        """End the phase that runs, if there is one."""
        if self.report.seconds:
            self.report.seconds[self.recorder.phase] += time.monotonic()
        self.recorder.end()

    def _describe(self, engine: Engine, batch: MiniBatch, world_size: int) -> None:
        report = self.report
        report.lengths = [
            len(sequence.tokens)
            for sample in self.rehearsal.samples
            for sequence in sample.rollout.sequences
        ]
        report.tokens = [part.num_tokens for part in batch.micro_batches]
        where = (engine.spec, engine.cfg, world_size, engine.parallel.pp_rank)
        planned = rank_memory(*where)
        recorded = device_recorded_bytes(*where)
        in_adam = planned.weights + planned.gradients + planned.optimizer + update_bytes(*where)
        ids = route_ids(engine.spec, engine.cfg, engine.parallel.pp_rank, sum(report.tokens))
        ids_here = route_bytes(engine.spec, engine.cfg, ids, 1)
        recorded_here = recorded_bytes(engine.spec, engine.cfg, ids, 1)
        report.planned = {
            **dataclasses.asdict(planned),
            "total": planned.total,
            "in Adam": in_adam + recorded + WORKSPACE * wants_te(engine.cfg),
            "checkpoint": checkpoint_bytes_of_rank(*where),
            "ids not rehearsed": max(0, device_route_bytes(*where) - ids_here),
            "recorded, not rehearsed": max(0, recorded - recorded_here),
        }
        report.num_parameters = sum(
            parameter.numel() for model in engine.models for parameter in model.parameters()
        )

    def _step(self, engine: Engine, batch: MiniBatch) -> None:
        """Two updates with their old-logprob passes: the second has Adam's state beside it."""
        mode, sums = engine.cfg.replay.mode, MetricSums()
        for update in ("first", "second"):
            self._begin(f"old-logprob, {update}")
            old = engine.old_logprobs(batch, sums, replay=mode)
            self._begin(f"gradient, {update}")
            norm = engine.compute_gradient(batch, old, sums, replay=mode)
            self._begin(f"optimizer, {update}")
            engine.apply_gradient(norm, batch, sums)
        self._begin("metrics")
        engine.mismatch([old])
        sums.reduce(torch.distributed.group.WORLD, engine.parallel.device)

    def _export(self, engine: Engine) -> None:
        """The weights, in the buckets of a push to servers."""
        self._begin("export")
        rollout, rank = engine.cfg.rollout, engine.parallel.rank
        most = rollout.weight_sync_bucket_mb << 20
        parts = engine.export_parts(rollout.weight_sync_sources)
        number = total = sent = 0
        for part in batches(parts, most, of_one_dtype=True):
            number, total = number + 1, total + part.num_bytes
            if part.source != rank:
                continue
            bucket = Bucket(engine.parallel.device, number)
            for item in part.tensors:
                assert item.tensor is not None  # this rank is their source
                bucket.add(item.name, item.tensor, torch.bfloat16)
            sent += bucket.flat().numel()
        self.report.exported = {"buckets": number, "bytes": total, "from this rank": sent}

    def _checkpoint(self, engine: Engine) -> None:
        """What a save writes of model and optimizer; nothing is written."""
        self._begin("checkpoint")
        state, _ = save_preprocess(sharded_state(engine), validate_access_integrity=False)
        tensors = [part for part in nested_values(state) if isinstance(part, ShardedTensor)]
        self.report.checkpoint = {
            "tensors": len(tensors),
            "bytes": sum(tensor.data.nbytes for tensor in tensors),
            "bytes of the optimizer": sum(
                tensor.data.nbytes for tensor in tensors if tensor.key.startswith("optimizer.")
            ),
        }

    def _offload(self, engine: Engine) -> None:
        """What a colocated run frees for the servers, and takes back."""
        for phase, action in (
            ("free training", engine.offload.free_training),
            ("free weights", engine.offload.free_weights),
            ("restore", engine.offload.restore),
        ):
            self._begin(phase)
            action()


def represent(objects: dict[int, Any], rank: int, parallel: ParallelConfig, size: int) -> Any:
    """Return what a rank that is not rehearsed would send: the object of one of its stage."""
    missing = place(rank, parallel, size)
    twins = [other for other in objects if place(other, parallel, size).pp == missing.pp]
    value = objects[twins[0] if twins else rank]
    if not isinstance(value, RankParameters):
        return value
    start = rank - missing.tp
    etp_start = rank - missing.etp
    return dataclasses.replace(
        value,
        stage=missing.pp,
        ep_rank=missing.ep,
        tp=tuple(range(start, start + parallel.tp)),
        etp=tuple(range(etp_start, etp_start + parallel.expert_tp)),
    )
