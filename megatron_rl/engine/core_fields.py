"""[megatron]: fields of megatron-core's configurations under core's names and types.

A name belongs to TransformerConfig, DistributedDataParallelConfig or OptimizerConfig; where two of
them have it, both get the value.  Fields that other settings or the checkpoint define are refused
here.  Settings under which replay cannot be exact are refused later, from the finished
TransformerConfig (replay/compatibility.py).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from megatron.core import __version__ as core_version
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import TypeAdapter, ValidationError

from megatron_rl.config import ConfigError
from megatron_rl.config.base import nearest

T = TypeVar("T")

KINDS = (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)

ELSEWHERE = {
    "model.dtype": ("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype"),
    "model.recompute": ("recompute_granularity", "recompute_method", "recompute_num_layers"),
    "model.router_dtype": ("moe_router_dtype",),
    "model.layer_spec": ("transformer_impl", "moe_grouped_gemm"),
    "parallel.tp": ("tensor_model_parallel_size",),
    "parallel.pp": ("pipeline_model_parallel_size",),
    "parallel.vp": ("virtual_pipeline_model_parallel_size",),
    "parallel.cp": ("context_parallel_size",),
    "parallel.ep": ("expert_model_parallel_size",),
    "parallel.etp": ("expert_tensor_parallel_size",),
    "parallel.sequence_parallel": ("sequence_parallel",),
    "parallel.layers_per_stage": (
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ),
    "optim.lr": ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"),
    "optim.beta1 or optim.beta2": ("adam_beta1", "adam_beta2"),
    "optim.eps": ("adam_eps",),
    "optim.weight_decay": ("weight_decay",),
    "optim.clip_grad": ("clip_grad",),
    "optim.distributed": ("use_distributed_optimizer",),
    "optim.max_skipped_updates": ("check_for_nan_in_grad",),
}
"""The setting to use in place of fields of core."""

OTHER_MODEL = (
    "activation_func_clamp_value",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "glu_linear_offset",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "moe_mlp_glu_interleave_size",
    "moe_router_topk_limited_devices",
    "moe_shared_expert_glu_interleave_size",
    "no_rope_freq",
    "qk_l2_norm",
    "rotary_base",
    "rotary_interleaved",
    "rotary_percent",
    "softmax_scale",
    "softmax_type",
    "use_mup",
    "window_size",
)
"""Fields that change what the model computes."""

NOT_POSSIBLE = {
    "average_in_collective": (
        "gradients are sums over data-parallel ranks: the loss carries its own global denominator"
    ),
    "calculate_per_token_loss": (
        "the loss carries its own global denominator, core must not divide gradients"
    ),
    "loss_scale": "the loss is not scaled here, core would divide the gradients by it all the same",
    "moe_router_force_biased": "every pass would add another random bias to the router's scores",
    "mtp_num_layers": "layers for multi-token prediction are neither loaded nor trained",
    "num_distributed_optimizer_instances": "process groups are those of one instance",
    "num_microbatches_with_partial_activation_checkpoints": (
        "every micro-batch of a step is recomputed alike; choose how much by model.recompute"
    ),
    "optimizer": "checkpoints and the memory plan are those of adam",
    "optimizer_cuda_graph": (
        "core's own training loop captures that graph; here no step would be replayed from one"
    ),
    "overlap_param_gather": (
        "the old-logprob pass and the weight sync would read weights that are not gathered yet"
    ),
    "overlap_param_gather_with_optimizer_step": (
        "the old-logprob pass would read weights that are not gathered yet"
    ),
    "qk_clip": "core's own training loop clips after each update; here nothing would",
    "test_mode": "it is for core's own tests of kernels",
    "use_layer_wise_distributed_optimizer": (
        "it is of optimizers other than adam; optim.distributed shards adam's state"
    ),
    "use_torch_optimizer_for_cpu_offload": "core ignores it for adam",
    **dict.fromkeys(
        (
            "data_parallel_sharding_strategy",
            "use_custom_fsdp",
            "use_megatron_fsdp",
            "use_torch_fsdp2",
        ),
        "models are wrapped in core's DistributedDataParallel; optim.distributed shards the"
        " optimizer state",
    ),
    **dict.fromkeys(
        OTHER_MODEL,
        "the trainer would compute another model than the checkpoint's, which the servers compute",
    ),
}
"""Fields of core that this program cannot change, with the reason."""

NOT_WITH_RELEASED_MEMORY = {
    **dict.fromkeys(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "a graph keeps the addresses of memory that is freed while the servers sample",
    ),
    "nccl_ub": "nccl keeps the addresses of memory that is freed while the servers sample",
    "fp8_param": "weights in fp8 have more parts than the one that is freed",
    "fp4_param": "weights in fp4 have more parts than the one that is freed",
}
"""Fields that cannot be used with rollout.release_memory (engine/offload.py), with the reason."""

NOT_WITH_REFERENCE = {
    "fp8_param": "weights in fp8 have more parts than the one that is exchanged",
    "fp4_param": "weights in fp4 have more parts than the one that is exchanged",
}
"""Fields that cannot be used with loss.kl_coef (engine/reference.py), with the reason."""

CHANGES_NO_ROUTE = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "deterministic_mode",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_permute_fusion",
    "persist_layer_norm",
    "recompute_modules",
)
"""Fields of TransformerConfig with which replay is tested, or that act after the router's choice.
"""

DEFAULTS_OF_OURS = (
    "attention_softmax_in_fp32",
    "batch_p2p_comm",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "overlap_p2p_comm",
    "use_cpu_initialization",
)
"""Fields for which this program has another default than core; [megatron] may change them, and
replay/compatibility.py judges the result.
"""

CORE_ERRORS = (ValueError, RuntimeError, AssertionError, ImportError, TypeError)
"""Errors that core's configurations raise for values that they refuse."""


def check_released_memory(values: Mapping[str, object]) -> None:
    """Raise ConfigError for fields that cannot be used with rollout.release_memory."""
    refuse(values, NOT_WITH_RELEASED_MEMORY, "rollout.release_memory = true")


def check_reference(values: Mapping[str, object]) -> None:
    """Raise ConfigError for fields that cannot be used with loss.kl_coef."""
    refuse(values, NOT_WITH_REFERENCE, "loss.kl_coef > 0")


def refuse(values: Mapping[str, object], reasons: Mapping[str, str], setting: str) -> None:
    """Raise ConfigError if a field of `reasons` is on, which cannot be used with `setting`."""
    for name, reason in reasons.items():
        # the values that leave such a field off
        if values.get(name) not in (None, False, "none", "false"):
            raise ConfigError(
                f"megatron.{name} = {values[name]!r} with {setting}: {reason}; remove one of them"
            )


def check_fields(
    values: Mapping[str, object],
    ours: Mapping[str, object] = types.MappingProxyType({}),
    *,
    is_mla: bool = True,
) -> None:
    """Raise ConfigError, with a line for every name that cannot be set: unknown, set elsewhere, or
    of another type.

    ours: the fields of TransformerConfig that this program derives from the checkpoint.
    is_mla: the checkpoint has latent attention.
    """
    problems = []
    for name, value in values.items():
        key = f"megatron.{name} = {value!r}"
        setting = next((setting for setting, names in ELSEWHERE.items() if name in names), None)
        if not any(name in field_types(kind) for kind in KINDS):
            known = sorted(set().union(*map(field_types, KINDS)))
            problems.append(f"{key}: megatron-core has no such field{nearest(name, known)}")
        elif setting:
            problems.append(f"{key}: set {setting} instead")
        elif name in NOT_POSSIBLE:
            problems.append(f"{key}: {NOT_POSSIBLE[name]}; remove it")
        elif not is_mla and all(
            name not in field_types(kind) for kind in KINDS if kind is not MLATransformerConfig
        ):
            problems.append(
                f"{key}: only latent attention reads it, which this checkpoint does not have;"
                " remove it"
            )
        elif name in ours and name not in CHANGES_NO_ROUTE and name not in DEFAULTS_OF_OURS:
            problems.append(
                f"{key}: is fixed here or comes from the checkpoint's config.json; remove it"
            )
        else:
            try:
                converted(name, value)
            except ValueError as error:
                problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def fields_of(kind: type, values: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of `kind` among `values`, converted to core's types."""
    return {
        name: converted(name, value) for name, value in values.items() if name in field_types(kind)
    }


def make_core(
    kind: Callable[..., T], ours: Mapping[str, object], values: Mapping[str, object]
) -> T:
    """Make a configuration of core from `ours` and the fields of `kind` among `values`.

    Raises ConfigError, with core's reason, where core refuses a user's field, else core's error.
    """
    fields = fields_of(kind, values)  # type: ignore[arg-type]  # a dataclass
    try:
        return kind(**{**ours, **fields})
    except CORE_ERRORS as error:
        if not fields:
            raise
        raise ConfigError(
            f"{named_settings(fields, values)}: megatron-core {core_version} refuses this: "
            f"{reason_of(error)}; change or remove it"
        ) from error


def named_settings(fields: Iterable[str], values: Mapping[str, object]) -> str:
    """Format the user's settings of these fields, for a message."""
    return ", ".join(f"megatron.{name} = {values[name]!r}" for name in fields)


def reason_of(error: Exception) -> str:
    """Return core's reason for an error."""
    reason = str(error) or "an assertion without a message"
    # where TransformerEngine is absent, core compares its version, None, with a number
    if isinstance(error, TypeError) and not has_transformer_engine():
        return f"it needs TransformerEngine ({reason})"
    return reason


def has_transformer_engine() -> bool:
    """Return True if the package is installed."""
    spec = importlib.util.find_spec("transformer_engine")
    # the placeholder of engine/bridge_package.py has no loader
    return spec is not None and spec.loader is not None


def forward_fields(values: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that reach the forward pass: those of TransformerConfig and, for latent
    attention, of MLATransformerConfig, which extends it.
    """
    return fields_of(MLATransformerConfig, values)


def untested(values: Mapping[str, object]) -> list[str]:
    """Return the names that reach the forward pass and with which replay has not been tested."""
    return [name for name in forward_fields(values) if name not in CHANGES_NO_ROUTE]


def converted(name: str, value: object) -> object:
    """Convert `value` to the type of core's field.

    Raises ValueError with the values that the field accepts.
    """
    hint = next(field_types(kind)[name] for kind in KINDS if name in field_types(kind))
    options = alternatives(hint)
    if torch.dtype in options:
        dtype = getattr(torch, str(value), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError("must be a torch dtype, for example float32 or bfloat16")
        return dtype
    lists = [option for option in options if typing.get_origin(option) is list]
    if isinstance(value, str) and lists and str not in options:
        value = value.split()  # on the command line a list is one string of words
    # an enumeration, or a list of one: core's members by their names
    for kind in [*options, *(item for option in lists for item in typing.get_args(option))]:
        if isinstance(kind, enum.EnumType):
            return (
                [member(kind, name) for name in value]
                if isinstance(value, list)
                else member(kind, value)
            )
    if not any(is_plain(option) for option in options):
        raise ValueError("its type cannot be written in a configuration file")
    try:
        # pydantic validates against the type that core's annotation names
        adapter: TypeAdapter[object] = TypeAdapter(hint)  # type: ignore[arg-type]
        return adapter.validate_python(value)
    except ValidationError as error:
        rules = [item["msg"].removeprefix("Input should be ") for item in error.errors()]
        raise ValueError(f"must be {' or '.join(dict.fromkeys(rules))}") from None


def member(kind: enum.EnumType, name: object) -> object:
    if name not in kind.__members__:
        raise ValueError(f"must be {' or '.join(kind.__members__)}")
    return kind.__members__[str(name)]


@functools.cache
def field_types(kind: type) -> dict[str, object]:
    """Return {field name: resolved type}."""
    hints: dict[str, object] = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def alternatives(hint: object) -> tuple[object, ...]:
    """Return the members of a union type, or the type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def is_plain(hint: object) -> bool:
    """Return True for a type that TOML can express: numbers, text, flags, and lists of them."""
    origin = typing.get_origin(hint) or hint
    return origin in (bool, int, float, str, list, tuple, dict, typing.Literal)
