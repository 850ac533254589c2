"""The rows of supervised training, in the place of sampled rollouts, and their loss in evaluation.

A row is the response of a group of one, with a reward of 1: batches, packing, optimizer,
checkpoints and metrics are those of RL (docs/guides/sft.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config
from megatron_rl.config.exact import as_written
from megatron_rl.data.demonstrations import (
    Demonstration,
    DemonstrationFile,
    load_demonstrations,
    shared_rows,
)
from megatron_rl.data.prompt_files import PromptPlace, eval_file, train_files
from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.data.prompts import DataError, load_tokenizer
from megatron_rl.data.training_order import make_stream, source_line, used_up_line
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.forward import to_device
from megatron_rl.engine.pass_results import OldPass
from megatron_rl.engine.provider import provider_spec
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import RolloutGroup
from megatron_rl.records.packed import MiniBatch, Sample
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl.rollout.saved.demonstrations_of_run import demonstrations_of_run
from megatron_rl.rollout.unique_ids import with_unique_ids
from megatron_rl.trainer.rollout_source import SourceWithoutServers
from megatron_rl.trainer.step_meter import StepMeter

RL_NAMES = {
    "sft/loss": "train/loss",
    "train/entropy": "train/entropy",
    "train/nonfinite_frac": "train/nonfinite_frac",
}
"""Metrics of an update that have a meaning without a sampler -> their names in RL."""
SFT_NAMES = {in_rl: name for name, in_rl in RL_NAMES.items()}
OF_A_SAMPLER = ("train/", "logratio/", "first_order/")

DemonstrationFiles = Mapping[str, DemonstrationFile]


@dataclass(frozen=True)
class SftRows:
    """The rows of a run, read before anything else."""

    cfg: Config
    """The configuration, with the steps that sft.epochs takes."""
    train: PromptStream
    """The order in which the rows are trained on."""
    sets: DemonstrationFiles
    """Rows by the name of their evaluation set."""
    lines: Sequence[str]
    """Lines for the log."""


def read_rows(cfg: Config) -> SftRows:
    """Read the rows of training and of evaluation.

    Raises ValueError for the broken rows of all files, and for rows that the model cannot compute.
    """
    train, sets = load_files(cfg)
    if cfg.sft.epochs is not None:
        rows = sum(len(file.rows) for file in train.values())
        # the last step may begin another epoch
        steps = max(1, math.ceil(as_written(cfg.sft.epochs) * rows / cfg.run.prompts_per_step))
        cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"num_steps": steps})})
    stream = make_stream(cfg.data, {name: file.rows for name, file in train.items()}, cfg.run.seed)
    lines = [source_line(cfg.data, name) + file.line for name, file in train.items()]
    for name, file in sets.items():
        lines.append(f"eval.sets.{name}: {file.line}")
        if count := shared_rows(list(train.values()), file):
            of = f"{count} of {len(file.rows)} rows of eval.sets.{name}"
            lines.append(f"WARNING {of} are also trained on")
    return SftRows(cfg, stream, sets, [*lines, *used_up_line(stream, cfg.run)])


def load_files(cfg: Config) -> tuple[DemonstrationFiles, DemonstrationFiles]:
    """Return the rows of data.train, by source, and of eval.sets, by name."""
    tokenizer = load_tokenizer(cfg.model.path)
    render = Chat(cfg.agent.renderer, tokenizer).demonstration if cfg.agent.renderer else None
    spec = provider_spec(cfg.model)
    errors: list[str] = []

    def load(places: Mapping[str, PromptPlace]) -> Iterator[tuple[str, DemonstrationFile]]:
        for name, (path, data, source) in places.items():
            try:
                if path.is_dir():
                    file = demonstrations_of_run(path, cfg.sft, tokenizer, source)
                else:
                    file = load_demonstrations(path, data, cfg.sft, tokenizer, render, source)
                check_fits(file, spec.vocab_size, spec.max_positions)
                yield name, file
            except DataError as error:
                errors.append(str(error))

    places = train_files(cfg.data)
    set_places = {name: eval_file(cfg, name) for name in cfg.eval.sets}
    is_of_run = any(path.is_dir() for path, *_ in (*places.values(), *set_places.values()))
    if cfg.sft.min_reward is not None and not is_of_run:
        errors.append(
            f"sft.min_reward = {cfg.sft.min_reward:g} has no effect on rows of files; remove it, or"
            " name the folder of a run in data.train"
        )
    train, sets = dict(load(places)), dict(load(set_places))
    if errors:
        raise DataError("\n".join(errors))
    return train, sets


def check_fits(file: DemonstrationFile, vocab_size: int, max_positions: int) -> None:
    """Raise DataError for a row with tokens or positions that the model does not have."""
    for row in file.rows:
        if int(row.tokens.max()) >= vocab_size:
            raise DataError(
                f"{file.path}, row {row.id}: token id {row.tokens.max()} must be below the model's"
                f" vocabulary, {vocab_size}; set model.path to a model with this tokenizer"
            )
        if len(row.tokens) > max_positions:
            raise DataError(
                f"{file.path}, row {row.id}: {len(row.tokens)} tokens, the model has"
                f" {max_positions} positions; lower sft.max_row_tokens, with"
                " data.on_long_prompt = drop"
            )


@dataclass
class SftSource(SourceWithoutServers):
    """The rows of each step; no server, no weight sync."""

    cfg: Config
    engine: Engine
    meter: StepMeter
    rows: SftRows
    policy_version: int = 0

    def __post_init__(self) -> None:
        self.prompts = self.rows.train

    def start(self, first_step: int) -> None:
        return

    def is_used_up(self) -> bool:
        needed = self.cfg.run.prompts_per_step
        return self.prompts.num_available(needed) < needed

    def sample(self, step: int) -> list[RolloutGroup]:
        parallel = self.engine.parallel
        taken = self.prompts.take(self.cfg.run.prompts_per_step)
        groups = [
            RolloutGroup(row, (row.rollout,), np.ones(1, np.float32))
            for row in taken[parallel.dp_rank :: parallel.dp_size]
            if isinstance(row, Demonstration)
        ]
        # a step may have a row twice, at the border of two epochs
        return with_unique_ids(groups)

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        if not self.engine.parallel.is_replica_leader:
            return
        rollouts = [group.rollouts[0] for group in groups]
        tokens = sum(rollout.response_length for rollout in rollouts)
        self.meter.sums.add_total("sft/tokens", tokens)
        self.meter.sums.add_total("perf/step_tokens", sum(len(r.tokens) for r in rollouts))

    def finish_step(self) -> None:
        self.meter.sums = self.meter.sums.renamed(name_of)
        if self.engine.parallel.rank == 0:
            for name, value in self.prompts.metrics().items():
                self.meter.sums.add(name, value)

    def evaluate(self) -> dict[str, float]:
        """Return eval/NAME/loss of every set: the mean of -log pi over all its learned tokens."""
        sums = MetricSums()
        for name, file in self.rows.sets.items():
            for batch in self._batches(file.rows[: self.cfg.eval.max_prompts]):
                self._add_loss(sums, name, batch)
        return sums.reduce(dist.group.WORLD, self.engine.parallel.device) if self.rows.sets else {}

    def _batches(self, rows: Sequence[Demonstration]) -> Iterator[MiniBatch]:
        """Yield this replica's share of the rows, run.prompts_per_step rows at a time."""
        parallel, rule = self.engine.parallel, self.engine.pack_rule
        size = self.cfg.run.prompts_per_step
        for first in range(0, len(rows), size):
            samples = [Sample(row.rollout, 1.0) for row in rows[first : first + size]]
            # every replica needs rows: copies of one, which do not count, fill the last batch
            multiple = parallel.dp_size * rule.count_multiple
            copy = replace(samples[0], in_loss=False)
            samples += [copy] * (-len(samples) % multiple)
            yield make_mini_batch(
                samples[parallel.dp_rank :: parallel.dp_size],
                max_tokens=self.cfg.run.max_tokens_per_micro_batch,
                rule=rule,
                dp_group=parallel.dp_group,
                node=parallel.node,
            )

    def _add_loss(self, sums: MetricSums, name: str, batch: MiniBatch) -> None:
        """Add the loss of a mini-batch of set `name`; nothing off the last pipeline stage."""
        engine = self.engine
        # the statistics of that pass compare with a sampler, which there is none of
        old = engine.old_logprobs(batch, MetricSums(), replay="none")
        parts = to_device(
            batch.micro_batches, engine.layout, engine.parallel.device, with_kept=False
        )
        # tensor ranks have equal values: a mean does not change where all of them count
        for logprobs, part in zip(old.logprobs, parts, strict=False):
            total = -logprobs.double()[part.loss_mask].sum()
            sums.add(f"eval/{name}/loss", total, part.loss_mask.sum())


def without_old_pass(engine: Engine, batch: MiniBatch) -> OldPass:
    """Return log pi_old := log mu = 0 of every row, which the loss of SFT does not read: no pass is
    computed for it.
    """
    logprobs: tuple[Any, ...] = ()
    if engine.parallel.is_last_stage:
        parts = to_device(
            batch.micro_batches, engine.layout, engine.parallel.device, with_kept=False
        )
        logprobs = tuple(part.rollout_logprobs for part in parts)
    return OldPass(logprobs, recorded=None, mismatch=None, flips=None)


def name_of(metric: str) -> str | None:
    """Return the name of an update's metric in SFT, None for one that compares with a sampler."""
    if not metric.startswith(OF_A_SAMPLER):
        return metric
    return SFT_NAMES.get(metric)
