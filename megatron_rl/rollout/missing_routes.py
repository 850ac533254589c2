"""Tokens for which the inference engine sent no route: how many a step has, and when the run must stop (replay.on_missing_route).

Row j of a rollout's routes belongs to token j and predicts token j + 1: of its S - 1 rows the first P - 1 are the prompt's,
the other R predict one response token each.  Shapes: S tokens, P prompt, R response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from megatron_rl.config import ReplayConfig
from megatron_rl.records import Rollout, RolloutGroup

SHOWN = 8  # runs of rows, and rollouts, in a message


@dataclass(frozen=True)
class MissingRouteCounts:
    """Sums over rollouts: rows without a route and all rows, apart for responses and prompts.

    dropped: samples refused for a gap (drop_sample), which are not among `samples`, the ones that were kept.
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
        return MissingRouteCounts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """All counts, in the order of the fields: MissingRouteCounts(*values) after they were added up over ranks."""
        return astuple(self)


def count_missing_routes(groups: Sequence[RolloutGroup], *, dropped: int = 0) -> MissingRouteCounts:
    """What these groups hold."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompt_rows = sum(rollout.prompt_length - 1 for rollout in rollouts)
    missing_prompt_rows = all_gaps = 0
    for rollout in rollouts:
        if rollout.missing_routes is not None:
            all_gaps += int(rollout.missing_routes.sum())
            missing_prompt_rows += int(rollout.missing_routes[: rollout.prompt_length - 1].sum())
    response_rows = sum(rollout.response_length for rollout in rollouts)
    return MissingRouteCounts(
        all_gaps - missing_prompt_rows, response_rows, missing_prompt_rows, prompt_rows, dropped, len(rollouts)
    )


def check_missing_routes(total: MissingRouteCounts, replay: ReplayConfig, groups: Sequence[RolloutGroup]) -> None:
    """Raise ValueError where the user's policy stops the run.

    total: the step's counts over all replicas; groups: this replica's, whose rollouts and rows are named.
    error: any row without a route.  Else: a share above replay.missing_route_budget, of response tokens, of prompt rows (each by
    itself: long prompts must not hide gaps in responses, nor the other way round), or of samples dropped for a gap.
    """
    if replay.on_missing_route == "error":
        if total.rows:
            raise ValueError(
                f"{describe_missing_routes(groups) or 'rollouts of another replica'}: the server sent no route, "
                "replay.on_missing_route = error stops "
                f"the run ({total.rows} such rows in {total.samples} rollouts of this step). Find out why it loses them "
                "(prefix or KV cache filled from elsewhere, capture buffer); or set replay.on_missing_route = "
                "live (these rows follow the "
                "router), mask_token (and what they predict leaves the loss) or drop_sample, with replay.missing_route_budget"
            )
        return
    shares = {
        "response tokens have no route": (total.missing_response_rows, total.response_rows),
        "prompt rows have no route": (total.missing_prompt_rows, total.prompt_rows),
        "samples were dropped for a token without a route": (total.dropped, total.dropped + total.samples),
    }
    for what, (count, of) in shares.items():
        if count > replay.missing_route_budget * of:
            where = describe_missing_routes(groups)
            raise ValueError(
                f"{count} of the step's {of} {what} ({count / of:.2%}), rule is replay.missing_route_budget = "
                f"{replay.missing_route_budget:.2%} at "
                f"most (replay.on_missing_route = {replay.on_missing_route}){'; ' + where if where else ''}. Find "
                "out why the server loses routes, "
                "or raise replay.missing_route_budget"
            )


def describe_missing_routes(groups: Sequence[RolloutGroup]) -> str:
    """Which rollouts, rows and layers, for people; "" where none."""
    broken = [r for group in groups for r in group.rollouts if r.missing_routes is not None and r.missing_routes.any()]
    more = f" and {len(broken) - SHOWN} more rollouts" if len(broken) > SHOWN else ""
    return "; ".join(name_rollout(rollout) for rollout in broken[:SHOWN]) + more


def name_rollout(rollout: Rollout) -> str:
    """E.g. "rollout 3/0: rows 4, 7 to 9 of 120 in all 48 MoE layers"."""
    assert rollout.missing_routes is not None and rollout.routed_experts is not None
    rows = np.flatnonzero(rollout.missing_routes)
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    runs = [(int(rows[a]), int(rows[b - 1])) for a, b in pairwise([0, *cuts.tolist(), len(rows)])]
    named = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs[:SHOWN]) + (
        ", ..." if len(runs) > SHOWN else ""
    )
    layers = rollout.routed_experts.shape[1]
    return f"rollout {rollout.id}: row{'s' * (len(rows) > 1)} {named} of {len(rollout.missing_routes)} in all {layers} MoE layers"
