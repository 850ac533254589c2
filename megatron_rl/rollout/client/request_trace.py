"""Spans of one request in the trace of a step (run.trace), on the lane of its server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron_rl.launch.trace import OFF, Trace
from megatron_rl.rollout.client.counters import meta_info, num_tokens
from megatron_rl.rollout.group import Group

SERVER_SECONDS = ("queue_time", "e2e_latency")
"""Times of a sample that servers may report in meta_info, in seconds."""


@dataclass(frozen=True)
class RequestTrace:
    """Writer of one request's spans."""

    trace: Trace = OFF
    url: str = ""
    """URL of the server."""
    rid: str = ""

    def span(self, name: str, **values: object) -> AbstractContextManager[dict[str, object]]:
        return self.trace.span(
            name, "request", process=self.url, thread="request", key=self.rid, **values
        )

    def request(self, group: Group) -> AbstractContextManager[dict[str, object]]:
        """Open the span from sending the request to the end of reading its answer."""
        prompt, samples = group.prompt, len(group.missing)
        tokens = len(prompt.token_ids)
        return self.span(
            "request", prompt=prompt.id, turn=group.turn, samples=samples, prompt_tokens=tokens
        )

    def answered(self, values: dict[str, object], samples: Sequence[object]) -> None:
        """Add the number of response tokens to `values` of the request's span, and the longest of
        SERVER_SECONDS, where servers send them.
        """
        values["tokens"] = sum(map(num_tokens, samples))
        for name in SERVER_SECONDS:
            reported = [meta_info(sample).get(name) for sample in samples]
            seconds = [value for value in reported if isinstance(value, int | float)]
            if seconds:
                values[f"server_{name}"] = max(seconds)


UNTRACED = RequestTrace()
