"""Policy losses on plain tensors, without Megatron and SGLang: call `policy_loss`, then `aggregate`
(example in docs/guides/algorithms.md).
"""

from megatron_rl.config import LossConfig
from megatron_rl.config.loss_presets import PRESETS, LossSwitches
from megatron_rl.loss.aggregate import aggregate, token_shares
from megatron_rl.loss.covariance import select_tokens, token_keys
from megatron_rl.loss.custom import LossInputs
from megatron_rl.loss.kept import count_kept, kept_tokens
from megatron_rl.loss.policy import PolicyLoss, policy_loss
from megatron_rl.loss.sequences import Sequences

__all__ = [
    "PRESETS",
    "LossConfig",
    "LossInputs",
    "LossSwitches",
    "PolicyLoss",
    "Sequences",
    "aggregate",
    "count_kept",
    "kept_tokens",
    "policy_loss",
    "select_tokens",
    "token_keys",
    "token_shares",
]
