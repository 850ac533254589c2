"""Counters of a rollout client: requests, retries and faults by class.

They only grow, and nothing is counted twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.rollout.group import Group

logger = logging.getLogger(__name__)

CLASS_OF_REASON = {
    "timeout": "timeout",
    "connection": "connection",
    "bad_body": "body",
    "aborted": "aborted",
    "stale_version": "stale",
    "no_adapter": "stale",
}
"""Reason -> its class in rollout/faults_CLASS_total.  Further classes: http for http_STATUS, routes
for routes_REASON, and sample for every other reason."""

NOT_METRICS = ("requests", "samples", "aborts", "aborts_failed", "failures", "dropped")
"""Fields of RolloutCounters that are not metrics; the others are, as rollout/NAME_total."""


@dataclass
class RolloutCounters:
    """Counts since the client was made."""

    requests: int = 0
    samples: int = 0
    """Complete samples that were used."""
    retries: int = 0
    circuits_opened: int = 0
    cancelled_groups: int = 0
    """Groups that were aborted because enough others were complete (over_sample)."""
    cancelled_samples: int = 0
    """Samples of cancelled groups that were dropped."""
    cancelled_tokens: int = 0
    """Response tokens of cancelled_samples."""
    cut_samples: int = 0
    """Responses that were cut short and kept, to be resumed."""
    resumed_samples: int = 0
    """Continuations of responses that were cut short."""
    lost_samples: int = 0
    """Responses that were cut short and that a server did not return in time."""
    stale_samples: int = 0
    """Responses, complete or cut short, that were dropped because they would be older than allowed
    when they are trained on."""
    stale_tokens: int = 0
    """Response tokens of stale_samples."""
    retracted_samples: int = 0
    """Samples that a server retracted and computed again, and that were used."""
    retracted_tokens: int = 0
    """Response tokens of retracted_samples."""
    redrawn_samples: int = 0
    """Responses sampled again because what was sampled of them was lost or not usable."""
    dropped_tokens: int = 0
    """Response tokens of samples that arrived and were not usable."""
    resent_routes: int = 0
    """Samples with all routes, of which some were known: the server ignores
    routed_experts_start_len."""
    failed_episodes: int = 0
    """Episodes of agent.function that raised, hung or returned no episode."""
    dropped_episodes: int = 0
    """Failed episodes that are left out of their group (agent.on_error = drop)."""
    resumed_episodes: int = 0
    """Episodes that were cut short and run again against what they had."""
    diverged_episodes: int = 0
    """Resumed episodes that asked for something else than before."""
    diverged_tokens: int = 0
    """Recorded tokens that were dropped because their episode diverged."""
    unread_turns: int = 0
    """Turns sampled for a request of messages that failed, or whose client hung up before its
    answer was written: they are not learned from."""
    unread_tokens: int = 0
    """Tokens of unread_turns."""
    after_stop_tokens: int = 0
    """Tokens that were sampled after a stop text of several tokens, and are left out."""
    tool_calls: int = 0
    """Tool calls that the model wrote where it was given tools."""
    tool_errors: int = 0
    """Tool calls that could not be made, or whose tool refused."""
    missing_tool_calls: int = 0
    """Turns without a call, or with others, where the client required one (tool_choice)."""
    aborts: int = 0
    """Requests whose abort was sent to the server."""
    aborts_failed: int = 0
    """Aborts that the server did not confirm."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests, by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples that arrived and were not usable, by reason."""

    def count_cancelled(self, samples: Sequence[object]) -> None:
        """Count undecoded samples of a cancelled group, complete or cut short by the abort."""
        self.cancelled_samples += len(samples)
        self.cancelled_tokens += sum(map(num_tokens, samples))

    def count_stale(self, num_tokens: int) -> None:
        """Count a response with tokens of too old weights, which is sampled again."""
        self.stale_samples += 1
        self.stale_tokens += num_tokens
        self.redrawn_samples += 1

    def count_dropped(self, reason: str, sample: object) -> None:
        """Count an undecoded sample that is not usable and is requested again."""
        self.dropped[reason] += 1
        self.dropped_tokens += num_tokens(sample)
        self.redrawn_samples += 1

    def count_retracted(self, sample: object) -> None:
        """Count a usable, undecoded sample if its server retracted it, which servers before 0.5.11
        do not report.
        """
        if meta_info(sample).get("num_retractions") not in (None, 0):
            self.retracted_samples += 1
            self.retracted_tokens += num_tokens(sample)

    def count_resent(self, url: str) -> None:
        """Count a sample with known routes from the server at `url`; the first one is logged."""
        if not self.resent_routes:
            logger.warning(
                "%s sends the routes of all tokens although a request names the first row it needs"
                " (routed_experts_start_len): used correctly, counted in"
                " rollout/resent_routes_total; SGLang 0.5.12 and later send the others only",
                url,
            )
        self.resent_routes += 1

    def totals(self) -> dict[str, float]:
        """Return metric -> count since the client was made, for all of docs/reference/metrics.md's
        rollout/*_total.
        """
        counts: dict[str, int] = {
            name: count for name, count in vars(self).items() if name not in NOT_METRICS
        }
        counts["failed_requests"] = self.failures.total()
        counts["dropped_samples"] = self.dropped.total()
        classes = (*CLASS_OF_REASON.values(), "http", "routes", "sample")
        counts |= {f"faults_{name}": 0 for name in classes}
        # copies: the client's thread may count meanwhile
        for reason, count in (self.failures.copy() + self.dropped.copy()).items():
            counts[f"faults_{class_of(reason)}"] += count
        return {f"rollout/{name}_total": float(count) for name, count in counts.items()}


TEACHER_FAULTS = {
    "timeout": "timeout",
    "connection": "connection",
    "bad_body": "body",
    "wrong_count": "count",
    "other_text": "text",
    "not_logprob": "value",
}
"""Reason -> its class in teacher/faults_CLASS_total; http for http_STATUS."""


@dataclass
class TeacherCounters:
    """Counts of the requests to a teacher's servers since the client was made."""

    requests: int = 0
    retries: int = 0
    circuits_opened: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests, by reason."""
    seconds: list[float] = field(default_factory=list)
    """Duration of every answered request since the last `take_seconds`."""

    def __add__(self, other: TeacherCounters) -> TeacherCounters:
        return TeacherCounters(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def take_seconds(self) -> list[float]:
        """Return `seconds`, and begin a new list."""
        taken, self.seconds = self.seconds, []
        return taken

    def totals(self) -> dict[str, float]:
        """Return metric -> count, for all of docs/reference/metrics.md's teacher/*_total."""
        counts = {
            "requests": self.requests,
            "retries": self.retries,
            "circuits_opened": self.circuits_opened,
        }
        counts |= {f"faults_{name}": 0 for name in (*TEACHER_FAULTS.values(), "http")}
        # a copy: the client's thread may count meanwhile
        for reason, count in self.failures.copy().items():
            counts[f"faults_{TEACHER_FAULTS.get(reason, 'http')}"] += count
        return {f"teacher/{name}_total": float(count) for name, count in counts.items()}


@dataclass
class CallStats:
    """Measurements of generate() and fill() between two calls of take_stats()."""

    seconds: float = 0.0
    """Time inside these calls."""
    tokens: int = 0
    """Response tokens of complete groups."""
    request_seconds: list[float] = field(default_factory=list)
    """Duration of every answered request."""
    environment_seconds: list[float] = field(default_factory=list)
    """Time of every finished episode outside sampling."""
    prompt_tokens: int = 0
    """Input tokens of the answered samples that report this number and the next."""
    cached_tokens: int = 0
    """The part of prompt_tokens that the server took from its prefix cache."""
    dropped_without_route: int = 0
    """Samples dropped for a row without a route (replay.on_missing_route = drop_sample)."""

    def __add__(self, other: CallStats) -> CallStats:
        return CallStats(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def answered(self, seconds: float, samples: Sequence[object]) -> None:
        """Add a request that was answered, with samples that are not validated yet."""
        self.request_seconds.append(seconds)
        for meta in map(meta_info, samples):
            sent, cached = meta.get("prompt_tokens"), meta.get("cached_tokens")
            # `type`, not isinstance: true is an int
            if type(sent) is int and type(cached) is int and 0 <= cached <= sent:
                self.prompt_tokens += sent
                self.cached_tokens += cached


def meta_info(sample: object) -> dict[str, object]:
    """Return the meta_info of an undecoded sample, {} where it has none."""
    meta = sample.get("meta_info") if isinstance(sample, dict) else None
    return meta if isinstance(meta, dict) else {}


def num_tokens(sample: object) -> int:
    """Return the number of response tokens of an undecoded sample, 0 where it has none."""
    tokens = sample.get("output_ids") if isinstance(sample, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


def class_of(reason: str) -> str:
    """Return the class of a RetryableError's or SampleDropped's reason."""
    if reason.startswith(("http_", "routes_")):
        return reason.partition("_")[0]
    return CLASS_OF_REASON.get(reason, "sample")


def drop_older(
    groups: Sequence[Group],
    version: int,
    counters: RolloutCounters,
    *,
    has_request: bool = False,
) -> None:
    """Drop and count the responses of `groups` with a token of weights older than `version`; they
    are sampled again.

    has_request: see Group.drop_older.
    """
    for group in groups:
        for rollout in group.drop_older(version, has_request=has_request):
            counters.count_stale(rollout.episode_length)
