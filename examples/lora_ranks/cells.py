"""Adapters against full training: rank and learning rate, on the task of examples/paper_tiny.

Each table is what is trained; its lines are learning rates.  Model, task and other settings are
those of paper_tiny with N = 2, but the rollouts' weights are not rounded to FP8.
"""

from __future__ import annotations

from typing import Any

from examples.experiments.experiment import Experiment, Table
from examples.experiments.rates import rate_lines
from examples.paper_tiny.cells import EXPERIMENT as PAPER_TINY

LIKE = PAPER_TINY.tables["n2"]
FULL_RATES = (2e-4, 4e-4, 8e-4, 1.6e-3)
ADAPTER_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
RANKS = {"full": 0, "rank1": 1, "rank8": 8, "rank64": 64, "rank8_head": 8}
HEAD = "rank8_head"
"""Not in the plan: an adapter of the LM head, too, at the best rate of rank 8."""
SEEDS = (1, 2, 3, 4, 5)


def table_of(name: str, rank: int) -> Table:
    lora: dict[str, Any] = {"rank": rank, "alpha": 2.0 * rank} if rank else {}
    if name == HEAD:
        lora["targets"] = ["all", "lm_head"]
    fixed = {
        "loss": {"name": "minirl"},
        "replay": {"mode": "R3"},
        "rollout": {"quantize": "none"},
        **({"lora": lora} if lora else {}),
    }
    rates = ADAPTER_RATES if rank else FULL_RATES
    if name == HEAD:
        rates = (2e-3,)
    title = "every weight" if not rank else f"adapters of rank {rank}"
    title += ", and of the LM head" * (name == HEAD)
    return Table(title, LIKE.num_mini_batches, LIKE.num_steps, fixed, rate_lines(rates))


EXPERIMENT = Experiment(
    "lora_ranks",
    model=PAPER_TINY.model,
    prompts_per_mini_batch=PAPER_TINY.prompts_per_mini_batch,
    tables={name: table_of(name, rank) for name, rank in RANKS.items()},
    shares=PAPER_TINY.name,
)
