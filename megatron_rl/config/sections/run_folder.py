"""[run], [checkpoint]: sizes of a step, what a run writes and what it continues from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_rl.config.base import AboveZero, Count, Positive, Section
from megatron_rl.config.device_limits import AutoSeconds
from megatron_rl.config.renamed import new_metric


class RunConfig(Section):
    """Sizes of a step, and the folder of the results."""

    # folder, seed and device
    name: Annotated[str, Field(min_length=1)] = "run"
    """Name of the run's folder, dir/name."""
    dir: Path = Path("runs")
    """Parent folder of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of weight initialisation, prompt order and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU."""
    # sizes of a run and of a step
    num_steps: Positive = 60
    """Total steps of the run, including those before a resume."""
    prompts_per_step: Positive = 16
    """P: prompts sampled per step, over all data-parallel replicas."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """G: responses per prompt."""
    num_mini_batches: Positive = 1
    """N: optimizer updates per step."""
    max_tokens_per_micro_batch: Positive = 4096
    """Rows per micro-batch and replica, padding included (a context-parallel rank holds 1/cp of
    them); a longer sequence gets a micro-batch of its own."""
    # late and dead ranks
    collective_timeout_minutes: AboveZero = 30.0
    """Longest time that ranks wait for one another, sampling included; then the run stops and
    names the late ranks."""
    silence_timeout_seconds: AboveZero = 300.0
    """A rank without a heartbeat for this long is considered dead: it is named, and the others
    stop."""
    # recording of steps
    save_batches: str = "on_anomaly"
    """Mini-batches saved for `megatron-rl replay-batch`: on_anomaly = where the gradient norm
    is too large or not finite, or KL(mu, pi_old) far from 0; "every N" = also the first of every
    N-th step; last = also the latest, without weights; off."""
    anomaly_grad_norm: AboveZero = 1000.0
    """Gradient norm before clipping above which a mini-batch is saved."""
    anomaly_kl: AboveZero = 1.0
    """Absolute value of KL(mu, pi_old) per token above which a mini-batch is saved."""
    trace: str = "off"
    """Steps of which every rank writes a timeline (docs/guides/look_at_a_run.md): off; last = the
    latest; "every N" = each N-th step."""
    log_format: Literal["text", "json"] = "text"
    """Lines on the terminal: text, or JSON objects for machines
    (docs/reference/token_data.md#log-lines)."""

    @property
    def save_batches_every(self) -> int:
        """N of save_batches = "every N"; 0 for every other value."""
        return period(self.save_batches)

    def traces(self, step: int) -> bool:
        """Return True if `step`, counted from 0, is traced."""
        every = period(self.trace)
        return self.trace == "last" or (every > 0 and (step + 1) % every == 0)

    @field_validator("save_batches")
    @classmethod
    def check_save_batches(cls, value: str) -> str:
        if not re.fullmatch(r"off|last|on_anomaly|every [1-9][0-9]*", value):
            raise ValueError(
                'must be off, on_anomaly, last or "every N" with N steps, such as "every 10"'
            )
        return value

    @field_validator("trace")
    @classmethod
    def check_trace(cls, value: str) -> str:
        if not re.fullmatch(r"off|last|every [1-9][0-9]*", value):
            raise ValueError('must be off, last or "every N" with N steps, such as "every 100"')
        return value


class CheckpointConfig(Section):
    """Times of saving, checkpoints to keep, and the one to continue from
    (docs/guides/checkpoints.md)."""

    every: Count = 0
    """Steps between checkpoints; 0 = only after the last step."""
    # resuming
    resume: bool = True
    """Continue from the newest checkpoint in the run directory, if there is one."""
    require: bool = False
    """Stop if there is nothing to resume, instead of starting over; `--resume` sets it."""
    load: Path | None = None
    """The checkpoint to continue from, of this or another run directory, instead of the newest."""
    allow_changes: tuple[str, ...] = ()
    """Keys (shell patterns) that may differ from the checkpoint's although they change training."""
    # saving
    async_save: bool = False
    """Write in the background; costs a copy of weights and optimizer state in host memory."""
    keep_last: Count = 0
    """Number of latest checkpoints to keep; 0 = all."""
    keep_every: Count = 0
    """keep_last > 0: also keep those whose step is a multiple of this; 0 = none."""
    best_metric: str | None = None
    """keep_last > 0: also keep the best checkpoint by this metric, e.g. eval/NAME/avg@4
    (docs/reference/metrics.md)."""
    best_mode: Literal["max", "min"] = "max"
    """The best value of best_metric is the largest (max) or the smallest (min)."""
    grace_seconds: AutoSeconds = "auto"
    """Seconds from SIGTERM or SIGUSR1 for the run to save and exit with code 85; auto: 25 on the
    CPU and under plain torchrun, else 600 (docs/guides/checkpoints.md#signals)."""
    export_hf: bool = True
    """Write the trained model as an HF checkpoint at the end."""

    def problems(self) -> Iterator[str]:
        if not self.resume and (self.require or self.load is not None):
            key = "require = true" if self.require else f"load = {self.load}"
            yield f"resume = false contradicts {key}; remove one of them"
        for key in ("keep_every", "best_metric"):
            if getattr(self, key) and not self.keep_last:
                yield (
                    f"{key} = {getattr(self, key)} has no effect: keep_last = 0 keeps all; set "
                    "keep_last"
                )
        if self.best_metric and (new := new_metric(self.best_metric)) != self.best_metric:
            yield (
                f"best_metric = {self.best_metric}: the metric was renamed to {new}; use the new "
                "name"
            )


def period(value: str) -> int:
    """Return N of "every N", 0 for everything else."""
    return int(value.split()[1]) if value.startswith("every ") else 0
