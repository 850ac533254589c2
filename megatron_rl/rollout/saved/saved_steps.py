"""Reads the rollouts that an earlier run saved (rollout.save_tensors): training without servers.

The folder is that run's directory: config.toml, and a file of lines and one of tensors per step and
replica that sampled (config/run_paths.py).  Replica d of D took every D-th prompt of a step: its
group i answers prompt i x D + d.  Any number of replicas may train on the groups now.
Shapes: S tokens of a rollout, L MoE layers, K top-k, G responses of a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_rl.batch.codec import TOP_KINDS, arrays_in_file, joined
from megatron_rl.config import Config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.saved.recorded_rollouts import RecordedRollout, read_episodes, to_rollout
from megatron_rl.rollout.saved.saved_config import check_config, first_step_number

ALWAYS_READ = (
    "tokens", "logprobs", "environment", "episode_digest", "mask_sizes", "mask_codes",
    "teacher_logprobs", *TOP_KINDS,
)  # fmt: skip
"""Kinds of tensors that are read also where the run needs no routes."""

Steps = dict[int, list[RecordedRollout]]
"""Number of a step -> its lines."""
SavedGroup = tuple[Path, tuple[RecordedRollout, ...]]
"""The file of a group's tensors, and its lines: one per sequence."""


class SavedSteps:
    """The saved steps from `first_step` on that the run `cfg` trains on.

    The constructor checks that they fit this configuration and model, before anything is trained.
    It raises ValueError, naming what differs, the rule and the fix, for a folder without the steps
    or their tensors, for another model, temperature, number of prompts or responses, and for routes
    that are needed and missing or of another shape.  Their digest is checked where they are packed:
    it proves that routes belong to their tokens.
    """

    def __init__(self, folder: Path, cfg: Config, spec: ModelSizes, *, first_step: int = 0) -> None:
        self.folder, self.cfg, self.spec = folder, cfg, spec
        check_config(folder, cfg)
        replicas = read_replicas(folder)
        self.first = first_step_number(folder)
        self.steps = {
            step: self._groups_of(step + self.first, replicas)
            for step in range(first_step, cfg.run.num_steps)
        }

    def groups(self, step: int, dp_rank: int, dp_size: int) -> list[RolloutGroup]:
        """Return the scored groups of replica `dp_rank` of `dp_size`, in the order of the step's
        prompts.

        Routes are layer-major in memory, as the client returns them.  Raises ValueError for a token
        outside the vocabulary.
        """
        return [
            self._load(tensors, records) for tensors, records in self.steps[step][dp_rank::dp_size]
        ]

    def _groups_of(self, step: int, replicas: Mapping[int, Steps]) -> list[SavedGroup]:
        """Return the groups of a step, in the order of its prompts."""
        run = self.cfg.run
        known = sorted(set().union(*replicas.values()))
        if step not in known:
            saved = f"steps {known[0]} to {known[-1]}" if known else "none"
            raise ValueError(
                f"{self.folder} has no rollouts of step {step}: every step to be trained must have"
                f" been saved; it has {saved}; set run.num_steps ="
                f" {known[-1] + 1 - self.first if known else 0}, or record more"
            )
        parts = []
        # a run that was resumed on another number of replicas has steps of both numbers
        for dp_rank, steps in replicas.items():
            if step not in steps:
                continue
            tensors = RunFolder(self.folder).tensors_of("rollouts", step, dp_rank)
            records = self._with_tensors(tensors, steps[step])
            # a prompt drawn twice in a step has two groups, whose ids differ (with_unique_ids)
            by_group = itertools.groupby(
                records, lambda record: (record.episode or record.id).rpartition("/")[0]
            )
            parts.append([(tensors, tuple(group)) for _, group in by_group])
        sizes = [len(part) for part in parts]
        if sum(sizes) != run.prompts_per_step or len(set(sizes)) != 1:
            raise ValueError(
                f"{self.folder}, step {step}: {sizes} prompts in {len(sizes)} file(s): must be"
                f" run.prompts_per_step = {run.prompts_per_step}, equally many in each; set"
                f" run.prompts_per_step = {sum(sizes)} if no file is missing"
            )
        for _, group in itertools.chain(*parts):
            size = sum(not record.episode for record in group)
            if size != run.group_size:
                raise ValueError(
                    f"{self.folder}, step {step}, prompt {group[0].prompt_id}: {size} responses:"
                    f" must be run.group_size = {run.group_size}; set run.group_size = {size}"
                )
        # the order of the step's prompts
        return [group for row in zip(*parts, strict=True) for group in row]

    def _with_tensors(
        self, tensors: Path, records: Sequence[RecordedRollout]
    ) -> list[RecordedRollout]:
        """Return the records whose tensors are in the file `tensors`, checked against it.

        The file is that of the last attempt at the step; lines of earlier ones have no tensors.
        """
        try:
            with safe_open(tensors, framework="numpy") as file:
                names = set(file.keys())
                kept = [record for record in records if f"{record.id}:tokens" in names]
                for record in kept:
                    self._check_record(f"{tensors}: rollout {record.id}", file, names, record)
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(
                f"{tensors}: no tensors that can be read ({error}): training needs tokens,"
                " log-probs and routes; record them with --only rollout or rollout.save_tensors ="
                " true"
            ) from error
        unknown = {name.rsplit(":", 1)[0] for name in names} - {record.id for record in kept}
        if unknown:
            raise ValueError(
                f"{tensors}: rollout {min(unknown)} has no line in the jsonl beside it: both must"
                " be of one run"
            )
        return kept

    def _check_record(
        self, where: str, file: safe_open, names: Collection[str], record: RecordedRollout
    ) -> None:
        replay = self.cfg.replay
        if record.reward is None:
            raise ValueError(
                f"{where} has no reward: saved rollouts must be scored; record them again"
            )
        if (f"{record.id}:mask_sizes" in names) != (self.cfg.rollout.truncation is not None):
            raise ValueError(
                f"{where}: kept sets must be there with rollout.top_p, top_k or min_p, and not"
                " without; record them again"
            )
        teacher = self.cfg.teachers.name_for(record.source)
        if teacher and f"{record.id}:teacher_logprobs" not in names:
            raise ValueError(
                f"{where} has no log-probs of a teacher, and teachers.{teacher} scores its source:"
                " no server scores saved rollouts; record them with this teacher, or remove it"
            )
        top_k = self.cfg.loss.teacher_top_k
        if teacher and top_k and f"{record.id}:{TOP_KINDS[0]}" not in names:
            raise ValueError(
                f"{where} has no most probable tokens of its teacher, and loss.teacher_top_k ="
                f" {top_k}: record them with this setting, or set loss.teacher_form = token"
            )
        if not self.cfg.needs_routes:
            return
        if f"{record.id}:routed_experts" not in names:
            raise ValueError(
                f"{where} has no expert ids: replay.mode = {replay.mode} with replay.measure ="
                f" {str(replay.measure).lower()} needs them; record with the same replay settings,"
                " or train with replay.mode = none (or R2) and replay.measure = false"
            )
        rows = record.prompt_length + record.response_length + record.environment_length - 1
        shape = list(file.get_slice(f"{record.id}:routed_experts").get_shape())
        expected = [rows, len(self.spec.moe_layers), self.spec.top_k]
        if shape != expected:
            raise ValueError(
                f"{where}: expert ids of shape {shape}: must be {expected} = (tokens - 1, MoE"
                f" layers, top-k) of the model {self.cfg.model.path}; set model.path to the one"
                " that sampled them"
            )
        if f"{record.id}:missing_routes" in names and replay.on_missing_route == "drop_sample":
            raise ValueError(
                f"{where} has rows without a route: replay.on_missing_route = drop_sample samples"
                " it again, which needs a server; set replay.on_missing_route = live or mask_token"
            )

    def _load(self, tensors: Path, records: Sequence[RecordedRollout]) -> RolloutGroup:
        with safe_open(tensors, framework="numpy") as file:
            names = set(file.keys())
            sequences = {record.id: self._sequence(file, names, record) for record in records}
        rollouts = []
        for record in (record for record in records if not record.episode):
            earlier = [sequences[other.id] for other in records if other.episode == record.id]
            rollouts.append(joined(sequences[record.id], earlier))
        first = records[0]
        ids = tuple(sequences[first.id].tokens[: first.prompt_length].tolist())
        rewards = np.array([record.reward for record in records if not record.episode], np.float32)
        prompt = Prompt(first.prompt_id, first.prompt, ids, first.label, source=first.source)
        return RolloutGroup(prompt, tuple(rollouts), rewards)

    def _sequence(
        self, file: safe_open, names: Collection[str], record: RecordedRollout
    ) -> Rollout:
        if record.finish_reason not in ("stop", "length"):
            raise ValueError(
                f"rollout {record.id}: finish_reason = {record.finish_reason!r}: must be stop or"
                " length; record again"
            )
        array = arrays_in_file(file, names, record.id)
        # routes are most of the bytes: they are read only where this run uses them
        needed = self.cfg.needs_routes
        rollout = to_rollout(
            record, lambda kind: array(kind) if needed or kind in ALWAYS_READ else None
        )
        tokens = rollout.tokens
        if not 0 <= tokens.min() <= tokens.max() < self.spec.vocab_size:
            raise ValueError(
                f"rollout {record.id}: token ids {tokens.min()}..{tokens.max()}: must be below the"
                f" vocabulary {self.spec.vocab_size} of {self.cfg.model.path}; set model.path to"
                " the model that sampled them"
            )
        return rollout


def read_replicas(folder: Path) -> dict[int, Steps]:
    """Return replica -> its steps, in order; without texts of responses, to save memory."""
    replicas: dict[int, Steps] = {}
    for file in RunFolder(folder).line_files("rollouts"):
        steps = replicas.setdefault(file.dp_rank, {})
        for step, episodes in read_episodes(file.path).items():
            lines = [line for of_one in episodes.values() for line in of_one]
            steps[step] = [replace(line, response="") for line in lines]
    return replicas
