"""Experiments: tables of cells, which are a few settings on top of those that the experiment's
cells share.

examples/NAME/cells.py has EXPERIMENT, examples/NAME/NAME.toml the shared settings,
examples/NAME/results the results.  N = updates per step.  As in the paper, the mini-batch is fixed
and the step grows with N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).resolve().parents[1]
ANALYSED = ("paper_tiny", "paper_long")
"""Experiments with tables of lines, curves and lead times; the others have tables of their own."""
NAMES = (*ANALYSED, "dose_map", "lora_ranks", "distil_forms")

ENDED = ("finished", "diverged")
"""Outcomes that are results; a cell that failed or timed out is run again."""

Settings = Mapping[str, Mapping[str, Any]]
"""Section -> key -> value."""


@dataclass(frozen=True)
class Line:
    """A line of a table's plot."""

    label: str
    settings: Settings
    is_papers: bool = True
    """The paper has it."""


@dataclass(frozen=True)
class Table:
    """Lines that are compared, with equally many mini-batches and steps."""

    title: str
    num_mini_batches: int
    num_steps: int
    settings: Settings
    lines: Mapping[str, Line]


class Hypothesis(NamedTuple):
    """A hypothesis that the last scores of two lines decide, in pairs of the same seed."""

    name: str
    table: str
    before: str
    after: str


@dataclass(frozen=True)
class Experiment:
    """Tables of cells, and the questions about them."""

    name: str
    model: Mapping[str, Any]
    """Arguments of make_tiny_moe beside the seed."""
    prompts_per_mini_batch: int
    tables: Mapping[str, Table]
    questions: Sequence[tuple[str, Sequence[tuple[str, str]]]] = field(default=())
    """(ingredient, pairs of lines without it and with it)."""
    hypotheses: Sequence[Hypothesis] = field(default=())
    teacher: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of make_tiny_moe for the teacher of its cells; {}: they have none."""
    shares: str = ""
    """Name of the experiment whose shared settings and models this one uses; "": its own."""

    @property
    def folder(self) -> Path:
        return EXAMPLES / self.name

    @property
    def teacher_model(self) -> Path:
        """Return the folder with the teacher's checkpoint."""
        return Path(f".cache/{self.name}-teacher")

    @property
    def shared_settings(self) -> Path:
        name = self.shares or self.name
        return EXAMPLES / name / f"{name}.toml"

    def cells(
        self, tables: Sequence[str], seeds: Sequence[int], lines: Sequence[str] = ()
    ) -> Iterator[Cell]:
        """Yield the cells seed by seed, so that the results of an interrupted run cover every line.

        lines: the lines to run; () for all.
        """
        for seed in seeds:
            for table in tables:
                for line in self.tables[table].lines:
                    if not lines or line in lines:
                        yield Cell(self, table, line, seed)


@dataclass(frozen=True)
class Cell:
    """A run: a line of a table with a seed of model, data order and sampling."""

    experiment: Experiment
    table: str
    line: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.table}-{self.line}-{self.seed}"

    @property
    def model(self) -> Path:
        """Return the folder with the checkpoint and prompts of its seed."""
        return Path(f".cache/{self.experiment.shares or self.experiment.name}-{self.seed}")

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings that differ from the shared ones."""
        table = self.experiment.tables[self.table]
        of_cell = {
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
        return merged(of_cell, table.settings, table.lines[self.line].settings)


def merged(*parts: Settings) -> dict[str, dict[str, Any]]:
    """Merge the sections of all parts; for equal keys the last one counts."""
    result: dict[str, dict[str, Any]] = {}
    for part in parts:
        for section, keys in part.items():
            result[section] = {**result.get(section, {}), **keys}
    return result


def load_experiment(name: str) -> Experiment:
    return import_module(f"examples.{name}.cells").EXPERIMENT
