"""Routers of megatron-core where TransformerEngine is not installed, or has no GPU to run on."""

import torch
from megatron.core.transformer.moe import moe_utils


def choose_router_product() -> None:
    """Set `te_general_gemm` of core's moe_utils to None, which selects torch's matrix product,
    where TransformerEngine's cannot run.

    Routers read the name in every forward pass.  Core 0.16 does not define it where
    TransformerEngine is not installed.  Where it is, core uses its product on a CPU too, and that
    asks the GPU for its properties.
    """
    if not hasattr(moe_utils, "te_general_gemm") or not torch.cuda.is_available():
        moe_utils.te_general_gemm = None
