"""The types of the checks: a saved sequence of any trainer, and a finding.

Shapes: S tokens of a sequence, R of them sampled, L MoE layers, K top-k; routes [S - 1, L, K].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

Spans = tuple[tuple[int, int], ...]
"""(start, end) of spans of tokens."""


@dataclass(frozen=True)
class RecordedRollout:
    """One line of rollouts: see docs/reference/token_data.md."""

    step: int
    id: str
    prompt_id: str
    prompt: str
    response: str
    label: str
    reward: float | None
    advantage: float | None
    prompt_length: int
    response_length: int
    """Sampled tokens, without those that an environment wrote."""
    finish_reason: str
    policy_versions: list[list[int]]
    """[[version, tokens], ...] of the weights that sampled the response, in order."""
    environment_length: int = 0
    episode: str = ""
    """Id of the sequence that ends the episode, in the lines of its other sequences."""
    num_turns: int = 1
    turn_rewards: list[float] = field(default_factory=list)
    turn_ends: list[str] = field(default_factory=list)
    turn_seconds: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    reward_metrics: dict[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Dumped:
    """One sequence as read from disk; nothing about it is trusted."""

    record: RecordedRollout
    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray | None
    missing: np.ndarray | None = None
    """Rows that are recorded as without a route, bool [S - 1]."""
    digest: bytes | None = None
    environment: Spans = ()
    """Spans that an environment wrote after the prompt."""
    episode_digest: bytes | None = None
    mask: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    """Sizes and codes of the kept sets; None if not saved."""

    @property
    def present(self) -> np.ndarray:
        """Return where a route is not recorded as missing, bool [rows]; all True if that record is
        invalid.
        """
        rows = 0 if self.routes is None else len(self.routes)
        if self.missing is None or self.missing.dtype != bool or self.missing.shape != (rows,):
            return np.ones(rows, bool)
        return ~self.missing


@dataclass(frozen=True)
class Finding:
    """A failed check."""

    check: str
    where: str
    """Its rollout or step."""
    found: str
    """The value, and the rule that it breaks."""
    cause: str
    """The usual cause."""


Problems = Iterator[tuple[str, str, str]]
"""(check, found, cause) of the problems of one sequence, see Finding."""
