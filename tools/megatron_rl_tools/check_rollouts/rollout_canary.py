"""The canary: a forward of the model on the same tokens must choose the recorded expert ids.

The agreement of a row is the fraction of the recorded ids that are in the model's live choice.
Engines differ in numerics, so it is below 1; routes of a neighbouring token, another layer or
another request agree far less.
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
LEAST_ROWS = 8
"""Rows of both prompt and response from which they are checked separately."""
PART_ROWS = 32
"""The fewest rows of a part of a rollout; every part must agree."""
SHIFTS = (-1, 0, 1)


@dataclass(frozen=True)
class CanaryResult:
    """The result of the comparison with the model."""

    agreement: dict[str, float] | None
    """Shift ("-1", "0", "+1") -> agreement over all sampled rows and layers."""
    findings: list[Finding]
    unchecked: str = ""
    """Why nothing was compared."""


@dataclass(frozen=True)
class Compared:
    """A rollout of the sample: recorded routes and the model's choice, int64 [S - 1, L, K]."""

    name: str
    prompt_length: int
    recorded: np.ndarray
    live: np.ndarray


def usable_rollouts(dumps: Iterable[Dumped], sizes: Sizes) -> list[tuple[Dumped, np.ndarray]]:
    """Return the rollouts that the canary can compare with the model, and their routes.

    It cannot compare those whose arrays do not have the model's shape (the other checks name them),
    those with rows without a route, or those sampled by several weight versions.
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
        ids = f"expert ids of {shape} for every token"
        needs = f"the canary needs rollouts of one weight version, with {ids}"
        return CanaryResult(None, [], f"{needs}; there are none")
    order = np.random.default_rng(seed).permutation(len(usable))[:sample]
    chosen = [usable[index] for index in sorted(order)]
    rows = []
    live_routes = model.forward([dumped.tokens for dumped, _ in chosen])
    for (dumped, routes), live in zip(chosen, live_routes, strict=True):
        size = min(len(live), len(routes))
        name = f"step {dumped.record.step} {dumped.record.id}"
        recorded = routes[:size].astype(np.int64)
        rows.append(Compared(name, dumped.record.prompt_length, recorded, live[:size]))
    return compare_rollouts(rows)


def compare_rollouts(rows: Sequence[Compared]) -> CanaryResult:
    """Check every rollout, then every layer over the rollouts that passed."""
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
        f"{shift:+d}" if shift else "0": np.concatenate([at_shift(item, shift) for item in rows])
        for shift in SHIFTS
    }
    means = {shift: float(values.mean()) for shift, values in by_shift.items()}
    return CanaryResult(means, findings)


def wrong_part(item: Compared) -> tuple[int, str] | None:
    """Return (first row, finding) of the first part of the rows that does not agree, or None.

    Rows are checked in parts, because routes may be correct up to some row, or only for a prompt
    that another request shares.
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
            if scores[0] < LEAST_AGREEMENT or is_shifted(piece):
                named = ", ".join(
                    f"{value:.2f} at shift {shift}" for shift, value in scores.items()
                )
                rule = f"must be best at 0 and >= {LEAST_AGREEMENT}"
                rows = f"rows {part[0]} to {part[-1]} of {size}"
                return int(part[0]), f"{rows} agree with the model's own top-k {named}; {rule}"
    return None


def is_shifted(part: Compared) -> bool:
    """Return True if a shift by one row removes most of the disagreement.

    It is compared over the same rows: those at the edges have no neighbour.  Rows of a repeated
    token agree at every shift, so that a little more agreement says nothing.
    """
    if len(part.live) < LEAST_ROWS:
        return False
    recorded = part.recorded[1:-1]
    wrong = {
        shift: 1
        - float(agreement(part.live[1 + shift : len(part.live) - 1 + shift], recorded).mean())
        for shift in SHIFTS
    }
    return min(wrong.values()) < wrong[0] / 2


def cause_of(item: Compared, first: int, rows: Sequence[Compared]) -> str:
    """Return the simplest change that makes these routes agree with the model."""
    shifted = {shift: float(at_shift(item, shift).mean()) for shift in SHIFTS if shift}
    best = max(shifted, key=lambda shift: shifted[shift])
    if shifted[best] >= LEAST_AGREEMENT:
        return shift_cause(best)
    moved = moved_layers(layer_table([item]))
    if moved:
        return moved
    for other in rows:
        size = min(len(other.live), len(item.recorded))
        same = agreement(other.live[:size], item.recorded[:size]).mean()
        if other is not item and same >= LEAST_AGREEMENT:
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
    """Check every layer: a few exchanged layers hardly change the mean over all."""
    table = layer_table(rows)
    weak = [layer for layer in range(len(table)) if table[layer, layer] < LEAST_AGREEMENT]
    if not weak:
        return []
    values = ", ".join(f"layer {layer}: {table[layer, layer]:.2f}" for layer in weak[:4])
    other = "other weights than --model in these layers, or much numeric noise"
    cause = moved_layers(table) or other
    return [Finding("canary", "dump", f"MoE layers below {LEAST_AGREEMENT} ({values})", cause)]


def moved_layers(table: np.ndarray) -> str | None:
    """Return the layers whose ids are those of another layer of the model, as text."""
    best = table.argmax(1)
    moved = [
        f"{layer} has those of {int(other)}"
        for layer, other in enumerate(best)
        if other != layer and table[layer, other] >= LEAST_AGREEMENT > table[layer, layer]
    ]
    if not moved:
        return None
    layers = np.arange(len(table))
    kind = "reversed" if (best == layers[::-1]).all() else "exchanged"
    return f"layers {kind}: MoE layer {'; '.join(moved[:4])}"


def layer_table(rows: Sequence[Compared]) -> np.ndarray:
    """Return the mean agreement of recorded layer i with the model's layer j, [L, L]."""
    layers = range(rows[0].live.shape[1])
    recorded = np.concatenate([row.recorded for row in rows])
    live = np.concatenate([row.live for row in rows])
    return np.array(
        [[agreement(live[:, [j]], recorded[:, [i]]).mean() for j in layers] for i in layers]
    )


def at_shift(item: Compared, shift: int) -> np.ndarray:
    """Return the agreement of recorded row j with the model's row j + shift, [n, L]."""
    size = len(item.live)
    rows = np.arange(max(0, -shift), size - max(0, shift))
    return agreement(item.live[rows + shift], item.recorded[rows])


def agreement(live: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Return the fraction of the model's K experts that are in the recorded row, [n, L]."""
    return (live[..., :, None] == recorded[..., None, :]).any(-1).mean(-1)
