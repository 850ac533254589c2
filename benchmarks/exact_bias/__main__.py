"""The exact bias of every loss, by enumeration: no sampling and no server.

    OMP_NUM_THREADS=1 python -m benchmarks.exact_bias [--seeds 2] [--staleness 0,1,2,4,8] \
[--samplers exact,fp32,bf16,fp8] [--jobs 2]
    python -m benchmarks.exact_bias.figures      # from results/exact_bias.json

It prints how far the policies are from each other, a table of the losses, the standard deviation of
the group, and one line for every loss x replay x sampler: bias, cosine, bias against the
first-order surrogate and noise, at every staleness.  Numbers are means over seeds.
docs/concepts/exact_bias.md explains them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import fmean

from benchmarks.exact_bias.study import (
    GROUPS,
    SAMPLERS,
    STALENESS,
    WEIGHTS,
    Cell,
    Facts,
    run_study,
)

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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="processes, one set of weights each")
    parser.add_argument("--staleness", type=numbers, default=STALENESS, help="0 must be first")
    parser.add_argument("--samplers", type=names, default=SAMPLERS, help="exact must be first")
    args = parser.parse_args()
    tasks = [(kind, seed) for seed in range(args.seeds) for kind in WEIGHTS]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        outcomes = list(
            pool.map(partial(run_study, args.staleness, args.samplers), *zip(*tasks, strict=True))
        )
    cells: dict[str, list[Cell | Facts]] = {}
    for kind in WEIGHTS:
        of_kind = [
            outcome for task, outcome in zip(tasks, outcomes, strict=True) if task[0] == kind
        ]
        cells[kind] = [cell for outcome in of_kind for cell in outcome.cells]
        rates = ", ".join(f"{outcome.pass_rate:.2f}" for outcome in of_kind)
        print(f"{kind} weights: pass rates of pi_old {rates}\n")
        print(facts_table(cells[kind]), end="\n\n")
        print(summary_table(cells[kind]), end="\n\n")
        print(bands_table(cells[kind], args.staleness), end="\n\n")
        print(gaps_table(cells[kind]), end="\n\n")
        print(group_table([outcome.group_biases for outcome in of_kind]), end="\n\n")
    for kind in WEIGHTS:
        print("\n".join(grid_lines(kind, cells[kind])))
    return 0


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


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
