"""Evidence: measured numbers and texts under names that the rules (verdicts.py) read.

KL is k3, the mean over sampled tokens of exp(d) - 1 - d with d = log pi - log mu, in nats.  It is
never negative, and 0 only where both are equal.
Shapes: N rows, R sampled tokens, S tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.records import Rollout
from megatron_rl_tools.explain_mismatch.trainer_side import Half

Value = float | str
LONGEST_SHIFT = 2
NO_ROUTE = -1
"""The expert ids of a row without a route (Rollout.missing_routes)."""
MOST_NATS = 20.0
"""Bound of a log-ratio's absolute value: without it, one token of a wrong model decides the KL."""


class Evidence(dict[str, Value]):
    """Name -> number (booleans are 0 and 1) or text.

    A condition of a rule that reads a missing name is false.
    """

    def number(self, name: str) -> float | None:
        value = self.get(name)
        return float(value) if isinstance(value, int | float) else None

    def add(self, prefix: str, **values: Value | None) -> None:
        """Set PREFIX.NAME for each value that is not None."""
        self.update(
            {f"{prefix}.{name}": value for name, value in values.items() if value is not None}
        )


def kl(mu: Sequence[np.ndarray], pi: Sequence[np.ndarray]) -> float:
    """Return k3 of KL(mu, pi) over the sampled tokens of all sequences, in nats.

    NaN if no log-ratio is finite.
    """
    d = log_ratios(mu, pi).clip(-MOST_NATS, MOST_NATS)
    return float(np.mean(np.expm1(d) - d)) if len(d) else math.nan


def difference(mu: Sequence[np.ndarray], pi: Sequence[np.ndarray]) -> float:
    """Return the mean of |log mu - log pi|, in nats; NaN if none is finite."""
    d = log_ratios(mu, pi)
    return float(np.mean(np.abs(d))) if len(d) else math.nan


def log_ratios(mu: Sequence[np.ndarray], pi: Sequence[np.ndarray]) -> np.ndarray:
    """Return log pi - log mu of the sampled tokens of all sequences, float64 [sum of R] without
    those that are not finite, which finite_evidence counts.
    """
    both = zip(mu, pi, strict=True)
    ratios = np.concatenate([p.astype(np.float64) - m for m, p in both])
    return ratios[np.isfinite(ratios)]


def finite_evidence(rollouts: Sequence[Rollout], halves: Sequence[Half]) -> Evidence:
    """Count the log-probs that are not finite, of each side."""

    def count(values: list[np.ndarray]) -> float:
        return float(sum((~np.isfinite(part)).sum() for part in values))

    evidence = Evidence()
    evidence.add(
        "not_finite",
        server=count([rollout.rollout_logprobs for rollout in rollouts]),
        trainer=count([half.logprobs for half in halves]),
        tokens=float(sum(len(half.logprobs) for half in halves)),
    )
    return evidence


def overlap(served: np.ndarray, trained: np.ndarray) -> float:
    """Return the mean share of the K experts that are in both; served, trained: [N, L, K].

    Rows without a route do not count; 0 if no row has one.
    """
    same = (served.astype(np.int64)[..., :, None] == trained[..., None, :]).any(-1)
    same = same[(served != NO_ROUTE).all((1, 2))]
    return float(same.mean()) if same.size else 0.0


def flips(served: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return where the sets of experts differ, bool [N, L]; rows without a route do not."""
    same = (served.astype(np.int64)[..., :, None] == trained[..., None, :]).any(-1).all(-1)
    return ~same & (served != NO_ROUTE).all(-1)


def served_routes(rollout: Rollout) -> np.ndarray | None:
    """Return the server's experts, int64 [S - 1, L, K], with NO_ROUTE in rows without a route; None
    if no row has one.
    """
    if rollout.routed_experts is None:
        return None
    ids, missing = rollout.routed_experts.astype(np.int64), rollout.missing_routes
    if missing is None:
        return ids
    return None if missing.all() else np.where(missing[:, None, None], NO_ROUTE, ids)


def shifted_overlap(served: np.ndarray, trained: np.ndarray, shift: int) -> float:
    """Return the overlap of served row j + shift with the trainer's row j."""
    rows = slice(max(0, -shift), len(trained) - max(0, shift))
    moved = slice(max(0, shift), len(trained) - max(0, -shift))
    return overlap(served[moved], trained[rows])


def route_evidence(rollouts: Sequence[Rollout], halves: Sequence[Half]) -> Evidence:
    """Test whether the server's routes belong to these rows, layers and sequences.

    halves: the live choices of the trainer's routers.
    """
    evidence = Evidence()
    pairs = [
        (served_routes(rollout), half.routes)
        for rollout, half in zip(rollouts, halves, strict=True)
    ]
    known = [(served, live) for served, live in pairs if served is not None and live.shape[1]]
    if not known:
        return evidence

    def mean(scores: list[float]) -> float:
        return float(np.average(scores, weights=[len(live) for _, live in known]))

    def best(scores: dict[int, float]) -> int:
        """Return 0 unless a shift removes more than half of the disagreement."""
        top = max(scores, key=lambda key: scores[key])
        return top if scores[top] - scores[0] > 0.5 * (1 - scores[0]) and scores[top] > 0.5 else 0

    by_row = {
        shift: mean([shifted_overlap(*pair, shift) for pair in known])
        for shift in range(-LONGEST_SHIFT, LONGEST_SHIFT + 1)
    }
    num_layers = known[0][1].shape[1]
    by_layer = {
        shift: mean([overlap(np.roll(served, -shift, axis=1), live) for served, live in known])
        for shift in range(min(num_layers, 4))
    }
    evidence.add(
        "routes",
        overlap=by_row[0],
        row_shift=best(by_row),
        row_offset=-best(by_row),
        row_shift_overlap=max(by_row.values()),
        layer_shift=best(by_layer),
        layer_shift_overlap=max(by_layer.values()),
    )
    evidence.update(foreign_evidence(known))
    return evidence


def foreign_evidence(known: Sequence[tuple[np.ndarray, np.ndarray]]) -> Evidence:
    """Test whether a response carries the routes of another one.

    known: (the server's routes, the trainer's live choice) of each sequence, both [S - 1, L, K].
    """
    others = [
        overlap(served[:size], live[:size])
        for number, (_, live) in enumerate(known)
        for at, (served, _) in enumerate(known)
        if at != number and (size := min(len(live), len(served)))
    ]
    partners = [
        max(
            (
                overlap(served[: len(live)], live[: len(served)])
                for at, (served, _) in enumerate(known)
                if at != number
            ),
            default=0.0,
        )
        for number, (_, live) in enumerate(known)
    ]
    same = [overlap(served, live) for served, live in known]
    # another response's routes must agree much better, and nearly completely: responses to one
    # prompt share the routes of its rows
    foreign = [other > s + 0.2 and other > 0.8 for other, s in zip(partners, same, strict=True)]
    evidence = Evidence()
    evidence.add(
        "routes",
        foreign=float(np.mean(foreign)),
        others_overlap=float(np.mean(others)) if others else None,
    )
    return evidence


def logprob_evidence(rollouts: Sequence[Rollout], halves: Sequence[Half]) -> Evidence:
    """Test whether the server's log-probs belong to these tokens, or to their neighbours."""
    evidence = finite_evidence(rollouts, halves)
    scores = {}
    for shift in range(-LONGEST_SHIFT, LONGEST_SHIFT + 1):
        ours = [
            half.logprobs[max(0, -shift) : len(half.logprobs) - max(0, shift)] for half in halves
        ]
        theirs = [
            r.rollout_logprobs[max(0, shift) : len(r.rollout_logprobs) - max(0, -shift)]
            for r in rollouts
        ]
        if min(map(len, ours)) > 0:
            scores[shift] = difference(theirs, ours), kl(theirs, ours)
    top = min(scores, key=lambda key: scores[key][0])
    # in repetitive text a shift may win by chance: it must remove most of the difference
    shift = top if scores[top][0] < 0.3 * scores[0][0] else 0
    evidence.add("logprobs", shift=shift, offset=-shift, shift_diff=scores[top][0])
    evidence.add("kl", logprobs_shifted=scores[top][1])
    return evidence


def flip_evidence(
    rollouts: Sequence[Rollout], halves: Sequence[Half], *, num_layers: int
) -> tuple[Evidence, list[dict[str, float]]]:
    """Return how often routers flip although the layers below had the same routes, with a table by
    layer.

    A flip whose gap is above a tenth of the layer's median margin is clear: rounding does not
    explain it.
    """
    evidence, table = Evidence(), list[dict[str, float]]()
    known = [
        (served, half)
        for rollout, half in zip(rollouts, halves, strict=True)
        if (served := served_routes(rollout)) is not None and half.routes.shape[1]
    ]
    has_route = np.concatenate([(ids != NO_ROUTE).all((1, 2)) for ids, _ in known] or [[]]) == 1
    # the layers below are replayed, so a flip is this layer's and not an effect of theirs
    for layer in range(num_layers if known else 0):
        flipped = np.concatenate([flips(served, half.routes)[:, layer] for served, half in known])
        flipped = flipped[has_route]
        gap, margin = (
            np.concatenate([getattr(h, name)[:, layer] for _, h in known])[has_route]
            for name in ("gap", "margin")
        )
        usual = float(np.median(margin))
        clear = flipped & (gap > 0.1 * usual)
        table.append(
            {
                "layer": layer,
                "flips": float(flipped.mean()),
                "clear": float(clear.mean()),
                "gap": float(gap.max()),
                "margin": usual,
            }
        )
    first = next((row for row in table if row["clear"] > 0), None)
    if table:
        evidence.add(
            "flips",
            share=float(np.mean([row["flips"] for row in table])),
            clear=float(np.mean([row["clear"] for row in table])),
        )
    if first is not None:
        evidence.add(
            "flips",
            first_layer=first["layer"],
            first_gap=first["gap"],
            first_margin=first["margin"],
        )
    return evidence, table


def position_evidence(
    rollouts: Sequence[Rollout], halves: Sequence[Half], borders: Sequence[int]
) -> Evidence:
    """Test whether the difference grows with the position, or lies at page and chunk borders."""
    places = np.concatenate([r.sampled - 1 for r in rollouts])
    pairs = zip(rollouts, halves, strict=True)
    sizes = np.abs(np.concatenate([r.rollout_logprobs - half.logprobs for r, half in pairs]))
    finite = np.isfinite(sizes)
    places, sizes = places[finite], sizes[finite]
    evidence = Evidence()
    if not len(sizes):
        return evidence
    early, late = places <= np.quantile(places, 0.3), places >= np.quantile(places, 0.7)
    if early.any() and late.any() and sizes[early].mean() > 0:
        evidence.add("position", growth=float(sizes[late].mean() / sizes[early].mean()))
    for border in borders:
        at = places % border == 0
        if border > 1 and at.any() and not at.all() and sizes[~at].mean() > 0:
            ratio = float(sizes[at].mean() / sizes[~at].mean())
            evidence.add("position", **{f"border_{border}": ratio})
    return evidence
