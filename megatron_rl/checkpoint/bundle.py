"""One mini-batch on disk, with everything that its update is computed from: what `megatron-rl
replay-batch` reads.

A bundle is a folder with
    bundle.json                why it was saved, step and update, layout, configuration, and the
                               results
    replica_DDDDD.safetensors  of data-parallel replica D: per micro-batch its sequences, advantages
                               and rows
    rank_RRRRR.safetensors     of rank R: its place, and per micro-batch log pi_old, log pi_ref and
                               flips of its rows, and the experts that R2 recorded; with
                               loss.router_shift the experts of the old-logprob pass and the
                               router's log-probabilities of them
    weights/                   HF checkpoint of the policy before the update, unless saved without
Shapes: T rows of a rank's micro-batch, l MoE layers of its stage, t router rows, K top-k.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.batch.pack import pack
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.batch.transfer import encode_samples
from megatron_rl.checkpoint.bundle_sequences import (
    BundleError,
    SavedSequences,
    keys_of,
    rank_name,
    read_bundle_tensors,
    read_replica,
    replica_name,
)
from megatron_rl.checkpoint.checkpointer import (
    CheckpointError,
    gather_values,
    layout_name,
    on_every_rank,
)
from megatron_rl.config import ParallelConfig, plain_values
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import OldPass, ReplayMode
from megatron_rl.metrics.sinks import finite
from megatron_rl.records import MiniBatch
from megatron_rl.replay.layout import Rows, indices
from megatron_rl.replay.router_shift import RouterRecord
from megatron_rl.weights.hf.write import write_hf_checkpoint

BUNDLE = "bundle.json"
VERSION = 1
OF_EACH_ROW = ("logprobs", "reference", "flips")  # of OldPass, on the last stage
OF_ROUTERS = ("router_ids", "router_logprobs")  # of OldPass.router: [l, t, K]


class Age(TypedDict, total=False):
    """Of bundle.json, which earlier versions wrote without it.  policy_version: see MiniBatch."""

    policy_version: int | None


class Header(Age):
    """bundle.json.  step and update count from 0; device: "cpu" or the GPU's name; metrics: null
    where not finite; gradients: digest of every rank."""

    version: int
    reason: str
    step: int
    update: int
    layout: str
    device: str
    ranks: int
    replicas: int
    num_responses: int
    num_response_tokens: int
    loss: float | None
    grad_norm: float | None
    metrics: dict[str, float | None]
    gradients: list[str]
    weights: str
    config: dict[str, dict[str, object]]


@dataclass(frozen=True)
class Results:
    """What a gradient's computation gave; the same on every rank."""

    metrics: Mapping[str, float | None]
    grad_norm: float | None
    gradients: Sequence[str]

    @property
    def loss(self) -> float | None:
        return self.metrics.get("train/loss")


def results_of(engine: Engine, metrics: Mapping[str, float], grad_norm: float) -> Results:
    """Collective.  metrics: the reduced metrics of the update."""
    known = {name: finite(value) for name, value in sorted(metrics.items())}
    return Results(known, finite(grad_norm), gather_values(gradient_digest(engine)))


def gradient_digest(engine: Engine) -> str:
    """blake2b of this rank's gradients after their reduction, parameter by parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for model in engine.models:
        for parameter in model.parameters():
            digest.update(parameter.main_grad.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def device_name(engine: Engine) -> str:
    device = engine.parallel.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# Writing


def write_bundle(
    folder: Path,
    engine: Engine,
    batch: MiniBatch,
    old: OldPass,
    results: Results,
    *,
    step: int,
    reason: str,
    with_weights: bool,
    weights: str,
) -> None:
    """Write `folder`, complete or not at all; collective.  Before the update: `weights/` is what
    the gradient belongs to.

    weights: where else they are, for people, without `with_weights`.  Raises CheckpointError on
    every rank where one could not write.
    """
    temporary = folder.with_name(f".{folder.name}.part")
    header: Header = {
        "version": VERSION,
        "reason": reason,
        "step": step,
        "update": batch.index,
        "layout": layout_name(engine),
        "device": device_name(engine),
        "ranks": engine.parallel.world_size,
        "replicas": engine.parallel.dp_size,
        "num_responses": batch.num_responses,
        "num_response_tokens": batch.num_response_tokens,
        "policy_version": batch.policy_version,
        "loss": results.loss,
        "grad_norm": results.grad_norm,
        "metrics": dict(results.metrics),
        "gradients": list(results.gradients),
        "weights": "weights" if with_weights else weights,
        "config": plain_values(engine.cfg),
    }
    try:
        call_on_rank_0(lambda: renew(temporary))
        on_every_rank(lambda: write_rank(temporary, engine, batch, old))
        if with_weights:
            on_every_rank(lambda: write_weights(temporary / "weights", engine))
        call_on_rank_0(lambda: finish(temporary, folder, header))
    except CheckpointError:
        if engine.parallel.rank == 0:  # what a full disk has room for again
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def call_on_rank_0(work: Callable[[], None]) -> None:
    """Collective: its error is raised as CheckpointError on every rank."""
    on_every_rank(lambda: work() if dist.get_rank() == 0 else None)


def write_weights(folder: Path, engine: Engine) -> None:
    stream = engine.export_parts(engine.parallel.world_size)
    write_hf_checkpoint(stream, engine.cfg.model.path, folder, Ranks.of(engine.parallel))


def renew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def finish(temporary: Path, folder: Path, header: Header) -> None:
    (temporary / BUNDLE).write_text(json.dumps(header, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def write_rank(folder: Path, engine: Engine, batch: MiniBatch, old: OldPass) -> None:
    parallel = engine.parallel
    if parallel.is_replica_leader:
        tensors = {}
        for number, (samples, micro_batch) in enumerate(
            zip(batch.samples, batch.micro_batches, strict=True)
        ):
            tensors[f"{number}:samples"] = torch.from_numpy(encode_samples(samples))
            tensors[f"{number}:rows"] = micro_batch.cu_seqlens.diff()
        save_file(tensors, folder / replica_name(parallel.dp_rank))
    parts = {
        "logprobs": old.logprobs,
        "reference": old.reference,
        "flips": old.flips,
        "recorded": old.recorded,
    }
    bounds, layout = [micro_batch.cu_seqlens for micro_batch in batch.micro_batches], engine.layout
    values = {
        f"{number}:{kind}": value.contiguous().cpu()
        for kind, every in parts.items()
        for number, value in enumerate(every or ())
    }
    if old.router is not None:
        for number in range(len(bounds)):
            stacked = old.router.stacked(number)
            values |= {
                f"{number}:{kind}": value.cpu()
                for kind, value in zip(OF_ROUTERS, stacked or (), strict=False)
            }
    values |= {
        f"{number}:model_rows": indices(layout.model_rows(bound))
        for number, bound in enumerate(bounds)
    }
    values |= {
        f"{number}:router_rows": indices(layout.rows(bound)) for number, bound in enumerate(bounds)
    }
    values["place"] = torch.tensor([parallel.dp_rank, *layout.layers])
    save_file(values, folder / rank_name(parallel.rank))


# Reading


def read_header(folder: Path) -> Header:
    """Raises BundleError for a folder that is no bundle of this version."""
    try:
        header: Header = json.loads((folder / BUNDLE).read_text())
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{folder}: not a saved mini-batch: {error}; name a folder of RUN/batches"
        ) from error
    if header.get("version") != VERSION or (missing := Header.__required_keys__ - header.keys()):
        raise BundleError(
            f"{folder / BUNDLE}: version {header.get('version')} (known: {VERSION}), missing"
            f" {sorted(missing)}"
            if header.get("version") == VERSION
            else (
                f"{folder / BUNDLE}: version {header.get('version')}, must be {VERSION}; use the"
                " program that wrote it"
            )
        )
    return header


class Bundle:
    """A bundle in the layout of `engine`: the same micro-batches where that is the saved one, else
    packed again.
    """

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.engine, self.header = folder, engine, read_header(folder)

    @property
    def is_same_layout(self) -> bool:
        saved, here = (
            ParallelConfig.model_validate(self.header["config"]["parallel"]),
            self.engine.cfg.parallel,
        )
        return (
            (self.header["layout"], self.header["ranks"])
            == (layout_name(self.engine), self.engine.parallel.world_size)
            and saved.layers_per_stage == here.layers_per_stage
            and saved.use_sequence_parallel == here.use_sequence_parallel
        )

    @property
    def is_exact(self) -> bool:
        """Whether every bit must be equal: this is what computed it."""
        return self.is_same_layout and self.header["device"] == device_name(self.engine)

    @property
    def replay(self) -> ReplayMode:
        """What R2 recorded belongs to the rows of its layout; in another it is given with the
        rollouts, as under R3.
        """
        mode = self.engine.cfg.replay.mode
        return "R3" if mode == "R2" and not self.is_same_layout else mode

    def load(self) -> tuple[MiniBatch, OldPass]:
        """This rank's part.  Raises BundleError where a file is missing or damaged.  Collective."""
        batch, old = self._as_saved() if self.is_same_layout else self._packed_again()
        header = self.header
        whole = replace(
            batch,
            index=header["update"],
            num_responses=header["num_responses"],
            num_response_tokens=header["num_response_tokens"],
            policy_version=header.get("policy_version"),
        )
        return whole, old

    def _as_saved(self) -> tuple[MiniBatch, OldPass]:
        parallel, mask = self.engine.parallel, self.engine.pack_rule.mask_missing_routes
        parts = read_replica(self.folder, parallel.dp_rank)
        values = read_bundle_tensors(self.folder / rank_name(parallel.rank))
        every = {
            kind: tuple(values[key].to(parallel.device) for key in keys_of(values, kind))
            for kind in (*OF_EACH_ROW, *OF_ROUTERS, "recorded")
        }
        old = OldPass(
            every["logprobs"],
            recorded=every["recorded"] or None,
            mismatch=None,
            flips=every["flips"] or None,
            reference=every["reference"] or None,
            router=self._router_record([every[kind] for kind in OF_ROUTERS], len(parts)),
        )
        micro_batches = tuple(
            pack(samples, rows, mask_missing_routes=mask) for samples, rows in parts
        )
        counts = self.header["num_responses"], self.header["num_response_tokens"]
        return MiniBatch(
            micro_batches, *counts, samples=tuple(samples for samples, _ in parts)
        ), old

    def _packed_again(self) -> tuple[MiniBatch, OldPass]:
        engine, parallel = self.engine, self.engine.parallel
        saved = SavedSequences(self.folder, self.header["replicas"], self.header["ranks"])
        batch = make_mini_batch(
            saved.samples(with_record=self.replay != engine.cfg.replay.mode)[
                parallel.dp_rank :: parallel.dp_size
            ],
            max_tokens=engine.cfg.run.max_tokens_per_micro_batch,
            rule=engine.pack_rule,
            dp_group=parallel.dp_group,
        )
        every: dict[str, tuple[Tensor, ...]] = {"logprobs": (), "reference": ()}
        if parallel.is_last_stage:
            every = {kind: tuple(self._rows_of(saved, kind, batch)) for kind in every}
        router = None
        if engine.cfg.loss.switches.router_shift:
            layers = engine.layout.layers
            found = [
                [tuple(self._rows_of(saved, f"{kind} {layer}", batch)) for layer in layers]
                for kind in OF_ROUTERS
            ]
            # [kind][layer][micro-batch] -> [kind][micro-batch], its layers stacked
            stacked = [
                tuple(torch.stack(parts) for parts in zip(*every_layer, strict=True))
                for every_layer in found
            ]
            router = self._router_record(stacked, len(batch.micro_batches))
        return batch, OldPass(
            every["logprobs"], None, None, None, every["reference"] or None, router
        )

    def _router_record(
        self, found: Sequence[Sequence[Tensor]], num_micro_batches: int
    ) -> RouterRecord | None:
        """found: of every kind of OF_ROUTERS, [l, t, K] per micro-batch.

        Raises BundleError where the loss needs more.
        """
        engine = self.engine
        if not engine.cfg.loss.switches.router_shift:
            return None
        record = RouterRecord(engine.manager.scores_are_logits, engine.manager.id_dtype)
        ids, values = found
        if engine.layout.layers and not len(ids) == len(values) == num_micro_batches:
            raise BundleError(
                f"{self.folder}: no router probabilities, which loss.router_shift = true needs;"
                " save the mini-batch again (an earlier version saved none)"
            )
        for number, parts in enumerate(zip(ids, values, strict=True)):
            record.put(number, *parts)
        return record

    def _rows_of(self, saved: SavedSequences, kind: str, batch: MiniBatch) -> Iterator[Tensor]:
        """This rank's rows of every micro-batch, of its model or routers; nothing where none were
        saved.  Pads are 0.
        """
        for samples, micro_batch in zip(batch.samples, batch.micro_batches, strict=True):
            values = saved.blank(kind, micro_batch.num_tokens)
            if values is None:
                return
            for sample, start in zip(samples, micro_batch.cu_seqlens.tolist(), strict=False):
                if (found := saved.values(sample.rollout.id, kind)) is None:
                    raise BundleError(
                        f"{self.folder}: {sample.rollout.id} has no {kind}, which other responses"
                        " have"
                    )
                values[start : start + len(found)] = found
            yield values[self._rows(kind, micro_batch.cu_seqlens)].to(self.engine.parallel.device)

    def _rows(self, kind: str, cu_seqlens: Tensor) -> Rows:
        layout = self.engine.layout
        return layout.model_rows(cu_seqlens) if kind in OF_EACH_ROW else layout.rows(cu_seqlens)
