"""avg@k and pass@k on evaluation sets, through the same client and reward pool as training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config import EvalConfig
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup

SampleAndScore = Callable[[Sequence[Prompt]], list[RolloutGroup]]
"""This replica's prompts -> groups of k scored responses, [] off its leader.  Collective."""


def evaluate(
    sets: Mapping[str, Sequence[Prompt]],
    config: EvalConfig,
    sample_and_score: SampleAndScore,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
) -> dict[str, float]:
    """eval/NAME/avg@k = mean reward over prompts and samples; eval/NAME/pass@k = mean over prompts of the best sample's.

    Collective over all ranks; every replica takes every dp_size-th prompt.
    """
    sums = MetricSums()
    for name, prompts in sets.items():
        mine = list(prompts[: config.max_prompts])[dp_rank::dp_size]
        rewards = [np.asarray(group.rewards) for group in sample_and_score(mine)]
        for group in rewards:
            sums.add(f"eval/{name}/avg@{config.samples}", float(group.sum()), len(group))
            sums.add(f"eval/{name}/pass@{config.samples}", float(group.max()), 1)
    return sums.reduce(dist.group.WORLD, device)
