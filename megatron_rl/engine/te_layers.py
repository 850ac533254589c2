"""TransformerEngine's layers on torch, for machines without it, with the same parameters, names,
shards and results.

Megatron-Bridge identifies parameters by their names in TransformerEngine's layers.  With these
classes in place of TransformerEngine's, core builds the layer spec of a GPU on a CPU, and Bridge's
tables apply unchanged.  The code is written for correctness, not speed: experts are a loop.

Shapes: t rows of this rank.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rl.engine import linear_attention
from megatron_rl.engine.model import RMSNorm
from megatron_rl.engine.te_attention import TEDotProductAttention
from megatron_rl.models.spec import ModelError


class TENorm(RMSNorm):
    """RMSNorm; with layernorm_zero_centered_gamma its parameter is the weight minus 1."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        if config.normalization != "RMSNorm":
            raise ModelError(
                f"normalization = {config.normalization}: without TransformerEngine only RMSNorm"
                " is supported; run on a GPU with TransformerEngine"
            )
        super().__init__(config, hidden_size, eps)
        self.is_zero_centered = bool(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.is_zero_centered)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel layer that first normalises its input; the norm's weight is a parameter of
    the layer itself.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = TENorm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.eps = norm.weight, norm.eps
        self.is_zero_centered = norm.is_zero_centered

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        x = rms_norm(x, self.layer_norm_weight, self.eps, self.is_zero_centered)
        return super().forward(x, *args, **kwargs)


def rms_norm(x: Tensor, weight: Tensor, eps: float, is_zero_centered: bool) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight + 1 if is_zero_centered else weight) * wide.to(x.dtype)


class TELinear(torch.nn.Module):
    """A layer with full weights on every tensor rank ("duplicated"); under sequence parallelism a
    rank computes its part of the rows.
    """

    parallel_mode: None = None  # TransformerEngine's value for a duplicated layer

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        bias: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias, "core uses it for latent attention only"
        # core passes None to these layers
        self.tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(
            # any finite values: the checkpoint replaces them
            torch.empty(output_size, input_size, dtype=config.params_dtype).normal_(0, 0.02)
        )
        # core reads both attributes when it reduces gradients
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.allreduce = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        assert metadata is not None  # core passes the groups in it
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class TEGroupedLinear(torch.nn.Module):
    """One linear layer per local expert (weight0, weight1, ..., bias0, ...) over rows sorted by
    expert.
    """

    partition_dim: int
    """Dimension of a weight that is sharded over the expert tensor ranks."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        self.groups = pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        # then gradients of experts are reduced over their own replicas, not over all ranks
        is_apart = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for index in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype).normal_(0, 0.02)
            )
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            weight.allreduce = not is_apart  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)
            if bias:
                values = torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                # a bias is sharded where the outputs are
                set_tensor_model_parallel_attributes(values, self.partition_dim == 0, 0, 1)
                values.allreduce = not is_apart  # type: ignore[attr-defined]
                self.register_parameter(f"bias{index}", values)

    def forward(self, x: Tensor, rows: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Return (outputs [t, output], biases that the caller adds, or None) for x [t, input].

        rows: number of rows of each local expert.
        """
        biases = None
        if self.use_bias:
            biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        added = biases is not None and not self.skip_bias_add
        outputs = []
        for index, part in enumerate(x.split(rows)):
            bias = biases[index] if biases and added else None
            outputs.append(F.linear(part, getattr(self, f"weight{index}"), bias))
        return torch.cat(outputs), None if added else biases

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return checkpoint tensors [global experts, ...], named as in core's SequentialMLP."""
        assert metadata is not None
        ep, kinds = self.groups.ep, ("weight", "bias") if self.use_bias else ("weight",)
        axes = {"weight": self.partition_dim} | ({"bias": 0} if self.partition_dim == 0 else {})
        tensors: ShardedStateDict = {}
        for index in range(self.num_gemms):
            expert = (
                len(sharded_offsets),
                ep.rank() * self.num_gemms + index,
                ep.size() * self.num_gemms,
            )
            sharded = make_sharded_tensors_for_checkpoint(
                {kind: getattr(self, f"{kind}{index}") for kind in kinds},
                prefix,
                axes,
                (*sharded_offsets, expert),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for kind in kinds:
                tensor = sharded[f"{prefix}{kind}"]
                # core numbered the replicas over dp_cp, but those of an expert are expert-dp ranks
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                tensors[f"{prefix}{kind}{index}"] = tensor
        return tensors


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    partition_dim = 0


class TERowParallelGroupedLinear(TEGroupedLinear):
    partition_dim = 1


LAYERS: dict[str, Any] = {
    "TENorm": TENorm,
    "TELinear": TELinear,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
    "TELayerNormColumnParallelLinear": TELayerNormColumnParallelLinear,
    "TEColumnParallelGroupedLinear": TEColumnParallelGroupedLinear,
    "TERowParallelGroupedLinear": TERowParallelGroupedLinear,
    "TEDotProductAttention": TEDotProductAttention,
    # core's choice for queries and keys where it finds no recent TransformerEngine
    "FusedLayerNorm": TENorm,
}
"""Name of TransformerEngine's class in core -> its replacement.

The replacements have the same names, because Bridge reads a parameter's sharding from the name of
its module's class.
"""

MODULES = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.extensions.transformer_engine_spec_provider",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.mla_qk_norm_config",
)
"""Modules of core that look the classes up when they make a spec or a layer."""


_with_te: list[bool] = []  # the first choice in this process; empty before it


def choose_layers(*, te: bool) -> None:
    """Choose the layers that core makes for Bridge in this process: TransformerEngine's, or these.

    Raises ModelError where the other ones were chosen before: modules that have imported a class
    keep it.
    """
    if not _with_te:
        _with_te.append(te)
        if not te:
            install_layers()
    if _with_te != [te]:
        kinds = {True: "TransformerEngine's layers", False: "layers without TransformerEngine"}
        raise ModelError(
            f"model.provider = bridge: this process was set up for {kinds[not te]} and cannot build"
            f" {kinds[te]}; use another process"
        )


def install_layers() -> None:
    """Replace TransformerEngine's layers in core's layer specs; its local specs do not change."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.transformer import transformer_block

    for path in MODULES:
        module = importlib.import_module(path)
        # core does not import it where TransformerEngine is absent
        module.TESpecProvider = TESpecProvider  # type: ignore[attr-defined]
        for name, layer in LAYERS.items():
            if hasattr(module, name):
                setattr(module, name, layer)
    transformer_block.LayerNormImpl = TENorm
    linear_attention.install_linear_attention()
