"""Missing routes of a step, over all of its draws, and what replay.on_missing_route does about
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.config import Config
from megatron_rl.records import RolloutGroup
from megatron_rl.rollout.missing_routes import MissingRouteCounts, check_missing_routes
from megatron_rl.trainer.rollout_metrics import count_missing_rows
from megatron_rl.trainer.step_meter import StepMeter


@dataclass
class MissingRoutes:
    """Counts the missing routes over all draws of a step and applies replay.on_missing_route."""

    cfg: Config
    meter: StepMeter
    counts: MissingRouteCounts = field(default_factory=MissingRouteCounts)

    def check(
        self, groups: Sequence[RolloutGroup], counts: MissingRouteCounts, *, is_last: bool = True
    ) -> None:
        """counts: of this replica, on one of its ranks, zeros on the others.

        is_last: the step's last draw.  Collective.
        """
        if not self.cfg.needs_routes:
            return
        count_missing_rows(self.meter.sums, counts)
        self.counts += counts
        if is_last or self.cfg.replay.on_missing_route == "error":
            total = MissingRouteCounts(
                *all_reduce_ints(self.counts.values(), dist.ReduceOp.SUM, dist.group.WORLD)
            )
            check_missing_routes(total, self.cfg.replay, groups)
        if is_last:
            self.counts = MissingRouteCounts()
