"""Distillation, rewards and both, and the forms of distillation from older rollouts.

A table is what a student learns from, and the age of its rollouts; its lines are learning rates.
Student, task and other settings are those of paper_tiny with N = 1, but the rollouts' weights are
not rounded to FP8.  One teacher serves all cells.
"""

from __future__ import annotations

from examples.experiments.experiment import Experiment, Settings, Table
from examples.experiments.rates import rate_lines
from examples.paper_tiny.cells import EXPERIMENT as PAPER_TINY

LIKE = PAPER_TINY.tables["on_policy"]
RATES = (2e-4, 4e-4, 8e-4, 1.6e-3)
LOWER_RATES = (5e-5, 1e-4)
"""Not in the first plan: of the reverse form, which collapsed at all others."""
TEACHER = "expert"
ALONE = {"weight": 0.0}
"""[advantage] of distillation without rewards."""
TOP_K, VOCAB_SIZE = 8, 64

ARMS: dict[str, Settings] = {
    "rewards": {},
    "token": {"advantage": ALONE},
    "mixed": {},
    "reverse": {"advantage": ALONE, "loss": {"teacher_form": "reverse", "teacher_top_k": TOP_K}},
    "forward": {"advantage": ALONE, "loss": {"teacher_form": "forward", "teacher_top_k": TOP_K}},
    "full": {"advantage": ALONE, "loss": {"teacher_form": "reverse", "teacher_top_k": VOCAB_SIZE}},
}
"""full is not in the plan: does the reverse form fail, or its eight tokens?"""
LABELS = {
    "rewards": "rewards",
    "token": "teacher, token form",
    "mixed": "rewards and teacher, token form",
    "reverse": "teacher, reverse KL, top 8",
    "forward": "teacher, forward KL, top 8",
    "full": "teacher, reverse KL, all 64 tokens",
}
FORMS = ("token", "reverse", "forward")
AGES = (2, 4)
"""Steps that the rollouts of a step are older than its weights (rollout.max_staleness)."""
SEEDS = (1, 2, 3, 4, 5)


def table_name(arm: str, age: int) -> str:
    return f"{arm}_{age}" if age else arm


def table_of(arm: str, age: int) -> Table:
    settings: dict[str, dict[str, object]] = {
        "replay": {"mode": "R3"},
        "rollout": {"quantize": "none", "max_staleness": age},
        **{section: dict(keys) for section, keys in ARMS[arm].items()},
    }
    settings["loss"] = {"name": "minirl", **settings.get("loss", {})}
    if arm != "rewards":
        settings["teachers"] = {TEACHER: {"path": ".cache/distil_forms-teacher"}}
    title = LABELS[arm] + f", rollouts {age} steps old" * bool(age)
    rates = (*LOWER_RATES, *RATES) if arm == "reverse" else RATES
    return Table(title, LIKE.num_mini_batches, LIKE.num_steps, settings, rate_lines(rates))


EXPERIMENT = Experiment(
    "distil_forms",
    model=PAPER_TINY.model,
    prompts_per_mini_batch=PAPER_TINY.prompts_per_mini_batch,
    tables={
        **{arm: table_of(arm, 0) for arm in ARMS},
        **{table_name(form, age): table_of(form, age) for age in AGES for form in FORMS},
    },
    teacher={**PAPER_TINY.model, "seed": 100, "target_accuracy": 0.95},
    shares=PAPER_TINY.name,
)
