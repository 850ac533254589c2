"""One answer that continues a response, or follows its turns: rows, missing ones among them, and
limits, token by token.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.response import (
    SMALL_VALUES,
    ExpectedSample,
    is_small,
    join_parts,
    parse_sample,
    payload_length,
)
from megatron_rl.rollout.client.sample_fields import SampleDropped, checked_logprobs, parse_tokens
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from tests.fake_model import assert_fingerprints, logprob, mixed_answer, route
from tests.fake_server import SPEC
from tests.faults.samples import cut_start, edit_routes, set_at, with_meta

P, N, M = 3, 4, 5  # tokens of prompt, prefix and continuation
SEAM = P + N - 1  # the first row that the prefix does not have: its last token was never an input
TOKENS = np.random.default_rng(0).integers(2, 60, P + N + M)


def parse(
    num_known: int,
    versions: list[int],
    *,
    lost: tuple[int, ...] = (),
    sent_from: int = 0,
    fields: dict | None = None,
    newest_version: int = 0,
    drop_missing_routes: bool = False,
    **settings,
) -> Rollout:
    """TOKENS after the first `num_known`, one for each of `versions`.  lost: rows without a route;
    sent_from: the first row that the server sends; fields: others of meta_info; settings: fields of
    ExpectedSample and Sampling."""
    tokens = TOKENS[num_known : num_known + len(versions)]
    sample = mixed_answer(versions, TOKENS[:num_known].tolist(), tokens, "q", {"type": "abort"})
    sample = edit_routes(set_at((list(lost),), -1))(with_meta(**fields or {})(sample))
    sample = cut_start(sample, {"routed_experts_start_len": sent_from})
    size = num_known if settings.get("prefix") is None else P
    prompt, names = Prompt("q", "", tuple(TOKENS[:size].tolist()), ""), {*settings}
    known = {name: settings.pop(name) for name in names & {"sample_id", "prefix", "start"}}
    return parse_sample(
        sample,
        ExpectedSample(prompt, "q/0", **known),
        replace(Sampling(1.0, 99, (), policy_version=versions[0]), **settings),
        SampleRules(SPEC, want_routes=True, drop_missing_routes=drop_missing_routes),
        newest_version=newest_version,
        may_be_cut=True,
    )


def assert_rows(rollout: Rollout, versions: list[int], missing: set[int], first: int = 0) -> None:
    """Row j is of weights versions[j - first], or `missing`; the first row of the record is row
    `first` of the sequence.
    """
    lost = [] if rollout.missing_routes is None else rollout.missing_routes
    assert np.flatnonzero(lost).tolist() == sorted(row - first for row in missing)
    for row, version in enumerate(versions, first):
        expected = 0 if row in missing else route(version, TOKENS[: row + 1])
        assert (rollout.routed_experts[row - first] == expected).all(), row


@pytest.mark.parametrize(
    ("first_row", "sends_all"), [(0, True), (2, False), (SEAM, False), (SEAM, True)]
)
def test_whichever_row_has_no_route_it_stays_where_it_is(first_row, sends_all):
    """One row that the prefix lost, one that the answer lost; the request left out the rows before
    `first_row`.
    """
    sent_from = 0 if sends_all else first_row
    for before in range(SEAM):
        prefix = parse(P, [4] * N, lost=(before,))
        assert_rows(prefix, [4] * SEAM, {before})
        for after in range(sent_from, SEAM + M):
            answer = {"lost": (after,), "sent_from": sent_from, "first_row": first_row}
            whole = parse(P + N, [7] * M, prefix=prefix, **answer)
            assert_rows(whole, [4] * SEAM + [7] * M, {before, after} if after >= SEAM else {before})
            part = parse(P + N, [7] * M, start=SEAM, **answer)  # as a further turn
            assert_rows(part, [7] * M, {after} & {*range(SEAM, SEAM + M)}, SEAM)
            lost = join_parts(prefix, part).missing_routes.tolist()
            assert lost == whole.missing_routes.tolist()


@pytest.mark.parametrize("is_prefix", [True, False])
def test_a_retraction_leaves_the_rows_that_were_known(is_prefix):
    prefix = parse(P, [4] * N, lost=(1,))
    settings = {"sent_from": SEAM, "first_row": SEAM, "policy_version": 7, "newest_version": 8}
    settings |= {"prefix": prefix} if is_prefix else {"start": SEAM}

    def parsed(versions: list[int]) -> Rollout:
        part = parse(P + N, versions, fields={"num_retractions": 1}, **settings)
        return part if is_prefix else join_parts(prefix, part)

    assert_rows(parsed([7, 7, 8, 8, 8]), [4] * SEAM, {1, *range(SEAM, SEAM + M)})
    assert_rows(parsed([7] * M), [4] * SEAM + [7] * M, {1})


def test_no_other_version_than_that_of_the_request_is_taken_where_no_newer_one_is_named():
    with pytest.raises(SampleDropped, match="stale_version"):
        parse(P, [1] * N, policy_version=0)


def test_a_continuation_has_the_tokens_that_its_prefix_leaves():
    prefix = parse(P, [4] * N)
    assert_fingerprints(parse(P + N, [7] * M, prefix=prefix, max_tokens=N + M))
    with pytest.raises(SampleDropped, match=rf"bad_tokens: .*expected 1\.\.{M - 1} integers"):
        parse(P + N, [7] * M, prefix=prefix, max_tokens=N + M - 1)


def test_samples_with_many_ids_are_read_in_a_thread():
    """They would block the event loop, and with it all other requests."""
    for rows in (0, 10):
        routes = {"routed_experts": "A" * payload_length(rows, SPEC)} if rows else {}
        most = SMALL_VALUES - 1 - 100 - rows * SPEC.num_layers * SPEC.top_k
        for tokens in (1, most, most + 1, 10 * most):
            sample = {"output_ids": [5] * tokens, "meta_info": routes}
            assert is_small(sample, 100) == (tokens <= most), (rows, tokens)
    assert is_small("no sample", 100) and is_small({"output_ids": 7}, 100)
    assert not is_small("no sample", SMALL_VALUES)


def test_an_answer_to_something_else_is_dropped_with_its_reason():
    parse(P, [4] * N, sample_id="q", drop_missing_routes=True)
    for reason, settings in {
        "wrong_id": {"sample_id": "another"},
        "bad_logprobs: log-probs of 0 tokens that are not the 4": {
            "fields": {"output_token_logprobs": []}
        },
        "bad_tokens: prompt_tokens = 4, 3 were sent": {"fields": {"prompt_tokens": P + 1}},
        "routes_gap: rollout q/0: 1 of 6 rows hold no route": {
            "lost": (2,),
            "drop_missing_routes": True,
        },
    }.items():
        with pytest.raises(SampleDropped, match=reason):
            parse(P, [4] * N, **settings)


def test_ids_and_log_probs_are_taken_up_to_their_edges():
    tokens = parse_tokens({"output_ids": [0, 63]}, {"completion_tokens": 2}, 64, 2)
    assert tokens.tolist() == [0, 63] and tokens.dtype == np.int64
    for wrong in ([0, 64], [-1, 0], [], [1, 2, 3], [True, 1], [1.0, 2.0], [[1], [2]], "12", None):
        with pytest.raises(SampleDropped, match="bad_tokens"):
            parse_tokens({"output_ids": wrong}, {}, 64, 2)
    with pytest.raises(SampleDropped, match="completion_tokens = 3"):
        parse_tokens({"output_ids": [0, 63]}, {"completion_tokens": 3}, 64, 2)
    logprobs = checked_logprobs(np.array([-1e30, 0.0, 1e-3]))
    assert (
        logprobs.tolist() == [np.float32(-1e30), 0.0, np.float32(1e-3)]
        and logprobs.dtype == np.float32
    )
    for log in (1.1e-3, float("nan"), float("inf"), float("-inf")):
        with pytest.raises(
            SampleDropped, match="bad_logprobs: a log-prob that is not finite or is above 0"
        ):
            checked_logprobs(np.array([-1.0, log]))


def test_log_probs_need_no_text():
    """SGLang sends null for it, or nothing."""
    entries = [[logprob(4, TOKENS[: P + i + 1]), int(TOKENS[P + i])] for i in range(N)]
    assert_fingerprints(parse(P, [4] * N, fields={"output_token_logprobs": entries}))


def test_a_continuation_is_never_older_than_the_last_token_before_it():
    prefix = parse(P, [4, 4, 6, 6], newest_version=6)
    assert_fingerprints(parse(P + N, [6] * M, prefix=prefix))
    with pytest.raises(ValueError, match="continuation is of older weights than its prefix"):
        parse(P + N, [5] * M, prefix=prefix)
