"""The checks of lengths and turns of saved rollouts (check_rollouts.py)."""

from __future__ import annotations

from itertools import pairwise

from megatron_rl_tools.check_rollouts.dumped import Dumped, Problems


def check_turns(dumped: Dumped) -> Problems:
    """Check that spans of the environment lie between turns, in order, and that the line has one
    entry per turn, or none.
    """
    record, spans = dumped.record, dumped.environment
    places = [place for span in spans for place in span]
    bounds = [record.prompt_length, *places, len(dumped.tokens)]
    if any(start >= end for start, end in pairwise(bounds)):
        rule = f"must lie in order between turns, after {bounds[0]} and before {bounds[-1]}"
        text = f"spans of the environment {list(spans)}, {rule}"
        yield "turns", text, "a span was moved, or a turn lost"
    for name in ("turn_rewards", "turn_ends", "turn_seconds"):
        values = getattr(record, name)
        if values and len(values) != len(spans) + 1:
            text = f"{len(values)} {name} for {len(spans) + 1} turns"
            yield "turns", text, "the line is of another rollout"


def check_token_counts(dumped: Dumped) -> Problems:
    record, size = dumped.record, len(dumped.tokens)
    parts = [record.prompt_length, record.response_length]
    names = "prompt + response"
    if record.environment_length:
        parts.append(record.environment_length)
        names += " + environment"
    if size and record.prompt_length < 1:
        text = (
            f"{size} tokens with a response of {record.response_length}: no token is the prompt's"
        )
        yield "length", text, "tokens were lost, or response_length is another rollout's"
        return
    if size != sum(parts):
        text = f"{size} tokens, must be {names} = {' + '.join(map(str, parts))}"
        yield "length", text, "the response was truncated, or extended, after it was recorded"
    versions = sum(tokens for _, tokens in record.policy_versions)
    if versions != record.response_length:
        text = f"{versions} weight versions for {record.response_length} response tokens"
        yield "length", text, "the line was edited"
    spans = sum(end - start for start, end in dumped.environment)
    if spans != record.environment_length:
        says = f"the line says {record.environment_length}"
        cause = "the line was edited, or the tensors are of another rollout"
        yield "length", f"{spans} tokens in spans of the environment, {says}", cause
    if len(dumped.logprobs) != record.response_length:
        text = f"{len(dumped.logprobs)} log-probs for {record.response_length} response tokens"
        yield "length", text, "log-probs of the prompt kept, or of the last token lost"
    if dumped.routes is None or dumped.routes.ndim == 0 or len(dumped.routes) == size - 1:
        return
    causes = {
        size: "offset by one: a row for the last token, which was never an input",
        size - 2: "offset by one: the first or the last row is missing",
        **dict.fromkeys(
            (record.response_length, record.response_length - 1),
            "the prompt's rows are missing (prefix cache?)",
        ),
    }
    text = f"{len(dumped.routes)} rows of expert ids, must be tokens - 1 = {size - 1}"
    other = "rows were dropped or added (truncated payload, retraction)"
    yield "length", text, causes.get(len(dumped.routes), other)
