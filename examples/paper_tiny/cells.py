"""The paper's experiments as data: four tables of cells, each cell a few settings on top of paper_tiny.toml.

N = updates per step.  As in the paper the mini-batch stays and the step grows with N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PROMPTS_PER_MINI_BATCH = 8  # x group_size = 128 responses; the paper: 64 x 16

# table -> (N, steps): 60 to 96 updates
SIZES = {"on_policy": (1, 60), "n2": (2, 36), "n4": (4, 20), "n8": (8, 12)}
# README.md, the search: at these the reference line of a table learns; higher, none does; lower, all do
LEARNING_RATES = {"on_policy": 4e-4, "n2": 8e-4, "n4": 8e-4, "n8": 8e-4}

# cell -> (loss, replay, whether the paper has it)
ON_POLICY = {
    "minirl": ("minirl", "none", True),
    "length_norm": ("minirl_length_norm", "none", True),
    "no_is": ("minirl_no_is", "none", True),
    "r3": ("minirl", "R3", True),
    "r3_length_norm": ("minirl_length_norm", "R3", True),
    "r3_no_is": ("minirl_no_is", "R3", True),
}
OFF_POLICY = {
    "no_clip": ("minirl_no_clip", "none", True),
    "r2_no_clip": ("minirl_no_clip", "R2", True),
    "r2": ("minirl", "R2", True),
    "r3": ("minirl", "R3", True),
    "clip": ("minirl", "none", False),
    "r3_no_clip": ("minirl_no_clip", "R3", False),
}
TABLES = {"on_policy": ON_POLICY, "n2": OFF_POLICY, "n4": OFF_POLICY, "n8": OFF_POLICY}

LABELS = {
    "minirl": "MiniRL",
    "length_norm": "+ length norm",
    "no_is": "- train-infer IS",
    "r3_length_norm": "+ R3 + length norm",
    "r3_no_is": "+ R3 - train-infer IS",
    "no_clip": "no clip",
    "r2_no_clip": "R2, no clip",
    "r2": "R2",
    "r3": "R3",
    "clip": "clip, no replay *",
    "r3_no_clip": "R3, no clip *",
}
"""What the plots say; * marks what the paper left out."""


@dataclass(frozen=True)
class Cell:
    """One run: a line of a table and a seed (of model, data order and sampling)."""

    table: str
    line: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.table}-{self.line}-{self.seed}"

    def settings(self) -> dict[str, dict[str, Any]]:
        """What differs from paper_tiny.toml."""
        num_mini_batches, steps = SIZES[self.table]
        loss, replay, _ = TABLES[self.table][self.line]
        return {
            "run": {
                "name": self.name,
                "seed": self.seed,
                "num_mini_batches": num_mini_batches,
                "prompts_per_step": PROMPTS_PER_MINI_BATCH * num_mini_batches,
                "num_steps": steps,
            },
            "loss": {"name": loss},
            "replay": {"mode": replay},
            "optim": {"lr": LEARNING_RATES[self.table]},
            "eval": {"every": max(1, steps // 4)},
        }


def all_cells(tables: list[str], seeds: list[int]) -> Iterator[Cell]:
    """Seed by seed, so that whatever is there after an interruption covers every line."""
    for seed in seeds:
        for table in tables:
            for line in TABLES[table]:
                yield Cell(table, line, seed)
