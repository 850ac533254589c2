"""What a rollout client has seen: requests, retries, and faults by class.

Counts only grow; nothing is counted twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.rollout.partial import PartialGroup

logger = logging.getLogger(__name__)

CLASS_OF_REASON = {
    "timeout": "timeout",
    "connection": "connection",
    "bad_body": "body",
    "aborted": "aborted",
    "stale_version": "stale",
}
"""Class of each reason in rollout/faults_CLASS_total; also http for http_STATUS, routes for
routes_REASON, else sample.
"""

NOT_METRICS = ("requests", "samples", "aborts", "aborts_failed", "failures", "dropped")
"""Fields of RolloutCounters that are not metrics by themselves; the others are, as
rollout/NAME_total.
"""


@dataclass
class RolloutCounters:
    """What happened since the client was made.

    failures  requests, by reason; dropped: samples that came and were not usable, by reason
    cancelled groups, samples and their tokens that were aborted because enough others were complete
    (over_sample)
    cut       responses that were cut short and kept, to be resumed; resumed: continuations of such;
              lost: parts that a server did not return in time
    stale     responses, complete or cut, dropped because they would be older than the budget when
              they are trained on
    retracted samples that a server took back and computed again, and kept; their response tokens
    redrawn   responses sampled again because what was sampled of them was lost or not usable
              (dropped_tokens: of those that came)
    resent    answers with all routes, of which some were known: of a server that ignores
              routed_experts_start_len
    failed_episodes  of agent.function, which raised, hung or returned no episode; dropped_episodes:
                     those of them that are left
              out of their group (agent.on_error = drop)
    resumed_episodes  that were cut short and run again against what they had; diverged_episodes:
                      those that then asked
              something else, and their recorded tokens that were dropped for it
    unread_turns  sampled for a request of messages that failed, or whose client hung up before its
                  answer was written: not
              learned from; unread_tokens: of these turns
    tool_calls  that the model wrote where it was given tools; tool_errors: those that could not be
                made, or whose tool refused
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
    resent_routes: int = 0
    failed_episodes: int = 0
    dropped_episodes: int = 0
    resumed_episodes: int = 0
    diverged_episodes: int = 0
    diverged_tokens: int = 0
    unread_turns: int = 0
    unread_tokens: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    aborts: int = 0
    aborts_failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def count_cancelled(self, samples: Sequence[object]) -> None:
        """Undecoded samples of a group that was cancelled, complete or cut short by the abort."""
        self.cancelled_samples += len(samples)
        self.cancelled_tokens += sum(map(num_tokens, samples))

    def count_stale(self, num_tokens: int) -> None:
        """A response with tokens of too old weights, which is sampled again."""
        self.stale_samples += 1
        self.stale_tokens += num_tokens
        self.redrawn_samples += 1

    def count_dropped(self, reason: str, sample: object) -> None:
        """An undecoded sample that is not usable, and is requested again."""
        self.dropped[reason] += 1
        self.dropped_tokens += num_tokens(sample)
        self.redrawn_samples += 1

    def count_retracted(self, sample: object) -> None:
        """A usable sample, undecoded; servers before 0.5.11 do not report how often they retracted
        it.
        """
        if meta_info(sample).get("num_retractions") not in (None, 0):
            self.retracted_samples += 1
            self.retracted_tokens += num_tokens(sample)

    def count_resent(self, url: str) -> None:
        """An answer of the server at `url` with routes that are known; logged once."""
        if not self.resent_routes:
            logger.warning(
                "%s sends the routes of all tokens although a request names the first row it needs"
                " (routed_experts_start_len): used correctly, counted in"
                " rollout/resent_routes_total; SGLang 0.5.12 and later send the others only",
                url,
            )
        self.resent_routes += 1

    def totals(self) -> dict[str, float]:
        """Metric -> count since the client was made, all of docs/reference/metrics.md's
        rollout/*_total.
        """
        found: dict[str, int] = {
            name: count for name, count in vars(self).items() if name not in NOT_METRICS
        }
        found |= {"failed_requests": self.failures.total(), "dropped_samples": self.dropped.total()}
        found |= {
            f"faults_{kind}": 0 for kind in (*CLASS_OF_REASON.values(), "http", "routes", "sample")
        }
        for reason, count in (self.failures.copy() + self.dropped.copy()).items():
            found[f"faults_{class_of(reason)}"] += count
        return {f"rollout/{name}_total": float(count) for name, count in found.items()}


@dataclass
class CallStats:
    """Calls of generate() and fill().

    request_seconds  of every answered request
    tokens           of the responses of complete groups
    prompt_tokens    that were sent, of every answered sample; cached_tokens: those the server took
                     from its prefix cache
    environment_seconds  of every finished episode: its time outside sampling
    dropped_without_route  samples dropped for a row without a route (replay.on_missing_route =
                           drop_sample)
    """

    seconds: float = 0.0
    tokens: int = 0
    request_seconds: list[float] = field(default_factory=list)
    environment_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0  # these two only of samples that report both
    cached_tokens: int = 0
    dropped_without_route: int = 0

    def __add__(self, other: CallStats) -> CallStats:
        return CallStats(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def answered(self, seconds: float, samples: Sequence[object]) -> None:
        """A request was answered, by samples that are not validated yet."""
        self.request_seconds.append(seconds)
        for meta in map(meta_info, samples):
            sent, cached = meta.get("prompt_tokens"), meta.get("cached_tokens")
            # `type`, not isinstance: true is an int
            if type(sent) is int and type(cached) is int and 0 <= cached <= sent:
                self.prompt_tokens += sent
                self.cached_tokens += cached


def meta_info(sample: object) -> dict[str, object]:
    """The meta_info of an undecoded sample, {} where it has none."""
    meta = sample.get("meta_info") if isinstance(sample, dict) else None
    return meta if isinstance(meta, dict) else {}


def num_tokens(sample: object) -> int:
    """Response tokens of an undecoded sample, 0 where it has none."""
    tokens = sample.get("output_ids") if isinstance(sample, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


def class_of(reason: str) -> str:
    """The class of a RetryableError's or SampleDropped's reason."""
    if reason.startswith(("http_", "routes_")):
        return reason.partition("_")[0]
    return CLASS_OF_REASON.get(reason, "sample")


def drop_older(
    groups: Sequence[PartialGroup],
    version: int,
    counters: RolloutCounters,
    *,
    is_asked: bool = False,
) -> None:
    """Drop, and count, responses of `groups` with a token of weights older than `version`: they are
    sampled again.
    """
    for group in groups:
        for rollout in group.drop_older(version, is_asked=is_asked):
            counters.count_stale(rollout.episode_length)
