"""A stand-in of TransformerEngine's FusedAdam for machines without a GPU: its constructor, state
and dtypes, with the update in torch.

float16 and FP8, which have scales, are left out: they are refused.
"""

import importlib.machinery
import sys
import types

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with moments in float32 or bfloat16.

    With store_param_remainders, "master_param" is the low 16 bits of a float32 weight; the high
    ones, rounded, are the bfloat16 weight.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *,
        bias_correction=True, adam_w_mode=True, master_weights=False,
        master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32, use_decoupled_grad=False, store_param_remainders=False,
        capturable=False,
    ):  # fmt: skip
        assert (
            bias_correction
            and adam_w_mode
            and not capturable
            and master_weight_dtype is torch.float32
        )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights

    def initialize_state(self, param, store_param_remainders):
        state = self.state[param]
        for name, dtype in self.dtypes.items():
            state[name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights:
            low = torch.zeros_like(param, dtype=torch.int16)
            state["master_param"] = low if store_param_remainders else param.detach().float()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                gradient = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if gradient is not None:
                    self.update(param, gradient.float(), group)

    def update(self, param, gradient, group):
        remainders = self.store_param_remainders and param.dtype is torch.bfloat16
        if not self.state[param]:
            self.initialize_state(param, remainders)
        state, (beta1, beta2) = self.state[param], group["betas"]
        first = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        second = state["exp_avg_sq"].float().lerp(gradient * gradient, 1 - beta2)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        master = state.get("master_param", param)
        weights = joined(param, master) if remainders else master.clone()
        root = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.sub_(group["lr"] * first / (1 - beta1 ** group["step"]) / root)
        if remainders:
            bits = weights.view(torch.int32)
            master.copy_(bits)  # the low 16 bits, with a sign
            param.view(torch.int16).copy_((bits - master.int()) >> 16)
        else:
            master.copy_(weights)
            param.copy_(weights)


def joined(high, low):
    """The float32 weights of their bfloat16 values and remaining bits."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def install():
    """Make megatron-core use the stand-in in this process."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = types.ModuleType(name)
        # without a loader: not the real package
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = FusedAdam
    sys.modules[optimizers.__name__] = optimizers
    for module in (optimizer, optimizer_config):
        module.is_te_min_version = lambda version: True
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
