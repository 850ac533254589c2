"""Tokens for which the inference engine sent no route: how many a step has, and when they stop the
run.

Row j of a rollout's routes belongs to token j and predicts token j + 1: of its S - 1 rows R predict
one sampled token each, the others are the prompt's and an environment's.  Shapes: S tokens, R
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import ReplayConfig
from megatron_rl.records import Rollout, RolloutGroup

SHOWN = 8  # runs of rows, and rollouts, in a message


@dataclass(frozen=True)
class MissingRouteCounts:
    """Sums over rollouts: rows without a route and all rows, separately for responses and prompts
    (with environments).

    dropped: samples dropped for such a row (drop_sample), which are not among `samples`, the
    sequences that were kept.
    """

    missing_response_rows: int = 0
    response_rows: int = 0
    missing_prompt_rows: int = 0
    prompt_rows: int = 0
    dropped: int = 0
    samples: int = 0

    @property
    def rows(self) -> int:
        """Rows without a route."""
        return self.missing_response_rows + self.missing_prompt_rows

    def __add__(self, other: MissingRouteCounts) -> MissingRouteCounts:
        return MissingRouteCounts(
            *(a + b for a, b in zip(self.values(), other.values(), strict=True))
        )

    def values(self) -> tuple[int, ...]:
        """All counts, in the order of the fields: MissingRouteCounts(*values) after they were
        summed over ranks.
        """
        return tuple(vars(self).values())  # astuple would copy deeply


def count_missing_routes(groups: Sequence[RolloutGroup], *, dropped: int = 0) -> MissingRouteCounts:
    """The counts of these groups; dropped: of the samples that are not among them."""
    total = MissingRouteCounts(dropped=dropped)
    for sequence in sequences_of(groups):
        missing, of_response = 0, 0
        if sequence.missing_routes is not None:
            missing, of_response = (
                int(sequence.missing_routes.sum()),
                int(sequence.missing_routes[sequence.sampled - 1].sum()),
            )
        total += MissingRouteCounts(
            missing_response_rows=of_response,
            response_rows=sequence.response_length,
            missing_prompt_rows=missing - of_response,
            prompt_rows=len(sequence.tokens) - 1 - sequence.response_length,
            samples=1,
        )
    return total


def sequences_of(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [
        sequence for group in groups for rollout in group.rollouts for sequence in rollout.sequences
    ]


def check_missing_routes(
    total: MissingRouteCounts, replay: ReplayConfig, groups: Sequence[RolloutGroup]
) -> None:
    """Raise ValueError where replay.on_missing_route stops the run.

    total: the step's counts over all replicas; groups: this replica's, whose rollouts and rows are
    named.
    error: any row without a route.  Else: a share above replay.missing_route_budget, of response
    tokens, of prompt rows (each
    separately: long prompts must not hide missing rows of responses, nor the reverse), or of
    dropped samples.
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
    # of dropped samples too: else drop_sample would hide a server that loses most routes
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
            raise ValueError(
                f"{count} of the step's {of} {what} ({count / of:.2%}): must be at most"
                f" replay.missing_route_budget = {replay.missing_route_budget:.2%}"
                " (replay.on_missing_route ="
                f" {replay.on_missing_route}){'; ' + where if where else ''}. Find out why the"
                " server loses routes, or raise replay.missing_route_budget"
            )


def describe_missing_routes(groups: Sequence[RolloutGroup]) -> str:
    """Which rollouts, rows and layers, for people; "" where none."""
    named = [
        name_rows(sequence, sequence.missing_routes)
        for sequence in sequences_of(groups)
        if sequence.missing_routes is not None and sequence.missing_routes.any()
    ]
    more = f" and {len(named) - SHOWN} more rollouts" if len(named) > SHOWN else ""
    return "; ".join(named[:SHOWN]) + more


def name_rows(rollout: Rollout, missing: np.ndarray) -> str:
    """E.g. "rollout 3/0: rows 4, 7 to 9 of 120 in all 48 MoE layers"."""
    rows = np.flatnonzero(missing)
    runs = [run.tolist() for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)]
    names = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs[:SHOWN]]
    named = ", ".join([*names, "..."] if len(runs) > SHOWN else names)
    layers = "" if rollout.routed_experts is None else f"{rollout.routed_experts.shape[1]} "
    return (
        f"rollout {rollout.id}: row{'s' * (len(rows) > 1)} {named} of {len(missing)} in all"
        f" {layers}MoE layers"
    )
