"""Discrepancy by staleness: how the weights of the rollouts are rounded, how many updates a step
makes, and the ingredients against both, one table of lines per pair.

The model, the task and the settings are those of examples/paper_tiny, whose cells with FP8 rollouts
are a part of the map and are not run again.
"""

from __future__ import annotations

from typing import NamedTuple

from examples.experiments.experiment import Experiment, Line, Settings, Table
from examples.paper_tiny.cells import EXPERIMENT as PAPER_TINY
from examples.paper_tiny.cells import line

FP32, BF16, FP8, FP8_ALL = "fp32", "bf16", "fp8", "fp8_all"
ROUNDINGS: dict[str, Settings] = {
    FP32: {"rollout": {"dtype": "float32", "quantize": "none"}},
    BF16: {"rollout": {"quantize": "none"}},
    FP8: {},  # as in paper_tiny.toml: bf16 arithmetic; embedding, router and head are not rounded
    FP8_ALL: {"rollout": {"quantize_keep": ["*norm*"]}},
}
LABELS = {FP32: "fp32", BF16: "bf16", FP8: "FP8 weights", FP8_ALL: "FP8, router and head too"}

INGREDIENTS = {
    "nothing": line("nothing", "reinforce", "none", is_papers=False),
    "weight": line("weight pi/mu", "minirl_no_clip", "none", is_papers=False),
    "clip": line("weight and clip", "minirl", "none", is_papers=False),
    "r2": line("weight and R2", "minirl_no_clip", "R2", is_papers=False),
    "r3": line("weight and R3", "minirl_no_clip", "R3", is_papers=False),
}
"""nothing has neither weight, clip nor replay; the others have the weight and one more thing."""
ON_POLICY = ("nothing", "weight", "r3")
"""With one update per step pi is pi_old: a clip and R2 change nothing, and have no cell."""

STALENESS = {1: "on_policy", 2: "n2", 4: "n4", 8: "n8"}
"""Updates per step -> the table of paper_tiny with as many, its steps and its learning rate."""
IN_PAPER_TINY = {
    1: {"weight": "minirl", "r3": "r3"},
    2: (
        off_policy := {"weight": "no_clip", "clip": "clip", "r2": "r2_no_clip", "r3": "r3_no_clip"}
    ),
    4: off_policy,
    8: off_policy,
}
"""Updates per step -> ingredient -> the line of paper_tiny that is the same cell with FP8."""


class Place(NamedTuple):
    """A square of the map: an experiment's name, table and line."""

    experiment: str
    table: str
    line: str


def table_of(rounding: str, updates: int) -> Table:
    theirs = PAPER_TINY.tables[STALENESS[updates]]
    lines = [name for name in INGREDIENTS if updates > 1 or name in ON_POLICY]
    if rounding == FP8:
        lines = [name for name in lines if name not in IN_PAPER_TINY[updates]]
    settings = {**theirs.settings, **ROUNDINGS[rounding]}
    title = f"{LABELS[rounding]}, N = {updates}"
    shown: dict[str, Line] = {name: INGREDIENTS[name] for name in lines}
    return Table(title, theirs.num_mini_batches, theirs.num_steps, settings, shown)


EXPERIMENT = Experiment(
    "dose_map",
    model=PAPER_TINY.model,
    prompts_per_mini_batch=PAPER_TINY.prompts_per_mini_batch,
    tables={
        f"{rounding}_n{updates}": table_of(rounding, updates)
        for rounding in ROUNDINGS
        for updates in STALENESS
    },
    shares=PAPER_TINY.name,
)


def place(rounding: str, updates: int, ingredient: str) -> Place:
    """Return the square's cells: on policy those of the ingredient that is the same there."""
    if updates == 1 and ingredient not in ON_POLICY:
        ingredient = "weight"
    theirs = IN_PAPER_TINY[updates]
    if rounding == FP8 and ingredient in theirs:
        return Place(PAPER_TINY.name, STALENESS[updates], theirs[ingredient])
    return Place(EXPERIMENT.name, f"{rounding}_n{updates}", ingredient)
