"""Which missing routes stop a run, and whether the message has what a user needs."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config import ReplayConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.missing_routes import (
    MissingRouteCounts,
    check_missing_routes,
    count_missing_routes,
    describe_missing_routes,
)
from tests.unit.batch.rollouts import make_rollout


def group_with(*gaps, prompt_length=5, response_length=20):
    """One rollout for each tuple of rows without a route."""
    rollouts = []
    for number, rows in enumerate(gaps):
        missing = np.zeros(prompt_length + response_length - 1, bool)
        missing[list(rows)] = True
        rollout = make_rollout(f"q/{number}", prompt_length, response_length)
        rollouts.append(replace(rollout, missing_routes=missing if len(rows) else None))
    return [RolloutGroup(Prompt("q", "", (1,) * prompt_length, ""), tuple(rollouts))]


def test_prompt_and_response_rows_are_counted_separately():
    """Row 3 is the last that predicts a prompt token, row 4 predicts the first response token, row 23 the last."""
    counts = count_missing_routes(group_with((0, 3), (4, 23), ()), dropped=2)
    assert counts == MissingRouteCounts(2, 60, 2, 12, dropped=2, samples=3)
    assert counts.rows == 4 and MissingRouteCounts(*counts.values()) == counts


def test_error_stops_at_the_first_missing_route_and_names_rows_layers_and_the_other_policies():
    groups = group_with((), (4, 7, 8, 9))
    with pytest.raises(ValueError) as caught:
        check_missing_routes(count_missing_routes(groups), ReplayConfig(), groups)
    message = str(caught.value)
    assert "rollout q/1: rows 4, 7 to 9 of 24 in all 3 MoE layers" in message and "q/0" not in message
    assert all(
        word in message
        for word in ("replay.on_missing_route = error", "live", "mask_token", "drop_sample", "4 such rows in 2")
    )
    check_missing_routes(count_missing_routes(group_with((), ())), ReplayConfig(), groups)


def test_a_replica_without_missing_routes_stops_too():
    total = MissingRouteCounts(1, 100, 0, 10, 0, 4)
    with pytest.raises(ValueError, match="rollouts of another replica: the server sent no route"):
        check_missing_routes(total, ReplayConfig(), group_with(()))


@pytest.mark.parametrize("policy", ["live", "mask_token"])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (MissingRouteCounts(5, 100, 0, 1000, 0, 8), None),  # at the budget
        (MissingRouteCounts(6, 100, 0, 1000, 0, 8), r"6 of the step's 100 response tokens have no route \(6.00%\)"),
        (MissingRouteCounts(0, 1000, 6, 100, 0, 8), r"6 of the step's 100 prompt rows have no route"),
        (MissingRouteCounts(0, 100, 0, 0, 0, 8), None),  # prompts of one token have no rows
    ],
)
def test_the_budget_bounds_responses_and_prompts_separately(policy, counts, message):
    replay = ReplayConfig(on_missing_route=policy, missing_route_budget=0.05)
    if message is None:
        return check_missing_routes(counts, replay, [])
    with pytest.raises(
        ValueError,
        match=message
        + rf".*replay.missing_route_budget = 5.00%.*on_missing_route = {policy}.*raise replay.missing_route_budget",
    ):
        check_missing_routes(counts, replay, [])


def test_the_budget_of_dropped_samples():
    replay = ReplayConfig(on_missing_route="drop_sample", missing_route_budget=0.1)
    check_missing_routes(MissingRouteCounts(0, 100, 0, 10, dropped=1, samples=9), replay, [])
    with pytest.raises(ValueError, match="2 of the step's 11 samples were dropped"):
        check_missing_routes(MissingRouteCounts(0, 100, 0, 10, dropped=2, samples=9), replay, [])


def test_long_lists_are_cut():
    text = describe_missing_routes(group_with(*[range(0, 24, 2)] * 10))
    assert "and 2 more rollouts" in text and "rows 0, 2, 4, 6, 8, 10, 12, 14, ... of 24" in text
