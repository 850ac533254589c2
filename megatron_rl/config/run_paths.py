"""The files of a run's folder, by name: the only place that knows them, in both layouts.

    config.toml  metrics.jsonl  events.jsonl  status.json  report.html     what people open
    rollouts/step_000012.jsonl                 lines of step 12, by replica 0
    rollouts/step_000012.dp1.safetensors       tensors of step 12, by replica 1
    trained/...                                the trainer's half, of the same names
    checkpoints/  hf/  logs/  tensorboard/  batches/  trace/  weights/

Versions up to 0.3 wrote both halves loose into the folder: HALF.jsonl or HALF.dp1.jsonl with the
lines of all steps, and HALF_000012.safetensors or HALF.dp1_000012.safetensors.  A run writes only
the present layout.  Readers get the files of both, since a run of the former layout may have been
resumed: then its later steps are in the present one.  This module imports no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

Half = Literal["rollouts", "trained"]
"""Who wrote a file of a step: the servers' half of the tokens, or the trainer's."""
Kind = Literal["jsonl", "safetensors"]

IN_FOLDER = re.compile(r"step_(\d{6,})(?:\.dp([1-9]\d*))?\.(jsonl|safetensors)", re.ASCII)
LOOSE = re.compile(
    r"(rollouts|trained)(?:\.dp([1-9]\d*))?(?:\.(jsonl)|_(\d{6,})\.(safetensors))", re.ASCII
)
ALL_STEPS = -1


@dataclass(frozen=True, order=True)
class StepFile:
    """A file that one replica wrote about a step, or in the former layout about all steps."""

    dp_rank: int
    step: int
    """From 1 (version 0.1: 0); ALL_STEPS for lines of the former layout."""
    half: Half
    kind: Kind
    name: str
    """Its path inside the run's folder, with "/"."""
    path: Path

    @property
    def is_former(self) -> bool:
        """Whether it is of the former layout: nothing is written into it any more."""
        return "/" not in self.name

    @property
    def has_all_steps(self) -> bool:
        """Whether it is a file of lines of the former layout."""
        return self.step == ALL_STEPS

    @property
    def writer(self) -> str:
        """The name of half and replica in lines and in addresses, as "rollouts.dp1"."""
        return writer_name(self.half, self.dp_rank)


@dataclass(frozen=True)
class RunFolder:
    """The paths in the folder of a run; making one touches no disk."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened beside the steps."""
        return self.path / "events.jsonl"

    @property
    def status(self) -> Path:
        """What every rank does now, for `megatron-rl top`."""
        return self.path / "status.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def picture(self) -> Path:
        """The curves of the report, for trackers."""
        return self.path / "report.png"

    @property
    def tracker_ids(self) -> Path:
        """The run's id in each tracker."""
        return self.path / "trackers.json"

    @property
    def checkpoints(self) -> Path:
        """What a run is resumed from."""
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        """The trained model in Hugging Face's format."""
        return self.path / "hf"

    @property
    def evaluation(self) -> Path:
        """The results of `megatron-rl evaluate --run`."""
        return self.path / "evaluation"

    @property
    def logs(self) -> Path:
        """Output of the servers, and full tracebacks of the ranks."""
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def batches(self) -> Path:
        """The mini-batches of run.save_batches."""
        return self.path / "batches"

    @property
    def traces(self) -> Path:
        return self.path / "trace"

    @property
    def weights(self) -> Path:
        """Weights on their way to servers that load them from disk."""
        return self.path / "weights"

    def error(self, rank: int | str) -> Path:
        """Return the file for the traceback that ended a rank."""
        return self.logs / f"error_rank{rank}.txt"

    def stalled(self, rank: int) -> Path:
        """Return the file for the stacks of a rank that hung."""
        return self.logs / f"stalled_rank{rank}.txt"

    # What replicas write about steps --------------------------------------------------------------

    def lines_path(self, half: Half, step: int, dp_rank: int = 0) -> Path:
        """Return where a replica writes the lines of a step."""
        return self._step_path(half, step, dp_rank, "jsonl")

    def tensors_path(self, half: Half, step: int, dp_rank: int = 0) -> Path:
        """Return where a replica writes the tensors of a step."""
        return self._step_path(half, step, dp_rank, "safetensors")

    def _step_path(self, half: Half, step: int, dp_rank: int, kind: Kind) -> Path:
        return self.path / half / f"step_{step:06d}{replica_suffix(dp_rank)}.{kind}"

    def line_files(self, half: Half) -> list[StepFile]:
        """Return the files of lines of both layouts, ordered by replica, then by step."""
        return [file for file in self._step_files(half) if file.kind == "jsonl"]

    def tensor_files(self, half: Half) -> list[StepFile]:
        """Return the files of tensors of both layouts, ordered by replica, then by step."""
        return [file for file in self._step_files(half) if file.kind == "safetensors"]

    def lines_of(self, half: Half, step: int, dp_rank: int = 0) -> Path:
        """Return the file with a replica's lines of a step, which in the former layout has those of
        all steps.

        Where there is none, the path of the present layout.
        """
        path = self.lines_path(half, step, dp_rank)
        loose = self.path / f"{writer_name(half, dp_rank)}.jsonl"
        return loose if loose.is_file() and not path.is_file() else path

    def tensors_of(self, half: Half, step: int, dp_rank: int = 0) -> Path:
        """Return the file with a replica's tensors of a step, in whichever layout it is.

        Where there is none, the path of the present layout.
        """
        path = self.tensors_path(half, step, dp_rank)
        loose = self.path / f"{writer_name(half, dp_rank)}_{step:06d}.safetensors"
        return loose if loose.is_file() and not path.is_file() else path

    def name_of(self, path: Path) -> str:
        """Return the name of a file inside the folder, with "/"."""
        return path.relative_to(self.path).as_posix()

    def file_named(self, name: str) -> StepFile | None:
        """Return the file of a step by its path inside the folder; None for any other name, so
        that no name leads outside.
        """
        half, slash, rest = name.rpartition("/")
        if slash:
            match = IN_FOLDER.fullmatch(rest)
            if match is None or half not in ("rollouts", "trained"):
                return None
            step, dp_rank, kind = match.groups()
        else:
            match = LOOSE.fullmatch(name)
            if match is None:
                return None
            half, dp_rank, lines, step, tensors = match.groups()
            kind = lines or tensors
        # the patterns match nothing else
        of_half, of_kind = cast(Half, half), cast(Kind, kind)
        return StepFile(
            int(dp_rank or 0), int(step or ALL_STEPS), of_half, of_kind, name, self.path / name
        )

    def _step_files(self, half: Half) -> list[StepFile]:
        names = [name for name in file_names(self.path) if name.startswith(half)]
        names += [f"{half}/{name}" for name in file_names(self.path / half)]
        return sorted(file for name in names if (file := self.file_named(name)))


def file_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder; none where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def replica_suffix(dp_rank: int) -> str:
    return f".dp{dp_rank}" if dp_rank else ""


def writer_name(half: str, dp_rank: int) -> str:
    """Return the name of a replica's half in lines and in addresses, as "rollouts.dp1"."""
    return f"{half}{replica_suffix(dp_rank)}"


def replica_of(writer: str) -> int:
    """Return the replica of a `writer_name`."""
    return int(writer.partition(".dp")[2] or 0)
