"""What a rollout client has seen: requests, retries, and faults by class.  Counts only grow; nothing is counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

CLASS_OF_REASON = {
    "timeout": "rollout/faults_timeout_total",
    "connection": "rollout/faults_connection_total",
    "bad_body": "rollout/faults_body_total",
    "aborted": "rollout/faults_aborted_total",
    "stale_version": "rollout/faults_stale_total",
}
"""Metric of each reason; http_STATUS, routes_REASON and what is wrong with one sample have a class of their own."""


@dataclass
class RolloutCounters:
    """What happened since the client was made.

    failures  requests, by reason; dropped: samples that came and were not usable, by reason
    unwanted_ groups, samples and their tokens that were given up because enough others were complete (over_sample)
    cut       responses that were cut short and kept, to be resumed; resumed: continuations of such; lost: parts that a server
              did not hand over in time
    stale     responses, whole or cut, thrown away because they would be older than the budget when they are trained on
    retracted samples that a server took back and computed again, and kept; their response tokens
    redrawn   responses sampled again because what was sampled of them was lost or not usable (dropped_tokens: of those that came)
    aborts    requests whose abort was sent to the server; aborts_failed: those it did not confirm
    """

    requests: int = 0
    samples: int = 0
    retries: int = 0
    circuits_opened: int = 0
    cancelled_groups: int = 0
    cancelled_samples: int = 0
    cancelled_tokens: int = 0
    cut_samples: int = 0
    resumed_samples: int = 0
    lost_samples: int = 0
    stale_samples: int = 0
    stale_tokens: int = 0
    retracted_samples: int = 0
    retracted_tokens: int = 0
    redrawn_samples: int = 0
    dropped_tokens: int = 0
    aborts: int = 0
    aborts_failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def count_cancelled(self, samples: Sequence[Any]) -> None:
        """Undecoded samples of a group that was given up, whole or cut short by the abort."""
        for sample in samples:
            self.cancelled_samples += 1
            self.cancelled_tokens += num_tokens(sample)

    def count_dropped(self, reason: str, sample: Any) -> None:
        """An undecoded sample that is not usable, and is asked for again."""
        self.dropped[reason] += 1
        self.dropped_tokens += num_tokens(sample)
        self.redrawn_samples += 1

    def count_retracted(self, sample: Any) -> None:
        """A usable sample, undecoded; servers before 0.5.11 do not say how often they retracted it."""
        if sample["meta_info"].get("num_retractions") not in (None, 0):
            self.retracted_samples += 1
            self.retracted_tokens += num_tokens(sample)

    def totals(self) -> dict[str, float]:
        """Metric -> count since the client was made, all of docs/metrics.md's rollout/*_total."""
        found = {
            "rollout/retries_total": self.retries,
            "rollout/failed_requests_total": self.failures.total(),
            "rollout/dropped_samples_total": self.dropped.total(),
            "rollout/faults_timeout_total": 0,
            "rollout/faults_connection_total": 0,
            "rollout/faults_http_total": 0,
            "rollout/faults_body_total": 0,
            "rollout/faults_aborted_total": 0,
            "rollout/faults_stale_total": 0,
            "rollout/faults_routes_total": 0,
            "rollout/faults_sample_total": 0,
            "rollout/retracted_samples_total": self.retracted_samples,
            "rollout/retracted_tokens_total": self.retracted_tokens,
            "rollout/redrawn_samples_total": self.redrawn_samples,
            "rollout/dropped_tokens_total": self.dropped_tokens,
            "rollout/circuits_opened_total": self.circuits_opened,
            "rollout/cancelled_groups_total": self.cancelled_groups,
            "rollout/cancelled_samples_total": self.cancelled_samples,
            "rollout/cancelled_tokens_total": self.cancelled_tokens,
            "rollout/cut_samples_total": self.cut_samples,
            "rollout/resumed_samples_total": self.resumed_samples,
            "rollout/lost_samples_total": self.lost_samples,
            "rollout/stale_samples_total": self.stale_samples,
            "rollout/stale_tokens_total": self.stale_tokens,
        }
        for reason, count in (self.failures + self.dropped).items():
            found[class_of(reason)] += count
        return {name: float(count) for name, count in found.items()}


@dataclass
class CallStats:
    """generate() calls.  request_seconds: of every answered request; tokens: of the responses of complete groups; prompt_tokens
    and cached_tokens: what was sent of every answered sample, and what of it the server took from its prefix cache."""

    seconds: float = 0.0
    tokens: int = 0
    request_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def answered(self, seconds: float, samples: Sequence[Any]) -> None:
        """A request was answered, by samples that nothing is known of yet."""
        self.request_seconds.append(seconds)
        for meta in (sample.get("meta_info") for sample in samples if isinstance(sample, dict)):
            sent, cached = (
                (meta.get(key) for key in ("prompt_tokens", "cached_tokens")) if isinstance(meta, dict) else (0, 0)
            )
            if type(sent) is int and type(cached) is int and 0 <= cached <= sent:
                self.prompt_tokens += sent
                self.cached_tokens += cached


def num_tokens(sample: Any) -> int:
    """Response tokens of an undecoded sample, 0 where it has none."""
    tokens = sample.get("output_ids") if isinstance(sample, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


def class_of(reason: str) -> str:
    """The metric that counts a reason of Unusable or SampleDropped."""
    if reason.startswith("http_"):
        return "rollout/faults_http_total"
    if reason.startswith("routes_"):
        return "rollout/faults_routes_total"
    return CLASS_OF_REASON.get(reason, "rollout/faults_sample_total")
