"""Turns as requests of their own, with all tokens before them, cut to the parts that the client
reads.
"""

from dataclasses import replace

from megatron_rl.records import Rollout
from megatron_rl.rollout.client.response import join_parts


def part_of(rollout: Rollout, start: int) -> Rollout:
    """The record without its first `start` tokens, which are of its prompt, and their rows."""
    routes, missing = rollout.routed_experts, rollout.missing_routes
    return replace(
        rollout,
        tokens=rollout.tokens[start:],
        prompt_length=rollout.prompt_length - start,
        routed_experts=None if routes is None else routes[start:],
        missing_routes=None if missing is None else missing[start:],
        environment=tuple((a - start, b - start) for a, b in rollout.environment),
        episode=replace(
            rollout.episode,
            turns=tuple((end - start, reason) for end, reason in rollout.episode.turns),
        ),
        routes_digest=None,
    )


def join_turns(prefix: Rollout, more: Rollout) -> Rollout:
    """The response `prefix` continued with `more`, whose prompt begins with `prefix`."""
    return join_parts(prefix, part_of(more, len(prefix.tokens) - 1))
