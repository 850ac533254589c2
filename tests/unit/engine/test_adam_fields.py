"""Adam's state on the host or in fewer bits: what a run could not resume with, or core would
ignore, is refused.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_rl.config import ConfigError, load_config
from megatron_rl.engine.adam_fields import check_adam_fields
from megatron_rl.engine.optim import make_ddp_config

OURS = {"params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
PRECISE = {"use_precision_aware_optimizer": True}
BF16 = torch.bfloat16
OVERLAPPED = OFFLOAD | PRECISE | {"main_grads_dtype": BF16, "overlap_cpu_optimizer_d2h_h2d": True}


def check(**fields):
    # core itself refuses some of these without TransformerEngine
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    check_adam_fields(SimpleNamespace(**defaults | OURS | fields), fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"params_dtype": torch.float32, "use_distributed_optimizer": False},
        OFFLOAD,
        OFFLOAD | {"optimizer_offload_fraction": 0.1},
        OVERLAPPED,
        OVERLAPPED | {"optimizer_offload_fraction": 0.5, "main_grads_dtype": torch.float32},
        PRECISE | {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "main_grads_dtype": BF16},
    ],
)
def test_allowed(fields):
    check(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer_offload_fraction": 0.5}, r"fraction = 0\.5: has no effect; set .*offload = t"),
        ({"optimizer_cpu_offload": True}, r"fraction = 0\.0: must be above 0 and at most 1"),
        (OFFLOAD | {"optimizer_offload_fraction": 1.5}, r"1\.5: must be above 0 and at most 1"),
        (OFFLOAD | {"use_distributed_optimizer": False}, r"needs optim\.distributed = true"),
        (OFFLOAD | {"params_dtype": torch.float32}, r"needs model\.dtype = bfloat16; core's"),
        (OFFLOAD | {"decoupled_weight_decay": False}, r"core offloads AdamW only"),
        (OFFLOAD | PRECISE | {"exp_avg_dtype": BF16}, r"exp_avg_dtype = .*: has no effect with"),
        (OVERLAPPED | {"optimizer_offload_fraction": 0.5}, r"without waiting for its gradients"),
        (PRECISE | {"params_dtype": torch.float32}, r"needs model\.dtype = bfloat16; Transf"),
        (PRECISE | {"main_grads_dtype": torch.float16}, r"must be float32 or bfloat16, in which"),
        (PRECISE | {"exp_avg_dtype": torch.float16}, r"float16: must be float32 or bfloat16; a"),
        (PRECISE | {"exp_avg_sq_dtype": torch.uint8}, r"uint8: must be float32 or bfloat16; a"),
        (PRECISE | {"main_params_dtype": torch.float16}, r"float16: must be float32; a run"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(**fields)


def test_gradients_are_summed_in_the_dtype_of_the_optimizers():
    def reduced_in_float32(**fields):
        sections = {"model": {"path": "x"}, "data": {"train": "x"}, "megatron": fields}
        return make_ddp_config(load_config(None, [], sections), overlap=False).grad_reduce_in_fp32

    assert reduced_in_float32() and reduced_in_float32(main_grads_dtype="float32")
    assert not reduced_in_float32(main_grads_dtype="bfloat16")
    assert reduced_in_float32(main_grads_dtype="bfloat16", grad_reduce_in_fp32=True)
