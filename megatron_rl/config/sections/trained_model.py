"""[model], [parallel], [optim], [megatron]: the trained model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from megatron_rl.config.base import AboveZero, Count, NotNegative, Positive, Section

Beta = Annotated[float, Field(ge=0, lt=1)]
BOOLEAN = TypeAdapter(bool)  # made once: making one takes longer than a thousand validations


class ModelConfig(Section):
    """The model that is trained, and the computation of its layers."""

    path: Path
    """HF checkpoint directory (config.json, tokenizer, safetensors)."""
    provider: Literal["native", "bridge", "auto"] = "native"
    """Builder, loader and exporter of the model: native = this program's tables; bridge =
    Megatron-Bridge, for every architecture that it knows (Python 3.12); auto = native where it
    can, else bridge."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the trained weights; the optimizer keeps a float32 copy of bfloat16 ones."""
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the layers; auto: transformer_engine if it is installed, there is a GPU,
    and dtype is bfloat16."""
    batch_format: Literal["thd", "bshd"] = "thd"
    """thd: a micro-batch's sequences are packed end to end; bshd: padded to its longest, one row of
    a batch each."""
    # memory
    recompute: Literal["none", "full", "block", "selective"] = "none"
    """Activation recompute: full = every layer; block = the first recompute_layers of each
    pipeline stage; selective = MoE layers."""
    recompute_layers: Positive = 1
    """full: layers per activation checkpoint; block: recomputed layers of each of the pp x vp
    stages."""
    fused_lm_head: bool = False
    """Log-probs directly from hidden states, a chunk of rows at a time: less memory, more time."""
    # experts
    router_dtype: Literal["fp32", "fp64", "model"] = "fp32"
    """Precision of the router's scores; model: that of the weights."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Way of tokens to the ranks of their experts."""

    @property
    def is_exact(self) -> bool:
        """True if results are compared at float32 accuracy, so that TF32 is not allowed."""
        return self.dtype == "float32"

    def problems(self) -> Iterator[str]:
        if self.is_exact and self.layer_spec == "transformer_engine":
            yield (
                "layer_spec = transformer_engine with dtype = float32: TransformerEngine computes "
                "float32 matrix products in TF32, with 10 bits of mantissa; use auto or local, or "
                "dtype = bfloat16"
            )


class ParallelConfig(Section):
    """Split of the model over ranks."""

    tp: Positive = 1
    """Tensor parallel size."""
    pp: Positive = 1
    """Pipeline parallel size."""
    vp: Positive = 1
    """Virtual pipeline stages per pipeline rank."""
    cp: Positive = 1
    """Context parallel size."""
    ep: Positive = 1
    """Expert parallel size."""
    # exceptions from the defaults of megatron-core
    layers_per_stage: tuple[Positive, ...] = ()
    """Decoder layers of each of the pp x vp stages, in forward order; stage i is on pipeline rank i
    % pp.

    Default: equal shares."""
    etp: Positive | None = None
    """Expert tensor parallel size; default tp, as megatron-core does."""
    sequence_parallel: bool | None = None
    """Default: on when tp > 1."""
    share_host_memory: bool = True
    """The ranks of a replica on one node have one copy of its rollouts."""

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    def problems(self) -> Iterator[str]:
        if self.vp > 1 and self.pp == 1:
            yield f"parallel.vp = {self.vp} needs parallel.pp > 1: it interleaves pipeline stages"
        stages = self.pp * self.vp  # every pipeline rank holds vp of them
        if self.layers_per_stage and len(self.layers_per_stage) != stages:
            yield (
                f"parallel.layers_per_stage = {list(self.layers_per_stage)} must name {stages} "
                f"stages = parallel.pp x vp: write {stages} numbers"
            )
        if self.sequence_parallel and self.tp == 1:
            yield (
                "parallel.sequence_parallel = true has no effect with parallel.tp = 1: it shards "
                "rows over tensor ranks; remove the key, or set tp > 1"
            )
        # without it core's MoE works only for ep = 1 with etp = 1, and etp defaults to tp
        if self.sequence_parallel is False and self.tp > 1 and (self.ep > 1 or self.expert_tp > 1):
            yield (
                "parallel.sequence_parallel = false with tp > 1: megatron-core's MoE needs it; "
                "remove the key"
            )


class OptimConfig(Section):
    """Adam and its learning rate."""

    lr: NotNegative = 1e-6
    """Learning rate; 0 is allowed (measurement runs)."""
    # Adam
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.95
    """Decay of the second moment."""
    eps: AboveZero = 1e-8
    """Adam's epsilon."""
    weight_decay: NotNegative = 0.0
    """AdamW's; biases and norms have none."""
    # limits and schedule
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it. 0 = no limit."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0, linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine reach 0 after the last update. Skipped and
    empty updates do not count: after them it ends above 0."""
    distributed: bool = True
    """megatron-core's distributed optimizer (state sharded over data-parallel ranks)."""
    max_skipped_updates: Positive = 3
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""
    measure_cosine: bool = False
    """Measure the cosine of the gradients of consecutive updates (optim/grad_cosine).  Keeps a
    copy of the gradient."""


class MegatronConfig(Section):
    """Fields of megatron-core by their own names: of TransformerConfig,
    DistributedDataParallelConfig and OptimizerConfig.

    Any field that neither the checkpoint nor another setting defines, for example
    moe_permute_fusion, recompute_modules, gradient_accumulation_fusion, or overlap_grad_reduce, on
    by default on GPUs.  Types and names are those of the installed version.  A field with which
    routing replay is not exact is refused; the log names those with which it is untested.
    """

    # engine/core_fields.py checks names and types: this package imports no core
    model_config = ConfigDict(extra="allow")

    @property
    def fields(self) -> dict[str, object]:
        """The fields of core, with their values as written."""
        return dict(self.model_extra or {})

    def is_on(self, name: str, *, default: bool = False) -> bool:
        """Return a field as core will read it.  Raises ValueError where it is no boolean."""
        return BOOLEAN.validate_python(self.fields.get(name, default))
