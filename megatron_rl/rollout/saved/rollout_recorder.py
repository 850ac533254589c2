"""Writes the rollouts that a step trains on: lines, and with rollout.save_tensors tensors."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.batch.codec import file_arrays
from megatron_rl.config.redact import Redactor
from megatron_rl.config.run_paths import RunFolder, StepFile
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.lines import replace_lines
from megatron_rl.records import RolloutGroup, version_spans
from megatron_rl.rollout.saved.recorded_rollouts import RecordedRollout
from megatron_rl.rollout.saved.rollout_tensors import write_tensors

GROUP_CHOICE = 17
"""First of the seeds of GroupChoice: no other part of a run draws the same random numbers."""


class Recorder:
    """Writes a file of lines per step into the folder of a run, and with `save_tensors` also a
    file of tensors.

    Every data-parallel replica has a recorder with its own files (config/run_paths.py).

    save_tensors: the groups whose tensors are saved; True or False: all or none.  files: writes in
    its thread, and continues after an error; without it an error is raised.  hidden: environment
    variables whose values no line may show, beside those that look like secrets; an environment may
    have printed one.  Token ids are not changed: they are what the model was trained on.
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
        self.folder, self.files, self._redactor = RunFolder(folder), files, Redactor(hidden)
        self.dp_rank = dp_rank
        self.choice = (
            GroupChoice(float(save_tensors)) if isinstance(save_tensors, bool) else save_tensors
        )
        self._has_written = False

    def record(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Write every rollout of `groups`, whose ids are unique, as step `step`, counted from 1 as
        on the console.

        Only the groups of `choice` need their expert ids, which are among the tensors.
        """
        records = [
            record.to_json()
            for group in groups
            for record in to_records(step, group, self._redactor.known)
        ]
        path = self.folder.lines_path("rollouts", step, self.dp_rank)
        tensors_file = self.folder.tensors_path("rollouts", step, self.dp_rank)
        tensors: dict[str, np.ndarray] = {}
        for index in sorted(self.choice.of(step, len(groups))):
            for rollout in groups[index].rollouts:
                tensors |= file_arrays(rollout.id, rollout)
        trained = self.folder.tensors_path("trained", step, self.dp_rank)

        def write_lines() -> None:
            # An attempt at this step, before the run was resumed, may have left tensors, which have
            # other tokens under the same ids, and lines of later steps, perhaps of other prompts.
            tensors_file.unlink(missing_ok=True)
            trained.unlink(missing_ok=True)
            if not self._has_written:
                self._has_written = True
                self._forget_from(step)
            replace_lines(path, records)

        if self.files is None:
            write_lines()
            write_tensors(tensors_file, tensors)
        else:
            # lines at once, so that readers of a running job have them; tensors, which are large,
            # in the thread
            self.files.now(path, write_lines)
            self.files.later(tensors_file, lambda: write_tensors(tensors_file, tensors))

    def _forget_from(self, step: int) -> None:
        """Remove this replica's lines and tensors of the steps from `step` on."""
        for file in (*self.folder.line_files("rollouts"), *self.folder.tensor_files("rollouts")):
            if file.dp_rank == self.dp_rank:
                forget(file, step - 1)


def to_records(
    step: int, group: RolloutGroup, clean: Callable[[str], str]
) -> Iterator[RecordedRollout]:
    """Yield the lines of a group.

    clean: removes secrets from a text; an environment may have printed one.
    """
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
                num_turns=sequence.num_spans,
                turn_rewards=list(sequence.episode.turn_rewards),
                turn_ends=list(sequence.span_finish_reasons),
                turn_seconds=sequence.span_seconds,
                metrics=dict(sequence.episode.metrics),
                reward_metrics=dict(sequence.reward_metrics),
                source=group.prompt.source,
                episode="" if sequence.id == rollout.id else rollout.id,
            )


@dataclass(frozen=True)
class GroupChoice:
    """The groups of a step whose tensors are saved: `share` of all replicas' groups, at least one.

    The choice is the same on every rank.  It does not depend on the number D of replicas, of which
    each has every D-th prompt.
    """

    share: float
    """0: none, 1: all."""
    seed: int = 0
    dp_rank: int = 0
    dp_size: int = 1

    def of(self, step: int, num_groups: int) -> frozenset[int]:
        """Return indices among this replica's `num_groups`; every replica has equally many groups.

        step: counted from 1.
        """
        if self.share >= 1:
            return frozenset(range(num_groups))
        total = num_groups * self.dp_size
        count = max(1, round(self.share * total)) if self.share > 0 else 0
        order = np.random.default_rng([GROUP_CHOICE, self.seed, step]).permutation(total)
        chosen = order[:count].tolist()
        return frozenset(
            index // self.dp_size for index in chosen if index % self.dp_size == self.dp_rank
        )


def forget_steps(folder: Path, first_step: int, dp_size: int) -> None:
    """Remove what an earlier process wrote of the steps after `first_step`, which are trained
    again, where nothing replaces it.

    That is everything of replicas from `dp_size` on, which the resumed run no longer has, what is
    in files of the former layout, and the trainer's half of the others: another replica may train
    the same sequence this time, which would then have a line of each attempt.
    """
    run = RunFolder(folder)
    gone = [
        file
        for file in (*run.line_files("rollouts"), *run.tensor_files("rollouts"))
        if file.dp_rank >= dp_size or file.is_former
    ]
    for file in (*gone, *run.line_files("trained"), *run.tensor_files("trained")):
        forget(file, first_step)


def forget(file: StepFile, last_step: int) -> None:
    """Remove what a file has of the steps after `last_step`."""
    if not file.has_all_steps:
        if file.step > last_step:
            file.path.unlink()
    elif file.half == "rollouts":
        cut_steps(file.path, last_step + 1)
    else:
        forget_lines(file.path, last_step)


def forget_lines(path: Path, first_step: int) -> None:
    """Remove the lines of the steps after `first_step`."""
    temporary = path.with_suffix(".part")
    with open(path, "rb") as lines, open(temporary, "wb") as kept:
        kept.writelines(line for line in lines if step_of(line) <= first_step)
    # as large as before: nothing was removed, and the file need not be replaced
    if temporary.stat().st_size < path.stat().st_size:
        temporary.replace(path)
    else:
        temporary.unlink()


def cut_steps(path: Path, first: int) -> None:
    """Remove the lines of the steps from `first` on, which are at the end of `path`: steps are
    written in order.

    The file is read from its end, as it may have gigabytes.
    """
    # an empty file cannot be mapped
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        end = lines.rfind(b"\n") + 1  # a killed run may have left an incomplete line
        while end and step_of(lines[(start := lines.rfind(b"\n", 0, end - 1) + 1) : end]) >= first:
            end = start
    os.truncate(path, end)


def step_of(line: bytes) -> int:
    """Return the step of a line; 0 for one that cannot be read, which read_rollouts reports."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0
