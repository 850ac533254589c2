"""rollouts.jsonl: one line per sequence, for people; beside it, with save_tensors, one safetensors
file per step, for tools.

The tensors are "ID:KIND" for every sequence's id, with the kinds, shapes and dtypes of
batch/codec.to_arrays: the servers' half of docs/reference/token_data.md.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from megatron_rl.batch.codec import file_arrays, from_arrays, to_spans
from megatron_rl.config.redact import Redactor
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.lines import append_lines
from megatron_rl.records import FinishReason, Rollout, RolloutGroup, check_digest, version_spans

SCHEMA = "1"
"""Of the tensor files and of trained.jsonl; docs/reference/token_data.md."""
HALVES = re.compile(
    r"(?P<half>rollouts|trained)(?:\.dp(?P<rank>\d+))?(?:\.jsonl|_(?P<step>\d+)\.safetensors)",
    re.ASCII,
)
"""What replicas write: the servers' half, and the trainer's."""
GROUP_CHOICE = 17
"""First of the seeds of GroupChoice: random numbers of its own."""


@dataclass(frozen=True)
class RecordedRollout:
    """One line of rollouts.jsonl.  `reward` and `advantage` are None where their stage had not run.

    policy_versions: [[version, tokens], ...], the weights that sampled the response, in order
    (records.version_spans).
    environment_length: tokens of the response that an environment wrote, not among response_length.
    metrics: of the rollout function; reward_metrics: of the reward function; turn_rewards,
    turn_ends: see records.Rollout.
    episode: of an episode of several sequences the id of the last one, in the lines of the others,
    which come before it.
    """

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
    finish_reason: str
    policy_versions: list[list[int]]
    environment_length: int = 0
    episode: str = ""
    num_turns: int = 1
    turn_rewards: list[float] = field(default_factory=list)
    turn_ends: list[FinishReason] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    reward_metrics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Without what is empty."""
        return {name: value for name, value in vars(self).items() if value not in ([], {})}


class Recorder:
    """Appends to `folder`/NAME.jsonl; with `save_tensors` also writes
    `folder`/NAME_STEP.safetensors.

    One per data-parallel replica, each with a file of its own: rollouts.jsonl, rollouts.dp1.jsonl,
    ...
    save_tensors: which groups; a Boolean: all or none.  files: writes the tensors in its thread and
    continues after an error; without it an error is raised.  hidden: environment variables whose
    values no line may show, beside those that look like secrets; an environment may have printed
    one.  Token ids are what the model was trained on, and are not changed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dp_rank: int = 0,
        save_tensors: bool | GroupChoice = False,
        files: FileWriter | None = None,
        hidden: Iterable[str | None] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.files, self._redactor = folder, files, Redactor(hidden)
        self.name = replica_file("rollouts", dp_rank)
        self.choice = (
            GroupChoice(float(save_tensors)) if isinstance(save_tensors, bool) else save_tensors
        )
        self._has_written = False

    def record(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Write every rollout of `groups` as step `step`, counted from 1 as on the console; see
        with_unique_ids.
        """
        groups = with_unique_ids(groups)
        records = [
            record.to_json()
            for group in groups
            for record in to_records(step, group, self._redactor.known)
        ]
        path, side = self.folder / f"{self.name}.jsonl", tensors_path(self.folder, step, self.name)
        tensors: dict[str, np.ndarray] = {}
        for index in sorted(self.choice.of(step, len(groups))):
            for rollout in groups[index].rollouts:
                tensors |= file_arrays(rollout.id, rollout)
        trained = tensors_path(self.folder, step, self.name.replace("rollouts", "trained", 1))

        def write_lines() -> None:
            # of an attempt at this step that the run was resumed before
            trained.unlink(missing_ok=True)
            # so are lines of this step and later ones, perhaps of other prompts
            if not self._has_written:
                self._has_written = True
                cut_steps(path, step)
            append_lines(path, records)

        if self.files is None:
            write_lines()
            write_tensors(side, tensors)
        else:
            self.files.now(path, write_lines)
            self.files.later(side, lambda: write_tensors(side, tensors))


@dataclass(frozen=True)
class GroupChoice:
    """Which groups of a step have their tensors saved: `share` of all replicas' groups, at least
    one.

    The same on every rank, and for the same prompts on every number of replicas, of which replica d
    has every D-th prompt.
    """

    share: float
    seed: int = 0
    dp_rank: int = 0
    dp_size: int = 1

    def of(self, step: int, num_groups: int) -> frozenset[int]:
        """Indices among this replica's `num_groups`; every replica has as many.

        step: counted from 1.
        """
        if self.share >= 1:
            return frozenset(range(num_groups))
        total = num_groups * self.dp_size
        count = max(1, round(self.share * total)) if self.share > 0 else 0
        chosen = (
            np.random.default_rng([GROUP_CHOICE, self.seed, step])
            .permutation(total)[:count]
            .tolist()
        )
        return frozenset(
            index // self.dp_size for index in chosen if index % self.dp_size == self.dp_rank
        )


def replica_file(name: str, dp_rank: int) -> str:
    """Stem of the files of a data-parallel replica."""
    return name if dp_rank == 0 else f"{name}.dp{dp_rank}"


def forget_steps(folder: Path, first_step: int, dp_size: int) -> None:
    """Remove what an earlier process wrote of the steps after `first_step`, which are trained
    again, where nothing replaces it.

    Of replicas from `dp_size` on, which the resumed run no longer has, that is everything; of the
    others the trainer's half: the same sequence may be trained by another replica this time, and
    would have a line of each attempt.
    """
    for path in folder.iterdir():
        found = HALVES.fullmatch(path.name)
        if found is None or (found["half"] == "rollouts" and int(found["rank"] or 0) < dp_size):
            continue
        if found["step"] is None:
            forget_lines(path, first_step)
        elif int(found["step"]) > first_step:
            path.unlink()


def forget_lines(path: Path, first_step: int) -> None:
    """Remove the lines of the steps after `first_step`."""
    temporary = path.with_suffix(".part")
    with open(path, "rb") as lines, open(temporary, "wb") as kept:
        kept.writelines(line for line in lines if step_of(line) <= first_step)
    if temporary.stat().st_size < path.stat().st_size:
        temporary.replace(path)
    else:
        temporary.unlink()


def cut_steps(path: Path, first: int) -> None:
    """Remove the lines of steps from `first` on at the end of `path`, where they are: they were
    written in order.

    Read from the end: the file may have gigabytes.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        end = lines.rfind(b"\n") + 1  # without the incomplete line of a killed run
        while end and step_of(lines[(start := lines.rfind(b"\n", 0, end - 1) + 1) : end]) >= first:
            end = start
    os.truncate(path, end)


def step_of(line: bytes) -> int:
    """0 for one that cannot be read: whoever reads the file names it."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `path`, complete or not at all; without tensors a file of an earlier run of the same
    step is removed.
    """
    if not tensors:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".part")
    try:
        save_file(dict(tensors), temporary, metadata={"schema": SCHEMA})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rollouts(path: Path) -> Iterator[RecordedRollout]:
    """Yield the lines of a rollouts.jsonl.  ValueError with file and line number for one that is
    not such a record.

    A resumed run writes the steps after its checkpoint again: see cut_steps, and for older runs
    read_episodes. Lines of older files name one policy_version for the whole response; they are
    read as one span.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
                # older files have one version for the entire response
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
"""Id of a rollout -> the lines of its sequences, the one with this id last; in the order in which
they were written.
"""


def read_episodes(path: Path) -> dict[int, Episodes]:
    """The episodes of every step.  Of a step that a resumed run of an older version wrote again
    each episode counts once, in its last place.

    A line whose episode does not follow it (the run was killed while it wrote) is left out.
    """
    steps: dict[int, Episodes] = {}
    lines: list[RecordedRollout] = []
    for record in read_rollouts(path):
        lines.append(record)
        if not record.episode:
            of_step = steps.setdefault(record.step, {})
            of_step.pop(record.id, None)  # a dict keeps the place of the first
            of_step[record.id] = [line for line in lines if record.id in (line.id, line.episode)]
            lines = []
    return steps


def check_spans(spans: object) -> None:
    """Raise ValueError unless these are [[version, tokens], ...]."""
    if not isinstance(spans, list) or not all(
        isinstance(span, list)
        and len(span) == 2
        and all(type(value) is int for value in span)
        and span[1] > 0
        for span in spans
    ):
        raise ValueError(f"policy_versions = {spans}: must be [[version, tokens], ...]")


def to_rollout(record: RecordedRollout, array: Callable[[str], np.ndarray | None]) -> Rollout:
    """The sequence of a line, without its text; array(kind): one of batch/codec.to_arrays, or None.

    Raises as `from_arrays`.
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
    return rollout.with_episode(turns=tuple(zip(ends, record.turn_ends, strict=True)))


def read_tensors(folder: Path, step: int, name: str = "rollouts") -> dict[str, np.ndarray]:
    """The tensors of `step`, of the replica whose files begin with `name`.

    Raises ValueError for expert ids without a digest, or that are not those of their tokens.
    """
    tensors = load_file(tensors_path(folder, step, name))
    for name, routes in tensors.items():
        rollout, kind = name.rsplit(":", 1)
        if kind == "routed_experts":
            digest = tensors.get(f"{rollout}:routes_digest")
            environment = to_spans(tensors.get(f"{rollout}:environment"))
            expected = None if digest is None else digest.tobytes()
            check_digest(rollout, tensors[f"{rollout}:tokens"], routes, expected, environment)
    return tensors


def tensors_path(folder: Path, step: int, name: str = "rollouts") -> Path:
    return folder / f"{name}_{step:06d}.safetensors"


def with_unique_ids(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """For a prompt drawn again in the same step the rollout ids Q/K become Q#2/K, the third time
    Q#3/K, and so on.

    Tensors and lines are found by id: of two equal ones the first would be lost.
    """
    taken: set[str] = set()
    unique = []
    for group in groups:
        rollouts, times = group.rollouts, 1
        while not taken.isdisjoint(ids_of(rollouts)):
            times += 1
            parts = [rollout.id.rpartition("/") for rollout in group.rollouts]
            names = [f"{prompt}#{times}/{k}" for prompt, _, k in parts]
            rollouts = tuple(
                rollout.named(name) for rollout, name in zip(rollouts, names, strict=True)
            )
        taken.update(ids_of(rollouts))
        unique.append(replace(group, rollouts=rollouts))
    return unique


def ids_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Of all their sequences."""
    return [sequence.id for rollout in rollouts for sequence in rollout.sequences]


def to_records(
    step: int, group: RolloutGroup, clean: Callable[[str], str]
) -> Iterator[RecordedRollout]:
    """clean: what removes secrets from a text."""
    for k, rollout in enumerate(group.rollouts):
        for sequence in rollout.sequences:
            yield RecordedRollout(
                step=step,
                id=sequence.id,
                prompt_id=group.prompt.id,
                prompt=clean(group.prompt.text),
                response=clean(sequence.response_text),
                label=clean(group.prompt.label),
                reward=None if group.rewards is None else float(group.rewards[k]),
                advantage=None if group.advantages is None else float(group.advantages[k]),
                prompt_length=sequence.prompt_length,
                response_length=sequence.response_length,
                finish_reason=sequence.finish_reason,
                policy_versions=version_spans(sequence.policy_versions),
                environment_length=sequence.environment_length,
                num_turns=sequence.num_turns,
                turn_rewards=list(sequence.episode.turn_rewards),
                turn_ends=list(sequence.turn_ends),
                metrics=dict(sequence.episode.metrics),
                reward_metrics=dict(sequence.reward_metrics),
                episode="" if sequence.id == rollout.id else rollout.id,
            )
