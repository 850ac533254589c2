"""Do recorded expert ids belong to their tokens?  A forward of the model on the same tokens must
choose them.

Agreement of a row is the fraction of the recorded ids that are in the model's own top-k.  Engines
differ in numerics, so it is below 1; routes of a neighbouring token, another layer or another
request agree far less.
Shapes: S tokens of a rollout, L MoE layers, K top-k; live and recorded routes [S - 1, L, K].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_rl_tools.check_rollouts.dumped import Dumped, Finding
from megatron_rl_tools.check_rollouts.model_sizes import NEEDS_TRAINER, Model, Sizes
from megatron_rl_tools.check_rollouts.rollout_checks import shift_cause

LEAST_AGREEMENT = 0.7
LEAST_ROWS = 8  # of both prompt and response, to check them separately
PART_ROWS = 32  # at least, of a part; every part of a rollout must agree
SHIFTS = (-1, 0, 1)


@dataclass(frozen=True)
class CanaryResult:
    """What the comparison with the model gave."""

    agreement: dict[str, float] | None
    """Over all sampled rows and layers, by shift ("-1", "0", "+1")."""
    findings: list[Finding]
    unchecked: str = ""
    """Why nothing was compared."""


@dataclass(frozen=True)
class Compared:
    """A sampled rollout: its recorded routes and the model's choice, int64 [S - 1, L, K]."""

    name: str
    prompt_length: int
    recorded: np.ndarray
    live: np.ndarray


def usable_rollouts(dumps: Iterable[Dumped], sizes: Sizes) -> list[tuple[Dumped, np.ndarray]]:
    """The rollouts that the canary can compare with the model, and their routes.

    Left out are those whose arrays do not have the model's shape (the other checks name them), with
    rows without a route, or sampled by weights of several versions.
    """
    return [
        (d, d.routes)
        for d in dumps
        if d.routes is not None
        and d.routes.ndim == 3
        and d.routes.shape[1:] == (len(sizes.moe_layers), sizes.top_k)
        if d.present.all()
        and len(d.tokens) > 1
        and len({version for version, _ in d.record.policy_versions}) == 1
        if d.tokens.min() >= 0 and d.tokens.max() < sizes.vocab_size
    ]


def run_canary(
    model: Model, dumps: Iterable[Dumped], *, sample: int = 8, seed: int = 0
) -> CanaryResult:
    """Compare up to `sample` of the usable rollouts with the model."""
    if model.forward is None or model.sizes is None:
        return CanaryResult(None, [], NEEDS_TRAINER)
    usable = usable_rollouts(dumps, model.sizes)
    if not usable:
        shape = f"{len(model.sizes.moe_layers)} MoE layers x top-{model.sizes.top_k}"
        needs = (
            f"the canary needs rollouts of one weight version, with expert ids of {shape} for every"
            " token"
        )
        return CanaryResult(None, [], f"{needs}; there are none")
    order = np.random.default_rng(seed).permutation(len(usable))[:sample]
    chosen = [usable[index] for index in sorted(order)]
    rows = []
    for (dumped, routes), live in zip(
        chosen, model.forward([d.tokens for d, _ in chosen]), strict=True
    ):
        size = min(len(live), len(routes))
        name = f"step {dumped.record.step} {dumped.record.id}"
        rows.append(
            Compared(name, dumped.record.prompt_length, routes[:size].astype(np.int64), live[:size])
        )
    return compare_rollouts(rows)


def compare_rollouts(rows: Sequence[Compared]) -> CanaryResult:
    """Check rollout by rollout, then layer by layer over the rollouts that passed."""
    findings, passed = [], []
    for item in rows:
        if (wrong := wrong_part(item)) is None:
            passed.append(item)
        else:
            first, text = wrong
            findings.append(Finding("canary", item.name, text, cause_of(item, first, rows)))
    if passed:
        findings += check_layers(passed)
    by_shift = {
        shift: np.concatenate([at_shift(item, shift) for item in rows]).mean() for shift in SHIFTS
    }
    return CanaryResult(
        {f"{shift:+d}" if shift else "0": float(value) for shift, value in by_shift.items()},
        findings,
    )


def wrong_part(item: Compared) -> tuple[int, str] | None:
    """(first row, finding) of the first part of the rows that does not agree, or None.

    Parts, because routes may be correct up to some row, or for a prompt that is shared with another
    request.
    """
    size, cut = len(item.live), min(item.prompt_length, len(item.live))
    bounds = [0, cut, size] if min(cut, size - cut) >= LEAST_ROWS else [0, size]
    for start, stop in pairwise(bounds):
        for part in np.array_split(np.arange(start, stop), max(1, (stop - start) // PART_ROWS)):
            piece = Compared(item.name, 0, item.recorded[part], item.live[part])
            scores = {
                shift: float(at_shift(piece, shift).mean())
                for shift in SHIFTS
                if len(part) > 1 or not shift
            }
            if scores[0] < LEAST_AGREEMENT or scores[0] < max(scores.values()):
                named = ", ".join(
                    f"{value:.2f} at shift {shift}" for shift, value in scores.items()
                )
                rule = f"must be best at 0 and >= {LEAST_AGREEMENT}"
                rows = f"rows {part[0]} to {part[-1]} of {size}"
                return int(part[0]), f"{rows} agree with the model's own top-k {named}; {rule}"
    return None


def cause_of(item: Compared, first: int, rows: Sequence[Compared]) -> str:
    """The simplest change that makes these routes agree with the model."""
    shifted = {shift: float(at_shift(item, shift).mean()) for shift in SHIFTS if shift}
    best = max(shifted, key=lambda shift: shifted[shift])
    if shifted[best] >= LEAST_AGREEMENT:
        return shift_cause(best)
    moved = moved_layers(layer_table([item]))
    if moved:
        return moved
    for other in rows:
        size = min(len(other.live), len(item.recorded))
        if (
            other is not item
            and agreement(other.live[:size], item.recorded[:size]).mean() >= LEAST_AGREEMENT
        ):
            return f"these are the routes of {other.name}"
    if first > item.prompt_length:
        return (
            "correct up to there: then rows were lost, added or recomputed (retraction, partial"
            " rollout)"
        )
    return (
        "another request's routes, other weights than --model, or physical instead of logical"
        " expert ids"
    )


def check_layers(rows: Sequence[Compared]) -> list[Finding]:
    """Each layer must agree: a few exchanged layers hardly change the mean over all."""
    table = layer_table(rows)
    weak = [layer for layer in range(len(table)) if table[layer, layer] < LEAST_AGREEMENT]
    if not weak:
        return []
    values = ", ".join(f"layer {layer}: {table[layer, layer]:.2f}" for layer in weak[:4])
    cause = (
        moved_layers(table) or "other weights than --model in these layers, or much numeric noise"
    )
    return [Finding("canary", "dump", f"MoE layers below {LEAST_AGREEMENT} ({values})", cause)]


def moved_layers(table: np.ndarray) -> str | None:
    """The layers whose ids are those of another layer of the model, as text."""
    best = table.argmax(1)
    moved = [
        f"{layer} has those of {int(other)}"
        for layer, other in enumerate(best)
        if other != layer and table[layer, other] >= LEAST_AGREEMENT > table[layer, layer]
    ]
    if not moved:
        return None
    layers = np.arange(len(table))
    return (
        f"layers {'reversed' if (best == layers[::-1]).all() else 'exchanged'}: MoE layer"
        f" {'; '.join(moved[:4])}"
    )


def layer_table(rows: Sequence[Compared]) -> np.ndarray:
    """[L, L]: mean agreement of recorded layer i with the model's layer j."""
    layers = range(rows[0].live.shape[1])
    recorded, live = (
        np.concatenate([r.recorded for r in rows]),
        np.concatenate([r.live for r in rows]),
    )
    return np.array(
        [[agreement(live[:, [j]], recorded[:, [i]]).mean() for j in layers] for i in layers]
    )


def at_shift(item: Compared, shift: int) -> np.ndarray:
    """[n, L]: agreement of recorded row j with the model's row j + shift."""
    size = len(item.live)
    rows = np.arange(max(0, -shift), size - max(0, shift))
    return agreement(item.live[rows + shift], item.recorded[rows])


def agreement(live: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """[n, L]: the fraction of the model's K experts that are in the recorded row."""
    return (live[..., :, None] == recorded[..., None, :]).any(-1).mean(-1)
