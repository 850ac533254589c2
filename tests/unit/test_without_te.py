"""A router of megatron-core runs without TransformerEngine, on a machine with a GPU or without."""

import os
import subprocess
import sys

import pytest

ROUTER = """
import torch

torch.cuda.is_available = lambda: {has_gpu}
import megatron_rl.distributed
from megatron_rl.distributed import cpu
from megatron.core.transformer.moe import moe_utils

if moe_utils.HAVE_TE:
    moe_utils.te_general_gemm = None
assert cpu._is_installed() is not {has_gpu}
rows = torch.ones(1, 2, requires_grad=True)
logits = moe_utils.RouterGatingLinearFunction.apply(rows, torch.ones(3, 2), None, torch.float32)
logits.sum().backward()
print(logits.tolist(), rows.grad.tolist())
"""


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_router_needs_no_transformer_engine(has_gpu: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUTER.format(has_gpu=has_gpu)], capture_output=True, text=True
    )
    assert done.stdout == "[[2.0, 2.0, 2.0]] [[3.0, 3.0]]\n", done.stderr


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "TransformerEngine's"), (False, None)])
def test_its_product_is_used_on_a_gpu_only(has_gpu, expected, monkeypatch) -> None:
    from megatron.core.transformer.moe import moe_utils

    from megatron_rl.distributed.without_te import choose_router_product

    assert "te_general_gemm" in moe_utils.RouterGatingLinearFunction.forward.__code__.co_names
    monkeypatch.setattr(moe_utils, "te_general_gemm", "TransformerEngine's")
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    choose_router_product()
    assert moe_utils.te_general_gemm == expected


OPTIMIZERS = """
import torch
import megatron_rl.distributed
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
import apex.optimizers

print(optimizer.Adam is torch.optim.AdamW, clip_grads.l2_norm_impl.__module__)
print(apex.optimizers.FusedAdam)
"""


def test_fused_optimizers_are_not_used_on_a_cpu(tmp_path) -> None:
    files = {
        "apex/__init__.py": "",
        "apex/optimizers.py": "FusedAdam = FusedSGD = 'fused'",
        "apex/multi_tensor_apply.py": "multi_tensor_applier = 'fused'",
        "amp_C.py": "multi_tensor_l2norm = multi_tensor_scale = 'fused'",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", OPTIMIZERS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout == "True megatron.core.utils\nfused\n", done.stderr
