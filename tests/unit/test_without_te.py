"""A router of megatron-core runs without TransformerEngine, on a machine with a GPU or without."""

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


def test_a_name_that_core_defines_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_utils

    from megatron_rl.distributed.without_te import define_missing_names

    assert "te_general_gemm" in moe_utils.RouterGatingLinearFunction.forward.__code__.co_names
    monkeypatch.setattr(moe_utils, "te_general_gemm", "core's")
    define_missing_names()
    assert moe_utils.te_general_gemm == "core's"
