"""The source of a step's rollouts: servers that sample them (live_rollouts.py), a run that saved
them (saved_rollouts.py), or rows that have their answers (sft_rows.py).

Every method is collective unless it says otherwise: all ranks call it at the same place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.records import Files, RolloutGroup


class RolloutSource(ABC):
    """A source of rollouts."""

    policy_version: int
    """Version of the trainer's weights as sync_weights counted it last.  The servers have these
    weights, with rollout.release_memory from the next sampling on."""

    @abstractmethod
    def start(self, first_step: int) -> None:
        """Prepare for `first_step`, after a checkpoint was restored.

        Raises an error for wrong servers or files.
        """

    @abstractmethod
    def sample(self, step: int) -> list[RolloutGroup]:
        """Return the step's scored groups of this replica, on each of its ranks; their ids are
        unique.

        Raises SamplingStopped when a signal ended sampling, ValueError when missing routes stop the
        run.
        """

    @abstractmethod
    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Save and count the groups that the step trains on.  Not collective."""

    @abstractmethod
    def sync_weights(self, version: int) -> None:
        """Send the current weights to the servers as `version`; on return every server in use has
        confirmed it.

        With rollout.release_memory the weights are sent when the servers sample next and get the
        GPUs' memory.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves, as plain values."""

    @abstractmethod
    def restore(
        self, state: Mapping[str, Any], checkpoint: Path, accepted: Sequence[str]
    ) -> list[str]:
        """Continue from `state`; return lines for the log.

        accepted: changed settings that the user allowed.
        """

    def give_memory_to_trainer(self) -> None:
        """Let the servers free their GPU memory, then restore the trainer's.

        It has no effect without rollout.release_memory, or where the trainer has the memory.  It is
        called before anything that uses the trainer's weights; the next weight sync does the
        reverse.
        """
        return

    def evaluate(self) -> dict[str, float]:
        """Return the metrics eval/* of the servers' weights; {} without evaluation sets, or when a
        signal ended the evaluation.
        """
        return {}

    def is_used_up(self) -> bool:
        """Return True if a source of data.train is used up, and no prompts are left for a step."""
        return False

    def finish_step(self) -> None:
        """End a step that is trained, before it is reported."""
        return

    def files(self, *, is_step_done: bool) -> Files:
        """Return extra files of this rank for a checkpoint: name -> writer."""
        return {}

    def stop(self) -> None:
        """Abort sampling: a signal came, and sampling may outlast its grace.

        Not collective; called from another thread.
        """
        return


class SourceWithoutServers(RolloutSource):
    """A source whose rollouts come from files: nothing receives weights, and its state is the
    position in the data.
    """

    prompts: PromptStream

    def sync_weights(self, version: int) -> None:
        self.policy_version = version

    def state_dict(self) -> dict[str, Any]:
        return {"policy_version": self.policy_version, "prompts": self.prompts.state_dict()}

    def restore(
        self, state: Mapping[str, Any], checkpoint: Path, accepted: Sequence[str]
    ) -> list[str]:
        return [restore_prompts(self, self.prompts, state)]


def restore_prompts(source: RolloutSource, prompts: PromptStream, state: Mapping[str, Any]) -> str:
    """Restore the policy version and the position in the data; return a line for the log."""
    source.policy_version = state["policy_version"]
    prompts.load_state_dict(state["prompts"])
    return f"  policy version {source.policy_version}; {prompts.place()}"
