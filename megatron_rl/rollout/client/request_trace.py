"""The spans of one request in the trace of a step (run.trace): on a lane of the server that got it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron_rl.launch.trace import OFF, Trace
from megatron_rl.rollout.client.counters import meta_info, num_tokens
from megatron_rl.rollout.partial import PartialGroup

SERVER_SECONDS = ("queue_time", "e2e_latency")
"""What servers may say about a sample in meta_info, in seconds."""


@dataclass(frozen=True)
class RequestTrace:
    """url: of the server."""

    trace: Trace = OFF
    url: str = ""
    rid: str = ""

    def span(self, name: str, **values: object) -> AbstractContextManager[dict[str, object]]:
        return self.trace.span(
            name, "request", process=self.url, thread="request", key=self.rid, **values
        )

    def request(self, group: PartialGroup) -> AbstractContextManager[dict[str, object]]:
        """From when it is sent until its answer is read."""
        turn = 1 if group.known is None else 1 + group.known.num_turns
        tokens = len(group.prompt.token_ids)
        return self.span(
            "request",
            prompt=group.prompt.id,
            turn=turn,
            samples=len(group.missing),
            prompt_tokens=tokens,
        )

    def answered(self, values: dict[str, object], samples: Sequence[object]) -> None:
        """Add the response tokens to `values` of `request`, and the longest of SERVER_SECONDS,
        where servers send them.
        """
        values["tokens"] = sum(map(num_tokens, samples))
        for name in SERVER_SECONDS:
            found = [
                value
                for value in (meta_info(each).get(name) for each in samples)
                if isinstance(value, int | float)
            ]
            if found:
                values[f"server_{name}"] = max(found)


UNTRACED = RequestTrace()
