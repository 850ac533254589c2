"""Tokens for which the inference engine sent no route: how many a step has, and when the run must stop (replay.on_gap).

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
class GapCounts:
    """Sums over rollouts: rows without a route and all rows, apart for responses and prompts.

    dropped: samples refused for a gap (drop_sample), which are not among `samples`, the ones that were kept.
    """

    response_gaps: int = 0
    response_rows: int = 0
    prompt_gaps: int = 0
    prompt_rows: int = 0
    dropped: int = 0
    samples: int = 0

    @property
    def rows(self) -> int:
        """Rows without a route."""
        return self.response_gaps + self.prompt_gaps

    def __add__(self, other: GapCounts) -> GapCounts:
        return GapCounts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """All counts, in the order of the fields: GapCounts(*values) after they were added up over ranks."""
        return astuple(self)


def count_gaps(groups: Sequence[RolloutGroup], *, dropped: int = 0) -> GapCounts:
    """What these groups hold."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompt_rows = sum(rollout.prompt_length - 1 for rollout in rollouts)
    prompt_gaps = all_gaps = 0
    for rollout in rollouts:
        if rollout.missing_routes is not None:
            all_gaps += int(rollout.missing_routes.sum())
            prompt_gaps += int(rollout.missing_routes[: rollout.prompt_length - 1].sum())
    response_rows = sum(rollout.response_length for rollout in rollouts)
    return GapCounts(all_gaps - prompt_gaps, response_rows, prompt_gaps, prompt_rows, dropped, len(rollouts))


def check_gaps(total: GapCounts, replay: ReplayConfig, groups: Sequence[RolloutGroup]) -> None:
    """Raise ValueError where the user's policy stops the run.

    total: the step's counts over all replicas; groups: this replica's, whose rollouts and rows are named.
    error: any row without a route.  Else: a share above replay.gap_budget, of response tokens, of prompt rows (each by
    itself: long prompts must not hide gaps in responses, nor the other way round), or of samples dropped for a gap.
    """
    if replay.on_gap == "error":
        if total.rows:
            raise ValueError(
                f"{name_gaps(groups) or 'rollouts of another replica'}: the server sent no route, replay.on_gap = error stops "
                f"the run ({total.rows} such rows in {total.samples} rollouts of this step). Find out why it loses them "
                "(prefix or KV cache filled from elsewhere, capture buffer); or set replay.on_gap = live (these rows follow the "
                "router), mask_token (and what they predict leaves the loss) or drop_sample, with replay.gap_budget"
            )
        return
    shares = {
        "response tokens have no route": (total.response_gaps, total.response_rows),
        "prompt rows have no route": (total.prompt_gaps, total.prompt_rows),
        "samples were dropped for a token without a route": (total.dropped, total.dropped + total.samples),
    }
    for what, (count, of) in shares.items():
        if count > replay.gap_budget * of:
            where = name_gaps(groups)
            raise ValueError(
                f"{count} of the step's {of} {what} ({count / of:.2%}), rule is replay.gap_budget = {replay.gap_budget:.2%} at "
                f"most (replay.on_gap = {replay.on_gap}){'; ' + where if where else ''}. Find out why the server loses routes, "
                "or raise replay.gap_budget"
            )


def name_gaps(groups: Sequence[RolloutGroup]) -> str:
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
    named = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs[:SHOWN]) + (", ..." if len(runs) > SHOWN else "")
    layers = rollout.routed_experts.shape[1]
    return f"rollout {rollout.id}: row{'s' * (len(rows) > 1)} {named} of {len(rollout.missing_routes)} in all {layers} MoE layers"
