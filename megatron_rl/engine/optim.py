"""megatron-core's DDP, optimizer and learning-rate schedule.  Updates with a gradient that is not
finite are skipped.

Gradients are pure sums over micro-batches and data-parallel ranks: the loss already carries its
global denominator, and `calculate_per_token_loss = True` makes core's DDP sum instead of average.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import Config
from megatron_rl.engine.adam_fields import check_adam_fields
from megatron_rl.engine.core_fields import fields_of, make_core
from megatron_rl.engine.gradient_cosine import GradientCosine

OF_OPTIMIZER = "start_param_sync_for_bucket_group_subset"
"""core 0.19.2's method that gathers the parameters of a distributed optimizer."""


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a non-finite gradient."""


def wrap_ddp(
    chunks: list[GPTModel], config: TransformerConfig, cfg: Config, *, overlap: bool
) -> list[DistributedDataParallel]:
    """Wrap model chunks for gradient reduction in float32, and set the functions with which core's
    schedules finish gradients.

    overlap: the default of overlap_grad_reduce.
    """
    ddp_config = make_ddp_config(cfg, overlap=overlap)
    modules = [ModelInBF16(config, chunk) if config.bf16 else chunk for chunk in chunks]
    wrapped = [  # core buckets the first chunk only, as its own training loop does
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    config.finalize_model_grads_func = finalize_summed_grads
    # core reduces a bucket outside no_sync: after the last micro-batch, when its sum is complete
    if ddp_config.overlap_grad_reduce:
        functions = [module.no_sync for module in wrapped]
        config.no_sync_func = functions[0] if len(functions) == 1 else functions
    return wrapped


def make_ddp_config(cfg: Config, *, overlap: bool) -> DistributedDataParallelConfig:
    """Make core's settings of the gradient reduction, with the user's [megatron] fields.

    overlap: the default of overlap_grad_reduce.  Raises ConfigError for a field that core refuses.
    """
    main_grads = fields_of(OptimizerConfig, cfg.megatron.fields).get("main_grads_dtype")
    ours = dict(
        # core leaves it to its own training loop to apply main_grads_dtype
        grad_reduce_in_fp32=main_grads is not torch.bfloat16,
        use_distributed_optimizer=cfg.optim.distributed,
        overlap_grad_reduce=overlap,
        # Optimizer.apply checks the norm and skips the update; core's check would stop the job
        check_for_nan_in_grad=False,
    )
    return make_core(DistributedDataParallelConfig, ours, cfg.megatron.fields)


def make_optimizer_config(cfg: Config) -> OptimizerConfig:
    """Make core's settings of Adam, with the user's [megatron] fields.

    Raises ConfigError for a field that core refuses, or with which a run could not resume.
    """
    optim, bf16 = cfg.optim, cfg.model.dtype == "bfloat16"
    ours = dict(
        optimizer="adam",
        lr=optim.lr,
        min_lr=0.0,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=optim.distributed,
    )
    config = make_core(OptimizerConfig, ours, cfg.megatron.fields)
    check_adam_fields(config, cfg.megatron.fields)
    return config


def core_optimizers(core: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return core's optimizers of this rank.

    core keeps one for dense and one for expert parameters where their ranks differ.
    """
    return list(getattr(core, "chained_optimizers", [core]))


def torch_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that keep Adam's state: with optimizer_cpu_offload those of the host
    and of the device, else `optimizer` itself.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        return list(optimizer.sub_optimizers)
    return [optimizer]


class ModelInBF16(Float16Module):
    """core's wrapper for 16 bits without its float32 copy of the last stage's output, which would
    take the memory of [T, V / tp] numbers.

    float32 buffers stay float32: rounded to 16 bits, the biases that select experts would select
    other ones.
    """

    def __init__(self, config: TransformerConfig, module: GPTModel) -> None:
        # super().__init__ casts every tensor to 16 bits
        exact = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.dtype is torch.float32
        ]
        super().__init__(config, module)
        for owner, name, buffer in exact:
            setattr(owner, name, buffer)

    def forward(self, *inputs: object, **kwargs: object) -> torch.Tensor:
        return super().forward(*inputs, fp32_output=False, **kwargs)


def finalize_summed_grads(
    models: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: object
) -> None:
    """Call core's finalize_model_grads without a token count, by which it would divide: the loss
    has the denominator.
    """
    finalize_model_grads(models, None, **kwargs)


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one update; the weights did not change where it was skipped or empty."""

    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    skipped: bool
    """The gradient was not finite."""
    empty: bool = False
    """The gradient was exactly 0."""
    cosine: float | None = None
    """Cosine of its gradient and that of the last update; None: there was none, or it is not
    measured."""


class MeasuredOptimizer(ChainedOptimizer):
    """core's optimizer, whose `step` clips by the norm that `measure` computed, of the gradient
    that it prepared; core's computes both again.
    """

    measured: float | torch.Tensor | None = None
    """The norm as core returns it; None: `step` computes it."""

    def measure(self) -> float:
        """Prepare the gradient; return its global L2 norm before clipping.  Collective.

        The norm is not finite where an element of the gradient is not.
        """
        self.measured = None
        is_bad = self.prepare_grads()
        self.measured = self.get_grad_norm()
        grad_norm = float(self.measured)
        return math.nan if is_bad and math.isfinite(grad_norm) else grad_norm

    def prepare_grads(self) -> bool:
        return super().prepare_grads() if self.measured is None else False

    def get_grad_norm(self) -> float | torch.Tensor:
        return super().get_grad_norm() if self.measured is None else self.measured

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the parameters and gather them once; return whether the update succeeded.

        core gathers all of them after each of its optimizers, and experts have one of their own.
        """
        if self.config.overlap_param_gather_with_optimizer_step:
            return super().step_with_ready_grads()  # it gathers part of them in between
        with gathered_once(self.chained_optimizers):
            return super().step_with_ready_grads()


@contextmanager
def gathered_once(optimizers: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Gather the parameters of a model chunk at the end, once, if any optimizer asks for it.

    core 0.16.1 asks by a method of the chunk, core 0.19.2 by one of the optimizer.
    """
    asked: dict[int, Any] = {}

    def ask(chunks: Iterable[Any]) -> None:
        asked.update((id(chunk), chunk) for chunk in chunks)

    chunks = {id(c): c for optimizer in optimizers for c in getattr(optimizer, "model_chunks", ())}
    hidden = [(chunk, "start_param_sync", [chunk]) for chunk in chunks.values()] + [
        (optimizer, OF_OPTIMIZER, optimizer.model_chunks)
        for optimizer in optimizers
        if hasattr(optimizer, OF_OPTIMIZER)
    ]
    for owner, name, asked_for in hidden:
        # an attribute of the instance hides the method
        setattr(owner, name, partial(ask, asked_for))
    try:
        yield
    finally:
        for owner, name, _ in hidden:
            delattr(owner, name)
    for chunk in asked.values():
        chunk.start_param_sync()


class Optimizer:
    """megatron-core's optimizer with updates skipped where the gradient is not finite or 0."""

    def __init__(
        self, models: list[DistributedDataParallel], cfg: Config, *, total_updates: int
    ) -> None:
        config = cfg.optim
        # core uses gloo groups only to save and load the optimizer in its own formats
        chain = get_megatron_optimizer(
            make_optimizer_config(cfg), models, use_gloo_process_groups=False
        )
        if cfg.megatron.is_on("optimizer_cpu_offload"):
            # core makes each optimizer twice; hooks, in cycles, keep the first one's weights
            gc.collect()
        self.core = MeasuredOptimizer(chain.chained_optimizers)
        self.scheduler = OptimizerParamScheduler(
            self.core,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=0.0,
            lr_warmup_steps=config.warmup_updates,
            lr_decay_steps=max(total_updates, config.warmup_updates) + bool(config.warmup_updates),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        if config.warmup_updates:
            # core starts a warm-up at lr 0, so that the first update would train nothing: skip this
            # step.  lr_decay_steps is one longer for it, else the last update would have lr 0.
            self.scheduler.step(increment=1)
        device = next(models[0].parameters()).device
        self.cosine = GradientCosine(self.core.chained_optimizers, device)
        self._measures_cosine = config.measure_cosine
        self._models = models
        self._max_skipped = config.max_skipped_updates
        self.skipped_in_a_row = 0

    def zero_grad(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self.core.zero_grad()

    def prepare(self) -> float:
        """Return the gradient's global L2 norm before clipping.  Collective.

        It is not finite where an element of the gradient is not.
        """
        return self.core.measure()

    def apply(self, grad_norm: float) -> StepOutcome:
        """Clip and apply the gradient that `prepare` measured, or skip the update.

        Every rank decides by the same norm.  A gradient of exactly 0 (every response filtered,
        clipped or without advantage) is not applied: Adam would still move along its momentum, and
        weight decay would shrink the weights, for a batch without information.  Raises
        TrainingDiverged after `optim.max_skipped_updates` skipped updates in a row.
        """
        # a rank that owns no parameters has no groups
        lr = float(self.core.param_groups[0]["lr"]) if self.core.param_groups else 0.0
        if not math.isfinite(grad_norm):
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self._max_skipped:
                raise TrainingDiverged(
                    f"{self.skipped_in_a_row} updates in a row had gradient norm {grad_norm} "
                    "(optim.max_skipped_updates); the weights are as before the first of them"
                )
            return StepOutcome(grad_norm, lr, skipped=True)
        self.skipped_in_a_row = 0
        if grad_norm == 0:
            return StepOutcome(grad_norm, lr, skipped=False, empty=True)
        # before `step` clips the gradient in place
        cosine = self.cosine.measure() if self._measures_cosine else None
        self.core.step()
        self.scheduler.step(increment=1)
        return StepOutcome(grad_norm, lr, skipped=False, cosine=cosine)
