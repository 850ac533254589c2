"""A custom loss: SAPO (arXiv 2511.20347), which replaces clipping by a soft gate.

--loss.name examples.losses.sapo:sapo --loss.aggregation sequence_mean --advantage.kind std
"""

import torch
from torch import Tensor

from megatron_rl.loss import LossConfig, LossInputs

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05


def sapo(inputs: LossInputs, config: LossConfig) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A per token, r = pi/pi_old, tau by the sign of A."""
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20.0, 20.0).exp()
    tau = torch.where(inputs.advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * inputs.advantages
