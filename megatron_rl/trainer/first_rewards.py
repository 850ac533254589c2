"""The rewards of a run's first step, before its first update: equal ones may teach nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce
from megatron_rl.records import RolloutGroup
from megatron_rl.trainer.rollout_metrics import teaches_nothing

CAUSES = {
    0.0: "the reward function may not recognise right answers, data.template may ask for another"
    " form than it reads, or the prompts are too hard for this model",
    1.0: "the reward function may accept everything, or the prompts are too easy for this model",
}


def first_rewards_warning(
    groups: Sequence[RolloutGroup], run_dir: Path, host_group: dist.ProcessGroup
) -> str | None:
    """Return a warning where every scored response of the step has the same reward and no group
    teaches anything, else None.

    Collective over `host_group`, all ranks.  groups: those of this replica that the step trains on,
    with advantages and the weights of their teachers.
    """
    rewards = [reward for one in groups if one.rewards is not None for reward in one.rewards]
    # NaN: reward.on_error = drop
    scored = [float(reward) for reward in rewards if not math.isnan(reward)]
    values = [
        -min(scored, default=math.inf),
        max(scored, default=-math.inf),
        float(not all(map(teaches_nothing, groups))),
    ]
    minus_low, high, does_teach = all_reduce(values, dist.ReduceOp.MAX, host_group)
    if -minus_low != high or does_teach:
        return None
    causes = CAUSES.get(high, "the reward function gives everything the same")
    return (
        f"WARNING before the first update: every response of this step has reward {high:g}, which"
        f" teaches nothing: {causes}; read the responses in {run_dir}, or stop the run and"
        " change reward.function, data.template or the prompts"
    )
