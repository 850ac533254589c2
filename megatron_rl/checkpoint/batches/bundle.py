"""A saved mini-batch, loaded into an engine of any layout (`megatron-rl replay-batch`).

bundle_header.py lists the files.  Shapes: T rows of a rank's micro-batch, l MoE layers of its
stage, t router rows, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.batch.pack import pack
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.checkpoint.all_ranks import layout_name
from megatron_rl.checkpoint.batches.bundle_header import (
    OF_EACH_ROW,
    OF_ROUTERS,
    device_name,
    read_header,
)
from megatron_rl.checkpoint.batches.bundle_sequences import (
    BundleError,
    SavedSequences,
    keys_of,
    rank_name,
    read_bundle_tensors,
    read_replica,
)
from megatron_rl.config import ParallelConfig
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import OldPass, ReplayMode
from megatron_rl.records.packed import MiniBatch
from megatron_rl.replay.layout import Rows
from megatron_rl.replay.router_shift import RouterRecord


class Bundle:
    """A bundle in the layout of `engine`.

    In the saved layout the micro-batches are the saved ones; in another one the sequences are
    packed again.
    """

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.engine, self.header = folder, engine, read_header(folder)

    @property
    def is_same_layout(self) -> bool:
        engine, header = self.engine, self.header
        saved = ParallelConfig.model_validate(header["config"]["parallel"])
        ours = engine.cfg.parallel
        return (
            (header["layout"], header["ranks"]) == (layout_name(engine), engine.parallel.world_size)
            and saved.layers_per_stage == ours.layers_per_stage
            and saved.use_sequence_parallel == ours.use_sequence_parallel
        )

    @property
    def is_exact(self) -> bool:
        """True where every bit of the results must be equal: same layout, same kind of device."""
        return self.is_same_layout and self.header["device"] == device_name(self.engine)

    @property
    def replay(self) -> ReplayMode:
        """Mode in which this engine replays routes.

        The experts that R2 recorded belong to the rows of the saved layout.  In another layout they
        come with the rollouts, as under R3.
        """
        mode = self.engine.cfg.replay.mode
        return "R3" if mode == "R2" and not self.is_same_layout else mode

    def load(self) -> tuple[MiniBatch, OldPass]:
        """Load this rank's part.  Collective.

        Raises BundleError where a file is missing or damaged.
        """
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
        tensors = {
            kind: tuple(values[key].to(parallel.device) for key in keys_of(values, kind))
            for kind in (*OF_EACH_ROW, *OF_ROUTERS, "recorded")
        }
        old = OldPass(
            tensors["logprobs"],
            recorded=tensors["recorded"] or None,
            mismatch=None,
            flips=tensors["flips"] or None,
            reference=tensors["reference"] or None,
            router=self._router_record([tensors[kind] for kind in OF_ROUTERS], len(parts)),
        )
        micro_batches = tuple(
            pack(samples, rows, mask_missing_routes=mask) for samples, rows in parts
        )
        counts = self.header["num_responses"], self.header["num_response_tokens"]
        samples = tuple(samples for samples, _ in parts)
        return MiniBatch(micro_batches, *counts, samples=samples), old

    def _packed_again(self) -> tuple[MiniBatch, OldPass]:
        engine, parallel = self.engine, self.engine.parallel
        saved = SavedSequences(self.folder, self.header["replicas"], self.header["ranks"])
        samples = saved.samples(with_record=self.replay != engine.cfg.replay.mode)
        batch = make_mini_batch(
            samples[parallel.dp_rank :: parallel.dp_size],
            max_tokens=engine.cfg.run.max_tokens_per_micro_batch,
            rule=engine.pack_rule,
            dp_group=parallel.dp_group,
        )
        tensors: dict[str, tuple[Tensor, ...]] = {"logprobs": (), "reference": ()}
        if parallel.is_last_stage:
            tensors = {kind: tuple(self._rows_of(saved, kind, batch)) for kind in tensors}
        router = None
        if engine.cfg.loss.switches.router_shift:
            router = self._router_record(
                [self._router_rows(saved, kind, batch) for kind in OF_ROUTERS],
                len(batch.micro_batches),
            )
        reference = tensors["reference"] or None
        # no recorded experts: under R2 the rollouts bring them here
        return batch, OldPass(tensors["logprobs"], None, None, None, reference, router)

    def _router_rows(
        self, saved: SavedSequences, kind: str, batch: MiniBatch
    ) -> tuple[Tensor, ...]:
        """Return [l, t, K] for each micro-batch, from the values that were saved by layer."""
        by_layer = [
            tuple(self._rows_of(saved, f"{kind} {layer}", batch))
            for layer in self.engine.layout.layers
        ]
        return tuple(torch.stack(layers) for layers in zip(*by_layer, strict=True))

    def _router_record(
        self, values: Sequence[Sequence[Tensor]], num_micro_batches: int
    ) -> RouterRecord | None:
        """Record the old-logprob pass of the routers where loss.router_shift needs it.

        `values` are, for each kind of OF_ROUTERS, [l, t, K] of each micro-batch.  Raises
        BundleError where the loss needs more than was saved.
        """
        engine = self.engine
        if not engine.cfg.loss.switches.router_shift:
            return None
        record = RouterRecord(engine.manager.scores_are_logits, engine.manager.id_dtype)
        ids, logprobs = values
        if engine.layout.layers and not len(ids) == len(logprobs) == num_micro_batches:
            raise BundleError(
                f"{self.folder}: no router probabilities, which loss.router_shift = true needs;"
                " save the mini-batch again (an earlier version saved none)"
            )
        for number, parts in enumerate(zip(ids, logprobs, strict=True)):
            record.put(number, *parts)
        return record

    def _rows_of(self, saved: SavedSequences, kind: str, batch: MiniBatch) -> Iterator[Tensor]:
        """Yield this rank's rows of each micro-batch, for its model or its routers; pads are 0.

        Yields nothing where no values of this kind were saved.
        """
        for samples, micro_batch in zip(batch.samples, batch.micro_batches, strict=True):
            values = saved.blank(kind, micro_batch.num_tokens)
            if values is None:
                return
            # not strict: pads have bounds, too
            for sample, start in zip(samples, micro_batch.cu_seqlens.tolist(), strict=False):
                rows = saved.values(sample.rollout.id, kind)
                if rows is None:
                    raise BundleError(
                        f"{self.folder}: {sample.rollout.id} has no {kind}, which other responses"
                        " have"
                    )
                values[start : start + len(rows)] = rows
            yield values[self._rows(kind, micro_batch.cu_seqlens)].to(self.engine.parallel.device)

    def _rows(self, kind: str, cu_seqlens: Tensor) -> Rows:
        layout = self.engine.layout
        return (
            layout.model_rows(cu_seqlens) if kind in OF_EACH_ROW else layout.router_rows(cu_seqlens)
        )
