"""Writes one mini-batch with everything that its update is computed from.

bundle_header.py lists the files.  Shapes: T rows of a rank's micro-batch, l MoE layers of its
stage, t router rows, K top-k.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.batch.transfer import encode_samples
from megatron_rl.checkpoint.all_ranks import gather_values, layout_name, on_every_rank
from megatron_rl.checkpoint.batches.bundle_header import (
    BUNDLE,
    OF_ROUTERS,
    VERSION,
    Header,
    device_name,
)
from megatron_rl.checkpoint.batches.bundle_sequences import rank_name, replica_name
from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.config import plain_values
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import OldPass
from megatron_rl.metrics.sinks import finite
from megatron_rl.records.packed import MiniBatch
from megatron_rl.replay.layout import indices
from megatron_rl.weights.hf.write import write_hf_checkpoint


@dataclass(frozen=True)
class Results:
    """Results of a gradient's computation, the same on every rank."""

    metrics: Mapping[str, float | None]
    grad_norm: float | None
    gradients: Sequence[str]
    """Digest of each rank's gradients."""

    @property
    def loss(self) -> float | None:
        return self.metrics.get("train/loss")


@dataclass(frozen=True)
class BundleNote:
    """The parts of a bundle's header that are for people."""

    step: int
    """Counted from 0."""
    reason: str
    with_weights: bool
    """The bundle has the policy's weights before the update."""
    weights: str = ""
    """Text that says where the weights are, for a bundle without them."""
    rollouts_of: str = ""
    """See OptionalKeys.rollouts_of."""


def results_of(engine: Engine, metrics: Mapping[str, float], grad_norm: float) -> Results:
    """Return the results of the gradient that the engine holds now.  Collective.

    `metrics` are the reduced metrics of the update.
    """
    known = {name: finite(value) for name, value in sorted(metrics.items())}
    return Results(known, finite(grad_norm), gather_values(gradient_digest(engine)))


def gradient_digest(engine: Engine) -> str:
    """Return the BLAKE2b of this rank's gradients after their reduction, parameter by parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for model in engine.models:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            # bytes: replay-batch compares every bit
            digest.update(parameter.main_grad.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def write_bundle(
    folder: Path, engine: Engine, batch: MiniBatch, old: OldPass, results: Results, note: BundleNote
) -> None:
    """Write `folder`, complete or not at all.  Collective.

    Call it before the update: `weights/` is the policy that the gradient belongs to.  Raises
    CheckpointError on every rank where one could not write.
    """
    # renamed at the end: a folder with a bundle's name is complete
    temporary = folder.with_name(f".{folder.name}.part")
    header = header_of(engine, batch, results, note)
    try:
        call_on_rank_0(lambda: renew(temporary))
        on_every_rank(lambda: write_rank(temporary, engine, batch, old))
        if note.with_weights:
            on_every_rank(lambda: write_weights(temporary / "weights", engine))
        call_on_rank_0(lambda: finish(temporary, folder, header))
    except CheckpointError:
        if engine.parallel.rank == 0:  # makes room again on a full disk
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def header_of(engine: Engine, batch: MiniBatch, results: Results, note: BundleNote) -> Header:
    return {
        "version": VERSION,
        "reason": note.reason,
        "step": note.step,
        "update": batch.index,
        "layout": layout_name(engine),
        "device": device_name(engine),
        "ranks": engine.parallel.world_size,
        "replicas": engine.parallel.dp_size,
        "num_responses": batch.num_responses,
        "num_response_tokens": batch.num_response_tokens,
        "policy_version": batch.policy_version,
        "rollouts_of": note.rollouts_of,
        "loss": results.loss,
        "grad_norm": results.grad_norm,
        "metrics": dict(results.metrics),
        "gradients": list(results.gradients),
        "weights": "weights" if note.with_weights else note.weights,
        "config": plain_values(engine.cfg),
    }


def call_on_rank_0(work: Callable[[], None]) -> None:
    """Call `work` on rank 0.  Collective: its error is raised as CheckpointError on every rank."""
    on_every_rank(lambda: work() if dist.get_rank() == 0 else None)


def write_weights(folder: Path, engine: Engine) -> None:
    stream = engine.export_parts(engine.parallel.world_size)
    write_hf_checkpoint(stream, engine.cfg.model.path, folder, Ranks.of(engine.parallel))


def renew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def finish(temporary: Path, folder: Path, header: Header) -> None:
    (temporary / BUNDLE).write_text(json.dumps(header, indent=1) + "\n")
    # `last` replaces the mini-batch before it, and a resumed run those that it trains again
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def write_rank(folder: Path, engine: Engine, batch: MiniBatch, old: OldPass) -> None:
    """Write the files of this rank: its values, and the sequences where it leads a replica."""
    parallel = engine.parallel
    if parallel.is_replica_leader:
        save_file(encoded_sequences(batch), folder / replica_name(parallel.dp_rank))
    values = rank_values(engine, batch, old)
    values["place"] = torch.tensor([parallel.dp_rank, *engine.layout.layers])
    save_file(values, folder / rank_name(parallel.rank))


def encoded_sequences(batch: MiniBatch) -> dict[str, Tensor]:
    """Return the encoded sequences, and the rows of each, by "NUMBER:" of the micro-batch."""
    tensors = {}
    for number, (samples, micro_batch) in enumerate(
        zip(batch.samples, batch.micro_batches, strict=True)
    ):
        tensors[f"{number}:samples"] = torch.from_numpy(encode_samples(samples))
        tensors[f"{number}:rows"] = micro_batch.cu_seqlens.diff()
    return tensors


def rank_values(engine: Engine, batch: MiniBatch, old: OldPass) -> dict[str, Tensor]:
    """Return the old-logprob pass of this rank, and the packed rows that its values belong to."""
    parts = {
        "logprobs": old.logprobs,
        "reference": old.reference,
        "flips": old.flips,
        "recorded": old.recorded,
    }
    values = {
        # safetensors refuses tensors with gaps
        f"{number}:{kind}": value.contiguous().cpu()
        for kind, micro_batches in parts.items()
        for number, value in enumerate(micro_batches or ())
    }
    layout = engine.layout
    for number, micro_batch in enumerate(batch.micro_batches):
        if old.router is not None:
            # nothing is stacked on a stage without routers
            for kind, value in zip(OF_ROUTERS, old.router.stacked(number) or (), strict=False):
                values[f"{number}:{kind}"] = value.cpu()
        bounds = micro_batch.cu_seqlens
        values[f"{number}:model_rows"] = indices(layout.model_rows(bounds))
        values[f"{number}:router_rows"] = indices(layout.router_rows(bounds))
    return values
