"""Names that megatron-core reads where TransformerEngine is not installed, and does not define
there, with a GPU or without.
"""

from megatron.core.transformer.moe import moe_utils


def define_missing_names() -> None:
    """Define `te_general_gemm` as None in core's moe_utils if it is missing.

    Routers of core 0.16 read it in every forward pass; None selects torch's matrix product.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
