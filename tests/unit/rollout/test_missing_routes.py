"""Which missing routes stop a run, and whether the message has what a user needs."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_rl.batch.pack import pack
from megatron_rl.config import ReplayConfig, load_config
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.records.packed import RowState, Sample
from megatron_rl.rollout.missing_routes import (
    MissingRouteCounts,
    MissingRoutes,
    check_missing_routes,
    count_missing_routes,
    describe_missing_routes,
)
from megatron_rl.trainer.recording.token_files import Flag, SequenceTokens, Table, TokenFiles
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
    """Row 3 is the last that predicts a prompt token, row 4 predicts the first response token, row
    23 the last.
    """
    counts = count_missing_routes(group_with((0, 3), (4, 23), ()), dropped=2)
    assert counts == MissingRouteCounts(2, 60, 2, 12, dropped=2, samples=3)
    assert counts.rows == 4 and MissingRouteCounts(*counts.values()) == counts


def test_whatever_the_row_the_counts_the_loss_and_the_token_files_name_the_token_that_it_predicts(
    tmp_path,
):
    """One rollout for each row: a prompt of 3 tokens, 3 sampled ones, 2 of an environment, 4
    sampled ones.
    """
    sampled, plain = [3, 4, 5, 8, 9, 10, 11], make_rollout("", 3, 9)
    parts = {name: getattr(plain, name)[:7] for name in ("rollout_logprobs", "policy_versions")}
    turns = replace(plain, environment=((6, 8),), routes_digest=None, **parts)
    samples = [
        Sample(
            replace(turns, id=f"q/{row}", missing_routes=np.arange(11) == row),
            1.0,
            save_tokens=True,
        )
        for row in range(11)
    ]
    table, files = Table.zeros(0, 11 * 11, 2, 11 * 7, np.dtype(np.uint8)), FileWriter(print)
    sequences = [SequenceTokens(0, sample, (0.0,) * 11, table) for sample in samples]
    TokenFiles(tmp_path, files, dp_rank=0, mask_missing_routes=True).write(1, sequences)
    files.close()
    written = load_file(tmp_path / "trained/step_000001.safetensors")
    for row, sample in enumerate(samples):
        counts = count_missing_routes([RolloutGroup(Prompt("q", "", (1,), ""), (sample.rollout,))])
        is_sampled = row + 1 in sampled
        assert (counts.missing_response_rows, counts.missing_prompt_rows) == (
            is_sampled,
            not is_sampled,
        ), row
        batch = pack([sample], mask_missing_routes=True)
        learned = [token for token in sampled if token != row + 1]
        assert (np.flatnonzero(batch.loss_mask) + 1).tolist() == learned, row
        assert np.flatnonzero(batch.row_state == RowState.LIVE).tolist() == [row, 11]
        expected = [Flag.MISSING_ROUTE if token == row + 1 else 0 for token in sampled]
        assert written[f"q/{row}:flags"].tolist() == expected, row


def test_error_stops_at_the_first_missing_route_and_names_rows_layers_and_the_other_policies():
    groups = group_with((), (4, 7, 8, 9))
    with pytest.raises(ValueError) as caught:
        check_missing_routes(count_missing_routes(groups), ReplayConfig(), groups)
    message = str(caught.value)
    assert "rollout q/1: rows 4, 7 to 9 of 24 in all MoE layers" in message and "q/0" not in message
    assert all(
        word in message
        for word in (
            "replay.on_missing_route = error",
            "live",
            "mask_token",
            "drop_sample",
            "4 such rows in 2",
        )
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
        (
            MissingRouteCounts(6, 100, 0, 1000, 0, 8),
            r"6 of the step's 100 response tokens have no route \(6.00%\)",
        ),
        (
            MissingRouteCounts(0, 1000, 6, 100, 0, 8),
            r"6 of the step's 100 prompt rows have no route",
        ),
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
        + rf".*replay.missing_route_budget = 5.00%.*on_missing_route = {policy}.*raise"
        r" replay.missing_route_budget",
    ):
        check_missing_routes(counts, replay, [])


@pytest.mark.usefixtures("one_rank")
def test_the_budget_is_of_a_step_whatever_its_draws_and_the_steps_before_it():
    sections = {"model": {"path": "unused"}, "data": {"train": "unused"}}
    sections["replay"] = {"on_missing_route": "live", "missing_route_budget": 0.05}
    missing, sums = MissingRoutes(load_config(None, [], sections)), MetricSums()
    for _ in range(2):
        missing.check(sums, [], MissingRouteCounts(9, 100, 0, 10), is_last=False)
        missing.check(sums, [], MissingRouteCounts(0, 100, 1, 20))
    with pytest.raises(ValueError, match="11 of the step's 200 response tokens"):
        missing.check(sums, [], MissingRouteCounts(8, 100, 0, 10), is_last=False)
        missing.check(sums, [], MissingRouteCounts(3, 100, 0, 10))
    metrics = sums.reduce(None, "cpu")
    assert metrics["replay/missing_rows_total"] == 9 + 1 + 9 + 1 + 8 + 3, "every draw is counted"


def test_the_budget_of_dropped_samples():
    replay = ReplayConfig(on_missing_route="drop_sample", missing_route_budget=0.1)
    check_missing_routes(MissingRouteCounts(0, 100, 0, 10, dropped=1, samples=9), replay, [])
    with pytest.raises(ValueError, match="2 of the step's 11 samples were dropped"):
        check_missing_routes(MissingRouteCounts(0, 100, 0, 10, dropped=2, samples=9), replay, [])


def test_long_lists_are_cut():
    text = describe_missing_routes(group_with(*[range(0, 24, 2)] * 10))
    assert "and 2 more rollouts" in text and "rows 0, 2, 4, 6, 8, 10, 12, 14, ... of 24" in text
