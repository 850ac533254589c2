"""Groups that are being sampled, and responses that are cut short and go on later.

A continuation is a request whose input is prompt + prefix: the server computes the prefix once more, under the weights that
it has now, and reports routes for all of it.  What a token keeps is what it was sampled with:

    log mu(y_i)   of the request that sampled y_i
    route of row  of the request that sampled the token the row predicts: row j predicts token j + 1

So of P + n tokens of prompt and prefix the rows 0 .. P + n - 2 stay those of the prefix's own sampling; row P + n - 1, the
prefix's last token, was never an input before: it predicts the first token of the continuation, which computed it.
Shapes: P prompt, n prefix, m continuation, S = P + n + m tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rl.records import Prompt, Rollout, RolloutGroup, check_digest


@dataclass(eq=False)
class PartialGroup:
    """One prompt's group while it is sampled, perhaps over several steps.

    rollouts: whole responses by index; prefixes: those cut short (finish_reason abort).  must: something of it was thrown
    away for its age, so that it has to be among the next groups that are trained on.
    number, attempts, troubles, failed_urls: of the call that fills it now.
    """

    prompt: Prompt
    size: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prefixes: dict[int, Rollout] = field(default_factory=dict)
    must: bool = False
    number: int = 0
    attempts: int = 0
    troubles: list[str] = field(default_factory=list)
    failed_urls: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.rollouts]

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == self.size

    def prefix_of(self, index: int) -> list[int]:
        """The response tokens that there are of an unfinished response."""
        prefix = self.prefixes.get(index)
        return [] if prefix is None else prefix.tokens[prefix.prompt_length :].tolist()

    def begin(self, number: int) -> None:
        """Another call fills it."""
        self.number, self.attempts, self.troubles, self.failed_urls = number, 0, [], set()

    def put(self, index: int, rollout: Rollout) -> None:
        """What is known of response `index` from now on."""
        if rollout.finish_reason == "abort":
            self.prefixes[index] = rollout
        else:
            self.rollouts[index] = rollout
            self.prefixes.pop(index, None)

    def drop_older(self, version: int) -> list[Rollout]:
        """Throw away, and return, the responses with a token of weights older than `version`: they begin anew."""
        old = []
        for found in (self.rollouts, self.prefixes):
            for index in [index for index, rollout in found.items() if rollout.oldest_version < version]:
                old.append(found.pop(index))
        self.must = self.must or bool(old)
        return old

    def closed(self) -> RolloutGroup:
        """The whole group."""
        return RolloutGroup(self.prompt, tuple(self.rollouts[index] for index in range(self.size)))


async def first_to_finish(
    groups: Sequence[PartialGroup], tasks: Mapping[asyncio.Task[None], PartialGroup], keep: int
) -> list[PartialGroup]:
    """`keep` whole groups, those that must be first, once there are so many and all that must be are whole; as in `groups`.

    tasks: what makes groups whole.  Raises what a task raised.
    """
    whole = [group for group in groups if group.is_complete]
    waiting = set(tasks)
    while len(whole) < keep or not all(group.is_complete for group in groups if group.must):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in tasks if task in done]:
            task.result()
            whole.append(tasks[task])
    whole = sorted(whole, key=lambda group: not group.must)[:keep]
    return [group for group in groups if group in whole]


def join_rollouts(prefix: Rollout, more: Rollout) -> Rollout:
    """The response that `prefix` began and `more`, whose prompt is prompt + prefix, went on with; routes and versions by token.

    Raises ValueError where either's routes are not those of its tokens any more, or `more` does not continue `prefix`.
    """
    size, rows = len(prefix.tokens), len(prefix.tokens) - 1
    if more.prompt_length != size or not np.array_equal(more.tokens[:size], prefix.tokens):
        raise ValueError(f"rollout {prefix.id}: its continuation begins with other tokens than were sampled before")
    if more.oldest_version < prefix.policy_versions[-1]:
        raise ValueError(f"rollout {prefix.id}: its continuation is of older weights than its prefix")
    for part in (prefix, more):
        if part.routed_experts is not None:
            check_digest(part.id, part.tokens, part.routed_experts, part.routes_digest)
    routes = more.routed_experts
    if routes is not None:
        assert prefix.routed_experts is not None, "a prefix without routes is not resumed where routes are wanted"
        layer_major = np.empty((routes.shape[1], routes.shape[0], routes.shape[2]), routes.dtype)
        layer_major[:, :rows] = prefix.routed_experts.transpose(1, 0, 2)
        layer_major[:, rows:] = routes[rows:].transpose(1, 0, 2)
        routes = layer_major.transpose(1, 0, 2)
    return replace(
        more,
        prompt_length=prefix.prompt_length,
        rollout_logprobs=np.concatenate([prefix.rollout_logprobs, more.rollout_logprobs]),
        policy_versions=np.concatenate([prefix.policy_versions, more.policy_versions]),
        routed_experts=routes,
        missing_routes=join_missing_routes(prefix, more),
        routes_digest=None,
    )


def join_missing_routes(prefix: Rollout, more: Rollout) -> np.ndarray | None:
    """bool [S - 1], each row as its own request has it; None where no row lacks its route."""
    rows = len(prefix.tokens) - 1
    gaps = np.zeros(len(more.tokens) - 1, bool)
    if prefix.missing_routes is not None:
        gaps[:rows] = prefix.missing_routes
    if more.missing_routes is not None:
        gaps[rows:] = more.missing_routes[rows:]
    return gaps if gaps.any() else None


def ended(rollout: Rollout, stop_token_ids: Collection[int], max_tokens: int) -> Rollout:
    """`rollout`, or the whole response that it is: an abort that arrives with the last token hides why the response ended."""
    if rollout.finish_reason != "abort":
        return rollout
    if int(rollout.tokens[-1]) in stop_token_ids:
        return replace(rollout, finish_reason="stop")
    return replace(rollout, finish_reason="length") if rollout.response_length >= max_tokens else rollout
