"""The paper's experiments, and sampling k steps ahead, as data: tables of cells, each some settings
on top of paper_tiny.toml.
"""

from __future__ import annotations

from examples.experiments.experiment import Experiment, Line, Table


def line(label: str, loss: str, replay: str, *, is_papers: bool = True) -> Line:
    return Line(label, {"loss": {"name": loss}, "replay": {"mode": replay}}, is_papers)


ON_POLICY = {
    "minirl": line("MiniRL", "minirl", "none"),
    "length_norm": line("+ length norm", "minirl_length_norm", "none"),
    "no_is": line("- train-infer IS", "minirl_no_is", "none"),
    "r3": line("R3", "minirl", "R3"),
    "r3_length_norm": line("+ R3 + length norm", "minirl_length_norm", "R3"),
    "r3_no_is": line("+ R3 - train-infer IS", "minirl_no_is", "R3"),
}
OFF_POLICY = {  # * marks what the paper left out
    "no_clip": line("no clip", "minirl_no_clip", "none"),
    "r2_no_clip": line("R2, no clip", "minirl_no_clip", "R2"),
    "r2": line("R2", "minirl", "R2"),
    "r3": line("R3", "minirl", "R3"),
    "clip": line("clip, no replay *", "minirl", "none", is_papers=False),
    "r3_no_clip": line("R3, no clip *", "minirl_no_clip", "R3", is_papers=False),
}
STALENESS = {  # k0 is the synchronous run
    f"k{k}": Line(
        f"k = {k}",
        {"loss": {"name": "minirl"}, "replay": {"mode": "R3"}, "rollout": {"max_staleness": k}},
        is_papers=False,
    )
    for k in (0, 1, 2, 4)
}
QUESTIONS = (
    ("clipping", (("no_clip", "clip"), ("r2_no_clip", "r2"), ("r3_no_clip", "r3"))),
    ("R2, with clipping", (("clip", "r2"),)),
    ("R2, without", (("no_clip", "r2_no_clip"),)),
    ("R3, with clipping", (("clip", "r3"),)),
    ("R3, without", (("no_clip", "r3_no_clip"),)),
    ("R3 instead of R2", (("r2", "r3"), ("r2_no_clip", "r3_no_clip"))),
    ("R3, on policy", (("minirl", "r3"), ("length_norm", "r3_length_norm"), ("no_is", "r3_no_is"))),
    ("length norm", (("minirl", "length_norm"), ("r3", "r3_length_norm"))),
    ("no train-infer IS", (("minirl", "no_is"), ("r3", "r3_no_is"))),
)


def rate(lr: float) -> dict[str, dict[str, float]]:
    """README.md, the search: at these the reference line of a table learns; higher, none does;
    lower, all do.
    """
    return {"optim": {"lr": lr}}


EXPERIMENT = Experiment(
    "paper_tiny",
    model={"num_experts": 32, "top_k": 4, "num_layers": 2},
    prompts_per_mini_batch=8,  # x group_size = 128 responses; the paper: 64 x 16
    tables={  # 60 to 96 updates
        "on_policy": Table("On policy (N = 1)", 1, 60, rate(4e-4), ON_POLICY),
        "n2": Table("Off policy, N = 2", 2, 36, rate(8e-4), OFF_POLICY),
        "n4": Table("Off policy, N = 4", 4, 20, rate(8e-4), OFF_POLICY),
        "n8": Table("Off policy, N = 8", 8, 12, rate(8e-4), OFF_POLICY),
        "staleness": Table("Sampling k steps ahead (N = 1)", 1, 60, rate(4e-4), STALENESS),
    },
    questions=(*QUESTIONS, *((f"sampling {k} ahead", (("k0", f"k{k}"),)) for k in (1, 2, 4))),
)
