"""Turns TF32 off.

With TF32, tensor cores round the inputs of float32 matrix products to 10 bits of mantissa, a
relative error of about 1e-3.
"""

from __future__ import annotations

import os

import torch


def disable_tf32() -> None:
    """Compute float32 matrix products in float32.

    Call it before the process uses CUDA; servers that it starts inherit it.  Containers turn TF32
    on for torch (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and torch itself does for cuDNN.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # cuBLAS and cuDNN read it once, when they start
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
