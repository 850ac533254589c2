"""The exact bias of every loss, by enumeration: no sampling and no server.

    OMP_NUM_THREADS=1 python -m benchmarks.exact_bias [--seeds 2] [--staleness 0,1,2,4,8] \
[--samplers exact,fp32,bf16,fp8]
    python -m benchmarks.exact_bias.figures      # from results/exact_bias.json

It prints how far the policies are from each other, a table of the losses, the standard deviation of
the group, and one line for every loss x replay x sampler: bias, cosine, bias against the
first-order surrogate and noise, at every staleness.  Numbers are means over seeds.
docs/design/exact_bias.md explains them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.exact_bias.estimators import Situation, advantages, moments
from benchmarks.exact_bias.policy import Policy, one_rank
from benchmarks.exact_bias.study import (
    SAMPLERS,
    STALENESS,
    TRAINING,
    TRAINING_UPDATE,
    Cell,
    Facts,
    Study,
)

WEIGHTS = ("random", "trained")
SUMMARY = (
    "exact sequence ratio", "token ratio", "minirl", "minirl_no_is", "minirl, clip against mu",
    "minirl_length_norm", "reinforce", "dr_grpo", "decoupled_ppo", "grpo", "dapo", "gspo", "cispo",
    "tis", "icepop", "kpop", "dis", "seq_mis", "dppo", "sapo", "gmpo",
)  # fmt: skip
COLUMNS = (
    ("on policy", "exact", "none", 0),
    ("fp8, none", "fp8", "none", 0),
    ("fp8, R2", "fp8", "R2", 0),
    ("fp8, R3", "fp8", "R3", 0),
    ("fp8, none, 4", "fp8", "none", 4),
    ("fp8, R2, 4", "fp8", "R2", 4),
    ("fp8, R3, 4", "fp8", "R3", 4),
)
BANDS = (
    "exact sequence ratio", "sequence ratio, truncated at 2", "sequence ratio, masked above 2",
    "token ratio", "token ratio, truncated at 1.28", "token ratio, clipped to 0.8, 1.28",
    "token ratio, masked outside 0.8, 1.28", "minirl", "reinforce",
)  # fmt: skip
GAPS = ("R3", "R3, gap live", "R3, gap masked", "R3, gap dropped")
GROUPS = (2, 4, 8, 16, 64)

Results = dict[str, list[Cell | Facts]]
"""Kind of weights -> the cells and facts of all seeds."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--staleness", type=numbers, default=STALENESS, help="0 must be first")
    parser.add_argument("--samplers", type=names, default=SAMPLERS, help="exact must be first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: Results = {kind: [] for kind in WEIGHTS}
    deviations: dict[str, list[list[float]]] = {kind: [] for kind in WEIGHTS}
    pass_rates = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder)) as policy:
        for seed in range(args.seeds):
            for kind in WEIGHTS:
                study = make_study(policy, kind, seed)
                pass_rates[kind].append(study.pass_rate(study.old.logprobs))
                deviations[kind].append(group_biases(study))
                results[kind] += study.run(args.staleness, args.samplers)
                print(f"{kind} weights, seed {seed}: done", file=sys.stderr, flush=True)
    for kind in WEIGHTS:
        rates = ", ".join(f"{rate:.2f}" for rate in pass_rates[kind])
        print(f"{kind} weights: pass rates of pi_old {rates}\n")
        print(facts_table(results[kind]), end="\n\n")
        print(summary_table(results[kind]), end="\n\n")
        print(bands_table(results[kind], args.staleness), end="\n\n")
        print(gaps_table(results[kind]), end="\n\n")
        print(group_table(deviations[kind]), end="\n\n")
    for kind in WEIGHTS:
        print("\n".join(grid_lines(kind, results[kind])))
    return 0


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def make_study(policy: Policy, kind: str, seed: int) -> Study:
    study = Study(policy, policy.random_weights(seed), seed)
    if kind == "random":
        return study
    # trained on the rewards that the study has
    return Study(policy, study.updated(study.weights, TRAINING, TRAINING_UPDATE), seed)


def group_biases(study: Study) -> list[float]:
    """Return the bias on policy of A = (R - mean) / std for every size of the group.

    It is a direction alone: the estimate is scaled to the true gradient.
    """
    study.policy.weights = study.weights
    pi = study.policy.steps(None)
    situation = study.situation("exact", "none", pi)
    loss, gram = study.losses["reinforce"], pi.gradient @ pi.gradient.T
    true = moments(situation, loss, gram).mean
    biases = []
    for group in GROUPS:
        mean, _ = advantages(situation, "std", group)
        estimate = weighted_gradient(situation, mean)
        scale = float(estimate @ true / true.square().sum())
        biases.append(float((estimate / scale - true).norm() / true.norm()))
    return biases


def weighted_gradient(situation: Situation, advantage: torch.Tensor) -> torch.Tensor:
    """Return E[A sum_t grad log pi_t] [P]."""
    responses, chances = situation.responses, situation.probabilities
    values = responses.per_token(chances * advantage)
    zeros = torch.zeros(len(situation.pi.gradient), dtype=torch.float64)
    return zeros.index_add(0, responses.steps, values) @ situation.pi.gradient


# Printed ------------------------------------------------------------------------------------------


def mean_of(cells: Iterable[Cell | Facts], value: Callable[..., float], **keys: object) -> float:
    """Return the mean of `value` over the cells (of all seeds) with these fields."""
    chosen = [
        value(cell)
        for cell in cells
        if all(getattr(cell, key, None) == wanted for key, wanted in keys.items())
    ]
    return fmean(chosen) if chosen else float("nan")


def facts_table(cells: Sequence[Cell | Facts]) -> str:
    facts = [cell for cell in cells if isinstance(cell, Facts)]
    lines = [
        "| sampler | updates | flips | KL(mu, pi) of a response | mean abs(pi/mu - 1) |",
        "|---|---|---|---|---|",
    ]
    for sampler, staleness in dict.fromkeys((fact.sampler, fact.staleness) for fact in facts):
        keys = {"sampler": sampler, "staleness": staleness}
        flips = mean_of(facts, lambda fact: fact.flips, **keys)
        kl = mean_of(facts, lambda fact: fact.kl, **keys)
        ratio = mean_of(facts, lambda fact: fact.ratio, **keys)
        lines.append(f"| {sampler} | {staleness} | {flips:.1%} | {kl:.1e} | {ratio:.1e} |")
    return "\n".join(lines)


def summary_table(cells: Sequence[Cell | Facts]) -> str:
    heads = [head for head, *_ in COLUMNS]
    lines = [
        f"| bias of | {' | '.join(heads)} | noise |",
        f"|---|{'---|' * (len(heads) + 1)}",
    ]
    for loss in SUMMARY:
        values = [
            mean_of(
                cells,
                lambda cell: cell.bias,
                loss=loss,
                sampler=sampler,
                replay=replay,
                staleness=staleness,
            )
            for _, sampler, replay, staleness in COLUMNS
        ]
        noise = mean_of(
            cells, lambda cell: cell.noise, loss=loss, sampler="fp8", replay="none", staleness=4
        )
        texts = " | ".join(short(value) for value in values)
        lines.append(f"| {loss} | {texts} | {noise:.1f} |")
    return "\n".join(lines)


def bands_table(cells: Sequence[Cell | Facts], staleness: Sequence[int]) -> str:
    """Return bias and noise of ways to bound the weight, without replay, sampler in fp8."""
    keys = {"sampler": "fp8", "replay": "none"}
    heads = [f"{name}, {number}" for name in ("bias", "noise") for number in staleness]
    lines = [f"| weight | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for loss in BANDS:
        biases, noises = (
            [mean_of(cells, value, loss=loss, staleness=number, **keys) for number in staleness]
            for value in (lambda cell: cell.bias, lambda cell: cell.noise)
        )
        texts = [short(bias) for bias in biases] + [f"{noise:.1f}" for noise in noises]
        lines.append(f"| {loss} | {' | '.join(texts)} |")
    return "\n".join(lines)


def gaps_table(cells: Sequence[Cell | Facts]) -> str:
    """Return the bias where the row that predicts a third token has no route, sampler in fp8."""
    lines = [f"| bias of | {' | '.join(GAPS)} |", f"|---|{'---|' * len(GAPS)}"]
    for loss in ("exact sequence ratio", "token ratio", "minirl"):
        values = [
            mean_of(
                cells, lambda cell: cell.bias, loss=loss, replay=gap, sampler="fp8", staleness=0
            )
            for gap in GAPS
        ]
        lines.append(f"| {loss} | {' | '.join(short(value) for value in values)} |")
    return "\n".join(lines)


def short(value: float) -> str:
    return "0" if value < 1e-12 else f"{value:.3f}"


def group_table(biases: Sequence[Sequence[float]]) -> str:
    heads = " | ".join(f"G = {group}" for group in GROUPS)
    means = " | ".join(f"{fmean(values):.3f}" for values in zip(*biases, strict=True))
    return f"| A | {heads} |\n|---|{'---|' * len(GROUPS)}\n| std | {means} |"


def grid_lines(kind: str, cells: Sequence[Cell | Facts]) -> list[str]:
    """Return one line for every (sampler, replay, loss), with the values at every staleness."""
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        if isinstance(cell, Cell):
            groups[cell.sampler, cell.replay, cell.loss].append(cell)
    lines = []
    for (sampler, replay, loss), group in groups.items():
        staleness = list(dict.fromkeys(cell.staleness for cell in group))
        parts = []
        for field in ("bias", "cosine", "first_order", "noise"):
            values = [
                mean_of(group, lambda cell, name=field: getattr(cell, name), staleness=number)
                for number in staleness
            ]
            parts.append(f"{field} {' '.join(f'{value:.4g}' for value in values)}")
        lines.append(f"{kind} / {sampler} / {replay} / {loss}: {'; '.join(parts)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
