"""What an experiment is: tables of cells, each cell a few settings on top of those that the
experiment's cells share.

examples/NAME/cells.py holds EXPERIMENT, examples/NAME/NAME.toml the shared settings,
examples/NAME/results what was run. N = updates per step.  As in the paper the mini-batch stays and
the step grows with N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).resolve().parents[1]
NAMES = ("paper_tiny", "paper_long")

# outcomes that are results; a cell that failed or timed out is run again
ENDED = ("finished", "diverged")

Settings = Mapping[str, Mapping[str, Any]]  # section -> key -> value


@dataclass(frozen=True)
class Line:
    """One line of a table's plot: its settings, and whether the paper has it."""

    label: str
    settings: Settings
    is_papers: bool = True


@dataclass(frozen=True)
class Table:
    """Lines that are compared: all have N mini-batches and so many steps."""

    title: str
    num_mini_batches: int
    num_steps: int
    settings: Settings
    lines: Mapping[str, Line]


class Hypothesis(NamedTuple):
    """Decided by the last scores of two lines of a table, pair by pair of the same seed."""

    name: str
    table: str
    before: str
    after: str


@dataclass(frozen=True)
class Experiment:
    """model: arguments of make_tiny_moe besides the seed.

    questions: what is changed -> pairs of lines (without it, with it).
    """

    name: str
    model: Mapping[str, Any]
    prompts_per_mini_batch: int
    tables: Mapping[str, Table]
    questions: Sequence[tuple[str, Sequence[tuple[str, str]]]] = field(default=())
    hypotheses: Sequence[Hypothesis] = field(default=())

    @property
    def folder(self) -> Path:
        return EXAMPLES / self.name

    def cells(
        self, tables: Sequence[str], seeds: Sequence[int], lines: Sequence[str] = ()
    ) -> Iterator[Cell]:
        """Seed by seed, so that whatever is there after an interruption covers every line.

        lines: only these.
        """
        for seed in seeds:
            for table in tables:
                for line in self.tables[table].lines:
                    if not lines or line in lines:
                        yield Cell(self, table, line, seed)


@dataclass(frozen=True)
class Cell:
    """One run: a line of a table and a seed (of model, data order and sampling)."""

    experiment: Experiment
    table: str
    line: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.table}-{self.line}-{self.seed}"

    @property
    def model(self) -> Path:
        """The checkpoint and prompts of its seed."""
        return Path(f".cache/{self.experiment.name}-{self.seed}")

    def settings(self) -> dict[str, dict[str, Any]]:
        """What differs from the shared settings."""
        table = self.experiment.tables[self.table]
        own = {
            "run": {
                "name": self.name,
                "seed": self.seed,
                "num_mini_batches": table.num_mini_batches,
                "prompts_per_step": self.experiment.prompts_per_mini_batch * table.num_mini_batches,
                "num_steps": table.num_steps,
            },
            "model": {"path": str(self.model)},
            "data": {"train": str(self.model / "train.jsonl")},
            "eval": {
                "every": max(1, table.num_steps // 4),
                "sets": {"heldout": str(self.model / "heldout.jsonl")},
            },
        }
        return merged(own, table.settings, table.lines[self.line].settings)


def merged(*parts: Settings) -> dict[str, dict[str, Any]]:
    """Sections of all parts; of equal keys the last counts."""
    result: dict[str, dict[str, Any]] = {}
    for part in parts:
        for section, keys in part.items():
            result[section] = {**result.get(section, {}), **keys}
    return result


def load_experiment(name: str) -> Experiment:
    return import_module(f"examples.{name}.cells").EXPERIMENT
