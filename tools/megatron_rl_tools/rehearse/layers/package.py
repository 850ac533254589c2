"""The modules of the stand-in, under the names that megatron-core imports."""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_rl_tools.rehearse.layers import (
    attention,
    base,
    experts,
    grouped,
    linear,
    norms,
    optimizers,
)
from megatron_rl_tools.rehearse.layers.costs import refuse, use
from megatron_rl_tools.rehearse.native import RehearsalError
from megatron_rl_tools.rehearse.recorder import Recorder

PACKAGE = "transformer_engine"
VERSION = "2.11.0"


class Quantized:
    """No tensor is one; core asks."""


class CudaRNGStatesTracker:
    """distributed.py; core's own tracker is the default."""

    def __init__(self) -> None:
        refuse("TransformerEngine's tracker of random states", "leave use_te_rng_tracker out")


class FusedOperations:
    """ops: layers of one kernel, which core makes with use_transformer_engine_op_fuser."""

    def __init__(self, *args: Any) -> None:
        refuse("te.pytorch.ops", "leave use_transformer_engine_op_fuser out")


class DelayedScaling:
    """common/recipe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("FP8", "leave it out")


class FP8GlobalStateManager:
    """quantization.py, for a process without FP8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def is_fp8_parameters() -> bool:
        return False

    @staticmethod
    def reset() -> None: ...


def fp8_autocast(enabled: bool = True, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    if enabled:
        refuse("FP8", "leave it out")
    return contextlib.nullcontext()


def activation_recompute_forward(**kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """distributed.py: it matters for FP8 only."""
    return contextlib.nullcontext()


LAYERS = {
    layer.__name__: layer
    for layer in (
        attention.DotProductAttention, grouped.GroupedLinear, linear.LayerNormLinear, linear.Linear,
        norms.LayerNorm, norms.RMSNorm,
    )
}  # fmt: skip
PERMUTATION = {
    name: getattr(experts, name)
    for name in (
        "moe_permute", "moe_permute_with_probs", "moe_unpermute", "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
    )
}  # fmt: skip
ROUTER = {
    name: getattr(experts, name)
    for name in (
        "fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
    )
}  # fmt: skip
OPTIMIZERS = {
    name: getattr(optimizers, name)
    for name in (
        "FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm",
        "multi_tensor_scale",
    )
}  # fmt: skip
APEX_KERNELS = dict.fromkeys(
    ("wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"), base.add_weight_gradient
)
MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": {"DelayedScaling": DelayedScaling},
    "pytorch": LAYERS,
    "pytorch.attention": {"DotProductAttention": attention.DotProductAttention},
    "pytorch.attention.rope": {"apply_rotary_pos_emb": attention.apply_rotary_pos_emb},
    "pytorch.cpp_extensions": {"general_gemm": linear.general_gemm},
    "pytorch.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "activation_recompute_forward": activation_recompute_forward,
    },
    "pytorch.fp8": {
        "FP8GlobalStateManager": FP8GlobalStateManager,
        "fp8_autocast": fp8_autocast,
        "fp8_model_init": fp8_autocast,
    },
    "pytorch.module": {},
    "pytorch.module.base": {"get_dummy_wgrad": base.get_dummy_wgrad},
    "pytorch.ops": dict.fromkeys(("FusibleOperation", "Sequential"), FusedOperations),
    "pytorch.optimizers": OPTIMIZERS,
    "pytorch.permutation": PERMUTATION,
    "pytorch.router": ROUTER,
    "pytorch.tensor": {"QuantizedTensor": Quantized},
}
"""Module under transformer_engine -> its names.  What core imports inside a `try` and TE 2.11 has
not, or a rehearsal does not need (FP8 tensors, CUDA graphs, offloading), is missing.
"""


APEX = "fused_weight_gradient_mlp_cuda"
"""apex's module of the one kernel by which core's own layers, such as the LM head, add a weight's
gradient to main_grad: with gradient_accumulation_fusion they need it.
"""


class StandInLoader(Loader):
    """The loader of the modules, by which megatron_rl tells the package from a placeholder."""


def install(recorder: Recorder) -> None:
    """Put the stand-in in TransformerEngine's place in this process and those that it forks.

    Call it after PretendedGpu was made and before megatron.core is imported.  Raises RehearsalError
    where core, or the real package, was imported already.
    """
    for name in ("megatron.core.extensions.transformer_engine", PACKAGE):
        module = sys.modules.get(name)
        if module is not None and not isinstance(getattr(module, "__loader__", 0), StandInLoader):
            raise RehearsalError(
                f"rehearse: {name} was imported before TransformerEngine's stand-in was installed;"
                " call layers.install first"
            )
    use(recorder)
    for path, names in (*MODULES.items(), (APEX, APEX_KERNELS)):
        name = path if path == APEX else f"{PACKAGE}.{path}".rstrip(".")
        module = ModuleType(name)
        spec = ModuleSpec(name, StandInLoader(), is_package=True)
        module.__spec__, module.__loader__, module.__path__ = spec, spec.loader, []
        vars(module).update(names)
        sys.modules[name] = module
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
