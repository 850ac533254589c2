"""The report of a step to the process that started it: a verdict, the reason, figures.

Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

Verdict = Literal["passed", "failed", "not possible"]
Figure: TypeAlias = "bool | int | float | str | list[Figure] | dict[str, Figure] | None"
FILE = "result.json"


class NotPossible(Exception):
    """A step cannot run on this machine; the message names what is missing."""


@dataclass
class Findings:
    """The figures of a step and the checks that failed, collected while it runs."""

    figures: dict[str, Figure] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    checks: int = 0
    """Number of checks that were made."""
    not_run: list[str] = field(default_factory=list)
    """Parts that cannot run here, with the reason."""

    def check(self, passed: bool, problem: str) -> None:
        """Count a check, and note `problem` unless `passed`."""
        self.checks += 1
        if not passed:
            self.problems.append(problem)

    @property
    def outcome(self) -> StepOutcome:
        verdict: Verdict = "failed" if self.problems else "passed"
        if self.not_run and not self.checks:
            verdict = "not possible"
        return StepOutcome(verdict, "; ".join([*self.problems, *self.not_run]), self.figures)


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step."""

    verdict: Verdict
    reason: str = ""
    """Why the step failed or is not possible, or which part of it did not run."""
    figures: dict[str, Figure] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_outcome(folder: Path) -> StepOutcome | None:
    """Return the outcome that the step in `folder` wrote, or None."""
    file = folder / FILE
    return StepOutcome(**json.loads(file.read_text())) if file.is_file() else None
