"""Policy losses on plain tensors: no Megatron, no SGLang.  `policy_loss` is the one entry."""

from megatron_rl.loss.aggregate import aggregate
from megatron_rl.loss.policy import LOSSES, PolicyLoss, policy_loss

__all__ = ["LOSSES", "PolicyLoss", "aggregate", "policy_loss"]
