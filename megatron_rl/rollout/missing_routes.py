"""Missing routes: tokens for which the inference engine sent no experts.  They are counted over all
draws of a step, and stop the run as replay.on_missing_route says.

Row j of a rollout's routes belongs to token j and predicts token j + 1.  Of its S - 1 rows R
predict one sampled token each; the others are the prompt's and an environment's.
Shapes: S tokens, R sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.config import Config, ReplayConfig
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Rollout, RolloutGroup

SHOWN = 8
"""Most rollouts that a message names, and most runs of rows of each."""


@dataclass(frozen=True)
class MissingRouteCounts:
    """Sums over rollouts of the rows without a route and of all rows."""

    missing_response_rows: int = 0
    """Rows without a route that predict a sampled token."""
    response_rows: int = 0
    missing_prompt_rows: int = 0
    """Rows without a route of prompts and environments."""
    prompt_rows: int = 0
    dropped: int = 0
    """Samples that were dropped for a missing route (drop_sample); not among `samples`."""
    samples: int = 0
    """Sequences that were kept."""

    @property
    def rows(self) -> int:
        """Number of rows without a route."""
        return self.missing_response_rows + self.missing_prompt_rows

    def __add__(self, other: MissingRouteCounts) -> MissingRouteCounts:
        return MissingRouteCounts(
            *(a + b for a, b in zip(self.values(), other.values(), strict=True))
        )

    def values(self) -> tuple[int, ...]:
        """Return the counts in the order of the fields, for a sum over ranks."""
        return tuple(vars(self).values())  # astuple would copy deeply


def count_missing_routes(groups: Sequence[RolloutGroup], *, dropped: int = 0) -> MissingRouteCounts:
    """Return the counts of these groups.

    dropped: number of samples that are not among them.
    """
    total = MissingRouteCounts(dropped=dropped)
    for sequence in sequences_of(groups):
        missing, of_response = 0, 0
        if sequence.missing_routes is not None:
            missing = int(sequence.missing_routes.sum())
            of_response = int(sequence.missing_routes[sequence.sampled - 1].sum())
        total += MissingRouteCounts(
            missing_response_rows=of_response,
            response_rows=sequence.response_length,
            missing_prompt_rows=missing - of_response,
            prompt_rows=len(sequence.tokens) - 1 - sequence.response_length,
            samples=1,
        )
    return total


@dataclass
class MissingRoutes:
    """Counts the missing routes over all draws of a step and applies replay.on_missing_route."""

    cfg: Config
    counts: MissingRouteCounts = field(default_factory=MissingRouteCounts)
    """Counts of this replica since the step began."""

    def check(
        self,
        sums: MetricSums,
        groups: Sequence[RolloutGroup],
        counts: MissingRouteCounts,
        *,
        is_last: bool = True,
    ) -> None:
        """Add `counts` of one draw, and raise ValueError where they stop the run.  Collective.

        counts: those of the replica on one of its ranks, zeros on the others.  is_last: the step's
        last draw, after which a share is known.
        """
        if not self.cfg.needs_routes:
            return
        add_missing_rows(sums, counts)
        self.counts += counts
        if is_last or self.cfg.replay.on_missing_route == "error":
            total = MissingRouteCounts(
                *all_reduce_ints(self.counts.values(), dist.ReduceOp.SUM, dist.group.WORLD)
            )
            check_missing_routes(total, self.cfg.replay, groups)
        if is_last:
            self.counts = MissingRouteCounts()


def add_missing_rows(sums: MetricSums, counts: MissingRouteCounts) -> None:
    """Add the metrics replay/* of missing routes in all sampled rollouts."""
    sums.add_total("replay/missing_rows_total", counts.rows)
    sums.add_total("replay/dropped_samples_total", counts.dropped)
    sums.add("replay/missing_route_frac", counts.missing_response_rows, counts.response_rows)
    sums.add("replay/prompt_missing_route_frac", counts.missing_prompt_rows, counts.prompt_rows)


def sequences_of(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [
        sequence for group in groups for rollout in group.rollouts for sequence in rollout.sequences
    ]


def check_missing_routes(
    total: MissingRouteCounts, replay: ReplayConfig, groups: Sequence[RolloutGroup]
) -> None:
    """Raise ValueError where replay.on_missing_route stops the run.

    total: the step's counts over all replicas.  groups: this replica's, whose rollouts and rows the
    message names.

    With `error` any row without a route does.  Otherwise a share above replay.missing_route_budget
    does: of response tokens, of prompt rows, or of dropped samples.  Response tokens and prompt
    rows are compared separately, because long prompts must not hide missing rows of responses, nor
    the reverse.
    """
    if replay.on_missing_route == "error":
        if total.rows:
            where = describe_missing_routes(groups) or "rollouts of another replica"
            raise ValueError(
                f"{where}: the server sent no route, replay.on_missing_route = error stops the run"
                f" ({total.rows} such rows in {total.samples} rollouts of this step). Find out why"
                " it loses them (prefix or KV cache filled from elsewhere, capture buffer); or set"
                " replay.on_missing_route = live (these rows follow the router), mask_token (and"
                " the tokens that they predict leave the loss) or drop_sample, with"
                " replay.missing_route_budget"
            )
        return
    # dropped samples count too: otherwise drop_sample would hide a server that loses most routes
    shares = {
        "response tokens have no route": (total.missing_response_rows, total.response_rows),
        "prompt rows have no route": (total.missing_prompt_rows, total.prompt_rows),
        "samples were dropped for a token without a route": (
            total.dropped,
            total.dropped + total.samples,
        ),
    }
    for what, (count, of) in shares.items():
        if count > replay.missing_route_budget * of:
            where = describe_missing_routes(groups)
            places = f"; {where}" if where else ""
            raise ValueError(
                f"{count} of the step's {of} {what} ({count / of:.2%}): must be at most"
                f" replay.missing_route_budget = {replay.missing_route_budget:.2%}"
                f" (replay.on_missing_route = {replay.on_missing_route}){places}. Find out why the"
                " server loses routes, or raise replay.missing_route_budget"
            )


def describe_missing_routes(groups: Sequence[RolloutGroup]) -> str:
    """Return the rollouts, rows and layers without routes, for people; "" where there are none."""
    named = [
        name_rows(sequence, sequence.missing_routes)
        for sequence in sequences_of(groups)
        if sequence.missing_routes is not None and sequence.missing_routes.any()
    ]
    more = f" and {len(named) - SHOWN} more rollouts" if len(named) > SHOWN else ""
    return "; ".join(named[:SHOWN]) + more


def name_rows(rollout: Rollout, missing: np.ndarray) -> str:
    """Return, for example, "rollout 3/0: rows 4, 7 to 9 of 120 in all MoE layers"."""
    rows = np.flatnonzero(missing)
    runs = [run.tolist() for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)]
    names = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs[:SHOWN]]
    named = ", ".join([*names, "..."] if len(runs) > SHOWN else names)
    return (
        f"rollout {rollout.id}: row{'s' * (len(rows) > 1)} {named} of {len(missing)} in all"
        " MoE layers"
    )
