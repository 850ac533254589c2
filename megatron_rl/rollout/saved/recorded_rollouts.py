"""The lines of rollouts: one per sequence, for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_rl.batch.codec import from_arrays
from megatron_rl.records import FinishReason, Rollout


@dataclass(frozen=True)
class RecordedRollout:
    """One line of rollouts."""

    step: int
    id: str
    prompt_id: str
    prompt: str
    response: str
    label: str
    reward: float | None
    """None where the response was not scored."""
    advantage: float | None
    """None where advantages were not computed."""
    prompt_length: int
    response_length: int
    """Number of sampled tokens."""
    finish_reason: str
    policy_versions: list[list[int]]
    """[[version, tokens], ...], the weights that sampled the response, in order
    (records.version_spans)."""
    environment_length: int = 0
    """Number of tokens that an environment wrote, which response_length does not count."""
    episode: str = ""
    """Id of the last sequence of the episode, in the lines of its other sequences, which come
    before."""
    num_turns: int = 1
    turn_rewards: list[float] = field(default_factory=list)
    """records.EpisodeRecord.turn_rewards."""
    turn_ends: list[FinishReason] = field(default_factory=list)
    """records.Rollout.span_finish_reasons."""
    turn_seconds: list[list[float]] = field(default_factory=list, compare=False)
    """records.Rollout.span_seconds; files of older versions have none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout function."""
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the reward function."""
    source: str = ""
    """Name of the prompt's source, where data.train has several."""

    def to_json(self) -> dict[str, object]:
        """Return the fields that are not empty lists or dicts; the source where there is one."""
        fields = {name: value for name, value in vars(self).items() if value not in ([], {})}
        if not self.source:
            del fields["source"]
        return fields


def read_rollouts(path: Path) -> Iterator[RecordedRollout]:
    """Yield the lines of a file of rollouts.

    Raises ValueError, with file and line number, for a line that is not such a record.  A resumed
    run writes the steps after its checkpoint again: see rollout_recorder.cut_steps, and for older
    runs read_episodes.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
                # older files have one version for the entire response: read as one span
                if "policy_version" in fields:
                    fields["policy_versions"] = [
                        [fields.pop("policy_version"), fields.get("response_length")]
                    ]
                record = RecordedRollout(**fields)
                check_spans(record.policy_versions)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a rollout record: {error}") from error
            yield record


Episodes = dict[str, list[RecordedRollout]]
"""Id of a rollout -> the lines of its sequences, the one with this id last, in the order in which
they were written.
"""


def read_episodes(path: Path) -> dict[int, Episodes]:
    """Return the episodes of every step.

    A resumed run of an older version may have written a step again: each episode counts once, in
    its last place.  Lines whose episode does not follow them are left out: the run was killed while
    it wrote.
    """
    steps: dict[int, Episodes] = {}
    lines: list[RecordedRollout] = []
    for record in read_rollouts(path):
        lines.append(record)
        if not record.episode:
            of_step = steps.setdefault(record.step, {})
            of_step.pop(record.id, None)  # otherwise the dict would keep the first place
            of_step[record.id] = [line for line in lines if record.id in (line.id, line.episode)]
            lines = []
    return steps


def check_spans(spans: object) -> None:
    """Raise ValueError unless these are [[version, tokens], ...]."""
    if not isinstance(spans, list) or not all(
        isinstance(span, list)
        and len(span) == 2
        # not isinstance, which takes true for an int
        and all(type(value) is int for value in span)
        and span[1] > 0
        for span in spans
    ):
        raise ValueError(f"policy_versions = {spans}: must be [[version, tokens], ...]")


def to_rollout(record: RecordedRollout, array: Callable[[str], np.ndarray | None]) -> Rollout:
    """Return the sequence of a line, without its text.  Raises what `from_arrays` raises.

    array: kind -> an array as of batch/codec.to_arrays, or None.
    """
    header = {
        "id": record.id,
        "prompt_length": record.prompt_length,
        "finish_reason": record.finish_reason,
        "versions": record.policy_versions,
        "turn_rewards": record.turn_rewards,
        "metrics": record.metrics,
        "reward_metrics": record.reward_metrics,
    }
    rollout = from_arrays(header, array)
    if not record.turn_ends:
        return rollout
    ends = [end for _, end in rollout.turn_spans]
    return rollout.with_episode(
        turns=tuple(zip(ends, record.turn_ends, strict=True)),
        turn_seconds=tuple((environment, model) for environment, model in record.turn_seconds),
    )
