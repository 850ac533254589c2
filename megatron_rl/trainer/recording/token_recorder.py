"""Records what the trainer knew about every sampled token of the groups that rollout.save_tensors
chooses.

It observes the router's own choices in the old-logprob pass, and the terms of the loss in the
update.  Nothing waits for the device before the step is trained.  Then every rank of a replica adds
its layers and rows of the chosen sequences to one table on the leader, which writes it in a thread
(token_files.py).  docs/reference/token_data.md says what is written.
Shapes: S tokens of a sequence, R sampled, T rows of a micro-batch on this rank, B its sequences, n
the chosen rows here, L MoE layers of the model, l this stage's, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import ObserveTokens, UpdateTokens
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.records.packed import MiniBatch, PackedBatch, Sample
from megatron_rl.replay.layout import Rows, indices
from megatron_rl.replay.mismatch import Mismatch
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice
from megatron_rl.trainer.recording.token_files import Flag, SequenceTokens, Table, TokenFiles

SUMS = ("count", "kl", "kl_k3", "clipped", "weight", "entropy", "loss", "flips", "pairs")
MAXIMA = ("max_log_ratio", "max_staleness")
"""Columns of a sequence's summary, over its tokens in the loss: `add_tokens` and, for the last two
sums, `add_flips` fill them, line_of in token_files.py reads them.
"""
NUM_SUMS, NUM_MAXIMA = len(SUMS), len(MAXIMA)


@dataclass(frozen=True)
class Places:
    """The chosen rows that this rank has."""

    index: Tensor
    """int64 [n], places among this rank's rows, on the device."""
    at: np.ndarray
    """int64 [n], places among all chosen rows of the micro-batch."""
    count: int
    """Number of all chosen rows of the micro-batch."""

    @classmethod
    def of(cls, wanted: Sequence[np.ndarray], rows: Rows, device: torch.device) -> Places:
        """Return the places of the chosen rows that this rank has.

        wanted: the packed rows of each chosen sequence, ascending.  rows: this rank's rows, in its
        order.
        """
        local = indices(rows).numpy()
        # an empty first part: a micro-batch may have no chosen sequence, and numpy joins no empty
        # list
        packed = np.concatenate([local[:0], *wanted])
        index = np.flatnonzero(np.isin(local, packed))
        return cls(
            torch.from_numpy(index).to(device), np.searchsorted(packed, local[index]), len(packed)
        )


class Part:
    """One micro-batch: what this rank knows of its chosen sequences, and sums over each of its
    sequences.
    """

    def __init__(self, engine: Engine, batch: PackedBatch, samples: Sequence[Sample]) -> None:
        layout, device = engine.layout, engine.parallel.device
        starts = batch.cu_seqlens.tolist()
        self.samples = samples
        chosen = [
            (sample.rollout, start)
            for sample, start in zip(samples, starts, strict=False)
            if sample.save_tokens
        ]
        router_rows = layout.router_rows(batch.cu_seqlens)
        inputs = [start + np.arange(len(rollout.tokens) - 1) for rollout, start in chosen]
        self.inputs = Places.of(inputs, router_rows, device)
        predicts = [start + rollout.sampled - 1 for rollout, start in chosen]
        self.sampled = Places.of(predicts, layout.model_rows(batch.cu_seqlens), device)
        self.sequence_of_row = batch.sequence_ids[indices(router_rows)].to(device)
        shape = (len(layout.layers), len(self.inputs.index))
        self.own_experts = torch.zeros(
            *shape, layout.top_k, dtype=engine.manager.id_dtype, device=device
        )
        self.margins = torch.zeros(shape, dtype=torch.float16, device=device)
        self.flipped = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.values = torch.zeros(len(Table.VALUES), len(self.sampled.index), device=device)
        # one more row than sequences: the pads add to the last one
        self.sums = torch.zeros(len(samples) + 1, NUM_SUMS, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(samples) + 1, NUM_MAXIMA, dtype=torch.float64, device=device)
        self.has_routes = False

    def add_routes(self, local: int, live: Tensor, margins: Tensor, flipped: Tensor) -> None:
        """Keep the chosen rows of one router call: live [t, K], margins [t], flipped [t]."""
        self.own_experts[local] = live[self.inputs.index].to(self.own_experts.dtype)
        self.margins[local] = margins[self.inputs.index].half()
        self.flipped[local] = flipped[self.inputs.index].to(torch.uint8)

    def add_flips(self, flips: Tensor, compared: Tensor) -> None:
        """Add flips [t], numbers of layers that flip, and compared [t], the rows with a route."""
        # rows with a route x layers of this stage: the compared pairs
        counts = torch.stack([flips, compared * len(self.own_experts)], dim=1).double()
        self.sums[:, -2:].index_add_(0, self._slots(self.sequence_of_row), counts)

    def add_tokens(self, tokens: UpdateTokens) -> None:
        """Keep the terms of the loss of this rank's rows."""
        loss, batch = tokens.loss, tokens.micro_batch
        mask, clipped = loss.mask, loss.clipped_high | loss.clipped_low
        weight = torch.where(mask, loss.weight, 0.0)
        columns = (
            tokens.old_logprobs,
            tokens.logprobs,
            weight,
            loss.ratio,
            tokens.entropy,
            tokens.shares,
            flags(tokens),
        )
        self.values = torch.stack(columns)[:, self.sampled.index]
        old_logprobs = tokens.old_logprobs.double()
        gap = torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0)
        stale = torch.where(mask, tokens.logprobs - old_logprobs, 0.0)
        entropy = torch.where(mask, tokens.entropy, 0.0)
        # KL(mu, pi_old) by two estimators of a sample of mu: k1 = log mu - log pi_old = -gap, and
        # k3
        k3 = torch.expm1(gap) - gap
        slots = self._slots(batch.sequence_ids)
        summed = torch.stack([mask, -gap, k3, clipped, weight, entropy, tokens.shares], 1)
        self.sums[:, :-2].index_add_(0, slots, summed)
        largest = torch.stack([gap.abs(), stale.abs()], dim=1)
        self.maxima.scatter_reduce_(0, slots[:, None].expand(-1, NUM_MAXIMA), largest, "amax")

    def _slots(self, ids: Tensor) -> Tensor:
        # pads go to the row after the last sequence
        return torch.where(ids >= 0, ids, len(self.samples))


def flags(tokens: UpdateTokens) -> Tensor:
    """Return [T], the sum of the flags that the loss knows; TokenFiles adds the others."""
    loss = tokens.loss
    known = {
        Flag.CLIPPED_HIGH: loss.clipped_high,
        Flag.CLIPPED_LOW: loss.clipped_low,
        Flag.BOUNDED: loss.bounded,
        Flag.WEIGHT_MASKED: loss.mask & ~loss.in_weight_mask,
        Flag.REJECTED: loss.rejected,
        Flag.NOT_FINITE: tokens.micro_batch.loss_mask & ~loss.mask,
    }
    return torch.stack([flag * where for flag, where in known.items()]).sum(0)


class TokenRecorder:
    """Records the tokens of a step.  Without rollout.save_tensors every method does nothing."""

    def __init__(self, cfg: Config, engine: Engine, files: FileWriter) -> None:
        parallel = engine.parallel
        self.engine = engine
        # the same draw as the recorder of rollouts: both halves have the same groups
        self.choice = GroupChoice(
            cfg.rollout.saved_share, cfg.run.seed, parallel.dp_rank, parallel.dp_size
        )
        mask_missing = engine.pack_rule.mask_missing_routes
        self.files = TokenFiles(
            cfg.run_dir, files, dp_rank=parallel.dp_rank, mask_missing_routes=mask_missing
        )
        self._parts: dict[int, list[Part]] = {}  # index of a mini-batch -> its micro-batches

    @contextmanager
    def old_pass(self, batch: MiniBatch) -> Iterator[None]:
        """Record the router's own choices in the old-logprob pass of `batch` that runs inside.

        The expert ids of the batch are not read.
        """
        if not self.choice.share:
            yield
            return
        parts = [
            Part(self.engine, part, samples)
            for part, samples in zip(batch.micro_batches, batch.samples, strict=True)
        ]
        self._parts[batch.index] = parts

        def observe(
            local: int, micro_batch: int, live: Tensor, margins: Tensor, flipped: Tensor
        ) -> None:
            parts[micro_batch].add_routes(local, live, margins, flipped)

        with self.engine.manager.with_mismatch_hook(observe):
            yield

    def observer(self, index: int, mismatch: Mismatch | None) -> ObserveTokens | None:
        """Return what observes the update of mini-batch `index`, for Engine.compute_gradient.

        mismatch: OldPass.mismatch of its old-logprob pass.
        """
        if not self.choice.share:
            return None
        parts = self._parts[index]
        if mismatch is not None:
            for part, flips, compared in zip(parts, mismatch.flips, mismatch.compared, strict=True):
                part.has_routes = True
                part.add_flips(flips, compared)
        return partial(observe_tokens, parts)

    def finish(self, step: int) -> None:
        """Collect the tokens on the leader of the replica and write them.  Collective.

        It is called after the updates of `step`, which is counted from 1.
        """
        # in one order on all ranks: every table is a collective
        everything = [
            (number, part) for number, parts in sorted(self._parts.items()) for part in parts
        ]
        self._parts = {}
        if not everything:
            return
        tables = [self._table(part) for _, part in everything]
        summaries = self._summaries([part for _, part in everything])
        if self.engine.parallel.is_replica_leader:
            rows = iter(summaries.tolist())
            sequences = [
                SequenceTokens(number, sample, next(rows), table)
                for (number, part), table in zip(everything, tables, strict=True)
                for sample in part.samples
            ]
            self.files.write(step, sequences)

    def _table(self, part: Part) -> Table | None:
        """Return the chosen rows of a micro-batch, complete on the leader; None without any."""
        if not part.sampled.count:
            return None
        engine, parallel = self.engine, self.engine.parallel
        layers = len(engine.spec.moe_layers) if part.has_routes else 0
        ids = part.own_experts.cpu().numpy()
        table = Table.zeros(
            layers, part.inputs.count, engine.spec.top_k, part.sampled.count, ids.dtype
        )
        # without sequence parallelism the tensor-parallel ranks have the same rows
        if part.has_routes and (engine.layout.sequence_parallel or parallel.tp_rank == 0):
            here = np.ix_(np.array(engine.layout.layers, np.int64), part.inputs.at)
            table.own_experts[here], table.margins[here] = ids, part.margins.cpu().numpy()
            table.flipped[here] = part.flipped.cpu().numpy()
        if parallel.tp_rank == 0:  # the stages before the last add zeros
            table.values[:, part.sampled.at] = part.values.cpu().numpy()
        # one rank has each byte and the others add 0: the sum is a gather
        if parallel.replica_group.size() > 1:
            dist.reduce(
                torch.from_numpy(table.memory),
                parallel.replica_leader,
                group=parallel.replica_group,
            )
        return table

    def _summaries(self, parts: Sequence[Part]) -> Tensor:
        """Return float64 [sequences, NUM_SUMS + NUM_MAXIMA], complete on the leader."""
        engine, parallel = self.engine, self.engine.parallel
        # [:-1]: the last row is that of the pads
        here = torch.cat([torch.cat([part.sums, part.maxima], dim=1)[:-1] for part in parts]).cpu()
        # tensor-parallel ranks have the same rows of the loss, and of the routers unless they are
        # sequence-parallel: rank 0 counts them
        if parallel.tp_rank and not engine.layout.sequence_parallel:
            here.zero_()
        if parallel.tp_rank:
            here[:, : NUM_SUMS - 2] = here[:, NUM_SUMS:] = 0
        group = parallel.replica_group
        if group.size() == 1:
            return here
        ranks = (
            [torch.empty_like(here) for _ in range(group.size())]
            if parallel.is_replica_leader
            else None
        )
        dist.gather(here, ranks, parallel.replica_leader, group=group)
        # gathered, not reduced: some columns are sums, others maxima
        stacked = torch.stack(ranks or [here])
        return torch.cat([stacked[:, :, :NUM_SUMS].sum(0), stacked[:, :, NUM_SUMS:].amax(0)], dim=1)


def observe_tokens(parts: Sequence[Part], tokens: UpdateTokens) -> None:
    parts[tokens.index].add_tokens(tokens)
