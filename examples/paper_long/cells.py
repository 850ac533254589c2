"""The questions of README.md as data: four tables of cells, each cell a few settings on top of
paper_long.toml.
"""

from __future__ import annotations

from examples.experiments.experiment import Experiment, Hypothesis, Line, Table
from examples.paper_tiny.cells import OFF_POLICY, ON_POLICY, QUESTIONS, rate

MINIRL = ON_POLICY["minirl"].settings
SAMPLING = {"rollout": {"top_p": 0.95, "top_k": 32}}
TOP_P = Line("top-p 0.95, sets replayed", {**MINIRL, **SAMPLING}, is_papers=False)
ALGORITHMS = {
    name: Line(label, {"loss": {"name": name}, "replay": {"mode": "none"}}, False)
    for name, label in (
        ("minirl", "MiniRL"),
        ("grpo", "GRPO"),
        ("dapo", "DAPO"),
        ("gspo", "GSPO"),
        ("cispo", "CISPO"),
        ("dppo", "DPPO"),
        ("tis", "TIS"),
        ("icepop", "IcePop"),
        ("sapo", "SAPO"),
        ("rspo", "RSPO"),
    )
}

EXPERIMENT = Experiment(
    "paper_long",
    model={"task": "ledger", "num_experts": 32, "top_k": 4, "num_layers": 2},
    prompts_per_mini_batch=8,  # x group_size = 128 responses of about 110 tokens
    tables={
        "on_policy": Table("On policy (N = 1)", 1, 60, rate(4e-4), {**ON_POLICY, "top_p": TOP_P}),
        "n4": Table("Off policy, N = 4", 4, 20, rate(8e-4), OFF_POLICY),
        "n8": Table("Off policy, N = 8", 8, 12, rate(8e-4), OFF_POLICY),
        "algorithms": Table(
            "Algorithms, N = 8", 8, 12, {**rate(8e-4), "advantage": {"kind": "auto"}}, ALGORITHMS
        ),
    },
    questions=(*QUESTIONS, ("top-p 0.95", (("minirl", "top_p"),))),
    hypotheses=(
        Hypothesis("H1", "on_policy", "minirl", "no_is"),
        Hypothesis("H1, with R3", "on_policy", "r3", "r3_no_is"),
        Hypothesis("H2", "on_policy", "minirl", "length_norm"),
        Hypothesis("H3", "on_policy", "minirl", "r3"),
        *(
            Hypothesis(f"H4{of}", table, before, after)
            for table in ("n4", "n8")
            for of, before, after in (
                ("", "clip", "no_clip"),
                (", with R2", "r2", "r2_no_clip"),
                (", with R3", "r3", "r3_no_clip"),
            )
        ),
        Hypothesis("H5, R3 and R2", "n8", "r2", "r3"),
        Hypothesis("H5, R2 and none", "n8", "clip", "r2"),
        Hypothesis("H5, R3 and none", "n8", "clip", "r3"),
        Hypothesis("H6", "on_policy", "minirl", "top_p"),
        *(
            Hypothesis(f"H7, {name}", "algorithms", "minirl", name)
            for name in ALGORITHMS
            if name != "minirl"
        ),
    ),
)
